from __future__ import annotations


def check_fp8_support() -> tuple[bool, str]:
    return True, ""


def check_mxfp8_support() -> tuple[bool, str]:
    return False, "Device compute capability 10.0 or higher required for MXFP8 execution."
