"""GPU telemetry from recorded NVML readings; no GPU is needed, since the sensor is replaced."""

import json
import math
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch

from hfscale.health import gpu, readings
from hfscale.health.amd_gpu import AmdSensor, amd_sensor_of
from hfscale.health.gpu import GpuWatch, NvmlSensor, xids
from hfscale.health.monitor import GpuThread, Monitor
from hfscale.health.readings import Reading
from hfscale.recovery import autostop_command as autostop

HEALTHY = Reading(
    temperature_c=61.0,
    power_w=655.0,
    sm_clock_mhz=1755.0,
    reasons=0x4,
    ecc_uncorrected=0,
    ecc_corrected=3,
    bus="00000000:17:00.0",
)
KERNEL = [
    "6,1234,98765,-;usb 1-1: new high-speed USB device",
    "4,1235,98766,-;NVRM: Xid (PCI:0000:17:00): 79, pid=4242, name=python, GPU has fallen off the bus.",
    "4,1236,98767,-;NVRM: Xid (PCI:0000:ca:00): 31, pid=4243, name=python, Ch 00000008, intr 10000000.",
]


class RecordedSensor:
    """A sensor that returns given readings in order, and then the last one again."""

    def __init__(self, *readings):
        self.readings = list(readings)

    def read(self):
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]


def messages(*readings, log=None):
    """The messages of each reading after the first."""
    watch = GpuWatch(RecordedSensor(HEALTHY, *readings), log)
    return [[finding.message for finding in watch.look()] for _ in readings]


def test_a_gpu_at_its_power_limit_is_healthy():
    assert messages(HEALTHY, HEALTHY) == [[], []]
    assert HEALTHY.throttled is None


def test_throttling_is_reported_once_with_its_reason(tmp_path):
    hot = replace(HEALTHY, temperature_c=91.0, sm_clock_mhz=1200.0, reasons=0x44)
    (first, second) = messages(hot, hot, log=tmp_path / "none")
    assert "91 °C, 1200 MHz (hardware thermal slowdown)" in first[0]
    assert second == []


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"ecc_uncorrected": 2}, "2 more uncorrected"),
        ({"ecc_corrected": 10}, "7 more corrected"),
        ({"remap_pending": True}, "needs a reset"),
        ({"remap_failed": True}, "exchanged"),
        ({"reasons": 0x80}, "power brake"),
    ],
)
def test_a_new_problem_is_reported(change, part, tmp_path):
    ((message,),) = messages(replace(HEALTHY, **change), log=tmp_path / "none")
    assert part in message


def test_an_xid_of_this_gpu_since_the_start_is_reported(tmp_path):
    log = tmp_path / "kern.log"
    log.write_text("\n".join(KERNEL[:1]))
    watch = GpuWatch(RecordedSensor(HEALTHY), log)
    assert watch.look() == []
    log.write_text("\n".join(KERNEL))
    (finding,) = watch.look()  # XID 31 is of another GPU
    assert "XID 79 (fell off the bus)" in finding.message
    assert GpuWatch(RecordedSensor(HEALTHY), log).look() == []  # from before the run


def test_a_remapped_row_alone_is_not_fatal():
    assert "63" not in gpu.FATAL_XIDS
    assert {"48", "64", "136", "140", "143", "149", "150", "154"} <= gpu.FATAL_XIDS.keys()


def test_xids_are_read_from_the_kernels_messages():
    assert xids(KERNEL) == [("0000:17:00", 79), ("0000:ca:00", 31)]
    assert isinstance(xids(gpu._kernel_lines(None)), list)


def nvml(**missing):
    """A stand-in for pynvml with the functions that are called; those in `missing` raise NVMLError."""

    class NVMLError(Exception):
        pass

    def refuse(*_):
        raise NVMLError

    asked = []
    module = types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        NVML_MEMORY_ERROR_TYPE_CORRECTED=0,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: asked.append(uuid),
        nvmlDeviceGetPowerUsage=lambda h: 654321,
        nvmlDeviceGetRemappedRows=lambda h: (1, 0, 1, 0),
        nvmlDeviceGetPciInfo=lambda h: types.SimpleNamespace(busId=b"00000000:17:00.0"),
        nvmlDeviceGetTemperature=lambda h, sensor: 61,
        nvmlDeviceGetClockInfo=lambda h, kind: 1755,
        nvmlDeviceGetCurrentClocksEventReasons=lambda h: 0x4,
        nvmlDeviceGetTotalEccErrors=lambda h, kind, counter: 3 - 3 * kind,
        asked=asked,
    )
    for name in missing:
        setattr(module, name, refuse)
    return module


@pytest.fixture
def properties(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="ab-cd"))


def test_units_of_nvml_are_converted(properties):
    module = nvml()
    reading = NvmlSensor(torch.device("cuda", 0), module).read()
    assert reading == replace(HEALTHY, power_w=654.321, remap_pending=True)
    assert module.asked == ["GPU-ab-cd"]


def test_values_that_a_gpu_does_not_report_are_absent(properties):
    module = nvml(nvmlDeviceGetTotalEccErrors=1, nvmlDeviceGetRemappedRows=1, nvmlDeviceGetPowerUsage=1)
    reading = NvmlSensor(torch.device("cuda", 0), module).read()
    assert (reading.power_w, reading.ecc_corrected, reading.remap_failed) == (None, None, False)
    assert reading.temperature_c == 61


def test_without_the_package_there_is_no_sensor(monkeypatch):
    assert gpu.sensor_of(torch.device("cpu")) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu.sensor_of(torch.device("cuda", 0)) is None


