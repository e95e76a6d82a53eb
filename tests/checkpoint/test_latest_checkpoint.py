"""The one answer to "which checkpoint do I resume from?", in one process and on several ranks."""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from attacks import RunsCode
from forked_ranks import run_ranks
from ports import free_port
from safetensors.torch import save_file
from tiny import tiny_trainer
from transformers import TrainerCallback

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint.manifest import FileRecord, read_manifest
from hfscale.checkpoint.remote import RemoteStore
from hfscale.checkpoint.store import commit, list_archives, list_checkpoints
from hfscale.core.final_errors import is_final
from hfscale.errors import CheckpointChangedError, CheckpointError, UsageError


def make_plain(folder, step):
    """Make the files that plain Trainer leaves, without training."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    weights = {"weight": torch.arange(256.0) + step}
    save_file(weights, checkpoint / "model.safetensors")
    torch.save({"state": weights}, checkpoint / "optimizer.pt")
    torch.save({"last_epoch": step}, checkpoint / "scheduler.pt")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return checkpoint


def make_checkpoint(folder, step, **changes):
    checkpoint = make_plain(folder, step)
    for name, value in changes.items():
        torch.save(value, checkpoint / f"{name}.pt")
    commit(checkpoint, step=step, strategy="ddp", world_size=2, global_batch_size=4)
    return checkpoint


def damage(path):
    """Change the last byte of a file, so that only its hash tells."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


class TestOneProcess:
    def test_a_checkpoint_of_plain_trainer_is_returned_with_a_warning(self, tmp_path, caplog):
        make_checkpoint(tmp_path, 2)
        newest = make_plain(tmp_path, 4)
        assert latest_checkpoint(tmp_path) == str(newest)
        assert "without hashes" in caplog.text

    def test_a_pickle_that_runs_code_is_refused(self, tmp_path):
        make_checkpoint(tmp_path, 2)
        make_checkpoint(tmp_path, 4, optimizer=RunsCode(tmp_path / "ran"))
        with pytest.raises(CheckpointError, match=r"checkpoint-4/optimizer\.pt is refused"):
            latest_checkpoint(tmp_path)
        assert not (tmp_path / "ran").exists()

    def test_a_newer_checkpoint_of_the_remote_store_is_fetched(self, tmp_path, caplog):
        url = f"file://{tmp_path}/remote"
        for step in (4, 6):
            RemoteStore(url).upload(make_checkpoint(tmp_path / "lost", step))
        make_checkpoint(tmp_path / "out", 5)
        assert latest_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-5")
        assert latest_checkpoint(tmp_path / "out", remote=url) == str(tmp_path / "out" / "checkpoint-6")
        assert "fetched checkpoint-6" in caplog.text
        make_checkpoint(tmp_path / "out", 8)
        assert latest_checkpoint(tmp_path / "out", url) == str(tmp_path / "out" / "checkpoint-8")

    def test_none_of_which_can_be_resumed_from_is_none(self, tmp_path, caplog):
        damage(make_checkpoint(tmp_path, 2) / "optimizer.pt")
        assert latest_checkpoint(tmp_path) is None
        assert "the content of optimizer.pt has changed" in caplog.text

    def test_a_folder_that_cannot_be_written_is_searched(self, tmp_path, monkeypatch, caplog):
        newest = make_checkpoint(tmp_path, 2)
        (tmp_path / ".unfinished").mkdir()
        monkeypatch.setattr("hfscale.checkpoint.writer.finish_renames", refuse)
        assert latest_checkpoint(tmp_path) == str(newest)
        assert "renaming complete checkpoints failed" in caplog.text

    @pytest.mark.parametrize("has_checkpoint", [False, pytest.param(True, marks=pytest.mark.long)])
    def test_a_program_without_torch_gets_the_answer(self, tmp_path, has_checkpoint):
        """It has no process group; torch is loaded only where there are pickles to check."""
        expected = str(make_checkpoint(tmp_path, 2)) if has_checkpoint else None
        probe = (
            "import sys, hfscale\n"
            "find = hfscale.latest_checkpoint\n"
            "before = 'torch' in sys.modules\n"
            f"print([before, find({str(tmp_path)!r}), 'torch' in sys.modules])"
        )
        environ = os.environ | {"WORLD_SIZE": "1"}
        answer = subprocess.run(
            [sys.executable, "-c", probe], env=environ, capture_output=True, text=True, check=True, timeout=300
        )
        assert answer.stdout.strip() == str([False, expected, has_checkpoint])


