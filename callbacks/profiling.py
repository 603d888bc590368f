"""`ProfileKwargs`: how `Accelerator.profile` records what runs, on this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from ..distributed.atomic import whole_file
from ..distributed.errors import ConfigError, suggest
from ..strategies.handlers import KwargsHandler

_SCHEDULE_OPTIONS = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")
_NEEDED_OPTIONS = _SCHEDULE_OPTIONS[:3]


@dataclass(frozen=True, slots=True)
class ProfileKwargs(KwargsHandler):
    """Settings of `torch.profiler.profile`; the names and their order are Accelerate's."""

    activities: Sequence[str] | None = None
    """What is recorded: `"cpu"`, `"cuda"`, and what else this torch can. None: all that this machine has."""
    schedule_option: Mapping[str, int] | None = None
    """The arguments of `torch.profiler.schedule`: after each step, `prof.step()` moves it on. None: everything."""
    on_trace_ready: Callable[[Any], Any] | None = None
    """Called with the profiler at the end of each cycle of the schedule."""
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | os.PathLike[str] | None = None
    """Where each process writes its trace, `profile_INDEX.json`, for Chrome's viewer. None: nowhere."""

    def __post_init__(self) -> None:
        known = _activities()
        for word in self.activities or ():
            if word not in known:
                raise ConfigError(f"ProfileKwargs.activities holds {word!r}. {suggest(str(word), known)}")
        supported = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        if not any(known[word] in supported for word in self.activities or known):
            raise ConfigError(
                f"ProfileKwargs.activities={list(self.activities or ())}: this machine records none of them. Give "
                "'cpu' as well, or None for all that there is."
            )
        if not (self.on_trace_ready is None or callable(self.on_trace_ready)):
            raise ConfigError(
                f"ProfileKwargs.on_trace_ready={self.on_trace_ready!r:.80}. Expected a function of the profiler, "
                "or None."
            )
        if self.schedule_option is not None:
            _check_schedule(self.schedule_option)

    def build(self) -> torch.profiler.profile:
        """A profiler with these settings, which has not begun."""
        known = _activities()
        schedule = None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option)
        return torch.profiler.profile(
            activities=None if self.activities is None else [known[word] for word in self.activities],
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


def _check_schedule(options: object) -> None:
    """Raises ConfigError where `torch.profiler.schedule` can't be made of these."""
    place = "ProfileKwargs.schedule_option"
    if not isinstance(options, Mapping):
        raise ConfigError(f"{place}={options!r:.80}. Expected a mapping with {', '.join(_NEEDED_OPTIONS)}, or None.")
    for name in options:
        if name not in _SCHEDULE_OPTIONS:
            raise ConfigError(f"{place} has {name!r}. {suggest(str(name), _SCHEDULE_OPTIONS)}")
    if missing := [name for name in _NEEDED_OPTIONS if name not in options]:
        raise ConfigError(
            f"{place}={dict(options)} has no {' and no '.join(missing)}. Expected {', '.join(_NEEDED_OPTIONS)}, in "
            "calls of prof.step()."
        )


@contextmanager
def profiled(settings: ProfileKwargs, process_index: int) -> Iterator[torch.profiler.profile]:
    """A context whose body is recorded by the profiler that it gives; the trace is written at its end. Local.

    Raises:
        ConfigError: the folder for traces is a file.
    """
    folder = settings.output_trace_dir
    if folder is not None and Path(folder).exists() and not Path(folder).is_dir():  # before anything is recorded
        raise ConfigError(
            f"ProfileKwargs.output_trace_dir={str(folder)!r} is a file. Expected a folder, or a new path."
        )
    with settings.build() as profiler:
        yield profiler
    if folder is not None:
        with whole_file(Path(folder) / f"profile_{process_index}.json") as path:
            profiler.export_chrome_trace(str(path))


def _activities() -> dict[str, ProfilerActivity]:
    """The activities that this machine can record, by word; and CUDA, which torch leaves out where there is none."""
    supported = {*torch.profiler.supported_activities(), ProfilerActivity.CUDA}  # type: ignore[no-untyped-call]
    return {name.lower(): activity for name, activity in ProfilerActivity.__members__.items() if activity in supported}
