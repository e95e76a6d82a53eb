"""The overhead of `ParallelTrainer` over a bare loop with torch.distributed.pipelining, and how long its ranks wait.

There are two and then four pipeline ranks with equal stages and the schedule 1F1B. Both variants run alternately in
the same processes, with the same layers, stages, micro-batches, optimizer and clipping, and read the loss every step.
A pair is two consecutive runs, one of each variant; the order within a pair alternates. The wait is
`scaling/bubble_fraction`, compared with the schedule's formula.

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 --mixed_precision no \
        -m benchmarks.pipeline_overhead

is what `measure` runs; each process is a stage.
"""

import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.launched import launch_benchmark, send_result

PAIRS = 20
RANKS = (2, 4)
STEPS = 6
UNTIMED_STEPS = 2
MICRO_BATCHES = 8
ROWS = 4  # a micro-batch takes 100 ms or more, so that a message between two processes is short in comparison
LENGTH = 128
VOCAB = 64  # so small that the head, which only the last stage has, costs almost nothing


def measure() -> dict[str, Any]:
    """Launch two processes, then four."""
    summary, runs = {}, {}
    for ranks in RANKS:
        result = launch_benchmark("benchmarks.pipeline_overhead", processes=ranks)
        paces = sorted(1 / ratio for ratio in result["step_s_over_bare"])
        summary[f"{ranks} stages"] = {
            "pairs": len(paces),
            "steps_per_s_over_bare": round(statistics.median(paces), 4),
            "quartiles": [round(pace, 4) for pace in (paces[len(paces) // 4], paces[-1 - len(paces) // 4])],
            "bubble_measured": result["bubble_measured"],
            "bubble_formula": result["bubble_formula"],
            "first_step_s": result["first_step_s"],
        }
        runs[f"{ranks} stages"] = result
    return {"summary": summary, "runs": runs}


def worker() -> None:
    """Run in each process of the launch."""
    from transformers import LlamaConfig, TrainingArguments

    from hfscale.parallel.stages import StagePlan

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            save_strategy="no",
            disable_tqdm=True,
            gradient_accumulation_steps=MICRO_BATCHES,
            lr_scheduler_type="constant",
            optim="adamw_torch",
            report_to="none",
            logging_steps=1,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=False,
        )
        rows = torch.randint(
            3, VOCAB, (STEPS * MICRO_BATCHES * ROWS, LENGTH), generator=torch.Generator().manual_seed(0)
        )
        ratios, bubbles, first = [], [], []
        for pair in range(PAIRS + 1):  # the first pair warms up
            runs = {}
            for name in ("trainer", "bare") if pair % 2 else ("bare", "trainer"):
                dist.barrier()
                runs[name] = _trainer(args, rows, config) if name == "trainer" else _bare(args, rows, config)
            if pair:
                ratios.append(round(runs["trainer"]["step_s"] / runs["bare"]["step_s"], 4))
                bubbles.append(runs["trainer"]["bubble"])
                first.append(runs["trainer"]["first_s"])
        if dist.get_rank() == 0:
            result = {
                "step_s_over_bare": ratios,
                "bubble_measured": round(statistics.median(bubbles), 4),
                "bubble_formula": round(StagePlan(pp=dist.get_world_size()).bubble_fraction(MICRO_BATCHES), 4),
                "first_step_s": round(statistics.median(first), 3),
                "step_s": round(runs["trainer"]["step_s"], 3),
            }
            send_result(result)
        dist.barrier()
        dist.destroy_process_group()


def _trainer(args: Any, rows: torch.Tensor, config: Any) -> dict[str, float]:
    from transformers import TrainerCallback

    from hfscale import ParallelArguments, ParallelTrainer
    from hfscale.parallel.weights import build_model

    class Stopwatch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:
                self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                self.first_s = time.perf_counter() - self.started
            if state.global_step == UNTIMED_STEPS:
                self.timed_from = time.perf_counter()
            if state.global_step == STEPS:
                self.step_s = (time.perf_counter() - self.timed_from) / (STEPS - UNTIMED_STEPS)

    watch = Stopwatch()
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = ParallelTrainer(
        model=build_model(config, seed=0, dtype=torch.float32),
        args=args,
        train_dataset=data,
        callbacks=[watch],
        parallel=ParallelArguments(pp_size=dist.get_world_size()),
    )
    trainer.train()
    waits = [e["scaling/bubble_fraction"] for e in trainer.state.log_history if "scaling/bubble_fraction" in e]
    return {"step_s": watch.step_s, "first_s": watch.first_s, "bubble": statistics.median(waits[UNTIMED_STEPS:])}


class _BareStage(nn.Module):
    """One of equal parts of a Llama model, without hfscale."""

    def __init__(self, model: Any, rank: int, ranks: int) -> None:
        super().__init__()
        count = len(model.model.layers) // ranks
        self.embedding = model.model.embed_tokens if rank == 0 else None
        self.layers = model.model.layers[rank * count : (rank + 1) * count]
        self.rotary = model.model.rotary_emb
        self.tail = nn.Sequential(model.model.norm, model.lm_head) if rank == ranks - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x) if self.embedding is not None else x
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotary = self.rotary(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotary, position_ids=positions, attention_mask=None)
        return hidden if self.tail is None else self.tail(hidden)


def _bare(args: Any, rows: torch.Tensor, config: Any) -> dict[str, float]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.utils.data import DataLoader

    from hfscale.parallel.weights import build_model

    rank, ranks, device = dist.get_rank(), dist.get_world_size(), args.device
    stage = _BareStage(build_model(config, seed=0, dtype=torch.float32), rank, ranks).to(device).train()
    optimizer = torch.optim.AdamW(stage.parameters(), lr=args.learning_rate, weight_decay=0.0)
    items = MICRO_BATCHES * ROWS * (LENGTH - 1)

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (
            nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / items
        )

    schedule = Schedule1F1B(PipelineStage(stage, rank, ranks, device), MICRO_BATCHES, loss_of, scale_grads=False)
    for step, batch in enumerate(DataLoader(rows, batch_size=MICRO_BATCHES * ROWS, shuffle=True), start=1):
        losses: list[torch.Tensor] = []
        batch = batch.to(device)
        if rank == 0:
            schedule.step(batch)
        elif rank == ranks - 1:
            schedule.step(target=batch, losses=losses, return_outputs=False)
        else:
            schedule.step()
        norm = torch.nn.utils.get_total_norm([p.grad for p in stage.parameters()]) ** 2
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=device)
        dist.all_reduce(norm)
        dist.all_reduce(loss)
        torch.nn.utils.clip_grads_with_norm_(stage.parameters(), 1.0, norm.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        if step == UNTIMED_STEPS:
            timed_from = time.perf_counter()
        if step == STEPS:
            break
    return {"step_s": (time.perf_counter() - timed_from) / (STEPS - UNTIMED_STEPS)}


if __name__ == "__main__":
    worker()
