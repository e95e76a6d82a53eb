"""Measures exposed communication and the noise scale on two processes: DDP with a Trainer, FSDP2 with a loop.

accelerate launch --num_processes 2 tests/workers/exchange.py [cuda | wide]
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
import torch
import torch.distributed as dist
from test_noise_scale import KNOWN, MeanOfInputs, Rows, noise_trainer
from tiny import logged
from torch import nn
from torch.distributed.fsdp import fully_shard

from hfscale.core import distributed
from hfscale.core.collectives import TRAINING
from hfscale.metrics.communication_profile import SampledSteps
from hfscale.metrics.meters.communication import CommunicationMeter
from hfscale.metrics.meters.noise_scale import NoiseScale, ReduceScatterProbe, Sample
from hfscale.metrics.triage import TriageInput, triage
from hfscale.recipe.entrypoint import run
from hfscale.trainer.strategies.tensors import sharded_modules

DEVICE = "cuda" if "cuda" in sys.argv else "cpu"


class Wide(nn.Module):
    """A model with many parameters and little computation, so that no computation hides the communication."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1536, 1536) for _ in range(4)))

    def forward(self, inputs_embeds, labels):
        return {"loss": self.layers(inputs_embeds.mean().expand(1, 1536)).square().mean()}


def under_ddp():
    trainer = noise_trainer(
        "ddp", gradient_accumulation_steps=2, max_steps=60, logging_steps=1, use_cpu=DEVICE == "cpu"
    )
    trainer.train()
    known = {"noise_scale": logged(trainer, "scaling/noise_scale")[-1]}
    return known | {"comm_fraction": logged(trainer, "scaling/comm_fraction")[-1]}


def wide_ddp():
    trainer = noise_trainer("wide", model=Wide(), noise_scale=False, max_steps=8, logging_steps=4)
    trainer.train()
    meter = next(c for c in trainer.callback_handler.callbacks if hasattr(c, "_communication"))._communication
    assert isinstance(meter, CommunicationMeter)
    share = logged(trainer, "scaling/comm_fraction")[-1]
    found = triage(
        TriageInput(
            efficiency=0.5, comm_fraction=share, comm_over_backward=meter.comm_over_backward, tokens_per_gpu=16
        )
    )
    return {"comm_fraction": share, "comm_over_backward": meter.comm_over_backward, "cause": found.check}


def under_fsdp2():
    model = MeanOfInputs().to(DEVICE)
    fully_shard(model)
    probe = ReduceScatterProbe(sharded_modules(model))
    sampled = SampledSteps(torch.device(DEVICE), first=3)
    scale = NoiseScale({})
    rows = Rows(2 * 2 * 4 * 60)
    batch = 4
    parts = 2
    position = distributed.rank()
    for _ in range(60):
        sampled.step_begin(parts)
        probe.open()
        for part in range(parts):
            model.set_requires_gradient_sync(part == parts - 1)
            items = [rows[(position + 2 * i) % len(rows)]["inputs_embeds"] for i in range(batch)]
            position += 2 * batch
            (model(torch.stack(items).to(DEVICE), None)["loss"] / parts).backward()
            if part < parts - 1:
                sampled.substep_end()
        probe.close()
        sampled.step_end()
        total, exchanges = probe.read(parts)
        big = sum(row[0] for row in TRAINING.gather("big", [float(model.w.grad.to_local().square().sum())]))
        small = [row[0] for row in TRAINING.gather("small", [exchanges * total])]
        scale.add(
            Sample(
                small_square=sum(small) / 2,
                big_square=big,
                small_batch=batch * parts / exchanges,
                big_batch=2 * batch * parts,
            )
        )
        model.w.grad = None
    return {"noise_scale": scale.value(), "comm_fraction": sampled.last.seconds / sampled.last.step_s}


def main():
    if "wide" in sys.argv:
        found = wide_ddp()
    else:
        found = {"known_noise_scale": KNOWN, "ddp": under_ddp(), "fsdp2": under_fsdp2()}
    if dist.get_rank() == 0:
        Path("found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run(main)
