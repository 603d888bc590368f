"""`NaNGuard` in real fits."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from loopwright import Callback, ConfigError, ModelCheckpoint, NaNGuard, NonFiniteError, StepOutcome, Task, Trainer


class Slope(Task):
    """w = 0, loss = w * x: each step takes the batch's mean from the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.w * batch.mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class Deep(Task):
    """The module `net.1` gives NaN for negative inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 1), Log(), nn.Linear(1, 1))
        self.num_calls = 0
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(1.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.num_calls += 1
        loss = self.net(batch).mean()
        self.log("train/loss", loss)
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class RootAtZero(Slope):
    """The loss is 0 where the weight is, and its gradient infinite."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.w.sqrt()


def xs(*values: float) -> list[Tensor]:
    return [torch.full((2,), float(value)) for value in values]


def trainer_with(*callbacks: Callback, **arguments: Any) -> Trainer:
    arguments = {"max_epochs": 1, "trackers": False, "progress": False, "log_every": 1, **arguments}
    return Trainer(callbacks=callbacks, **arguments)


def test_pain_16_raise_names_the_step_the_batch_and_the_samples() -> None:
    seen: list[BaseException] = []

    class Watch(Callback):
        def on_exception(self, trainer: Any, task: Any, error: BaseException) -> None:
            seen.append(error)

    task = Slope()
    bad = torch.tensor([1.0, math.nan])
    message = (
        r"^the loss is nan at step 3 \(epoch 0, batch 2, samples 4 to 5 of the run\). The input batch is not finite "
        r"itself, in rows 1 \(the first is sample 5 of the run\). No module's output was bad .* Lower the learning rate"
    )
    with pytest.raises(NonFiniteError, match=message) as caught:
        trainer_with(NaNGuard(), Watch()).fit(task, [*xs(1, 1), bad, *xs(1)])
    assert task.w.item() == -2.0
    assert seen == [caught.value]


def test_pain_16_stop_ends_the_run_in_order() -> None:
    task, guard = Slope(), NaNGuard("stop")
    trainer = trainer_with(guard)
    trainer.fit(task, xs(1, 1, math.nan, 1))
    assert task.w.item() == -2.0
    assert trainer.stop_reason is not None
    assert trainer.stop_reason.startswith("NaNGuard: the loss is nan at step 3 (epoch 0, batch 2, ")
    assert guard.nonfinite_steps == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_pain_16_skip_drops_the_step_and_counts_it(bad: float) -> None:
    task, guard = Slope(), NaNGuard("skip")
    trainer = trainer_with(guard)
    with pytest.warns(UserWarning, match=r"NaNGuard skips a step: the loss is (nan|inf|-inf) at step 3"):
        trainer.fit(task, xs(1, 1, bad, 1))
    assert task.w.item() == -3.0
    assert (trainer.state.step, trainer.state.skipped_steps) == (3, 1)
    assert guard.nonfinite_steps == 1
    assert trainer.metrics["nonfinite_steps"] == 1


def test_counter_is_in_the_first_record_and_in_each_after_a_change() -> None:
    recorded: list[tuple[int, float]] = []

    class Keep(Callback):
        after = (NaNGuard,)

        def on_log(self, trainer: Any, task: Any, metrics: dict[str, float], step: int) -> None:
            if "nonfinite_steps" in metrics:
                recorded.append((step, metrics["nonfinite_steps"]))

    with pytest.warns(UserWarning, match="NaNGuard skips a step"):
        trainer_with(NaNGuard("skip"), Keep()).fit(Slope(), xs(1, 1, math.nan, 1, 1))
    assert recorded == [(1, 0), (3, 1)]


def test_skip_drops_the_whole_window() -> None:
    task = Slope()
    outcomes: list[StepOutcome] = []

    class Watch(Callback):
        def on_step(self, trainer: Any, task: Any, outcome: StepOutcome) -> None:
            outcomes.append(outcome)

    guard = NaNGuard("skip")
    with pytest.warns(UserWarning, match=r"at step [23] \(.*A step takes 2 micro-batches"):
        trainer_with(guard, Watch(), accumulate=2).fit(task, xs(1, 1, math.nan, 5, 1, 1, 5, math.nan, 1, 1))
    applied, skipped = StepOutcome.APPLIED, StepOutcome.SKIPPED
    assert outcomes == [applied, skipped, applied, skipped, applied]
    assert task.w.item() == -3.0
    assert guard.nonfinite_steps == 2


