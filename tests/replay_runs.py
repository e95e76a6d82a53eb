"""Trains tiny models with replays under any layout, in forked ranks, with and without a flipped bit."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forked_ranks import run_ranks
from native_runs import Layout, make_model
from parallel_world import Tokens, tiny_causal_lm
from recipe_runs import environment_of
from tiny import RandomTokens, tiny_arguments, tiny_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from hfscale import CommHealthCallback, ParallelArguments, ParallelTrainer, ScalingCallback
from hfscale.core.bit_hash import bytes_of
from hfscale.core.findings import Finding
from hfscale.core.replaying import is_replaying
from hfscale.health import callback as health_callback
from hfscale.recipe.layout import set_up_parallelism
from hfscale.trainer.strategies.fsdp2 import let_fsdp_run_on_cpu

PARALLEL = {
    "tp": {"parallel": {"tp_size": 2}},
    "tp-sp": {"parallel": {"tp_size": 2, "sequence_parallel": True}},
    "pp": {"parallel": {"pp_size": 2}},
    "pp-interleaved": {"parallel": {"pp_size": 2, "pipeline_schedule": "Interleaved1F1B"}},
    "dp": {"parallel": {}},
    "cp": {"parallel": {"cp_size": 2}},
    "ep": {"parallel": {"ep_size": 2}, "family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2},
    "tp-pp": {"parallel": {"tp_size": 2, "pp_size": 2}},
}
NATIVE = {
    "native-fsdp": Layout(fsdp=2),
    "native-hsdp": Layout(rep=2),
    "native-tp": Layout(tp=2),
    "native-ep": Layout(fsdp=2, ep=2),
}


@dataclass(frozen=True, kw_only=True)
class Flip:
    """One bit that a rank computes wrongly, once."""

    module: str
    """The end of the name of a module, or of a parameter for `weight` and `state`."""
    rank: int = 1
    step: int = 4
    kind: str = "output"
    """`output`, `gradient` (of the output), `wgrad` (gradient of its weight, before the reduction); or `weight` or
    `state` (of the optimizer)."""
    moment: str = "begin"
    """When a `weight` or a `state` changes: at the `begin` of the step, while the module is computed in the `replay`,
    or in the `forward` or `backward` pass of the training."""
    is_written: bool = False
    """Whether it is changed by an operation of PyTorch, as a wrong update would; else in memory only."""
    bit: int = 20
    element: int = 0


_FLIPPED: list[int] = []
_STORED: list[torch.Tensor | None] = []
"""Of each `FlipsBit` of this process: how often it flipped its bit, and the tensor with it."""


class FlipsBit(TrainerCallback):
    """Flips a bit of what a rank computes in the training, and not in a replay."""

    def __init__(self, flip: Flip) -> None:
        self.flip = flip
        # A replay sets back what hooks of modules lead to: their object, but not what a variable of this file holds
        self._number = len(_FLIPPED)
        _FLIPPED.append(0)
        _STORED.append(None)

    @property
    def flipped(self) -> int:
        """How often the bit was flipped."""
        return _FLIPPED[self._number]

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._state = state
        if not self._is_own:
            return
        found = [module for name, module in model.named_modules() if name.endswith(self._module)]
        if self.flip.kind == "wgrad":
            (module,) = found
            module.weight.register_hook(self._changed)
        elif not self._is_stored:
            (module,) = found
            module.register_forward_hook(self._leave)
        elif found and self.flip.moment != "begin":
            found[0].register_forward_hook(self._change_stored)

    @property
    def _is_own(self) -> bool:
        return int(os.environ.get("RANK", "0")) == self.flip.rank

    @property
    def _is_stored(self) -> bool:
        return self.flip.kind in ("weight", "state")

    @property
    def _module(self) -> str:
        return self.flip.module.removesuffix(".weight")

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        flip = self.flip
        if not (self._is_stored and self._is_own and state.global_step + 1 == flip.step):
            return
        found = [p for name, p in model.named_parameters() if name.endswith(flip.module)]
        if not found:
            return
        tensor = getattr(found[0], "ds_tensor", found[0])
        if flip.kind == "state":
            optimizer = kwargs["optimizer"]
            while hasattr(optimizer, "optimizer"):
                optimizer = optimizer.optimizer
            states = optimizer.state
            tensor = states.get(found[0], next(iter(states.values())))["exp_avg"]  # DeepSpeed's are of all weights
        _STORED[self._number] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if flip.moment == "begin":
            self._flip_stored()

    def _flip_stored(self) -> None:
        stored = _STORED[self._number]
        if self.flipped or stored is None:
            return
        _FLIPPED[self._number] += 1
        if self.flip.is_written:
            with torch.no_grad():
                flip_bit(stored, self.flip)
        else:
            flip_in_memory(stored, self.flip)

    def _change_stored(self, module: Any, args: Any, output: torch.Tensor) -> None:
        if is_replaying() == (self.flip.moment == "replay"):
            if self.flip.moment == "backward":
                if output.requires_grad:
                    output.register_hook(lambda gradient: self._flip_stored())
            else:
                self._flip_stored()

    def _leave(self, module: Any, args: Any, output: torch.Tensor) -> Any:
        if self.flip.kind == "output":
            return self._changed(output)
        if output.requires_grad:
            output.register_hook(self._changed)
        return None

    def _changed(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if self.flipped or is_replaying() or self._state.global_step + 1 != self.flip.step:
            return None
        _FLIPPED[self._number] += 1
        changed = tensor.clone()
        with torch.no_grad():
            flip_bit(changed.to_local() if isinstance(changed, DTensor) else changed, self.flip)
        return changed


class StepTimes(TrainerCallback):
    """Measures the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def flip_bit(tensor: torch.Tensor, flip: Flip) -> None:
    """Flip one bit of one element of a contiguous fp32 tensor, in place."""
    bits = tensor.detach().view(-1).view(torch.int32)
    mask = 1 << flip.bit if flip.bit < 31 else -(2**31)
    bits[flip.element % len(bits)] ^= mask


