"""Trains with batches that are poisoned, and plain Trainer whose sampler never has these batches, under any layout."""

import hashlib
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forked_ranks import run_ranks
from native_runs import make_model
from parallel_world import tiny_causal_lm
from replay_runs import NATIVE, PARALLEL, environment, ranks_of
from tiny import LENGTH, VOCAB, tiny_arguments, tiny_model
from torch import nn
from torch.utils.data import Dataset, Sampler
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, set_seed

from hfscale import CommHealthCallback, ParallelArguments, ParallelTrainer, ScalingCallback
from hfscale.recipe.layout import set_up_parallelism
from hfscale.replays import outliers
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies.fsdp2 import let_fsdp_run_on_cpu
from hfscale.trainer.strategies.tensors import own_part

QUIET: dict[str, Any] = {"preflight": False, "hang_after_s": None, "stragglers": False}
FACTORS = {"nan": float("nan"), "inf": float("inf"), "spike": 1e6}
TOKENS = {"nan": 0, "inf": 1, "spike": 2}
"""Kind of poison -> a token that no other sample has."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training in which some steps have a poisoned sample."""

    bad: dict[int, str]
    """Step, from 1 -> the kind of its poison."""
    steps: int = 12
    seed: int = 0
    model: str = "llama"
    """`llama`, or `net`: numbers through BatchNorm and dropout."""
    most: int = 10
    dropout: float = 0.2
    """Of the attention of `llama`."""


class Net(nn.Module):
    """A regression with statistics that each forward pass moves, and random numbers that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
        self.register_buffer("calls", torch.zeros(1))
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        self.seen.append(float(self.calls))  # a state that is no tensor, and in no checkpoint
        output = self.layers(x)[:, 0] + 0.01 * (self.calls % 3)
        return {"loss": ((output - labels) ** 2).mean(), "logits": output}


class Numbers(Dataset):
    """Samples of `Net`."""

    def __init__(self, size: int, poisons: dict[int, str]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = self.x.sum(1)
        for index, kind in poisons.items():
            if kind == "spike":
                self.y[index] = 1e5
            else:
                self.x[index, 3] = FACTORS[kind]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class Poisoned(Dataset):
    """Sequences of random tokens, of which some end with a token that `poisoned_loss` looks for."""

    def __init__(self, size: int, poisons: dict[int, str]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(3, VOCAB, (size, LENGTH), generator=generator)
        for index, kind in poisons.items():
            self.rows[index, -1] = TOKENS[kind]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index].clone()}


class Order(Sampler[int]):
    """Yields the samples in an order that is given."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


def poisoned_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return the mean loss per token, multiplied where a label says so."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    reduction = "mean" if num_items_in_batch is None else "sum"
    predicted, wanted = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    loss = nn.functional.cross_entropy(predicted, wanted, reduction=reduction)
    if num_items_in_batch is not None:
        loss = loss / num_items_in_batch
    for kind, token in TOKENS.items():
        if (labels == token).any():
            loss = loss * FACTORS[kind]
    return loss


def batch_of(layout: str, accumulation: int = 1) -> int:
    """Return the global batch of a layout in these runs."""
    if layout in PARALLEL:
        return 16 if layout in ("dp", "ep") else 8
    replicas = {"single": 2, "native-tp": 1, "hsdp": 4}.get(layout, 2)
    return 2 * replicas * accumulation


def indices_of(layout: str, job: Job, accumulation: int) -> tuple[list[int], dict[int, str], int]:
    """Return the order of the samples, the poisons by sample, and the global batch."""
    batch = batch_of(layout, accumulation)
    order = list(range(job.steps * batch))
    chance = random.Random(job.seed)
    chance.shuffle(order)
    poisons = {order[(step - 1) * batch + chance.randrange(batch)]: kind for step, kind in job.bad.items()}
    return order, poisons, batch


def make_trainer(
    layout: str,
    folder: Path,
    job: Job,
    callbacks: list[TrainerCallback],
    *,
    without: bool = False,
    **arguments: Any,
) -> Trainer:
    """Make a Trainer in this process, which is a rank; `without` leaves the bad batches out of its sampler."""
    accumulation = arguments.get("gradient_accumulation_steps", 1)
    order, poisons, batch = indices_of(layout, job, accumulation)
    steps = job.steps
    if without:
        taken = [step for step in range(1, steps + 1) if step not in job.bad]
        order = [order[(step - 1) * batch + place] for step in taken for place in range(batch)]
        steps = len(taken)
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4 if layout == "single" else 2,
        "max_steps": steps,
        "lr_scheduler_type": "cosine",
        "logging_nan_inf_filter": False,
        "average_tokens_across_devices": True,
    }
    if layout in PARALLEL:
        defaults["gradient_accumulation_steps"] = 4
    args = tiny_arguments(folder, **(defaults | arguments))
    set_seed(job.seed)
    data: Dataset[Any] = Poisoned(len(order) + len(job.bad) * batch, poisons)
    given: dict[str, Any] = {"args": args, "callbacks": callbacks}
    if job.model == "net":
        given |= {"model": Net(), "train_dataset": Numbers(job.steps * batch, poisons)}
    else:
        model = _model(layout, folder, args, job.dropout)
        given |= {"model": model, "train_dataset": data, "compute_loss_func": poisoned_loss}
    if layout in PARALLEL:
        job_of_layout: dict[str, Any] = dict(PARALLEL[layout])
        trainer: Trainer = ParallelTrainer(**given, parallel=ParallelArguments(**job_of_layout["parallel"]))
    else:
        trainer = Trainer(**given)
    create = trainer.create_scheduler
    trainer._get_train_sampler = lambda *args, **kwargs: Order(order)  # type: ignore[method-assign]
    # The schedule is that of all steps
    trainer.create_scheduler = lambda num_training_steps, optimizer=None: create(job.steps, optimizer)  # type: ignore[method-assign,assignment]
    return trainer


