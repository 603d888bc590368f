"""What was logged in an epoch so far, as a tree for a checkpoint: so that a resumed epoch has the same means."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .metrics import Metric, MetricLog

_FIELDS = ("on_step", "on_epoch", "reduce", "sync", "total", "weight")


def log_tree(log: MetricLog, task: nn.Module) -> dict[str, Any]:
    """The sums and single values that a log holds, and the states of the task's torchmetrics objects. Local."""
    return {
        "window": log.window,
        "samples": log.samples if isinstance(log.samples, int) else None,
        "metrics": {name: _metric_tree(metric, task) for name, metric in log.metrics.items()},
        "objects": {name: _object_tree(each) for name, each in _objects(task)},
    }


def restore_log(log: MetricLog, trees: Sequence[Mapping[str, Any]], task: nn.Module, device: torch.device) -> None:
    """Put back what `log_tree` gave. Local.

    Args:
        log: gets it.
        trees: one; or those of several processes of the earlier leg, whose sums are added up, or none.
        task: whose torchmetrics objects get their states; of several trees those of the first.
        device: where values are held that were on a device.
    """
    for number, tree in enumerate(trees):
        log.window, log.samples = tree["window"], tree["samples"]  # what events log weighs as the newest batch
        for name, saved in tree["metrics"].items():
            _restore_metric(log, name, saved, device)
        if number == 0:
            for name, each in _objects(task):
                if name in tree["objects"]:
                    _restore_object(each, tree["objects"][name], device)
            modules = dict(_objects(task))
            for name, saved in tree["metrics"].items():
                log.metrics[name].source = modules.get(saved["source"])


def _metric_tree(metric: Metric, task: nn.Module) -> dict[str, Any]:
    tree: dict[str, Any] = {name: getattr(metric, name) for name in _FIELDS}
    names = {id(each): name for name, each in _objects(task)}
    source = None if metric.source is None else names.get(id(metric.source))
    return tree | {
        "options": metric.options,
        "entries": _columns(metric.entries),
        "kept": _columns(metric.kept),
        "source": source,
    }


def _restore_metric(log: MetricLog, name: str, saved: Mapping[str, Any], device: torch.device) -> None:
    metric = log.metrics.get(name)
    if metric is None:
        metric = Metric(name, tuple(saved["options"]), saved["on_step"], saved["on_epoch"], saved["reduce"])
        metric.sync = saved["sync"]
        log.metrics[name] = metric
    if saved["total"] is not None:
        metric.add(_placed(saved["total"], device), _placed(saved["weight"], device))
    metric.entries += _rows(saved["entries"], device)
    metric.kept += _rows(saved["kept"], device)


def _columns(entries: list[tuple[int, Any, Any]]) -> dict[str, Any]:
    """Entries by column: hundreds of scalar tensors become one."""
    windows, values, weights = (list(column) for column in zip(*entries, strict=True)) if entries else ([], [], [])
    return {"windows": windows, "values": _joined(values), "weights": _joined(weights)}


def _rows(columns: Mapping[str, Any], device: torch.device) -> list[tuple[int, Any, Any]]:
    values, weights = (_parted(columns[name], device) for name in ("values", "weights"))
    return list(zip(columns["windows"], values, weights, strict=True))


def _joined(column: list[Any]) -> Any:
    """One tensor, where all are scalar tensors of one kind. No value is read from the device."""
    kinds = {(each.dtype, each.device) if isinstance(each, Tensor) else None for each in column}
    return torch.stack(column) if len(kinds) == 1 and None not in kinds else column


def _parted(column: Any, device: torch.device) -> list[Any]:
    if isinstance(column, Tensor):
        return list(column.to(device).unbind())
    return [_placed(each, device) for each in column]


def _placed(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _objects(task: nn.Module) -> Iterator[tuple[str, Any]]:
    """The task's torchmetrics objects by the names of their modules."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None:
        yield from ((name, each) for name, each in task.named_modules() if isinstance(each, torchmetrics.Metric))


def _object_tree(metric: Any) -> dict[str, Any]:
    # Their states are no part of a module's state_dict, unless they are declared persistent.
    return {
        "states": {name: getattr(metric, name) for name in metric._defaults},
        "update_count": metric._update_count,
    }


def _restore_object(metric: Any, tree: Mapping[str, Any], device: torch.device) -> None:
    for name, state in tree["states"].items():
        setattr(
            metric, name, [_placed(each, device) for each in state] if isinstance(state, list) else state.to(device)
        )
    metric._update_count = tree["update_count"]
    metric._computed = None
