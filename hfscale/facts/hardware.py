"""Accelerators and their peaks, links and memory, from `hardware.toml`."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from hfscale.core.tables import read_table
from hfscale.errors import UnknownHardwareError, UsageError

Dtype = Literal["bf16", "fp16", "fp8", "tf32", "fp32"]
"""Formats of matrix products. fp32 matrices use `tf32` where torch allows it, and `fp32` where it does not."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Describes one device as torch reports it. A field for which there is no reliable source is None."""

    name: str
    """Its name in hfscale, such as `H100-80GB`."""
    aliases: tuple[str, ...]
    """Other names for it."""
    device_names: tuple[str, ...]
    """Regular expressions that match all of `torch.cuda.get_device_name()`."""
    bf16_tflops: float | None = None
    """Dense peak of bf16 matrix products, TFLOP/s; None on hardware without bf16."""
    fp16_tflops: float | None = None
    """Dense peak of fp16 matrix products with fp32 accumulation, TFLOP/s."""
    fp8_tflops: float | None = None
    """Dense peak of fp8 matrix products with fp32 accumulation, TFLOP/s; None on hardware without fp8."""
    tf32_tflops: float | None = None
    """Dense peak of tf32 matrix products, TFLOP/s."""
    fp32_tflops: float | None = None
    """Peak of fp32 matrix products without tf32, TFLOP/s."""
    achieved_bf16_tflops: float | None = None
    """Best large bf16 matrix product measured with torch, TFLOP/s."""
    achieved_fp16_tflops: float | None = None
    """Best large fp16 matrix product measured, TFLOP/s; by default the same fraction of the peak as bf16."""
    achieved_fp32_tflops: float | None = None
    """Best large fp32 matrix product measured, TFLOP/s; by default the same fraction of the peak as bf16."""
    achieved_memory_tb_s: float | None = None
    """Memory bandwidth of a large copy, read and written, TB/s; by default the usual fraction of `memory_tb_s`."""
    achieved_link_gb_s: float | None = None
    """Bandwidth of a ring inside the node, measured per device, GB/s; by default the usual fraction of `link_gb_s`."""
    achieved_network_gb_s: float | None = None
    """Bandwidth of a ring between nodes, measured per device, GB/s; by default the usual fraction of
    `network_gb_s`."""
    hop_us: float | None = None
    """Latency of one step of a ring inside the node, microseconds."""
    network_hop_us: float | None = None
    """Latency of one step of a ring between nodes, microseconds."""
    base: str | None = None
    """For a measured device: the name of the row of `hardware.toml` with its datasheet numbers and prices."""
    memory_gib: float
    """Total device memory that torch reports, GiB."""
    memory_tb_s: float
    """Memory bandwidth, TB/s."""
    l2_mib: float | None = None
    """Level-2 cache, MiB, where it is one piece and several times as fast as the memory, as from Ada on beside GDDR;
    None elsewhere (A100 and H100 have two halves, which are hardly faster than their HBM)."""
    link_gb_s: float | None = None
    """NVLink or xGMI bandwidth of one device to all others of its node, one direction, GB/s; None if it has
    none (bridges between pairs of cards are not counted)."""
    host_gb_s: float | None = None
    """Bandwidth to the CPU's memory, one direction, GB/s: PCIe x16 or NVLink-C2C."""
    network_gb_s: float | None = None
    """Network bandwidth per device of the vendor's reference node, one direction, GB/s."""
    power_w: float | None = None
    """Power limit, W."""
    source: str
    """The document that the numbers come from."""
    date: str
    """Year of that document's edition."""

    @property
    def is_nvidia(self) -> bool:
        """Whether it is a GPU of NVIDIA, by the names that torch reports."""
        return any("NVIDIA" in name for name in self.device_names)


