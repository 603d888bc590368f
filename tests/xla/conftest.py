"""These tests need torch_xla, which is built for another torch than that of `make test`: `make test-xla` runs them."""

from __future__ import annotations

import importlib.util
import os
import warnings

import torch

if importlib.util.find_spec("torch_xla") is not None:
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    with warnings.catch_warnings():  # torch 2.9 says once that reading this setting has a newer name
        warnings.simplefilter("ignore")
        torch.get_float32_matmul_precision()
