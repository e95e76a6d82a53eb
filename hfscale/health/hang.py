"""A thread that notices when training stands still, asks all ranks what they do, and names who keeps them waiting.

Ranks answer through the launcher's store (`RankStore`), never through the group that hangs; a rank that is dead,
stopped or held by a call that does not release the interpreter cannot answer, which is an answer too.
"""

import json
import os
import socket
import statistics
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hfscale.health import stacks
from hfscale.health.diagnosis import Snapshot, diagnose
from hfscale.health.flight import positions
from hfscale.health.rank_store import RankStore
from hfscale.utils.findings import Finding, join_findings
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

FOLDER = "hfscale_hang"
"""In the output directory: one folder per hang."""
_WARM_UP_STEPS = 3
_EXIT_CODE = 1


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When silence is a hang."""

    floor_s: float = 60.0
    """Never less than this."""
    factor: float = 10.0
    """Times the median step of late."""
    outside_s: float = 1800.0
    """For the first steps, and while a rank compiles, saves or evaluates."""
    grace_s: float = 3.0
    """For the ranks to answer an alarm."""
    poll_s: float = 1.0
    """Between two looks."""


class HangWatchdog(threading.Thread):
    """Watches the thread that makes it, which tells it of its progress.

    Args:
        board (`RankStore`): unused until now; every rank must make a watchdog.
        output_dir (`Path`): where the folder `hfscale_hang` is written.
        limits (`Limits`, *optional*): when silence is a hang.
        abort (`bool`): whether to end this process after the report (exit code 1), so that the launcher restarts all.
        inside (`FrameType`, *optional*): a call that is on the watched thread's stack as long as there is something to
            watch; the watchdog ends when it is not.
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
        """Of the last hang."""
        self.folder: Path | None = None
        """What was written about it, on the rank that wrote it."""
        self._board, self._output_dir, self._abort, self._inside = rank_store, output_dir, abort, inside
        self._watched = threading.get_ident()
        self._step, self._phase, self._error = 0, "starting", ""
        self._moved = self._began = time.monotonic()
        self._durations: deque[float] = deque(maxlen=50)
        self._incident, self._reported, self._not_before = 0, 0.0, 0.0
        self._stop_now, self._examined = threading.Event(), threading.Event()
        rank_store.post("hang/hello", {"host": socket.gethostname()})

    def step_began(self, step: int) -> None:
        """`step` begins; called by the watched thread."""
        self._step, self._phase = step, "compute"
        self._moved = time.monotonic()

    def step_ended(self) -> None:
        """The step is done."""
        now = time.monotonic()
        self._durations.append(now - self._began)
        self._phase, self._began, self._moved = "between steps", now, now

    def moved(self) -> None:
        """Something else went on: a micro-step, a batch of an evaluation, a log."""
        self._moved = time.monotonic()

    def stop(self) -> None:
        """The training is over. Waits for the thread, which must not be in a call of the store when Python ends."""
        self._stop_now.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(self.limits.grace_s + 2 * self.limits.poll_s)

    def examine_failure(self, error: BaseException) -> None:
        """This process ends by `error`: ask the others which rank began it, and wait for the answer."""
        self._error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if self.is_alive():
            self._examined.wait(2 * self.limits.grace_s + 2 * self.limits.poll_s)

    def limit_s(self, occupation: str | None) -> float:
        """Seconds of silence that are a hang, now."""
        if occupation is not None or len(self._durations) < _WARM_UP_STEPS:
            return self.limits.outside_s
        return max(self.limits.floor_s, self.limits.factor * statistics.median(self._durations))

    def run(self) -> None:
        try:
            while not self._stop_now.wait(self.limits.poll_s):
                if not self._look():
                    return
        except RuntimeError as error:  # the store: without the launcher's process there is nobody to ask
            logger.warning("hangs are no longer watched for: the launcher's store failed (%s)", str(error)[:200])

    def _look(self) -> bool:
        """One look at the watched thread and at the board; False: there is nothing more to watch."""
        frames = stacks.frames_of(self._watched)
        is_inside = self._inside is None or self._inside in frames
        if not self._error and not (frames and is_inside):
            self._inside = None  # with which goes all that the call holds
            return False
        now = time.monotonic()
        if self._reported and self._moved > self._reported and not self._error:
            logger.warning("training goes on after the hang at step %d", self._step)
            self._reported = 0.0
        flag = f"hang/{self._incident}"
        if self._board.flag(flag) is None:
            silent_s = now - self._moved
            hangs = silent_s > self.limit_s(stacks.occupation(frames)) and now > self._not_before
            if not self._error and (not hangs or self._reported):
                return True
            self._board.raise_flag(flag, str(self._board.rank))
        self._examine(frames)
        return True

    def _examine(self, frames: list[Any]) -> None:
        """Answer the alarm, read the others' answers, and say who it is."""
        topic = f"hang/{self._incident}/snapshot"
        self._incident += 1
        snapshot = Snapshot(
            host=socket.gethostname(),
            step=self._step,
            phase=self._phase,
            idle_s=time.monotonic() - self._moved,
            occupation=stacks.occupation(frames),
            place=stacks.place(frames),
            positions=tuple(positions()),
            error=self._error or None,
            stacks=stacks.all_stacks(),
        )
        self._board.post(topic, snapshot.to_dict())
        until = time.monotonic() + self.limits.grace_s
        while not self._board.is_complete(topic) and time.monotonic() < until:
            time.sleep(0.05)
        answers = {rank: Snapshot.from_dict(note) for rank, note in self._board.read(topic).items()}
        hosts = {rank: note["host"] for rank, note in self._board.read("hang/hello").items()}
        found = diagnose(self._board.world_size, hosts, answers)
        now = time.monotonic()
        self._not_before = now + self.limits.floor_s  # of a rank that is rightly slow, ask again later
        if not found:
            return
        self.findings, self._reported = found, now
        if self._board.rank == min(answers):
            self._tell(found, answers)
        self._examined.set()
        if self._abort:
            time.sleep(1.0)  # for the writer
            os._exit(_EXIT_CODE)

    def _tell(self, found: list[Finding], answers: dict[int, Snapshot]) -> None:
        """One line in the log, and a folder with everything."""
        step = max(snap.step for snap in answers.values())
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.folder = self._output_dir / FOLDER / f"step-{step}-{stamp}"
        try:
            write_folder(self.folder, found, answers)
        except OSError as error:
            logger.error("the hang's folder %s cannot be written: %s", self.folder, error.strerror)
        idle_s = max(snap.idle_s for snap in answers.values())
        named = join_findings(found)
        logger.error("training stands still at step %d for %.0f s: %s (see %s)", step, idle_s, named, self.folder)


def write_folder(folder: Path, found: list[Finding], answers: dict[int, Snapshot]) -> None:
    """`verdict.json` with the findings and each rank's place, and `rank-N.txt` with its stacks.

    Raises:
        OSError: the disk is full, or gone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [
        {"rank": rank, **{k: v for k, v in snap.to_dict().items() if k != "stacks"}} for rank, snap in answers.items()
    ]
    verdict = {"findings": [finding.to_dict() for finding in found], "ranks": ranks}
    (folder / "verdict.json").write_text(json.dumps(verdict, indent=1) + "\n", encoding="utf-8")
    for rank, snap in answers.items():
        (folder / f"rank-{rank}.txt").write_text(snap.stacks, encoding="utf-8")
