"""`hfscale doctor`: in an environment without torch, with modules that fail, and each rule of what fits together."""

import compileall
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import REPOSITORY, fake_nvidia_smi
from hidden_packages import python_without
from peft import LoraConfig, get_peft_model
from strategy_kinds import named
from tiny import tiny_model, tiny_trainer
from torch.distributed.fsdp import StateDictType

import hfscale
from hfscale.check import doctor
from hfscale.checkpoint import loading
from hfscale.core import versions
from hfscale.core.nvidia_driver import check_gpus_of_driver, nvidia_driver
from hfscale.errors import CheckpointError, MissingDependencyError
from hfscale.health.callback import check_ranks

HIDDEN = ("torch", "functorch", "transformers", "accelerate", "deepspeed", "datasets", "peft", "trl", "sentence", "_")
CUDA = {"cuda": "12.8", "nccl": "2.27.5", "architectures": ["sm_80", "sm_90", "compute_90"], "gpus": []}
H100 = {"name": "NVIDIA H100", "memory_gib": 79.6, "capability": [9, 0]}


@pytest.fixture
def two_gpus_of_the_driver(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr("hfscale.core.nvidia_driver.nvidia_driver", lambda: ("535.104.05", ("NVIDIA H100",) * 2))


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory):
    """Run hfscale in an environment that has the installed packages except torch and what is built on it."""
    return python_without(tmp_path_factory.mktemp("packages"), *HIDDEN, also_on_path=REPOSITORY)


def test_an_environment_without_torch_is_reported_and_fails(without_torch):
    done = without_torch("-m", "hfscale", "doctor")
    assert done.returncode == 1
    assert done.stderr == ""
    last = done.stdout.splitlines()[-1]
    for part in ("torch 2.6 or later (not installed)", "transformers 4.57", 'pip install --upgrade "torch>=2.6"'):
        assert part in last
    report = json.loads(without_torch("-m", "hfscale", "doctor", "--json").stdout)
    assert (report["ok"], report["torch"], report["packages"]["torch"]) == (False, None, None)
    assert not report["features"]["ScalingCallback"]["works"]


def test_other_commands_name_what_is_missing_in_one_line(without_torch):
    done = without_torch("-m", "hfscale", "check")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "torch 2.6 or later (not installed)" in done.stderr


@pytest.mark.parametrize(
    "code", ["from hfscale import ParallelTrainer", "import hfscale.parallel.mesh", "import hfscale.recipe.data"]
)
def test_a_script_that_imports_what_cannot_work_ends_with_one_line(without_torch, code):
    done = without_torch("-c", code)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("hfscale: error: ")
    assert "torch 2." in done.stderr


