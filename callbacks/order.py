"""The order of callbacks: sorted once from what they declare, stably from the order in which they were given."""

from __future__ import annotations

from collections.abc import Sequence

from ..distributed.errors import CallbackOrderError, suggest
from .callback import Callback


def sort_callbacks(callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks in the order in which they run.

    A callback runs after those that provide a metric which it `needs` or `reads`, before the classes in its `before`
    and after those in its `after`; among equals the given order holds.

    Raises:
        CallbackOrderError: the declarations form a cycle, or a needed metric has no provider.
    """
    earlier = {index: _earlier(index, callbacks) for index in range(len(callbacks))}
    ordered: list[int] = []
    while len(ordered) < len(callbacks):
        ready = [i for i in earlier if i not in ordered and earlier[i] <= set(ordered)]
        if not ready:
            stuck = [i for i in earlier if i not in ordered]
            raise CallbackOrderError(_describe_cycle(stuck, earlier, callbacks))
        ordered.append(min(ready))
    return [callbacks[index] for index in ordered]


def _earlier(index: int, callbacks: Sequence[Callback]) -> set[int]:
    """Indices of the callbacks that must run before the one at `index`."""
    this = callbacks[index]
    found: set[int] = set()
    for metric in this.needs:
        providers = {i for i, other in enumerate(callbacks) if metric in other.provides and i != index}
        if not providers:
            provided = {name for other in callbacks for name in other.provides}
            raise CallbackOrderError(
                f"{_name(this)} needs the metric {metric!r}, which no callback provides. {suggest(metric, provided)} "
                "Add the callback that provides it, or declare it in `reads` when the task logs it."
            )
        found |= providers
    for other_index, other in enumerate(callbacks):
        if other_index == index:
            continue
        if set(this.reads) & set(other.provides) or _is_one_of(other, this.after) or _is_one_of(this, other.before):
            found.add(other_index)
    return found


def _is_one_of(callback: Callback, classes: Sequence[type[Callback] | str]) -> bool:
    names = {base.__name__ for base in type(callback).__mro__}
    return any(c in names if isinstance(c, str) else isinstance(callback, c) for c in classes)


def _describe_cycle(stuck: Sequence[int], earlier: dict[int, set[int]], callbacks: Sequence[Callback]) -> str:
    lines = [
        f"  {_name(callbacks[i])} runs after {', '.join(_name(callbacks[j]) for j in sorted(earlier[i] & set(stuck)))}"
        for i in stuck
    ]
    return (
        "these callbacks wait for one another:\n"
        + "\n".join(lines)
        + "\nRemove one of their `provides`, `needs`, `reads`, `before` or `after`."
    )


def _name(callback: Callback) -> str:
    return type(callback).__name__


def state_keys(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """The name under which each callback's state is saved; a second one of the same key gets `#2`, and so on."""
    keys: dict[str, Callback] = {}
    for callback in callbacks:
        key, number = callback.state_key, 1
        while key in keys:
            number += 1
            key = f"{callback.state_key}#{number}"
        keys[key] = callback
    return keys
