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
from ..distributed.exchange import exchange
from ..distributed.meshes import MeshSizes
from ..distributed.shares import DataShare
from . import pipeline_state
from .averaging import broadcast_tensors
from .optimizer import move_optimizer_state
from .pipeline_layers import Cut, Pipelined, cut, free, is_freed, whole_loss
from .pipeline_stages import SCHEDULES, Pipeline
from .strategy import Strategy
from .suitability import check_alike, check_replicable, check_trained, check_whole

_PASSES = "pipeline"
"""What the processes call it that all of them are at the same batch."""


@final
class PipelineStrategy(Strategy):
    """Deals a task's layers to the processes, with torch's `pipelining`: `strategy="pipeline"`.

    All processes get the same batches and begin with the weights of process 0. A batch is cut into microbatches, which
    go through the stages one after another, so that all stages compute at the same time. In one process it only places
    the model.

    Args:
        schedule: in which order a stage goes forward and backward: `"1f1b"`, `"gpipe"`; with several stages per process
            `"interleaved_1f1b"`, `"looped_bfs"`, `"interleaved_zero_bubble"`.
        microbatches: into how many equal parts a batch is cut. None: as many as there are stages.
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
        microbatches: int | None = None,
        stages_per_process: int | None = None,
        split: Sequence[str] = (),
    ) -> None:
        if schedule not in SCHEDULES:
            raise ConfigError(f"PipelineStrategy(schedule={schedule!r}) is unknown. {suggest(schedule, SCHEDULES)}")
        has_several = SCHEDULES[schedule][1]
        if microbatches is not None:
            check_integer("PipelineStrategy(microbatches)", microbatches, 1, "Leave it out for the number of stages.")
        if stages_per_process is not None:
            check_integer("PipelineStrategy(stages_per_process)", stages_per_process, 1, "Leave it out.")
            if (stages_per_process > 1) is not has_several:
                fitting = [word for word, (_, several) in SCHEDULES.items() if several is not has_several]
                raise ConfigError(
                    f"PipelineStrategy(stages_per_process={stages_per_process}) does not fit schedule='{schedule}', "
                    f"which is for {'several' if has_several else 'one'}. Choose one of {fitting}."
                )
        if isinstance(split, str) or not all(isinstance(name, str) for name in split):
            raise ConfigError(f"PipelineStrategy(split={split!r:.80}). Expected a list of names of layers.")
        self.schedule = schedule
        self.microbatches = microbatches
        self.stages_per_process = stages_per_process or (2 if has_several else 1)
        self.split = tuple(split)
        self._pipelines: list[Pipeline] = []
        self._pending: Tensor | None = None
        """A loss whose gradients were added, and from which backward was not called yet."""

    @property
    def data_share(self) -> DataShare:
        """All processes get the same batches, and come to the same loss."""
        count = self.process.num_processes
        return DataShare(
            num_processes=1, process_index=0, num_peers=count, peer=self.process.process_index, num_twins=count
        )

    def use_mesh(self, sizes: MeshSizes) -> None:
        raise ConfigError(
            f"strategy='pipeline' and a mesh of {sizes} were given, and all processes are in one pipeline. Leave the "
            "mesh out (parallelism_config), or use strategy='fsdp'."
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
            count = self.process.num_processes
            num_stages = count * self.stages_per_process
            made = cut(model, count, num_stages, self.split)
            check_alike(model)
            found = Pipeline(made, self.schedule, self.microbatches or num_stages, self.precision, self.device)
            self._deal(made)
            self._pipelines.append(found)
        for optimizer in optimizers:
            for parameter in found.cut.elsewhere(self.process.process_index):
                optimizer.state.pop(parameter, None)
            move_optimizer_state(optimizer)
        return model, list(optimizers)

    def pipelined_loss(self, model: Pipelined, batch: Any) -> Tensor:
        """The mean loss of a batch that goes through all stages, the same on all processes. Collective.

        In training its gradients are added up on the way: `backward` only takes note of it.

        Raises:
            DataError: the batch can't be cut into microbatches.
            DistributedError: on every process: some of them have left the batch out.
        """
        found = self._find(model) if isinstance(model, nn.Module) else None
        if found is None:
            return whole_loss(model, batch)
        self._meet()
        if not torch.is_grad_enabled():
            return found.evaluate(batch)
        if self._pending is not None:
            self._refuse_pending()
        self._pending = found.train(batch, self.gradient_state.window_size).requires_grad_()
        return self._pending

    def sit_out_evaluation(self) -> bool:
        """See that no process has one more batch. Collective.

        Raises:
            DistributedError: on every process: some of them have left a batch out.
        """
        if self.process.num_processes > 1:
            self._sit_out()
        return False

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Take note that the gradients of `pipelined_loss` count. Local.

        Raises:
            TaskError: it is another loss, whose gradients nobody has.
        """
        if not self._pipelines:
            super().backward(loss, **kwargs)
            return
        if loss is not self._pending:
            raise TaskError(
                "training_step returned another loss than self.run_pipeline(batch) gave, and with strategy='pipeline' "
                "gradients are computed there. Return that one, a mean loss, unchanged; put what is to be added or "
                "weighted into pipeline_loss."
            )
        self._pending = None

    def take_part(self, model: nn.Module) -> None:
        if self._find(model) is not None:
            self._sit_out()

    def sit_out(self, model: nn.Module) -> None:
        self.take_part(model)

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
        parts = [torch.zeros_like(own) for _ in range(self.process.num_processes)]
        with watch.collective("norm of gradients"):
            dist.all_gather(parts, own)
        total: Tensor = torch.linalg.vector_norm(torch.stack(parts), norm_type)
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
            dist.all_reduce(both)
        return [norm if count else None for norm, count in zip(both[0], both[1].tolist(), strict=True)]

    @property
    def shows_weights(self) -> bool:
        return self.process.num_processes == 1

    @property
    def can_save_alone(self) -> bool:
        return self.process.num_processes == 1

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
            pipeline_state.load_model_state(found.cut, state, strict)

    def writing_weights(self, model: nn.Module) -> AbstractContextManager[Any]:
        found = self._find(model)
        return nullcontext() if found is None else pipeline_state.writing_weights(found.cut, self.device)

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
            pipeline_state.load_optimizer_state(found.cut, optimizer, state)

    def teardown(self) -> None:
        """Forget a batch whose backward never came. The model stays cut. Local."""
        self._pending = None

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
        if self.precision.scales:
            raise ConfigError(
                "precision='fp16' with strategy='pipeline': the scale of losses would have to be agreed on by all "
                "stages. Use 'bf16' or 'no'."
            )

    def _deal(self, made: Cut) -> None:
        """Give all layers the values of process 0, and keep those of this process. Collective."""
        rank = self.process.process_index
        inside: set[int] = set()
        for index, stage in enumerate(made.stages):
            for layer in stage:
                layer.to(self.device)
                tensors = [*layer.parameters(), *layer.buffers()]
                inside |= {id(tensor) for tensor in tensors}
                broadcast_tensors(tensors, f"setup of {type(made.model).__name__}")
                if index % made.num_processes != rank:
                    for parameter in layer.parameters():
                        free(parameter, self.device)
                    for module in layer.modules():
                        module.register_forward_pre_hook(_refuse_call)
        made.model.to(self.device)
        tensors = [*made.model.parameters(), *made.model.buffers()]
        broadcast_tensors([each for each in tensors if id(each) not in inside], f"setup of {type(made.model).__name__}")

    def _meet(self) -> None:
        """See that all processes are at the same batch. Collective."""
        self._compare(exchange(True, _PASSES))

    def _sit_out(self) -> None:
        """See that no process has a batch that this one has left out. Collective."""
        if self._pending is not None:
            self._refuse_pending()
        self._compare(exchange(False, _PASSES))

    def _compare(self, found: Sequence[bool]) -> None:
        if len(set(found)) > 1:
            without = ", ".join(str(index) for index, has_one in enumerate(found) if not has_one)
            raise DistributedError(
                f"a batch was left out on process {without} alone, and with strategy='pipeline' it goes through all. "
                "Let callbacks and the task leave batches out, or end an epoch, on all processes alike."
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
