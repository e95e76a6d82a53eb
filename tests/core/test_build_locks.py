"""Locks of extensions whose build was killed are removed before DeepSpeed would wait for them; others are kept."""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import EXTENSIONS, REPOSITORY, accelerate_launch
from tiny import tiny_trainer
from transformers import TrainerCallback

from hfscale import (
    CommHealthCallback,
    LRScalingCallback,
    ScalingCallback,
    ScalingMetricsCallback,
    SpotCheckpointCallback,
)
from hfscale.core import build_locks
from hfscale.core.build_locks import abandoned_locks, remove_abandoned_locks

HOLD = "import sys; held = open(sys.argv[1], 'x'); print(flush=True); input()"
CALLBACKS = [
    CommHealthCallback,
    LRScalingCallback,
    ScalingCallback,
    ScalingMetricsCallback,
    SpotCheckpointCallback,
]


def hold(lock):
    """Have a process take a lock as torch does, and return it."""
    lock.parent.mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def kill(process):
    process.kill()
    process.communicate(timeout=30)


@pytest.fixture
def locks(tmp_path, monkeypatch):
    """A lock whose process was killed, and one whose process lives."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    abandoned, held = (tmp_path / "extensions" / name / "lock" for name in ("cpu_adam", "fused_adam"))
    kill(hold(abandoned))
    holder = hold(held)
    yield abandoned, held
    kill(holder)


class UsesDeepSpeed(TrainerCallback):
    """Leaves in the environment what Accelerate does under DeepSpeed, before the callbacks after it are called."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def on_init_end(self, *args, **kwargs):
        self.monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")


@pytest.mark.parametrize("kind", CALLBACKS)
def test_each_callback_alone_removes_abandoned_locks_when_its_trainer_is_made(kind, locks, tmp_path, monkeypatch):
    abandoned, held = locks
    tiny_trainer(tmp_path / "out", UsesDeepSpeed(monkeypatch), kind())
    assert not abandoned.exists()
    assert held.exists()


def test_only_the_first_process_of_a_machine_removes_locks(locks, tmp_path, monkeypatch):
    class SecondProcess(UsesDeepSpeed):
        def on_init_end(self, *args, **kwargs):
            super().on_init_end()
            self.monkeypatch.setenv("LOCAL_RANK", "1")

    tiny_trainer(tmp_path / "out", SecondProcess(monkeypatch), CommHealthCallback())
    assert all(lock.exists() for lock in locks)


def test_without_deepspeed_locks_are_kept(locks, tmp_path):
    tiny_trainer(tmp_path / "out", ScalingCallback())
    assert all(lock.exists() for lock in locks)


@pytest.mark.world(2)
@pytest.mark.long
def test_a_recipe_removes_the_lock_before_the_trainer_exists(tmp_path: Path) -> None:
    """On a CPU DeepSpeed loads an extension before the Trainer exists, and torch silently waits for its lock."""
    lock = tmp_path / "extensions" / "deepspeed_shm_comm" / "lock"
    shutil.copytree(EXTENSIONS / lock.parent.name, lock.parent)
    lock.touch()
    (tmp_path / "ds_configs").symlink_to(REPOSITORY / "ds_configs")
    worker, config = REPOSITORY / "tests" / "workers" / "saving.py", REPOSITORY / "accelerate_configs" / "zero1.yaml"
    done = accelerate_launch(tmp_path, config, 2, worker, "1", TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"))
    assert done.code == 0, done.err[-4000:]
    (line,) = done.lines("hfscale: removed")
    assert line.startswith(f"hfscale: removed {lock}: ")


def test_locks_that_a_process_holds_are_kept_until_it_ends(tmp_path):
    here = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    left = tmp_path / "fused_adam" / "lock"
    left.parent.mkdir()
    left.touch()
    holder = hold(tmp_path / "held" / "lock")
    assert abandoned_locks(here) == [left]
    remove_abandoned_locks(here)
    assert [path.parent.name for path in tmp_path.glob("*/lock")] == ["held"]
    kill(holder)
    remove_abandoned_locks(here)
    assert not list(tmp_path.glob("*/lock"))


def test_locks_are_found_in_the_default_folder_and_none_in_a_missing_one(tmp_path):
    lock = tmp_path / "torch_extensions" / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert abandoned_locks({"XDG_CACHE_HOME": str(tmp_path)}) == [lock]
    assert abandoned_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path / "none")}) == []


def test_where_the_holder_may_be_on_another_machine_the_age_decides(tmp_path, monkeypatch):
    here = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setattr(build_locks, "_SHARED_FILE_SYSTEMS", ("",))
    assert abandoned_locks(here) == []
    os.utime(lock, (0, 0))
    assert abandoned_locks(here) == [lock]


def test_a_lock_that_is_being_released_is_left_to_its_holder(tmp_path):
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()  # as it is between the holder's close and its removal
    with ThreadPoolExecutor(1) as pool:

        def release():
            time.sleep(0.3)
            lock.unlink()

        released = pool.submit(release)
        remove_abandoned_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
        released.result()  # raises if the file was gone


def test_a_lock_that_another_run_has_taken_meanwhile_is_kept(tmp_path, monkeypatch):
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()

    def locked_again(path):  # another run removed the file, and holds its own now
        path.unlink()
        (tmp_path / "other").touch()  # takes the freed inode
        path.touch()
        return True

    monkeypatch.setattr(build_locks, "_is_abandoned", locked_again)
    remove_abandoned_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert lock.exists()
