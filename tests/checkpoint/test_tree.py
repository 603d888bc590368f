"""State trees: what comes back is equal and of the same type, and what can't be stored is named."""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from loopwright.checkpoint.memory import _TYPED
from loopwright.checkpoint.scalars import DTYPES
from loopwright.checkpoint.tree import pack, unpack
from loopwright.distributed.errors import CheckpointError


class Colour(enum.Enum):
    RED = "r"
    BLUE = ("b", 1)
    CRIMSON = "r"


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Inside:
    class Kind(enum.Enum):
        A = 1


Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Record:
    value: int = 1


def through_a_file(value: Any) -> Any:
    """Packed, as text and bytes, and back: nothing of the original is left in it."""
    packed = pack(value)
    copies = {name: tensor.detach().resolve_conj().resolve_neg().clone() for name, tensor in packed.tensors.items()}
    return unpack(json.loads(packed.text(), parse_constant=pytest.fail), copies)


def assert_same(found: Any, expected: Any, path: str = "value") -> None:
    kind = type(expected)
    if kind is nn.Parameter:
        kind = Tensor
    assert type(found) is kind, f"{path}: {type(found)} for {kind}"
    if kind is Tensor:
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert bits(found) == bits(expected), path
    elif kind is np.ndarray or isinstance(expected, np.generic):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert found.tobytes() == expected.tobytes(), path
    elif kind is float:
        assert struct.pack("d", found) == struct.pack("d", expected), path
    elif kind is complex:
        assert_same([found.real, found.imag], [expected.real, expected.imag], path)
    elif kind in (list, tuple, deque):
        assert len(found) == len(expected), path
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{path}[{index}]")
    elif isinstance(expected, dict):
        for (key, one), (other_key, other) in zip(found.items(), expected.items(), strict=True):
            assert_same(key, other_key, f"key of {path}")
            assert_same(one, other, f"{path}[{key!r}]")
    else:
        assert found == expected, path


def bits(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


SMALL_VALUES = [
    None, True, False, 0, 1, -1, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**5000, -(7**900),
    0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, -math.nan,
    struct.unpack("d", struct.pack("Q", 0x7FF8000000000123))[0],
    complex(1, -0.0), complex(math.nan, math.inf),
    "", "text", "ünï", "😀", "\ud83d\ude00", "\udcff", "\0\n\"\\", "a" * 70_000,
    b"", b"\x00\xff", bytearray(b"ab"), range(3), range(10, -5, -3), range(2**70),
    Colour.RED, Colour.CRIMSON, Colour.BLUE, Level.LOW, Word.YES, Access.READ, Access.READ | Access.WRITE, Access(0),
    Inside.Kind.A, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool,
    torch.device("cpu"), torch.device("cuda:3"), torch.device("meta"), torch.Size([]), torch.Size([2, 0, 3]),
    np.float64(0.1), np.float32(math.nan), np.int8(-3), np.bool_(True), np.uint64(2**64 - 1), np.str_("né"),
    np.bytes_(b"x"), np.datetime64("2020-02-29T12:00"), np.timedelta64(5, "s"), np.complex64(1j), np.longdouble(1) / 3,
]  # fmt: skip
CONTAINERS = [
    [], (), {}, set(), frozenset(), [[]], ([],), {"a": {}}, {"": 1}, {"$": 1}, {"$": "tensor", "in": "x"}, {1: 2},
    {None: 1, True: 2, 2.5: 3, (1, (2,)): 4, "x": 5, b"k": 6, Colour.RED: 7, frozenset({1}): 8, math.inf: 9},
    {"\ud800": 1}, {"é": 1, "b": 2, "a": 3}, OrderedDict([("b", 1), ("a", 2)]), OrderedDict(), Counter("abca"),
    defaultdict(list, {"a": [1]}), defaultdict(None, {1: 2}), defaultdict(float), deque([1, 2], 5), deque([[]]),
    {1, "1", 1.5, None, (1, 2)}, frozenset({"a", frozenset({1})}), [1, [2, (3, {"k": {4, 5}})]],
]  # fmt: skip


@pytest.mark.parametrize("value", SMALL_VALUES, ids=range(len(SMALL_VALUES)))
def test_small_values_come_back_equal_and_of_their_types(value: Any) -> None:
    assert_same(through_a_file(value), value)
    assert_same(through_a_file({"a": [value, (value,)]}), {"a": [value, (value,)]})


@pytest.mark.parametrize("value", CONTAINERS, ids=range(len(CONTAINERS)))
def test_containers_come_back_equal_and_of_their_types(value: Any) -> None:
    found = through_a_file(value)
    assert_same(found, value)
    if isinstance(value, defaultdict):
        assert found.default_factory is value.default_factory
    if isinstance(value, deque):
        assert found.maxlen == value.maxlen


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_tensors_of_every_dtype_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(2, 3)
    value = {"whole": tensor, "scalar": tensor[0, 0].clone(), "empty": tensor[:0].clone(), "turned": tensor.clone().t()}
    found = through_a_file(value)
    assert_same(found, value)
    assert found["turned"].stride() == (1, 3)
    assert {tensor.dtype for tensor in pack(tensor).tensors.values()} <= _TYPED


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_every_dtype_of_torch_is_stored_or_refused_by_name() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    without_values = [str(dtype) for dtype in dtypes - {*DTYPES.values()}]
    assert all("int" in name or "bit" in name for name in without_values), without_values
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    with pytest.raises(CheckpointError, match=r"state.q is of type torch.Tensor.*dtype torch.quint8; dequantise"):
        pack({"q": quantised})


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["?", "i1", "<u8", ">i4", "<f2", "f8", "c16", "U3", "S2", "M8[ns]", "m8[D]", "g"])
def test_arrays_come_back_with_dtype_and_order(dtype: str, order: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype, order=order)  # type: ignore[call-overload]
    read_only = array.copy(order)  # type: ignore[call-overload]
    read_only.flags.writeable = False
    for value in (array, array[:, ::2], array[:0], array.reshape(-1)[0:1].reshape(()), read_only):
        found = through_a_file({"a": value})["a"]
        assert_same(found, value)
        assert found.flags.writeable
    assert through_a_file(array).flags.f_contiguous == array.flags.f_contiguous


