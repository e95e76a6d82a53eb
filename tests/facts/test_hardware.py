"""The table of accelerators: names, device names, and plausible peaks with a source."""

import re
import tomllib
from importlib import resources

import pytest

from hfscale.errors import UnknownHardwareError, UsageError
from hfscale.facts.hardware import Accelerator, accelerator, accelerators, match_device_name, peak_tflops

ROWS = [pytest.param(row, id=row.name) for row in accelerators()]

DEVICE_NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "A100-SXM4-40GB": "A100-40GB",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA A100-PCIE-40GB": "A100-40GB-PCIe",
    "NVIDIA A100 80GB PCIe": "A100-80GB-PCIe",
    "NVIDIA H100 80GB HBM3": "H100-80GB",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H100": "H100-96GB",
    "NVIDIA H800": "H800",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200-NVL",
    "NVIDIA GH200 480GB": "GH200-96GB",
    "NVIDIA GH200 144G HBM3e": "GH200",
    "NVIDIA B200": "B200",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB200": "GB200",
    "NVIDIA GB300": "GB300",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA A40": "A40",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA RTX A6000": "A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX6000-Ada",
    "NVIDIA GeForce RTX 5090": "RTX5090",
    "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA GeForce RTX 3090": "RTX3090",
    "Tesla V100-SXM2-32GB": "V100-32GB",
    "Tesla V100-SXM2-16GB": "V100-16GB",
    "Tesla T4": "T4",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI300X OAM": "MI300X",
    "AMD Instinct MI325X": "MI325X",
    "AMD Instinct MI250X": "MI250X",
}

NOT_THE_WHOLE_DEVICE = [
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce GTX 1080",
    "GRID A100D-10C",
    "cpu",
    "",
]

# hardware.csv and throughput.csv of the published measurements, and the names that users type.
NAMES = {
    "A100 SXM 80GB": "A100-80GB",
    "H100 SXM": "H100-80GB",
    "H200 SXM": "H200",
    "B200 SXM": "B200",
    "B300 SXM": "B300",
    "GB200": "GB200",
    "GB300": "GB300",
    "GH200 900W": "GH200",
    "A100-40GB": "A100-40GB",
    "a100-80gb": "A100-80GB",
    "H100-96GB-HBM2e-2.4TBps-500W": "H100-96GB",
    "H100-94/95GB-HBM2e-lowTDP": "H100-96GB",
    "GH200 (cluster, assumed)": "GH200",
    "rtx 4090": "RTX4090",
    "RTX_3090": "RTX3090",
    "A6000": "A6000",
    "h100": "H100-80GB",
}

DENSE_BF16_TFLOPS = {
    "A100-40GB": 312,
    "A100-80GB": 312,
    "H100-80GB": 989,
    "H100-PCIe": 756,
    "H100-NVL": 835,
    "H200": 989,
    "B200": 2250,
    "GB200": 2500,
    "MI300X": 1307,
    "L40S": 362,
    "L4": 121,
    "RTX4090": 165.2,
}


def test_every_row_has_a_device_name_in_this_test() -> None:
    assert set(DEVICE_NAMES.values()) == {row.name for row in accelerators()}


@pytest.mark.parametrize(("device_name", "name"), DEVICE_NAMES.items())
def test_device_names_are_matched_by_one_row_only(device_name: str, name: str) -> None:
    matched = match_device_name(device_name)
    assert matched is not None
    assert matched.name == name
    everyone = [
        row.name for row in accelerators() if any(re.fullmatch(known, device_name) for known in row.device_names)
    ]
    assert everyone == [name]


@pytest.mark.parametrize("device_name", NOT_THE_WHOLE_DEVICE)
def test_slices_and_unknown_devices_are_not_matched(device_name: str) -> None:
    assert match_device_name(device_name) is None


@pytest.mark.parametrize(("name", "expected"), NAMES.items())
def test_names_and_aliases(name: str, expected: str) -> None:
    assert accelerator(name).name == expected


def test_names_are_unambiguous() -> None:
    names = [re.sub(r"[\s_-]", "", name).casefold() for row in accelerators() for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("A100", "use one of A100-40GB, A100-80GB, A100-40GB-PCIe, A100-80GB-PCIe,"),
        ("H10", "H100-80GB"),
        ("B200-power-limited", "use one of B200,"),
        ("H1OO", "use one of H100-PCIe, H100-NVL, H100-80GB, H100-96GB, or"),
        ("TPUv4", "use one of A100-40GB, A100-80GB,"),
        ("RTX4080", "RTX4090"),
        ("", "A100-40GB"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownHardwareError, match=re.escape(nearest)) as caught:
        accelerator(name)
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "tflops"), DENSE_BF16_TFLOPS.items())
def test_bf16_peaks_are_dense(name: str, tflops: float) -> None:
    assert peak_tflops(accelerator(name), "bf16") == tflops


@pytest.mark.parametrize("name", ["V100-32GB", "V100-16GB", "T4"])
def test_hardware_without_bf16_has_no_bf16_peak(name: str) -> None:
    row = accelerator(name)
    assert [peak_tflops(row, dtype) for dtype in ("bf16", "fp8", "tf32")] == [None] * 3
    assert peak_tflops(row, "fp16") is not None


def test_peaks_by_dtype() -> None:
    h100 = accelerator("H100-80GB")
    peaks = [peak_tflops(h100, dtype) for dtype in ("bf16", "fp16", "fp8", "tf32", "fp32")]
    assert peaks == [989, 989, 1979, 494.5, 67]
    assert peak_tflops(accelerator("A100-80GB"), "fp8") is None
    with pytest.raises(UsageError, match="dtype is 'int8': use one of bf16"):
        peak_tflops(h100, "int8")  # type: ignore[arg-type]


@pytest.mark.parametrize("row", ROWS)
def test_rows_have_sources_and_plausible_values(row: Accelerator) -> None:
    assert row.source
    assert re.fullmatch(r"20\d\d", row.date)
    numbers = {key: value for key, value in vars(row).items() if isinstance(value, float)}
    assert all(value > 0 for value in numbers.values())
    assert 0.2 < row.memory_tb_s < 10
    # Tensor cores run tf32 at half the rate of bf16 and fp8 at twice it: a sparse figure among dense ones shows.
    if row.bf16_tflops is not None:
        assert row.fp16_tflops == row.bf16_tflops
        for other, ratio in ((row.tf32_tflops, 0.5), (row.fp8_tflops, 2.0)):
            assert other is None or other / row.bf16_tflops == pytest.approx(ratio, rel=0.02)
    if row.achieved_bf16_tflops is not None and row.bf16_tflops is not None:
        assert 0.5 < row.achieved_bf16_tflops / row.bf16_tflops < 1
    # What torch reports is no more than what the vendor prints, and no less than 85% of it.
    for printed in re.findall(r"-(\d+)GB", " ".join((row.name, *row.aliases))):
        assert 0.85 * int(printed) < row.memory_gib <= int(printed)


def test_numbers_in_the_file_are_floats() -> None:
    text = resources.files("hfscale.facts").joinpath("hardware.toml").read_text(encoding="utf-8")
    for row in tomllib.loads(text)["accelerator"]:
        assert not [key for key, value in row.items() if isinstance(value, int)]
