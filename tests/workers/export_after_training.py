"""Trains a tiny model, waits for a file, then saves the model: export_after_training.py OUTPUT_DIR FILE."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tiny import tiny_trainer

from hfscale import ScalingCallback

output_dir, file = map(Path, sys.argv[1:])
trainer = tiny_trainer(output_dir, ScalingCallback(), max_steps=3)
trainer.train()
while not file.exists():
    time.sleep(0.05)
trainer.save_model(output_dir / "exported")
