"""Windows of micro-batches: exact weights, remainders, and batches that are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright.callbacks.callback import Callback
from loopwright.distributed.errors import ConfigError, DataError, TaskError
from loopwright.strategies.outcome import StepOutcome
from loopwright.trainer.task import Task

from .tiny import Pair, Scalar, Watch, Weighed, batches, fit, ones, tracked

APPLIED, SKIPPED = StepOutcome.APPLIED, StepOutcome.SKIPPED


class Steps(Callback):
    """The weight after each optimizer step, and what became of the step."""

    def __init__(self) -> None:
        self.weights: list[float] = []
        self.outcomes: list[StepOutcome] = []

    def on_step(self, trainer: Any, task: Any, outcome: StepOutcome) -> None:
        self.weights.append(task.w.item())
        self.outcomes.append(outcome)


def steps(task: Task, data: Any, **options: Any) -> list[float]:
    seen = Steps()
    fit(task, data, callbacks=seen, **options)
    return seen.weights


@pytest.mark.parametrize(
    ("accumulate", "expected"), [(1, [-1, -2, -3, -4, -5]), (2, [-1, -2, -3]), (5, [-1]), (8, [-1])]
)
@pytest.mark.filterwarnings("ignore:accumulate=8 but an epoch has 5 batches")
def test_each_step_is_the_mean_of_its_window(accumulate: int, expected: list[float]) -> None:
    assert steps(Scalar(), ones(5), accumulate=accumulate) == expected


def test_unequal_gradients() -> None:
    # (1 + 2) / 2 = 1.5; (3 + 6) / 2 = 4.5; 10 alone.
    assert steps(Scalar(), batches(1, 2, 3, 6, 10), accumulate=2) == [-1.5, -6, -16]


def test_the_same_as_a_bare_loop() -> None:
    class Net(Task):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    data = [(torch.randn(3, 4), torch.randint(3, (3,))) for _ in range(7)]
    task, bare = Net(), Net()
    bare.load_state_dict(task.state_dict())
    fit(task, data, accumulate=3, clip_norm=0.5, max_epochs=2)

    optimizer = bare.configure_optimizers()
    for _ in range(2):
        for start in (0, 3, 6):
            window = data[start : start + 3]
            for batch in window:
                (bare.training_step(batch, 0) / len(window)).backward()
            nn.utils.clip_grad_norm_(bare.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(task.parameters(), bare.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:accumulate=4 but an epoch has")
class TestRemainder:
    def test_flush_steps_on_what_there_is(self) -> None:
        # 2 epochs of 1, 2, 3, 6, 10, windows of 2: (1+2)/2, (3+6)/2, 10, and again.
        weights = steps(Scalar(), batches(1, 2, 3, 6, 10), accumulate=2, max_epochs=2)
        assert weights == [-1.5, -6, -16, -17.5, -22, -32]

    def test_carry_goes_on_in_the_next_epoch(self) -> None:
        # (1+2)/2, (3+6)/2, (10+1)/2, (2+3)/2, (6+10)/2.
        weights = steps(Scalar(), batches(1, 2, 3, 6, 10), accumulate=2, max_epochs=2, accumulate_across_epochs="carry")
        assert weights == [-1.5, -6, -11.5, -14, -22]

    def test_carry_flushes_at_the_end_of_the_run_over_its_real_size(self) -> None:
        # 3 epochs of 3 batches, windows of 4: 1 2 3 1, 2 3 1 2, and 3 alone.
        weights = steps(Scalar(), batches(1, 2, 3), accumulate=4, max_epochs=3, accumulate_across_epochs="carry")
        assert weights == [-7 / 4, -15 / 4, -15 / 4 - 3]

    def test_a_carried_window_that_the_run_ends_is_a_mean_over_its_real_size(self) -> None:
        # 2 epochs of 3 batches, windows of 8: all six in one, (1+2+3+1+2+3)/6 = 2.
        weights = steps(Scalar(), batches(1, 2, 3), accumulate=8, max_epochs=2, accumulate_across_epochs="carry")
        assert weights == [pytest.approx(-2, abs=1e-6)]

    def test_carry_over_several_epochs(self) -> None:
        # 8 epochs of 1 batch, windows of 3: 3, 3, and 2 flushed.
        weights = steps(Scalar(), ones(1), accumulate=3, max_epochs=8, accumulate_across_epochs="carry")
        assert weights == [pytest.approx(-1), pytest.approx(-2), pytest.approx(-3)]

    def test_drop_leaves_the_rest_out(self) -> None:
        seen: list[float] = []
        task = Scalar()
        watch = Watch(batch_start=lambda trainer, task, batch, index: seen.append(batch.item()))
        found = fit(
            task, batches(1, 2, 3, 6, 10), accumulate=2, max_epochs=2, accumulate_across_epochs="drop", callbacks=watch
        )
        assert task.value == 2 * -(1.5 + 4.5)
        assert seen == [1, 2, 3, 6] * 2
        assert (found.state.step, found.state.micro_step, found.state.epoch) == (4, 8, 2)

    def test_drop_of_everything_is_an_error(self) -> None:
        with pytest.raises(DataError, match=r"3 batches, fewer than accumulate=4.*'flush' or 'carry'"):
            fit(Scalar(), ones(3), accumulate=4, accumulate_across_epochs="drop")

    @pytest.mark.parametrize("remainder", ["flush", "carry", "drop"])
    def test_nothing_to_decide_where_windows_fit(self, remainder: str) -> None:
        weights = steps(Scalar(), ones(4), accumulate=2, max_epochs=2, accumulate_across_epochs=remainder)
        assert weights == [-1, -2, -3, -4]

    def test_carry_with_exact_weights(self) -> None:
        # Windows of 2 over epochs of 3: counts 1 and 3, then 2 and 1 of the next epoch, then 3 and 2.
        data = [tokens(4), tokens(1, 1, 1), tokens(5, 5)]
        weights = steps(Weighed(), data, accumulate=2, max_epochs=2, accumulate_across_epochs="carry")
        assert weights == pytest.approx([-7 / 4, -7 / 4 - 14 / 3, -7 / 4 - 14 / 3 - 13 / 5])

    def test_an_unknown_word(self) -> None:
        with pytest.raises(ConfigError, match=r"accumulate_across_epochs='cary'.*Did you mean 'carry'"):
            fit(Scalar(), ones(3), accumulate_across_epochs="cary")

    def test_a_window_that_never_fills_is_warned_of(self) -> None:
        with pytest.warns(UserWarning, match=r"accumulate=4 but an epoch has 2 batches.*'carry'"):
            fit(Scalar(), ones(2), accumulate=4)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", None])
def test_a_wrong_number_of_batches(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"accumulate=.*Expected an integer >= 1. Leave it out"):
        fit(Scalar(), ones(1), accumulate=value)


def tokens(*losses: float, out: int = 0) -> tuple[Tensor, Tensor]:
    """One batch of token losses, and `out` more that don't count."""
    return torch.tensor([*losses, *[9.0] * out]), torch.tensor([1.0] * len(losses) + [0.0] * out)


