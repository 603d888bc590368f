"""Post-local SGD: gradients are averaged at first; later they stay in their process, and weights are averaged."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

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

    def register(self, model: nn.parallel.DistributedDataParallel) -> None:
        """Let a model send its gradients only during the warm-up. Local."""
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

        # torch's state would average in groups of processes after its warm-up; without that, nothing is sent.
        state = PostLocalSGDState(  # type: ignore[no-untyped-call]
            model.process_group, None, self.warmup_steps, post_local_gradient_allreduce=False
        )
        model.register_comm_hook(state, post_localSGD_hook)

    def after_step(self, optimizer: Optimizer) -> None:
        """Count a step, also one that was skipped in this process, and average the weights if due. Collective then."""
        steps = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if steps > self.warmup_steps and (steps - self.warmup_steps) % self.period == 0:
            average(parameters_of(optimizer), "averaging of weights (post-local SGD)")
