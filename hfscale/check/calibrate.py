"""Measures this machine and writes the result where later plans look for it.

    hfscale plan --calibrate                          # one device: matrix products, memory, transfers from the host
    accelerate launch -m hfscale plan --calibrate     # all devices: collectives too

Operations and formulas are those of `hfscale.health.measure`. A copy of b bytes counts as 2 b: b are read and b are
written.
"""

import functools
import json
import os
import platform
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hfscale.core import distributed
from hfscale.core.collectives import TRAINING
from hfscale.core.disk_errors import writing
from hfscale.core.durable_files import write_atomically
from hfscale.core.launch_variables import launch_number
from hfscale.errors import UsageError
from hfscale.facts.hardware import Accelerator, match_device_name
from hfscale.facts.own_hardware import read_hardware_document, read_hardware_file
from hfscale.health import measure

GIB = 2**30
SECONDS = 0.3
"""Least seconds that a measurement on one device takes; its result is the median."""
ROUNDS = 7
"""Timed calls of a collective, whose median is the result: every rank must make as many."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
_FROM_SEVERAL_PROCESSES = (
    "achieved_link_gb_s",
    "achieved_network_gb_s",
    "hop_us",
    "network_hop_us",
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Holds the sizes of the matrices and buffers that a calibration measures."""

    matrices: tuple[int, ...]
    """Widths of square matrices."""
    copy_bytes: int
    """Bytes of the buffer that is copied: well above the size of the caches."""
    messages: tuple[int, ...]
    """Full buffers of the collectives, bytes; the smallest shows the latency, the largest the bandwidth."""


ON_GPU = Sizes(
    matrices=(1024, 2048, 4096, 8192, 16384),
    copy_bytes=GIB,
    messages=tuple(4**n for n in range(6, 15)),
)
ON_CPU = Sizes(
    matrices=(512, 1024, 2048), copy_bytes=2**28, messages=tuple(4**n for n in range(6, 13))
)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Holds the results of a calibration; times are those of the slowest rank."""

    gpu: Accelerator
    """The row that plans use, under its name."""
    measurements: tuple[dict[str, Any], ...]
    """Each single measurement: its `kind`, its size, its `seconds` and its rate."""
    processes: int
    """The number of processes that measured at the same time."""


def calibrate() -> Calibration:
    """Measure this machine; under a launcher every rank must call it.

    Returns:
        `Calibration`: the measurements, and the hardware row that is made from them.

    Raises:
        UsageError: the device is neither a CUDA GPU nor a CPU.
    """
    on_gpu = torch.cuda.is_available()
    if torch.accelerator.is_available() and not on_gpu:
        raise UsageError(
            f"calibration measures CUDA and ROCm GPUs and CPUs, not {torch.accelerator.current_accelerator()}"
        )
    sizes = ON_GPU if on_gpu else ON_CPU
    with _process_group(on_gpu):
        device = (
            torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        )
        rows = [*_matrix_products(device, sizes), *_copies(device, sizes)]
        for where, group in _groups().items():
            rows += _collectives(device, sizes, where, group)
        return Calibration(
            gpu=_accelerator(device, rows),
            measurements=tuple(rows),
            processes=distributed.world_size(),
        )


def write(calibration: Calibration, path: Path) -> Accelerator:
    """Write the calibrated row into a hardware file, replacing the row of the same name; other rows stay.

    A single process cannot measure collectives: their rates are kept from the replaced row.

    Args:
        calibration (`Calibration`): what was measured.
        path (`Path`): the hardware file; it is created if it does not exist.

    Returns:
        `Accelerator`: the row that was written.

    Raises:
        ConfigFileError: the file exists and is not a hardware file.
        StorageError: it cannot be written.
    """
    gpu = calibration.gpu
    if path.exists() and calibration.processes == 1:
        for old in read_hardware_file(path):
            if old.name == gpu.name:
                gpu = replace(gpu, **{key: getattr(old, key) for key in _FROM_SEVERAL_PROCESSES})
    write_row(gpu, path, calibration.measurements)
    return gpu


def write_row(gpu: Accelerator, path: Path, measurements: Iterable[Mapping[str, Any]]) -> None:
    """Write a row and what it was measured with into a hardware file, replacing those of the same name.

    Args:
        gpu (`Accelerator`): the row.
        path (`Path`): the hardware file; it is created if it does not exist.
        measurements (`Iterable[Mapping[str, Any]]`): the measurements that the row comes from.

    Raises:
        ConfigFileError: the file exists and is not a hardware file.
        StorageError: it cannot be written.
    """
    document: dict[str, Any] = {}
    if path.exists():
        document = read_hardware_document(path)
        read_hardware_file(path)  # a wrong row is reported, not copied
    known = {key: value for key, value in asdict(gpu).items() if value is not None}
    others = [row for row in document.pop("accelerator", []) if row["name"] != gpu.name]
    tables = [("accelerator", row) for row in (*others, known)]
    tables += [
        (key, row) for key, rows in document.items() for row in rows if row.get("gpu") != gpu.name
    ]
    tables += [("measurement", {"gpu": gpu.name, **row}) for row in measurements]
    text = "# Written by `hfscale plan --calibrate`; plans find its accelerators by their names.\n"
    text += "".join(f"\n[[{key}]]\n" + "".join(_toml_lines(row)) for key, row in tables)
    with writing(path, "name another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)


def _toml_lines(row: Mapping[str, Any]) -> Iterator[str]:
    for key, value in row.items():
        rounded = float(f"{value:.4g}") if isinstance(value, float) else value
        # strings, numbers and lists are written alike in JSON and TOML
        yield f"{key} = {json.dumps(rounded)}\n"


@contextmanager
def _process_group(on_gpu: bool) -> Iterator[None]:
    """Create the default group where a launcher started several processes and there is none yet."""
    is_ours = launch_number("WORLD_SIZE", 1) > 1 and not dist.is_initialized()
    if on_gpu:
        torch.cuda.set_device(launch_number("LOCAL_RANK", 0) % torch.cuda.device_count())
    if is_ours:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=5))
    try:
        yield
    finally:
        if is_ours:
            dist.destroy_process_group()


def _slowest_rank_s(seconds: float) -> float:
    return TRAINING.maximum("calibration", [seconds])[0]


def _median_s(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call on this device, of the slowest rank."""
    for _ in range(2):
        measure.time_call(run, device)
    times: list[float] = []
    while sum(times) < SECONDS and len(times) < 1000:
        times.append(measure.time_call(run, device))
    return _slowest_rank_s(statistics.median(times))