def refuse(*_):
    raise PermissionError(30, "Read-only file system")


class TestStartFromScratch:
    ARGUMENTS = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}  # noqa: RUF012

    def trainer(self, tmp_path, remote=None, **arguments):
        return tiny_trainer(tmp_path / "out", SpotCheckpointCallback(remote=remote), **(self.ARGUMENTS | arguments))

    def test_beside_checkpoints_of_the_remote_store_is_refused(self, tmp_path):
        """The script asks before the callback has fetched, and without naming the store."""
        url = f"file://{tmp_path}/remote"
        RemoteStore(url).upload(make_checkpoint(tmp_path / "lost", 6))
        found = latest_checkpoint(tmp_path / "out")
        assert found is None
        trainer = self.trainer(tmp_path, url)
        with pytest.raises(CheckpointError, match=r"checkpoint-6, and the training begins at step 0: .*remote='file:"):
            trainer.train(resume_from_checkpoint=found)
        assert trainer.state.global_step == 0
        assert RemoteStore(url).committed_steps() == [6]
        from_scratch = self.trainer(tmp_path, url, resume_from_checkpoint="false")
        from_scratch.train()
        assert RemoteStore(url).committed_steps() == [2]

    def test_before_a_checkpoint_that_the_callback_has_fetched_is_refused(self, tmp_path):
        url = f"file://{tmp_path}/remote"
        self.trainer(tmp_path).train()
        RemoteStore(url).upload(make_checkpoint(tmp_path / "lost", 6))
        found = latest_checkpoint(tmp_path / "out")
        trainer = self.trainer(tmp_path, url, max_steps=8)
        with pytest.raises(CheckpointError, match=r"checkpoint-6, and the training begins at step 2"):
            trainer.train(resume_from_checkpoint=found)

    def test_beside_a_checkpoint_that_has_come_since_is_an_error_that_passes(self, tmp_path):
        """The launch before has ended, and a process of it has completed the upload meanwhile."""
        url = f"file://{tmp_path}/remote"
        trainer = self.trainer(tmp_path, url)
        RemoteStore(url).upload(make_checkpoint(tmp_path / "ended", 6))
        with pytest.raises(
            CheckpointChangedError, match=r"checkpoint-6 has come into file:.*start the same command"
        ) as raised:
            trainer.train()
        assert not is_final(raised.value)
        assert latest_checkpoint(tmp_path / "out", remote=url) == str(tmp_path / "out" / "checkpoint-6")

    def test_a_second_training_of_the_callback_may_begin_at_step_0(self, tmp_path):
        trainer = self.trainer(tmp_path, f"file://{tmp_path}/remote")
        trainer.train()
        trainer.train()
        assert trainer.state.global_step == 2

    def test_beside_checkpoints_that_cannot_be_read_is_refused(self, tmp_path, caplog):
        damage(make_checkpoint(tmp_path / "out", 4) / "optimizer.pt")
        with pytest.raises(CheckpointError, match=r"none of them is verified.*optimizer\.pt has changed"):
            self.trainer(tmp_path).train()
        assert not list_archives(tmp_path / "out")
        self.trainer(tmp_path, resume_from_checkpoint="false").train()
        assert [path.name for path in list_archives(tmp_path / "out")] == ["checkpoint-4.superseded"]
        assert "training starts at step 0" in caplog.text

    def test_beside_one_that_can_be_read_archives_it_with_a_warning(self, tmp_path, caplog):
        make_checkpoint(tmp_path / "out", 4)
        self.trainer(tmp_path).train()
        assert [path.name for path in list_checkpoints(tmp_path / "out")] == ["checkpoint-2"]
        assert [path.name for path in list_archives(tmp_path / "out")] == ["checkpoint-4.superseded"]
        assert "training starts at step 0" in caplog.text


def answer(folder, has_group, remote=None):
    """Call `latest_checkpoint` on this rank, and print its answer or its error, and how many bytes were hashed."""
    if has_group:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    read = []
    of = FileRecord.of

    def counted(path):
        read.append(path.stat().st_size)
        return of(path)

    if os.environ["RANK"] == "1" and folder.with_name("rank-1").exists():
        folder = folder.with_name("rank-1")
    with patch.object(FileRecord, "of", counted):
        try:
            found = latest_checkpoint(folder, remote)
        except CheckpointError as error:
            found = f"error: {error}"
    sys.stdout.write(json.dumps([found, sum(read)]) + "\n")


