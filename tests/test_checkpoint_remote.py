"""Checkpoints in a remote store: an S3-compatible server on loopback, fsspec's stores in memory and in a folder."""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ports import free_port
from tiny import tiny_trainer

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint import remote as remote_module
from hfscale.checkpoint.manifest import MANIFEST_NAME
from hfscale.checkpoint.remote import RemoteStore, Uploader, fetch_newest, redacted_message
from hfscale.checkpoint.store import commit, verify
from hfscale.errors import CheckpointError, MissingDependencyError, StorageError, UsageError
from hfscale.recipe.resume import resume_point

SECRET = "not-a-real-secret"  # noqa: S105 of the server below


@pytest.fixture(autouse=True)
def forget_what_was_fetched(monkeypatch):
    monkeypatch.setattr(remote_module, "_fetched", set())


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """The address of a server that speaks S3 from a folder; stops with the module."""
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
        deadline = time.monotonic() + 30
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
    """URL of an empty folder in the kind of store that the test names, and where its files lie (None: nowhere)."""
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


def each(*kinds):
    return pytest.mark.parametrize("remote", kinds, indirect=True)


def make(folder, step, content="weights"):
    checkpoint = folder / f"checkpoint-{step}"
    (checkpoint / "part").mkdir(parents=True)
    (checkpoint / "model.safetensors").write_text(f"{content} {step}")
    (checkpoint / "part" / "__0_0.distcp").write_text(f"shard {step}")
    commit(checkpoint, step=step, strategy="single", world_size=1, global_batch_size=4)
    return checkpoint


def quick(url):
    return RemoteStore(url, attempts=2, first_pause_s=0.01)


class TestAStore:
    @each("s3", "file", "memory")
    def test_takes_gives_back_and_rotates(self, remote, tmp_path):
        store = quick(remote[0])
        assert store.committed_steps() == []
        for step in (9, 10, 11):
            store.upload(make(tmp_path, step))
        assert store.committed_steps() == [9, 10, 11]
        assert store.rotate(limit=1, keep="checkpoint-9") == [10]
        assert store.committed_steps() == [9, 11]
        fetched = store.download(11, tmp_path / "other", tmp_path / "other" / "down")
        assert fetched == tmp_path / "other" / "checkpoint-11"
        assert verify(fetched).files == verify(tmp_path / "checkpoint-11").files
        assert store.archive(after_step=9) == [11]
        assert store.committed_steps() == [9]
        store.upload(tmp_path / "checkpoint-11")  # the step again
        assert store.committed_steps() == [9, 11]

    @each("s3")
    def test_the_manifest_comes_last(self, remote, tmp_path, monkeypatch):
        store, put = quick(remote[0]), RemoteStore._put
        order = []

        def failing(self, checkpoint, name, size):
            order.append(name)
            if len(order) > 2:
                raise OSError("the line is cut")
            put(self, checkpoint, name, size)

        monkeypatch.setattr(RemoteStore, "_put", failing)
        with pytest.raises(StorageError, match="could not be written: OSError: the line is cut"):
            store.upload(make(tmp_path, 3))
        assert order[-1] == MANIFEST_NAME
        assert store.committed_steps() == []

    @each("file")
    def test_a_damaged_copy_is_not_taken(self, remote, tmp_path):
        store = quick(remote[0])
        for step in (2, 4):
            store.upload(make(tmp_path, step))
        (remote[1] / "checkpoint-4" / "model.safetensors").write_text("weights 5")
        with pytest.raises(CheckpointError, match="corrupt"):
            store.download(4, tmp_path / "other", tmp_path / "other" / "down")
        assert not (tmp_path / "other" / "checkpoint-4").exists()
        fetch_newest(store, tmp_path / "other")  # the one before it
        assert latest_checkpoint(tmp_path / "other") == str(tmp_path / "other" / "checkpoint-2")

    @each("file")
    def test_a_name_that_leads_out_of_the_folder_is_refused(self, remote, tmp_path):
        store = quick(remote[0])
        store.upload(make(tmp_path, 2))
        manifest = remote[1] / "checkpoint-2" / MANIFEST_NAME
        fields = json.loads(manifest.read_text())
        fields["files"]["../../outside"] = fields["files"].pop("model.safetensors")
        manifest.write_text(json.dumps(fields))
        (remote[1].parent / "outside").write_text("weights 2")
        with pytest.raises(CheckpointError, match="not a plain path"):
            store.download(2, tmp_path / "other", tmp_path / "other" / "down")

    def test_tries_again_with_longer_pauses(self, tmp_path, monkeypatch):
        pauses, calls = [], []
        monkeypatch.setattr("hfscale.checkpoint.remote.time.sleep", pauses.append)
        store = RemoteStore(f"file://{tmp_path}/remote", attempts=4, first_pause_s=1.0)

        def unsteady():
            calls.append(1)
            if len(calls) < 4:
                raise ConnectionError("try again")
            return 7

        assert store._retry("read", unsteady) == 7
        assert pauses == [1.0, 2.0, 4.0]


