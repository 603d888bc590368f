"""Context parallelism: what models leave out for it, and on two devices the losses of whole sequences."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from loopwright.distributed.errors import ConfigError, DataError
from loopwright.strategies.context_parallel import RingAttention, prepare_attention


def inside(is_inside: bool = True) -> Any:
    return SimpleNamespace(word="context", size_word="cp_size", is_inside=is_inside)


class Attention(nn.Module):
    """Gives back how it was called."""

    def forward(self, hidden: Any, attention_mask: Any = None, is_causal: bool = False) -> Any:
        return hidden, attention_mask, is_causal


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**options)
        self.self_attn, self.other = Attention(), Attention()


def test_attention_goes_without_its_mask() -> None:
    model = Model(layer_types=["full_attention", "full_attention"])
    sequences = inside(False)
    prepare_attention(model, sequences)
    assert model.self_attn(1, attention_mask="mask") == (1, "mask", False)
    sequences.is_inside = True
    assert model.self_attn(1, attention_mask="mask") == (1, None, True)
    assert model.self_attn(1) == (1, None, False)
    assert model.other(1, attention_mask="mask") == (1, "mask", False)
    model.self_attn.is_causal = False  # type: ignore[assignment]
    assert model.self_attn(1, attention_mask="mask") == (1, "mask", False)


@pytest.mark.parametrize("options", [{"layer_types": ["sliding_attention"]}, {"sliding_window": 4}])
def test_narrow_attention_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Model has attention of kind sliding_attention, and on parts of sequences"):
        prepare_attention(Model(**options), inside())


@pytest.mark.parametrize("name", ["eager", "flash_attention_2"])
def test_attention_by_other_code_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"Model computes attention by {name}, which would see this process's part"):
        prepare_attention(Model(_attn_implementation=name), inside())
    prepare_attention(Model(_attn_implementation="sdpa"), inside())


def _contexts() -> Any:
    """Where torch's attention is another one, of forward passes and their backward; and what buffers hold inside."""
    sequences = RingAttention(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    own, seen = F.scaled_dot_product_attention, []
    weight = torch.ones(8, requires_grad=True)
    weight.register_hook(lambda gradient: seen.append(F.scaled_dot_product_attention is not own))

    def go_back(loss: Tensor) -> None:
        with sequences.backward():
            loss.backward()  # type: ignore[no-untyped-call]

    places = torch.arange(8).expand(2, 8).contiguous()
    with sequences.cut([places], [1], [places]):  # as in a Task
        loss = weight[places].sum()
    go_back(loss)
    go_back(weight.sum())  # of something else
    put_back = torch.arange(8)
    with sequences.cut([put_back], [0], []):
        inside = put_back.tolist()
        go_back((weight * 2).sum())
    go_back(weight.sum())
    with torch.no_grad(), sequences.cut([put_back], [0], []):
        pass
    go_back(weight.sum())
    assert F.scaled_dot_product_attention is own
    return places.tolist(), inside, put_back.tolist(), seen


def test_backward_is_over_all_parts_behind_the_step_too(two_processes: Callable[..., list[Any]]) -> None:
    for (places, inside, put_back, seen), own in zip(
        two_processes(_contexts), ([0, 1, 6, 7], [2, 3, 4, 5]), strict=True
    ):
        assert (places, inside, put_back) == ([own, own], own, list(range(8)))
        assert seen == [True, False, True, False, False]


def test_buffers_that_would_be_cut_wrong() -> None:
    sequences = RingAttention(SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]
    words, places = torch.zeros(2, 9), torch.arange(8)
    cases: list[tuple[Any, Any, Any, str]] = [
        ([], [], [], "got no buffers. Give the step's inputs, targets and positions"),
        ([places], [0], [words], "no_restore_buffers of maybe_context_parallel holds a tensor that is not in buffers"),
        ([places, words[:, 1:]], [0, 1], [], r"buffers\[1\] of maybe_context_parallel is a view with strides \(9, 1\)"),
        ([words[0, :-1], words[0, 1:]], [0, 0], [], r"buffers\[0\] and buffers\[1\] of .* share memory"),
    ]
    for buffers, dims, kept, text in cases:
        with pytest.raises(ConfigError, match=text), sequences.cut(buffers, dims, kept):
            pass
    for buffers, dims, text in [([words], [1], "9"), ([places, torch.zeros(2, 6)], [0, 1], "8, 6")]:
        with pytest.raises(DataError, match=f"got sequences of {text}. Expected one"), sequences.cut(buffers, dims, []):
            pass


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("axis", ["cp_size", "sp_size"])
def test_losses_of_whole_sequences(axis: str) -> None:
    script = Path(__file__).with_name("context_script.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), axis]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
