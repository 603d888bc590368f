"""Weights that other libraries wrote: read without running anything of them, loaded, and written anew."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from loopwright.checkpoint.contents import Contents
from loopwright.checkpoint.converting import convert_weights
from loopwright.checkpoint.manifest import Facts
from loopwright.checkpoint.others import open_weights
from loopwright.checkpoint.pickled import PickledWeights, read_pickle
from loopwright.checkpoint.reading import open_checkpoint
from loopwright.checkpoint.saving import save_checkpoint
from loopwright.checkpoint.sources import Renamed, plainly_named
from loopwright.checkpoint.weights import load_weights, save_weights
from loopwright.distributed.errors import CheckpointError, ConfigError

from ..nursery import nursery

SCRIPT = Path(__file__).with_name("foreign_files.py")


class Net(nn.Sequential):
    """As in the script."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        self[3].weight = self[2].weight


class Module(nn.Module):
    """The names of the script's LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Net()
        self.register_buffer("seen", torch.zeros(()))


class Evil:
    """What runs a command when it is unpickled in the ordinary way."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files that Accelerate and Lightning wrote."""
    for name in ("accelerate", "lightning"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    folder = tmp_path_factory.mktemp("foreign")
    done = nursery().run(SCRIPT, str(folder), cwd=folder, timeout=110)
    assert done.returncode == 0, done.stderr
    return folder


def equal(module: nn.Module, expected: dict[str, Tensor]) -> bool:
    state = module.state_dict()
    return state.keys() == expected.keys() and all(torch.equal(state[name], value) for name, value in expected.items())


def state_of(seed: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return dict(Net().state_dict())


class TestRealLibraries:
    @pytest.mark.parametrize(
        "name", ["whole", "sharded", "pickled", "pickled-sharded", "state", "pickled-state", "wrapped.pt"]
    )
    def test_weights_of_accelerate(self, foreign: Path, tmp_path: Path, name: str) -> None:
        expected = load_file(foreign / "expected.safetensors")
        net = Net()
        assert not load_weights(net, foreign / name)
        assert equal(net, expected)
        assert net[2].weight is net[3].weight
        (model,) = convert_weights(foreign / name, tmp_path / "out")
        stored = load_file(tmp_path / "out" / "model.safetensors")
        assert all(torch.equal(value, expected[each]) for each, value in stored.items())
        assert stored.keys() == expected.keys() - {"3.weight"}
        assert bool(model.renamed) == (name == "wrapped.pt")
        other = Net()
        load_weights(other, tmp_path / "out")
        assert equal(other, expected)

    def test_weights_of_lightning(self, foreign: Path, tmp_path: Path) -> None:
        expected = load_file(foreign / "expected.safetensors")
        module = Module()
        assert not load_weights(module, foreign / "plain.ckpt")
        assert equal(module.model, expected)
        net = Net()
        load_weights(net, foreign / "plain.ckpt", prefix="model.")
        assert equal(net, expected)
        with pytest.raises(CheckpointError, match=r"begin with 'model.' in the file: give prefix='model.'"):
            load_weights(net, foreign / "plain.ckpt")
        (model,) = convert_weights(foreign / "plain.ckpt", tmp_path / "out", prefix="model.")
        assert model.left_out == ("seen",)
        load_weights(net, tmp_path / "out")
        assert equal(net, expected)

    def test_what_else_lightning_has(self, foreign: Path) -> None:
        found = open_weights(foreign / "plain.ckpt")
        assert isinstance(found, PickledWeights)
        assert found.rest["hyper_parameters"] == {"width": 8, "note": None}
        assert (found.rest["global_step"], found.rest["epoch"]) == (2, 1)

    def test_classes_in_hyperparameters_are_named_and_can_be_allowed(self, foreign: Path) -> None:
        net = Net()
        with pytest.raises(CheckpointError, match=r"names argparse.Namespace: to read it would run their code"):
            load_weights(net, foreign / "classes.ckpt", prefix="model.")
        import argparse

        with torch.serialization.safe_globals([argparse.Namespace]):
            load_weights(net, foreign / "classes.ckpt", prefix="model.")
        assert net[2].weight.abs().sum() > 0

    def test_the_folder_of_distributed_checkpoint(self, foreign: Path) -> None:
        assert (foreign / "dcp" / ".metadata").is_file()
        net = Net()
        assert not load_weights(net, foreign / "dcp")
        assert equal(net, load_file(foreign / "expected.safetensors"))


class TestPickles:
    @pytest.mark.parametrize("name", ["w.bin", "w.pt", "w.pth", "w.ckpt", "old.pt"])
    def test_a_state_dict_of_torch_save(self, tmp_path: Path, name: str) -> None:
        state = state_of()
        torch.save(OrderedDict(state), tmp_path / name, _use_new_zipfile_serialization=name != "old.pt")
        net = Net()
        load_weights(net, tmp_path / name)
        assert equal(net, state)
        assert open_weights(tmp_path / name).aliases == {"3.weight": "2.weight"}

    @pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "module"])
    def test_a_state_dict_beside_other_things(self, tmp_path: Path, key: str) -> None:
        torch.save({"step": 3, key: state_of(), "optimizer": {"state": {}}}, tmp_path / "w.pt")
        found = open_weights(tmp_path / "w.pt")
        assert isinstance(found, PickledWeights)
        assert found.rest == {"step": 3, "optimizer": {"state": {}}}
        net = Net()
        load_weights(net, tmp_path / "w.pt")
        assert equal(net, state_of())

    def test_no_run_goes_on_from_such_a_file(self, tmp_path: Path) -> None:
        torch.save({"state_dict": state_of()}, tmp_path / "last.ckpt")
        with pytest.raises(
            CheckpointError, match=r"is no checkpoint: it is a file. .* Weights alone, .* by load_weights"
        ):
            open_checkpoint(tmp_path / "last.ckpt")

    def test_values_do_not_change_when_the_file_does(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(1000)}, tmp_path / "w.pt")
        value = open_weights(tmp_path / "w.pt")["a"]
        (tmp_path / "w.pt").write_bytes(bytes((tmp_path / "w.pt").stat().st_size))
        assert value.sum() == 1000

    @pytest.mark.parametrize("is_old", [False, True])
    def test_a_malicious_pickle_is_not_run(self, tmp_path: Path, is_old: bool) -> None:
        trap = tmp_path / "was-run"
        torch.save({"state_dict": state_of(), "x": Evil(trap)}, tmp_path / "w.ckpt",
                   _use_new_zipfile_serialization=not is_old)  # fmt: skip
        with pytest.raises(CheckpointError, match=r"is a pickle that names (posix|os).system: to read it would run"):
            load_weights(Net(), tmp_path / "w.ckpt")
        assert not trap.exists()

    @pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "manifest.json", "w.bin"])
    def test_a_bare_pickle_is_not_run_under_any_name(self, tmp_path: Path, name: str) -> None:
        trap = tmp_path / "was-run"
        folder = tmp_path / "in"
        folder.mkdir()
        (folder / name).write_bytes(pickle.dumps(Evil(trap)))
        for read in (lambda: load_weights(Net(), folder), lambda: load_weights(Net(), folder / name),
                     lambda: open_checkpoint(folder), lambda: convert_weights(folder, tmp_path / "out")):  # fmt: skip
            with pytest.raises(CheckpointError, match=re.escape(str(folder))):
                read()
        assert not trap.exists()
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("part", ["state.json", "state.safetensors", "model.safetensors", "manifest.json"])
    def test_a_pickle_in_a_checkpoint_is_not_run(self, tmp_path: Path, part: str) -> None:
        trap = tmp_path / "was-run"
        contents = Contents(trees={"state": {"a": torch.ones(2)}}, weights={"model": state_of()})
        checkpoint = open_checkpoint(save_checkpoint(tmp_path / "c", contents, Facts()))
        (tmp_path / "c" / part).write_bytes(pickle.dumps(Evil(trap)))
        with pytest.raises(CheckpointError, match=re.escape(part)):
            open_checkpoint(tmp_path / "c")
        if part != "manifest.json":  # also where nobody verified anything
            with pytest.raises(CheckpointError, match=re.escape(part)):
                checkpoint.load_weights_into(Net()) if part.startswith("model") else checkpoint.tree("state")
        assert not trap.exists()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ([torch.ones(1)], r"holds a list. Expected a state dict"),
            ({"generator": {"a": torch.ones(1)}, "disc": {}}, r"has no state dict: .* It has: generator, disc"),
            ({1: torch.ones(1)}, r"has no state dict: neither itself nor under 'state_dict'"),
            ({"a": torch.ones(1, dtype=torch.complex128)}, None),
        ],
    )
    def test_what_is_no_state_dict(self, tmp_path: Path, content: Any, message: str | None) -> None:
        torch.save(content, tmp_path / "w.pt")
        if message is None:
            with pytest.raises(CheckpointError, match=r"'a' can't be stored: it has the dtype torch.complex128"):
                convert_weights(tmp_path / "w.pt", tmp_path / "out")
            assert os.listdir(tmp_path) == ["w.pt"]
            return
        with pytest.raises(CheckpointError, match=message):
            open_weights(tmp_path / "w.pt")

    def test_damage_is_named(self, tmp_path: Path) -> None:
        torch.save(state_of(), tmp_path / "w.pt")
        data = (tmp_path / "w.pt").read_bytes()
        for damaged in (data[:-300], data[:10], b"", b"nonsense" * 10):
            (tmp_path / "w.pt").write_bytes(damaged)
            with pytest.raises(CheckpointError, match=r"w.pt' can't be read as a file of torch.save: .*may be damaged"):
                open_weights(tmp_path / "w.pt")

    def test_paths_and_other_harmless_classes_are_refused_too(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(1), "where": pathlib.PurePosixPath("x")}, tmp_path / "w.pt")
        with pytest.raises(CheckpointError, match=r"names pathlib\S*PurePosixPath"):
            read_pickle(tmp_path / "w.pt")


