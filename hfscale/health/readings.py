"""What a sensor reads of a GPU at one moment, whoever made the GPU."""

from dataclasses import dataclass
from typing import Protocol

HARDWARE_SLOWDOWN = 0x08
HARDWARE_THERMAL = 0x40
# nvml.h, nvmlClocksEventReason*: bits of nvmlDeviceGetCurrentClocksEventReasons.
THERMAL = {0x20: "software thermal slowdown", HARDWARE_THERMAL: "hardware thermal slowdown"}
BRAKES = {HARDWARE_SLOWDOWN: "hardware slowdown", 0x80: "power brake"}
"""Power capping by software (0x04) is not a fault: a GPU at full load runs at its power limit."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Holds the values of one GPU at one moment; None if the GPU does not report a value."""

    temperature_c: float | None = None
    """Core temperature, °C."""
    power_w: float | None = None
    """Power drawn, W."""
    sm_clock_mhz: float | None = None
    """Clock of the multiprocessors, MHz."""
    reasons: int = 0
    """Why the clocks are below their maximum: bits as in nvml.h."""
    ecc_uncorrected: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    ecc_corrected: int | None = None
    """Corrected memory errors since the driver was loaded."""
    remap_pending: bool = False
    """Whether a memory row will be replaced at the next reset."""
    remap_failed: bool = False
    """Whether a memory row could not be replaced."""
    bus: str | None = None
    """PCI address."""

    @property
    def throttled(self) -> str | None:
        """Why the GPU is throttled by temperature or a power brake; None where it is not."""
        names = [name for bit, name in (THERMAL | BRAKES).items() if self.reasons & bit]
        return ", ".join(names) or None


class Sensor(Protocol):
    """Reads the values of one GPU."""

    def read(self) -> Reading:
        """Return the current values of the GPU."""
