"""`loopwright launch`: real processes, run by the agent in this process or, for signals, in one of its own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loopwright import ConfigError
from loopwright.cli.launch import settings_of
from loopwright.cli.launch_config import TYPES
from loopwright.cli.launch_merge import merged_options
from loopwright.cli.launch_options import read_launch
from loopwright.cli.main import main

from ..ports import free_port

# Writes what a process got, then does what its first argument says. It imports no torch: that takes seconds.
SCRIPT = """
import json, os, signal, sys, time
index = os.environ["RANK"]
with open(f"got-{index}.json", "w") as file:
    json.dump({"arguments": sys.argv[1:], "environment": dict(os.environ), "name": __name__}, file)
word = sys.argv[1] if len(sys.argv) > 1 else ""
if word == "exit" and index == "1":
    raise SystemExit(3)
if word == "raise" and index == "1":
    raise ValueError("boom")
if word == "kill" and index == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if word in ("exit", "raise", "kill", "wait"):
    if word == "wait":
        signal.signal(signal.SIGTERM, lambda *_: (open(f"ended-{index}", "w").close(), sys.exit(0)))
    print(f"ready {os.getpid()}\\n", end="", flush=True)  # in one write: two processes share the pipe
    time.sleep(60)
"""
TWO = ["launch", "--cpu", "--num_processes=2"]


@pytest.fixture(autouse=True)
def no_launch_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The launch file of whoever runs the tests does not count."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    return "script.py"


def got(index: int) -> Any:
    return json.loads(Path(f"got-{index}.json").read_text())


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["launch", *arguments]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err


class TestProcesses:
    def test_arguments_and_variables_arrive_as_they_were_given(self, script: str) -> None:
        arguments = ["", "a b", "it's", '"q"', "$HOME", "--num_processes", "9", "*"]
        options = ["--mixed-precision", "bf16", "--gradient-accumulation-steps=4", "--debug"]
        assert main([*TWO, *options, script, *arguments]) == 0
        assert [got(index)["arguments"] for index in (0, 1)] == [arguments, arguments]
        for index in (0, 1):
            found = got(index)["environment"]
            assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == (str(index), str(index), "2")
            assert found["MASTER_ADDR"] == "127.0.0.1"
            assert found["LOOPWRIGHT_USE_CPU"] == "true"
            assert found["LOOPWRIGHT_DEBUG_MODE"] == "true"
            assert found["LOOPWRIGHT_MIXED_PRECISION"] == "bf16"
            assert found["LOOPWRIGHT_GRADIENT_ACCUMULATION_STEPS"] == "4"
            assert int(found["OMP_NUM_THREADS"]) >= 1
            assert got(index)["name"] == "__main__"

    def test_module_and_program(self, script: str) -> None:
        assert main([*TWO, "-m", "script", "as a module"]) == 0
        assert got(1)["arguments"] == ["as a module"]
        assert main([*TWO, "--no_python", sys.executable, "script.py", "as a program"]) == 0
        assert got(1)["arguments"] == ["as a program"]

    @pytest.mark.parametrize(
        ("word", "code", "says"),
        [
            ("exit", 3, "process 1 of 2 failed first: exit code 3."),
            ("raise", 1, "process 1 of 2 failed first: exit code 1."),
            ("kill", 137, "process 1 of 2 failed first: killed by SIGKILL"),
        ],
    )
    def test_first_failure_decides_the_exit_code_and_ends_the_others(
        self, word: str, code: int, says: str, script: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        begin = time.monotonic()
        assert main([*TWO, script, word]) == code
        assert time.monotonic() - begin < 30
        said = capfd.readouterr()
        assert says in said.err.splitlines()[-1]
        assert ("ValueError: boom" in said.err) == (word == "raise")
        assert "====" not in said.err  # torch's banner
        for pid in [int(line.split()[1]) for line in said.out.splitlines() if line.startswith("ready")]:
            assert not Path(f"/proc/{pid}").exists()

    def test_restarts(self, capfd: pytest.CaptureFixture[str]) -> None:
        Path("again.py").write_text("import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] != '1')")
        assert main([*TWO, "--max_restarts=1", "again.py"]) == 0
        assert capfd.readouterr().err == ""

    def test_two_machines_meet_at_a_port(self, script: str) -> None:
        meeting = ["--main_process_ip", "127.0.0.1", f"--main_process_port={free_port()}", "--num_machines=2"]
        command = [sys.executable, "-m", "loopwright", *TWO, *meeting]
        with subprocess.Popen([*command, "--machine_rank=1", script]) as other:
            assert main([*TWO, *meeting, "--machine_rank=0", script]) == 0
            assert other.wait(60) == 0
        assert [got(index)["environment"]["LOCAL_RANK"] for index in (0, 1)] == ["0", "0"]

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
    def test_signals_are_passed_on(self, number: signal.Signals, code: int, script: str) -> None:
        command = [sys.executable, "-m", "loopwright", *TWO, script, "wait"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
            assert launcher.stdout is not None
            pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
            launcher.send_signal(number)
            _, said = launcher.communicate(timeout=60)
        assert launcher.returncode == code
        assert said.splitlines()[-1].startswith(f"loopwright launch: ended by {number.name}")
        assert [Path(f"ended-{index}").exists() for index in (0, 1)] == [number == signal.SIGTERM] * 2
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process that its parent died")
    def test_a_launcher_that_is_killed_leaves_nobody_behind(self, script: str) -> None:
        with subprocess.Popen(
            [sys.executable, "-m", "loopwright", *TWO, script, "wait"], stdout=subprocess.PIPE
        ) as run:
            assert run.stdout is not None
            pids = [int(run.stdout.readline().split()[1]) for _ in range(2)]
            run.kill()
            assert run.stdout.read() == b""  # it is open as long as one of them lives
        assert [Path(f"ended-{index}").exists() for index in (0, 1)] == [True, True]
        assert len(set(pids)) == 2


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["nope.py"], r"there is no script 'nope.py'\."),
            (["scirpt.py"], r"Did you mean 'script\.py'\?"),
            ([], r"no script is given"),
            (["--num_proceses=2", "script.py"], r"--num_proceses is not known\. Did you mean 'num_processes'\?"),
            (["--num_processes=two", "script.py"], r"--num_processes: got 'two'\. Expected a whole number"),
            (["--num_processes=0", "script.py"], r"num_processes=0\. Expected an integer >= 1"),
            (["--num_processes"], r"--num_processes has no value\. Processes on all machines together"),
            (["--num_machines=2", "--num_processes=3", "script.py"], r"num_processes=3 can't be shared evenly"),
            (["--num_machines=2", "--num_processes=2", "script.py"], r"needs main_process_ip"),
            (["--machine_rank=1", "script.py"], r"machine_rank=1 with num_machines=1"),
            (["--mixed_precision=bf61", "script.py"], r"Did you mean 'bf16'\?"),
            (["--zero_stage=2", "script.py"], r"--zero_stage belongs to --use_deepspeed, which is not given"),
            (["--fsdp_version=2", "script.py"], r"--fsdp_version belongs to --use_fsdp, which is not given"),
            (["--use_fsdp", "--fsdp_version=3", "script.py"], r"--fsdp_version: got '3'\. Accepted: 1, 2\."),
            (["--use_fsdp", "--fsdp_offload_params", "--cpu"], r"--fsdp_offload_params has no value"),
            (["--use_fsdp", "--fsdp_offload_params=perhaps", "script.py"], r"got 'perhaps'\. Expected true or false"),
            (
                ["--use_fsdp", "--fsdp_auto_wrap_policy=SIZE_BASE_WRAP", "script.py"],
                r"Did you mean 'SIZE_BASED_WRAP'\?",
            ),
            (["--use_fsdp", "--use_deepspeed", "script.py"], r"--use_fsdp and --use_deepspeed exclude each other"),
            (["--use_fsdp", "--multi_gpu", "script.py"], r"--multi_gpu and --use_fsdp exclude each other"),
            (["--use_parallelism_config", "script.py"], r"--use_parallelism_config needs --use_fsdp"),
            (["--use_deepspeed", "--zero_stage=4", "script.py"], r"--zero_stage: got '4'\. Accepted: 0, 1, 2, 3\."),
            (["--use_megatron_lm", "script.py"], r"--use_megatron_lm: Megatron-LM is not available"),
            (["--cpu", "--multi_gpu", "script.py"], r"--cpu and --multi_gpu exclude each other"),
            (["--module", "--no_python", "script"], r"--module and --no_python exclude each other"),
            (["--module", "no_such_module"], r"there is no module 'no_such_module'"),
            (["--no_python", "no-such-program"], r"there is no program 'no-such-program'"),
            (["--gradient_accumulation_steps=0", "script.py"], r"Expected an integer >= 1"),
            (["--rdzv_conf=timeout", "script.py"], r"rdzv_conf='timeout'\. Expected name=value pairs"),
            (["--tee=9", "script.py"], r"tee='9'\. Expected 0"),
            (["--monitor_interval=0", "script.py"], r"monitor_interval=0\.0\. Expected a finite number above 0"),
            (["--main_process_port=70000", "script.py"], r"main_process_port=70000"),
            (["--config_file=none.yaml", "script.py"], r"the launch file none\.yaml can't be read"),
            ([""], r"the script's name is empty"),
            (["--NUM_PROCESSES=2", "script.py"], r"--NUM_PROCESSES is not known\. Did you mean 'num_processes'\?"),
            (["--module", "script.py"], r"there is no module 'script\.py'.* Did you mean 'script'\?"),
            (["--module", "json.nothing"], r"there is no module 'json\.nothing'"),
            (["--module", "json"], r"the module json is a package without a __main__\.py"),
            (["--log_dir=script.py", "script.py"], r"log_dir='script\.py' can't be used"),
            (["--rdzv_backend=none", "script.py"], r"could not be started: The rendezvous backend 'none' is not"),
            (["--main_process_ip=999.1.1.1", "script.py"], r"main_process_ip='999\.1\.1\.1' can't be used: no machine"),
            (["--main_process_ip=192.0.2.1", "script.py"], r"main_process_ip='192\.0\.2\.1' is not this machine"),
        ],
    )
    def test_is_one_clear_error(
        self, arguments: Sequence[str], says: str, script: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = error_of(capsys, *arguments)
        with pytest.raises(ConfigError, match=says):  # the words of the message, with the pattern in the report
            raise ConfigError(text)
        assert len(text.splitlines()) == 1

    def test_port_in_use(self, script: str, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.socket() as taken:
            taken.bind(("", 0))
            taken.listen()
            port = taken.getsockname()[1]
            text = error_of(capsys, "--cpu", "--num_processes=2", f"--main_process_port={port}", script)
        assert f"main_process_port={port} can't be used" in text


@pytest.mark.parametrize("arguments", [["launch", "--help"], ["env"]])
def test_output_that_nobody_reads_ends_a_command_without_a_traceback(arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "loopwright", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


class TestPrecedence:
    def write(self, text: str) -> dict[str, Any]:
        Path("launch.yaml").write_text(text)
        return {"config_file": "launch.yaml"}

    def test_argument_over_variable_over_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given = self.write("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\nmixed_precision: fp16\n")
        settings = settings_of(merged_options(given))
        assert settings.num_processes == 2
        assert settings.environment["LOOPWRIGHT_MIXED_PRECISION"] == "fp16"
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
        assert "LOOPWRIGHT_MIXED_PRECISION" not in settings_of(merged_options(given)).environment
        settings = settings_of(merged_options({**given, "mixed_precision": "bf16", "num_processes": 4}))
        assert settings.environment["LOOPWRIGHT_MIXED_PRECISION"] == "bf16"
        assert settings.num_processes == 4

    @pytest.mark.parametrize("kind", TYPES)
    def test_b112_accumulation_reaches_the_script_whatever_the_type(self, kind: str) -> None:
        given = self.write(f"distributed_type: {kind}\nuse_cpu: true\nnum_processes: 2\n")
        for steps in (4, 8):  # the second launch does not see the first one's
            arguments = read_launch([f"--accumulate={steps}", "script.py"]).options
            settings = settings_of(merged_options({**given, **arguments}))
            assert settings.environment["LOOPWRIGHT_GRADIENT_ACCUMULATION_STEPS"] == str(steps)

    def test_accumulation_of_the_file_is_not_for_one_strategy_alone(self) -> None:
        given = self.write(
            "distributed_type: MULTI_CPU\nuse_cpu: true\ndeepspeed_config: {gradient_accumulation_steps: 4}"
        )
        assert settings_of(merged_options(given)).environment["LOOPWRIGHT_GRADIENT_ACCUMULATION_STEPS"] == "4"

    def test_what_is_not_there_is_refused_unless_the_command_line_goes_on_without_it(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        given = self.write(
            "distributed_type: MEGATRON_LM\nnum_processes: 2\nmegatron_lm_config: {megatron_lm_tp_degree: 2}\n"
        )
        with pytest.raises(
            ConfigError, match=r"distributed_type='MEGATRON_LM': Megatron-LM is not available\. --multi"
        ):
            merged_options(given)
        assert settings_of(merged_options({**given, "cpu": True})).num_processes == 2
        said = capsys.readouterr().err
        assert "distributed_type=MEGATRON_LM is not used" in said
        assert "megatron_lm_config is not used here" in said

    def test_number_left_open_by_the_file(self) -> None:
        given = self.write("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: -1\n")
        with pytest.raises(ConfigError, match=r"num_processes: -1, which leaves it open\. Give --num_processes"):
            settings_of(merged_options(given))


class TestFilesInProcesses:
    def test_fit_trains_in_two_processes_and_speaks_once(self, project: Any) -> None:
        file = project.write((Path(__file__).parent / "conftest.py").read_text().split('RUN = """')[1].split('"""')[0])
        command = [sys.executable, "-m", "loopwright", "fit", str(file), "--cpu", "--devices", "2", "--trainer.name=a"]
        command += ["--trainer.callbacks=[task.Steps]"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert run.returncode == 0, run.stderr
        assert run.stdout.count("The files of this run are in") == 1
        assert run.stdout.count("4 steps") == 2  # 8 samples in batches of 2 on 2 processes, 2 epochs

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--num_processes=2", "--trainer.max_epoch=3"], "Did you mean trainer.max_epochs?"),
            (["--num_processes=two"], "--num_processes: got 'two'"),
            (["--use_fsdp"], "--use_fsdp is for scripts. A file says it itself: --trainer.strategy=fsdp."),
        ],
    )
    def test_errors_come_before_the_launch(
        self, arguments: Sequence[str], says: str, project: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = project.write("task: {class_path: task.Line}\ndata: {class_path: task.loaders}\n")
        assert main(["fit", str(file), "--cpu", *arguments]) == 2
        assert says in capsys.readouterr().err

    def test_plan_starts_nothing(self, project: Any, capsys: pytest.CaptureFixture[str]) -> None:
        file = project.write("task: {class_path: task.Line}\n")
        assert main(["plan", str(file), "--num_processes=2"]) == 2
        assert "--num_processes: plan starts no processes" in capsys.readouterr().err

    def test_self_check(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert main(["test", "--cpu", "--num_processes=2"]) == 0
        lines = capfd.readouterr().out.splitlines()
        assert [line[:3] for line in lines] == ["ok:", "ok:", "ok:", "All"]
