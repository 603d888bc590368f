"""Loaders, schedules and metrics of an `Accelerator` on two processes. F: facts of semantics; B: cases.

What runs in the workers returns plain values; process 0's stand first in the lists that the tests compare.
"""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from loopwright.data.configuration import DataLoaderConfiguration
from loopwright.data.dispatch import DispatchedLoader
from loopwright.data.skip import skip_first_batches
from loopwright.distributed.errors import ConfigError, DataError
from loopwright.strategies.outcome import StepOutcome

from .several import Stream, ids, on_cpu
from .weights import Weight


def joined(even: bool | None) -> tuple[list[int], float]:
    """Five batches of one sample; with the gradient 1 each, each step subtracts 1."""
    accelerator = on_cpu()
    model = Weight()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), ids(5, 1))
    seen = []
    with accelerator.join_uneven_inputs([model], even_batches=even):
        for batch in loader:
            accelerator.backward(model(torch.ones(1)).mean())
            optimizer.step()
            optimizer.zero_grad()
            seen += batch.tolist()
    assert len(list(loader)) == 3, "the loader is as before"
    return seen, accelerator.unwrap_model(model).weight.item()


def test_join_lets_the_longer_process_go_on(two_processes: Any) -> None:
    first, second = two_processes(joined, False)
    assert [first[0], second[0]] == [[0, 2, 4], [1, 3]]
    assert first[1] == second[1] == -2.5  # torch divides by the number of processes, also where one has ended
    assert [seen for seen, _ in two_processes(joined, None)] == [[0, 2, 4], [1, 3, 0]]


