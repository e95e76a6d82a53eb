"""Before the first step: is every rank well, and is what runs what was asked for? During the run: who holds it up?"""

import math
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.callbacks.rank_check import check_ranks, connect_board, tell
from hfscale.checkpoint.store import archive, latest_checkpoint
from hfscale.errors import HealthError, StrategyMismatchError, UsageError
from hfscale.health.build_locks import remove_abandoned_locks
from hfscale.health.gpu import GpuWatch, sensor_of
from hfscale.health.hang import HangWatchdog, Limits
from hfscale.health.local_time import LocalTimer
from hfscale.health.loss import LossGuard
from hfscale.health.monitor import GpuThread, Monitor, gather_hosts
from hfscale.health.rank_store import RankStore
from hfscale.integrations.metric_injector import MetricInjector
from hfscale.integrations.saving import finish_saves
from hfscale.integrations.strategy import check_launch, check_strategy, describe_strategy
from hfscale.integrations.trainer import DataFetchHook, calling_trainer, training_frame
from hfscale.metrics.records import RankLines
from hfscale.utils import distributed
from hfscale.utils.findings import Finding, join_errors
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)


class CommHealthCallback(TrainerCallback):
    """Stops a run that is not the one asked for or whose ranks are not well, and names what holds it up.

    At the beginning: strategy, world size and model wrapper are compared with the request; the node's variables,
    limits and disk are looked at; every rank multiplies against a known answer, and all collectives are checked for
    their values (half a second). During the run a thread watches for hangs and names the rank that keeps the others
    waiting, with every rank's stacks in `hfscale_hang/`; at each log the ranks exchange one vector, from which
    stragglers, ranks that wait for data, replicas that have drifted apart and GPUs that throttle are named; losses
    are watched for NaN, infinity and spikes. See `hfscale.health`.

    | metric key | unit | meaning |
    |---|---|---|
    | `scaling/straggler_skew` | ratio | slowest rank's own work over the median rank's; from two processes on |
    | `gpu/temperature_c_max` | °C | hottest GPU (with `nvidia-ml-py`) |
    | `gpu/power_w` | W | mean power of a GPU |
    | `gpu/throttled` | ratio | share of the GPUs that are slowed down by heat or a power brake |

    Args:
        preflight (`bool`): whether ranks check each other before the first step.
        hang_after_s (`float`, *optional*): seconds of silence that are a hang, or ten steps where that is more; None:
            hangs are not watched for.
        on_hang (`str`): `report`, or `abort`: after the report the processes end, so that the launcher restarts them.
        stragglers (`bool`): whether each rank's own work is timed.
        on_bad_training (`str`): on a NaN or infinite loss and on replicas that differ, `warn`, or `stop`: checkpoints
            after the last good log are set aside and the run ends.

    Raises:
        StrategyMismatchError: when the Trainer is made (number of processes) or training begins (strategy, wrapper,
            ranks that disagree).
        HealthError: a rank is missing, computes or communicates wrongly; with `stop`, a training that cannot go on.
        UsageError: an argument that is none of the above.
    """

    def __init__(
        self,
        *,
        preflight: bool = True,
        hang_after_s: float | None = 60.0,
        on_hang: Literal["report", "abort"] = "report",
        stragglers: bool = True,
        on_bad_training: Literal["warn", "stop"] = "warn",
    ) -> None:
        if hang_after_s is not None and hang_after_s <= 0:
            raise UsageError(f"hang_after_s is {hang_after_s}: it must be greater than 0, or None")
        if on_hang not in ("report", "abort"):
            raise UsageError(f"on_hang is {on_hang!r}: use report or abort")
        if on_bad_training not in ("warn", "stop"):
            raise UsageError(f"on_bad_training is {on_bad_training!r}: use warn or stop")
        self.preflight, self.hang_after_s, self.on_hang = preflight, hang_after_s, on_hang
        self.stragglers, self.on_bad_training = stragglers, on_bad_training
        self._watchdog: HangWatchdog | None = None
        self._monitor: Monitor | None = None
        self._previous_hook: Any = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        check_launch(args)
        if args.deepspeed and args.local_process_index == 0:  # now: it is before training begins that it would wait
            remove_abandoned_locks(os.environ)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = calling_trainer()
        check_launch(args)
        strategy = check_strategy(trainer)
        steps = [row[0] for row in distributed.gather_rows([state.global_step])]
        if len(set(steps)) > 1:
            raise StrategyMismatchError(
                f"the ranks start at different steps {[int(step) for step in steps]}: they do not see the same "
                "output_dir; put it on storage that every machine shares"
            )
        logger.info("strategy %s on %d processes (%s)", strategy, args.world_size, args.device.type)
        if args.world_size > 1:
            logger.info("each rank: %s", describe_strategy(trainer))
        self._end()  # of an earlier training that broke off
        self._losses, self._healthy_step, self._args = LossGuard(), state.global_step, args
        rank_store = connect_board(args) if self.preflight or self.hang_after_s else None
        if self.preflight:
            check_ranks(trainer, rank_store)
        self._rank_lines = RankLines(Path(args.output_dir)) if state.is_world_process_zero else None
        self._watch(trainer, strategy, rank_store)
        MetricInjector.of(trainer).add(self._keys)
        DataFetchHook.of(trainer).add(self._batch_came)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._monitor is not None:
            self._monitor.step_began()
        if self._watchdog is not None:
            self._watchdog.step_began(state.global_step + 1)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._moved()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._monitor is not None:
            self._monitor.step_ended()
        if self._watchdog is not None:
            self._watchdog.step_ended()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._moved()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._moved_aside()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._moved_aside()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._moved_aside()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._end()

    def _batch_came(self) -> None:
        if self._monitor is not None:
            self._monitor.batch_came()

    def _moved(self) -> None:
        if self._watchdog is not None:
            self._watchdog.moved()

    def _moved_aside(self) -> None:
        self._moved()
        if self._monitor is not None:
            self._monitor.aside()

    def _watch(self, trainer: Trainer, strategy: str, rank_store: RankStore | None) -> None:
        args = trainer.args
        has_peers = args.world_size > 1  # a rank alone has nobody to be slower than
        timer = LocalTimer(trainer.model_wrapped, strategy, args.device) if self.stragglers and has_peers else None
        if timer is not None and not timer.measures:
            logger.info("stragglers are not looked for: under %s a rank's own work cannot be timed", strategy)
        sensor = sensor_of(args.device)
        gpu = GpuThread(GpuWatch(sensor)) if sensor is not None else None
        if gpu is not None:
            gpu.start()
        are_replicas = strategy == "ddp" and has_peers
        self._monitor = Monitor(
            hosts=gather_hosts(),
            timer=timer,
            gpu=gpu,
            replicas=list(trainer.model.parameters()) if are_replicas else (),
        )
        if rank_store is not None and self.hang_after_s:
            self._watchdog = HangWatchdog(
                rank_store,
                Path(args.output_dir),
                limits=Limits(floor_s=self.hang_after_s),
                abort=self.on_hang == "abort",
                inside=training_frame(),
            )
            self._watchdog.start()
            self._previous_hook, sys.excepthook = sys.excepthook, self._on_exception

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An exception ends this process: find out which rank began it, then report it as before."""
        if self._watchdog is not None and isinstance(error, Exception):
            self._watchdog.examine_failure(error)
            self._watchdog.stop()
        (self._previous_hook or sys.__excepthook__)(kind, error, trace)

    def _keys(self, state: TrainerState) -> dict[str, float]:
        """The keys of the window that ends now. Called on every rank."""
        if self._monitor is None:
            return {}
        logs, step = state.log_history[-1], state.global_step
        keys, found = self._monitor.exchange(step, logs.get("grad_norm"))
        if "loss" in logs:
            bad_loss = self._losses.check(step, logs["loss"], logs.get("grad_norm"))
            found += [bad_loss] if bad_loss is not None else []
        if self._rank_lines is not None and self._monitor.own_s:
            self._rank_lines.add(step, {"compute_s": self._monitor.own_s})
        tell(found)
        # What the loss and the replicas say is the same on every rank, so all stop or none.
        bad = [f for f in found if f.level == "error" and f.check in ("loss", "replicas")]
        if bad and self.on_bad_training == "stop":
            self._stop(bad)
        if not bad:
            self._healthy_step = step
        return {name: value for name, value in keys.items() if math.isfinite(value)}

    def _stop(self, bad: list[Finding]) -> None:
        """End the run at the last checkpoint that was written while all was well.

        Raises:
            HealthError: always.
        """
        finish_saves(calling_trainer())  # one that is still being written would come to stand after those set aside
        distributed.barrier()
        output_dir = self._args.output_dir
        if self._args.should_save and Path(output_dir).is_dir():
            archive(output_dir, after_step=self._healthy_step)
        distributed.barrier()
        good = latest_checkpoint(output_dir) if self._args.should_save and Path(output_dir).is_dir() else None
        self._end()
        go_on = f"the relaunched command goes on from {Path(good).name}" if good else "no good checkpoint was written"
        raise HealthError(f"stopped: {join_errors(bad)}; {go_on}")

    def _end(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
            sys.excepthook = self._previous_hook
            self._watchdog = None
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None
