"""Asserts in the contract show their values when they fail, as those in test modules do."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.trackers.contract", "contract")
