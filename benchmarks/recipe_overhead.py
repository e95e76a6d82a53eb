"""Measures what a recipe's Trainer with all callbacks adds to a plain `accelerate` loop with the same strategy.

Both run in the same processes, with the same model, optimizer, gradient clipping, batches and a log every ten steps.
They take turns of ten steps: after each ten steps of the Trainer, a callback runs ten steps of the plain loop. A pair
is two consecutive turns, so that other work on the machine affects both. The added time does not depend on the model:
it is measured best on a tiny one, and on a larger one the ratio matters.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, default_data_collator

from benchmarks.launched import launch_benchmark, send_result
from hfscale import ParallelArguments, ScalingCallback
from hfscale.core import distributed
from hfscale.core.collectives import TRAINING
from hfscale.parallel.weights import build_model
from hfscale.recipe import corpus
from hfscale.recipe.arguments import DataArguments, RecipeTrainingArguments
from hfscale.recipe.data import load_packed_datasets
from hfscale.recipe.layout import set_up_parallelism

STRATEGIES = ("ddp", "fsdp2")
TURN_STEPS = 10
BATCH = 2


@dataclass(frozen=True, kw_only=True)
class Load:
    """A model and its measurement."""

    pairs: int
    """Pairs of turns."""
    block_size: int
    """Tokens per sequence."""
    changes: dict[str, int]
    """Changes to the default model config of the recipes."""


LOADS = {
    "four_million_parameters": Load(pairs=12, block_size=256, changes={}),
    "tiny": Load(
        pairs=40, block_size=16, changes={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    ),
}


def measure() -> dict[str, Any]:
    """Launch two processes (one per GPU, where there are any) for each strategy."""
    processes = max(2, torch.cuda.device_count())
    results = {}
    for name in STRATEGIES:
        turns = launch_benchmark("benchmarks.recipe_overhead", processes=processes, config=name)
        results |= {f"{name}/{load}": _summary(seconds) for load, seconds in turns.items()}
    return {"summary": {"processes": processes} | results}


def _summary(turns: dict[str, list[float]]) -> dict[str, float]:
    """Medians over the pairs of milliseconds per step, from seconds per turn, and of the ratio."""
    pairs = list(zip(turns["recipe"], turns["bare"], strict=True))
    per_step = 1e3 / TURN_STEPS
    return {
        "pairs": len(pairs),
        "bare_step_ms": round(statistics.median(bare for _, bare in pairs) * per_step, 2),
        "added_ms_per_step": round(statistics.median(recipe - bare for recipe, bare in pairs) * per_step, 2),
        "recipe_step_over_bare_step": round(statistics.median(recipe / bare for recipe, bare in pairs), 4),
    }


def worker() -> None:
    """Run the measurement in one process of a launch."""
    tokenizer = corpus.default_tokenizer()
    seconds = {}
    for name, load in LOADS.items():
        config = corpus.default_config(tokenizer)
        config.update(load.changes)
        with tempfile.TemporaryDirectory() as folder:
            args = RecipeTrainingArguments(
                output_dir=folder,
                max_steps=(load.pairs + 1) * TURN_STEPS + 1,
                per_device_train_batch_size=BATCH,
                save_strategy="no",
                disable_tqdm=True,
                lr_scheduler_type="constant",
                optim="adamw_torch",
            )
            set_up_parallelism(ParallelArguments(), args)
            dataset, _ = load_packed_datasets(DataArguments(block_size=load.block_size), tokenizer, seed=0)
            turns = Turns(_bare_steps(args, dataset, config))
            trainer = Trainer(
                model=build_model(config, seed=0, dtype=torch.float32),
                args=args,
                train_dataset=dataset,
                data_collator=default_data_collator,
                callbacks=[ScalingCallback(), turns],
            )
            trainer.train()
            seconds[name] = turns.seconds
    if distributed.rank() == 0:
        send_result(seconds)
    TRAINING.barrier("end")


class Turns(TrainerCallback):
    """Runs the plain loop between the turns of the Trainer, and measures both.

    Args:
        bare_steps (`Iterator[None]`): Takes one step of the plain loop at each `next`.
    """

    def __init__(self, bare_steps: Iterator[None]) -> None:
        self.bare_steps = bare_steps
        self.seconds: dict[str, list[float]] = {"recipe": [], "bare": []}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A turn ends one step later, so that the log after the tenth step is inside the Trainer's turn.
        if state.global_step % TURN_STEPS != 1:
            return
        if state.global_step > 1:
            self.seconds["recipe"].append(time.perf_counter() - self.begun)
            self._run_bare()
        if state.global_step == TURN_STEPS + 1:  # the first turns warm up
            self.seconds = {"recipe": [], "bare": []}
        self.begun = time.perf_counter()

    def _run_bare(self) -> None:
        begun = time.perf_counter()
        for _ in range(TURN_STEPS):
            next(self.bare_steps)
        self.seconds["bare"].append(time.perf_counter() - begun)


def _bare_steps(args: Any, dataset: Any, config: Any) -> Iterator[None]:
    """A plain training loop, as a generator that takes one step at each `next`."""
    accelerator = Accelerator()
    model = build_model(config, seed=0, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, collate_fn=default_data_collator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for step, batch in enumerate(loader, start=1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step % args.logging_steps == 0:
            accelerator.gather(loss.detach()).mean().item()
        yield


if __name__ == "__main__":
    worker()
