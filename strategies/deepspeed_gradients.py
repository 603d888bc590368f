"""The gradients of a window where DeepSpeed keeps them: scaled, clipped and forgotten before its optimizer steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from ..distributed.errors import ConfigError


class WindowGradients(ABC):
    """What one kind of DeepSpeed's optimizers does with the gradients of a window.

    Args:
        optimizer: DeepSpeed's.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def pending(self) -> float:
        """What the gradients will be multiplied with when the optimizer steps, beside the clipping."""
        return 1.0

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply the gradients, at the latest when the optimizer steps. Local."""

    @abstractmethod
    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Keep the global norm at `max_norm`, at the latest when the optimizer steps. Collective.

        Returns:
            The norm before, a scalar.
        Raises:
            ConfigError: norms of this kind can't be computed.
        """

    @abstractmethod
    def forget(self) -> None:
        """Drop the gradients of a window that will not be closed. Local."""

    def after_step(self) -> None:
        """Put back what `scale` and `clip` have set for one step. Local."""


@final
class WholeGradients(WindowGradients):
    """Stage 0: whole ones, in the parameters.

    Args:
        optimizer: torch's own.
        parameters: those that are trained.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[Tensor]) -> None:
        super().__init__(optimizer)
        self._parameters = parameters

    def scale(self, factor: float) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self._parameters, max_norm, norm_type=norm_type)

    def forget(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class _Clipped(WindowGradients):
    """Where DeepSpeed's optimizer clips by its `clip_grad`."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._configured = optimizer.clip_grad

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        if norm_type != 2:
            raise ConfigError(
                f"clip_grad_norm_(norm_type={norm_type}): DeepSpeed computes norms of type 2 alone, from stage 1 on."
            )
        self.optimizer.clip_grad = max_norm
        return self._norm()

    @abstractmethod
    def _norm(self) -> Tensor:
        """The global norm of the gradients as they will be stepped on. Collective."""

    def after_step(self) -> None:
        self.optimizer.clip_grad = self._configured


class PartitionedGradients(_Clipped):
    """Stages 1 to 3: in partitions, which the optimizer divides by its loss scale before it steps."""

    _cached = ""
    """The method of the optimizer that computes the norm, which is not to be computed twice."""

    @property
    def pending(self) -> float:
        return 1.0 / float(self.optimizer.loss_scale)

    def scale(self, factor: float) -> None:
        optimizer = self.optimizer
        optimizer.external_loss_scale = optimizer.loss_scale / factor
        optimizer.custom_loss_scaler = True

    def after_step(self) -> None:
        super().after_step()
        self.optimizer.custom_loss_scaler = False
        vars(self.optimizer).pop(self._cached, None)

    def _keep(self, norms: Any) -> Any:
        vars(self.optimizer)[self._cached] = lambda *_: norms
        return norms


@final
class FlatPartitions(PartitionedGradients):
    """Stages 1 and 2."""

    _cached = "scaled_global_norm"

    def _norm(self) -> Tensor:
        norm: Tensor = self._keep(self.optimizer.scaled_global_norm()) / self.optimizer.loss_scale
        return norm

    def forget(self) -> None:
        optimizer = self.optimizer
        optimizer.zero_grad()
        optimizer.micro_step_id = -1
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = optimizer.all_grad_tensors[group] = None
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
        self.after_step()


@final
class ParameterPartitions(PartitionedGradients):
    """Stage 3."""

    _cached = "_get_norm_groups"

    def _norm(self) -> Tensor:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        norm: Tensor = (
            combine_grad_norm_groups(self._keep(self.optimizer._get_norm_groups())) / self.optimizer.loss_scale
        )
        return norm

    def forget(self) -> None:
        self.optimizer.zero_grad()  # the next backward overwrites the partitions
        if self.optimizer.offload_optimizer:
            self.optimizer.reset_cpu_buffers()
        self.after_step()


@final
class FullAccumulation(_Clipped):
    """Stage 1 with weights in 16 bits and gradients that are accumulated in 32."""

    def scale(self, factor: float) -> None:
        torch._foreach_mul_(self.optimizer.fp32_groups_gradients_flat, factor)

    def _norm(self) -> Tensor:
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        ours, _ = self.optimizer.get_grads_for_norm()
        norm: Tensor = get_global_norm_of_tensors(input_tensors=ours, mpu=None, norm_type=2)
        return torch.where(norm < 0, torch.inf, norm)  # of what is not finite it gives -1

    def forget(self) -> None:
        self.optimizer.clear_hp_grads()
        self.optimizer.clear_lp_grads()
        self.after_step()


def gradients_of(optimizer: Any, stage: int, parameters: Sequence[Tensor]) -> WindowGradients:
    """What handles the gradients of a window. Local.

    Args:
        optimizer: DeepSpeed's, as its engine has it.
        stage: of ZeRO.
        parameters: those that are trained.
    """
    if stage == 0:
        return WholeGradients(optimizer, parameters)
    if stage == 3:
        return ParameterPartitions(optimizer)
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    return FullAccumulation(optimizer) if isinstance(optimizer, BF16_Optimizer) else FlatPartitions(optimizer)
