"""Trains for a long time, one rank on each of two nodes, and says when training has begun."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401

if __name__ == "__main__":
    from tiny import tiny_trainer
    from transformers import TrainerCallback

    from hfscale import CommHealthCallback

    class Slow(TrainerCallback):
        """Takes some time for each step."""

        def on_step_end(self, args, state, control, **kwargs):
            time.sleep(0.05)
            if state.global_step == 20:
                Path(f"trains-{args.process_index}").touch()

    health = CommHealthCallback(hang_after_s=5.0, on_hang="abort")
    tiny_trainer("out", health, Slow(), max_steps=100_000, logging_steps=1000).train()
