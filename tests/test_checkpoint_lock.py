"""Two runs never write into one directory."""

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
    """Another process that holds the lock of a folder."""

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
    made = Holder(tmp_path)
    yield made
    if made.pid:
        made.kill()


def test_a_second_run_is_told_who_holds_it_and_nothing_is_lost(holder, tmp_path):
    (tmp_path / "checkpoint-9").mkdir()
    message = rf"is in use by process {holder.pid} on \S+ since 20"
    with pytest.raises(UsageError, match=message):
        tiny_trainer(tmp_path, SpotCheckpointCallback(), save_strategy="steps").train()
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK_NAME, "checkpoint-9"]


def test_what_its_holder_is_about_to_put_in_place_is_left_to_it(holder, tmp_path):
    unnamed = tmp_path / UNFINISHED / "checkpoint-4"
    unnamed.mkdir(parents=True)
    (unnamed / MANIFEST_NAME).touch()
    assert finish_renames(tmp_path) == []
    holder.kill()
    holder.pid = None
    assert finish_renames(tmp_path) == [tmp_path / "checkpoint-4"]


def test_a_killed_run_holds_nothing(holder, tmp_path):
    holder.kill()
    holder.pid = None
    lock_output_dir(tmp_path)
    unlock_output_dir(tmp_path)


def test_a_run_may_train_twice_in_its_own_folder_and_gives_it_back(tmp_path):
    for _ in range(2):
        tiny_trainer(tmp_path, SpotCheckpointCallback(), save_strategy="steps", max_steps=1).train()
    Holder(tmp_path).kill()  # would hang in the pipe if the lock were still held


def test_a_lock_file_of_another_format_is_still_a_lock(holder, tmp_path):
    (tmp_path / LOCK_NAME).write_text("not JSON")
    with pytest.raises(UsageError, match="is in use by another run"):
        lock_output_dir(tmp_path)