def test_window_with_two_bad_batches_is_one_step() -> None:
    task, guard = Slope(), NaNGuard("skip", max_skips=1)
    with pytest.warns(UserWarning, match="skips a step"):
        trainer_with(guard, accumulate=3).fit(task, xs(math.nan, math.nan, 1, 1, 1, 1))
    assert task.w.item() == -1.0
    assert guard.nonfinite_steps == 1


def test_gradient_that_is_not_finite_is_seen_before_the_step() -> None:
    task = RootAtZero()
    with pytest.raises(NonFiniteError, match=r"gradients are not finite at step 1 .*of 1 of 1 parameters .*: 'w'"):
        trainer_with(NaNGuard()).fit(task, xs(1))
    assert task.w.item() == 0.0


def test_skips_are_bounded() -> None:
    task = Slope()
    with (
        pytest.warns(UserWarning, match="NaNGuard skips a step"),
        pytest.raises(NonFiniteError, match=r"at step 2 .* 2 steps were skipped before; max_skips=2"),
    ):
        trainer_with(NaNGuard("skip", max_skips=2)).fit(task, xs(1, math.nan, math.nan, math.nan, 1))
    assert task.w.item() == -1.0


def test_first_bad_module_is_named() -> None:
    message = r"The first module with a bad output is 'net.1' \(Log\); its input is finite"
    with pytest.raises(NonFiniteError, match=message):
        trainer_with(NaNGuard()).fit(Deep(), [torch.ones(2, 1), -3 * torch.ones(2, 1)])


def test_bad_input_and_bad_weight_are_named() -> None:
    batch = torch.ones(4, 1)
    batch[2] = math.nan
    with pytest.raises(NonFiniteError, match=r"in rows 2 .* 'net.0' \(Linear\); its input is not finite already"):
        trainer_with(NaNGuard()).fit(Deep(), [batch])
    task = Deep()
    with torch.no_grad():
        dict(task.named_parameters())["net.2.bias"].fill_(math.nan)
    with pytest.raises(NonFiniteError, match=r"The weight 'net.2.bias' is not finite itself. .*'net.2' \(Linear\)"):
        trainer_with(NaNGuard()).fit(task, [torch.ones(4, 1)])


def test_search_leaves_no_trace_and_can_be_left_out() -> None:
    bad = -3 * torch.ones(2, 1)
    task = Deep()
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match=r"'net.1' \(Log\)"):
        trainer_with(NaNGuard("skip"), seed=None).fit(task, [bad])
    assert task.num_calls == 2
    assert "log" not in vars(task)
    assert all(not module._forward_hooks for module in task.modules())
    assert torch.equal(torch.get_rng_state(), before)
    task = Deep()
    with pytest.warns(UserWarning, match=r"at step 1 \(epoch 0, batch 0, samples 0 to 1 of the run\).$"):
        trainer_with(NaNGuard("skip", locate=False)).fit(task, [bad])
    assert task.num_calls == 1


def test_search_that_fails_does_not_hide_the_report() -> None:
    class Once(Slope):
        num_calls = 0

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.num_calls += 1
            if self.num_calls > 1:
                raise RuntimeError("only once")
            return super().training_step(batch, batch_idx)

    message = "^the loss is nan at step 1 .* A second run of this batch failed: RuntimeError: only once"
    with pytest.raises(NonFiniteError, match=message):
        trainer_with(NaNGuard()).fit(Once(), xs(math.nan))


