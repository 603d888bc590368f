"""Peak arithmetic throughput of common devices, for the share of it that training reaches (MFU)."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """Dense matrix throughput (no structured sparsity, accumulation in fp32) in TFLOP/s; None where there is none."""

    fp16: float
    bf16: float | None
    fp8: float | None
    tf32: float | None
    fp32: float


# From the vendors' data sheets and architecture papers. Where they quote figures with 2:4 sparsity, half of that.
# The name is looked for as whole words in what torch calls the device; the first that matches counts.
_PEAKS: tuple[tuple[str, Peak], ...] = (
    ("GB200", Peak(2500, 2500, 5000, 1250, 80)),  # GB200 NVL72 data sheet, one of 72
    ("B200", Peak(2250, 2250, 4500, 1125, 75)),  # HGX B200 data sheet, one of 8
    ("GH200", Peak(989.4, 989.4, 1978.9, 494.7, 66.9)),  # GH200 data sheet: an H100 SXM's
    ("H200 NVL", Peak(835.5, 835.5, 1670.5, 417.5, 60)),  # H200 data sheet
    ("H200", Peak(989.4, 989.4, 1978.9, 494.7, 66.9)),  # H200 data sheet
    ("H100 PCIe", Peak(756.5, 756.5, 1513, 378, 51.2)),  # H100 data sheet
    ("H100 NVL", Peak(835.5, 835.5, 1670.5, 417.5, 60)),  # H100 data sheet
    ("H100", Peak(989.4, 989.4, 1978.9, 494.7, 66.9)),  # H100 architecture paper, SXM5
    ("H800 PCIe", Peak(756.5, 756.5, 1513, 378, 51.2)),  # as the H100 of this form
    ("H800", Peak(989.4, 989.4, 1978.9, 494.7, 66.9)),  # as the H100 of this form
    ("H20", Peak(148, 148, 296, 74, 44)),  # H20 data sheet
    ("A100", Peak(312, 312, None, 156, 19.5)),  # A100 data sheet, both forms
    ("A800", Peak(312, 312, None, 156, 19.5)),  # as the A100
    ("A40", Peak(149.7, 149.7, None, 74.8, 37.4)),  # A40 data sheet
    ("A30", Peak(165, 165, None, 82, 10.3)),  # A30 data sheet
    ("A10G", Peak(70, 70, None, 35, 35)),  # the cloud provider's figures
    ("A10", Peak(125, 125, None, 62.5, 31.2)),  # A10 data sheet
    ("L40S", Peak(362.05, 362.05, 733, 183, 91.6)),  # L40S data sheet
    ("L40", Peak(181.05, 181.05, 362, 90.5, 90.5)),  # L40 data sheet
    ("L4", Peak(121, 121, 242.5, 60, 30.3)),  # L4 data sheet
    ("V100-PCIE", Peak(112, None, None, None, 14)),  # V100 data sheet
    ("V100S", Peak(130, None, None, None, 16.4)),  # V100 data sheet
    ("V100", Peak(125, None, None, None, 15.7)),  # V100 data sheet, SXM2
    ("T4", Peak(65, None, None, None, 8.1)),  # T4 data sheet
    ("RTX 6000 Ada", Peak(364.2, 364.2, 728.5, 182.1, 91.1)),  # Ada professional architecture paper
    ("RTX A6000", Peak(154.8, 154.8, None, 77.4, 38.7)),  # RTX A6000 data sheet
    ("RTX 5090", Peak(209.5, 209.5, 419, 104.8, 104.8)),  # Blackwell GeForce architecture paper
    ("RTX 4090", Peak(165.2, 165.2, 330.3, 82.6, 82.6)),  # Ada GeForce architecture paper
    ("RTX 3090 Ti", Peak(80, 80, None, 40, 40)),  # Ampere GeForce architecture paper
    ("RTX 3090", Peak(71, 71, None, 35.6, 35.6)),  # Ampere GeForce architecture paper
    ("MI355X", Peak(2516.6, 2516.6, 5033.2, None, 157.3)),  # MI355X data sheet
    ("MI325X", Peak(1307.4, 1307.4, 2614.9, 653.7, 163.4)),  # MI325X data sheet
    ("MI300X", Peak(1307.4, 1307.4, 2614.9, 653.7, 163.4)),  # MI300X data sheet
    ("MI250X", Peak(191.5, 191.5, None, None, 47.85)),  # MI250X data sheet, one of its two dies: a device to torch
)


def peak_flops(device_name: str, number_format: str) -> float | None:
    """The most floating point operations per second that a device can do, None where that is not known here.

    Args:
        device_name: as `torch.cuda.get_device_name` says it.
        number_format: "fp16", "bf16", "fp8", "tf32" or "fp32". Where a device has no TF32, that means fp32.
    """
    for name, peak in _PEAKS:
        if re.search(rf"\b{re.escape(name)}\b", device_name):
            tera = getattr(peak, number_format)
            if tera is None and number_format == "tf32":
                tera = peak.fp32
            return None if tera is None else float(tera) * 1e12
    return None


_FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}


def number_format(dtype: torch.dtype) -> str | None:
    """The format in which CUDA multiplies matrices of a dtype, None for integers and fp64."""
    if dtype is torch.float32:
        return "tf32" if _uses_tf32() else "fp32"
    return _FORMATS.get(dtype)


def _uses_tf32() -> bool:
    # Older versions have only the second name; newer ones refuse it once the first was set.
    setting = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return bool(torch.backends.cuda.matmul.allow_tf32) if setting is None else setting == "tf32"
