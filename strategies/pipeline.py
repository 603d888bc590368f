"""Some of the layers in each process, and batches that go from one to the next in parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.names import unwrapped
from ..checkpoint.sharded import is_sharded
from ..distributed import watch
from ..distributed.errors import ConfigError, check_integer
from ..distributed.exchange import exchange
from ..distributed.meshes import MeshSizes
from ..distributed.shares import DataShare
from . import pipeline_state, sharded_state
from .averaging import broadcast_tensors
from .buffers import load_buffers, saved_buffers
from .context_parallel import prepare_attention
from .optimizer import move_optimizer_state
from .optimizer_limits import check_steps_parts, step_apart
from .outcome import StepOutcome
from .pipeline_building import check_held, check_scaled, check_served, deal
from .pipeline_gradients import agree_on_overflow, average_over_copies
from .pipeline_groups import PipelineGroups, pipeline_share
from .pipeline_layers import Cut, Loss, Pipelined, cut, renewed, whole_loss
from .pipeline_schedules import SCHEDULES, check_schedule
from .pipeline_shards import StageShards, check_spread
from .pipeline_stages import Pipeline
from .pipeline_weighing import Weighing
from .sharded_gradients import local_gradients
from .sharded_norms import whole_norms
from .strategy import Strategy
from .suitability import check_alike, check_replicable, check_trained, check_whole
from .tensor_agreement import Agreement
from .tensor_parallel import Plan, PlanLike, check_divides, find_plan, read_plan
from .ulysses import ExchangedHeads


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
        copies: of the model, side by side. Each has batches of its own, and gradients are averaged over them.
        shards: pipelines that a copy is spread over, each with batches of its own: at each place the layers' weights,
            their gradients and the optimizer's state are kept in so many parts, as FSDP keeps them. A process gathers
            the weights of its layers for a batch, and frees them behind it.
        sequence: pipelines that have parts of the same sequences, with losses of their own; a copy's weights are spread
            over them as well. A step is inside of `accelerator.maybe_context_parallel`, as with FSDP.
        tensor: over how many processes at each place layers are cut, which get the same batches.
        tensor_plan: how they are cut, as `FSDPStrategy` takes it; None: the model's own plan.
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
        shards: int = 1,
        sequence: int = 1,
        tensor: int = 1,
        tensor_plan: PlanLike = None,
        microbatches: int | None = None,
        stages_per_process: int | None = None,
        split: Sequence[str] = (),
    ) -> None:
        check_schedule(schedule, microbatches, stages_per_process, split)
        check_integer("PipelineStrategy(copies)", copies, 1, "It counts copies of the model.")
        check_integer("PipelineStrategy(shards)", shards, 1, "It counts parts of the weights of a copy.")
        check_integer("PipelineStrategy(sequence)", sequence, 1, "It counts parts of each sequence.")
        check_integer("PipelineStrategy(tensor)", tensor, 1, "It counts parts of layers.")
        if tensor_plan is not None and tensor == 1:
            raise ConfigError("PipelineStrategy(tensor_plan=...) without tensor, which says how many parts there are.")
        self.schedule = schedule
        self.copies = copies
        self.shards = shards
        self.sequence = sequence
        self.tensor = tensor
        self.tensor_plan = read_plan("PipelineStrategy(tensor_plan)", tensor_plan)
        self.microbatches = microbatches
        self.stages_per_process = stages_per_process or (2 if SCHEDULES[schedule].has_several else 1)
        self.split = tuple(split)
        self._pipelines: list[Pipeline] = []
        self._groups: PipelineGroups | None = None
        self._agreement: Agreement | None = None
        self._sequences: ExchangedHeads | None = None
        self._weighing = Weighing()

    @property
    def data_share(self) -> DataShare:
        """The processes of one pipeline get the same batches, and come to the same loss.

        Raises:
            ConfigError: they can't be dealt to so many pipelines.
        """
        count, shares = self.process.num_processes, self.copies * self.shards
        pipelines = shares * self.sequence * self.tensor
        if count % pipelines or (count == pipelines > 1):
            names = ("copies", "shards", "sequence", "tensor")
            given = ", ".join(f"{name}={size}" for name in names if (size := getattr(self, name)) > 1)
            raise ConfigError(
                f"PipelineStrategy({given}) with {count} processes. Expected a multiple of {pipelines}, of at least "
                "two processes for each pipeline; all layers in each process are strategy='ddp', or 'fsdp' for parts."
            )
        return pipeline_share(self.process.process_index, count, shares, self.sequence)

    def use_mesh(self, sizes: MeshSizes) -> None:
        if sizes.context > 1:
            raise ConfigError(
                f"strategy='pipeline' and a mesh of {sizes}, whose context axis it has not. Use sequence (sp_size), "
                "which cuts sequences too."
            )
        own = self.copies, self.shards, self.sequence, self.tensor
        given = sizes.replicate, sizes.shard or 1, sizes.sequence, sizes.tensor
        if own not in ((1, 1, 1, 1), given):
            raise ConfigError(
                f"PipelineStrategy with (copies, shards, sequence, tensor) = {own}, and the run is given {sizes}. Give "
                "the sizes in one place."
            )
        self.copies, self.shards, self.sequence, self.tensor = given

    def context_parallel(
        self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]
    ) -> AbstractContextManager[Any] | None:
        return None if self._sequences is None else self._sequences.cut(buffers, dims, kept)

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
        check_served(model, optimizers, method)
        found = self._find(model)
        if found is None:
            found = self._set_up(model, optimizers)
        for optimizer in optimizers:
            for parameter in found.cut.elsewhere(self._here.place):
                optimizer.state.pop(parameter, None)
            move_optimizer_state(optimizer)
        return model, list(optimizers)

    def _set_up(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Pipeline:
        """Cut a model, and deal its layers. Collective."""
        check_whole(model)
        check_held(model)
        groups = self._groups = self._groups or self._make_groups()
        if self._sequences is not None:
            prepare_attention(model, self._sequences)
        num_stages = groups.size * self.stages_per_process
        turns_back = SCHEDULES[self.schedule].turns_back
        made = cut(model, groups.size, num_stages, self.split, turns_back=turns_back)
        check_alike(model)
        num_chunks = self.microbatches or num_stages
        found = Pipeline(made, self.schedule, num_chunks, self.precision, groups, self.device)
        if self.precision.scales:
            check_scaled(made)
        if groups.mesh is not None:
            check_steps_parts(optimizers, "pipeline")
            found.shards = self._shards(made, groups)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        deal(made, groups.place, self.device, found.shards)
        if found.shards is not None:
            found.cut = renewed(made)
            for optimizer in optimizers:
                sharded_state.rebuild(optimizer, model, names)
        self._pipelines.append(found)
        return found

    def _make_groups(self) -> PipelineGroups:
        """The groups of all processes, and what cuts sequences over them. Collective."""
        groups = PipelineGroups(self.copies, self.shards, self.sequence, self.tensor, self.device)
        if groups.sequence is not None:
            self._sequences = ExchangedHeads(groups.sequence)
        return groups

    def _shards(self, made: Cut, groups: PipelineGroups) -> StageShards:
        """What spreads and cuts the layers of this process. Local.

        Raises:
            ConfigError: they can't be.
        """
        plan: Plan = {}
        if groups.tensor is not None:
            plan = find_plan(made.model, self.tensor_plan)
            check_divides(plan, groups.num_parts)
            self._agreement = Agreement(groups.tensor, self.device, groups.same_place)
        check_spread([layer for stage in made.stages for layer in stage], plan)
        return StageShards(groups, plan, self.device)

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
            self._meet_in_evaluation(True)
            with found.gathered():
                return found.evaluate(batch, value)
        self._weighing.check_settled()
        factor = self._weighing.factor(self.gradient_state.window_size)
        with found.gathered():
            loss = found.train(batch, value, factor)
        return self._weighing.added(loss, factor)

    def sit_out_evaluation(self) -> bool:
        """See that no process of the pipeline has one more batch, and gather weights for other pipelines that have.
        Collective.

        Raises:
            DistributedError: on every process: some of them have left a batch out.
        """
        if self._groups is None:
            return False
        self._compare(0)
        if not self._meet_in_evaluation(False):
            return False
        for found in self._pipelines:
            with found.gathered():
                pass
        return True

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Take note that the gradients of `pipelined_loss` count, and with which weight. In a window's last they are
        averaged over pipelines: collective then.

        Raises:
            TaskError: it is another loss, whose gradients nobody has.
        """
        if not self._pipelines:
            super().backward(loss, **kwargs)
            return
        with nullcontext() if self._sequences is None else self._sequences.backward():
            multiplier = self._weighing.settle(loss, self.gradient_state.window_size)
        if multiplier != 1.0:
            for found in self._pipelines:
                self.scale_gradients(found.cut.trained_by(self._here.place), multiplier)
                if found.shards is not None:
                    found.shards.scale_gradients(multiplier)
        self._close_window()

    def take_part(self, model: nn.Module) -> None:
        if self._find(model) is not None:
            self.sit_out(model)
            self._close_window()

    def sit_out(self, model: nn.Module) -> None:
        found = self._find(model)
        if found is not None:
            self._weighing.check_settled()
            self._compare(0)
            with found.gathered():  # for other pipelines, which may have the batch
                pass

    def step(self, optimizer: Optimizer) -> StepOutcome:
        if self._agreement is not None and self.gradient_state.sync_gradients:
            self._agreement.check(optimizer, [found.cut.model for found in self._pipelines])
        is_mixed = any(found.shards is not None and found.shards.has_whole for found in self._pipelines)
        if is_mixed and self.gradient_state.sync_gradients:
            others = [each for found in self._pipelines for each in found.cut.elsewhere(self._here.place)]
            step_apart(optimizer, others)  # each time: a checkpoint may have brought other settings
        return super().step(optimizer)

    def forget_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().forget_gradients(model, optimizer)
        self._weighing.close()
        found = self._find(model)
        if found is not None and found.shards is not None:
            found.shards.forget_gradients()

    def scale_gradients(self, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
        if self.shards * self.sequence * self.tensor == 1:
            super().scale_gradients(parameters, factor)
        elif gradients := local_gradients(parameters):
            torch._foreach_mul_(gradients, factor)

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
        own = self._norms_of([parameter.grad for parameter in chosen if parameter.grad is not None], norm_type)
        norms = torch.stack(own) if own else torch.zeros(1)
        joint = torch.linalg.vector_norm(norms, norm_type).to(self.device, torch.float32)
        total = self._here.sum_norms(joint, norm_type)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        self.scale_gradients(chosen, factor)
        return total

    def clip_grad_value(self, parameters: Iterable[Tensor], value: float) -> None:
        for gradient in local_gradients(parameters):
            gradient.clamp_(-value, value)

    def _norms_of(self, gradients: Sequence[Tensor], norm_type: float) -> list[Tensor]:
        return whole_norms(gradients, norm_type, self.device)

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
        return pipeline_state.part_of(parameter, self._here, is_here=holder == self._here.place)

    @property
    def can_save_alone(self) -> bool:
        return self.process.num_processes == 1

    @property
    def can_go_back(self) -> bool:
        return False

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The state of the model, of which each process has that of its layers. Local."""
        found = self._find(model)
        return super().model_state(model) if found is None else pipeline_state.model_state(found.cut, self._here)

    def whole_model_state(self, model: nn.Module) -> dict[str, Any]:
        """The state of all stages on the host of the main process, nothing elsewhere. Collective."""
        found = self._find(model)
        if found is None:
            return super().model_state(model)
        with watch.collective("gathering of the weights"):
            return pipeline_state.whole_model_state(found.cut, self._here)

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
        return pipeline_state.writing_weights(found.cut, self._here.place)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer, of which each process has that of its layers. Collective."""
        found = self._find(model)
        if found is None:
            return super().optimizer_state(model, optimizer)
        return pipeline_state.optimizer_state(found.cut, self._here, optimizer)

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Take the parts of a full state, which every process has or can read. Local."""
        found = self._find(model)
        if found is None:
            super().load_optimizer_state(model, optimizer, state)
        else:
            pipeline_state.load_optimizer_state(found.cut, self._here.place, optimizer, state)

    def process_state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """What its next losses are multiplied with, and its own buffers in a pipeline beside the first. Local."""
        found = self._find(model)
        if found is None:
            return {}
        buffers = {} if self._here.is_first else {"buffers": saved_buffers(found.cut.model)}
        return {"weight": self._weighing.weight, **buffers}

    def load_process_state(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        load_buffers(self.unwrap(model), state.get("buffers", {}))
        self._weighing.weight = state.get("weight", 1.0)

    def teardown(self) -> None:
        """Forget a batch whose backward never came. The model stays cut. Local."""
        self._weighing.forget()

    @property
    def _here(self) -> PipelineGroups:
        """The groups of a model that was cut."""
        assert self._groups is not None
        return self._groups

    def _find(self, model: nn.Module) -> Pipeline | None:
        inner = unwrapped(model)
        return next((found for found in self._pipelines if found.cut.model is inner), None)

    def _close_window(self) -> None:
        """Average the gradients of a window that ends. Collective then; nothing in one that goes on."""
        if not self.gradient_state.sync_gradients:
            return
        self._weighing.close()
        for found in self._pipelines:
            own = found.cut.trained_by(self._here.place)
            if found.shards is not None:
                found.shards.reduce()
            if self._here.alike is not None:
                average_over_copies([each for each in own if not is_sharded(each)], self._here.alike)
            if self.precision.scales:
                everybody = self._here.pipeline if found.shards is None else None
                agree_on_overflow(own, everybody, self.device)

    def _compare(self, num_samples: int) -> None:
        """See that all that get the same batches are at the same one. Collective among them."""
        for found in self._pipelines:
            found.check_whole()
        self._here.compare(num_samples)

    def _meet_in_evaluation(self, has_batch: bool) -> bool:
        """Whether a pipeline has one more batch, for which those that share its weights have to gather. Collective
        where weights are spread.
        """
        return self._here.mesh is not None and any(exchange(has_batch, "evaluation"))
