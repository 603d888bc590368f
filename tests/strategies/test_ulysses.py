"""Attention by exchanging heads: its numbers against attention to whole sequences, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from loopwright.distributed.errors import ConfigError, DataError
from loopwright.strategies.context_parallel import prepare_attention
from loopwright.strategies.ulysses import ExchangedHeads, _AllToAll

Run = Callable[..., list[Any]]
BATCH, LENGTH, WIDTH = 2, 12, 4


def _sequences() -> ExchangedHeads:
    return ExchangedHeads(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",)))


def _inside(sequences: ExchangedHeads, *buffers: Tensor) -> Any:
    """A context with parts of tensors of shape (batch, length, ...), which stay cut."""
    return sequences.cut(buffers, [1] * len(buffers), {*buffers})


def _rows() -> Any:
    index = float(dist.get_rank())
    rows = (torch.arange(6.0).reshape(2, 3) + 10 * index).requires_grad_()
    received = _AllToAll.apply(rows, dist.group.WORLD)  # type: ignore[no-untyped-call]
    # Each process's loss has weights of its own: row i of process j goes to process i, and gets the gradient of there.
    (received * torch.tensor([[1.0], [2.0]]) * (1 + index)).sum().backward()
    assert rows.grad is not None
    return received.tolist(), rows.grad.tolist()


def test_rows_and_their_gradients_by_hand(two_processes: Run) -> None:
    first, second = two_processes(_rows)
    assert first == ([[0, 1, 2], [10, 11, 12]], [[1] * 3, [2] * 3])
    assert second == ([[3, 4, 5], [13, 14, 15]], [[2] * 3, [4] * 3])


def _cases(num_processes: int) -> list[tuple[int, int, dict[str, Any]]]:
    """Heads of queries and of keys, and arguments of attention."""
    heads, generator = 2 * num_processes, torch.Generator().manual_seed(5)
    padding = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    padding[0, ..., -3:] = False
    return [
        (heads, heads, {}),
        (heads, heads, {"is_causal": True, "scale": 0.3}),
        (heads, heads, {"attn_mask": torch.ones(LENGTH, LENGTH).tril(2).bool()}),
        (heads, heads, {"attn_mask": padding}),
        (heads, heads, {"attn_mask": torch.randn(1, heads, LENGTH, LENGTH, generator=generator)}),
        (heads, num_processes, {"enable_gqa": True, "is_causal": True}),
        (heads, 1, {"enable_gqa": True}),
        (3 * heads, 3, {"enable_gqa": True, "attn_mask": padding}),
    ]


def _drawn(heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whole queries, keys and values, of shape (batch, length, heads, width); values are wider."""
    generator = torch.Generator().manual_seed(heads + key_heads)
    sizes = [(heads, WIDTH), (key_heads, WIDTH), (key_heads, WIDTH + 1)]
    query, key, value = (torch.randn(BATCH, LENGTH, *size, generator=generator) for size in sizes)
    return query, key, value


def _attend(parts: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """What attention gives, of shape (batch, heads, length, width), and gradients of a loss with weights."""
    leaves = [each.clone().requires_grad_() for each in parts]
    mixed = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in leaves), **options)
    mixed.square().sum().backward()  # type: ignore[no-untyped-call]
    return mixed.detach(), [each.grad for each in leaves if each.grad is not None]


def _exchanged() -> list[tuple[Tensor, list[Tensor]]]:
    sequences, found = _sequences(), []
    for heads, key_heads, options in _cases(dist.get_world_size()):
        buffers = _drawn(heads, key_heads)
        with _inside(sequences, *buffers):
            found.append(_attend(buffers, options))
    return found


@pytest.mark.parametrize("num_processes", [2, 3])
def test_numbers_of_whole_sequences(two_processes: Run, three_processes: Run, num_processes: int) -> None:
    found = (two_processes if num_processes == 2 else three_processes)(_exchanged)
    for index, (heads, key_heads, options) in enumerate(_cases(num_processes)):
        wanted, gradients = _attend(_drawn(heads, key_heads), options)
        mixed = torch.cat([process[index][0] for process in found], dim=2)
        torch.testing.assert_close(mixed, wanted, atol=1e-5, rtol=1e-5)
        for each, whole in enumerate(gradients):
            parts = torch.cat([process[index][1][each] for process in found], dim=1)
            torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)


