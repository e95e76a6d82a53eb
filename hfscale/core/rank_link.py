"""What a rank tells the supervisor of its node, over a local socket; each message is one JSON object.

| event | fields | meaning |
|---|---|---|
| `hello` | `rank`, `pid` | the rank's process has imported what it needs |
| `training` | `step` | `train` begins or resumes after this step |
| `stepped` | `step`, `recovery` | the first step since then is complete; `recovery` is that of `RankLink.stepped` |
| `snapshot` | `folder`, `step` | this node's part of a snapshot is committed; only on several nodes |
| `trained` | | `train` is about to return |
| `removed` | | the folder in host memory was removed |
| `ending` | `code`, `final`, `reason`, `hosts`, `error` | it ends: `final`: a restart cannot help; 75: preempted |

`hosts` are those that the health checks blame; `error` is what `recurring_error` returns before the first step. The
end of the connection is the end of the process, however it ends.
"""

import atexit
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from hfscale.core.final_errors import has_optimizer, is_final, is_of_user, recurring_error
from hfscale.core.launch_variables import launch_number
from hfscale.core.logging import get_logger
from hfscale.core.recovery_times import RecoveryTimes
from hfscale.core.redaction import redact
from hfscale.core.run_memory import (
    FOLDER_VARIABLE,
    LAUNCHED_VARIABLE,
    RESTARTS_VARIABLE,
    RunMemory,
)
from hfscale.errors import HealthError, HfScaleError

logger = get_logger(__name__)


