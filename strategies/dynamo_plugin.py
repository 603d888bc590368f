"""`TorchDynamoPlugin`: how models are compiled, by Accelerate's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..distributed.environment import read_flag, read_variable
from ..distributed.errors import ConfigError, check_boolean, suggest

BACKENDS = (
    "no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt",
    "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm", "hpu_backend", "neuron",
)  # fmt: skip
"""Accelerate's words for what compiles; `"no"`: nothing does."""
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""torch's words for what the backend aims at."""
_DEFAULTS: Mapping[str, Any] = {
    "backend": "no", "mode": "default", "fullgraph": False, "dynamic": None, "options": None, "disable": False,
    "use_regional_compilation": False,
}  # fmt: skip
"""Where neither a field nor its variable says anything."""


class CompileSettings:
    """Base of the plugin. It is no dataclass itself, so that command lines don't look for fields in it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TorchDynamoPlugin(CompileSettings):
    """How models are compiled, for `Accelerator(dynamo_plugin=...)` and `Trainer(compile=...)`.

    What is None is read from its variable (`ACCELERATE_DYNAMO_*`), else has the default that is said here.

    Raises:
        ConfigError: a field or its variable can't be used.
    """

    backend: str | Callable[..., Any] | None = None
    """What compiles: one of `BACKENDS` in any case, or a function as `torch.compile` takes it; `"no"`: nothing."""
    mode: str | None = None
    """What it aims at, one of `MODES`; `"default"`."""
    fullgraph: bool | None = None
    """An error where a graph would break, instead of several graphs; False."""
    dynamic: bool | None = None
    """Shapes are variables from the beginning, or never (False). None: once they have changed."""
    options: Mapping[str, Any] | None = None
    """The backend's own, instead of a mode."""
    disable: bool = False
    """Compile nothing, to compare."""
    use_regional_compilation: bool | None = None
    """Compile the layers that a model repeats, once for all of them, and leave the rest as it is; False."""

    def __post_init__(self) -> None:
        self._set("backend", _read_word(self.backend, "backend", "DYNAMO_BACKEND", BACKENDS))
        self._set("mode", _read_word(self.mode, "mode", "DYNAMO_MODE", MODES))
        for name, variable in (
            ("fullgraph", "DYNAMO_USE_FULLGRAPH"),
            ("dynamic", "DYNAMO_USE_DYNAMIC"),
            ("use_regional_compilation", "DYNAMO_USE_REGIONAL_COMPILATION"),
        ):
            if getattr(self, name) is None:
                found = read_flag(variable)
                self._set(name, _DEFAULTS[name] if found is None else found)
            elif not isinstance(getattr(self, name), bool):
                raise ConfigError(f"TorchDynamoPlugin({name}={getattr(self, name)!r}). Expected True, False or None.")
        check_boolean("TorchDynamoPlugin(disable)", self.disable)
        if not isinstance(self.options, Mapping | None):
            raise ConfigError(f"TorchDynamoPlugin(options={self.options!r:.80}). Expected a mapping, or None.")
        if self.options is not None and self.mode != "default":
            raise ConfigError(
                f"TorchDynamoPlugin(mode={self.mode!r}, options={dict(self.options)}): a mode is a choice of options. "
                "Give one of them."
            )

    def to_dict(self) -> dict[str, Any]:
        """Every field by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of `torch.compile` that are not its defaults."""
        return {
            name: value
            for name, value in self.to_dict().items()
            if name != "use_regional_compilation" and value != _DEFAULTS[name]
        }

    @property
    def compiles(self) -> bool:
        """Whether there is a backend, and it is to be used."""
        return self.backend != "no" and not self.disable

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _read_word(value: Any, name: str, variable: str, known: tuple[str, ...]) -> Any:
    """A field in lower case: as it was given, or as its variable has it, or its default."""
    place = f"TorchDynamoPlugin({name}={value!r})"
    if value is None:
        found = read_variable(variable)
        if found is None:
            return _DEFAULTS[name]
        place, value = f"{found[0]}={found[1]!r}", found[1]
    elif name == "backend" and callable(value):
        return value
    word = str(getattr(value, "value", value)).lower()  # a member of an enumeration as well
    if word not in known:
        hint = " Another backend of torch is given as a function." if name == "backend" else ""
        raise ConfigError(f"{place} is unknown. {suggest(word, known)}{hint}")
    return word
