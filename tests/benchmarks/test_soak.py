"""The kill test: killed at random moments, on one process and two, with synchronous and asynchronous saves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS_FOR_EACH_KILL = 6


def soak(repository: Path, kills: int) -> str:
    command = [sys.executable, str(repository / "benchmarks" / "soak.py"), "--kills", str(kills), "--seed", "1"]
    seconds = 60 + SECONDS_FOR_EACH_KILL * kills
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(said: str, kills: int) -> None:
    *kinds, total = said.splitlines()
    assert len(kinds) == 5
    found = re.search(r"all: (\d+) kills, (\d+) resumed; .* bit-equal at the end (\d+) of (\d+) runs", total)
    assert found is not None, said
    assert (int(found[1]), int(found[2])) == (kills, kills)
    assert found[3] == found[4]


@pytest.mark.slow
def test_nothing_is_lost_by_kills(repository: Path) -> None:
    check(soak(repository, 10), 10)


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_nothing_is_lost_by_two_hundred_kills(repository: Path) -> None:
    check(soak(repository, 200), 200)
