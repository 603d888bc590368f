"""FSDP under the Accelerator, its states, and what it refuses; two processes against one."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from loopwright.checkpoint.weights import load_weights
from loopwright.distributed.errors import ConfigError, DataError, DistributedError
from loopwright.strategies.fsdp import FSDPStrategy
from loopwright.strategies.local_sgd import LocalSGD
from loopwright.trainer.accelerator import Accelerator

from .sharded import Words, fit, loader, make, state_of, words

Run = Callable[..., list[Any]]


def _loop(path: str, strategy: str, batch_size: int, loads: bool) -> Any:
    accelerator = Accelerator(strategy=strategy, gradient_accumulation_steps=2)
    model = make(1 + accelerator.process_index)
    optimizer = model.configure_optimizers()
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(32, batch_size))
    if loads:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # another number of processes
            accelerator.load_state(path)
    norms = []
    for batch in data:
        with accelerator.accumulate(model):
            # The mean over processes of the sum of each, times their number, is the sum over all.
            accelerator.backward(_loss(model, batch) * accelerator.num_processes / 20)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.3).item())
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        outputs = model(words(4).tensors[0])
    if not loads:
        accelerator.save_state(path)
        accelerator.save_model(model, f"{path}-weights")
    return norms, outputs, accelerator.get_state_dict(model)


def _loss(model: nn.Module, batch: Any) -> Tensor:
    found = batch[0]
    logits, targets = model(found[:, :-1]), found[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_an_own_loop_and_its_state(two_processes: Run, tmp_path: Path) -> None:
    wanted = _loop("one", "single", 8, False)
    found, (_, again, nothing) = two_processes(_loop, "two", "fsdp", 4, False)
    close(found, wanted)
    close(again, found[1])
    assert nothing == {}
    loaded = make(5)
    load_weights(loaded, tmp_path / "two-weights")
    close(loaded(words(4).tensors[0]).detach(), wanted[1])
    wanted = _loop("one", "single", 8, True)
    close(_loop("two", "single", 8, True), wanted)
    close(two_processes(_loop, "two", "fsdp", 4, True)[0], wanted)
    close(two_processes(_loop, "one", "fsdp", 4, True)[0], wanted)


class Probe(nn.Module):
    """A layer that sees how often it is called, and a buffer that no state dict has."""

    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("turn", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.frozen(self.first(x)) + self.turn
        return outputs


def _from_meta() -> tuple[bool, Tensor, Any]:
    index = dist.get_rank()
    torch.manual_seed(3)
    with torch.device("cpu" if index == 0 else "meta"):
        model = Probe()
    wanted = model(torch.ones(2, 4)).detach() if index == 0 else None
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    accelerator = Accelerator(strategy={"name": "fsdp", "wrap": "Linear"})
    model, optimizer = accelerator.prepare(model, optimizer)
    with torch.no_grad():
        found = model(torch.ones(2, 4))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    same = wanted is None or torch.equal(found, wanted)
    return same, found, model.frozen.weight.grad


def test_weights_come_from_process_0(two_processes: Run) -> None:
    (same, first, gradient), (_, second, _) = two_processes(_from_meta)
    assert same
    assert torch.equal(first, second)
    assert gradient is None


def _text(act: Callable[[], Any]) -> str:
    try:
        act()
    except (ConfigError, DataError, DistributedError) as error:
        return str(error)
    return "nothing was raised"


def _refused() -> list[str]:
    def prepared(**options: Any) -> tuple[Accelerator, Words, Any]:
        model = make(1)
        return Accelerator(strategy={"name": "fsdp"} | options), model, model.configure_optimizers()

    accelerator, model, optimizer = prepared()
    texts = [_text(lambda: accelerator.prepare(model))]
    accelerator.prepare(model, optimizer)
    late = torch.optim.SGD(make(2).parameters(), lr=0.1)
    texts.append(_text(lambda: accelerator.strategy.step(late)))
    accelerator, model, optimizer = prepared(mesh=[2, 2])
    texts.append(_text(lambda: accelerator.prepare(model, optimizer)))
    accelerator, model, optimizer = prepared(ignored_modules=["heat"])
    texts.append(_text(lambda: accelerator.prepare(model, optimizer)))
    accelerator, model, optimizer = prepared()
    texts.append(_text(lambda: accelerator.prepare(model.to("meta"), model.configure_optimizers())))
    accelerator, model, optimizer = prepared(wrap="Leyer")
    texts.append(_text(lambda: accelerator.prepare(model, optimizer)))
    accelerator, model, optimizer = prepared()
    model.layers[0].norm.bfloat16()
    texts.append(_text(lambda: accelerator.prepare(model, optimizer)))
    return texts


def test_what_is_refused(two_processes: Run) -> None:
    wanted = [
        "Words was set up without its optimizer",
        "SGD holds 19 parameters that FSDPWords does not have",
        "a mesh of replicate 2 x shard 2 needs 4 processes, and there are 2",
        "ignored_modules: Words has no module 'heat'",
        "'embedding.weight' of Words has no values on the main process (device meta)",
        "wrap: Words has no module of class 'Leyer'. Did you mean 'Layer'?",
        "the trained parameters of the unit Layer have several number formats: torch.bfloat16, torch.float32",
    ]
    for texts in two_processes(_refused):
        for text, begin in zip(texts, wanted, strict=True):
            assert text.startswith(begin), text


class Manual(Words):
    automatic_optimization = False


def _refused_by_trainer() -> list[str]:
    return [_text(lambda: fit(Manual(2), loader(8, 2), strategy="fsdp"))]


def test_manual_optimization_is_refused(two_processes: Run) -> None:
    for (text,) in two_processes(_refused_by_trainer):
        assert text.startswith("Manual is trained by manual optimization, which strategy='fsdp' can't serve")


def _given_weights() -> dict[str, Tensor]:
    trainer = fit(make(1), loader(8, 2), strategy="fsdp")
    trainer.strategy.load_model_state(trainer._newest("test").model, make(3).state_dict())
    return state_of(trainer)


def test_whole_weights_become_parts(two_processes: Run) -> None:
    close(two_processes(_given_weights)[0], dict(make(3).state_dict()))


def _twice() -> dict[str, Tensor]:
    task = make(1)
    trainer = fit(task, loader(24, 4), strategy="fsdp")
    trainer.fit(task, loader(24, 4))
    trainer.save_model("twice.safetensors")
    return state_of(trainer)


def test_a_second_run_of_the_same_task(two_processes: Run, tmp_path: Path) -> None:
    task = make(1)
    trainer = fit(task, loader(24, 8))
    trainer.fit(task, loader(24, 8))
    found = two_processes(_twice)[0]
    close(found, state_of(trainer))
    loaded = make(9)
    load_weights(loaded, tmp_path / "twice.safetensors")
    close(dict(loaded.state_dict()), found)


def test_one_process_only_places_the_model() -> None:
    task = make(1)
    trainer = fit(task, loader(24, 8), strategy={"name": "fsdp", "activation_checkpointing": True})
    close(state_of(trainer), state_of(fit(make(1), loader(24, 8))))
    assert isinstance(trainer.strategy, FSDPStrategy)


def _clipped(strategy: str, batch_size: int) -> Any:
    accelerator = Accelerator(strategy=strategy)
    model = make(1, kind="sgd")
    optimizer = model.configure_optimizers()
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(16, batch_size))
    for batch in data:
        accelerator.backward(_loss(model, batch) * accelerator.num_processes / 20)
        accelerator.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()
    same = accelerator.unwrap_model(model) is model
    refused = _text(lambda: LocalSGD(accelerator, model, 2)) if accelerator.num_processes > 1 else ""
    return accelerator.get_state_dict(model), accelerator.get_state_dict(model, unwrap=False), same, refused


def test_clipped_values_whole_states_and_what_needs_copies(two_processes: Run) -> None:
    wanted, *_ = _clipped("single", 8)
    (found, again, same, refused), (nothing, nothing_either, *_) = two_processes(_clipped, "fsdp", 4)
    close(found, wanted)
    close(again, wanted)
    assert nothing == nothing_either == {}
    assert same
    assert refused.startswith(
        "LocalSGD lets the weights of processes differ for some steps, and with FSDPStrategy each"
    )


class Turned(nn.Module):
    """Attention over turned queries and keys, as large language models have it."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.turns = turns

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(x).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(self.turns(query), self.turns(key), value, is_causal=True)
        outputs: Tensor = x + self.out(mixed)
        return outputs


