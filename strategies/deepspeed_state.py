"""States of a model under DeepSpeed and of its optimizer: whole, by the names that the model has, and put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed.errors import CheckpointError
from .deepspeed_engine import Driven
from .optimizer import parameters_of

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""Those of an engine."""


def whole_model_state(driven: Driven, keeps: bool) -> dict[str, Any]:
    """A model's state dict with whole tensors, empty where it is not kept. Collective.

    Weights that are trained in 16 bits are given in the 32 bits in which they are updated. One tensor at a time is put
    together. Tied parameters stay one.
    """
    state: dict[str, Any] = {}
    known: dict[int, Tensor] = {}
    for name, value in driven.model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            if id(value) not in known:
                full = _whole_weight(driven, value)
                known[id(value)] = full if keeps else torch.empty(0)
            value = known[id(value)]
        state[name] = value.detach() if isinstance(value, Tensor) else value
    return state if keeps else {}


@contextmanager
def writing_weights(driven: Driven) -> Iterator[None]:
    """A context in which the model has whole weights in 32 bits, to be written into by every process alike. Collective.

    They are put together at the beginning, so that what is not written stays.
    """
    if driven.stage == 0:
        yield
        return
    before: list[tuple[nn.Parameter, Tensor]] = []
    optimizer = driven.engine.optimizer
    if driven.stage == 3:
        optimizer._partition_all_parameters()
    for parameter in driven.model.parameters():
        if driven.stage == 3 or _has_master(driven, parameter):
            full = _whole_weight(driven, parameter)
            before.append((parameter, parameter.data))
            parameter.data = full.clone() if full.data_ptr() == parameter.data.data_ptr() else full
    try:
        yield
    finally:
        for parameter, data in before:
            full, parameter.data = parameter.data, data
            _set_weight(driven, parameter, full)
        _show_weights(driven)


def whole_optimizer_state(driven: Driven, keeps: bool) -> dict[str, Any]:
    """The optimizer's state dict with whole tensors on the host, without them where it is not kept. Collective."""
    state = driven.optimizer.state_dict()
    entries: dict[int, Any] = {}
    stepped = driven.stepped.state
    _link_states(driven)
    for number, parameter in enumerate(parameters_of(driven.optimizer)):
        flat = _partition(driven, parameter)
        if flat is None or not stepped.get(flat):
            continue
        entry = entries[number] = {}
        for key, value in stepped[flat].items():
            if _is_spread(value, flat):
                full = _whole_state(driven, parameter, key).to(value.dtype)
                entry[key] = full.detach().cpu() if keeps else torch.empty(0)
            else:
                entry[key] = value.clone() if isinstance(value, Tensor) else value
    return {"state": entries if keeps else {}, "param_groups": state["param_groups"]}


def load_optimizer_state(driven: Driven, state: Mapping[str, Any]) -> None:
    """Put a whole state, which every process has, into the partitions. Local.

    Raises:
        CheckpointError: the partitions are on NVMe.
    """
    optimizer, stepped = driven.optimizer, driven.stepped
    optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
    if driven.stage == 3 and driven.engine.optimizer.swap_optimizer:
        raise CheckpointError(
            "the optimizer's state is on NVMe, where it can't be put back. Resume with offload_optimizer='cpu', or "
            "begin anew from the weights alone."
        )
    stepped.state.clear()
    spread: list[tuple[Tensor, str, Tensor]] = []
    for number, parameter in enumerate(parameters_of(optimizer)):
        flat, values = _partition(driven, parameter), state["state"].get(number)
        if flat is None or not values:
            continue
        shape = _shape(parameter)
        for key, value in values.items():
            if isinstance(value, Tensor) and value.shape == shape and value.dim():
                if key not in stepped.state[flat]:
                    stepped.state[flat][key] = torch.zeros_like(flat, dtype=value.dtype, requires_grad=False)
                spread.append((parameter, key, value))
            else:
                stepped.state[flat][key] = value.clone() if isinstance(value, Tensor) else value
    _link_states(driven)
    for parameter, key, value in spread:
        _set_state(driven, parameter, key, value)