class TestFolders:
    def test_what_is_nowhere(self, tmp_path: Path) -> None:
        (tmp_path / "epoch=1.ckpt").touch()
        with pytest.raises(CheckpointError, match=r"has no weights: none of model.safetensors, .* In it: epoch=1.ckpt"):
            open_weights(tmp_path)
        with pytest.raises(CheckpointError, match=r"w.bin' does not exist. In its folder: epoch=1.ckpt"):
            open_weights(tmp_path / "w.bin")

    @pytest.mark.parametrize(
        ("name", "message"),
        [(".metadata", "is no index of torch.distributed.checkpoint"), ("zero_to_fp32.py", "a folder of DeepSpeed")],
    )
    def test_folders_whose_index_is_a_pickle(self, tmp_path: Path, name: str, message: str) -> None:
        (tmp_path / name).touch()
        with pytest.raises(CheckpointError, match=message):
            open_weights(tmp_path)

    @pytest.mark.parametrize("ending", [".safetensors", ".bin"])
    def test_an_index_that_does_not_agree_with_its_files(self, tmp_path: Path, ending: str) -> None:
        base = "model" if ending == ".safetensors" else "pytorch_model"
        index = tmp_path / f"{base}{ending}.index.json"
        first = tmp_path / f"{base}-00001-of-00002{ending}"
        save_file({"a": torch.ones(1)}, first) if ending == ".safetensors" else torch.save({"a": torch.ones(1)}, first)

        cases = {
            "names files that are missing": {"a": first.name, "b": f"{base}-00002-of-00002{ending}"},
            "names files that are not beside it": {"a": f"../{first.name}"},
            r"says that \S+ has b; it has not|says that \S+ has b, which it has not": {
                "a": first.name,
                "b": first.name,
            },
            "is no index of weights": ["a"],
        }
        for message, weight_map in cases.items():
            index.write_text(json.dumps({"weight_map": weight_map}))
            with pytest.raises(CheckpointError, match=message):
                open_weights(tmp_path)

    def test_safetensors_go_before_pickles(self, tmp_path: Path) -> None:
        torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
        save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
        assert open_weights(tmp_path)["a"] == 1


