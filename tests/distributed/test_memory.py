"""Memory and the search for a batch size. F: facts of semantics about Accelerate; B: cases."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loopwright.distributed.errors import ConfigError, PeerFailedError
from loopwright.distributed.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)

from .failing import ended, start

TEXT = "CUDA out of memory."


def needs(limit: int, tried: list[int], error: Exception | None = None) -> Callable[..., int]:
    """A function that runs out of memory above a batch size."""

    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > limit:
            raise error or RuntimeError(TEXT)
        return batch_size

    return train


def halve(size: int) -> int:
    return size // 2


def test_b85_both_forms_halve() -> None:
    tried: list[int] = []
    assert find_executable_batch_size(needs(8, tried), starting_batch_size=64)() == 8
    assert tried == [64, 32, 16, 8]
    tried.clear()
    assert find_executable_batch_size(starting_batch_size=64)(needs(8, tried))() == 8
    assert tried == [64, 32, 16, 8]


def test_b85_a_reducer_is_kept_in_both_forms() -> None:
    tried: list[int] = []
    options = {"starting_batch_size": 64, "reduce_batch_size_fn": halve}
    assert find_executable_batch_size(needs(8, tried), **options)() == 8
    assert find_executable_batch_size(**options)(needs(8, tried))() == 8
    assert tried == [64, 32, 16, 8] * 2


def test_a_reducer_may_keep_its_own_count() -> None:
    sizes = iter([20, 10])
    tried: list[int] = []
    found = find_executable_batch_size(needs(10, tried), 64, lambda: next(sizes))()
    assert (found, tried) == (10, [64, 20, 10])


def test_b85_f50_nothing_fits() -> None:
    tried: list[int] = []
    with pytest.raises(RuntimeError, match=r"No executable batch size found, reached zero\. Tried 10, 5, 2, 1\."):
        find_executable_batch_size(needs(0, tried), starting_batch_size=10)()
    assert tried == [10, 5, 2, 1]
    with pytest.raises(RuntimeError, match=r"No executable batch size found, reached zero\. It began at 0\."):
        find_executable_batch_size(needs(8, tried), starting_batch_size=0)()


@pytest.mark.parametrize("error", [ValueError(TEXT), RuntimeError("shapes differ"), RuntimeError(TEXT, "more")])
def test_b85_other_errors_pass_through_at_once(error: Exception) -> None:
    tried: list[int] = []
    with pytest.raises(type(error), match=r"shapes differ|out of memory"):
        find_executable_batch_size(needs(8, tried, error), starting_batch_size=64)()
    assert tried == [64]


def test_f51_each_call_begins_anew_and_says_what_it_found(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[int] = []
    search = find_executable_batch_size(needs(30, tried), starting_batch_size=64)
    with caplog.at_level(logging.WARNING):
        assert (search(), search()) == (16, 16)
    assert tried == [64, 32, 16] * 2
    assert caplog.messages == ["train ran with batch size 16; 64, 32 ran out of memory."] * 2
    assert search.__name__ == "train"


def test_the_factor_can_be_chosen() -> None:
    tried: list[int] = []
    find_executable_batch_size(needs(58, tried), factor=0.9)()
    assert tried == [128, 115, 103, 92, 82, 73, 65, 58]
    with pytest.raises(ConfigError, match=r"factor=1\.0\)\. Expected a number between 0 and 1"):
        find_executable_batch_size(needs(1, []), factor=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"starting_batch_size": "8"}, r"\(starting_batch_size='8'\)\. Expected an integer >= 0\. It counts samples"),
        ({"starting_batch_size": 8.5}, r"\(starting_batch_size=8\.5\)\. Expected an integer"),
        ({"reduce_batch_size_fn": 3}, r"\(reduce_batch_size_fn=3\)\. Expected a function that gives the next size"),
    ],
)
def test_arguments_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_executable_batch_size(**options)(needs(1, []))


def test_a_reducer_has_to_reduce() -> None:
    with pytest.raises(ConfigError, match=r"reduce_batch_size_fn gave 64 after 64\. It has to give a smaller size"):
        find_executable_batch_size(needs(1, []), 64, lambda size: size)()


def test_arguments_pass_through_and_the_batch_size_is_not_one_of_them() -> None:
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int, rate: float, *, name: str = "") -> tuple[int, float, str]:
        return batch_size, rate, name

    assert train(0.1, name="a") == (4, 0.1, "a")
    with pytest.raises(TypeError, match=r"train\(64, 0\.1\): find_executable_batch_size passes 'batch_size' itself"):
        train(64, 0.1)
    with pytest.raises(TypeError, match=r"train\(0\.1, batch_size=64\): find_executable_batch_size passes"):
        train(0.1, batch_size=64)
    with pytest.raises(TypeError, match=r"nothing\(\) takes no argument\. Give it the batch size as its first one"):

        @find_executable_batch_size
        def nothing() -> None: ...

        nothing()


def test_what_failed_is_gone_before_the_next_try() -> None:
    class Big:
        """Stands for the tensors of a try."""

    alive: list[weakref.ref[Big]] = []

    def train(batch_size: int) -> int:
        gc.collect()
        assert all(reference() is None for reference in alive)
        big = Big()
        alive.append(weakref.ref(big))
        if batch_size > 1:
            raise RuntimeError(TEXT)
        return batch_size

    assert find_executable_batch_size(train, starting_batch_size=4)() == 1
    assert len(alive) == 3


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA: no more"), True),
        (RuntimeError("HIP out of memory. Tried to allocate"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("out of memory"), False),
        (RuntimeError(3), False),
        (MemoryError(" out of memory."), False),
        (PeerFailedError("process 1 failed first: OutOfMemoryError: CUDA out of memory. Tried"), False),
    ],
)
def test_which_errors_say_that_memory_is_used_up(error: BaseException, is_memory: bool) -> None:
    assert should_reduce_batch_size(error) is is_memory


def test_memory_is_released() -> None:
    class Node:
        """Part of a cycle, which only the collector frees."""

    first: Any = Node()
    first.other = Node()
    first.other.other = first
    gone = weakref.ref(first)
    second = "text"
    (first, second) = release_memory(first, second)
    assert (first, second) == (None, None)
    gc.collect()
    assert gone() is None
    assert release_memory() == []
    clear_device_cache()


def _search(limits: list[int], fails: str = "", start: int = 64) -> Any:
    r = dist.get_rank()
    tried: list[int] = []
    kept: list[weakref.ref[Any]] = []

    @find_executable_batch_size(starting_batch_size=start)
    def train(batch_size: int) -> Any:
        tried.append(batch_size)
        result = torch.zeros(batch_size)
        kept.append(weakref.ref(result))
        if batch_size == 16 and fails in (str(r), "all"):
            raise ValueError(f"boom on {r}")
        if batch_size > limits[r]:
            raise torch.OutOfMemoryError(TEXT)
        return result

    try:
        text = str(len(train()))
    except (RuntimeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    # Results of sizes that did not fit everywhere are gone.
    alive = [size for size, result in zip(tried, kept, strict=True) if result() is not None]
    return tried, text, alive


def test_f49_all_processes_find_the_same_size(two_processes: Any) -> None:
    assert two_processes(_search, [32, 8]) == [([64, 32, 16, 8], "8", [])] * 2
    assert two_processes(_search, [100, 100]) == [([64], "64", [])] * 2
    nothing = "RuntimeError: No executable batch size found, reached zero. Tried 2, 1."
    assert two_processes(_search, [0, 100], "", 2) == [([2, 1], nothing, [])] * 2


def test_f50_another_error_ends_the_search_on_all_processes(two_processes: Any) -> None:
    first, second = two_processes(_search, [64, 20], "1")
    assert second == ([64, 32, 16], "ValueError: boom on 1", [])
    assert first[0] == [64, 32, 16]
    assert first[1].startswith(
        "PeerFailedError: find_executable_batch_size: process 1 failed: ValueError: boom on 1. That says nothing"
    )
    assert [text for _, text, _ in two_processes(_search, [20, 64], "all")] == [
        "ValueError: boom on 0", "ValueError: boom on 1",
    ]  # fmt: skip
    assert two_processes(_search, [64, 64])[1][1] == "64"  # and they are still together


# The processes join within the first try, as a Trainer lets them: `joining.py OPERATION LIMIT OF PROCESS 0 AND 1`.
JOINING = """
import os, sys
import torch
import torch.distributed as dist
from loopwright.distributed import attempts, group, watch
from loopwright.distributed.memory import find_executable_batch_size
from loopwright.distributed.process import ProcessState

