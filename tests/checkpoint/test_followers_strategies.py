"""Reference models that ranks share follow the trained model over a resume, as TRL places and moves them."""

import json
import os
from pathlib import Path

import pytest
import torch
from forked_ranks import run_ranks
from replay_runs import environment, make_trainer
from tiny import LENGTH, tiny_model
from transformers import TrainerCallback

from hfscale import SpotCheckpointCallback
from hfscale.checkpoint import followers
from hfscale.checkpoint.followers import FILE

callbacks = pytest.importorskip("trl.trainer.callbacks")
utils = pytest.importorskip("trl.models.utils")

STEPS = 6


class Refers(TrainerCallback):
    """Computes with the reference model in each step, as a loss does."""

    def __init__(self):
        self.reference = None
        self.losses = {}

    def on_step_begin(self, args, state, control, **kwargs):
        ids = torch.arange(3, 3 + LENGTH).unsqueeze(0)
        with torch.no_grad():
            loss = self.reference(input_ids=ids, labels=ids, use_cache=False).loss
        self.losses[state.global_step] = float(loss)


def place(trainer, layout, model):
    """Place a reference model as the trainers of TRL do."""
    if layout.startswith("zero"):
        return utils.prepare_deepspeed(model, trainer.accelerator)
    if layout == "fsdp2":
        return utils.prepare_fsdp(model, trainer.accelerator)
    return trainer.accelerator.prepare_model(model, evaluation_mode=True)


def rank(layout, folder, name, checkpoint):
    """Train with a reference that takes half of the trained weights after each step; write what it is in the end."""
    torch.set_num_threads(1)
    refers = Refers()
    spot = SpotCheckpointCallback(cloud=None)
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": STEPS, "learning_rate": 1e-2}
    trainer = make_trainer(layout, folder / name, [spot, refers], **saving)
    trainer.args.ref_model_sync_steps = 1
    trainer.args.ref_model_mixup_alpha = 0.5
    refers.reference = place(trainer, layout, tiny_model())
    trainer.add_callback(callbacks.SyncRefModelCallback(ref_model=refers.reference, accelerator=trainer.accelerator))
    trainer.train(resume_from_checkpoint=checkpoint)
    weights = {}
    for key, weight in refers.reference.named_parameters():
        with followers._complete(weight) as whole:
            weights[key] = whole.clone()
    if os.environ["RANK"] == "0":
        torch.save(weights, folder / f"{name}.pt")
        (folder / f"{name}.json").write_text(json.dumps(refers.losses))


def train(layout: str, folder: Path, name: str, checkpoint: Path | None = None):
    """Train on two ranks; return the losses of the reference by step, and its weights at the end."""
    start = None if checkpoint is None else str(checkpoint)
    log = folder / f"log-{name}"
    codes = run_ranks(2, rank, layout, folder, name, start, log=log, env=environment(layout), timeout_s=150)
    printed = "\n".join(path.read_text()[-4000:] for path in sorted(log.iterdir()))
    assert codes == [0, 0], printed
    losses = json.loads((folder / f"{name}.json").read_text())
    return losses, torch.load(folder / f"{name}.pt", weights_only=True)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "layout",
    [
        "fsdp2",
        pytest.param("ddp", marks=pytest.mark.long),
        pytest.param("zero2", marks=pytest.mark.long),
        pytest.param("zero3", marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_has_the_reference_of_an_uninterrupted_one(layout, tmp_path):
    losses, expected = train(layout, tmp_path, "whole")
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert (checkpoint / FILE).is_file()
    resumed, weights = train(layout, tmp_path, "resumed", checkpoint)
    assert len(set(losses.values())) == STEPS  # it follows
    assert resumed == {step: loss for step, loss in losses.items() if int(step) >= 2}
    assert [key for key, weight in weights.items() if not torch.equal(weight, expected[key])] == []
