"""Two processes under Trainer; at step 30 the second one hangs, and the watchdog ends both.

A checkpoint is being written then; it is complete only after the watchdog has looked whether one is.

accelerate launch … tests/workers/health_training.py
"""

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
from tiny import logged, tiny_trainer
from transformers import TrainerCallback

from hfscale import CommHealthCallback, SpotCheckpointCallback
from hfscale.checkpoint.writer import CheckpointWriter
from hfscale.health.hang import HangWatchdog


class HangAtStep30(TrainerCallback):
    """Hangs like a storage that never answers.

    Only then the watchdogs get their short limit, so that a stall of a loaded machine before is no hang.
    """

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 30:
            health._watchdog.limits = replace(health._watchdog.limits, floor_s=2.0)
        if state.global_step == 30 and args.process_index == 1:
            time.sleep(1000)

    def on_log(self, args, state, control, **kwargs):
        if args.process_index == 0:
            Path("skews.json").write_text(json.dumps(logged(trainer, "scaling/straggler_skew")))


ends = threading.Event()


def is_saving(watchdog):
    ends.set()
    return looks(watchdog)


def write_at_the_end(writer, job):
    ends.wait()
    write(writer, job)


looks, HangWatchdog._is_saving_in_background = HangWatchdog._is_saving_in_background, is_saving
write, CheckpointWriter._run = CheckpointWriter._run, write_at_the_end
spot = SpotCheckpointCallback(cloud=None)
health = CommHealthCallback(hang_after_s=120.0, on_hang="abort", on_bad_training="stop")
saving = {"save_strategy": "steps", "save_steps": 28}
trainer = tiny_trainer("out", health, spot, HangAtStep30(), max_steps=60, logging_steps=10, **saving)
trainer.train()
