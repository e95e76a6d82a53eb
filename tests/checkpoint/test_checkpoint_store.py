"""Manifest, verification, archiving and rotation of checkpoints."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers.trainer_utils import rotate_checkpoints

from hfscale import latest_checkpoint
from hfscale.checkpoint.manifest import read_manifest
from hfscale.checkpoint.store import (
    archive,
    commit,
    list_archives,
    list_checkpoints,
    rotate,
    update_manifest,
    verify,
)
from hfscale.checkpoint.writer import clear_unfinished
from hfscale.cli import main
from hfscale.core.durable_files import write_atomically
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.errors import CheckpointError

TRAINED = {"model.safetensors", "optimizer.pt", "scheduler.pt"}


def make_checkpoint(output_dir: Path, step: int, committed: bool = True) -> Path:
    checkpoint = output_dir / f"checkpoint-{step}"
    (checkpoint / "shards").mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(os.urandom(5000))
    (checkpoint / "shards" / "rank_0.distcp").write_bytes(os.urandom(300))
    (checkpoint / "trainer_state.json").write_text("{}")
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({}, checkpoint / name)
    if committed:
        commit(checkpoint, step=step, strategy="ddp", world_size=2, global_batch_size=16)
    return checkpoint


def test_the_manifest_has_the_documented_fields(tmp_path):
    fields = json.loads((make_checkpoint(tmp_path, 7) / MANIFEST_NAME).read_text())
    assert set(fields) == {"format", "step", "strategy", "world_size", "global_batch_size", "files"}
    assert (fields["format"], fields["step"], fields["strategy"], fields["world_size"]) == (1, 7, "ddp", 2)
    assert set(fields["files"]) == {"shards/rank_0.distcp", "trainer_state.json", *TRAINED}
    record = fields["files"]["model.safetensors"]
    assert record["bytes"] == 5000
    assert len(record["xxh3_128"]) == 32


def test_the_digest_is_plain_xxh3_128(tmp_path):
    import xxhash

    checkpoint = make_checkpoint(tmp_path, 1)
    expected = xxhash.xxh3_128_hexdigest((checkpoint / "model.safetensors").read_bytes())
    assert verify(checkpoint).files["model.safetensors"].xxh3_128 == expected


def flip_bit(checkpoint):
    path = checkpoint / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[4321] ^= 1
    path.write_bytes(content)


def swap(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "t")
    (checkpoint / "shards" / "rank_0.distcp").rename(checkpoint / "model.safetensors")
    (checkpoint / "t").rename(checkpoint / "shards" / "rank_0.distcp")


def link(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint.parent / "elsewhere")
    (checkpoint / "model.safetensors").symlink_to(checkpoint.parent / "elsewhere")


def link_folder(checkpoint):
    (checkpoint / "shards").rename(checkpoint.parent / "elsewhere")
    (checkpoint / "shards").symlink_to(checkpoint.parent / "elsewhere")


DAMAGE = {
    "bit flip": (flip_bit, "content of model.safetensors"),
    "truncated": (lambda c: os.truncate(c / "model.safetensors", 100), "has 100 bytes, not 5000"),
    "zero length": (lambda c: (c / "model.safetensors").write_bytes(b""), "has 0 bytes"),
    "missing": (lambda c: (c / "shards" / "rank_0.distcp").unlink(), "shards/rank_0.distcp is missing"),
    "swapped": (swap, "corrupt"),
    "link": (link, "model.safetensors is a symbolic link"),
    "linked folder": (link_folder, "shards is a symbolic link"),
    "no manifest": (lambda c: (c / MANIFEST_NAME).unlink(), "incomplete"),
    "half a manifest": (lambda c: os.truncate(c / MANIFEST_NAME, 40), "cannot be read"),
    "not a manifest": (lambda c: (c / MANIFEST_NAME).write_text("[1]"), "not a manifest"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_reported_and_skipped(tmp_path, kind):
    damage, message = DAMAGE[kind]
    good = make_checkpoint(tmp_path, 10)
    bad = make_checkpoint(tmp_path, 20)
    assert latest_checkpoint(tmp_path) == str(bad)
    damage(bad)
    with pytest.raises(CheckpointError, match=message):
        verify(bad)
    assert latest_checkpoint(tmp_path) == str(good)


def test_a_damaged_checkpoint_may_not_have_links_that_its_manifest_does_not_list(tmp_path):
    checkpoint = make_checkpoint(tmp_path, 10)
    (checkpoint / "notes.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"notes\.json is a symbolic link"):
        verify(checkpoint)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/../../b", "", "a\\..\\b", MANIFEST_NAME])
def test_a_manifest_with_a_path_outside_the_checkpoint_is_rejected(tmp_path, name):
    checkpoint = make_checkpoint(tmp_path, 1)
    fields = json.loads((checkpoint / MANIFEST_NAME).read_text())
    fields["files"][name] = fields["files"].pop("model.safetensors")
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="not a plain path"):
        read_manifest(checkpoint)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "1"),
        ("step", True),
        ("world_size", "<meta http-equiv=refresh>"),
        ("world_size", -1),
        ("global_batch_size", 1.5),
        ("global_batch_size", None),
        ("strategy", "<b>ddp</b>"),
        ("strategy", ["ddp"]),
        ("layout", ["tp"]),
        ("layout", {"tp": "2"}),
        ("files", {"model.safetensors": {"bytes": "1", "xxh3_128": "0"}}),
        ("files", {"model.safetensors": {"bytes": 1, "xxh3_128": 0}}),
    ],
)
def test_a_manifest_with_a_value_of_another_type_is_rejected(tmp_path, field, value):
    checkpoint = make_checkpoint(tmp_path, 1)
    fields = json.loads((checkpoint / MANIFEST_NAME).read_text()) | {field: value}
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="is not a manifest"):
        read_manifest(checkpoint)


def test_another_manifest_format_is_rejected(tmp_path):
    checkpoint = make_checkpoint(tmp_path, 1)
    text = (checkpoint / MANIFEST_NAME).read_text().replace('"format": 1', '"format": 2')
    (checkpoint / MANIFEST_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="format 2"):
        read_manifest(checkpoint)


def test_the_newest_checkpoint_has_the_highest_step(tmp_path):
    make_checkpoint(tmp_path, 100)
    make_checkpoint(tmp_path, 20)
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-100")


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("limit", "best", "temporary", "left"),
    [
        (6, None, (), [1, 2, 3, 4]),
        (2, None, (), [3, 4]),
        (2, 1, (), [1, 4]),
        (1, 1, (), [1, 4]),
        (1, 4, (), [4]),
        (None, 1, (), [1, 2, 3, 4]),
        (None, 1, (1, 2, 4), [1, 3, 4]),
        (2, None, (2, 4), [1, 3, 4]),
        (1, 1, (4,), [1, 3, 4]),
    ],
)
def test_rotation_keeps_what_trainer_keeps(tmp_path, limit, best, temporary, left):
    """Where no checkpoint is temporary, transformers' own rotation leaves the same."""
    plain = tmp_path / "plain"
    for folder in (tmp_path / "ours", plain):
        for step in (1, 2, 3, 4):
            make_checkpoint(folder, step)
    make_checkpoint(tmp_path / "ours", 5, committed=False)  # newer than every complete one
    keep = f"checkpoint-{best}" if best else None
    rotate(tmp_path / "ours", limit=limit, keep=tmp_path / "ours" / keep if keep else None, temporary=temporary)
    assert [path.name for path in list_checkpoints(tmp_path / "ours")] == [f"checkpoint-{n}" for n in (*left, 5)]
    if not temporary:
        rotate_checkpoints(str(plain), limit, str(plain / keep) if keep else None)
        assert [path.name for path in list_checkpoints(plain)] == [f"checkpoint-{n}" for n in left]


