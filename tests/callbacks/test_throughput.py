"""`ThroughputMonitor` and the table of peaks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.callbacks.bus import bind
from loopwright.callbacks.callback import Callback
from loopwright.callbacks.peaks import number_format, peak_flops
from loopwright.callbacks.throughput import ThroughputMonitor, _compute_dtype
from loopwright.distributed.errors import ConfigError
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

STEP = 0.02  # seconds that a batch takes at least
SAMPLES, TOKENS = 4, 12  # of a batch


class Slow(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        time.sleep(STEP)
        return self.net(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(5 * STEP)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Tokens(Slow):
    def count_tokens(self, batch: Tensor) -> int:
        return batch.numel()


class Records(Callback):
    """Keeps the rates that go to the trackers."""

    def __init__(self) -> None:
        self.all: list[tuple[int, dict[str, float]]] = []

    def on_log(self, trainer: Any, task: Any, metrics: dict[str, float], step: int) -> None:
        rates = {k.removeprefix("throughput/"): v for k, v in metrics.items() if k.startswith("throughput/")}
        if rates:
            self.all.append((step, rates))


BATCHES = [torch.ones(SAMPLES, 3)]


def fit(monitor: ThroughputMonitor, task: Task, *, batches: Any = BATCHES * 4, **options: Any) -> Records:
    records = Records()
    options = {"max_epochs": 1, "log_every": 2, "sanity_val_batches": 0, **options}
    trainer = Trainer(callbacks=[monitor, records], trackers=False, progress=False, **options)
    trainer.fit(task, batches, BATCHES)
    return records


def test_rates_hang_together() -> None:
    records = fit(ThroughputMonitor(), Tokens(), accumulate=2, log_every=1)
    assert [step for step, _ in records.all] == [1, 2]
    for _, rates in records.all:
        assert set(rates) == {
            "samples_per_second", "tokens_per_second", "batches_per_second", "steps_per_second", "data_wait_share",
            "forward_share", "backward_share", "step_share", "callbacks_share", "trackers_share",
        }  # fmt: skip
        assert 0 < rates["batches_per_second"] <= 1 / STEP
        assert rates["steps_per_second"] == pytest.approx(rates["batches_per_second"] / 2)
        assert rates["samples_per_second"] == pytest.approx(rates["batches_per_second"] * SAMPLES)
        assert rates["tokens_per_second"] == pytest.approx(rates["batches_per_second"] * TOKENS)
        assert 0 <= rates["data_wait_share"] < 0.5
        assert sum(rate for name, rate in rates.items() if name.endswith("_share")) <= 1


def test_no_tokens_no_rate_of_them() -> None:
    assert "tokens_per_second" not in fit(ThroughputMonitor(), Slow()).all[0][1]


def test_validation_takes_no_time() -> None:
    # Four steps of 0.02 s and, between them, three validations of 0.1 s: with these, under 12 batches per second.
    records = fit(ThroughputMonitor(), Slow(), log_every=1, val_every="1 step")
    assert [step for step, _ in records.all] == [1, 2, 3, 4]
    assert 20 < records.all[-1][1]["batches_per_second"] <= 1 / STEP


def test_the_start_counts_in_the_first_record_alone() -> None:
    class Compiles(Slow):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if batch_idx == 0:
                time.sleep(1.0)
            return super().training_step(batch, batch_idx)

    (_, first), (_, second) = fit(ThroughputMonitor(), Compiles()).all
    assert first["batches_per_second"] < 2
    assert second["batches_per_second"] > 5  # 50 on a machine with nothing else to do


def test_the_window_slides() -> None:
    class SlowStart(Slow):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if batch_idx == 1:
                time.sleep(1.0)
            return super().training_step(batch, batch_idx)

    rates = [r["batches_per_second"] for _, r in fit(ThroughputMonitor(window=1), SlowStart(), log_every=1).all]
    assert rates[1] < 1
    assert rates[2] > 5  # over the newest record alone


def test_waiting_for_data() -> None:
    class SlowData:
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[Tensor]:
            for _ in range(4):
                time.sleep(3 * STEP)
                yield BATCHES[0]

    records = fit(ThroughputMonitor(), Slow(), batches=SlowData(), log_every=1)
    assert 0.5 < records.all[-1][1]["data_wait_share"] <= 0.76  # 0.06 of each 0.08 seconds


def test_operations_by_sample_token_and_batch() -> None:
    class Known(Tokens):
        flops_per_batch = 120.0

    by_sample = fit(ThroughputMonitor(flops_per_sample=30.0, device_peak_flops=1e6), Tokens()).all[-1][1]
    by_token = fit(ThroughputMonitor(flops_per_token=10.0, device_peak_flops=1e6), Tokens()).all[-1][1]
    by_batch = fit(ThroughputMonitor(device_peak_flops=1e6), Known()).all[-1][1]
    for rates in (by_sample, by_token, by_batch):  # 120 operations a batch
        assert rates["flops_per_second"] == pytest.approx(120 * rates["batches_per_second"])
        assert rates["mfu"] == pytest.approx(rates["flops_per_second"] / 1e6)


def test_no_share_of_an_unknown_peak() -> None:
    rates = fit(ThroughputMonitor(flops_per_sample=30.0), Slow()).all[-1][1]
    assert "flops_per_second" in rates
    assert "mfu" not in rates  # a CPU


def test_operations_per_token_without_tokens() -> None:
    with pytest.warns(UserWarning, match=r"flops_per_token=\.\.\.\) is ignored: no tokens are counted"):
        records = fit(ThroughputMonitor(flops_per_token=10.0), Slow())
    assert "flops_per_second" not in records.all[-1][1]


def test_operations_that_are_no_number() -> None:
    class Wrong(Slow):
        flops_per_batch = "many"

    with pytest.raises(ConfigError, match=r"task\.flops_per_batch='many'\. Expected a number"):
        fit(ThroughputMonitor(), Wrong())


@pytest.mark.parametrize("option", ["flops_per_sample", "flops_per_token", "device_peak_flops"])
@pytest.mark.parametrize("value", [0, "many", float("nan"), float("inf")])
def test_numbers_above_zero(option: str, value: Any) -> None:
    message = rf"ThroughputMonitor\({option}={value!r}\)\. Expected a finite number above 0\. Leave it out"
    with pytest.raises(ConfigError, match=message):
        ThroughputMonitor(**{option: value})


@pytest.mark.parametrize("window", [0, 1.5, None])
def test_the_window_is_a_number_of_records(window: Any) -> None:
    ThroughputMonitor(window=10**30)
    with pytest.raises(ConfigError, match=rf"ThroughputMonitor\(window={window}\)\. Expected an integer >= 1"):
        ThroughputMonitor(window=window)


def test_one_kind_of_operations() -> None:
    with pytest.raises(ConfigError, match=r"has flops_per_sample and flops_per_token\. Give one"):
        ThroughputMonitor(flops_per_sample=1, flops_per_token=1)


def test_no_event_of_a_step_or_a_batch() -> None:
    bound = {event.__name__ for event, emit in bind([ThroughputMonitor()], [], None, None).items() if emit}
    assert bound == {"on_fit_start", "on_validation_start", "on_validation_end", "on_fit_end", "on_log"}


@pytest.mark.parametrize(
    ("device", "number", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H200", "fp8", 1978.9),
        ("NVIDIA H20", "bf16", 148),
        ("NVIDIA GH200 480GB", "tf32", 494.7),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362.05),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("Tesla T4", "tf32", 8.1),  # it has none: plain fp32
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", 80),
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_known_peaks(device: str, number: str, tera: float) -> None:
    assert peak_flops(device, number) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("device", "number"), [("NVIDIA RTX A4000", "fp32"), ("Tesla T4", "bf16"), ("NVIDIA A100", "fp8")]
)
def test_unknown_peaks(device: str, number: str) -> None:
    assert peak_flops(device, number) is None


def test_number_formats() -> None:
    before = torch.get_float32_matmul_precision()
    assert number_format(torch.bfloat16) == "bf16"
    assert number_format(torch.float16) == "fp16"
    assert number_format(torch.float64) is None
    assert number_format(torch.float32) == "fp32"
    try:
        torch.set_float32_matmul_precision("high")
        assert number_format(torch.float32) == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("precision", "dtype"), [("no", torch.float64), ("bf16", torch.bfloat16)])
def test_the_format_that_a_run_computes_in(precision: str, dtype: torch.dtype) -> None:
    class Mixed(Task):
        """Ten numbers in 64 bits, two in 32."""

        def __init__(self) -> None:
            super().__init__()
            self.large = nn.Linear(9, 1, dtype=torch.float64)
            self.small = nn.Linear(1, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.small(batch).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.small.parameters(), lr=0.1)

    class Look(Callback):
        found: torch.dtype | None = None

        def on_log(self, trainer: Any, task: Any, metrics: dict[str, float], step: int) -> None:
            self.found = _compute_dtype(trainer)

    look = Look()
    trainer = Trainer(
        max_steps=1, log_every=1, precision=precision, callbacks=[look], trackers=False, progress=False
    )  # fmt: skip
    trainer.fit(Mixed(), [torch.ones(1, 1)])
    assert look.found is dtype
