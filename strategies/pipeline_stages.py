"""The stages of one process, and torch's schedules that send batches through those of all."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..distributed import watch
from ..distributed.errors import ConfigError, DataError, TaskError
from ..distributed.numbers import wide_float
from .handlers import AutocastKwargs
from .pipeline_groups import PipelineGroups
from .pipeline_layers import Cut, Loss
from .pipeline_schedules import SCHEDULES
from .pipeline_shards import StageShards
from .precision import ContextFactory, Precision

_MOST_KEPT = 8
"""Shapes of batches whose schedules are kept."""


class Stage(nn.Module):
    """Layers that are called one after another.

    Args:
        layers: of one stage.
        autocast: gives the contexts in which they compute.
        place: what an error in it says of where it was.
    """

    def __init__(self, layers: tuple[nn.Module, ...], autocast: ContextFactory, place: str) -> None:
        super().__init__()
        self._place = place
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
            error.add_note(f"raised in {self._place}")
            self.__dict__["raised"] = error
            raise
        return value


class Pipeline:
    """Sends batches through the stages of the processes of a pipeline, and each stage's gradients back.

    Args:
        cut: of the model.
        schedule: a word of `SCHEDULES`.
        num_chunks: parts of a batch in training.
        precision: of the run.
        groups: of the processes.
        device: where this process computes.
    Raises:
        ConfigError: the schedule can't have so many chunks.
    """

    def __init__(
        self,
        cut: Cut,
        schedule: str,
        num_chunks: int,
        precision: Precision,
        groups: PipelineGroups,
        device: torch.device,
    ) -> None:
        self.cut = cut
        self.shards: StageShards | None = None
        """What spreads this process's layers over pipelines side by side; None: it has them whole."""
        self._num_chunks = num_chunks
        self._word = schedule
        self._precision = precision
        self._groups = groups
        self._device = device
        # Without torch's cache of converted weights: one made for one chunk would be a part of the graphs of others.
        self._autocast = precision.contexts(AutocastKwargs(cache_enabled=False))
        self._stages = {
            index: Stage(layers, self._autocast, f"stage {index} of the {len(cut.stages)} of the pipeline")
            for index, layers in cut.entries_of(groups.place).items()
        }
        self._last = cut.owners[-1]
        self._schedules: dict[Hashable, Any] = {}
        self._parts: list[Any] = []
        """The chunks of the batch that is on its way."""
        self._losses: dict[int, tuple[Tensor, Any]] = {}
        """Their losses and what these count, in the process with the last stage."""
        self._largest = 0
        """Samples of the largest batch in training."""
        self._has_warned = False
        self._gives_counts: bool | None = None
        """Whether losses are sums with counts; None: there was none yet."""
        self._raised: Exception | None = None
        self._broken: BaseException | None = None
        """What has ended a batch on its way through the stages, which other processes go on with."""
        self._factor: float | Tensor = 1.0
        self._build(True, num_chunks)  # so that what can't work is refused now

    def gathered(self) -> AbstractContextManager[None]:
        """A context in which this process has all weights of its layers. Collective where these are spread."""
        return nullcontext() if self.shards is None else self.shards.gathered()

    def input_of(self, batch: Any) -> Tensor:
        """What the first layer takes of a batch; dimension 0 counts samples. Local.

        Raises:
            DataError: it is no tensor with samples.
        """
        model: Any = self.cut.model
        value = model.pipeline_input(batch)
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] == 0:
            shown = f"tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise DataError(
                f"pipeline_input(batch) gave a {shown}. Expected a tensor whose dimension 0 counts samples."
            )
        return value

    def train(self, batch: Any, value: Tensor, factor: float) -> Loss:
        """Add up the gradients of a batch's loss times a factor, scaled as the precision asks. Collective.

        Args:
            batch: the same on all processes of the pipeline.
            value: its input, as `input_of` gives it.
            factor: of the loss.
        Returns:
            The mean loss, or its sum and count, without the factor: scalars, the same on all processes of the pipeline,
            without a gradient.
        Raises:
            DataError: the batch can't be cut.
        """
        size = value.shape[0]
        self._cut_batch(batch, size, self._num_parts(size))
        scales = self._precision.scales
        self._factor = self._precision.scale(torch.tensor(factor, device=self._device)) if scales else factor
        return self._run(value, True)

    def evaluate(self, batch: Any, value: Tensor) -> Loss:
        """The mean loss of a batch, or its sum and count: scalars, the same on all processes of the pipeline.
        Collective.

        It is cut into as many equal chunks as can be, up to those of training.
        """
        size = value.shape[0]
        most = min(self._num_chunks, size)
        self._cut_batch(batch, size, next(n for n in range(most, 0, -1) if size % n == 0))
        return self._run(value, False)

    def check_whole(self) -> None:
        """Refuse to go on where something has ended a batch on its way, and was taken for no error. Local.

        Raises:
            TaskError: names it.
        """
        if self._broken is not None:
            raise TaskError(
                f"{type(self._broken).__name__} left a batch on its way through the stages of a pipeline, which other "
                "processes go on with. Raise it in training_step, before self.run_pipeline or after it, and not in a "
                "layer or in pipeline_loss."
            ) from self._broken

    def _num_parts(self, size: int) -> int:
        """Into how many equal parts a batch of training is cut: none is larger for an odd size, as of the last batch.
        Local, alike on all processes of the pipeline.
        """
        found = next((n for n in range(self._num_chunks, size) if size % n == 0), size)
        if found != self._num_chunks and size >= self._largest and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a batch of {size} samples can't be cut into {self._num_chunks} equal microbatches, and is cut into "
                f"{found}, which is slower. Use a batch size that is a multiple of {self._num_chunks}, or other "
                "microbatches: strategy={'name': 'pipeline', 'microbatches': ...}.",
                stacklevel=2,
            )
        self._largest = max(self._largest, size)
        return found

    def _cut_batch(self, batch: Any, size: int, num_chunks: int) -> None:
        """Cut a batch of so many samples. Local."""

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

    def _run(self, value: Tensor, trains: bool) -> Loss:
        key = (trains, len(self._parts), value.shape, value.dtype, torch.is_inference_mode_enabled())
        if key not in self._schedules:
            if len(self._schedules) == _MOST_KEPT:
                del self._schedules[next(iter(self._schedules))]
            self._schedules[key] = self._build(trains, len(self._parts))
        schedule = self._schedules[key]
        arguments = (value,) if 0 in self._stages else ()
        numbers = torch.arange(len(self._parts))
        call = schedule.step if trains else schedule.eval
        self._losses.clear()
        self._raised = None
        for stage in self._stages.values():
            stage.__dict__["raised"] = None
        with watch.collective("pipeline"):
            try:
                with torch.autocast(self._device.type, enabled=False):  # which stages enter by themselves
                    call(*arguments, target=numbers, return_outputs=False)
                return self._whole_loss()
            except RuntimeError as error:
                self._broken = self._origin_of(error)
                raise self._broken  # noqa: B904  (its own cause stays)
            except BaseException as error:
                self._broken = error
                raise

    def _build(self, trains: bool, num_chunks: int) -> Any:
        """The schedule of a number of chunks; it learns the shapes with its first batch. Local."""
        from torch.distributed import pipelining

        count = len(self.cut.stages)
        for stage in self._stages.values():
            stage.__dict__["is_tried"] = True
        made = [
            pipelining.PipelineStage(each, index, count, self._device, group=self._groups.pipeline)
            for index, each in self._stages.items()
        ]
        stages = made if SCHEDULES[self._word].has_several else made[0]

        def schedule_of(word: str) -> Any:
            kind = getattr(pipelining, SCHEDULES[word].name)
            return kind(stages, num_chunks, loss_fn=self._loss_of, scale_grads=False)

        if not trains:
            schedule = schedule_of(self._patient_word)
            if SCHEDULES[self._word].turns_back:
                _leave_out_backward(schedule)
            return schedule
        try:
            return schedule_of(self._word)
        except ValueError as error:
            if num_chunks != self._num_chunks:
                return schedule_of(self._patient_word)  # a single batch, which need not be the fastest
            raise ConfigError(
                f"strategy='pipeline' with schedule='{self._word}', {count} stages and microbatches={num_chunks}: "
                f"{' '.join(str(error).split())} A multiple of the number of stages serves each schedule."
            ) from error

    @property
    def _patient_word(self) -> str:
        """A schedule with the same places of stages, which takes any number of chunks."""
        if SCHEDULES[self._word].turns_back:
            return "zbv_zero_bubble"
        return "looped_bfs" if SCHEDULES[self._word].has_several else "gpipe"

    def _loss_of(self, output: Tensor, number: Tensor) -> Tensor:
        """The loss of one chunk, as backward starts from it."""
        model: Any = self.cut.model
        try:
            with self._autocast():
                found = model.pipeline_loss(output, self._parts[int(number)])
            loss, count = self._read_loss(found)
        except Exception as error:
            error.add_note("raised in pipeline_loss, in the process with the last stage of the pipeline")
            self._raised = error
            raise
        self._losses[int(number)] = loss.detach(), count
        weighted: Tensor = loss * (self._factor if self._gives_counts else self._factor / len(self._parts))
        return weighted

    def _read_loss(self, found: Any) -> tuple[Tensor, Any]:
        """A loss as a tensor without dimensions, and what it counts. Local.

        Raises:
            TaskError: it is neither a mean loss nor a pair, or another one than before.
        """
        is_pair = isinstance(found, tuple) and len(found) == 2
        loss, count = found if is_pair else (found, 1)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TaskError(
                f"pipeline_loss gave a {shown}. Expected the mean loss of its batch, a scalar tensor, or (loss_sum, "
                "count)."
            )
        if self._gives_counts not in (None, is_pair):
            raise TaskError(
                "pipeline_loss gave a mean loss for one part of a batch and (loss_sum, count) for another. Return the "
                "same kind for every batch."
            )
        self._gives_counts = is_pair
        return loss.reshape(()), count

    def _whole_loss(self) -> Loss:
        """The loss of all chunks, from the process that has them. Collective."""
        wide = wide_float(self._device)
        told = torch.zeros(3, dtype=wide, device=self._device)  # the loss, its count, whether it has one
        if self._groups.place == self._last:
            losses, counts = zip(*(self._losses[number] for number in range(len(self._parts))), strict=True)
            values = torch.stack(losses).to(wide)
            told[0] = values.sum() if self._gives_counts else values.mean()
            told[1] = sum(counts)
            told[2] = bool(self._gives_counts)
        self._losses.clear()
        self._parts = []
        dist.broadcast(told, group=self._groups.pipeline, group_src=self._last)
        if self._gives_counts is None:
            self._gives_counts = bool(told[2])
        loss = told[0].float().clone()
        return (loss, told[1].clone()) if self._gives_counts else loss

    def _origin_of(self, error: RuntimeError) -> Exception:
        """What was raised in a stage, which torch hides in an error of its own; else that error. Local."""
        found = [stage.raised for stage in self._stages.values()]
        first = next((each for each in [*found, self._raised] if each is not None), None)
        if first is None and isinstance(error.__cause__, Exception):
            first = error.__cause__
            own = " or ".join(str(index) for index in self._stages)
            first.add_note(f"raised in the backward pass of stage {own} of the {len(self.cut.stages)} of the pipeline")
        return first or error


def _leave_out_backward(schedule: Any) -> None:
    """Let a schedule that goes back and forth between two stages of one process go forward alone. Local."""
    from torch.distributed.pipelining import schedules

    kept = (schedules.FORWARD, schedules.SEND_F, schedules.RECV_F)
    order = schedule.pipeline_order_with_comms
    order.update({place: [each for each in own if each.computation_type in kept] for place, own in order.items()})


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
