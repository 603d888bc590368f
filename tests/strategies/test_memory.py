"""What strategies say they hold, with numbers worked out by hand, and what optimizers hold, beside real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from loopwright.distributed.errors import ConfigError
from loopwright.distributed.meshes import MeshSizes
from loopwright.strategies.ddp import DDPStrategy
from loopwright.strategies.deepspeed import DeepSpeedStrategy
from loopwright.strategies.fsdp import FSDPStrategy
from loopwright.strategies.memory import (
    BACKWARD,
    BYTES,
    ENTER,
    GRADIENT,
    LEAVE,
    Event,
    OptimizerMemory,
    Subject,
    Surroundings,
    TracedStep,
    most_held,
    part_of,
)
from loopwright.strategies.memory_buckets import BucketReplay, Rows, part_reduction
from loopwright.strategies.memory_candidates import candidates
from loopwright.strategies.memory_optimizer import optimizer_memory
from loopwright.strategies.memory_replay import Replay, UnitSizes
from loopwright.strategies.registry import create_strategy
from loopwright.strategies.single import SingleDeviceStrategy

CPU = torch.device("cpu")


def traced(*events: tuple[str, int]) -> TracedStep:
    return TracedStep([Event(what, value) for what, value in events])


# Forward takes 100 and keeps 60, the gradient of parameter 0 comes while 90 are held, then that of parameter 1.
STEP = traced((BYTES, 100), (BYTES, -40), (BYTES, 30), (GRADIENT, 0), (BYTES, -60), (GRADIENT, 1), (BYTES, -30))


class Pair(nn.Module):
    """Two weights of 4 and of 8 elements, 16 and 32 bytes, and a buffer of 8 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 4, bias=False)
        self.register_buffer("scale", torch.ones(2))


def subject(trace: TracedStep | None = STEP, window_size: int = 1, state: int = 7, temporary: int = 3) -> Subject:
    return Subject(
        model=Pair(),
        window_size=window_size,
        batch_bytes=1000,
        device=CPU,
        trace=lambda options: trace,
        step=lambda shape_of: OptimizerMemory(state, temporary),
    )


class TestWhole:
    def test_gradients_come_one_after_another(self) -> None:
        # 90 of the step with the 16 of the first gradient are more than 100 before it.
        assert most_held(STEP.events, [16, 32]) == 106
        assert (most_held(STEP.events), STEP.highest, STEP.left) == (100, 100, 0)

    @pytest.mark.parametrize(
        ("options", "num_processes", "window", "passes"),
        [
            ({}, 1, 1, 106),
            ({}, 2, 1, 48 + 106),  # the buckets
            ({}, 2, 3, 48 + 48 + 100),  # gradients that are there before the pass
            ({"gradient_as_bucket_view": True}, 2, 1, 48 + 100),
            ({"gradient_as_bucket_view": True}, 2, 2, 48 + 48 + 100),
        ],
    )
    def test_peak_of_ddp(self, options: dict[str, Any], num_processes: int, window: int, passes: int) -> None:
        memory = DDPStrategy(**options).memory(Surroundings(num_processes))
        assert memory is not None
        found = memory.footprint(subject(window_size=window))
        assert (found.weights, found.gradients, found.optimizer, found.activations) == (48 + 8, 48, 7, 100)
        assert found.peak == 56 + 7 + 1000 + passes

    def test_the_step_is_the_peak_where_it_takes_more(self) -> None:
        memory = SingleDeviceStrategy().memory(Surroundings(1))
        assert memory is not None
        assert memory.footprint(subject(temporary=500)).peak == 56 + 7 + 1000 + 48 + 500

    def test_nothing_is_made_up_where_the_step_is_not_known(self) -> None:
        memory = SingleDeviceStrategy().memory(Surroundings(1))
        assert memory is not None
        found = memory.footprint(subject(trace=None))
        assert (found.peak, found.activations, found.known) == (None, None, 56 + 48 + 7)

    def test_single_is_for_one(self) -> None:
        assert SingleDeviceStrategy().memory(Surroundings(2)) is None


# Two units inside of the outermost (index 2), of 100 bytes each; their gradients are the parameters 0 and 1.
UNITS = [
    UnitSizes(part=50, whole=100, accumulated=100, reduced=100, gradient_part=50, trained={index: 100})
    for index in range(2)
]
OUTERMOST = UnitSizes(part=5, whole=10, accumulated=10, reduced=10, gradient_part=5, trained={2: 10})
PASSES = traced(
    (ENTER, 2), (ENTER, 1), (BYTES, 7), (LEAVE, 1), (ENTER, 0), (BYTES, 7), (LEAVE, 0), (LEAVE, 2),
    (BACKWARD, 2), (BACKWARD, 0), (GRADIENT, 0), (BYTES, -7), (BACKWARD, 1), (GRADIENT, 1), (BYTES, -7), (GRADIENT, 2),
)  # fmt: skip