@pytest.fixture(params=["group", "store"])
def answers(request, tmp_path):
    """Return a function that calls `latest_checkpoint` on two ranks, with or without a process group."""
    port, environ = free_port(), {}
    has_group = request.param == "group"
    if not has_group:
        server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        environ = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "run"}

    def call(folder, remote=None):
        log = tmp_path / "log"
        codes = run_ranks(2, answer, folder, has_group, remote, log=log, env=environ)
        logs = [(log / f"rank-{rank}.log").read_text() for rank in (0, 1)]
        assert codes == [0, 0], logs
        return [json.loads(text.strip().splitlines()[-1]) for text in logs]

    yield call
    if not has_group:
        del server


@pytest.mark.world(2)
class TestRanks:
    def test_they_agree_where_one_sees_another_content(self, answers, tmp_path):
        """As with a damaged page cache or a stale client of a network file system."""
        for folder in ("run", "rank-1"):
            older = make_checkpoint(tmp_path / folder, 2)
            newer = make_checkpoint(tmp_path / folder, 4)
        damage(newer / read_manifest(newer).share(1, 2)[0])
        (on_0, _), (on_1, _) = answers(tmp_path / "run")
        assert [on_0, on_1] == [str(tmp_path / "run" / older.name), str(older)]

    def test_each_hashes_its_share(self, answers, tmp_path):
        newest = make_checkpoint(tmp_path / "run", 2)
        total = sum(record.bytes for record in read_manifest(newest).files.values())
        (on_0, of_0), (on_1, of_1) = answers(tmp_path / "run")
        assert on_0 == on_1 == str(newest)
        assert of_0 + of_1 == total
        assert 0 < of_0 < total

    def test_a_pickle_that_runs_code_is_refused_on_all(self, answers, tmp_path):
        make_checkpoint(tmp_path / "run", 4, optimizer=RunsCode(tmp_path / "ran"))
        for found, _ in answers(tmp_path / "run"):
            assert "optimizer.pt is refused" in found
        assert not (tmp_path / "ran").exists()

    def test_a_newer_checkpoint_of_the_remote_store_is_fetched_for_all(self, answers, tmp_path):
        url = f"file://{tmp_path}/remote"
        RemoteStore(url).upload(make_checkpoint(tmp_path / "lost", 6))
        expected = str(tmp_path / "run" / "checkpoint-6")
        assert [found for found, _ in answers(tmp_path / "run", url)] == [expected, expected]


def call_alone(folder, has_group):
    """Call `latest_checkpoint` on rank 0 only; rank 1 lives as long."""
    if has_group:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    has_ended = folder / "ended"
    if os.environ["RANK"] == "0":
        try:
            with patch("hfscale.checkpoint.resume.ARRIVAL_S", 1.0):
                latest_checkpoint(folder)
        finally:
            has_ended.touch()
    while not has_ended.exists():
        time.sleep(0.01)


@pytest.mark.world(2)
@pytest.mark.parametrize("has_group", [True, False])
def test_a_rank_that_calls_alone_gets_an_error(tmp_path, has_group):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {"MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    run_ranks(2, call_alone, tmp_path, has_group, log=tmp_path / "log", env=environ, ends_all=False)
    log = (tmp_path / "log" / "rank-0.log").read_text()
    assert "ranks [1] have not called latest_checkpoint" in log


def test_ranks_without_a_group_or_a_store_are_refused(tmp_path, monkeypatch):
    launcher = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(UsageError, match="after TrainingArguments is made"):
        latest_checkpoint(tmp_path)


class Removes(TrainerCallback):
    def __init__(self, path):
        self.path = path

    def on_train_begin(self, args, state, control, **kwargs):
        self.path.unlink()


def test_a_file_that_is_removed_while_a_training_starts_is_an_error_that_passes(tmp_path):
    """Trainer goes on without random states, which it loads last; then dropout is another, and all losses are."""
    arguments = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    tiny_trainer(tmp_path, SpotCheckpointCallback(), **arguments).train()
    state = tmp_path / "checkpoint-2" / "rng_state.pth"
    trainer = tiny_trainer(tmp_path, SpotCheckpointCallback(), Removes(state), **arguments)
    with pytest.raises(CheckpointChangedError, match=r"rng_state\.pth was removed while .* start the same") as raised:
        trainer.train(resume_from_checkpoint=str(state.parent))
    assert not is_final(raised.value)
    assert trainer.state.global_step == 2
