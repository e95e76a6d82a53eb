"""What a recipe's Trainer, with all callbacks, adds to a bare `accelerate` loop under the same strategy.

Both live in the same processes with the same model, optimizer, gradient clipping, batches and a log every ten steps.
They take turns of ten steps: after each ten of the Trainer's, its callback runs ten bare ones. A pair is two turns
next to each other, so what else the machine does meets both. The time added does not depend on the model: on a tiny
one it stands out of the noise, and on a larger one it is the ratio that counts.

    accelerate launch --config_file accelerate_configs/fsdp2.yaml benchmarks/recipe_overhead.py

is what `measure` runs for each strategy; on GPUs give --num_processes.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).parent.parent
STRATEGIES = ("ddp", "fsdp2")
TURN_STEPS = 10
BATCH = 2
PREFIX = "turns: "


@dataclass(frozen=True, kw_only=True)
class Load:
    """A model and how many pairs of turns it is measured for."""

    pairs: int
    block_size: int
    changes: dict[str, int]
    """Changes to the recipes' default config."""


TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
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
        config = REPOSITORY / "accelerate_configs" / f"{name}.yaml"
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        done = subprocess.run(
            [*command, "--num_processes", str(processes), __file__],
            cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=1800,
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith(PREFIX)]
        for load, line in zip(LOADS, lines, strict=True):
            results[f"{name}/{load}"] = _summary(json.loads(line.removeprefix(PREFIX)))
    return {"summary": {"processes": processes} | results}


def _summary(turns: dict[str, list[float]]) -> dict[str, float]:
    """Medians over the pairs: seconds per turn -> milliseconds per step, and the ratio."""
    pairs = list(zip(turns["recipe"], turns["bare"], strict=True))
    per_step = 1e3 / TURN_STEPS
    return {
        "pairs": len(pairs),
        "bare_step_ms": round(statistics.median(bare for _, bare in pairs) * per_step, 2),
        "added_ms_per_step": round(statistics.median(recipe - bare for recipe, bare in pairs) * per_step, 2),
        "recipe_step_over_bare_step": round(statistics.median(recipe / bare for recipe, bare in pairs), 4),
    }


def worker() -> None:
    """One process of a launch."""
    sys.path.insert(0, str(REPOSITORY))
    from transformers import Trainer, default_data_collator

    from hfscale import ScalingCallback, corpus, distributed
    from hfscale.arguments import DataArguments, ParallelArguments, RecipeTrainingArguments
    from hfscale.data import load_packed_datasets
    from hfscale.parallelism import set_up_parallelism
    from hfscale.weights import build_model

    tokenizer = corpus.default_tokenizer()
    for load in LOADS.values():
        config = corpus.default_config(tokenizer)
        config.update(load.changes)
        with tempfile.TemporaryDirectory() as folder:
            args = RecipeTrainingArguments(
                output_dir=folder, max_steps=(load.pairs + 1) * TURN_STEPS + 1, per_device_train_batch_size=BATCH,
                save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant", optim="adamw_torch",
            )  # fmt: skip
            set_up_parallelism(ParallelArguments(), args)
            dataset, _ = load_packed_datasets(DataArguments(block_size=load.block_size), tokenizer, seed=0)
            turns = _turns(_bare_steps(args, dataset, config))
            trainer = Trainer(
                model=build_model(config, seed=0, dtype=torch.float32), args=args, train_dataset=dataset,
                data_collator=default_data_collator, callbacks=[ScalingCallback(), turns],
            )  # fmt: skip
            trainer.train()
            if distributed.rank() == 0:
                sys.stdout.write(f"{PREFIX}{json.dumps(turns.seconds)}\n")
            distributed.barrier()


def _turns(bare_steps: Iterator[None]) -> Any:
    """A callback that runs the bare loop between the Trainer's turns and keeps both times."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: dict[str, list[float]] = {"recipe": [], "bare": []}

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # One step into each turn, so that the log that follows the tenth step is inside the Trainer's turn.
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
                next(bare_steps)
            self.seconds["bare"].append(time.perf_counter() - begun)

    return Turns()


def _bare_steps(args: Any, dataset: Any, config: Any) -> Iterator[None]:
    """A bare training loop that stands still after each step."""
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
        accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step % args.logging_steps == 0:
            accelerator.gather(loss.detach()).mean().item()
        yield


if __name__ == "__main__":
    worker()
