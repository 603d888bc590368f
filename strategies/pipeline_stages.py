"""The stages of one process, and torch's schedules that send batches through those of all."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..distributed import watch
from ..distributed.errors import ConfigError, DataError, TaskError
from .handlers import AutocastKwargs
from .pipeline_layers import Cut
from .precision import ContextFactory, Precision

SCHEDULES: Mapping[str, tuple[str, bool]] = {
    "1f1b": ("Schedule1F1B", False),
    "gpipe": ("ScheduleGPipe", False),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", True),
    "interleaved_zero_bubble": ("ScheduleInterleavedZeroBubble", True),
    "looped_bfs": ("ScheduleLoopedBFS", True),
}
"""torch's class for each word, and whether it is made for several stages per process."""
_MOST_KEPT = 8
"""Shapes of batches whose schedules are kept."""


class Stage(nn.Module):
    """Layers that are called one after another.

    Args:
        layers: of one stage.
        autocast: gives the contexts in which they compute.
    """

    def __init__(self, layers: tuple[nn.Module, ...], autocast: ContextFactory) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._autocast = autocast
        self.raised: Exception | None = None
        """What a layer has raised, which torch hides in an error of its own."""
        self.is_tried = False
        """Whether the next pass only shows torch the shapes: it leaves no trace in buffers."""

    def forward(self, value: Tensor) -> Tensor:
        trying = _copies_of_buffers(self) if self.is_tried else nullcontext()
        self.__dict__["is_tried"] = False
        try:
            with self._autocast(), trying:
                for layer in self.layers:
                    value = layer(value)
                    if not isinstance(value, Tensor):
                        raise TaskError(
                            f"a layer of pipeline_layers(), {type(layer).__name__}, gave a {type(value).__name__}. "
                            "Expected one tensor, which the next layer takes."
                        )
        except Exception as error:
            self.__dict__["raised"] = error
            raise
        return value