def test_shared_memory_is_stored_once_and_shared_again() -> None:
    base = torch.arange(24.0).view(4, 6)
    value = {
        "base": base, "same": base, "row": base[1], "column": base[:, 2], "turned": base.t(), "alias": base.detach(),
        "bits": base.view(torch.int32)[0, 1:], "bytes": base.view(torch.uint8)[3, 5:7], "list": [base[2:], base],
    }  # fmt: skip
    packed = pack(value)
    assert sum(tensor.numel() * tensor.element_size() for tensor in packed.tensors.values()) == 96
    found = through_a_file(value)
    assert_same(found, value)
    assert found["same"] is found["base"] is found["list"][1]
    assert found["alias"] is not found["base"]
    found["base"].fill_(7)
    assert found["row"].tolist() == [7] * 6
    assert found["column"].tolist() == [7] * 4
    assert found["bits"].view(torch.float32).tolist() == [7] * 5


def test_halves_of_one_memory_without_the_whole_stay_one_memory() -> None:
    flat = torch.arange(6.0)
    found = through_a_file([flat[:2], flat[2:]])
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()
    apart = through_a_file([flat[:1], flat[5:]])
    assert apart[0].untyped_storage().nbytes() == apart[1].untyped_storage().nbytes() == 4


def test_a_small_view_of_a_large_memory_is_stored_small() -> None:
    large = torch.zeros(1000, 1000)
    for view in (large[0, :1], large[:, 3], large[::10, ::10], large[5:6].t()):
        packed = pack({"v": view})
        assert packed.tensors["state.v"].numel() == view.numel()
        assert_same(through_a_file({"v": view}), {"v": view})


def test_unaligned_views_of_mixed_formats_share_memory_again() -> None:
    raw = torch.arange(40, dtype=torch.uint8)
    value = [raw[3:9], raw[8:16].view(torch.int64), raw[5:7], raw[32:].view(torch.float64)]
    found = through_a_file(value)
    assert_same(found, value)
    found[1].zero_()
    assert found[0].tolist() == [3, 4, 5, 6, 7, 0]


def test_layouts_are_kept_where_memory_is_dense() -> None:
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    expanded = torch.randn(1, 3).expand(1000, 3)
    found = through_a_file([images, expanded])
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    assert found[1].stride() == (0, 1)
    assert pack(expanded).tensors["state"].numel() == 3
    assert_same(found, [images, expanded])


