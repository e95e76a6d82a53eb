"""Accelerators and their peaks, links and memory, from `hardware.toml`."""

import difflib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

from hfscale.errors import UnknownHardwareError, UsageError

Dtype = Literal["bf16", "fp16", "fp8", "tf32", "fp32"]
"""Formats of matrix products; `tf32` is what fp32 matrices use where torch allows it, `fp32` where it does not."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device as torch sees it. Fields that no source states for sure are None."""

    name: str
    """Its name in hfscale: `H100-80GB`."""
    aliases: tuple[str, ...]
    """Other names for it."""
    device_names: tuple[str, ...]
    """Regular expressions for the whole of `torch.cuda.get_device_name()`."""
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
    """Best large fp16 matrix product measured, TFLOP/s; None takes bf16's part of the peak."""
    achieved_fp32_tflops: float | None = None
    """Best large fp32 matrix product measured, TFLOP/s; None takes bf16's part of the peak."""
    achieved_memory_tb_s: float | None = None
    """Memory bandwidth of a large copy, read and written, TB/s; None takes the stacks' usual part of `memory_tb_s`."""
    achieved_link_gb_s: float | None = None
    """What a ring inside the node moves past each device, GB/s; None takes the usual part of `link_gb_s`."""
    achieved_network_gb_s: float | None = None
    """What a ring between nodes moves per device, GB/s; None takes the usual part of `network_gb_s`."""
    hop_us: float | None = None
    """Latency of one step of a ring inside the node, microseconds."""
    network_hop_us: float | None = None
    """Latency of one step of a ring between nodes, microseconds."""
    base: str | None = None
    """For a measured device: the name of the row of `hardware.toml` whose datasheet it has, and whose prices."""
    memory_gib: float
    """Device memory that torch reports in total, GiB."""
    memory_tb_s: float
    """Memory bandwidth, TB/s."""
    link_gb_s: float | None = None
    """NVLink or xGMI bandwidth of one device to all others of its node, one direction, GB/s; None without one (bridges
    between pairs of cards are not counted)."""
    host_gb_s: float | None = None
    """Bandwidth to the CPU's memory, one direction, GB/s: PCIe x16 or NVLink-C2C."""
    network_gb_s: float | None = None
    """Network bandwidth per device of the vendor's reference node, one direction, GB/s."""
    power_w: float | None = None
    """Power limit, W."""
    source: str
    """Document that the numbers come from."""
    date: str
    """Year of that document's edition."""


@cache
def accelerators() -> tuple[Accelerator, ...]:
    """All accelerators of `hardware.toml`, in its order."""
    text = resources.files("hfscale.facts").joinpath("hardware.toml").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = tomllib.loads(text)["accelerator"]
    for row in rows:
        row["aliases"], row["device_names"] = tuple(row["aliases"]), tuple(row["device_names"])
    return tuple(Accelerator(**row) for row in rows)


@cache
def _by_plain_name() -> dict[str, Accelerator]:
    return {plain_name(known): row for row in accelerators() for known in (row.name, *row.aliases)}


@cache
def accelerator(name: str) -> Accelerator:
    """The accelerator called `name`, by its name or an alias.

    Case, spaces, dashes and underscores do not matter, nor does a remark in brackets: `B200 (cluster X)`.

    Raises:
        `UnknownHardwareError`: There is none; the message names the nearest.
    """
    by_name = _by_plain_name()
    plain = plain_name(name)
    if plain in by_name:
        return by_name[plain]
    same_start = [known for known in by_name if known.startswith(plain) or plain.startswith(known)] if plain else []
    close = same_start or difflib.get_close_matches(plain, by_name, n=4) or _misspelt(plain, by_name) or by_name
    nearest = dict.fromkeys(by_name[known].name for known in close)
    raise UnknownHardwareError(
        f"GPU {name!r} is not in hfscale's table: use one of {', '.join(nearest)}, or add it to "
        "hfscale/facts/hardware.toml"
    )


def _misspelt(plain: str, names: Iterable[str]) -> list[str]:
    """Names that begin nearly as `plain` does: `h1oo` and `h10080gb`."""
    openings = {known: known[: len(plain)] for known in names if len(known) >= len(plain) > 2}
    near = set(difflib.get_close_matches(plain, openings.values(), n=1, cutoff=0.5))
    return [known for known, opening in openings.items() if opening in near]


def match_device_name(name: str) -> Accelerator | None:
    """The accelerator that `torch.cuda.get_device_name()` calls `name`; None where it is not a known one as a whole.

    A MIG slice, a laptop part or another cut-down version is not the accelerator whose name it bears.
    """
    for row in accelerators():
        if any(re.fullmatch(pattern, name.strip(), flags=re.IGNORECASE) for pattern in row.device_names):
            return row
    return None


def peak_tflops(accelerator: Accelerator, dtype: Dtype) -> float | None:
    """Dense peak of matrix products in `dtype`, TFLOP/s; None where the device has no such format or none is known.

    Raises:
        `UsageError`: `dtype` is not one of `bf16`, `fp16`, `fp8`, `tf32`, `fp32`.
    """
    peaks: dict[str, float | None] = {
        "bf16": accelerator.bf16_tflops,
        "fp16": accelerator.fp16_tflops,
        "fp8": accelerator.fp8_tflops,
        "tf32": accelerator.tf32_tflops,
        "fp32": accelerator.fp32_tflops,
    }
    if dtype not in peaks:
        raise UsageError(f"dtype {dtype!r} is not one with a peak: use one of {', '.join(get_args(Dtype))}")
    return peaks[dtype]


def plain_name(name: str) -> str:
    """A name without what does not matter in it."""
    return re.sub(r"\(.*\)|[\s_-]", "", name).casefold()
