"""A node's environment before a run: variables that are wrong, stale or at odds, and limits that are too low.

Everything here reads; nothing is changed. Thresholds without a source are hfscale's own and say so.
"""

import os
import resource
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hfscale.errors import UsageError
from hfscale.health.build_locks import abandoned_locks, lock_finding
from hfscale.utils.findings import Finding, Level

GIB = 2**30
STALE = {
    # ProcessGroupNCCL.hpp and FlightRecorder.hpp of torch 2.13 read the new name first, then the old one.
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
    # NCCL 2.5 release notes: removed.
    "NCCL_TREE_THRESHOLD": "NCCL_ALGO",
    "NCCL_LL_THRESHOLD": "NCCL_PROTO",
    "NCCL_MIN_NRINGS": "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NRINGS": "NCCL_MAX_NCHANNELS",
    "NCCL_RINGS": "NCCL_GRAPH_FILE",
}
"""Variables whose name has changed, and the name now."""
_SHM = "/dev/shm"  # noqa: S108 - the mount, no file in it
_TRUE = ("1", "true", "yes", "on", "y", "t")
_LEFT_FROM_TUNING = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_MAX_NCHANNELS", "NCCL_BUFFSIZE")


@dataclass(frozen=True, kw_only=True)
class Node:
    """What is true of this machine, apart from the variables."""

    host: str
    """Its name."""
    interfaces: Mapping[str, bool]
    """Network interfaces, and whether each is up."""
    ib_devices: tuple[str, ...]
    """InfiniBand or RoCE devices with an active port."""
    gpus: tuple[str, ...]
    """Names of the GPUs that torch sees, not narrowed by CUDA_VISIBLE_DEVICES where that is not known."""
    cores: int
    """CPU cores this process may use."""
    memory_gib: float
    """RAM this process may use: the machine's or the container's, whichever is less."""
    shm_gib: float
    """Size of /dev/shm."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Soft limits by name: `nofile`, `memlock` (bytes), `nproc`; infinity where there is none."""

    build_locks: tuple[str, ...] = ()
    """Locks of torch's extension builds that are older than `BUILD_LOCK_AGE_S`."""

    @classmethod
    def here(cls, gpus: Iterable[str] = ()) -> "Node":
        """This machine."""
        shm = os.statvfs(_SHM) if Path(_SHM).is_dir() else None
        return cls(
            host=socket.gethostname(),
            interfaces={name: stats.isup for name, stats in psutil.net_if_stats().items()},
            ib_devices=_ib_devices(Path("/sys/class/infiniband")),
            gpus=tuple(gpus),
            cores=len(os.sched_getaffinity(0)),
            memory_gib=_memory_bytes() / GIB,
            shm_gib=shm.f_frsize * shm.f_blocks / GIB if shm is not None else 0.0,
            limits={
                "nofile": _limit(resource.RLIMIT_NOFILE),
                "memlock": _limit(resource.RLIMIT_MEMLOCK),
                "nproc": _limit(resource.RLIMIT_NPROC),
            },
            build_locks=tuple(map(str, abandoned_locks(os.environ))),
        )


