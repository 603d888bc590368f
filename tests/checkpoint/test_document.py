"""docs/checkpoint-format.md is enough to read a checkpoint: its reader is run, and its rules are applied by hand."""

from __future__ import annotations

import enum
import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from loopwright.checkpoint.contents import Contents
from loopwright.checkpoint.manifest import Facts, Manifest
from loopwright.checkpoint.saving import save_checkpoint
from loopwright.checkpoint.scalars import SMALL_DECODERS
from loopwright.checkpoint.tree import _BUILDERS

from .test_tree import CONTAINERS, SMALL_VALUES, assert_same, random_value

DOCUMENT = (Path(__file__).parents[2] / "docs" / "checkpoint-format.md").read_text()


def documented_reader(name: str = "read_tree") -> Any:
    code = re.search(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    return names[name]


def has_enumerations(value: Any) -> bool:
    return isinstance(value, enum.Enum) or re.search(r"Colour|Level|Kind", repr_of(value)) is not None


def repr_of(value: Any) -> str:
    return "" if isinstance(value, int) else repr(value)  # a long integer has none


def test_the_documented_reader_reads_every_value(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    small = [value for value in SMALL_VALUES if not has_enumerations(value)]
    random_values = [random_value(random.Random(seed), small=small) for seed in range(100, 130)]
    trees = {
        "small": small,
        "containers": [value for value in CONTAINERS if not has_enumerations(value)],
        "random": random_values,
        "tensors": {
            "base": base, "row": base[1], "turned": base.t(), "again": base, "bytes": base.view(torch.uint8)[3, 5:7],
            "complex": torch.randn(3, dtype=torch.complex128), "empty": torch.empty(0, 2), "scalar": torch.tensor(2.5),
        },
    }  # fmt: skip
    save_checkpoint(tmp_path / "a", Contents(trees=trees), Facts())
    read_tree = documented_reader()
    for name, expected in trees.items():
        assert_same(read_tree(tmp_path / "a", name), expected, name)
    tensors = read_tree(tmp_path / "a", "tensors")
    assert tensors["again"] is tensors["base"]
    tensors["base"].zero_()
    assert tensors["row"].tolist() == [0] * 6


def save_in_parts(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    value: Any = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)], src_data_rank=None)
    weights = {"w": value, "tied": value, "b": torch.ones(2), "note": 3}
    save_checkpoint(path, Contents(shared_trees={"s": [value, torch.ones(1)]}, weights={"model": weights}), Facts())


def test_the_documented_reader_reads_parts(two_processes: Any, tmp_path: Path) -> None:
    two_processes(save_in_parts, str(tmp_path / "a"))
    wanted = torch.arange(15.0).view(5, 3)
    tree = documented_reader()(tmp_path / "a", "s")
    assert torch.equal(tree[0], wanted)
    assert tree[1].tolist() == [1.0]
    weights = documented_reader("read_tensors")(tmp_path / "a", "model")
    assert weights.keys() == {"w", "b"}
    assert torch.equal(weights["w"], wanted)
    index = json.loads((tmp_path / "a" / "model.parts.json").read_text())
    assert index["metadata"] == {"tied": "w", "loopwright.extra": '{"note": 3}'}
    assert index["tensors"]["w"] == {
        "dtype": "float32",
        "shape": [5, 3],
        "parts": [
            {"file": "model.part-00000.safetensors", "tensor": "w", "offset": [0, 0], "shape": [3, 3]},
            {"file": "model.part-00001.safetensors", "tensor": "w", "offset": [3, 0], "shape": [2, 3]},
        ],
    }
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["format_version"] == 2


def test_every_key_and_kind_is_documented() -> None:
    for name in (*Manifest.__dataclass_fields__, "checksum"):
        assert f"`{name}`" in DOCUMENT, name
    for kind in (*SMALL_DECODERS, *_BUILDERS, "numpy", "ndarray", "tensor", "again"):
        assert f"`{kind}`" in DOCUMENT, kind


def test_the_rules_of_the_manifest_hold_as_written(tmp_path: Path) -> None:
    weights = {"a": torch.ones(100), "b": torch.ones(100), "note": (1, torch.ones(2))}
    weights["tied"] = weights["a"]
    contents = Contents(trees={"state": {"x": 1}}, weights={"model": weights}, max_shard_size=500)
    save_checkpoint(tmp_path / "a", contents, Facts(run={"name": "é"}, scores=[{"name": "l", "value": float("nan")}]))
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text(), parse_constant=pytest.fail)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {*manifest["files"], "manifest.json"}
    for name, entry in manifest["files"].items():
        data = (tmp_path / "a" / name).read_bytes()
        assert entry == {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    checksum = manifest.pop("checksum")
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert checksum == hashlib.sha256(text.encode()).hexdigest()
    assert manifest["scores"][0]["value"] == {"$": "float", "bits": "7ff8000000000000"}
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 808
    with safe_open(tmp_path / "a" / index["weight_map"]["a"], framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["tied"] == "a"
        extra = json.loads(file.metadata()["loopwright.extra"])
        assert extra == {"note": {"$": "tuple", "items": [1, {"$": "tensor", "in": "note[1]"}]}}
    assert "note[1]" in index["weight_map"]
