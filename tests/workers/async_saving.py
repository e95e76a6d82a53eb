"""Two ranks save beside the training and in the Trainer's own way; what they wrote is compared by the test.

accelerate launch … tests/workers/async_saving.py FOLDER: with and without `asynchronous`, then a failure on rank 1.
"""

import json
import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch.distributed as dist
from test_checkpoint_writer import At, Save, held, lora_model
from test_spot_checkpoint import Pause
from tiny import RandomTokens, tiny_arguments, tiny_model
from transformers import Trainer

from hfscale import ParallelArguments, SpotCheckpointCallback
from hfscale.errors import StorageError
from hfscale.recipe.entrypoint import run
from hfscale.recipe.layout import finish_on_cpu, set_up_parallelism

PLAIN = {"save_strategy": "steps", "save_steps": 100, "logging_strategy": "no", "lr_scheduler_type": "linear"}


def train(folder, *callbacks, model=None, asynchronous=True, **overrides):
    """In a folder of its own, so that `output_dir`, which is pickled with the arguments, is the same."""
    Path(folder).mkdir(exist_ok=True)
    here = Path.cwd()
    os.chdir(folder)
    spot = SpotCheckpointCallback(asynchronous=asynchronous)
    try:
        arguments = tiny_arguments("run", **(PLAIN | {"max_steps": 6} | overrides))
        set_up_parallelism(ParallelArguments(), arguments)
        trainer = Trainer(
            model=model or tiny_model(), args=arguments, train_dataset=RandomTokens(), callbacks=[spot, *callbacks]
        )
        finish_on_cpu(trainer)
        trainer.train()
    finally:
        os.chdir(here)
    return trainer, spot


def fail_on_rank_1(folder):
    """A file-size limit on rank 1 alone from step 3 on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit():
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))

    message, step = None, At(3, limit)
    try:
        train(folder, Save(4), step, Pause(0.05), max_steps=200)
    except StorageError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return message


def main():
    models = {"whole": tiny_model, "lora": lora_model}
    config = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if config:
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(Path(config).resolve())
        models.pop("lora")
    modes = {}
    for kind, make in models.items():
        for asynchronous in (False, True):
            folder = f"{kind}-{asynchronous}"
            with held(pytest.MonkeyPatch()) as (go, _):  # what is written beside the training is, from step 5 on
                late = At(5, go.set)
                if not asynchronous:
                    go.set()
                _, spot = train(folder, Save(2), late, model=make(), asynchronous=asynchronous)
            modes[folder] = spot._saving.synchronous_because
    message = fail_on_rank_1("failing")
    Path(f"rank{dist.get_rank()}.json").write_text(json.dumps({"modes": modes, "failure": message}))


run(main)