def lint(environ: Mapping[str, str], node: Node) -> list[Finding]:
    """Everything that is wrong, or worth knowing, about a node before a run."""
    local = max(1, whole(environ, "LOCAL_WORLD_SIZE", 1))
    nodes = max(1, whole(environ, "WORLD_SIZE", 1) // local)
    found: list[Finding] = []

    def say(level: Level, check: str, message: str) -> None:
        found.append(Finding(level=level, check=check, problem=message, host=node.host))

    for check in (_launch, _interfaces, _transports, _errors_and_debugging, _stale, _devices):
        check(environ, node, nodes, local, say)
    _limits(node, local, say)
    found += [lock_finding(path, node.host) for path in node.build_locks]
    return found


def whole(environ: Mapping[str, str], name: str, default: int) -> int:
    """A launcher's variable as a number of at least 0.

    Raises:
        UsageError: it is none.
    """
    text = environ.get(name, "").strip()
    if text and not text.isdigit():
        raise UsageError(f"{name}={text} is not a number: unset it, or start with accelerate launch")
    return int(text) if text else default


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() in _TRUE


Say = Callable[[Level, str, str], None]


def _launch(environ: Mapping[str, str], node: Node, nodes: int, local: int, say: Say) -> None:
    if "RANK" in environ and whole(environ, "RANK", 0) >= whole(environ, "WORLD_SIZE", 1):
        say(
            "error",
            "launch",
            f"RANK={environ['RANK']} is not below WORLD_SIZE={environ.get('WORLD_SIZE', '1')}: "
            "left from an earlier launch; unset RANK, WORLD_SIZE and LOCAL_RANK",
        )
    if "RANK" in environ and "MASTER_ADDR" not in environ:
        say("error", "launch", "RANK is set and MASTER_ADDR is not: start with accelerate launch, or unset RANK")
    address = environ.get("MASTER_ADDR", "")
    if nodes > 1 and (address == "localhost" or address.startswith("127.") or address == "::1"):
        say("error", "launch", f"MASTER_ADDR={address} on {nodes} nodes: give the address of the first node")
    if _is_on(environ, "ACCELERATE_USE_FSDP") and _is_on(environ, "ACCELERATE_USE_DEEPSPEED"):
        say("error", "launch", "ACCELERATE_USE_FSDP and ACCELERATE_USE_DEEPSPEED are both set: unset one")
    if _is_on(environ, "ACCELERATE_USE_CPU") and node.gpus:
        say("warning", "launch", f"ACCELERATE_USE_CPU is set and there are {len(node.gpus)} GPUs: they stay idle")


def _interfaces(environ: Mapping[str, str], node: Node, nodes: int, local: int, say: Say) -> None:
    chosen = {}
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = environ.get(name, "").strip()
        if not wanted or wanted.startswith("^"):  # NCCL: all but these
            continue
        # NCCL takes prefixes unless the list begins with "="; gloo takes whole names.
        exact = name.startswith("GLOO") or wanted.startswith("=")
        parts = [part for part in wanted.lstrip("=").split(",") if part]
        matching = [
            known for known in node.interfaces if any(known == p or (not exact and known.startswith(p)) for p in parts)
        ]
        chosen[name] = set(matching)
        if not matching:
            say(
                "error",
                "interfaces",
                f"{name}={wanted} names no interface of this node (it has "
                f"{', '.join(sorted(node.interfaces))}): name one of them",
            )
        elif not any(node.interfaces[known] for known in matching):
            say("error", "interfaces", f"{name}={wanted}: {', '.join(matching)} is down: bring it up or name another")
        elif nodes > 1 and all(known == "lo" for known in matching):
            say(
                "error",
                "interfaces",
                f"{name}={wanted} is the loopback, and there are {nodes} nodes: name the interface that joins them",
            )
    both = list(chosen.values())
    if len(both) == 2 and both[0] and both[1] and not both[0] & both[1]:
        say(
            "warning",
            "interfaces",
            f"NCCL_SOCKET_IFNAME={environ['NCCL_SOCKET_IFNAME']} and GLOO_SOCKET_IFNAME="
            f"{environ['GLOO_SOCKET_IFNAME']} are different networks: is that meant?",
        )


def _transports(environ: Mapping[str, str], node: Node, nodes: int, local: int, say: Say) -> None:
    devices = ", ".join(node.ib_devices)
    if nodes > 1 and node.ib_devices and _is_on(environ, "NCCL_IB_DISABLE"):
        say(
            "warning",
            "transports",
            f"NCCL_IB_DISABLE=1 with {devices} active: NCCL falls back to TCP between nodes; unset it",
        )
    hca = environ.get("NCCL_IB_HCA", "").strip()
    if hca and not hca.startswith("^"):
        names = [part.partition(":")[0] for part in hca.lstrip("=").split(",") if part]
        if not any(
            device == n or (not hca.startswith("=") and device.startswith(n))
            for device in node.ib_devices
            for n in names
        ):
            say(
                "error",
                "transports",
                f"NCCL_IB_HCA={hca} names no active device of this node ({devices or 'none'}): name one, or unset it",
            )
    # accelerate sets both itself on GeForce RTX 40 cards, which have no peer-to-peer.
    if len(node.gpus) > 1 and not any("RTX 40" in gpu for gpu in node.gpus):
        for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
            if _is_on(environ, name):
                say(
                    "warning",
                    "transports",
                    f"{name}=1 with {len(node.gpus)} GPUs: traffic inside the node takes a "
                    "slower way; unset it unless these GPUs cannot do without",
                )


def _errors_and_debugging(environ: Mapping[str, str], node: Node, nodes: int, local: int, say: Say) -> None:
    handling = environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", environ.get("NCCL_ASYNC_ERROR_HANDLING"))
    if handling == "0":
        say(
            "warning",
            "errors",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=0: after a rank dies the others hang for ever; unset it",
        )
    if _is_on(environ, "TORCH_NCCL_BLOCKING_WAIT") and handling not in (None, "0"):
        say(
            "warning",
            "errors",
            "TORCH_NCCL_BLOCKING_WAIT and TORCH_NCCL_ASYNC_ERROR_HANDLING are both set: the "
            "first makes every collective block the host; unset it",
        )
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        if environ.get(name) == "0":
            say(
                "warning",
                "errors",
                f"{name}=0 turns the Flight Recorder off: a hang can then not be traced to a "
                "collective; unset it (2,000 entries)",
            )
    slow = {"CUDA_LAUNCH_BLOCKING": ("1",), "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",), "NCCL_DEBUG": ("TRACE",)}
    for name, values in slow.items():
        if environ.get(name, "").upper() in values:
            say(
                "warning", "debugging", f"{name}={environ[name]} slows every step: unset it when you have done with it"
            )
    tuned = [f"{name}={environ[name]}" for name in _LEFT_FROM_TUNING if name in environ]
    if tuned:
        say("note", "tuning", f"{', '.join(tuned)}: NCCL would choose by size and topology; left from tuning?")


