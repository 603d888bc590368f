from __future__ import annotations

import argparse
import functools
import json
import math
from collections import namedtuple
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from loopwright.trackers.config import flatten_config, plain_config
from loopwright.trackers.secrets import is_secret


class Colour(Enum):
    RED = 1


class Mode(StrEnum):
    FAST = "fast"


class Level(IntEnum):
    HIGH = 3


@dataclass
class Settings:
    lr: float = 0.5
    layers: list[int] = field(default_factory=lambda: [1, 2])
    where: Path = Path("a/b")
    late: int = field(init=False)


class Odd:
    pass


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


Point = namedtuple("Point", ["x", "y"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (3, 3),
        ("größe", "größe"),
        (Colour.RED, "RED"),
        (Mode.FAST, "fast"),
        (Level.HIGH, "HIGH"),
        (Path("a/b"), "a/b"),
        (np.float32(0.5), 0.5),
        (torch.tensor(2.0), 2.0),
        (torch.ones(2, 3), "Tensor(shape=(2, 3), dtype=torch.float32)"),
        (np.ones(4), "ndarray(shape=(4,), dtype=float64)"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.device("cpu"), "cpu"),
        (torch.Size([2, 3]), [2, 3]),
        (math.sqrt, "math.sqrt"),
        (Odd, f"{__name__}.Odd"),
        (torch.optim.AdamW, "torch.optim.adamw.AdamW"),
        ([1, (2, Path("c"))], [1, [2, "c"]]),
        ({3, 1}, [1, 3]),
        (Settings(), {"lr": 0.5, "layers": [1, 2], "where": "a/b", "late": None}),
        (Point(1, None), {"x": 1, "y": None}),
        (argparse.Namespace(a=1), {"a": 1}),
        (SimpleNamespace(a=SimpleNamespace(b=2)), {"a": {"b": 2}}),
        ({1: {Colour.RED: 2}}, {"1": {"RED": 2}}),
        ({1: "number", "1": "text"}, {"1": "number", "1_": "text"}),
        (Odd(), f"<{__name__}.Odd object>"),
        (Broken(), f"<{__name__}.Broken>"),
        (functools.partial(math.pow, 2), "functools.partial(<built-in function pow>, 2)"),
        (torch.nn.Linear(2, 1), "Linear(in_features=2, out_features=1, bias=True)"),
        (range(10**6), "range(0, 1000000)"),
        (b"ab", "b'ab'"),
        ("s3://me:hunter2@host/x", "s3://me:***@host/x"),
        (10**400, math.inf),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_value(value: Any, expected: Any) -> None:
    assert plain_config({"key": value}) == {"key": expected}


def test_long_descriptions_are_cut() -> None:
    assert len(plain_config({"a": b"x" * 10_000})["a"]) == 500


def test_a_cycle_ends() -> None:
    config: dict[str, Any] = {"a": {"b": []}}
    config["a"]["b"] += [config, config["a"], 1]
    assert plain_config(config) == {"a": {"b": ["<cycle>", "<cycle>", 1]}}


def test_the_same_object_twice_is_no_cycle() -> None:
    shared = {"b": 1}
    assert plain_config({"x": shared, "y": [shared, shared]}) == {"x": {"b": 1}, "y": [{"b": 1}, {"b": 1}]}


def test_the_result_is_json_and_the_input_is_left_alone() -> None:
    config = {"a": {"token": "t", "list": [Odd(), Settings()]}, "s": {1}}
    plain = plain_config(config)
    assert json.loads(json.dumps(plain)) == plain
    assert config["a"]["token"] == "t"  # type: ignore[index]


def test_flat_keys() -> None:
    config = {
        "model": {"width": 64, "layers": [1, 2.5, "a", None], "empty": {}, "none": []},
        "callbacks": [{"name": "ema", "decay": 0.5}, "bar"],
        "grid": [[1, 2], [3]],
        "lr": None,
        "fast": True,
    }
    assert flatten_config(config) == {
        "model.width": 64,
        "model.layers": '[1, 2.5, "a", null]',
        "model.empty": "{}",
        "model.none": "[]",
        "callbacks.0.name": "ema",
        "callbacks.0.decay": 0.5,
        "callbacks.1": "bar",
        "grid.0": "[1, 2]",
        "grid.1": "[3]",
        "lr": None,
        "fast": True,
    }


def test_flat_keys_that_would_be_the_same_stay_apart() -> None:
    assert flatten_config({"a.b": 1, "a": {"b": 2}}) == {"a.b": 1, "a.b_": 2}


@pytest.mark.parametrize(
    "key",
    [
        "password", "db_password", "DB_PASSWORD", "dbPassword", "passwd", "api_key", "apiKey", "OPENAI_API_KEY",
        "apikey", "api-key", "access_key", "aws_secret_access_key", "private_key", "token", "hf_token", "hfToken",
        "HFToken", "auth_token", "github.token", "client_secret", "secrets", "credentials", "Authorization",
        "basic_auth",
    ],
)  # fmt: skip
def test_secret_keys(key: str) -> None:
    assert plain_config({"x": {key: "hunter2"}}) == {"x": {key: "***"}}


@pytest.mark.parametrize(
    "key",
    [
        "pad_token", "eos_token", "bosToken", "mask_token", "tokenizer", "max_tokens", "tokens", "token_count",
        "author", "key", "keys", "sort_key", "monkey", "keyboard", "passes", "compass", "secretary", "num_tokens", "",
    ],
)  # fmt: skip
def test_keys_that_are_no_secrets(key: str) -> None:
    assert plain_config({key: "shown"}) == {key: "shown"}


def test_secrets_of_other_kinds() -> None:
    config = {"password": 1234, "credentials": {"user": "u", "pass": "p"}, "api_key": ["k"], "secret": torch.ones(2)}
    assert set(plain_config(config).values()) == {"***"}
    empty = {"password": None, "api_key": "", "use_auth": True, "token": 50256, "secret": False}
    assert plain_config(empty) == empty
    assert not is_secret("token", 50256)
