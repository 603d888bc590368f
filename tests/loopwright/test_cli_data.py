"""What `data` may give, and what becomes of predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from loopwright import ConfigError
from loopwright.cli.loaders import loader_of
from loopwright.cli.predictions import prediction_writer, rows_of


class Attributes:
    train = (1, 2)
    val = None
    test = (3,)


class Methods:
    def train_dataloader(self) -> list[int]:
        return [1, 2]

    def predict(self) -> list[int]:
        return [4]


class TestLoaders:
    def test_mapping(self) -> None:
        data = {"train": "a", "val": {"clean": "b", "noisy": "c"}}
        assert loader_of(data, "train") == "a"
        assert loader_of(data, "val") == {"clean": "b", "noisy": "c"}

    def test_row(self) -> None:
        assert [loader_of(("a", "b", "c"), stage) for stage in ("train", "val", "test")] == ["a", "b", "c"]

    def test_attributes_and_methods(self) -> None:
        assert (loader_of(Attributes(), "train"), loader_of(Attributes(), "test")) == ((1, 2), (3,))
        assert loader_of(Attributes(), "val", is_required=False) is None
        assert (loader_of(Methods(), "train"), loader_of(Methods(), "predict")) == ([1, 2], [4])

    def test_one_loader_is_that_of_the_stage(self) -> None:
        loader: Any = DataLoader(TensorDataset(torch.zeros(3)))
        assert loader_of(loader, "train") is loader
        assert loader_of(loader, "test") is loader
        assert loader_of(loader, "val", is_required=False) is None

    def test_without_data_the_tasks_own_are_used(self) -> None:
        assert loader_of(None, "train") is None

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ({"train": [1]}, "no loader for 'test'; it gives train"),
            ({"training": [1]}, r"keys \['training'\]. Expected some of train, val, test, predict"),
            (([1],), "1 loaders in a row. Expected 2 to 4"),
            (3, "data gives int, which has no loaders"),
            (Methods(), "no loader for 'test'; it gives train, predict"),
        ],
    )
    def test_errors(self, data: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            loader_of(data, "test")


class TestPredictions:
    @pytest.mark.parametrize(
        ("output", "lines"),
        [
            (torch.tensor([1, 2]), [1, 2]),
            (torch.tensor([[0.5], [1.5]]), [[0.5], [1.5]]),
            ({"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4])}, [{"a": 1, "b": 3}, {"a": 2, "b": 4}]),
            ((torch.tensor([1, 2]), torch.tensor([3, 4])), [[1, 3], [2, 4]]),
            (torch.tensor(5), [5]),
            ({"a": torch.tensor([1, 2]), "b": torch.tensor([3])}, [{"a": [1, 2], "b": [3]}]),
            (["x", "y"], [["x", "y"]]),
            ("text", ["text"]),
            ({}, [{}]),
        ],
    )
    def test_one_line_for_each_sample(self, output: Any, lines: list[Any], tmp_path: Path) -> None:
        file = tmp_path / "out" / "p.jsonl"
        with prediction_writer(file) as writer:
            writer(output, None, 0)
        assert [json.loads(line) for line in file.read_text().splitlines()] == lines
        assert writer.count == len(lines) == len(list(rows_of(output)))

    def test_a_failure_leaves_the_older_file(self, tmp_path: Path) -> None:
        file = tmp_path / "p.jsonl"
        file.write_text("old\n")
        with pytest.raises(RuntimeError, match="stop"), prediction_writer(file) as writer:
            writer(torch.tensor([1]), None, 0)
            raise RuntimeError("stop")
        assert file.read_text() == "old\n"
        assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]
