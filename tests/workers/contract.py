"""For each callback named: an uninterrupted run, and one that is resumed half-way, in several processes.

accelerate launch --num_processes 2 tests/workers/contract.py ScalingCallback …
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
for name in sys.argv[1:]:
    uninterrupted = tiny_trainer(f"{name}-uninterrupted", make_callback(name), tokenizer=tiny_tokenizer(), **SAVING)
    uninterrupted.train()
    tiny_trainer(name, make_callback(name), tokenizer=tiny_tokenizer(), **(SAVING | {"max_steps": 3})).train()
    resumed = tiny_trainer(name, make_callback(name), tokenizer=tiny_tokenizer(), **SAVING)
    resumed.train(resume_from_checkpoint=f"{name}/checkpoint-3")
    if dist.get_rank() == 0:
        losses = {"uninterrupted": logged(uninterrupted, "loss"), "resumed": logged(resumed, "loss")}
        Path(f"{name}.json").write_text(json.dumps(losses))
dist.barrier()
dist.destroy_process_group()
