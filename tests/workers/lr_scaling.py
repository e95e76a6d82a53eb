"""Trains from scratch, resumed, and resumed with another global batch; writes the learning rates used.

accelerate launch --num_processes 2 tests/workers/lr_scaling.py hf|deepspeed_optimizer|deepspeed_both
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
import torch.distributed as dist
from tiny import let_old_transformers_resume_on_cpu, tiny_trainer
from transformers import TrainerCallback

from hfscale import LRScalingCallback

let_old_transformers_resume_on_cpu()
case = sys.argv[1]
WARMUP = 2


class RatesInUse(TrainerCallback):
    """Records the optimizer's learning rate when a step begins: DeepSpeed steps before `on_pre_optimizer_step`."""

    def __init__(self):
        self.rates = []

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        self.rates.append(optimizer.param_groups[0]["lr"])


def deepspeed_config():
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    }
    if case == "deepspeed_both":
        config["scheduler"] = {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "warmup_type": "linear",
            },
        }
    return config


def run(output_dir, resume=None, **overrides):
    arguments = {
        "per_device_train_batch_size": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": WARMUP,
    }
    if case.startswith("deepspeed"):
        arguments["deepspeed"] = deepspeed_config()
    scaling, rates = LRScalingCallback(base_global_batch_size=1), RatesInUse()
    trainer = tiny_trainer(output_dir, scaling, rates, **(arguments | overrides))
    trainer.train(resume_from_checkpoint=resume)
    return rates.rates, scaling.scaling.factor


fresh, factor = run("fresh")
resumed, _ = run("resumed", resume="fresh/checkpoint-2")
changed, _ = run("changed", resume="fresh/checkpoint-2", gradient_accumulation_steps=4)
if dist.get_rank() == 0:
    result = {"fresh": fresh, "resumed": resumed, "changed": changed, "factor": factor}
    Path(f"{case}.json").write_text(json.dumps(result))
dist.barrier()
dist.destroy_process_group()
