"""The loops by name; each is imported when it first runs, and only where its library is installed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from ticks import Ticker
from workloads import Workload


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One way to train: a function of a module beside this one."""

    name: str
    module: str
    function: str
    package: str = "torch"
    """What must be installed."""
    needs_accumulation: bool = False
    """Whether it differs from the raw loop only where several batches make one step."""

    def is_installed(self) -> bool:
        """Whether the library is there."""
        return find_spec(self.package) is not None

    def run(self, work: Workload, ticker: Ticker, steps: int) -> None:
        """Train `work` for `steps` optimizer steps; what the library prints goes nowhere."""
        function = getattr(import_module(self.module), self.function)
        with _silent_terminal():
            function(work, ticker, steps)


def chosen(loops: Sequence[Loop], words: str) -> list[Loop]:
    """The installed loops whose name has one of the words (all where there is none), and always the first one."""
    asked = [word.strip().lower() for word in words.split(",") if word.strip()]
    named = [loop for loop in loops[1:] if not asked or any(word in loop.name.lower() for word in asked)]
    return [loops[0], *(loop for loop in named if loop.is_installed())]


class _NullTerminal(io.TextIOWrapper):
    """Says that it is a terminal, so that progress bars draw, and shows nothing."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def _silent_terminal() -> Iterator[None]:
    with open("/dev/null", "wb") as nowhere:
        terminal = _NullTerminal(nowhere, write_through=True)
        with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
            yield


RAW = "raw PyTorch"
BARE = "Loopwright Trainer, bare"
LOOPS = (
    Loop(name=RAW, module="raw_loop", function="run_raw"),
    Loop(name="raw PyTorch, again", module="raw_loop", function="run_raw"),
    Loop(name=f"{RAW}, window fetched first", module="raw_loop", function="run_raw_windows", needs_accumulation=True),
    Loop(name=BARE, module="own_loops", function="run_trainer_bare"),
    Loop(name="Loopwright Trainer, defaults + log", module="own_loops", function="run_trainer_defaults"),
    Loop(name="Loopwright Accelerator", module="own_loops", function="run_accelerator"),
    Loop(name="Ignite", module="peer_loops", function="run_ignite", package="ignite"),
    Loop(name="Fabric", module="peer_loops", function="run_fabric", package="lightning"),
    Loop(name="Accelerate", module="peer_loops", function="run_accelerate", package="accelerate"),
    Loop(name="Lightning, all off", module="peer_loops", function="run_lightning_bare", package="lightning"),
    Loop(name="Lightning, defaults + log", module="peer_loops", function="run_lightning_defaults", package="lightning"),
)
ADDITIONS = (
    Loop(name="a no-op callback", module="own_loops", function="run_trainer_callback"),
    Loop(name="a callback with one empty event", module="own_loops", function="run_trainer_hook"),
    Loop(name="self.log(on_step, on_epoch)", module="own_loops", function="run_trainer_log"),
)
