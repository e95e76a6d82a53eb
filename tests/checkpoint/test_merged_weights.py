"""Weights that transformers merges in memory and saves separately: round trips for every family, and a resume."""

import pytest
import torch
from parallel_families import small_config
from parallel_world import Tokens, tiny_causal_lm
from transformers import Trainer, TrainingArguments
from transformers.core_model_loading import revert_weight_conversion

from hfscale import SpotCheckpointCallback
from hfscale.checkpoint.formats.merged import merge, split
from hfscale.checkpoint.formats.view import TensorRef
from hfscale.errors import CheckpointError
from hfscale.facts.support import PIPELINE_TESTED
from hfscale.parallel.weights import build_model

ORDINARY = ("mixtral", "qwen3_moe", "llama")


def refs(tensors):
    return {name: TensorRef.of(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in ORDINARY else [pytest.mark.faults]) for name in sorted(PIPELINE_TESTED)],
)
def test_split_and_merge_are_inverse(family):
    model = build_model(small_config(family), seed=1, dtype=torch.float32)
    in_memory = model.state_dict()
    stored = revert_weight_conversion(model, dict(in_memory))
    separate = split(refs(in_memory), model)
    merged = merge(refs(stored), model)
    assert separate.keys() == stored.keys()
    assert all(torch.equal(separate[name].read(), tensor) for name, tensor in stored.items())
    assert merged.keys() == in_memory.keys()
    assert all(torch.equal(merged[name].read(), tensor) for name, tensor in in_memory.items())
    has_separate_experts = any(".experts.1." in name for name in stored)  # granitemoe saves them merged
    assert has_separate_experts or family not in ORDINARY[:2]
    if has_separate_experts:
        assert len(stored) > len(in_memory)
        with pytest.raises(CheckpointError, match=r"\d+ tensors, of which \d+"):
            merge(refs(dict([item for item in stored.items() if ".experts.1." not in item[0]])), model)


def losses(folder, seed, resume=None, **arguments):
    """Train from scratch with `seed`, or resume from a checkpoint; return the loss of each step and the Trainer."""
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        seed=7,
        **arguments,
    )
    model = tiny_causal_lm("mixtral", seed=seed, num_local_experts=4, num_hidden_layers=1)
    trainer = Trainer(
        model, args, train_dataset=Tokens(), eval_dataset=Tokens(8), callbacks=[SpotCheckpointCallback()]
    )
    trainer.train(resume_from_checkpoint=resume)
    return [record["loss"] for record in trainer.state.log_history if "loss" in record], trainer


def test_experts_are_restored_at_resume(tmp_path):
    """Trainer alone leaves the new model's random experts in place (transformers 5.23)."""
    uninterrupted, _ = losses(tmp_path / "uninterrupted", 1)
    resumed, _ = losses(tmp_path / "resumed", 2, str(tmp_path / "uninterrupted" / "checkpoint-2"))
    assert resumed[-2:] == uninterrupted[-2:]
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    _, trainer = losses(tmp_path / "best", 1, None, **evaluated, metric_for_best_model="loss", greater_is_better=True)
    best = trainer.state.best_metric
    assert trainer.state.best_global_step == 2
    assert trainer.evaluate()["eval_loss"] == best