def test_rotation_deletes_incomplete_checkpoints_first(tmp_path):
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step, committed=step != 2)
    rotate(tmp_path, limit=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-3"]


def test_files_added_after_the_commit_become_part_of_the_checkpoint(tmp_path):
    checkpoint = make_checkpoint(tmp_path, 1)
    (checkpoint / "added.txt").write_text("added")
    (checkpoint / "trainer_state.json").write_text("{ }")
    (checkpoint / "shards" / "rank_0.distcp").unlink()
    with pytest.raises(CheckpointError):
        verify(checkpoint)
    update_manifest(checkpoint)
    assert set(verify(checkpoint).files) == {"trainer_state.json", "added.txt", *TRAINED}


def test_a_file_that_changes_without_its_length_becomes_part_of_the_checkpoint(tmp_path):
    checkpoint = make_checkpoint(tmp_path, 1)
    (checkpoint / "trainer_state.json").write_text("[]")
    update_manifest(checkpoint)
    verify(checkpoint)


def test_an_interrupted_rotation_leaves_no_partial_checkpoint(tmp_path, monkeypatch):
    for step in (1, 2):
        make_checkpoint(tmp_path, step)
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)
        rotate(tmp_path, limit=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2"]
    clear_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_rotation_never_deletes_the_last_committed_checkpoint(tmp_path):
    make_checkpoint(tmp_path, 1)
    make_checkpoint(tmp_path, 2, committed=False)
    assert rotate(tmp_path, limit=1) == []
    assert rotate(tmp_path, limit=0) == []
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")


def test_one_archive_of_each_later_step_is_kept(tmp_path):
    for content in ("first", "second"):
        for step in (5, 9):
            (make_checkpoint(tmp_path, step) / "content").write_text(content)
        archive(tmp_path, after_step=4)
    archives = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert archives == ["checkpoint-5.superseded", "checkpoint-9.superseded"]
    assert (tmp_path / archives[0] / "content").read_text() == "second"
    make_checkpoint(tmp_path, 7)
    archive(tmp_path, after_step=4, limit=2)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-7.superseded",
        "checkpoint-9.superseded",
    ]