def _matrix_products(device: torch.device, sizes: Sizes) -> Iterator[dict[str, Any]]:
    names = ["fp32"]
    if device.type == "cuda":
        names = [
            "fp16",
            *(["bf16"] if torch.cuda.is_bf16_supported(including_emulation=False) else []),
        ]
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    for name in names:
        for n in sizes.matrices:
            a, b = (torch.randn(n, n, device=device).to(dtypes[name]) for _ in range(2))
            out = torch.empty_like(a)
            seconds = _median_s(functools.partial(torch.mm, a, b, out=out), device)
            yield {
                "kind": "matmul",
                "dtype": name,
                "n": n,
                "seconds": seconds,
                "tflops": 2 * n**3 / seconds / 1e12,
            }


def _copies(device: torch.device, sizes: Sizes) -> Iterator[dict[str, Any]]:
    size = sizes.copy_bytes
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _median_s(lambda: target.copy_(source), device)
    yield {"kind": "copy", "bytes": size, "seconds": seconds, "gb_s": 2 * size / seconds / 1e9}
    if device.type == "cuda":
        pinned = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        seconds = _median_s(lambda: target.copy_(pinned, non_blocking=True), device)
        yield {"kind": "host", "bytes": size, "seconds": seconds, "gb_s": size / seconds / 1e9}


def _groups() -> "dict[str, dist.ProcessGroup | None]":
    """Return the default group, and on several nodes the ranks of this node too."""
    if not distributed.is_distributed():
        return {}
    if _nodes() == 1:
        return {"node": dist.group.WORLD}
    inside = dist.new_subgroups(group_size=_per_node())[0] if _per_node() > 1 else None
    return {**({"node": inside} if inside is not None else {}), "network": dist.group.WORLD}


def _per_node() -> int:
    return launch_number("LOCAL_WORLD_SIZE", distributed.world_size())


