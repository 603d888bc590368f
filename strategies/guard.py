"""`Guard`: passes that all processes leave together where memory runs out on one of them.

Every process has a part in each pass of a sharded model, so that one which leaves it alone would leave the others
waiting. In a guarded pass each of its collectives begins with a meeting, in which every process says whether it has
run out of memory since the last one, and the pass ends with one more. Who has says so at its next meeting, whichever
collective the others are about to begin; they leave at the same place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..distributed.errors import DistributedError
from ..distributed.exchange import start_vector

_NUM_COPIES = 2


class LeftPass(BaseException):
    """Another process ran out of memory in a guarded pass: this one is to leave it as well.

    It is no error, and goes past what catches those, such as a `training_step` that tries something.
    """


class Guard:
    """The meetings of a process."""

    def __init__(self) -> None:
        self.is_on = False
        """Whether passes are guarded now."""
        self._is_left = False

    def begin(self) -> None:
        """Hold meetings from now on. Local, on all processes alike."""
        self.is_on, self._is_left = True, False

    def end(self) -> None:
        """Hold no more of them. Local."""
        self.is_on = False

    def meet(self, place: int = 0) -> None:
        """Go on, if all processes do. Collective in guarded passes; elsewhere nothing is done.

        Args:
            place: what comes now, the same on all.
        Raises:
            LeftPass: another process has run out of memory, here and on all that go on.
            DistributedError: on every process: something else comes on another one.
        """
        if self.is_on:
            self._say(place, runs_out=False)
            if self._is_left:
                raise LeftPass

    def leave(self) -> None:
        """Tell the others that this process has run out of memory, unless another one has by now. Collective."""
        self._say(0, runs_out=True)

    def _say(self, place: int, *, runs_out: bool) -> None:
        if self._is_left:
            return
        rows = start_vector([place, runs_out], "go on with a pass").read()
        self._is_left = any(has_run_out for _, has_run_out in rows)
        if not self._is_left and len({place for place, _ in rows}) > 1:
            raise DistributedError(
                f"processes go through the model's units in different orders (place {[int(each) for each, _ in rows]} "
                "of their collectives). Every process has to call the same units in each part of a batch; a model that "
                "computes some of them a second time in backward can't be trained so."
            )


class GuardedCollective:
    """What gathers or reduces a unit's tensors, after a meeting. torch calls it when its memory is there.

    Args:
        own: torch's object for it.
        guard: of the model.
        place: see `Guard.meet`.
    """

    def __init__(self, own: Any, guard: Guard, place: int) -> None:
        self._own, self._guard, self._place = own, guard, place

    def allocate(self, *args: Any, **options: Any) -> Any:
        """A buffer, as torch's object makes it. Local."""
        return self._own.allocate(*args, **options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The collective. Collective."""
        if self._guard.is_on:
            _make_sure_of_memory([*args, *options.values()])
            self._guard.meet(self._place)
        return self._own(*args, **options)


def _make_sure_of_memory(arguments: Iterable[Any]) -> None:
    """Run out of memory now if a collective on the host would, which has copies of its tensors, and could not be left.
    One on an accelerator has none. Local.
    """
    on_host = [each for each in arguments if isinstance(each, torch.Tensor) and each.device.type == "cpu"]
    if on_host:
        torch.empty(_NUM_COPIES * sum(each.nbytes for each in on_host), dtype=torch.uint8)  # no page of it is used