COUNTS: dict[str, Callable[[Tensor], Any]] = {
    "int": lambda mask: int(mask.sum()),
    "float": lambda mask: float(mask.sum()),
    "float tensor": lambda mask: mask.sum(),
    "integer tensor": lambda mask: mask.sum().long(),
}


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS.keys())
class TestExactWeights:
    def test_the_window_is_one_big_batch(self, count: Any) -> None:
        # Sums 4 and 3 over counts 1 and 3.
        assert steps(Weighed(count), [tokens(4), tokens(1, 1, 1)], accumulate=2) == [pytest.approx(-1.75)]
        assert steps(Weighed(count), [tokens(4, 1, 1, 1)]) == [pytest.approx(-1.75)]

    def test_the_order_does_not_matter(self, count: Any) -> None:
        assert steps(Weighed(count), [tokens(1, 1, 1), tokens(4)], accumulate=2) == [pytest.approx(-1.75)]

    def test_a_short_last_window(self, count: Any) -> None:
        data = [tokens(4), tokens(1, 1, 1), tokens(2, 4)]
        assert steps(Weighed(count), data, accumulate=2) == pytest.approx([-1.75, -1.75 - 3])

    def test_a_batch_without_a_token(self, count: Any) -> None:
        for data in ([tokens(4), tokens(out=2)], [tokens(out=2), tokens(4)]):
            assert steps(Weighed(count), data, accumulate=2) == [pytest.approx(-4)]

    def test_a_window_without_a_token(self, count: Any) -> None:
        weights = steps(Weighed(count), [tokens(out=2), tokens(out=1), tokens(4)], accumulate=2)
        assert weights == [0, pytest.approx(-4)]

    def test_tokens_are_counted(self, count: Any) -> None:
        found = fit(Weighed(count), [tokens(4), tokens(1, 1, 1, out=2), tokens(2)], accumulate=2, max_epochs=2)
        assert found.state.tokens == 10

    def test_the_log_uses_the_same_numbers(self, count: Any) -> None:
        records = tracked(Weighed(count), [tokens(4), tokens(1, 1, 1)], accumulate=2, log_every=1)
        assert records == [(1, {"loss": pytest.approx(1.75), "epoch": 1})]

    def test_clipping_sees_the_exact_gradient(self, count: Any) -> None:
        assert steps(Weighed(count), [tokens(4), tokens(1, 1, 1)], accumulate=2, clip_norm=1.0) == [pytest.approx(-1)]


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS.keys())
def test_exact_weights_in_fp16(count: Any) -> None:
    data = [tokens(4), tokens(1, 1, 1), tokens(2, 4)]
    assert steps(Weighed(count), data, accumulate=2, precision="fp16") == pytest.approx([-1.75, -4.75])


