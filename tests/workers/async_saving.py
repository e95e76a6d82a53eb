"""Two ranks save asynchronously and as Trainer does; the test compares the files. Then a save fails on rank 1.

accelerate launch … tests/workers/async_saving.py
"""

import json
import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
import pytest
import torch.distributed as dist
from test_checkpoint_writer import CallAtStep, SaveAtSteps, WritesMore, lora_model, paused_saves
from test_spot_checkpoint import Pause
from tiny import RandomTokens, tiny_arguments, tiny_model
from transformers import Trainer

from hfscale import ParallelArguments, SpotCheckpointCallback
from hfscale.checkpoint import writer
from hfscale.errors import StorageError
from hfscale.recipe.entrypoint import run
from hfscale.recipe.layout import finish_on_cpu, set_up_parallelism

PLAIN = {"save_strategy": "steps", "save_steps": 100, "logging_strategy": "no", "lr_scheduler_type": "linear"}


def train(folder, *callbacks, kind=Trainer, model=None, asynchronous=True, **overrides):
    """Train in a folder of its own, so that `output_dir`, which is pickled with the arguments, is always the same."""
    Path(folder).mkdir(exist_ok=True)
    previous = Path.cwd()
    os.chdir(folder)
    spot = SpotCheckpointCallback(asynchronous=asynchronous)
    try:
        arguments = tiny_arguments("run", **(PLAIN | {"max_steps": 6} | overrides))
        set_up_parallelism(ParallelArguments(), arguments)
        trainer = kind(
            model=model or tiny_model(), args=arguments, train_dataset=RandomTokens(), callbacks=[spot, *callbacks]
        )
        finish_on_cpu(trainer)
        trainer.train()
    finally:
        os.chdir(previous)
    return trainer, spot


def fail_on_rank_1(folder):
    """Train with a file-size limit on rank 1 from step 3 on; return the message of the error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit():
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))

    message = None
    try:
        train(folder, SaveAtSteps(4), CallAtStep(3, limit), Pause(0.05), max_steps=200)
    except StorageError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return message


def defect_on_rank_1(folder):
    """Train with code that fails on rank 1 while its part of the checkpoint is saved; return each rank's error."""
    with pytest.MonkeyPatch().context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(writer, "_record", lambda folder, names: folder.nothing)
        try:
            train(folder, SaveAtSteps(2), Pause(0.05), max_steps=200)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


def main():
    models = {"full": tiny_model, "lora": lora_model}
    config = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if config:
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(Path(config).resolve())
        models.pop("lora")
    modes = {}
    for kind, make in models.items():
        for asynchronous in (False, True):
            folder = f"{kind}-{asynchronous}"
            with paused_saves(pytest.MonkeyPatch()) as (go, _):  # asynchronous saves write from step 5 on
                release = CallAtStep(5, go.set)
                if not asynchronous:
                    go.set()
                _, spot = train(folder, SaveAtSteps(2), release, model=make(), asynchronous=asynchronous)
            modes[folder] = spot._saving.synchronous_because
    train("more", SaveAtSteps(2, 4), kind=WritesMore)
    message = fail_on_rank_1("failing")
    found = {"modes": modes, "failure": message, "defect": defect_on_rank_1("defect")}
    Path(f"rank{dist.get_rank()}.json").write_text(json.dumps(found))


run(main)
