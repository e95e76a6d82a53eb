"""Snapshots of a supervised training in host memory, and what its rank tells the supervisor (`hfscale run`)."""

import math
import os
import shutil
import statistics
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerState

from hfscale.checkpoint.contents import SHARE_OF_FREE_MEMORY
from hfscale.checkpoint.manifest import Manifest
from hfscale.checkpoint.saving import TrainerSaving
from hfscale.checkpoint.store import DELETING, rotate
from hfscale.checkpoint.writer import clear_unfinished
from hfscale.core import distributed
from hfscale.core.best_effort import best_effort
from hfscale.core.collectives import TRAINING
from hfscale.core.host_memory import available_bytes
from hfscale.core.launch_variables import launch_number
from hfscale.core.logging import get_logger
from hfscale.core.rank_link import RankLink, connect
from hfscale.core.records import WRITING, append_record, unix_time
from hfscale.core.recovery_times import RECOVERY_PARTS
from hfscale.core.run_files import TIMELINE_NAME
from hfscale.core.run_memory import (
    AGREED_VARIABLES,
    INTERVAL_VARIABLE,
    NODES_VARIABLE,
    PARTS,
    RunMemory,
    replicated_step,
    trust_again,
)
from hfscale.core.run_state import ResetOnCopy
from hfscale.errors import UsageError
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.sample_indices import StepSamples, record_samples

logger = get_logger(__name__)

MAX_COST = 0.01
"""Share of the step time that snapshots may cost on average."""
SLOTS = 2
"""Snapshots that need to fit: the newest, and the one that is being written.

On several nodes a node's part and its replica are at most one snapshot, and the complete one from which a launch has
resumed is deleted before the second snapshot after it is taken.
"""
# The first steps are slower than the others, and the step time must be known
_FIRST_AFTER_STEPS = 3
# The first snapshot also allocates its buffers, so its time says little about the next
_MAX_FIRST_INTERVAL = 10
_REMEMBERED_STEPS = 50
_COPY_POLL_S = 0.005
_FAILED, _BUSY, _NOT_COPIED, _COST, _WRITE, _STEP = (
    f"snapshot: {number}" for number in ("failed", "busy", "not copied", "cost", "write", "step")
)
_FIRST_PAUSE_STEPS, _MAX_PAUSE_STEPS = 16, 1024  # until snapshots that did not fit are tried again


