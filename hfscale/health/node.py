"""Checks one node before a run: environment variables, limits, and the disk for checkpoints.

Everything here only reads, apart from the probe that measures the disk's speed. Thresholds without a source are
hfscale's own and say so.
"""

import os
import re
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from hfscale.core.build_locks import abandoned_locks, lock_finding
from hfscale.core.findings import Finding, Level
from hfscale.core.launch_variables import launch_number
from hfscale.core.tables import read_table
from hfscale.core.text_files import read_json
from hfscale.errors import StorageError

GIB = 2**30
RENAMED_VARIABLES: Mapping[str, str] = read_table("health/tables.toml")["renamed_variables"]
"""Old names of variables, and the names that are read now."""
PROBE_BYTES = 64 * 2**20
"""Bytes written and flushed to measure the disk: more than most caches of disks, little enough for every start."""
BYTES_PER_TRAINED_PARAMETER = 8
"""AdamW keeps two fp32 moments per trained parameter (Kingma & Ba, 2015; torch.optim.AdamW's state)."""
DEFAULT_NOTICE_S = 30.0
"""GCP and Azure give 30 s before they take a spot machine, AWS 120 s (their spot documentation)."""
_SHM = "/dev/shm"  # noqa: S108 - the mount, no file in it
_TRUE = ("1", "true", "yes", "on", "y", "t")
_DATA_CENTER_GPU = re.compile(r"\b([AH][128]00|H20|GH200|G?B[123]00)\b")
"""Names of GPUs whose servers have RDMA network cards."""
_CAP_IPC_LOCK = 1 << 14
"""Bit of /proc/self/status, CapEff: memory may be locked without a limit (linux/capability.h)."""
_TUNING_VARIABLES = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NTHREADS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_BUFFSIZE",
)


@dataclass(frozen=True, kw_only=True)
class Node:
    """Holds the properties of a machine that matter for a run, apart from the environment variables."""

    host: str
    """The name of the machine."""
    address: str
    """The IPv4 address of that name, to which gloo binds by default: 127.0.0.1 if the name has none."""
    interfaces: Mapping[str, bool]
    """Network interfaces, and whether each is up."""
    ib_devices: tuple[str, ...]
    """InfiniBand or RoCE devices with an active port."""
    gpus: tuple[str, ...]
    """Names of the GPUs that torch sees, not narrowed by CUDA_VISIBLE_DEVICES where that is not known."""
    cores: int
    """CPU cores that this process may use."""
    memory_gib: float
    """RAM that this process may use: the machine's or the container's, whichever is less."""
    shm_gib: float
    """Size of /dev/shm."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Soft limits by name: `nofile`, `memlock` (bytes), `nproc`; infinity where there is none."""
    build_locks: tuple[str, ...] = ()
    """Abandoned locks of torch's extension builds."""

    @classmethod
    def here(
        cls, gpus: Iterable[str] = (), resolve: Callable[[str], str] = socket.gethostbyname
    ) -> "Node":
        """Return the properties of this machine.

        Args:
            gpus (`Iterable[str]`): the names of its GPUs (`gpu_names`).
            resolve (`Callable[[str], str]`, *optional*): returns the address of a host name, or raises `OSError`.
        """
        host = socket.gethostname()
        try:
            address = resolve(host)
        except OSError:
            address = "127.0.0.1"
        shm = os.statvfs(_SHM) if Path(_SHM).is_dir() else None
        return cls(
            host=host,
            address=address,
            interfaces={name: stats.isup for name, stats in psutil.net_if_stats().items()},
            ib_devices=_ib_devices(Path("/sys/class/infiniband")),
            gpus=tuple(gpus),
            cores=len(os.sched_getaffinity(0)),
            memory_gib=_memory_bytes() / GIB,
            shm_gib=shm.f_frsize * shm.f_blocks / GIB if shm is not None else 0.0,
            limits={
                "nofile": _limit(resource.RLIMIT_NOFILE),
                "memlock": float("inf") if _may_lock_all() else _limit(resource.RLIMIT_MEMLOCK),
                "nproc": _limit(resource.RLIMIT_NPROC),
            },
            build_locks=tuple(map(str, abandoned_locks(os.environ))),
        )


