"""Crashes of the machine and of the disk at every I/O operation of a resume, a save and a rotation.

Each trial starts with a run that has committed steps 2 and 3. It resumes, saves step 4, deletes step 2, saves step 5
and deletes step 3, and crashes at one operation (open, write, fsync, rename, unlink …). The test asserts that the
newest verified checkpoint is the newest that was committed, and that the relaunched run has the same results as a run
without a crash, bit by bit. For the loss of the machine, `disk.py` computes from the log of one run what is on the
disk after each operation if files, and names in folders, are lost that were not flushed.

The quick part crashes at some operations, the long part (`make test-faults`) at all of them, also with two ranks, and
with a subclass of Trainer that writes files of its own into `checkpoint-N`.
"""

import errno
import os
import shutil
from pathlib import Path

import pytest
from conftest import REPOSITORY
from crashes import CrashRunner, committed_step, crash_server  # noqa: F401  the fixture
from disk import SURVIVORS, restore, signature, with_two_names
from safetensors.torch import load_file
from test_kill import QUICK, chains  # noqa: F401  the fixture
from torch.testing import assert_close

from hfscale import latest_checkpoint
from hfscale.checkpoint.manifest import read_manifest
from hfscale.checkpoint.store import verify
from hfscale.checkpoint.writer import clear_unfinished, finish_renames

STEPS = 5


LONG = [(2, "Trainer"), (1, "WritesMore"), (2, "WritesMore")]


@pytest.fixture(
    scope="module", params=[(1, "Trainer"), *(pytest.param(case, marks=pytest.mark.faults) for case in LONG)]
)
def case(request):
    """Return the number of ranks and the class of Trainer."""
    return request.param


@pytest.fixture(scope="module")
def crashes(crash_server, case, tmp_path_factory):  # noqa: F811
    """Runner with `start`, the folder with which every trial starts, and `reference`, the run without a crash."""
    ranks, kind = case
    runner = CrashRunner(crash_server, tmp_path_factory.mktemp("crashes"), kind)
    assert runner.train(runner.folder / "start", 3, ranks=ranks).codes == [0] * ranks
    runner.reference = runner.train(runner.copy("reference"), STEPS, ranks=ranks)
    assert runner.reference.codes == [0] * ranks
    runner.operations = len(runner.reference.operations_of(0))
    runner.ranks = ranks
    return runner


def assert_usable(crashes, cwd, committed):
    """Assert that the newest verified checkpoint is the newest that was committed, or a later complete one."""
    for renamed in finish_renames(cwd / "out"):
        verify(renamed)
    newest = latest_checkpoint(cwd / "out")
    assert newest is not None
    manifest = read_manifest(newest)
    assert manifest.step >= max(committed, 3)
    written = {name for name in manifest.files if name.endswith(".txt")}
    names = ("before", "after", "model") if crashes.kind == "WritesMore" else ()
    assert written == {f"{name}_{rank}.txt" for name in names for rank in range(crashes.ranks)}


def assert_relaunch_equals_reference(crashes, cwd):
    """Assert that the relaunched run has the losses, gradient norms, weights and optimizer of the reference."""
    outcome = crashes.train(cwd, STEPS, ranks=crashes.ranks)
    assert outcome.codes == [0] * crashes.ranks, outcome.err[-2000:]
    reference = crashes.folder / "reference"
    assert crashes.records(cwd) == crashes.records(reference)
    last = f"out/checkpoint-{STEPS}"
    assert read_manifest(cwd / last).files["optimizer.pt"] == read_manifest(reference / last).files["optimizer.pt"]
    assert_close(
        load_file(cwd / last / "model.safetensors"), load_file(reference / last / "model.safetensors"), rtol=0, atol=0
    )


def has_crashed(crashes, outcome, at):
    """Return whether the run crashed at operation `at`.

    Two ranks race to create a folder, so such a run may have one or two operations fewer than the reference.
    """
    if any(outcome.codes):
        return True
    may_be_missing = crashes.ranks > 1 and at > 0.95 * crashes.operations
    assert may_be_missing, f"operation {at} failed and the run ended without an error"
    return False


