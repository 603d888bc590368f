"""Weights in 16 bits, with copies in fp32 that optimizers update; and how exact products of fp32 numbers are."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.distributed.errors import ConfigError
from loopwright.strategies.master_weights import KEY, keep_master_weights
from loopwright.trainer.accelerator import Accelerator
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

from .tiny import trainer

HALVES = {"bf16-true": torch.bfloat16, "fp16-true": torch.float16, "16-true": torch.float16}
MASTER = {"name": "bf16-true", "master_weights": True}


class Line(Task):
    """A line through points; writes down the number formats that it computes in."""

    def __init__(self, lr: float = 0.05, kind: str = "adamw", momentum: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.register_buffer("scale", torch.ones(2))
        self.lr, self.kind, self.momentum = lr, kind, momentum
        self.formats: set[torch.dtype] = set()

    def step(self, batch: Any, *_: Any) -> Tensor:
        inputs, targets, counts = batch
        outputs = self.net(inputs) * self.get_buffer("scale") + torch.zeros(2)
        self.formats |= {inputs.dtype, targets.dtype, outputs.dtype, self.net.weight.dtype}
        assert counts.dtype is torch.int64
        return F.mse_loss(outputs, targets)

    training_step = validation_step = step

    def configure_optimizers(self) -> Any:
        if self.kind == "sgd":
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(count: int = 6) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return [(draw(5, 3), draw(5, 2), torch.arange(5)) for _ in range(count)]


def made(**options: Any) -> Line:
    torch.manual_seed(0)
    return Line(**options)


@pytest.mark.parametrize("word", HALVES)
def test_all_is_in_16_bits(word: str) -> None:
    task = made(kind="sgd", momentum=0.5)
    found = trainer(precision=word, sanity_val_batches=1)
    found.fit(task, data(), data(2))
    assert task.formats == {HALVES[word]}
    assert task.get_buffer("scale").dtype is HALVES[word]
    assert found.accelerator.mixed_precision == ("fp16-true" if word == "16-true" else word)
    assert torch.get_default_dtype() is torch.float32
    state = found.accelerator.preparation.optimizers[0].state[task.net.weight]
    assert state["momentum_buffer"].dtype is HALVES[word]


def test_a_divisor_that_is_0_in_fp16() -> None:
    with pytest.raises(
        ConfigError, match=r"eps=1e-08 of AdamW \(group 0\) is 0 in fp16.*Give eps=1e-4, master_weights"
    ):
        trainer(precision="fp16-true").fit(made(), data())
    task = made()
    trainer(precision={"name": "fp16-true", "master_weights": True}, max_epochs=3).fit(task, data())
    assert task.net.weight.isfinite().all()


def test_new_tensors_are_in_fp32_again_after_an_exception() -> None:
    class Fails(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(precision="bf16-true").fit(Fails(), data())
    assert torch.get_default_dtype() is torch.float32


def test_an_own_loop() -> None:
    accelerator = Accelerator(mixed_precision="bf16-true")
    model, optimizer = accelerator.prepare(net := nn.Linear(3, 2), torch.optim.SGD(net.parameters(), lr=0.1))
    outputs = model(torch.ones(4, 3))
    assert (net.weight.dtype, outputs.dtype) == (torch.bfloat16, torch.float32)
    accelerator.backward(outputs.mean())
    optimizer.step()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(twin(torch.ones(4, 3)), model(torch.ones(4, 3)))


class TestMasterWeights:
    def test_steps_that_are_smaller_than_the_last_bit_add_up(self) -> None:
        """Near 1, bf16 knows no number between 1 and 1 - 2**-8: eight steps of 2**-11 are one such distance."""

        class Constant(Task):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.ones(1))

            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                return (self.w * batch).sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=2.0**-11)

        lost, kept = Constant(), Constant()
        trainer(precision="bf16-true").fit(lost, [torch.ones(1)] * 8)
        trainer(precision=MASTER).fit(kept, [torch.ones(1)] * 8)
        assert (lost.w.item(), kept.w.item()) == (1.0, 1 - 2.0**-8)

    @pytest.mark.parametrize("kind", ["sgd", "adamw"])
    def test_the_copies_are_those_of_a_loop_in_fp32_on_the_same_gradients(self, kind: str) -> None:
        task = made(kind=kind).bfloat16()
        twin = made(kind=kind).bfloat16().float()
        optimizer, other = task.configure_optimizers(), twin.configure_optimizers()
        masters = keep_master_weights(optimizer)
        assert keep_master_weights(optimizer) is masters
        for inputs, targets, _ in data():
            F.mse_loss(task.net(inputs.bfloat16()).float(), targets).backward()
            for parameter, copied in zip(task.parameters(), twin.parameters(), strict=True):
                assert parameter.grad is not None
                copied.grad = parameter.grad.float()
            optimizer.step()
            other.step()
            optimizer.zero_grad()
            for parameter, copied in zip(task.parameters(), twin.parameters(), strict=True):
                assert torch.equal(parameter, copied.bfloat16())
        entries = optimizer.state_dict()["state"]
        for number, copied in enumerate(twin.parameters()):
            assert torch.equal(entries[number][KEY], copied)
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in task.parameters()]

    @pytest.mark.parametrize("kind", ["sgd", "adamw"])
    def test_a_run_goes_on_bit_for_bit(self, kind: str) -> None:
        whole, again = made(kind=kind), made(kind=kind)
        found = trainer(precision=MASTER, max_epochs=2)
        found.fit(whole, data())
        saving = ModelCheckpoint(every="4 steps")
        trainer(precision=MASTER, max_epochs=None, max_steps=8, name="run", callbacks=saving).fit(
            made(kind=kind), data()
        )
        resumed = trainer(precision=MASTER, max_epochs=2, name="run", callbacks=ModelCheckpoint(every="4 steps"))
        resumed.fit(again, data(), resume_from="latest")
        assert torch.equal(whole.net.weight, again.net.weight)
        states = [each.accelerator.preparation.optimizers[0].state_dict()["state"] for each in (found, resumed)]
        assert states[0].keys() == states[1].keys()
        for number, values in states[0].items():
            assert values.keys() == states[1][number].keys()
            for name, value in values.items():
                assert value is None or torch.equal(value, states[1][number][name]), name
                assert value is None or value.dtype is torch.float32

    def test_they_follow_what_else_writes_the_weights(self) -> None:
        layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(layer.parameters(), lr=2.0**-11)
        keep_master_weights(optimizer)

        def step() -> float:
            layer.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
            optimizer.step()
            return float(optimizer.state_dict()["state"][0][KEY].item())

        with torch.no_grad():
            layer.weight.fill_(1)
        assert step() == 1 - 2.0**-11
        with torch.no_grad():
            layer.weight.copy_(layer.weight.clone())  # as who shows averages and puts the weights back
        assert step() == 1 - 2 * 2.0**-11
        with torch.no_grad():
            layer.weight.fill_(2)
        assert step() == 2 - 2.0**-11

    def test_they_are_refused_under_fsdp(self, two_processes: Callable[..., list[Any]]) -> None:
        assert all("Use precision='bf16': the parts are in fp32 then" in text for text in two_processes(refused))


def refused() -> str:
    with pytest.raises(ConfigError) as caught:
        trainer(precision=MASTER, strategy="fsdp").fit(made(), data())
    return str(caught.value)


def ddp_values(precision: Any) -> list[Tensor]:
    task = made()
    trainer(precision=precision, strategy="ddp", max_epochs=2).fit(task, data())
    return [task.net.weight.detach().clone(), task.net.bias.detach().clone()]


def test_copies_on_two_processes(two_processes: Callable[..., list[Any]]) -> None:
    first, second = two_processes(ddp_values, MASTER)
    exact, _ = two_processes(ddp_values, "no")
    for one, other, wanted in zip(first, second, exact, strict=True):
        assert one.dtype is torch.bfloat16
        assert torch.equal(one, other)
        torch.testing.assert_close(one.float(), wanted, atol=0.02, rtol=0.02)


class TestProducts:
    @pytest.mark.parametrize("word", ["highest", "high", "medium"])
    def test_inside_of_a_run_alone(self, word: str) -> None:
        class Looks(Line):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                self.seen = torch.get_float32_matmul_precision()
                return self.step(batch)

        task, before = Looks(), torch.get_float32_matmul_precision()
        trainer(matmul_precision=word).fit(task, data())
        assert task.seen == word
        assert torch.get_float32_matmul_precision() == before

    def test_an_unknown_word(self) -> None:
        with pytest.raises(
            ConfigError, match=r"matmul_precision='hihg' is unknown\. Did you mean 'high'\? Accepted: high"
        ):
            trainer(matmul_precision="hihg")


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("bf16-ture", r"precision='bf16-ture' is unknown\. Did you mean 'bf16-true'"),
        ({"nome": "fp8"}, r"precision=\{'nome': 'fp8'\} has no 'name'"),
        ({"name": "bf16", "master_weights": True}, r"precision='bf16' does not take 'master_weights'\. Nothing is acc"),
        (
            {"name": "bf16-true", "master": True},
            r"precision='bf16-true' does not take 'master'\. Did you mean 'master_w",
        ),
        ({"name": "bf16-true", "master_weights": 1}, r"master_weights=1"),
    ],
)
def test_what_a_precision_can_not_be(precision: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(precision=precision)


def test_deepspeed_has_its_own_way() -> None:
    with pytest.raises(
        ConfigError, match=r"precision='bf16-true' with DeepSpeed\. Use 'bf16': from stage 1 on it keeps"
    ):
        Trainer(max_steps=1, precision="bf16-true", strategy="deepspeed", progress=False, trackers=False)
