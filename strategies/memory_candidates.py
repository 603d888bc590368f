"""The strategies among which a plan chooses, the simplest and quickest first."""

from __future__ import annotations

from dataclasses import replace

from ..distributed.meshes import MeshSizes
from .memory import StrategyMemory, Surroundings, WholeMemory
from .memory_sharded import ShardedMemory
from .memory_zero import ZeroMemory
from .registry import DDP, FSDP, SINGLE, create_strategy
from .strategy import Strategy

PROCESSES_PER_MACHINE = 8
"""How many exchange weights quickly, where nothing else is known."""


def candidates(own: Strategy, surroundings: Surroundings) -> list[StrategyMemory]:
    """The strategies that could serve a run: `own`, where it can tell what it holds, and those that others choose from.

    Those of one kind with `own` have its other options.

    Returns:
        Each before those that take more time or more machinery: whole copies, parts that stay gathered for backward,
        parts within machines, parts of all processes, activations that are computed twice, parts on the host,
        DeepSpeed's stages.
    """
    chosen = own.memory(surroundings)
    word = SINGLE if surroundings.num_processes == 1 else DDP
    whole = chosen if isinstance(chosen, WholeMemory) else create_strategy(word).memory(surroundings)
    found = [] if whole is None else [whole]
    if surroundings.num_processes == 1:
        return found
    base = chosen if isinstance(chosen, ShardedMemory) else create_strategy(FSDP).memory(surroundings)
    assert isinstance(base, ShardedMemory)
    plain = replace(base, mesh=None, reshard_after_forward=True, activation_checkpointing=False, cpu_offload=False)
    found.append(replace(plain, reshard_after_forward=False))
    num_machines, rest = divmod(surroundings.num_processes, PROCESSES_PER_MACHINE)
    if num_machines > 1 and rest == 0:
        found.append(replace(plain, mesh=MeshSizes(replicate=num_machines, shard=PROCESSES_PER_MACHINE)))
    recomputing = replace(plain, activation_checkpointing=True)
    found += [plain, recomputing, replace(recomputing, cpu_offload=True)]
    zero = chosen if isinstance(chosen, ZeroMemory) else ZeroMemory(surroundings, 1)
    found += [replace(zero, stage=stage) for stage in (1, 2, 3)]
    return found if chosen is None or chosen in found else [*found, chosen]
