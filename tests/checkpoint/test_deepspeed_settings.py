"""Settings of a DeepSpeed config that `hfscale/facts/deepspeed.toml` lists: a run that stops resumes exactly."""

import json

import pytest
import torch
from forked_ranks import run_ranks
from tiny import StopAt, tiny_trainer

from hfscale import CommHealthCallback, ScalingCallback, latest_checkpoint
from hfscale.checkpoint.formats.zero import read_zero
from hfscale.errors import CheckpointError

STEPS = 6
HARMLESS = {
    "steps_per_print": 1,
    "dump_state": True,
    "wall_clock_breakdown": True,
    "memory_breakdown": False,
    "log_level": "warning",
    "vocabulary_size": 64,
    "dataloader_drop_last": True,
    "flops_profiler": {"enabled": True, "profile_step": 2, "detailed": False},
    "comms_logger": {"enabled": True, "verbose": False, "prof_all": True},
    "timers": {"throughput": {"enabled": True, "synchronized": False}},
    "tensorboard": {"enabled": False},
    "wandb": {"enabled": False},
    "comet": {"enabled": False},
    "aio": {"block_size": 1048576, "queue_depth": 4},
    "disable_python_gc": True,
    "gradient_clipping": "auto",
    "communication_data_type": "fp32",
    "seq_parallel_communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_allow_untested_optimizer": True,
    "checkpoint": {"tag_validation": "Fail", "parallel_write": {"pipeline_stage": False}},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 1},
}
STAGES_1_AND_2 = {
    "contiguous_gradients": False,
    "reduce_scatter": False,
    "reduce_bucket_size": 4000,
    "use_multi_rank_bucket_allreduce": False,
    "allgather_partitions": False,
    "allgather_bucket_size": 4000,
    "overlap_comm": False,
    "ignore_unused_parameters": False,
    "enable_sanity_checks": True,
}
STAGE_3 = {
    "stage3_gather_16bit_weights_on_model_save": True,
    "stage3_prefetch_bucket_size": 3000,
    "stage3_param_persistence_threshold": 50,
    "stage3_model_persistence_threshold": 100,
    "stage3_max_live_parameters": 5000,
    "stage3_max_reuse_distance": 3000,
    "stage3_use_all_reduce_for_fetch_params": True,
    "stage3_module_granularity_threshold": 0,
    "sub_group_size": 3000,
    "memory_efficient_linear": False,
    "override_module_apply": False,
    "log_trace_cache_warnings": True,
    "leaf_module": {"classes": ["transformers.models.llama.modeling_llama.LlamaMLP"]},
    "reduce_bucket_size": 4000,
}
OFFLOAD = {
    "stage3_gather_16bit_weights_on_model_save": True,
    "sub_group_size": 3000,
    "offload_optimizer": {
        "device": "cpu",
        "pin_memory": False,
        "ratio": 0.5,
        "buffer_count": 6,
        "pipeline_read": True,
        "pipeline_write": True,
        "fast_init": True,
    },
}


def config(stage, of_zero, **more):
    sizes = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
    }
    return sizes | {"zero_optimization": {"stage": stage, **of_zero}} | more


def optimizer(name, **params):
    return {"type": name, "params": {"lr": "auto", "weight_decay": "auto", **params}}


UNTESTED = {"zero_allow_untested_optimizer": True}


