"""A thread that detects when training stops making progress, and finds the rank that the others wait for.

The main thread of each rank reports its progress. When a rank has been silent for too long, or ends by an exception:

1. It raises an alarm: a flag in the launcher's key-value store (`RankStore`), which the watchdogs of all ranks poll.
2. Every watchdog writes a snapshot of its rank into the store and waits a few seconds for the others. A rank that is
   dead, stopped or in a call that does not release the interpreter cannot answer, which is informative too.
3. One watchdog, that of rank 0 if it has answered, reads all snapshots, computes the diagnosis
   (`hfscale.health.diagnosis`), publishes it to the others, logs it, and writes a folder with the stacks. So the work
   of a hang grows with the number of ranks and not with its square.

Nothing uses the process group, which is what hangs.

A rank whose network is lost, or that has lost the node of rank 0, gets no answer from the store, and torch's client
waits for it for ever. A second thread notices that, and ends the hang of this rank without the others.
"""

import json
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hfscale.core.activity import threads_in
from hfscale.core.alarms import HANG, raise_alarm, settle_alarms
from hfscale.core.findings import Finding, blamed_hosts, join_findings, limit_findings, name_ranks
from hfscale.core.logging import get_logger
from hfscale.core.rank_link import connect
from hfscale.core.rank_store import RankStore
from hfscale.core.redaction import redact, redact_json
from hfscale.health.diagnosis import (
    Snapshot,
    all_stacks,
    code_position,
    diagnose,
    frames_of,
    positions,
    slow_activity,
)

logger = get_logger(__name__)

FOLDER = "hfscale_hang"
"""Folder in the output directory, with one folder per hang."""
MAX_FILES = 512
"""Number of files with stacks that are written about one hang."""
_WARM_UP_STEPS = 3
_EXIT_CODE = 1
_SAVE_POLL_S = 0.1
_SETTLE_S = 5.0
"""Seconds for which the end of the process waits for listeners of alarms."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Holds the times that decide when silence counts as a hang."""

    floor_s: float = 60.0
    """Least seconds of silence."""
    factor: float = 10.0
    """Least silence as a multiple of the recent median step time."""
    outside_s: float = 1800.0
    """Seconds of silence during the first steps, and while a rank compiles, saves, evaluates or generates."""
    grace_s: float = 3.0
    """Seconds that the ranks have to answer an alarm."""
    poll_s: float = 1.0
    """Seconds between two polls."""


