"""Checkpoints of which each process writes its part: they go between strategies and numbers of processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from loopwright.callbacks.callback import Callback
from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.callbacks.ema import EMA
from loopwright.checkpoint.parts import PartedTensors
from loopwright.checkpoint.reading import open_checkpoint
from loopwright.checkpoint.sharded import whole
from loopwright.checkpoint.weights import load_weights
from loopwright.cli.main import main
from loopwright.trainer.accelerator import Accelerator

from .sharded import close, fit, loader, make, state_of

Run = Callable[..., list[Any]]
SETTINGS: dict[str, Any] = {"max_epochs": 2, "accumulate": 2, "clip_norm": 0.5}


class Saves(Callback):
    """Saves at a step."""

    def __init__(self, path: str, at: int, **options: Any) -> None:
        self.path, self.at, self.options = path, at, options

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        if trainer.state.step == self.at:
            trainer.save_state(self.path, **self.options)


def begin(path: str, batch_size: int, options: dict[str, Any], at: int = 3, **how: Any) -> dict[str, Tensor]:
    """A whole training, which saves at a step."""
    return state_of(fit(make(1), loader(48, batch_size), callbacks=[Saves(path, at, **how)], **SETTINGS | options))


def go_on(path: str, batch_size: int, options: dict[str, Any], seed: int = 5) -> dict[str, Tensor]:
    """The rest of it, by a task that begins with other weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another number of processes
        return state_of(fit(make(seed), loader(48, batch_size), resume_from=path, **SETTINGS | options))