def _stale(environ: Mapping[str, str], node: Node, nodes: int, local: int, say: Say) -> None:
    for old, new in STALE.items():
        if old not in environ:
            continue
        if new in environ and environ[new] != environ[old]:
            say(
                "warning",
                "variables",
                f"{old}={environ[old]} and {new}={environ[new]} contradict each other: keep {new}",
            )
        else:
            say("note", "variables", f"{old} is called {new} now")


def _devices(environ: Mapping[str, str], node: Node, nodes: int, local: int, say: Say) -> None:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and node.gpus:
        named = [part.strip() for part in visible.split(",") if part.strip()]
        if len(set(named)) < len(named):
            say("error", "devices", f"CUDA_VISIBLE_DEVICES={visible} names a GPU twice: name each once")
    if node.gpus and local > len(node.gpus):
        say("error", "devices", f"{local} processes on this node and {len(node.gpus)} GPUs: start one process per GPU")
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) * local > node.cores:
        say(
            "warning",
            "cores",
            f"OMP_NUM_THREADS={threads} in {local} processes on {node.cores} cores: set at most "
            f"{max(1, node.cores // local)}",
        )


def _limits(node: Node, local: int, say: Say) -> None:
    """Thresholds are hfscale's own: what data loaders with workers, NCCL and checkpoints are known to run into."""
    if node.limits.get("nofile", float("inf")) < 4096:
        say(
            "warning",
            "limits",
            f"ulimit -n is {node.limits['nofile']:.0f}: data loader workers and sharded "
            "checkpoints open thousands of files; ulimit -n 65536",
        )
    if node.ib_devices and node.limits.get("memlock", float("inf")) < 2**30:
        say(
            "error",
            "limits",
            f"ulimit -l is {node.limits['memlock'] / 2**20:.0f} MiB with InfiniBand: memory cannot "
            "be registered; ulimit -l unlimited",
        )
    if node.limits.get("nproc", float("inf")) < 4096:
        say(
            "warning",
            "limits",
            f"ulimit -u is {node.limits['nproc']:.0f}: threads of {local} processes may not start; ulimit -u 65536",
        )
    if node.shm_gib < 0.1:
        level: Level = "error" if local > 1 else "warning"
        say(
            level,
            "shared memory",
            f"{_SHM} is {node.shm_gib * 1024:.0f} MiB: NCCL and data loader workers need "
            "more; docker run --shm-size 16g, or an emptyDir of medium Memory",
        )
    elif node.gpus and node.shm_gib < local:
        say("warning", "shared memory", f"{_SHM} is {node.shm_gib:.1f} GiB for {local} processes: give 1 GiB each")
    if node.gpus and node.cores < 2 * local:
        say(
            "warning",
            "cores",
            f"{node.cores} CPU cores for {local} processes: one drives the GPU, a data loader "
            "needs more; give each at least 4, or the GPUs will wait for data",
        )
    if node.gpus and node.memory_gib < 16 * local:
        say(
            "warning",
            "memory",
            f"{node.memory_gib:.0f} GiB of RAM for {local} processes: loading and saving a model "
            "passes through it; give each at least 16 GiB",
        )


def _limit(which: int) -> float:
    soft, _ = resource.getrlimit(which)
    return float("inf") if soft == resource.RLIM_INFINITY else float(soft)


def _ib_devices(root: Path) -> tuple[str, ...]:
    if not root.is_dir():
        return ()
    states = {device.name: [s.read_text() for s in device.glob("ports/*/state")] for device in sorted(root.iterdir())}
    return tuple(name for name, ports in states.items() if any("ACTIVE" in state for state in ports))


def _memory_bytes() -> int:
    total = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).is_file():
            text = Path(path).read_text(encoding="ascii").strip()
            if text.isdigit():
                total = min(total, int(text))
    return total
