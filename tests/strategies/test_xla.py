"""What the XLA strategy does without torch_xla: its errors, and a model moved to a device where parameters are new.

`make test-xla` runs tests/xla on torch_xla itself.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from loopwright import Accelerator, ConfigError, MissingDependencyError, Trainer, XLAStrategy
from loopwright.cli.launch import settings_of
from loopwright.cli.launch_merge import merged_options
from loopwright.cli.launch_options import read_launch
from loopwright.distributed.kinds import DistributedType, kind_of
from loopwright.strategies.xla_loading import BatchShapes
from loopwright.strategies.xla_moving import check_optimizer, follow, move_model, on_host

without_torch_xla = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is not None, reason="is about machines without torch_xla"
)
PAIR = r"pip install 'loopwright\[xla\]', which is pip install torch==2.9.0 torch_xla==2.9.0"


@without_torch_xla
def test_without_torch_xla_an_error_names_the_pair_of_versions() -> None:
    with pytest.raises(MissingDependencyError, match=f"strategy='xla' needs torch_xla, which is not installed.*{PAIR}"):
        Trainer(max_epochs=1, strategy="xla")


@without_torch_xla
def test_beside_another_torch_an_error_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "torch_xla"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('_XLAC.so: undefined symbol: _ZN5torch')")
    monkeypatch.syspath_prepend(tmp_path)
    text = rf"can't be imported beside torch {torch.__version__.replace('+', '.')} \(_XLAC.so: undefined symbol.*{PAIR}"
    with pytest.raises(MissingDependencyError, match=text):
        Accelerator(strategy={"name": "xla", "spmd": True})
    assert "torch_xla" not in sys.modules


@without_torch_xla
def test_the_launcher_chooses_it_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    options = merged_options(read_launch(["--tpu", "--num_processes", "4", "script.py"]).options)
    settings = settings_of(options)
    assert settings.num_processes == 4 and settings.environment["LOOPWRIGHT_USE_XLA"] == "true"
    monkeypatch.setenv("LOOPWRIGHT_USE_XLA", "true")
    with pytest.raises(MissingDependencyError, match="strategy='xla' needs torch_xla"):
        Accelerator()


def test_the_launcher_reads_files_of_accelerate_for_tpus(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: XLA\ndowncast_bf16: 'no'\nmain_training_function: main\n"
        "num_processes: 8\ntpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: false\n"
    )
    settings = settings_of(merged_options({"config_file": str(file)}))
    assert settings.num_processes == 8 and settings.environment["LOOPWRIGHT_USE_XLA"] == "true"
    settings = settings_of(merged_options({"config_file": str(file), "cpu": True}))
    assert "LOOPWRIGHT_USE_XLA" not in settings.environment


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (["--tpu", "--cpu"], "--cpu and --tpu exclude each other"),
        (["--tpu", "--use_fsdp"], "exclude each other"),
        (["--tpu_use_cluster"], "start the same command on each of its machines, with --tpu"),
        (["--downcast_bf16", "yes"], "Use --mixed_precision bf16"),
        (["--main_training_function", "main"], "each process runs the script as it is"),
    ],
)
def test_the_launcher_says_what_to_do_in_place_of_other_options(given: list[str], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        merged_options(read_launch([*given, "script.py"]).options)


@pytest.mark.parametrize("options", [{"spmd": "yes"}, {"fsdp": 1}, {"wrap": 0}, {"warn_of_shapes": None}])
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        XLAStrategy(**options)  # type: ignore[arg-type]


def test_its_devices_are_xla_in_one_process_too() -> None:
    assert kind_of("xla", 1) == kind_of("xla", 4) == DistributedType.XLA


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.output = nn.Linear(3, 4, bias=False)
        self.output.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.ones(2))
        self.norm.register_buffer("scale", self.scale)


def test_a_model_is_moved_with_its_shared_parts_and_its_optimizers() -> None:
    model = Tied()
    model.embedding.weight.mark = "kept"  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    kept = optimizer.param_groups[0]["params"]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    replaced = move_model(model, torch.device("meta"))
    follow([optimizer], replaced)
    assert model.output.weight is model.embedding.weight and model.embedding.weight.is_meta
    assert model.norm.scale is model.scale and model.scale.is_meta
    assert model.embedding.weight.mark == "kept"
    assert optimizer.param_groups[0]["params"] is kept
    assert [id(p) for p in kept] == [id(p) for p in model.parameters()]
    assert {id(p) for p in optimizer.state} == {id(p) for p in kept}
    assert all(state["momentum_buffer"].is_meta for state in optimizer.state.values())
    assert move_model(model, torch.device("meta")) == {}


def test_an_optimizer_of_old_parameters_is_refused() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    move_model(model, torch.device("meta"))
    with pytest.raises(
        ConfigError, match=r"parameter 0 of SGD, of shape \[3, 2\], is on cpu, while the models are on m"
    ):
        check_optimizer(optimizer, torch.device("meta"))


def test_copies_on_the_host_are_shared_as_the_tensors_are() -> None:
    model = Tied()
    state = on_host(model.state_dict(keep_vars=True))
    assert state["embedding.weight"] is state["output.weight"] and not state["output.weight"].requires_grad
    assert on_host({"a": [1, (None, "b")]}) == {"a": [1, (None, "b")]}


def test_shapes_are_told_once() -> None:
    shapes = BatchShapes("DataLoader")
    for _ in range(2):
        shapes.see({"words": torch.ones(4, 7), "length": 3})
    with pytest.warns(UserWarning, match=r"batches of DataLoader change their shapes: \[4, 7\], and now \[4, 9\]"):
        shapes.see({"words": torch.ones(4, 9), "length": 3})
    shapes.see({"words": torch.ones(4, 11), "length": 3})
    silent = BatchShapes(None)
    for size in (1, 2):
        silent.see(torch.ones(size))
