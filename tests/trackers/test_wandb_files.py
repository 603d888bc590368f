"""Files that wandb wrote offline, written anew: read back by the tests' own reader, and by wandb's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

from loopwright.trackers.tracker import RunInfo
from loopwright.trackers.wandb import WandbTracker
from loopwright.trackers.wandb_files import next_row, offline_files, read_records, remove_later_rows

from .conftest import hide_wandb_settings
from .wandb_log import history
from .wandb_log import read_records as parsed_records

BLOCK = 32768


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Iterator[bytes]:
    """A file with ten rows, some of them as large as several blocks."""
    wandb = pytest.importorskip("wandb")
    run = RunInfo("one", "digits", tmp_path_factory.mktemp("wandb") / "one")
    with pytest.MonkeyPatch.context() as patch:
        hide_wandb_settings(patch)
        tracker = WandbTracker(mode="offline")
        tracker.start(run, {"lr": 0.5})
        for step in range(1, 11):
            width = (0, 300, 0, 3000, 1)[step % 5]
            tracker.log({"loss": float(step)} | {f"metric/{index:04}": 0.5 for index in range(width)}, step)
        tracker.finish("success")
        wandb.teardown()
    (path,) = offline_files(run.directory, run.run_ids["wandb"])
    yield path.read_bytes()


@pytest.fixture
def file(content: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "run-a.wandb"
    path.write_bytes(content)
    return path


def parse(records: Iterable[bytes]) -> list[Any]:
    return [Record.FromString(record) for record in records]


def test_a_file_is_written_as_wandb_writes_it(file: Path, content: bytes) -> None:
    assert len(content) > 6 * BLOCK
    assert remove_later_rows(file, 10, "step") == 0
    assert file.read_bytes() == content
    assert parse(read_records(file)) == list(parsed_records(file))


def test_reading_begins_in_any_block(file: Path, content: bytes) -> None:
    records = list(read_records(file))
    found = [list(read_records(file, begin)) for begin in range(0, len(content), BLOCK)]
    assert found[0] == list(read_records(file, BLOCK - 1)) == records
    assert all(rest == records[len(records) - len(rest) :] for rest in found)
    assert len(found[1]) < len(found[0])


def test_later_rows_are_removed_and_every_other_record_stays(file: Path) -> None:
    before = list(read_records(file))
    assert next_row(file) == 10
    assert remove_later_rows(file, 6, "step") == 4
    assert next_row(file) == 6
    records = list(parsed_records(file))
    rows = [(row["step"], row["loss"], row["_step"]) for row in history(records)]
    assert rows == [(step, step, step - 1) for step in range(1, 7)]
    kept = list(read_records(file))
    assert len(kept) == len(before) - 4
    assert [record for record in before if record in set(kept)] == kept

    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stderr
    kinds = [json.loads(line)["type"] for line in done.stdout.splitlines()]
    assert kinds == [record.WhichOneof("record_type") for record in records]


@pytest.mark.parametrize("cut", [7, 8, 100, BLOCK - 3, BLOCK, BLOCK + 5, 3 * BLOCK + 77])
def test_a_file_that_a_kill_cut_short_becomes_whole(file: Path, content: bytes, cut: int) -> None:
    whole = list(parsed_records(file))
    file.write_bytes(content[:cut])
    assert remove_later_rows(file, 10, "step") == 0
    kept = list(parsed_records(file))
    assert kept == whole[: len(kept)] == parse(read_records(file))
    assert file.stat().st_size <= cut
    assert content.startswith(file.read_bytes())