class Turns(nn.Module):
    """Rotary embeddings: angles that are computed when the module is built, and that no state dict has."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 10.0 ** -torch.arange(0.0, 1.0, 0.25), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1]).float()[:, None] * self.frequencies
        first, second = x.chunk(2, -1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )


class Language(nn.Module):
    """Layers that share their rotary embeddings, learned places by number, and a head that is tied."""

    _no_split_modules = ("Turned",)
    numbers: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.places = nn.Embedding(16, 8)
        turns = Turns()
        self.layers = nn.ModuleList(Turned(turns) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("numbers", torch.arange(16).flip(0)[None], persistent=False)  # as BERT's position ids

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(self.numbers[:, : words.shape[1]])
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def _language(strategy: Any, batch_size: int) -> Any:
    index = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(3)
    with torch.device("cpu" if index == 0 else "meta"):
        model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    accelerator = Accelerator(strategy=strategy)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(16, batch_size))
    logits = []
    for batch in data:
        with torch.no_grad():
            logits.append(model(words(4).tensors[0]))
        accelerator.backward(_loss(model, batch) * accelerator.num_processes / 20)
        optimizer.step()
        optimizer.zero_grad()
    return logits, accelerator.get_state_dict(model)


def test_buffers_of_a_model_that_is_built_without_memory(two_processes: Run) -> None:
    wanted = _language("single", 8)
    found, other = two_processes(_language, "fsdp", 4)
    close(found, wanted)
    close(other[0], wanted[0])


def _rates_in_tensors(path: str) -> list[dict[str, Tensor]]:
    """The weights behind three steps, without a stop and behind a return to the second."""
    accelerator, found = Accelerator(strategy="fsdp"), []
    model = make(1)
    rate = torch.tensor(0.01)  # as compiled optimizers want it
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "lr": rate}], lr=rate)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(8, 4))
    (batch,) = data
    for step in (0, 1, 2, 2):
        if step == 2:
            if found:
                accelerator.load_state(path)
            else:
                accelerator.save_state(path)
        accelerator.backward(_loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            found.append({name: value.clone() for name, value in accelerator.get_state_dict(model).items()})
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
    return found


def test_learning_rates_in_tensors_come_back(two_processes: Run, tmp_path: Path) -> None:
    (whole, again), _ = two_processes(_rates_in_tensors, str(tmp_path / "state"))
    assert len(whole) > 5
    close(again, whole)


class Uneven(nn.Module):
    """A parameter without an element, one without a dimension, and a layer that is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.nothing, self.heat = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.heat + self.nothing.sum()
        return x