def test_archiving_that_is_cut_off_leaves_no_newest_checkpoint(tmp_path, monkeypatch):
    for step in (5, 7, 9):
        make_checkpoint(tmp_path, step)
    rename = Path.rename

    def once(path, target):
        monkeypatch.setattr(Path, "rename", cut_off)
        return rename(path, target)

    def cut_off(path, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", once)
    with pytest.raises(KeyboardInterrupt):
        archive(tmp_path, after_step=4)
    assert [path.name for path in list_archives(tmp_path)] == ["checkpoint-9.superseded"]


def test_a_limit_never_deletes_what_has_just_been_archived(tmp_path):
    for step in (1, 5):
        make_checkpoint(tmp_path, step)
    archive(tmp_path, after_step=0, limit=1)
    assert [path.name for path in list_archives(tmp_path)] == ["checkpoint-1.superseded", "checkpoint-5.superseded"]
    make_checkpoint(tmp_path, 3)
    archive(tmp_path, after_step=0, limit=1)
    assert [path.name for path in list_archives(tmp_path)] == ["checkpoint-3.superseded", "checkpoint-5.superseded"]


def test_archives_are_listed_and_not_verified(tmp_path, capsys):
    for step in (1, 5):
        make_checkpoint(tmp_path, step)
    archive(tmp_path, after_step=1)
    assert main(["checkpoints", "list", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(entry["name"], entry["state"], entry["step"]) for entry in listed] == [
        ("checkpoint-1", "good", 1),
        ("checkpoint-5.superseded", "superseded", 5),
    ]
    assert main(["checkpoints", "verify", str(tmp_path)]) == 0
    assert main(["checkpoints", "list", str(tmp_path)]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["checkpoint-1", "good", "1"] in rows
    assert ["checkpoint-5.superseded", "superseded", "5"] in rows


def test_a_failed_atomic_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    write_atomically(path, "old")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


def test_a_reader_during_an_atomic_write_sees_the_old_content(tmp_path):
    path = tmp_path / "status.json"
    write_atomically(path, "old")
    with path.open() as reader:
        write_atomically(path, "new")
        assert reader.read() == "old"
    assert path.read_text() == "new"