def assert_survives_a_kill(crashes, at, *, relaunch):
    cwd = crashes.copy("crashed")
    outcome = crashes.train(cwd, STEPS, ranks=crashes.ranks, at=at)
    if not has_crashed(crashes, outcome, at):
        return
    assert -9 in outcome.codes
    assert_usable(crashes, cwd, committed_step(outcome.operations, needs_flush=False))
    if relaunch:
        assert_relaunch_equals_reference(crashes, cwd)


def assert_survives_disk_failure(crashes, at, number, *, relaunch):
    cwd = crashes.copy("crashed")
    outcome = crashes.train(cwd, STEPS, ranks=crashes.ranks, at=at, errno=number)
    if any(outcome.codes):
        assert_usable(crashes, cwd, committed_step(outcome.operations, needs_flush=False))
        if relaunch:
            assert_relaunch_equals_reference(crashes, cwd)
        return
    # It was an operation without which the training can go on, such as deleting an old checkpoint; or two ranks
    # raced to create a folder, and the run had fewer operations.
    assert len(outcome.operations_of(0)) < at or os.strerror(number) in outcome.err, f"operation {at}: no warning"
    assert verify(latest_checkpoint(cwd / "out")).step == STEPS
    assert crashes.records(cwd) == crashes.records(crashes.folder / "reference")


def disks_after_loss(outcome, folder):
    """Yield each different folder that a loss of the machine can leave of a run, and the step promised by then."""
    contents, seen = outcome.disk().contents(outcome.trash), {}
    for committed, disk in outcome.states():
        for survivors in SURVIVORS.values():
            top = disk.after_loss(survivors)
            if seen.setdefault(signature(top), -1) < committed:
                seen[signature(top)] = committed
                left = folder / str(len(seen))
                restore(top, contents, left)
                yield left, committed, with_two_names(top)
                shutil.rmtree(left)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_machine_loss_after_every_operation(crashes, tmp_path):
    number = 0
    for number, (cwd, committed, twice) in enumerate(disks_after_loss(crashes.reference, tmp_path)):
        assert_usable(crashes, cwd, committed)
        assert f"out/checkpoint-{committed}" not in twice
        if number % 40 == 39 and (crashes.ranks, crashes.kind) in LONG:
            assert_relaunch_equals_reference(crashes, cwd)
    assert number > 40


@pytest.fixture(scope="module")
def commits(crash_server, tmp_path_factory):  # noqa: F811
    """Commits by one process, without a training."""
    runner = CrashRunner(crash_server, tmp_path_factory.mktemp("commits"))
    outcome = runner.train(runner.folder / "run", 4, worker=REPOSITORY / "tests" / "workers" / "committing.py")
    assert outcome.codes == [0], outcome.err
    return outcome


@pytest.mark.long
def test_commits_survive_a_machine_loss_after_every_operation(commits, tmp_path):
    for cwd, committed, twice in disks_after_loss(commits, tmp_path):
        out = cwd / "out"
        if (
            committed > 2
        ):  # while step 2 is saved again it has two names for a moment, as long as a rename is not flushed
            assert f"out/checkpoint-{committed}" not in twice
        if not out.is_dir():
            assert committed == 0
            continue
        for renamed in finish_renames(out):
            verify(renamed)
        newest = latest_checkpoint(out)
        assert committed <= (verify(newest).step if newest else 0)
        clear_unfinished(out)
        assert latest_checkpoint(out) == newest


@pytest.mark.parametrize("case", ["finished commit", "archive"])
@pytest.mark.long
def test_what_a_relaunch_renames_survives_a_machine_loss(commits, crash_server, tmp_path, case):  # noqa: F811
    runner, out = CrashRunner(crash_server, tmp_path), tmp_path / "run" / "out"
    shutil.copytree(commits.cwd, out.parent)
    (out / ".unfinished").mkdir(exist_ok=True)
    if case == "archive":
        (out / "checkpoint-3").rename(out / "checkpoint-9")
    else:
        (out / "checkpoint-4").rename(out / ".unfinished" / "checkpoint-4")  # before the last rename of its commit
    outcome = runner.train(out.parent, 0, worker=REPOSITORY / "tests" / "workers" / "committing.py")
    assert outcome.codes == [0], outcome.err
    disk = outcome.disk()
    for number, survivors in enumerate(SURVIVORS.values()):
        left = tmp_path / str(number)
        restore(disk.after_loss(survivors), disk.contents(outcome.trash), left)
        assert verify(left / "out" / "checkpoint-4").step == 4
        assert not (left / "out" / "checkpoint-9").exists()


