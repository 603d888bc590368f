"""Sequences in parts under the Trainer and the Accelerator, by exchanging heads: against one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from loopwright import SkipBatch
from loopwright.distributed.errors import DataError
from loopwright.distributed.parallelism import DeepSpeedSequenceParallelConfig, ParallelismConfig
from loopwright.trainer.accelerator import Accelerator

from .attending import LENGTH, PLAN, WORDS, Attends, prepared, train, words
from .sharded import close, fit, state_of

Run = Callable[..., list[Any]]
SETTINGS: dict[str, Any] = {"max_epochs": 2, "accumulate": 2, "clip_norm": 0.5, "val_every": 2}


def _train_each(cases: list[tuple[int, dict[str, Any]]]) -> list[Any]:
    return [train(size, SETTINGS | options)[:4] for size, options in cases]


def _fsdp(mesh: dict[str, int], **options: Any) -> dict[str, Any]:
    return {"strategy": {"name": "fsdp", "mesh": mesh, "wrap": "Layer", **options}}


def _compare(found: list[Any], wanted: Any, tolerance: float = 1e-5) -> None:
    losses, metrics, weights, counters = wanted
    for own_losses, own_metrics, _, own_counters in found:
        assert own_losses == pytest.approx(losses, abs=tolerance)
        assert own_metrics == pytest.approx(metrics, abs=tolerance)
        assert own_counters == counters
    close(found[0][2], weights, tolerance)


def test_numbers_of_one_process(two_processes: Run) -> None:
    (wanted,) = _train_each([(8, {})])
    assert wanted[0][-1] < wanted[0][0] - 0.1
    mesh = {"sequence": 2}
    cases = [(8, _fsdp(mesh)), (8, _fsdp(mesh, activation_checkpointing=True, reshard_after_forward=False))]
    first, second = two_processes(_train_each, [*cases, (8, _fsdp(mesh) | {"precision": "bf16"})])
    for index in range(len(cases)):
        _compare([first[index], second[index]], wanted)
    (rounded,) = _train_each([(8, {"precision": "bf16"})])
    _compare([first[2], second[2]], rounded, 0.03)


def test_mean_losses_of_steps(two_processes: Run) -> None:
    wanted = _own_loop(None)
    for losses, norms, _ in (found := two_processes(_own_loop, 2)):
        assert losses == pytest.approx(wanted[0], abs=1e-5)
        assert norms == pytest.approx(wanted[1], abs=1e-5)
    close(found[0][2], wanted[2])


def _own_loop(size: int | None) -> Any:
    """An own loop, with half of the backward passes behind their context."""
    config = None if size is None else ParallelismConfig(sp_size=size)
    accelerator = Accelerator(gradient_accumulation_steps=2, parallelism_config=config)
    torch.manual_seed(1)
    model: Any = Attends(num_key_heads=1)
    optimizer = model.configure_optimizers()
    model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(words(32), batch_size=8))
    losses, norms = [], []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "maybe_context_parallel has no effect" if size is None else "nothing")
        for index, (batch,) in enumerate(data):
            buffers, is_behind = prepared(batch), index % 2
            with accelerator.accumulate(model):
                with accelerator.maybe_context_parallel(buffers, [1, 1, 1], {*buffers} if is_behind else None):
                    loss = F.cross_entropy(model(buffers[0], buffers[2]).flatten(0, 1), buffers[1].flatten())
                    if not is_behind:
                        accelerator.backward(loss)
                if is_behind:
                    accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            assert buffers[0].shape[1] == (LENGTH // 2 if is_behind and size else LENGTH)
    return losses, norms, accelerator.get_state_dict(model)


def _axes() -> Any:
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length=6, sp_seq_length_is_variable=False)
    accelerator = Accelerator(parallelism_config=ParallelismConfig(sp_size=2, sp_handler=handler))
    mesh = accelerator.torch_device_mesh
    assert mesh is not None
    context = accelerator.maybe_context_parallel([torch.zeros(2, 8)], [1])
    with pytest.raises(DataError, match="got sequences of 8, and sp_handler has sp_seq_length=6"), context:
        pass
    ranks = accelerator.context_parallel_rank, accelerator.data_parallel_rank, accelerator.tensor_parallel_rank
    again = Accelerator(parallelism_config=ParallelismConfig(), strategy={"name": "fsdp", "mesh": {"sequence": 2}})
    assert again.parallelism_config is not None
    return type(accelerator.strategy).__name__, mesh["sp"].size(), ranks, again.parallelism_config.sp_size


def test_the_axis_of_an_accelerator(two_processes: Run) -> None:
    assert two_processes(_axes) == [("FSDPStrategy", 2, (index, 0, 0), 2) for index in range(2)]


def _save(path: str) -> Any:
    options = SETTINGS | _fsdp({"sequence": 2, "shard": 2})
    *found, trainer = train(4, options | {"max_epochs": 1})
    trainer.save_state(path)
    return found


@pytest.mark.slow
def test_beside_other_axes(four_processes: Run, tmp_path: Path) -> None:
    (wanted,) = _train_each([(8, {})])
    meshes = [{"sequence": 2, "shard": 2}, {"sequence": 2, "replicate": 2}, {"sequence": 4}]
    cases = [(8 if mesh["sequence"] == 4 else 4, _fsdp(mesh)) for mesh in meshes]
    cases.append((8, _fsdp({"sequence": 2, "tensor": 2}, tensor_plan=PLAN)))
    found = four_processes(_train_each, cases)
    for index in range(len(cases)):
        _compare([process[index] for process in found], wanted)
    path = str(tmp_path / "saved")
    begun = four_processes(_save, path)[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the resumed run can't be equal bit for bit")
        losses, metrics, weights, *_ = train(8, SETTINGS, path)
    assert begun[0] + losses == pytest.approx(wanted[0], abs=1e-5)
    assert metrics == pytest.approx(wanted[1], abs=1e-5)
    close(weights, wanted[2])


class Skips(Attends):
    """Leaves batches, after its sequences were cut: in one of two shares another one than in the other."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        buffers = prepared(batch[0])
        with self.cut(buffers):
            if batch_idx == 2 or (batch_idx == 3 and batch[0][0, 0] == 7):
                raise SkipBatch
            return self.loss(*buffers)