class Modules(nn.Module):
    """torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)

    def forward(self, hidden: Tensor, **options: Any) -> Tensor:
        hidden = self.layer(hidden)
        mixed: Tensor = self.attention(hidden, hidden, hidden, **{"need_weights": False} | options)[0]
        return mixed


def _hidden() -> Tensor:
    return torch.randn(BATCH, LENGTH, 8, generator=torch.Generator().manual_seed(4))


def _by_modules() -> tuple[list[Tensor], list[str]]:
    sequences, model, found, texts = _sequences(), Modules(), [], []
    for trains in (True, False):  # else torch's fast path, which has no function to be replaced
        part = _hidden()
        with torch.set_grad_enabled(trains), _inside(sequences, part):
            found.append(model.train(trains)(part).detach())
    assert torch.backends.mha.get_fastpath_enabled()
    own = torch.zeros(LENGTH // 2, LENGTH // 2)
    for options in ({"need_weights": True}, {"attn_mask": own}):
        part = _hidden()
        with pytest.raises((ConfigError, DataError), match=" ") as caught, _inside(sequences, part):
            model(part, **options)
        texts.append(str(caught.value))
    model.attention = nn.MultiheadAttention(8, 4, batch_first=True, add_bias_kv=True)
    part = _hidden()
    with pytest.raises(DataError, match=" ") as caught, _inside(sequences, part):
        model(part)
    return found, [*texts, str(caught.value)]


def test_modules_of_torch(two_processes: Run) -> None:
    first, second = two_processes(_by_modules)
    with torch.no_grad():
        wanted = Modules()(_hidden())
    for halves in zip(first[0], second[0], strict=True):
        torch.testing.assert_close(torch.cat(halves, dim=1), wanted, atol=1e-5, rtol=1e-5)
    assert first[1] == second[1]
    for text, begin in zip(
        first[1],
        [
            "nn.MultiheadAttention was called with need_weights=True, its default, inside of maybe_context_parallel",
            "attn_mask of shape (1, 1, 6, 6) inside of maybe_context_parallel. Attention is over the whole 12 ",
            "attention of 6 queries to 7 keys inside of maybe_context_parallel. Expected as many of each",
        ],
        strict=True,
    ):
        assert text.startswith(begin), text


def _compiled() -> Any:
    def attend(hidden: Tensor) -> Tensor:
        heads = hidden.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).sin()

    sequences, run = _sequences(), torch.compile(attend, backend="eager")
    whole, part = _hidden(), _hidden()
    before = run(whole)
    with _inside(sequences, part):
        inside = run(part)
    return torch.equal(before, attend(whole)), torch.equal(run(whole), before), inside, before


def test_compiled_code_is_another_inside(two_processes: Run) -> None:
    found = two_processes(_compiled)
    assert [each[:2] for each in found] == [(True, True)] * 2
    torch.testing.assert_close(torch.cat([each[2] for each in found], dim=2), found[0][3], atol=1e-6, rtol=0)


def _formats() -> list[Any]:
    sequences, found = _sequences(), []
    for options in ({"dtype": torch.bfloat16}, {"enabled": False}):
        query, key, value = (each.double() if "enabled" in options else each for each in _drawn(4, 4))
        buffers = query, key.bfloat16() if "dtype" in options else key, value
        with torch.autocast("cpu", **options), _inside(sequences, *buffers):
            mixed, gradients = _attend(buffers, {"is_causal": True})
        found.append([mixed.dtype, *(each.dtype for each in gradients)])
    return found


def test_number_formats(two_processes: Run) -> None:
    full, half, double = torch.float32, torch.bfloat16, torch.float64
    assert two_processes(_formats) == [[[half, full, half, full], [double] * 4]] * 2


def _texts() -> list[str]:
    sequences, texts, own = _sequences(), [], F.scaled_dot_product_attention
    hidden, odd = torch.zeros(1, 6, 2, 4), torch.zeros(1, 3, 4, 4)
    cases: list[Callable[[Tensor], Any]] = [
        lambda part: F.scaled_dot_product_attention(part[0], part[0], part[0]),
        lambda part: F.scaled_dot_product_attention(odd, odd, odd),
        lambda part: F.scaled_dot_product_attention(hidden, hidden[:, :, :1], hidden[:, :, :1]),
        lambda part: F.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=torch.zeros(3, 4)),
        lambda part: sequences.cut([part], [0], []).__enter__(),
    ]
    for case in cases:
        part = torch.zeros(1, 6, 2, 4)
        with pytest.raises((ConfigError, DataError), match=" ") as caught, sequences.cut([part], [1], []):
            case(part)
        texts.append(str(caught.value))
        assert part.shape == (1, 6, 2, 4)
    fresh = _sequences()
    with pytest.raises(ConfigError, match=" ") as unseen, fresh.cut([hidden], [1], []):
        pass
    assert F.scaled_dot_product_attention is own and hidden.shape == (1, 6, 2, 4)
    with pytest.raises(DataError, match=" ") as uneven, fresh.cut([torch.zeros(2, 5)], [1], []):
        pass
    return [*texts, str(unseen.value), str(uneven.value)]


def test_what_is_refused(two_processes: Run) -> None:
    wanted = [
        "attention on tensors of shapes [(3, 2, 4), (3, 2, 4), (3, 2, 4)] inside of maybe_context_parallel. Expected (",
        "3 heads of attention can't be dealt to the 2 processes of the mesh's sequence axis. Choose a size (sp_size)",
        "attention of 2 queries to 1 keys inside of maybe_context_parallel.",
        "attn_mask of shape (3, 4) inside of maybe_context_parallel. Attention is over the whole 4 positions there",
        "maybe_context_parallel was called inside of itself",
        "the first maybe_context_parallel has seen no attention by F.scaled_dot_product_attention",
        "maybe_context_parallel got sequences of 5. Expected one length, which is a multiple of 2, the size of the "
        "mesh's sequence axis: pad them.",
    ]
    first, second = two_processes(_texts)
    assert first == second
    for text, begin in zip(first, wanted, strict=True):
        assert text.startswith(begin), text


def _buffers() -> Any:
    sequences = _sequences()
    places, words, kept = torch.arange(8), torch.arange(16).reshape(2, 8), torch.arange(4)
    heads = torch.zeros(1, 2, 4, 1)
    with sequences.cut([places, words], [0, 1], [words]):
        inside = places.tolist(), words.tolist()
        F.scaled_dot_product_attention(heads, heads, heads)
    with pytest.raises(KeyError, match="own"), sequences.cut([kept], [0], []):
        raise KeyError("own")
    return inside, places.tolist(), words.tolist(), kept.tolist()


def test_buffers_are_cut_in_order_and_put_back(two_processes: Run) -> None:
    first, second = two_processes(_buffers)
    assert first[0] == ([0, 1, 2, 3], [[0, 1, 2, 3], [8, 9, 10, 11]])
    assert second[0] == ([4, 5, 6, 7], [[4, 5, 6, 7], [12, 13, 14, 15]])
    for inside, places, words, kept in (first, second):
        assert (places, words, kept) == (list(range(8)), inside[1], list(range(4)))


def _differing() -> str:
    sequences, own = _sequences(), torch.arange(8.0).bfloat16() + dist.get_rank()
    with pytest.raises(DataError, match=" ") as caught, sequences.cut([torch.zeros(8, 1), own], [0, 0], []):
        pass
    return str(caught.value)


def test_other_batches_than_those_of_the_others_are_refused(two_processes: Run) -> None:
    texts = two_processes(_differing)
    assert texts[0] == texts[1]
    assert texts[0].startswith("processes along the mesh's sequence axis have different buffers in maybe_context_para")


def test_attention_under_a_name_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ModuleType("some_model")
    monkeypatch.setattr(file, "scaled_dot_product_attention", F.scaled_dot_product_attention, raising=False)
    monkeypatch.setitem(sys.modules, "some_model", file)
    base = type("Base", (nn.Module,), {"__module__": "some_model"})
    model = type("Own", (base,), {})()
    sequences: Any = SimpleNamespace(word="sequence", size_word="sp_size", is_inside=True)
    with pytest.raises(ConfigError, match=r"some_model of Own imports scaled_dot_product_attention .*\(sp_size=1\)"):
        prepare_attention(model, sequences)


class Counting(nn.Module):
    """Takes positions as models of Hugging Face do."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.config, self.inner = SimpleNamespace(), inner

    def forward(self, words: Any, position_ids: Any = None) -> Any:
        return words if self.inner is None else self.inner(words)


def test_positions_that_a_model_would_count_in_its_part() -> None:
    model = Counting(Counting())
    sequences: Any = SimpleNamespace(word="sequence", size_word="sp_size", is_inside=False)
    prepare_attention(nn.Sequential(model), sequences)
    assert model("words") == "words"
    sequences.is_inside = True
    assert model("words", "places") == model("words", position_ids="places") == "words"
    with pytest.raises(DataError, match="Counting was called without position_ids inside of maybe_context_parallel"):
        model("words")
