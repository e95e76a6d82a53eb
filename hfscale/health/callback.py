"""Checks that a run is the one that was asked for and that its ranks are healthy, before the first step and during it.

At the beginning the callback compares the strategy with the request, checks the node (`hfscale.health.node`) and lets
all ranks check each other (`hfscale.health.preflight`). During the run it feeds two observers: the `Monitor`, which
compares the ranks at each log, and the `HangWatchdog`, a thread that detects when progress stops.
"""

import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from hfscale.checkpoint.resume import newest_resumable
from hfscale.checkpoint.store import archive, checkpoint_step, list_with_snapshots
from hfscale.core import distributed
from hfscale.core.alarms import DISK, HEALTH, LOSS, raise_alarm
from hfscale.core.best_effort import best_effort
from hfscale.core.collectives import TRAINING
from hfscale.core.counts import counted
from hfscale.core.exchanges import OneProcess
from hfscale.core.findings import Finding, blamed_hosts, join_errors
from hfscale.core.late import late
from hfscale.core.logging import get_logger, is_main_process
from hfscale.core.nvidia_driver import check_gpus_of_driver
from hfscale.core.options import takes_options
from hfscale.core.rank_link import connect
from hfscale.core.rank_store import RankStore
from hfscale.core.records import RankLines
from hfscale.core.run_memory import RunMemory, trust_until
from hfscale.errors import DataError, HealthError, StrategyMismatchError
from hfscale.health import node, preflight
from hfscale.health.gpu import GpuWatch, sensor_of
from hfscale.health.hang import HangWatchdog, Limits
from hfscale.health.jitter import AgreedCollection, JitterWatch
from hfscale.health.local_time import LocalTimer
from hfscale.health.loss import LossGuard
from hfscale.health.loss_weights import why_tokens_weigh_unequally
from hfscale.health.monitor import GpuThread, Monitor, gather_hosts
from hfscale.health.options import HealthOptions
from hfscale.trainer.adapter import AdapterCallback, TrainerAdapter
from hfscale.trainer.collector import Arrays
from hfscale.trainer.frames import training_frame
from hfscale.trainer.precision import why_accumulation_is_inexact, why_products_are_slow
from hfscale.trainer.state import model_of, output_folder
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.native import why_expert_gradients_are_small
from hfscale.trainer.strategies.requested import check_launch
from hfscale.trainer.strategies.tensors import full_numel

logger = get_logger(__name__)

