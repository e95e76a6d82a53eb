"""GPU telemetry: temperature, power, clocks, memory errors, and the error numbers (XIDs) of the driver.

Values are read through NVML (package `nvidia-ml-py`, extra `gpu`), or on AMD's GPUs through amdsmi, which ROCm brings;
without the package, or without its library, there is no sensor and there are no values.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hfscale.core.findings import Finding
from hfscale.core.tables import read_table
from hfscale.health.amd_gpu import amd_sensor_of
from hfscale.health.readings import Reading, Sensor

ECC_KINDS = ("corrected", "uncorrected")
FATAL_XIDS: Mapping[str, str] = read_table("health/tables.toml")["fatal_xids"]
"""XIDs of a faulty GPU, link or firmware, and their meaning."""
_XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<number>\d+)")


class NvmlSensor:
    """Reads one CUDA device through NVML.

    Args:
        device (`torch.device`): a CUDA device of this process.
        nvml (module): the module `pynvml`.
    """

    def __init__(self, device: torch.device, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        properties = torch.cuda.get_device_properties(device)
        # NVML does not follow CUDA_VISIBLE_DEVICES; the UUID is the same for both.
        self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")

    def read(self) -> Reading:
        nvml = self._nvml
        power = self._query("nvmlDeviceGetPowerUsage")  # mW
        # corrected, uncorrected, pending, failed
        remapped = self._query("nvmlDeviceGetRemappedRows")
        pci = self._query("nvmlDeviceGetPciInfo")
        return Reading(
            temperature_c=self._query("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power is None else power / 1e3,
            sm_clock_mhz=self._query("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            reasons=self._throttle_reasons() or 0,
            ecc_uncorrected=self._errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            ecc_corrected=self._errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            remap_pending=bool(remapped and remapped[2]),
            remap_failed=bool(remapped and remapped[3]),
            bus=None if pci is None else _text(pci.busId),
        )

    def _errors(self, kind: int) -> int | None:
        found = self._query("nvmlDeviceGetTotalEccErrors", kind, self._nvml.NVML_VOLATILE_ECC)
        return None if found is None else int(found)

    def _throttle_reasons(self) -> int | None:
        """Why the clocks are low; nvidia-ml-py before 12.535 has only the older name of the call."""
        reasons: int | None = self._query("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self._query("nvmlDeviceGetCurrentClocksThrottleReasons")
        return reasons

    def _query(self, name: str, *arguments: Any) -> Any:
        """Return one value; None where this GPU, driver or version of nvidia-ml-py does not have it."""
        query = getattr(self._nvml, name, None)
        try:
            return query(self._handle, *arguments) if query is not None else None
        except self._nvml.NVMLError:
            return None


def sensor_of(device: torch.device) -> Sensor | None:
    """Return the sensor of a device.

    Args:
        device (`torch.device`): a device of this process.

    Returns:
        `Sensor | None`: the sensor; None for other devices than GPUs of NVIDIA and AMD, and if NVML or amdsmi is not
        available.
    """
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return amd_sensor_of(device)
    try:
        import pynvml
    except ImportError:
        return None
    try:
        return NvmlSensor(device, pynvml)
    except pynvml.NVMLError:
        return None


class GpuWatch:
    """Watches a rank's GPU and reports each new problem once.

    Args:
        sensor (`Sensor`): the source of readings.
        kernel_log (`Path`, *optional*): a text file with the kernel's messages, for XIDs. By default the kernel's own
            buffer.
    """

    def __init__(self, sensor: Sensor, kernel_log: Path | None = None) -> None:
        self._sensor = sensor
        self._kernel_log = kernel_log
        self.first = self.last = sensor.read()
        """The first and the newest reading."""
        self._reported: set[str] = set()
        self._earlier_xids = set(self._read_xids())  # XIDs from before the run do not concern it

    def look(self) -> list[Finding]:
        """Take a reading.

        Returns:
            `list[Finding]`: warnings about problems that have not been reported before.
        """
        self.last = self._sensor.read()
        problems = self._problems(self.last)
        new = {name: texts for name, texts in problems.items() if name not in self._reported}
        self._reported |= new.keys()
        return [
            Finding(level="warning", check="gpu", problem=problem, fix=fix)
            for problem, fix in new.values()
        ]

    def _problems(self, now: Reading) -> dict[str, tuple[str, str]]:
        """Problem and fix by the name of each current problem."""
        found: dict[str, tuple[str, str]] = {}
        if now.throttled:
            temperature = f" at {now.temperature_c:.0f} °C" if now.temperature_c is not None else ""
            clock = f", {now.sm_clock_mhz:.0f} MHz" if now.sm_clock_mhz is not None else ""
            problem = f"the GPU is throttled{temperature}{clock} ({now.throttled})"
            found["throttled"] = (problem, "check cooling and power")
        for kind in ECC_KINDS:
            before, after = (getattr(reading, f"ecc_{kind}") for reading in (self.first, now))
            if before is not None and after is not None and after > before:
                problem = f"the GPU has {after - before} more {kind} memory errors since the start"
                fix = (
                    "take it out of the run"
                    if kind == "uncorrected"
                    else "watch whether they increase"
                )
                found[kind] = (problem, fix)
        if now.remap_failed:
            found["remap failed"] = (
                "the GPU could not replace a memory row",
                "have the GPU exchanged",
            )
        elif now.remap_pending:
            found["remap pending"] = (
                "the GPU needs a reset to replace a memory row",
                "reset it before the next run",
            )
        for bus, number in sorted(set(self._read_xids()) - self._earlier_xids):
            if _same_bus(bus, now.bus):
                meaning = f" ({FATAL_XIDS[str(number)]})" if str(number) in FATAL_XIDS else ""
                found[f"xid {number}"] = (
                    f"the driver reports XID {number}{meaning}",
                    "see the kernel log",
                )
        return found

    def _read_xids(self) -> list[tuple[str, int]]:
        return xids(_kernel_lines(self._kernel_log))


def xids(lines: Iterable[str]) -> list[tuple[str, int]]:
    """Return the XIDs that the kernel's messages contain.

    Args:
        lines (`Iterable[str]`): messages of the kernel; at most one XID is read from each.

    Returns:
        `list[tuple[str, int]]`: the PCI address and the number of each XID, in the order of the messages.
    """
    found = (_XID.search(line) for line in lines)
    return [(match["bus"], int(match["number"])) for match in found if match]


def _kernel_lines(path: Path | None) -> list[str]:
    """Return the kernel's messages that this user may read, from a text file or from the kernel's buffer."""
    if path is not None:
        return (
            path.read_text(encoding="utf-8", errors="replace").splitlines()
            if path.is_file()
            else []
        )
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
    """Return whether two PCI addresses belong to one device: the kernel writes 0000:17:00, NVML 00000000:17:00.0."""
    if other is None:
        return True
    plain = [part.lower().partition(".")[0].split(":")[-2:] for part in (one, other)]
    return plain[0] == plain[1]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
