"""What a recipe's Trainer, with all callbacks, adds to a bare `accelerate` loop under the same strategy.

Both take turns in the same processes: same model, same batches, same optimizer, gradient clipping, a log every ten
steps. A pair is two turns next to each other, and the order within a pair alternates.

    accelerate launch --config_file accelerate_configs/fsdp2.yaml benchmarks/recipe_overhead.py

is what `measure` runs for each strategy; on GPUs give --num_processes.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).parent.parent
STRATEGIES = ("ddp", "fsdp2")
PAIRS = 5
STEPS = 15
UNTIMED_STEPS = 3
LENGTH = 256
BATCH = 2
PREFIX = "ratios: "


def measure() -> dict[str, Any]:
    """Launch two processes (one per GPU, where there are any) for each strategy."""
    processes = max(2, torch.cuda.device_count())
    results = {}
    for name in STRATEGIES:
        config = REPOSITORY / "accelerate_configs" / f"{name}.yaml"
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        done = subprocess.run(
            [*command, "--num_processes", str(processes), __file__],
            cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=1800,
        )  # fmt: skip
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(PREFIX)]
        results[name] = json.loads(line.removeprefix(PREFIX))
    summary = {name: round(statistics.median(result["pairs"]), 4) for name, result in results.items()}
    return {"summary": {"recipe_step_over_bare_step": summary, "processes": processes}, "strategies": results}


def worker() -> None:
    """One process of a launch."""
    sys.path.insert(0, str(REPOSITORY))
    from hfscale import corpus, distributed
    from hfscale.arguments import DataArguments, ParallelArguments, RecipeTrainingArguments
    from hfscale.data import load_packed_datasets
    from hfscale.parallelism import set_up_parallelism

    with tempfile.TemporaryDirectory() as folder:
        args = RecipeTrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=BATCH, save_strategy="no",
            disable_tqdm=True, lr_scheduler_type="constant", optim="adamw_torch",
        )  # fmt: skip
        set_up_parallelism(ParallelArguments(), args)
        tokenizer = corpus.default_tokenizer()
        dataset, _ = load_packed_datasets(DataArguments(block_size=LENGTH), tokenizer, seed=0)
        pairs, bare_s = [], []
        for pair in range(PAIRS + 1):  # the first warms up
            turns = {}
            for name in ("recipe", "bare") if pair % 2 else ("bare", "recipe"):
                distributed.barrier()
                turn = _recipe if name == "recipe" else _bare
                turns[name] = turn(args, dataset, corpus.default_config(tokenizer))
            if pair:
                pairs.append(round(turns["recipe"] / turns["bare"], 4))
                bare_s.append(turns["bare"])
        if distributed.rank() == 0:
            step_ms = round(statistics.median(bare_s) * 1e3, 1)
            sys.stdout.write(f"{PREFIX}{json.dumps({'bare_step_ms': step_ms, 'pairs': pairs})}\n")
        distributed.barrier()


def _recipe(args: Any, dataset: Any, config: Any) -> float:
    from transformers import Trainer, TrainerCallback, default_data_collator

    from hfscale import ScalingCallback
    from hfscale.weights import build_model

    class Stopwatch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == UNTIMED_STEPS:
                self.begun = time.perf_counter()
            if state.global_step == STEPS:
                self.step_s = (time.perf_counter() - self.begun) / (STEPS - UNTIMED_STEPS)

    watch = Stopwatch()
    trainer = Trainer(
        model=build_model(config, seed=0, dtype=torch.float32), args=args, train_dataset=dataset,
        data_collator=default_data_collator, callbacks=[ScalingCallback(), watch],
    )  # fmt: skip
    trainer.train()
    return watch.step_s


def _bare(args: Any, dataset: Any, config: Any) -> float:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    from hfscale.weights import build_model

    accelerator = Accelerator()
    model = build_model(config, seed=0, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, collate_fn=default_data_collator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for step, batch in enumerate(loader, start=1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % args.logging_steps == 0:
            loss.item()
        if step == UNTIMED_STEPS:
            begun = time.perf_counter()
        if step == STEPS:
            break
    return (time.perf_counter() - begun) / (STEPS - UNTIMED_STEPS)


if __name__ == "__main__":
    worker()