class HangWatchdog(threading.Thread):
    """Watches the thread that creates it, which reports its progress to the watchdog.

    Args:
        rank_store (`RankStore`): a store that has not been used yet; every rank must create a watchdog.
        output_dir (`Path`): where the folder `hfscale_hang` is written.
        limits (`Limits`, *optional*): when silence counts as a hang.
        abort (`bool`): whether to end this process after the report (exit code 1), so that the launcher restarts all
            ranks. A checkpoint that is being written in the background is completed before.
        inside (`FrameType`, *optional*): a call that is on the watched thread's stack as long as there is something to
            watch; the watchdog ends when it no longer is.
    """

    def __init__(
        self,
        rank_store: RankStore,
        output_dir: Path,
        *,
        limits: Limits | None = None,
        abort: bool = False,
        inside: FrameType | None = None,
    ) -> None:
        super().__init__(name="hfscale-hang-watchdog", daemon=True)
        self.limits = limits or Limits()
        self.findings: list[Finding] = []
        """The findings about the last hang."""
        self.folder: Path | None = None
        """The folder that was written about it, on the rank that wrote it."""
        self._store = rank_store
        self._scaled_s = rank_store.world_size / 4096
        """Seconds that thousands of ranks need in addition, for their requests to the one store."""
        self._poll_s = max(self.limits.poll_s, rank_store.poll_s)
        self._answer_s = self.limits.grace_s + self._scaled_s
        self._verdict_s = 3 * self._answer_s + 1.0
        self._answers: dict[int, Snapshot] = {}
        self._output_dir = output_dir
        self._abort = abort
        self._inside = inside
        self._watched_thread = threading.get_ident()
        self._step = 0
        self._phase = "starting"
        self._error = ""
        self._step_began_at = time.monotonic()
        self._last_progress_at = self._step_began_at
        self._last_slow_at = 0.0
        self._step_times: deque[float] = deque(maxlen=50)
        self._incident = 0
        self._reported_at = 0.0
        self._no_alarm_before = 0.0
        self._stop_now = threading.Event()
        self._is_examined = threading.Event()
        self._polls = 0
        self._polls_store = False
        rank_store.write("hang/hello", {"host": socket.gethostname()})

    def step_began(self, step: int) -> None:
        """Report that a step begins. The watched thread calls it.

        Args:
            step (`int`): the optimizer step, counted from 1.
        """
        self._step = step
        self._phase = "compute"
        self._last_progress_at = time.monotonic()

    def step_ended(self) -> None:
        """Report that the step has ended. The watched thread calls it."""
        now = time.monotonic()
        self._step_times.append(now - self._step_began_at)
        self._phase = "between steps"
        self._step_began_at = now
        self._last_progress_at = now

    def progressed(self) -> None:
        """Report other progress of the watched thread: a micro-step, a batch of an evaluation, a log."""
        self._last_progress_at = time.monotonic()

    def stop(self) -> None:
        """End the watchdog and wait for its thread, which must not be in a call of the store when Python ends."""
        self._stop_now.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(self._verdict_s + 2 * self._poll_s)

    def examine_failure(self, error: BaseException) -> None:
        """Raise an alarm because this process ends by an exception, and wait until the rank that caused it is found.

        The wait is at most three times `grace_s` plus twice `poll_s` seconds (`Limits`), and more with thousands of
        ranks.

        Args:
            error (`BaseException`): the exception.
        """
        self._error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if self.is_alive():
            self._is_examined.wait(self._verdict_s + 2 * self._poll_s)

    def limit_s(self, activity: str | None) -> float:
        """Return the seconds of silence that count as a hang now.

        Args:
            activity (`str`, *optional*): what the watched thread does that may take long (`slow_activity`).
        """
        if activity is not None or len(self._step_times) < _WARM_UP_STEPS:
            return self.limits.outside_s
        return max(self.limits.floor_s, self.limits.factor * statistics.median(self._step_times))

    def run(self) -> None:
        """Poll the watched thread and the alarms of other ranks until `stop` is called or nothing is left to watch."""
        alone = threading.Thread(target=self._watch_alone, name=f"{self.name}-alone", daemon=True)
        alone.start()
        try:
            while not self._stop_now.wait(self._poll_s):
                self._polls += 1
                self._polls_store = True
                if not self._poll():
                    self._stop_now.set()
                self._polls_store = False
        except (
            Exception
        ) as error:  # such as those of the store; this rank is still watched by itself
            logger.warning(
                "the ranks of a hang can no longer be found: the launcher's store failed (%s: %s)",
                type(error).__name__,
                str(error)[:200],
            )

    def _watch_alone(self) -> None:
        """Watch for silence while the store does not answer, when no other rank can be asked.

        Counted are waits of this thread, in which a process that is stopped for a while does not count. Each silence
        is reported once; if the store answers again, the other ranks are asked as usual.
        """
        polls = 0
        waits = 0
        reported_at = 0.0
        while not self._stop_now.wait(self._poll_s):
            waits = waits + 1 if self._polls_store and self._polls == polls else 0
            polls = self._polls
            unanswered_s = waits * self._poll_s
            if unanswered_s < 2 * self._verdict_s or self._last_progress_at < reported_at:
                continue
            now = time.monotonic()
            frames = frames_of(self._watched_thread)
            if not frames or self._inside not in (None, *frames):
                return
            if self._is_silent(now, slow_activity(self._watched_thread)):
                reported_at = now
                self._end_alone(now, unanswered_s)

    def _end_alone(self, now: float, unanswered_s: float) -> None:
        """Report a hang of this rank without an answer of the store; end the process if hangs abort the run."""
        name = name_ranks((self._store.rank,), socket.gethostname())
        problem = f"{name} gets no answer from the launcher's store for {unanswered_s:.0f} s"
        fix = "look whether the network of this node is lost, or the node of rank 0"
        self.findings = [Finding(level="error", check="hang", problem=problem, fix=fix)]
        silent_s = now - self._last_progress_at
        text = join_findings(self.findings)
        logger.error("training hangs at step %d for %.0f s: %s", self._step, silent_s, text)
        raise_alarm(
            HANG, f"training hangs for {silent_s:.0f} s: {text}", step=self._step, level="error"
        )
        if self._abort:
            self._end_process(self.limits.floor_s)

    def _poll(self) -> bool:
        """Check the watched thread and the alarm of the others; False where there is nothing more to watch."""
        # Before it looks at what the thread does, which may be something slow from then on
        now = time.monotonic()
        frames = frames_of(self._watched_thread)
        is_inside = self._inside is None or self._inside in frames
        if not self._error and not (frames and is_inside):
            self._inside = None  # releases all that the call refers to
            return False
        if self._reported_at and self._last_progress_at > self._reported_at and not self._error:
            logger.warning("training continues after the hang at step %d", self._step)
            self._reported_at = 0.0
        alarm = f"hang/{self._incident}"
        if self._store.flag(alarm) is None:
            hangs = (
                self._is_silent(now, slow_activity(self._watched_thread))
                and now > self._no_alarm_before
            )
            if not self._error and (not hangs or self._reported_at):
                return True
            self._store.raise_flag(alarm, str(self._store.rank))
        self._examine(frames)
        return True

    def _is_silent(self, now: float, activity: str | None) -> bool:
        """Decide whether the watched thread has been silent for too long.

        After an activity that may take long, the silence begins anew: it ends before the next progress is reported.
        """
        since = self._last_progress_at
        if activity is not None:
            self._last_slow_at = now
        else:
            since = max(since, self._last_slow_at)
        return now - since > self.limit_s(activity)

    def _examine(self, frames: list[FrameType]) -> None:
        """Answer the alarm, and learn who is to blame: from the rank that reads the answers, or as that rank."""
        incident = f"hang/{self._incident}"
        self._incident += 1
        self._store.write(f"{incident}/snapshot", self._snapshot(frames).to_dict())
        verdict, is_reader = self._store.decide(
            incident,
            lambda: self._judge(incident),
            after_s=self._answer_s,
            limit_s=self._verdict_s,
            is_ready=lambda: self._store.is_complete(f"{incident}/snapshot"),
        )
        # None: the rank that read the answers has ended too; if the hang lasts, there is another alarm.
        found = [Finding.from_dict(fields) for fields in verdict or []]
        now = time.monotonic()
        # Where a rank may be slow, ask again later
        self._no_alarm_before = now + self.limits.floor_s
        if not found:
            return
        self.findings = found
        self._reported_at = now
        self._is_examined.set()
        if is_reader:
            self._report()
        if self._abort:
            is_complete = self._store.is_complete(f"{incident}/snapshot")
            self._polls_store = False
            self._end_process(self.limits.outside_s if is_complete else self.limits.floor_s)

    def _end_process(self, longest_s: float) -> None:
        """End this process when the report is written and no checkpoint is being written in the background.

        Such a checkpoint can be complete in a moment, and with it all the training up to it. All ranks that are alive
        take part in writing it; if one has not answered, it is probably dead, and the others do not wait as long.

        Args:
            longest_s (`float`): longest time to wait for the checkpoint, seconds.
        """
        until = time.monotonic() + longest_s
        time.sleep(1.0 + self._scaled_s)  # for the rank that writes the report
        if self._is_saving_in_background():
            logger.warning("the process ends when the checkpoint that is being written is complete")
        while self._is_saving_in_background() and time.monotonic() < until:
            time.sleep(_SAVE_POLL_S)
        link = connect()
        if link is not None:
            reason = f"{self.findings[0].check}: {'; '.join(map(str, self.findings))}"
            link.ending(_EXIT_CODE, reason=reason, hosts=blamed_hosts(self.findings))
        settle_alarms(_SETTLE_S)
        os._exit(_EXIT_CODE)

    def _is_saving_in_background(self) -> bool:
        """Return whether a thread other than the watched one, which hangs, is writing a checkpoint."""
        return bool(threads_in("saving") - {self._watched_thread})

    def _judge(self, incident: str) -> list[dict[str, Any]]:
        """Read all answers, and return who is to blame; nobody if a rank does something that may take long."""
        answers = self._store.read(f"{incident}/snapshot")
        self._answers = {rank: Snapshot.from_dict(note) for rank, note in answers.items()}
        hosts = {rank: note["host"] for rank, note in self._store.read("hang/hello").items()}
        found = diagnose(self._store.world_size, hosts, self._answers)
        return [finding.to_dict() for finding in limit_findings(found)]

    def _snapshot(self, frames: list[FrameType]) -> Snapshot:
        idle_s = time.monotonic() - self._last_progress_at
        return Snapshot(
            host=socket.gethostname(),
            step=self._step,
            phase=self._phase,
            idle_s=idle_s,
            occupation=slow_activity(self._watched_thread)
            if idle_s <= self.limits.outside_s
            else None,
            place=code_position(frames),
            positions=tuple(positions()),
            error=self._error or None,
            stacks=self._store.keep(all_stacks()),
        )

    def _report(self) -> None:
        """Log one line, and write a folder with all details."""
        found = self.findings
        answers = self._answers
        step = max(snap.step for snap in answers.values())
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.folder = self._output_dir / FOLDER / f"step-{step}-{stamp}"
        stacks = self._store.kept({snap.stacks for snap in answers.values()})
        try:
            write_folder(self.folder, found, answers, stacks)
        except OSError as error:
            logger.error("the hang's folder %s cannot be written: %s", self.folder, error.strerror)
        idle_s = max(snap.idle_s for snap in answers.values())
        text = join_findings(found)
        logger.error(
            "training hangs at step %d for %.0f s: %s (see %s)", step, idle_s, text, self.folder
        )
        raise_alarm(
            HANG,
            f"training hangs for {idle_s:.0f} s: {text} (see {self.folder})",
            step=step,
            level="error",
        )


