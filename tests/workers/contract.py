"""For each group of callbacks: an uninterrupted run, and one that is resumed half-way, in several processes.

accelerate launch --num_processes 2 tests/workers/contract.py SpotCheckpointCallback ScalingCallback+TraceCallback …
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
import torch.distributed as dist
from tiny import let_old_transformers_resume_on_cpu, logged, make_callback, tiny_tokenizer, tiny_trainer

SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "lr_scheduler_type": "constant"}

let_old_transformers_resume_on_cpu()


def trainer_of(group, output_dir, **arguments):
    callbacks = map(make_callback, group.split("+"))
    return tiny_trainer(output_dir, *callbacks, tokenizer=tiny_tokenizer(), **(SAVING | arguments))


for group in sys.argv[1:]:
    uninterrupted = trainer_of(group, f"{group}-uninterrupted")
    uninterrupted.train()
    trainer_of(group, group, max_steps=3).train()
    resumed = trainer_of(group, group)
    resumed.train(resume_from_checkpoint=f"{group}/checkpoint-3")
    if dist.get_rank() == 0:
        losses = {"uninterrupted": logged(uninterrupted, "loss"), "resumed": logged(resumed, "loss")}
        Path(f"{group}.json").write_text(json.dumps(losses))
dist.barrier()
dist.destroy_process_group()
