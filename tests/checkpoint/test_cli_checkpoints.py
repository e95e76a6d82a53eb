"""`hfscale checkpoints`: states, exit codes, conversion and export through the command line."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from attacks import RunsCode, link_a_folder, link_another_file
from tiny import tiny_trainer
from transformers import AutoModelForCausalLM

from hfscale import SpotCheckpointCallback
from hfscale.checkpoint.store import update_manifest
from hfscale.cli import main

STATES = {"checkpoint-1": "good", "checkpoint-2": "corrupt", "checkpoint-3": "incomplete", "checkpoint-4": "good"}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    arguments = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "max_steps": 4,
        "learning_rate": 1e-3,
    }
    tiny_trainer(folder, SpotCheckpointCallback(), **arguments).train()
    return folder


@pytest.fixture
def run(finished_run, tmp_path):
    """A run with a checkpoint in every state."""
    folder = shutil.copytree(finished_run, tmp_path / "run")
    path = folder / "checkpoint-2" / "optimizer.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    (folder / "checkpoint-3" / "hfscale_manifest.json").unlink()
    return folder


def run_checkpoints(capsys, *argv, code=0):
    assert main(["checkpoints", *map(str, argv)]) == code
    return capsys.readouterr()


def test_list_shows_every_checkpoint_with_its_state(run, capsys):
    rows = json.loads(run_checkpoints(capsys, "list", run, "--json").out)
    assert {row["name"]: row["state"] for row in rows} == STATES
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert "optimizer.pt has changed" in rows[1]["reason"]
    assert "no hfscale_manifest.json" in rows[2]["reason"]
    good = rows[3]
    assert (good["strategy"], good["world_size"], good["global_batch_size"]) == ("single", 1, 4)
    assert rows[2]["strategy"] is rows[2]["world_size"] is None
    assert [row["best"] for row in rows].count(True) == 1
    assert (
        good["bytes"]
        == sum(p.stat().st_size for p in (run / "checkpoint-4").iterdir())
        - (run / "checkpoint-4" / "hfscale_manifest.json").stat().st_size
    )
    assert 0 <= good["age_s"] < 600
    table = run_checkpoints(capsys, "list", run).out
    assert all(name in table and state in table for name, state in STATES.items())
    quick = json.loads(run_checkpoints(capsys, "list", run, "--quick", "--json").out)
    assert quick[1]["state"] == "good"  # its length has not changed


def test_verify_returns_exit_code_1_for_anything_not_good(run, tmp_path, capsys):
    (row,) = json.loads(run_checkpoints(capsys, "verify", run / "checkpoint-4", "--json").out)
    assert row["state"] == "good"
    run_checkpoints(capsys, "verify", run / "checkpoint-2", code=1)
    run_checkpoints(capsys, "verify", run / "checkpoint-3", code=1)
    run_checkpoints(capsys, "verify", run, code=1)
    (run / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    found = run_checkpoints(capsys, "verify", run / "checkpoint-4", "--quick", code=1).out
    assert "checkpoint-4: model.safetensors has 0 bytes" in found
    (tmp_path / "empty").mkdir()
    assert "has no checkpoints" in run_checkpoints(capsys, "verify", tmp_path / "empty", code=1).out
    assert json.loads(run_checkpoints(capsys, "list", tmp_path / "empty", "--json").out) == []


def write_a_harmful_pickle(checkpoint):
    torch.save(RunsCode(checkpoint.parent / "ran"), checkpoint / "optimizer.pt")


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (link_another_file, "notes.json is a symbolic link"),
        (link_a_folder, "global_step4 is a symbolic link"),
        (write_a_harmful_pickle, "would run"),
    ],
)
def test_verify_refuses_what_a_matching_manifest_hides(run, capsys, attack, reason):
    checkpoint = run / "checkpoint-4"
    attack(checkpoint)
    update_manifest(checkpoint)
    (row,) = json.loads(run_checkpoints(capsys, "verify", checkpoint, "--json", code=1).out)
    assert row["state"] == "corrupt"
    assert reason in row["reason"]
    assert not (run / "ran").exists()


def test_a_quick_verify_sees_links_that_the_manifest_does_not_list(run, tmp_path, capsys):
    (tmp_path / "another").write_text("")
    (run / "checkpoint-4" / "extra").symlink_to(tmp_path / "another")
    found = run_checkpoints(capsys, "verify", run / "checkpoint-4", "--quick", code=1).out
    assert "checkpoint-4: extra is a symbolic link" in found


def test_convert_takes_the_newest_good_checkpoint_of_a_run(run, tmp_path, capsys):
    (run / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    (run / "checkpoint-3" / "trainer_state.json").unlink()  # without a manifest and not complete
    converted = tmp_path / "converted"
    summary = json.loads(
        run_checkpoints(
            capsys, "convert", run, converted, "--to", "zero2", "--world-size", "8", "--json"
        ).out.splitlines()[-1]
    )
    assert (summary["step"], summary["strategy"], summary["world_size"]) == (1, "zero2", 8)
    (row,) = json.loads(run_checkpoints(capsys, "list", converted, "--json").out)
    assert (row["state"], row["strategy"], row["world_size"], row["global_batch_size"]) == ("good", "zero2", 8, 4)
    output = run_checkpoints(
        capsys, "convert", converted, tmp_path / "back", "--to", "single", "--world-size", "1"
    ).out
    assert f"--resume_from_checkpoint {tmp_path / 'back'}" in output


def test_convert_a_checkpoint_of_plain_trainer(run, tmp_path, capsys):
    error = run_checkpoints(capsys, "convert", run / "checkpoint-3", tmp_path / "made", "--to", "fsdp2", code=2).err
    assert "--global-batch-size" in error
    options = ["--to", "fsdp2", "--global-batch-size", "16"]
    run_checkpoints(capsys, "convert", run / "checkpoint-3", tmp_path / "made", *options)
    (row,) = json.loads(run_checkpoints(capsys, "verify", tmp_path / "made", "--json").out)
    assert (row["state"], row["step"], row["global_batch_size"]) == ("good", 3, 16)


def test_export_writes_a_folder_for_from_pretrained(run, tmp_path, capsys):
    run_checkpoints(capsys, "export", run, tmp_path / "model", "--dtype", "float16", "--max-shard-size", "20 kB")
    assert len(list((tmp_path / "model").glob("model-*-of-*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert str(model.dtype) == "torch.float16"
    files = json.loads(run_checkpoints(capsys, "export", run, tmp_path / "default", "--json").out)["files"]
    assert "model.safetensors" in files


@pytest.mark.parametrize(
    ("argv", "code", "part"),
    [
        (["list", "nothing"], 2, "nothing is not a folder"),
        (["verify"], 2, "PATH"),
        (["convert", "{run}", "{tmp}/made"], 2, "--to"),
        (["convert", "{run}", "{tmp}/made", "--to", "zero4"], 2, "--to is zero4: use one of single, ddp, fsdp2"),
        (
            ["convert", "{run}", "{run}", "--to", "ddp", "--world-size", "2"],
            2,
            "already exists",
        ),
        (["convert", "{run}", "{tmp}/made", "--to", "ddp"], 2, "--to is ddp with --world-size 1"),
        (["convert", "{run}", "{tmp}/made", "--to", "fsdp2", "--world-size", "0"], 2, "--world-size"),
        (["convert", "{run}/checkpoint-2", "{tmp}/made", "--to", "fsdp2"], 1, "optimizer.pt has changed"),
        (["convert", "{tmp}", "{tmp}/made", "--to", "fsdp2"], 1, "has no good checkpoint"),
        (["convert", "{run}", "/proc/made", "--to", "fsdp2"], 1, "cannot be written"),
        (["export", "{run}", "{tmp}/made", "--dtype", "int4"], 2, "--dtype is int4: use one of auto, float32"),
        (["export", "{run}", "{tmp}/made", "--max-shard-size", "much"], 2, "--max-shard-size is much"),
        (["export", "{run}", "{tmp}/made", "--model", "{tmp}"], 1, "has no config.json"),
    ],
)
def test_an_error_is_one_line_without_traceback(run, tmp_path, capsys, argv, code, part):
    paths = {"run": str(run), "tmp": str(tmp_path)}
    error = run_checkpoints(capsys, *[argument.format(**paths) for argument in argv], code=code).err.strip()
    assert part in error.splitlines()[-1]
    assert error.startswith("hfscale: error:")
    assert "Traceback" not in error
    assert not (tmp_path / "made").exists()


def test_help_and_list_import_no_torch(run):
    for argv in (["checkpoints", "convert", "--help"], ["checkpoints", "list", str(run)]):
        probe = f"import sys; from hfscale.cli import main; main({argv!r}); assert 'torch' not in sys.modules"
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
