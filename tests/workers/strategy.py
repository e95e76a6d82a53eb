"""Two steps with ScalingCallback and the training arguments given as JSON.

accelerate launch … tests/workers/strategy.py '{"use_cpu": false}'
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
import torch.distributed as dist
from tiny import tiny_trainer

from hfscale import ScalingCallback
from hfscale.recipe.entrypoint import run

arguments = json.loads(sys.argv[1])
resume_on_rank_0 = arguments.pop("resume_on_rank_0", False)
keep_bare = arguments.pop("keep_bare", False)
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}


def main():
    resume = None
    if resume_on_rank_0:
        tiny_trainer("first", **SAVING).train()
        resume = "first/checkpoint-2" if dist.get_rank() == 0 else None
        arguments["max_steps"] = 4
    trainer = tiny_trainer("out", ScalingCallback(), **(SAVING | arguments))
    if keep_bare:
        trainer.is_distributed_loading_by_transformers = True  # the Trainer then leaves the wrapping to the model
    trainer.train(resume_from_checkpoint=resume)


run(main)
