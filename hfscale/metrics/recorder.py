"""Records what a run does: writes its files of measurements, on the main process.

`hfscale.core.records` describes the files.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hfscale.core.alarms import RESTART, Alarm, listen, raise_alarm
from hfscale.core.best_effort import best_effort, return_counts, take_counts
from hfscale.core.counts import counted
from hfscale.core.findings import Finding
from hfscale.core.launch_variables import launch_number
from hfscale.core.lives import lives_of
from hfscale.core.records import (
    METRIC_PREFIXES,
    WRITING,
    RankLines,
    append_record,
    begin_records,
    last_sign_of_life,
    read_events,
    read_status,
)
from hfscale.core.run_files import JSONL_NAME, TIMELINE_NAME
from hfscale.core.run_memory import RESTARTS_VARIABLE
from hfscale.metrics.goodput import GoodputTracker, Rate

if TYPE_CHECKING:
    from transformers import TrainerState, TrainingArguments

_TRAINER_KEYS = ("loss", "grad_norm", "learning_rate", "epoch")
_process_start_is_taken = False


def launched_at() -> float:
    """Return the Unix time at which this training was launched, in seconds.

    For the first training of a script this is the start of the process. For a second training in one process, and for
    one in a notebook, it is the time of the call.
    """
    global _process_start_is_taken
    if _process_start_is_taken or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return time.time()
    _process_start_is_taken = True
    return float(psutil.Process().create_time())


class RunRecorder:
    """Writes `scaling.jsonl` and the timeline on the main process. On other ranks its methods write nothing."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._ranks: RankLines | None = None
        self._workload_is_written = False
        self._end_listening: Callable[[], None] | None = None

    def begin(
        self,
        folder: Path,
        args: "TrainingArguments",
        state: "TrainerState",
        *,
        saved_goodput: dict[str, Any],
        facts: Mapping[str, Any],
    ) -> GoodputTracker:
        """Prepare the files, record the launch, and start to account for its time.

        Args:
            folder (`Path`): output directory of the run, or of one trial of a hyperparameter search.
            args (`TrainingArguments`): arguments of the training.
            state (`TrainerState`): the state of the Trainer at the beginning of the training.
            saved_goodput (`dict[str, Any]`): the dictionary that `GoodputTracker` keeps its times in.
            facts (`Mapping[str, Any]`): what is known of the run; `world_size` and `strategy` are recorded.

        Returns:
            `GoodputTracker`: the tracker of this run, on every rank.
        """
        goodput_tracker = GoodputTracker(saved_goodput)
        launched = launched_at()
        self._workload_is_written = False
        if not state.is_world_process_zero:
            self._folder = None
            self._ranks = None
            goodput_tracker.begin(launched_at=launched, world_size=args.world_size)
            return goodput_tracker
        self._folder = folder
        self._ranks = RankLines(folder)
        self._end_listening = listen(self._alarmed)
        last_alive: float | None = None
        events: list[dict[str, Any]] = []
        with best_effort(WRITING, folder):
            folder.mkdir(parents=True, exist_ok=True)
            last_alive = last_sign_of_life(folder)
            begin_records(folder, state.global_step)
            events = read_events(folder)
        saves = [
            (e["time"], e["seconds"])
            for e in events
            if e["event"] == "save" and e["step"] == state.global_step
        ]
        is_relaunch = bool(events) or state.global_step > 0
        lost_launches = 0
        # The files of the launches before were lost with their disk
        if state.global_step > 0 and not events:
            lost_launches = launch_number(RESTARTS_VARIABLE, 0)
        self._write(
            "launch",
            state,
            time=launched,
            begun=time.time(),
            max_steps=state.max_steps,
            host=socket.gethostname(),
            pid=os.getpid(),
            previous_alive=last_alive if is_relaunch else None,
            **({"lost_launches": lost_launches} if lost_launches else {}),
            **{key: facts[key] for key in ("world_size", "strategy", "passes") if key in facts},
        )
        lives = lives_of(events, last_alive)
        follows_pause = bool(lives) and lives[-1].is_pause
        if is_relaunch and not follows_pause:
            launches = sum(event["event"] == "launch" for event in events) + lost_launches
            raise_alarm(
                RESTART,
                f"launch {launches + 1} begins at step {state.global_step} "
                f"on {counted(args.world_size, 'process')}",
                step=state.global_step,
                level="note",
            )
        goodput_tracker.begin(
            launched_at=launched,
            world_size=args.world_size,
            lives=lives,
            step=state.global_step,
            save=saves[-1] if saves and state.global_step > 0 else None,
        )
        return goodput_tracker

    def release(self) -> None:
        """Record no further alarms: the training has ended."""
        if self._end_listening is not None:
            self._end_listening()
            self._end_listening = None

    def _alarmed(self, alarm: Alarm) -> None:
        """Record an alarm, in whichever thread it is raised."""
        if self._folder is not None:
            fields = {
                "event": "alarm",
                "kind": alarm.kind,
                "level": alarm.level,
                "text": alarm.text,
            }
            fields |= {"about": alarm.about} if alarm.about else {}
            fields |= {"withdraws": alarm.withdraws} if alarm.withdraws else {}
            with best_effort(WRITING, self._folder / TIMELINE_NAME):
                line = {"step": alarm.step, "time": alarm.time, **fields}
                append_record(self._folder / TIMELINE_NAME, line)

    @property
    def needs_workload(self) -> bool:
        """Whether this process records the workload and has not done so yet."""
        return self._folder is not None and not self._workload_is_written

    def workload(self, state: "TrainerState", facts: Mapping[str, Any], rate: Rate | None) -> None:
        """Record once what the run does, and the price of a GPU.

        Args:
            state (`TrainerState`): the state of the Trainer, for its step.
            facts (`Mapping[str, Any]`): what the run does, such as its model, strategy and batch.
            rate (`Rate`, *optional*): the price of a GPU; None if it is unknown.
        """
        self._workload_is_written = True
        price = (
            {"usd_per_gpu_hour": rate.usd_per_gpu_hour, "price_source": rate.source}
            if rate is not None
            else {}
        )
        self._write("workload", state, **facts, **price)

    def setup(self, state: "TrainerState", facts: Mapping[str, Any]) -> None:
        """Record what decides the numbers of this launch.

        Args:
            state (`TrainerState`): the state of the Trainer, for its step.
            facts (`Mapping[str, Any]`): what `hfscale.trainer.setup.run_setup` returns.
        """
        self._write("setup", state, **facts)

    def job(self, state: "TrainerState", facts: Mapping[str, Any]) -> None:
        """Record once how the planner describes the run, for the comparison with its estimate in the report.

        Args:
            state (`TrainerState`): the state of the Trainer, for its step.
            facts (`Mapping[str, Any]`): model config, layout and options; values that JSON does not have become text.
        """
        self._write("job", state, **json.loads(json.dumps(facts, default=str)))

    def ranks(self, state: "TrainerState", numbers: Mapping[str, Sequence[float]]) -> None:
        """Write a line of `hfscale_ranks.jsonl`.

        Args:
            state (`TrainerState`): the state of the Trainer, for its step.
            numbers (`Mapping[str, Sequence[float]]`): one number per rank of each measure, as in `RankLines.add`.
        """
        if self._ranks is not None:
            self._ranks.add(state.global_step, numbers)

    def logged(self, state: "TrainerState", logs: Mapping[str, float], *, durable: bool) -> None:
        """Write a line of `scaling.jsonl`.

        Args:
            state (`TrainerState`): the state of the Trainer, for its step.
            logs (`Mapping[str, float]`): the values of the log. hfscale's metric keys and Trainer's loss, gradient
                norm, learning rate and epoch are kept.
            durable (`bool`): whether to wait until the line is on disk, which a log before a checkpoint needs.
        """
        if self._folder is None:
            return
        kept = {
            key: value
            for key, value in logs.items()
            if key in _TRAINER_KEYS or key.startswith(METRIC_PREFIXES)
        }
        line = {"step": state.global_step, "time": time.time(), **kept}
        with best_effort(WRITING, self._folder / JSONL_NAME):
            append_record(self._folder / JSONL_NAME, line, durable=durable)
        self._record_failures(state)

    def saved(self, state: "TrainerState", *, seconds: float) -> None:
        """Record that a checkpoint was saved.

        Args:
            state (`TrainerState`): the state of the Trainer, for its step.
            seconds (`float`): the seconds for which the training waited.
        """
        self._write("save", state, seconds=round(seconds, 4))

    def evaluated(self, state: "TrainerState", logs: Mapping[str, float]) -> None:
        """Record the numbers of an evaluation.

        Args:
            state (`TrainerState`): the state of the Trainer, for its step.
            logs (`Mapping[str, float]`): the keys that Trainer logs after an evaluation.
        """
        self._write(
            "evaluation",
            state,
            metrics={key: value for key, value in logs.items() if is_of_evaluation(key)},
        )

    def found(self, state: "TrainerState", finding: Finding) -> None:
        """Record a bottleneck that the triage has named.

        Args:
            state (`TrainerState`): the state of the Trainer, for its step.
            finding (`Finding`): the bottleneck.
        """
        self._write("finding", state, **finding.to_cause())

    def ended(
        self, state: "TrainerState", *, split: Mapping[str, float], advice: str | None
    ) -> None:
        """Record the end of the training.

        Args:
            state (`TrainerState`): the state of the Trainer, for its step.
            split (`Mapping[str, float]`): seconds of each phase since the first launch.
            advice (`str`, *optional*): the advice on the batch size; None if there is none.
        """
        self._record_failures(state)
        extra = {"advice": advice} if advice is not None else {}
        self._write(
            "end",
            state,
            seconds={phase: round(s, 3) for phase, s in split.items()},
            **self._how_it_ended(state),
            **extra,
        )

    def _how_it_ended(self, state: "TrainerState") -> dict[str, str]:
        """Return the status that `SpotCheckpointCallback` has written before; without it nothing stops a training."""
        found = read_status(self._folder) if self._folder is not None else None
        if found is None or found.get("step") != state.global_step:
            return {"status": "completed"}
        if found.get("status") not in ("completed", "preempted"):
            return {}
        known = {name: found.get(name) for name in ("status", "reason")}
        return {name: str(value) for name, value in known.items() if value}

    def _write(self, event: str, state: "TrainerState", **fields: Any) -> None:
        if self._folder is None:
            return
        line = {"event": event, "step": state.global_step, "time": time.time(), **fields}
        with best_effort(WRITING, self._folder / TIMELINE_NAME):
            append_record(self._folder / TIMELINE_NAME, line)

    def _record_failures(self, state: "TrainerState") -> None:
        """Record how often best-effort work has failed since the last record, for the report."""
        counts = take_counts() if self._folder is not None else {}
        if counts and self._folder is not None:
            try:
                line = {
                    "event": "failures",
                    "step": state.global_step,
                    "time": time.time(),
                    "counts": counts,
                }
                append_record(self._folder / TIMELINE_NAME, line)
            except OSError:  # the next log tries again
                return_counts(counts)


def is_of_evaluation(key: str) -> bool:
    """Return whether Trainer logs a number of an evaluation under this key.

    Args:
        key (`str`): a key of Trainer's log.
    """
    return key.startswith("eval_")
