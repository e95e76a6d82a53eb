"""Trainings whose global batch grows, in this process or in forked ranks, and the same by hand in plain torch."""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from forked_ranks import run_ranks
from tiny import RandomTokens, StopAt, logged, tiny_arguments, tiny_model
from transformers import LlamaForCausalLM, PreTrainedModel, Trainer, TrainerCallback, default_data_collator
from transformers.distributed import DistributedConfig

from hfscale import (
    LRScalingCallback,
    ParallelArguments,
    ParallelTrainer,
    ScalingCallback,
    ScalingMetricsCallback,
)
from hfscale.errors import UsageError
from hfscale.trainer.strategies.fsdp2 import let_fsdp_run_on_cpu

STAGES = ((0, 4), (20, 8), (60, 16), (150, 24))
SCHEDULE = ",".join(f"{batch}@{after}samples" if after else f"{batch}@0" for after, batch in STAGES)
ROWS = 64
PASSES = 4
LR = 1e-2
UNIT = 4  # the greatest common divisor of the batches
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
SIZES = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}
PARALLEL: dict[str, dict[str, Any]] = {
    "parallel": {},
    "pp2": {"pp_size": 2},
    "tp2": {"tp_size": 2},
    "cp2": {"cp_size": 2},
}
"""Strategies of ParallelTrainer on two processes."""
OF_FOUR = {"tp2_pp2": {"tp_size": 2, "pp_size": 2}}
"""Further ones, on four."""
NATIVE = {"native": {"fsdp_size": 2}, "native_tp": {"tp_size": 2}}
"""Sizes of strategies by which transformers distributes a model."""
ARGUMENTS = {
    "max_steps": -1,
    "num_train_epochs": PASSES,
    "per_device_train_batch_size": 2,
    "lr_scheduler_type": "linear",
    "learning_rate": LR,
    "save_strategy": "steps",
    "save_steps": 1000,
}


class Seen(RandomTokens):
    """Random tokens that note the order in which they are read."""

    def __init__(self) -> None:
        super().__init__(ROWS)
        self.order: list[int] = []

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.order.append(int(index))
        return super().__getitem__(index)


def make(
    folder: Path,
    *callbacks: TrainerCallback,
    options: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    native: dict[str, int] | None = None,
    layers: int = 2,
    **arguments: Any,
) -> Trainer:
    """Return a Trainer whose batch grows by `SCHEDULE`.

    `options` are those of `LRScalingCallback`; with `parallel`, those of `ParallelArguments`, it is a ParallelTrainer;
    with `native`, sizes of a `DistributedConfig`, transformers distributes the model.
    """
    scaling = LRScalingCallback(**({"batch_schedule": SCHEDULE} | (options or {})))
    args = tiny_arguments(folder, **(ARGUMENTS | arguments))
    if "ACCELERATE_USE_FSDP" in os.environ:
        let_fsdp_run_on_cpu()
    metrics = ScalingMetricsCallback(noise_scale=parallel is None)
    return (Trainer if parallel is None else partial(ParallelTrainer, parallel=ParallelArguments(**parallel)))(
        model=tiny_model(num_hidden_layers=layers) if native is None else distributed_model(folder, native),
        args=args,
        train_dataset=Seen(),
        data_collator=default_data_collator,
        callbacks=[ScalingCallback(lr_scaling=scaling, metrics=metrics), *callbacks],
    )


def distributed_model(folder: Path, sizes: dict[str, int]) -> PreTrainedModel:
    """Load the tiny model, which `on_ranks` has saved, distributed by transformers."""
    config = DistributedConfig(**({"fsdp_size": 1} | sizes))
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, distributed_config=config)
    if "tp_size" in sizes:
        # Accelerate makes device meshes for accelerators only
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return model