def gpu_names() -> list[str]:
    """Return the names of the GPUs that torch sees on this machine."""
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


# Environment variables and limits


@dataclass
class _NodeCheck:
    """What the checks of a node read, and the findings that they add."""

    environ: Mapping[str, str]
    node: Node
    nodes: int
    """The number of nodes."""
    processes: int
    """The number of processes on this node."""
    findings: list[Finding] = field(default_factory=list)

    def is_on(self, name: str) -> bool:
        """Return whether a variable is set to a true value."""
        return self.environ.get(name, "").strip().lower() in _TRUE

    def add(self, level: Level, check: str, problem: str, fix: str) -> None:
        """Add a finding about this node."""
        self.findings.append(
            Finding(level=level, check=check, problem=problem, fix=fix, host=self.node.host)
        )

    def error(self, check: str, problem: str, fix: str) -> None:
        self.add("error", check, problem, fix)

    def warn(self, check: str, problem: str, fix: str) -> None:
        self.add("warning", check, problem, fix)


def check_node(environ: Mapping[str, str], node: Node) -> list[Finding]:
    """Find what is wrong with a node's environment variables and limits, or worth knowing about them.

    Args:
        environ (`Mapping[str, str]`): the environment variables.
        node (`Node`): the machine.

    Returns:
        `list[Finding]`: errors, warnings and notes about the node.

    Raises:
        UsageError: a launcher's variable is not a number.
    """
    processes = max(1, launch_number("LOCAL_WORLD_SIZE", 1, environ))
    check = _NodeCheck(environ, node, count_nodes(environ), processes)
    for part in (
        _check_launch,
        _check_interfaces,
        _check_transports,
        _check_error_handling,
        _check_renamed_variables,
        _check_devices,
        _check_limits,
        _check_memory,
    ):
        part(check)
    return check.findings + [lock_finding(path, node.host) for path in node.build_locks]


