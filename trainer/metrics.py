"""The logging of metrics: values stay on their device until a record is due."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from ..data.sizes import AmbiguousBatchSizeError
from ..distributed.errors import MetricError, suggest
from ..distributed.numbers import stack_wide, wide_float

if TYPE_CHECKING:
    from .metric_exchange import MetricExchange

Reduce: TypeAlias = Literal["mean", "sum", "min", "max"]

STEP = "step:"
"""Marks the newest window's values where several processes exchange them."""

_FOLD_EVERY = 256  # values of a metric that are held before they are folded into its running total


class Sum(NamedTuple):
    """What some values of one metric add up to."""

    reduce: Reduce
    total: Any
    """A number or a scalar tensor; for torchmetrics objects also a mapping of these."""
    weight: Any
    """What a mean is divided by."""
    sync: bool
    """Whether it is taken over all processes."""

    def value(self) -> Any:
        """The metric's value, on its device."""
        if self.reduce != "mean" or isinstance(self.total, dict):
            return self.total
        return _quotient(self.total, self.weight)


class Metric:
    """One logged name in one stage: the values of the newest window, and a running total over the epoch."""

    __slots__ = (
        "entries", "kept", "name", "on_epoch", "on_step", "options", "reduce", "source", "sync", "total", "weight",
    )  # fmt: skip

    def __init__(self, name: str, options: tuple[Any, ...], on_step: bool, on_epoch: bool, reduce: Reduce) -> None:
        self.name = name
        self.options = options
        self.on_step = on_step
        self.on_epoch = on_epoch
        self.reduce = reduce
        self.sync = True
        """Whether it is taken over all processes."""
        self.source: Any = None
        """The torchmetrics object that computes the value itself."""
        self.kept: list[tuple[int, Any, Any]] = []
        """What a window that is carried over an epoch's end logged before it."""
        self.reset()

    def reset(self) -> None:
        """Forget everything that was logged."""
        self.entries: list[tuple[int, Any, Any]] = []
        self.total: Any = None
        self.weight: Any = 0

    def fold(self, window: int) -> None:
        """Bring the values of earlier windows into the running total."""
        old = [entry for entry in self.entries if entry[0] != window]
        if old and self.on_epoch:
            self.add(*_reduce(old, self.reduce))
        self.entries = [entry for entry in self.entries if entry[0] == window]

    def add(self, total: Any, weight: Any) -> None:
        """Add to the running total of the epoch."""
        if self.total is None:
            self.total, self.weight = total, weight
        elif self.reduce in ("mean", "sum"):
            self.total, self.weight = self.total + total, self.weight + weight
        else:
            self.total = extreme(self.reduce, self.total, total)

    def window_sum(self, window: int) -> Sum | None:
        """What one window adds up to, None where it was not logged there."""
        if self.source is not None:
            newest = getattr(self.source, "_forward_cache", None)
            return None if newest is None else Sum("mean", newest, 1, self.sync)
        entries = [entry for entry in (*self.kept, *self.entries) if entry[0] == window]
        return Sum(self.reduce, *_reduce(entries, self.reduce), self.sync) if entries else None

    def epoch_sum(self) -> Sum | None:
        """What all adds up to that was logged since `reset`, None where nothing was."""
        self.fold(-1)
        return None if self.total is None else Sum(self.reduce, self.total, self.weight, self.sync)


def _reduce(entries: list[tuple[int, Any, Any]], reduce: Reduce) -> tuple[Any, Any]:
    """Total and weight of some entries, each of window, value and weight.

    Sums are made in 64 bits, integers as integers, so that a large count stays exact.
    """
    numbers = [(v, w) for _, v, w in entries if not isinstance(v, Tensor) and not isinstance(w, Tensor)]
    tensors = [(v, w) for _, v, w in entries if isinstance(v, Tensor) or isinstance(w, Tensor)]
    parts: list[tuple[Any, Any]] = []
    if numbers:
        parts.append(_reduce_numbers(numbers, reduce))
    if tensors:
        parts.append(_reduce_tensors(tensors, reduce))
    (total, weight), *rest = parts
    for other_total, other_weight in rest:
        total = total + other_total if reduce in ("mean", "sum") else extreme(reduce, total, other_total)
        weight = weight + other_weight
    return total, weight


