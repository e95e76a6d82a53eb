"""The waiting time that `ParallelTrainer` measures with stages of fixed duration, and that of each schedule's formula.

`pipeline_overhead` measures real layers on the machine at hand. Where ranks share cores, a rank that waits makes the
others faster, and the durations of micro-batches vary; a formula accounts for neither. Here a layer's forward, the
gradient of its input and the gradient of its weights each sleep for the same time, as if every rank had a device of
its own. The remaining difference between measurement and formula comes from the engine: messages, the order of
actions, and the clock itself.

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 --mixed_precision no \
        -m benchmarks.pipeline_bubble

is what `measure` runs.
"""

import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.launched import launch_benchmark, send_result
from hfscale.facts.schedules import SCHEDULES

RANKS = 4
MICRO_BATCHES = 8
STEPS, UNTIMED_STEPS = 5, 2
UNIT_S = 0.12
"""Duration of a rank's forward; messages and the layers' real work are short in comparison."""


def measure() -> dict[str, Any]:
    """Launch one process per pipeline rank."""
    bubbles = launch_benchmark("benchmarks.pipeline_bubble", processes=RANKS)
    summary = {f"{name}_over_formula": round(b["measured"] / b["formula"], 3) for name, b in bubbles.items()}
    return {"summary": summary, "ranks": RANKS, "micro_batches": MICRO_BATCHES, "bubble_fraction": bubbles}


class _SleepingIdentity(torch.autograd.Function):
    """The identity, which sleeps for a given time in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None, None


def _sleep_in_layer(layer: Any, hidden: torch.Tensor, seconds: float) -> torch.Tensor:
    """Return a layer's output after `seconds`; the gradient of its input and that of its weights take as long each.

    The two gradients are computed separately, as for a matrix product, so that a schedule can postpone one.
    """
    weight = _SleepingIdentity.apply(layer.own_time, 0.0, seconds)
    return _SleepingIdentity.apply(hidden, seconds, seconds) * weight


def worker() -> None:
    """Run in each process of the launch."""
    found = {}
    for schedule in SCHEDULES:
        with tempfile.TemporaryDirectory() as folder:
            found[schedule] = bubble(schedule, folder)
    if dist.get_rank() == 0:
        send_result(found)
    dist.barrier()
    dist.destroy_process_group()


def bubble(schedule: str, folder: str) -> dict[str, float]:
    """Measure the bubble fraction of a schedule with all ranks in one pipeline.

    Args:
        schedule (`str`): name of the schedule.
        folder (`str`): output folder of the run.

    Returns:
        The measured fraction and that of the formula.
    """
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
        layer.register_forward_hook(lambda layer, _, hidden: _sleep_in_layer(layer, hidden, UNIT_S / plan.per_rank))
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
