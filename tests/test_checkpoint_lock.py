"""The lock that keeps two runs from writing into one output directory."""

import os
import signal
import time

import pytest
from tiny import tiny_trainer

from hfscale import SpotCheckpointCallback
from hfscale.checkpoint.lock import LOCK_NAME, lock_output_dir, unlock_output_dir
from hfscale.checkpoint.manifest import MANIFEST_NAME
from hfscale.checkpoint.store import UNFINISHED
from hfscale.checkpoint.writer import finish_renames
from hfscale.errors import UsageError


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


def test_a_lock_file_with_other_content_is_still_a_lock(holder, tmp_path):
    (tmp_path / LOCK_NAME).write_text("not JSON")
    with pytest.raises(UsageError, match="is in use by another run"):
        lock_output_dir(tmp_path)
