"""Ports of this machine where processes meet."""

from __future__ import annotations

import socket

from .errors import ConfigError

LOOPBACK = "127.0.0.1"


def check_port(port: int) -> None:
    """Refuse a port on which this machine already listens. Local.

    Raises:
        ConfigError: it is in use, or may not be used by this user.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does: one that was closed is free
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            raise ConfigError(
                f"main_process_port={port} can't be used ({error.strerror}). Another run may be using it: choose "
                "another port, or 0 for a free one."
            ) from error


def free_port() -> int:
    """A port of this machine that nobody uses at this moment. Local."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
