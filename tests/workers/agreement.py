"""Exchanges values, then trains with a save interval of minutes that is overdue on rank 1 and not on rank 0."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
import torch.distributed as dist
from test_spot_checkpoint import Pause
from tiny import tiny_trainer
from transformers import TrainerCallback

from hfscale import SpotCheckpointCallback
from hfscale.core.collectives import TRAINING


class SavedSteps(TrainerCallback):
    """Records the steps that are saved."""

    def __init__(self):
        self.steps = []

    def on_save(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


arguments = {"save_strategy": "steps", "save_steps": 1000, "max_steps": 40}
spot = SpotCheckpointCallback(every_steps=1000)
saved = SavedSteps()
trainer = tiny_trainer("out", spot, Pause(0.02), saved, **arguments)
rank = dist.get_rank()
mine = [3.0, 6.0] if rank == 1 else [0.0, 7.0]
values = {"max": TRAINING.maximum("max", mine), "rows": TRAINING.gather_numbers("rows", mine).tolist()}
if rank == 0:
    Path("values.json").write_text(json.dumps(values))
spot.cadence.every_minutes = 0.2 / 60 if rank == 1 else 10.0
trainer.train()
Path(f"saved_{rank}.json").write_text(json.dumps(saved.steps))
dist.barrier()
dist.destroy_process_group()
