"""Positions: where a loader is in its passes, as a tree that a checkpoint can hold, and going on from one."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ..distributed.errors import ConfigError, DataError
from .combined import CombinedLoader
from .described import LoaderAround
from .geometry import Dealing
from .rest import Origin, Unit
from .samplers import SeedableRandomSampler, parts_of_loader
from .seeding import DataSeeds
from .workers import WorkersSeed

VERSION = 1
_ADDED: dict[str, Any] = {"workers": None, "workers_after": None}
"""Fields of positions that were not there at first."""


class Position(TypedDict):
    """Where a loader is. Nothing in it refers to the loader that gave it."""

    version: int
    kind: str
    """How the loader reads: by "indices", as a "stream", or whole "batches"."""
    epoch: int
    batch: int
    """Batches of this process's pass that are done."""
    origin: dict[str, Any]
    """Where the batches of this pass begin, see `Origin`: not at its start where a leg had other ones."""
    samples: int | None
    """Samples of all processes that are done, in the global order; None where they can't be counted."""
    batches: int | None
    """Batches of the user's own loader that are done, those of all processes together; None as well."""
    batch_size: int | None
    num_processes: int
    split_batches: bool
    num_workers: int
    num_samples: int | None
    """In a pass."""
    seed: int | None
    """That of the data's own random stream, None where it has none."""
    sampler_seeds: list[int]
    generators: list[Tensor]
    """The states that the generators of samplers and loaders had when the pass began."""
    generators_after: list[Tensor]
    """Their states now: those that the next pass begins with."""
    workers: list[Tensor | None] | None
    """For each loader whose workers outlive a pass: where their seed was drawn, if that was before the pass, see
    `WorkersSeed`. None: not said, by a version that did not know it.
    """
    workers_after: list[Tensor | None] | None
    """The same as it is now, and when the next pass begins."""
    is_over: bool
    """Whether nothing of the pass is left."""
    state: Any
    """What a stateful loader or dataset says of itself behind these batches."""
    state_before: Any
    """What it said before the pass."""
    is_whole: bool
    """Whether these states are for all processes together."""


@dataclass(slots=True)
class Start:
    """Where the next pass begins."""

    position: Position
    batch: int
    """Its first batch, counted from the pass's start."""
    origin: Origin
    state: Any = None
    was_begun: bool = False
    """Whether the earlier leg had begun this pass, and so has drawn what beginning it draws."""

    def whole_pass(self) -> Start:
        """The beginning of this pass."""
        return Start(_at_beginning(self.position), 0, Origin(), was_begun=self.was_begun)

    def after_pass(self, *, keeps_state: bool) -> Start:
        """Where the pass after this one begins, which is left as it is."""
        after = _at_beginning(self.position)
        after["epoch"] += 1
        after["generators"], after["workers"] = after["generators_after"], after["workers_after"]
        after["state"] = self.state if keeps_state else None
        return Start(after, 0, Origin(), after["state"])


@dataclass(slots=True)
class Pass:
    """What is noted of the running pass."""

    epoch: int
    generators: list[Tensor]
    """Their states when it began."""
    workers: list[Tensor | None]
    """See `Position`."""
    first: int = 0
    """Its first batch."""
    origin: Origin = field(default_factory=Origin)
    rest: LoaderAround | None = None
    """What is read in the loader's place where the pass goes on in other batches than it began with."""
    state_before: Any = None
    """What was stateful said before it."""
    states: dict[int, Any] = field(default_factory=dict)
    """By the number of batches that are done."""
    has_ended: bool = False

    def note(self, batch: int, state: Any, num_kept: int) -> None:
        """Keep a state, and forget those that are too far behind."""
        self.states[batch] = state
        self.states.pop(batch - num_kept, None)


def _at_beginning(position: Position) -> Position:
    """The position of the same pass's beginning."""
    whole = copy.copy(position)
    whole["batch"], whole["origin"], whole["is_over"], whole["state"] = 0, asdict(Origin()), False, None
    whole["samples"] = None if position["samples"] is None else 0
    whole["batches"] = None if position["batches"] is None else 0
    return whole


def start_of(
    position: Mapping[str, Any], dealing: Dealing, *, by_state: bool, is_whole: bool
) -> tuple[Start, list[str]]:
    """Where the next pass of a loader begins that goes on at a position, and why it can't be equal bit for bit.

    Args:
        position: as another loader of the same data gave it.
        dealing: how this loader's batches are made and dealt.
        by_state: whether it goes on by a state.
        is_whole: whether that state is one for all processes.
    Raises:
        ConfigError: it is no position, or of another kind of loader.
        DataError: this loader can't go on there.
    """
    position = checked_position(position, dealing)
    batch, origin, state = position["batch"], Origin(**position["origin"]), position["state"]
    inexact = _differences(position, dealing)
    if position["num_samples"] != dealing.num_samples:
        inexact.append(f"a pass had {position['num_samples']} samples and has {dealing.num_samples} now")
    same_readers = position["num_workers"] == dealing.num_workers
    alike = position["num_processes"] == dealing.num_processes or (position["is_whole"] and is_whole)
    if not (by_state and same_readers and alike):
        state = None
    if batch and _batches(position) != _batches(dealing):
        batch, origin = _dealt_anew(position, dealing)
    return Start(position, batch, origin, state, was_begun=position["batch"] > 0), inexact