def _nodes() -> int:
    return max(1, distributed.world_size() // _per_node())


def _collectives(
    device: torch.device, sizes: Sizes, where: str, group: "dist.ProcessGroup | None"
) -> Iterator[dict[str, Any]]:
    """Return the collectives of `KINDS` at each size."""
    ranks = dist.get_world_size(group)
    for size in sizes.messages:
        for kind in KINDS:
            collective = measure.make_collective(kind, size, device, group)
            seconds = _slowest_rank_s(measure.time_collective(collective, device, ROUNDS))
            yield {
                "kind": kind,
                "where": where,
                "ranks": ranks,
                "bytes": collective.full_bytes,
                "seconds": seconds,
                "passes": measure.RING_PASSES[kind],
                "gb_s": collective.ring_bytes(ranks) / seconds / 1e9,
            }


def _ring(rows: list[dict[str, Any]], where: str) -> tuple[float, float] | None:
    """Latency of one pass around the ring, seconds, from the smallest buffers; GB/s past each rank, from the
    largest."""
    rows = [row for row in rows if row.get("where") == where]
    if not rows:
        return None
    smallest = min(row["bytes"] for row in rows)
    largest = max(row["bytes"] for row in rows)
    latency = statistics.median(
        row["seconds"] / row["passes"] for row in rows if row["bytes"] == smallest
    )
    last = [row for row in rows if row["bytes"] == largest]
    # The volume of the largest exchanges over their time: latency is a small part of it.
    return latency, sum(row["gb_s"] * row["seconds"] for row in last) / sum(
        row["seconds"] for row in last
    )


def _accelerator(device: torch.device, rows: list[dict[str, Any]]) -> Accelerator:
    """Return the datasheet's row where the device is known, else a row with the best measured rates as peaks."""
    best: dict[str, float] = {}
    for row in rows:
        if row["kind"] == "matmul":
            best[row["dtype"]] = max(best.get(row["dtype"], 0.0), row["tflops"])
    rate = {row["kind"]: row["gb_s"] for row in rows if row["kind"] in ("copy", "host")}
    full_name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else (platform.machine() or "cpu")
    )
    known = match_device_name(full_name) if device.type == "cuda" else None
    measured: dict[str, Any] = {f"achieved_{dtype}_tflops": value for dtype, value in best.items()}
    measured |= {
        "achieved_memory_tb_s": rate["copy"] / 1e3,
        "memory_gib": _memory_gib(device),
        **_links(rows),
    }
    measured |= {"date": str(date.today().year), "aliases": (), "device_names": ()}
    with_torch = (
        f"measured by hfscale plan --calibrate with torch {torch.__version__} on {date.today()}"
    )
    if known is not None:
        source = f"{known.source}; achieved rates {with_torch}"
        return replace(
            known, **measured, name=f"local-{known.name}", base=known.name, source=source
        )
    peaks: dict[str, Any] = {f"{dtype}_tflops": value for dtype, value in best.items()}
    name = "cpu" if device.type == "cpu" else re.sub(r"\W+", "-", full_name).strip("-")
    return Accelerator(
        **measured,
        **peaks,
        memory_tb_s=rate["copy"] / 1e3,
        host_gb_s=rate.get("host"),
        name=f"local-{name}",
        source=f"{full_name}: peaks are the best rates {with_torch}",
    )


def _links(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return bandwidths and latencies as `hfscale.planner.network` uses them."""
    links: dict[str, float] = {}
    per_node = _per_node()
    hop_s = 0.0
    if inside := _ring(rows, "node"):
        hop_s = inside[0] / max(1, per_node - 1)
        links |= {"achieved_link_gb_s": inside[1], "hop_us": hop_s * 1e6}
    if between := _ring(rows, "network"):
        between_nodes_s = between[0] - hop_s * (distributed.world_size() - 1)
        links["achieved_network_gb_s"] = between[1] / per_node
        if between_nodes_s > 0:
            links["network_hop_us"] = between_nodes_s / (_nodes() - 1) * 1e6
    return links


def _memory_gib(device: torch.device) -> float:
    """Memory of the GPU, or a process's part of the machine's memory."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory / GIB)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB / _per_node()
