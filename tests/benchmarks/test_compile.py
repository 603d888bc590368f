"""How many graphs `benchmarks/compile.py` counts; its times are not looked at here."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.strategies.test_compiling import compiler


def test_twelve_blocks_are_one_graph(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    module = __import__("compile")
    options = argparse.Namespace(backend="eager", layers=12, width=64, batch_size=1)
    with compiler():
        assert module.first_step("regional", options)["graphs"] == 1
