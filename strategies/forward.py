"""A model's forward in the precision of its run, with outputs in fp32; and models without what was put around them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..distributed.nested import convert_to_fp32
from .handlers import AutocastKwargs
from .precision import Precision

ContextFactory: TypeAlias = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Autocast:
    """Gives contexts of `torch.autocast`. Unlike these and unlike a gradient scaler it can be copied at any time."""

    device_type: str
    dtype: torch.dtype
    enabled: bool
    cache_enabled: bool | None

    def __call__(self) -> torch.autocast:
        return torch.autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled)


def autocast_factory(precision: Precision, settings: AutocastKwargs) -> ContextFactory:
    """What gives the contexts of forward passes: those of a precision, with further settings.

    A precision without autocast, or with contexts of its own kind, gives its own.
    """
    context = precision.autocast()
    if not isinstance(context, torch.autocast):
        return precision.autocast
    return Autocast(context.device, context.fast_dtype, settings.enabled, settings.cache_enabled)


class AutocastForward:
    """The `forward` of one module: its own, inside a context, with fp16 and bf16 outputs made fp32.

    It reaches the module by a reference of its own and not by a closure, so that a copy or a pickle of the module runs
    the copy's weights.

    Args:
        module: whose forward this is.
        context: gives a new context for each call; picklable where the module is to be.
    """

    def __init__(self, module: nn.Module, context: ContextFactory) -> None:
        self.module = module
        self.context = context
        self.replaced: Callable[..., Any] | None = module.__dict__.get("forward")
        """What the module had instead of its class's forward, None where it had nothing."""

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward; `inspect.signature` looks here."""
        own: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return self.replaced or own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.context():
            outputs = self.__wrapped__(*args, **kwargs)
        return convert_to_fp32(outputs)


def wrap_forward(module: nn.Module, context: ContextFactory) -> None:
    """Let a module's forward passes run in a context. One that is wrapped already gets the new context."""
    restore_forward(module)
    module.forward = AutocastForward(module, context)


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
    return isinstance(module, nn.Module) and "_orig_mod" in module._modules


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
    if is_compiled_module(model):
        inner = extract_model_from_parallel(model._orig_mod, keep_fp32_wrapper, keep_torch_compile, recursive)
        if not keep_fp32_wrapper:
            restore_forward(model)
        if not keep_torch_compile:
            return inner
        model._orig_mod = inner
        return model
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    if is_compiled_module(model):
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile, recursive)
    if recursive:
        for name, child in list(model.named_children()):
            setattr(model, name, extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, recursive))
    if not keep_fp32_wrapper:
        restore_forward(model)
    return model
