"""Jobs of one node that use one folder for their copies, at the same time or after one that was killed."""

import os
import signal
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from forked_ranks import run_ranks
from test_load_once import content, make_checkpoint, make_model

import hfscale
from hfscale.checkpoint import node_copies, transfer
from hfscale.errors import HfScaleError

WAIT_S = 60.0


class Signals:
    """Files by which two processes wait for each other."""

    def __init__(self, folder):
        self.folder = folder

    def give(self, name):
        (self.folder / name).touch()

    def wait(self, name):
        deadline = time.monotonic() + WAIT_S
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.01)


def on_jobs(folder, *jobs):
    """Run functions as jobs of one process each, at the same time; return their exit codes.

    Each gets a `Signals`. What it returns is written to `job-N` of the folder, or the error of hfscale.
    """

    def run():
        number = int(os.environ["RANK"])
        os.environ |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
        try:
            found = jobs[number](Signals(folder))
        except HfScaleError as error:
            found = f"{type(error).__name__}: {error}"
        (folder / f"job-{number}").write_text(str(found))

    return run_ranks(len(jobs), run, log=folder / "log", ends_all=False, timeout_s=100)


def result(folder, number):
    return (folder / f"job-{number}").read_text()


@pytest.fixture
def places(tmp_path):
    """Return the folder of a model, the one for the copies, and the one in which jobs write."""
    model = make_model(tmp_path / "shared" / "model")
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    return model, tmp_path / "disk", jobs


def reading(signals, then):
    """Return a replacement of `read_chunk` that says that the job reads, and does something before its first chunk."""
    read_chunk = transfer.read_chunk
    begun = []

    def read(folder, chunk, buffer):
        if not begun:
            begun.append(chunk)
            signals.give("first reads")
            then()
        read_chunk(folder, chunk, buffer)

    return patch.object(transfer, "read_chunk", read)


def test_a_copy_that_another_job_writes_is_left_to_it(places):
    model, disk, folder = places

    def first(signals):
        with reading(signals, lambda: signals.wait("second has ended")):
            return hfscale.load_once(str(model), str(disk))

    def second(signals):
        signals.wait("first reads")
        copy = hfscale.load_once(str(model), str(disk))
        partial = [path.name for path in disk.rglob("*.partial")]
        signals.give("second has ended")
        return f"{copy} {len(partial)}"

    assert on_jobs(folder, first, second) == [0, 0]
    copy, partial = result(folder, 1).split()
    assert partial == "1"
    assert result(folder, 0) == copy
    assert content(copy)["config.json"] == b"{}"
    assert list(disk.rglob("*.partial")) == []


def test_what_a_killed_job_has_left_is_removed(places):
    model, disk, folder = places

    def killed(signals):
        with reading(signals, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            hfscale.load_once(str(model), str(disk))

    assert on_jobs(folder, killed) == [-signal.SIGKILL]
    assert len(list(disk.rglob("*.partial"))) == 1
    assert on_jobs(folder, lambda signals: hfscale.load_once(str(model), str(disk))) == [0]
    assert list(disk.rglob("*.partial")) == []
    assert (Path(result(folder, 0)) / "config.json").is_file()


def test_a_complete_copy_is_not_replaced_by_a_job_that_is_slower(places):
    """The first job is about to give its copy the name when the second one has it complete."""
    model, disk, folder = places

    def slow(signals):
        write = node_copies.write_atomically

        def write_later(*arguments):
            signals.give("first completes")
            signals.wait("second completes")
            time.sleep(1.0)  # longer than the second one would need
            write(*arguments)

        # It holds the lock of the folder while it completes, which the second one needs before it reads
        with (
            reading(signals, lambda: signals.wait("second reads")),
            patch.object(node_copies, "write_atomically", write_later),
        ):
            return Path(hfscale.load_once(str(model), str(disk))).stat().st_ino

    def quick(signals):
        def wait():
            signals.give("second reads")
            signals.wait("first completes")

        with reading(signals, wait):
            complete = node_copies.NodeCopies._complete

            def completed(self, *arguments):
                signals.give("second completes")
                complete(self, *arguments)

            with patch.object(node_copies.NodeCopies, "_complete", completed):
                return Path(hfscale.load_once(str(model), str(disk))).stat().st_ino

    assert on_jobs(folder, slow, quick) == [0, 0]
    (copy,) = disk.glob("models/*/model")
    assert result(folder, 0) == result(folder, 1) == str(copy.stat().st_ino)


def test_a_checkpoint_that_another_job_has_loaded_stays_until_it_ends(places, tmp_path):
    _, disk, folder = places
    run = tmp_path / "run"
    make_checkpoint(run, 2)

    def load():
        return hfscale.latest_checkpoint(str(run), load_once=str(disk))

    def first(signals):
        copy = load()
        before = content(copy)
        signals.give("first has loaded")
        signals.wait("second has loaded")
        return f"{copy} {content(copy) == before}"

    def second(signals):
        signals.wait("first has loaded")
        make_checkpoint(run, 4)
        copy = load()
        signals.give("second has loaded")
        return copy

    assert on_jobs(folder, first, second) == [0, 0]
    copy, is_equal = result(folder, 0).split()
    assert is_equal == "True"
    newer = Path(result(folder, 1))
    assert newer.name == "checkpoint-4"
    assert on_jobs(folder, lambda signals: load()) == [0]
    assert result(folder, 0) == str(newer)
    make_checkpoint(run, 6)
    assert on_jobs(folder, lambda signals: load()) == [0]
    assert [path.name for path in disk.glob("checkpoints/*/*/checkpoint-*")] == ["checkpoint-6"]
    assert not Path(copy).exists()


def test_a_checkpoint_that_another_job_removes_meanwhile_is_one_line(places, tmp_path):
    _, disk, folder = places
    run = tmp_path / "run"
    make_checkpoint(run, 2)

    def first(signals):
        hold = node_copies.NodeCopies._hold

        def held(self, *arguments):
            signals.give("first holds")
            signals.wait("second has loaded")
            hold(self, *arguments)

        with patch.object(node_copies.NodeCopies, "_hold", held):
            return hfscale.latest_checkpoint(str(run), load_once=str(disk))

    def second(signals):
        signals.wait("first holds")
        make_checkpoint(run, 4)
        copy = hfscale.latest_checkpoint(str(run), load_once=str(disk))
        signals.give("second has loaded")
        return copy

    assert on_jobs(folder, first, second) == [0, 0]
    assert result(folder, 0).startswith("StorageError: ")
    assert "was removed on" in result(folder, 0)
    assert Path(result(folder, 1)).name == "checkpoint-4"