def test_wrong_usage():
    done = subprocess.run(
        [sys.executable, "-m", "hfscale", "doctor", "--wide"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "--wide" in done.stderr


@pytest.mark.long
def test_a_module_that_fails_and_one_that_ends_the_interpreter_are_reported(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text(
        "import json\nprint(json.dumps({'failed': 1}) + 'x')\nfrom json import no_name\n"
    )
    (tmp_path / "crashing_module.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{REPOSITORY}")
    failed, facts = doctor._probe(["json", "broken_module"])
    assert failed.keys() == {"broken_module"}
    assert failed["broken_module"].startswith("ImportError: cannot import name 'no_name'")
    assert facts.keys() == {"cuda", "hip", "nccl", "architectures", "gpus", "why_no_gpu"}
    failed, facts = doctor._probe(["crashing_module"])
    assert (failed, facts) == ({"crashing_module": "it ended the interpreter with SIGSEGV"}, None)


def test_every_feature_has_modules_and_names_its_packages(monkeypatch):
    assert doctor._MODULES.keys() == versions.FEATURES.keys()
    monkeypatch.setattr(versions, "installed", lambda package: None)
    for feature, needs in versions.FEATURES.items():
        with pytest.raises(MissingDependencyError, match="pip install --upgrade") as caught:
            versions.require(feature, "--flag")
        message = str(caught.value)
        assert message.startswith(f"--flag: {feature} cannot be used without ")
        assert all(need.package in message for need in needs)
        assert "\n" not in message


def test_the_strictest_of_two_requirements_counts(monkeypatch):
    monkeypatch.setattr(versions, "installed", {"torch": "2.13.0a0+1", "transformers": "5.15.1"}.get)
    message = versions.what_is_missing("ParallelTrainer")
    assert "transformers 5.23 or later (5.15.1 is installed)" in message
    assert "torch" not in message  # a vendor's build counts as its release


@pytest.mark.parametrize(
    ("name", "feature"), [("ScalingCallback", "ScalingCallback"), ("ParallelTrainer", "ParallelTrainer")]
)
def test_a_public_name_that_cannot_work_raises_one_line(monkeypatch, name, feature):
    monkeypatch.setattr(versions, "installed", {"torch": "2.5.1", "transformers": "4.50"}.get)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which is replaced
    with pytest.raises(
        MissingDependencyError, match=rf"^{feature} cannot be used without torch .* \(2.5.1 is installed"
    ):
        getattr(hfscale, name)


def test_what_packages_declare_is_compared_with_what_is_installed(monkeypatch):
    there = {"trl": "1.0", "transformers": "4.50", "torch": "2.13.0a0+gitabc", "numpy": "1.26"}
    declared = {
        "trl": [
            "transformers>=4.56",
            "torch>=2.13",
            "vllm>=1; extra == 'vllm'",
            "numpy",
            "rich>=14",
            "x; python_version<'3'",
        ],
    }
    monkeypatch.setattr(doctor, "installed", there.get)
    monkeypatch.setattr(doctor.importlib.metadata, "requires", declared.get)
    problems = [finding.problem for finding in doctor._unmet_declarations()]
    assert problems == [
        "trl 1.0 needs transformers>=4.56, and 4.50 is installed",
        "trl 1.0 needs rich>=14, and none is installed",
    ]


@pytest.mark.parametrize(
    ("there", "nccl", "count"),
    [
        ({"peft": "0.17.1", "transformers": "5.0.0"}, None, 1),
        ({"peft": "0.17.1", "transformers": "4.57.6"}, None, 0),
        ({"peft": "0.18.0", "transformers": "5.0.0"}, None, 0),
        ({"transformers": "5.0.0"}, "2.29.2", 1),
        ({"transformers": "5.0.0"}, "2.29.3", 0),
    ],
)
def test_known_problems(monkeypatch, there, nccl, count):
    monkeypatch.setattr(doctor, "installed", there.get)
    found = doctor._known_problems({**CUDA, "nccl": nccl})
    assert len(found) == count
    assert all("#" in finding.problem and finding.fix for finding in found)


@pytest.mark.parametrize(
    ("facts", "visible", "expected"),
    [
        ({"gpus": [H100]}, None, []),
        ({"cuda": None}, None, [("error", "without CUDA")]),
        ({"why_no_gpu": "The NVIDIA driver is too old"}, None, [("error", "too old")]),
        ({}, "", [("note", "CUDA_VISIBLE_DEVICES")]),
        ({"gpus": [H100 | {"capability": [12, 0]}], "architectures": ["sm_80", "sm_90"]}, None, [("error", "sm_120")]),
        ({"gpus": [H100 | {"capability": [12, 0]}]}, None, []),  # compiled from compute_90
        ({"gpus": [H100 | {"capability": [8, 9]}]}, None, []),  # runs sm_80
        ({"gpus": [H100 | {"capability": [7, 0]}]}, None, [("error", "sm_70")]),
    ],
)
def test_why_torch_cannot_use_the_gpus(facts, visible, expected):
    found = doctor._gpu_problems({**CUDA, "why_no_gpu": None, **facts}, "570.1", ("NVIDIA H100",), visible)
    assert [finding.level for finding in found] == [level for level, _ in expected]
    for finding, (_, part) in zip(found, expected, strict=True):
        assert part in finding.message


def driver_files(root, *minors, devices):
    """Write what the driver shows of its GPUs, and the files of the devices that a container has."""
    files = root / "proc" / "driver" / "nvidia"
    (root / "dev").mkdir(parents=True)
    files.mkdir(parents=True)
    (files / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n")
    for minor in minors:
        gpu = files / "gpus" / f"0000:{minor}7:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t NVIDIA H{minor}00\nIRQ:   \t\t 18\nDevice Minor: \t {minor}\n")
    for minor in devices:
        (root / "dev" / f"nvidia{minor}").touch()
    return root


def test_the_gpus_of_the_driver_are_those_with_a_device_file(tmp_path):
    root = driver_files(tmp_path, 1, 2, 3, devices=(1, 3))
    assert nvidia_driver(root) == ("535.104.05", ("NVIDIA H100", "NVIDIA H300"))


def test_nvidia_smi_is_asked_where_no_device_has_a_file(tmp_path, monkeypatch):
    root = driver_files(tmp_path / "root", 1, devices=())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_driver(root) == (None, ())
    fake_nvidia_smi(tmp_path)
    assert nvidia_driver(root) == ("535.104.05", ("NVIDIA H100", "NVIDIA H100"))


@pytest.mark.parametrize(
    ("environ", "level", "problem"),
    [
        ({}, "error", "torch is built without CUDA, and the driver lists 2 GPUs"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "note", "CUDA_VISIBLE_DEVICES= hides 2 GPUs"),
    ],
)
def test_gpus_that_this_torch_cannot_use(two_gpus_of_the_driver, monkeypatch, environ, level, problem):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert [(found.level, found.problem) for found in check_gpus_of_driver(environ)] == [(level, problem)]


def test_the_reason_that_torch_gives_is_in_the_finding(two_gpus_of_the_driver, monkeypatch):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 12020).")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    (found,) = check_gpus_of_driver({"CUDA_VISIBLE_DEVICES": "0,1"})
    assert found.problem == (
        "torch (CUDA 13.0) cannot use 2 GPUs of driver 535.104.05 with CUDA_VISIBLE_DEVICES=0,1: The NVIDIA driver on "
        "your system is too old (found version 12020)."
    )


def test_gpus_that_torch_uses_and_machines_without_gpus_are_no_findings(two_gpus_of_the_driver, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert check_gpus_of_driver({}) == []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr("hfscale.core.nvidia_driver.nvidia_driver", lambda: (None, ()))
    assert check_gpus_of_driver({}) == []


@pytest.mark.parametrize(("use_cpu", "warns"), [(False, True), (True, False)])
def test_a_training_on_the_cpu_beside_gpus_is_logged(
    two_gpus_of_the_driver, monkeypatch, tmp_path, caplog, use_cpu, warns
):
    monkeypatch.setattr(torch.version, "cuda", None)
    check_ranks(tiny_trainer(tmp_path, use_cpu=use_cpu), None)
    assert ("the driver lists 2 GPUs" in caplog.text) == warns


@pytest.mark.parametrize(
    ("accelerate", "torch_version", "works"),
    [("1.13.0", "2.13.0", True), ("1.14.0", "2.12.1", True), ("1.14.0", "2.13.0", False), ("1.15.0", "2.13.0", True)],
)
def test_fsdp2_with_tied_embeddings(monkeypatch, accelerate, torch_version, works):
    monkeypatch.setattr(versions, "installed", {"accelerate": accelerate, "torch": torch_version}.get)
    problem = versions.why_fsdp2_cannot_tie()
    assert (problem is None) == works
    assert works or problem.endswith('accelerate 1.14.0 and torch 2.13.0: pip install --upgrade "accelerate>=1.15"')


@pytest.mark.parametrize(("accelerate", "works"), [("1.13.0", False), ("1.14.0", False), ("1.15.0", True)])
def test_fsdp2_with_adapters_in_one_file(monkeypatch, accelerate, works):
    monkeypatch.setattr(versions, "installed", {"accelerate": accelerate, "torch": "2.13.0"}.get)
    strategy = named("fsdp2")
    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"]))
    strategy.trainer.model = model
    for kind in StateDictType:
        strategy.trainer.accelerator.state.fsdp_plugin = SimpleNamespace(state_dict_type=kind)
        if works or kind.name != "FULL_STATE_DICT":
            strategy.check_versions()
            continue
        with pytest.raises(MissingDependencyError, match=f"accelerate {accelerate} saves the adapters of the first"):
            strategy.check_versions()
        strategy.trainer.model = tiny_model()
        strategy.check_versions()
        strategy.trainer.model = model


def test_a_file_with_the_adapters_of_one_rank_is_not_resumed(tmp_path):
    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"]))
    trained = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    path = tmp_path / "pytorch_model_fsdp.bin"
    torch.save(trained, path)
    loading._check_adapters(model, tmp_path)
    torch.save({name.replace(".default", ""): value[:1] for name, value in trained.items()}, path)
    with pytest.raises(CheckpointError, match="saves the adapters of one rank"):
        loading._check_adapters(model, tmp_path)
    loading._check_adapters(tiny_model(), tmp_path)


def test_fsdp2_does_not_resume_where_accelerate_loses_the_optimizer(monkeypatch, tmp_path):
    old = {"torch": "2.11", "transformers": "5.12", "accelerate": "1.12.0", "datasets": "5.2"}
    monkeypatch.setattr(versions, "installed", old.get)
    monkeypatch.setattr(loading.Strategy, "of", lambda trainer: named("fsdp2"))
    warnings = []
    monkeypatch.setattr(loading.logger, "warning", lambda text, *args: warnings.append(text % args))
    loading.check_resumed(None, None)
    assert "accelerate 1.13 or later (1.12.0 is installed)" in warnings[0]
    with pytest.raises(MissingDependencyError, match=r"accelerate 1.13 or later \(1.12.0 is installed\)"):
        loading.check_resumed(None, str(tmp_path))


def test_a_package_without_bytecode_is_reported_where_it_cannot_be_kept(tmp_path, monkeypatch):
    (tmp_path / "slow_to_compile").mkdir()
    (tmp_path / "slow_to_compile" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert doctor._bytecode_problems("slow_to_compile") == []  # the first import writes it
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    [finding] = doctor._bytecode_problems("slow_to_compile")
    assert "PYTHONDONTWRITEBYTECODE is set" in finding.problem
    assert finding.fix.endswith(f"python -m compileall -q {tmp_path}")
    compileall.compile_dir(tmp_path, quiet=1)
    assert doctor._bytecode_problems("slow_to_compile") == []
    assert doctor._bytecode_problems("not_installed_at_all") == []