def replayed(syncs: bool = True, accumulated: bool = False, parts: int = 2, **options: Any) -> int:
    return Replay([*UNITS, OUTERMOST], parts, {}, **options).run(PASSES, syncs=syncs, accumulated=accumulated)


class TestReplay:
    def test_units_are_freed_behind_their_forward(self) -> None:
        # At the second unit's backward: outermost 10, activations 7, its weights 100 and gradients 100, the first
        # unit's part of gradients 50 and the buffer of its reduction 100.
        assert replayed() == 10 + 7 + 100 + 100 + 50 + 100

    def test_units_that_stay_whole(self) -> None:
        # At the end of forward: all weights 210, the buffer of the first unit until that of the second is copied out.
        # In backward: 10 + 14 + 200 and the gradients of one unit 100 are less.
        assert replayed(reshards=False) == 210 + 7 + 100 + 100
        # Where nothing is gathered there are no such buffers: the backward of the second unit takes the most.
        assert replayed(reshards=False, parts=1) == 10 + 7 + 100 + 100 + 50 + 100

    def test_gloo_reduces_in_a_copy(self) -> None:
        # At the reduction of the first: outermost 10, activations 14, the other unit on its way 100, the part 50.
        assert replayed(copies=True) == 10 + 14 + 100 + 50 + 2 * 100

    def test_gradients_that_wait_are_whole(self) -> None:
        # At the first unit's backward: 10, activations 14, its weights 100 and gradients 100, the other on its way 100.
        assert replayed(syncs=False) == 10 + 14 + 100 + 100 + 100
        # With those of earlier micro-batches, 210 from the beginning: in the forward of the second unit 10, 7, its
        # weights 100, two buffers of 100.
        assert replayed(syncs=False, accumulated=True) == 210 + 10 + 7 + 100 + 200

    def test_frozen_units_are_freed(self) -> None:
        frozen = [UnitSizes(part=50, whole=100), UNITS[1], OUTERMOST]
        events = [event for event in PASSES.events if event != Event(GRADIENT, 0)]
        # As with a trained unit, without its 50 and 100.
        found = Replay(frozen, 2, {}).run(TracedStep(events), syncs=True, accumulated=False)
        assert found == 10 + 7 + 100 + 200  # in the forward of the second unit, with two buffers


class TestSharded:
    def footprint(self, num_processes: int = 2, compute_format: torch.dtype | None = None, **options: Any) -> Any:
        memory = FSDPStrategy(**options).memory(Surroundings(num_processes, compute_format))
        assert memory is not None
        return memory.footprint(subject())

    def test_parts(self) -> None:
        found = self.footprint(2)
        assert (found.weights, found.gradients) == (8 + 24, 24)
        # 3 parts of 2 rows are of 1 row, and of 4 rows of 2: 8 and 16 bytes.
        assert self.footprint(3).weights == 8 + 8 + 16
        assert self.footprint(4, mesh=(2, 2)).weights == 8 + 24

    def test_ignored_modules_are_whole(self) -> None:
        found = self.footprint(2, ignored_modules=["second"])
        assert (found.weights, found.gradients) == (8 + 32 + 8, 32 + 8)

    def test_offloaded_parts_are_on_the_host(self) -> None:
        found = self.footprint(2, cpu_offload=True)
        assert (found.weights, found.gradients, found.optimizer, found.host) == (8, 0, 0, 24 + 24 + 7)

    def test_trained_weights_are_kept_in_full_precision(self) -> None:
        assert self.footprint(2, torch.bfloat16).weights == 8 + 24

    def test_a_mesh_that_does_not_fit(self) -> None:
        with pytest.raises(ConfigError, match="a mesh of replicate 2 x shard 2 needs 4 processes, and there are 6"):
            self.footprint(6, mesh=(2, 2))

    def test_layers_that_are_cut_are_not_told(self) -> None:
        assert FSDPStrategy(mesh={"tensor": 2}, tensor_plan={"first": "colwise"}).memory(Surroundings(2)) is None
        assert FSDPStrategy(mesh={"sequence": 2}).memory(Surroundings(2)) is None

    def test_shapes(self) -> None:
        assert [part_of(shape, 3) for shape in ((7, 2), (2, 5), (1,), ())] == [(3, 2), (1, 5), (1,), (1,)]


