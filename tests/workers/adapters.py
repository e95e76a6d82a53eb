"""Two ranks train adapters, and resume with adapters of another seed; the test compares the losses.

accelerate launch … tests/workers/adapters.py KIND …
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
import torch.distributed as dist
from test_adapters import SAVED, adapter_model, losses
from tiny import RandomTokens, tiny_arguments
from transformers import Trainer

from hfscale import ParallelArguments, SpotCheckpointCallback, latest_checkpoint
from hfscale.errors import HfScaleError
from hfscale.recipe.entrypoint import run
from hfscale.recipe.layout import finish_on_cpu, set_up_parallelism


def train(folder, kind, *, seed, steps, resume=False):
    saving = {"save_strategy": "steps", "save_steps": SAVED, "lr_scheduler_type": "constant", "learning_rate": 0.05}
    arguments = tiny_arguments(folder, max_steps=steps, **saving)
    set_up_parallelism(ParallelArguments(), arguments)
    trainer = Trainer(
        model=adapter_model(kind, seed=seed),
        args=arguments,
        train_dataset=RandomTokens(),
        callbacks=[SpotCheckpointCallback()],
    )
    finish_on_cpu(trainer)
    trainer.train(resume_from_checkpoint=latest_checkpoint(folder) if resume else None)
    return losses(trainer)


def main():
    config = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if config:
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(Path(config).resolve())
    found = {}
    for number, kind in enumerate(sys.argv[1:]):
        try:
            complete = train(f"complete-{number}", kind, seed=1, steps=4)
            train(f"run-{number}", kind, seed=1, steps=SAVED)
            resumed = train(f"run-{number}", kind, seed=2, steps=4, resume=True)
            found[kind] = {"complete": complete, "resumed": resumed}
        except HfScaleError as error:
            found[kind] = {"error": str(error)}
    if dist.get_rank() == 0:
        Path("losses.json").write_text(json.dumps(found))


run(main)