class TestNames:
    def source(self, tmp_path: Path, *names: str) -> PickledWeights:
        torch.save({name: torch.ones(1) for name in names}, tmp_path / "w.pt")
        return PickledWeights(tmp_path / "w.pt")

    @pytest.mark.parametrize(
        ("names", "plain"),
        [
            (["module.a", "module.b.c"], ["a", "b.c"]),
            (["module.a", "b"], ["module.a", "b"]),
            (["_orig_mod.module.a"], ["a"]),
            (["module._orig_mod.a", "module._orig_mod.module.b"], ["a", "module.b"]),
            (["net._orig_mod.a", "net.module.b"], ["net.a", "net.module.b"]),
        ],
    )
    def test_wrappers_without_the_module(self, tmp_path: Path, names: list[str], plain: list[str]) -> None:
        if plain[-1] == "module.b" and names[0].startswith("module._orig"):
            plain = ["a", "b"]  # all begin with it again, so that nothing tells whose it is
        assert list(plainly_named(self.source(tmp_path, *names))) == plain

    def test_a_module_keeps_the_names_that_it_has(self, tmp_path: Path) -> None:
        module = nn.ModuleDict({"module": nn.Linear(1, 1, bias=False)})
        torch.save({"module.weight": torch.full((1, 1), 4.0)}, tmp_path / "w.pt")
        load_weights(module, tmp_path / "w.pt")
        assert module["module"].weight.item() == 4
        plain = nn.Linear(1, 1, bias=False)
        load_weights(plain, tmp_path / "w.pt")
        assert plain.weight.item() == 4
        torch.save({"module.module.weight": torch.full((1, 1), 5.0)}, tmp_path / "w.pt")
        with pytest.raises(CheckpointError, match=r"unexpected \(1\): module.module.weight"):
            load_weights(module, tmp_path / "w.pt")

    def test_two_weights_of_one_new_name(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"'a' and '_orig_mod.a' would both be called 'a'"):
            plainly_named(self.source(tmp_path, "a", "_orig_mod.a"))

    def test_a_prefix_that_nothing_has(self, tmp_path: Path) -> None:
        torch.save({"net.a": torch.ones(1), "head.b": torch.ones(1)}, tmp_path / "w.pt")
        with pytest.raises(
            CheckpointError, match=r"no weights whose names begin with 'model.'. They begin with: head., net."
        ):
            load_weights(nn.Linear(1, 1), tmp_path / "w.pt", prefix="model.")

    def test_a_tied_name_stays_when_the_stored_one_is_left_out(self, tmp_path: Path) -> None:
        weight = torch.full((2, 2), 3.0)
        torch.save({"out.weight": weight, "model.weight": weight}, tmp_path / "w.pt")
        source = Renamed(PickledWeights(tmp_path / "w.pt"), lambda n: n[6:] if n.startswith("model.") else None)
        assert (list(source), dict(source.aliases)) == (["weight"], {})
        net = nn.Linear(2, 2, bias=False)
        load_weights(net, tmp_path / "w.pt", prefix="model.")
        assert torch.equal(net.weight, weight)