def test_a_conversion_survives_a_machine_loss_after_every_operation(commits, crash_server, tmp_path):  # noqa: F811
    runner, run = CrashRunner(crash_server, tmp_path), tmp_path / "run"
    shutil.copytree(commits.cwd, run)
    outcome = runner.train(run, 0, worker=REPOSITORY / "tests" / "workers" / "converting.py")
    assert outcome.codes == [0], outcome.err
    target = Path("new", "folder", "checkpoint-4")
    for cwd, _, _ in disks_after_loss(outcome, tmp_path / "left"):
        if (cwd / target).exists():
            verify(cwd / target)
    disk = outcome.disk()
    for number, survivors in enumerate(SURVIVORS.values()):
        left = tmp_path / str(number)
        restore(disk.after_loss(survivors), disk.contents(outcome.trash), left)
        assert verify(left / target).step == 4


@pytest.mark.timeout(300)
@pytest.mark.long
def test_kills_at_some_operations(crashes):
    if (crashes.ranks, crashes.kind) in LONG:
        pytest.skip("the next test covers all operations")
    for number in range(4):
        assert_survives_a_kill(crashes, 3 + number * crashes.operations // 4, relaunch=number % 2 == 0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.long
def test_disk_failure_at_some_operations(crashes, number):
    for at in (crashes.operations // 5, crashes.operations // 2):
        assert_survives_disk_failure(crashes, at, number, relaunch=at > crashes.operations // 4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("failing", ["unlink,rmdir", "rmdir"])
@pytest.mark.long
def test_deletions_that_fail_end_no_run(crashes, failing):
    """The rotation of old checkpoints fails; the run logs a warning and ends as the reference does."""
    cwd = crashes.copy("undeletable")
    outcome = crashes.train(cwd, STEPS, ranks=crashes.ranks, at=1, errno=errno.EIO, failing=failing)
    if crashes.kind == "WritesMore" and "unlink" in failing:  # its methods write through a link
        assert outcome.codes == [1] * crashes.ranks
        assert "checkpoint-4 could not be written" in outcome.err
        assert verify(latest_checkpoint(cwd / "out")).step == 3
        return
    assert outcome.codes == [0] * crashes.ranks, outcome.err[-2000:]
    assert any(operation.name == "rmdir" for operation in outcome.operations)
    assert "deleting old checkpoints" in outcome.err
    assert verify(latest_checkpoint(cwd / "out")).step == STEPS
    assert crashes.records(cwd) == crashes.records(crashes.folder / "reference")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_repeatedly_killed_run_equals_an_uninterrupted_one(chains):  # noqa: F811
    chains("single").run(QUICK["single"])


@pytest.mark.faults
@pytest.mark.timeout(7200)
def test_kills_at_every_operation(crashes):
    for at in range(1, crashes.operations + 1):
        assert_survives_a_kill(crashes, at, relaunch=at % 6 == 0)


@pytest.mark.faults
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_disk_failure_at_every_sixth_operation(crashes, number):
    for at in range(1 + (number == errno.EIO) * 2 + (number == errno.EROFS) * 4, crashes.operations, 6):
        assert_survives_disk_failure(crashes, at, number, relaunch=at % 12 < 6)


def test_control_plain_trainer_picks_an_incomplete_checkpoint(crashes):
    """`get_last_checkpoint` picks what plain Trainer leaves after a crash, so the trials above can fail."""
    from transformers.trainer_utils import get_last_checkpoint

    cwd = crashes.copy("control")
    incomplete = cwd / "out" / "checkpoint-4"
    shutil.copytree(cwd / "out" / "checkpoint-3", incomplete)
    (incomplete / "hfscale_manifest.json").unlink()
    (incomplete / "optimizer.pt").write_bytes(b"")
    assert get_last_checkpoint(str(cwd / "out")) == str(incomplete)
    assert verify(latest_checkpoint(cwd / "out")).step == 3
