"""The entry of the `loopwright` command: chooses the command, and imports only what that one needs."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence

HELP = """\
usage: loopwright COMMAND FILE.yaml [--trainer.max_epochs 3 --task.init_args.width 32 ...]
       loopwright launch [--num_processes 2 ...] script.py [arguments of the script]

commands:
  fit         train the task that FILE.yaml describes
  validate    run the validation data through it    [--weights model.safetensors]
  test        run the test data through it          [--weights model.safetensors]
  predict     run the predict data through it       [--weights model.safetensors] [--output predictions.jsonl]
  plan        say what fit will do, without training     [--world-size 64] [--device-memory 80GB]
  verify-resume  prove that the task of FILE.yaml goes on exactly after a stop  [--steps 30] [--stops 3]
  checkpoint  show what a checkpoint holds, verify its files, or convert weights; `loopwright checkpoint --help`
  merge-weights  write one set of weights from a checkpoint that several processes wrote  CHECKPOINT OUT
  launch      run a script in several processes; `loopwright launch --help` lists the options
  to-fsdp2    write a launch file with FSDP version 2's options  --config_file FILE (--output_file FILE | --overwrite)
  config      ask how scripts are launched on this machine, and write that down  [--default] [--update]
  test        without a file: check that the processes of this machine work together [launch options]
  env         print versions and devices, for bug reports

options:
  --help     this text; `loopwright COMMAND FILE.yaml --help` lists every key with its type and default
  --version  print the version

Every key of the file is also a flag (--trainer.seed 1) and an environment variable (LOOPWRIGHT_TRAINER__SEED=1).
A flag wins over the environment, the environment over the file. --print_config prints the outcome as a YAML file.
--devices 2 runs the file in two processes; it takes the options of `launch` as well, such as --num_processes 2.
"""
RUN_COMMANDS = ("fit", "validate", "test", "predict")
CONFIG_COMMANDS = (*RUN_COMMANDS, "plan")
COMMANDS = (*CONFIG_COMMANDS, "verify-resume", "checkpoint", "merge-weights", "launch", "config", "to-fsdp2", "env")

USAGE_ERROR = 2
INTERRUPTED = 130
OUTPUT_CLOSED = 141
"""What a shell says of a program whose output nobody reads any more, as behind `| head`: it ended by SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Exceptions of the user's code pass through, so that Python shows their traceback and exits with 1. An output that
    nobody reads any more, as behind `| head`, ends the command without one.

    Args:
        argv: the arguments without the program's name; `sys.argv[1:]` when left out.
    Returns:
        0 when all went well, 2 when a command, a key or a value can't be used, 130 after Ctrl-C,
        141 when the output's reader has gone.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _main(arguments)
        print(end="", flush=True)  # here, since Python would say it as it ends
    except BrokenPipeError:
        if not _is_output_closed():
            raise
        if arguments[0] in RUN_COMMANDS:
            print(f"{_speaker(arguments[0])}: ended, because nobody reads its output any more.", file=sys.stderr)
        return OUTPUT_CLOSED
    return code


def _main(arguments: list[str]) -> int:
    if not arguments:
        print(HELP, end="", file=sys.stderr)
        return USAGE_ERROR
    if arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if arguments[0] == "--version":
        from .. import __version__

        print(f"loopwright {__version__}")
        return 0
    return _run_guarded(arguments[0], arguments[1:])


def _is_output_closed() -> bool:
    """Whether nobody reads the standard output any more; it goes nowhere then, so that Python can end in silence."""
    probe = select.poll()
    probe.register(sys.stdout.fileno(), 0)  # errors are told whatever is asked for
    is_closed = bool(probe.poll(0))
    if is_closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_closed


def _run_guarded(command: str, arguments: list[str]) -> int:
    """Run a command; turn what the user can mend without a traceback into one message."""
    from ..distributed.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        LaunchError,
        MissingDependencyError,
        TaskError,
    )

    try:
        return _run(command, arguments)
    except (ConfigError, TaskError, DataError, CheckpointError, LaunchError, MissingDependencyError) as error:
        _record(error)
        print("\n".join([f"{_speaker(command)}: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt as interrupt:
        print("\n".join(["Interrupted.", *getattr(interrupt, "__notes__", [])]), file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        _record(error)
        raise


def _speaker(command: str) -> str:
    """Who says something: the command, with the process's index where there are others."""
    index = os.environ.get("RANK", "") if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    return f"loopwright {command} (process {index})" if index else f"loopwright {command}"


def _record(error: BaseException) -> None:
    """Tell the launcher of this process, if it has one, how it failed."""
    from ..distributed.outcomes import record_failure

    record_failure(error)


def _run(command: str, arguments: list[str]) -> int:
    if command == "checkpoint":
        from .checkpoint import run_checkpoint

        return run_checkpoint(arguments)
    if command == "merge-weights":
        from .merge_weights import run_merge_weights

        return run_merge_weights(arguments)
    if command == "launch":
        from .launch import run_launch

        return run_launch(arguments)
    if command == "verify-resume":
        from .verify_resume import run_verify_resume

        return run_verify_resume(arguments)
    if command == "config":
        from .questions import run_config

        return run_config(arguments)
    if command == "to-fsdp2":
        from .to_fsdp2 import run_to_fsdp2

        return run_to_fsdp2(arguments)
    if command == "env":
        from .environment import run_env

        return run_env(arguments)
    if command in CONFIG_COMMANDS:
        from .processes import run_file_command

        return run_file_command(command, arguments)
    from ..distributed.errors import ConfigError, suggest

    raise ConfigError(f"there is no such command. {suggest(command, COMMANDS)}")
