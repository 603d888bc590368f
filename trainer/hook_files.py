"""Files that hooks write into a checkpoint, before it is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..distributed.atomic import PartialFolder
from ..distributed.exchange import exchange

if TYPE_CHECKING:
    from ..distributed.process import ProcessState


@contextmanager
def files_of_hooks(path: Path, members: Sequence[int], process: ProcessState, *, needed: bool) -> Iterator[Path | None]:
    """A context that gives a folder for files which belong into a checkpoint; gone at its end. Collective if needed.

    It has the checkpoint's own name, since some hooks read the step from it.

    Args:
        path: where the checkpoint will stand.
        members: the processes that save it, the first of which makes the folder.
        process: this one.
        needed: whether there are hooks at all; without them it gives None.
    """
    if not needed:
        yield None
        return
    around = PartialFolder(path.with_name(f"{path.name}.hooks")) if process.process_index == members[0] else None
    try:
        if around is not None:
            (around.path / path.name).mkdir()
        own = "" if around is None else str(around.path / path.name)
        yield Path(own if process.num_processes == 1 else exchange(own, "save_state")[members[0]])
    finally:
        if around is not None:
            around.discard()
