"""`DDPStrategy` on two processes: what it averages, when, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from loopwright.checkpoint.names import MethodForward, plain_names
from loopwright.distributed.errors import ConfigError, DistributedError
from loopwright.distributed.process import ProcessState
from loopwright.strategies.averaging import average_gradients
from loopwright.strategies.ddp import DDPStrategy
from loopwright.strategies.gradient_state import GradientState
from loopwright.strategies.handlers import DistributedDataParallelKwargs
from loopwright.strategies.outcome import StepOutcome
from loopwright.strategies.precision import FullPrecision
from loopwright.strategies.replica import find_replica, zero_loss

Run = Callable[..., list[Any]]


def attached(**options: Any) -> DDPStrategy:
    """A strategy of this process."""
    strategy = DDPStrategy(**options)
    strategy.attach(ProcessState(cpu=True), FullPrecision(), GradientState())
    return strategy


def ones(inputs: int = 1) -> nn.Linear:
    """A layer without bias whose weights are 1 on process 0 and 2 on process 1."""
    layer = nn.Linear(inputs, 1, bias=False)
    nn.init.constant_(layer.weight, 1.0 + ProcessState(cpu=True).process_index)
    return layer


def number(tensor: Tensor | None) -> float:
    """The value of a tensor of one element."""
    assert tensor is not None
    return float(tensor.detach())


def column(value: float) -> Tensor:
    return torch.tensor([[value]])


def error_of(attempt: Callable[[], Any]) -> str:
    """The kind and the text of the error of ours that a call ends in."""
    try:
        attempt()
    except (ConfigError, DistributedError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


class Branches(nn.Module):
    """Uses `second` only on request."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1)
        self.second = nn.Linear(1, 1)

    def forward(self, inputs: Tensor, both: bool = False) -> Tensor:
        output: Tensor = self.first(inputs)
        return output + self.second(inputs) if both else output

    def training_step(self, batch: Tensor) -> Tensor:
        return self(batch)


class Twice(nn.Module):
    """Recomputes one layer twice in a backward pass, so that its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.first(inputs)
        parts = [checkpoint(self.layer, inputs, use_reentrant=True) for _ in range(2)]
        total: Tensor = parts[0] + parts[1]
        return total


class SmallTask(nn.Module):
    """Trains by a method that is not its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = ones()
        self.register_buffer("seen", torch.zeros(1))

    def training_step(self, batch: Tensor, index: int = 0) -> dict[str, Tensor]:
        return {"loss": self.layer(batch).sum() * (index + 1)}


def _windows(sync_each_batch: bool) -> list[float]:
    """The gradient after each micro-batch of a window of two, as `accumulate` runs it; F24."""
    strategy = attached()
    model, _ = strategy.setup(ones(), [])
    inputs = column(strategy.process.process_index + 1.0)
    strategy.gradient_state.window_size = 2
    weight = next(model.parameters())
    found = []
    for is_last in (False, True):
        if is_last or sync_each_batch:
            strategy.backward(model(inputs).sum())
        else:
            with strategy.no_sync(model):
                strategy.backward(model(inputs).sum())
        found.append(number(weight.grad))
    return found


def test_gradients_are_averaged_on_the_last_micro_batch_alone(two_processes: Run) -> None:
    assert two_processes(_windows, False) == [[0.5, 1.5], [1.0, 1.5]]
    assert two_processes(_windows, True) == [[0.75, 1.5], [0.75, 1.5]]


def _case_b08() -> tuple[float, float]:
    strategy = attached()
    model, (optimizer,) = _set_up(strategy, ones())
    weight = next(model.parameters())
    inputs = ((1.0, 2.0), (3.0, 6.0))[strategy.process.process_index]
    with strategy.no_sync(model):
        strategy.backward(model(column(inputs[0])).sum())
    strategy.backward(model(column(inputs[1])).sum())
    gradient = number(weight.grad)
    assert strategy.step(optimizer) is StepOutcome.APPLIED
    return gradient, number(weight)


