"""The lock that keeps two runs from writing into one output directory."""

import fcntl
import json
import os
import shutil
import signal
import socket
import threading
import time

import pytest
from tiny import tiny_trainer
from transformers import TrainerCallback

from hfscale import SpotCheckpointCallback
from hfscale.checkpoint import lock
from hfscale.checkpoint.lock import (
    is_locked_by_another_process,
    lock_for_all_ranks,
    lock_output_dir,
    unlock_output_dir,
)
from hfscale.checkpoint.writer import finish_renames
from hfscale.core.run_files import LOCK_NAME, MANIFEST_NAME, UNFINISHED
from hfscale.errors import OutputDirInUseError, UsageError


class Holder:
    """A child process that holds the lock of a folder."""

    def __init__(self, folder):
        ready, done = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            lock_output_dir(folder)
            os.write(done, b"1")
            time.sleep(300)
            os._exit(0)
        os.read(ready, 1)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@pytest.fixture
def holder(tmp_path):
    process = Holder(tmp_path)
    yield process
    if process.pid:
        process.kill()


def test_a_second_run_gets_an_error_that_names_the_holder(holder, tmp_path):
    (tmp_path / "checkpoint-9").mkdir()
    message = rf"is in use by process {holder.pid} on \S+ since 20"
    with pytest.raises(UsageError, match=message):
        tiny_trainer(tmp_path, SpotCheckpointCallback(), save_strategy="steps").train()
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK_NAME, "checkpoint-9"]


def test_only_the_holder_finishes_its_renames(holder, tmp_path):
    complete = tmp_path / UNFINISHED / "checkpoint-4"
    complete.mkdir(parents=True)
    (complete / MANIFEST_NAME).touch()
    assert finish_renames(tmp_path) == []
    holder.kill()
    holder.pid = None
    assert finish_renames(tmp_path) == [tmp_path / "checkpoint-4"]


def test_a_killed_run_releases_the_lock(holder, tmp_path):
    holder.kill()
    holder.pid = None
    lock_output_dir(tmp_path)
    unlock_output_dir(tmp_path)


def test_a_run_can_train_twice_in_its_folder_and_then_releases_it(tmp_path):
    for _ in range(2):
        tiny_trainer(tmp_path, SpotCheckpointCallback(), save_strategy="steps", max_steps=1).train()
    Holder(tmp_path).kill()  # would wait for the pipe forever if the lock were still held


class Removes(TrainerCallback):
    """Removes the output directory after step 1; `other` then does something in a new one."""

    def __init__(self, folder, other):
        self.folder, self.other = folder, other

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            shutil.rmtree(self.folder)
            self.other()

    def on_save(self, args, state, control, **kwargs):
        self.is_locked = is_locked(self.folder)


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_folder_that_is_removed_and_made_again_is_locked_again(tmp_path, is_made_again):
    output_dir = tmp_path / "out"
    removes = Removes(output_dir, output_dir.mkdir if is_made_again else lambda: None)
    tiny_trainer(
        output_dir, SpotCheckpointCallback(), removes, save_strategy="steps", save_steps=2, max_steps=2
    ).train()
    assert removes.is_locked
    assert not is_locked(output_dir)


def test_a_folder_that_another_run_has_made_again_is_left_to_it(tmp_path):
    output_dir, others = tmp_path / "out", []

    def start_another():
        output_dir.mkdir()
        others.append(Holder(output_dir))

    removes = Removes(output_dir, start_another)
    trainer = tiny_trainer(
        output_dir, SpotCheckpointCallback(), removes, save_strategy="steps", save_steps=2, max_steps=2
    )
    with pytest.raises(UsageError, match="in use by process"):
        trainer.train()
    others[0].kill()
    assert not (output_dir / "checkpoint-2").exists()
    unlock_output_dir(output_dir)


def is_locked(folder):
    """Ask a forked process."""
    child = os.fork()
    if child == 0:
        os._exit(int(is_locked_by_another_process(folder)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_backup_of_the_folder_in_the_same_process_does_not_release_the_lock(tmp_path):
    output_dir = tmp_path / "out"
    output_dir.mkdir()
    lock_output_dir(output_dir)
    shutil.copytree(output_dir, tmp_path / "backup")
    assert is_locked(output_dir)
    unlock_output_dir(output_dir)
    assert not is_locked(output_dir)


def test_a_child_that_outlives_the_run_does_not_keep_the_lock(tmp_path):
    end, kept = os.pipe()
    lock_output_dir(tmp_path)
    child = os.fork()  # as a worker of a DataLoader
    if child == 0:
        os.close(kept)
        os.read(end, 1)
        os._exit(0)
    unlock_output_dir(tmp_path)
    assert not is_locked(tmp_path)
    os.close(kept)
    os.close(end)
    os.waitpid(child, 0)


def test_it_excludes_the_lock_of_the_process_that_earlier_versions_have(tmp_path):
    lock_output_dir(tmp_path)
    child = os.fork()
    if child == 0:
        with (tmp_path / LOCK_NAME).open("r+") as file, pytest.raises(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    unlock_output_dir(tmp_path)


@pytest.fixture(params=["lost-node", socket.gethostname()])
def lost_machine(request, holder, tmp_path):
    """The lock of a machine that is lost, which an NFS server keeps for a while; also one whose pod was replaced."""
    fields = {"host": request.param, "pid": os.getpid(), "since": "2001-01-01T00:00:00+00:00"}
    (tmp_path / LOCK_NAME).write_text(json.dumps(fields))
    return holder


def test_the_lock_of_a_lost_machine_is_waited_for(lost_machine, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lock, "_POLL_S", 0.1)
    threading.Timer(1.0, os.kill, [lost_machine.pid, signal.SIGKILL]).start()
    lock_output_dir(tmp_path)
    assert caplog.text.count("waiting up to") == 1
    assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    unlock_output_dir(tmp_path)


def test_a_lock_that_stays_ends_the_run_with_exit_code_75(lost_machine, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "LOCK_WAIT_S", 0.5)
    monkeypatch.setattr(lock, "_POLL_S", 0.1)
    with pytest.raises(
        OutputDirInUseError, match=r"process \d+ on \S+ since 2001.*start the same command again"
    ) as caught:
        lock_for_all_ranks(tmp_path, is_holder=True)
    assert caught.value.exit_code == 75


def test_a_lock_file_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "victim").write_text("content")
    (tmp_path / LOCK_NAME).symlink_to(tmp_path / "victim")
    with pytest.raises(UsageError, match="symbolic link"):
        lock_output_dir(tmp_path)
    assert (tmp_path / "victim").read_text() == "content"


def test_a_lock_file_with_other_content_is_still_a_lock(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "LOCK_WAIT_S", 0.0)
    (tmp_path / LOCK_NAME).write_text("not JSON")
    with pytest.raises(UsageError, match="is in use by another run"):
        lock_output_dir(tmp_path)
