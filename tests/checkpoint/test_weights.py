"""Weight files: whole models through safetensors and back."""

from __future__ import annotations

import json
import math
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from loopwright.checkpoint.others import open_weights
from loopwright.checkpoint.weights import LoadReport, load_weights, save_weights, write_weights
from loopwright.distributed.errors import CheckpointError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


class Untied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)


class OddName(nn.Module):
    """Names that look like those of wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod_x = nn.Parameter(torch.randn(2))
        self.module = nn.Linear(2, 2)
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.module(x)) * self._orig_mod_x  # type: ignore[no-any-return]


class Noted(nn.Module):
    """A transposed weight, and state that is no tensor."""

    def __init__(self, note: Any = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3).t() if note else torch.zeros(2, 3).t())
        self.note = note

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def keys(path: Path) -> list[str]:
    return sorted(load_file(path))


def test_file_is_in_the_layout_of_hugging_face(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    file = save_weights(module, tmp_path / "out")
    assert file == tmp_path / "out" / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    loaded = load_file(file)
    assert loaded.keys() == module.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in module.state_dict().items())
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert not load_weights(other, tmp_path / "out")
    assert all(torch.equal(value, loaded[name]) for name, value in other.state_dict().items())


def test_b37_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    module = Tied()
    file = save_weights(module, tmp_path / "tied.safetensors")
    stored = load_file(file)
    assert sum(value.numel() for value in stored.values()) == 15
    other = Tied()
    assert (report := load_weights(other, file)) == LoadReport()
    assert (str(report), bool(report)) == ("everything fits", False)
    assert other.embed.weight.data_ptr() == other.head.weight.data_ptr()
    assert torch.equal(other.head.weight, module.embed.weight)


def test_tied_file_fills_an_untied_module_and_the_other_name_fills_a_tied_one(tmp_path: Path) -> None:
    module = Tied()
    untied = Untied()
    load_weights(untied, save_weights(module, tmp_path / "tied.safetensors"))
    assert torch.equal(untied.head.weight, module.embed.weight)
    assert untied.head.weight.data_ptr() != untied.embed.weight.data_ptr()
    save_file({"head.weight": torch.full((5, 3), 2.0)}, tmp_path / "other.safetensors", metadata={"format": "pt"})
    load_weights(module, tmp_path / "other.safetensors")
    assert torch.equal(module.embed.weight, torch.full((5, 3), 2.0))


def test_two_values_for_tied_weights_are_a_mismatch(tmp_path: Path) -> None:
    file = save_weights(Untied(), tmp_path / "untied.safetensors")
    with pytest.raises(CheckpointError, match=r"does not fit Tied: mismatched \(1\): head.weight"):
        load_weights(Tied(), file)


def test_parts_of_one_memory_are_stored_apart(tmp_path: Path) -> None:
    flat = torch.arange(6.0)
    module = nn.ParameterDict({"whole": nn.Parameter(flat), "part": nn.Parameter(flat[:2])})
    file = save_weights(module, tmp_path / "w.safetensors")
    assert {name: value.tolist() for name, value in load_file(file).items()} == {
        "whole": [0, 1, 2, 3, 4, 5],
        "part": [0, 1],
    }
    assert module["part"].data_ptr() == module["whole"].data_ptr()


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def compiled_inside(module: OddName) -> nn.Module:
    module.net[0] = compiled(module.net[0])
    return module


def distributed(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


@pytest.mark.usefixtures("process_group")
def test_b38_wrappers_leave_no_trace_in_the_names(tmp_path: Path) -> None:
    plain = OddName()
    expected = sorted(plain.state_dict())
    x = torch.randn(4, 2)

    def output_of(module: nn.Module) -> Tensor:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return module(x)  # type: ignore[no-any-return]

    wrappers: dict[str, Callable[[Any], nn.Module]] = {
        "plain": lambda m: m,
        "compiled": compiled,
        "inside": compiled_inside,
        "distributed": lambda m: distributed(compiled(m)),
    }
    for name, wrap in wrappers.items():
        source = OddName()
        output = output_of(source)
        file = save_weights(wrap(source), tmp_path / f"{name}.safetensors")
        assert keys(file) == expected, name
        assert not load_weights(plain, file)
        assert torch.equal(output_of(plain), output)
        for other_name, other_wrap in wrappers.items():
            other = OddName()
            assert not load_weights(other_wrap(other), file), (name, other_name)
            assert torch.equal(output_of(other), output)


def test_b104_transposed_weight_and_text_entry_round_trip(tmp_path: Path) -> None:
    note = {"name": "ten", "sizes": [1, 2.5, None, True], "limit": math.inf, 3: ({4}, b"x"), "amax": torch.ones(2)}
    module = Noted(note)
    file = save_weights(module, tmp_path / "w.safetensors")
    assert not module.weight.is_contiguous()
    other = Noted()
    load_weights(other, file)
    assert torch.equal(other.weight, torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))
    assert not other.weight.is_contiguous()
    assert torch.equal(other.note.pop("amax"), note.pop("amax"))
    assert other.note == note
    with safe_open(file, framework="pt") as opened:
        assert sorted(opened.keys()) == ["_extra_state.amax", "weight"]


@pytest.mark.parametrize(
    ("note", "message"),
    [
        ({"a": [1, object()]}, r"_extra_state\.a\[1\] is of type object, which can't be stored"),
        ({(1,): nn.Linear(1, 1)}, r"_extra_state\[\(1,\)\] is of type torch.nn.modules.linear.Linear"),
        (lambda: 1, r"_extra_state is of type function"),
    ],
)
def test_state_that_can_not_be_stored_is_named_and_nothing_is_written(tmp_path: Path, note: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_weights(Noted(note), tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.empty(2, device="meta"), r"'weight' can't be stored: it has no values \(device meta\)"),
        (torch.ones(2, dtype=torch.complex128), r"'weight' can't be stored: it has the dtype torch.complex128"),
        (torch.eye(2).to_sparse(), r"'weight' can't be stored: it has the layout torch.sparse_coo; make it dense"),
    ],
)
def test_tensors_that_can_not_be_stored_are_named(tmp_path: Path, value: Tensor, message: str) -> None:
    module = nn.Module()
    module.register_buffer("weight", value)
    with pytest.raises(CheckpointError, match=message):
        save_weights(module, tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_every_dtype_comes_back_as_it_was(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.uint8, torch.bool]
    dtypes += [torch.complex64, torch.float8_e4m3fn, torch.uint32]
    module = nn.Module()
    for dtype in dtypes:
        module.register_buffer(f"of_{str(dtype).rpartition(chr(46))[2]}", torch.ones(3).to(dtype))
    module.register_buffer("empty", torch.empty(0, 2))
    module.register_buffer("scalar", torch.tensor(2.0))
    saved = open_weights(save_weights(module, tmp_path / "w.safetensors"))
    for name, value in module.state_dict().items():
        assert saved[name].dtype == value.dtype
        assert saved[name].shape == value.shape
        assert saved[name].to(torch.complex64).tolist() == value.to(torch.complex64).tolist()


def test_strict_loading_lists_what_does_not_fit(tmp_path: Path) -> None:
    file = save_weights(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), tmp_path / "w.safetensors")
    other = nn.ModuleDict({"a": nn.Linear(2, 3), "c": nn.Linear(2, 2)})
    before = {name: value.clone() for name, value in other.state_dict().items()}
    shapes = "a.weight (saved as (2, 2), here (3, 2)), a.bias (saved as (2,), here (3,))"
    expected = f"missing (2): c.weight, c.bias; unexpected (2): b.weight, b.bias; mismatched (2): {shapes}"
    with pytest.raises(CheckpointError, match=re.escape(f"does not fit ModuleDict: {expected}.")):
        load_weights(other, file)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    report = load_weights(other, file, strict=False)
    assert set(report.missing) == {"c.weight", "c.bias"}
    assert set(report.unexpected) == {"b.weight", "b.bias"}
    assert set(report.mismatched) == {"a.weight", "a.bias"}


def test_strict_loading_lists_the_first_ten(tmp_path: Path) -> None:
    file = save_weights(nn.ModuleList(nn.Linear(1, 1) for _ in range(6)), tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected \(12\): 0.weight, .*, 4.bias, and 2 more"):
        load_weights(nn.ModuleList(), file)


def test_what_is_no_weights_file_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"w.safetensors' does not exist. In its folder: nothing"):
        load_weights(module, tmp_path / "w.safetensors")
    (tmp_path / "w.txt").write_text("weights")
    with pytest.raises(CheckpointError, match=r"w.txt' can't be read as safetensors \(its header is said to have"):
        load_weights(module, tmp_path / "w.txt")
    with pytest.raises(CheckpointError, match=r"has no weights: none of model.safetensors, .* is there. In it: w.txt"):
        load_weights(module, tmp_path)
    whole = save_weights(module, tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "w.safetensors").write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match=r"w.safetensors' can't be read as safetensors"):
        load_weights(module, tmp_path / "w.safetensors")


def test_weights_on_the_meta_device_are_refused(tmp_path: Path) -> None:
    file = save_weights(nn.Linear(2, 2), tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"without memory \(device meta\): weight, bias. Call module.to_empty"):
        load_weights(nn.Linear(2, 2, device="meta"), file)


def test_lazy_modules_take_their_shape_from_the_file(tmp_path: Path) -> None:
    file = save_weights(nn.Linear(4, 2), tmp_path / "w.safetensors")
    lazy = nn.LazyLinear(2)
    with pytest.raises(CheckpointError, match="'weight' can't be stored: it has no shape yet"):
        save_weights(lazy, tmp_path / "lazy.safetensors")
    load_weights(lazy, file)
    assert torch.equal(lazy.weight, load_file(file)["weight"])


def shards(folder: Path) -> dict[str, list[str]]:
    """For each file of weights of a folder, its tensors as the safetensors library reads them."""
    return {path.name: sorted(load_file(path)) for path in sorted(folder.glob("*.safetensors"))}


def test_f46_weights_are_spread_over_files_of_limited_size(tmp_path: Path) -> None:
    state = {name: torch.full((100,), float(ord(name))) for name in "dbca"}
    index = write_weights(state, tmp_path, max_shard_size="900B")
    assert index == tmp_path / "model.safetensors.index.json"
    assert shards(tmp_path) == {
        "model-00001-of-00002.safetensors": ["b", "d"],
        "model-00002-of-00002.safetensors": ["a", "c"],
    }
    values = json.loads(index.read_text())
    assert values["metadata"] == {"total_size": 1600}
    assert values["weight_map"] == {
        **dict.fromkeys("db", "model-00001-of-00002.safetensors"),
        **dict.fromkeys("ca", "model-00002-of-00002.safetensors"),
    }
    for path in (tmp_path, index, tmp_path / "model.safetensors"):
        other = nn.ParameterDict({name: nn.Parameter(torch.zeros(100)) for name in "abcd"})
        assert not load_weights(other, path)
        assert {name: value.unique().tolist() for name, value in other.items()} == {n: [ord(n)] for n in "abcd"}


def test_f46_files_of_an_earlier_save_do_not_stay(tmp_path: Path) -> None:
    module = nn.ParameterDict({name: nn.Parameter(torch.ones(100)) for name in "abcd"})
    (tmp_path / "model_1.safetensors").write_text("another model's")
    (tmp_path / "notes.txt").write_text("mine")
    others = ["model_1.safetensors", "notes.txt"]
    for size, expected in (
        (400, [f"model-0000{index}-of-00004.safetensors" for index in (1, 2, 3, 4)]),
        ("900B", [f"model-0000{index}-of-00002.safetensors" for index in (1, 2)]),
        ("900B", [f"model-0000{index}-of-00002.safetensors" for index in (1, 2)]),
    ):
        save_weights(module, tmp_path, max_shard_size=size)
        assert sorted(os.listdir(tmp_path)) == sorted([*expected, "model.safetensors.index.json", *others])
    save_weights(module, tmp_path, max_shard_size="5MB")
    assert sorted(os.listdir(tmp_path)) == sorted(["model.safetensors", *others])
    save_weights(module, tmp_path, max_shard_size=1)  # each weight is larger than that
    assert len(list(tmp_path.glob("model-*-of-00004.safetensors"))) == 4
    assert not (tmp_path / "model.safetensors").exists()


def test_f47_the_first_name_of_tied_weights_is_stored_also_in_shards(tmp_path: Path) -> None:
    module = Tied()
    save_weights(module, tmp_path, max_shard_size=1)
    assert shards(tmp_path) == {"model.safetensors": ["embed.weight"]}
    wide = nn.ModuleDict({"first": nn.Linear(3, 5), "tied": Tied()})
    index = save_weights(wide, tmp_path / "wide", max_shard_size=1)
    assert "tied.head.weight" not in json.loads(index.read_text())["weight_map"]
    other = nn.ModuleDict({"first": nn.Linear(3, 5), "tied": Tied()})
    assert not load_weights(other, index)
    assert torch.equal(other["tied"].head.weight, wide["tied"].embed.weight)


def test_indexes_that_can_not_be_followed_are_refused(tmp_path: Path) -> None:
    module = nn.ParameterDict({name: nn.Parameter(torch.ones(100)) for name in "ab"})
    index = save_weights(module, tmp_path, max_shard_size=400)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"files that are missing: model-00002-of-00002.safetensors. Copy them"):
        load_weights(module, tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "/etc/passwd"}}))
    with pytest.raises(CheckpointError, match="names files that are not beside it: /etc/passwd"):
        load_weights(module, tmp_path)
    for text in ("{", "[]", '{"weight_map": ["a"]}', "{}"):
        index.write_text(text)
        with pytest.raises(CheckpointError, match="is no index of weights"):
            load_weights(module, tmp_path)


def test_a_save_that_fails_keeps_the_files_before_it(tmp_path: Path) -> None:
    module = nn.ParameterDict({name: nn.Parameter(torch.ones(100)) for name in "abcd"})
    save_weights(module, tmp_path, max_shard_size=400)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    module["c"] = nn.Parameter(torch.ones(100_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_weights(module, tmp_path, max_shard_size=400)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


class Older(nn.Module):
    """Reads an older layout by a hook, and by code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.inner = nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}gain" in state:
            state[f"{prefix}scale"] = state.pop(f"{prefix}gain") * 2