class OfBatches(Deep):
    """A step that takes the batch alone."""

    def training_step(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_search_calls_the_step_as_the_loop_does(precision: str) -> None:
    task = OfBatches()
    with pytest.raises(NonFiniteError, match=r"The first module with a bad output is 'net.1' \(Log\)"):
        trainer_with(NaNGuard(), precision=precision).fit(task, [-3 * torch.ones(2, 1)])
    assert task.num_calls == 2


@pytest.mark.filterwarnings("ignore:state.samples does not count such batches")
def test_samples_are_left_out_where_the_parts_of_a_batch_disagree() -> None:
    class Uneven(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.w * batch[0].mean()  # type: ignore[no-any-return]

    with pytest.raises(NonFiniteError, match=r"the loss is nan at step 1 \(epoch 0, batch 0\)\. The input batch\[0\]"):
        trainer_with(NaNGuard()).fit(Uneven(), [[torch.full((2,), math.nan), torch.ones(3)]])


class Normed(Slope):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)
        self.register_buffer("table", torch.ones(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.norm(batch[:, None]).mean() * self.w  # type: ignore[no-any-return]


def test_skip_puts_the_means_of_batch_norm_back() -> None:
    good, other = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    expected, task = Normed(), Normed()
    trainer_with().fit(expected, [good, other])
    with pytest.warns(UserWarning, match="skips a step"):
        trainer_with(NaNGuard("skip")).fit(task, [good, torch.tensor([math.nan, 1.0]), other])
    for name, value in expected.state_dict().items():
        assert torch.equal(task.state_dict()[name], value), name


def test_manual_optimization_skips_the_rest_of_a_batch() -> None:
    class Manual(Slope):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers()
            self.manual_backward(self.w * batch.mean())
            optimizer.step()
            optimizer.zero_grad()

    task = Manual()
    with pytest.warns(UserWarning, match="not looked for in manual optimization"):
        trainer_with(NaNGuard("skip")).fit(task, xs(1, math.nan, 1))
    assert task.w.item() == -2.0


def test_overflow_of_fp16_is_none() -> None:
    """The first scale of the loss, 65536, makes the scaled gradient of 10 an infinity in fp16."""

    class Half(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros((), dtype=torch.float32))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.w.half() * batch.half().mean()).float()

    task, guard = Half(), NaNGuard()
    trainer = trainer_with(guard, precision="fp16")
    trainer.fit(task, xs(10, 1))
    assert trainer.state.skipped_steps == 1
    assert guard.nonfinite_steps == 0
    assert math.isfinite(task.w.item())


def test_losses_are_watched_without_reading_them_between_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """What accelerators do by default: the report comes at the interval and names the first bad step."""
    reads: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def read(tensor: Tensor, *values: Any) -> Any:
            reads.append(name)
            return original(tensor, *values)

        return read

    for name in ("item", "__float__", "__int__", "__bool__", "tolist"):
        monkeypatch.setattr(Tensor, name, counting(name))
    guard = NaNGuard("stop", every="4 steps")
    trainer = trainer_with(guard, log_every="100 steps")
    trainer.fit(Slope(), xs(*[1.0] * 9, math.nan, 1, 1, 1))
    assert trainer.stop_reason is not None
    assert "the loss was not finite at step 10. This was seen at step 12 (epoch 0, batch 11" in trainer.stop_reason
    assert reads[:3] == ["__int__"] * 3  # at steps 4, 8 and 12; what follows is the report


def test_saves_nothing_bad(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(1, directory=tmp_path / "out")
    with pytest.raises(NonFiniteError, match="the loss is nan at step 3"):
        trainer_with(NaNGuard(), checkpoint).fit(Slope(), xs(1, 1, math.nan, 1))
    assert os.listdir(tmp_path / "out") == ["step=000002"]
    assert load_file(tmp_path / "out/step=000002/model.safetensors")["w"].item() == -2.0


def test_batches_of_other_kinds_are_described() -> None:
    class Mapped(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.w * batch["x"][0].mean()  # type: ignore[no-any-return]

        def count_samples(self, batch: Any) -> int:
            return 2

    batch = {"x": [torch.tensor([[1.0], [math.inf]])], "name": "a", "n": torch.tensor([1, 2])}
    with pytest.raises(NonFiniteError, match=r"The input batch\['x'\]\[0\] is not finite itself, in rows 1 "):
        trainer_with(NaNGuard()).fit(Mapped(), [batch])


def test_count_survives_a_resume_and_a_new_fit_begins_at_0() -> None:
    guard = NaNGuard("skip", max_skips=2)
    with pytest.warns(UserWarning, match="skips a step"):
        trainer_with(guard).fit(Slope(), xs(math.nan, 1))
    resumed = NaNGuard("skip", max_skips=2)
    resumed.load_state_dict(guard.state_dict())
    with pytest.warns(UserWarning, match="skips a step"):
        trainer_with(resumed).fit(Slope(), xs(math.nan, 1))
    assert resumed.nonfinite_steps == 2
    trainer_with(resumed).fit(Slope(), xs(1))
    assert resumed.nonfinite_steps == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ignore"], r"policy='ignore'\). "),
        (["skip", "50 steps"], r"policy='skip', every='50 steps'\) would miss what it has to skip"),
        (["raise", None, 0], r"max_skips=0\). Expected an integer >= 1"),
        (["raise", None, 1, "false"], r"NaNGuard\(locate='false'\). Expected True or False"),
    ],
)
def test_arguments_are_checked(arguments: Sequence[Any], message: str) -> None:
    names = ("policy", "every", "max_skips", "locate")
    with pytest.raises(ConfigError, match=message):
        NaNGuard(**dict(zip(names, arguments, strict=False)))