def _skip(mesh: dict[str, int]) -> Any:
    torch.manual_seed(1)
    options = {"max_epochs": 1, "accumulate": 2, **_fsdp(mesh)}
    data = words(40)
    data.tensors[0][24, 0], data.tensors[0][28, 0] = 7, 1  # of the fourth batch of each share
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "maybe_context_parallel has no effect")
        trainer = fit(Skips(), DataLoader(data, batch_size=4), **options)
    return state_of(trainer), trainer.state.samples


@pytest.mark.slow
def test_batches_that_are_left_out(two_processes: Run, four_processes: Run) -> None:
    wanted, samples = two_processes(_skip, {"shard": 2})[0]
    for found, own_samples in four_processes(_skip, {"shard": 2, "sequence": 2}):
        assert own_samples == samples
        close(found or wanted, wanted)


def _llama(size: int | None) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = None if size is None else ParallelismConfig(sp_size=size)
    accelerator = Accelerator(parallelism_config=config, strategy="auto" if size is None else "fsdp")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, **sizes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, draws = [], torch.Generator().manual_seed(3)
    for _ in range(3):
        buffers = prepared(torch.randint(WORDS, (4, LENGTH + 1), generator=draws))
        mask = torch.ones_like(buffers[0])
        with nullcontext() if size is None else accelerator.maybe_context_parallel([*buffers, mask], [1] * 4):
            outputs = model(buffers[0], attention_mask=mask, position_ids=buffers[2], use_cache=False)
            loss: Tensor = F.cross_entropy(outputs.logits.flatten(0, 1), buffers[1].flatten())
            optimizer.zero_grad()
            accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, accelerator.get_state_dict(model)


def test_llama(two_processes: Run) -> None:
    pytest.importorskip("transformers")
    losses, weights = _llama(None)
    found = two_processes(_llama, 2)
    assert [each[0] for each in found] == [pytest.approx(losses, abs=1e-5)] * 2
    close(found[0][1], weights)
