"""The wait that `ParallelTrainer` measures, beside the formula of each schedule, where every stage takes a set time.

`pipeline_overhead` measures real layers, on whatever machine it runs. Where ranks share cores, one that waits makes
the others faster, and no two micro-batches take as long; a formula knows neither. Here a layer's forward, the gradient
of its input and that of its weights sleep for the same time each, as if a device of its own did them. What is left
between measurement and formula is the engine's: messages, the order of actions, and the clock itself.

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 -m benchmarks.pipeline_bubble

is what `measure` runs.
"""

import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.launched import launched, tell

RANKS = 4
MICRO_BATCHES = 8
STEPS, UNTIMED_STEPS = 5, 2
UNIT_S = 0.12
"""Of a rank's forward, beside which messages and the layers' real work are short."""
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV")


def measure() -> dict[str, Any]:
    """Launch one process per pipeline rank."""
    bubbles = launched("benchmarks.pipeline_bubble", processes=RANKS)
    summary = {f"{name}_over_formula": round(b["measured"] / b["formula"], 3) for name, b in bubbles.items()}
    return {"summary": summary, "ranks": RANKS, "micro_batches": MICRO_BATCHES, "bubble_fraction": bubbles}


class _Takes(torch.autograd.Function):
    """The identity, that takes so many seconds each way."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None, None


def _take(layer: Any, hidden: torch.Tensor, seconds: float) -> torch.Tensor:
    """What a layer gives, after so many seconds; the gradient of its input takes as many, and that of its weights.

    The two are apart, as in a matrix product, so that a schedule can put one off.
    """
    weight = _Takes.apply(layer.own_time, 0.0, seconds)
    return _Takes.apply(hidden, seconds, seconds) * weight


def worker() -> None:
    """One process of a launch."""
    found = {}
    for schedule in SCHEDULES:
        with tempfile.TemporaryDirectory() as folder:
            found[schedule] = bubble(schedule, folder)
    if dist.get_rank() == 0:
        tell(found)
    dist.barrier()
    dist.destroy_process_group()


def bubble(schedule: str, folder: str) -> dict[str, float]:
    """What is measured and what the formula says, with the ranks that there are, all in one pipeline."""
    from transformers import LlamaConfig, TrainingArguments

    from hfscale import ParallelArguments, ParallelTrainer
    from hfscale.parallel.stages import StagePlan
    from hfscale.parallel.weights import build_model

    torch.set_num_threads(1)
    args = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=MICRO_BATCHES,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
    )
    plan = StagePlan(schedule=schedule, pp=args.world_size)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=plan.stages,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = build_model(config, seed=0, dtype=torch.float32)
    for layer in model.model.layers:
        layer.own_time = torch.nn.Parameter(torch.ones(config.hidden_size))
        layer.register_forward_hook(lambda layer, _, hidden: _take(layer, hidden, UNIT_S / plan.per_rank))
    rows = torch.randint(3, 32, (STEPS * MICRO_BATCHES, 8), generator=torch.Generator().manual_seed(0))
    trainer = ParallelTrainer(
        model=model,
        args=args,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        parallel=ParallelArguments(pp_size=plan.pp, pipeline_schedule=schedule),
    )
    trainer.train()
    waits = [e["scaling/bubble_fraction"] for e in trainer.state.log_history if "scaling/bubble_fraction" in e]
    return {
        "measured": round(statistics.median(waits[UNTIMED_STEPS:]), 4),
        "formula": round(plan.bubble_fraction(MICRO_BATCHES), 4),
    }


if __name__ == "__main__":
    worker()
