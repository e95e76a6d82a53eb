"""A forked process shows progress bars although another one was killed while it held their lock."""

import multiprocessing
import os
import signal
import time

import pytest
from tqdm import tqdm

from hfscale.core.progress_locks import own_progress_locks


class Bar(tqdm):
    """A class of a library, with a lock of its own."""


def forked(run):
    pid = os.fork()
    if pid == 0:
        run()
        os._exit(0)
    return pid


def ends(pid, within_s):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


@pytest.mark.parametrize("kind", [tqdm, Bar])
def test_a_lock_that_a_killed_process_held_holds_up_no_other(kind, tmp_path):
    kept = tqdm.get_lock()
    lock = multiprocessing.RLock()  # of this test, as tqdm's own one: it stays locked
    tqdm.set_lock(lock)
    if kind is Bar:
        Bar.set_lock(lock)
    is_held = tmp_path / "held"

    def hold():
        kind.get_lock().acquire()
        is_held.touch()
        signal.pause()

    def show():
        list(kind(range(2), disable=False))

    def show_with_own_locks():
        own_progress_locks()
        show()

    try:
        holder = forked(hold)
        deadline = time.monotonic() + 20.0
        while not is_held.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        assert not ends(forked(show), 1.0)  # as it was
        assert ends(forked(show_with_own_locks), 20.0)
    finally:
        tqdm.set_lock(kept)
        Bar.set_lock(kept)