class KillAt(TrainerCallback):
    """Kills this process when a step begins."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(folder: Path, step: int, ranks: int) -> None:
    """Train in forked ranks, with a checkpoint every second step, until they are killed."""
    codes = run_ranks(ranks, _train_until_killed, folder, step, log=folder / "log")
    assert set(codes) == {-signal.SIGKILL}


def _train_until_killed(folder: Path, step: int) -> None:
    make(folder, KillAt(step), save_steps=2).train()


def train(folder: Path, *, stop: int | None = None, resume: int | None = None, **kwargs: Any) -> Trainer:
    """Train, until after a step if `stop` names one, and from the checkpoint of a step if `resume` does."""
    trainer = make(folder, *([] if stop is None else [StopAt(stop)]), **kwargs)
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / f"checkpoint-{resume}"))
    return trainer


def result_of(trainer: Trainer) -> dict[str, list[float]]:
    """Return what was logged in each step."""
    keys = ("loss", "learning_rate", "scaling/global_batch", "lr_scaling/factor", "epoch")
    return {key: logged(trainer, key)[: trainer.state.global_step] for key in keys}


def on_ranks(folder: Path, strategy: str, ranks: int = 2, **kwargs: Any) -> dict[str, list[float]]:
    """Train in forked ranks; return what rank 0 has logged."""
    if strategy in NATIVE:
        tiny_model().save_pretrained(folder / "model")
    env = {"fsdp2": FSDP, "hsdp": FSDP | SIZES}.get(strategy, {})
    codes = run_ranks(ranks, _rank, folder, strategy, kwargs, log=folder / "log", env=env)
    assert codes == [0] * ranks, "\n".join(path.read_text()[-3000:] for path in (folder / "log").glob("*.log"))
    return json.loads((folder / "result.json").read_text())


def _rank(folder: Path, strategy: str, kwargs: dict[str, Any]) -> None:
    if strategy.startswith("zero"):
        kwargs["deepspeed"] = zero(int(strategy[-1]))
    if strategy in NATIVE:
        kwargs |= {"native": NATIVE[strategy], "save_strategy": "no"}  # Trainer itself cannot save it
    if strategy in PARALLEL | OF_FOUR:
        kwargs["parallel"] = (PARALLEL | OF_FOUR)[strategy]
    trainer = train(folder, **kwargs)
    if os.environ["RANK"] == "0":
        (folder / "result.json").write_text(json.dumps(result_of(trainer)))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def refused_on_ranks(folder: Path, sizes: dict[str, Any], schedule: str) -> str:
    """Begin a training of a ParallelTrainer on two ranks, which is refused; return the sentence."""
    codes = run_ranks(2, _refused, folder, sizes, schedule, log=folder / "log")
    assert codes == [0, 0], "\n".join(path.read_text()[-3000:] for path in (folder / "log").glob("*.log"))
    return (folder / "said").read_text()


def _refused(folder: Path, sizes: dict[str, Any], schedule: str) -> None:
    trainer = make(folder, parallel=sizes, layers=4, options={"batch_schedule": schedule})
    with pytest.raises(UsageError) as raised:
        trainer.train()
    assert trainer.state.global_step == 0
    if os.environ["RANK"] == "0":
        (folder / "said").write_text(str(raised.value))
    dist.barrier()
    dist.destroy_process_group()


def zero(stage: int, **config: Any) -> dict[str, Any]:
    """Return a config of DeepSpeed that takes Trainer's optimizer."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    } | config


def by_hand(order: list[int]) -> dict[str, list[float]]:
    """Train in plain torch: one backward pass for each step, AdamW with the square-root rule, a linear schedule.

    Args:
        order (`list[int]`): the rows of all passes, in the order in which they are read.
    """
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    rows = RandomTokens(ROWS).rows
    found: dict[str, list[float]] = {"loss": [], "learning_rate": [], "scaling/global_batch": [], "epoch": []}
    seen = 0
    while seen < len(order):
        batch = [size for after, size in STAGES if after <= seen][-1]
        end_of_pass = (seen // ROWS + 1) * ROWS
        taken = rows[order[seen : min(seen + batch, end_of_pass)]]
        rate = LR * (batch / STAGES[0][1]) ** 0.5 * (1 - seen // UNIT / (len(order) / UNIT))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = model(input_ids=taken, labels=taken).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen = min(seen + batch, end_of_pass)
        found["loss"].append(loss.item())
        found["learning_rate"].append(rate)
        found["scaling/global_batch"].append(batch)
        found["epoch"].append(seen / ROWS)
    return found