def compared(monitor, grad_norm=None):
    """The metric keys and the findings of a log with one rank."""
    numbers = monitor.numbers(1, None, grad_norm, {})
    judgement = monitor.judge(1, {name: np.array([number]) for name, number in numbers.items()})
    comparison = monitor.comparison(json.loads(json.dumps(judgement)))
    return comparison.keys, comparison.findings


def test_metric_keys_are_logged_with_a_sensor_and_absent_without():
    hot = replace(HEALTHY, reasons=0x20, temperature_c=88.0)
    thread = GpuThread(GpuWatch(RecordedSensor(hot)), every_s=0.01)
    thread.start()
    monitor = Monitor(hosts=["node"], gpu=thread)
    while not thread._found:
        pass
    keys, found = compared(monitor)
    assert keys == {"gpu/temperature_c_max": 88.0, "gpu/power_w": 655.0, "gpu/throttled": 1.0}
    assert (found[0].ranks, found[0].host) == ((0,), "node")
    assert monitor.temperatures_c == [88.0]
    monitor.stop()
    without_sensor = Monitor(hosts=["node"])
    assert compared(without_sensor) == ({}, [])
    assert without_sensor.temperatures_c == ()
    without_values = GpuThread(GpuWatch(RecordedSensor(Reading())))
    assert compared(Monitor(hosts=["node"], gpu=without_values), math.nan)[0] == {"gpu/throttled": 0.0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, test_gpu.py reads the sensor")
def test_without_a_driver_the_real_package_gives_no_sensor():
    import pynvml

    with pytest.raises(pynvml.NVMLError):
        pynvml.nvmlInit()
    assert gpu.sensor_of(torch.device("cuda", 0)) is None
    assert autostop.gpu_activity() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, test_gpu.py reads the sensor")
def test_the_real_functions_take_the_arguments_that_they_are_given():
    """Without a driver each raises NVMLError, and not TypeError."""
    import pynvml

    sensor = NvmlSensor.__new__(NvmlSensor)
    sensor._nvml, sensor._handle = pynvml, pynvml.c_nvmlDevice_t()
    assert sensor.read() == Reading()
    calls = {"nvmlDeviceGetHandleByUUID": ("GPU-ab-cd",), "nvmlDeviceGetHandleByIndex": (0,), "nvmlDeviceGetCount": ()}
    for name, arguments in (calls | {"nvmlDeviceGetUtilizationRates": (sensor._handle,)}).items():
        with pytest.raises(pynvml.NVMLError):
            getattr(pynvml, name)(*arguments)
    assert "busId" in dict(pynvml.nvmlPciInfo_t._fields_)
    assert "gpu" in dict(pynvml.c_nvmlUtilization_t._fields_)


def test_the_stand_in_has_the_names_of_pynvml():
    import pynvml

    for name in vars(nvml()):
        assert name == "asked" or hasattr(pynvml, name), name
    assert pynvml.nvmlClocksEventReasonHwThermalSlowdown in readings.THERMAL
    assert pynvml.nvmlClocksEventReasonSwThermalSlowdown in readings.THERMAL
    assert {pynvml.nvmlClocksEventReasonHwSlowdown, pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown} == set(
        readings.BRAKES
    )


class AmdError(Exception):
    """The base of amdsmi's errors."""


def amdsmi_with(**answers):
    """A stand-in for the module `amdsmi`, with two GPUs; an answer that is an error is raised."""

    def answer(value):
        def call(*_):
            if isinstance(value, Exception):
                raise value
            return value

        return call

    return types.SimpleNamespace(
        AmdSmiException=AmdError,
        AmdSmiClkType=types.SimpleNamespace(GFX="gfx"),
        AmdSmiTemperatureType=types.SimpleNamespace(JUNCTION="junction"),
        AmdSmiTemperatureMetric=types.SimpleNamespace(CURRENT="current"),
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: ["first", "second"],
        amdsmi_get_gpu_device_bdf={"first": "0000:C1:00.0", "second": "0000:c2:00.0"}.get,
        **{name: answer(value) for name, value in answers.items()},
    )


def test_an_amd_gpu_is_read_through_amdsmi(monkeypatch):
    amdsmi = amdsmi_with(
        amdsmi_get_temp_metric=71,
        amdsmi_get_power_info={"average_socket_power": "N/A", "current_socket_power": 748},
        amdsmi_get_clock_info={"clk": 2100, "max_clk": 2100},
        amdsmi_get_gpu_total_ecc_count={"correctable_count": 2, "uncorrectable_count": 0, "deferred_count": 0},
        amdsmi_get_violation_status={"active_hbm_thrm": True, "active_ppt_pwr": True, "active_vr_thrm": "N/A"},
    )
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi)
    address = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: address)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    reading = gpu.sensor_of(torch.device("cuda", 0)).read()
    assert reading == Reading(
        temperature_c=71.0,
        power_w=748.0,
        sm_clock_mhz=2100.0,
        reasons=0x40,
        ecc_uncorrected=0,
        ecc_corrected=2,
        bus="0000:C1:00.0",
    )
    assert reading.throttled == "hardware thermal slowdown"
    address.pci_bus_id = 0xC7
    assert gpu.sensor_of(torch.device("cuda", 0)) is None


def test_what_amdsmi_does_not_have_is_absent(monkeypatch):
    error = AmdError("not supported")
    reading = AmdSensor("second", amdsmi_with(amdsmi_get_temp_metric=error, amdsmi_get_power_info=error)).read()
    assert reading == Reading(bus="0000:c2:00.0")
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert amd_sensor_of(torch.device("cuda", 0)) is None
