"""The orders in which a pipeline's stages go forward and backward: torch's schedules by words for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..distributed.errors import ConfigError, check_integer, suggest


class Schedule(NamedTuple):
    """One of torch's schedules."""

    name: str
    """Its class."""
    has_several: bool = True
    """Whether it is made for several stages per process."""
    turns_back: bool = False
    """Whether the first process has the last stage, of two in each."""


SCHEDULES: Mapping[str, Schedule] = {
    "1f1b": Schedule("Schedule1F1B", has_several=False),
    "gpipe": Schedule("ScheduleGPipe", has_several=False),
    "interleaved_1f1b": Schedule("ScheduleInterleaved1F1B"),
    "interleaved_zero_bubble": Schedule("ScheduleInterleavedZeroBubble"),
    "looped_bfs": Schedule("ScheduleLoopedBFS"),
    "zbv_zero_bubble": Schedule("ScheduleZBVZeroBubble", turns_back=True),
    "dual_pipe_v": Schedule("ScheduleDualPipeV", turns_back=True),
}
"""torch's schedules by the words for them."""


def check_schedule(word: str, microbatches: int | None, stages_per_process: int | None, split: Sequence[str]) -> None:
    """Refuse options that no schedule has, or not this one. Local.

    Args:
        word: for the schedule.
        microbatches: as `PipelineStrategy` takes it.
        stages_per_process: the same.
        split: the same.
    Raises:
        ConfigError: an option can't be used.
    """
    if word not in SCHEDULES:
        raise ConfigError(f"PipelineStrategy(schedule={word!r}) is unknown. {suggest(word, SCHEDULES)}")
    kind = SCHEDULES[word]
    if microbatches is not None:
        check_integer("PipelineStrategy(microbatches)", microbatches, 1, "Leave it out for the number of stages.")
    if stages_per_process is not None:
        check_integer("PipelineStrategy(stages_per_process)", stages_per_process, 1, "Leave it out.")
        if (stages_per_process > 1) is not kind.has_several or (kind.turns_back and stages_per_process > 2):
            fitting = [each for each, other in SCHEDULES.items() if other.has_several is not kind.has_several]
            raise ConfigError(
                f"PipelineStrategy(stages_per_process={stages_per_process}) does not fit schedule='{word}', "
                f"which is for {'two' if kind.turns_back else 'several' if kind.has_several else 'one'}. "
                + (f"Choose one of {fitting}." if not kind.turns_back else "Leave it out.")
            )
    if isinstance(split, str) or not all(isinstance(name, str) for name in split):
        raise ConfigError(f"PipelineStrategy(split={split!r:.80}). Expected a list of names of layers.")
