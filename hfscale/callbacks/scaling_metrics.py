"""Throughput, efficiency and where time and money go, at each logging step."""

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.callbacks.meters import (
    CommunicationMeter,
    EfficiencyMeter,
    Meter,
    SpendingMeter,
    UtilisationMeter,
    Window,
)
from hfscale.callbacks.noise_meter import NoiseScaleMeter
from hfscale.callbacks.run_files import RunFiles
from hfscale.callbacks.triage_watch import TriageWatch
from hfscale.errors import UsageError
from hfscale.integrations.metric_injector import MetricInjector
from hfscale.integrations.trainer import DataFetchHook, calling_trainer, prepend_callback, saved_state
from hfscale.integrations.wandb_run import WandbRun
from hfscale.metrics.phases import PhaseClock
from hfscale.metrics.throughput import TokenCounter
from hfscale.utils import distributed

_OUTSIDE_TRAINING = ("evaluate", "save")
_OWN_WIDTH = 4


class ScalingMetricsCallback(TrainerCallback):
    """Logs the keys below beside the Trainer's loss, and appends them to `scaling.jsonl` in the output directory.

    Rates are over the time since the previous log, without evaluations and saves, and over all processes. Tokens are
    counted on the host from the shapes of what enters the model, padding included. Nothing synchronises with the GPU
    between logs; the processes exchange a few numbers at each log. What cannot be known is left out.

    | metric key | unit | meaning |
    |---|---|---|
    | `scaling/tokens_per_s` | tokens/s | trained on by all processes together |
    | `scaling/tokens_per_s_per_gpu` | tokens/s | the same per process |
    | `scaling/tokens_seen` | tokens | trained on since step 0, over all resumes |
    | `scaling/mfu` | ratio | model FLOPs (attention counted in full) / peak |
    | `scaling/hfu` | ratio | executed FLOPs, recomputation included / peak |
    | `scaling/efficiency` | ratio | tokens/s/GPU over those of a recorded baseline of the same work |
    | `scaling/data_wait_fraction` | ratio | time the host waited for batches, of the rank that waited longest |
    | `scaling/comm_fraction` | ratio | time of exchange in which nothing is computed, of the rank with least of it |
    | `scaling/goodput` | ratio | time in optimizer steps that were kept / time since the first launch |
    | `scaling/usd` | USD | spent since the first launch: processes x hours x price |
    | `scaling/usd_per_million_tokens` | USD | the same per million of `scaling/tokens_seen` |
    | `scaling/noise_scale` | sequences | batch that the gradient's noise is worth; only with `noise_scale=True` |
    | `gpu/memory_peak_gib` | GiB | most memory PyTorch has allocated on a GPU, of the fullest one |

    Where a run loses time, one cause is named in the log, with its numbers and the mend (`hfscale.metrics.triage`).
    `scaling.jsonl` holds one object per training log: these keys, the other callbacks', `step`, `time`
    (Unix seconds) and Trainer's own `loss`, `grad_norm`, `learning_rate` and `epoch`. What else `hfscale report` reads
    (launches, saves, numbers per rank) is described in `hfscale.metrics.records`.

    Args:
        peak_tflops (`float`, *optional*): dense peak of one device in TFLOP/s, for hardware not in `hardware.toml`.
        usd_per_gpu_hour (`float`, *optional*): price of one device; absent: of `prices.toml`, where it has the device.
        baseline (`str` or `Path`, *optional*): a file of `hfscale sweep`; absent: `~/.config/hfscale/baselines.json`,
            where it exists.
        noise_scale (`bool`): measure the gradient noise scale too, from the gradients of one step in fifty at most
            that is logged. Off unless asked for, as it puts hooks on the parameters, or under FSDP2 on the exchange.

    Raises:
        UsageError: a peak or price that is not positive.
        ConfigFileError: when training begins: a baseline or price list that cannot be read.
    """

    def __init__(
        self,
        *,
        peak_tflops: float | None = None,
        usd_per_gpu_hour: float | None = None,
        baseline: str | Path | None = None,
        noise_scale: bool = False,
    ) -> None:
        for name, value, unit in (
            ("peak_tflops", peak_tflops, "TFLOP/s"),
            ("usd_per_gpu_hour", usd_per_gpu_hour, "USD"),
        ):
            if value is not None and not value > 0:
                raise UsageError(f"{name} is {value}: it must be greater than 0, in {unit}")
        self.peak_tflops = peak_tflops
        self.usd_per_gpu_hour = usd_per_gpu_hour
        self._communication = CommunicationMeter()
        self._efficiency = EfficiencyMeter(Path(baseline) if baseline is not None else None)
        self._spending = SpendingMeter(usd_per_gpu_hour)
        self._noise = NoiseScaleMeter() if noise_scale else None
        self._meters: list[Meter] = [
            UtilisationMeter(peak_tflops),
            self._communication,
            self._efficiency,
            self._spending,
        ]
        self._meters += [self._noise] if self._noise is not None else []
        self._counter = TokenCounter()
        self._clock = PhaseClock()
        self._files = RunFiles()
        self._watch = TriageWatch()
        self._wandb_run: WandbRun | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if "wandb" in args.report_to:
            self._wandb_run = WandbRun()
            prepend_callback(calling_trainer(), self._wandb_run)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = calling_trainer()
        if self._wandb_run is not None:
            self._wandb_run.settle(state, reached=self._files.last_step(args))
        self._saved = saved_state(state, "metrics")
        self._tokens_seen = int(self._saved.setdefault("tokens_seen", 0))
        # Ranks that share matrices see the same tokens; those that share a sequence see a part of it each.
        self._same_tokens = trainer.get_tp_size()
        self._sequence_parts = trainer.get_cp_size() * trainer.get_sp_size()
        for meter in self._meters:
            meter.begin(trainer, state)
        self._step_meters = [meter for meter in self._meters if meter.watches_steps]
        self._ledger = self._spending.goodput_tracker = self._files.begin(trainer, state, self._efficiency.facts())
        self._clock.restart()  # the ledger counts up to here
        self._watch.begin()
        self._counter.attach(trainer.model_wrapped)
        self._counted, self._logged_step = self._counter.tokens, state.global_step
        MetricInjector.of(trainer).add(self._keys)
        DataFetchHook.of(trainer).add(self._batch_came)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._clock.end("other")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._clock.end("compute")  # ranks that had their batches have waited for those that had not
        for meter in self._step_meters:
            meter.step_begin(state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for meter in self._step_meters:
            meter.step_end(state)
        self._clock.end("compute")
        # A save may follow before the next log: keep what it will record up to date, from this process alone.
        self._saved["tokens_seen"] = self._tokens_seen + self._uncollected() * args.world_size // self._same_tokens
        self._ledger.update(self._clock.seconds)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._clock.end("evaluate")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._files.saved(state, seconds=self._clock.end("save"))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "loss" in logs and state.is_world_process_zero:
            self._files.logged(state, logs, durable=control.should_save)
            workload = self._efficiency.workload
            finding = self._watch.look(
                logs, hides=self._communication.hides, tokens_per_gpu=workload.tokens_per_gpu if workload else None
            )
            if finding is not None:
                self._files.found(state, finding)
        # Trainer logs an evaluation's metrics before it fires `on_evaluate`.
        self._clock.end("evaluate" if any(key.startswith("eval_") for key in logs or ()) else "other")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._counter.detach()
        for meter in self._meters:
            meter.end()
        advice = self._noise.advice if self._noise is not None else None
        self._files.ended(state, split=dict(saved_state(state, "goodput").get("seconds", {})), advice=advice)
        if self._wandb_run is not None:
            self._wandb_run.publish(args, state)

    def _batch_came(self) -> None:
        self._clock.end("data_wait")

    def _uncollected(self) -> int:
        return self._counter.tokens - self._counted

    def _keys(self, state: TrainerState) -> dict[str, float]:
        """The keys of the window that ends now. Called on every rank."""
        self._clock.end("compute")  # Trainer has just waited for the loss, that is for the GPU
        seconds = self._clock.take()
        training_s = sum(s for phase, s in seconds.items() if phase not in _OUTSIDE_TRAINING)
        row = [self._uncollected(), training_s, seconds.get("data_wait", 0.0), _peak_memory_gib()]
        row += [number for meter in self._meters for number in meter.row(state)]
        steps, self._logged_step = state.global_step - self._logged_step, state.global_step
        self._counted = self._counter.tokens
        self._ledger.fold(seconds)
        rows = distributed.gather_rows(row)
        tokens, training_times, waits, memory = ([row[i] for row in rows] for i in range(_OWN_WIDTH))
        window_tokens = sum(tokens) / self._same_tokens
        self._tokens_seen += int(window_tokens)
        self._saved["tokens_seen"] = self._tokens_seen
        if window_tokens == 0 or max(training_times) == 0 or steps == 0:
            return {}
        window = Window(
            steps=steps,
            seconds=max(training_times),
            tokens=window_tokens,
            tokens_seen=self._tokens_seen,
            tokens_per_s_per_gpu=window_tokens / max(training_times) / len(rows),
            sequence_length=self._counter.sequence_length * self._sequence_parts,
        )
        shares = [wait / training for wait, training in zip(waits, training_times, strict=True)]
        keys = {
            "scaling/tokens_per_s": window_tokens / window.seconds,
            "scaling/tokens_per_s_per_gpu": window.tokens_per_s_per_gpu,
            "scaling/tokens_seen": self._tokens_seen,
            "scaling/data_wait_fraction": max(shares),
        }
        at = _OWN_WIDTH
        for meter in self._meters:
            keys |= meter.keys([row[at : at + meter.width] for row in rows], window, state)
            at += meter.width
        if max(memory) > 0:
            keys["gpu/memory_peak_gib"] = max(memory)
        if state.is_world_process_zero:
            self._files.workload(state, self._efficiency.facts, self._spending.rate)
            measured = {"data_wait_fraction": shares, "memory_peak_gib": memory}
            self._files.ranks(state, measured | {"comm_fraction": self._communication.shares})
        return keys


def _peak_memory_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
