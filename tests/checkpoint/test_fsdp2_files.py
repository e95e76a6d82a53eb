"""What a script under FSDP2 finds on the disk: a complete final model, and checkpoints that can be converted."""

import json

import pytest
import torch
from forked_ranks import run_ranks
from replay_runs import environment
from tiny import RandomTokens, tiny_arguments, tiny_model
from transformers import AutoModelForCausalLM, Trainer

from hfscale import SpotCheckpointCallback
from hfscale.core.run_files import PARAMETERS_NAME
from hfscale.trainer.strategies.fsdp2 import let_fsdp_run_on_cpu


def train_and_save(folder):
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    args = tiny_arguments(folder, max_steps=4, **saving)
    let_fsdp_run_on_cpu()
    trainer = Trainer(
        model=tiny_model(),
        args=args,
        train_dataset=RandomTokens(),
        eval_dataset=RandomTokens(8),
        callbacks=[SpotCheckpointCallback()],
    )
    assert "SHARDED" in str(trainer.accelerator.state.fsdp_plugin.state_dict_type)
    trainer.train()
    trainer.save_model(str(folder / "final"))
    assert "SHARDED" in str(trainer.accelerator.state.fsdp_plugin.state_dict_type)
    weights = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.is_world_process_zero():
        torch.save(weights, folder / "expected.pt")


@pytest.mark.world(2)
def test_the_final_model_is_complete_and_checkpoints_name_their_parameters(tmp_path):
    env = environment("fsdp2")
    codes = run_ranks(2, train_and_save, tmp_path, log=tmp_path / "log", env=env, timeout_s=240)
    printed = "\n".join(path.read_text()[-3000:] for path in sorted((tmp_path / "log").iterdir()))
    assert codes == [0, 0], printed
    expected = torch.load(tmp_path / "expected.pt")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final").state_dict()
    assert loaded.keys() == tiny_model().state_dict().keys()
    assert all(torch.equal(loaded[name], expected[name].float()) for name in loaded)
    assert "cannot be converted" not in printed
    for step in (2, 4):  # after an evaluation too
        assert json.loads((tmp_path / f"checkpoint-{step}" / PARAMETERS_NAME).read_text())["groups"]
