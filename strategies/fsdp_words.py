"""Accelerate's words for options of FSDP; the command line reads them without loading torch."""

from __future__ import annotations

SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Version 1's words for what is spread over which processes, in the order of their numbers, which begin at 1."""
BACKWARD_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
"""Version 1's words for what is gathered ahead in backward."""
STATE_DICT_TYPES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
"""In which form checkpoints are; the second is version 1's."""
WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
"""Which modules are units."""
FREEING = ("FULL_SHARD", "HYBRID_SHARD")
"""The words of `SHARDING_STRATEGIES` that free the weights of a unit after its forward."""