def write_folder(
    folder: Path, found: list[Finding], answers: Mapping[int, Snapshot], stacks: Mapping[str, str]
) -> None:
    """Write `verdict.json` with the findings and each rank's position, and `rank-N.txt` with its stacks.

    Beyond `MAX_FILES` ranks the stacks are those of the ranks to blame and of one rank for each different stack.

    Args:
        folder (`Path`): the folder; it is created if it does not exist.
        found (`list[Finding]`): the findings about the hang.
        answers (`Mapping[int, Snapshot]`): the snapshots of the ranks that answered, by rank.
        stacks (`Mapping[str, str]`): the texts that the snapshots' `stacks` are the keys of.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [
        {"rank": rank, **{k: v for k, v in snap.to_dict().items() if k != "stacks"}}
        for rank, snap in answers.items()
    ]
    verdict = {"findings": [finding.to_dict() for finding in found], "ranks": ranks}
    (folder / "verdict.json").write_text(
        json.dumps(redact_json(verdict), indent=1) + "\n", encoding="utf-8"
    )
    blamed = {rank for finding in found for rank in finding.ranks}
    one_of_each = {snap.stacks: rank for rank, snap in reversed(list(answers.items()))}.values()
    chosen = sorted(answers, key=lambda rank: (rank not in blamed, rank not in one_of_each, rank))[
        :MAX_FILES
    ]
    for rank in chosen:
        (folder / f"rank-{rank}.txt").write_text(
            redact(stacks[answers[rank].stacks]), encoding="utf-8"
        )
