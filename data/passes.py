"""`Passes`: a loader's passes one after another, each of which may begin in the middle."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import chain, islice
from typing import Any

import torch

from ..distributed.errors import ConfigError, check_integer
from ..distributed.random import preserved_random_state, synchronize_rng_state
from .combined import CombinedLoader
from .described import LoaderAround
from .dispatch import DispatchedLoader
from .geometry import dealing_of
from .position import VERSION, Pass, Position, Start, own_generators, seeded_samplers, start_of
from .rest import Origin, dealer_of, rest_of
from .rounds import Dealer
from .samplers import epoch_listeners
from .seeding import DataSeeds, apart, derived_seed
from .sizes import loader_length
from .skipping import batches_from, reads_by_index
from .stateful import goes_on_by_state, is_stateful, put_state, state_of, tells_place
from .workers import WorkersSeed, indices_begun_once, put_seeds, seeds_drawn

_END = object()


class Passes(LoaderAround):
    """The base of a prepared loader: what one pass of it reads, and where the next one begins.

    Args:
        loader: any iterable of batches, or what deals one out.
        num_processes: how many processes share it.
        dealer: what gives this process its share; None: the loader was not shared.
        skip_batches: batches at the start of each pass that are left out.
    """

    def __init__(self, loader: Iterable[Any], num_processes: int, dealer: Dealer | None, skip_batches: int = 0) -> None:
        super().__init__(loader, num_processes, dealer)
        self.skip_batches = skip_batches
        self.iteration = 0
        """Passes that were begun and finished; also the epoch that samplers are told."""
        self.shared_generators: list[torch.Generator] = []
        """Generators of samplers, whose state all processes take from the main process at the start of a pass."""
        self.seeds: DataSeeds | None = None
        """Where the random numbers of the data come from; None: from the loader's generator and the training's."""
        self.workers: list[WorkersSeed] = []
        """Those of the loaders whose workers outlive a pass."""
        self.reads_apart = False
        """Whether batches are read apart from the training's random states, as reading them may draw."""
        self.num_before = 0
        """Batches of the origin's pass that are before the first one of this loader."""
        self._start: Start | None = None
        """Where the next pass begins; None: at its beginning."""
        self._pass: Pass | None = None
        """The pass that was begun last, or is running."""

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, its samplers at any depth and its dataset, where they listen, which epoch begins."""
        self.iteration = epoch
        for listener in epoch_listeners(self.loader):
            listener.set_epoch(epoch)
        if self.seeds is not None:
            self.seeds.set_epoch(epoch)
        start = self._start
        if start is not None and start.position["epoch"] != epoch:
            is_next = start.position["epoch"] + 1 == epoch
            keeps_state = start.position["is_over"] or not is_stateful(self.loader)
            self._start = start.after_pass(keeps_state=keeps_state) if is_next else None

    @property
    def generator(self) -> torch.Generator | None:
        """The wrapped loader's generator, as the user gave it."""
        found = super().generator
        return next((each.own for each in self.workers if each.generator is found), found)

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators that the user's loader, its samplers and its iterable dataset draw from."""
        return own_generators(self.loader, self.seeds, self.workers)

    @property
    def first_batch(self) -> int:
        """The number of the batch that the pass of this epoch begins with: above 0 where it goes on in the middle."""
        if self._start is not None:
            return self._start.batch
        return self._pass.first if self._pass is not None and self._pass.epoch == self.iteration else 0

    @property
    def pass_length(self) -> int | None:
        """The number of the batch that would follow the running pass; None where the loader has no length."""
        running = self._pass
        if running is None or running.rest is None:
            return self.length
        left = loader_length(running.rest.loader)
        return None if left is None else running.origin.batch + left

    @property
    def _read(self) -> LoaderAround:
        """What the running pass reads."""
        running = self._pass
        return self if running is None or running.rest is None else running.rest

    @property
    def length(self) -> int | None:
        """Batches in a whole pass, None where the loader has no length."""
        return loader_length(self)

    def __len__(self) -> int:
        """Batches in a whole pass. Raises TypeError where the loader has no length."""
        return max(len(self.loader) - self.skip_batches, 0)  # type: ignore[arg-type]

    def position(self, batch: int, *, epoch: int | None = None) -> Position:
        """Where this process is in its data: what a loader of the same data needs to go on behind it. Local.

        Args:
            batch: batches of this process's pass that are done; 0: the pass begins, or begins next.
            epoch: the pass, None: the one of `iteration`. At the end of a pass give the next one, with batch 0.
        Returns:
            Integers, texts, tensors and nestings of them, and what a stateful loader or dataset says of itself.
        Raises:
            ConfigError: no integer, or a stateful loader's state behind this batch is not kept any more.
        """
        check_integer("loader.position(batch)", batch, 0)
        epoch = self.iteration if epoch is None else epoch
        start = self._start
        if start is not None and (start.position["epoch"], start.batch) == (epoch, batch):
            return copy.copy(start.position)  # nothing was read since
        running = self._pass if self._pass is not None and self._pass.epoch == epoch else None
        origin = Origin() if running is None else running.origin
        state = self._state_behind(batch, running) if goes_on_by_state(self.loader) else None
        generators = [each.get_state() for each in self.generators]
        dealing = dealing_of(self)
        return Position(
            version=VERSION,
            kind=dealing.kind,
            epoch=epoch,
            batch=batch,
            origin=asdict(origin),
            samples=dealing.samples(batch, origin),
            batches=dealing.batches(batch, origin),
            batch_size=dealing.batch_size,
            num_processes=dealing.num_processes,
            split_batches=dealing.split_batches,
            num_workers=dealing.num_workers,
            num_samples=dealing.num_samples,
            seed=self.seeds.seed if self.seeds is not None and self.seeds.by_batch else None,
            sampler_seeds=[sampler.seed for sampler in seeded_samplers(self.loader)],
            generators=generators if running is None else running.generators,
            generators_after=generators,
            workers=seeds_drawn(self.workers) if running is None else running.workers,
            workers_after=seeds_drawn(self.workers),
            is_over=running is not None and self._is_over(batch, running, dealing.kind),
            state=state,
            state_before=state if running is None else running.state_before,
            is_whole=self._has_whole_state(),
        )

    def resume(self, position: Mapping[str, Any], *, whole: bool = False) -> list[str]:
        """Go on behind a position in the next pass; later passes are whole. Local.

        Batches of another size and another number of processes go on behind the samples that were seen, in the global
        order, so that each one left is seen once. What the random numbers come from is that of the position.

        Args:
            position: what `position` gave, on this process or, if there were fewer, on the main one.
            whole: give the position's pass from its beginning; the user skips what is done.
        Returns:
            Sentences on why the data can't be equal bit for bit to that of a run which was never stopped.
        Raises:
            ConfigError: it is no position, or that of another kind of loader.
            DataError: this loader can't go on there.
        """
        by_state = goes_on_by_state(self.loader)
        start, inexact = start_of(position, dealing_of(self), by_state=by_state, is_whole=self._has_whole_state())
        if whole:
            start = start.whole_pass()
        inexact += self._take_seeds(start.position)
        self._start = self._pass = None
        self.set_epoch(start.position["epoch"])
        if start.batch and start.state is None and start.origin.count:
            rest_of(self.loader, start.origin)  # what can't be done is known now
        self._start = start
        return inexact

    def _take_seeds(self, position: Position) -> list[str]:
        """Take over what the random numbers come from. Returns why they can't be equal."""
        inexact = []
        samplers = seeded_samplers(self.loader)
        if len(samplers) == len(position["sampler_seeds"]):
            for sampler, seed in zip(samplers, position["sampler_seeds"], strict=True):
                sampler.seed = seed
        else:
            inexact.append("the loader shuffles in another way than before, so that the order of samples is another")
        if len(self.generators) != len(position["generators"]):
            inexact.append("samplers had other generators, so that the order of samples may be another")
        inexact += self._take_workers(position)
        by_batch = self.seeds is not None and self.seeds.by_batch
        if by_batch != (position["seed"] is not None):
            inexact.append(f"seed_batches was {not by_batch} and is {by_batch}, so that the data draws other numbers")
        elif self.seeds is not None and position["seed"] is not None:
            self.seeds.seed = position["seed"]
        return inexact

    def _take_workers(self, position: Position) -> list[str]:
        """Take over where the seeds of persistent workers were drawn. Returns why what is drawn can't be equal."""
        drawn, is_alike = position["workers_after"], position["num_processes"] == self.num_processes
        if is_alike and drawn is not None and len(drawn) == len(self.workers):
            put_seeds(self.workers, drawn)
            return []
        position["workers"] = position["workers_after"] = None
        if not is_alike or self.seeds is not None or (drawn is None and not self.workers):
            return []  # that is told, or nothing else draws from what these seeds are drawn from
        if drawn is None:
            return ["it is not known whether persistent workers were there, so that their seed is drawn once more"]
        return [f"{len(drawn)} loaders had persistent workers and {len(self.workers)} have, which draw other seeds"]

    def _begin(self, lookahead: int) -> Iterator[Any]:
        """The base of every way to iterate: the items of the wrapped loader, `Counted` where it counts samples."""
        start = self._start
        if start is not None and start.position["is_over"]:
            return iter(())  # the next pass begins as it would have
        self._start = None
        running = self._pass = self._pass_from(start)
        for generator in self.shared_generators:
            synchronize_rng_state("generator", generator)
        if start is None or not start.was_begun:
            iterator = self._drawn(start, running)
        else:  # the earlier leg has drawn what beginning it draws
            with preserved_random_state(torch.device("cpu")):
                iterator = self._drawn(start, running)
                if isinstance(self.loader, CombinedLoader):  # it begins its loaders when it is read
                    first = list(islice(iterator, 1))
                    iterator = chain(first, iterator)
        # A pass that skips is read from a copy of the loader, and the loader itself is nowhere then.
        skips = start is not None and start.state is None
        is_copy = running.rest is not None or (skips and reads_by_index(self.loader))
        return self._noted(iterator, running, lookahead) if running.states and not is_copy else iterator

    def _pass_from(self, start: Start | None) -> Pass:
        """The pass that begins there, after its generators are put there."""
        generators = self.generators
        if start is not None and len(start.position["generators"]) == len(generators):
            for generator, state in zip(generators, start.position["generators"], strict=True):
                generator.set_state(state)
        if start is not None and start.position["workers"] is not None:
            put_seeds(self.workers, start.position["workers"])
        running = Pass(self.iteration, [generator.get_state() for generator in generators], seeds_drawn(self.workers))
        if start is not None:
            running.first, running.origin = start.batch, start.origin
        if start is not None and start.state is None and start.origin.count:
            rest = rest_of(self.loader, start.origin)
            dealer = None if self.dealer is None else dealer_of(rest)
            running.rest = LoaderAround(rest, self.num_processes, self.dealer if dealer is None else dealer)
        if is_stateful(self.loader) or goes_on_by_state(self.loader):
            state = self._state_between_passes() if start is None else start.state
            running.states[running.first] = state
            running.state_before = state if start is None else start.position["state_before"]
        return running

    def _drawn(self, start: Start | None, running: Pass) -> Iterator[Any]:
        self._begin_workers(start, running)
        seeds = self.seeds
        if seeds is not None:
            seeds.keep_pace()
        if seeds is None or not self.reads_apart:
            return self._opened(start, running)
        return apart(lambda: self._opened(start, running), derived_seed(seeds.pass_seed, "begin", seeds.process_index))

    def _begin_workers(self, start: Start | None, running: Pass) -> None:
        was_begun = start is not None and start.was_begun
        drawn = start.position["workers_after"] if start is not None and was_begun else None
        process = 0 if self.seeds is None else self.seeds.process_index
        place = f"{process}/{running.epoch}/{self.num_before + running.first}"
        for index, each in enumerate(self.workers):
            # A stream is read from the beginning of its pass, and draws what it drew there.
            is_anew = was_begun and reads_by_index(self.loader)
            each.begin(place, is_anew=is_anew, drawn_at=None if drawn is None else drawn[index])

    def _opened(self, start: Start | None, running: Pass) -> Iterator[Any]:
        with indices_begun_once(self.loader, self.workers):
            return self._items(start, running)

    def _items(self, start: Start | None, running: Pass) -> Iterator[Any]:
        """The items of a pass, from where it begins."""
        if running.rest is not None:
            return batches_from(running.rest.loader, running.first - running.origin.batch)
        if start is None or start.state is None:
            return batches_from(self.loader, self.skip_batches + running.first)
        if start.batch and isinstance(self.loader, DispatchedLoader):
            self.loader.keep_first_round(start.position["state_before"])
        put_state(self.loader, start.state)
        iterator = iter(self.loader)
        if start.batch:
            return iterator
        # What is saved at the end of a pass may say that there is nothing left.
        first = next(iterator, _END)
        return iter(self.loader) if first is _END else chain([first], iterator)

    def _noted(self, iterator: Iterator[Any], running: Pass, lookahead: int) -> Iterator[Any]:
        """The items, the loader's state being kept behind each that its user may still have to hand."""
        batch = running.first
        for item in iterator:
            batch += 1
            running.note(batch, state_of(self.loader), lookahead + 3)
            yield item
        running.states[batch] = state_of(self.loader)  # behind the last batch the pass is over
        running.has_ended = True

    def _is_over(self, batch: int, running: Pass, kind: str) -> bool:
        if running.has_ended:
            return batch == max(running.states)
        return batch > 0 and kind == "indices" and batch == self.pass_length

    def _state_behind(self, batch: int, running: Pass | None) -> Any:
        state = self._state_between_passes() if running is None else self._kept_state(batch, running)
        return state if tells_place(state) else None

    def _kept_state(self, batch: int, running: Pass) -> Any:
        if batch not in running.states:
            raise ConfigError(
                f"the state of the {type(self.loader).__name__} behind batch {batch} is not known: it is kept for "
                f"{sorted(running.states)}. Ask before more is read; a pass that was resumed by skipping has none."
            )
        return running.states[batch]

    def _state_between_passes(self) -> Any:
        before = self._pass
        if before is None or not (before.has_ended or not is_stateful(self.loader)):
            return None  # a loader that was left in the middle begins anew by itself
        return state_of(self.loader)

    def _has_whole_state(self) -> bool:
        return self.dealer is None or isinstance(self.dealer, DispatchedLoader)
