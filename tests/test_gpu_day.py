"""`make gpu-day`: its parts, limits, wheels and table; with `make test-recipes` every part in tiny shapes."""

import ast
import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY

import benchmarks.gpu
from benchmarks.gpu import profiles, runner, wheels
from benchmarks.gpu.registry import PARTS, Part, parts_named
from benchmarks.gpu.table import document_table
from hfscale.errors import UsageError

FOLDER = REPOSITORY / "benchmarks" / "gpu"
RECORDED = REPOSITORY / "benchmarks" / "results" / "gpu_h100.json"
MAX_LIMIT_S = 600
SLEEPERS = """
import subprocess, sys, time
from pathlib import Path
from benchmarks.gpu.part import CannotRunError, report

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]

def start(folder, name):
    # In a session of its own, as torch's launcher starts its ranks.
    child = subprocess.Popen(SLEEP, start_new_session=True)
    Path(folder, name).write_text(str(child.pid))

def sleep(folder):
    start(folder, "sleeps")
    report(before="the limit")
    time.sleep(600)

def leave(folder):
    start(folder, "left")
    report(value=1)

def fail():
    raise ValueError("no such shape")

def refuse():
    raise CannotRunError("needs a left hand")
"""
RUN = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from benchmarks.gpu.registry import Part
from benchmarks.gpu.runner import run_parts
from hfscale.recovery.children import adopt_orphans

adopt_orphans()
folder = sys.argv[1]
parts = [
    Part(name="sleep", limit_s=8, function="sleepers:sleep", arguments=(folder,)),
    Part(name="leave", limit_s=60, function="sleepers:leave", arguments=(folder,)),
    Part(name="fail", limit_s=60, function="sleepers:fail"),
    Part(name="refuse", limit_s=60, function="sleepers:refuse"),
    Part(name="eight", limit_s=60, function="sleepers:fail", gpus=8),
    Part(name="late", limit_s=9000, function="sleepers:fail"),
]
found = []
machine = {"gpus": 1, "accelerator": "H100-80GB"}
run_parts(parts, machine=machine, folder=Path(folder), seconds=300, after_each=found.append)
print(json.dumps([asdict(outcome) for outcome in found]))
"""


def definition(part):
    """The definition of a part's function, without an import of its module, which loads torch."""
    module, _, name = part.function.partition(":")
    tree = ast.parse((REPOSITORY / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found


def test_every_part_has_a_function_that_takes_its_arguments():
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        function = definition(part)
        most = len(function.args.args)
        least = len(function.args.args) - len(function.args.defaults)
        if function.args.vararg is not None:
            most = len(part.arguments)
        assert least <= len(part.arguments) <= most, part.name
        assert ast.get_docstring(function), part.name
        assert 0 < part.limit_s <= MAX_LIMIT_S


def test_what_failed_on_the_first_day_comes_first_and_several_nodes_last():
    first = [part.name for part in PARTS[:5]]
    assert first == ["experts", "fp8_save", "packed_1b", "callback_cost", "save_background"]
    sizes = [part.gpus * part.nodes for part in PARTS]
    assert sizes == sorted(sizes)
    assert {1, 8, 16} == set(sizes)
    assert [part.name for part in parts_named(["trl_1b", "experts"])] == ["experts", "trl_1b"]
    with pytest.raises(UsageError, match="'no_part'"):
        parts_named(["experts", "no_part"])


def test_the_package_lists_its_modules():
    listed = {f"{name}.py" for name in ("__init__",)} | {
        line.split("`")[1] for line in (benchmarks.gpu.__doc__ or "").splitlines() if line.startswith("| `")
    }
    assert listed == {path.name for path in FOLDER.glob("*.py")}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"packages": ("json", "no_such_package")}, "needs no_such_package: it is not installed"),
        ({"gpus": 8}, "needs 8 GPUs: this machine has 1"),
        ({"nodes": 2}, "needs 2 nodes: this command was started on 1 (--node RANK,ADDRESS,PORT)"),
        ({"limit_s": 201}, "needs up to 201 s: 100 s are left"),
    ],
)
def test_a_part_that_cannot_run_says_why(changes, reason):
    part = Part(**({"name": "part", "limit_s": 199, "function": "a:b"} | changes))
    assert runner.reason_not_to_run(part, gpus=1, nodes=1, left_s=100) == reason
    assert runner.reason_not_to_run(part, gpus=0, nodes=1, left_s=100) is not None


