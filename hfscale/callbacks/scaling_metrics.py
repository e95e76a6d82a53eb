"""Throughput, efficiency and where the time goes, at each logging step."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale import distributed
from hfscale.callbacks.log_keys import LogKeys
from hfscale.callbacks.trainer_access import calling_trainer, saved_state, stand_first
from hfscale.callbacks.wandb_run import WandbRun
from hfscale.checkpoint.store import write_atomically
from hfscale.errors import UnsupportedModelError, UsageError
from hfscale.logs import get_logger
from hfscale.metrics.efficiency import FlopsModel, device_peak_tflops, training_dtype
from hfscale.metrics.phases import PhaseClock
from hfscale.metrics.throughput import TokenCounter

logger = get_logger(__name__)

JSONL_NAME = "scaling.jsonl"
_PREFIXES = ("scaling/", "checkpoint/", "gpu/", "lr_scaling/")
_TRAINER_KEYS = ("loss", "grad_norm", "learning_rate", "epoch")
_OUTSIDE_TRAINING = ("evaluate", "save")


class ScalingMetricsCallback(TrainerCallback):
    """Logs the keys below beside the Trainer's loss, and appends them to `scaling.jsonl` in the output directory.

    Rates are over the time since the previous log, without evaluations and saves, and over all processes. Tokens are
    counted on the host from the shapes of what enters the model, padding included. Nothing synchronises with the GPU;
    the processes exchange four numbers at each log. What cannot be known is left out.

    | metric key | unit | meaning |
    |---|---|---|
    | `scaling/tokens_per_s` | tokens/s | trained on by all processes together |
    | `scaling/tokens_per_s_per_gpu` | tokens/s | the same per process |
    | `scaling/tokens_seen` | tokens | trained on since step 0, over all resumes |
    | `scaling/mfu` | ratio | model FLOPs (attention counted in full) / peak |
    | `scaling/hfu` | ratio | executed FLOPs, recomputation included / peak |
    | `scaling/data_wait_fraction` | ratio | time the host waited for batches, of the rank that waited longest |
    | `gpu/memory_peak_gib` | GiB | most memory PyTorch has allocated on a GPU, of the fullest one |

    `scaling.jsonl` holds one object per training log: these keys, the other callbacks', `step`, `time`
    (Unix seconds) and Trainer's own `loss`, `grad_norm`, `learning_rate` and `epoch`.

    Args:
        peak_tflops (`float`, *optional*): dense peak of one device in TFLOP/s, for hardware not in `hardware.toml`.

    Raises:
        UsageError: a peak that is not positive.
    """

    def __init__(self, *, peak_tflops: float | None = None) -> None:
        if peak_tflops is not None and peak_tflops <= 0:
            raise UsageError(f"peak_tflops is {peak_tflops}: it must be greater than 0, in TFLOP/s")
        self.peak_tflops = peak_tflops
        self._counter = TokenCounter()
        self._clock = PhaseClock()
        self._wandb_run: WandbRun | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if "wandb" in args.report_to:
            self._wandb_run = WandbRun()
            stand_first(calling_trainer(), self._wandb_run)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = calling_trainer()
        if self._wandb_run is not None:
            self._wandb_run.settle(state)
        self._saved = saved_state(state, "metrics")
        self._tokens_seen = int(self._saved.setdefault("tokens_seen", 0))
        # Ranks that share matrices see the same tokens; those that share a sequence see a part of it each.
        self._same_tokens = trainer.get_tp_size()
        self._sequence_parts = trainer.get_cp_size() * trainer.get_sp_size()
        self._flops, self._peak_flops = self._efficiency_basis(trainer, args)
        self._counter.attach(trainer.model_wrapped)
        self._counted = self._counter.tokens
        LogKeys.of(trainer).add(self._keys)
        if state.is_world_process_zero:
            _begin_jsonl(Path(args.output_dir) / JSONL_NAME, state.global_step)
        self._clock.restart()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._clock.end("other")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._clock.end("data_wait")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._clock.end("compute")
        # A save may follow before the next log: keep what it will record up to date, from this process alone.
        self._saved["tokens_seen"] = self._tokens_seen + self._uncollected() * args.world_size // self._same_tokens

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._clock.end("evaluate")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._clock.end("save")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "loss" in logs and state.is_world_process_zero:
            record = {key: value for key, value in logs.items() if key in _TRAINER_KEYS or key.startswith(_PREFIXES)}
            finite = {key: value for key, value in record.items() if math.isfinite(value)}  # JSON has no NaN
            _append_jsonl(
                Path(args.output_dir) / JSONL_NAME, {"step": state.global_step, "time": time.time(), **finite}
            )
        # Trainer logs an evaluation's metrics before it fires `on_evaluate`.
        self._clock.end("evaluate" if any(key.startswith("eval_") for key in logs or ()) else "other")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._counter.detach()

    def _uncollected(self) -> int:
        return self._counter.tokens - self._counted

    def _keys(self, state: TrainerState) -> dict[str, float]:
        """The keys of the window that ends now. Called on every rank."""
        self._clock.end("compute")  # Trainer has just waited for the loss, that is for the GPU
        seconds = self._clock.seconds
        training_s = sum(s for phase, s in seconds.items() if phase not in _OUTSIDE_TRAINING)
        row = [self._uncollected(), training_s, seconds.get("data_wait", 0.0), _peak_memory_gib()]
        self._counted = self._counter.tokens
        self._clock.restart()
        tokens, training_times, waits, memory = zip(*distributed.gather_rows(row), strict=True)
        window_tokens = sum(tokens) / self._same_tokens
        self._tokens_seen += int(window_tokens)
        self._saved["tokens_seen"] = self._tokens_seen
        if window_tokens == 0 or max(training_times) == 0:
            return {}
        tokens_per_s = window_tokens / max(training_times)
        per_gpu = tokens_per_s / len(tokens)
        keys = {
            "scaling/tokens_per_s": tokens_per_s,
            "scaling/tokens_per_s_per_gpu": per_gpu,
            "scaling/tokens_seen": self._tokens_seen,
            "scaling/data_wait_fraction": max(w / t for w, t in zip(waits, training_times, strict=True)),
        }
        if self._flops is not None and self._peak_flops is not None:
            length = self._counter.sequence_length * self._sequence_parts
            keys["scaling/mfu"] = per_gpu * self._flops.model_flops_per_token(length) / self._peak_flops
            keys["scaling/hfu"] = per_gpu * self._flops.hardware_flops_per_token(length) / self._peak_flops
        if max(memory) > 0:
            keys["gpu/memory_peak_gib"] = max(memory)
        return keys

    def _efficiency_basis(self, trainer: Any, args: TrainingArguments) -> tuple[FlopsModel | None, float | None]:
        """What MFU needs: the model's FLOPs and the peak in FLOP/s; says once why it will be absent."""
        model = trainer.model
        dtype = training_dtype(model, args)
        peak = self.peak_tflops or device_peak_tflops(args.device, dtype)
        if peak is None:
            logger.info(
                "scaling/mfu is left out: the %s peak of this %s is unknown (give peak_tflops)",
                dtype,
                args.device.type,
            )
            return None, None
        try:
            return FlopsModel.of(model, args, sizes=getattr(trainer, "whole_sizes", None)), peak * 1e12
        except UnsupportedModelError as error:
            logger.info("scaling/mfu is left out: %s", error)
            return None, None


def _peak_memory_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def _begin_jsonl(path: Path, step: int) -> None:
    """Keep the records up to `step`: later ones are of steps that will be taken again. A fresh run keeps none, and
    what another run left is put beside it."""
    if not path.is_file():
        return
    if step == 0:
        path.rename(path.with_name(f"scaling-until-{int(path.stat().st_mtime)}.jsonl"))
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if (record := _parse(line)) is not None and record["step"] <= step]
    write_atomically(path, "".join(f"{line}\n" for line in kept))


def _parse(line: str) -> dict[str, Any] | None:
    """One record, or None for a line that a killed process left unfinished."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "step" in record else None


def _append_jsonl(path: Path, record: dict[str, float]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