attempts.PATIENCE_SECONDS = 1.0
tried, limits = [], list(map(int, sys.argv[2:]))

@find_executable_batch_size(starting_batch_size=8)
def train(batch_size):
    tried.append(batch_size)
    is_early = sys.argv[1] == "early"
    if is_early and batch_size > limits[int(os.environ["RANK"])]:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    state = ProcessState(cpu=True)
    if batch_size > limits[state.process_index] and not is_early:
        error = torch.OutOfMemoryError("CUDA out of memory.")
        if sys.argv[1] == "leaves":
            watch.leave_group_after(error)
        raise error
    if sys.argv[1] in ("meets", "leaves"):
        with watch.collective("backward"):
            dist.all_reduce(torch.ones(1))
    return batch_size

try:
    print(train(), tried)
except (RuntimeError, torch.OutOfMemoryError) as error:
    print(type(error).__name__, error, *getattr(error, "__notes__", ()), tried)
    raise
"""


@pytest.fixture
def joining(tmp_path: Path) -> Callable[..., Any]:
    """Runs that script in two processes."""
    script = tmp_path / "joining.py"
    script.write_text(JOINING)
    return lambda *arguments: ended(start(*arguments, count=2, folder=tmp_path, script=script))


def test_processes_that_join_within_the_first_try_find_the_same_size(joining: Callable[..., Any]) -> None:
    run = joining("alone", "4", "2")
    assert (run.codes, run.outputs) == ([0, 0], ["2 [8, 4, 2]\n"] * 2), run.errors
    run = joining("meets", "8", "8")
    assert (run.codes, run.outputs) == ([0, 0], ["8 [8]\n"] * 2), run.errors


def test_memory_that_runs_out_on_one_before_they_join(joining: Callable[..., Any]) -> None:
    run = joining("early", "8", "4")
    assert run.codes == [1, 1], run.errors
    for output in run.outputs:
        assert output.startswith(
            "DistributedError find_executable_batch_size: the processes have tried the sizes [8, 4]"
        )


@pytest.mark.slow
def test_memory_that_runs_out_beside_a_collective_ends_all(joining: Callable[..., Any]) -> None:
    run = joining("meets", "8", "4")
    assert run.codes == [1, 1], run.errors
    assert run.outputs[1].startswith(
        "DistributedError find_executable_batch_size: memory ran out in process 1, while process 0 waits for it in "
        "'backward', which can't be taken back"
    )
    assert run.outputs[0].startswith("PeerFailedError process 1 failed first")
    run = joining("leaves", "8", "4")
    assert run.codes == [1, 1], run.errors
    assert run.outputs[1].startswith("OutOfMemoryError CUDA out of memory. find_executable_batch_size: memory ran out")
    assert run.outputs[1].endswith("Begin with a smaller size. [8]\n")
    assert run.outputs[0].startswith("PeerFailedError process 1 failed first")