def count_nodes(environ: Mapping[str, str]) -> int:
    """Return the number of nodes of the launch, at least 1.

    Args:
        environ (`Mapping[str, str]`): the environment variables.

    Raises:
        UsageError: a launcher's variable is not a number.
    """
    processes = max(1, launch_number("LOCAL_WORLD_SIZE", 1, environ))
    return max(1, launch_number("WORLD_SIZE", 1, environ) // processes)


def _check_launch(check: _NodeCheck) -> None:
    environ = check.environ
    if "RANK" in environ and launch_number("RANK", 0, environ) >= launch_number(
        "WORLD_SIZE", 1, environ
    ):
        check.error(
            "launch",
            f"RANK={environ['RANK']} is not below WORLD_SIZE={environ.get('WORLD_SIZE', '1')}, probably from an "
            "earlier launch",
            "unset RANK, WORLD_SIZE and LOCAL_RANK",
        )
    if "RANK" in environ and "MASTER_ADDR" not in environ:
        check.error(
            "launch",
            "RANK is set and MASTER_ADDR is not",
            "start with accelerate launch, or unset RANK",
        )
    address = environ.get("MASTER_ADDR", "")
    if check.nodes > 1 and (
        address == "localhost" or address.startswith("127.") or address == "::1"
    ):
        check.error(
            "launch",
            f"MASTER_ADDR={address} on {check.nodes} nodes",
            "set it to the first node's address",
        )
    if check.is_on("ACCELERATE_USE_FSDP") and check.is_on("ACCELERATE_USE_DEEPSPEED"):
        check.error(
            "launch", "ACCELERATE_USE_FSDP and ACCELERATE_USE_DEEPSPEED are both set", "unset one"
        )
    if check.is_on("ACCELERATE_USE_CPU") and check.node.gpus:
        problem = f"ACCELERATE_USE_CPU is set, so this node's {len(check.node.gpus)} GPUs stay idle"
        check.warn("launch", problem, "unset it")


def _check_interfaces(check: _NodeCheck) -> None:
    matching: dict[str, set[str]] = {}
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = check.environ.get(name, "").strip()
        if wanted and not wanted.startswith("^"):  # with "^" NCCL takes all interfaces but these
            matching[name] = _check_interface(check, name, wanted)
    _check_address(check)
    nccl = matching.get("NCCL_SOCKET_IFNAME")
    gloo = matching.get("GLOO_SOCKET_IFNAME")
    if nccl and gloo and not nccl & gloo:
        check.warn(
            "interfaces",
            f"NCCL_SOCKET_IFNAME={check.environ['NCCL_SOCKET_IFNAME']} and "
            f"GLOO_SOCKET_IFNAME={check.environ['GLOO_SOCKET_IFNAME']} are different networks",
            "set both to the same interface unless that is intended",
        )


def _check_address(check: _NodeCheck) -> None:
    """Check the address to which gloo binds without GLOO_SOCKET_IFNAME (`ProcessGroupGloo::createDefaultDevice`).

    Images of Debian and Ubuntu map the name of the machine to 127.0.1.1.
    """
    address = check.node.address
    if (
        check.nodes == 1
        or check.environ.get("GLOO_SOCKET_IFNAME", "").strip()
        or not address.startswith("127.")
    ):
        return
    up = ", ".join(
        sorted(name for name, is_up in check.node.interfaces.items() if is_up and name != "lo")
    )
    check.error(
        "interfaces",
        f"gloo binds to the address of the name {check.node.host}, which is {address} here: {check.nodes} nodes "
        "cannot connect to each other",
        f"set GLOO_SOCKET_IFNAME to the interface that connects the nodes (up here: {up or 'none'})",
    )


def _check_interface(check: _NodeCheck, name: str, wanted: str) -> set[str]:
    """Check a variable that selects network interfaces; returns the interfaces that it selects."""
    # NCCL matches prefixes unless the list begins with "="; gloo matches complete names.
    is_exact = name.startswith("GLOO") or wanted.startswith("=")
    names = [part for part in wanted.lstrip("=").split(",") if part]
    interfaces = check.node.interfaces
    matching = [
        i for i in interfaces if any(i == n or (not is_exact and i.startswith(n)) for n in names)
    ]
    if not matching:
        has = ", ".join(sorted(interfaces))
        problem = f"{name}={wanted} names no interface of this node (it has {has})"
        check.error("interfaces", problem, "set it to one of them")
    elif not any(interfaces[i] for i in matching):
        problem = f"{name}={wanted}: {', '.join(matching)} is down"
        check.error("interfaces", problem, "bring it up, or name another interface")
    elif check.nodes > 1 and all(i == "lo" for i in matching):
        problem = f"{name}={wanted} is the loopback interface, and there are {check.nodes} nodes"
        check.error("interfaces", problem, "name the interface that connects the nodes")
    return set(matching)


def _check_transports(check: _NodeCheck) -> None:
    node = check.node
    devices = ", ".join(node.ib_devices)
    if check.nodes > 1 and node.ib_devices and check.is_on("NCCL_IB_DISABLE"):
        problem = f"NCCL_IB_DISABLE=1 with {devices} active: NCCL uses TCP between the nodes"
        check.warn("transports", problem, "unset it")
    is_data_center = any(_DATA_CENTER_GPU.search(gpu) for gpu in node.gpus)
    if (
        check.nodes > 1
        and is_data_center
        and not node.ib_devices
        and not check.environ.get("FI_PROVIDER")
    ):
        check.warn(
            "transports",
            f"{check.nodes} nodes and no RDMA device in /sys/class/infiniband: NCCL uses TCP between the nodes",
            "in a container ask for the RDMA devices (launch/README.md)",
        )
    hca = check.environ.get("NCCL_IB_HCA", "").strip()
    if hca and not hca.startswith("^"):
        is_exact = hca.startswith("=")
        names = [part.partition(":")[0] for part in hca.lstrip("=").split(",") if part]
        if not any(
            d == n or (not is_exact and d.startswith(n)) for d in node.ib_devices for n in names
        ):
            problem = f"NCCL_IB_HCA={hca} names no active device of this node (it has {devices or 'none'})"
            check.error("transports", problem, "name an active device, or unset it")
    # accelerate sets both variables itself on GeForce RTX 40 cards, which have no peer-to-peer.
    if len(node.gpus) > 1 and not any("RTX 40" in gpu for gpu in node.gpus):
        for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
            if check.is_on(name):
                problem = f"{name}=1 with {len(node.gpus)} GPUs: traffic inside the node uses a slower path"
                check.warn("transports", problem, "unset it unless these GPUs need it")


def _check_error_handling(check: _NodeCheck) -> None:
    """Check the variables that decide what happens after an error, and those left from debugging or tuning."""
    environ = check.environ
    handling = environ.get(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", environ.get("NCCL_ASYNC_ERROR_HANDLING")
    )
    if handling == "0":
        problem = "TORCH_NCCL_ASYNC_ERROR_HANDLING=0: after a rank dies the others hang forever"
        check.warn("errors", problem, "unset it")
    if check.is_on("TORCH_NCCL_BLOCKING_WAIT") and handling not in (None, "0"):
        check.warn(
            "errors",
            "TORCH_NCCL_BLOCKING_WAIT and TORCH_NCCL_ASYNC_ERROR_HANDLING are both set: with the first every "
            "collective blocks the host",
            "unset TORCH_NCCL_BLOCKING_WAIT",
        )
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        if environ.get(name) == "0":
            problem = (
                f"{name}=0 turns the Flight Recorder off: a hang cannot be traced to a collective"
            )
            check.warn("errors", problem, "unset it (the default is 2,000 entries)")
    slow = {
        "CUDA_LAUNCH_BLOCKING": ("1",),
        "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
        "NCCL_DEBUG": ("TRACE",),
    }
    for name, values in slow.items():
        if environ.get(name, "").upper() in values:
            check.warn(
                "debugging",
                f"{name}={environ[name]} slows every step",
                "unset it when debugging is over",
            )
    tuned = [f"{name}={environ[name]}" for name in _TUNING_VARIABLES if name in environ]
    if tuned:
        problem = f"{', '.join(tuned)} is set, perhaps left from tuning"
        check.add(
            "note", "tuning", problem, "unset it to let NCCL choose by message size and topology"
        )


def _check_renamed_variables(check: _NodeCheck) -> None:
    environ = check.environ
    for old, new in RENAMED_VARIABLES.items():
        if old not in environ:
            continue
        if new in environ and environ[new] != environ[old]:
            problem = f"{old}={environ[old]} and {new}={environ[new]} contradict each other"
            check.warn("variables", problem, f"keep {new}")
        else:
            check.add("note", "variables", f"{old} is called {new} now", f"set {new}")


def _check_devices(check: _NodeCheck) -> None:
    node = check.node
    processes = check.processes
    visible = check.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and node.gpus:
        named = [part.strip() for part in visible.split(",") if part.strip()]
        if len(set(named)) < len(named):
            check.error(
                "devices", f"CUDA_VISIBLE_DEVICES={visible} names a GPU twice", "name each GPU once"
            )
    if node.gpus and processes > len(node.gpus):
        problem = f"{processes} processes on this node and {len(node.gpus)} GPUs"
        check.error("devices", problem, "start one process per GPU")
    usable = len(node.gpus) if visible is None else min(len(node.gpus), visible.count(",") + 1)
    if "LOCAL_WORLD_SIZE" in check.environ and processes < usable:
        check.warn(
            "devices",
            f"{processes} processes on this node and {usable} GPUs: {usable - processes} of them stay idle",
            f"give accelerate launch --num_processes {usable * check.nodes} (torchrun --nproc-per-node {usable}), or "
            "set CUDA_VISIBLE_DEVICES to those that you mean",
        )
    threads = check.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) * processes > node.cores:
        problem = f"OMP_NUM_THREADS={threads} in {processes} processes on {node.cores} cores"
        check.warn("cores", problem, f"set at most {max(1, node.cores // processes)}")
    if node.gpus and threads == "1" and node.cores >= 2 * processes and _offloads_optimizer(check):
        problem = (
            "the optimizer runs on the CPU with OMP_NUM_THREADS=1 in "
            f"{processes} processes on {node.cores} cores"
        )
        check.add(
            "note",
            "cores",
            problem,
            f"export OMP_NUM_THREADS={node.cores // processes} before accelerate launch",
        )
    if node.gpus and node.cores < 2 * processes:
        problem = f"{node.cores} CPU cores for {processes} processes: the GPUs will wait for data"
        check.warn(
            "cores",
            problem,
            "give each process at least 4: one drives the GPU, data loaders need more",
        )