class RankLink:
    """The connection of this process to its supervisor.

    Args:
        memory (`RunMemory`): the folder of the run.
        rank (`int`): the global rank of this process.

    Raises:
        OSError: the supervisor does not answer.
    """

    def __init__(self, memory: RunMemory, rank: int) -> None:
        self.memory = memory
        self._rank = rank
        self._progress = memory.progress(rank)
        self._has_memory = True
        self.memory_losses = 0
        """How often the folder in host memory was removed, with all snapshots in it."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(str(memory.socket))
        self._pid = os.getpid()
        self._connected_at = time.monotonic()
        self._began_at: float | None = None
        self._began_after = 0
        self._has_stepped = False
        self.ended_trainings: list[Path] = []
        """Folders in the memory of the trainings of this process that have ended; the next one frees them."""
        self._has_ended = False
        self.say("hello", rank=rank, pid=self._pid)
        atexit.register(self._at_exit)

    def say(self, event: str, **fields: Any) -> None:
        """Send one message. A supervisor that is gone is ignored: this process is about to be ended.

        Args:
            event (`str`): one of the table in this module's docstring.
            fields (`Any`): its fields.
        """
        try:
            self._socket.sendall(json.dumps({"event": event, **fields}).encode())
        except OSError as error:
            logger.debug("the supervisor is gone: %s", error)

    def progressed(self, begun: int, completed: int) -> None:
        """Record the steps of this rank where the supervisor finds them after its death.

        Args:
            begun (`int`): the last optimizer step that has begun.
            completed (`int`): the last optimizer step that is complete.
        """
        if not self.memory.has_progress(self._rank):
            if self._has_memory:
                self.memory_losses += 1
            self._has_memory = False
            self.say("removed")
            with suppress(OSError):  # the supervisor has not made the folder again yet
                self._progress = self.memory.progress(self._rank)
                self._has_memory = True
        self._progress.write(begun, completed)

    def training(self, step: int) -> None:
        """Say that `train` begins or resumes.

        Args:
            step (`int`): the optimizer step after which it does.
        """
        self._began_at = time.monotonic()
        self._began_after = step
        self.say("training", step=step)

    def stepped(self, step: int) -> dict[str, Any] | None:
        """Say that the first step of a training is complete.

        Args:
            step (`int`): the optimizer step.

        Returns:
            `dict[str, Any]` or `None`: the recovery that ended with this step: `steps_lost`, the seconds of each of
            `RECOVERY_PARTS`, and the `rank` and the `reason` of the failure. None if no failure led to this launch, or
            if an earlier training of this process has reported it.
        """
        recovery = None if self._has_stepped else self._recovery()
        self._has_stepped = True
        self.say("stepped", step=step, recovery=recovery)
        return recovery

    def _recovery(self) -> dict[str, Any] | None:
        failure = self.memory.read_failure()
        if failure is None or self._began_at is None:
            return None
        ended_at = failure["ended_monotonic"]
        times = RecoveryTimes(
            failed_at=failure["failed_monotonic"],
            ended_at=ended_at,
            launched_at=float(os.environ.get(LAUNCHED_VARIABLE, ended_at)),
            connected_at=self._connected_at,
            began_at=self._began_at,
            stepped_at=time.monotonic(),
        )
        lost = max(failure["completed_step"] - self._began_after, 0)
        return {
            "steps_lost": lost,
            **times.parts(),
            "rank": failure["rank"],
            "reason": failure["reason"],
        }

    def ending(
        self,
        code: int,
        *,
        final: bool = False,
        reason: str = "",
        hosts: Sequence[str] = (),
        error: str = "",
    ) -> None:
        """Say that this process is about to end, and why; only the first call of a process has an effect.

        Args:
            code (`int`): its exit code.
            final (`bool`): whether a restart of the same command cannot help.
            reason (`str`): the error in one line; secrets in it are redacted.
            hosts (`Sequence[str]`): the hosts that the health checks blame.
            error (`str`): what `recurring_error` returns for an error before the first step.
        """
        if not self._has_ended:
            self._has_ended = True
            shown = redact(" ".join(reason.split()))[:2000]
            said = {"final": final, "reason": shown, "hosts": list(hosts), "error": redact(error)}
            self.say("ending", code=code, **said)

    def ending_by(self, error: BaseException) -> None:
        """Say that this process is about to end because of an exception.

        Args:
            error (`BaseException`): the exception.
        """
        code = error.exit_code if isinstance(error, HfScaleError) else 1
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        hosts = error.hosts if isinstance(error, HealthError) else ()
        is_at_start = self._is_before_the_first_step()
        is_first = os.environ.get(RESTARTS_VARIABLE, "0") == "0"
        is_sure_to_return = is_final(error) or (is_at_start and is_first and is_of_user(error))
        self.ending(
            code,
            final=is_sure_to_return,
            reason=f"{type(error).__name__}: {error}",
            hosts=hosts,
            error=recurring_error(error) if is_at_start else "",
        )

    def _is_before_the_first_step(self) -> bool:
        """Return whether this launch can have completed no step so far.

        A script that trains without the callbacks of hfscale reports no step: there it is so as long as the process
        has no optimizer.
        """
        return not self._has_stepped and (self._began_at is not None or not has_optimizer())

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:  # a forked child, such as a worker of a DataLoader
            return
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.ending_by(error)
        else:
            self.ending(0)


def report_uncaught_error() -> None:
    """Report an error that ends this process and would come back, if no callback has connected it before.

    It is called when a process of `hfscale run` exits. A rank whose error came before its Trainer was made, such as
    one about an argument of a callback, would otherwise be started again until the limit of restarts. Of a rank that
    `sys.exit` ends, such as for a wrong flag, the supervisor reads the exit code once it knows its process.
    """
    error = getattr(sys, "last_value", None)
    if error is None:
        is_unknown_rank = _link is None and "RANK" in os.environ and not _is_helper_of_rank()
        if is_unknown_rank and (link := connect()) is not None:
            link.ending(0)
        return
    may_return = is_of_user(error) or bool(recurring_error(error))
    would_return = is_final(error) or (may_return and not _is_helper_of_rank())
    if (would_return or isinstance(error, HfScaleError)) and (link := connect()) is not None:
        link.ending_by(error)


def _is_helper_of_rank() -> bool:
    """Return whether a rank has started this process, and not the launcher: the training goes on without it."""
    try:
        parent = psutil.Process().parent()
        of_parent = {} if parent is None else parent.environ()
    except psutil.Error:
        return True
    names = (FOLDER_VARIABLE, "RANK")
    return all(of_parent.get(name) == os.environ.get(name) for name in names)


@cache
def _warn_of_missing(folder: str | None) -> None:
    if folder:
        logger.warning("the folder of hfscale run, %s, is gone: this run is not supervised", folder)


_link: RankLink | None = None


def connect(environ: Mapping[str, str] = os.environ) -> RankLink | None:
    """Return the link of this process to its supervisor, and connect it at the first call.

    Args:
        environ (`Mapping[str, str]`): the environment variables.

    Returns:
        `RankLink` or `None`: None if no supervisor started this process, or if it is gone.
    """
    global _link
    memory = RunMemory.of_environment(environ)
    if memory is None:
        _warn_of_missing(environ.get(FOLDER_VARIABLE))
        return None
    if _link is None or _link.memory.folder != memory.folder:
        try:
            _link = RankLink(memory, launch_number("RANK", 0, environ))
        except OSError as error:
            logger.warning(
                "the supervisor in %s cannot be reached (%s): this run is not supervised",
                memory.folder,
                error,
            )
            return None
    return _link
