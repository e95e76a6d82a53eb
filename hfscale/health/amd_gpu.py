"""Readings of AMD GPUs through amdsmi (the package `amdsmi` of ROCm), behind the interface of `hfscale.health.gpu`.

Written from AMD's documentation (rocm.docs.amd.com/projects/amdsmi) and tested with a stand-in; not yet run on a GPU.
"""

from collections.abc import Mapping
from typing import Any

import torch

from hfscale.health.readings import HARDWARE_SLOWDOWN, HARDWARE_THERMAL, Reading

VIOLATIONS: Mapping[str, int] = {
    "active_socket_thrm": HARDWARE_THERMAL,
    "active_vr_thrm": HARDWARE_THERMAL,
    "active_hbm_thrm": HARDWARE_THERMAL,
    "active_prochot_thrm": HARDWARE_SLOWDOWN,
}
"""Fields of `amdsmi_get_violation_status`, which MI300 and newer GPUs have -> bits of `Reading.reasons`. A package at
its power limit (`active_ppt_pwr`) is not a fault, as on NVIDIA."""


NO_LIBRARY = (ImportError, OSError, KeyError, AttributeError)
"""What importing amdsmi raises where ROCm's library cannot be loaded."""


class AmdSensor:
    """Reads one device of ROCm through amdsmi.

    Args:
        handle (`object`): amdsmi's handle of the GPU.
        amdsmi (module): the module `amdsmi`, which is initialised.
    """

    def __init__(self, handle: Any, amdsmi: Any) -> None:
        self._handle = handle
        self._amdsmi = amdsmi

    def read(self) -> Reading:
        amdsmi = self._amdsmi
        power = self._fields("amdsmi_get_power_info")
        clock = self._fields("amdsmi_get_clock_info", amdsmi.AmdSmiClkType.GFX)
        errors = self._fields("amdsmi_get_gpu_total_ecc_count")
        corrected = _number(errors, "correctable_count")
        uncorrected = _number(errors, "uncorrectable_count")
        return Reading(
            temperature_c=self._temperature(),
            power_w=_number(power, "average_socket_power", "current_socket_power"),
            sm_clock_mhz=_number(clock, "clk", "cur_clk"),
            reasons=self._reasons(),
            ecc_uncorrected=None if uncorrected is None else int(uncorrected),
            ecc_corrected=None if corrected is None else int(corrected),
            bus=self._query("amdsmi_get_gpu_device_bdf"),
        )

    def _temperature(self) -> float | None:
        kinds, now = (
            self._amdsmi.AmdSmiTemperatureType,
            self._amdsmi.AmdSmiTemperatureMetric.CURRENT,
        )
        value = self._query("amdsmi_get_temp_metric", kinds.JUNCTION, now)
        return _number({"value": value}, "value")

    def _reasons(self) -> int:
        status = self._fields("amdsmi_get_violation_status")
        reasons = 0
        for field, bit in VIOLATIONS.items():
            # "N/A" where the GPU does not have it
            if status.get(field) is True or status.get(field) == 1:
                reasons |= bit
        return reasons

    def _fields(self, name: str, *arguments: Any) -> Mapping[str, Any]:
        found = self._query(name, *arguments)
        return found if isinstance(found, Mapping) else {}

    def _query(self, name: str, *arguments: Any) -> Any:
        """Return one value; None where this GPU, driver or version of amdsmi does not have it."""
        query = getattr(self._amdsmi, name, None)
        try:
            return query(self._handle, *arguments) if query is not None else None
        except self._amdsmi.AmdSmiException:
            return None


def amd_sensor_of(device: torch.device) -> AmdSensor | None:
    """Return the sensor of a device of ROCm.

    Args:
        device (`torch.device`): a device of this process, in a torch that is built for ROCm.

    Returns:
        `AmdSensor | None`: the sensor; None if amdsmi is not available, or does not list the device.
    """
    try:
        import amdsmi
    except NO_LIBRARY:
        return None
    # torch's stubs lack the address
    properties: Any = torch.cuda.get_device_properties(device)
    # amdsmi does not follow HIP_VISIBLE_DEVICES; the PCI address is the same for both.
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}."
    try:
        amdsmi.amdsmi_init()
        for handle in amdsmi.amdsmi_get_processor_handles():
            if amdsmi.amdsmi_get_gpu_device_bdf(handle).lower().startswith(address):
                return AmdSensor(handle, amdsmi)
    except amdsmi.AmdSmiException:
        pass
    return None


def _number(fields: Mapping[str, Any], *names: str) -> float | None:
    """The first of these fields that has a number; a GPU that lacks one says "N/A"."""
    for name in names:
        value = fields.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None