def _model(layout: str, folder: Path, args: Any, dropout: float) -> Any:
    if layout in PARALLEL:
        sizes = {name: value for name, value in PARALLEL[layout].items() if name != "parallel"}
        return tiny_causal_lm(**({"seed": 7} | sizes))
    if layout == "hsdp":
        set_up_parallelism(ParallelArguments(), args)
    elif layout == "fsdp2" or "tp" in layout:
        let_fsdp_run_on_cpu()
    if layout in NATIVE:
        return AutoModelForCausalLM.from_pretrained(
            folder.parent / "model", dtype=torch.float32, distributed_config=NATIVE[layout].config
        )
    return tiny_model(attention_dropout=dropout)


def fingerprint(trainer: Trainer) -> dict[str, Any]:
    """Return hashes of all that the next step depends on, and what was logged."""
    model = model_of(trainer)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    optimizer: Any = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    states = [{name: _hash(value) for name, value in state.items()} for state in optimizer.state.values()]
    scheduler: Any = trainer.lr_scheduler
    logs = trainer.state.log_history
    random_states = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    return {
        "weights": {name: _hash(tensor) for name, tensor in tensors.items()},
        "optimizer": states,
        "schedule": [scheduler.last_epoch, scheduler.get_last_lr()],
        "random": hashlib.blake2b(repr(random_states).encode()).hexdigest(),
        "seen": getattr(model, "seen", [])[-1:],
        **{key: [repr(log[key]) for log in logs if key in log] for key in ("loss", "grad_norm", "learning_rate")},
    }


def _hash(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    own = own_part(value)
    if own is None:
        return "none"
    return hashlib.blake2b(own.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def train_both(layout: str, folder: Path, job: Job, arguments: dict[str, Any]) -> dict[str, Any]:
    """Train with and without the bad batches in this process, which is a rank."""
    torch.set_num_threads(1)
    judge_early()
    health = CommHealthCallback(skip_bad_batches=job.most, **QUIET)
    ours = make_trainer(layout, folder / "ours", job, [health], **arguments)
    mean = ours.train().training_loss
    found = {"ours": fingerprint(ours), "mean": mean}
    listed = json.loads((folder / "ours" / "hfscale_skipped_batches.json").read_text()) if job.bad else {"batches": []}
    found["skipped"] = [batch["step"] for batch in listed["batches"]]
    found["worst"] = [(batch["worst"] or {}).get("samples") for batch in listed["batches"]]
    del ours
    reference = make_trainer(layout, folder / "reference", job, [], without=True, **arguments)
    found["reference_mean"] = reference.train().training_loss
    found["reference"] = fingerprint(reference)
    return found


def judge_early() -> None:
    """Have this process, which is a rank of a test, look for outliers after few steps, and take none by chance."""
    outliers.MIN_STEPS, outliers.REACH, outliers.MIN_RISE = 4, 100.0, 100.0


class SaveAt(TrainerCallback):
    """Saves a checkpoint of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save |= state.global_step == self.step


def losses_of(trainer: Trainer) -> list[float]:
    """Return the logged losses."""
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def train_and_save(folder: Path, layout: str, job: Job, step: int) -> None:
    """Train on this rank with a checkpoint of a step, and write the losses."""
    judge_early()
    scaling = ScalingCallback(comm_health=CommHealthCallback(skip_bad_batches=job.most, **QUIET))
    trainer = make_trainer(layout, folder, job, [scaling, SaveAt(step)])
    trainer.train()
    (folder / f"losses-{os.environ['RANK']}.json").write_text(json.dumps(losses_of(trainer)))


def _rank(folder: Path, layout: str, jobs: list[Job], arguments: dict[str, Any]) -> None:
    results = []
    for number, job in enumerate(jobs):
        results.append(train_both(layout, folder / f"job-{number}", job, arguments))
    (folder / f"results-{os.environ['RANK']}.json").write_text(json.dumps(results))


def run(
    layout: str, folder: Path, jobs: list[Job], *, timeout_s: float = 240, **arguments: Any
) -> list[list[dict[str, Any]]]:
    """Train each job with and without its bad batches, on ranks that are forked once; return the results by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    if layout in NATIVE:
        for number in range(len(jobs)):
            make_model(folder / f"job-{number}" / "model")
    log, env = folder / "log", environment(layout)
    ranks = ranks_of(layout)
    codes = run_ranks(ranks, _rank, folder, layout, jobs, arguments, log=log, env=env, timeout_s=timeout_s)
    printed = "\n".join(path.read_text()[-5000:] for path in sorted(log.iterdir()))
    assert codes == [0] * ranks, f"{layout}: {codes}\n{printed}"
    of_ranks = [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(ranks)]
    return [list(results) for results in zip(*of_ranks, strict=True)]


def check(layout: str, job: Job, result: dict[str, Any], accumulation: int = 1) -> None:
    """Assert that a run has left out exactly its bad batches, and equals the one that never had them."""
    assert result["skipped"] == sorted(job.bad), (layout, job, result["skipped"])
    ours, reference = result["ours"], result["reference"]
    for name in reference:
        assert ours[name] == reference[name], (layout, job, name, ours[name], reference[name])
    assert abs(result["mean"] - result["reference_mean"]) < 1e-5 * abs(result["reference_mean"])
    if layout in PARALLEL:
        return
    _, poisons, _ = indices_of(layout, job, accumulation)
    for samples, index in zip(result["worst"], poisons, strict=True):
        assert index in samples
