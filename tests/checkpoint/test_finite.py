"""What counts as finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from loopwright.checkpoint.finite import all_finite, find_nonfinite_weight, nonfinite_names, tensor_norms


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_one_bad_element_is_found(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.ones(5, 7, dtype=dtype)
    assert all_finite([torch.zeros(3), tensor])
    tensor[3, 2] = bad
    assert not all_finite([torch.zeros(3), tensor])
    assert nonfinite_names({"a": torch.zeros(3), "b": tensor}) == ["b"]


def test_large_finite_values_are_finite() -> None:
    assert all_finite([torch.full((4,), 3e38), torch.full((4,), 6e4, dtype=torch.float16)])


def test_what_can_not_be_nonfinite_is_finite() -> None:
    assert all_finite([])
    assert all_finite([torch.arange(3), torch.empty(0), torch.ones(2, dtype=torch.bool), torch.empty(2, device="meta")])


def test_sparse_gradients_are_read() -> None:
    indices = torch.tensor([[0, 0, 2]])
    sparse = torch.sparse_coo_tensor(indices, torch.tensor([3.0, 1.0, 3.0]), (5,), check_invariants=True)
    assert tensor_norms([sparse])[0].item() == 5.0  # two entries at 0 are added: sqrt(4^2 + 3^2)
    bad = torch.sparse_coo_tensor(indices, torch.tensor([1.0, math.nan, 0.0]), (5,), check_invariants=True)
    assert not all_finite([bad])


def test_norms_are_at_least_float32() -> None:
    norms = tensor_norms([torch.full((100,), 1000.0, dtype=torch.float16), torch.tensor([3.0, 4.0])])
    assert [n.item() for n in norms] == [10000.0, 5.0]
    assert norms[0].dtype == torch.float32  # 100 * 1000^2 is far above what float16 holds
    assert tensor_norms([]) == []


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))


def test_infinite_masks_are_allowed_and_weights_are_not() -> None:
    module = Masked()
    assert find_nonfinite_weight(module) is None
    module.net.weight.data[0, 1] = math.inf
    assert find_nonfinite_weight(module) == "net.weight"
    module.net.weight.requires_grad_(False)
    assert find_nonfinite_weight(module) is None
    module.get_buffer("mask")[0, 0] = math.nan
    assert find_nonfinite_weight(module) == "mask"
