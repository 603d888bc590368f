"""Folders of torch.distributed.checkpoint: read without running anything of them, and merged."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from loopwright.checkpoint.distributed_folder import DistributedWeights
from loopwright.checkpoint.weights import load_weights
from loopwright.cli.main import main
from loopwright.distributed.errors import CheckpointError

Run = Callable[..., list[Any]]
FULL = {
    "rows": torch.arange(35.0).view(7, 5),
    "columns": torch.arange(12.0).view(3, 4).bfloat16(),
    "number": torch.tensor(2),
}
PLACES = {"rows": 0, "columns": 1}


def save(folder: str) -> None:
    """As Accelerate saves a model that it has sharded."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = dict(FULL)
    for name, dim in PLACES.items():
        state[name] = distribute_tensor(FULL[name], mesh, [Shard(dim)], src_data_rank=None)
    path = Path(folder) / "state"
    torch.distributed.checkpoint.save({"model": state}, checkpoint_id=path / "pytorch_model_fsdp_0")
    torch.distributed.checkpoint.save({"optimizer": {"state": state}}, checkpoint_id=path / "optimizer_0")
    found = distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)], src_data_rank=None)
    assert isinstance(found, DTensor)
    DistributedWeights(path / "pytorch_model_fsdp_0").read_part("rows", (0, 3 * dist.get_rank()), found.to_local())
    wanted = distribute_tensor(FULL["rows"], mesh, [Shard(1)], src_data_rank=None)
    assert torch.equal(found.to_local(), wanted.to_local())


def module() -> nn.Module:
    found = nn.Module()
    for name, value in FULL.items():
        found.register_buffer(name, torch.zeros_like(value))
    return found


def equal(found: dict[str, Tensor]) -> bool:
    return found.keys() == FULL.keys() and all(torch.equal(found[name], value) for name, value in FULL.items())


def test_what_two_processes_wrote(two_processes: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_processes(save, str(tmp_path))
    for name in ("state", "state/pytorch_model_fsdp_0"):
        loaded = module()
        load_weights(loaded, tmp_path / name)
        assert equal(dict(loaded.named_buffers()))
        assert main(["merge-weights", str(tmp_path / name), str(tmp_path / "out")]) == 0
        assert equal(load_file(tmp_path / "out" / "model.safetensors"))
        shutil.rmtree(tmp_path / "out")
    folder = tmp_path / "state" / "pytorch_model_fsdp_0"
    assert main(["merge-weights", str(folder), str(tmp_path / "torch"), "--unsafe-serialization"]) == 0
    assert equal(torch.load(tmp_path / "torch" / "pytorch_model.bin", weights_only=True))
    with pytest.raises(CheckpointError, match=r"it has the state of an optimizer, and no weights"):
        DistributedWeights(tmp_path / "state" / "optimizer_0")
    capsys.readouterr()
    removes = ["merge-weights", str(folder), str(folder / "out"), "--remove_checkpoint_dir"]
    assert main(removes) == 2
    assert "would be removed with" in capsys.readouterr().err
    (folder / "note.txt").touch()
    (tmp_path / "link").symlink_to(folder)
    assert main(["merge-weights", str(tmp_path / "link"), str(tmp_path / "again"), "--remove_checkpoint_dir"]) == 2
    assert "is a link to" in capsys.readouterr().err
    removes[2] = str(tmp_path / "again")
    assert main(removes) == 2
    assert "is not removed: these are no part of a checkpoint: note.txt" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
    (folder / "note.txt").unlink()
    assert main(removes) == 0
    assert not folder.exists()
    assert equal(load_file(tmp_path / "again" / "model.safetensors"))


class Evil:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def test_indexes_that_name_other_things_are_not_read(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "folder").mkdir()
    calls: list[tuple[Any, str]] = [(os.system, f"touch {mark}"), (torch.load, str(mark)), (open, str(mark))]
    calls.append((eval, f"open({str(mark)!r}, 'w')"))
    for call in calls:
        (tmp_path / "folder" / ".metadata").write_bytes(pickle.dumps({"a": Evil(*call)}))
        with pytest.raises(CheckpointError, match=r"is not read: to read it would run code of it"):
            DistributedWeights(tmp_path / "folder")
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_damaged_folders(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    torch.distributed.checkpoint.save(dict(FULL), checkpoint_id=folder, no_dist=True)
    assert equal(dict(DistributedWeights(folder)))
    (data,) = folder.glob("*.distcp")
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 3])
    with pytest.raises(CheckpointError, match=rf"of {data.name}, which has {len(content) // 3}; it takes"):
        DistributedWeights(folder)
    data.write_bytes(content.replace(b"PK", b"KP"))
    with pytest.raises(CheckpointError, match=r"can't be read as a part of torch.distributed.checkpoint"):
        dict(DistributedWeights(folder))
    data.unlink()
    with pytest.raises(CheckpointError, match=rf"names files that are missing: {data.name}"):
        DistributedWeights(folder)
    (folder / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"can't be read: AttributeError"):
        DistributedWeights(folder)


def box(offset: list[int], shape: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))


@pytest.mark.parametrize(
    ("size", "chunks", "message"),
    [
        ([7, 5], [], r"at 'rows': the parts have 0 elements, and the shape \[7, 5\] has 35"),
        ([7, 5], [box([0, 0], [6, 5]), box([5, 0], [1, 5])], r"at 'rows': the parts .* overlap"),
        ([7, 5], [box([0, 0], [6, 5]), box([6, 0], [1, 5])], r"does not say where the parts at \[6, 0\] are"),
        ([5, 7], [box([0, 0], [5, 7])], r"has 'rows' of torch.float32 \(5, 7\) .* it has torch.float32 \(7, 5\) there"),
        ([2**36, 5], [box([0, 0], [2**36, 5])], r"'rows' is in bytes .* it takes 1374389534720"),
        ([2**40, 2**40], [], r"1099511627776\]?\)? is the shape of no tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_indexes_that_lie(tmp_path: Path, size: list[int], chunks: list[Any], message: str) -> None:
    torch.distributed.checkpoint.save(dict(FULL), checkpoint_id=tmp_path, no_dist=True)
    index = pickle.loads((tmp_path / ".metadata").read_bytes())
    index.state_dict_metadata["rows"].size = torch.Size(size)
    index.state_dict_metadata["rows"].chunks = chunks
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        dict(DistributedWeights(tmp_path))