def _set_up(
    strategy: DDPStrategy, model: nn.Module, method: str | None = "forward"
) -> tuple[nn.Module, list[Optimizer]]:
    return strategy.setup(model, [torch.optim.SGD(model.parameters(), lr=1.0)], method)


def test_b08_the_sum_over_a_window_is_the_same_on_both(two_processes: Run) -> None:
    assert two_processes(_case_b08) == [(6.0, -5.0), (6.0, -5.0)]


def _count_reductions(bucket_cap_mb: float) -> list[list[int]]:
    """Which buckets are sent in each of three steps of four micro-batches."""
    strategy = attached(bucket_cap_mb=bucket_cap_mb)
    model, (optimizer,) = _set_up(strategy, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    replica = find_replica(model)
    assert replica is not None
    sent: list[int] = []

    def count(state: None, bucket: Any) -> Any:
        sent.append(bucket.index())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    replica.register_comm_hook(None, lambda state, bucket: count(state, bucket))
    per_step = []
    for _ in range(3):
        for micro_batch in range(4):
            with strategy.no_sync(model) if micro_batch < 3 else nullcontext():
                strategy.backward(model(torch.ones(2, 4)).sum())
        strategy.step(optimizer)
        per_step.append(sorted(sent))
        sent.clear()
    return per_step


def test_one_reduction_per_bucket_and_step(two_processes: Run) -> None:
    assert two_processes(_count_reductions, 25) == [[[0]] * 3] * 2
    for first, *others in two_processes(_count_reductions, 5e-5):  # torch fills its buckets anew after the first step
        assert first == list(range(len(first)))
        assert len(others[0]) > 1
        assert others == [list(range(len(others[0])))] * 2


def _train_by_a_method() -> tuple[list[str], list[str], bool, float, list[int]]:
    strategy = attached()
    task = SmallTask()
    model, _ = strategy.setup(task, [], "training_step")
    step = strategy.training_method(model, "training_step")
    strategy.backward(step(column(strategy.process.process_index + 1.0), index=1)["loss"])
    names = list(strategy.model_state(model))
    plain = list(plain_names(model, model.state_dict()).values())
    shapes = [len(model.state_dict()), len(names)]
    return names, plain, strategy.unwrap(model) is task, number(task.layer.weight.grad), shapes


def test_training_through_a_method_keeps_the_task_as_it_is(two_processes: Run) -> None:
    names = ["seen", "layer.weight"]
    assert two_processes(_train_by_a_method) == [(names, names, True, 3.0, [2, 2])] * 2


def _manual() -> list[Any]:
    strategy = attached()
    task = Branches()
    task.third = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(task.third.weight, strategy.process.process_index)
    model, _ = strategy.setup(task, [], None)
    assert model is task
    assert strategy.training_method(model, "forward")(column(1.0)) is not None
    rank = strategy.process.process_index
    inputs = column(rank + 1.0)
    found: list[Any] = [number(task.third.weight)]
    with strategy.no_sync(model):
        strategy.backward(task(inputs).sum())
    found.append(number(task.first.weight.grad))
    if rank == 0:  # process 1 has no gradient of `second`
        strategy.backward(task.first(inputs).sum() + 4 * task.second(inputs).sum())
    else:
        strategy.backward(task.first(inputs).sum())
    found += [number(task.first.weight.grad), number(task.second.weight.grad), task.third.weight.grad]
    strategy.take_part(model) if rank == 0 else strategy.backward(task.third(inputs.double()).sum())
    return [*found, number(task.third.weight.grad)]


def test_manual_optimization_averages_after_each_backward(two_processes: Run) -> None:
    # First micro-batch unsynchronised: 1 and 2; then (2 + 4) / 2 = 3. `second`: (4 + 0) / 2. Nobody has one of `third`.
    first, second = two_processes(_manual)
    assert first == [0.0, 1.0, 3.0, 2.0, None, 1.0]
    assert second == [0.0, 2.0, 3.0, 2.0, None, 1.0]


def _sparse() -> str:
    embedding = nn.Embedding(3, 1, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    return error_of(lambda: average_gradients(embedding.parameters(), "test"))


def test_manual_optimization_refuses_sparse_gradients(two_processes: Run) -> None:
    for text in two_processes(_sparse):
        assert text.startswith("ConfigError: manual optimization over several processes got a sparse gradient")
        assert "which it can't average. Make the embedding with sparse=False" in text


def _unused(method: str) -> tuple[str, float]:
    """The error of the first step with unused parameters, and the weight after it."""
    strategy = attached()
    model = Branches()
    nn.init.ones_(model.first.weight)
    replica, (optimizer,) = _set_up(strategy, model, method)
    strategy.backward(strategy.training_method(replica, method)(column(1.0)).sum())
    return error_of(lambda: strategy.step(optimizer)), number(model.first.weight)


@pytest.mark.parametrize("method", ["forward", "training_step"])
def test_unused_parameters_are_named_before_the_first_wrong_step(two_processes: Run, method: str) -> None:
    for text, weight in two_processes(_unused, method):
        assert text.startswith("DistributedError: parameters second.weight, second.bias of Branches had no part")
        assert "find_unused_parameters" in text
        assert weight == 1.0


def _ready_twice() -> str:
    strategy = attached()
    model, _ = strategy.setup(Twice(), [])
    return error_of(lambda: strategy.backward(model(column(1.0)).sum()))


def test_a_parameter_that_gets_its_gradient_twice_is_named(two_processes: Run) -> None:
    for text in two_processes(_ready_twice):
        assert text.startswith("DistributedError: parameter layer.weight of Twice got its gradient twice in one")
        assert "use_reentrant=False" in text


def _used(options: dict[str, Any]) -> list[float | None]:
    strategy = attached(**options)
    model = Branches()
    replica, (optimizer,) = _set_up(strategy, model)
    for _ in range(3):
        strategy.backward(replica(column(strategy.process.process_index + 1.0)).sum())
        assert strategy.step(optimizer) is StepOutcome.APPLIED
    return [None if p.grad is None else number(p.grad) for p in model.parameters()]


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_unused_parameters_may_be_looked_for(two_processes: Run, option: str) -> None:
    # Summed over three steps without zero_grad.
    first, second = two_processes(_used, {option: True})
    assert first == second
    assert first[:2] == [4.5, 3.0]
    assert first[2:] in ([None, None], [0.0, 0.0])


def _take_part(options: dict[str, Any]) -> list[float]:
    """Process 1 has no loss in the second window."""
    strategy = attached(**options)
    norm = nn.BatchNorm1d(1)
    replica, (optimizer,) = _set_up(strategy, nn.Sequential(ones(), norm, ones()))
    model = strategy.unwrap(replica)
    for window in range(2):
        optimizer.zero_grad()
        if window == 1 and strategy.process.process_index == 1:
            strategy.take_part(replica)
        else:
            strategy.backward(replica(torch.tensor([[0.0], [2.0]])).sum())
        strategy.step(optimizer)
    return [number(p.grad) for p in model[2].parameters()] + [number(p) for p in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_a_process_without_a_loss_takes_part(two_processes: Run, options: dict[str, Any]) -> None:
    first, second = two_processes(_take_part, options)
    assert first == second
    # The norm gives -1 and 1, so the first window moves its bias alone, by -2. In the second, the gradient of
    # the last weight on process 0 is the sum of its inputs, -2 + -2: half of it is left of the mean with a zero.
    assert first[0] == pytest.approx(-2.0, abs=1e-4)


def test_a_loss_of_zeros_has_gradients_of_zero_whatever_the_weights() -> None:
    parameters = [torch.tensor([float("nan"), 1.0], requires_grad=True), torch.tensor(2.0, requires_grad=True)]
    loss = zero_loss(list(parameters))
    loss.backward()
    assert loss.item() == 0.0
    assert [p.grad.tolist() for p in parameters if p.grad is not None] == [[0.0, 0.0], 0.0]


def _trigger() -> list[float]:
    strategy = attached()
    model, _ = strategy.setup(ones(), [])
    weight = next(model.parameters())
    rank = strategy.process.process_index
    with strategy.no_sync(model):
        losses = [model(column(value + rank)).sum() for value in (1.0, 10.0)]
        strategy.backward(losses[0])
    found = [number(weight.grad)]
    with strategy.trigger_sync(model):
        strategy.backward(losses[1])
    return [*found, number(weight.grad)]


def test_a_backward_may_synchronise_what_its_forward_did_not(two_processes: Run) -> None:
    assert two_processes(_trigger) == [[1.0, 12.0], [2.0, 12.0]]


def _buffers(options: dict[str, Any], method: str | None) -> float:
    strategy = attached(**options)
    task = SmallTask()
    model, _ = strategy.setup(task, [], method)
    task.seen.fill_(strategy.process.process_index + 5.0)
    strategy.synchronize_buffers(model)
    return number(task.seen)


def test_buffers_of_process_0(two_processes: Run) -> None:
    assert two_processes(_buffers, {}, "training_step") == [5.0, 5.0]
    assert two_processes(_buffers, {}, None) == [5.0, 5.0]
    assert two_processes(_buffers, {"broadcast_buffers": False}, "training_step") == [5.0, 6.0]


def _join() -> list[float]:
    strategy = attached()
    model, (optimizer,) = _set_up(strategy, ones())
    with strategy.join([model]):
        for _ in range(1 + 2 * strategy.process.process_index):
            optimizer.zero_grad()
            strategy.backward(model(column(2.0)).sum())
            strategy.step(optimizer)
    return [number(p) for p in model.parameters()]


def test_processes_with_more_batches_go_on_alone(two_processes: Run) -> None:
    # Step 1 together: 1 - 2; steps 2 and 3 with a gradient of 2 and one of 0.
    assert two_processes(_join) == [[-3.0], [-3.0]]


def _refused() -> list[str]:
    """The error of each set-up that can't work."""
    frozen = nn.Linear(1, 1).requires_grad_(False)
    mapped, quantised, adapted = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    mapped.hf_device_map = {"a": 0, "b": 1}
    quantised.is_loaded_in_8bit = adapted.is_loaded_in_8bit = True
    adapted.peft_config = {}
    attempts: list[Callable[[], Any]] = [
        lambda: _set_up(attached(), frozen),
        lambda: attached().setup(frozen, [], "training_step"),
        lambda: attached().setup(nn.ReLU(), [], None),
        lambda: attached().setup(nn.Sequential(mapped), []),
        lambda: attached().setup(nn.Sequential(quantised), []),
        lambda: attached(sync_batchnorm=True).setup(nn.BatchNorm1d(1), []),
        lambda: attached().setup(nn.Sequential(nn.SyncBatchNorm(1)), []),
        lambda: attached(comm_hook="fp16").setup(nn.Linear(1, 1), [], None),
        lambda: attached().setup(_with_dtensor(), []),
        lambda: attached().setup(nn.LazyLinear(1), []),
        lambda: attached().setup(adapted, []),
        lambda: attached().setup(frozen, []),
    ]
    return [error_of(attempt) for attempt in attempts]


def _different() -> list[str]:
    """The errors for models that differ between the processes."""
    rank = ProcessState(cpu=True).process_index
    frozen = nn.Linear(2, 1)
    frozen.bias.requires_grad_(rank == 0)
    models = (nn.Linear(2, 1 + rank), nn.Sequential(*(nn.Linear(1, 1) for _ in range(1 + rank))), frozen)
    return [error_of(lambda model=model: attached().setup(model, [])) for model in models]


def test_models_that_differ_between_processes(two_processes: Run) -> None:
    first, second = two_processes(_different)
    assert first == second
    assert {text.partition(":")[0] for text in first} == {"ShapeMismatchError"}
    shape, number_of_layers, frozen = first
    assert "process 0: weight [1, 2] torch.float32, trained\n  process 1: weight [2, 2] torch.float32" in shape
    assert "process 0: nothing\n  process 1: 1.weight [1, 1]" in number_of_layers
    assert "process 0: bias [1] torch.float32, trained\n  process 1: bias [1] torch.float32, frozen" in frozen


def _with_dtensor() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    layer = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), init_device_mesh("cpu", (2,))))
    return layer