def begin_all(folder: str, size: int, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    return {name: begin(f"{folder}/{name}", size, options) for name, options in cases.items()}


def go_on_all(cases: list[tuple[str, dict[str, Any]]], size: int) -> list[dict[str, Tensor]]:
    return [go_on(path, size, options) for path, options in cases]


FSDP: dict[str, Any] = {"strategy": "fsdp"}
KINDS: dict[str, dict[str, Any]] = {
    "fsdp": FSDP,
    "copies": {"strategy": {"name": "fsdp", "mesh": [2, 1]}},
    "offload": {"strategy": {"name": "fsdp", "cpu_offload": True, "ignored_modules": [r"layers\.1"]}},
    "ddp": {"strategy": "ddp"},
}


def test_between_strategies_and_numbers_of_processes(two_processes: Run, three_processes: Run, tmp_path: Path) -> None:
    wanted = begin("one", 8, {})
    three_processes(begin_all, str(tmp_path / "three"), 4, {"fsdp": FSDP})
    ends, _ = two_processes(begin_all, str(tmp_path / "two"), 4, KINDS)
    for end in ends.values():
        close(end, wanted)
    saved = {name: str(tmp_path / "two" / name) for name in KINDS}
    formats = {name: open_checkpoint(path).manifest.format_version for name, path in saved.items()}
    assert formats == {"fsdp": 2, "copies": 2, "offload": 2, "ddp": 1}
    for path in saved.values():
        close(go_on(path, 8, {}), wanted)
        close(go_on(path, 8, FSDP), wanted)
    # The same number of processes and the same strategy: bit for bit.
    again, _ = two_processes(go_on_all, [(saved[name], options) for name, options in KINDS.items()], 4)
    for found, end in zip(again, ends.values(), strict=True):
        close(found, end, 0.0)
    crossed = [("one", FSDP), (saved["fsdp"], KINDS["ddp"]), (saved["ddp"], FSDP), (saved["copies"], FSDP)]
    paths = [(str(tmp_path / path), options) for path, options in crossed]
    for found in two_processes(go_on_all, [*paths, (str(tmp_path / "three" / "fsdp"), FSDP)], 4)[0][:-1]:
        close(found, wanted)


def test_three_processes_go_on_with_the_parts_of_two(two_processes: Run, three_processes: Run, tmp_path: Path) -> None:
    def whole(path: str) -> dict[str, Tensor]:
        return dict(open_checkpoint(path).weights().state_dict())

    path = str(tmp_path / "two")
    two_processes(begin, path, 3, FSDP, 3)  # in the middle of an epoch
    three_processes(save_again, path, str(tmp_path / "three"))
    two_processes(save_again, str(tmp_path / "three"), str(tmp_path / "again"))
    for name in ("three", "again"):
        close(whole(str(tmp_path / name)), whole(path), 0.0)
        before, after = (open_checkpoint(each).tree("optimizers") for each in (path, tmp_path / name))
        assert len(before[0]["state"]["state"]) == 19
        for number, values in before[0]["state"]["state"].items():
            close(after[0]["state"]["state"][number], values, 0.0)


def save_again(path: str, folder: str) -> None:
    """Loads a checkpoint, and saves another before any step."""

    class AtStart(Callback):
        def on_fit_start(self, trainer: Any, task: Any) -> None:
            trainer.save_state(folder)
            trainer.stop("saved")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(make(5), loader(48, 3), strategy="fsdp", resume_from=path, callbacks=[AtStart()], **SETTINGS)


def in_background(path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    end = begin(path, 4, FSDP, asynchronous=True)
    return end, go_on(path, 4, FSDP)


def test_in_the_background(two_processes: Run, tmp_path: Path) -> None:
    end, found = two_processes(in_background, str(tmp_path / "saved"))[0]
    close(found, end, 0.0)
    first, second = (load_file(tmp_path / "saved" / f"model.part-0000{index}.safetensors") for index in range(2))
    assert first["embedding.weight"].shape == (6, 8)
    assert second["embedding.weight"].shape == (5, 8)
    assert "head.weight" not in first


class Normed(nn.Module):
    """Batch norm, of which each process has statistics of its own, and a layer that is trained half the time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.norm(self.first(x)))
        return outputs


class Calls:
    """An object that the user has registered."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def own_loop(folder: str, at: int, loads: bool) -> Any:
    """Seven micro-batches in windows of two; the state is saved, or loaded, after `at` of them."""
    torch.manual_seed(9 if loads else 1)
    accelerator = Accelerator(strategy="fsdp", gradient_accumulation_steps=2)
    model, calls = Normed(), Calls()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(calls)
    data = torch.randn(7, 2, 3, 4, generator=torch.Generator().manual_seed(4))[:, accelerator.process_index]
    if loads:
        accelerator.load_state(f"{folder}/{at}")
    for index in range(at if loads else 0, 7):
        if index == at and not loads:
            accelerator.save_state(f"{folder}/{at}")
        with accelerator.accumulate(model):
            accelerator.backward(model(data[index]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        calls.count += 1
    state = {name: value.to_local() for name, value in model.state_dict().items() if hasattr(value, "to_local")}
    return state | dict(model.named_buffers()), calls.count


@pytest.mark.parametrize("at", [3, 4])
def test_an_own_loop_goes_on_bit_for_bit(two_processes: Run, tmp_path: Path, at: int) -> None:
    # After three the gradients of an open window are whole in each process, and belong to its state.
    whole = two_processes(own_loop, str(tmp_path), at, False)
    again = two_processes(own_loop, str(tmp_path), at, True)
    for (wanted, count), (found, calls) in zip(whole, again, strict=True):
        assert count == calls == 7
        close(found, wanted, 0.0)
    assert not torch.equal(whole[0][0]["norm.running_mean"], whole[1][0]["norm.running_mean"])


def keeps(folder: str) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    saver = ModelCheckpoint("2 steps", monitor="val/loss", directory=f"{folder}/states", restore_best=True)
    alone = ModelCheckpoint("2 steps", directory=f"{folder}/weights", save_weights_only=True)
    settings = {"val_every": "2 steps", "max_epochs": 3, "callbacks": [saver, alone]}
    trainer = fit(make(1, kind="sgd"), loader(24, 4), loader(8, 2), strategy="fsdp", **settings)
    kept = [str(saver.best_path), str(alone.last_path)]
    best = state_of(trainer)
    trainer.save_model(f"{folder}/model.safetensors")
    return kept, best, {}


def test_model_checkpoint(two_processes: Run, tmp_path: Path) -> None:
    (best_path, last_path), best, _ = two_processes(keeps, str(tmp_path))[0]
    close(dict(open_checkpoint(best_path).weights().state_dict()), best, 0.0)
    exported = make(7)
    load_weights(exported, tmp_path / "model.safetensors")
    close(dict(exported.state_dict()), best, 0.0)
    assert open_checkpoint(best_path).manifest.format_version == 2
    last = load_file(last_path)  # weights alone are whole, in one file
    assert last["embedding.weight"].shape == (11, 8)
    newest = max((tmp_path / "states").glob("*/manifest.json"), key=lambda each: each.stat().st_mtime_ns).parent
    close(dict(open_checkpoint(newest).weights()), last, 0.0)


def test_the_commands(two_processes: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "saved"
    two_processes(begin, str(path), 4, FSDP)
    assert main(["checkpoint", "verify", str(path)]) == 0
    assert main(["checkpoint", "show", str(path)]) == 0
    told = capsys.readouterr().out
    assert "format 2" in told
    assert "model: 19 tensors, 1,384 elements, float32, 1 tied: head.weight" in told
    assert main(["checkpoint", "show", str(path), "--tree", "optimizers"]) == 0
    assert "tensor float32 (11, 8)" in capsys.readouterr().out
    for command in (["checkpoint", "convert"], ["merge-weights"]):
        out = tmp_path / command[-1]
        assert main([*command, str(path), str(out), "--max_shard_size", "2KB"]) == 0
        found, again = make(7), make(8)
        load_weights(found, out)
        load_weights(again, path)
        close(dict(found.state_dict()), dict(again.state_dict()), 0.0)
        assert len(list(out.glob("model-*-of-*.safetensors"))) > 2
    part = path / "optimizers.part-00001.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    assert main(["checkpoint", "verify", str(path)]) == 1
    assert "optimizers.part-00001.safetensors: expected SHA-256" in capsys.readouterr().out


def validated(path: str) -> tuple[float, float]:
    task = make(1)
    trainer = fit(task, loader(8, 2), loader(9, 3), strategy="fsdp")
    load_weights(trainer.strategy.unwrap(trainer._newest("test").model), path)
    own = trainer.validate(task, loader(9, 3))["val/loss"]
    return own, float(sum(p.to_local().numel() for p in task.parameters() if hasattr(p, "to_local")))


def test_weights_of_parts_into_parts(two_processes: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    two_processes(begin, path, 4, FSDP)
    task = make(3)
    load_weights(task, path)
    trainer = fit(make(3), loader(8, 2), loader(9, 3))
    load_weights(trainer._newest("test").model, path)
    wanted = trainer.validate(trainer._newest("test").model, loader(9, 3))["val/loss"]
    for found, _ in two_processes(validated, path):
        assert found == pytest.approx(wanted, abs=1e-6)


def averaged(path: str, options: dict[str, Any], batch_size: int, loads: bool) -> dict[str, Tensor]:
    """The averages of a training, whose second half may begin from a checkpoint."""
    average = EMA(decay=0.5)
    callbacks = [average] if loads else [average, Saves(path, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another number of processes
        resumed = {"resume_from": path} if loads else {}
        fit(make(1), loader(48, batch_size), callbacks=callbacks, **resumed, **SETTINGS | options)
    return {name: whole(value).clone() for name, value in average.state_dict()["averages"].items()}


def test_averages_go_into_parts_and_out_of_them(two_processes: Run, tmp_path: Path) -> None:
    wanted = averaged("one", {}, 8, False)
    path = str(tmp_path / "two")
    two_processes(averaged, path, FSDP, 4, False)
    file = open_checkpoint(path).packed_tree("state")[1]
    assert isinstance(file, PartedTensors)
    assert len([name for name in file.places if "averages" in name]) == 19
    close(averaged(path, {}, 8, True), wanted)
    close(two_processes(averaged, path, FSDP, 4, True)[0], wanted)
    close(two_processes(averaged, str(tmp_path / "one"), FSDP, 4, True)[0], wanted)