def _unfrozen_later(strategy: Any, precision: str, path: str | None = None) -> Any:
    torch.manual_seed(3)
    model, accelerator = Uneven(), Accelerator(strategy=strategy, mixed_precision=precision)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0))
    inputs = torch.arange(16.0).view(2, 2, 4) / 16  # two processes with a half each
    own = inputs.flatten(0, 1) if accelerator.num_processes == 1 else inputs[accelerator.process_index]
    for step in range(4):
        accelerator.unwrap_model(model).layers[1].requires_grad_(step > 1)
        accelerator.backward(model(own).float().square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    if path is not None:
        accelerator.save_state(path)
        accelerator.load_state(path)
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def test_a_unit_that_is_unfrozen_and_parameters_that_stay_whole(two_processes: Run, tmp_path: Path) -> None:
    torch.manual_seed(3)
    begin = Uneven().layers[1].weight.detach()
    for precision, tolerance in [("no", 1e-5), ("bf16", 0.1), ("fp16", 0.1)]:
        wanted = _unfrozen_later("single", precision)
        strategy = {"name": "fsdp", "wrap": ["Linear"]}
        found = two_processes(_unfrozen_later, strategy, precision, str(tmp_path / precision))[0]
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)
        assert (found["layers.1.weight"] - begin).abs().min() > 0.02  # it was trained


def _freed() -> tuple[list[bool], bool]:
    accelerator, gone = Accelerator(strategy="fsdp"), []
    for _ in range(2):
        model = make(1)
        gone.append(weakref.ref(model))
        model, optimizer = accelerator.prepare(model, model.configure_optimizers())
        accelerator.backward(_loss(model, words(4).tensors))
        optimizer.step()
        model, optimizer = accelerator.free_memory(model, optimizer)
        gc.collect()
    return [each() is None for each in gone], accelerator.preparation.models == []


def test_free_memory_forgets_sharded_models(two_processes: Run) -> None:
    assert two_processes(_freed) == [([True, True], True)] * 2


class Branching(nn.Module):
    """Uses a second layer in every other pass, and a third one never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        found: Tensor = torch.tanh(self.first(x))
        return self.second(found) if both else found


def _late_gradients(strategy: Any, precision: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model, accelerator = (
        Branching(),
        Accelerator(strategy=strategy, mixed_precision=precision, gradient_accumulation_steps=2),
    )
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.arange(8.0).view(2, 4) / 8, step % 2 == 1).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("finds", [False, True])
def test_gradients_that_come_first_in_a_windows_last_batch(two_processes: Run, finds: bool) -> None:
    for precision in ("bf16", "fp16"):
        wanted = _late_gradients("single", precision)
        strategy = {"name": "fsdp", "wrap": "none", "find_unused_parameters": finds}
        found = two_processes(_late_gradients, strategy, precision)[0]
        torch.testing.assert_close(found, wanted, atol=0.02, rtol=0)
