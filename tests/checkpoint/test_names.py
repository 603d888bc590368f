"""Wrappers of modules, which are found in one way everywhere."""

from __future__ import annotations

import torch
from torch import nn

from loopwright.checkpoint.names import plain_names, unwrapped, wrapped_attribute
from loopwright.strategies.forward import extract_model_from_parallel, is_compiled_module
from loopwright.strategies.single import SingleDeviceStrategy
from loopwright.trainer.accelerator import Accelerator


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


class Odd(nn.Module):
    """Has what wrappers have, and is none."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = nn.Linear(1, 1)
        self.module = nn.Linear(1, 1)


def test_wrappers_are_told_by_what_they_are() -> None:
    plain = nn.Linear(1, 1)
    modules = [plain, Odd(), nn.DataParallel(plain), compiled(plain), "text"]
    assert [wrapped_attribute(module) for module in modules] == [None, None, "module", "_orig_mod", None]
    assert [is_compiled_module(module) for module in modules] == [False, False, False, True, False]


def test_all_wrappers_at_the_top_come_off_and_nothing_is_changed() -> None:
    inside = nn.Sequential(compiled(nn.Linear(1, 1)))
    wrapped = compiled(nn.DataParallel(compiled(inside)))
    assert unwrapped(wrapped) is inside
    assert SingleDeviceStrategy().unwrap(wrapped) is inside
    assert wrapped_attribute(wrapped) == "_orig_mod"
    assert is_compiled_module(inside[0])
    assert plain_names(wrapped, wrapped.state_dict()) == {
        f"_orig_mod.module._orig_mod.0._orig_mod.{name}": f"0.{name}" for name in ("weight", "bias")
    }
    odd = Odd()
    assert unwrapped(odd) is odd


def test_the_compilers_wrapper_may_stay_around_what_is_left() -> None:
    plain = nn.Linear(1, 1)
    outer = compiled(nn.DataParallel(plain))
    assert extract_model_from_parallel(outer) is outer
    assert outer._orig_mod is plain
    assert extract_model_from_parallel(nn.DataParallel(outer), keep_torch_compile=False) is plain
    holder = nn.Sequential(nn.DataParallel(plain), compiled(plain))
    assert extract_model_from_parallel(holder, keep_torch_compile=False, recursive=True) is holder
    assert list(holder) == [plain, plain]


def test_a_state_dict_has_the_names_of_the_plain_model() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(compiled(nn.Linear(1, 1)))
    assert accelerator.get_state_dict(model).keys() == {"weight", "bias"}
    assert accelerator.get_state_dict(model, unwrap=False).keys() == {"_orig_mod.weight", "_orig_mod.bias"}