def warned_of_dispatch() -> list[str]:
    accelerator = on_cpu()
    model = accelerator.prepare(Weight())
    accelerator.prepare(DataLoader(Stream(4), batch_size=1), ids(4, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([model], even_batches=False):
            pass
    return [f"{Path(warning.filename).name}: {warning.message}" for warning in caught]


def test_join_says_which_loaders_it_can_not_change(two_processes: Any) -> None:
    for texts in two_processes(warned_of_dispatch):
        assert len(texts) == 1
        assert texts[0].startswith(
            "test_accelerator_loaders.py: even_batches=False has no effect on 1 of 2 prepared loaders"
        )


def cut_by_hand() -> list[list[int]]:
    """The main process's two batches are joined; process 0 gets the even rows."""

    def every_second(batch: Tensor, part: slice, process_index: int, num_processes: int) -> Tensor:
        return batch[process_index::num_processes]

    loader = on_cpu().prepare_data_loader(DataLoader(Stream(8), batch_size=2), slice_fn_for_dispatch=every_second)
    return [batch.tolist() for batch in loader]


def test_the_users_own_function_cuts_what_the_main_process_read(two_processes: Any) -> None:
    assert two_processes(cut_by_hand) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def drawn(rng_types: list[str]) -> list[list[float]]:
    """Random numbers of two passes; the processes have other seeds."""
    accelerator = on_cpu(rng_types=rng_types)
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(ids(4, 1))
    return [[torch.rand(()).item() for _ in loader] for _ in range(2)]


def test_processes_agree_on_the_random_states_that_were_named(two_processes: Any) -> None:
    first, second = two_processes(drawn, ["torch", "generator"])
    assert first == second
    assert first[0] != first[1]
    first, second = two_processes(drawn, ["generator"])
    assert first[0] != second[0]


def drawn_after_a_pass() -> float:
    accelerator = on_cpu()
    loader = accelerator.prepare(ids(4, 1, shuffle=True))
    torch.manual_seed(5)
    assert len(list(loader)) == 4 // accelerator.num_processes
    return torch.rand(()).item()


def test_a_pass_leaves_torchs_random_state_as_in_one_process(two_processes: Any) -> None:
    assert two_processes(drawn_after_a_pass) == [drawn_after_a_pass()] * 2


def shuffled_by(generator: torch.Generator | None, sampler: Any = None) -> list[list[int]]:
    """The batches of two passes; the processes have other seeds."""
    accelerator = on_cpu(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=False))
    torch.manual_seed(accelerator.process_index)
    options = {"shuffle": True} if sampler is None else {"sampler": sampler}
    loader = accelerator.prepare(ids(12, 2, generator=generator, **options))
    return [batch.tolist() for _ in range(2) for batch in loader]


def dealt_to_two(batches: list[list[int]]) -> list[list[list[int]]]:
    return [batches[::2], batches[1::2]]


def test_a_generator_of_the_users_gives_the_order_of_one_process(two_processes: Any) -> None:
    plain = ids(12, 2, shuffle=True, generator=torch.Generator().manual_seed(3))
    batches = [batch.tolist() for _ in range(2) for batch in plain]
    assert shuffled_by(torch.Generator().manual_seed(3)) == batches
    assert two_processes(shuffled_by, torch.Generator().manual_seed(3)) == dealt_to_two(batches)


@pytest.mark.parametrize("kind", ["random", "weighted", "subset"])
def test_a_sampler_without_a_generator_gets_one_by_a_draw(two_processes: Any, kind: str) -> None:
    """Accelerate's rule: the seed is what process 0 draws from torch's random state in prepare."""
    sampler: Any = {
        "random": RandomSampler(range(12)),
        "weighted": WeightedRandomSampler([1.0] * 12, 12),
        "subset": SubsetRandomSampler(range(12)),
    }[kind]
    found = two_processes(shuffled_by, None, sampler)
    assert sampler.generator is None, "the user's loader is not changed"
    torch.manual_seed(0)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    sampler.generator = torch.Generator().manual_seed(seed)
    order = [index for _ in range(2) for index in sampler]
    assert found == dealt_to_two([order[start : start + 2] for start in range(0, 24, 2)])


def dealt_by_the_main_process(generator: torch.Generator | None) -> tuple[list[list[int]], float]:
    options = DataLoaderConfiguration(dispatch_batches=True, use_seedable_sampler=False)
    accelerator = on_cpu(dataloader_config=options)
    loader = accelerator.prepare(ids(12, 2, shuffle=True, generator=generator))
    return [batch.tolist() for batch in loader], torch.rand(()).item()


def test_where_the_main_process_reads_for_all_its_random_state_counts(two_processes: Any) -> None:
    """Each process draws the seed of workers, as torch does; the main one alone the order."""
    torch.manual_seed(0)
    batches = [batch.tolist() for batch in ids(12, 2, shuffle=True)]
    expected = [torch.rand(()).item()]
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()
    expected.append(torch.rand(()).item())
    assert two_processes(dealt_by_the_main_process, None) == list(zip(dealt_to_two(batches), expected, strict=True))
    sampler = RandomSampler(range(12), generator=torch.Generator().manual_seed(3))
    batches = [batch.tolist() for batch in ids(12, 2, sampler=sampler)]
    found = two_processes(dealt_by_the_main_process, torch.Generator().manual_seed(3))
    assert found == list(zip(dealt_to_two(batches), expected[1:] * 2, strict=True))


def own_batches(drop_last: bool) -> tuple[int | None, list[int], list[int]]:
    accelerator = on_cpu()
    batches = BatchSampler(SequentialSampler(range(22)), 4, drop_last)
    loader = accelerator.prepare(DataLoader(list(range(22)), batch_sampler=batches))  # type: ignore[arg-type]
    remainders, seen = [], []
    for batch in loader:
        remainders.append(accelerator.gradient_state.remainder)
        seen += accelerator.gather_for_metrics(batch).tolist()
    return loader.total_batch_size, remainders, seen


def test_the_size_of_an_own_batch_sampler_counts(two_processes: Any) -> None:
    assert own_batches(drop_last=False) == (4, [2] * 6, list(range(22)))
    assert two_processes(own_batches, False) == [(8, [6] * 3, list(range(22)))] * 2
    assert own_batches(drop_last=True) == (4, [-1] * 5, list(range(20)))
    assert two_processes(own_batches, True) == [(8, [-1] * 2, list(range(16)))] * 2


class Pairs:
    """A batch sampler without a size."""

    def __iter__(self) -> Any:
        return iter([[0, 1], [2, 3]])

    def __len__(self) -> int:
        return 2


def refused_to_split() -> str:
    accelerator = on_cpu(dataloader_config=DataLoaderConfiguration(split_batches=True))
    with pytest.raises(ConfigError) as raised:
        accelerator.prepare(DataLoader(list(range(4)), batch_sampler=Pairs()))  # type: ignore[arg-type]
    return str(raised.value)


def test_batches_without_a_size_can_not_be_split(two_processes: Any) -> None:
    for text in two_processes(refused_to_split):
        assert "split_batches=True with a Pairs that has no batch_size" in text


# Schedules


def rates(steps: int, options: dict[str, Any], split: bool = False, accumulate: int = 1) -> list[float]:
    """The learning rates of LambdaLR 1 - k/10 after each micro-batch."""
    configuration = DataLoaderConfiguration(split_batches=split)
    accelerator = on_cpu(gradient_accumulation_steps=accumulate, dataloader_config=configuration, **options)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    optimizer, scheduler = accelerator.prepare(optimizer, schedule)
    seen = []
    for _ in range(steps):
        with accelerator.accumulate():
            accelerator.backward((parameter * 0).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen.append(round(scheduler.get_last_lr()[0], 6))
    return seen


def all_rates() -> list[list[float]]:
    return [
        rates(3, {}),
        rates(3, {}, split=True),
        rates(3, {"step_scheduler_with_optimizer": False}),
        rates(4, {}, accumulate=2),
        rates(3, {"scale_scheduler_by_processes": False}),
    ]


def test_f21_a_schedule_advances_by_the_number_of_processes(two_processes: Any) -> None:
    expected = [[0.8, 0.6, 0.4], [0.9, 0.8, 0.7], [0.9, 0.8, 0.7], [1.0, 0.8, 0.8, 0.6], [0.9, 0.8, 0.7]]
    assert two_processes(all_rates) == [expected] * 2


def planned_in_steps() -> float:
    accelerator = on_cpu(scale_scheduler_by_processes=False)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10)
    optimizer, scheduler = accelerator.prepare(optimizer, schedule)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    rate: float = scheduler.get_last_lr()[0]
    return rate


def test_b11_a_schedule_that_is_planned_in_steps_is_right_on_any_number_of_processes(two_processes: Any) -> None:
    assert [planned_in_steps(), *two_processes(planned_in_steps)] == [pytest.approx(0.5)] * 3


def beyond_its_end() -> tuple[int, list[int]]:
    """OneCycleLR of 6 steps over uneven data: 4 optimizer steps."""
    accelerator = on_cpu()
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=6)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, ids(7, 1), schedule)
    reached = []
    for batch in loader:
        accelerator.backward(model(batch.float()).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        reached.append(schedule.last_epoch)
    return len(reached), reached


def test_b89_f22_a_schedule_with_a_hard_end_never_raises(two_processes: Any) -> None:
    assert two_processes(beyond_its_end) == [(4, [2, 4, 6, 6])] * 2


def skipped_step() -> list[float]:
    accelerator = on_cpu()
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer, scheduler = accelerator.prepare(
        optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    )
    seen = []
    for outcome in (StepOutcome.APPLIED, StepOutcome.SKIPPED, StepOutcome.APPLIED, StepOutcome.APPLIED):
        with contextlib.suppress(RuntimeError):
            optimizer.step()
        optimizer.outcome = outcome
        scheduler.step()
        seen.append(round(scheduler.get_last_lr()[0], 6))
    return seen


def test_f23_a_dropped_step_does_not_move_the_schedule(two_processes: Any) -> None:
    assert two_processes(skipped_step) == [[0.8, 0.8, 0.6, 0.4]] * 2


# Metrics


def gathered(count: int, batch_size: int, skip: int, options: dict[str, Any]) -> list[list[int]]:
    """What each batch of a prepared loader gives as metrics."""
    settings = {key: options.pop(key) for key in ("split_batches", "dispatch_batches") if key in options}
    accelerator = on_cpu(dataloader_config=DataLoaderConfiguration(**settings))
    if options.pop("stream", False):
        loader = DataLoader(Stream(count), batch_size=batch_size, **options)
    else:
        loader = ids(count, batch_size, **options)
    loader = accelerator.prepare(loader)
    if skip:
        loader = accelerator.skip_first_batches(loader, skip)
    return [accelerator.gather_for_metrics(batch).tolist() for batch in loader]


GATHERED: list[tuple[int, int, int, dict[str, Any], list[list[int]]]] = [
    (10, 2, 0, {}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),  # F11
    (9, 2, 0, {}, [[0, 1, 2, 3], [4, 5, 6, 7], [8]]),  # B40
    (7, 2, 0, {}, [[0, 1, 2, 3], [4, 5, 6]]),
    (8, 2, 0, {}, [[0, 1, 2, 3], [4, 5, 6, 7]]),  # B40
    (9, 2, 0, {"drop_last": True}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    (5, 1, 0, {}, [[0, 1], [2, 3], [4]]),  # B41
    (9, 4, 0, {"split_batches": True}, [[0, 1, 2, 3], [4, 5, 6, 7], [8]]),
    (11, 2, 1, {}, [[4, 5, 6, 7], [8, 9, 10]]),  # F15, right here
    (9, 2, 0, {"stream": True, "dispatch_batches": False}, [[0, 1, 2, 3], [4, 5, 6, 7], [8]]),  # F14, right here
    (9, 2, 0, {"stream": True}, [[0, 1, 2, 3], [4, 5, 6, 7], [8]]),
]


def all_gathered() -> list[Any]:
    return [gathered(count, size, skip, dict(options)) for count, size, skip, options, _ in GATHERED]


def test_b40_b41_f11_to_f15_each_sample_is_there_once(two_processes: Any) -> None:
    expected = [case[-1] for case in GATHERED]
    for answer in two_processes(all_gathered):
        assert answer == expected


def gathered_values() -> Any:
    """Seven samples in batches of two: in the last round process 1 has one real sample and one that was added."""
    accelerator = on_cpu()
    kept: list[Any] = []
    for batch in accelerator.prepare(ids(7, 2)):
        nested = {"ids": batch, "pair": (batch * 10, batch.float().sum())}
        found = accelerator.gather_for_metrics(nested)
        texts = accelerator.gather_for_metrics([str(number) for number in batch.tolist()])
        objects = accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)
        kept = [found["ids"].tolist(), found["pair"][0].tolist(), found["pair"][1].tolist(), texts, objects]
    after = accelerator.gather_for_metrics(torch.tensor([accelerator.process_index])).tolist()
    return kept, after


def test_f12_f13_objects_and_values_without_a_dimension(two_processes: Any) -> None:
    kept = [[4, 5, 6], [40, 50, 60], [9.0, 6.0], ["4", "5", "6"], [4, 5, 6]]
    assert two_processes(gathered_values) == [(kept, [0, 1])] * 2


def nested_loops() -> list[int]:
    """An evaluation inside a training loop trims by its own loader."""
    accelerator = on_cpu()
    outer, inner = accelerator.prepare(ids(8, 2), ids(5, 2))
    counts = []
    for _ in outer:
        seen = [value for batch in inner for value in accelerator.gather_for_metrics(batch).tolist()]
        counts.append(len(seen))
    return counts


def test_an_evaluation_inside_training_counts_each_sample_once(two_processes: Any) -> None:
    assert two_processes(nested_loops) == [[5, 5]] * 2


class Shared(Stream):
    """Numbers, of which each worker gives every so-many-th."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        return iter(range(info.id, self.count, info.num_workers))


def gathered_from_workers() -> list[int]:
    """What two workers on each of two processes read, of whose shards each ends with a short round of its own."""
    accelerator = on_cpu(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    loader = accelerator.prepare(DataLoader(Shared(14), batch_size=2, num_workers=2))
    return [number for batch in loader for number in accelerator.gather_for_metrics(batch).tolist()]


def test_streams_of_several_workers_are_trimmed_in_the_middle_of_a_pass(two_processes: Any) -> None:
    first, second = two_processes(gathered_from_workers)
    assert first == second
    assert sorted(first) == list(range(14))


def unplaced() -> tuple[list[list[int]], str]:
    """A stream whose batches stay where they are; and one that is to be dispatched all the same."""
    accelerator = on_cpu()
    loader = accelerator.prepare_data_loader(DataLoader(Stream(8), batch_size=2), device_placement=False)
    assert loader.device is None and not isinstance(loader.dealer, DispatchedLoader)
    dispatching = on_cpu(dataloader_config=DataLoaderConfiguration(dispatch_batches=True), device_placement=False)
    try:
        dispatching.prepare(DataLoader(Stream(8), batch_size=2))
    except ConfigError as error:
        return [batch.tolist() for batch in loader], str(error)
    return [], "no error"


def test_what_is_not_placed_is_not_dispatched(two_processes: Any) -> None:
    (first, text), (second, other_text) = two_processes(unplaced)
    assert [first, second] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert text == other_text
    assert "dispatch_batches=True for a loader whose batches stay where they are" in text


def refused_as_empty() -> list[str]:
    texts = []
    for options in ({}, {"shuffle": True}):
        for count, drops in ((0, False), (3, True)):
            if count or not options:  # torch itself refuses to shuffle nothing
                try:
                    on_cpu().prepare(ids(count, 4, drop_last=drops, **options))
                except DataError as error:
                    texts.append(str(error))
    return texts


def test_a_loader_without_a_batch_is_refused_on_all(two_processes: Any) -> None:
    for texts in (*two_processes(refused_as_empty), refused_as_empty()):
        assert len(texts) == 3
        assert all("prepare got a DataLoader that has no batch: its length is 0" in text for text in texts)


def test_a_pass_that_is_over_already_may_be_prepared() -> None:
    assert list(on_cpu().prepare(skip_first_batches(ids(4, 2), 2))) == []
