"""Writes one file per rank with the memory used until training begins, in MiB above the memory for imports.

accelerate launch --config_file accelerate_configs/fsdp2.yaml tests/workers/loading.py FOLDER_OF_A_MODEL
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
import torch.distributed as dist
from tiny import RandomTokens, tiny_arguments
from transformers import AutoConfig, Trainer, TrainerCallback

from hfscale import ParallelArguments
from hfscale.recipe.entrypoint import run
from hfscale.recipe.layout import set_up_parallelism
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.recipe.models import load_weights


def peak_mib():
    """Return the peak memory of this process in MiB."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


class StopAtBegin(TrainerCallback):
    """Writes the file and stops training before its first step."""

    def on_train_begin(self, args, state, control, **kwargs):
        Path(f"rank-{dist.get_rank()}").write_text(str(peak_mib() - imports_mib))
        control.should_training_stop = True


def main():
    global imports_mib
    args = tiny_arguments("out", max_steps=1, optim="sgd", per_device_train_batch_size=1)
    set_up_parallelism(ParallelArguments(), args)
    imports_mib = peak_mib()
    config = AutoConfig.from_pretrained(sys.argv[1])
    model = load_weights(ModelArguments(model_name_or_path=sys.argv[1]), config, args)
    Trainer(model=model, args=args, train_dataset=RandomTokens(), callbacks=[StopAtBegin()]).train()


run(main)
