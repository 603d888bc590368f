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

from loopwright.checkpoint.contents import Contents
from loopwright.checkpoint.manifest import Facts, Manifest
from loopwright.checkpoint.saving import save_checkpoint
from loopwright.checkpoint.scalars import SMALL_DECODERS
from loopwright.checkpoint.tree import _BUILDERS

from .test_tree import CONTAINERS, SMALL_VALUES, assert_same, random_value

DOCUMENT = (Path(__file__).parents[2] / "docs" / "checkpoint-format.md").read_text()


def documented_reader() -> Any:
    code = re.search(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    return names["read_tree"]


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
