"""Failures of work that training does not need: the run completes, one warning is logged, the report counts them."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_trainer
from transformers import TrainerCallback

from hfscale import ScalingCallback, SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint.remote import COPYING, RemoteStore, Uploader
from hfscale.checkpoint.store import DELETING, STATUS_NAME, list_checkpoints
from hfscale.cli import main
from hfscale.core import best_effort
from hfscale.core.durable_files import flush
from hfscale.core.records import WRITING
from hfscale.core.run_files import JSONL_NAME, RANKS_NAME, TIMELINE_NAME
from hfscale.health.gpu import NvmlSensor
from hfscale.metrics.profiler import ProfilerCallback
from hfscale.recovery.autostop_command import gpu_activity, wait_until_idle
from hfscale.report.run_data import load_run

SAVES = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6, "save_total_limit": 2}


@pytest.fixture(autouse=True)
def fresh_counts():
    best_effort.take_counts()


def failing_folder(monkeypatch, name):
    """Let the deletion of one checkpoint fail as on NFS, where a file that another process has open stays."""
    delete = shutil.rmtree

    def rmtree(path, ignore_errors=False):
        if Path(path).name == f"{name}.deleted" and Path(path).exists() and not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        delete(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", rmtree)


def failing_file(monkeypatch, *names):
    """Let every write to files of these names fail, as after a restart of an NFS server."""
    plain = Path.open

    def stale(self, mode="r", *args, **kwargs):
        if any(name in self.name for name in names) and mode != "r":
            raise OSError(errno.ESTALE, "Stale file handle", str(self))
        return plain(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", stale)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_old_checkpoint_that_cannot_be_deleted(tmp_path, monkeypatch, caplog, capsys, asynchronous):
    failing_folder(monkeypatch, "checkpoint-1")
    callback = ScalingCallback(spot_checkpoint=SpotCheckpointCallback(asynchronous=asynchronous))
    trainer = tiny_trainer(tmp_path, callback, **SAVES)
    trainer.train()
    assert trainer.state.global_step == 6
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
    assert caplog.text.count(f"{DELETING} failed") == 1
    assert load_run(tmp_path).failures == {DELETING: 1}
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failures"] == {DELETING: 1}
    assert main(["report", str(tmp_path)]) == 0
    assert "deleting old checkpoints (1 time)" in " ".join(capsys.readouterr().out.split())


def test_an_immutable_old_checkpoint(tmp_path):
    """The rename itself is refused, and the next checkpoints are deleted all the same."""

    class MakeImmutable(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            folder = tmp_path / "checkpoint-1"
            if folder.exists() and subprocess.run(["chattr", "+i", folder], capture_output=True).returncode:
                pytest.skip("this file system has no immutable files")

    try:
        tiny_trainer(tmp_path, SpotCheckpointCallback(), MakeImmutable(), **SAVES).train()
        assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-5", "checkpoint-6"]
    finally:
        subprocess.run(["chattr", "-i", tmp_path / "checkpoint-1"], capture_output=True, check=False)


def test_files_of_measurements_and_status_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    callback = ScalingCallback(spot_checkpoint=SpotCheckpointCallback())
    trainer = tiny_trainer(tmp_path, callback, **SAVES)
    failing_file(monkeypatch, JSONL_NAME, RANKS_NAME, TIMELINE_NAME, STATUS_NAME)
    trainer.train()
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
    assert not (tmp_path / STATUS_NAME).exists()
    assert caplog.text.count(f"{WRITING} failed at {tmp_path / JSONL_NAME}") == 1
    assert best_effort.take_counts()[WRITING] >= 6


def test_failures_are_recorded_when_the_file_can_be_written_again(tmp_path, monkeypatch):
    callback = ScalingCallback(spot_checkpoint=SpotCheckpointCallback())

    class Recover(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                failing_file(monkeypatch, JSONL_NAME, TIMELINE_NAME)
            if state.global_step == 4:
                monkeypatch.undo()

    tiny_trainer(tmp_path, callback, Recover(), **SAVES).train()
    assert load_run(tmp_path).failures[WRITING] >= 2


def test_a_warning_is_repeated_after_some_minutes(caplog, monkeypatch):
    with best_effort.best_effort("work", "first"):
        raise OSError("first")
    for _ in range(3):
        with best_effort.best_effort("work", "first"):
            raise OSError("second")
    assert caplog.text.count("work failed at first") == 1
    monkeypatch.setattr(best_effort, "WARN_EVERY_S", 0.0)
    with best_effort.best_effort("work", "first"):
        raise OSError("third")
    assert "third, and 3 more since the last warning" in caplog.text
    assert best_effort.take_counts() == {"work": 5}
    with pytest.raises(TypeError), best_effort.best_effort("work", "first"):
        raise TypeError("a defect is not handled")


def test_a_checkpoint_that_is_gone_before_its_copy(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    uploader = Uploader(RemoteStore(f"file://{tmp_path}/remote"), limit=None, links=tmp_path / "links")
    uploader.offer(tmp_path / "checkpoint-1")
    assert best_effort.take_counts() == {COPYING: 1}


def test_a_profile_that_cannot_be_written(tmp_path):
    (tmp_path / "profile").write_text("a file instead of the folder")
    trainer = tiny_trainer(tmp_path, ProfilerCallback(steps=[2]), max_steps=3)
    trainer.train()
    assert trainer.state.global_step == 3


def test_a_file_system_without_fsync_of_folders(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.EINVAL, "Invalid argument")

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", refuse)
    flush(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        flush(tmp_path / "file")


# ---- NVML


class NVMLError(Exception):
    """As that of pynvml."""


def fake_nvml(use):
    """Return a module with the calls of `autostop`, whose GPUs have the given uses; an exception is raised."""

    def rates(handle):
        if isinstance(use[handle], Exception):
            raise use[handle]
        return SimpleNamespace(gpu=use[handle])

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(use),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=rates,
    )


def test_autostop_runs_its_command_after_a_gpu_is_lost(monkeypatch):
    use = [80, 0]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(use))
    check = gpu_activity()
    assert check()
    use[0] = NVMLError("GPU is lost")
    assert not check()
    use[1] = 50
    assert check(), "the other GPU computes"
    use[1] = 0
    clock = iter(range(1000))
    wait_until_idle([check], idle_s=20.0, now=lambda: float(next(clock)), sleep=lambda seconds: None)


def test_autostop_does_not_watch_a_gpu_that_tells_nothing(monkeypatch):
    """In MIG mode NVML has no use: the machine must not be stopped for it."""
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([NVMLError("Not Supported")]))
    assert gpu_activity() is None


def test_an_older_nvidia_ml_py_without_a_call(monkeypatch):
    old = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_MEMORY_ERROR_TYPE_CORRECTED=0,
        NVML_VOLATILE_ECC=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTemperature=lambda handle, kind: 50,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x20,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0"))
    reading = NvmlSensor(torch.device("cuda", 0), old).read()
    assert (reading.temperature_c, reading.reasons, reading.power_w) == (50, 0x20, None)
