"""Some of the layers in each process, and batches that go from one to the next in parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.names import unwrapped
from ..distributed import watch
from ..distributed.errors import ConfigError, DistributedError, TaskError, check_integer, suggest
from ..distributed.meshes import MeshSizes
from ..distributed.shares import DataShare
from . import pipeline_state
from .averaging import broadcast_tensors
from .buffers import load_buffers, saved_buffers
from .optimizer import move_optimizer_state
from .pipeline_gradients import agree_on_overflow, average_over_copies, weight_of
from .pipeline_groups import PipelineGroups, pipeline_share
from .pipeline_layers import Cut, Loss, Pipelined, cut, free, is_freed, whole_loss
from .pipeline_stages import SCHEDULES, Pipeline
from .strategy import Strategy
from .suitability import check_alike, check_replicable, check_trained, check_whole

_ROUNDING = 1e-6
"""How far two weights of losses may be apart that are meant to be equal."""


@final
class PipelineStrategy(Strategy):
    """Deals a task's layers to the processes, with torch's `pipelining`: `strategy="pipeline"`.

    All processes of a pipeline get the same batches, and all begin with the weights of process 0. A batch is cut into
    microbatches, which go through the stages one after another, so that all stages compute at the same time. In one
    process it only places the model.

    Args:
        schedule: in which order a stage goes forward and backward: `"1f1b"`, `"gpipe"`; with several stages per process
            `"interleaved_1f1b"`, `"looped_bfs"`, `"interleaved_zero_bubble"`; with two of which the first process has
            the first and the last: `"zbv_zero_bubble"`, `"dual_pipe_v"`.
        copies: pipelines side by side, of processes one after another. Each has batches of its own, and gradients are
            averaged over them.
        microbatches: into how many equal parts a batch is cut; one of an odd size into more. None: as many as there are
            stages.
        stages_per_process: stages that a process has: 0, n, 2n, ... of n processes has the first. None: 1, or 2 where
            the schedule is made for several.
        split: names of the layers with which the second and each further stage begins. Left out: stages are chosen so
            that the largest has as few parameters as can be.
    Raises:
        ConfigError: an option can't be used.
    """

    def __init__(
        self,
        *,
        schedule: str = "1f1b",
        copies: int = 1,
        microbatches: int | None = None,
        stages_per_process: int | None = None,
        split: Sequence[str] = (),
    ) -> None:
        if schedule not in SCHEDULES:
            raise ConfigError(f"PipelineStrategy(schedule={schedule!r}) is unknown. {suggest(schedule, SCHEDULES)}")
        kind = SCHEDULES[schedule]
        check_integer("PipelineStrategy(copies)", copies, 1, "It counts pipelines side by side.")
        if microbatches is not None:
            check_integer("PipelineStrategy(microbatches)", microbatches, 1, "Leave it out for the number of stages.")
        if stages_per_process is not None:
            check_integer("PipelineStrategy(stages_per_process)", stages_per_process, 1, "Leave it out.")
            if (stages_per_process > 1) is not kind.has_several or (kind.turns_back and stages_per_process > 2):
                fitting = [word for word, each in SCHEDULES.items() if each.has_several is not kind.has_several]
                raise ConfigError(
                    f"PipelineStrategy(stages_per_process={stages_per_process}) does not fit schedule='{schedule}', "
                    f"which is for {'two' if kind.turns_back else 'several' if kind.has_several else 'one'}. "
                    + (f"Choose one of {fitting}." if not kind.turns_back else "Leave it out.")
                )
        if isinstance(split, str) or not all(isinstance(name, str) for name in split):
            raise ConfigError(f"PipelineStrategy(split={split!r:.80}). Expected a list of names of layers.")
        self.schedule = schedule
        self.copies = copies
        self.microbatches = microbatches
        self.stages_per_process = stages_per_process or (2 if kind.has_several else 1)
        self.split = tuple(split)
        self._pipelines: list[Pipeline] = []
        self._groups: PipelineGroups | None = None
        self._pending: Tensor | None = None
        """A loss whose gradients were added, and from which backward was not called yet."""
        self._weight = 1.0
        """What losses were multiplied with last, beside the division by the window's size."""
        self._is_first = True
        """Whether the newest batch was the first of its window."""
        self._factor: float | None = None
        """What the gradients that were added in this window were multiplied with; None: there are none."""

    @property
    def data_share(self) -> DataShare:
        """The processes of one pipeline get the same batches, and come to the same loss.

        Raises:
            ConfigError: they can't be dealt to so many pipelines.
        """
        count = self.process.num_processes
        if count % self.copies or (count == self.copies > 1):
            raise ConfigError(
                f"PipelineStrategy(copies={self.copies}) with {count} processes. Expected a multiple of the copies, of "
                "at least two processes for each; copies of whole models are strategy='ddp'."
            )
        return pipeline_share(self.process.process_index, count, self.copies)

    def use_mesh(self, sizes: MeshSizes) -> None:
        raise ConfigError(
            f"strategy='pipeline' and a mesh of {sizes} were given, and it lays out its processes itself. Leave the "
            "mesh out (parallelism_config) and give copies: {'name': 'pipeline', 'copies': 2}, or use strategy='fsdp'."
        )

    def setup(
        self, model: nn.Module, optimizers: Sequence[Optimizer], method: str | None = "forward"
    ) -> tuple[nn.Module, list[Optimizer]]:
        check_replicable(model)
        check_trained(model, optimizers, method)
        if self.process.num_processes == 1:
            model.to(self.device)
            for optimizer in optimizers:
                move_optimizer_state(optimizer)
            return model, list(optimizers)
        self._check(model, optimizers, method)
        found = self._find(model)
        if found is None:
            check_whole(model)
            _check_held(model)
            groups = self._groups = self._groups or PipelineGroups(self.copies, self.device)
            num_stages = groups.size * self.stages_per_process
            turns_back = SCHEDULES[self.schedule].turns_back
            made = cut(model, groups.size, num_stages, self.split, turns_back=turns_back)
            check_alike(model)
            num_chunks = self.microbatches or num_stages
            found = Pipeline(made, self.schedule, num_chunks, self.precision, groups, self.device)
            self._check_scaled(made)
            self._deal(made)
            self._pipelines.append(found)
        for optimizer in optimizers:
            for parameter in found.cut.elsewhere(self._here.place):
                optimizer.state.pop(parameter, None)
            move_optimizer_state(optimizer)
        return model, list(optimizers)

    def pipelined_loss(self, model: Pipelined, batch: Any) -> Loss:
        """The loss of a batch that goes through all stages, the same on all processes of the pipeline. Collective.

        In training its gradients are added up on the way: `backward` only takes note of it.

        Raises:
            DataError: the batch can't be cut into microbatches.
            DistributedError: on every process of the pipeline: some of them have left the batch out.
        """
        found = self._find(model) if isinstance(model, nn.Module) else None
        if found is None:
            return whole_loss(model, batch)
        value = found.input_of(batch)
        self._compare(value.shape[0])
        if not torch.is_grad_enabled():
            return found.evaluate(batch, value)
        if self._pending is not None:
            self._refuse_pending()
        factor = self._weight / self.gradient_state.window_size if self._factor is None else self._factor
        loss = found.train(batch, value, factor)
        self._is_first, self._factor = self._factor is None, factor
        if isinstance(loss, Tensor):
            self._pending = loss.requires_grad_()
            return loss
        self._pending = loss[0].requires_grad_()
        return loss

    def sit_out_evaluation(self) -> bool:
        """See that no process of the pipeline has one more batch. Collective.

        Raises:
            DistributedError: on every process: some of them have left a batch out.
        """
        if self._groups is not None:
            self._compare(0)
        return False

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Take note that the gradients of `pipelined_loss` count, and with which weight. In a window's last they are
        averaged over pipelines: collective then.

        Raises:
            TaskError: it is another loss, whose gradients nobody has.
        """
        if not self._pipelines:
            super().backward(loss, **kwargs)
            return
        weight = weight_of(loss, self._pending)
        self._pending = None
        self._weigh(weight)
        self._close_window()

    def take_part(self, model: nn.Module) -> None:
        if self._find(model) is not None:
            self.sit_out(model)
            self._close_window()

    def sit_out(self, model: nn.Module) -> None:
        if self._find(model) is not None:
            if self._pending is not None:
                self._refuse_pending()
            self._compare(0)

    def forget_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().forget_gradients(model, optimizer)
        self._factor = None

    def synchronize_buffers(self, model: nn.Module) -> None:
        found = self._find(model)
        if found is not None and self._here.alike is not None:
            broadcast_tensors(found.cut.model.buffers(), "broadcast of buffers", self._here.alike)

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale unscaled gradients so that the norm over all stages is at most `max_norm`. Collective.

        Returns:
            The norm before, a scalar.
        """
        chosen = list(parameters)
        if not self._pipelines:
            return super().clip_grad_norm(chosen, max_norm, norm_type)
        gradients = [parameter.grad for parameter in chosen if parameter.grad is not None]
        own = torch.nn.utils.get_total_norm(gradients, norm_type).to(self.device, torch.float32)
        total = self._here.sum_norms(own, norm_type)
        torch.nn.utils.clip_grads_with_norm_(chosen, max_norm, total)
        return total

    def gradient_norms(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> list[Tensor | None]:
        """The norm of each parameter's gradient, a scalar; None for one that has none. Collective."""
        norms = super().gradient_norms(parameters, norm_type)
        if not self._pipelines or not norms:
            return norms
        zero = torch.zeros((), device=self.device)
        rows = torch.stack([zero if norm is None else norm.float() for norm in norms])
        counts = torch.tensor([float(norm is not None) for norm in norms], device=self.device)
        both = torch.stack([rows, counts])
        with watch.collective("norms of gradients"):
            dist.all_reduce(both, group=self._here.pipeline)
        return [norm if count else None for norm, count in zip(both[0], both[1].tolist(), strict=True)]

    def weight_part(self, model: nn.Module, parameter: Tensor) -> Tensor:
        """A parameter or buffer of a layer: all of it in the process that has the layer, nothing of it elsewhere; what
        is in no layer is itself. Local.

        Raises:
            ConfigError: its elements don't lie in memory in their order.
        """
        found = self._find(model)
        holder = None if found is None else found.cut.holder_of(parameter)
        if holder is None:
            return parameter
        return pipeline_state.part_of(parameter, holder == self._here.place, self._here.copy > 0)

    @property
    def can_save_alone(self) -> bool:
        return self.process.num_processes == 1

    @property
    def can_go_back(self) -> bool:
        return False

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The state of all stages on the main process, nothing elsewhere. Collective."""
        found = self._find(model)
        if found is None:
            return super().model_state(model)
        with watch.collective("gathering of the weights"):
            return pipeline_state.whole_model_state(found.cut)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        found = self._find(model)
        if found is None:
            super().load_model_state(model, state, strict)
        else:
            pipeline_state.load_model_state(found.cut, self._here.place, state, strict)

    def writing_weights(self, model: nn.Module) -> AbstractContextManager[Any]:
        found = self._find(model)
        if found is None:
            return nullcontext()
        return pipeline_state.writing_weights(found.cut, self._here.place, self.device)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """The state of all stages on the host of the main process, elsewhere the groups alone. Collective."""
        found = self._find(model)
        if found is None:
            return super().optimizer_state(model, optimizer)
        with watch.collective("gathering of the optimizer's state"):
            return pipeline_state.whole_optimizer_state(found.cut, optimizer, self.device)

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Take the parts of a full state, which every process has or can read. Local."""
        found = self._find(model)
        if found is None:
            super().load_optimizer_state(model, optimizer, state)
        else:
            pipeline_state.load_optimizer_state(found.cut, self._here.place, optimizer, state)

    def process_state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Its own buffers in a pipeline beside the first. Local."""
        found = self._find(model)
        return {} if found is None or self._here.copy == 0 else {"buffers": saved_buffers(found.cut.model)}

    def load_process_state(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        load_buffers(self.unwrap(model), state.get("buffers", {}))

    def teardown(self) -> None:
        """Forget a batch whose backward never came. The model stays cut. Local."""
        self._pending = self._factor = None

    @property
    def _here(self) -> PipelineGroups:
        """The groups of a model that was cut."""
        assert self._groups is not None
        return self._groups

    def _find(self, model: nn.Module) -> Pipeline | None:
        inner = unwrapped(model)
        return next((found for found in self._pipelines if found.cut.model is inner), None)

    def _check(self, model: nn.Module, optimizers: Sequence[Optimizer], method: str | None) -> None:
        name = type(model).__name__
        if method == "forward":
            raise ConfigError(
                f"{name} was passed to accelerator.prepare, and strategy='pipeline' has to make the passes itself. Use "
                "a Trainer with a Task that has pipeline_layers."
            )
        if method is None and optimizers:
            raise ConfigError(
                f"{name} is trained by manual optimization, which strategy='pipeline' can't serve: forward and backward"
                " of a batch's parts are one call there. Use automatic optimization, or 'ddp'."
            )
        if len(optimizers) > 1:
            raise ConfigError(
                f"{name} has {len(optimizers)} optimizers, and strategy='pipeline' steps one. Put their parameters "
                "into groups of one optimizer."
            )

    def _check_scaled(self, made: Cut) -> None:
        """Refuse stages whose gradients can't tell of an overflow of fp16. Local, alike on all processes."""
        if not self.precision.scales:
            return
        for place in range(self._here.size):
            if not made.trained_by(place):
                raise ConfigError(
                    f"precision='fp16' with strategy='pipeline': process {place} has no trainable parameter in its "
                    f"stages of {type(made.model).__name__}. Use 'bf16', or let split= give it one."
                )

    def _deal(self, made: Cut) -> None:
        """Give all layers the values of process 0, and keep those of this process. Collective."""
        inside: set[int] = set()
        for index, stage in enumerate(made.stages):
            for layer in stage:
                layer.to(self.device)
                tensors = [each for each in [*layer.parameters(), *layer.buffers()] if id(each) not in inside]
                inside |= {id(tensor) for tensor in tensors}
                broadcast_tensors(tensors, f"setup of {type(made.model).__name__}")
                if made.owners[index] != self._here.place:
                    for parameter in layer.parameters():
                        free(parameter, self.device)
                    for module in layer.modules():
                        module.register_forward_pre_hook(_refuse_call)
        made.model.to(self.device)
        tensors = [*made.model.parameters(), *made.model.buffers()]
        broadcast_tensors([each for each in tensors if id(each) not in inside], f"setup of {type(made.model).__name__}")

    def _weigh(self, weight: float) -> None:
        """Give the gradients of the newest batch their weight: what the loss of backward makes of it. Local.

        They were computed with the weight of the batch before. In a window's first batch there are no others, and all
        are multiplied.

        Raises:
            TaskError: it is another one than that of the batches before in the window.
        """
        assert self._factor is not None
        factor = weight / self.gradient_state.window_size
        if factor == self._factor:
            return
        if not self._is_first and abs(factor - self._factor) > _ROUNDING * abs(self._factor):
            raise TaskError(
                f"training_step multiplied the loss of self.run_pipeline(batch) with {weight:g}, and with "
                f"{self._factor * self.gradient_state.window_size:g} for batches before in the same window. With "
                "strategy='pipeline' these weigh alike: let pipeline_loss return (loss_sum, count), or weigh inside it."
            )
        if self._is_first:
            for found in self._pipelines:
                self.scale_gradients(found.cut.trained_by(self._here.place), factor / self._factor)
            self._factor = factor
            self._weight = weight or 1.0

    def _close_window(self) -> None:
        """Average the gradients of a window that ends. Collective then; nothing in one that goes on."""
        if not self.gradient_state.sync_gradients:
            return
        self._factor = None
        for found in self._pipelines:
            own = found.cut.trained_by(self._here.place)
            if self._here.alike is not None:
                average_over_copies(own, self._here.alike)
            if self.precision.scales:
                agree_on_overflow(own, self._here.pipeline, self.device)

    def _compare(self, num_samples: int) -> None:
        """See that all processes of the pipeline are at a batch of as many samples, or all without one. Collective."""
        for found in self._pipelines:
            found.check_whole()
        told = self._here.tell(num_samples)
        if 0 in told and any(told):
            begin = self._here.copy * self._here.size
            without = ", ".join(str(begin + place) for place, size in enumerate(told) if not size)
            raise DistributedError(
                f"a batch was left out on process {without} alone, and with strategy='pipeline' it goes through all. "
                "Let callbacks and the task leave batches out, or end an epoch, on all processes alike."
            )
        if len(set(told)) > 1:
            raise DistributedError(
                f"the processes of a pipeline have batches of {told} samples, and have to get the same ones. Pass a "
                "loader that is not shared yet, or give the same batches to all of them."
            )

    def _refuse_pending(self) -> NoReturn:
        raise ConfigError(
            "a batch was left out after self.run_pipeline(batch), by SkipBatch or a step without a loss, and with "
            "strategy='pipeline' its gradients are added up by then. Leave it out before, or call run_pipeline once."
        )


def _check_held(model: nn.Module) -> None:
    """Refuse a model of which this process has no values. Local."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta or is_freed(parameter):
            where = "on the meta device" if parameter.is_meta else "in the pipeline of another Trainer"
            raise ConfigError(
                f"parameter {name} of {type(model).__name__} is {where}. Make the task anew with values, on all "
                "processes; a checkpoint brings back those that were trained."
            )


def _refuse_call(module: nn.Module, args: Any) -> None:
    """A hook on layers whose weights another process has."""
    raise ConfigError(
        f"{type(module).__name__} was called in a process that has no weights of it, with strategy='pipeline'. Compute "
        "losses by self.run_pipeline(batch); other outputs and predictions need another strategy."
    )
