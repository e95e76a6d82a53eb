"""What a GPU says about itself: heat, power, clocks, memory errors, and the driver's own error numbers.

Read through NVML (package `nvidia-ml-py`, extra `gpu`); without it, or without its library, there is no sensor and no
number.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from hfscale.utils.findings import Finding

# nvml.h, nvmlClocksEventReason*: bits of nvmlDeviceGetCurrentClocksEventReasons.
THERMAL = {0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown"}
BRAKES = {0x08: "hardware slowdown", 0x80: "power brake"}
"""Power capping by software (0x04) is no fault: a GPU at full load runs at its power limit."""
ECC_KINDS = ("corrected", "uncorrected")
# NVIDIA's XID catalogue (docs.nvidia.com/deploy/xid-errors): those that take the GPU or the link away.
FATAL_XIDS = {
    48: "double-bit memory error",
    63: "row remapping",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fell off the bus",
    92: "high rate of corrected memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GSP timeout",
    120: "GSP error",
}
_XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<number>\d+)")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One look at one GPU; None: it does not tell."""

    temperature_c: float | None = None
    """Core temperature, °C."""
    power_w: float | None = None
    """Power drawn, W."""
    sm_clock_mhz: float | None = None
    """Clock of the multiprocessors, MHz."""
    reasons: int = 0
    """Why the clocks are not at their highest: bits as in nvml.h."""
    ecc_uncorrected: int | None = None
    """Memory errors that were not corrected, since the driver was loaded."""
    ecc_corrected: int | None = None
    """Memory errors that were corrected, since the driver was loaded."""
    remap_pending: bool = False
    """A memory row waits for a reset to be replaced."""
    remap_failed: bool = False
    """A memory row could not be replaced."""
    bus: str | None = None
    """PCI address."""

    @property
    def throttled(self) -> str | None:
        """Why it is slowed down against its will; None where it is not."""
        names = [name for bit, name in (THERMAL | BRAKES).items() if self.reasons & bit]
        return ", ".join(names) or None


class Sensor(Protocol):
    """Where readings come from."""

    def read(self) -> Reading:
        """Look now."""


class NvmlSensor:
    """One CUDA device, by NVML.

    Args:
        device (`torch.device`): a CUDA device of this process.
        nvml (module, *optional*): what `import pynvml` gives.
    """

    def __init__(self, device: torch.device, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        properties = torch.cuda.get_device_properties(device)
        # NVML does not follow CUDA_VISIBLE_DEVICES; the UUID is the same for both.
        self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")

    def read(self) -> Reading:
        nvml = self._nvml
        power = self._ask("nvmlDeviceGetPowerUsage")  # mW
        remapped = self._ask("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, pending, failed
        pci = self._ask("nvmlDeviceGetPciInfo")
        return Reading(
            temperature_c=self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power is None else power / 1e3,
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            reasons=self._ask("nvmlDeviceGetCurrentClocksEventReasons") or 0,
            ecc_uncorrected=self._errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            ecc_corrected=self._errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            remap_pending=bool(remapped and remapped[2]),
            remap_failed=bool(remapped and remapped[3]),
            bus=None if pci is None else _text(pci.busId),
        )

    def _errors(self, kind: int) -> int | None:
        found = self._ask("nvmlDeviceGetTotalEccErrors", kind, self._nvml.NVML_VOLATILE_ECC)
        return None if found is None else int(found)

    def _ask(self, name: str, *arguments: Any) -> Any:
        """One value; None where this GPU or driver does not have it."""
        try:
            return getattr(self._nvml, name)(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None


def sensor_of(device: torch.device) -> Sensor | None:
    """The sensor of a CUDA device; None on another device, or where NVML is not there."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        return NvmlSensor(device, pynvml)
    except pynvml.NVMLError:
        return None


class GpuWatch:
    """Keeps a rank's readings, and says once what is new and bad.

    Args:
        sensor (`Sensor`): where they come from.
        kernel_log (`Path`, *optional*): a text of the kernel's messages, for XIDs. By default the kernel's own.
    """

    def __init__(self, sensor: Sensor, kernel_log: Path | None = None) -> None:
        self._sensor, self._kernel_log = sensor, kernel_log
        self.first = self.last = sensor.read()
        """The first and the newest reading."""
        self._told: set[str] = set()
        self._xids = set(self._read_xids())  # those of before the run are not its own

    def look(self) -> list[Finding]:
        """Read, and tell what was not told before."""
        self.last = now = self._sensor.read()
        bad: dict[str, str] = {}
        if now.throttled:
            heat = f" at {now.temperature_c:.0f} °C" if now.temperature_c is not None else ""
            clock = f", {now.sm_clock_mhz:.0f} MHz" if now.sm_clock_mhz is not None else ""
            bad["throttled"] = f"its GPU is throttled{heat}{clock} ({now.throttled}): look at cooling and power"
        for kind in ECC_KINDS:
            before, after = (getattr(reading, f"ecc_{kind}") for reading in (self.first, now))
            if before is not None and after is not None and after > before:
                bad[kind] = f"its GPU has {after - before} more {kind} memory errors since the start: "
                bad[kind] += "take it out of the run" if kind == "uncorrected" else "have it watched"
        if now.remap_failed:
            bad["remap failed"] = "its GPU could not replace a memory row: have it exchanged"
        elif now.remap_pending:
            bad["remap pending"] = "its GPU waits for a reset to replace a memory row: reset it before the next run"
        for bus, number in sorted(set(self._read_xids()) - self._xids):
            if _same_bus(bus, now.bus):
                meaning = f" ({FATAL_XIDS[number]})" if number in FATAL_XIDS else ""
                bad[f"xid {number}"] = f"the driver reports XID {number}{meaning} for its GPU: see the kernel log"
        fresh = {name: text for name, text in bad.items() if name not in self._told}
        self._told |= fresh.keys()
        return [Finding(level="warning", check="gpu", problem=text) for text in fresh.values()]

    def _read_xids(self) -> list[tuple[str, int]]:
        return xids(_kernel_lines(self._kernel_log))


def xids(lines: Iterable[str]) -> list[tuple[str, int]]:
    """The PCI address and number of each XID in the kernel's messages."""
    found = (_XID.search(line) for line in lines)
    return [(match["bus"], int(match["number"])) for match in found if match]


def _kernel_lines(path: Path | None) -> list[str]:
    """The kernel's messages, as far as this user may read them: a text file, or the kernel's buffer."""
    if path is not None:
        return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    lines: list[str] = []
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return lines
    try:
        while len(lines) < 100_000:
            lines.append(os.read(log, 8192).decode("utf-8", errors="replace"))
    except OSError:  # the end (EAGAIN), or a record that was overwritten meanwhile (EPIPE)
        pass
    finally:
        os.close(log)
    return lines


def _same_bus(one: str, other: str | None) -> bool:
    """Whether two PCI addresses are of one device: the kernel writes 0000:17:00, NVML 00000000:17:00.0."""
    if other is None:
        return True
    plain = [part.lower().partition(".")[0].split(":")[-2:] for part in (one, other)]
    return plain[0] == plain[1]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