@cache
def accelerators() -> tuple[Accelerator, ...]:
    """Read all accelerators of `hardware.toml`, in the order of the file."""
    rows: list[dict[str, Any]] = read_table("facts/hardware.toml")["accelerator"]
    for row in rows:
        row["aliases"] = tuple(row["aliases"])
        row["device_names"] = tuple(row["device_names"])
    return tuple(Accelerator(**row) for row in rows)


@cache
def _by_plain_name() -> dict[str, Accelerator]:
    return {plain_name(known): row for row in accelerators() for known in (row.name, *row.aliases)}


@cache
def accelerator(name: str) -> Accelerator:
    """Return the accelerator of `hardware.toml` with this name or alias.

    Case, spaces, dashes, underscores and a remark in brackets, as in `B200 (cluster X)`, are ignored.

    Raises:
        UnknownHardwareError: there is none; the message gives the nearest names.
    """
    by_name = _by_plain_name()
    plain = plain_name(name)
    if plain in by_name:
        return by_name[plain]
    same_start = (
        [known for known in by_name if known.startswith(plain) or plain.startswith(known)]
        if plain
        else []
    )
    close = (
        same_start
        or difflib.get_close_matches(plain, by_name, n=4)
        or _misspelt(plain, by_name)
        or by_name
    )
    nearest = dict.fromkeys(by_name[known].name for known in close)
    raise UnknownHardwareError(
        f"GPU {name!r} is unknown: use one of {', '.join(nearest)}, or add it to hfscale/facts/hardware.toml"
    )


def _misspelt(plain: str, names: Iterable[str]) -> list[str]:
    """Return the names whose beginning resembles `plain`, as that of `h10080gb` resembles `h1oo`."""
    openings = {known: known[: len(plain)] for known in names if len(known) >= len(plain) > 2}
    near = set(difflib.get_close_matches(plain, openings.values(), n=1, cutoff=0.5))
    return [known for known, opening in openings.items() if opening in near]


def match_device_name(name: str) -> Accelerator | None:
    """Return the accelerator that `torch.cuda.get_device_name()` calls `name`; None if it is not a known one.

    A MIG slice, a laptop version or another reduced version does not match the accelerator whose name it contains.
    """
    for row in accelerators():
        if any(
            re.fullmatch(pattern, name.strip(), flags=re.IGNORECASE) for pattern in row.device_names
        ):
            return row
    return None


def peak_tflops(accelerator: Accelerator, dtype: Dtype) -> float | None:
    """Return the dense peak of matrix products in `dtype`, TFLOP/s.

    Args:
        accelerator (`Accelerator`): the device.
        dtype (`str`): format of the matrix products: `bf16`, `fp16`, `fp8`, `tf32` or `fp32`.

    Returns:
        `float`, *optional*: The peak; None if the device does not support the format or no peak is known.

    Raises:
        UsageError: `dtype` is not one of these formats.
    """
    if dtype not in get_args(Dtype):
        raise UsageError(f"dtype is {dtype!r}: use one of {', '.join(get_args(Dtype))}")
    peak: float | None = getattr(accelerator, f"{dtype}_tflops")
    return peak


def peak_dtype(dtype: Dtype) -> Dtype:
    """Return the dtype whose peak utilization is relative to: that of the matrix products, but `bf16` for `fp8`.

    With fp8 the linear layers use the fp8 units, and attention and the head those of bf16. torchtitan reports no MFU
    in its benchmarks for that reason (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md), and in its log divides
    by the bf16 peak in any case (`get_peak_flops` in torchtitan/tools/utils.py). So does hfscale: the MFU of an fp8
    run over that of a bf16 run is then the speedup. Runs report it so, and estimates print it so.

    Args:
        dtype (`str`): the dtype of the matrix products, `bf16`, `fp16`, `fp8`, `tf32` or `fp32`.
    """
    return "bf16" if dtype == "fp8" else dtype


def plain_name(name: str) -> str:
    """Return a name in lower case without spaces, dashes, underscores and remarks in brackets."""
    return re.sub(r"\(.*\)|[\s_-]", "", name).casefold()