@pytest.mark.long
def test_a_part_ends_with_all_that_it_has_started_and_every_part_has_a_result_or_a_reason(tmp_path):
    (tmp_path / "sleepers.py").write_text(SLEEPERS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = {row["part"]: row for row in json.loads(done.stdout.splitlines()[-1])}
    for name in ("sleeps", "left"):
        assert not psutil.pid_exists(int((tmp_path / name).read_text()))
    assert outcomes["sleep"]["status"] == "ended at its limit"
    assert outcomes["sleep"]["results"] == [{"before": "the limit"}]
    assert outcomes["leave"]["status"] == "ran"
    assert outcomes["leave"]["results"] == [{"value": 1}]
    assert outcomes["fail"]["status"] == "failed"
    assert outcomes["fail"]["results"][0]["failed"] == "ValueError: no such shape"
    assert "Traceback" in (tmp_path / "fail.log").read_text()
    assert outcomes["refuse"]["status"] == "not run"
    assert outcomes["refuse"]["results"] == [{"not_run": "needs a left hand"}]
    assert outcomes["eight"]["reason"] == "needs 8 GPUs: this machine has 1"
    assert outcomes["late"]["reason"].startswith("needs up to 9000 s: ")


def test_the_table_of_the_recorded_day_sets_measured_beside_predicted_and_plain_trainer():
    document = json.loads(RECORDED.read_text(encoding="utf-8"))
    table = document_table(document)
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines() if line.startswith("| ")}
    assert {run["run"] for run in document["runs"]} <= set(rows)
    assert "| recipe, defaults | 48,656 | 49,454 (+2%) | 40.4% | 28.2 | 30.6 (+8%) | 1.40 |  | 1.34 |" in table
    assert "| recipe, defaults | 14,296 | 14,573 (+2%) | 48.4% | 35.9 | 39.6 (+10%) | 1.60 |  |  |" in table
    assert table.startswith("NVIDIA H100 80GB HBM3 (SXM, 700 W), 2026-11-27, commit 8d09f5ee\n")


def test_the_table_names_the_parts_without_a_result_and_mixes_no_models():
    runs = [
        {"shape": shape, "method": "full", "run": run, "tokens_s": speed}
        for shape, run, speed in [("a", "Trainer", 100), ("a", "TRL's SFTTrainer", 50), ("b", "recipe, defaults", 200)]
    ]
    parts = [
        {"part": "ddp_8", "status": "not run", "reason": "needs 8 GPUs: this machine has 1"},
        {"part": "loop_1b", "status": "ran", "reason": None},
    ]
    document = {"machine": {"gpus": 0}, "versions": {}, "date": "2026-01-01", "runs": runs, "parts": parts}
    lines = document_table(document | {"results": [{"part": "waits", "steps": 3}]}).splitlines()
    assert lines[0].startswith("CPU")
    assert "| Trainer | 100 |  |  |  |  |  | 2.00 |  |" in lines
    assert "| recipe, defaults | 200 |  |  |  |  |  |  |  |" in lines
    assert '- {"part": "waits", "steps": 3}' in lines
    assert lines[-1] == "- ddp_8: not run: needs 8 GPUs: this machine has 1"


def test_a_profile_is_the_time_of_the_gpu_by_kind_of_kernel():
    def event(start, duration, name, kind="kernel"):
        return {"ts": start, "dur": duration, "name": name, "cat": kind}

    events = [
        event(1000, 4000, "nvjet_sm90_tst"),
        event(3000, 1000, "ncclDevKernel_AllReduce"),  # at the same time, on another stream
        event(8000, 2000, "Memcpy DtoD", "gpu_memcpy"),
        event(0, 9000, "aten::mm", "cpu_op"),
        event(0, 5, "cudaLaunchKernel", "cuda_runtime"),
        event(9, 5, "cudaStreamSynchronize", "cuda_runtime"),
    ]
    found = profiles.summarize(events)
    assert found["step_ms"] == 9.0
    assert found["busy_ms"] == 6.0
    assert found["ms"] == {"matrix products": 4.0, "copies and casts": 2.0, "communication": 1.0}
    assert (found["launches"], found["waits"]) == (1, 1)
    assert profiles.summarize(events[3:]) == {}