class TestMistakes:
    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("runs/out", "is not a URL"),
            ("s3://", "is not a URL"),
            ("s3://key:secret@bucket/run", "credentials"),
            ("s3://bucket/run?secret=1", "credentials"),
            ("nosuch://bucket/run", "nosuch://"),
        ],
    )
    def test_one_line_and_no_secret(self, url, words):
        with pytest.raises(UsageError, match=words) as caught:
            SpotCheckpointCallback(remote=url)
        assert "secret" not in str(caught.value)

    def test_a_missing_package_is_named(self):
        with pytest.raises(MissingDependencyError, match=r'pip install "hfscale\[gcs\]"'):
            RemoteStore("gs://bucket/run")

    def test_what_a_store_quotes_of_credentials_is_not_repeated(self):
        told = redacted_message(
            OSError("403 for AWS_SECRET_ACCESS_KEY=abc123 X-Amz-Signature=f00 token: 'xyz' at bucket")
        )
        assert not [secret for secret in ("abc123", "f00", "xyz") if secret in told]
        assert "at bucket" in told

    @each("s3")
    def test_wrong_credentials(self, remote, monkeypatch, tmp_path):
        import fsspec

        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
        fsspec.filesystem("s3").clear_instance_cache()
        with pytest.raises(StorageError, match="could not be read") as caught:
            fetch_newest(quick(remote[0]), tmp_path / "out")
        assert "another-secret" not in str(caught.value)


class TestTheUploader:
    def test_the_newest_goes_before_those_that_wait_and_rotation_cannot_take_it_away(self, tmp_path, monkeypatch):
        go, put = threading.Event(), RemoteStore._put

        def slow(self, *args):
            go.wait(10)
            put(self, *args)

        monkeypatch.setattr(RemoteStore, "_put", slow)
        store = quick(f"file://{tmp_path}/remote")
        sender = Uploader(store, limit=None, links=tmp_path / "links")
        for step in (1, 2, 3):
            checkpoint = make(tmp_path / "out", step)
            sender.offer(checkpoint)
            if step == 1:
                while not sender._busy or sender._next is not None:
                    time.sleep(0.001)
            shutil.rmtree(checkpoint)
        assert not sender.wait(0.05)
        go.set()
        assert sender.wait(10)
        assert store.committed_steps() == [1, 3]
        assert sender.last_uploaded == "checkpoint-3"
        assert 0 < sender.expected_s == sender.last_upload_s < 10
        assert list((tmp_path / "links").iterdir()) == []

    def test_a_store_that_refuses_is_told_once(self, tmp_path, monkeypatch):
        told = []
        monkeypatch.setattr(remote_module.logger, "log", lambda level, *words: told.append(level))
        (tmp_path / "remote").write_text("a file where the folder should be")
        sender = Uploader(quick(f"file://{tmp_path}/remote"), limit=2, links=tmp_path / "links")
        for step in (1, 2):
            sender.offer(make(tmp_path / "out", step))
            assert sender.wait(10)
        assert told == [30, 10]
        assert sender.last_uploaded is None


class TestATraining:
    ARGUMENTS = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "max_steps": 6}  # noqa: RUF012

    @each("s3")
    def test_goes_on_from_the_store_when_its_disk_is_gone(self, remote, tmp_path):
        tiny_trainer(tmp_path / "out", SpotCheckpointCallback(remote=remote[0]), **self.ARGUMENTS).train()
        store = quick(remote[0])
        assert store.committed_steps()[-1] == 6  # 4 is passed over where the disk was quicker than the store
        assert list((tmp_path / "out" / ".unfinished").rglob("*.*")) == []
        shutil.rmtree(tmp_path / "out")
        remote_module._fetched.clear()
        again = tiny_trainer(
            tmp_path / "out", SpotCheckpointCallback(remote=remote[0]), **(self.ARGUMENTS | {"max_steps": 8})
        )
        again.train(resume_from_checkpoint=latest_checkpoint(tmp_path / "out"))
        assert again.state.global_step == 8
        assert again.state.log_history[0]["step"] == 1
        assert store.committed_steps() == [6, 8]
        for file in (path for path in (tmp_path / "out").rglob("*") if path.is_file()):
            assert SECRET.encode() not in file.read_bytes(), file

    @each("memory")
    def test_resume_point_fetches_and_a_fresh_start_sets_the_later_aside(self, remote, tmp_path):
        tiny_trainer(tmp_path / "a", SpotCheckpointCallback(remote=remote[0]), **self.ARGUMENTS).train()
        arguments = tiny_trainer(tmp_path / "b", resume_from_checkpoint="true").args
        remote_module._fetched.clear()
        assert resume_point(arguments, remote[0]) == str(tmp_path / "b" / "checkpoint-6")
        again = tiny_trainer(
            tmp_path / "c", SpotCheckpointCallback(remote=remote[0]), **(self.ARGUMENTS | {"max_steps": 2})
        )
        again.train()  # from step 0, though checkpoint-6 was fetched
        assert quick(remote[0]).committed_steps() == [2]

    def test_goes_on_without_a_store_that_refuses(self, tmp_path, monkeypatch):
        (tmp_path / "remote").mkdir()
        monkeypatch.setattr("hfscale.checkpoint.remote._FIRST_PAUSE_S", 0.01)
        spot = SpotCheckpointCallback(remote=f"file://{tmp_path}/remote")
        spot.remote.store = quick(spot.remote.store.url)
        trainer = tiny_trainer(tmp_path / "out", spot, **self.ARGUMENTS)
        (tmp_path / "remote").rmdir()
        (tmp_path / "remote").write_text("no folder any more")
        trainer.train()
        assert latest_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-6")

    def test_does_not_begin_afresh_where_the_store_cannot_be_read(self, tmp_path, monkeypatch):
        (tmp_path / "remote").write_text("no folder")
        spot = SpotCheckpointCallback(remote=f"file://{tmp_path}/remote/run")
        spot.remote.store = quick(spot.remote.store.url)
        make(tmp_path / "kept", 3)
        tiny_trainer(tmp_path / "kept", spot)  # a warning: there is a local one

        def refuse(*args, **kwargs):
            raise PermissionError("no access")

        monkeypatch.setattr(spot.remote.store._fs, "ls", refuse)  # an object that all of this process share
        with pytest.raises(StorageError, match="could not be read"):
            tiny_trainer(tmp_path / "fresh", spot)