def _offloads_optimizer(check: _NodeCheck) -> bool:
    """Return whether the launcher's config, as it is in the environment, puts the optimizer on the CPU."""
    if check.is_on("ACCELERATE_USE_FSDP"):
        return check.is_on("FSDP_OFFLOAD_PARAMS")
    if not check.is_on("ACCELERATE_USE_DEEPSPEED"):
        return False
    device = check.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
    config = Path(check.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", ""))
    if config.is_file():
        device = _offload_device(config)
    return device in ("cpu", "nvme")


def _offload_device(config: Path) -> str:
    """Return the device of the optimizer in a config of DeepSpeed; `none` for one that DeepSpeed refuses itself."""
    try:
        found = read_json(config)
    except (OSError, ValueError):
        return "none"
    for name in ("zero_optimization", "offload_optimizer", "device"):
        found = found.get(name) if isinstance(found, dict) else None
    return str(found)


def _check_limits(check: _NodeCheck) -> None:
    """Check the limits of this process.

    The thresholds are hfscale's own: what data loaders with workers, NCCL and checkpoints are known to run into.
    """
    limits = check.node.limits
    if limits.get("nofile", float("inf")) < 4096:
        check.warn(
            "limits",
            f"ulimit -n is {limits['nofile']:.0f}: data loader workers and sharded checkpoints need thousands",
            "ulimit -n 65536",
        )
    # Only traffic between nodes registers memory with the network cards.
    if check.nodes > 1 and check.node.ib_devices and limits.get("memlock", float("inf")) < 2**30:
        problem = f"ulimit -l is {limits['memlock'] / 2**20:.3g} MiB: InfiniBand memory may not be registered"
        check.warn(
            "limits",
            problem,
            "ulimit -l unlimited; in a container docker run --ulimit memlock=-1, or IPC_LOCK",
        )
    if limits.get("nproc", float("inf")) < 4096:
        problem = f"ulimit -u is {limits['nproc']:.0f}: threads of {check.processes} processes may not start"
        check.warn("limits", problem, "ulimit -u 65536")


def _check_memory(check: _NodeCheck) -> None:
    """Check the memory of this node; the thresholds are hfscale's own, as in `_check_limits`."""
    node = check.node
    processes = check.processes
    if node.shm_gib < 0.1:
        check.add(
            "error" if processes > 1 else "warning",
            "shared memory",
            f"{_SHM} is {node.shm_gib * 1024:.0f} MiB: NCCL and data loader workers need more",
            "docker run --shm-size 16g, or an emptyDir of medium Memory",
        )
    elif node.gpus and node.shm_gib < processes:
        problem = f"{_SHM} is {node.shm_gib:.1f} GiB for {processes} processes"
        check.warn("shared memory", problem, "give each process 1 GiB")
    if node.gpus and node.memory_gib < 16 * processes:
        problem = (
            f"{node.memory_gib:.0f} GiB of RAM for {processes} processes: "
            "loading and saving a model passes through it"
        )
        check.warn("memory", problem, "give each process at least 16 GiB")


def _limit(which: int) -> float:
    soft, _ = resource.getrlimit(which)
    return float("inf") if soft == resource.RLIM_INFINITY else float(soft)


def _may_lock_all() -> bool:
    found = re.search(
        r"^CapEff:\s*([0-9a-f]+)",
        Path("/proc/self/status").read_text(encoding="ascii"),
        re.MULTILINE,
    )
    return found is not None and bool(int(found[1], 16) & _CAP_IPC_LOCK)


def _ib_devices(root: Path) -> tuple[str, ...]:
    if not root.is_dir():
        return ()
    states = {
        device.name: [s.read_text() for s in device.glob("ports/*/state")]
        for device in sorted(root.iterdir())
    }
    return tuple(
        name for name, ports in states.items() if any("ACTIVE" in state for state in ports)
    )


def _memory_bytes() -> int:
    total: int = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).is_file():
            text = Path(path).read_text(encoding="ascii").strip()
            if text.isdecimal():
                total = min(total, int(text))
    return total


