"""A training that raises after its third step; with the argument `again` the error is caught and training resumed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
from test_spot_checkpoint import Interrupt
from tiny import tiny_trainer

from hfscale import SpotCheckpointCallback

arguments = {"save_strategy": "steps", "save_steps": 2}
try:
    tiny_trainer("out", SpotCheckpointCallback(), Interrupt(3), **arguments).train()
except RuntimeError:
    if sys.argv[1:] != ["again"]:
        raise
    tiny_trainer("out", SpotCheckpointCallback(), **arguments).train(resume_from_checkpoint=True)
