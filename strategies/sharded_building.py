"""How a model becomes a `Sharded` one: its units, what is cut of its layers, and where its weights get their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from ..distributed.errors import ConfigError
from .context_parallel import prepare_attention
from .layout import Layout
from .passes import Entry, Passes
from .precision import Precision
from .recompute import recompute
from .sharded_model import Sharded, free_after_evaluation, learn_formats, reduce_in_one_format
from .sharded_options import ShardedOptions, unit_arguments
from .sharded_state import groups_of
from .sharding import (
    as_full_precision,
    bring_buffers,
    bring_values,
    check_formats,
    check_shardable,
    find_ignored,
    owned_parameters,
    shard,
    whole_parameters,
)
from .suitability import check_alike
from .tensor_parallel import Plan, check_divides, check_units, cut, cut_inputs, find_plan
from .wrapping import find_units

if TYPE_CHECKING:
    from ..distributed.process import ProcessState


def make_sharded(
    model: nn.Module,
    method: str | None,
    options: ShardedOptions,
    layout: Layout,
    process: ProcessState,
    precision: Precision,
    before_sharding: Callable[[Sequence[tuple[nn.Module, str]]], None] | None = None,
) -> Sharded:
    """Spread a model over the processes, in place. Collective.

    Args:
        model: any module; on the main process with its values.
        method: as `Strategy.setup` takes it.
        options: of the sharding.
        layout: of the processes.
        process: this one.
        precision: of the run.
        before_sharding: called with each unit's parameters before they are spread, where no layers are cut.
    Raises:
        ConfigError: an option does not fit the model.
        ShapeMismatchError: it is another model on other processes.
    """
    check_alike(model)
    check_shardable(model, process.is_main_process)
    ignored = find_ignored(model, options.ignored_modules)
    units = find_units(model, options.wrap, ignored)
    entry = model if method == "forward" else Entry(model, method or "forward")
    owned = owned_parameters(entry, {*units}, ignored)
    plan = _find_plan(model, options, layout, units, ignored)
    if layout.sequences is not None:
        prepare_attention(model, layout.sequences)
    if options.compute_format(precision.compute_format) is not None:
        as_full_precision(owned)
    check_formats(owned)
    recompute_units(units, options)
    bring_buffers(model, process.device)
    holders = whole_parameters(model, ignored)
    bring_values(holders, process.device)
    whole = list(dict.fromkeys(getattr(module, name) for module, name in holders))
    arguments = unit_arguments(options, layout.parts, precision, process.device, {*whole})
    cuts = before_sharding if layout.tensor is None else partial(cut, plan=plan, mesh=layout.tensor)
    shard([*units, entry], owned, process.device, arguments, cuts)
    if layout.tensor is not None:
        cut_inputs(plan, {module for holders in owned.values() for module, _ in holders}, layout.tensor)
    _order(entry, units, options)
    if options.compute_format(precision.compute_format) is not None:
        entry.register_forward_hook(partial(learn_formats, groups_of(entry)))
        for group in groups_of(entry):
            group.post_backward = partial(reduce_in_one_format, group, group.post_backward)
    passes = Passes(entry, owned, process.device) if isinstance(entry, Entry) else None
    if passes is None:
        entry.register_forward_hook(free_after_evaluation)
    return Sharded(model, entry, passes, whole)


def recompute_units(units: Iterable[nn.Module], options: ShardedOptions) -> None:
    """Let units keep no activations, where the options say so. Local."""
    if options.activation_checkpointing:
        for unit in units:
            recompute(unit, offloads=options.activation_offload)


def _find_plan(
    model: nn.Module, options: ShardedOptions, layout: Layout, units: Sequence[nn.Module], ignored: Sequence[nn.Module]
) -> Plan:
    """How layers are cut; nothing where there is no axis for it, or the user has cut them.

    Raises:
        ConfigError: the plan does not fit the model, the units, or the mesh.
    """
    is_cut = layout.check_cut(model)
    if options.tensor_plan is not None and (is_cut or not layout.is_given):
        why = "its layers are cut already" if is_cut else "no mesh was, such as mesh={'tensor': 2}"
        raise ConfigError(f"tensor_plan was given for {type(model).__name__}, but {why}. Leave out one of them.")
    if layout.tensor is None or is_cut:
        return {}
    plan = find_plan(model, options.tensor_plan)
    check_units(plan, units, ignored)
    check_divides(plan, layout.sizes.tensor)
    return plan


def _order(entry: Any, units: Sequence[nn.Module], options: ShardedOptions) -> None:
    """Tell units what else to do around their passes."""
    entry.set_reduce_scatter_unused_params(options.find_unused_parameters)
    if not options.prefetch:
        return
    held: list[Any] = [module for module in entry.modules() if module in {*units}]
    for index, unit in enumerate(held):
        unit.set_modules_to_forward_prefetch(held[index + 1 : index + 1 + options.prefetch])