def test_modules_that_read_older_layouts_still_do(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 2), Older())
    saved = {f"0.{name}": torch.full(value.shape, 3.0) for name, value in module[0].state_dict().items()}
    saved |= {f"1.inner.{name}": torch.full(value.shape, 4.0) for name, value in module[1].inner.state_dict().items()}
    saved["1.gain"] = torch.tensor([1.0, 5.0])
    save_file(saved, tmp_path / "w.safetensors")
    assert not load_weights(module, tmp_path / "w.safetensors")
    assert module[1].scale.tolist() == [2.0, 10.0]
    assert module[1].inner.weight.unique().tolist() == [4.0]
    assert module[0].weight.unique().tolist() == [3.0]
    assert module[0].weight.is_leaf and module[0].weight.requires_grad


def test_weights_are_converted_to_the_modules_formats_and_memory(tmp_path: Path) -> None:
    file = save_weights(nn.Linear(300, 40).double(), tmp_path / "w.safetensors")
    module = nn.Linear(300, 40).half()
    module.weight.data = torch.zeros(300, 40).half().t()
    expected = load_file(file)["weight"].half()
    assert not load_weights(module, file)
    assert torch.equal(module.weight, expected)
    assert module.weight.stride() == (1, 40)


def test_large_weights_of_another_format_are_read_in_pieces(tmp_path: Path) -> None:
    tensors = {"long": torch.randn(3_000_000), "wide": torch.randn(2, 1_500_000), "deep": torch.randn(3_000, 10, 100)}
    file = write_weights(tensors, tmp_path / "w.safetensors")
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(t.shape).double()) for name, t in tensors.items()})
    assert not load_weights(module, file)
    assert all(torch.equal(module[name], tensor.double()) for name, tensor in tensors.items())
