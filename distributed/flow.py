"""`Flow`: the base of exceptions that steer a run, for those who have to tell them from failures."""

from __future__ import annotations


class Flow(Exception):  # noqa: N818 - these are control flow, not errors
    """An exception after which its process goes on, and the other processes with it."""
