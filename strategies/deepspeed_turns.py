"""Passes under DeepSpeed in which every process has a part, also one that has nothing to compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..distributed import watch
from ..distributed.errors import DistributedError
from ..distributed.exchange import exchange
from .passes import Entry, Passes


class EngineEntry(Entry):
    """What an engine calls: a method of the model by its name, or a function in the place of None."""

    def forward(self, name: str | None, *args: Any, **kwargs: Any) -> Any:
        return args[0]() if name is None else super().forward(name, *args, **kwargs)


class EngineCall:
    """A method of a model in an engine, as the training loop calls it.

    Args:
        engine: DeepSpeed's.
        entry: of the model.
        name: of the method.
    """

    def __init__(self, engine: Any, entry: EngineEntry, name: str) -> None:
        self._engine = engine
        self._entry = entry
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with watch.collective(self._name):
            outputs, _ = self._engine(self._name, *args, **kwargs)
            error, self._entry.__dict__["raised"] = self._entry.raised, None
            if error is not None:
                raise error  # of the model, or of a message for its parts
        return outputs


class TurnCall:
    """A method of a model in parts, as an evaluation calls it: in turns with the other processes.

    Args:
        passes: of the model.
        name: of the method.
    """

    def __init__(self, passes: Passes, name: str) -> None:
        self._passes = passes
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        exchange(True, "evaluation")
        with watch.collective(self._name):
            return self._passes.evaluate(self._name, *args, **kwargs)


def passes_of(entry: EngineEntry, device: torch.device) -> Passes:
    """What makes the passes of a model in parts: DeepSpeed gathers weights for each module by itself. Local."""
    modules = {module: module.named_parameters(recurse=False) for module in entry.modules()}
    owned = {module: [(module, name) for name, _ in named] for module, named in modules.items()}
    return Passes(entry, owned, device)


class ArrivalOrder:
    """In which order backward comes to the parameters. Gradients are reduced in that order, on all processes alike.

    Args:
        parameters: those that are trained.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._found: list[Tensor] = []
        self._hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._found.append)  # type: ignore[no-untyped-call]
            for parameter in parameters
        ]

    def went_back(self) -> None:
        """A backward is over. Local."""
        if self._found:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def zero_loss(self) -> Tensor:
        """A loss of 0 whose backward comes to the same parameters in the same order. Local.

        Raises:
            DistributedError: there was no backward yet.
        """
        if not self._found:
            raise DistributedError(
                "this process has no loss in the first micro-batch, and so does not know in which order gradients are "
                "reduced. Give each process a batch with a loss to begin with."
            )
        keep = torch.zeros((), dtype=torch.bool, device=self._found[0].device)
        zero = torch.zeros((), device=self._found[0].device)
        # Backward begins with what was added last.
        for parameter in reversed(self._found):
            zero = zero + torch.where(keep, parameter, 0).sum().float()
        return zero
