"""What processes do with each other's data. F: facts of semantics about Accelerate; B: cases."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from loopwright.distributed.errors import ConfigError
from loopwright.distributed.operations import (
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    pad_input_tensors,
    reduce,
    wait_for_everyone,
)


@pytest.mark.parametrize("operation", [gather, broadcast, reduce, pad_across_processes])
def test_f36_nested_tensors_come_back_as_they_were(operation: Any) -> None:
    data = {"a": torch.arange(3), "b": (torch.tensor(1.5), [torch.ones(2, 2)])}
    out = operation(data)
    assert out["a"].tolist() == [0, 1, 2]
    assert out["b"][0].item() == 1.5
    assert out["b"][1][0].shape == (2, 2)


@pytest.mark.parametrize("operation", [gather, broadcast, reduce, pad_across_processes])
@pytest.mark.parametrize("leaf", ["text", 3, None])
def test_f34_f36_other_leaves_are_an_error(operation: Any, leaf: Any) -> None:
    with pytest.raises(TypeError, match=rf"{operation.__name__} got a {type(leaf).__name__} .*Expected tensors"):
        operation([torch.ones(1), leaf])


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_f35_reduce_gives_new_tensors(reduction: str) -> None:
    tensor = torch.tensor([1, 2])
    out = reduce(tensor, reduction)
    assert out is not tensor
    assert out.tolist() == [1, 2]


def test_f35_an_unknown_reduction_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"reduction='meen'\) is unknown\. Did you mean 'mean'\? Accepted: mean, none, sum"
    ):
        reduce(torch.ones(1), "meen")


def test_f37_objects() -> None:
    objects = ["a", {"b": 1}]
    assert gather_object(objects) is objects
    assert broadcast_object_list(objects) is objects
    with pytest.raises(TypeError, match=r"broadcast_object_list got a tuple\. Expected a list"):
        broadcast_object_list(("a",))  # type: ignore[arg-type]
    wait_for_everyone()


def test_sources_and_objects_are_checked_in_one_process_as_well() -> None:
    with pytest.raises(ConfigError, match=r"broadcast\(from_process=1\): there are 1 processes.*from 0 to 0"):
        broadcast(torch.ones(1), from_process=1)
    with pytest.raises(ConfigError, match=r"broadcast_object_list\(from_process=-1\)"):
        broadcast_object_list([1], from_process=-1)
    with pytest.raises(TypeError, match=r"gather_object got a int \(3\)\. Expected a list"):
        gather_object(3)
    with pytest.raises(TypeError, match=r"(?s)reduce got a sparse tensor .*at \[0\]\. Expected tensors"):
        reduce([torch.eye(2).to_sparse()])


@pytest.mark.parametrize(
    ("batch", "processes", "size"), [(4, 2, 4), (5, 2, 6), (5, 4, 8), (3, 4, 4), (1, 3, 3), (4, 4, 4)]
)
def test_batches_are_filled_up_for_all_processes(batch: int, processes: int, size: int) -> None:
    data = {"x": torch.ones(batch, 2), "other": torch.ones(9)}
    out = pad_input_tensors(data, batch, processes)
    assert out["x"].shape == (size, 2)
    assert out["x"].sum().item() == 2 * batch
    assert out["x"][:batch].eq(1).all()
    assert out["other"] is data["other"]
    with pytest.raises(ConfigError, match=r"pad_input_tensors\(batch_size=0, num_processes=2\)\. Expected integers"):
        pad_input_tensors(data, 0, 2)


class Pair(NamedTuple):
    """A named tuple of tensors."""

    first: Any
    second: Any


@dataclass(frozen=True)
class Output:
    """A dataclass of tensors."""

    loss: Any
    parts: list[Any] = field(default_factory=list)


def error_of(function: Callable[[], Any]) -> tuple[str, str]:
    """The kind and the text of the error that a call ends in."""
    try:
        function()
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "none", ""


def _gather_nested() -> Any:
    r = dist.get_rank()
    data = {
        "scalar": torch.tensor(r),  # F36: without dimensions
        "pair": Pair(torch.tensor([[r, 10 + r]]), [torch.tensor([True, r == 1])]),
        "output": Output(torch.tensor([0.5 + r], requires_grad=True), [torch.empty(0, 3)]),
        "ordered": OrderedDict(b=torch.arange(6.0).view(2, 3).t() + r),  # not contiguous
        "default": defaultdict(list, a=torch.tensor([1 + r], dtype=torch.int16)),
    }
    if r == 1:  # the order of keys does not matter
        data = {key: data[key] for key in reversed(data)}
    out = gather(data)
    return (
        {type(value).__name__ for value in out.values()} == {"Tensor", "Pair", "Output", "OrderedDict", "defaultdict"},
        out["default"].default_factory is list and out["default"]["a"].dtype is torch.int16,
        out["scalar"].tolist(),
        out["pair"].first.tolist(),
        out["pair"].second[0].tolist(),
        out["output"].loss.tolist(),
        out["output"].parts[0].shape == (0, 3) and not out["output"].loss.requires_grad,
        out["ordered"]["b"].tolist(),
        out["default"]["a"].tolist(),
    )


def test_f36_b106_gather_joins_nested_tensors(two_processes: Any) -> None:
    columns = [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    expected = (
        True, True, [0, 1], [[0, 10], [1, 11]], [True, False, True, True], [0.5, 1.5], True,
        columns + [[a + 1, b + 1] for a, b in columns], [1, 2],
    )  # fmt: skip
    assert two_processes(_gather_nested) == [expected, expected]


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def _every_dtype() -> Any:
    r = dist.get_rank()
    bad = []
    for dtype in DTYPES:
        own = torch.tensor([r, 1]).to(dtype)
        if (
            gather(own).float().tolist() != [0, 1, 1, 1]
            if not dtype.is_complex
            else gather(own).real.tolist() != [0, 1, 1, 1]
        ):
            bad.append(f"gather {dtype}")
        sent = broadcast(own.clone(), from_process=1)
        if not torch.equal(sent.to(torch.complex64), torch.ones(2, dtype=torch.complex64)) or sent.dtype != dtype:
            bad.append(f"broadcast {dtype}")
    large = torch.full((300_000,), r + 0.5)  # more than is sent together with others
    out = gather([large, large.to(torch.int8), torch.view_as_complex(torch.tensor([[1.0, r]])).conj()])
    large_sum = reduce(large, "sum")
    return (
        bad,
        [out[0].view(2, -1).unique(dim=1).tolist(), out[1].sum().item(), out[2].tolist()],
        [large_sum.unique().tolist(), reduce(torch.full((300_000,), r == 1), "sum").all().item()],
    )


def test_b106_every_type_and_size_is_sent(two_processes: Any) -> None:
    expected = ([], [[[0.5], [1.5]], 300_000, [1 + 0j, 1 - 1j]], [[2.0], True])
    assert two_processes(_every_dtype) == [expected, expected]


def _mismatches() -> list[tuple[str, str]]:
    r = dist.get_rank()
    one = torch.ones(1)
    return [
        error_of(lambda: gather((one, 1))),
        error_of(lambda: gather([one, "text" if r else one])),
        error_of(lambda: gather(torch.ones(2, 3 + 2 * r))),
        error_of(lambda: gather({"a": one, "b": torch.ones(1, dtype=torch.float64 if r else torch.float32)})),
        error_of(lambda: gather({"a": one} if r else {"a": one, "b": [one]})),
        error_of(lambda: gather([torch.ones(1 + r) for _ in range(7)])),
        error_of(lambda: pad_across_processes(torch.ones(2) if r else torch.ones(2, 2))),
        error_of(lambda: reduce({"a": torch.ones(2, dtype=torch.int64)}, "mean")),
        error_of(lambda: copy_tensor_to_devices(one)),
        error_of(lambda: copy_tensor_to_devices(None)),
        error_of(lambda: gather_object(3 if r else ["a"])),
        error_of(lambda: gather_object([threading.Lock()] if r else ["a"])),
        error_of(lambda: broadcast_object_list([threading.Lock()], from_process=1)),
        error_of(lambda: pad_across_processes([3 if r else one])),
        error_of(lambda: copy_tensor_to_devices(3 if r else None)),  # type: ignore[arg-type]
        error_of(lambda: gather(torch.nested.nested_tensor([one], layout=torch.jagged) if r else one)),
        error_of(lambda: reduce(one.to(torch.float8_e5m2))),
        ("sum", str(gather(torch.tensor([r])).tolist())),  # and the processes are still together
    ]


def test_f38_b106_what_does_not_fit_together_is_an_error_on_every_process(two_processes: Any) -> None:
    first, second = two_processes(_mismatches)
    differing = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    assert not differing
    kinds = [kind for kind, _ in first]
    assert kinds == [
        "TypeError", "TypeError", *["ShapeMismatchError"] * 5, *["DistributedError"] * 3, *["TypeError"] * 7, "sum",
    ]  # fmt: skip
    texts = [text for _, text in first]
    assert texts[0].startswith("gather got a int (1) at [1]. Expected tensors")
    assert "process 1: gather got a str ('text') at [1]. Expected tensors" in texts[1]
    assert "- Process 0: [2, 3] float32 on cpu\n- Process 1: [2, 5] float32 on cpu" in texts[2]
    assert "Operation: gather" in texts[2]
    assert "- Process 0: ['b'] [1] float32 on cpu\n- Process 1: ['b'] [1] float64 on cpu" in texts[3]
    assert "- Process 0: ['b'][0] [1] float32 on cpu\n- Process 1: ['b'][0] nothing" in texts[4]
    assert texts[5].endswith("(2 more tensors differ)")
    assert "- Process 0: [2, 2]\n- Process 1: [2]" in texts[6]
    assert "got a tensor of torch.int64 at ['a'], which holds no fractions" in texts[7]
    assert "got a tensor on the processes [0, 1] of 2" in texts[8]
    assert "got a tensor on the processes [] of 2" in texts[9]
    assert "process 1: TypeError: gather_object got a int (3)" in texts[10]
    assert "process 1: TypeError: cannot pickle" in texts[11]
    assert "broadcast_object_list(from_process=1) got what can't be sent" in texts[12]
    assert "process 1: TypeError: pad_across_processes got a int (3) at [0]" in texts[13]
    assert "process 1: TypeError: copy_tensor_to_devices got a int (3)" in texts[14]
    assert "process 1: gather got a nested tensor" in texts[15]
    assert "reduce got a tensor of torch.float8_e5m2, which torch can't add up. Convert it" in texts[16]
    assert texts[17] == "[0, 1]"


def _unlike() -> list[tuple[str, str]]:
    """`broadcast` and `reduce` of small tensors, which travel with their description, and of large ones."""
    r = dist.get_rank()
    found = []
    for size in (1, 5000):
        for operation in (broadcast, reduce):
            found.append(error_of(lambda o=operation, s=size: o(torch.ones(s + r))))
            found.append(error_of(lambda o=operation, s=size: o([torch.ones(s), 1 if r else torch.ones(1)])))
            found.append(("same", str(operation(torch.ones(size + 1))[:2].tolist())))
    found.append(error_of(lambda: reduce(torch.ones(1 if r else 5000))))  # one is small, the other is not
    found.append(error_of(lambda: broadcast(torch.ones(2), from_process=r)))
    found.append(error_of(lambda: reduce(torch.ones(2), "mean" if r else "sum")))
    found.append(error_of(lambda: gather(torch.ones(1)) if r else reduce(torch.ones(1))))
    return found


def test_f38_no_collective_sends_what_differs(two_processes: Any) -> None:
    first, second = two_processes(_unlike)
    assert first == second
    cases, others = [first[index : index + 3] for index in range(0, 12, 3)], first[12:]
    operations = ["broadcast(from_process=0)", "reduce(reduction='mean')"] * 2
    for size, operation, (shapes, kinds, same) in zip((1, 1, 5000, 5000), operations, cases, strict=True):
        assert shapes[0] == "ShapeMismatchError"
        assert f"Operation: {operation}\n" in shapes[1]
        assert f"- Process 0: [{size}] float32 on cpu\n- Process 1: [{size + 1}] float32 on cpu" in shapes[1]
        assert kinds[0] == "TypeError"
        assert f"process 1: {operation} got a int (1) at [1]. Expected tensors" in kinds[1]
        assert same == ("same", "[1.0, 1.0]")
    assert [kind for kind, _ in others] == ["ShapeMismatchError", *["DistributedError"] * 3]
    assert "- Process 0: [5000] float32 on cpu\n- Process 1: [1] float32 on cpu" in others[0][1]
    assert "process 0: broadcast(from_process=0); process 1: broadcast(from_process=1)" in others[1][1]
    assert "process 0: reduce(reduction='sum'); process 1: reduce(reduction='mean')" in others[2][1]
    assert "process 0: reduce(reduction='mean'); process 1: gather" in others[3][1]


def _sizes() -> list[Any]:
    """Around the size up to which tensors travel with their description: 944 bytes."""
    r = dist.get_rank()
    found: list[Any] = []
    for size in (943, 944, 945):
        own = torch.full((size,), 1 + r, dtype=torch.uint8)
        found.append([each.tolist() for each in (gather(own), reduce(own, "sum"), broadcast(own.clone(), 1))])
    steep = (torch.arange(10.0) + r)[1::10]  # one element, whose stride is 10
    found.append([each.tolist() for each in (gather(steep), reduce(steep, "sum"), broadcast(steep, 1))])
    mixed = {"a": torch.tensor([r], dtype=torch.int8), "b": torch.tensor(2.5 + r, dtype=torch.float64), "c": []}
    found += [gather(mixed), reduce(mixed, "sum"), broadcast(mixed, 1), mixed, reduce([])]
    return found


def test_f34_to_f37_small_tensors_are_as_exact_as_large_ones(two_processes: Any) -> None:
    for found in two_processes(_sizes):
        for size, values in zip((943, 944, 945), found, strict=False):
            assert values == [[1] * size + [2] * size, [3] * size, [2] * size]
        assert found[3] == [[1.0, 2.0], [3.0], [2.0]]
        plain = [{key: value.tolist() if key != "c" else value for key, value in each.items()} for each in found[4:8]]
        assert plain == [
            {"a": [0, 1], "b": [2.5, 3.5], "c": []},
            {"a": [1], "b": 6.0, "c": []},
            {"a": [1], "b": 3.5, "c": []},
            {"a": [1], "b": 3.5, "c": []},  # filled in place
        ]
        assert found[8] == []


def _f34_f35_f37() -> Any:
    r = dist.get_rank()
    ragged = torch.zeros(1 + r, dtype=torch.int64)
    own = torch.tensor([1.0, 2.0]) * (1 + r)
    view = torch.full((2, 2), float(r)).t()[0]
    filled = torch.tensor([r])
    objects = ["a", {"r": r}] if r else [None, None, None]
    same_list = broadcast_object_list(objects, from_process=1) is objects
    big = broadcast_object_list([torch.full((9000,), r)])
    nested = pad_across_processes({"a": ragged, "b": (torch.ones(2, 1 + r),)}, dim=-1, pad_index=-1)
    whole = torch.ones(1 + r)
    return {
        "f34": [
            pad_across_processes(ragged).tolist(),
            pad_across_processes(ragged, pad_index=-1).tolist(),
            pad_across_processes(ragged, pad_index=9, pad_first=True).tolist(),
        ],
        "f34 nested": [nested["a"].tolist(), nested["b"][0].tolist()],
        "f34 no such dimension": pad_across_processes(whole, dim=1) is whole,
        "f35": [reduce(own, "sum").tolist(), reduce(own).tolist(), reduce(own, "none").tolist(), own.tolist()],
        "f35 scalar": [reduce(torch.tensor(r), "sum").item(), reduce(torch.tensor(r == 1), "sum").item()],
        "f36": [gather_object(["0", r]), gather_object({f"k{r}": 1}), gather_object([])],
        "f37": [broadcast(filled, from_process=1).tolist(), filled.tolist(), broadcast(view).tolist()],
        "f37 objects": [objects, same_list, big[0].unique().tolist(), big[0].shape[0]],
        "copy": copy_tensor_to_devices(torch.tensor([[1.5, 2.5]]) if r else None).tolist(),
    }


def test_f34_to_f37_on_two_processes(two_processes: Any) -> None:
    first, second = two_processes(_f34_f35_f37)
    for r, out in enumerate((first, second)):
        assert out["f34"] == ([[0, 0], [0, 0], [0, 0]] if r else [[0, 0], [0, -1], [9, 0]])
        assert out["f34 nested"] == ([[0, 0], [[1, 1], [1, 1]]] if r else [[0, -1], [[1, -1], [1, -1]]])
        assert out["f34 no such dimension"]
        own = [2.0, 4.0] if r else [1.0, 2.0]
        assert out["f35"] == [[3.0, 6.0], [1.5, 3.0], own, own]
        assert out["f35 scalar"] == [1, True]
        assert out["f36"] == [["0", 0, "0", 1], ["k0", "k1"], []]
        assert out["f37"] == [[1], [1], [0.0, 0.0]]
        assert out["f37 objects"] == [["a", {"r": 1}], True, [0], 9000]
        assert out["copy"] == [[1.5, 2.5]]
