"""Trains on two ranks, and checks the contract of the capture of the strategy (tests/capture_contract.py).

accelerate launch … tests/workers/captures.py
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
from capture_contract import SAVED, WRITTEN, ObeysContract
from tiny import RandomTokens, tiny_arguments, tiny_model
from transformers import Trainer

from hfscale import ParallelArguments, SpotCheckpointCallback
from hfscale.recipe.entrypoint import run
from hfscale.recipe.layout import finish_on_cpu, set_up_parallelism

ARGUMENTS = {"save_strategy": "steps", "save_steps": SAVED, "max_steps": WRITTEN + 1, "lr_scheduler_type": "linear"}


def main():
    config = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if config:
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(Path(config).resolve())
    arguments = tiny_arguments("out", **ARGUMENTS)
    set_up_parallelism(ParallelArguments(), arguments)
    contract = ObeysContract(Path("written"))
    spot = SpotCheckpointCallback(asynchronous=False, every_minutes=None)
    trainer = Trainer(model=tiny_model(), args=arguments, train_dataset=RandomTokens(), callbacks=[spot, contract])
    finish_on_cpu(trainer)
    trainer.train()
    if trainer.is_world_process_zero():
        Path("files.json").write_text(json.dumps(contract.files))


run(main)
