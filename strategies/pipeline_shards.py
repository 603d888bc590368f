"""The weights of one place in pipelines: spread by torch's `fully_shard` over those side by side, or cut by a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.sharded import local_part
from ..distributed import watch
from ..distributed.errors import ConfigError
from .pipeline_groups import PipelineGroups
from .sharded_model import learn_formats
from .sharded_state import groups_of, restore_accumulated
from .sharding import check_formats, is_uncut, owned_parameters
from .tensor_parallel import Plan, cut, cut_inputs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class StageShards:
    """Spreads the layers of this process, gathers them for a batch, and reduces their gradients where a window ends.

    All are gathered before a batch goes through the stages and freed behind it, so that processes which leave a batch
    out, or are at another microbatch, need only do the same at its edges. Computing is as without shards: in the
    weights' own number format, under autocast where the precision asks for it.

    Args:
        groups: of the processes, with a mesh.
        plan: which modules are cut over its tensor axis, and how.
        device: where this process computes.
    """

    def __init__(self, groups: PipelineGroups, plan: Plan, device: torch.device) -> None:
        self._groups = groups
        self._plan = plan
        self._device = device
        self._units: list[Any] = []
        """The layers that were spread, in their order, each in a module that is never called: torch's hooks on it would
        gather and reduce at times of their own."""
        self.has_whole = False
        """Whether layers have parameters that are not spread; those that are frozen may be trained later."""

    def spread(self, layer: nn.Module, whole: Collection[nn.Parameter]) -> None:
        """Cut and spread the weights of a layer that this process has with all of its values. Collective among those at
        its place.

        Args:
            layer: one of its stages.
            whole: parameters that are not spread.
        """
        from torch.distributed.fsdp import fully_shard

        left = {each for each in layer.parameters() if is_uncut(each) or each in whole}
        self.has_whole |= bool(left)
        is_whole = left.issuperset(layer.parameters())
        if self._groups.tensor is not None:
            self._cut(layer, left, self._groups.tensor)
        if is_whole:
            return
        unit: Any = fully_shard(nn.Sequential(layer), mesh=self._groups.spread, ignored_params=left)
        unit.set_reduce_scatter_unused_params(True)
        unit._get_fsdp_state()._lazy_init()  # which torch does in the first call
        self._units.append(unit)

    def _cut(self, layer: nn.Module, left: Collection[nn.Parameter], tensor: DeviceMesh) -> None:
        """Keep of planned modules of a layer the part of this process. Local."""
        owned = owned_parameters(layer, {layer}, ())[layer]
        holders = [(module, name) for module, name in owned if getattr(module, name) not in left]
        cut(holders, self._plan, tensor)
        own = {module: style for module, style in self._plan.items() if module in {*layer.modules()}}
        cut_inputs(own, {module for module, _ in holders}, tensor)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A context in which the layers have all of their weights. Collective among those at its place."""
        try:
            # A batch of an evaluation may be the first: what is gathered into serves training as well.
            with watch.collective("gathering of the weights"), torch.inference_mode(False):
                for unit in self._units:
                    unit.unshard()
            yield
        finally:
            self.free()

    def free(self) -> None:
        """Free what is gathered. Local."""
        for unit in self._units:
            unit.reshard()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients that were not reduced yet. Local."""
        gradients = [local_part(each.unsharded_param.grad) for each in self._parameters() if _has_gradient(each)]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def forget_gradients(self) -> None:
        """Drop the gradients that were not reduced yet. Local."""
        for unit in self._units:
            restore_accumulated(unit, {})

    def reduce(self) -> None:
        """Average the gradients of the window over pipelines, and keep this process's part. Collective among those at
        its place.

        A gradient that only some pipelines have counts as 0 in the others; one that none has stays None.
        """
        parameters = [each for each in self._parameters() if each.sharded_param.requires_grad]
        with watch.collective("averaging of gradients"):
            missing = self._missing_everywhere(parameters)
            for unit in self._units:
                _reduce(unit)
        for parameter, is_missing in zip(parameters, missing, strict=True):
            if is_missing:
                parameter.sharded_param.grad = None

    def _missing_everywhere(self, parameters: Sequence[Any]) -> list[bool]:
        """Of each parameter whether no pipeline has a gradient. Collective."""
        own = [_has_gradient(parameter) for parameter in parameters]
        present = torch.tensor(own, dtype=torch.uint8, device=self._device)
        dist.all_reduce(present, dist.ReduceOp.MAX, group=self._groups.alike)
        return [False] * len(own) if all(own) else [not each for each in present.tolist()]

    def _parameters(self) -> Iterator[Any]:
        """What torch keeps of each parameter."""
        for unit in self._units:
            for group in groups_of(unit):
                yield from group.fsdp_params


def check_spread(layers: Sequence[nn.Module], plan: Plan) -> None:
    """Refuse layers whose gradients can't be reduced together, or that can't be cut. Local, alike on all processes.

    Args:
        layers: of all stages.
        plan: of what is cut.
    Raises:
        ConfigError: the trained parameters of one have several number formats, or several share what the plan cuts.
    """
    shared = shared_parameters(layers)
    for layer in layers:
        check_formats(owned_parameters(layer, {layer}, ()))
        for name, module in layer.named_modules():
            if module in plan and not shared.isdisjoint(module.parameters(recurse=False)):
                raise ConfigError(
                    f"tensor_plan cuts {name or 'a layer,'} {type(module).__name__}, whose weights several layers of "
                    "the pipeline share. Untie them, or leave it out of the plan."
                )


def shared_parameters(layers: Sequence[nn.Module]) -> set[nn.Parameter]:
    """The parameters that several of these layers have, which stay whole. Local."""
    counts = Counter(parameter for layer in layers for parameter in {*layer.parameters()})
    return {parameter for parameter, count in counts.items() if count > 1}


def _has_gradient(parameter: Any) -> bool:
    return hasattr(parameter, "_unsharded_param") and parameter.unsharded_param.grad is not None


def _reduce(unit: Any) -> None:
    """Reduce the gradients of a unit. Collective."""
    learn_formats(groups_of(unit))
    for group in groups_of(unit):
        group.post_backward()
    # torch has no public way to wait for what a unit reduces, where no backward of its own ends.
    unit._get_fsdp_state()._root_post_backward_final_callback()
