"""Ports where processes that tests start meet."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import socket
from collections.abc import Iterator

# Below the ports that a system gives to whoever asks for any (from 32768 on Linux, 49152 elsewhere): nothing else takes
# one between the moment when it was found free and that when a store listens on it.
FIRST, COUNT, WORKERS = 20_000, 1_000, 12


@functools.cache
def _candidates() -> Iterator[int]:
    """Those of this process: of each worker of pytest-xdist others, and of each run in another order."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    begin = os.getpid() * 31
    return itertools.cycle(FIRST + worker * COUNT + (begin + index) % COUNT for index in range(COUNT))


def free_port() -> int:
    """A port that nobody listens on, and that no other test takes."""
    for port in itertools.islice(_candidates(), COUNT):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        return port
    raise AssertionError(f"none of {COUNT} ports is free")
