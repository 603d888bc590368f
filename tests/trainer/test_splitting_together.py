"""`Trainer(auto_accumulate=True, strategy="fsdp")`: wherever memory runs out in a pass, and on whichever processes, all
do the micro-batch again in parts, with the result of a run in which it had fitted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.callbacks.callback import EndEpoch, SkipBatch, StopRun
from loopwright.distributed.errors import ConfigError, DistributedError, TaskError
from loopwright.distributed.group import rank
from loopwright.distributed.slots import channel
from loopwright.strategies.guard import Guard

from ..distributed import failing
from ..nursery import nursery
from ..ports import free_port
from .tiny import Watch, trainer
from .together import NUM_BLOCKS, Net, Spot, compare, data, fit, run

Run = Callable[..., list[Any]]
Case = tuple[Sequence[Sequence[Any]], dict[str, Any]]
SIZES = [(6, 5, 6, 6), (5, 6, 6, 1)]
FIRST, HEAD = -1, NUM_BLOCKS


def run_cases(cases: Sequence[Case], sizes: Sequence[Sequence[int]], wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """A run in which all fits, which is not looked at, and one of each case; all with these options. Collective."""
    found = [fit([], sizes, **{"auto_accumulate": False} | wanted)]
    return [*found, *(fit(spots, sizes, **wanted | options) for spots, options in cases)]


def check(two_processes: Run, cases: Sequence[Case], sizes: Sequence[Sequence[int]] = SIZES, **options: Any) -> Any:
    """Whether each case gives what the run gives in which all fits. Gives all runs, of process 0 and of the others."""
    plain = [([tuple(spot) for spot in spots], options) for spots, options in cases]  # workers import no class
    first, *others = two_processes(run_cases, plain, sizes, options)
    for found in first[1:]:
        compare(found, first[0])
    return first, others


PLACES = [
    Spot(FIRST, "forward", (0,), 2),
    Spot(0, "forward", (1,)),
    Spot(2, "forward", (0, 1)),
    Spot(HEAD, "forward", (0,)),
    Spot(HEAD, "backward", (1,)),
    Spot(2, "backward", (0,)),
    Spot(0, "backward", (1,)),
    Spot(1, "backward", (0, 1)),
]


def test_wherever_memory_runs_out(two_processes: Run) -> None:
    """In the first pass, of which no process knows the order of units yet, before, in and behind each of them."""
    sizes = [each[:2] for each in SIZES]
    first, (second,) = check(two_processes, [([spot], {}) for spot in PLACES], sizes)
    for spot, *both in zip(PLACES, first[1:], second[1:], strict=True):
        for index, found in enumerate(both):
            assert found["size"] == spot.most
            assert len(found["said"]) == (4 - spot.most if index in spot.ranks else 0)  # 6 or 5, 3, 2
    assert "memory ran out with 6 samples at once. From now on at most 3 go through" in first[1]["said"][0]
    # It goes in as many parts as on the other process, also where it had memory enough: of 5 samples in 2, then in 3.
    assert second[1]["sizes"][:5] == [5, 3, 2, 2, 1]


@pytest.mark.parametrize(("since", "returns"), [(1, "mean"), (2, "pair"), (3, "mean")])
def test_whenever_memory_runs_out(two_processes: Run, since: int, returns: str) -> None:
    """Later in the first window of two batches, of which gradients are kept, and in the first and last batch of the
    second window, with the gradients of an optimizer's first step behind it.
    """
    spots = [Spot(block, phase, (int(since < 3),), 3, since) for block, phase in ((FIRST, "forward"), (1, "backward"))]
    first, _ = check(two_processes, [([spot], {}) for spot in spots], accumulate=2, net={"returns": returns})
    for found in first[1:]:
        assert found["sizes"][: since + 1] == list(SIZES[0][: since + 1])
        assert found["size"] == 3


def test_in_two_places_at_once(two_processes: Run) -> None:
    """Each process leaves its pass by itself, in different places and with different sizes that fit."""
    cases = [
        [Spot(0, "backward", (0,), 3), Spot(1, "forward", (1,), 1)],
        [Spot(FIRST, "forward", (0,), 1), Spot(HEAD, "forward", (1,), 2)],
        [Spot(2, "backward", (0,), 4), Spot(HEAD, "backward", (1,), 1, 1)],
    ]
    first, (second,) = check(two_processes, [(spots, {}) for spots in cases], accumulate=2, clip_norm=0.1)
    assert [found["size"] for found in first[1:]] == [found["size"] for found in second[1:]] == [1, 1, 1]


def test_in_recomputation(two_processes: Run) -> None:
    spots = [Spot(block, "recompute", ranks) for block, ranks in [(0, (1,)), (1, (0, 1)), (2, (0,))]]
    strategy = {"activation_checkpointing": True}
    first, _ = check(two_processes, [([spot], {}) for spot in spots], accumulate=2, strategy=strategy)
    assert [found["size"] for found in first[1:]] == [3] * 3


STRATEGIES: list[dict[str, Any]] = [
    {"reshard_after_forward": False, "prefetch": 1},
    {"cpu_offload": True, "find_unused_parameters": True},
    {"wrap": ["Block", "Linear"], "prefetch": 2},
    {"prefetch": 1, "activation_checkpointing": True},
    {"wrap": "none", "ignored_modules": ["head"]},
]


@pytest.mark.parametrize(
    "strategy", [*STRATEGIES[:3], *(pytest.param(each, marks=pytest.mark.slow) for each in STRATEGIES[3:])]
)
def test_options_of_the_strategy(two_processes: Run, strategy: dict[str, Any]) -> None:
    spots = [Spot(0, "forward", (0,)), Spot(1, "backward", (1,), 3, 1)]
    net = {"frozen": True}
    check(two_processes, [([spot], {}) for spot in spots], accumulate=2, strategy=strategy, net=net)


def test_copies_of_parts(four_processes: Run) -> None:
    """Gradients are summed up over parts, and then over copies."""
    sizes = [*SIZES, (2, 2, 4, 4), (6, 6, 2, 2)]
    spots = [Spot(1, "backward", (2,)), Spot(1, "forward", (0, 3), 3, 1)]
    check(four_processes, [([spot], {}) for spot in spots], sizes, strategy={"mesh": {"replicate": 2}})


def test_processes_without_a_part(three_processes: Run) -> None:
    """One has a single sample, and others none: they leave batches out, or return no loss, before and behind it."""
    sizes = [(6, 6, 6, 6), (1, 1, 1, 1), (6, 2, 6, 2)]
    ways = ["..ls", "....", "se.l"]
    spots = [Spot(1, "forward", (0,)), Spot(1, "backward", (0, 2), 3), Spot(HEAD, "backward", (2,), 1, 2)]
    for accumulate in (1, 2):
        _, others = check(
            three_processes, [([spot], {}) for spot in spots], sizes, accumulate=accumulate, net={"ways": ways}
        )
        assert {*others[0][1]["sizes"]} == {1}


def run_in_halves(precision: str, accumulate: int, most: int | None) -> dict[str, Any]:
    net = Net([] if most is None else [Spot(1, "backward", (1,), most)]).float()
    sizes = (8, 8, 8, 8) if most is not None else (4,) * 8
    loader = data(sizes, sizes)
    loader.dataset.tensors = tuple(each.float() for each in loader.dataset.tensors)  # type: ignore[attr-defined]
    return run(net, loader, precision=precision, accumulate=accumulate, auto_accumulate=most is not None)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(two_processes: Run, precision: str) -> None:
    """As batches of half the size from the beginning; with sums of gradients in another order, in fp32."""
    small, _ = two_processes(run_in_halves, precision, 4, None)
    parts, _ = two_processes(run_in_halves, precision, 2, 4)
    assert parts["size"] == 4
    for name, value in small["weights"].items():
        torch.testing.assert_close(parts["weights"][name], value, rtol=1e-5, atol=1e-6)


def run_counting(auto: bool) -> list[int]:
    """The messages of each micro-batch, in windows of two."""
    sent: list[int] = []
    seen = Watch(batch_start=lambda *_: sent.append(channel().num_sent))
    fit([], [(4,) * 10] * 2, accumulate=2, callbacks=seen, auto_accumulate=auto, trackers=False, log_every=100)
    return [after - before for before, after in pairwise(sent)]


def test_a_batch_that_has_fitted_takes_one_message_more(two_processes: Run) -> None:
    for plain, careful in zip(two_processes(run_counting, False), two_processes(run_counting, True), strict=True):
        more = [each - other for each, other in zip(careful, plain, strict=True)]
        assert more[4:] == [1] * len(more[4:])
        # Once it is guarded, each gathering of a unit (the outermost, and blocks 0, 1, 0, 2, forward and backward but
        # for the outermost, which stays) has a message, each reduction (of each call of a block), and the end.
        assert more[2:4] == [1 + 9 + 1, 1 + 9 + 5 + 1]


class Steered(Net):
    """Tries a smaller model where anything fails, as no task should."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            return super().training_step(batch, batch_idx)
        except Exception:
            if rank() == 1:
                raise
            return None


