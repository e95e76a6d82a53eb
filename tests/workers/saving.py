"""A training that saves at every step and continues from the newest verified checkpoint."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tiny import tiny_trainer

from hfscale import ScalingCallback, latest_checkpoint

trainer = tiny_trainer(
    "out", ScalingCallback(), save_strategy="steps", save_steps=1, save_total_limit=2, max_steps=60, learning_rate=1e-3
)
trainer.train(resume_from_checkpoint=latest_checkpoint("out"))
