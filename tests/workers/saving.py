"""A training that saves at every step and continues from the newest verified checkpoint: saving.py STEPS."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tiny import tiny_trainer

from hfscale import ScalingCallback, latest_checkpoint
from hfscale.entrypoint import run
from hfscale.resume import is_finished


def main() -> None:
    trainer = tiny_trainer(
        "out", ScalingCallback(), save_strategy="steps", save_steps=1, save_total_limit=2, max_steps=int(sys.argv[1]),
        learning_rate=1e-3, dataloader_num_workers=0,
    )  # fmt: skip
    checkpoint = latest_checkpoint("out")
    if not is_finished(trainer, checkpoint):
        trainer.train(resume_from_checkpoint=checkpoint)


run(main)
