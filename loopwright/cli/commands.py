"""The commands that run a YAML file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from ..callbacks.checkpoint import ModelCheckpoint
from ..checkpoint.weights import load_weights
from ..distributed.atomic import whole_file
from ..distributed.errors import CheckpointError, ConfigError
from ..distributed.paths import free_path
from ..trainer.memory import built_on_meta, read_memory_options
from ..trainer.setup import build_model
from ..trainer.task import Task
from ..trainer.trainer import Trainer
from .classes import find_class, full_class_path, python_path
from .config import RunConfig, add_trainer
from .loaders import loader_of
from .parsed import ParsedConfig
from .predictions import prediction_writer
from .request import read_request
from .shared_predictions import shared_writer
from .sources import Sources

Options = Mapping[str, str]


def run_config_command(command: str, arguments: Sequence[str]) -> int:
    """Run `fit`, `validate`, `test`, `predict` or `plan` and return 0.

    Raises:
        ConfigError: the arguments, the file or its values can't be used.
    """
    request = read_request(command, arguments)
    if request.file is None:
        return _without_file(command, is_help="help" in request.switches)
    sources = Sources.read(request.file, request.flags, os.environ)
    with python_path(sources.folders):
        config = RunConfig(sources, prog=f"loopwright {command} FILE.yaml")
        if "help" in request.switches:
            config.parser.print_help()
            return 0
        if request.class_help is not None:
            return _print_class_help(config, *request.class_help)
        parsed = config.parse()
        if "print_config" in request.switches:
            print(parsed.to_yaml(), end="")
        else:
            _COMMANDS[command](parsed, request.options)
    return 0


def check_config(command: str, arguments: Sequence[str]) -> None:
    """Read a file and check it against the classes that it names, and run nothing.

    Raises:
        ConfigError: the arguments, the file or its values can't be used.
    """
    request = read_request(command, arguments)
    assert request.file is not None
    sources = Sources.read(request.file, request.flags, os.environ)
    with python_path(sources.folders):
        RunConfig(sources, prog=f"loopwright {command} FILE.yaml").parse()


def _print_class_help(config: RunConfig, key: str, class_path: str) -> int:
    """Let jsonargparse print the arguments of a class that can stand at a key, and exit."""
    find_class(class_path)
    problem: Exception | None = None
    try:
        config.parser.parse_args([f"--{key}={full_class_path(class_path)}"])
    except ArgumentError as error:
        problem = error
    except SystemExit:
        return 0
    raise ConfigError(
        f"--{key}: {class_path} can't stand at this key. --help lists the keys with their types."
    ) from problem


def _without_file(command: str, *, is_help: bool) -> int:
    if not is_help:
        raise ConfigError(f"no file is given. Expected: loopwright {command} FILE.yaml [--key value ...].")
    parser = ArgumentParser(
        usage=f"loopwright {command} FILE.yaml [--key value ...]",
        description="With a file, this help lists the arguments of its task and its data as well.",
    )
    add_trainer(parser)
    parser.print_help()
    return 0


def _fit(config: ParsedConfig, options: Options) -> None:
    task, data, trainer = config.build()
    _describe_run(task, trainer, config)
    train, val = loader_of(data, "train"), loader_of(data, "val", is_required=False)

    def save_config(*_: object) -> None:  # its name stands in the reports of what callbacks cost
        _save_config(trainer, config)

    trainer.on("fit_start", lambda *_: _say_where_it_begins(trainer))
    trainer.on("fit_start", save_config)
    try:
        trainer.fit(task, train, val, resume_from=config.sources.resume_from)
    except KeyboardInterrupt as interrupt:
        for line in _what_is_left(trainer):
            interrupt.add_note(line)
        raise
    if not trainer.process.is_main_process:
        return
    if trainer.stop_reason is not None:
        print(f"The run ended: {trainer.stop_reason}")
    if trainer.run_directory.is_dir():
        print(f"The files of this run are in {trainer.run_directory}")


def _what_is_left(trainer: Trainer) -> Iterator[str]:
    """Lines that say what a run which was cut off has written."""
    checkpoints = [callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]
    written = [callback.last_path for callback in checkpoints if callback.last_path is not None]
    for path in written:
        yield f"The newest checkpoint is {path}"
    if not written:
        remedy = "" if checkpoints else " The callback ModelCheckpoint saves them."
        yield f"No checkpoint was saved.{remedy}"
    if trainer.run_directory.is_dir():
        yield f"The files of this run are in {trainer.run_directory}"


def _describe_run(task: Task, trainer: Trainer, config: ParsedConfig) -> None:
    """Let the trackers have the whole file, and not the trainer's arguments alone."""
    values = config.values
    task.hparams.update(values["task"].get("init_args", {}) | task.hparams)
    trainer.config.update(values["trainer"])
    if "data" in values:
        trainer.config["data"] = values["data"]


