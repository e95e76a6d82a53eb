"""Trains tiny models with a trace of each step, under one process, DDP or FSDP2, with or without an injected fault."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from forked_ranks import run_ranks
from recipe_runs import environment_of
from tiny import RandomTokens, tiny_arguments, tiny_model
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, default_data_collator, set_seed

from hfscale import CommHealthCallback, ScalingCallback, TraceCallback
from hfscale.trainer.strategies.fsdp2 import let_fsdp_run_on_cpu

STEPS = 4
LAYOUTS = {"single": 1, "ddp": 2, "fsdp2": 2}
"""Layouts and their number of processes."""
GLOBAL_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a run trains, besides the fault."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Training arguments."""
    model: dict[str, Any] = field(default_factory=dict)
    """Keys of the model's config."""
    edit: Callable[[Any], None] | None = None
    """Called with the model before the Trainer is made."""
    prepare: Callable[[Trainer], None] | None = None
    """Called with the Trainer before it trains."""
    callbacks: tuple[Callable[[], TrainerCallback], ...] = ()
    """Make further callbacks."""
    data: Callable[[RandomTokens], Any] | None = None
    """Called with the dataset; returns the one to use."""
    seed: int = 0
    """Seed of the weights, the data and the random numbers."""
    trace: tuple[int, ...] = (1, 2, 3, 4)
    """The steps that are traced."""


def rank() -> int:
    """Return the rank of this process."""
    return int(os.environ.get("RANK", "0"))


def last_rank() -> bool:
    """Return whether this is the last rank, in which a fault of one rank is injected."""
    return rank() == int(os.environ.get("WORLD_SIZE", "1")) - 1


def local(tensor: Any) -> torch.Tensor:
    """Return the part of a parameter or gradient that this rank holds."""
    held = tensor.detach()
    return held.to_local() if isinstance(held, DTensor) else held


class At(TrainerCallback):
    """Calls `act(trainer)` at an event of a step, counted from 1; step None: of every step."""

    def __init__(self, event: str, step: int | None, act: Callable[[Any], None]) -> None:
        def handle(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            running = state.global_step + (event not in ("on_step_end", "on_train_begin"))
            if step is None or running == step:
                act(self.trainer)

        self.trainer: Any = None
        setattr(self, event, handle)


def make_trainer(training: Training, folder: Path, layout: str) -> Trainer:
    """Make the Trainer of a run in this process, which is a rank."""
    set_seed(training.seed)
    model = tiny_model(**training.model)
    if training.seed:
        set_seed(training.seed)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter.data, std=0.05)
    if training.edit is not None:
        training.edit(model)
    defaults = {
        "per_device_train_batch_size": GLOBAL_BATCH // LAYOUTS[layout],
        "max_steps": STEPS,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.1,
        "seed": training.seed,
    }
    asked = dict(training.arguments)
    accumulation = asked.get("gradient_accumulation_steps", 1)
    defaults["per_device_train_batch_size"] //= accumulation
    args = tiny_arguments(folder, **(defaults | asked))
    if layout == "fsdp2":
        let_fsdp_run_on_cpu()
    dataset: Any = RandomTokens()
    if training.data is not None:
        dataset = training.data(dataset)
    trace = TraceCallback(training.trace)
    others = [make() for make in training.callbacks]
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=dataset,
        callbacks=[
            ScalingCallback(comm_health=CommHealthCallback(preflight=False, hang_after_s=None)),
            trace,
            *others,
        ],
        data_collator=default_data_collator,
    )
    for other in others:
        if isinstance(other, At):
            other.trainer = trainer
    if training.prepare is not None:
        training.prepare(trainer)
    return trainer


def train_rank(training: Training, folder: Path, layout: str) -> None:
    """Train in this process, which is a rank."""
    torch.set_num_threads(1)
    make_trainer(training, folder, layout).train()


def launch(training: Training, folder: Path, layout: str) -> Path:
    """Run the ranks of a run in forked processes, and return its output directory."""
    out, log = folder / "out", folder / "log"
    codes = run_ranks(
        LAYOUTS[layout], train_rank, training, out, layout, log=log, env=environment_of(layout), timeout_s=150
    )
    printed = "\n".join(path.read_text()[-4000:] for path in sorted(log.iterdir()))
    assert codes == [0] * LAYOUTS[layout], f"{layout}: {codes}\n{printed}"
    return out
