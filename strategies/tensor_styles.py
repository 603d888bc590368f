"""How a layer is cut over the tensor axis: words, and torch's objects for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from ..distributed.errors import ConfigError

_LAYERS = (nn.Linear, nn.Embedding)
_OF_LAYERS = ("colwise", "rowwise", "embedding", "sequence_colwise", "sequence_rowwise")


def split_dimension(style: Any) -> int | None:
    """The dimension along which a style cuts outputs that were whole; None where it cuts none. Local."""
    from torch.distributed.tensor.parallel import PrepareModuleOutput

    if not isinstance(style, PrepareModuleOutput):
        return None
    layouts: Iterable[tuple[Any, Any]] = zip(style.output_layouts, style.desired_output_layouts, strict=True)
    cuts = [after.dim for before, after in layouts if before and before.is_replicate() and after.is_shard()]
    return cuts[0] if cuts else None


def _colwise(**layouts: str) -> Callable[[nn.Module], Any]:
    def make(module: nn.Module) -> Any:
        from torch.distributed.tensor.parallel import ColwiseParallel

        return ColwiseParallel(**_layouts(layouts))

    return make


def _rowwise(**layouts: str) -> Callable[[nn.Module], Any]:
    def make(module: nn.Module) -> Any:
        from torch.distributed.tensor.parallel import RowwiseParallel

        given = layouts | {"input_layouts": "whole"} if isinstance(module, nn.Embedding) else layouts
        return RowwiseParallel(**_layouts(given))

    return make


def _sequence(module: nn.Module) -> Any:
    from torch.distributed.tensor.parallel import SequenceParallel

    return SequenceParallel(use_local_output=True)


def _output(before: str, after: str) -> Callable[[nn.Module], Any]:
    def make(module: nn.Module) -> Any:
        from torch.distributed.tensor.parallel import PrepareModuleOutput

        return PrepareModuleOutput(**_layouts({"output_layouts": before, "desired_output_layouts": after}))

    return make


def _gathered_sequence(module: nn.Module) -> Any:
    gather = _output("sequence", "whole")(module)
    # A norm's own weights see a part of the sequence: their gradients are added up over the axis.
    return (_sequence(module), gather) if _has_own_weights(module) else gather


def _has_own_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _whole(module: nn.Module) -> Any:
    return None


def _layouts(words: Mapping[str, str]) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard

    placements = {"whole": Replicate(), "features": Shard(-1), "sequence": Shard(1)}
    return {name: placements[word] for name, word in words.items()}


STYLES: dict[str, Callable[[nn.Module], Any]] = {
    "colwise": _colwise(),
    "rowwise": _rowwise(),
    "colwise_gather": _colwise(output_layouts="whole"),
    "colwise_gather_output": _colwise(output_layouts="whole"),
    "colwise_rep": _colwise(output_layouts="whole"),
    "rowwise_split": _rowwise(input_layouts="whole"),
    "rowwise_split_input": _rowwise(input_layouts="whole"),
    "rowwise_rep": _rowwise(input_layouts="whole"),
    "embedding_rowwise": _rowwise(input_layouts="whole"),
    "sequence": _sequence,
    "sequence_parallel": _sequence,
    "replicated_with_grad_allreduce": _sequence,
    "sequence_colwise": _colwise(input_layouts="sequence"),
    "sequence_rowwise": _rowwise(output_layouts="sequence"),
    "sequence_split": _output("whole", "sequence"),
    "sequence_gather": _gathered_sequence,
    "gather": _output("features", "whole"),
    "replicate": _whole,
}
"""The words of styles, those of Hugging Face's plans among them, and what makes torch's object for a module."""


def style_of(name: str, module: nn.Module, style: Any) -> Any:
    """What torch has for a style, or a tuple of what is applied in turn; None: the module stays whole. Local.

    Args:
        name: of the module.
        module: what is cut.
        style: a word of `STYLES`, or torch's object itself.
    Raises:
        ConfigError: the word does not fit the module.
    """
    if not isinstance(style, str):
        return style
    if style.startswith(_OF_LAYERS) and not isinstance(module, _LAYERS):
        raise ConfigError(
            f"tensor_plan: {name} is a {type(module).__name__}, which {style!r} can't cut: it is for Linear and "
            "Embedding. Name the layers inside of it."
        )
    is_norm = not isinstance(module, _LAYERS) and next(module.children(), None) is None
    if style == "sequence_gather" and _has_own_weights(module) and not is_norm:
        raise ConfigError(
            f"tensor_plan: {name} is a {type(module).__name__} with weights of its own, which 'sequence_gather' would "
            "train on a part of each sequence. Give it to the last norm, or to a module without weights of its own."
        )
    return STYLES[style](module)
