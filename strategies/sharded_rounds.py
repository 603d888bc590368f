"""What processes tell each other in the first passes of a sharded model, of which none knows the order of its units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

import torch
import torch.distributed as dist

from ..distributed.errors import DistributedError
from ..distributed.slots import control_device, gather_into


class Kind(IntEnum):
    """What comes next in a pass."""

    NOTHING = 0
    """This process has nothing to compute (any more), and makes what others say."""
    ENTER = 1
    LEAVE = 2
    LOSS = 3


@dataclass(frozen=True, slots=True)
class Said:
    """What a process does next."""

    kind: Kind
    unit: int = 0
    """Of `ENTER` and `LEAVE`: which one."""
    takes_gradient: bool = False
    is_quiet: bool = False


NOTHING, LOSS = Said(Kind.NOTHING), Said(Kind.LOSS)


class Rounds:
    """Rounds in which each process says what comes next, in turns with the collectives of the units themselves."""

    def __init__(self) -> None:
        self._leader = 0
        self.meet: Callable[[], None] | None = None
        """What comes before each round, on all processes."""

    def hear(self, said: Said) -> Said:
        """What those processes do next that have something to compute, `NOTHING` if none has. Collective.

        Raises:
            DistributedError: on every process: they do different things.
        """
        device, count = control_device(), dist.get_world_size()
        if count == 1:
            return said
        if self.meet is not None:
            self.meet()
        own = torch.tensor([said.kind, said.unit, said.takes_gradient, said.is_quiet], device=device)
        found = torch.empty(count * len(own), dtype=own.dtype, device=device)
        gather_into(found, own)
        rows = found.view(count, -1).tolist()
        active = [index for index, row in enumerate(rows) if row[0] != Kind.NOTHING]
        if not active:
            return NOTHING
        self._leader = active[0]
        if any(rows[index] != rows[active[0]] for index in active):
            raise DistributedError(
                f"processes {active} go through the model's units in different orders. Every process has to call the "
                "same units in each batch, or leave the batch out."
            )
        kind, unit, takes_gradient, is_quiet = rows[active[0]]
        return Said(Kind(kind), unit, bool(takes_gradient), bool(is_quiet))

    def share(self, value: list[Any] | None) -> list[Any]:
        """The value of the first process that had something to say in the last round. Collective.

        Args:
            value: this process's; None where it said nothing.
        """
        if self.meet is not None:
            self.meet()
        values = [value]
        dist.broadcast_object_list(values, src=self._leader, device=control_device())
        return cast("list[Any]", values[0])