# Parameters of 4, 8 and 4 elements of 1 byte in two parts of 8: the second lies in both.
ROWS = Rows([[(0, 4), (1, 8), (2, 4)]], 2)
GRADIENTS = traced((BYTES, 10), (GRADIENT, 2), (GRADIENT, 1), (BYTES, -10), (GRADIENT, 0))


def bucket(capacity: int, spreads: bool, part: int = 0, window_size: int = 1) -> int:
    return BucketReplay(ROWS, part, 1, capacity, spreads=spreads).highest(GRADIENTS, window_size)


class TestBuckets:
    def test_rows(self) -> None:
        assert (ROWS.parts, [ROWS.touched(part) for part in (0, 1)]) == ([8], [12, 12])
        assert ROWS.owners == {0: range(1), 1: range(2), 2: range(1, 2)}
        # Parts are even: 3 and 5 elements in 2 parts are 4 and 6, and in 3 parts 2 and 2.
        assert Rows([[(0, 3)], [(1, 10)]], 2).parts == [2, 6]

    def test_gradients_go_into_the_buffer_as_they_come(self) -> None:
        # The buffer 16 beside activations 10 and the gradient of 8, or at the end beside its copy 16.
        assert bucket(16, spreads=True) == 16 + 10 + 8

    def test_a_small_buffer_is_reduced_in_between(self) -> None:
        # The buffer 8, activations 10, and of the second gradient 8; the first of 4 lies in one part and needs no copy,
        # what part 1 has of it is put aside: 12.
        assert bucket(8, spreads=True, part=1) == 8 + 10 + 8 + 12
        assert bucket(8, spreads=True, part=0) == 8 + 10 + 8

    def test_a_gradient_that_is_larger_than_the_buffer_stays(self) -> None:
        # The second, of 8, is reduced where it lies, in a copy for two parts, when the third comes: 4 + 8 + 4 + 8.
        assert bucket(4, spreads=True, part=0) == 4 + 8 + 4 + 12

    def test_gradients_wait_for_the_last_micro_batch(self) -> None:
        # Stage 1: the buffer 16, activations 10, two gradients 12; all three without activations are less.
        assert bucket(16, spreads=False) == 16 + 16 + 12 - 6
        # With those of earlier ones: 16 + 16 + 10.
        assert bucket(16, spreads=False, window_size=2) == 16 + 16 + 10

    def test_parts_are_reduced_in_copies(self) -> None:
        sizes = {0: 4, 1: 8, 2: 4}
        assert part_reduction(GRADIENTS, sizes, 16) == 10 + 8
        # The first of 4 is reduced while that of 8 lies there with the activations.
        assert part_reduction(GRADIENTS, sizes, 8) == 10 + 8 + 4


class TestGivenOptions:
    """What is recommended has the user's other options."""

    def test_of_fsdp(self) -> None:
        given = {"wrap": ["Linear"], "param_dtype": "bf16", "prefetch": 2, "ignored_modules": ["first"]}
        own = FSDPStrategy(**given, mesh=(2, 2), activation_checkpointing=True, activation_offload=True)
        found = [spec for spec in specs(own, 4) if spec["name"] == "fsdp"]
        kept = {**given, "ignored_modules": ("first",)}
        for spec in found:
            assert {name: spec[name] for name in given} == kept
            assert ("activation_offload" in spec) == ("activation_checkpointing" in spec)
            again = create_strategy(spec).memory(Surroundings(4))
            assert again is not None
            assert again.spec == spec
        assert found[-1]["mesh"] == {"replicate": 2, "shard": 2}

    def test_of_ddp(self) -> None:
        given = {"bucket_cap_mb": 1, "comm_hook": "bf16", "sync_batchnorm": True}
        assert specs(DDPStrategy(**given), 4)[0] == {"name": "ddp", **given}
        averaging = {"post_local_sgd": 5, "post_local_sgd_period": 2}
        assert specs(DDPStrategy(**averaging), 4)[0] == {"name": "ddp", **averaging}

    def test_of_deepspeed(self) -> None:
        own = DeepSpeedStrategy(zero_stage=3, overlap_comm=True, zero_hpz_partition_size=2, clip_norm=1.0)
        first, _, third = [spec for spec in specs(own, 4) if spec["name"] == "deepspeed"]
        assert first == {"name": "deepspeed", "zero_stage": 1, "overlap_comm": True, "clip_norm": 1.0}
        assert third == {**first, "zero_stage": 3, "zero_hpz_partition_size": 2}

    def test_of_deepspeeds_configuration(self) -> None:
        own = DeepSpeedStrategy(config={"zero_optimization": {"stage": 2, "overlap_comm": True}, "wall_clock": True})
        third = specs(own, 4)[-1]
        assert third["zero_stage"] == 3
        assert third["config"] == {"zero_optimization": {"overlap_comm": True}, "wall_clock": True}
        assert create_strategy(third).zero_stage == 3  # type: ignore[attr-defined]


