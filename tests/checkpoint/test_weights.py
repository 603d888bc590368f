"""Weight files: whole models through safetensors and back."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from loopwright.checkpoint.weights import LoadReport, load_weights, read_weights, save_weights
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
    assert load_weights(other, file) == LoadReport()
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
    note = {"name": "ten", "sizes": [1, 2.5, None, True], "limit": math.inf}
    module = Noted(note)
    file = save_weights(module, tmp_path / "w.safetensors")
    assert not module.weight.is_contiguous()
    other = Noted()
    load_weights(other, file)
    assert torch.equal(other.weight, torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))
    assert not other.weight.is_contiguous()
    assert other.note == note
    with safe_open(file, framework="pt") as opened:
        assert list(opened.keys()) == ["weight"]


@pytest.mark.parametrize(
    ("note", "message"),
    [
        ({"a": [1, {2, 3}]}, r"'_extra_state.a\[1\]' is of type set"),
        ({"a": (1, 2)}, r"'_extra_state.a' is of type tuple"),
        ({3: 1}, r"'_extra_state' has the key 3 of int"),
        (b"pickle", r"'_extra_state' is of type bytes, which can't be stored without pickle"),
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
    saved, _ = read_weights(save_weights(module, tmp_path / "w.safetensors"))
    for name, value in module.state_dict().items():
        assert saved[name].dtype == value.dtype
        assert saved[name].shape == value.shape
        assert saved[name].to(torch.complex64).tolist() == value.to(torch.complex64).tolist()


def test_strict_loading_lists_what_does_not_fit(tmp_path: Path) -> None:
    file = save_weights(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), tmp_path / "w.safetensors")
    other = nn.ModuleDict({"a": nn.Linear(2, 3), "c": nn.Linear(2, 2)})
    before = {name: value.clone() for name, value in other.state_dict().items()}
    expected = "missing (2): c.bias, c.weight; unexpected (2): b.bias, b.weight; mismatched (2): a.bias, a.weight"
    with pytest.raises(CheckpointError, match=re.escape(f"does not fit ModuleDict: {expected}.")):
        load_weights(other, file)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    report = load_weights(other, file, strict=False)
    assert set(report.missing) == {"c.weight", "c.bias"}
    assert set(report.unexpected) == {"b.weight", "b.bias"}
    assert set(report.mismatched) == {"a.weight", "a.bias"}


def test_strict_loading_lists_the_first_ten(tmp_path: Path) -> None:
    file = save_weights(nn.ModuleList(nn.Linear(1, 1) for _ in range(6)), tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected \(12\): 0.bias, .*, 4.weight, and 2 more"):
        load_weights(nn.ModuleList(), file)


def test_what_is_no_weights_file_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"w.safetensors' does not exist. In its folder: nothing"):
        load_weights(module, tmp_path / "w.safetensors")
    torch.save(module.state_dict(), tmp_path / "w.bin")
    with pytest.raises(CheckpointError, match=r"w.bin' can't be read as safetensors .* pickled weights"):
        load_weights(module, tmp_path / "w.bin")
    with pytest.raises(CheckpointError, match=r"model.safetensors' does not exist. In its folder: w.bin"):
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
