"""What `make test-gpu` does on a machine as it is: packages that are missing, and several GPUs."""

from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, missing_package
from fork_client import fork_server
from hidden_packages import python_without
from tiny import tiny_arguments

from hfscale.errors import MissingDependencyError

MISSING = ("datasets", "deepspeed", "peft", "trl", "wandb", "liger", "pynvml", "nvidia_ml_py", "sentence_transformers")
PLUGINS_OF_PYTEST = ("pytest_timeout", "pytest_rerunfailures", "pytest_xdist", "xdist")


@pytest.mark.recipes
def test_missing_packages_are_skips_with_their_names(tmp_path):
    """hfscale is not installed either."""
    hidden = (*MISSING, *PLUGINS_OF_PYTEST, "hfscale", "__editable__")
    run = python_without(tmp_path, *hidden, also_on_path=REPOSITORY, timeout_s=200)
    done = run("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", cwd=REPOSITORY, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    reasons = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    for package, file in {
        "datasets": "tests/recipe/test_compression.py",
        "nvidia-ml-py": "tests/test_gpu.py",
        "deepspeed": "tests/test_gpu.py",
    }.items():
        assert any(file in line and f"{package} " in line and "not installed" in line for line in reasons), reasons
    assert any("needs a CUDA GPU" in line for line in reasons), reasons


def test_what_an_import_lacks():
    assert missing_package(ModuleNotFoundError("", name="no_package.module")) == "no_package is not installed"
    assert missing_package(MissingDependencyError("needs datasets 4.0")) == "needs datasets 4.0"
    older = missing_package(ImportError("cannot import name 'x' from 'torch'", name="torch.nn"))
    assert older == f"cannot import name 'x' from 'torch' (torch {torch.__version__} is installed)"


@pytest.mark.parametrize("name", ["hfscale.health.no_module", "tiny", None])
def test_a_fault_of_hfscale_or_of_the_tests_is_no_missing_package(name):
    assert missing_package(ImportError("cannot import name 'x'", name=name)) is None


def test_trainings_in_the_test_process_use_one_of_eight_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert tiny_arguments(tmp_path, use_cpu=False).n_gpu == 1
    assert tiny_arguments(tmp_path).n_gpu == 0


def test_the_fork_server_looks_for_gpus_without_using_cuda(python, monkeypatch):
    """A fork of a process that has used CUDA cannot use it. The forks have the environment of the test."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    monkeypatch.delenv(name, raising=False)  # DeepSpeed sets it when it is imported
    done = python("-c", f"import os; print(os.environ.get({name!r}))")
    assert done.out.strip() == "None"
    environ = Path(f"/proc/{fork_server()._process.pid}/environ").read_bytes().split(b"\0")
    assert f"{name}=1".encode() in environ
