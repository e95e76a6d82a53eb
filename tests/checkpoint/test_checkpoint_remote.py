"""Remote copies of checkpoints, in an S3-compatible server on loopback and in fsspec's memory and file stores."""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from forked_ranks import run_ranks
from ports import free_port
from tiny import tiny_trainer

from hfscale import (
    CommHealthCallback,
    ScalingCallback,
    SpotCheckpointCallback,
    WeightAveragingCallback,
    latest_checkpoint,
)
from hfscale.checkpoint.remote import COPYING, RemoteStore, Uploader, redacted_message
from hfscale.checkpoint.resume import newest_resumable
from hfscale.checkpoint.store import commit, verify
from hfscale.core import best_effort
from hfscale.core.exchanges import OneProcess
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.errors import CheckpointError, MissingDependencyError, StorageError, UsageError
from hfscale.recipe.resume import resume_point

SECRET = "not-a-real-secret"  # noqa: S105 - only for the server below


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """Start a server that serves a folder by the S3 protocol; yields its address and the bucket's folder."""
    root = tmp_path_factory.mktemp("s3")
    (root / "bucket").mkdir()
    port = free_port()
    rclone = Path(sys.executable).with_name("rclone")
    server = subprocess.Popen(
        [rclone, "serve", "s3", root, "--addr", f"127.0.0.1:{port}", "--auth-key", f"hfscale,{SECRET}"],
        env={"HOME": str(root), "RCLONE_CONFIG": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", root / "bucket"
    finally:
        server.kill()
        server.wait(10)


@pytest.fixture
def remote(request, monkeypatch, tmp_path):
    """URL of an empty folder in the kind of store that the test names, and the local path of its files if any."""
    import fsspec

    kind = request.param
    if kind == "s3":
        address, bucket = request.getfixturevalue("s3")
        for name, value in {
            "AWS_ACCESS_KEY_ID": "hfscale",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": address,
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        fsspec.filesystem("s3").clear_instance_cache()
        name = tmp_path.name
        return f"s3://bucket/{name}", bucket / name
    if kind == "file":
        return f"file://{tmp_path}/remote", tmp_path / "remote"
    fsspec.filesystem("memory").store.clear()
    return "memory://run", None


def each_store(*kinds):
    return pytest.mark.parametrize("remote", kinds, indirect=True)


def make_checkpoint(folder, step, content="weights"):
    checkpoint = folder / f"checkpoint-{step}"
    (checkpoint / "part").mkdir(parents=True)
    (checkpoint / "model.safetensors").write_text(f"{content} {step}")
    (checkpoint / "part" / "__0_0.distcp").write_text(f"shard {step}")
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({}, checkpoint / name)
    commit(checkpoint, step=step, strategy="single", world_size=1, global_batch_size=4)
    return checkpoint


def fetch(store, output_dir):
    return newest_resumable(output_dir, store, exchanges=OneProcess()).path


def fast_store(url):
    return RemoteStore(url, attempts=2, first_pause_s=0.01)


def check_store(store, folder):
    """Upload, download, rotate and archive in an empty store."""
    assert store.committed_steps() == []
    for step in (9, 10, 11):
        store.upload(make_checkpoint(folder, step))
    assert store.committed_steps() == [9, 10, 11]
    assert store.rotate(limit=1, keep="checkpoint-9") == [10]
    assert store.committed_steps() == [9, 11]
    fetched = store.download(11, folder / "other", folder / "other" / "down")
    assert fetched == folder / "other" / "checkpoint-11"
    assert verify(fetched).files == verify(folder / "checkpoint-11").files
    assert store.archive(after_step=9) == [11]
    assert store.committed_steps() == [9]
    store.upload(folder / "checkpoint-11")  # the step again
    assert store.committed_steps() == [9, 11]


class TestStore:
    @each_store("s3", "file", "memory")
    def test_upload_download_rotate_and_archive(self, remote, tmp_path):
        check_store(fast_store(remote[0]), tmp_path)

    @each_store("s3")
    def test_the_manifest_is_uploaded_last(self, remote, tmp_path, monkeypatch):
        store = fast_store(remote[0])
        put = RemoteStore._put
        order = []

        def recording(self, checkpoint, name, size):
            order.append(name)
            put(self, checkpoint, name, size)

        def failing(path, content):
            order.append(path.rpartition("/")[2])
            raise OSError("connection lost")

        monkeypatch.setattr(RemoteStore, "_put", recording)
        monkeypatch.setattr(store._fs, "pipe_file", failing)
        checkpoint = make_checkpoint(tmp_path, 3)
        with pytest.raises(StorageError, match="OSError: connection lost"):
            store.upload(checkpoint)
        files = ["model.safetensors", "optimizer.pt", "part/__0_0.distcp", "scheduler.pt"]
        assert order == [*files, *[MANIFEST_NAME] * 2]
        assert store.committed_steps() == []
        monkeypatch.setattr(RemoteStore, "_put", lambda self, *arguments: self.nothing)
        with pytest.raises(AttributeError, match="nothing"):  # a defect, not a store that cannot be reached
            store.upload(checkpoint)

    @each_store("file")
    def test_a_damaged_copy_is_rejected(self, remote, tmp_path):
        store = fast_store(remote[0])
        for step in (2, 4):
            store.upload(make_checkpoint(tmp_path, step))
        (remote[1] / "checkpoint-4" / "model.safetensors").write_text("weights 5")
        with pytest.raises(CheckpointError, match="corrupt"):
            store.download(4, tmp_path / "other", tmp_path / "other" / "down")
        assert not (tmp_path / "other" / "checkpoint-4").exists()
        fetch(store, tmp_path / "other")  # the one before it
        assert latest_checkpoint(tmp_path / "other") == str(tmp_path / "other" / "checkpoint-2")

    @each_store("file")
    def test_a_path_outside_the_checkpoint_is_rejected(self, remote, tmp_path):
        store = fast_store(remote[0])
        store.upload(make_checkpoint(tmp_path, 2))
        manifest = remote[1] / "checkpoint-2" / MANIFEST_NAME
        fields = json.loads(manifest.read_text())
        fields["files"]["../../outside"] = fields["files"].pop("model.safetensors")
        manifest.write_text(json.dumps(fields))
        (remote[1].parent / "outside").write_text("weights 2")
        with pytest.raises(CheckpointError, match="not a plain path"):
            store.download(2, tmp_path / "other", tmp_path / "other" / "down")

    def test_operations_are_retried_with_longer_pauses(self, tmp_path, monkeypatch):
        pauses = []
        calls = []
        monkeypatch.setattr("hfscale.checkpoint.remote.time.sleep", pauses.append)
        store = RemoteStore(f"file://{tmp_path}/remote", attempts=4, first_pause_s=1.0)

        def fails_three_times():
            calls.append(1)
            if len(calls) < 4:
                raise ConnectionError("try again")
            return 7

        assert store._retry("read", fails_three_times) == 7
        assert pauses == [1.0, 2.0, 4.0]


class TestUserErrors:
    @pytest.mark.parametrize(
        ("url", "part"),
        [
            ("runs/out", "give a URL"),
            ("s3://", "give a URL"),
            ("s3://key:secret@bucket/run", "credentials"),
            ("s3://bucket/run?secret=1", "credentials"),
            ("nosuch://bucket/run", "nosuch://"),
        ],
    )
    def test_the_error_of_a_wrong_url_contains_no_secret(self, url, part):
        with pytest.raises(UsageError, match=part) as caught:
            SpotCheckpointCallback(remote=url)
        assert "secret" not in str(caught.value)

    def test_the_error_names_a_missing_package(self):
        with pytest.raises(MissingDependencyError, match=r'pip install --upgrade "gcsfs>=\d'):
            RemoteStore("gs://bucket/run")

    def test_credentials_in_an_error_of_the_store_are_redacted(self):
        message = redacted_message(
            OSError("403 for AWS_SECRET_ACCESS_KEY=abc123 X-Amz-Signature=f00 token: 'xyz' at bucket")
        )
        assert not [secret for secret in ("abc123", "f00", "xyz") if secret in message]
        assert "at bucket" in message

    @each_store("s3")
    def test_wrong_credentials_are_a_storage_error(self, remote, monkeypatch, tmp_path):
        import fsspec

        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
        fsspec.filesystem("s3").clear_instance_cache()
        with pytest.raises(StorageError, match="could not be read") as caught:
            fetch(fast_store(remote[0]), tmp_path / "out")
        assert "another-secret" not in str(caught.value)


class TestUploader:
    def test_the_newest_replaces_a_waiting_one_and_is_safe_from_rotation(self, tmp_path, monkeypatch):
        go = threading.Event()
        put = RemoteStore._put

        def slow(self, *args):
            go.wait(120)
            put(self, *args)

        monkeypatch.setattr(RemoteStore, "_put", slow)
        store = fast_store(f"file://{tmp_path}/remote")
        uploader = Uploader(store, limit=None, links=tmp_path / "links")
        for step in (1, 2, 3):
            checkpoint = make_checkpoint(tmp_path / "out", step)
            uploader.offer(checkpoint)
            if step == 1:
                while not uploader._busy or uploader._next is not None:
                    time.sleep(0.001)
            shutil.rmtree(checkpoint)
        assert not uploader.wait(0.05)
        go.set()
        assert uploader.wait(120)
        assert store.committed_steps() == [1, 3]
        assert uploader.last_uploaded == "checkpoint-3"
        assert 0 < uploader.expected_s == uploader.last_upload_s
        assert list((tmp_path / "links").iterdir()) == []

    @pytest.mark.parametrize("are_linked", [True, False])
    def test_a_step_that_is_saved_again_during_its_copy_is_never_corrupt_there(
        self, tmp_path, monkeypatch, caplog, are_linked
    ):
        is_copying, go = threading.Event(), threading.Event()
        put = RemoteStore._put

        def slow(self, checkpoint, name, size):
            put(self, checkpoint, name, size)
            is_copying.set()
            go.wait(120)

        monkeypatch.setattr(RemoteStore, "_put", slow)
        store = fast_store(f"file://{tmp_path}/remote")
        links = tmp_path / "links" if are_linked else tmp_path / "a file" / "links"  # where none can be made
        (tmp_path / "a file").touch()
        uploader = Uploader(store, limit=None, links=links)
        copied = tmp_path / "remote" / "checkpoint-5"
        committed = []

        def copy(*task):
            Uploader._copy(uploader, *task)
            committed.append((copied / MANIFEST_NAME).exists())
            if committed[-1]:
                verify(copied)

        monkeypatch.setattr(uploader, "_copy", copy)
        uploader.offer(make_checkpoint(tmp_path / "out", 5, "first"))
        is_copying.wait(120)
        shutil.rmtree(tmp_path / "out" / "checkpoint-5")
        again = make_checkpoint(tmp_path / "out", 5, "other")
        uploader.offer(again)
        go.set()
        assert uploader.wait(120)
        assert committed == ([True, True] if are_linked else [False, True]), caplog.text
        assert verify(copied).files == verify(again).files

    def test_a_store_that_refuses_causes_one_warning(self, tmp_path, caplog):
        best_effort.take_counts()
        (tmp_path / "remote").write_text("a file where the folder should be")
        uploader = Uploader(fast_store(f"file://{tmp_path}/remote"), limit=2, links=tmp_path / "links")
        for step in (1, 2):
            uploader.offer(make_checkpoint(tmp_path / "out", step))
            assert uploader.wait(120)
        assert caplog.text.count(f"{COPYING} failed") == 1
        assert best_effort.take_counts() == {COPYING: 2}
        assert uploader.last_uploaded is None


class TestTraining:
    ARGUMENTS = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "max_steps": 6}  # noqa: RUF012

    @each_store("s3")
    def test_resumes_from_the_store_when_its_disk_is_lost(self, remote, tmp_path):
        tiny_trainer(tmp_path / "out", SpotCheckpointCallback(remote=remote[0]), **self.ARGUMENTS).train()
        store = fast_store(remote[0])
        assert store.committed_steps()[-1] == 6  # 4 is skipped if the disk was faster than the store
        assert list((tmp_path / "out" / ".unfinished").rglob("*.*")) == []
        shutil.rmtree(tmp_path / "out")
        again = tiny_trainer(
            tmp_path / "out", SpotCheckpointCallback(remote=remote[0]), **(self.ARGUMENTS | {"max_steps": 8})
        )
        again.train(resume_from_checkpoint=latest_checkpoint(tmp_path / "out"))
        assert again.state.global_step == 8
        assert again.state.log_history[0]["step"] == 1
        assert store.committed_steps() == [6, 8]
        for file in (path for path in (tmp_path / "out").rglob("*") if path.is_file()):
            assert SECRET.encode() not in file.read_bytes(), file

    @each_store("memory")
    def test_resume_point_fetches_and_only_false_starts_from_scratch(self, remote, tmp_path):
        tiny_trainer(tmp_path / "a", SpotCheckpointCallback(remote=remote[0]), **self.ARGUMENTS).train()
        arguments = tiny_trainer(tmp_path / "b", resume_from_checkpoint="true").args
        assert resume_point(arguments, remote[0]) == str(tmp_path / "b" / "checkpoint-6")
        again = tiny_trainer(
            tmp_path / "c", SpotCheckpointCallback(remote=remote[0]), **(self.ARGUMENTS | {"max_steps": 2})
        )
        with pytest.raises(CheckpointError, match=r"begins at step 0: resume from latest_checkp"):
            again.train()  # though checkpoint-6 was fetched
        assert fast_store(remote[0]).committed_steps()[-1] == 6
        arguments = self.ARGUMENTS | {"max_steps": 2, "resume_from_checkpoint": "false"}
        again = tiny_trainer(tmp_path / "d", SpotCheckpointCallback(remote=remote[0]), **arguments)
        again.train()
        assert fast_store(remote[0]).committed_steps() == [2]

    def test_continues_if_the_store_refuses(self, tmp_path, monkeypatch):
        (tmp_path / "remote").mkdir()
        monkeypatch.setattr("hfscale.checkpoint.remote._FIRST_PAUSE_S", 0.01)
        spot = SpotCheckpointCallback(remote=f"file://{tmp_path}/remote")
        spot.remote.store = fast_store(spot.remote.store.url)
        trainer = tiny_trainer(tmp_path / "out", spot, **self.ARGUMENTS)
        (tmp_path / "remote").rmdir()
        (tmp_path / "remote").write_text("a file instead of the folder")
        trainer.train()
        assert latest_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-6")

    def test_does_not_start_from_scratch_if_the_store_cannot_be_read(self, tmp_path, monkeypatch):
        (tmp_path / "remote").write_text("a file instead of the folder")
        spot = SpotCheckpointCallback(remote=f"file://{tmp_path}/remote/run")
        spot.remote.store = fast_store(spot.remote.store.url)
        make_checkpoint(tmp_path / "kept", 3)
        tiny_trainer(tmp_path / "kept", spot)  # only warns, because there is a local checkpoint

        def refuse(*args, **kwargs):
            raise PermissionError("no access")

        monkeypatch.setattr(spot.remote.store._fs, "ls", refuse)  # fsspec shares this object in the process
        with pytest.raises(StorageError, match="could not be read"):
            tiny_trainer(tmp_path / "fresh", spot)

    @pytest.mark.parametrize("damage", ["missing", "changed"])
    def test_a_checkpoint_of_the_store_that_is_not_complete_is_skipped(self, tmp_path, damage):
        store = fast_store(f"file://{tmp_path}/remote")
        for step in (3, 5):
            store.upload(make_checkpoint(tmp_path / "first", step))

        def spoil(step):
            path = tmp_path / "remote" / f"checkpoint-{step}" / "model.safetensors"
            path.unlink() if damage == "missing" else path.write_bytes(b"0" * path.stat().st_size)

        spoil(5)
        fetch(store, tmp_path / "second")
        assert latest_checkpoint(tmp_path / "second") == str(tmp_path / "second" / "checkpoint-3")
        spoil(3)
        with pytest.raises(StorageError, match="none of them is complete"):
            fetch(store, tmp_path / "third")

    def test_a_newer_plain_checkpoint_is_not_replaced_by_an_older_copy(self, tmp_path):
        store = fast_store(f"file://{tmp_path}/remote")
        store.upload(make_checkpoint(tmp_path / "first", 1))
        tiny_trainer(tmp_path / "plain", save_strategy="steps", save_steps=2).train()
        fetch(store, tmp_path / "plain")
        assert not list((tmp_path / "plain").glob("*.superseded"))


def train_twice(folder):
    """Train with one callback in two Trainers, as over folds; every part of the callback is on."""
    torch.set_num_threads(1)
    spot = SpotCheckpointCallback(remote=f"file://{folder}/remote", memory_interval_steps=1)
    health = CommHealthCallback(replay_every_steps=1, skip_bad_batches=3)
    parts = [ScalingCallback(spot_checkpoint=spot, comm_health=health), WeightAveragingCallback(ema_decay=0.9)]
    for fold in range(2):
        arguments = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps"}
        tiny_trainer(folder / f"fold-{fold}", *parts, **arguments).train()


@pytest.mark.world(2)
def test_one_callback_serves_two_trainings_on_two_ranks(tmp_path):
    """What only the ranks that save know decided whether all of them looked into the store: the second one hung."""
    (tmp_path / "remote").mkdir()
    assert run_ranks(2, train_twice, tmp_path, log=tmp_path / "log", timeout_s=120) == [0, 0]