def test_conjugate_and_negative_views_come_back_as_values() -> None:
    z = torch.randn(4, dtype=torch.complex64)
    value = {"conj": z.conj(), "imag": z.conj().imag, "real": z.real, "z": z}
    assert_same(through_a_file(value), value)


def test_parameters_come_back_as_tensors_and_the_original_is_untouched() -> None:
    module = nn.Linear(3, 2)
    output = module(torch.ones(1, 3))
    value = {"weight": module.weight, "data": module.weight.data, "output": output}
    found = through_a_file(value)
    assert_same(found, value)
    assert not any(tensor.requires_grad for tensor in found.values())
    assert found["weight"].data_ptr() == found["data"].data_ptr()
    assert module.weight.requires_grad and output.grad_fn is not None
    assert pack(module.weight).tensors["state"].data_ptr() == module.weight.data_ptr()


def random_value(draw: random.Random, depth: int = 0, small: list[Any] = SMALL_VALUES) -> Any:
    """Nested values of all kinds; the same for the same generator."""
    kinds = ["small", "small", "tensor", "array"] + (["list", "tuple", "dict", "odd dict", "set"] if depth < 4 else [])
    kind = draw.choice(kinds)
    size = draw.randrange(4)
    if kind == "small":
        return draw.choice(small)
    if kind == "tensor":
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint16])
        tensor = torch.randint(0, 2, [draw.randrange(4) for _ in range(size)]).to(dtype)
        return tensor.t() if tensor.dim() == 2 else tensor
    if kind == "array":
        return np.arange(size * 2).reshape(size, 2).astype(draw.choice(["<i2", "f8", "U4"]))
    if kind in ("list", "tuple"):
        items = [random_value(draw, depth + 1, small) for _ in range(size)]
        return items if kind == "list" else tuple(items)
    if kind == "set":
        return {draw.choice(SMALL_VALUES[:14]) for _ in range(size)}
    keys: list[Any] = ["a", "b.c", "$", ""] if kind == "dict" else [1, None, (1, "x"), b"k", 2.5]
    return {key: random_value(draw, depth + 1, small) for key in draw.sample(keys, size)}


@pytest.mark.parametrize("seed", range(60))
def test_random_trees_come_back(seed: int) -> None:
    value = random_value(random.Random(seed))
    assert_same(through_a_file(value), value)


def test_states_of_torchs_optimizers_and_schedulers_come_back() -> None:
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop):
        weights = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))]
        optimizer = kind([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.5}], lr=0.1)
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        assert_same(through_a_file(optimizer.state_dict()), optimizer.state_dict())
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedulers = torch.optim.lr_scheduler
    for scheduler in (
        schedulers.MultiStepLR(optimizer, [2, 2, 5]),
        schedulers.OneCycleLR(optimizer, 0.5, total_steps=10, cycle_momentum=False),
        schedulers.CosineAnnealingWarmRestarts(optimizer, 3),
        schedulers.ReduceLROnPlateau(optimizer),
        schedulers.ChainedScheduler([schedulers.ExponentialLR(optimizer, 0.9)]),
        schedulers.SequentialLR(
            optimizer, [schedulers.ConstantLR(optimizer), schedulers.LambdaLR(optimizer, lambda _: 1.0)], [2]
        ),
    ):
        assert_same(through_a_file(scheduler.state_dict()), scheduler.state_dict())


def self_containing() -> list[Any]:
    value: list[Any] = [1]
    value.append({"inner": value})
    return value


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = (value,)
    return value


class Local(nn.Module):
    pass


