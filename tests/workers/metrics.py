"""Trains in two processes, of which the second reads its batches slowly."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
import torch.distributed as dist
from test_scaling_metrics import SlowTokens
from tiny import tiny_trainer

from hfscale import CommHealthCallback, ScalingMetricsCallback

trainer = tiny_trainer("out", ScalingMetricsCallback(), CommHealthCallback(), max_steps=6, logging_steps=2)
trainer.train_dataset = SlowTokens(64, 0.1 if dist.get_rank() == 1 else 0.0)
trainer.train()
dist.barrier()
dist.destroy_process_group()
