"""The guards of tests/conftest.py fail a test that leaks, and only that one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LEAKS = """
import gc, os, signal, threading, time, pathlib
import pytest, torch

def test_environment():
    os.environ["LEAKED_VARIABLE"] = "1"

def test_environment_is_back():
    assert "LEAKED_VARIABLE" not in os.environ

def test_file():
    (pathlib.Path(__file__).parent.parent / "leaked.txt").touch()

def test_run():
    (pathlib.Path(__file__).parent.parent / "runs" / "leaked_run").mkdir(parents=True)

def test_signal():
    signal.signal(signal.SIGUSR1, lambda *_: None)

def test_thread():
    threading.Thread(target=time.sleep, args=(3,), name="leaked-thread").start()

def test_grad():
    torch.set_grad_enabled(False)

def test_dtype():
    torch.set_default_dtype(torch.float64)

def test_threads():
    torch.set_num_threads(2)

def test_deterministic():
    torch.use_deterministic_algorithms(True)

def test_device():
    torch.set_default_device("meta")

def test_garbage():
    gc.disable()

def test_torch_is_back():
    assert torch.ones(1).sum().item() == 1 and torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32

def test_clean(monkeypatch, seed):
    monkeypatch.setenv("A_VARIABLE", "1")
    pathlib.Path("runs").mkdir()
    threading.Thread(target=time.sleep, args=(0.05,)).start()
    assert torch.initial_seed() == seed == 0

@pytest.mark.gpu(count=1000)
def test_gpu():
    raise AssertionError("ran without the devices it needs")
"""

EXPECTED = {
    "test_environment": "the test leaked environment variables: LEAKED_VARIABLE.",
    "test_file": "the test leaked files into the repository: leaked.txt.",
    "test_run": "the test leaked files into the repository: runs, runs/leaked_run.",
    "test_signal": "the test leaked signal handlers: SIGUSR1.",
    "test_thread": "the test leaked threads: leaked-thread.",
    "test_grad": "the test leaked settings: grad enabled (True -> False).",
    "test_dtype": "the test leaked settings: default dtype (torch.float32 -> torch.float64).",
    "test_threads": "the test leaked settings: number of threads (1 -> 2).",
    "test_deterministic": "the test leaked settings: deterministic algorithms",
    "test_garbage": "the test leaked settings: garbage collection (True -> False).",
    "test_device": "the test leaked settings: default device (cpu -> meta).",
}


@pytest.mark.slow
def test_each_leak_fails_its_test_and_no_other(repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    shutil.copy(repository / "tests" / "conftest.py", folder)
    (folder / "test_leaks.py").write_text(LEAKS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu(count=1)\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", "-rA", str(folder)]
    environment = {**os.environ, "COLUMNS": "400"}  # pytest cuts the lines of its summary at the terminal's width
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    errors = [line for line in run.stdout.splitlines() if line.startswith("ERROR ")]

    for test, message in EXPECTED.items():
        assert any(f"::{test} - AssertionError: {message}" in line for line in errors), (test, run.stdout)
    assert len(errors) == len(EXPECTED), run.stdout
    assert "needs 1000 CUDA device(s), this machine has" in run.stdout
    assert "14 passed, 1 skipped, 11 errors" in run.stdout