class MemorySnapshots(ResetOnCopy):
    """Copies the state of a training to the folder in host memory of its supervisor, every few steps.

    A snapshot is a checkpoint in every respect, in `checkpoints/` of the folder: the newest is kept while the next one
    is written. The interval follows from the measured cost, so that it stays below `MAX_COST`: the time for which
    training waits, and the slowdown of the steps during which a snapshot is written. Without a supervisor it does
    nothing.

    On several nodes each has a part of a snapshot, and the supervisors copy the parts between the nodes
    (`hfscale.recovery.replicas`). The next snapshot is taken when all parts of the last have been copied. For that
    training waits, up to the time of one step, if the interval is forced.

    Snapshots that do not fit, or that cannot be written, are tried again after 16 steps, then after 32, and so on up
    to 1,024.

    Args:
        interval_steps (`int`, *optional*): steps between two snapshots, instead; `hfscale run --memory-interval-steps`
            goes before it.
    """

    def __init__(self, interval_steps: int | None = None) -> None:
        self._asked_interval = interval_steps
        self._begin_run()

    def _begin_run(self) -> None:
        self._link: RankLink | None = None
        self._saving: TrainerSaving | None = None
        self._samples: StepSamples | None = None
        self._folder = Path()
        self._nodes = 1
        self._commits = False
        self._last_step: int | None = None
        self._losses = 0
        self._has_waited = False  # for the copies of the last snapshot
        self._interval: int | None = None  # forced by the user
        self._next_step = 0
        self._pause_steps = 0  # the last pause, after a snapshot that did not fit
        self._is_paused = False
        self._run_dir = Path()
        self._taken = 0
        self._stall_s = 0.0
        self._waited_s = 0.0  # for the copies of the last snapshot, at the vote for this one
        self._agreed: Mapping[str, float] | None = None  # of the step that has just ended
        self._started_from = 0
        self._step_began_at = 0.0
        self._was_writing = False
        self._idle_s: deque[float] = deque(maxlen=_REMEMBERED_STEPS)  # of steps without a save
        self._busy_s: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._recovery: dict[str, float] = {}

    def begin(
        self,
        adapter: TrainerAdapter,
        state: TrainerState,
        saving: TrainerSaving,
        run_dir: Path,
        train_dataloader: Any,
    ) -> None:
        """Start with a training. Every rank must call it.

        Args:
            adapter (`TrainerAdapter`): the adapter of the Trainer.
            state (`TrainerState`): its state.
            saving (`TrainerSaving`): writes its checkpoints.
            run_dir (`Path`): the folder of the run's checkpoints.
            train_dataloader (`DataLoader`): the training data.
        """
        self._begin_run()
        self._link = connect()
        self._nodes = launch_number(NODES_VARIABLE, 1)
        self._commits = _leads_node() if self._nodes > 1 else saving.commits
        self._run_dir = run_dir
        why_not, may_pass = self._agree_why_not(saving)
        if self._link is None:
            return
        self._samples = record_samples(adapter, train_dataloader)
        self._started_from = state.global_step
        self._link.training(state.global_step)
        self._folder = self._link.memory.snapshots(run_dir)
        while self._link.ended_trainings:  # of this process, with another output directory
            shutil.rmtree(self._link.ended_trainings.pop(), ignore_errors=True)
        if self._commits:
            with best_effort("making the folder of snapshots", self._own_folder):
                self._link.memory.make_folder(self._own_folder)
                trust_again(self._folder)
        adapter.before_last_log(self._finish)
        if why_not is not None and not may_pass:
            logger.warning(
                "no snapshots in host memory: %s; after a failure the run resumes from the disk",
                why_not,
            )
            return
        self._interval = self._forced_interval()
        self._next_step = state.global_step + (self._interval or _FIRST_AFTER_STEPS)
        self._saving = saving
        if self._commits:
            clear_unfinished(self._own_folder)
        if why_not is not None:
            self._pause(state.global_step, why_not)
        adapter.after_reports("snapshots", lambda: self._after_reports(state))

    def _forced_interval(self) -> int | None:
        """Return the interval that the user has forced; None: it follows from the cost.

        Raises:
            UsageError: the environment has something else.
        """
        forced = os.environ.get(INTERVAL_VARIABLE)
        if not forced:
            return self._asked_interval
        if not forced.isdecimal() or int(forced) < 1:
            raise UsageError(f"{INTERVAL_VARIABLE} is {forced!r}: it must be 1 or greater")
        return int(forced)

    @property
    def _own_folder(self) -> Path:
        """Folder in which this node's ranks write snapshots, or its part of them."""
        return self._folder / PARTS if self._nodes > 1 else self._folder

    def _agree_why_not(self, saving: TrainerSaving) -> tuple[str | None, bool]:
        """Return why there are no snapshots, None if there are, and whether that may change; the same on all ranks.

        Raises:
            UsageError: what decides when ranks meet for a snapshot differs between them; raised on every rank.
        """
        own: dict[str, Any] = {"why_not": self._why_not(saving), "bytes": 0, "held": 0, "free": 0}
        own["problem"] = None
        options = {option: os.environ.get(name) for name, option in AGREED_VARIABLES.items()}
        own["options"] = options | {"memory_interval_steps": self._asked_interval}
        if self._link is not None and own["why_not"] is None:
            own["bytes"] = saving.expected_bytes()
            try:
                own |= self._room(self._link.memory)
            except OSError as error:  # what measures one rank must not part it from the others
                own["problem"] = f"{error.filename}: {error.strerror}"
        reason, may_pass = TRAINING.combine("memory snapshots", own, _first_reason)
        return reason, may_pass

    def _room(self, memory: RunMemory) -> dict[str, int]:
        """Return the bytes that the snapshots of this training take on this node, and those that are free."""
        files = [path for path in memory.snapshots(self._run_dir).rglob("*") if path.is_file()]
        held = sum(path.stat().st_size for path in files)
        free = shutil.disk_usage(memory.folder).free
        return {"held": held, "free": min(available_bytes(), free)}

    def _pause(self, step: int, why: str) -> None:
        """Take no snapshots for some steps. The last one is kept: a restart, or this start, may need it."""
        self._is_paused = True
        self._pause_steps = min(2 * self._pause_steps, _MAX_PAUSE_STEPS) or _FIRST_PAUSE_STEPS
        self._next_step = step + self._pause_steps
        text = "no snapshots in host memory from step %d to %d: %s; a failure resumes from the last one or the disk"
        logger.warning(text, step, self._next_step, why)
        self._last_step = None

    def _resumes(self, step: int) -> bool:
        """Return whether snapshots fit again after a pause; all ranks call it together."""
        assert self._saving is not None
        why_not, _ = self._agree_why_not(self._saving)
        if why_not is not None:
            self._pause(step, why_not)
            return False
        self._is_paused = False
        logger.warning("snapshots in host memory are taken again, from step %d", step)
        return True

    def _why_not(self, saving: TrainerSaving) -> str | None:
        if self._link is None:
            return "a rank has no supervisor"
        if launch_number("LOCAL_WORLD_SIZE", 1) * self._nodes != distributed.world_size():
            return "the run has several nodes, and hfscale run was not given --nodes, or not as many ranks on each"
        return saving.why_no_optional_save()

    def step_began(self, state: TrainerState) -> None:
        """Record that the next step has begun.

        Args:
            state (`TrainerState`): the state of the Trainer.
        """
        if self._link is not None:
            self._link.progressed(state.global_step + 1, state.global_step)
            if self._losses != self._link.memory_losses:
                self._losses = self._link.memory_losses
                self._last_step = None  # nothing is left that other nodes could still copy
            if self._samples is not None:
                samples = self._samples.of_step_after(state.global_step)
                self._link.memory.write_samples(distributed.rank(), state.global_step + 1, samples)
            self._step_began_at = time.monotonic()
            self._was_writing = self._saving is not None and self._saving.writer.in_flight

    def step_ended(self, state: TrainerState, output_dir: Path) -> None:
        """Record that a step is complete; after a restart, report the recovery with the first one.

        Args:
            state (`TrainerState`): the state of the Trainer.
            output_dir (`Path`): output directory of the run.
        """
        if self._link is None:
            return
        self._link.progressed(state.global_step, state.global_step)
        steps = self._busy_s if self._was_writing else self._idle_s
        steps.append(time.monotonic() - self._step_began_at)
        if state.global_step == self._started_from + 1:
            if _leads_node():
                with best_effort(
                    "recording imports for the standby process", self._link.memory.folder
                ):
                    self._link.memory.write_imports()
            recovery = self._link.stepped(state.global_step)
            if recovery is not None and state.is_world_process_zero:
                self._report_recovery(recovery, state.global_step, output_dir)

    def _report_recovery(self, recovery: dict[str, Any], step: int, output_dir: Path) -> None:
        self._recovery = {
            "recovery/steps_lost": float(recovery["steps_lost"]),
            **{f"recovery/{part}": recovery[part] for part in RECOVERY_PARTS},
            "recovery/total_s": sum(recovery[part] for part in RECOVERY_PARTS),
        }
        event = {"event": "recovery", "time": unix_time(), "step": step, **recovery}
        with best_effort(WRITING, output_dir):
            append_record(output_dir / TIMELINE_NAME, event)

    def keys(self) -> dict[str, float]:
        """Return the metric keys of the recovery that led to this training, once."""
        keys, self._recovery = self._recovery, {}
        return keys

    def is_due(self, state: TrainerState) -> bool:
        """Return whether a snapshot is due after this step; the same on every rank.

        Args:
            state (`TrainerState`): the state of the Trainer.
        """
        return self._saving is not None and state.global_step >= self._next_step

    def votes(self, state: TrainerState) -> dict[str, float]:
        """Return what this rank knows for the decision about a snapshot, for the exchange at the end of a step.

        Args:
            state (`TrainerState`): the state of the Trainer.

        Returns:
            `dict[str, float]`: numbers of which the greatest of all ranks count; zeros where no snapshot is due.
        """
        names = (_FAILED, _BUSY, _NOT_COPIED, _COST, _WRITE, _STEP)
        if self._saving is None or not self.is_due(state):
            return dict.fromkeys(names, 0.0)
        began = time.monotonic()
        measured = self._measured()
        if self._interval is not None and not self._has_waited:
            self._wait_for_copies(began + measured[-1])
            self._waited_s = time.monotonic() - began
        writer = self._saving.writer
        has_failed = writer.optional_failure is not None
        facts = (float(has_failed), float(writer.in_flight), float(not self._is_copied))
        return dict(zip(names, (*facts, *measured), strict=True))

    def follow(self, agreed: Mapping[str, float]) -> None:
        """Keep the votes of all ranks until Trainer has logged, evaluated and saved what is due at this step.

        Args:
            agreed (`Mapping[str, float]`): the greatest of each vote; empty if no exchange was read.
        """
        self._agreed = agreed or None

    def _after_reports(self, state: TrainerState) -> None:
        """Take a snapshot if one is due. It is called on every rank after each step."""
        agreed, self._agreed = self._agreed, None
        # Trainer reports once more at the end of an epoch; the votes of its last step count once
        if self._saving is None or agreed is None or not self.is_due(state):
            return
        if self._is_paused and not self._resumes(state.global_step):
            return
        writer = self._saving.writer
        if agreed[_FAILED]:
            writer.wait()  # on the ranks that do not know it yet
            why, writer.optional_failure = writer.optional_failure, None
            self._pause(state.global_step, str(why))
            return
        if agreed[_NOT_COPIED]:  # the last snapshot is needed until the next has been copied
            return
        interval = self._interval
        if interval is None:
            interval = self._affordable(agreed[_COST], agreed[_WRITE], agreed[_STEP])
        self._next_step = state.global_step + interval
        if agreed[_BUSY] and self._interval is None:
            return  # training would wait for the save in the background; a forced interval is kept
        self._take(state)

    def _take(self, state: TrainerState) -> None:
        """Take a snapshot of this step, and measure for how long training waits."""
        assert self._saving is not None
        began = time.monotonic()
        self._taken += 1
        self._last_step = state.global_step
        self._has_waited = False
        assert self._link is not None
        self._saving.save_optional(
            self._own_folder,
            self._committed,
            make_folder=self._link.memory.make_folder,
            on_each_node=self._nodes > 1,
        )
        self._stall_s = self._waited_s + time.monotonic() - began
        self._waited_s = 0.0

    @property
    def _is_copied(self) -> bool:
        """Whether the last snapshot survives the loss of a node."""
        return self._nodes == 1 or self._last_step in (None, replicated_step(self._folder))

    def _wait_for_copies(self, until: float) -> None:
        """Wait until the last snapshot has been copied, or until a time of the monotonic clock; once per snapshot."""
        self._has_waited = True
        while not self._is_copied and time.monotonic() < until:
            time.sleep(_COPY_POLL_S)

    def _measured(self) -> tuple[float, float, float]:
        """Return, of this rank in seconds: the cost of a snapshot, the time to write it, the time of a step."""
        assert self._saving is not None
        step_s = statistics.median(self._idle_s or self._busy_s or [0.0])
        busy_s = statistics.median(self._busy_s) if self._busy_s else step_s
        write_s = self._saving.writer.last_optional_s
        slowed_s = max(busy_s - step_s, 0.0) * write_s / max(busy_s, 1e-9)
        return self._stall_s + slowed_s, write_s, step_s

    def _affordable(self, cost_s: float, write_s: float, step_s: float) -> int:
        """Return the steps between two snapshots at which they cost `MAX_COST` and never wait for one another."""
        step_s = max(step_s, 1e-6)
        interval = max(1, math.ceil(cost_s / (MAX_COST * step_s)), math.ceil(write_s / step_s))
        return min(interval, _MAX_FIRST_INTERVAL) if self._taken <= 1 else interval

    def _committed(self, manifest: Manifest) -> None:
        if self._nodes > 1:  # the supervisor deletes the last one when this one has been copied
            assert self._link is not None
            self._link.say("snapshot", folder=self._folder.name, step=manifest.step)
            return
        with best_effort(DELETING, self._folder):
            rotate(self._folder, limit=1, keep=None, temporary=[])

    def _finish(self) -> None:
        """Take no more snapshots. The last one is kept: a failure in the last evaluation must not lose the run."""
        self._saving = None
        if self._link is not None:
            self._link.ended_trainings.append(self._folder)
            self._link.say("trained")

    def preempted(self, code: int) -> None:
        """Tell the supervisor that the process is about to end, since the run was preempted and has saved.

        Args:
            code (`int`): the exit code.
        """
        if self._link is not None:
            self._link.ending(code)


