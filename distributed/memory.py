"""Memory: giving it back, and finding the batch size that it allows."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from .attempts import Attempts
from .errors import ConfigError, LoopwrightError, check_integer
from .group import rank

logger = logging.getLogger(__name__)

# What else than torch.OutOfMemoryError says that the memory is used up.
_TEXTS = (
    " out of memory.",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "MPS backend out of memory",
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the accelerator's cached memory back to the device. Local.

    Args:
        garbage_collection: collect Python's unreachable objects first, which may hold tensors.
    """
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Collect garbage and give cached memory back, once your own references are gone. Local.

    Usage: `model, optimizer = release_memory(model, optimizer)`.

    Returns:
        None for each object.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether an exception says that memory is used up, in this process."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    if isinstance(exception, LoopwrightError):  # it may tell of another process whose memory is
        return False
    is_plain = isinstance(exception, RuntimeError) and len(exception.args) == 1
    return is_plain and any(text in str(exception.args[0]) for text in _TEXTS)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
    *,
    factor: float = 0.5,
) -> Any:
    """Decorate a function so that it is called again with a smaller batch size when memory runs out.

    Each call begins anew at `starting_batch_size`. The size that was found is logged when it is a smaller one.
    Collective: all processes call it, and try the next size together when memory runs out on any of them, so that the
    size is the same on all. Where one runs out alone and others wait for it inside a collective of the function, that
    can't be taken back: all end with an error, within half a minute.

    Args:
        function: called as `function(batch_size, *args, **kwargs)`; callers leave `batch_size` out. It has to build
            whatever depends on the size (loaders, models to be freed) inside.
        starting_batch_size: the first size to try, in samples.
        reduce_batch_size_fn: gives the next size, from the last one or (without a parameter) by itself.
        factor: what a size is multiplied by to give the next one, where no function does.
    Returns:
        The decorated function; without `function`, a decorator.
    Raises:
        ConfigError: an argument can't be used.
        RuntimeError: when called: even a size of 1 does not fit. Any other error passes through.
        DistributedError: when called: memory ran out on one process, and others wait for it inside a collective, or
            tried another size.
        PeerFailedError: when called: the function raised another error on another process.
        TypeError: when called: a batch size was passed as well.
    """
    _check_options(starting_batch_size, reduce_batch_size_fn, factor)
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            factor=factor,
        )
    decorated: Callable[..., Any] = function
    next_size = _with_size(reduce_batch_size_fn) if reduce_batch_size_fn else lambda size: int(size * factor)

    @functools.wraps(decorated)
    def search(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(decorated, args, kwargs)
        clear_device_cache(garbage_collection=True)
        size, failed = starting_batch_size, list[int]()
        attempts = Attempts("find_executable_batch_size")
        while size > 0:
            fits, result = _try(decorated, size, args, kwargs, attempts)
            if fits:
                _tell(decorated, size, failed)
                return result
            failed.append(size)
            size = next_size(size)
            if size >= failed[-1]:
                raise ConfigError(
                    f"reduce_batch_size_fn gave {size} after {failed[-1]}. It has to give a smaller size."
                )
        tried = f" Tried {', '.join(map(str, failed))}." if failed else f" It began at {starting_batch_size}."
        raise RuntimeError(f"No executable batch size found, reached zero.{tried}")

    return search


def _try(
    function: Callable[..., Any], size: int, args: tuple[Any, ...], kwargs: dict[str, Any], attempts: Attempts
) -> tuple[bool, Any]:
    """Whether a size fits everywhere, and the result here. Collective.

    A caught error and a result that nobody gets are gone on return, and with them what they held.
    """
    try:
        fits, result = True, function(size, *args, **kwargs)
    except BaseException as error:
        if not should_reduce_batch_size(error):
            attempts.fail(error)
            raise
        if attempts.have_ended():
            error.add_note(
                "find_executable_batch_size: memory ran out here alone, in a training of several processes, which ends "
                "on all of them, so that no other size can be tried. Begin with a smaller size."
            )
            raise
        fits, result = False, None
    if not fits:  # before the wait: the device may be shared with processes that still try
        clear_device_cache(garbage_collection=True)
    if attempts.all_fit(size, fits):
        return True, result
    if fits:
        del result
        clear_device_cache(garbage_collection=True)
    return False, None


def _with_size(reduce: Callable[..., int]) -> Callable[[int], int]:
    takes_size = any(p.default is p.empty for p in inspect.signature(reduce).parameters.values())
    return (lambda size: int(reduce(size))) if takes_size else (lambda size: int(reduce()))


def _check_options(starting_batch_size: object, reduce_batch_size_fn: object, factor: float) -> None:
    """Raises ConfigError where one can't be used."""
    if not 0 < factor < 1:
        raise ConfigError(
            f"find_executable_batch_size(factor={factor}). Expected a number between 0 and 1, such as 0.5."
        )
    check_integer("find_executable_batch_size(starting_batch_size)", starting_batch_size, 0, "It counts samples.")
    if not (reduce_batch_size_fn is None or callable(reduce_batch_size_fn)):
        raise ConfigError(
            f"find_executable_batch_size(reduce_batch_size_fn={reduce_batch_size_fn!r:.80}). Expected a function that "
            "gives the next size, or None."
        )


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises TypeError where the caller gave a batch size, or the function takes none."""
    name = getattr(function, "__name__", repr(function))
    parameters = list(inspect.signature(function).parameters.values())
    first = parameters[0].name if parameters else None
    if first is None:
        raise TypeError(f"{name}() takes no argument. Give it the batch size as its first one.")
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    has_too_many = not any(p.kind is p.VAR_POSITIONAL for p in parameters) and len(args) >= len(positional)
    if first in kwargs or has_too_many:
        given = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
        raise TypeError(
            f"{name}({given}): find_executable_batch_size passes {first!r} itself. Leave it out of the call."
        )


def _tell(function: Callable[..., Any], size: int, failed: list[int]) -> None:
    if failed and rank() == 0:
        name = getattr(function, "__name__", repr(function))
        logger.warning("%s ran with batch size %d; %s ran out of memory.", name, size, ", ".join(map(str, failed)))
