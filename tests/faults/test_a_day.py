"""A day of logs and saves on two ranks: nothing that a process or the store of the ranks holds grows with the steps.

A log every 10 s and a save every 5 minutes are 8,640 logs and 288 saves; here the steps follow each other at once.
HFSCALE_DAY_LOGS is another number of logs, and HFSCALE_RESULTS a file for what was measured (`results.py`).
"""

import json
import os
import threading

import psutil
import pytest
import torch.distributed as dist
from forked_ranks import run_ranks
from results import keep_result
from tiny import tiny_trainer
from transformers import TrainerCallback

from hfscale import ScalingCallback
from hfscale.checkpoint.preemption.stop import PreemptionStop
from hfscale.core.collectives import DEBUG_VARIABLE

pytestmark = [pytest.mark.faults, pytest.mark.world(2), pytest.mark.timeout(3600)]
LOGS = int(os.environ.get("HFSCALE_DAY_LOGS", "8640"))
LOGS_PER_SAVE = 30
SAMPLES = 24
WARM_UP = SAMPLES // 4
"""Samples that are left out: buffers and caches are made there."""
MOST_MORE = {"store_keys": 0, "threads": 0, "files": 0, "memory_mb": 24.0}
"""How much each measure may grow between the end of the warm-up and the end of the day."""


class Measure(TrainerCallback):
    """Notes what this process holds, and forgets Trainer's own log, which keeps each entry for ever."""

    def __init__(self):
        self.samples = []

    def on_log(self, args, state, control, **kwargs):
        del state.log_history[:-1]

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % (LOGS // SAMPLES) == LOGS // SAMPLES // 2:  # between two saves
            process = psutil.Process()
            self.samples.append(
                {
                    "store_keys": dist.distributed_c10d._get_default_store().num_keys(),
                    "threads": threading.active_count(),
                    "files": process.num_fds(),
                    "memory_mb": round(process.memory_info().rss / 1e6, 1),
                }
            )


def train_a_day(folder):
    PreemptionStop.exchange_every_s = 0.0  # a run votes every few seconds: at each of these logs
    measure = Measure()
    trainer = tiny_trainer(
        folder / "run",
        ScalingCallback(),
        measure,
        max_steps=LOGS,
        save_strategy="steps",
        save_steps=LOGS_PER_SAVE,
        save_total_limit=2,
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer.train()
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(measure.samples))


def test_a_day_of_logs_and_saves_leaves_the_processes_as_they_were(tmp_path):
    env = {DEBUG_VARIABLE: "0"}  # the names of exchanges are compared through the store
    assert run_ranks(2, train_a_day, tmp_path, log=tmp_path / "logs", env=env, timeout_s=3000) == [0, 0]
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 2
    for rank in (0, 1):
        samples = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert len(samples) == SAMPLES
        warm, last = samples[WARM_UP], samples[-1]
        keep_result(f"rank {rank}", {"logs": LOGS, "saves": LOGS // LOGS_PER_SAVE, "warm": warm, "last": last})
        more = {name: max(sample[name] for sample in samples[WARM_UP:]) - warm[name] for name in warm}
        assert all(more[name] <= most for name, most in MOST_MORE.items()), (rank, samples)
