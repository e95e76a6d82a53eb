"""Networks of several nodes on one machine: a network namespace for each, with a bridge. They need root on Linux."""

import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INTERFACE = "link0"
"""The name of the only interface of a node besides loopback."""
_NEW_NETWORK, _NEW_NAMES = 0x40000000, 0x04000000


class NetworksNotAllowedError(RuntimeError):
    """The machine does not let this process make network namespaces."""


@contextmanager
def node_networks(count: int) -> Iterator[list[str]]:
    """Make the networks of nodes, and remove them at the end.

    Args:
        count (`int`): number of nodes, at most 200.

    Returns:
        `list[str]`: the names of their namespaces. Node n has the address `address_of(n)`.

    Raises:
        NetworksNotAllowedError: they cannot be made.
    """
    switch = f"hfscale-switch-{os.getpid()}"
    nodes = [f"hfscale-{os.getpid()}-{number}" for number in range(count)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for number, node in enumerate(nodes):
            port = f"port{number}"
            _ip("netns", "add", node)
            _ip("link", "add", INTERFACE, "netns", node, "type", "veth", "peer", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", node, "addr", "add", f"{address_of(number)}/24", "dev", INTERFACE)
            for name in ("lo", INTERFACE):
                _ip("-n", node, "link", "set", name, "up")
        yield nodes
    finally:
        for name in [*nodes, switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def address_of(node: int) -> str:
    """Return the address of a node."""
    return f"10.78.0.{node + 1}"


def enter(namespace: str) -> None:
    """Move this process, which has one thread, into the network of a node, and give it a host name of its own.

    Args:
        namespace (`str`): the name of the node's namespace.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/var/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
    if libc.unshare(_NEW_NAMES):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def bytes_of_node() -> tuple[int, int]:
    """Return how many bytes the node of this process has received and sent, with the headers of all layers."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            found = [int(number) for number in numbers.split()]
            return found[0], found[8]
    raise AssertionError(f"no {INTERFACE}")


def _ip(*words: str) -> None:
    try:
        subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise NetworksNotAllowedError(f"network namespaces are not permitted: {reason.strip()}") from None
