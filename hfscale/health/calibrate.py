"""Measures the machine at hand and writes what it found where later plans look for it.

    hfscale plan --calibrate                          # one device: matrix products, memory, the way to the host
    accelerate launch -m hfscale plan --calibrate     # all of them: collectives too

A matrix product of n x n takes 2 n^3 FLOPs; a copy of b bytes moves 2 b. A ring of n ranks moves (n-1)/n of the whole
buffer past each rank in an all-gather or a reduce-scatter, and twice that in an all-reduce (Thakur et al., 2005).
"""

import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hfscale.errors import StorageError, UsageError
from hfscale.facts.hardware import Accelerator, match_device_name
from hfscale.facts.local_hardware import read_document, read_rows
from hfscale.utils import distributed

GIB = 2**30
SECONDS = 0.3
"""Least time that a measurement on one device takes, its median being the result."""
ROUNDS = 7
"""Calls of a collective, its median being the result: every rank must make as many."""
# torch 2.13 has new names for them, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_KEPT = ("achieved_link_gb_s", "achieved_network_gb_s", "hop_us", "network_hop_us")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured with."""

    matrices: tuple[int, ...]
    """Widths of square matrices."""
    copy_bytes: int
    """Bytes of the buffer that is copied: well above the caches."""
    messages: tuple[int, ...]
    """Whole buffers of the collectives, bytes; the smallest tells the latency, the largest the bandwidth."""


ON_GPU = Sizes(matrices=(1024, 2048, 4096, 8192, 16384), copy_bytes=GIB, messages=tuple(4**n for n in range(6, 15)))
ON_CPU = Sizes(matrices=(512, 1024, 2048), copy_bytes=2**28, messages=tuple(4**n for n in range(6, 13)))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured, the slowest rank's numbers throughout."""

    gpu: Accelerator
    """The row that plans use, under its name."""
    measurements: tuple[dict[str, Any], ...]
    """Each single one: its `kind`, its size, its `seconds` and its rate."""
    processes: int
    """How many measured at the same time."""


def calibrate(sizes: Sizes | None = None) -> Calibration:
    """Measure this machine; under a launcher every rank must call it.

    Args:
        sizes (`Sizes`, *optional*): By default `ON_GPU` or `ON_CPU`.

    Raises:
        `UsageError`: The device is neither a CUDA GPU nor a CPU.
    """
    on_gpu = torch.cuda.is_available()
    if torch.accelerator.is_available() and not on_gpu:
        raise UsageError(
            f"calibration measures CUDA and ROCm GPUs and CPUs, not {torch.accelerator.current_accelerator()}"
        )
    sizes = sizes or (ON_GPU if on_gpu else ON_CPU)
    with _process_group(on_gpu):
        device = _device(on_gpu)
        found = [*_matrix_products(device, sizes), *_copies(device, sizes)]
        groups = _groups()
        found += [row for where, group in groups.items() for row in _collectives(device, sizes, where, group)]
        return Calibration(
            gpu=_accelerator(device, found), measurements=tuple(found), processes=distributed.world_size()
        )


def write(calibration: Calibration, path: Path) -> Accelerator:
    """Write the row into `path`, in the place of the row of that name; other rows stay.

    Collectives that a single process could not measure are kept from the row that was there. Returns the row written.

    Raises:
        `ConfigFileError`: The file is there and not one of these.
        `StorageError`: It cannot be written.
    """
    rows, document, name = (), {}, calibration.gpu.name
    if path.exists():
        rows, document = read_rows(path), read_document(path)
    gpu = calibration.gpu
    for old in rows:
        if old.name == name and calibration.processes == 1:
            gpu = replace(gpu, **{key: getattr(old, key) for key in _KEPT})
    others = [row for row in document.pop("accelerator", []) if row["name"] != name]
    tables = [("accelerator", row) for row in (*others, _as_dict(gpu))]
    tables += [(key, row) for key, content in document.items() for row in content if row.get("gpu") != name]
    tables += [("measurement", {"gpu": name, **row}) for row in calibration.measurements]
    text = "# Written by `hfscale plan --calibrate`; plans find its accelerators by their names.\n"
    text += "".join(f"\n[[{key}]]\n" + "".join(_lines(row)) for key, row in tables)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}.part")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; name another file") from None
    return gpu


