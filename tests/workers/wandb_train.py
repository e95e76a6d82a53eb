"""Trains with reports to W&B, from scratch or from the given checkpoint.

python tests/workers/wandb_train.py [CHECKPOINT] [FLAGS THAT ARE IGNORED]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
import wandb
from tiny import tiny_trainer

from hfscale import ScalingMetricsCallback

x_axis = "tokens" if "--over_tokens" in sys.argv else "steps"
trainer = tiny_trainer(
    "out", ScalingMetricsCallback(wandb_x_axis=x_axis), report_to="wandb", save_strategy="steps", save_steps=2
)
trainer.train(resume_from_checkpoint=sys.argv[1] if len(sys.argv) > 1 and not sys.argv[1].startswith("--") else None)
wandb.finish()