CONFIGS = {
    "zero1": config(1, STAGES_1_AND_2, **HARMLESS, prescale_gradients=True, gradient_predivide_factor=2.0),
    "zero2": config(2, STAGES_1_AND_2, **HARMLESS, optimizer=optimizer("AdamW", torch_adam=True)),
    "zero2 in another order": config(
        2, {"round_robin_gradients": True}, **UNTESTED, optimizer=optimizer("SGD", momentum=0.9)
    ),
    "zero1 with RMSprop": config(1, {}, **UNTESTED, optimizer=optimizer("RMSprop")),
    "zero1 with NAdam": config(1, {}, **UNTESTED, optimizer=optimizer("NAdam")),
    "zero2 with a schedule": config(
        2,
        {},
        optimizer=optimizer("Adam", torch_adam=True),
        scheduler={"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    ),
    "zero3": config(3, STAGE_3, **HARMLESS),
    "zero3, each parameter alone": config(
        3, {"stage3_allgather_sequential": True, "stage3_gather_16bit_weights_on_model_save": True}
    ),
    "zero3 with a part of the states offloaded": config(3, OFFLOAD),
    "without effect": config(2, {}, activation_checkpointing={"cpu_checkpointing": True}, pipeline={"stages": 2}),
}


def train(folder, deepspeed, stops):
    """Train in this process, which is a rank, from the newest checkpoint; rank 0 writes what it has seen."""
    torch.set_num_threads(1)
    callbacks = [
        ScalingCallback(comm_health=CommHealthCallback(replay_every_steps=2)),
        *([StopAt(3)] if stops else []),
    ]
    sizes = {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "weight_decay": 0.1,
    }
    saving = {"save_strategy": "steps", "save_steps": 3}
    trainer = tiny_trainer(folder / "out", *callbacks, deepspeed=deepspeed, **sizes, **saving)
    trainer.train(resume_from_checkpoint=latest_checkpoint(folder / "out"))
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        logs = trainer.state.log_history
        losses = {log["step"]: [log["loss"], log["grad_norm"], log["learning_rate"]] for log in logs if "loss" in log}
        mismatches = max(log.get("health/replay_mismatches", 0) for log in logs)
        (folder / "found.json").write_text(json.dumps([losses, mismatches]))
        torch.save(weights, folder / "weights.pt")


def launch(folder, deepspeed, *, stops=False):
    """Run two ranks; return losses, mismatches of replayed steps, weights and output of rank 0."""
    codes = run_ranks(2, train, folder, deepspeed, stops, log=folder / "log", timeout_s=240)
    printed = (folder / "log" / "rank-0.log").read_text()
    assert codes == [0, 0], printed[-6000:]
    return *json.loads((folder / "found.json").read_text()), torch.load(folder / "weights.pt"), printed


@pytest.mark.world(2)
@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_with_the_settings_that_are_listed_resumes_exactly(tmp_path, name):
    losses, mismatches, weights, printed = launch(tmp_path / "whole", CONFIGS[name])
    assert len(losses) == STEPS
    launch(tmp_path / "stopped", CONFIGS[name], stops=True)
    resumed = launch(tmp_path / "stopped", CONFIGS[name])
    assert resumed[:2] == (losses, mismatches) == (losses, 0)
    assert all(torch.equal(resumed[2][key], value) for key, value in weights.items())
    assert ("has no effect in a Trainer" in printed) == (name == "without effect")
    newest = tmp_path / "whole" / "out" / f"checkpoint-{STEPS}"
    if "order" in name:
        with pytest.raises(CheckpointError, match="written with round_robin_gradients"):
            read_zero(newest)
    else:
        stored = read_zero(newest).weights
        assert all(torch.equal(stored[key].read(), value) for key, value in weights.items() if key in stored)


@pytest.mark.world(2)
@pytest.mark.long
def test_another_norm_than_that_of_the_arguments_is_named(tmp_path):
    """A config without gradient_clipping is clipped at DeepSpeed's default, whatever max_grad_norm says."""

    def as_rank():
        trainer = tiny_trainer(tmp_path / "out", ScalingCallback(), deepspeed=config(1, {}), max_grad_norm=0.25)
        trainer.train()

    codes = run_ranks(2, as_rank, log=tmp_path / "log", timeout_s=120)
    printed = (tmp_path / "log" / "rank-0.log").read_text()
    assert codes == [0, 0], printed[-3000:]
    assert "has no gradient_clipping, so that DeepSpeed clips gradients at 1" in printed
    assert "not at max_grad_norm=0.25" in printed