def _leads_node() -> bool:
    return launch_number("LOCAL_RANK", 0) == 0


def _first_reason(ranks: list[dict[str, Any]]) -> tuple[str | None, bool]:
    """Return the first rank's reason against snapshots, or that two of them do not fit into the host's memory, which
    may change.

    Raises:
        UsageError: an option differs between the ranks: they would take snapshots at different steps.
    """
    reason: str | None = next(
        (rank["why_not"] for rank in ranks if rank["why_not"] is not None), None
    )
    if reason is not None:
        return reason, False
    for option, value in ranks[0]["options"].items():
        for number, rank in enumerate(ranks):
            if rank["options"][option] != value:
                values = (
                    f"{_shown(value)} on rank 0, {_shown(rank['options'][option])} on rank {number}"
                )
                raise UsageError(f"{option} differs: {values}; give the same on all nodes")
    problem: str | None = next(
        (rank["problem"] for rank in ranks if rank["problem"] is not None), None
    )
    if problem is not None:
        return problem, True
    wanted = SLOTS * sum(rank["bytes"] for rank in ranks) - max(rank["held"] for rank in ranks)
    free = min(rank["free"] for rank in ranks)
    if wanted <= SHARE_OF_FREE_MEMORY * free:
        return None, True
    return (
        f"{SLOTS} of them need {wanted / 2**30:.1f} GiB more, and {free / 2**30:.1f} GiB are free",
        True,
    )


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)
