"""Several machines for DeepSpeed: the hostfile, its filters, and the command of other launchers, which is not run."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loopwright.cli.deepspeed_machines import (
    deepspeed_command,
    filtered,
    is_for_deepspeed,
    on_machines,
    read_hostfile,
    write_environment,
)
from loopwright.cli.launch import settings_of
from loopwright.cli.launch_merge import merged_options
from loopwright.cli.launch_options import read_launch
from loopwright.cli.main import main
from loopwright.distributed.errors import ConfigError

HOSTS = "# two machines\nhost-1 slots=4\n\nhost-2 slots=2  # older\n"
LAUNCHERS = ["pdsh", "openmpi", "mvapich", "mpich", "slurm", "nossh"]


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    Path("hosts").write_text(HOSTS)
    Path("script.py").write_text("")


def options_of(*arguments: str) -> dict[str, Any]:
    return on_machines(merged_options(read_launch(["--use_deepspeed", *arguments, "script.py"]).options))


def test_a_hostfile() -> None:
    assert read_hostfile(Path("hosts")) == {"host-1": [0, 1, 2, 3], "host-2": [0, 1]}


@pytest.mark.parametrize(
    ("inclusion", "exclusion", "left"),
    [
        (None, None, {"a": [0, 1, 2], "b": [0, 1]}),
        ("b", None, {"b": [0, 1]}),
        ("b:1@a:0,2", None, {"a": [0, 2], "b": [1]}),
        (None, "a", {"b": [0, 1]}),
        (None, "a:1@b:0,1", {"a": [0, 2]}),
    ],
)
def test_filters(inclusion: str | None, exclusion: str | None, left: dict[str, list[int]]) -> None:
    assert filtered({"a": [0, 1, 2], "b": [0, 1]}, inclusion, exclusion) == left


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        ("host-1 4", [], r"hosts, line 1: got 'host-1 4'\. Expected such as 'host-1 slots=4'"),
        ("host-1 slots=many", [], r"line 1: got 'host-1 slots=many'"),
        ("a slots=1\na slots=2", [], r"line 2: a stands in it twice"),
        ("# none\n", [], r"deepspeed_hostfile='hosts' names no machine"),
        (HOSTS, ["--deepspeed_hostfile=nowhere"], r"deepspeed_hostfile='nowhere' can't be read"),
        (HOSTS, ["--deepspeed_inclusion_filter=host-3"], r"has no machine 'host-3'\. Did you mean 'host-[12]'"),
        (HOSTS, ["--deepspeed_exclusion_filter=host-2:5"], r"host-2 has no slot '5', but 0 to 1"),
        (HOSTS, ["--deepspeed_exclusion_filter=host-1@host-2"], r"leaves no machine"),
        (HOSTS, ["--deepspeed_inclusion_filter=host-1", "--deepspeed_exclusion_filter=host-2"], r"exclude each other"),
        (HOSTS, ["--num_machines=3"], r"num_machines=3, and hosts gives 2"),
        (
            HOSTS,
            ["--deepspeed_multinode_launcher=standard"],
            r"the machines have 4, 2 slots\. Expected as many on each",
        ),
        (
            "host-1 slots=1\nhost-2 slots=1",
            ["--deepspeed_multinode_launcher=standard"],
            r"this machine is none of hosts: host-1, host-2\. Give --machine_rank",
        ),
    ],
)
def test_bad_files_and_filters(text: str, arguments: Sequence[str], says: str) -> None:
    Path("hosts").write_text(text)
    with pytest.raises(ConfigError, match=says):
        options_of("--deepspeed_hostfile=hosts", *arguments)


def test_standard_is_this_command_on_each_machine() -> None:
    """The file says how many machines and processes there are, where they meet, and which of them this is."""
    Path("hosts").write_text(f"10.0.0.5 slots=4\n{socket.gethostname()} slots=2\n127.0.0.1 slots=4\n")
    given = ["--deepspeed_hostfile=hosts", "--deepspeed_multinode_launcher=standard"]
    found = options_of(*given, "--deepspeed_exclusion_filter", "10.0.0.5:0,1@127.0.0.1:3,1")
    assert not is_for_deepspeed(found)
    settings = settings_of(found)
    assert (settings.num_machines, settings.num_processes, settings.machine_rank) == (3, 6, 1)
    assert settings.main_process_ip == "10.0.0.5"
    assert (
        settings_of(options_of(*given, "--machine_rank=0", "--deepspeed_inclusion_filter=10.0.0.5")).machine_rank == 0
    )


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    "more",
    [
        ["--num_processes=4"],
        ["--num_processes=4", "--deepspeed_exclusion_filter=host-1:3", "--main_process_ip=host-2"],
        ["--num_processes=4", "--deepspeed_inclusion_filter=host-1@host-2", "--module", "--main_process_port=29777"],
    ],
)
def test_the_command_of_another_launcher_is_accelerates_and_is_not_run_here(
    launcher: str, more: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = importlib.import_module("accelerate.utils.launch")
    monkeypatch.setattr(utils, "compare_versions", lambda *_: False)  # of deepspeed, for nossh
    given = ["--use_deepspeed", "--num_machines=2", "--machine_rank=1", "--deepspeed_hostfile=hosts", *more]
    given.append(f"--deepspeed_multinode_launcher={launcher}")
    found = options_of(*given)
    assert is_for_deepspeed(found)
    launch = importlib.import_module("accelerate.commands.launch")
    parser = launch.launch_command_parser()
    args, _, _ = launch._validate_launch_command(parser.parse_args([*given, "script.py", "--lr", "1"]))
    args.deepspeed_fields_from_accelerate_config = ""
    assert deepspeed_command(found, ["script.py", "--lr", "1"]) == utils.prepare_deepspeed_cmd_env(args)[0]


def test_another_launcher_needs_a_hostfile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--use_deepspeed", "--num_machines=2", "--num_processes=2", "script.py"]) == 2
    assert "needs deepspeed_hostfile" in capsys.readouterr().err


def test_the_program_runs_with_the_variables_for_the_other_machines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In place of DeepSpeed's launcher stands a program that prints what it got."""
    folder = Path("bin")
    folder.mkdir()
    program = folder / "deepspeed"
    program.write_text('#!/bin/sh\necho "$@"\necho stage=$ACCELERATE_DEEPSPEED_ZERO_STAGE path=$PYTHONPATH\nexit 7\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder.resolve()}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("MY_SECRET", "s3cret")
    arguments = ["launch", "--use_deepspeed", "--zero_stage=1", "--deepspeed_hostfile=hosts", "script.py", "--a b"]
    assert main(arguments) == 7
    said = capfd.readouterr().out.splitlines()
    assert said[0] == "--hostfile hosts --no_local_rank --launcher pdsh --master_port 29500 script.py --a b"
    assert said[1] == f"stage=1 path=/elsewhere:{Path.cwd()}"
    written = Path(".deepspeed_env").read_text().splitlines()
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE=1" in written
    assert f"PYTHONPATH=/elsewhere:{Path.cwd()}" in written
    assert "s3cret" not in Path(".deepspeed_env").read_text()


def test_the_file_of_variables_keeps_lines_of_others_and_gets_none_twice(capsys: pytest.CaptureFixture[str]) -> None:
    Path("env").write_text("NCCL_DEBUG=INFO\nA=1\n")
    for value in ("2", "3"):
        write_environment(Path("env"), {"A": value, "B": "two words", "C": "x"})
    assert Path("env").read_text().splitlines() == ["NCCL_DEBUG=INFO", "A=3", "C=x"]
    assert "B='two words' is not handed to other machines: env can't hold it" in capsys.readouterr().err


def test_a_missing_deepspeed_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["launch", "--use_deepspeed", "--deepspeed_hostfile=hosts", "script.py"]) == 2
    assert "pip install 'loopwright[deepspeed]'" in capsys.readouterr().err
    assert not Path(".deepspeed_env").exists()
