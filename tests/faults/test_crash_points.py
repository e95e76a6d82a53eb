"""A machine lost, or a disk that fails, at every deed of a resume, a save and a rotation.

Each trial begins with a run that has committed steps 2 and 3. It resumes, saves step 4, deletes step 2, saves step 5
and deletes step 3, and at one deed (open, write, fsync, rename, unlink …) it is struck. Then must hold: the newest
verified checkpoint is the newest that was committed, also when what was not flushed is gone, and the relaunched run
ends as the run that was never struck, bit by bit.

The quick part takes some deeds, the long part (`make test-faults`) all of them, on two ranks too.
"""

import errno
import shutil

import pytest
from crashes import Crashes, crash_server  # noqa: F401  the fixture
from safetensors.torch import load_file
from torch.testing import assert_close

from hfscale.checkpoint.manifest import read_manifest
from hfscale.checkpoint.store import latest_checkpoint, verify

STEPS = 5


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.faults)])
def ranks(request):
    return request.param


@pytest.fixture(scope="module")
def crashes(crash_server, ranks, tmp_path_factory):  # noqa: F811
    """With `start`, the folder in which every trial begins, and `whole`, the run that is never struck."""
    made = Crashes(crash_server, tmp_path_factory.mktemp("crashes"))
    assert made.train(made.folder / "start", 3, ranks=ranks).codes == [0] * ranks
    made.whole = made.train(made.copy("whole"), STEPS, ranks=ranks)
    assert made.whole.codes == [0] * ranks
    made.ranks = ranks
    return made


def assert_usable(cwd, committed):
    """A verified checkpoint is there, and it is the newest that was committed, or one that came whole after it."""
    newest = latest_checkpoint(cwd / "out")
    assert newest is not None
    assert read_manifest(newest).step >= max(committed, 3)


def assert_ends_as_whole(crashes, cwd):
    """Relaunched, the run is the one that was never struck: losses, gradient norms, weights and optimizer."""
    ended = crashes.train(cwd, STEPS, ranks=crashes.ranks)
    assert ended.codes == [0] * crashes.ranks, ended.err[-2000:]
    whole = crashes.folder / "whole"
    assert crashes.records(cwd) == crashes.records(whole)
    last = f"out/checkpoint-{STEPS}"
    assert read_manifest(cwd / last).files["optimizer.pt"] == read_manifest(whole / last).files["optimizer.pt"]
    assert_close(
        load_file(cwd / last / "model.safetensors"), load_file(whole / last / "model.safetensors"), rtol=0, atol=0
    )


def was_struck(crashes, ended, at):
    """Ranks race to make a folder, so a run of two does a deed or two more or fewer than the one that was counted."""
    if any(ended.codes):
        return True
    may_be_missing = crashes.ranks > 1 and at > 0.95 * len(crashes.whole.deeds)
    assert may_be_missing, f"deed {at} failed and nobody noticed"
    return False


def assert_survives_the_machine(crashes, at, *, relaunch):
    cwd = crashes.copy("struck")
    ended = crashes.train(cwd, STEPS, ranks=crashes.ranks, at=at)
    if not was_struck(crashes, ended, at):
        return
    assert -9 in ended.codes
    committed = ended.committed_step(at)
    assert_usable(cwd, committed)
    crashes.lose_unflushed(ended)
    assert_usable(cwd, committed)
    if relaunch:
        assert_ends_as_whole(crashes, cwd)


def assert_survives_the_disk(crashes, at, number, *, relaunch):
    cwd = crashes.copy("struck")
    ended = crashes.train(cwd, STEPS, ranks=crashes.ranks, at=at, errno=number)
    if not was_struck(crashes, ended, at):
        return
    assert_usable(cwd, ended.committed_step(at))
    if relaunch:
        assert_ends_as_whole(crashes, cwd)


@pytest.mark.timeout(600)
def test_a_machine_lost_at_some_deeds(crashes):
    if crashes.ranks > 1:
        pytest.skip("all of them are struck in the next test")
    deeds = len(crashes.whole.deeds)
    for number, at in enumerate(range(3, deeds, max(deeds // 12, 1))):
        assert_survives_the_machine(crashes, at, relaunch=number % 6 == 0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_some_deeds(crashes, number):
    deeds = len(crashes.whole.deeds)
    for at in (deeds // 5, deeds // 2):
        assert_survives_the_disk(crashes, at, number, relaunch=at > deeds // 4)


@pytest.mark.faults
@pytest.mark.timeout(7200)
def test_a_machine_lost_at_every_deed(crashes):
    for at in range(1, len(crashes.whole.deeds) + 1):
        assert_survives_the_machine(crashes, at, relaunch=at % 3 == 0)


@pytest.mark.faults
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_at_every_deed(crashes, number):
    for at in range(1, len(crashes.whole.deeds), 3):
        assert_survives_the_disk(crashes, at, number, relaunch=at % 4 == 0)


def test_the_control_a_save_without_a_manifest_is_not_noticed(crashes):
    """What plain Trainer leaves behind, and `get_last_checkpoint` picks: the trials above can fail."""
    from transformers.trainer_utils import get_last_checkpoint

    cwd = crashes.copy("control")
    half = cwd / "out" / "checkpoint-4"
    shutil.copytree(cwd / "out" / "checkpoint-3", half)
    (half / "hfscale_manifest.json").unlink()
    (half / "optimizer.pt").write_bytes(b"")
    assert get_last_checkpoint(str(cwd / "out")) == str(half)
    assert verify(latest_checkpoint(cwd / "out")).step == 3
