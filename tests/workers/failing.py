"""A training that raises after its third step, with nothing to catch it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from test_spot_checkpoint import Interrupt
from tiny import tiny_trainer

from hfscale import SpotCheckpointCallback

tiny_trainer("out", SpotCheckpointCallback(), Interrupt(3), save_strategy="steps", save_steps=2).train()
