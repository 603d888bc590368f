"""A progress bar for loops of your own that several processes run."""

from __future__ import annotations

from typing import Any

from .errors import ConfigError
from .launched import find_place


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A progress bar of tqdm, on each machine's main process alone.

    Args:
        args: as tqdm takes them.
        main_process_only: False shows a bar in every process.
        kwargs: as tqdm takes them.
    Raises:
        ConfigError: the first argument is a bool, as it was in old versions of Accelerate.
    """
    from tqdm.auto import tqdm as bar

    if args and isinstance(args[0], bool):
        raise ConfigError(
            f"tqdm({args[0]}, ...): the first argument is what to iterate. Use main_process_only={args[0]}."
        )
    is_off = main_process_only and find_place().local_process_index != 0
    return bar(*args, **{"disable": is_off, **kwargs})