def gradient_norms(driven: Driven | None, parameters: Iterable[Tensor], norm_type: float) -> list[Tensor | None]:
    """The norm of each parameter's gradient, as it will be stepped on but for the clipping. Collective.

    None for a parameter without one.
    """
    import deepspeed

    norms: list[Tensor | None] = []
    for parameter in parameters:
        norms.append(None)
        if driven is None or driven.stage == 0 or id(parameter) not in driven.owned:
            gradient = parameter.grad
        else:
            gradient = deepspeed.utils.safe_get_full_grad(parameter)
        if gradient is not None:
            factor = 1.0 if driven is None else driven.gradients.pending
            norms[-1] = torch.linalg.vector_norm(gradient.float(), norm_type) * factor
    return norms


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


def _has_master(driven: Driven, parameter: Tensor) -> bool:
    """Whether DeepSpeed updates a copy of a parameter, and not the parameter."""
    return driven.stage > 0 and id(parameter) in driven.owned


def _shape(parameter: Any) -> torch.Size:
    """The shape of a whole parameter, also of one that is spread."""
    shape: torch.Size = parameter.ds_shape if hasattr(parameter, "ds_id") else parameter.shape
    return shape


def _whole_weight(driven: Driven, parameter: nn.Parameter) -> Tensor:
    import deepspeed

    if driven.stage == 0 or (driven.stage < 3 and not _has_master(driven, parameter)):
        return parameter.detach()
    if driven.stage < 3 and parameter.dtype == torch.float32:
        return parameter.detach()  # its copy has the same values
    if _has_master(driven, parameter):
        full: Tensor = deepspeed.utils.safe_get_full_fp32_param(parameter)
        return full.detach()
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _link_states(driven: Driven) -> None:
    """Let DeepSpeed find the states by parameters. It does so after the step of its first group, when the others have
    none yet. Local.
    """
    if driven.stage in (1, 2):
        driven.engine.optimizer._hp_optimizer_states_linked = False
        driven.engine.optimizer._lazy_init_hp_params_optimizer_state()


def _whole_state(driven: Driven, parameter: Tensor, key: str) -> Tensor:
    import deepspeed

    if driven.stage == 0:
        own: Tensor = driven.stepped.state[parameter][key]
        return own
    full: Tensor = deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
    return full


def _set_weight(driven: Driven, parameter: Any, full: Tensor) -> None:
    import deepspeed

    if driven.stage < 3:
        deepspeed.utils.safe_set_full_fp32_param(parameter, full)
    elif _has_master(driven, parameter):
        deepspeed.utils.safe_set_local_fp32_param(parameter, _own_slice(parameter, full))
    else:
        parameter.ds_tensor.data.copy_(_own_slice(parameter, full))


def _set_state(driven: Driven, parameter: Any, key: str, full: Tensor) -> None:
    import deepspeed

    if driven.stage == 0:
        driven.stepped.state[parameter][key].copy_(full)
    elif driven.stage < 3:
        deepspeed.utils.safe_set_full_optimizer_state(parameter, full, key)
    else:
        deepspeed.utils.safe_set_local_optimizer_state(parameter, _own_slice(parameter, full), key)


def _own_slice(parameter: Any, full: Tensor) -> Tensor:
    """This process's part of a parameter's numbers, filled up with zeros at the end."""
    size: int = parameter.ds_tensor.ds_numel
    begin = size * dist.get_rank(parameter.ds_process_group)
    part = full.flatten()[begin : begin + size]
    return torch.nn.functional.pad(part, (0, size - part.numel()))


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


def _partition(driven: Driven, parameter: Tensor) -> Tensor | None:
    """The tensor under which the stepped optimizer keeps a parameter's state; None where it has none."""
    index = driven.owned.get(id(parameter))
    if index is None:
        return None
    optimizer = driven.engine.optimizer
    if driven.stage == 0:
        return parameter
    if driven.stage == 3:
        group, _, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        partition: Tensor = optimizer.fp32_partitioned_groups_flat[group]
        return partition
    found: Tensor = driven.stepped.param_groups[index]["params"][0]
    return found


def _is_spread(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == flat.shape