NATIVE = "void at::native::"


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        (f"{NATIVE}(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer and clipping"),
        (
            f"{NATIVE}unrolled_elementwise_kernel<{NATIVE}direct_copy_kernel_cuda()::{{lambda()#1}}>",
            "copies and casts",
        ),
        (f"{NATIVE}vectorized_elementwise_kernel<4, {NATIVE}exp_kernel_cuda()::{{lambda()#2}}>", "element-wise"),
        ("triton_poi_fused__to_copy_mul_silu_3", "Triton kernels"),
        ("triton_tem_fused_flex_attention_0", "attention"),
    ],
)
def test_a_kernel_counts_as_what_it_computes_and_not_as_a_part_of_its_name(kernel, kind):
    """The lambdas of torch's element-wise kernels once counted as the optimizer LAMB."""
    assert profiles.kind_of(kernel) == kind


def make_wheel(folder, name, files):
    """Write a wheel without dependencies."""
    information = f"{name}-1.0.dist-info"
    files |= {
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{information}/RECORD": "",
    }
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    return path


def test_a_wheel_keeps_one_cuda_library_and_can_be_installed(tmp_path, monkeypatch):
    libraries = ["cuda128", "cuda130", "cuda130_nocublaslt", "rocm62", "cpu", "xpu"]
    files = {f"bitsandbytes/libbitsandbytes_{name}.so": name for name in libraries}
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = make_wheel(folder, "bitsandbytes", files | {"bitsandbytes/__init__.py": "kept = True\n"})
    with pytest.raises(ValueError, match="CUDA 999"):
        wheels.keep_one_cuda_library(path, "999")
    wheels.keep_one_cuda_library(path, "130")
    with zipfile.ZipFile(path) as wheel:
        kept = {name for name in wheel.namelist() if name.endswith(".so")}
        assert kept == {f"bitsandbytes/libbitsandbytes_{name}.so" for name in ("cuda130", "cuda130_nocublaslt", "cpu")}
        record = list(csv.reader(io.StringIO(wheel.read("bitsandbytes-1.0.dist-info/RECORD").decode())))
        assert {row[0] for row in record} == set(wheel.namelist())
        for name, digest, _ in record[:-1]:
            expected = urlsafe_b64encode(hashlib.sha256(wheel.read(name)).digest()).rstrip(b"=").decode()
            assert digest == f"sha256={expected}"

    site = tmp_path / "site"
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "before")
    wheels.use(tmp_path / "no_folder", site)
    assert not site.exists()
    wheels.use(folder, site)
    assert (site / "bitsandbytes" / "__init__.py").is_file()
    assert os.environ["PYTHONPATH"] == f"{site}{os.pathsep}before"
    assert sys.path[0] == str(site)


def test_a_package_that_cannot_be_had_is_named_and_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(wheels, "PACKAGES", (wheels.Package(name="hjson"),))
    (line,) = wheels.collect(tmp_path / "wheels", python="3.12", cuda="130")
    assert line.startswith("hjson")
    assert "left out: ERROR" in line


def test_the_wheels_have_the_versions_that_the_tests_run_with():
    asked = {package.name: wheels.requirement(package) for package in wheels.PACKAGES}
    assert asked["transformers"] == "transformers==5.23.0"
    command = wheels.pip_command(wheels.Package(name="trl"), Path("folder"), "3.12")
    assert command[-1].startswith("trl==")
    assert "3.12" in command
    assert "--no-build-isolation" in wheels.pip_command(
        wheels.Package(name="deepspeed", built=True), Path("f"), "3.12"
    )


@pytest.mark.recipes
@pytest.mark.timeout(3600)
def test_every_part_runs_on_a_cpu_in_tiny_shapes(tmp_path):
    """Some fifty short trainings: about ten minutes. What needs a GPU or a missing package says so."""
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--folder", str(tmp_path / "day"), "--result", str(result)]
    environment = os.environ | {"KIT_TINY": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=3500, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {row["part"]: row for row in json.loads(result.read_text())["parts"]}
    assert list(rows) == [part.name for part in PARTS]
    assert [row for row in rows.values() if row["status"] not in ("ran", "not run")] == []
    for part in PARTS:
        row = rows[part.name]
        if row["status"] == "not run":
            excused = part.cuda_only or part.function.endswith(("profiles:profile", "health:waits"))
            assert excused or "is not installed" in row["reason"], row
            assert "needs a CUDA GPU" in row["reason"] or "is not installed" in row["reason"], row
