"""Worker processes that outlive a pass: their seed is drawn when they are first started, and kept where they go on.

A loader with `persistent_workers` draws the seed of its workers in its first pass alone. A run that goes on in a new
process has to start them once more, and would draw what the run that was never stopped did not: its dropout would be
another, or the order of samples, where these come from the same generator. So the seed is drawn here, at the same place
as torch does, and the state that it was drawn at is part of the loader's position.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterDataPipe

from .samplers import SamplerAround, index_source, with_options
from .seeding import derived_seed
from .skipping import reads_by_index
from .stateful import has_state

_PASSED_OVER = 2**16


class WorkersSeed:
    """Where the seed of a loader's persistent workers comes from.

    Args:
        own: what the loader draws it from; None: torch's random state.
    """

    def __init__(self, own: torch.Generator | None) -> None:
        self.own = own
        self.generator = torch.Generator()
        """What the loader draws it from now: the same number whenever the workers are started."""
        self.drawn_at: Tensor | None = None
        """The state of `own` at which it was drawn; None: the workers were not started yet."""
        self.is_older = False
        """Whether it was drawn before the pass that began last."""
        self._again = _Again()

    def attached_to(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """A copy of the loader whose workers get this seed."""
        start = _Start(loader.worker_init_fn, self._again)
        return with_options(loader, generator=self.generator, worker_init_fn=start)

    def begin(self, place: str, *, is_anew: bool, drawn_at: Tensor | None = None) -> None:
        """Be ready for a pass, which starts the workers unless they are there. Draws the seed if it was not drawn yet.

        Args:
            place: where the pass begins.
            is_anew: whether an earlier leg has begun it, and its workers have read some of it.
            drawn_at: where that leg drew the seed in this pass.
        """
        self.is_older = self.drawn_at is not None
        self._again.place = place if is_anew or self.is_older else None
        if self.drawn_at is None:
            own = torch.default_generator if self.own is None else self.own
            self.drawn_at = own.get_state() if drawn_at is None else drawn_at
            torch.empty((), dtype=torch.int64).random_(generator=own)
        self.generator.set_state(self.drawn_at)


def keeps_workers(loader: DataLoader[Any]) -> bool:
    """Whether a loader's workers outlive a pass, and its seed is drawn for them alone."""
    is_kept = loader.num_workers > 0 and loader.persistent_workers
    return is_kept and not isinstance(loader.dataset, IterDataPipe)  # these draw from the generator in each pass


def seeds_drawn(workers: Sequence[WorkersSeed]) -> list[Tensor | None]:
    """The states at which the seeds were drawn."""
    return [each.drawn_at for each in workers]


def put_seeds(workers: Sequence[WorkersSeed], drawn: Sequence[Tensor | None]) -> None:
    """Go on with workers whose seeds were drawn at these states."""
    for each, state in zip(workers, drawn, strict=True):
        each.drawn_at = state


@contextmanager
def indices_begun_once(loader: Any, workers: Sequence[WorkersSeed]) -> Iterator[None]:
    """A context in which a loader begins a pass; its sampler begins once where its workers would have been there.

    torch begins a sampler twice where it starts workers, and a sampler may draw then.
    """
    if not any(each.is_older for each in workers) or not reads_by_index(loader) or has_state(loader):
        yield
        return
    name, source = index_source(loader)
    object.__setattr__(loader, name, _BegunWhenRead(source))  # DataLoader guards it against changes
    try:
        yield
    finally:
        object.__setattr__(loader, name, source)


class _BegunWhenRead(SamplerAround):
    """A sampler or batch sampler that begins when its first item is read."""

    def __iter__(self) -> Iterator[Any]:
        yield from self.sampler


class _Again:
    """Where workers are started that were before; None: they are started for the first time."""

    place: str | None = None


class _Start:
    """A `worker_init_fn` that lets workers which are started again draw other numbers than at the first time.

    Their seed stays, and so all that is a function of it. What they would draw is what the first ones have drawn, long
    ago: the same augmentation after each resume.

    Args:
        worker_init_fn: the user's, or what stands around it.
        again: read when the workers start.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None, again: _Again) -> None:
        self.worker_init_fn = worker_init_fn
        self.again = again

    def __call__(self, worker_id: int) -> None:
        if self.again.place is not None:
            seed = derived_seed(torch.initial_seed(), self.again.place)
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed % 2**32)
            torch.rand(1 + seed % _PASSED_OVER)  # not seeded anew: `torch.initial_seed()` stays
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
