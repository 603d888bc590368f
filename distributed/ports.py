"""Ports of this machine where processes meet."""

from __future__ import annotations

import socket
from typing import Any

from .errors import ConfigError

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500
"""Where the processes of several machines meet when no port is given."""


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


def check_host(host: str, *, is_here: bool) -> None:
    """Refuse a name or address that leads nowhere: processes would try it for minutes. Local.

    Args:
        host: of machine 0.
        is_here: whether it has to be this machine.
    Raises:
        ConfigError: it is not known, or not this machine.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"main_process_ip={host!r} can't be used: no machine is known by it ({error}).") from error
    if is_here and not any(_is_of_this_machine(family, address) for family, _, _, _, address in found):
        raise ConfigError(f"main_process_ip={host!r} is not this machine, and it is the only one. Leave it out.")


def is_this_machine(host: str) -> bool:
    """Whether a name or address is this machine's own; False where nobody knows it. Local."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_of_this_machine(family, address) for family, _, _, _, address in found)


def _is_of_this_machine(family: int, address: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def free_port() -> int:
    """A port of this machine that nobody uses at this moment. Local."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
