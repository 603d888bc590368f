"""Which range of each parameter's elements a process updates under ZeRO, and where its weights and states are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ..checkpoint.flat import FlatPart
from .deepspeed_engine import Driven


class Slot(NamedTuple):
    """A parameter's range in one of the flat tensors that the stepped optimizer has in the place of parameters."""

    flat: Tensor
    """That tensor, under which the optimizer keeps its states; at stage 0 the parameter."""
    place: int
    """Where the range begins in it."""
    begin: int
    """Where it begins in the parameter."""
    length: int
    """How many elements it has; none where other processes have them all."""
    shape: tuple[int, ...]
    """Of the whole parameter."""

    def part(self, flat: Tensor) -> FlatPart:
        """The range in a tensor of the same make as `flat`, in the same memory. Local."""
        return FlatPart(flat.detach().narrow(0, self.place, self.length), self.begin, self.shape)


def slot_of(driven: Driven, parameter: Any) -> Slot | None:
    """Where the optimizer has a parameter; None for one that it does not train. Local."""
    index = driven.owned.get(id(parameter))
    if index is None:
        return None
    if driven.stage == 0:
        return Slot(parameter, 0, 0, parameter.numel(), tuple(parameter.shape))
    optimizer = driven.engine.optimizer
    if driven.stage == 3:
        group, place, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        return Slot(optimizer.fp32_partitioned_groups_flat[group], place, *_range(parameter), tuple(parameter.ds_shape))
    flat = driven.stepped.param_groups[index]["params"][0]
    fragment = parameter._hp_mapping
    if fragment is None:
        return Slot(flat, 0, 0, 0, tuple(parameter.shape))
    place, begin = fragment.hp_fragment_address.start, fragment.lp_fragment_address.start
    return Slot(flat, place, begin, fragment.lp_fragment_address.numel, tuple(parameter.shape))


def weight_part(driven: Driven, parameter: Tensor) -> Tensor:
    """What this process has of a weight as it is updated: in 32 bits, in the same memory. Local.

    A weight that is whole in each process is itself. Of one on NVMe the part is a copy; see `put_back`.
    """
    slot = slot_of(driven, parameter) if driven.stage else None
    if slot is None:
        return parameter.detach() if driven.stage < 3 else computing_part(parameter)
    if not is_swapped(driven):
        return slot.part(slot.flat)
    import deepspeed

    local = deepspeed.utils.safe_get_local_fp32_param(parameter)[: slot.length].clone()
    return FlatPart(local, slot.begin, slot.shape)


def put_back(driven: Driven, parameter: Tensor, part: Tensor) -> None:
    """Write what `weight_part` has copied from NVMe, and was changed since. Local."""
    if is_swapped(driven) and isinstance(part, FlatPart) and id(parameter) in driven.owned:
        import deepspeed

        local = deepspeed.utils.safe_get_local_fp32_param(parameter).clone()
        local[: len(part.local)] = part.local
        deepspeed.utils.safe_set_local_fp32_param(parameter, local)


def computing_part(parameter: Any) -> FlatPart:
    """What this process has, at stage 3, of a weight as the model computes with it, in the same memory. Local."""
    begin, length = _range(parameter)
    return FlatPart(parameter.ds_tensor.detach()[:length], begin, parameter.ds_shape)


def state_part(driven: Driven, parameter: Tensor, slot: Slot, key: str) -> Tensor:
    """What this process has of one of the states that the optimizer has for each element of a parameter. Local."""
    state: Tensor = driven.stepped.state[slot.flat][key]
    if driven.stage == 0:
        return state
    if not is_swapped(driven):
        return slot.part(state)
    import deepspeed

    local = deepspeed.utils.safe_get_local_optimizer_state(parameter, key)[: slot.length].clone()
    return FlatPart(local, slot.begin, slot.shape)


def gradient_part(driven: Driven, parameter: Any) -> Tensor | None:
    """What this process has of a gradient that was reduced; None where there is none. Local."""
    slot = slot_of(driven, parameter) if driven.stage else None
    if slot is None:
        gradient: Tensor | None = parameter.grad
        return gradient
    if driven.stage == 3:
        import deepspeed

        local = deepspeed.utils.safe_get_local_grad(parameter)[: slot.length]
    elif slot.length:
        local = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
        if local.numel() == parameter.numel():  # where whole gradients are accumulated in 32 bits
            local = local[slot.begin : slot.begin + slot.length]
    else:
        local = slot.flat.detach()[:0]
    return FlatPart(local, slot.begin, slot.shape)


def is_swapped(driven: Driven) -> bool:
    """Whether the optimizer's states are on NVMe. Local."""
    return driven.stage == 3 and bool(driven.engine.optimizer.swap_optimizer)


def _range(parameter: Any) -> tuple[int, int]:
    """Where this process's range begins at stage 3, and how long it is without what fills it up at the end."""
    size: int = parameter.ds_tensor.ds_numel
    begin = min(size * dist.get_rank(parameter.ds_process_group), parameter.ds_numel)
    return begin, min(size, parameter.ds_numel - begin)
