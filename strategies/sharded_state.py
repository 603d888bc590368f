"""States of sharded models and of their optimizers: as they are, whole on the main process, and put back into parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.sharded import fill_part, is_sharded, local_part, whole
from ..checkpoint.stored import StoredTensor, read_all
from ..distributed.errors import ConfigError
from .optimizer import parameters_of


def model_state(model: nn.Module) -> dict[str, Any]:
    """A model's state dict, in the same memory, in which tied parameters stay one. Local."""
    known: dict[int, Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        is_tensor = isinstance(value, Tensor)
        state[name] = known.setdefault(id(value), value.detach()) if is_tensor else value
    return state


def whole_model_state(model: nn.Module, keeps: bool) -> dict[str, Any]:
    """A model's state dict with whole tensors on the host, empty where it is not kept. Collective.

    One tensor at a time is put together on the device. Tied parameters stay one.
    """
    state: dict[str, Any] = {}
    known: dict[int, Tensor] = {}
    for name, value in model_state(model).items():
        if is_sharded(value):
            if id(value) not in known:
                known[id(value)] = _on_host(value, keeps)
            value = known[id(value)]
        state[name] = value
    return state if keeps else {}


def whole_optimizer_state(state: Mapping[str, Any], keeps: bool) -> dict[str, Any]:
    """An optimizer's state dict with whole tensors on the host, its groups alone where it is not kept. Collective.

    One tensor at a time is put together on the device.
    """
    entries = {
        number: {name: _on_host(value, keeps) if is_sharded(value) else value for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": entries if keeps else {}}


def load_model_state(model: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Put a whole state, which every process has, into a model of which it has a part. Local."""
    own = model.state_dict(keep_vars=True)
    values = {
        name: fill_part(own[name], value) if name in own and _fits(own[name], value) else value
        for name, value in state.items()
    }
    model.load_state_dict(values, strict=strict)


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Put a whole state, which every process has or can read, into an optimizer of parts. Local."""
    numbered = dict(enumerate(parameters_of(optimizer)))
    entries = {number: _in_parts(numbered.get(number), values) for number, values in state["state"].items()}
    groups = read_all(state["param_groups"])  # a rate may be a tensor
    optimizer.load_state_dict({**state, "state": entries, "param_groups": groups})


def rebuild(optimizer: Optimizer, model: nn.Module, names: Mapping[int, str]) -> None:
    """Give an optimizer the parameters that a model has now for those that it was made with. Local.

    Groups, hyperparameters and state stay; of the state's tensors each process keeps its part.

    Args:
        optimizer: made with the model's parameters as they were before.
        model: sharded since.
        names: of its parameters before, by `id`.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    new = {number: parameters[name] for number, name in names.items()}
    states = [(new[id(old)], values) for old, values in optimizer.state.items()]
    for group in optimizer.param_groups:
        group["params"] = [new[id(parameter)] for parameter in group["params"]]
    optimizer.state.clear()
    for parameter, values in states:
        optimizer.state[parameter] = _in_parts(parameter, values)


def accumulated_gradients(entry: nn.Module) -> dict[str, Tensor]:
    """The gradients that units keep whole while they are accumulated and not reduced, by their parameters. Local."""
    found = {}
    for name, parameter in _unit_parameters(entry):
        gradient = parameter.unsharded_accumulated_grad
        if gradient is None and hasattr(parameter, "_unsharded_param"):
            gradient = parameter._unsharded_param.grad
        if gradient is not None:
            found[name] = local_part(gradient)
    return found


def restore_accumulated(entry: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Put back what `accumulated_gradients` gave. Local."""
    from torch.distributed.tensor import DTensor  # here: only who has sharded tensors needs it

    for name, parameter in _unit_parameters(entry):
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
        given = gradients.get(name)
        if given is not None:
            given = given.to(parameter.device)
            if parameter.is_dtensor:  # its layer is cut as well
                spec = parameter._unsharded_dtensor_spec
                given = DTensor.from_local(
                    given, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
                )
        parameter.unsharded_accumulated_grad = given


def _unit_parameters(entry: nn.Module) -> Iterator[tuple[str, Any]]:
    """What torch keeps of each parameter of the units, by its name."""
    paths = {id(module): path for path, module in entry.named_modules()}
    for group in groups_of(entry):
        for parameter in group.fsdp_params:
            place = parameter._module_info
            yield f"{paths[id(place.module)]}.{place.param_name}", parameter


def groups_of(entry: nn.Module) -> list[Any]:
    """What torch keeps of each unit's parameters, which are gathered and reduced together. Local."""
    # torch has no public way to them.
    states = [state() for module in entry.modules() if (state := getattr(module, "_get_fsdp_state", None)) is not None]
    return [group for state in states for group in state._fsdp_param_groups]


def check_parameters(optimizer: Optimizer, model: nn.Module, known: Mapping[int, Any]) -> None:
    """Refuse an optimizer of other parameters than a model's. Local.

    Raises:
        ConfigError: says how many, and their shapes.
    """
    others = [list(p.shape) for p in parameters_of(optimizer) if id(p) not in known]
    if others:
        raise ConfigError(
            f"{type(optimizer).__name__} holds {len(others)} parameters that {type(model).__name__} does not have (the "
            f"first of shape {others[0]}): its parameters were replaced since, as sharding does, or they are another "
            "model's. Make the optimizer from model.parameters(), and set both up together: "
            "accelerator.prepare(model, optimizer)."
        )


def _on_host(value: Tensor, keeps: bool) -> Tensor:
    full = whole(value)
    return full.cpu() if keeps else torch.empty(0)


def _fits(mine: Any, value: Any) -> bool:
    is_whole = isinstance(value, (Tensor, StoredTensor)) and not is_sharded(value)
    return is_sharded(mine) and is_whole and mine.shape == value.shape


def _in_parts(parameter: Tensor | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """One parameter's state; tensors of its shape become parts as its own is one."""
    parts = {key: _as_part(parameter, value) for key, value in values.items() if _fits(parameter, value)}
    return read_all({**values, **parts})  # type: ignore[no-any-return]


def _as_part(parameter: Any, value: Tensor | StoredTensor) -> Tensor:
    part = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    if isinstance(value, StoredTensor):
        value.read_into(part)
        return part
    return fill_part(part, value)