def specs(own: Any, num_processes: int) -> list[dict[str, Any]]:
    return [dict(each.spec) for each in candidates(own, Surroundings(num_processes))]


class TestCandidates:
    def test_the_simplest_is_first(self) -> None:
        found = specs(SingleDeviceStrategy(), 16)
        assert found[:6] == [
            {"name": "ddp"},
            {"name": "fsdp", "reshard_after_forward": False},
            {"name": "fsdp", "mesh": {"replicate": 2, "shard": 8}},
            {"name": "fsdp"},
            {"name": "fsdp", "activation_checkpointing": True},
            {"name": "fsdp", "activation_checkpointing": True, "cpu_offload": True},
        ]
        assert found[6:] == [{"name": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)]
        assert specs(SingleDeviceStrategy(), 1) == [{"name": "single"}]

    def test_ones_own_is_among_them_once(self) -> None:
        assert len(specs(FSDPStrategy(), 4)) == len(specs(DDPStrategy(), 4)) == 8
        assert specs(DDPStrategy(gradient_as_bucket_view=True), 4)[0]["gradient_as_bucket_view"] is True
        assert specs(FSDPStrategy(cpu_offload=True), 4)[-1] == {"name": "fsdp", "cpu_offload": True}

    def test_others_of_its_kind_have_its_options(self) -> None:
        found = candidates(FSDPStrategy(wrap="Linear", mesh=(2, 2)), Surroundings(4))
        sharded = [each for each in found if each.spec["name"] == "fsdp"]
        assert {each.wrap for each in sharded} == {"Linear"}  # type: ignore[attr-defined]
        assert [each.mesh for each in sharded] == [None] * 4 + [MeshSizes(replicate=2, shard=2)]  # type: ignore[attr-defined]


Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


class TestOptimizers:
    @pytest.mark.parametrize(
        "make",
        [
            lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.AdamW(p), lambda p: torch.optim.Adam(p, amsgrad=True, foreach=True),
            lambda p: torch.optim.Adafactor(p), lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
            lambda p: torch.optim.ASGD(p), lambda p: torch.optim.Adagrad(p),
        ],
    )  # fmt: skip
    def test_state_is_that_of_a_real_step(self, make: Make) -> None:
        weights = [nn.Parameter(torch.ones(64, 32)), nn.Parameter(torch.ones(16))]
        optimizer = make(weights)
        before = len(optimizer.state)
        found = optimizer_memory(optimizer, lambda p: tuple(p.shape), CPU)
        assert len(optimizer.state) == before
        assert all(weight.grad is None for weight in weights)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        real = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        assert found.state == sum(value.untyped_storage().nbytes() for value in real)

    def test_temporary_values(self) -> None:
        weight = nn.Parameter(torch.ones(1000))
        adamw, sgd = torch.optim.AdamW([weight]), torch.optim.SGD([weight], lr=0.1)
        # The root of the second moment and the same divided by a number, both as large as the weight.
        assert optimizer_memory(adamw, lambda p: (1000,), CPU).temporary == pytest.approx(8000, abs=9)
        assert optimizer_memory(sgd, lambda p: (1000,), CPU).temporary == 0

    def test_parts_and_frozen_weights(self) -> None:
        weights = [nn.Parameter(torch.ones(10, 3)), nn.Parameter(torch.ones(10), requires_grad=False)]
        found = optimizer_memory(torch.optim.SGD(weights, lr=0.1, momentum=0.9), lambda p: (5, 3), CPU)
        assert found.state == 5 * 3 * 4

    def test_nobody_notices(self) -> None:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        steps: list[object] = []
        optimizer.register_step_post_hook(lambda *_: steps.append(None))
        schedule = StepLR(optimizer, 1)
        optimizer_memory(optimizer, lambda p: tuple(p.shape), CPU)
        assert (steps, len(optimizer.state), optimizer.param_groups[0]["params"]) == ([], 0, [weight])
        with pytest.warns(UserWarning, match="before `optimizer.step"):  # it has not stepped
            schedule.step()
