"""Trains with a save at every step, and resumes from the newest verified checkpoint: saving.py STEPS [KIND]."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
from tiny import RandomTokens, tiny_arguments, tiny_model
from transformers import Trainer

from hfscale import ParallelArguments, ScalingCallback, latest_checkpoint
from hfscale.recipe.entrypoint import run
from hfscale.recipe.layout import set_up_parallelism
from hfscale.recipe.resume import is_finished


def main() -> None:
    args = tiny_arguments(
        "out",
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        max_steps=int(sys.argv[1]),
        learning_rate=1e-3,
        dataloader_num_workers=0,
    )
    set_up_parallelism(ParallelArguments(), args)  # without it accelerate runs no FSDP on a CPU
    kind = Trainer
    if sys.argv[2:] == ["WritesMore"]:
        from test_checkpoint_writer import WritesMore

        kind = WritesMore
    trainer = kind(model=tiny_model(), args=args, train_dataset=RandomTokens(), callbacks=[ScalingCallback()])
    checkpoint = latest_checkpoint("out")
    if not is_finished(trainer, checkpoint):
        trainer.train(resume_from_checkpoint=checkpoint)


run(main)