def run_trying(spots: Sequence[Sequence[Any]], auto: bool) -> dict[str, Any]:
    return run(Steered(spots), data(*SIZES), auto_accumulate=auto)


def test_a_step_that_catches_errors(two_processes: Run) -> None:
    wanted, _ = two_processes(run_trying, [], False)
    compare(two_processes(run_trying, [tuple(Spot(1, "forward", (1,)))], True)[0], wanted)


FLOWS = [
    (SkipBatch, "before_backward"), (EndEpoch, "before_backward"), (StopRun, "batch_start"), (EndEpoch, "batch_end"),
]  # fmt: skip


def run_flows(accumulate: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Process 1 leaves its third batch. Memory runs out there, and before."""
    found = []
    for error, event in FLOWS:

        def act(trainer: Any, *values: Any, error: Any = error) -> None:
            if rank() == 1 and trainer.state.micro_step == 2:
                raise error("why")

        options = {"accumulate": accumulate, "callbacks": Watch(**{event: act})}
        wanted = fit([], SIZES, auto_accumulate=False, **options)
        spot = Spot(2, "backward", (0,)) if event == "before_backward" else PLACES[1]
        found.append((fit([spot], SIZES, **options), wanted))
    return found


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_process_that_leaves_its_batch(two_processes: Run, accumulate: int) -> None:
    for found, wanted in two_processes(run_flows, accumulate)[0]:
        # What is logged in a batch until it is left out stays, as ever: of a part it is less.
        compare(found | {"records": []}, wanted | {"records": []})


class LeavesLate(Net):
    """Leaves a batch out in its second part."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.sizes[-2:] == [6, 3]:
            raise SkipBatch
        return super().training_step(batch, batch_idx)


def run_late() -> str:
    with pytest.raises(TaskError) as caught:
        run(LeavesLate([Spot(1, "forward")]), data((6, 6), (6, 6)))
    return str(caught.value)


def test_a_batch_that_is_left_out_too_late(two_processes: Run) -> None:
    """The gradients of its first part are summed up with those of the other process by then."""
    for text in two_processes(run_late):
        assert "SkipBatch in a part of batch 0 whose first parts have gone backward" in text


def run_sealed(validates: bool) -> dict[str, Any]:
    spots = [Spot(0, "forward", (0,)), Spot(2, "backward", (1,), 2)]
    val = data((7, 3), (1, 7)) if validates else None
    found = run(Net(spots), data(*SIZES), val, accumulate=2, val_every="1 step", sanity_val_batches=1)
    records = [(step, {k: v for k, v in values.items() if k != "val"}) for step, values in found["records"]]
    return found | {"records": [(step, values) for step, values in records if "loss" in values]}


def test_a_validation_changes_nothing(two_processes: Run) -> None:
    """Which does not go in parts either."""
    found, wanted = two_processes(run_sealed, True)[0], two_processes(run_sealed, False)[0]
    assert all(torch.equal(found["weights"][name], value) for name, value in wanted["weights"].items())
    assert found["sizes"] == wanted["sizes"]


def run_legs(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    path = Path(folder) / "saved"
    stops = Watch(step=lambda trainer, *_: trainer.state.step == 2 and trainer.save_state(path))
    spots, options = [Spot(2, "backward", (1,), 3)], {"accumulate": 2}
    whole = run(Net(spots), data(*SIZES), **options, max_epochs=2)
    run(Net(spots), data(*SIZES), **options, max_epochs=None, max_steps=2, callbacks=stops)
    return run(Net(spots), data(*SIZES), **options, max_epochs=2, resume_from=path), whole


def test_a_resumed_run_keeps_the_size(two_processes: Run, tmp_path: Path) -> None:
    for resumed, whole in two_processes(run_legs, str(tmp_path)):
        assert (resumed["size"], resumed["said"]) == (3, [])
        for name, value in whole["weights"].items():
            assert torch.equal(resumed["weights"][name], value), name


def meet_elsewhere() -> None:
    guard = Guard()
    guard.meet(rank())  # it is not on
    guard.begin()
    guard.meet(3)
    with pytest.raises(DistributedError, match=r"units in different orders \(place \[0, 1\] of their collectives\)"):
        guard.meet(rank())
    guard.end()


def test_processes_that_come_to_different_collectives(two_processes: Run) -> None:
    two_processes(meet_elsewhere)


def refusals() -> list[str]:
    texts = []
    strategy = {"wrap": ["Block", "Linear"], "activation_checkpointing": True}
    with pytest.raises(ConfigError) as caught:
        fit([], SIZES, strategy=strategy)
    texts.append(str(caught.value))
    for mesh in ({"tensor": 2}, {"replicate": 2}):
        with pytest.raises(ConfigError, match="auto_accumulate=True can't be used") as caught:
            trainer(auto_accumulate=True, strategy={"name": "fsdp", "mesh": mesh}).fit(Net(), data((2,), (2,)))
        texts.append(str(caught.value))
    return texts


def test_what_can_not_be_served(two_processes: Run) -> None:
    for units, tensor, copies in two_processes(refusals):
        assert "activation_checkpointing of a unit (module.blocks.0) that has another one inside (inner)" in units
        assert "a mesh of tensor 2: processes compute parts of the same batch" in tensor
        assert "a mesh of shard 1 under strategy='fsdp'" in copies


def test_one_process_has_no_others_to_ask() -> None:
    found = fit([Spot(1, "backward")], [(6, 6)])
    compare(found, fit([], [(6, 6)], auto_accumulate=False))
    assert found["size"] == 3


# In processes of their own.

SCRIPT = Path(__file__).parent / "full_training.py"


def ended(folder: Path, kind: str) -> Any:
    """How two processes ended that run the script."""
    place = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = []
    for index in range(2):
        variables = {key: str(value) for key, value in (place | {"RANK": index, "LOCAL_RANK": index}).items()}
        environment = os.environ | variables | {"LOOPWRIGHT_USE_CPU": "1"}
        processes.append(nursery().start(SCRIPT, kind, env=environment, cwd=folder))
    return failing.ended(processes)


def test_one_sample_that_does_not_fit_ends_both(tmp_path: Path) -> None:
    done = ended(tmp_path, "sample")
    assert done.codes == [1, 1]
    assert "does not suffice for one sample" in done.errors[1]
    assert "OutOfMemoryError" in done.errors[1]
    assert "PeerFailedError: process 1 failed first" in done.errors[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the memory of a process is bounded on Linux alone")
def test_memory_that_is_really_full(tmp_path: Path) -> None:
    """On process 1, wherever torch's own allocator fails."""
    done = ended(tmp_path, "full")
    assert done.codes == [0, 0], done.errors