class TestConverting:
    def test_a_checkpoint_with_two_models(self, tmp_path: Path) -> None:
        contents = Contents(trees={"state": {"step": 1}}, weights={"model": state_of(1), "model_1": state_of(2)})
        path = save_checkpoint(tmp_path / "c", contents, Facts())
        models = convert_weights(path, tmp_path / "out", max_shard_size=300)
        assert [model.name for model in models] == ["model", "model_1"]
        assert {"model.safetensors.index.json", "model_1.safetensors.index.json"} < {*os.listdir(tmp_path / "out")}
        for base, seed in (("model", 1), ("model_1", 2)):
            net = Net()
            load_weights(net, tmp_path / "out", base=base)
            assert equal(net, state_of(seed))

    def test_to_torch_and_back(self, tmp_path: Path) -> None:
        torch.manual_seed(5)
        file = save_weights(Net(), tmp_path / "w.safetensors")
        convert_weights(file, tmp_path / "out", kind="torch")
        state = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
        net = Net()
        net.load_state_dict(state)
        assert equal(net, state_of())
        assert state["2.weight"].data_ptr() == state["3.weight"].data_ptr()
        convert_weights(tmp_path / "out", tmp_path / "again")
        assert load_file(tmp_path / "again" / "model.safetensors").keys() == load_file(file).keys()

    def test_what_is_there_stays_and_failures_leave_nothing(self, tmp_path: Path) -> None:
        file = save_weights(Net(), tmp_path / "w.safetensors")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").touch()
        with pytest.raises(CheckpointError, match=r"out' exists already, and nothing that exists is overwritten"):
            convert_weights(file, tmp_path / "out")
        with pytest.raises(CheckpointError, match=r"w.safetensors/out' can't be written: "):
            convert_weights(file, file / "out")
        with pytest.raises(ConfigError, match=r"to='onnx' is unknown. Accepted: safetensors, torch"):
            convert_weights(file, tmp_path / "new", kind="onnx")
        with pytest.raises(ConfigError, match=r"size='much'. Expected a number of bytes"):
            convert_weights(file, tmp_path / "new", max_shard_size="much")
        with pytest.raises(ConfigError, match=r"max_shard_size='5GB': a file of torch.save is not split"):
            convert_weights(file, tmp_path / "new", kind="torch", max_shard_size="5GB")
        assert sorted(os.listdir(tmp_path)) == ["out", "w.safetensors"]
        assert os.listdir(tmp_path / "out") == ["notes.txt"]

    def test_a_damaged_checkpoint_is_not_converted(self, tmp_path: Path) -> None:
        path = save_checkpoint(tmp_path / "c", Contents(weights={"model": state_of()}), Facts())
        data = bytearray((path / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (path / "model.safetensors").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"is damaged: model.safetensors: expected SHA-256 \w+, found \w+"):
            convert_weights(path, tmp_path / "out")
        assert os.listdir(tmp_path) == ["c"]
