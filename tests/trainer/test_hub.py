"""Uploads to the hub leave out the files that hfscale keeps in the output directory."""

from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, _upload_pipeline, hf_api
from tiny import tiny_trainer

from hfscale import ScalingCallback
from hfscale.core.run_files import MANIFEST_NAME


@pytest.fixture
def commits(monkeypatch):
    """Record the paths of each upload, after huggingface_hub has chosen the files and before it contacts the hub."""
    made = []

    def upload(api, *, add_operations, commit_message, **options):
        made.append({operation.path_in_repo for operation in add_operations})
        return SimpleNamespace(commit_message=commit_message)

    monkeypatch.setattr(_upload_pipeline, "pipelined_upload", upload)
    monkeypatch.setattr(hf_api, "is_xet_available", lambda: True)
    monkeypatch.setattr(HfApi, "_validate_yaml", lambda *args, **options: None)
    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **options: SimpleNamespace(repo_id=name))
    return made


@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint"])
def test_working_files_are_not_uploaded(tmp_path, commits, strategy):
    hub = {"push_to_hub": True, "hub_model_id": "user/run", "hub_token": "none", "hub_strategy": strategy}
    trainer = tiny_trainer(
        tmp_path, ScalingCallback(), save_strategy="steps", save_steps=2, hub_always_push=True, **hub
    )
    trainer.train()
    during = {"end": 0, "every_save": 2, "checkpoint": 4}[strategy]
    assert len(commits) == during
    trainer.push_to_hub()
    assert len(commits) == during + 1
    for paths in commits:
        if "last-checkpoint/model.safetensors" in paths:
            assert f"last-checkpoint/{MANIFEST_NAME}" in paths
        else:
            assert {"config.json", "model.safetensors"} <= paths
            assert not [path for path in paths if path.startswith((".", "hfscale_", "scaling.", "checkpoint-"))]
    left = {path.name for path in tmp_path.iterdir()}
    assert {".hfscale_lock", "hfscale_status.json", "hfscale_timeline.jsonl", "scaling.jsonl"} <= left
