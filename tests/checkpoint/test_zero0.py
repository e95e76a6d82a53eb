"""DeepSpeed's stage 0, which shards nothing, is trained, saved, resumed and replayed as every other strategy."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from forked_ranks import run_ranks
from tiny import tiny_trainer
from transformers import TrainerCallback

from hfscale import CommHealthCallback, DiLoCoCallback, ScalingCallback, SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint.manifest import read_manifest
from hfscale.cli import main
from hfscale.errors import UsageError
from hfscale.facts.strategies import STRATEGIES
from hfscale.trainer.strategies import Strategy

STEPS = 6
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 0},
}


class Preempts(TrainerCallback):
    """Sends a rank the signal of a preemption within a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def train(folder, config, preempted_at=None, callback=None, **arguments):
    """Train in this process, which is a rank, from the newest checkpoint; rank 0 writes what it has seen."""
    torch.set_num_threads(1)
    callback = callback or ScalingCallback(
        comm_health=CommHealthCallback(replay_every_steps=2),
        spot_checkpoint=SpotCheckpointCallback(on_preemption="return"),
    )
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": STEPS}
    trainer = tiny_trainer(folder / "out", callback, Preempts(preempted_at), deepspeed=config, **saving, **arguments)
    try:
        trainer.train(resume_from_checkpoint=latest_checkpoint(folder / "out"))
        error = None
    except UsageError as refused:
        error = str(refused)
    if trainer.is_world_process_zero():
        logs = trainer.state.log_history
        keys = ("health/replay_mismatches", "scaling/tokens_per_s", "scaling/comm_fraction")
        found = {
            "losses": {log["step"]: log["loss"] for log in logs if "loss" in log},
            "keys": {key: [log[key] for log in logs if key in log] for key in keys},
            "strategy": Strategy.of(trainer).name,
            "error": error,
        }
        (folder / "found.json").write_text(json.dumps(found))


def launch(folder, *args, config=DEEPSPEED, **options):
    """Run two ranks, and return what rank 0 has seen."""
    folder.mkdir(exist_ok=True)

    def as_rank():
        train(folder, config, *args, **options)

    codes = run_ranks(2, as_rank, log=folder / "log", timeout_s=200)
    printed = "\n".join(path.read_text() for path in (folder / "log").iterdir())
    assert codes == [0, 0], printed[-6000:]
    return json.loads((folder / "found.json").read_text()), printed


@pytest.mark.world(2)
@pytest.mark.long
def test_a_preempted_run_resumes_with_the_losses_of_an_uninterrupted_one(tmp_path, capsys):
    complete, printed = launch(tmp_path / "complete")
    assert "strategy zero0 on 2 processes" in printed
    assert complete["strategy"] == "zero0"
    assert complete["keys"]["health/replay_mismatches"][-1] == 0
    assert all(rate > 0 for rate in complete["keys"]["scaling/tokens_per_s"])
    run = tmp_path / "run"
    before, _ = launch(run, 3)
    assert max(map(int, before["losses"])) < STEPS
    after, _ = launch(run)
    assert before["losses"] | after["losses"] == complete["losses"]
    newest = Path(latest_checkpoint(run / "out"))
    manifest = read_manifest(newest)
    assert (manifest.strategy, manifest.world_size) == ("zero0", 2)
    capsys.readouterr()
    assert main(["checkpoints", "list", str(run / "out")]) == 0
    assert "zero0" in capsys.readouterr().out
    assert main(["checkpoints", "verify", str(newest)]) == 0
    for to in ("ddp", "zero1", "zero0"):
        capsys.readouterr()
        assert main(["checkpoints", "convert", str(newest), str(tmp_path / to), "--to", to, "--world-size", "2"]) != 0
        (line,) = capsys.readouterr().err.splitlines()
        assert "zero0" in line
        assert not (tmp_path / to).exists()


def test_what_its_name_says():
    facts = STRATEGIES["zero0"]
    assert facts.by_deepspeed
    assert not facts.is_convertible
    assert not facts.shards


@pytest.mark.world(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_islands_cannot_reach_what_stage_0_steps_in_16_bits(tmp_path, precision, monkeypatch):
    if precision == "fp16" and not get_accelerator().is_fp16_supported():
        pytest.skip("DeepSpeed has no fp16 on this CPU")
    monkeypatch.setenv("HFSCALE_ISLAND_TOKEN", "t")
    islands = DiLoCoCallback(islands=2, rendezvous="127.0.0.1:9")
    config = DEEPSPEED | {precision: {"enabled": True}}
    found, _ = launch(tmp_path, config=config, callback=islands, **{precision: True})
    assert f"under ZeRO stage 0 in {precision}" in found["error"]
    assert found["losses"] == {}