def _as_dict(gpu: Accelerator) -> dict[str, Any]:
    values = {field.name: getattr(gpu, field.name) for field in fields(gpu)}
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in values.items() if value is not None
    }


def _lines(row: dict[str, Any]) -> Iterator[str]:
    for key, value in row.items():
        shown = float(f"{value:.4g}") if isinstance(value, float) else value
        yield f"{key} = {json.dumps(shown)}\n"  # JSON's texts, numbers and lists are TOML's


@contextmanager
def _process_group(on_gpu: bool) -> Iterator[None]:
    """The default group, where a launcher started several processes and nobody has made it."""
    is_ours = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if is_ours:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=5))
    try:
        yield
    finally:
        if is_ours:
            dist.destroy_process_group()


def _device(on_gpu: bool) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _once(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, its kernels included."""
    begun = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call on this device, the slowest rank's."""
    for _ in range(2):
        _once(run, device)
    times: list[float] = []
    while sum(times) < SECONDS and len(times) < 1000:
        times.append(_once(run, device))
    return distributed.all_max([statistics.median(times)])[0]


def _matrix_products(device: torch.device, sizes: Sizes) -> Iterator[dict[str, Any]]:
    names = ["fp32"]
    if device.type == "cuda":
        names = ["fp16", *(["bf16"] if torch.cuda.is_bf16_supported(including_emulation=False) else [])]
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    for name in names:
        for n in sizes.matrices:
            a, b = (torch.randn(n, n, device=device).to(dtypes[name]) for _ in range(2))
            out = torch.empty_like(a)
            seconds = _seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device)
            yield {"kind": "matmul", "dtype": name, "n": n, "seconds": seconds, "tflops": 2 * n**3 / seconds / 1e12}


def _copies(device: torch.device, sizes: Sizes) -> Iterator[dict[str, Any]]:
    size = sizes.copy_bytes
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source), device)
    yield {"kind": "copy", "bytes": size, "seconds": seconds, "gb_s": 2 * size / seconds / 1e9}
    if device.type == "cuda":
        pinned = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        seconds = _seconds(lambda: target.copy_(pinned, non_blocking=True), device)
        yield {"kind": "host", "bytes": size, "seconds": seconds, "gb_s": size / seconds / 1e9}


def _groups() -> "dict[str, dist.ProcessGroup | None]":
    """The default group, and on several nodes the ranks of this one too."""
    if not distributed.is_distributed():
        return {}
    if _nodes() == 1:
        return {"node": dist.group.WORLD}
    inside = dist.new_subgroups(group_size=_per_node())[0] if _per_node() > 1 else None
    return {**({"node": inside} if inside is not None else {}), "network": dist.group.WORLD}


def _per_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", distributed.world_size()))