def local_enum() -> enum.Enum:
    class Hidden(enum.Enum):
        A = 1

    return Hidden.A


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"optimizers": [{"foo": object()}]}, r"^state\.optimizers\[0\]\.foo is of type object, which can't be stored"),
        ({"a": {3: {"b": (1, lambda: 1)}}}, r"state\.a\[3\]\.b\[1\] is of type function"),
        ({"p": Point(1, 2)}, r"state\.p is of type .*Point, which can't be stored\. Expected mappings, lists"),
        ([Record()], r"state\[0\] is of type .*Record"),
        ({Point(1, 2): 1}, r"state\[Point\(x=1, y=2\)\] is of type .*Point"),
        (Local(), r"state is of type .*Local, which can't be stored\. Store its state_dict\(\) instead"),
        (self_containing(), r"state\[1\]\.inner is of type list.*It contains itself"),
        (nested(101), r"nested more than 100 levels"),
        ({"e": local_enum()}, r"state\.e is of type .*Hidden.*Its class .* is not found under its name in"),
        (defaultdict(lambda: 1), r"state is of type collections.defaultdict.*default_factory has to be None or one of"),
        (torch.ones(2, device="meta"), r"state is of type torch.Tensor.*It has no values \(device meta\)"),
        (torch.eye(2).to_sparse(), r"It has the layout torch.sparse_coo; make it dense"),
        (nn.LazyLinear(1).weight, r"state is of type torch.nn.parameter.UninitializedParameter.*no shape yet"),
        ({10**5000: [object()]}, r"state\[a int\]\[0\] is of type object"),
        (np.array([object()]), r"state is of type numpy.ndarray.*Its elements are of the dtype object"),
        (np.zeros(2, dtype=[("a", "i4")]), r"Its elements are of the dtype \[\('a', '<i4'\)\]"),
        (type("Text", (str,), {})("x"), r"state is of type .*Text"),
        (type("Number", (int,), {})(1), r"state is of type .*Number"),
    ],
)  # fmt: skip
def test_what_can_not_be_stored_is_named(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        pack(value)


def test_deep_trees_come_back_and_siblings_may_be_the_same_object() -> None:
    assert_same(through_a_file(nested(99)), nested(99))
    shared = [1]
    assert through_a_file([shared, shared, {"a": shared}]) == [[1], [1], {"a": [1]}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"$":"enum","class":"os:system","name":"x"}', r"enumeration 'os:system', which this program has not defined"),
        ('{"$":"enum","class":"not_imported_module:X","name":"x"}', "has not defined. Import its module"),
        (f'{{"$":"enum","class":"{__name__}:Colour","name":"GREEN"}}', "no member 'GREEN' any more"),
        (f'{{"$":"enum","class":"{__name__}:Colour","value":1}}', "is no set of flags any more"),
        (f'{{"$":"enum","class":"{__name__}:Record","name":"x"}}', "has not defined"),
        ('{"$":"pickle","base64":"gASVBQ=="}', "unknown kind 'pickle'. Update Loopwright"),
        ('{"$":["tensor"]}', "can't be read: Type"),
        ('{"$":"tensor","in":"missing"}', "can't be read: KeyError: missing"),
        ('{"$":"tensor","in":"t","dtype":"float32","shape":[9],"stride":[1],"offset":0}', "RuntimeError"),
        ('{"$":"tensor","in":"t","dtype":"float32","shape":[1],"stride":[1],"offset":-9}', "RuntimeError"),
        ('{"$":"tensor","in":"t","dtype":"load","shape":[1],"stride":[1],"offset":0}', "KeyError: load"),
        ('{"$":"ndarray","dtype":"O","shape":[1],"order":"C","data":{"$":"tensor","in":"t"}}', "can't be read: Type"),
        ('{"$":"numpy","dtype":"O","base64":"AAAAAAAAAAA="}', "can't be read: Type"),
        ('{"$":"bytes","base64":"a*"}', "can't be read: Error"),
        ('{"$":"set","items":[[]]}', "can't be read: TypeError: unhashable"),
        ('{"$":"defaultdict","factory":"eval","items":[]}', "KeyError: eval"),
        ('{"$":"tuple"}', "KeyError: items"),
    ],
)  # fmt: skip
def test_foreign_json_runs_nothing_and_is_refused(text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        unpack(json.loads(text), {"t": torch.ones(3)})


def test_foreign_json_of_any_depth_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="RecursionError"):
        unpack(deep, {})


def test_the_json_is_plain_and_names_tell_where_tensors_stand() -> None:
    packed = pack(
        {"groups": [{"lr": 0.1, "exp_avg": torch.ones(2)}], 3: torch.ones(1), "a.b": 1, "é": b"x"}, "optimizer"
    )
    assert list(packed.tensors) == ["optimizer.groups[0].exp_avg", "optimizer[3]"]
    assert packed.text().isascii()
    plain = pack({"epoch": 3, "loss": 0.5, "names": ["a", None, True]})
    assert json.loads(plain.text()) == {"epoch": 3, "loss": 0.5, "names": ["a", None, True]}
    twice = pack({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
    assert list(twice.tensors) == ["state.a.b", "state.a.b#2"]
    assert base64.b64decode(json.loads(pack(b"x").text())["base64"]) == b"x"
