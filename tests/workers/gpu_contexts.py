"""Trains with saves in the background, and writes on which GPUs each rank has a context: gpu_contexts.py.

Another thread reads the flight recorder, as the watch for hangs does.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
import torch
from cuda_driver import open_contexts
from tiny import RandomTokens, tiny_arguments, tiny_model
from transformers import Trainer

from hfscale import ParallelArguments, ScalingCallback
from hfscale.health.diagnosis import positions
from hfscale.recipe.entrypoint import run
from hfscale.recipe.layout import set_up_parallelism


def main() -> None:
    torch.cuda.is_bf16_supported(including_emulation=False)  # as the recipes ask, before a rank has set its device
    args = tiny_arguments("out", use_cpu=False, save_strategy="steps", save_steps=2, max_steps=6)
    set_up_parallelism(ParallelArguments(), args)
    callback = ScalingCallback()
    Trainer(model=tiny_model(), args=args, train_dataset=RandomTokens(), callbacks=[callback]).train()
    with ThreadPoolExecutor(1) as other_thread:
        groups = len(other_thread.submit(positions).result())
    found = {
        "groups": groups > 0,
        "contexts": open_contexts(),
        "own": int(os.environ["LOCAL_RANK"]),
        "synchronous_because": callback.spot_checkpoint._saving.synchronous_because,
    }
    Path(f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


run(main)
