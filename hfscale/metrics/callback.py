"""ScalingMetricsCallback: throughput, efficiency, and where time and money go, at each logging step."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from hfscale.core.logging import get_logger
from hfscale.core.options import takes_options
from hfscale.core.phases import COMPUTE, DATA_WAIT, training_seconds
from hfscale.core.records import last_logged_step
from hfscale.core.versions import context_parallel_size, sequence_parallel_size
from hfscale.metrics.expert_load import ExpertLoad, expert_load_of
from hfscale.metrics.fingerprint import RunFingerprint
from hfscale.metrics.meters.communication import CommunicationMeter
from hfscale.metrics.meters.efficiency import EfficiencyMeter
from hfscale.metrics.meters.goodput_and_cost import GoodputMeter
from hfscale.metrics.meters.meter import Meter, Window
from hfscale.metrics.meters.noise_scale import NoiseScaleMeter
from hfscale.metrics.meters.utilization import UtilizationMeter
from hfscale.metrics.options import MetricsOptions
from hfscale.metrics.recorder import RunRecorder, is_of_evaluation
from hfscale.metrics.tokens import TokenCounter, TokenCounts
from hfscale.metrics.triage import TriageWatch
from hfscale.metrics.wandb_run import WandbRun
from hfscale.trainer.adapter import AdapterCallback, TrainerAdapter
from hfscale.trainer.batches import batch_entries
from hfscale.trainer.collector import Columns
from hfscale.trainer.setup import run_setup
from hfscale.trainer.state import saved_state

logger = get_logger(__name__)


class ScalingMetricsCallback(AdapterCallback):
    """Logs the keys below together with the Trainer's loss, and appends them to the run's `scaling.jsonl`.

    Rates cover the time since the previous log, without evaluations and saves, and all processes. Tokens are those of
    forwards with gradients (`hfscale.metrics.tokens.TokenCounter`), padding included. Nothing synchronizes with the
    GPU between logs, and the processes exchange a few numbers at each log. A key whose value is unknown is left out: a
    model of images or audio has no tokens.

    | metric key | unit | meaning |
    |---|---|---|
    | `scaling/tokens_per_s` | tokens/s | tokens trained on by all processes together |
    | `scaling/tokens_per_s_per_gpu` | tokens/s | the same, divided by the number of processes |
    | `scaling/tokens_seen` | tokens | tokens trained on since step 0, over all resumes |
    | `scaling/padding_fraction` | ratio | padding / tokens, where masks, positions or labels tell what is padding |
    | `scaling/samples_per_s` | samples/s | sequences, images or audio clips trained on by all processes together |
    | `scaling/mfu` | ratio | model FLOPs utilization: model FLOPs (attention in full) / peak; see `UtilizationMeter` |
    | `scaling/hfu` | ratio | hardware FLOPs utilization: executed FLOPs, recomputation included / peak |
    | `scaling/efficiency` | ratio | tokens/s/GPU over those of a recorded baseline of the same work |
    | `scaling/data_wait_fraction` | ratio | time waiting for batches / time, on the rank that waits longest |
    | `scaling/comm_fraction` | ratio | communication that no computation hides / time, on the rank with the least |
    | `scaling/goodput` | ratio | time in optimizer steps that were kept / time since the first launch, less pauses |
    | `scaling/usd` | USD | cost since the first launch: processes x hours x price, summed over the launches |
    | `scaling/usd_per_million_tokens` | USD | cost per million of `scaling/tokens_seen` |
    | `scaling/noise_scale` | sequences | gradient noise scale (McCandlish et al. 2018); only with `noise_scale=True` |
    | `moe/max_load` | ratio | tokens of the fullest expert / mean, in the layer where it is largest; 1 is balanced |
    | `moe/entropy` | ratio | entropy of the tokens over the experts / its largest value, in the least balanced layer |
    | `moe/dropped_fraction` | ratio | choices of the routers that no expert computes / all choices |
    | `gpu/memory_peak_gib` | GiB | peak memory allocated by PyTorch, on the GPU with the most |

    If a run loses time, the log names the bottleneck, with its numbers and what to change first
    (`hfscale.metrics.triage`). `scaling.jsonl` holds one object per training log: these keys, those of the other
    callbacks, `step`, `time` (Unix seconds) and Trainer's own `loss`, `grad_norm`, `learning_rate` and `epoch`. The
    other files that `hfscale report` reads (launches, saves, numbers per rank) are described in
    `hfscale.core.records`.

    Args:
        **options: the options, see below.

    Raises:
        ParameterError: a peak or a price is not positive.
        ConfigFileError: when training begins: the baselines file or the price list cannot be read.
    """

    @takes_options(MetricsOptions)
    def __init__(self, options: MetricsOptions) -> None:
        self.options = options
        self._begin_run()

    def _begin_run(self) -> None:
        self._counter = TokenCounter()
        self._utilization = UtilizationMeter(self.options.peak_tflops, self._counter)
        self._communication = CommunicationMeter()
        self._efficiency = EfficiencyMeter(self.options.baseline)
        self._goodput = GoodputMeter(self.options.usd_per_gpu_hour)
        self._noise = NoiseScaleMeter() if self.options.noise_scale else None
        self._meters: list[Meter] = [
            self._utilization,
            self._communication,
            self._efficiency,
            self._goodput,
        ]
        if self._noise is not None:
            self._meters.append(self._noise)
        self._expert_load: ExpertLoad | None = None
        self._recorder = RunRecorder()
        self._fingerprint = RunFingerprint()
        self._triage = TriageWatch()
        self._wandb_run: WandbRun | None = None

    def before_train(self, adapter: TrainerAdapter) -> None:
        """Make transformers' WandbCallback continue one W&B run, if the Trainer reports to W&B."""
        self._wandb_run = None
        if "wandb" in (adapter.trainer.args.report_to or ()):
            over_tokens = self.options.wandb_x_axis == "tokens"
            self._wandb_run = WandbRun(over_tokens=over_tokens)
            adapter.prepend_callback(self._wandb_run)
            adapter.at_training_end(self._wandb_run.restore_environment)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        adapter = TrainerAdapter.current()
        trainer = adapter.trainer
        self._release()  # of a training loop that `auto_find_batch_size` has restarted
        wandb_run, fingerprint = self._wandb_run, self._fingerprint
        self._begin_run()
        # The latter is already a part of the collector
        self._wandb_run, self._fingerprint = wandb_run, fingerprint
        if wandb_run is not None:
            wandb_run.settle(
                state, last_logged_step=last_logged_step(adapter.checkpoints.run_dir())
            )
        adapter.at_training_end(self._release)
        self._saved = saved_state(state, "metrics")
        self._tokens_seen = int(self._saved.setdefault("tokens_seen", 0))
        # Tensor-parallel ranks see the same tokens; ranks that share a sequence see a part of it each.
        self._ranks_with_same_tokens = trainer.get_tp_size()
        self._sequence_parts = context_parallel_size(trainer) * sequence_parallel_size(trainer)
        for meter in self._meters:
            meter.begin(trainer, state)
        facts = self._efficiency.facts()
        if adapter.announced.grows_batch and args.max_steps <= 0:
            # What ends it: the steps are not equally long
            facts = {**facts, "passes": args.num_train_epochs}
        self._goodput_tracker = self._recorder.begin(
            adapter.checkpoints.run_dir(),
            args,
            state,
            saved_goodput=saved_state(state, "goodput"),
            facts=facts,
        )
        self._goodput.goodput_tracker = self._goodput_tracker
        if state.is_world_process_zero:
            self._recorder.setup(state, run_setup(trainer))
        self._clock = adapter.collect(self)
        self._fingerprint.begin(trainer, state, adapter.checkpoints.run_dir())
        self._counter.watcher = self._fingerprint.digest.see
        adapter.collect(self._fingerprint)
        self._expert_load = expert_load_of(trainer)
        if self._expert_load is not None:
            adapter.collect(self._expert_load, self._expert_load.judge)
        self._clock.restart()  # the goodput tracker has accounted for the time until now
        self._triage.begin()
        self._counter.attach(batch_entries(trainer))
        self._counter.take()
        self._gathered_tokens = self._counter.tokens
        self._is_first_log = True
        self._logged_step = state.global_step

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._counter.step_begin()
        for meter in self._meters:
            if meter.watches_steps:
                meter.step_begin(state)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._utilization.pause()
        for meter in self._meters:
            if meter.watches_steps:
                meter.substep_end(state)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._utilization.pause()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for meter in self._meters:
            if meter.watches_steps:
                meter.step_end(state)
        # A save may come before the next log, so keep what it stores up to date, estimated from this process alone.
        tokens = self._counter.tokens - self._gathered_tokens
        self._saved["tokens_seen"] = (
            self._tokens_seen + tokens * args.world_size // self._ranks_with_same_tokens
        )
        self._goodput_tracker.update(self._clock.seconds_until_now(COMPUTE))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._recorder.saved(state, seconds=self._clock.elapsed())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or not state.is_world_process_zero:
            return
        if any(map(is_of_evaluation, logs)):
            self._recorder.evaluated(state, logs)
        # The log at the end of the training has no loss, and the keys of the steps since the last one
        is_measured = "loss" in logs or "scaling/goodput" in logs
        if is_measured:
            self._recorder.logged(state, logs, durable=control.should_save)
        if "loss" in logs:
            workload = self._efficiency.workload
            finding = self._triage.check(
                logs,
                comm_over_backward=self._communication.comm_over_backward,
                tokens_per_gpu=(workload.tokens_per_gpu or None) if workload else None,
            )
            if finding is not None:
                self._recorder.found(state, finding)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._release()
        advice = self._noise.advice if self._noise is not None else None
        self._recorder.ended(
            state, split=dict(saved_state(state, "goodput").get("seconds", {})), advice=advice
        )
        if self._wandb_run is not None:
            self._wandb_run.publish(args, state)

    def _release(self) -> None:
        """Remove what the counter and the meters have put on the model, and record no further alarms."""
        self._recorder.release()
        self._counter.detach()
        if self._expert_load is not None:
            self._expert_load.detach()
        for meter in self._meters:
            meter.end()

    def numbers(
        self, state: TrainerState, logs: Mapping[str, float], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """End the window on this rank, and return its part of the exchange (see `LogPart`).

        Args:
            state (`TrainerState`): the state of the Trainer.
            logs (`Mapping[str, float]`): the keys that Trainer logs.
            seconds (`Mapping[str, float]`): seconds of each phase since the previous log.

        Returns:
            `dict[str, float]`: the numbers of this rank and of its meters, by name.
        """
        self._goodput_tracker.fold(seconds)
        counts: TokenCounts = self._counter.take()
        self._gathered_tokens = self._counter.tokens
        numbers: dict[str, float] = {
            **{name: float(value) for name, value in asdict(counts).items()},
            "training_s": training_seconds(seconds),
            "data_wait_s": seconds.get(DATA_WAIT, 0.0),
            "memory_peak_gib": _peak_memory_gib(),
        }
        for meter in self._meters:
            numbers |= meter.numbers(state)
        return numbers

    def keys(
        self, columns: Columns, state: TrainerState, logs: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the metric keys of the window that ends now. It is called on every rank.

        Args:
            columns (`Mapping[str, Sequence[float]]`): the numbers of every rank, by name.
            state (`TrainerState`): the state of the Trainer.
            logs (`Mapping[str, float]`): the keys that Trainer logs.

        Returns:
            `dict[str, float]`: the metric keys that are known.
        """
        window = self._window(columns, state, logs.get("grad_norm"))
        if window is None:
            return {}
        waits = [
            wait_s / training_s
            for wait_s, training_s in zip(
                columns["data_wait_s"], columns["training_s"], strict=True
            )
        ]
        keys = self._rates(columns, window)
        keys["scaling/data_wait_fraction"] = max(waits)
        for meter in self._meters:
            keys |= meter.keys(columns, window, state)
        memory = columns["memory_peak_gib"]
        if max(memory) > 0:
            keys["gpu/memory_peak_gib"] = max(memory)
        if self._recorder.needs_workload:
            facts = self._efficiency.facts() | self._utilization.facts()
            self._recorder.workload(state, facts, self._goodput.rate)
            self._recorder.job(state, self._efficiency.job_facts())
        self._recorder.ranks(
            state,
            {
                "data_wait_fraction": waits,
                "memory_peak_gib": memory,
                "comm_fraction": self._communication.shares,
            },
        )
        return keys

    def _rates(self, columns: Columns, window: Window) -> dict[str, float]:
        """Return tokens and samples per second, and the share of padding."""
        keys: dict[str, float] = {}
        samples = sum(columns["samples"]) / (self._ranks_with_same_tokens * self._sequence_parts)
        if window.tokens:
            keys["scaling/tokens_per_s"] = window.tokens / window.seconds
            keys["scaling/tokens_per_s_per_gpu"] = window.tokens_per_s_per_gpu
            keys["scaling/tokens_seen"] = self._tokens_seen
            if sum(columns["unmasked"]) == 0:
                keys["scaling/padding_fraction"] = sum(columns["padding"]) / sum(columns["tokens"])
        elif self._is_first_log:
            instead = "scaling/samples_per_s is" if samples else "no rate is"
            batch = ", ".join(self._counter.inputs) or "no tensors that hfscale has seen"
            logger.info(
                "scaling/tokens_per_s is not logged: the batches are %s; %s logged instead",
                batch,
                instead,
            )
        if samples:
            keys["scaling/samples_per_s"] = samples / window.seconds
        self._is_first_log = False
        return keys

    def _window(
        self, columns: Columns, state: TrainerState, grad_norm: float | None
    ) -> Window | None:
        """Combine the numbers of all ranks, and count their tokens; None if nothing was trained on."""
        steps = state.global_step - self._logged_step
        self._logged_step = state.global_step
        tokens = sum(columns["tokens"]) / self._ranks_with_same_tokens
        self._tokens_seen += int(tokens)
        self._saved["tokens_seen"] = self._tokens_seen
        seconds = max(columns["training_s"])
        if seconds == 0 or steps == 0:
            return None
        mean_length = sum(columns["attended"]) / max(sum(columns["main_tokens"]), 1)
        return Window(
            steps=steps,
            seconds=seconds,
            tokens=tokens,
            tokens_seen=self._tokens_seen,
            tokens_per_s_per_gpu=tokens / seconds / len(columns["tokens"]),
            sequence_length=round(mean_length * self._sequence_parts),
            grad_norm=grad_norm,
        )


def _peak_memory_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
