"""`loopwright verify-resume`: prove that a task of one's own goes on after a stop as if nothing had happened."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ..checkpoint.reading import open_checkpoint
from ..distributed.errors import ConfigError, LoopwrightError
from .commands import check_config
from .proof import MAY_VARY, PARTS, Difference, Evidence, differences
from .proof_leg import Leg, StopKind
from .request import Request, read_request

USAGE = """\
usage: loopwright verify-resume FILE.yaml [--steps 30] [--stops 3] [--seed 0] [--key value ...]

Trains the task of FILE.yaml, without leaving anything in your folders: once in one go, once more to see what differs by
itself, and once in legs. A leg is stopped at a random point (inside an epoch or an accumulation window, inside a
validation, by a kill behind a checkpoint), and the next one goes on in a new process. At the end the order of samples,
tracker rows, weights, optimizers, random states, counters and callbacks have to be equal bit for bit; otherwise the
first difference is named, and the exit code is 1.

  --steps N  optimizer steps to train  (default 30, or fewer where the file's own limits end the run)
  --stops N  how often it is stopped   (default 3)
  --seed N   of the random points, and of the run where the file has no trainer.seed  (default 0)
"""
COMMAND = "verify-resume"
DEFAULTS = {"steps": 30, "stops": 3, "seed": 0}
KINDS: tuple[StopKind, ...] = ("stop", "validation", "kill")
_SAYS = {
    "stop": "stopped at the next step boundary",
    "validation": "stopped inside the next validation",
    "kill": "killed behind its checkpoint",
}


class LegFailedError(LoopwrightError, RuntimeError):
    """A leg ended by an error of its own."""


def run_verify_resume(arguments: Sequence[str]) -> int:
    """Compare a run that is stopped and resumed with one that is not. Returns 0 where they are equal, else 1.

    Raises:
        ConfigError: the arguments, the file or its values can't be used.
    """
    request = read_request(COMMAND, arguments)
    if "help" in request.switches:
        print(USAGE, end="")
        return 0
    if request.file is None:
        raise ConfigError(f"no file is given. Expected: loopwright {COMMAND} FILE.yaml [--steps 30] [--stops 3].")
    steps, stops, seed = (_number(request, name, least) for name, least in (("steps", 2), ("stops", 1), ("seed", 0)))
    flags = [[key, text] for key, text in request.flags]
    if not any(key == "trainer.seed" for key, _ in request.flags):
        flags = [["trainer.seed", str(seed)], *flags] if _has_no_seed(request) else flags
    check_config("fit", [str(request.file), *(f"--{key}={text}" for key, text in flags)])
    folder = Path(tempfile.mkdtemp(prefix="verify-resume-"))
    first = Leg(file=str(request.file.resolve()), flags=flags, steps=steps, folder=str(folder / "whole"), name="end")
    try:
        is_equal = _prove(first, folder, stops, random.Random(seed))
    except LegFailedError as error:
        print(f"{error}\nIts files are in {folder}.")
        return 1
    if is_equal:
        shutil.rmtree(folder)
    else:
        print(f"The files of all runs are in {folder}.")
    return int(not is_equal)


def _has_no_seed(request: Request) -> bool:
    from .sources import Sources

    assert request.file is not None
    trainer = Sources.read(request.file, request.flags, {}).tree.get("trainer")
    return not isinstance(trainer, dict) or "seed" not in trainer


def _number(request: Request, name: str, least: int) -> int:
    text = request.options.get(name, str(DEFAULTS[name]))
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"--{name}={text}. Expected an integer >= {least}.")
    return int(text)


def _prove(first: Leg, folder: Path, num_stops: int, choices: random.Random) -> bool:
    """All runs; says what is found. Returns whether it is as it should be."""
    _run(first)
    whole = Evidence([first])
    _say("in one go", f"{len(whole.batches)} batches, {whole.checkpoint.manifest.progress['step']} steps")
    again = replace(first, folder=str(folder / "again"))
    _run(again)
    varying = _varying(whole, Evidence([again]))
    if varying is None:
        return False
    legs = [replace(first, folder=str(folder / "legs"), name="leg-1")]
    for number, (kind, at) in enumerate(draw_stops(whole, num_stops, choices), start=1):
        legs[-1] = replace(legs[-1], stop=kind, stop_at=at)
        _run(legs[-1])
        path = legs[-1].checkpoint
        step = open_checkpoint(path, verify="sizes").manifest.progress["step"]
        _say(f"leg {number}", f"after batch {at}: {_SAYS[kind]}, at step {step}")
        legs.append(replace(legs[-1], name=f"leg-{number + 1}", resume_from=str(path), stop=None))
    _run(legs[-1])
    _say(f"leg {len(legs)}", "to the end")
    return _report(whole, Evidence(legs), varying)


def _varying(whole: Evidence, again: Evidence) -> dict[str, set[str]] | None:
    """By part, the places in which the run differs from itself; None where it does so in more than what may vary."""
    varying = {part: [*differences(whole, again, part)] for part in PARTS}
    bad = [(part, found[0]) for part, found in varying.items() if found and (part not in MAY_VARY or _is_order(found))]
    if bad:
        print("NOT REPEATABLE: two runs that nobody stopped differ already, so that no resumed one can be equal.")
        _list(bad)
        print("Seed what draws random numbers of its own; trainer.deterministic=true finds operations that vary.")
        return None
    names = sorted({found.path.rpartition(".")[2] for each in varying.values() for found in each})
    if names:
        _say("left out", f"what two runs that nobody stopped differ in: {', '.join(names)}")
    return {part: {found.path for found in each} for part, each in varying.items()}


def _is_order(found: Iterable[Difference]) -> bool:
    """Whether rows came or went, and did not only have another value."""
    return any("." not in each.path for each in found)


def draw_stops(whole: Evidence, count: int, choices: random.Random) -> list[tuple[StopKind, int]]:
    """Random points at which to stop, in their order: how, and after how many batches.

    Raises:
        ConfigError: there are not so many batches.
    """
    total = len(whole.batches)
    if total <= count:
        raise ConfigError(f"--stops={count}: the run has {total} batches. Train more --steps, or stop it less often.")
    points = sorted(choices.sample(range(1, total), count))
    first = choices.randrange(len(KINDS))
    stops: list[tuple[StopKind, int]] = []
    for number, point in enumerate(points):
        kind = KINDS[(first + number) % len(KINDS)]
        before_next = points[number + 1] if number + 1 < count else total
        if kind == "validation" and not any(point <= each < before_next for each in whole.validated_at):
            kind = "stop"
        stops.append((kind, point))
    return stops


def _report(whole: Evidence, legs: Evidence, varying: dict[str, set[str]]) -> bool:
    found = []
    for part in PARTS:
        first = next((each for each in differences(whole, legs, part) if each.path not in varying[part]), None)
        if first is not None:
            found.append((part, first))
    if not found:
        counts = f"{len(whole.batches)} batches, {len(whole.rows)} tracker rows, {len(whole.part('weights'))} tensors"
        print(f"EQUAL bit for bit: {', '.join(PARTS)} ({counts}).")
        return True
    print(f"NOT EQUAL: the resumed run differs. The first difference is in the {found[0][0]}:")
    _list(found)
    equal = [part for part in PARTS if part not in dict(found)]
    if equal:
        print(f"Equal: {', '.join(equal)}.")
    return False


def _list(found: Iterable[tuple[str, Difference]]) -> None:
    for part, difference in found:
        print(f"  {part}: {difference}")


def _say(what: str, text: str) -> None:
    print(f"{what}: {text}", flush=True)


def _run(leg: Leg) -> None:
    """Train a leg in a new process.

    Raises:
        LegFailedError: it ended by an error of its own; shows what it printed.
    """
    folder = Path(leg.folder)
    folder.mkdir(exist_ok=True)
    file = folder / f"{leg.name}.leg.json"
    leg.write(file)
    command = [sys.executable, "-m", f"{__package__}.proof_leg", str(file)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    (folder / f"{leg.name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if not leg.checkpoint.is_dir() or (done.returncode != 0 and leg.stop != "kill"):
        tail = (done.stdout + done.stderr).strip()[-3000:]
        raise LegFailedError(f"A leg failed with exit code {done.returncode}:\n{tail}")