def _say_where_it_begins(trainer: Trainer) -> None:
    if trainer.process.is_main_process and trainer.resumed_step is not None:
        print(f"Goes on behind step {trainer.resumed_step}, in {trainer.run_directory}")


def _save_config(trainer: Trainer, config: ParsedConfig) -> None:
    if trainer.process.is_main_process and not trainer.is_fast_dev_run:
        save_config(config.to_yaml(), trainer.run_directory)


def save_config(text: str, directory: Path) -> Path:
    """Write `config.yaml`, whole or not at all, and return its path.

    A file of another run is never overwritten: where one with other content stands, this one is `config-2.yaml`, and
    so on; where one with the same content stands, nothing is written.
    """

    def is_of_another_run(file: Path) -> bool:
        return file.exists() and file.read_text(encoding="utf-8") != text

    file = free_path(directory / "config.yaml", is_taken=is_of_another_run)
    if not file.exists():
        with whole_file(file) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return file


def _plan(config: ParsedConfig, options: Options) -> None:
    world_size, notes = _world_size(options), []
    read_memory_options(world_size, options.get("device_memory"))  # before anything is built

    def without_memory(make: Callable[[], Any]) -> Any:
        task, note = built_on_meta(make, "the task")
        if task is None:
            notes.append(note)
        return make() if task is None else task

    task, data, trainer = config.build(without_memory) if options else config.build()
    train, val = loader_of(data, "train"), loader_of(data, "val", is_required=False)
    plan = trainer.plan(task, train, val, world_size=world_size, device_memory=options.get("device_memory"))
    if plan.memory is not None:
        plan.memory.notes += notes
    if trainer.process.is_main_process:
        print(plan)


def _world_size(options: Options) -> int | None:
    text = options.get("world_size")
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--world-size {text}. Expected a number of processes, at least 1.")
    return int(text)


def _validate(config: ParsedConfig, options: Options) -> None:
    task, data, trainer = config.build()
    _load(task, options)
    _print_metrics(trainer, trainer.validate(task, loader_of(data, "val")))


def _test(config: ParsedConfig, options: Options) -> None:
    task, data, trainer = config.build()
    _load(task, options)
    _print_metrics(trainer, trainer.test(task, loader_of(data, "test")))


def _predict(config: ParsedConfig, options: Options) -> None:
    task, data, trainer = config.build(trackers=False)  # nothing is logged that they could take
    _load(task, options)
    file = Path(options["output"]) if "output" in options else None
    is_shared = trainer.process.num_processes > 1
    with shared_writer(file, trainer) if is_shared else prediction_writer(file) as writer:
        trainer.predict(task, loader_of(data, "predict"), writer=writer)
    place = "Write them to a file with --output predictions.jsonl." if file is None else f"They are in {file}."
    if trainer.process.is_main_process:
        print(f"{writer.count} predictions. {place}")


def _load(task: Task, options: Options) -> None:
    if "weights" not in options:
        return
    build_model(task)
    try:
        load_weights(task, options["weights"])
    except CheckpointError as error:
        raise ConfigError(f"--weights: {error}") from error


def _print_metrics(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    if not trainer.process.is_main_process:
        return
    for name, value in metrics.items():
        print(f"{name}: {value:.6g}")


_COMMANDS: dict[str, Callable[[ParsedConfig, Options], None]] = {
    "fit": _fit,
    "plan": _plan,
    "validate": _validate,
    "test": _test,
    "predict": _predict,
}