PREFLIGHT_DEADLINE_S = 60.0
PREFLIGHT_SECONDS_PER_NODE = 1.0
"""Seconds by which the deadline of the pre-flight grows with each node after the first: NCCL's first connections take
longer with more ranks. It is an assumption of ours, and not measured."""
ALARM_EVERY_S = 600.0
"""Least seconds between two alarms of the same check; each finding is logged."""
_SPEED_PROBE_BYTES = 16 * 2**20
_LOG_LEVELS = {"note": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_trainings = 0
"""Trainings of this process so far; each has a store of its own."""


class CommHealthCallback(AdapterCallback):
    """Stops a run that is not the one asked for or whose ranks are not healthy, and names what slows it down.

    At the beginning, the strategy, the number of processes and the model wrapper are compared with the request; the
    node's variables, limits and disk are checked; every rank multiplies matrices with a known product, and all
    collectives are checked for their values (half a second). During the run a thread detects hangs and names the rank
    that the others wait for, with every rank's stacks in `hfscale_hang/`. At each log the ranks exchange one vector,
    which shows stragglers, ranks that wait for data, replicas that differ and GPUs that throttle. Losses are checked
    for NaN, infinity and spikes. With `replay_every_steps` the first micro-batch of every N-th step is computed twice
    and compared bit by bit, and weights and states of the optimizer are hashed while nothing writes them, which finds
    silent data corruption (`hfscale.replays.replay`). With `skip_bad_batches` the batch of a step whose loss or
    gradient norm is NaN, infinite or an outlier is left out, as if the run had never trained on it
    (`hfscale.replays.bad_batches`). See `hfscale.health`.

    | metric key | unit | meaning |
    |---|---|---|
    | `scaling/straggler_skew` | ratio | slowest rank's own work in a step over the median rank's; from two ranks on |
    | `scaling/straggler_ratio` | ratio | own work of the slowest straggler over the median rank's; 1: no rank is one |
    | `health/gc_fraction` | share | time of the worst rank in Python's automatic garbage collection, from 0.1% on |
    | `health/cpu_wait_fraction` | share | time in which a rank's main thread had no CPU core, worst rank, from 1% on |
    | `health/compiled_graphs` | graphs | graphs that torch.compile has compiled since the previous log, worst rank |
    | `health/context_switches_per_s` | 1/s | how often a rank's main thread lost its core, worst rank, from 20 on |
    | `health/cpu_clock_missing` | share | clock of its core below the highest one, worst rank, from 4% on |
    | `health/new_pages_per_s` | 1/s | pages of memory that the system had to provide, worst rank, from 4,000 on |
    | `gpu/temperature_c_max` | °C | hottest GPU (with `nvidia-ml-py`) |
    | `gpu/power_w` | W | mean power of a GPU |
    | `gpu/throttled` | ratio | share of the GPUs that are throttled by temperature or a power brake |
    | `health/replay_mismatches` | replays | with `replay_every_steps`: replays so far that gave another result |
    | `health/replay_compared` | share | with `replay_every_steps`: values of a micro-batch that are compared |
    | `health/replay_s` | s | with `replay_every_steps`: time in replays and hashes since the previous log |
    | `health/skipped_batches` | batches | with `skip_bad_batches`: batches that the run has left out so far |

    Args:
        **options: the options, see below.

    Raises:
        StrategyMismatchError: when the Trainer is created (number of processes, Megatron-LM) or training begins
            (strategy, wrapper, ranks that disagree).
        HealthError: a rank is missing, or computes or communicates wrongly; with `stop`, the training is not healthy.
        DataError: one more batch is bad than `skip_bad_batches` allows to leave out.
        ParameterError: an argument has another value than those above.
    """

    @takes_options(HealthOptions)
    def __init__(self, options: HealthOptions) -> None:
        self.options = options
        self._begin_run()

    def _begin_run(self) -> None:
        self._watchdog: HangWatchdog | None = None
        self._monitor: Monitor | None = None
        self._previous_hook: Any = None
        self._losses = LossGuard()
        self._healthy_step = 0
        self._rank_lines: RankLines | None = None
        # A `StepReplay`, which is loaded where it is asked for
        self._replay: Any = None
        self._alarmed_at: dict[str, float] = {}
        self._checkpoint_bytes = 0
        self._is_supervised = False
        self._collection: AgreedCollection | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_init_end(args, state, control, **kwargs)
        check_launch(args)
        Strategy.of(TrainerAdapter.current().trainer).check_request()

    def before_train(self, adapter: TrainerAdapter) -> None:
        """Have a training refused whose batches cannot be left out, before Trainer prepares it."""
        if self.options.skip_bad_batches is not None:
            adapter.announced.skip_bad_batches = self.options.skip_bad_batches

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        adapter = TrainerAdapter.current()
        trainer = adapter.trainer
        check_launch(args)
        strategy = Strategy.of(trainer)
        strategy.check()
        steps = TRAINING.gather("start: step", state.global_step)
        if len(set(steps)) > 1:
            raise StrategyMismatchError(
                f"the ranks start at different steps {steps}: they do not see the same "
                "output_dir; put it on storage that all machines share"
            )
        running = f"strategy {strategy.name} on {counted(args.world_size, 'process')} ({args.device.type})"
        if args.world_size > 1:
            running += f": {strategy.describe()}"
        if args.logging_nan_inf_filter:  # Trainer's default: one line says both
            logger.warning(
                "%s; logging_nan_inf_filter is on: a NaN or infinite loss is logged as the mean of earlier ones, so "
                "that it is not found, and each micro-batch waits for the GPU; set logging_nan_inf_filter=False",
                running,
            )
        else:
            logger.info("%s", running)
        has_bf16 = args.device.type == "cuda" and torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        for doubt in (
            why_accumulation_is_inexact(trainer),
            why_expert_gradients_are_small(trainer.model, args.device.type),
            why_products_are_slow(trainer, has_bf16=has_bf16),
            why_tokens_weigh_unequally(trainer),
            *strategy.doubts(),
        ):
            if doubt is not None:
                logger.warning(doubt)
        self._end()  # an earlier training may have ended by an exception
        replay = self._replay  # of a training loop that `auto_find_batch_size` has restarted
        self._begin_run()
        self._replay = replay
        self._healthy_step = state.global_step
        self._checkpoint_bytes = _checkpoint_bytes(trainer)
        self._is_supervised = is_any_rank_supervised()
        rank_store = (
            connect_rank_store(args)
            if self.options.preflight or self.options.hang_after_s
            else None
        )
        if not all(TRAINING.gather("start: rank store", rank_store is not None)):
            rank_store = None  # a rank that cannot reach it would be missed by the others
        if self.options.preflight:
            check_ranks(trainer, rank_store)
            if is_main_process() and self._checkpoint_bytes:
                self._raise_alarms(check_room(args, self._checkpoint_bytes), state.global_step)
        self._rank_lines = (
            RankLines(adapter.checkpoints.run_dir()) if state.is_world_process_zero else None
        )
        hosts = gather_hosts()
        self._start_monitor(trainer, strategy, hosts)
        if rank_store is not None and self.options.hang_after_s:
            self._start_watchdog(args, rank_store, self.options.hang_after_s)
        adapter.collect(self, self.judge)
        self._watch_jitter(adapter, hosts)
        if self.options.replay_every_steps is not None and self._replay is None:
            self._replay = late("StepReplay")(
                trainer, self.options.replay_every_steps, self._replay_differs
            )
            adapter.wrap_training_step(self._replay.wrap)
            adapter.after_reports("replay", self._replay.step_ended)
            adapter.add_metrics(self._replay.keys)
            adapter.at_training_end(self._forget_replay)
        if self.options.skip_bad_batches is not None:
            # The callback may have joined a training that was already running
            strategy.check_support(skip_bad_batches=self.options.skip_bad_batches)
            late("BadBatches")(
                adapter, self.options.skip_bad_batches, self._left_out, self._cannot_leave_out
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._watchdog is not None:
            self._watchdog.step_began(state.global_step + 1)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._progressed()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._replay is not None:
            self._replay.before_update()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._monitor is not None:
            self._monitor.step_ended()
        if self._watchdog is not None:
            self._watchdog.step_ended()
        if self._collection is not None:
            self._collection.step_ended(state.global_step)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._progressed()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._progressed()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._progressed()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._progressed()
        if self._collection is not None:
            self._collection.saved()
        if is_main_process() and self._checkpoint_bytes:
            with best_effort("checking the room on the disk", output_folder(args)):
                self._raise_alarms(check_room(args, self._checkpoint_bytes), state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._end()

    def _progressed(self) -> None:
        if self._watchdog is not None:
            self._watchdog.progressed()

    def _watch_jitter(self, adapter: TrainerAdapter, hosts: Sequence[str]) -> None:
        watch = JitterWatch(hosts, self._report)
        adapter.collect(watch, watch.judge)
        watch.begin()
        adapter.at_training_end(watch.end)
        if self.options.gc_every_steps is not None:
            self._collection = AgreedCollection(self.options.gc_every_steps)
            self._collection.begin()
            adapter.at_training_end(self._collection.end)

    def _report(self, found: Sequence[Finding], step: int) -> None:
        log_findings(found)
        self._raise_alarms(found, step)

    def _start_monitor(self, trainer: Trainer, strategy: Strategy, hosts: Sequence[str]) -> None:
        args = trainer.args
        has_peers = args.world_size > 1  # a single rank is not slower than others
        timer = (
            LocalTimer(trainer.model_wrapped, strategy, args.device)
            if self.options.stragglers and has_peers
            else None
        )
        if timer is not None and not timer.measures:
            logger.info(
                "stragglers are not looked for: under %s a rank's own work cannot be timed",
                strategy.name,
            )
        sensor = sensor_of(args.device)
        gpu = GpuThread(GpuWatch(sensor)) if sensor is not None else None
        if gpu is not None:
            gpu.start()
        are_replicas = strategy.replicas and not strategy.shards and has_peers
        self._monitor = Monitor(
            hosts=hosts,
            timer=timer,
            gpu=gpu,
            replicas=list(model_of(trainer).parameters()) if are_replicas else (),
            have_equal_gradients=strategy.equal_gradients,
        )

    def _start_watchdog(
        self, args: TrainingArguments, rank_store: RankStore, hang_after_s: float
    ) -> None:
        self._watchdog = HangWatchdog(
            rank_store,
            output_folder(args),
            limits=Limits(floor_s=hang_after_s, outside_s=max(Limits.outside_s, 10 * hang_after_s)),
            abort=self.options.on_hang == "abort" or self._is_supervised,
            inside=training_frame(),
        )
        self._watchdog.start()
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_exception

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Find the rank that caused the exception that ends this process, then call the previous hook."""
        link = connect()
        if link is not None and isinstance(error, Exception):
            link.ending_by(error)  # before the watchdog gives the search for the rank as the reason
        if self._watchdog is not None and isinstance(error, Exception):
            self._watchdog.examine_failure(error)
            self._watchdog.stop()
        (self._previous_hook or sys.__excepthook__)(kind, error, trace)

    def numbers(
        self, state: TrainerState, logs: Mapping[str, float], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Return what this rank exchanges at the log (see `LogPart`).

        Args:
            state (`TrainerState`): the state of the Trainer.
            logs (`Mapping[str, float]`): the keys that Trainer logs, of which some are exchanged.
            seconds (`Mapping[str, float]`): seconds of each phase since the previous log.

        Returns:
            `dict[str, float]`: the numbers of the monitor, by name.
        """
        assert self._monitor is not None  # it ends with the training, as the collector does
        return self._monitor.numbers(
            state.global_step,
            logs.get("loss"),
            logs.get("grad_norm"),
            seconds,
            logs.get("learning_rate"),
        )

    def judge(self, columns: Arrays, state: TrainerState) -> dict[str, Any]:
        """Compare all ranks. It is called on rank 0 only.

        Args:
            columns (`Mapping[str, ndarray]`): the numbers of every rank, by name.
            state (`TrainerState`): the state of the Trainer.

        Returns:
            `dict[str, Any]`: the judgement, as JSON can represent it.
        """
        assert self._monitor is not None
        return self._monitor.judge(state.global_step, columns)

    def keys(
        self, judgement: Mapping[str, Any], state: TrainerState, logs: Mapping[str, float]
    ) -> dict[str, float]:
        """Log what was found, and return the metric keys of this log. It is called on every rank.

        Args:
            judgement (`Mapping[str, Any]`): what `judge` has returned on rank 0.
            state (`TrainerState`): the state of the Trainer.
            logs (`Mapping[str, float]`): the keys that Trainer logs.

        Returns:
            `dict[str, float]`: the metric keys that are known.

        Raises:
            HealthError: on every rank: the training is not healthy, and `on_bad_training` is `stop`.
        """
        assert self._monitor is not None
        step = state.global_step
        comparison = self._monitor.comparison(judgement)
        found = list(comparison.findings)
        if comparison.loss is not None:
            bad_loss = self._losses.check(step, comparison.loss, comparison.grad_norm)
            found += [bad_loss] if bad_loss is not None else []
        of_ranks = {"compute_s": self._monitor.own_s, "temperature_c": self._monitor.temperatures_c}
        measured = {name: numbers for name, numbers in of_ranks.items() if numbers}
        if self._rank_lines is not None and measured:
            self._rank_lines.add(step, measured)
        self._withdraw(comparison.withdrawn, step)
        log_findings(found)
        self._raise_alarms(found, step)
        # These findings follow from what all ranks have exchanged, so all ranks stop or none.
        bad = [f for f in found if f.level == "error" and f.check in ("loss", "replicas")]
        if bad and self.options.on_bad_training == "stop":
            self._stop(bad, self._healthy_step)
        if not bad:
            self._healthy_step = step
        return {name: value for name, value in comparison.keys.items() if math.isfinite(value)}

    def _raise_alarms(self, found: Sequence[Finding], step: int) -> None:
        """Raise an alarm for each finding on the main process; the same check alarms once in `ALARM_EVERY_S`."""
        now = time.monotonic()
        for finding in found if is_main_process() else ():
            if (
                finding.level != "note"
                and now - self._alarmed_at.get(finding.check, -math.inf) >= ALARM_EVERY_S
            ):
                self._alarmed_at[finding.check] = now
                kind = {"loss": LOSS, "disk": DISK}.get(finding.check, HEALTH)
                raise_alarm(
                    kind, str(finding), step=step, level=finding.level, about=_subject(finding)
                )

    def _withdraw(self, withdrawn: Sequence[Finding], step: int) -> None:
        """Log on the main process which findings do not hold any more, and withdraw their alarms."""
        for finding in withdrawn if is_main_process() else ():
            text = f"{finding.where}: is no {finding.check} any more: what was reported of it is withdrawn"
            logger.info(text)
            self._alarmed_at.pop(finding.check, None)
            raise_alarm(HEALTH, text, step=step, level="note", withdraws=_subject(finding))

    def _replay_differs(self, found: list[Finding], verified_step: int) -> None:
        """Log what a replay has found; with `stop`, and under `hfscale run`, end the run, on all ranks.

        Args:
            found (`list[Finding]`): one error for each host.
            verified_step (`int`): the last step in which a replay has found nothing, or with which training began.
        """
        log_findings(found)
        self._raise_alarms(found, self._healthy_step)
        if self.options.on_bad_training == "stop" or self._is_supervised:
            self._stop(found, _newest_good_step(verified_step))

    def _left_out(self, finding: Finding, step: int) -> None:
        """Report a batch that is left out; each has an alarm of its own, since there are few."""
        log_findings([finding])
        if is_main_process():
            raise_alarm(LOSS, str(finding), step=step, level=finding.level)

    def _cannot_leave_out(self, finding: Finding) -> None:
        """End the run, after the step before: a relaunch would find the same batch, and have no more to leave out.

        Raises:
            DataError: it is always raised, on all ranks.
        """
        adapter = TrainerAdapter.current()
        self._raise_alarms([finding], adapter.trainer.state.global_step)
        _end_saves(adapter)
        self._end()
        raise DataError(f"stopped: {finding}")

    def _forget_replay(self) -> None:
        self._replay = None

    def _stop(self, bad: list[Finding], good_step: int) -> None:
        """End the run at the last checkpoint or snapshot that was written before the fault.

        Args:
            bad (`list[Finding]`): why.
            good_step (`int`): the last step that is known to be good; what was saved later is not used.

        Raises:
            HealthError: it is always raised, since it ends the run.
        """
        adapter = TrainerAdapter.current()
        _end_saves(adapter)
        output_dir = adapter.checkpoints.run_dir()
        memory = RunMemory.of_environment()
        with TRAINING.agreed("stop: archive"):
            if memory is not None and adapter.trainer.args.local_process_index == 0:
                trust_until(memory.snapshots(output_dir), good_step)
            archives = adapter.trainer.args.should_save and output_dir.is_dir()
            if archives:
                archive(output_dir, after_step=good_step)
        good = newest_resumable(output_dir, exchanges=OneProcess()).path if archives else None
        self._end()
        resume = (
            f"the relaunched command resumes from {good.name}"
            if good
            else "no good checkpoint was written"
        )
        raise HealthError(f"stopped: {join_errors(bad)}; {resume}", hosts=blamed_hosts(bad))

    def _end(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
            sys.excepthook = self._previous_hook
            self._watchdog = None
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None


def _end_saves(adapter: TrainerAdapter) -> None:
    """Wait for what is being written, which would be committed after the others have been archived."""
    adapter.checkpoints.wait_for_save()
    TRAINING.barrier("stop: saves have ended")


def _newest_good_step(verified_step: int) -> int:
    """Return the step up to which checkpoints are kept after a replay has found a difference; the same on all ranks.

    It is the last one that a replay has verified, unless everything that the run could resume from is of later steps.
    """
    adapter = TrainerAdapter.current()
    _end_saves(adapter)  # each deletes older ones
    kept: int | None = None
    if is_main_process():
        steps = [
            checkpoint_step(path) for path in list_with_snapshots(adapter.checkpoints.run_dir())
        ]
        has_verified = verified_step == 0 or any(step <= verified_step for step in steps)
        kept = verified_step if has_verified or not steps else max(steps)
        if kept != verified_step:
            logger.warning(
                "no checkpoint is left up to step %d, the last that a replay has verified: the run resumes at step %d",
                verified_step,
                kept,
            )
    good: int = TRAINING.gather("replay: good step", kept)[0]
    return good


def is_any_rank_supervised() -> bool:
    """Return whether `hfscale run` supervises a rank, the same on all ranks. Every rank must call it.

    A rank may have no supervisor where others have one: its node was launched without, or its supervisor is gone.
    """
    is_supervised = connect() is not None
    (any_supervised,) = TRAINING.maximum("start: supervised", [float(is_supervised)])
    return any_supervised > 0


def connect_rank_store(args: TrainingArguments) -> RankStore | None:
    """Connect to the launcher's store. Every rank must call it, once per training.

    Args:
        args (`TrainingArguments`): the training arguments.

    Returns:
        `RankStore` or `None`: a store that belongs to this training; None for a single process, if no launcher's
        variables point to a store, and if the store does not answer (which is logged).
    """
    global _trainings
    _trainings += 1  # on all ranks alike
    if args.world_size == 1:
        return None
    if "MASTER_ADDR" not in os.environ or "RANK" not in os.environ:
        logger.info(
            "no launcher's variables are set: ranks are not checked, and hangs are not watched for"
        )
        return None
    try:
        return RankStore.connect(f"training-{_trainings}")
    except HealthError as error:  # the process group may have been created without that store
        logger.error("ranks are not checked and hangs are not watched for: %s", error)
        return None


def preflight_deadline_s(environ: Mapping[str, str]) -> float:
    """Return the seconds within which every rank must have the verdict of the pre-flight.

    Args:
        environ (`Mapping[str, str]`): the environment variables, of which the launcher's give the number of nodes.
    """
    return PREFLIGHT_DEADLINE_S + PREFLIGHT_SECONDS_PER_NODE * (node.count_nodes(environ) - 1)


def check_ranks(trainer: Trainer, rank_store: RankStore | None) -> None:
    """Check this node, and all ranks together if they have a store; log what is found.

    Args:
        trainer (`Trainer`): prepared for training. Its arguments and its model give the device and the space that a
            checkpoint needs.
        rank_store (`RankStore`, *optional*): a store that has not been used yet; None: only this node is checked.

    Raises:
        HealthError: a rank is missing, or computes or communicates wrongly.
    """
    args = trainer.args
    of_this_node: list[Finding] = []
    if args.local_process_index == 0:
        of_this_node = node.check_node(os.environ, node.Node.here(node.gpu_names())) + _check_disk(
            trainer
        )
        if not args.use_cpu:
            of_this_node += check_gpus_of_driver()
    if rank_store is None:
        log_findings(of_this_node)
        return
    plan = preflight.PreflightPlan(
        device=args.device,
        deadline_s=preflight_deadline_s(os.environ),
        all_to_all=False,  # the training never connects every rank to every other one
        # Another callback, such as W&B's on rank 0, may take long when training begins
        arrival_s=Limits.outside_s,
        node_findings=of_this_node,
    )
    result = preflight.run(rank_store, plan)
    # A slow device does no harm apart from slowing the run down: it is logged, and the run's own times will show it.
    bad = [
        finding
        for finding in result.findings
        if finding.level == "error" and finding.check != "speed"
    ]
    if bad:
        raise HealthError(
            f"the ranks are not fit to train: {join_errors(bad)}", hosts=blamed_hosts(bad)
        )
    log_findings([*result.findings, *result.node_findings])


def _checkpoint_bytes(trainer: Trainer) -> int:
    """Return the size of a checkpoint with this model's weights and AdamW states; 0 if nothing is saved."""
    args = trainer.args
    if args.save_strategy == "no" and not TrainerAdapter.of(trainer).announced.callback_saves:
        return 0
    weights = 0
    trained = 0
    for parameter in model_of(trainer).parameters():
        elements = full_numel(parameter)
        weights += elements * parameter.element_size()
        if parameter.requires_grad:
            trained += elements
    return weights + node.BYTES_PER_TRAINED_PARAMETER * trained


def _check_disk(trainer: Trainer) -> list[Finding]:
    """Check space and time for checkpoints as large as this model's weights and AdamW states."""
    size = _checkpoint_bytes(trainer)
    if not size:
        return []
    folder = output_folder(trainer.args)
    return check_room(trainer.args, size, bytes_per_s=node.write_speed(folder, _SPEED_PROBE_BYTES))


def check_room(
    args: TrainingArguments, checkpoint_bytes: int, *, bytes_per_s: float | None = None
) -> list[Finding]:
    """Check that two checkpoints fit on the disk of the output directory.

    Args:
        args (`TrainingArguments`): the training arguments.
        checkpoint_bytes (`int`): size of one checkpoint.
        bytes_per_s (`float`, *optional*): write speed of the disk, to check the time of a save too.
    """
    return node.check_disk(
        output_folder(args),
        checkpoint_bytes=checkpoint_bytes,
        bytes_per_s=bytes_per_s,
        notice_s=node.DEFAULT_NOTICE_S,
    )


def _subject(finding: Finding) -> str:
    """Return what a finding is about, which tells it apart from others of the same check."""
    return f"{finding.check}: {finding.where}"


def log_findings(findings: Sequence[Finding]) -> None:
    """Log each finding in one line on the main process, and on another rank only a finding about its own GPU.

    Args:
        findings (`list[Finding]`): the level of each decides about its log level.
    """
    for finding in findings:
        is_about_own_gpu = finding.ranks == (distributed.rank(),) and finding.check == "gpu"
        if is_main_process():
            logger.log(_LOG_LEVELS[finding.level], "%s", finding)
        elif is_about_own_gpu:
            logger.error("%s", finding)