def _reduce_numbers(entries: list[tuple[Any, Any]], reduce: Reduce) -> tuple[Any, Any]:
    if reduce == "mean":
        return sum(v * w for v, w in entries), sum(w for _, w in entries)
    values = [v for v, _ in entries]
    if reduce == "sum":
        return sum(values), 0
    found = values[0]
    for value in values[1:]:
        found = extreme(reduce, found, value)
    return found, 0


def _reduce_tensors(entries: list[tuple[Any, Any]], reduce: Reduce) -> tuple[Tensor, Any]:
    device = next(x.device for entry in entries for x in entry if isinstance(x, Tensor))
    values = stack_wide([v for v, _ in entries], device)
    if reduce == "mean":
        weights = stack_wide([w for _, w in entries], device)
        return (values * weights).sum(), weights.sum()
    if reduce == "sum":
        return values.sum(), 0
    return (values.amin() if reduce == "min" else values.amax()), 0


def extreme(reduce: Reduce, first: Any, second: Any) -> Any:
    """The smaller or the larger of two values; NaN where one of them is NaN."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        a, b = torch.as_tensor(first), torch.as_tensor(second)
        return torch.minimum(a, b.to(a.device)) if reduce == "min" else torch.maximum(a, b.to(a.device))
    if first != first or second != second:  # NaN: not hidden by the order of arguments
        return float("nan")
    return min(first, second) if reduce == "min" else max(first, second)


def _quotient(total: Any, weight: Any) -> Any:
    if isinstance(total, Tensor) or isinstance(weight, Tensor):
        if isinstance(total, Tensor) and not total.is_floating_point():
            total = total.to(wide_float(total.device))
        return total / weight  # 0 / 0 is NaN, as it should be
    return total / weight if weight else float("nan")


def _copied(name: str, value: Tensor) -> Tensor:
    """A scalar of its own without a graph: what the user does to the tensor later is not logged."""
    if value.numel() != 1:
        raise MetricError(f"log({name!r}) of a tensor of shape {tuple(value.shape)}. Expected one element: reduce it.")
    if value.is_complex():
        raise MetricError(f"log({name!r}) of a complex number. Log its real and imaginary parts, or its magnitude.")
    copy = value.detach().clone()
    return copy.reshape(()) if copy.ndim else copy


def _read_weight(name: str, weight: Any) -> Any:
    """The weight of a value as a number, or as a scalar tensor of its own.

    Raises:
        MetricError: it is neither.
    """
    if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex():
        return weight.detach().clone().reshape(())
    item = getattr(weight, "item", None)
    number = item() if callable(item) and getattr(weight, "size", 1) == 1 else weight
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise MetricError(
            f"log({name!r}) with the weight {weight!r}. Expected a number: the samples that it stands for."
        )
    return number


class MetricLog:
    """What is logged in one stage of a run.

    Args:
        stage: `"train"`, `"validation"`, `"test"` or `"predict"`: sets the defaults of `on_step` and `on_epoch`.
        progress: where newest values for the progress bar go.
        exchange: takes sums over all processes; None in one process.
    """

    def __init__(self, stage: str, progress: dict[str, Any], exchange: MetricExchange | None = None) -> None:
        self.stage = stage
        self.progress = progress
        self.exchange = exchange
        self.suffix = ""
        """Appended to every name, for one of several loaders."""
        self.window = 0
        """Number of the current window; values of one window make one step value."""
        self.samples: int | AmbiguousBatchSizeError | None = None
        """Samples in the current batch, or why they can't be told."""
        self.metrics: dict[str, Metric] = {}

    def log(
        self,
        name: str,
        value: Any,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce: Reduce = "mean",
        batch_size: int | Tensor | None = None,
        progress_bar: bool = False,
        sync: bool = True,
    ) -> None:
        """As `Task.log` says."""
        if self.suffix:
            name += self.suffix
        metric = self.metrics.get(name)
        if metric is None:
            metric = self._open(name, on_step, on_epoch, reduce)
            metric.sync = sync
        elif metric.options != (on_step, on_epoch, reduce):
            raise MetricError(
                f"log({name!r}) with on_step={on_step}, on_epoch={on_epoch}, reduce={reduce!r}, but earlier with "
                f"{metric.options}. Use the same options for one name, or another name."
            )
        weight: Any = batch_size
        if isinstance(value, Tensor):
            value = _copied(name, value)
        elif type(value) is not float and type(value) is not int:
            value, weight = self._convert(metric, value, batch_size)
            if value is None:
                return
        if weight is not None and type(weight) is not int:
            weight = _read_weight(name, weight)
        if weight is None:
            weight = self.samples if type(self.samples) is int else self._weight(metric)
        metric.entries.append((self.window, value, weight))
        if len(metric.entries) % _FOLD_EVERY == 0:
            metric.fold(self.window)
        if progress_bar:
            self.progress[name] = value

    def see(self, suffix: str, num_batches: int) -> None:
        """Note so many more batches of a suffix's loader, which has to log what other processes log; 0: it begins."""
        if self.exchange is not None:
            self.exchange.see(suffix, num_batches)

    def _open(self, name: str, on_step: bool | None, on_epoch: bool | None, reduce: Reduce) -> Metric:
        if not isinstance(name, str) or not name:
            raise MetricError(f"log({name!r}, ...). Expected the metric's name, a text such as 'train/loss'.")
        if name == "epoch":
            raise MetricError("log('epoch', ...): each record has this name already, for the epochs done. Use another.")
        if reduce not in get_args(Reduce):
            raise MetricError(f"log({name!r}, reduce={reduce!r}). {suggest(reduce, get_args(Reduce))}")
        training = self.stage == "train"
        if on_step and not training:
            warnings.warn(
                f"log({name!r}, on_step=True) in {self.stage}: evaluation has no steps of its own, so only the "
                "mean over "
                "its data is recorded.", stacklevel=4,
            )  # fmt: skip
        is_step = training and on_step is not False
        is_epoch = (not training) if on_epoch is None else on_epoch
        metric = Metric(name, (on_step, on_epoch, reduce), is_step, is_epoch, reduce)
        self.metrics[name] = metric
        return metric

    def _convert(self, metric: Metric, value: Any, batch_size: Any) -> tuple[Any, Any]:
        """A number and its weight from the rarer kinds of values; None where an object keeps the value itself."""
        torchmetrics = sys.modules.get("torchmetrics")
        if torchmetrics is not None and isinstance(value, torchmetrics.Metric):
            metric.source = value
            return None, None
        if isinstance(value, tuple) and len(value) == 2:
            total, count = value
            total = total.detach() if isinstance(total, Tensor) else total
            if isinstance(count, Tensor):
                count = count.detach().clone()
                return total / torch.where(count == 0, 1, count), count  # a pair that counts nothing changes nothing
            return total / (count or 1), count
        if isinstance(value, bool):
            return int(value), batch_size
        item = getattr(value, "item", None)
        if callable(item) and getattr(value, "size", 1) == 1:  # a NumPy scalar or array of one element
            return item(), batch_size
        if isinstance(value, (int, float)):
            return value, batch_size
        raise MetricError(
            f"log({metric.name!r}) of a {type(value).__name__}. Expected a number, a tensor of one element, a "
            "torchmetrics object, or a pair (sum, count)."
        )

    def _weight(self, metric: Metric) -> int:
        """The weight of a value where the batch's number of samples is not known.

        Raises:
            MetricError: a mean over the epoch would need it.
        """
        needs_weight = metric.on_epoch and metric.reduce == "mean"
        if needs_weight and isinstance(self.samples, AmbiguousBatchSizeError):
            raise MetricError(f"log({metric.name!r}): {self.samples}") from self.samples
        return 1

    def step_values(self) -> dict[str, Any]:
        """The values of the newest window for a step record. Collective where there are several processes."""
        return self._values_of(self._step_sums(), {}, {})[0]

    def epoch_values(self) -> dict[str, Any]:
        """The values over the epoch; then begins anew. Collective where there are several processes."""
        found = self._values(*self._close(keeps_window=False))
        self.reset()
        return found

    def close_epoch(self, *, keeps_window: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        """The values of the newest window, and those over the epoch; then begins anew. Collective, as above.

        Args:
            keeps_window: the newest window goes on, so that its value will be over both parts of it.
        """
        steps = self._step_sums()
        found = self._values_of(steps, *self._close(keeps_window=keeps_window))
        self.reset()
        if self.exchange is not None:
            self.exchange.begin_epoch()
        return found

    def late_values(self) -> dict[str, Any]:
        """What was logged after the record that it would have belonged to; then begins anew. Collective, as above."""
        is_empty = not any(metric.entries or metric.source is not None for metric in self.metrics.values())
        if self.exchange is not None:
            self.exchange.expect_all()
        elif is_empty:
            return {}
        carried = {name: metric.kept for name, metric in self.metrics.items()}
        for metric in self.metrics.values():
            metric.kept = []  # its window goes on, and has its own record
        steps, epochs = self.close_epoch()
        for name, kept in carried.items():
            self.metrics[name].kept = kept
        return steps | epochs

    def _step_sums(self) -> dict[str, Sum]:
        found: dict[str, Sum] = {}
        for metric in self.metrics.values():
            if metric.on_step and (part := metric.window_sum(self.window)) is not None:
                found[f"{metric.name}_step" if metric.on_epoch else metric.name] = part
        return found

    def _close(self, *, keeps_window: bool) -> tuple[dict[str, Sum], dict[str, Any]]:
        """The sums over the epoch by name, and the objects that compute their values themselves."""
        found: dict[str, Sum] = {}
        sources: dict[str, Any] = {}
        for metric in self.metrics.values():
            window = [*metric.kept, *metric.entries] if keeps_window else []
            metric.kept = [entry for entry in window if entry[0] == self.window]
            if not metric.on_epoch:
                continue
            name = f"{metric.name}_epoch" if metric.on_step else metric.name
            if metric.source is not None:
                sources[name] = metric.source
            elif (part := metric.epoch_sum()) is not None:
                found[name] = part
        return found, sources

    def _values_of(
        self, steps: dict[str, Sum], epochs: dict[str, Sum], sources: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the sums of a window and of an epoch come to, in one collective for both."""
        if self.exchange is None:
            return self._values(steps), self._values(epochs, sources)
        values = self._values({f"{STEP}{name}": part for name, part in steps.items()} | epochs, sources)
        newest = {name.removeprefix(STEP): value for name, value in values.items() if name.startswith(STEP)}
        return newest, {name: value for name, value in values.items() if not name.startswith(STEP)}

    def _values(self, sums: dict[str, Sum], sources: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What sums come to, over all processes."""
        found: dict[str, Any] = {}
        if self.exchange is not None:
            values = self.exchange(sums, sources or {})
        else:
            values = {name: part.value() for name, part in sums.items()}
            values |= {name: source.compute() for name, source in (sources or {}).items()}
        for name, value in values.items():
            _enter(found, name, value)
        return found

    def reset(self) -> None:
        """Forget all values, as at the start of an epoch."""
        for metric in self.metrics.values():
            metric.reset()
            if metric.source is not None:
                metric.source.reset()
                metric.source = None


def _enter(found: dict[str, Any], name: str, value: Any) -> None:
    """Add a value if there is one; a torchmetrics object may give several, by name."""
    if isinstance(value, dict):
        found.update({f"{name}/{key}": part for key, part in value.items()})
    elif value is not None:
        found[name] = value
