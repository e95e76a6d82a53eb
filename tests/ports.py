"""Ports of loopback for process groups and servers."""

import random
import socket

# Below the ports of outgoing connections (on Linux from 32768), so that the system takes none of these between this
# check and its use. A random generator of the system, because forks of one process must not draw the same numbers.
_RANGE = (12_000, 32_000)
_CHANCE = random.SystemRandom()


def free_port() -> int:
    """Return a port of the loopback interface on which nothing listens."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", _CHANCE.randint(*_RANGE)))
            except OSError:
                continue
            return probe.getsockname()[1]
