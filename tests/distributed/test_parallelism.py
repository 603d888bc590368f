"""Sizes of meshes: by Accelerate's names and variables, by ours, and the shares of the data that follow from them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from loopwright.distributed.errors import ConfigError
from loopwright.distributed.meshes import MeshSizes, build_mesh, spreading_axes
from loopwright.distributed.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)

Run = Callable[..., list[Any]]


def test_parts_of_weights_and_of_sequences() -> None:
    config = ParallelismConfig(dp_shard_size=4, cp_size=2)
    assert config.active_mesh_dims == ["dp_shard", "cp"]
    assert (config.data_parallel_size, config.non_data_parallel_size, config.total_size) == (4, 2, 8)
    assert config.fsdp_dim_names == ["dp_shard_cp"]
    assert config.dp_shard_cp_dim_names == config.dp_cp_dim_names == ["dp_shard", "cp"]
    assert config.cp_handler == TorchContextParallelConfig(cp_comm_strategy="allgather")
    assert config.sizes == MeshSizes(shard=4, context=2)


def test_copies_of_parts_of_layers() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4, tp_size=2)
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == ["tp"]
    assert config.tp_handler == TorchTensorParallelConfig()
    assert (config.cp_handler, config.cp_enabled, config.total_size) == (None, False, 16)


def test_nothing_asked_for() -> None:
    config = ParallelismConfig()
    assert (config.total_size, config.active_mesh_dims, config.fsdp_dim_names) == (1, [], ["dp_shard_cp"])
    assert config.build_device_mesh("cpu") is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cp_size": 2, "sp_size": 2}, "cp_size=2 and sp_size=2 both cut sequences"),
        ({"dp_replicate_size": 2, "cp_size": 2}, "dp_replicate_size=2 with tp_size=1, cp_size=2 and dp_shard_size=1"),
        ({"tp_size": 0}, r"ParallelismConfig\(tp_size=0\). Expected an integer >= 1"),
        ({"dp_shard_size": True}, r"ParallelismConfig\(dp_shard_size=True\). Expected an integer"),
        ({"cp_backend": "x"}, "cp_backend='x'.* is unknown. Accepted: torch"),
        ({"sp_backend": "x"}, "sp_backend='x'.* is unknown. Accepted: deepspeed"),
        ({"tp_size": 2, "tp_handler": 3}, r"tp_handler=3\). Expected TorchTensorParallelConfig"),
        ({"sp_size": 2, "sp_handler": 3}, r"sp_handler=3\). Expected DeepSpeedSequenceParallelConfig"),
    ],
)
def test_what_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ParallelismConfig(**options)


def test_parts_of_sequences_by_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ParallelismConfig(dp_shard_size=2, sp_size=4)
    assert config.sizes == MeshSizes(shard=2, sequence=4)
    assert config.dp_shard_cp_dim_names == config.dp_cp_dim_names == ["dp_shard", "sp"]
    assert (config.active_mesh_dims, config.total_size, config.non_data_parallel_size) == (["dp_shard", "sp"], 8, 4)
    assert config.sp_handler == DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True)
    assert (config.sp_backend, config.sp_enabled, config.cp_enabled) == ("deepspeed", True, False)
    # What Accelerate's launcher writes.
    for name, text in {"SEQ_LENGTH": "64", "SEQ_LENGTH_IS_VARIABLE": "False", "ATTN_IMPLEMENTATION": "None"}.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_SP_{name}", text)
    handler = ParallelismConfig(sp_size=2).sp_handler
    assert handler == DeepSpeedSequenceParallelConfig(sp_seq_length=64, sp_seq_length_is_variable=False)
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "None")
    with pytest.raises(ConfigError, match=r"sp_seq_length_is_variable=False needs the length. Give sp_seq_length"):
        ParallelismConfig(sp_size=2)
    for kernel in ("flash_attention_2", "eager"):
        with pytest.raises(ConfigError, match=f"sp_attn_implementation='{kernel}': heads are exchanged around torch's"):
            DeepSpeedSequenceParallelConfig(sp_attn_implementation=kernel)
    with pytest.raises(ConfigError, match=r"sp_seq_length=0. Expected an integer >= 1"):
        DeepSpeedSequenceParallelConfig(sp_seq_length=0)


def test_what_is_not_available() -> None:
    with pytest.raises(ConfigError, match=r"cp_comm_strategy='ring' is unknown. Accepted: allgather, alltoall"):
        TorchContextParallelConfig(cp_comm_strategy="ring")
    with pytest.warns(UserWarning, match="enable_async_tp=True has no effect"):
        TorchTensorParallelConfig(enable_async_tp=True)
    with pytest.warns(UserWarning, match="tp_handler has no effect, since tp_size is 1"):
        ParallelismConfig(tp_handler=TorchTensorParallelConfig())


def test_variables_where_an_argument_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    config = ParallelismConfig(tp_size=2)
    assert (config.tp_size, config.cp_size, config.dp_shard_size) == (2, 2, 1)
    assert config.cp_handler == TorchContextParallelConfig(cp_comm_strategy="alltoall")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "two")
    with pytest.raises(ConfigError, match="PARALLELISM_CONFIG_DP_SHARD_SIZE='two' is not an integer"):
        ParallelismConfig()


def test_sizes_that_are_left_open_take_the_rest() -> None:
    assert MeshSizes(tensor=2).filled(8) == MeshSizes(shard=4, tensor=2)
    assert MeshSizes().filled(1) == MeshSizes(shard=1)
    with pytest.raises(ConfigError, match="a mesh of tensor 3 needs a multiple of 3 processes, and there are 8"):
        MeshSizes(tensor=3).filled(8)
    with pytest.raises(ConfigError, match="a mesh of replicate 2 x shard 3 needs 6 processes, and there are 4"):
        MeshSizes(replicate=2, shard=3).filled(4)
    with pytest.raises(ConfigError, match=r"mesh.context=0. Expected an integer >= 1"):
        MeshSizes(context=0)
    with pytest.raises(ConfigError, match=r"mesh.context=2 and mesh.sequence=2 both cut sequences. Leave one of them"):
        MeshSizes(context=2, sequence=2)


def test_shares_of_the_data() -> None:
    # Of 12 processes: 2 copies of 1 part, each of 3 parts of sequences by 2 parts of layers.
    sizes = MeshSizes(replicate=2, sequence=3, tensor=2)
    shares = [sizes.share(index, 12) for index in range(12)]
    assert shares == [MeshSizes(replicate=2, context=3, tensor=2).share(index, 12) for index in range(12)]
    assert [share.process_index for share in shares] == [0] * 6 + [1] * 6
    assert [share.peer for share in shares] == [0, 1, 2, 3, 4, 5] * 2
    share = shares[7]
    assert (share.num_processes, share.num_peers, share.num_twins, share.num_losses) == (2, 6, 2, 6)
    assert share.by_batches(range(12)) == range(0, 12, 6)
    assert share.by_losses(range(12)) == range(0, 12, 2)


_SEQUENCES = [MeshSizes(shard=1, context=2), MeshSizes(shard=1, sequence=2)]


def _axes() -> list[Any]:
    config = ParallelismConfig(tp_size=2)
    mesh = config.build_device_mesh("cpu")
    copies = ParallelismConfig(dp_replicate_size=2).build_device_mesh("cpu")
    sequences = [build_mesh(sizes, "cpu", always=("dp_shard",)) for sizes in _SEQUENCES]
    assert mesh is not None and copies is not None
    spread = [spreading_axes(each) for each in sequences if each is not None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: it is to stop finding joints by their names
        joints = copies["dp"].size(), copies["dp_cp"].size()
    found = [(each.mesh_dim_names, each.size()) for each in spread]
    return [mesh.mesh_dim_names, mesh.shape, copies.mesh_dim_names, joints, found]


def test_a_mesh_has_the_axes_along_which_there_are_several(two_processes: Run) -> None:
    spread = [(("dp_shard_cp",), 2)] * 2
    assert two_processes(_axes) == [[("tp",), (2,), ("dp_replicate",), (2, 2), spread]] * 2
