"""States of a model under DeepSpeed and of its optimizer: as they are, whole on the main process, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.flat import FlatPart
from ..checkpoint.stored import StoredTensor, read_all
from ..distributed.errors import CheckpointError
from .deepspeed_engine import Driven
from .deepspeed_parts import computing_part, gradient_part, is_swapped, put_back, slot_of, state_part, weight_part
from .optimizer import parameters_of
from .sharded_norms import whole_norms

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""Those of an engine."""


def model_state(driven: Driven) -> dict[str, Any]:
    """A model's state dict, of which each process has its part of the weights, in the 32 bits in which they are
    updated and in the same memory. Tied parameters stay one. Local.
    """
    return _state_dict(driven, lambda parameter: weight_part(driven, parameter))


def whole_model_state(driven: Driven, keeps: bool) -> dict[str, Any]:
    """A model's state dict with whole weights in 32 bits, empty where it is not kept. Collective.

    One tensor at a time is put together on the device, and kept on the host. Tied parameters stay one.
    """
    state = _state_dict(driven, lambda parameter: _whole_weight(driven, parameter, keeps))
    return state if keeps else {}


@contextmanager
def writing_weights(driven: Driven) -> Iterator[None]:
    """A context in which the model's weights are this process's parts in 32 bits, to be written into: parts of whole
    tensors that every process writes alike. What is not written stays. Collective.
    """
    if driven.stage == 0:
        yield
        return
    if driven.stage == 3:
        driven.engine.optimizer._partition_all_parameters()
    parts: dict[nn.Parameter, Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    for module in driven.model.modules():
        owner: dict[str, Any] = module._parameters
        for name, parameter in list(owner.items()):
            if parameter is not None and (driven.stage == 3 or id(parameter) in driven.owned):
                if parameter not in parts:
                    parts[parameter] = weight_part(driven, parameter)
                owner[name] = parts[parameter]
                replaced.append((owner, name, parameter))
    try:
        yield
    finally:
        for owner, name, parameter in replaced:
            owner[name] = parameter
        for parameter, part in parts.items():
            put_back(driven, parameter, part)
        _show_weights(driven)


def show_parts(driven: Driven) -> Callable[[], None]:
    """Let the model compute with the weights that the optimizer has. Collective at stages 1 and 2.

    Returns:
        What lets it compute with those that it had. Local.
    """
    if driven.stage == 0:
        return lambda: None
    if driven.stage < 3:
        before = [(parameter, parameter.detach().clone()) for parameter in driven.parameters]
        _show_weights(driven)
        return lambda: _compute_with(driven, before)
    parts = [(computing_part(parameter), weight_part(driven, parameter)) for parameter in driven.parameters]
    kept = [(part, part.clone()) for part, _ in parts]
    _compute_with(driven, parts)
    return lambda: _compute_with(driven, kept)


@torch.no_grad()
def _compute_with(driven: Driven, values: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write values into the weights that the model computes with. Local."""
    if driven.stage == 3:
        driven.engine.optimizer._partition_all_parameters()  # what was gathered has the former values
        driven.engine.optimizer.invalidate_secondary_tensor()
    for weight, value in values:
        weight.copy_(value)


def optimizer_state(driven: Driven) -> dict[str, Any]:
    """The optimizer's state dict, of which each process has its part, in the same memory. Local."""
    state = driven.optimizer.state_dict()
    entries: dict[int, Any] = {}
    stepped = driven.stepped.state
    for number, parameter in enumerate(parameters_of(driven.optimizer)):
        slot = slot_of(driven, parameter)
        if slot is None or not stepped.get(slot.flat):
            continue
        entry = entries[number] = {}
        for key, value in stepped[slot.flat].items():
            if _is_spread(value, slot.flat):
                entry[key] = state_part(driven, parameter, slot, key)
            else:
                entry[key] = value.clone() if isinstance(value, Tensor) else value
    return {"state": entries, "param_groups": state["param_groups"]}


def load_optimizer_state(driven: Driven, state: Mapping[str, Any]) -> None:
    """Put a whole state, which every process has or can read, into the partitions; of stored tensors each process reads
    its part. Local.

    Raises:
        CheckpointError: the partitions are on NVMe.
    """
    optimizer, stepped = driven.optimizer, driven.stepped
    optimizer.load_state_dict({"state": {}, "param_groups": read_all(state["param_groups"])})  # a rate may be a tensor
    if is_swapped(driven):
        raise CheckpointError(
            "the optimizer's state is on NVMe, where it can't be put back. Resume with offload_optimizer='cpu', or "
            "begin anew from the weights alone."
        )
    stepped.state.clear()
    for number, parameter in enumerate(parameters_of(optimizer)):
        slot, values = slot_of(driven, parameter), state["state"].get(number)
        if slot is None or not values:
            continue
        own = stepped.state[slot.flat]
        for key, value in values.items():
            if isinstance(value, (Tensor, StoredTensor)) and tuple(value.shape) == slot.shape != ():
                if key not in own:
                    own[key] = torch.zeros_like(slot.flat, dtype=value.dtype, requires_grad=False)
                _fill(own[key] if driven.stage == 0 else slot.part(own[key]), value)
            else:
                value = read_all(value)
                own[key] = value.clone() if isinstance(value, Tensor) else value
    _link_states(driven)


def gradient_norms(
    driven: Driven | None, parameters: Iterable[Tensor], norm_type: float, device: torch.device
) -> list[Tensor | None]:
    """The norm of each parameter's gradient, as it will be stepped on but for the clipping. Collective.

    None for a parameter without one.
    """
    factor = 1.0 if driven is None else driven.gradients.pending
    gradients = [p.grad if driven is None else gradient_part(driven, p) for p in parameters]
    found = [index for index, gradient in enumerate(gradients) if gradient is not None]
    norms = dict(zip(found, whole_norms([g for g in gradients if g is not None], norm_type, device), strict=True))
    return [norms[index] * factor if index in norms else None for index in range(len(gradients))]


def nonfinite_part(model: nn.Module) -> str | None:
    """The name of the first parameter of whose part in this process a number is not finite. Local."""
    for name, parameter in model.named_parameters():
        part = vars(parameter).get("ds_tensor", parameter)
        if part.is_floating_point() and not bool(torch.isfinite(part).all()):
            return name
    return None


def in_half(state: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """A state whose numbers in 32 bits are in the 16 bits of a precision, if it has 16. Local."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    is_wide = {name for name, value in state.items() if isinstance(value, Tensor) and value.dtype == torch.float32}
    return {name: value.to(kind) if name in is_wide else value for name, value in state.items()}


def own_state(driven: Driven, has_buffers: bool) -> dict[str, Any]:
    """DeepSpeed's counters and its loss scale, and where asked for the model's buffers. Local."""
    engine = driven.engine
    scaler = vars(engine.optimizer).get("loss_scaler") if driven.stage else None
    return {
        "buffers": dict(driven.model.named_buffers()) if has_buffers else {},
        "engine": {name: getattr(engine, name) for name in _COUNTERS},
        "loss_scaler": {k: v for k, v in vars(scaler).items() if type(v) in (bool, int, float)} if scaler else {},
    }


def load_own_state(driven: Driven, state: Mapping[str, Any]) -> None:
    """Take back what `own_state` gave. Local."""
    own = dict(driven.model.named_buffers())
    with torch.no_grad():
        for name in state["buffers"].keys() & own.keys():
            own[name].copy_(state["buffers"][name])
    for name in _COUNTERS:
        setattr(driven.engine, name, state["engine"][name])
    if state["loss_scaler"] and driven.stage:
        vars(driven.engine.optimizer.loss_scaler).update(state["loss_scaler"])


def _state_dict(driven: Driven, weight: Callable[[nn.Parameter], Tensor]) -> dict[str, Any]:
    """The model's state dict with another tensor for each parameter, which is made once."""
    known: dict[int, Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in driven.model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            if id(value) not in known:
                known[id(value)] = weight(value)
            state[name] = known[id(value)]
        else:
            state[name] = value.detach() if isinstance(value, Tensor) else value
    return state


def _whole_weight(driven: Driven, parameter: nn.Parameter, keeps: bool) -> Tensor:
    if driven.stage < 3 and parameter.dtype == torch.float32:
        return parameter.detach()  # what is updated has the same values
    part = weight_part(driven, parameter)
    if not isinstance(part, FlatPart):
        return part
    full = part.gathered(driven.engine.device)
    return full.cpu() if keeps else torch.empty(0)


def _fill(target: Tensor, value: Tensor | StoredTensor) -> None:
    if isinstance(value, StoredTensor):
        value.read_into(target)
    else:
        with torch.no_grad():
            target.copy_(value)


def _link_states(driven: Driven) -> None:
    """Let DeepSpeed's own functions find the states by parameters. It does so after the step of its first group, when
    the others have none yet. Local.
    """
    if driven.stage in (1, 2):
        driven.engine.optimizer._hp_optimizer_states_linked = False
        driven.engine.optimizer._lazy_init_hp_params_optimizer_state()


def _show_weights(driven: Driven) -> None:
    """Let the model compute with the weights that the optimizer has. Collective."""
    optimizer = driven.engine.optimizer
    if driven.stage < 3:
        optimizer.update_lp_params()
        return
    for group, _ in enumerate(optimizer.fp16_groups):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    optimizer.invalidate_secondary_tensor()


def _is_spread(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == flat.shape
