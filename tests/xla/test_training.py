"""One process on one XLA device, against torch on the CPU and against itself."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch_xla = pytest.importorskip("torch_xla", reason="needs torch_xla: make test-xla", exc_type=ImportError)

from loopwright import EMA, Accelerator, ConfigError, DistributedType, ModelCheckpoint, set_seed  # noqa: E402
from loopwright.distributed import xla  # noqa: E402
from loopwright.distributed.random import random_tree, restore_random_tree, synchronize_rng_state  # noqa: E402

from .training import assert_equal, data, loader, make, numbers, state_of, trainer  # noqa: E402

torch_xla.real_devices()  # before the first backward pass of the process


def compiled_programs() -> int:
    import torch_xla.debug.metrics as metrics

    found = metrics.metric_data("CompileTime")
    return 0 if found is None else int(found[0])


def fit(strategy: Any = "xla", *, model: Any = None, resume_from: Any = None, **options: Any) -> Any:
    task, found = make(**(model or {})), trainer(strategy, **options)
    found.fit(task, loader(48, 8, shuffle=True), loader(16, 8), resume_from=resume_from)
    return task, found


@pytest.mark.parametrize("ties", [True, False])
def test_losses_are_those_of_torch_on_the_cpu(ties: bool) -> None:
    losses, metrics = {}, {}
    for strategy in ("single", "xla"):
        task = make(ties=ties)
        found = trainer(strategy, accumulate=2, clip_norm=0.5, log_every=1)
        found.fit(task, loader(56, 8, shuffle=True), loader(16, 8))  # an epoch ends with a window of one batch
        losses[strategy], metrics[strategy] = numbers(task.losses), found.metrics
        assert found.state.step == 8
    assert losses["xla"] == pytest.approx(losses["single"], abs=1e-5)
    assert metrics["xla"] == pytest.approx(metrics["single"], abs=1e-5)


def test_an_own_loop_is_torch_by_hand() -> None:
    def by_hand() -> list[float]:
        model, found = make(), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        batches = list(loader(32, 8))
        for index, (words, target) in enumerate(batches):
            loss = F.cross_entropy(model(words), target)
            (loss / 2).backward()
            found.append(loss.item())
            if index % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
        return found

    accelerator = Accelerator(strategy="xla", gradient_accumulation_steps=2)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(32, 8))
    found = []
    for words, target in batches:
        assert words.device.type == "xla"
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(words), target)
            accelerator.backward(loss)
            found.append(loss.detach())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    assert numbers(found) == pytest.approx(by_hand(), abs=1e-5)
    gathered = accelerator.gather_for_metrics(torch.arange(3, device=accelerator.device))
    assert gathered.tolist() == [0, 1, 2]
    accelerator.wait_for_everyone()
    assert accelerator.distributed_type == DistributedType.XLA
    state = accelerator.get_state_dict(model)
    assert {value.device.type for value in state.values()} == {"cpu"}


def test_a_resumed_run_is_the_one_that_was_never_stopped(working_folder: Path) -> None:
    model = {"drop": 0.3, "norm": nn.BatchNorm1d}
    whole, _ = fit(model=model, project_dir="whole")
    saved, _ = fit(model=model, project_dir="saved", callbacks=[ModelCheckpoint(every="1 steps")])
    assert_equal(state_of(whole), state_of(saved))  # saving leaves no trace
    fit(model=model, name="run", max_steps=8, callbacks=[ModelCheckpoint(every=8)])
    resumed, found = fit(model=model, name="run", callbacks=[ModelCheckpoint(every=8)], resume_from="latest")
    assert found.state.step == 12 and len(resumed.losses) == 4
    assert numbers(resumed.losses) == numbers(whole.losses)[8:]
    assert_equal(state_of(whole), state_of(resumed))


def test_checkpoints_go_to_other_strategies_and_come_from_them(working_folder: Path) -> None:
    whole, _ = fit("single", name="whole")
    for name, legs in {"to": ("xla", "single"), "from": ("single", "xla")}.items():
        fit(legs[0], name=name, max_steps=6, callbacks=[ModelCheckpoint(every=6)])
        lacks = pytest.warns(UserWarning, match=r"no random state of \['xla'\]") if name == "from" else nullcontext()
        with lacks:
            task, _ = fit(legs[1], name=name, callbacks=[ModelCheckpoint(every=6)], resume_from="latest")
        for key, value in state_of(whole).items():
            torch.testing.assert_close(state_of(task)[key], value, atol=1e-5, rtol=1e-5)


def test_validation_leaves_no_trace() -> None:
    model = {"drop": 0.3, "norm": nn.BatchNorm1d}
    states = [state_of(fit(model=model, val_every=every)[0]) for every in (None, "2 steps")]
    assert_equal(*states)


def test_shared_parameters_stay_one_and_are_written_once(working_folder: Path) -> None:
    task, found = fit(max_epochs=1)
    assert task.output.weight is task.embedding.weight and task.output.weight.device.type == "xla"
    groups = found.accelerator.preparation.optimizers[0].param_groups
    assert [id(p) for p in groups[0]["params"]] == [id(p) for p in task.parameters()]
    found.save_model("model")
    from safetensors.torch import load_file

    (file,) = Path("model").rglob("*.safetensors")
    stored = load_file(file)
    assert "output.weight" not in stored and torch.equal(stored["embedding.weight"], task.embedding.weight.cpu())
    assert "blocks.1.0.weight" in stored  # of the same shape, but a tensor of its own


def test_an_optimizer_follows_its_models_with_its_state() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1, momentum=0.9)
    (first(torch.ones(1, 2)) + second(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    before = optimizer.state[second.weight]["momentum_buffer"].clone()
    accelerator = Accelerator(strategy="xla")
    first, second, gated = accelerator.prepare(first, second, optimizer)
    assert {p.device.type for group in gated.param_groups for p in group["params"]} == {"xla"}
    assert torch.equal(optimizer.state[second.weight]["momentum_buffer"].cpu(), before)
    assert len(optimizer.state) == 4
    gated.step()


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    accelerator, model = Accelerator(strategy="xla"), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    accelerator.backward(model(torch.ones(1, 2, device=accelerator.device)).sum())
    with pytest.raises(ConfigError, match=r"parameter 0 of SGD, of shape \[2, 2\], is on cpu.*prepare\(model, opt"):
        optimizer.step()


def test_changing_shapes_are_warned_of_once() -> None:
    task = make()
    with pytest.warns(UserWarning, match=r"change their shapes: \[8, 6\], \[8\], and now \[4, 6\].*drop_last"):
        trainer(max_epochs=1).fit(task, loader(20, 8))
    trainer({"name": "xla", "warn_of_shapes": False}, max_epochs=1).fit(make(), loader(20, 8))
    trainer(max_epochs=1).fit(make(), DataLoader(data(20), 8, drop_last=True))


def test_steps_are_compiled_once_though_the_rate_changes() -> None:
    task, found = make(), trainer(max_epochs=1, val_every=None)
    counts: list[int] = []
    found.on("batch_end", lambda *_: counts.append(compiled_programs()))
    found.fit(task, loader(64, 8))
    assert len(counts) == 8 and len(set(counts[3:])) == 1, counts


def test_bf16_is_autocast() -> None:
    accelerator, model = Accelerator(strategy="xla", mixed_precision="bf16"), nn.Sequential(nn.Linear(4, 4))
    seen = []
    model[0].register_forward_hook(lambda module, args, outputs: seen.append(outputs.dtype))
    prepared = accelerator.prepare(model)
    outputs = prepared(torch.ones(2, 4, device=accelerator.device))
    assert seen == [torch.bfloat16] and outputs.dtype == torch.float32 and model[0].weight.dtype == torch.float32
    plain = numbers(fit(max_epochs=1)[0].losses)
    assert numbers(fit(max_epochs=1, precision="bf16")[0].losses) == pytest.approx(plain, abs=0.05)


def test_fp16_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision='fp16': XLA devices compute in bf16"):
        Accelerator(strategy="xla", mixed_precision="fp16")


def test_random_states_are_saved_and_put_back() -> None:
    device = torch_xla.device()
    set_seed(11)
    tree = random_tree(device)
    assert tree["xla"].device.type == "cpu" and tree["xla"].dtype == torch.int64
    first = torch.rand(4, device=device).cpu()
    xla.sync()
    second = torch.rand(4, device=device).cpu()
    assert not torch.equal(first, second)
    assert restore_random_tree(tree, device) == []
    assert torch.equal(torch.rand(4, device=device).cpu(), first)
    set_seed(11)
    assert torch.equal(torch.rand(4, device=device).cpu(), first)
    synchronize_rng_state("xla")  # one process: nothing to do


def test_syncs_draw_nothing() -> None:
    device, found = torch_xla.device(), []
    for times in (0, 3):
        set_seed(4)
        torch.rand(2, device=device)
        for _ in range(times):
            xla.sync(wait=True)
        found.append(torch.rand(2, device=device).cpu())
    assert torch.equal(*found)


def test_a_loader_of_torch_xla_is_read_without_its_threads() -> None:
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    plain = numbers(_losses_of(loader(32, 8)))
    assert numbers(_losses_of(MpDeviceLoader(loader(32, 8), torch_xla.device()))) == plain


def _losses_of(batches: Any) -> list[Tensor]:
    task = make()
    trainer(max_epochs=1).fit(task, batches)
    return task.losses


def test_averages_of_weights_are_those_of_the_cpu(working_folder: Path) -> None:
    found = {}
    for strategy in ("single", "xla"):
        average = EMA(decay=0.9)
        _, run = fit(strategy, callbacks=[average, ModelCheckpoint(every="1 epoch")], project_dir=strategy)
        found[strategy] = run.metrics["val/loss"]
    assert found["xla"] == pytest.approx(found["single"], abs=1e-5)


def test_batches_of_any_nesting_go_to_the_device() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    batch = {"words": [torch.ones(2), (torch.zeros(1), "name")], "packed": packed}
    accelerator = Accelerator(strategy="xla")
    (moved,) = list(accelerator.prepare_data_loader([batch]))
    assert moved["words"][0].device.type == moved["words"][1][0].device.type == "xla" and moved["words"][1][1] == "name"
    assert moved["packed"].data.device.type == "xla" and moved["packed"].batch_sizes.device.type == "cpu"


def test_a_prepared_loader_may_be_left_for_another_strategy() -> None:
    batches = Accelerator(strategy="xla").prepare(DataLoader(TensorDataset(torch.ones(4)), 2))
    again = Accelerator(strategy="single").prepare(batches)
    assert [batch[0].device.type for batch in again] == ["cpu", "cpu"]