def test_exact_weights_equal_a_bare_loop() -> None:
    class Net(Task):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 5)

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
            x, y = batch
            return F.cross_entropy(self.net(x), y, reduction="sum"), (y >= 0).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    sizes = [3, 1, 6, 2, 5]
    data = [(torch.randn(n, 4), torch.randint(5, (n,))) for n in sizes]
    data[2][1][:4] = -100  # ignored by the loss
    task, bare = Net(), Net()
    bare.load_state_dict(task.state_dict())
    fit(task, data, accumulate=2)

    optimizer = bare.configure_optimizers()
    for start in (0, 2, 4):
        x = torch.cat([x for x, _ in data[start : start + 2]])
        y = torch.cat([y for _, y in data[start : start + 2]])
        F.cross_entropy(bare.net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(task.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_exact_weights_of_sparse_gradients(precision: str) -> None:
    class Sparse(Task):
        def __init__(self, is_sparse: bool) -> None:
            super().__init__()
            self.table, self.line = nn.Embedding(4, 2, sparse=is_sparse), nn.Linear(2, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.line(self.table(batch)).float().sum(), batch.numel()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    dense, sparse = Sparse(False), Sparse(True)
    sparse.load_state_dict(dense.state_dict())
    for task in (dense, sparse):
        fit(task, [torch.tensor([0, 1]), torch.tensor([1, 2, 3])], accumulate=2, precision=precision)
    torch.testing.assert_close(sparse.table.weight, dense.table.weight)


class Some(Scalar):
    """Leaves out the batches that are 0."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch.item() == 0 else super().training_step(batch, batch_idx)


class TestLeftOut:
    def test_the_mean_is_over_the_batches_that_count(self) -> None:
        # (1 + 3) / 2 in windows of 3, one of which is left out; then 5 alone.
        assert steps(Some(), batches(1, 0, 3, 0, 0, 5), accumulate=3) == pytest.approx([-2, -7])

    def test_a_window_without_a_loss_is_skipped(self) -> None:
        seen = Steps()
        found = fit(Some(), batches(0, 0, 2, 4), accumulate=2, callbacks=seen)
        assert seen.outcomes == [SKIPPED, APPLIED]
        assert seen.weights == [0, -3]
        assert (found.state.step, found.state.skipped_steps, found.state.micro_step) == (1, 1, 4)

    def test_weight_decay_does_not_act_in_a_skipped_step(self) -> None:
        class Decayed(Some):
            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=1.0, weight_decay=0.5, momentum=0.9)

        task = Decayed()
        fit(task, batches(1, 0, 0, 0))
        assert task.value == -1  # a step with a gradient of zero would have moved it

    def test_a_mapping_without_gradient_bookkeeping(self) -> None:
        class Mapped(Scalar):
            def training_step(self, batch: Tensor, batch_idx: int) -> Any:
                return {"loss": super().training_step(batch, batch_idx), "more": [1, 2]}

        assert steps(Mapped(), batches(1, 3), accumulate=2) == [-2]

    def test_a_mapping_may_hold_none_or_a_pair(self) -> None:
        class Mapped(Weighed):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return {"loss": None if batch is None else super().training_step(batch, batch_idx)}

        data = [tokens(4), None, tokens(1, 1, 1)]
        assert steps(Mapped(), data, accumulate=3) == [pytest.approx(-1.75)]

    def test_in_fp16(self) -> None:
        assert steps(Some(), batches(1, 0, 3, 0, 0, 5), accumulate=3, precision="fp16") == pytest.approx([-2, -7])


def test_kinds_of_losses_do_not_mix_in_a_window() -> None:
    class Mixed(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss if batch_idx % 2 else (loss, 1)

    assert steps(Mixed(), ones(2)) == [-1, -2]
    with pytest.raises(TaskError, match=r"a mean loss for one batch and \(loss_sum, count\) for another"):
        fit(Mixed(), ones(2), accumulate=2)


class TestClipping:
    def test_norm_once_per_window_after_the_mean(self) -> None:
        # The mean of 6 and 2 is 4, cut to 1; clipping each would give the same, clipping the sum would not be seen.
        assert steps(Scalar(), batches(6, -2), accumulate=2, clip_norm=1) == [pytest.approx(-1)]
        assert steps(Scalar(), batches(6, -6), accumulate=2, clip_norm=1) == [0]

    def test_a_norm_below_the_limit_stays(self) -> None:
        assert steps(Scalar(), batches(0.5, 0.25), clip_norm=1) == [-0.5, -0.75]

    def test_value(self) -> None:
        assert steps(Scalar(), batches(6, -2, 0.25), clip_value=0.5) == [-0.5, 0, -0.25]

    def test_value_before_norm(self) -> None:
        task = Pair()
        # (30, 4) -> (3, 4) by value, whose norm is 5 -> (0.6, 0.8).
        fit(task, [torch.tensor([30.0, 4.0])], clip_value=4.0, clip_norm=1.0)
        by_hand = torch.tensor([4.0, 4.0]) / 32**0.5
        torch.testing.assert_close(task.w.detach(), -by_hand)

    def test_what_the_callback_sees_is_clipped(self) -> None:
        seen: list[float] = []
        watch = Watch(before_step=lambda trainer, task, optimizer: seen.append(task.w.grad.item()))
        fit(Scalar(), batches(6, -2, 0.25), clip_value=0.5, callbacks=watch)
        assert seen == [0.5, -0.5, 0.25]

    @pytest.mark.parametrize("option", ["clip_norm", "clip_value"])
    @pytest.mark.parametrize("value", [0, -1.0, "1", True])
    def test_a_wrong_limit(self, option: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=rf"{option}={value!r}. Expected a number above 0"):
            fit(Scalar(), ones(1), **{option: value})


class TestCountsOfEveryType:
    """A count is added to others without wrapping or rounding, whatever its type."""

    @pytest.mark.parametrize(
        ("dtype", "count"),
        [
            (torch.int8, 100), (torch.uint8, 200), (torch.bool, 1), (torch.int64, 3),
            (torch.float16, 40000), (torch.bfloat16, 257), (torch.float32, 2**24 + 2), (torch.float64, 0.25),
        ],
    )  # fmt: skip
    def test_four_in_a_window(self, dtype: torch.dtype, count: float) -> None:
        exact = torch.tensor(count, dtype=dtype).item()

        class Counts(Scalar):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.w * batch.sum() * float(exact), torch.tensor(count, dtype=dtype)

        found = fit(task := Counts(), ones(4), accumulate=4)
        assert task.value == pytest.approx(-1, rel=1e-6)
        assert found.state.tokens == int(4 * float(exact))

    @pytest.mark.parametrize(
        "count", [None, "3", 2j, float("nan"), float("inf"), -1, True, torch.tensor(-2), torch.tensor([1, 2])]
    )
    def test_what_is_no_count(self, count: Any) -> None:
        class Counts(Scalar):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.w * batch.sum(), count

        with pytest.raises(TaskError, match=r"\(loss_sum, count\) with the .*\. Expected a number of at least 0"):
            fit(Counts(), ones(1))


@pytest.mark.parametrize("weighs", [False, True])
def test_a_group_added_in_the_run_is_clipped_and_weighted(weighs: bool) -> None:
    class Grows(Scalar):
        def __init__(self) -> None:
            super().__init__()
            self.new = torch.nn.Parameter(torch.zeros(()))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.w], lr=1.0)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = (self.w + self.new) * batch.sum()
            return (loss, batch_idx + 1) if weighs else loss

    def unfreeze(trainer: Any, task: Any) -> None:
        trainer.optimizers[0].add_param_group({"params": [task.new]})

    task = Grows()
    fit(task, batches(3, 6), accumulate=2, clip_norm=None if weighs else 1.0, callbacks=Watch(fit_start=unfreeze))
    # Weighted: (3 + 6) / (1 + 2). Clipped: both have the mean 4.5, scaled to a norm of 1 together.
    assert task.new.item() == pytest.approx(-3 if weighs else -(0.5**0.5), rel=1e-5)
    assert task.w.item() == pytest.approx(task.new.item())
