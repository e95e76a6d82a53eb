"""A resume gives each parameter its own states, in whichever order a launch gives them to the optimizer."""

import json
import shutil

import pytest
import torch
from conftest import REPOSITORY
from peft import LoraConfig, get_peft_model
from tiny import RandomTokens, tiny_arguments, tiny_model
from transformers import Trainer, default_data_collator

from hfscale import SpotCheckpointCallback
from hfscale.core.run_files import PARAMETERS_NAME
from hfscale.errors import CheckpointError

ARGUMENTS = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "logging_steps": 1}


def as_named(names):
    return names


def from_the_end(names):
    return names[::-1]


def without_the_first(names):
    return names[1:]


class Chooses(Trainer):
    """Makes its optimizer from a set of names, as a script does; `order` is the order of the set in this process."""

    order = staticmethod(as_named)

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
            decay = self.order([name for name in trained if trained[name].dim() > 1])
            others = [name for name in trained if name not in decay]
            groups = [{"params": [trained[name] for name in names]} for names in (decay, others) if names]
            self.optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        return self.optimizer


def trainer_of(folder, order, *, lora=False):
    model = tiny_model()
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"], r=4))
    kind = type("Chooses", (Chooses,), {"order": staticmethod(order), "__module__": __name__})
    return kind(
        model=model,
        args=tiny_arguments(folder, **ARGUMENTS),
        train_dataset=RandomTokens(),
        data_collator=default_data_collator,
        callbacks=[SpotCheckpointCallback(cloud=None, every_minutes=None)],
    )


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(params=[False, True], ids=["full", "lora"])
def interrupted(request, tmp_path):
    """Return the losses of a whole run and a function that makes its Trainer again, with a checkpoint of step 4."""
    whole = trainer_of(tmp_path, as_named, lora=request.param)
    whole.train()
    shutil.rmtree(tmp_path / "checkpoint-5", ignore_errors=True)
    return losses(whole), lambda order: trainer_of(tmp_path, order, lora=request.param)


@pytest.mark.parametrize("order", [as_named, from_the_end])
def test_states_follow_the_names(interrupted, order, caplog):
    """Adapters have equal shapes: plain Trainer goes on with the states of other ones."""
    expected, again = interrupted
    resumed = again(order)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == expected
    assert ("in another order" in caplog.text) == (order is from_the_end)


def test_other_groups_are_refused(interrupted):
    _, again = interrupted
    with pytest.raises(CheckpointError, match=r"has (the states of '.*' where|2 parameter groups|1 parameter groups)"):
        again(without_the_first).train(resume_from_checkpoint=True)


def test_a_checkpoint_that_names_no_parameters_is_loaded_by_number(interrupted, tmp_path):
    """As those of plain Trainer."""
    expected, again = interrupted
    for name in (PARAMETERS_NAME, "hfscale_manifest.json"):
        (tmp_path / "checkpoint-4" / name).unlink()
    resumed = again(as_named)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert losses(resumed) == expected


@pytest.mark.world(2)
def test_deepspeed_has_one_order_on_all_ranks_and_in_all_launches(tmp_path, launch):
    """It adds up gradients and loads states by position: losses would differ from the second step on, silently."""
    (tmp_path / "ds_configs").symlink_to(REPOSITORY / "ds_configs")
    config = REPOSITORY / "accelerate_configs" / "zero2.yaml"
    done = launch(2, REPOSITORY / "tests" / "workers" / "engine_order.py", config=config)
    assert done.code == 0, done.err[-3000:]
    outcomes, others = (json.loads((tmp_path / f"outcomes-{rank}.json").read_text()) for rank in range(2))
    assert outcomes == others
    assert outcomes["ranks differ"].startswith("UsageError: rank 1 gives its parameters to the optimizer in another")
    assert outcomes["equal"] == outcomes["same order"] == "trained with DeepSpeedEngine"
    assert "has the states of the optimizer in another order" in outcomes["another order"]
