"""Trains with each method of compressing DDP's gradients; writes losses and whether the ranks have equal weights.

accelerate launch --num_processes 2 tests/workers/compression.py
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
import torch
import torch.distributed as dist
from tiny import logged, tiny_trainer

from hfscale.core.collectives import TRAINING
from hfscale.errors import UsageError
from hfscale.recipe.compression import TopKState, compress_gradients, topk_hook
from hfscale.recipe.entrypoint import run


class Bucket:
    """A bucket with the interface that DDP passes to a hook."""

    def __init__(self, gradient):
        self.gradient = gradient

    def buffer(self):
        return self.gradient

    def index(self):
        return 0

    def is_last(self):
        return True


def topk_sums(steps):
    """Return the sums over `steps` steps of the received and of this rank's own gradients, and its residual."""
    state = TopKState(fraction=0.1, start_step=1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    arrived, given = torch.zeros(50), torch.zeros(50)
    sparse = []
    for _ in range(steps):
        gradient = torch.randn(50, generator=generator)
        given += gradient
        result = topk_hook(state, Bucket(gradient.clone())).wait()
        arrived += result
        sparse.append(int((result != 0).sum()))
    return {
        "arrived": arrived.tolist(),
        "kept": state.residuals[0].tolist(),
        "given": given.tolist(),
        "nonzero": sparse,
    }


def main():
    results = {}
    for method in ("none", "fp16", "topk"):
        trainer = tiny_trainer("out", per_device_train_batch_size=2, max_steps=12, learning_rate=1e-2)
        compress_gradients(trainer, method, powersgd_rank=2, topk_fraction=0.1, start_step=3)
        trainer.train()
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).double()
        sums = TRAINING.gather("weights", [float(weights.sum()), float(weights.square().sum())])
        results[method] = {"loss": logged(trainer, "loss"), "agree": sums[0] == sums[1]}
    for method in ("bf16", "powersgd"):
        try:
            compress_gradients(tiny_trainer("out"), method, powersgd_rank=1, topk_fraction=1, start_step=1)
        except UsageError as error:
            results[method] = str(error)
    topk = topk_sums(20)
    rows = {name: TRAINING.gather(name, topk[name]) for name in ("given", "kept")}
    if dist.get_rank() == 0:
        results["sent"] = topk | rows
        Path("results.json").write_text(json.dumps(results))


run(main)
