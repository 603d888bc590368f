"""A model's forward in the precision of its run, with outputs in fp32; and models without what was put around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..checkpoint.names import COMPILED, wrapped_attribute
from ..distributed.nested import convert_to_fp32
from .precision import ContextFactory


class ReplacedForward:
    """The base of what stands in the place of one module's `forward`, in the module itself.

    It reaches the module by a reference of its own and not by a closure, so that a copy or a pickle of the module runs
    the copy's weights.

    Args:
        module: whose forward this is.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.replaced: Callable[..., Any] | None = module.__dict__.get("forward")
        """What the module had instead of its class's forward, None where it had nothing."""

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward; `inspect.signature` looks here."""
        own: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return self.replaced or own


class AutocastForward(ReplacedForward):
    """A module's own forward, inside a context, with fp16 and bf16 outputs made fp32.

    Args:
        module: whose forward this is.
        context: gives a new context for each call; picklable where the module is to be.
        convert_inputs: gives the arguments in the format of the precision; picklable too.
    """

    def __init__(self, module: nn.Module, context: ContextFactory, convert_inputs: Callable[[Any], Any]) -> None:
        super().__init__(module)
        self.context = context
        self.convert_inputs = convert_inputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.convert_inputs((args, kwargs))
        with self.context():
            outputs = self.__wrapped__(*args, **kwargs)
        return convert_to_fp32(outputs)


def wrap_forward(module: nn.Module, context: ContextFactory, convert_inputs: Callable[[Any], Any]) -> None:
    """Let a module's forward passes run in a context, with converted arguments. One that is wrapped already gets the
    new ones.
    """
    restore_forward(module)
    module.forward = AutocastForward(module, context, convert_inputs)


def restore_forward(module: nn.Module) -> None:
    """Give a module its own forward back. Does nothing where it was not wrapped."""
    wrapper = module.__dict__.get("forward")
    if not isinstance(wrapper, AutocastForward):
        return
    if wrapper.replaced is None:
        del module.forward
    else:
        module.forward = wrapper.replaced


def is_compiled_module(module: Any) -> bool:
    """Whether `torch.compile` has put its wrapper around this module."""
    return wrapped_attribute(module) == COMPILED


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The model without what data parallelism, and on request precision and compiler, put around it.

    Args:
        model: wrapped or plain.
        keep_fp32_wrapper: keep its forward in mixed precision. False gives the model its own forward back, in place.
        keep_torch_compile: keep the wrapper of `torch.compile`, around what is left.
        recursive: also look into the model's children.
    """
    attribute = wrapped_attribute(model)
    if attribute is None:
        for name, child in list(model.named_children()) if recursive else ():
            setattr(model, name, extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, recursive))
    else:
        wrapped = getattr(model, attribute)
        inner = extract_model_from_parallel(wrapped, keep_fp32_wrapper, keep_torch_compile, recursive)
        if attribute != COMPILED:
            return inner
        setattr(model, COMPILED, inner)
    if not keep_fp32_wrapper:
        restore_forward(model)
    return model if attribute is None or keep_torch_compile else inner
