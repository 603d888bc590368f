"""Post-local SGD: gradients are averaged at first; later they stay in their process, and weights are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from ..checkpoint.names import unwrapped
from .averaging import average
from .optimizer import parameters_of


class PostLocalSGD:
    """Counts the steps of each optimizer, and averages its weights when that is due.

    Args:
        warmup_steps: optimizer steps with averaged gradients.
        period: optimizer steps from one averaging of the weights to the next.
    """

    def __init__(self, warmup_steps: int, period: int) -> None:
        self.warmup_steps = warmup_steps
        self.period = period
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._hooks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
        """torch's state of each model, which counts its reductions."""

    def register(self, model: nn.parallel.DistributedDataParallel) -> None:
        """Let a model send its gradients only during the warm-up. Local."""
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

        # torch's state would average in groups of processes after its warm-up; without that, nothing is sent.
        state = PostLocalSGDState(  # type: ignore[no-untyped-call]
            model.process_group, None, self.warmup_steps, post_local_gradient_allreduce=False
        )
        model.register_comm_hook(state, post_localSGD_hook)
        self._hooks[model] = state

    def process_state(self, replica: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """The counts; after the warm-up also this process's own weights and optimizer states. Local."""
        steps = [self._steps.get(optimizer, 0) for optimizer in optimizers]
        state: dict[str, Any] = {"steps": steps, "reductions": self._hooks[replica].iter}
        if max(steps, default=0) > self.warmup_steps:
            state["weights"] = unwrapped(replica).state_dict()
            state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
        return state

    def load_process_state(self, replica: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        """Take back what `process_state` gave. Local."""
        self._hooks[replica].iter = state["reductions"]
        for optimizer, steps in zip(optimizers, state["steps"], strict=True):
            self._steps[optimizer] = steps
        if "weights" in state:
            unwrapped(replica).load_state_dict(state["weights"])
            for optimizer, own in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(own)

    def after_step(self, optimizer: Optimizer) -> None:
        """Count a step, also one that was skipped in this process, and average the weights if due. Collective then."""
        steps = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if steps > self.warmup_steps and (steps - self.warmup_steps) % self.period == 0:
            average(parameters_of(optimizer), "averaging of weights (post-local SGD)")
