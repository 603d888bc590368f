"""Several processes share the comparing of a checkpoint's files with their checksums, and all say the same."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.checkpoint.finding import newest
from loopwright.checkpoint.hashing import FileEntry
from loopwright.checkpoint.reading import open_checkpoint
from loopwright.checkpoint.verifying import find_damage_together, led_by_first, share_of, verify_share
from loopwright.distributed.errors import CheckpointError
from loopwright.distributed.group import rank

from ..strategies.sharded import fit, loader, make
from ..trainer.trained import build, train

Run = Callable[..., list[Any]]


def test_shares_are_about_as_large_and_have_each_file_once() -> None:
    sizes = {"a": 5, "b": 4, "c": 3, "d": 3, "e": 1, "f": 0}
    files = {name: FileEntry(size, "") for name, size in sizes.items()}
    shares = [share_of(files, index, 2) for index in range(2)]
    assert [sorted(share) for share in shares] == [["a", "d", "f"], ["b", "c", "e"]]
    assert [sum(entry.size_bytes for entry in share.values()) for share in shares] == [8, 8]
    assert share_of(files, 0, 1) == files
    assert [sorted(share_of(files, index, 9)) for index in (5, 6)] == [["f"], []]


def flip(file: Path) -> None:
    """One bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def share_of_second(folder: Path) -> str:
    """The largest file that process 1 of two reads."""
    share = share_of(open_checkpoint(folder).manifest.files, 1, 2)
    return max(share, key=lambda name: share[name].size_bytes)


def told(act: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a function gives, or the error that it raises, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = act()
        except CheckpointError as error:
            result = str(error)
    return result, [str(each.message) for each in caught if "damaged" in str(each.message)]


def save_sharded(folder: str) -> None:
    saver = ModelCheckpoint(1, top_k=-1, directory=Path(folder))
    fit(make(1), loader(12, 2), strategy="fsdp", max_steps=3, callbacks=[saver], max_epochs=None)


def resume_sharded(resume_from: str, folder: str) -> tuple[Any, list[str]]:
    saver = ModelCheckpoint(100, directory=Path(folder), last=False)
    options: dict[str, Any] = {"strategy": "fsdp", "max_steps": 3, "max_epochs": None, "callbacks": [saver]}
    return told(lambda: fit(make(5), loader(12, 2), resume_from=resume_from, **options).resumed_step)


def test_damage_that_the_second_process_finds_is_known_to_both(two_processes: Run, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    two_processes(save_sharded, str(folder))
    path = folder / "step=000003"
    name = share_of_second(path)
    entry = open_checkpoint(path).manifest.files[name]
    flip(path / name)
    (first, _), (second, _) = two_processes(resume_sharded, str(path), str(tmp_path / "none"))
    assert first == second
    assert f"step=000003' is damaged: {name}: expected SHA-256 {entry.sha256}, found " in first
    first, second = two_processes(resume_sharded, "latest", str(folder))
    assert (first[0], second[0]) == (2, 2)
    assert len(first[1]) == 1 and name in first[1][0] and "passed over" in first[1][0]
    assert second[1] == [], "the main process warns"
    flip(path / name)
    assert [each[0] for each in two_processes(resume_sharded, "latest", str(folder))] == [3, 3]


def save_plainly(folder: str) -> None:
    train(build(), epochs=range(1), save_at=(0, 1), path=folder)


def load(folder: str) -> tuple[Any, list[str]]:
    return told(lambda: build(seed=99).accelerator.load_state(folder))


def test_an_accelerator_on_two_processes(two_processes: Run, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    two_processes(save_plainly, str(folder))
    assert [error for error, _ in two_processes(load, str(folder))] == [None, None]
    name = share_of_second(folder)
    flip(folder / name)
    first, second = two_processes(load, str(folder))
    assert first == second
    assert f"is damaged: {name}: expected SHA-256 " in first[0]


def choose(places: list[str]) -> tuple[Any, list[str]]:
    """The newest checkpoint of a folder that each process sees at its own place."""
    with chdir(places[rank()]):

        def act() -> Any:
            found = led_by_first(lambda: newest("saved", kind=None, find_damage=find_damage_together))
            return None if found is None else found.path.name

        return told(act)


def verify(places: list[str]) -> Any:
    """What is wrong with a checkpoint that each process sees at its own place."""
    with chdir(places[rank()]):
        return told(lambda: verify_share(Path("saved/state")))[0]


def test_processes_that_do_not_see_the_folder(two_processes: Run, tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    elsewhere.mkdir()
    two_processes(save_plainly, str(here / "saved" / "state"))
    places = [str(here), str(elsewhere)]
    error = "process 1: 'saved/state' is no checkpoint: it is not there. "
    first, second = two_processes(verify, places)
    assert first == second and first.startswith(error)
    assert two_processes(choose, [str(here)] * 2)[0] == ("state", [])
    (first, _), (second, _) = two_processes(choose, places)
    assert first.startswith(error)
    assert second is None, "it hears of it from the first"


def test_a_copy_on_a_disk_of_its_own_is_read_whole(two_processes: Run, tmp_path: Path) -> None:
    here, copy = tmp_path / "here", tmp_path / "copy"
    two_processes(save_plainly, str(here / "saved" / "state"))
    shutil.copytree(here, copy)
    places = [str(here), str(copy)]
    assert two_processes(verify, places) == [[], []]
    files = open_checkpoint(here / "saved" / "state").manifest.files
    name = next(iter(share_of(files, 0, 2)))  # the first process would read it, if they saw one folder
    flip(copy / "saved" / "state" / name)
    first, second = two_processes(verify, places)
    assert first == second and len(first) == 1
    assert first[0].startswith(f"{name}: expected SHA-256 {files[name].sha256}, found ")
    assert first[0].endswith(" (as process 1 sees it)")
    (copy / "saved" / "state" / name).unlink()
    assert two_processes(verify, places) == [[f"{name}: missing (as process 1 sees it)"]] * 2
