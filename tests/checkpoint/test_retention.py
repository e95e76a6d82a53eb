"""`state_limit`: older checkpoints keep their weights, here and in the remote copy; the newest keep everything."""

import json
import logging

import pytest
import torch
from forked_ranks import run_ranks
from replay_runs import environment, make_trainer
from tiny import StopAt, logged, tiny_trainer
from transformers import AutoModelForCausalLM, TrainerCallback

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint.export import export
from hfscale.checkpoint.manifest import read_manifest
from hfscale.checkpoint.retention import drop_states, steps_without_state
from hfscale.checkpoint.store import verify
from hfscale.core.run_files import MANIFEST_NAME

STATE = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "data_order_0.json"}
STATE |= {"hfscale_running_loss_0.json", "hfscale_program_state_0.json"}


def train(folder, *callbacks, resume=None, **options):
    arguments = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
    best = options.pop("best", {})
    spot = SpotCheckpointCallback(**({"state_limit": 2} | options))
    trainer = tiny_trainer(folder, spot, *callbacks, **arguments, **best)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def with_state(folder):
    return [step for step in range(1, 6) if (folder / f"checkpoint-{step}" / "optimizer.pt").is_file()]


def test_older_checkpoints_keep_their_weights_and_the_newest_are_resumed_from(tmp_path):
    whole = logged(train(tmp_path / "whole", state_limit=None), "loss")
    train(tmp_path / "run", StopAt(4))
    assert with_state(tmp_path / "run") == [3, 4]
    for step in (1, 2):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        manifest = verify(folder)
        assert "state_limit" in manifest.why_model_only()
        left = {path.name for path in folder.iterdir()}
        assert left == {path.name for path in (tmp_path / "whole" / folder.name).iterdir()} - STATE
        weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / folder.name).state_dict()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
    resume = latest_checkpoint(tmp_path / "run")
    assert resume.endswith("checkpoint-4")
    assert logged(train(tmp_path / "run", resume=resume), "loss") == whole
    assert with_state(tmp_path / "run") == [4, 5]


class SecondIsBest(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_loss"] = 1.0 if state.global_step == 2 else 2.0


def test_the_best_checkpoint_keeps_its_state(tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    train(tmp_path, SecondIsBest(), best=best, state_limit=1)
    assert with_state(tmp_path) == [2, 5]


def test_the_remote_copy_too(tmp_path):
    remote = tmp_path / "remote"
    train(tmp_path / "run", StopAt(4), remote=f"file://{remote}", state_limit=1)
    assert set(read_manifest(remote / "checkpoint-4").files) >= STATE
    older = [path for path in remote.glob("checkpoint-*") if path.name != "checkpoint-4"]
    for path in older:  # a copy that is overtaken is left out
        assert not STATE & {file.name for file in path.iterdir()}
        assert verify(path).why_model_only() is not None


def test_what_an_interrupted_call_has_left_is_deleted(tmp_path):
    train(tmp_path, StopAt(3), state_limit=None)
    first = tmp_path / "checkpoint-1"
    fields = json.loads((first / MANIFEST_NAME).read_text())
    fields["files"] = {name: one for name, one in fields["files"].items() if name not in STATE}
    (first / MANIFEST_NAME).write_text(json.dumps(fields))
    assert [path.name for path in drop_states(tmp_path, limit=2)] == ["checkpoint-1"]
    assert with_state(tmp_path) == [2, 3]
    assert not STATE & {path.name for path in first.iterdir()}
    assert drop_states(tmp_path, limit=2) == []


def test_a_checkpoint_whose_weights_are_in_the_optimizers_files_keeps_both(tmp_path, caplog):
    train(tmp_path, StopAt(2), state_limit=None)
    manifest = tmp_path / "checkpoint-1" / MANIFEST_NAME
    manifest.write_text(manifest.read_text().replace('"model.safetensors"', '"optimizer_0/model.distcp"'))
    assert drop_states(tmp_path, limit=1) == []
    assert with_state(tmp_path) == [1, 2]
    spot = SpotCheckpointCallback(state_limit=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            spot._check_weights_are_apart(read_manifest(tmp_path / "checkpoint-1"))
    assert [record.message[:30] for record in caplog.records] == ["state_limit has no effect: che"]


def test_the_newest_of_those_with_a_state_are_kept():
    assert steps_without_state([5, 1, 3], limit=1) == [1, 3]
    assert steps_without_state([5, 1, 3], limit=1, best=1) == [3]
    assert steps_without_state([5], limit=2) == []


def rank(layout, folder):
    torch.set_num_threads(1)
    spot = SpotCheckpointCallback(state_limit=1)
    make_trainer(layout, folder, [spot], max_steps=3, save_strategy="steps", save_steps=1).train()


@pytest.mark.long
@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("layout", "older"), [("ddp", True), ("fsdp2", True), ("zero2", True), ("zero3", True), ("tp", False)]
)
def test_two_ranks(layout, older, tmp_path):
    """The older checkpoints are exported as before; those of ParallelTrainer keep what they have."""
    out = tmp_path / "out"
    codes = run_ranks(2, rank, layout, out, log=tmp_path / "log", env=environment(layout), timeout_s=240)
    assert codes == [0, 0], "".join(path.read_text()[-3000:] for path in (tmp_path / "log").iterdir())
    found = [verify(out / f"checkpoint-{step}").why_model_only() is not None for step in (1, 2, 3)]
    assert found == [older, older, False]
    export(out / "checkpoint-2", tmp_path / "exported", strategy=read_manifest(out / "checkpoint-2").strategy)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").num_parameters() > 0
