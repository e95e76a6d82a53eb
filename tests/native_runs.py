"""Trains tiny models that transformers distributes while it loads them (`distributed_config`), in forked ranks."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from forked_ranks import run_ranks
from tiny import VOCAB, RandomTokens, tiny_arguments
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainerCallback, set_seed
from transformers.distributed import DistributedConfig

from hfscale import (
    CommHealthCallback,
    LRScalingCallback,
    ScalingCallback,
    ScalingMetricsCallback,
    SpotCheckpointCallback,
    latest_checkpoint,
)

GLOBAL_BATCH = 8
STEPS = 6
EVERY = 3
FILE = "records.json"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of a `DistributedConfig`."""

    fsdp: int = 1
    rep: int = 1
    tp: int = 1
    ep: int = 1
    ep_plan: dict[str, str] | None = None
    """Rules that replace some of the family's own, with `ep`."""

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.fsdp * self.rep * self.tp

    @property
    def config(self) -> DistributedConfig | None:
        """The config that `from_pretrained` gets; None for one process."""
        if self.ranks == 1:
            return None
        others: dict[str, Any] = {"dp_replicate_size": self.rep} if self.rep > 1 else {}  # from transformers 5.23
        if self.ep_plan is not None and self.ep > 1:
            others["ep_plan"] = self.ep_plan
        return DistributedConfig(fsdp_size=self.fsdp, tp_size=self.tp, ep_size=self.ep, **others)

    def __str__(self) -> str:
        sizes = {"fsdp": self.fsdp, "rep": self.rep, "tp": self.tp, "ep": self.ep}
        return "-".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "single"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one launch trains."""

    layout: Layout
    steps: int = STEPS
    every: int | None = EVERY
    accumulation: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further training arguments."""
    spot: dict[str, Any] = field(default_factory=dict)
    """Arguments of `SpotCheckpointCallback`."""
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments of the other parts of `ScalingCallback`, by the name of the part."""
    resume: str | None = "auto"
    """`auto`: the newest checkpoint; None: from scratch; or the path of one."""
    callbacks: tuple[TrainerCallback, ...] = ()
    """Further callbacks."""
    prepare: Callable[[Any], Any] | None = None
    """Called with the loaded model; returns the one to train."""
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    """Called with the model; returns the optimizer, instead of the Trainer's own."""
    after: Callable[[Trainer], None] | None = None
    """Called on every rank after the training."""


def make_model(folder: Path, **overrides: Any) -> Path:
    """Save a mixture of experts of a few thousand parameters, and return its folder."""
    set_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**(sizes | overrides))).save_pretrained(folder)
    return folder


def make_trainer(run: Run, model: Path, folder: Path) -> Trainer:
    """Make the Trainer of a run in this process, which is a rank."""
    layout = run.layout
    set_seed(0)
    options = {} if layout.config is None else {"distributed_config": layout.config}
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **options)
    arguments = {
        "save_strategy": "no",
        "max_steps": run.steps,
        "per_device_train_batch_size": GLOBAL_BATCH // (layout.fsdp * layout.rep * run.accumulation),
        "gradient_accumulation_steps": run.accumulation,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
    }
    args = tiny_arguments(folder / "out", **(arguments | run.arguments))
    state = PartialState._shared_state
    if layout.tp > 1 and state["distributed_type"] == DistributedType.MULTI_CPU:
        state["distributed_type"] = DistributedType.MULTI_GPU  # Accelerate makes device meshes for accelerators only
    spot = SpotCheckpointCallback(**({"every_steps": run.every, "every_minutes": None} | run.spot))
    kinds = {"comm_health": CommHealthCallback, "lr_scaling": LRScalingCallback, "metrics": ScalingMetricsCallback}
    parts: dict[str, Any] = {name: kinds[name](**options) for name, options in run.parts.items()}
    callback = ScalingCallback(spot_checkpoint=spot, **parts)
    trained = loaded if run.prepare is None else run.prepare(loaded)
    optimizer = None if run.optimizer is None else run.optimizer(trained)
    return Trainer(
        model=trained,
        optimizers=(optimizer, None),
        args=args,
        train_dataset=RandomTokens(),
        eval_dataset=RandomTokens(8),
        callbacks=[callback, *run.callbacks],
    )


def train(run: Run, model: Path, folder: Path) -> None:
    """Train in this process, which is a rank; rank 0 writes the log of each step that it has taken."""
    torch.set_num_threads(1)
    trainer = make_trainer(run, model, folder)
    resume = latest_checkpoint(folder / "out") if run.resume == "auto" else run.resume
    start = _Start()
    trainer.add_callback(start)
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        if trainer.is_world_process_zero():
            logs = [log for log in trainer.state.log_history if "loss" in log and log["step"] > start.step]
            found = {log["step"]: [log["loss"], log["grad_norm"], log["learning_rate"]] for log in logs}
            (folder / FILE).write_text(json.dumps(found))
    if run.after is not None:
        run.after(trainer)


class _Start(TrainerCallback):
    """Notes the step from which a training resumes."""

    step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step


def launch(run: Run, model: Path, folder: Path, *, env: dict[str, str] | None = None) -> str:
    """Run the ranks of a run, and return what they printed; fail with it if one of them fails."""
    codes = attempt(run, model, folder, env=env)
    printed = output(folder)
    assert codes == [0] * run.layout.ranks, f"{run.layout}: {codes}\n{printed[-8000:]}"
    return printed


def attempt(
    run: Run, model: Path, folder: Path, *, env: dict[str, str] | None = None, ends_all: bool = True
) -> list[int]:
    """Run the ranks of a run, and return their exit codes."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    return run_ranks(run.layout.ranks, train, run, model, folder, log=log, env=env, timeout_s=180, ends_all=ends_all)


def output(folder: Path) -> str:
    """Return what the ranks of the last launch printed."""
    return "\n".join(path.read_text() for path in sorted((folder / "log").iterdir()))


def records(folder: Path) -> dict[int, list[float]]:
    """Return loss, gradient norm and learning rate of each step that the last launch has taken."""
    return {int(step): values for step, values in json.loads((folder / FILE).read_text()).items()}