class Pipeline:
    """Sends batches through the stages of all processes, and each stage's gradients back.

    Args:
        cut: of the model.
        schedule: a word of `SCHEDULES`.
        num_chunks: parts of a batch in training.
        precision: of the run.
        device: where this process computes.
    Raises:
        ConfigError: the schedule can't have so many chunks.
    """

    def __init__(self, cut: Cut, schedule: str, num_chunks: int, precision: Precision, device: torch.device) -> None:
        self.cut = cut
        self._num_chunks = num_chunks
        self._word = schedule
        self._device = device
        # Without torch's cache of converted weights: one made for one chunk would be a part of the graphs of others.
        self._autocast = precision.contexts(AutocastKwargs(cache_enabled=False))
        rank = dist.get_rank()
        self._stages = {
            rank + number * cut.num_processes: Stage(layers, self._autocast)
            for number, layers in enumerate(cut.entries_of(rank))
        }
        self._last = (len(cut.stages) - 1) % cut.num_processes
        self._schedules: dict[Hashable, Any] = {}
        self._parts: list[Any] = []
        """The chunks of the batch that is on its way."""
        self._losses: dict[int, Tensor] = {}
        """Their losses, in the process with the last stage."""
        self._raised: Exception | None = None
        self._factor = 1.0
        self._build(True, num_chunks)  # so that what can't work is refused now

    def train(self, batch: Any, window_size: int) -> Tensor:
        """Add up the gradients of a batch's mean loss, divided by the size of its window. Collective.

        Returns:
            The mean loss, not divided: a scalar, the same on all processes, without a gradient.
        Raises:
            DataError: the batch can't be cut.
        """
        value = self._cut_batch(batch, self._num_chunks)
        self._factor = 1 / (window_size * self._num_chunks)
        return self._run(value, True)

    def evaluate(self, batch: Any) -> Tensor:
        """The mean loss of a batch, a scalar, the same on all processes. Collective.

        It is cut into as many equal chunks as can be, up to those of training.
        """
        size = self._input(batch).shape[0]
        most = min(self._num_chunks, size)
        return self._run(self._cut_batch(batch, next(n for n in range(most, 0, -1) if size % n == 0)), False)

    def _input(self, batch: Any) -> Tensor:
        model: Any = self.cut.model
        value = model.pipeline_input(batch)
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] == 0:
            shown = f"tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise DataError(
                f"pipeline_input(batch) gave a {shown}. Expected a tensor whose dimension 0 counts samples."
            )
        return value

    def _cut_batch(self, batch: Any, num_chunks: int) -> Tensor:
        """Cut a batch, and give what the first layer takes of the whole."""
        value = self._input(batch)
        size = value.shape[0]
        if size % num_chunks:
            raise DataError(
                f"a batch of {size} samples can't be cut into {num_chunks} equal microbatches. Use a batch size that "
                f"is a multiple of {num_chunks} and drop_last=True in the DataLoader, or another number of microbatches"
                " in strategy={'name': 'pipeline', 'microbatches': ...}."
            )

        def part_of(number: int) -> Any:
            def part(tensor: Tensor) -> Tensor:
                if tensor.dim() == 0:
                    return tensor
                if tensor.shape[0] != size:
                    raise DataError(
                        f"a batch has a tensor of shape {list(tensor.shape)} beside {size} samples, which can't be cut "
                        "with them. Give tensors dimension 0 for samples, or none."
                    )
                return tensor.chunk(num_chunks)[number]

            return tree_map_only(Tensor, part, batch)

        self._parts = [part_of(number) for number in range(num_chunks)]
        return value

    def _run(self, value: Tensor, trains: bool) -> Tensor:
        key = (trains, len(self._parts), value.shape, value.dtype, torch.is_inference_mode_enabled())
        if key not in self._schedules:
            if len(self._schedules) == _MOST_KEPT:
                del self._schedules[next(iter(self._schedules))]
            self._schedules[key] = self._build(trains, len(self._parts))
        schedule = self._schedules[key]
        arguments = (value,) if 0 in self._stages else ()
        numbers = torch.arange(len(self._parts))
        call = schedule.step if trains else schedule.eval
        with watch.collective("pipeline"):
            try:
                with torch.autocast(self._device.type, enabled=False):  # which stages enter by themselves
                    call(*arguments, target=numbers, return_outputs=False)
            except RuntimeError as error:
                raise self._first_raised() or error from error
            return self._mean_loss()

    def _build(self, trains: bool, num_chunks: int) -> Any:
        """The schedule of a number of chunks; it learns the shapes with its first batch. Local."""
        from torch.distributed import pipelining

        count = len(self.cut.stages)
        for stage in self._stages.values():
            stage.__dict__["is_tried"] = True
        made = [pipelining.PipelineStage(each, index, count, self._device) for index, each in self._stages.items()]
        # Of those that only go forward any number of chunks will do.
        word = self._word if trains else "gpipe" if len(made) == 1 else "looped_bfs"
        name, is_for_several = SCHEDULES[word]
        kind: Any = getattr(pipelining, name)
        try:
            return kind(made if is_for_several else made[0], num_chunks, loss_fn=self._loss_of, scale_grads=False)
        except ValueError as error:
            raise ConfigError(
                f"strategy='pipeline' with schedule='{self._word}', {count} stages and microbatches={num_chunks}: "
                f"{' '.join(str(error).split())} A multiple of the number of stages serves each schedule."
            ) from error

    def _loss_of(self, output: Tensor, number: Tensor) -> Tensor:
        """The loss of one chunk, as backward starts from it."""
        model: Any = self.cut.model
        try:
            with self._autocast():
                loss = model.pipeline_loss(output, self._parts[int(number)])
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                shown = f"tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise TaskError(f"pipeline_loss gave a {shown}. Expected the mean loss of its batch, a scalar tensor.")
        except Exception as error:
            self._raised = error
            raise
        self._losses[int(number)] = loss.detach().reshape(())
        weighted: Tensor = loss.reshape(()) * self._factor
        return weighted

    def _mean_loss(self) -> Tensor:
        """The mean of the chunks' losses, from the process that has them. Collective."""
        if dist.get_rank() == self._last:
            mean = torch.stack([self._losses[number] for number in range(len(self._parts))]).float().mean()
        else:
            mean = torch.zeros((), device=self._device)
        self._losses.clear()
        self._parts = []
        dist.broadcast(mean, self._last)
        return mean

    def _first_raised(self) -> Exception | None:
        found = [stage.raised for stage in self._stages.values()]
        return next((error for error in [*found, self._raised] if error is not None), None)


@contextmanager
def _copies_of_buffers(module: nn.Module) -> Iterator[None]:
    """A context in which a module and those inside of it have copies of their buffers. Local."""
    before = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    for part, own in before:
        part._buffers.update({name: None if each is None else each.clone() for name, each in own.items()})
    try:
        yield
    finally:
        for part, own in before:
            part._buffers.update(own)
