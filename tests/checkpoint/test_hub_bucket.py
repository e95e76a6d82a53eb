"""Remote copies of checkpoints in a bucket of the hub: the real huggingface_hub and hf_xet, and a hub on loopback."""

import shutil

import huggingface_hub
import pytest
from fake_hub import BUCKET, TOKEN, FakeHub
from huggingface_hub import constants
from huggingface_hub.utils import are_progress_bars_disabled
from test_checkpoint_remote import check_store, fast_store, fetch, make_checkpoint
from tiny import tiny_trainer

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint.remote import RemoteStore, Uploader
from hfscale.core import best_effort
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.errors import CheckpointError, MissingDependencyError, StorageError, UsageError

URL = f"hf://buckets/{BUCKET}/runs/a"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub whose address and token this process has; the cache of hf_xet is a folder of the test."""
    hub = FakeHub(tmp_path / "content")
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet"))
    huggingface_hub.close_session()
    yield hub
    hub.close()
    huggingface_hub.close_session()


class TestStore:
    def test_upload_download_rotate_and_archive(self, hub, tmp_path, capfd):
        store = fast_store(URL)
        store.check()
        other = f"runs/a2/checkpoint-12/{MANIFEST_NAME}"
        hub.files[other] = ("0" * 64, 3)
        check_store(store, tmp_path)
        assert other in hub.files
        assert "%" not in capfd.readouterr().err  # no progress bars
        assert not are_progress_bars_disabled()

    def test_the_manifest_is_written_last_and_deleted_first(self, hub, tmp_path):
        store = fast_store(URL)
        store.upload(make_checkpoint(tmp_path, 3))
        folder = "runs/a/checkpoint-3"
        manifest = f"{folder}/{MANIFEST_NAME}"
        names = ["model.safetensors", "optimizer.pt", "part/__0_0.distcp", "scheduler.pt"]
        files = [f"{folder}/{name}" for name in names]
        assert hub.operations == [("addFile", path) for path in (*files, manifest)]
        hub.operations.clear()
        store.upload(tmp_path / "checkpoint-3")
        store.upload(make_checkpoint(tmp_path, 4))
        assert hub.operations[0] == ("deleteFile", manifest)
        hub.operations.clear()
        store.rotate(limit=1)
        assert hub.operations == [("deleteFile", path) for path in (manifest, *files)]

    def test_a_deletion_leaves_checkpoints_whose_names_begin_alike(self, hub, tmp_path):
        store = fast_store(URL)
        for step in (1, 10):
            store.upload(make_checkpoint(tmp_path, step))
        assert store.rotate(limit=1) == [1]
        names = ("model.safetensors", "optimizer.pt", "part/__0_0.distcp", "scheduler.pt", MANIFEST_NAME)
        assert sorted(hub.files) == sorted(f"runs/a/checkpoint-10/{name}" for name in names)

    def test_a_copy_that_ends_early_is_no_checkpoint_and_the_next_attempt_completes_it(self, hub, tmp_path):
        store = fast_store(URL)
        checkpoint = make_checkpoint(tmp_path, 3)
        hub.failing[f"/api/buckets/{BUCKET}/batch"] = 403
        with pytest.raises(StorageError, match=r"could not be written: .*403") as caught:
            store.upload(checkpoint)
        assert TOKEN not in str(caught.value)
        assert store.committed_steps() == []
        hub.failing.clear()
        store.upload(checkpoint)
        assert store.committed_steps() == [3]

    def test_a_file_that_arrives_with_another_size_is_not_committed(self, hub, tmp_path, monkeypatch):
        store = fast_store(URL)
        monkeypatch.setattr(hub, "_size", lambda content_hash: 1)
        with pytest.raises(StorageError, match=r"model\.safetensors has 1 bytes there, not 9"):
            store.upload(make_checkpoint(tmp_path, 3))
        assert store.committed_steps() == []

    @pytest.mark.long
    def test_a_damaged_copy_is_rejected_and_the_one_before_it_is_used(self, hub, tmp_path):
        store = fast_store(URL)
        for step in (2, 4, 6):
            store.upload(make_checkpoint(tmp_path, step))
        hub.files["runs/a/checkpoint-4/model.safetensors"] = hub.files["runs/a/checkpoint-2/model.safetensors"]
        del hub.files["runs/a/checkpoint-6/model.safetensors"]
        with pytest.raises(CheckpointError, match="corrupt"):
            store.download(4, tmp_path / "other", tmp_path / "other" / "down")
        with pytest.raises(FileNotFoundError, match=r"checkpoint-6/model\.safetensors is not in the bucket"):
            store.download(6, tmp_path / "other", tmp_path / "other" / "down")
        fetch(store, tmp_path / "other")
        assert latest_checkpoint(tmp_path / "other") == str(tmp_path / "other" / "checkpoint-2")

    def test_a_checkpoint_in_the_bucket_itself(self, hub, tmp_path):
        store = fast_store(f"hf://buckets/{BUCKET}")
        store.upload(make_checkpoint(tmp_path, 1))
        assert f"checkpoint-1/{MANIFEST_NAME}" in hub.files
        assert store.committed_steps() == [1]

    def test_an_upload_that_is_refused_is_one_warning_without_the_token(self, hub, tmp_path, caplog):
        best_effort.take_counts()
        hub.failing[f"/api/buckets/{BUCKET}/xet-write-token"] = 403
        uploader = Uploader(fast_store(URL), limit=2, links=tmp_path / "links")
        uploader.offer(make_checkpoint(tmp_path / "out", 1))
        assert uploader.wait(120)
        assert caplog.text.count("copying a checkpoint failed") == 1
        assert TOKEN not in caplog.text
        assert uploader.last_uploaded is None


class TestUserErrors:
    @pytest.mark.parametrize(
        "url", ["hf://user/model", "hf://datasets/user/set", "hf://buckets/user", "hf://buckets/user/bucket//run"]
    )
    def test_only_a_folder_of_a_bucket_is_accepted(self, hub, url):
        with pytest.raises(UsageError, match="hf://buckets/USER/BUCKET/run") as caught:
            SpotCheckpointCallback(remote=url)
        assert url in str(caught.value)

    def test_no_token(self, hub, monkeypatch, tmp_path):
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        with pytest.raises(UsageError, match="set HF_TOKEN, or log in"):
            SpotCheckpointCallback(remote=URL)
        assert hub.requests == []

    def test_offline(self, hub, monkeypatch):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
            RemoteStore(URL)

    def test_an_older_library(self, hub, monkeypatch):
        monkeypatch.setattr("hfscale.core.versions.installed", {"huggingface-hub": "1.8.0", "hf-xet": "1.8.0"}.get)
        with pytest.raises(MissingDependencyError, match=r"huggingface-hub 2\.4 or later \(1\.8\.0 is installed\)"):
            RemoteStore(URL)

    @pytest.mark.parametrize(
        ("bucket", "token", "code"), [("user/other", TOKEN, 404), (BUCKET, "hf_wrong0token", 401)]
    )
    def test_an_unknown_bucket_or_token_stops_at_once(self, hub, monkeypatch, tmp_path, bucket, token, code):
        monkeypatch.setenv("HF_TOKEN", token)
        make_checkpoint(tmp_path / "out", 3)  # although the run could resume from this
        with pytest.raises(UsageError, match=f"the hub answers {code}: create the bucket with") as caught:
            latest_checkpoint(tmp_path / "out", remote=f"hf://buckets/{bucket}/run")
        assert token not in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len([path for _, path in hub.requests if path.startswith("/api/buckets/")]) == 1

    def test_a_hub_that_does_not_answer_is_a_storage_error(self, hub, tmp_path):
        hub.failing["/api/buckets"] = 500
        with pytest.raises(StorageError, match=r"could not be read: .*500"):
            fetch(fast_store(URL), tmp_path / "out")


def test_a_training_resumes_from_the_bucket_when_its_disk_is_lost(hub, tmp_path):
    arguments = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "max_steps": 6}
    out = tmp_path / "out"
    tiny_trainer(out, SpotCheckpointCallback(remote=URL), **arguments).train()
    store = fast_store(URL)
    assert store.committed_steps()[-1] == 6
    shutil.rmtree(out)
    again = tiny_trainer(out, SpotCheckpointCallback(remote=URL), **(arguments | {"max_steps": 8}))
    again.train(resume_from_checkpoint=latest_checkpoint(out))
    assert again.state.global_step == 8
    assert again.state.log_history[0]["step"] == 1  # of the first process
    assert store.committed_steps() == [6, 8]
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert TOKEN.encode() not in file.read_bytes(), file