def _nodes() -> int:
    return max(1, distributed.world_size() // _per_node())


def _collectives(
    device: torch.device, sizes: Sizes, where: str, group: "dist.ProcessGroup | None"
) -> Iterator[dict[str, Any]]:
    """All-reduce, all-gather and reduce-scatter of each size; `gb_s` is what the ring moves past each rank."""
    ranks = dist.get_world_size(group)
    for size in sizes.messages:
        part = torch.zeros(max(1, size // 4 // ranks), device=device)
        whole = torch.zeros(part.numel() * ranks, device=device)
        calls: dict[str, tuple[int, Callable[[], object]]] = {
            "all_reduce": (2, lambda whole=whole: dist.all_reduce(whole, group=group)),
            "all_gather": (1, lambda w=whole, p=part: _all_gather(w, p, group=group)),
            "reduce_scatter": (1, lambda w=whole, p=part: _reduce_scatter(p, w, group=group)),
        }
        for kind, (passes, run) in calls.items():
            times = [_once(run, device) for _ in range(ROUNDS + 1)][1:]
            seconds = distributed.all_max([statistics.median(times)])[0]
            moved = passes * whole.nbytes * (ranks - 1) / ranks
            row = {"kind": kind, "where": where, "ranks": ranks, "bytes": whole.nbytes, "seconds": seconds}
            yield {**row, "passes": passes, "gb_s": moved / seconds / 1e9}


def _ring(found: list[dict[str, Any]], where: str) -> tuple[float, float] | None:
    """Seconds of a ring's latency, from the smallest buffers, and GB/s past each rank, from the largest."""
    rows = [row for row in found if row.get("where") == where]
    if not rows:
        return None
    smallest, largest = min(row["bytes"] for row in rows), max(row["bytes"] for row in rows)
    latency = statistics.median(row["seconds"] / row["passes"] for row in rows if row["bytes"] == smallest)
    last = [row for row in rows if row["bytes"] == largest]
    # The whole of the largest exchanges over the whole of their time: latency is a small part of it.
    return latency, sum(row["gb_s"] * row["seconds"] for row in last) / sum(row["seconds"] for row in last)


def _accelerator(device: torch.device, found: list[dict[str, Any]]) -> Accelerator:
    """The row: the datasheet's where the device is known, else with the best measured as its peaks."""
    best: dict[str, float] = {}
    for row in found:
        if row["kind"] == "matmul":
            best[row["dtype"]] = max(best.get(row["dtype"], 0.0), row["tflops"])
    rate = {row["kind"]: row["gb_s"] for row in found if row["kind"] in ("copy", "host")}
    full_name = torch.cuda.get_device_name(device) if device.type == "cuda" else (platform.machine() or "cpu")
    known = match_device_name(full_name) if device.type == "cuda" else None
    measured: dict[str, Any] = {f"achieved_{dtype}_tflops": value for dtype, value in best.items()}
    measured |= {"achieved_memory_tb_s": rate["copy"] / 1e3, "memory_gib": _memory_gib(device), **_links(found)}
    measured |= {"date": str(date.today().year), "aliases": (), "device_names": ()}
    with_torch = f"measured by hfscale plan --calibrate with torch {torch.__version__} on {date.today()}"
    if known is not None:
        source = f"{known.source}; achieved rates {with_torch}"
        return replace(known, **measured, name=f"local-{known.name}", base=known.name, source=source)
    peaks: dict[str, Any] = {f"{dtype}_tflops": value for dtype, value in best.items()}
    name = "cpu" if device.type == "cpu" else re.sub(r"\W+", "-", full_name).strip("-")
    return Accelerator(
        **measured,
        **peaks,
        memory_tb_s=rate["copy"] / 1e3,
        host_gb_s=rate.get("host"),
        name=f"local-{name}",
        source=f"{full_name}: peaks are the best that was {with_torch}",
    )


def _links(found: list[dict[str, Any]]) -> dict[str, float]:
    """Bandwidths and latencies as `hfscale.planner.network` counts them."""
    links: dict[str, float] = {}
    per_node, hop_s = _per_node(), 0.0
    if inside := _ring(found, "node"):
        hop_s = inside[0] / max(1, per_node - 1)
        links |= {"achieved_link_gb_s": inside[1], "hop_us": hop_s * 1e6}
    if between := _ring(found, "network"):
        left = between[0] - hop_s * (distributed.world_size() - 1)
        links["achieved_network_gb_s"] = between[1] / per_node
        if left > 0:
            links["network_hop_us"] = left / (_nodes() - 1) * 1e6
    return links


def _memory_gib(device: torch.device) -> float:
    """Of the GPU; of the machine, divided among its processes."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory / GIB)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB / _per_node()
