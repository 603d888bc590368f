"""Tensors of which each process writes a part: every placement, read again whole and in other parts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from loopwright.checkpoint.boxes import check_boxes
from loopwright.checkpoint.contents import Contents
from loopwright.checkpoint.manifest import Facts
from loopwright.checkpoint.parts import SAVE_KEY, Described, Index, PartedTensors, own_parts, part_file
from loopwright.checkpoint.reading import Checkpoint, open_checkpoint
from loopwright.checkpoint.saving import save_checkpoint, start_saving
from loopwright.checkpoint.sharded import fill_part, is_first_copy, parts_of, whole
from loopwright.checkpoint.stored import StoredTensor, read_all
from loopwright.checkpoint.tensor_file import TensorFile, write_tensors
from loopwright.checkpoint.weights import load_weights
from loopwright.distributed.errors import CheckpointError

Run = Callable[..., list[Any]]
SHAPES = [(7, 5), (1, 5), (8, 8, 3), (4,)]
MESHES: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(-1)]),
    ((4,), [Replicate()]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(0), Replicate()]),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 2), [_StridedShard(0, split_factor=3), Replicate()]),
]


@contextmanager
def as_process(index: int, sizes: Sequence[int]) -> Iterator[DeviceMesh]:
    """A mesh as one process of many sees it, in a group that sends nothing."""
    dist.init_process_group("fake", rank=index, world_size=prod(sizes), store=FakeStore())
    try:
        yield init_device_mesh("cpu", tuple(sizes))
    finally:
        dist.destroy_process_group()


def dealt(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


@pytest.mark.parametrize(("sizes", "placements"), MESHES, ids=lambda value: str(value))
def test_every_placement(sizes: tuple[int, ...], placements: list[Placement], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    full = {f"t{index}": torch.randn(shape, generator=generator) for index, shape in enumerate(SHAPES)}
    described: dict[int, Described] = {}
    for process in range(prod(sizes)):
        with as_process(process, sizes) as mesh:
            tensors: dict[str, Tensor] = {name: dealt(value, mesh, placements) for name, value in full.items()}
            held = {name: parts_of(tensor) for name, tensor in tensors.items()}
            own = own_parts(tensors | {"plain": torch.arange(3)}, is_main=process == 0)
            # Every part is where it says, and of copies one alone is written.
            for name, parts in held.items():
                for offset, values in parts:
                    box = tuple(slice(at, at + size) for at, size in zip(offset, values.shape, strict=True))
                    assert torch.equal(values, full[name][box])
                if not is_first_copy(tensors[name]):
                    assert all(not entry.startswith(name) for entry in own.tensors)
        described[process] = own.described
        if own.tensors:
            with (tmp_path / part_file("w", process)).open("xb") as file:
                write_tensors(file, own.tensors, {SAVE_KEY: "1"})
    (tmp_path / "w.parts.json").write_text(Index("w", described).text({"note": "x"}, "1"))
    stored = PartedTensors(tmp_path / "w.parts.json")
    assert stored.metadata == {"note": "x"}
    assert torch.equal(stored.read("plain"), torch.arange(3))
    for name, value in full.items():
        assert torch.equal(stored.read(name), value)
    read_in_other_parts(stored, full)


def read_in_other_parts(stored: PartedTensors, full: dict[str, Tensor]) -> None:
    for sizes, placements in MESHES:
        for process in range(prod(sizes)):
            with as_process(process, sizes) as mesh:
                for name, value in full.items():
                    wanted = dealt(value, mesh, placements)
                    found = dealt(torch.zeros_like(value, dtype=torch.float64), mesh, placements)
                    StoredTensor(stored, name, value.dtype, value.shape).read_into(found)
                    assert torch.equal(found.to_local(), wanted.to_local().double())
                    again = fill_part(dealt(torch.zeros_like(value), mesh, placements), value)
                    assert torch.equal(again.to_local(), wanted.to_local())


def test_boxes_of_a_file(tmp_path: Path) -> None:
    # Small rows are read whole, long ones piece by piece, and neighbours at once.
    sizes = [(7, 5, 3), (500, 1300), (3, 1100, 1300), (4000,), ()]
    tensors = {str(index): torch.randn(size) for index, size in enumerate(sizes)}
    with (tmp_path / "x").open("xb") as file:
        write_tensors(file, tensors)
    stored, draw = TensorFile(tmp_path / "x"), random.Random(1)
    for name, value in tensors.items():
        for _ in range(12):
            lengths = [draw.choice([draw.randint(1, size), size]) for size in value.shape]
            offset = [draw.randint(0, size - length) for size, length in zip(value.shape, lengths, strict=True)]
            wanted = value[tuple(slice(at, at + length) for at, length in zip(offset, lengths, strict=True))]
            turned = list(reversed(range(len(lengths))))
            targets = [torch.empty(lengths), torch.empty(lengths, dtype=torch.float64)]
            for target in (*targets, torch.empty(lengths[::-1]).permute(turned)):
                stored.read_part(name, offset, target)
                assert torch.equal(target, wanted.to(target.dtype))


FULL = {
    "rows": torch.arange(35.0).view(7, 5),
    "columns": torch.arange(12.0).view(3, 4),
    "copied": torch.arange(4.0),
    "few": torch.ones(1, 2),
}
PLACES = {"rows": Shard(0), "columns": Shard(1), "copied": Replicate(), "few": Shard(0)}


def state_of() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {name: dealt(value, mesh, [PLACES[name]]) for name, value in FULL.items()}
    state["tied"] = state["rows"]
    state["whole"] = torch.full((2,), float(dist.get_rank()))
    state["more"] = {"kind": "extra", "step": dist.get_rank()}
    return state


def contents_of() -> Contents:
    state = state_of()
    optimizer = {"state": {0: {"exp_avg": state["rows"], "again": state["rows"], "step": torch.tensor(3.0)}}, "lr": 0.1}
    own = {f"process-{dist.get_rank():05}": {"rank": dist.get_rank()}}
    return Contents(trees=own, shared_trees={"optimizers": optimizer, "small": {"step": 1}}, weights={"model": state})


def save(folder: str) -> list[Any]:
    path, contents = Path(folder), contents_of()
    save_checkpoint(path / "a", contents, Facts(world_size=dist.get_world_size()))
    pending = start_saving(path / "b", contents, Facts())
    for value in contents.weights["model"].values():
        if isinstance(value, DTensor):
            value.to_local().zero_()  # they are copied already
    pending.wait()
    return [read_parts(open_checkpoint(path / name)) for name in ("a", "b")]


def read_parts(checkpoint: Checkpoint) -> bool:
    """Whether a process reads its own parts again, of a state as it is in memory and as it is stored."""
    wanted = state_of()
    tree = {"state": {0: {"exp_avg": wanted["rows"] * 0, "again": torch.empty(0), "step": 0}}, "lr": 0.0}
    found = checkpoint.tree("optimizers", into=tree)
    same = torch.equal(found["state"][0]["exp_avg"].to_local(), wanted["rows"].to_local())
    lazy = checkpoint.stored_tree("optimizers")["state"][0]
    mine = wanted["rows"] * 0
    lazy["exp_avg"].read_into(mine)
    return same and found["lr"] == 0.1 and torch.equal(mine.to_local(), wanted["rows"].to_local())


def test_each_process_writes_its_part(three_processes: Run, tmp_path: Path) -> None:
    assert three_processes(save, str(tmp_path)) == [[True, True]] * 3
    for name in ("a", "b"):
        checkpoint = open_checkpoint(tmp_path / name)  # by one process alone
        assert checkpoint.manifest.format_version == 2
        assert checkpoint.tree_names == (
            "optimizers", "process-00000", "process-00001", "process-00002", "small"
        )  # fmt: skip
        assert checkpoint.weights_names == ("model",)
        weights = checkpoint.weights()
        for key, value in FULL.items():
            assert torch.equal(weights[key], value), key
        assert (weights["whole"].tolist(), weights["more"]) == ([0.0, 0.0], {"kind": "extra", "step": 0})
        assert weights.aliases == {"tied": "rows"}
        tree = checkpoint.tree("optimizers")
        assert torch.equal(tree["state"][0]["exp_avg"], FULL["rows"])
        assert tree["state"][0]["again"] is tree["state"][0]["exp_avg"]
        assert tree["state"][0]["step"].item() == 3.0
    sizes = [
        {name: list(value.shape) for name, value in load_file(tmp_path / "a" / part_file("model", process)).items()}
        for process in range(3)
    ]
    assert sizes == [
        {"rows": [3, 5], "columns": [3, 2], "copied": [4], "few": [1, 2], "whole": [2]},
        {"rows": [3, 5], "columns": [3, 2]},
        {"rows": [1, 5]},
    ]
    assert load_weights_of(tmp_path / "a")


def load_weights_of(path: Path) -> bool:
    module = torch.nn.Module()
    for name, value in FULL.items():
        module.register_buffer(name, torch.zeros_like(value))
    module.register_buffer("whole", torch.ones(2))
    report = load_weights(module, path, strict=False)
    assert report.missing == ()
    assert report.unexpected == ("more",)
    return all(torch.equal(module.get_buffer(name), value) for name, value in FULL.items())


def test_reading_opens_what_is_needed_alone(three_processes: Run, tmp_path: Path) -> None:
    three_processes(save, str(tmp_path))
    file = tmp_path / "a" / part_file("model", 2)
    file.write_bytes(b"x" * file.stat().st_size)
    stored = PartedTensors(tmp_path / "a" / "model.parts.json")
    rows = torch.zeros(2, 5)
    stored.read_part("rows", (2, 0), rows)  # of two files
    assert torch.equal(rows, FULL["rows"][2:4])
    with pytest.raises(CheckpointError, match=r"model.part-00002.safetensors' can't be read as safetensors"):
        stored.read("rows")
    file.write_bytes(b"x" * 19)
    with pytest.raises(CheckpointError, match=r"model.part-00002.safetensors has parts of 20 bytes .* it has 19"):
        PartedTensors(tmp_path / "a" / "model.parts.json")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"names model.part-00002.safetensors, which is missing"):
        PartedTensors(tmp_path / "a" / "model.parts.json")
    with pytest.raises(CheckpointError, match=r"model.part-00002.safetensors: missing"):
        open_checkpoint(tmp_path / "a", verify="sizes")


def test_stored_tensors_in_a_state_are_read_at_once(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    turned = torch.ones(3, 2, dtype=torch.complex64)
    tree = {"a": base, "b": [base, (torch.ones(2), 3)], "view": base[2:4], "turned": turned}
    save_checkpoint(tmp_path / "a", Contents(trees={"state": tree}), Facts())
    checkpoint = open_checkpoint(tmp_path / "a")
    assert checkpoint.manifest.format_version == 1
    lazy = checkpoint.stored_tree("state")
    assert isinstance(lazy["b"][1][0], StoredTensor)
    found = read_all(lazy)
    assert found["a"] is found["b"][0]
    assert found["a"].tolist() == base.tolist()
    assert (found["b"][1][0].tolist(), found["b"][1][1], found["view"].tolist()) == ([1.0, 1.0], 3, [2.0, 3.0])
    assert torch.equal(found["turned"], turned)


def refusals(folder: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    path = Path(folder) / "a"

    def text_of(value: Any, **options: Any) -> str:
        try:
            save_checkpoint(path, Contents(weights={"model": {"w": value}}), Facts(), **options)
        except CheckpointError as error:
            return str(error)
        return "no error"

    summands = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    complexes = DTensor.from_local(torch.ones(2, dtype=torch.complex128), mesh, [Shard(0)])
    part = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    texts = [text_of(summands), text_of(complexes), text_of(part, members=[dist.get_rank()])]
    other = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], shape=(4 + dist.get_rank(),), stride=(1,))
    return [*texts, text_of(other)]


def test_what_can_not_be_stored(two_processes: Run, tmp_path: Path) -> None:
    first, second = two_processes(refusals, str(tmp_path))
    for texts in (first, second):
        assert "'w' can't be stored: its processes hold summands of it" in texts[0]
        assert "it has the dtype torch.complex128, which safetensors does not know" in texts[1]
        assert "the parts have 2 elements, and the shape [4] has 4. All processes that hold a part have to" in texts[2]
        assert "'w' has the shape [4] and the dtype float32 on one process, [5] and float32 on process 1" in texts[3]
    assert list(tmp_path.iterdir()) == []


def save_twice(folder: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parts"))["parts"]  # each has one of its own
    value: Any = DTensor.from_local(torch.arange(3.0), mesh, [Shard(0)])
    save_checkpoint(Path(folder) / "a", Contents(weights={"model": {"w": value}}), Facts())
    return sorted(path.name for path in (Path(folder) / "a").iterdir())


def test_copies_that_no_mesh_tells_of_are_written_once(two_processes: Run, tmp_path: Path) -> None:
    first, _ = two_processes(save_twice, str(tmp_path))
    assert first == ["manifest.json", "model.part-00000.safetensors", "model.parts.json"]
    assert open_checkpoint(tmp_path / "a").weights()["w"].tolist() == [0.0, 1.0, 2.0]


def change_of(**changes: Any) -> Callable[[Any], Any]:
    """Changes of the first part of a tensor in an index."""
    return lambda entry: entry["parts"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: entry["parts"].pop(), r"at 'w': ValueError: the parts have 2 elements, and the shape \[4\] has"),
        (change_of(offset=[3]), r"the part \[2\] at \[3\] lies outside of the shape \[4\]"),
        (change_of(offset=[-1]), r"the part \[2\] at \[-1\] lies outside of the shape \[4\]"),
        (change_of(offset=[1]), r"the parts \[2\] at \[1\] and \[2\] at \[2\] overlap"),
        (change_of(offset=[0, 0]), r"the part \[2\] at \[0, 0\] has other dimensions than \[4\]"),
        (change_of(offset=[0.5]), r"at 'w': TypeError"),
        (change_of(shape=[-2]), r"at 'w': ValueError: \[-2\] is the shape of no tensor"),
        (change_of(file="../x"), r"names the file '../x', which is not beside"),
        (change_of(file="m.part-00001.safetensors"), r"'w' of m.part-00001.safetensors is a part already"),
        (change_of(file="m.part-00009.safetensors"), r"names m.part-00009.safetensors, which is missing"),
        (change_of(file=".."), r"names \.\., which is missing"),
        (change_of(tensor="v"), r"has 'v' of float32 \(2,\), and no such tensor is there"),
        (lambda entry: entry.update(dtype="os.system"), r"is no index of parts, at 'w': KeyError: 'os.system'"),
        (lambda entry: entry.update(dtype="int32"), r"has 'w' of int32 \(2,\), and it has float32 \(2,\)"),
        (lambda entry: entry.update(shape=[2**40] * 2, parts=[]), r"1099511627776\] is the shape of no tensor"),
        (
            lambda entry: promise_much(entry),
            r"m.part-00000.safetensors has parts of 68719476736 bytes together",
        ),
    ],
)
def test_damaged_indexes(tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    described: dict[int, Described] = {
        process: {"w": ["float32", [4], [["w", [2 * process], [2]]]]} for process in range(2)
    }
    for process in range(2):
        with (tmp_path / part_file("m", process)).open("xb") as file:
            write_tensors(file, {"w": torch.ones(2)}, {SAVE_KEY: "1"})
    index = json.loads(Index("m", described).text({}, "1"))
    change(index["tensors"]["w"])
    (tmp_path / "m.parts.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        PartedTensors(tmp_path / "m.parts.json").read("w")


def promise_much(entry: Any) -> None:
    """More than any memory."""
    entry.update(shape=[2**34])
    entry["parts"] = [entry["parts"][0] | {"shape": [2**34]}]


def test_boxes_that_make_up_a_tensor() -> None:
    draw = random.Random(1)
    for _ in range(50):
        shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 3)))
        boxes = [((0,) * len(shape), shape)]
        for _ in range(draw.randint(0, 6)):  # one is cut in two
            offset, sizes = boxes.pop(draw.randrange(len(boxes)))
            dim = draw.randrange(len(shape))
            cut = draw.randint(0, sizes[dim])
            first, second, begin = list(sizes), list(sizes), list(offset)
            first[dim], second[dim], begin[dim] = cut, sizes[dim] - cut, offset[dim] + cut
            boxes += [(offset, tuple(first)), (tuple(begin), tuple(second))]
        check_boxes(shape, boxes)
        counts = torch.zeros(shape)
        moved = draw.randrange(len(boxes))
        offset, sizes = boxes[moved]
        places = zip(shape, sizes, strict=True)
        boxes[moved] = (tuple(draw.randint(0, whole - size) for whole, size in places), sizes)
        for offset, sizes in boxes:
            counts[tuple(slice(at, at + size) for at, size in zip(offset, sizes, strict=True))] += 1
        if bool((counts == 1).all()):
            check_boxes(shape, boxes)
        else:
            with pytest.raises(ValueError, match="overlap"):
                check_boxes(shape, boxes)


def test_parts_of_two_saves_are_not_mixed(two_processes: Run, tmp_path: Path) -> None:
    two_processes(save, str(tmp_path))
    for name in ("model", "optimizers"):
        file = part_file(name, 1)
        (tmp_path / "a" / file).write_bytes((tmp_path / "b" / file).read_bytes())
    checkpoint = open_checkpoint(tmp_path / "a", verify="sizes")
    for read in (checkpoint.weights().state_dict, lambda: checkpoint.tree("optimizers")):
        with pytest.raises(CheckpointError, match=r"is of the save '\w{16}', and \w+.part-00001.* is of '\w{16}'"):
            read()


def test_a_whole_tensor_is_one_part() -> None:
    value = torch.ones(2, 3)
    assert [(part.offset, part.values.shape) for part in parts_of(value)] == [((0, 0), value.shape)]
    assert whole(value) is value
