"""The entry of the `loopwright` command: chooses the command, and imports only what that one needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

HELP = """\
usage: loopwright COMMAND FILE.yaml [--trainer.max_epochs 3 --task.init_args.width 32 ...]

commands:
  fit       train the task that FILE.yaml describes
  validate  run the validation data through it    [--weights model.safetensors]
  test      run the test data through it          [--weights model.safetensors]
  predict   run the predict data through it       [--weights model.safetensors] [--output predictions.jsonl]
  plan      say what fit will do, without training
  env       print versions and devices, for bug reports

options:
  --help     this text; `loopwright COMMAND FILE.yaml --help` lists every key with its type and default
  --version  print the version

Every key of the file is also a flag (--trainer.seed 1) and an environment variable (LOOPWRIGHT_TRAINER__SEED=1).
A flag wins over the environment, the environment over the file. --print_config prints the outcome as a YAML file.
"""
CONFIG_COMMANDS = ("fit", "validate", "test", "predict", "plan")
COMMANDS = (*CONFIG_COMMANDS, "env")

USAGE_ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Exceptions of the user's code pass through, so that Python shows their traceback and exits with 1.

    Args:
        argv: the arguments without the program's name; `sys.argv[1:]` when left out.
    Returns:
        0 when all went well, 2 when a command, a key or a value can't be used, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
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


def _run_guarded(command: str, arguments: list[str]) -> int:
    """Run a command; turn what the user can mend without a traceback into one message."""
    from ..distributed.errors import CheckpointError, ConfigError, DataError, MissingDependencyError, TaskError

    try:
        return _run(command, arguments)
    except (ConfigError, TaskError, DataError, CheckpointError, MissingDependencyError) as error:
        print("\n".join([f"loopwright {command}: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt as interrupt:
        print("\n".join(["Interrupted.", *getattr(interrupt, "__notes__", [])]), file=sys.stderr)
        return INTERRUPTED


def _run(command: str, arguments: list[str]) -> int:
    if command == "env":
        from .environment import run_env

        return run_env(arguments)
    if command in CONFIG_COMMANDS:
        from .commands import run_config_command

        return run_config_command(command, arguments)
    from ..distributed.errors import ConfigError, suggest

    raise ConfigError(f"there is no such command. {suggest(command, COMMANDS)}")
