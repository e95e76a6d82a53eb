"""Ports of loopback for process groups and servers."""

import random
import socket

# Below those that systems give to outgoing connections (Linux: from 32768): one of these is not taken in the moment
# between this look and its use. Forks of one process must not draw alike.
_RANGE = (12_000, 32_000)
_CHANCE = random.SystemRandom()


def free_port() -> int:
    """A port of loopback that nobody listened on a moment ago."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", _CHANCE.randint(*_RANGE)))
            except OSError:
                continue
            return probe.getsockname()[1]
