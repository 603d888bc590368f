"""Whether processes that share layers agree on the gradients of the weights that each of them has whole."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ..checkpoint.sharded import is_sharded, local_part
from ..distributed import watch
from ..distributed.errors import ConfigError
from ..distributed.meshes import TENSOR

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_NUM_STEPS = 16
"""For how many steps weights are waited for whose gradients are 0 (behind a layer that begins with zeros) or not finite
(fp16, until its scale fits)."""
_BUCKETS = 16
_PIECE = 1 << 20
_TOLERANCE = 0.05
"""How far gradients may be apart, as a part of their norm. Processes compute them alike but for the order of additions
in some kernels of accelerators."""
_FLOOR = 1e-4
"""The same as a part of the norm of all gradients: what stands before a normalisation may have nothing but rounding."""
_SHOWN = 6


class _Found(NamedTuple):
    """What all processes know of gradients after a comparison."""

    differing: list[int]
    """Which of them are not alike."""
    largest: float
    """By how much of its norm one differs at most."""
    is_whole: bool
    """Whether each had a gradient that is finite and not 0."""
    draws_alike: bool
    """Whether random numbers are in the same state along the axis."""


class Agreement:
    """Compares, in the first steps of each optimizer, gradients that processes along the tensor axis must have alike.

    They are those of weights that are not cut. A module that sees a part of the sequence, or of the heads, without the
    plan's knowledge gets a part of its gradient.

    Args:
        tensor: the axis.
        device: where processes reduce.
        all_alike: those that have the same parameters; None: all processes.
    """

    def __init__(self, tensor: DeviceMesh, device: torch.device, all_alike: dist.ProcessGroup | None = None) -> None:
        self._group = tensor.get_group()
        self._all_alike = all_alike
        self._device = device
        self._open: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()
        """Of each optimizer how many parameters were trained, and for how many steps they are compared yet."""

    def check(self, optimizer: Optimizer, models: Iterable[nn.Module]) -> None:
        """Compare the gradients before an optimizer's step, in its first ones and where parameters were unfrozen.
        Collective.

        Args:
            optimizer: of a sharded model.
            models: whose parameters it holds.
        Raises:
            ConfigError: some differ, on all processes. Names them, and says what the plan lacks.
        """
        held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        num_trained, num_left = self._open.get(optimizer, (-1, 0))
        if num_trained != len(held):
            num_left = _NUM_STEPS
        if num_left == 0:
            return
        whole = [parameter for parameter in held if _is_whole(parameter)]
        found = self._compare([parameter.grad for parameter in whole])
        if found.differing:
            names = {id(p): name for model in models for name, p in model.named_parameters()}
            raise _error([names.get(id(whole[index]), "?") for index in found.differing], found)
        self._open[optimizer] = len(held), 0 if found.is_whole else num_left - 1

    def _compare(self, gradients: Sequence[Tensor | None]) -> _Found:
        """Compare sketches of gradients: random sums, whose distance is about that of the gradients. Collective: a
        small reduction over the axis, and one over all that have the same parameters, so that all find the same.
        """
        signs = self._signs(gradients)
        sketches = torch.stack([_random_state(self._device), *(self._sketch(each, signs) for each in gradients)])
        norms, is_bad = sketches[:, -1:], ~sketches.isfinite().all(1, keepdim=True)
        around = torch.cat([sketches[:, :-1], -sketches[:, :-1], norms], 1).masked_fill(is_bad, 0)
        with watch.collective("comparison of gradients over the tensor axis"):
            dist.all_reduce(around, dist.ReduceOp.MAX, group=self._group)
            spread = around[:, :_BUCKETS] + around[:, _BUCKETS:-1]
            joint = torch.cat([spread.square().sum(1, keepdim=True), around[:, -1:], is_bad.to(spread.dtype)], 1)
            dist.all_reduce(joint, group=self._all_alike)
        squares = joint[1:].cpu()
        apart, norm, bad = squares.unbind(1)
        limit = torch.maximum(norm * _TOLERANCE**2, norm.sum() * _FLOOR**2)
        differing = ((apart > limit) & (bad == 0)).nonzero().flatten().tolist()
        largest = (apart / norm.clamp_min(1e-30)).sqrt()[differing].max().item() if differing else 0.0
        is_whole = bool(((norm > 0) & (bad == 0)).all())
        return _Found(differing, largest, is_whole, joint[0, 0].item() == 0)

    def _signs(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The same random signs on all processes, as many as the longest part of a gradient needs."""
        longest = max((local_part(each).numel() for each in gradients if each is not None), default=0)
        generator = torch.Generator().manual_seed(0)
        return torch.randint(2, (min(longest, _PIECE),), generator=generator).mul_(2).sub_(1).float()

    def _sketch(self, gradient: Tensor | None, signs: Tensor) -> Tensor:
        """Sums of a part of a gradient with random signs, and its norm squared: (_BUCKETS + 1,)."""
        total = torch.zeros(_BUCKETS + 1, dtype=torch.float64)
        if gradient is None or local_part(gradient).numel() == 0:
            return total.to(self._device, torch.float32)
        flat = local_part(gradient.detach()).flatten()
        signs, sums = signs.to(flat.device), total.to(flat.device, torch.float32)
        for piece in torch.split(flat, _PIECE):
            values = piece.float()
            signed = F.pad(values * signs[: len(piece)], (0, -len(piece) % _BUCKETS))
            sums[:-1] += signed.view(-1, _BUCKETS).sum(0)
            sums[-1] += values.square().sum()
        return sums.to(self._device)


def _is_whole(parameter: Tensor) -> bool:
    """Whether each process along the tensor axis has to have the same gradient of a parameter."""
    if not is_sharded(parameter):
        return True
    sharded: Any = parameter
    names = sharded.device_mesh.mesh_dim_names or ()
    return TENSOR not in names or sharded.placements[names.index(TENSOR)].is_replicate()


def _random_state(device: torch.device) -> Tensor:
    """The state of random numbers, as a row of a comparison."""
    state = torch.get_rng_state()
    if device.type != "cpu":
        state = torch.cat([state, torch.get_device_module(device.type).get_rng_state(device).cpu()])
    checksum = zlib.crc32(state.numpy().tobytes())
    row = torch.zeros(_BUCKETS + 1)
    row[0], row[1] = checksum & 0xFFFF, checksum >> 16  # which float32 holds exactly
    return row.to(device)


def _error(names: Sequence[str], found: _Found) -> ConfigError:
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    cause = (
        "Their modules see a part of the sequence or of the heads: put them into tensor_plan as 'sequence', or what "
        "stands before them as 'sequence_gather' or 'gather'."
    )
    if not found.draws_alike:
        cause = (
            "Random numbers differ along it too, so that dropout does: seed its processes alike (Trainer(seed=...); "
            f"set_seed(seed) without device_specific). If there is none: {cause[0].lower()}{cause[1:]}"
        )
    return ConfigError(
        f"processes along the tensor axis have different gradients, by up to {found.largest:.0%}, of what each has "
        f"whole: {shown}. {cause}"
    )