def checked_position(position: Any, dealing: Dealing) -> Position:
    """A position, if it is one of this kind of loader.

    Raises:
        ConfigError: says what came.
    """
    if not isinstance(position, Mapping) or not set(Position.__annotations__) - set(_ADDED) <= set(position):
        raise ConfigError(f"a loader's position is {position!r:.80}. Expected what PreparedLoader.position() gave.")
    if position["version"] != VERSION:
        raise ConfigError(
            f"a loader's position has version {position['version']!r}. This version of Loopwright reads {VERSION}."
        )
    if position["kind"] != dealing.kind:
        raise ConfigError(
            f"the position is that of a loader that reads {_KINDS[position['kind']]}, and this one reads "
            f"{_KINDS[dealing.kind]}. Go on with the data of before, or begin a new epoch: loader.set_epoch(epoch)."
        )
    return cast(Position, _ADDED | dict(position))


def _all_parts(loader: Any) -> list[Any]:
    """A loader and what it reads from at any depth, the parts of a `CombinedLoader` as well."""
    found = parts_of_loader(loader)
    for part in [part for part in found if isinstance(part, CombinedLoader)]:
        for each in part.loaders:
            found += [inner for inner in _all_parts(each) if all(inner is not other for other in found)]
    return found


def seeded_samplers(loader: Any) -> list[SeedableRandomSampler]:
    """The samplers of a loader that shuffle by a seed of their own."""
    return [part for part in _all_parts(loader) if isinstance(part, SeedableRandomSampler)]


def own_generators(loader: Any, seeds: DataSeeds | None, workers: Sequence[WorkersSeed]) -> list[torch.Generator]:
    """The generators that a loader, its samplers and its iterable dataset draw from, each once."""
    in_place_of = {id(each.generator): each.own for each in workers}
    candidates: list[Any] = [] if seeds is None else list(seeds.replaced)
    for part in _all_parts(loader):
        is_reader = not isinstance(part, Dataset) or isinstance(part, IterableDataset)
        if is_reader and not isinstance(part, SeedableRandomSampler):
            generator = getattr(part, "generator", None)
            candidates.append(in_place_of.get(id(generator), generator))
    found: list[torch.Generator] = []
    for each in candidates:
        is_own = isinstance(each, torch.Generator) and (seeds is None or each is not seeds.generator)
        if is_own and all(each is not other for other in found):
            found.append(each)
    return found


_KINDS = {"indices": "samples by their indices", "stream": "an iterable dataset", "batches": "whole batches"}


def _differences(position: Position, dealing: Dealing) -> list[str]:
    """Sentences on how the batches differ from those of before."""
    found = []
    if (before := _batches(position)) != (now := _batches(dealing)):
        found.append(f"the data came in {before} and comes in {now} now")
    if position["num_workers"] != dealing.num_workers:
        found.append(
            f"the iterable dataset was read by {position['num_workers']} workers and is by {dealing.num_workers} now: "
            "if they share it, samples of this epoch are seen twice or not at all"
        )
    return found


def _batches(dealing: Position | Dealing) -> str:
    """What batches the processes get: position numbers mean the same as long as it does."""
    its = dealing if isinstance(dealing, dict) else asdict(dealing)
    size = "batches" if its["batch_size"] is None else f"batches of {its['batch_size']}"
    count = its["num_processes"]
    return f"{size} {'split among' if its['split_batches'] else 'for'} {count} process{'es' * (count > 1)}"


def _dealt_anew(position: Position, dealing: Dealing) -> tuple[int, Origin]:
    """The first batch of the rest of a pass, which is dealt in another way than what was before."""
    samples, batches = position["samples"], position["batches"]
    if samples is not None and dealing.samples_per_round:
        return _at("samples", samples, dealing.samples_per_round)
    if batches is not None and dealing.batches_per_round and position["batch_size"] == dealing.batch_size:
        return _at("batches", batches, dealing.batches_per_round)
    raise DataError(
        f"the pass can't go on in the middle: {'; '.join(_differences(position, dealing))}, and the samples that were "
        "seen can't be counted. Use the batch size and the number of processes of before, or begin a new epoch."
    )


def _at(unit: Unit, count: int, per_round: int) -> tuple[int, Origin]:
    batch = -(-count // per_round)
    return batch, Origin(batch, unit, count)