# The disk


def write_speed(folder: Path, probe_bytes: int = PROBE_BYTES) -> float:
    """Measure how fast a file is written and flushed to the disk.

    Args:
        folder (`Path`): where the file is written and deleted again; it is created if it does not exist.
        probe_bytes (`int`): size of the file in bytes, a multiple of 1 MiB.

    Returns:
        `float`: bytes per second.

    Raises:
        StorageError: nothing can be written there.
    """
    block = os.urandom(2**20)  # random, so that a compressing file system does not look fast
    try:
        folder.mkdir(parents=True, exist_ok=True)
        begun = time.perf_counter()
        # Without a name: a process that is killed leaves nothing
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(probe_bytes // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return probe_bytes / (time.perf_counter() - begun)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written: {error.strerror}: make room, or name another"
        ) from None


def free_bytes(folder: Path) -> int:
    """Return the free space of a disk in bytes.

    Args:
        folder (`Path`): a folder on the disk; it need not exist yet.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def check_disk(
    folder: Path,
    *,
    checkpoint_bytes: int | None,
    bytes_per_s: float | None,
    notice_s: float,
    host: str | None = None,
) -> list[Finding]:
    """Check that two checkpoints fit on the disk and that a save takes less time than a preemption notice gives.

    Args:
        folder (`Path`): where checkpoints are written.
        checkpoint_bytes (`int`, *optional*): size of one checkpoint; None: not known.
        bytes_per_s (`float`, *optional*): write speed of the disk; None: not known.
        notice_s (`float`): seconds between a preemption notice and the end of the machine.
        host (`str`, *optional*): the name of this node.

    Returns:
        `list[Finding]`: an error if two checkpoints do not fit, a warning if a save takes too long; a note if the size
        of a checkpoint is not known.
    """
    free = free_bytes(folder)
    if checkpoint_bytes is None:
        problem = (
            f"{free / GIB:.1f} GiB are free in {folder}; the size of a checkpoint is not known"
        )
        return [
            Finding(
                level="note", check="disk", problem=problem, fix="give --checkpoint-gib", host=host
            )
        ]
    found = []
    if free < 2 * checkpoint_bytes:
        problem = (
            f"{free / GIB:.1f} GiB are free in {folder} and two checkpoints need {2 * checkpoint_bytes / GIB:.1f} "
            "(the old one is deleted when the new one is complete)"
        )
        fix = "make room, or name another folder"
        found.append(Finding(level="error", check="disk", problem=problem, fix=fix, host=host))
    if bytes_per_s is not None and checkpoint_bytes / bytes_per_s > notice_s:
        problem = (
            f"a save takes {checkpoint_bytes / bytes_per_s:.0f} s, a preemption notice gives {notice_s:.0f} s "
            f"({checkpoint_bytes / GIB:.1f} GiB at {bytes_per_s / 1e6:.0f} MB/s in {folder}): a preempted machine "
            "loses the steps after its last save"
        )
        fix = "save more often, or to faster storage"
        found.append(Finding(level="warning", check="disk", problem=problem, fix=fix, host=host))
    return found