def flip_in_memory(tensor: torch.Tensor, flip: Flip) -> None:
    """Flip one bit of one element of a contiguous tensor, as a fault of the memory does: PyTorch does not see it."""
    assert tensor.is_contiguous()
    size = tensor.element_size()
    byte, bit = divmod(flip.bit % (8 * size), 8)
    bytes_of(tensor)[flip.element % tensor.numel() * size + byte] ^= 1 << bit


def make_trainer(
    layout: str, folder: Path, callbacks: list[TrainerCallback], *, hidden: int = 32, **arguments: Any
) -> Trainer:
    """Make a Trainer in this process, which is a rank; `hidden` is that of a model without parallelism of its own."""
    if layout in PARALLEL:
        job = dict(PARALLEL[layout])
        defaults = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
        args = tiny_arguments(folder, **(defaults | arguments))
        sizes = ParallelArguments(**job.pop("parallel"))
        model = tiny_causal_lm(**({"seed": 7} | job))
        return ParallelTrainer(model=model, args=args, train_dataset=Tokens(), callbacks=callbacks, parallel=sizes)
    args = tiny_arguments(folder, **({"per_device_train_batch_size": 2} | arguments))
    if layout == "hsdp":
        set_up_parallelism(ParallelArguments(), args)
    elif layout == "fsdp2" or "tp" in layout:
        let_fsdp_run_on_cpu()
    if layout in NATIVE:
        loaded = folder.parent / "model"
        model = AutoModelForCausalLM.from_pretrained(
            loaded, dtype=torch.float32, distributed_config=NATIVE[layout].config
        )
    else:
        model = tiny_model(attention_dropout=0.2, hidden_size=hidden, intermediate_size=hidden * 3 // 2)
    return Trainer(model=model, args=args, train_dataset=RandomTokens(), callbacks=callbacks)


def environment(layout: str) -> dict[str, str]:
    """Return the environment that a launcher gives the ranks of a layout."""
    if layout == "hsdp":
        sizes = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
        return environment_of("fsdp2") | sizes
    return environment_of(layout)


def ranks_of(layout: str) -> int:
    """Return the number of ranks of a layout."""
    return {"single": 1, "hsdp": 4, "tp-pp": 4}.get(layout, 2)


def train(
    layout: str, folder: Path, every: int | None, flip: Flip | None, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Train in this process, which is a rank, and return the losses, the findings and the metrics of the replays."""
    torch.set_num_threads(1)
    found: list[Finding] = []
    health_callback.log_findings = found.extend  # type: ignore[assignment]
    health = CommHealthCallback(replay_every_steps=every, preflight=False, hang_after_s=None)
    flips = [FlipsBit(flip)] if flip is not None else []
    times = StepTimes()
    callbacks = [ScalingCallback(comm_health=health), *flips, times]
    trainer = make_trainer(layout, folder / "out", callbacks, **arguments)
    trainer.train()
    logs = trainer.state.log_history
    return {
        "loss": [log["loss"] for log in logs if "loss" in log],
        "grad_norm": [log["grad_norm"] for log in logs if "grad_norm" in log],
        "mismatches": [log["health/replay_mismatches"] for log in logs if "health/replay_mismatches" in log],
        "found": [finding.to_dict() for finding in found if finding.level == "error"],
        "step_s": times.seconds,
        "flipped": sum(callback.flipped for callback in flips),
    }


def _rank(folder: Path, jobs: list[tuple[Any, ...]], work: Callable[..., dict[str, Any]]) -> None:
    results = [work(*job) for job in jobs]
    (folder / f"results-{os.environ['RANK']}.json").write_text(json.dumps(results))


def run(
    layout: str,
    folder: Path,
    jobs: list[tuple[int | None, Flip | None]],
    *,
    timeout_s: float = 240,
    **arguments: Any,
) -> list[list[dict[str, Any]]]:
    """Train once for each job, on ranks that are forked once; return the results of each job by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    if layout in NATIVE:
        make_model(folder / "model")
    ranks = ranks_of(layout)
    given = [(layout, folder, every, flip, arguments) for every, flip in jobs]
    log, env = folder / "log", environment(layout)
    codes = run_ranks(ranks, _rank, folder, given, train, log=log, env=env, timeout_s=timeout_s)
    printed = "\n".join(path.read_text()[-5000:] for path in sorted(log.iterdir()))
    assert codes == [0] * ranks, f"{layout}: {codes}\n{printed}"
    of_ranks = [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(ranks)]
    return [list(results) for results in zip(*of_ranks, strict=True)]