def test_what_cannot_be_trained_in_copies(two_processes: Run) -> None:
    expected = [
        "Linear has no trainable parameter: all 2 have requires_grad=False. Unfreeze",
        "Linear has no trainable parameter: all 2",
        "ReLU has no parameters, so that there is nothing to train.",
        "Sequential has a device map over 0, 1, and strategy='ddp' trains a whole copy in each process. Load it",
        "Sequential is quantised (is_loaded_in_8bit), and its quantised weights have no gradients. Train adapters",
        "sync_batchnorm=True: torch synchronises batch norm on accelerators alone",
        "layer 0 is a SyncBatchNorm, which torch has for accelerators alone",
        "Linear is trained by manual optimization, whose gradients are averaged as they are. Leave out comm_hook",
        "parameter weight of Linear is a DTensor, which strategy='ddp' can't average.",
        "parameter weight of LazyLinear has no shape yet, as its layer is lazy. Call the model once before",
        "none",
        "none",
    ]
    for texts in two_processes(_refused):
        said = [text.removeprefix("ConfigError: ") for text in texts]
        assert [text[: len(start)] for text, start in zip(said, expected, strict=True)] == expected


def _bypassed() -> str:
    mapped = nn.Linear(1, 1)
    mapped.hf_device_map = {"a": 0, "b": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_BYPASS_DEVICE_MAP", "true")
        model, _ = attached().setup(mapped, [])
    return type(model).__name__


def test_a_device_map_may_be_bypassed(two_processes: Run) -> None:
    assert two_processes(_bypassed) == ["DistributedDataParallel"] * 2


def _options_of_torch() -> tuple[bool, bool, bool, bool, float]:
    options = {"bucket_cap_mb": 7, "gradient_as_bucket_view": True, "static_graph": True, "broadcast_buffers": False}
    handler = DistributedDataParallelKwargs(**options)  # type: ignore[arg-type]
    strategy = DDPStrategy.from_handler(handler)
    strategy.attach(ProcessState(cpu=True), FullPrecision(), GradientState())
    model, _ = strategy.setup(ones(), [])
    assert isinstance(model, DistributedDataParallel)
    found = (model.gradient_as_bucket_view, model.static_graph, model.broadcast_buffers, model.find_unused_parameters)
    return *found, model.bucket_bytes_cap / 2**20


def test_every_option_reaches_torch(two_processes: Run) -> None:
    assert two_processes(_options_of_torch) == [(True, True, False, False, 7.0)] * 2


def _left_alone() -> list[float]:
    strategy = attached()
    task = SmallTask()
    task.own = nn.Parameter(torch.tensor([float(strategy.process.process_index)]))
    task._ddp_params_and_buffers_to_ignore = ["own"]
    model, _ = strategy.setup(task, [], "training_step")
    strategy.backward(strategy.training_method(model, "training_step")(column(1.0))["loss"])
    return [number(task.own), number(task.layer.weight)]


def test_parameters_that_a_task_keeps_to_its_process(two_processes: Run) -> None:
    assert two_processes(_left_alone) == [[0.0, 1.0], [1.0, 1.0]]


def _again(methods: list[str | None]) -> list[float]:
    """The gradient after each set-up of the same task, the last one after the end of all."""
    strategy = attached()
    task = SmallTask()
    found = []
    for method in methods:
        model, _ = strategy.setup(task, [], method)
        task.zero_grad()
        step = strategy.training_method(model, method or "training_step")
        strategy.backward(step(column(strategy.process.process_index + 1.0))["loss"])
        found.append(number(task.layer.weight.grad))
    strategy.teardown()
    task.zero_grad()
    strategy.backward(task.training_step(column(strategy.process.process_index + 1.0))["loss"])
    return [*found, number(task.layer.weight.grad)]


def test_a_task_may_be_set_up_again(two_processes: Run) -> None:
    assert two_processes(_again, ["training_step", "training_step", None, "training_step"]) == [
        [1.5, 1.5, 1.5, 1.5, 1.0],
        [1.5, 1.5, 1.5, 1.5, 2.0],
    ]


def _post_local() -> list[float]:
    strategy = attached(post_local_sgd=1, post_local_sgd_period=2)
    model, (optimizer,) = _set_up(strategy, ones())
    weights = []
    for _ in range(5):
        optimizer.zero_grad()
        strategy.backward(model(column(strategy.process.process_index + 1.0)).sum())
        strategy.step(optimizer)
        weights.append(-number(next(model.parameters())))
    return weights


def test_post_local_sgd(two_processes: Run) -> None:
    # From 1: together 1 - 1.5; then each by its own 1 and 2, averaged after two steps each time.
    assert two_processes(_post_local) == [[0.5, 1.5, 3.5, 4.5, 6.5], [0.5, 2.5, 3.5, 5.5, 6.5]]


def test_in_one_process_nothing_is_wrapped() -> None:
    strategy = attached(find_unused_parameters=True)
    task = SmallTask()
    optimizer = torch.optim.SGD(task.parameters(), lr=1.0)
    model, optimizers = strategy.setup(task, [optimizer], "training_step")
    assert model is task
    assert optimizers == [optimizer]
    assert strategy.training_method(model, "training_step") == task.training_step
    with strategy.no_sync(model), strategy.trigger_sync(model), strategy.join([model]):
        strategy.backward(task.training_step(column(2.0))["loss"])
    strategy.take_part(model)
    strategy.synchronize_buffers(model)
    assert strategy.step(optimizer) is StepOutcome.APPLIED
    assert number(task.layer.weight) == -1.0
    strategy.teardown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"post_local_sgd": -1}, r"DDPStrategy\(post_local_sgd=-1\)\. Expected an integer >= 0"),
        ({"post_local_sgd": 1, "post_local_sgd_period": 0}, r"DDPStrategy\(post_local_sgd_period=0\)\. Expected"),
        ({"post_local_sgd": 1, "comm_hook": "fp16"}, r"comm_hook='fp16' and post_local_sgd=1 were both given"),
        ({"sync_batchnorm": "yes"}, r"DDPStrategy\(sync_batchnorm='yes'\)\. Expected True or False"),
        ({"bucket_cap_mb": 0}, r"DistributedDataParallelKwargs\(bucket_cap_mb=0\)\. Expected a number above 0"),
        ({"static_graph": 1}, r"DistributedDataParallelKwargs\(static_graph=1\)\. Expected True or False"),
        (
            {"comm_hook": "fp8"},
            r"comm_hook='fp8' is unknown\. .*Accepted: batched_power_sgd, bf16, fp16, no, power_sgd",
        ),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DDPStrategy(**options)


def test_names_inside_of_a_wrapped_method() -> None:
    wrapper = MethodForward(SmallTask(), "training_step")
    names: Sequence[str] = list(wrapper.state_dict())
    assert plain_names(wrapper, names) == {name: name.removeprefix("module.") for name in names}
    assert wrapper(column(1.0))["loss"].item() == 1.0
