"""Starts the launcher of a training on one node, and starts it again after a failure.

The supervisor sleeps until something happens: a message of a rank, the end of a rank, the end of the launcher, or a
signal. When a rank ends without saying why (SIGKILL, a segmentation fault), the others can only wait for it in a
collective, so they are ended too, and the launcher ends by itself. What the ranks keep in host memory
(`hfscale.core.run_memory`) survives, and the next launch resumes from it.
"""

import fcntl
import os
import selectors
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hfscale.core.best_effort import best_effort
from hfscale.core.final_errors import PREEMPTED
from hfscale.core.records import unix_time
from hfscale.core.recovery_times import RECOVERY_PARTS, shown_name
from hfscale.core.run_memory import (
    FOLDER_VARIABLE,
    INTERVAL_VARIABLE,
    LAUNCHED_VARIABLE,
    RESTARTS_VARIABLE,
    RunMemory,
)
from hfscale.core.spelling import spelled
from hfscale.core.text_files import parse_json
from hfscale.errors import UsageError
from hfscale.recovery.abandoned import remove_abandoned
from hfscale.recovery.children import (
    adopt_orphans,
    catches,
    describe,
    die_with_parent,
    end_descendants,
    exit_code_of,
    send,
)
from hfscale.recovery.connections import TOKEN_VARIABLE
from hfscale.recovery.event_log import EventLog
from hfscale.recovery.nodes import NodeGroup, NodeSettings, Start
from hfscale.recovery.rank_start import IN_RANK, with_folder
from hfscale.recovery.restarts import Failure, RestartPolicy, back_off_s
from hfscale.recovery.standby import Standby, is_wrapped

_OTHERS_GRACE_S = 1.0  # for ranks that fail at the same time to say why
_LAUNCHER_GRACE_S = 20.0  # for the launcher to notice that its ranks have ended
_KILLED_S = 60.0  # for killed processes to end: those that use GPUs free much memory
_START_ATTEMPTS = 10  # to start a command that has run before
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_MAX_MESSAGE = 65_536
_WRONG_USAGE = 2
_GUARD_S = 5.0  # between two looks at the folder in host memory, while nothing happens


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How a command is supervised."""

    command: Sequence[str]
    """The launcher and its arguments."""
    max_restarts: int = 10
    """Restarts in any 24 hours after which the supervisor gives up."""
    root: Path
    """Folder of a file system in memory."""
    memory_interval_steps: int | None = None
    """Steps between two snapshots in host memory; None: as many as keep their cost low."""
    nodes: NodeSettings | None = None
    """The nodes of the run; None: this one only."""
    standby: bool = True
    """Whether a process that has imported what the ranks need waits for the next launch."""
    exclude_file: Path | None = None
    """File to which the hosts are added that the health checks blame, one per line."""
    log: Path | None = None
    """File to which one JSON line per event is appended."""


@dataclass(frozen=True, kw_only=True)
class _Moments:
    """The moments of the last failure on this node."""

    failed_at: float
    """When the first rank ended, in seconds of `time.monotonic`."""
    ended_at: float
    """When the last process had ended, likewise."""
    failed_time: float
    """`failed_at` as Unix time."""


@dataclass
class _Launch:
    """One launch of the command, while it runs."""

    process: subprocess.Popen[bytes]
    ranks: dict[int, int] = field(default_factory=dict)  # pid: rank
    watched: set[int] = field(default_factory=set)  # pids whose end is waited for
    codes: dict[int, int | None] = field(default_factory=dict)  # pid: exit code, if it is known
    # rank: its message, in the order of their arrival; of a process that has not said its rank, minus its pid
    endings: dict[int, dict[str, Any]] = field(default_factory=dict)
    # Ranks for which nothing but their own end is left
    trained: set[int] = field(default_factory=set)
    first_dead: int | None = None  # rank that ended without saying why, or with an error
    failed_at: float | None = None  # in seconds of `time.monotonic`
    failed_time: float | None = None  # the same moment as Unix time, for records
    is_stopped: bool = False  # because another node has failed
    is_blamed: bool = False  # this host, by the health checks
    is_standby: bool = False  # its launcher has waited for it (`hfscale.recovery.standby`)
    has_stepped: bool = False

    def fail(self) -> None:
        """Record that the launch fails now."""
        self.failed_at = time.monotonic()
        self.failed_time = unix_time()


class Supervisor:
    """Runs one command until it is done, preempted, or cannot be helped by a restart.

    Args:
        settings (`RunSettings`): the command and the limits.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._say = EventLog(settings.log).say
        self._memory: RunMemory
        self._selector = selectors.DefaultSelector()
        self._signalled: int | None = None
        self._stop = threading.Event()
        self._launch: _Launch | None = None
        self._policy = RestartPolicy(settings.max_restarts)
        self._group: NodeGroup | None = None
        self._standby: Standby | None = None
        self._has_started = False
        self._listener: socket.socket | None = None
        self._guarded_at = 0.0
        self._memory_problem: str | None = None
        self._recorded: Failure | None = None
        self._last_here: _Moments | None = None
        self._outliving: set[psutil.Process] = set()
        self._unkillable: set[psutil.Process] = set()

    def run(self) -> int:
        """Run the command.

        Returns:
            `int`: the exit code: 0 when the command is done, 75 when it was preempted or stopped by SIGTERM or
            SIGUSR1, 130 when it was stopped by SIGINT, the code of an error that a restart cannot help (2: wrong
            usage or a missing package, 1: another), and 1 when the supervisor gives up.

        Raises:
            UsageError: the command or the folder in memory cannot be used.
        """
        for folder in remove_abandoned(self._settings.root):
            self._say(
                "reclaimed", f"deleted the memory of a run whose supervisor was killed: {folder}"
            )
        try:
            self._memory = RunMemory.create(self._settings.root)
        except OSError as error:
            named = spelled("memory_dir", str(self._settings.root))
            raise UsageError(
                f"{named} cannot be used: {error.strerror}; name a folder of a file system in memory (tmpfs)"
            ) from None
        adopt_orphans()  # ranks whose launcher is killed
        previous = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        if self._settings.standby:
            self._standby = Standby(self._settings.command, self._memory, die_with_parent)
        try:
            self._listen()
            if self._settings.nodes is not None:
                self._group = NodeGroup(
                    self._settings.nodes,
                    self._memory,
                    max_restarts=self._settings.max_restarts,
                    interrupted=self._stop.is_set,
                    say=self._say,
                )
            return self._run_until_the_end()
        finally:
            if self._group is not None:
                self._group.close()
            if self._standby is not None:
                self._standby.end()
            self._selector.close()
            self._memory.delete()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run_until_the_end(self) -> int:
        while True:
            self._guard_memory()
            start: Start | None = None
            if self._group is not None:
                met = self._group.wait_for_start()
                if met is None:
                    return self._code_of_signal()
                if isinstance(met, int):
                    return met
                start = met
                if start.failure is not None:
                    self._record(start.failure)
            self._guard_memory()  # the nodes may have waited for one another
            launch = self._start(start)
            # The signal came before there was a launcher to pass it on to
            if self._signalled is not None:
                send(launch.process.pid, signal.SIGTERM)
            while launch.process.poll() is None and not self._is_unkillable(launch):
                self._handle_events(launch)
            code = (
                -signal.SIGKILL if launch.process.returncode is None else launch.process.returncode
            )
            self._launch = None  # a signal must not go to another process with its id
            self._leave_group(launch, code)
            if (
                launch.is_standby
                and not launch.has_stepped
                and self._standby is not None
                and code != 0
            ):
                self._standby.end()
                self._standby = None  # if that was the reason, it would come back
            self._end_descendants()
            ended = (time.monotonic(), unix_time())
            self._drain(launch)
            self._exclude_blamed(launch)
            final = None if launch.is_stopped else self._final_code(launch, code)
            failure = self._failure(launch, *ended) if final is None else None
            if self._group is not None:
                decided = self._group.ended(final, failure, is_blamed=launch.is_blamed)
                if decided is not None:
                    return decided
            elif final is not None:
                return final
            elif failure is not None:
                self._record(failure)
                why = self._policy.why_give_up(failure)
                if why is not None:
                    self._say("gave_up", f"gives up: {why}", failure)
                    return 1
                wait_s, text = self._policy.next_restart(failure)
                self._say("restart", text, failure)
                self._stop.wait(wait_s)
            if self._signalled is not None:
                return self._code_of_signal()

    def _code_of_signal(self) -> int:
        """Return the exit code after a signal: the same command can be started again, unless a person has ended it."""
        number = signal.Signals(self._signalled or signal.SIGTERM)
        code = 128 + signal.SIGINT if number == signal.SIGINT else PREEMPTED
        self._say("stopped", f"stopped by {number.name} (exit code {code})")
        return code

    # --- several nodes ----------------------------------------------------------------------------------------------

    def _leave_group(self, launch: _Launch, code: int) -> None:
        """Read no more messages of the coordinator, and tell it of a failure before the rest is cleared up."""
        group = self._group
        if group is None:
            return
        if group.connection is not None:
            self._selector.unregister(group.connection)
        decisive = _decisive_ending(launch)
        is_preempted = decisive is not None and not decisive["final"]
        if code not in (0, PREEMPTED) and not launch.is_stopped and not is_preempted:
            group.failed()

    def _told(self, launch: _Launch, connection: Any) -> None:
        """Take a message of the coordinator. If it is lost, its node is: the launch cannot go on."""
        assert self._group is not None
        message = self._group.receive()
        if message is None:
            self._selector.unregister(connection)
            self._group.disconnect()
        if message is None or message["event"] == "stop":
            if launch.failed_at is None:
                launch.fail()
                launch.is_stopped = True
                for pid in launch.ranks:
                    send(pid, signal.SIGKILL)
                launch.process.kill()
        elif message["event"] == "replicated":
            self._group.replicated(message)

    # --- one launch -------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Listen at the socket in the folder; what has connected to an earlier one is kept."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._memory.socket.unlink(missing_ok=True)
        listener.bind(str(self._memory.socket))
        listener.listen(1024)
        listener.setblocking(False)
        if self._listener is not None:
            while self._accept(self._launch, self._listener):
                pass
            self._forget(self._listener)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def _guard_memory(self) -> None:
        """Make the folder in host memory again if something has removed it, such as a cleaner or systemd-logind.

        It is private again, and ranks that start later find their supervisor in it. Until it can be made, the run goes
        on without snapshots.
        """
        self._guarded_at = time.monotonic()
        if self._memory.is_intact() and self._memory.socket.exists():
            self._outliving |= self._memory.outliving()
            return
        folder = self._memory.folder
        try:
            self._memory.make_again()
            self._listen()
        except OSError as error:
            problem = f"{folder} was removed and cannot be made again: {error.strerror or error}"
            if problem != self._memory_problem:
                text = f"{problem}; the run goes on without snapshots in host memory"
                self._say("memory_removed", text)
            self._memory_problem = problem
            return
        self._memory_problem = None
        text = "it is made again; the snapshots in it are lost"
        cause = "by a cleaner, or at your last logout (RemoveIPC of systemd-logind)"
        self._say("memory_removed", f"{folder} was removed, {cause}: {text}")
        if self._recorded is not None:
            self._record(self._recorded)

    def _start(self, start: Start | None) -> _Launch:
        process = (
            self._standby.become_launcher(self._environ(start))
            if self._standby is not None
            else None
        )
        is_standby = process is not None
        if process is None:
            process = self._start_command(self._environ(start))
        self._has_started = True
        launch = self._launch = _Launch(process, is_standby=is_standby)
        self._watch_process(launch, process.pid, lambda _: None)
        if self._group is not None and self._group.connection is not None:
            self._selector.register(self._group.connection, selectors.EVENT_READ, self._told)
        return launch

    def _environ(self, start: Start | None) -> dict[str, str]:
        environ = {
            **os.environ,
            **(start.environ if start is not None else {}),
            FOLDER_VARIABLE: str(self._memory.folder),
            RESTARTS_VARIABLE: str(self._policy.failures if start is None else start.restarts),
            LAUNCHED_VARIABLE: str(time.monotonic()),
            "PYTHONPATH": with_folder(os.environ.get("PYTHONPATH", "")),
        }
        if self._settings.memory_interval_steps is not None:
            environ[INTERVAL_VARIABLE] = str(self._settings.memory_interval_steps)
        environ.pop(TOKEN_VARIABLE, None)  # the secret of the supervisors
        environ.pop(IN_RANK, None)  # where a rank of another run has started this one
        return environ

    def _start_command(self, environ: dict[str, str]) -> "subprocess.Popen[bytes]":
        """Start the command. What has run before may be away for a moment, such as a program on a network disk."""
        attempts = _START_ATTEMPTS if self._has_started else 1
        for attempt in range(1, attempts + 1):
            try:
                return subprocess.Popen(  # noqa: S603 - the user's own command, without a shell
                    list(self._settings.command),
                    env=environ,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            except OSError as error:
                problem = f"command {self._settings.command[0]} cannot be run: {error.strerror}"
            if attempt < attempts and not self._stop.is_set():
                self._say("not_started", f"{problem}; tried again in {back_off_s(attempt):.0f} s")
                self._stop.wait(back_off_s(attempt))
        raise UsageError(problem)

    def _handle_events(self, launch: _Launch) -> None:
        """Wait for events, and end what is left once a rank has failed."""
        timeout = max(self._guarded_at + _GUARD_S - time.monotonic(), 0.0)
        if launch.failed_at is not None:
            waited = time.monotonic() - launch.failed_at
            if waited >= _LAUNCHER_GRACE_S:
                launch.process.kill()
            elif waited >= _OTHERS_GRACE_S:
                for pid in launch.ranks:
                    send(pid, signal.SIGKILL)
            timeout = min(timeout, _OTHERS_GRACE_S)
        # What a rank has said is read before its end is handled: it may be the reason.
        for key in sorted(
            (key for key, _ in self._selector.select(timeout)), key=self._is_end_of_process
        ):
            if self._is_end_of_process(key):
                key.data(launch)
            else:
                key.data(launch, key.fileobj)
        if time.monotonic() >= self._guarded_at + _GUARD_S:
            self._guard_memory()

    def _is_end_of_process(self, key: selectors.SelectorKey) -> bool:
        return key.data not in (self._accept, self._read, self._told)

    def _drain(self, launch: _Launch) -> None:
        """Read what the ranks said last, and forget their connections."""
        for handler in (self._accept, self._read):
            for key, _ in self._selector.select(0):
                if key.data == handler:
                    handler(launch, key.fileobj)
        for key in list(self._selector.get_map().values()):
            if key.data != self._accept:
                self._forget(key.fileobj)

    def _accept(self, launch: _Launch | None, listener: Any) -> bool:
        """Take a connection of a rank; False if there is none."""
        try:
            connection, _ = listener.accept()
        except OSError:  # the process has ended meanwhile, or too many files are open
            return False
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, self._read)
        return True

    def _read(self, launch: _Launch, connection: Any) -> None:
        """Take all messages that have arrived."""
        pid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[
            0
        ]
        try:
            while text := connection.recv(_MAX_MESSAGE):
                try:
                    self._take(launch, pid, parse_json(text))
                except (ValueError, KeyError, TypeError) as error:
                    self._say(
                        "unread",
                        f"a message of process {pid} is ignored: {type(error).__name__}: {error}",
                    )
            self._forget(connection)
        except BlockingIOError:
            pass  # nothing more has arrived
        except OSError:  # the connection was reset: the process has ended
            self._forget(connection)
        # It may have ended already, after all its messages
        if pid in launch.ranks and pid not in launch.watched:
            launch.watched.add(pid)
            self._watch_process(launch, pid, lambda launch: self._rank_ended(launch, pid))

    def _take(self, launch: _Launch, pid: int, message: dict[str, Any]) -> None:
        event = message["event"]
        if event == "hello":
            launch.ranks[pid] = int(message["rank"])
            if self._signalled == signal.SIGUSR1 and not is_wrapped(self._settings.command):
                send(pid, signal.SIGUSR1)
        elif event == "ending":
            _check_ending(message)
            launch.endings.setdefault(launch.ranks.get(pid, -pid), message)
        elif event == "removed":
            self._guard_memory()
        elif event == "trained":
            launch.trained.add(launch.ranks.get(pid, -1))
        elif event == "training":
            launch.trained.clear()
        elif event == "stepped":
            if message["recovery"] is not None and not launch.has_stepped:
                self._report_recovery(message["recovery"])
            launch.has_stepped = True
            self._recorded = None
            if self._standby is not None:
                with best_effort("starting a standby process", self._memory.folder):
                    self._standby.start(self._environ(None))
        elif event == "snapshot" and self._group is not None:
            self._group.committed(message["folder"], int(message["step"]))

    def _exclude_blamed(self, launch: _Launch) -> None:
        """Add the hosts that the health checks blame to the file, when the launch is over.

        Before, it is not known whether a rank ends by an error of its own, whose end others then take for a fault.
        """
        endings = launch.endings.values()
        if any(ending["final"] or ending.get("error") for ending in endings):
            return
        hosts = list(dict.fromkeys(host for ending in endings for host in ending["hosts"]))
        if self._settings.exclude_file is not None and hosts:
            self._exclude(self._settings.exclude_file, hosts)
            launch.is_blamed = socket.gethostname() in hosts

    def _exclude(self, path: Path, hosts: list[str]) -> None:
        try:
            added = add_lines(path, hosts)
        except OSError as error:
            self._say(
                "not_excluded",
                f"{path} cannot be written ({error.strerror}); bad hosts: {' '.join(hosts)}",
            )
            return
        if added:
            text = f"added to {path}, since the health checks blame them: {' '.join(added)}"
            self._say("excluded", text, {"hosts": added})

    def _watch_process(self, launch: _Launch, pid: int, ended: Any) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            ended(launch)
            return

        def handle(launch: _Launch) -> None:
            launch.codes[pid] = exit_code_of(pid, descriptor)
            self._forget(descriptor)
            ended(launch)

        self._selector.register(descriptor, selectors.EVENT_READ, handle)

    def _rank_ended(self, launch: _Launch, pid: int) -> None:
        rank = launch.ranks.pop(pid)
        if not launch.ranks:
            send(launch.process.pid, signal.SIGCONT)  # a launcher that was stopped would never end
        _note_code(launch, rank, launch.codes.get(pid))
        ending = launch.endings.get(rank)
        is_expected = rank in launch.trained or (
            ending is not None and ending["code"] in (0, PREEMPTED)
        )
        if launch.failed_at is None and not is_expected and self._signalled is None:
            launch.fail()
            launch.first_dead = rank
            if self._group is not None:
                self._group.failed()

    def _forget(self, file: Any) -> None:
        self._selector.unregister(file)
        if isinstance(file, int):
            os.close(file)
        else:
            file.close()

    # --- after a launch ---------------------------------------------------------------------------------------------

    def _is_unkillable(self, launch: _Launch) -> bool:
        """Return whether the launcher has not ended, although it was killed some time ago."""
        if launch.failed_at is None:
            return False
        return time.monotonic() - launch.failed_at >= _LAUNCHER_GRACE_S + _KILLED_S

    def _end_descendants(self) -> None:
        """End what the launcher has left behind. What the kernel does not end is named, and no longer waited for."""
        spared = self._unkillable | self._outliving | self._memory.outliving()
        if self._standby is not None and self._standby.pid is not None:
            spared.add(psutil.Process(self._standby.pid))
        left = end_descendants(spared, limit_s=_KILLED_S)
        if left:
            text = f"{describe(left)} did not end {_KILLED_S:.0f} s after SIGKILL: not waited for any longer"
            self._say("unkillable", text, {"pids": [process.pid for process in left]})
            self._unkillable.update(left)

    def _record(self, failure: Failure) -> None:
        """Write a failure for the ranks of the next launch, which report it."""
        self._recorded = failure
        with best_effort("recording a failure", self._memory.folder):
            self._memory.write_failure(asdict(failure) | self._on_this_clock(failure))

    def _on_this_clock(self, failure: Failure) -> dict[str, float]:
        """Return the moments of a failure in seconds of this machine's `time.monotonic`.

        Those of another node are Unix times of its clock: they are placed next to the failure of this node.
        """
        here, shift_s = self._last_here, 0.0
        if here is None:  # this node has just come
            shift_s = time.monotonic() - unix_time()
        elif failure.failed_at == here.failed_time:
            return {"failed_monotonic": here.failed_at, "ended_monotonic": here.ended_at}
        else:
            shift_s = here.failed_at - here.failed_time
        failed, ended = failure.failed_at + shift_s, failure.ended_at + shift_s
        return {"failed_monotonic": failed, "ended_monotonic": max(failed, ended)}

    def _final_code(self, launch: _Launch, code: int) -> int | None:
        """Return the exit code if the command is not to be started again.

        A launcher ends the other ranks of one that has failed by a signal, which those can take for a preemption: what
        a rank has said first counts.
        """
        if code == 0:
            self._say("done", None)
            return 0
        decisive = _decisive_ending(launch)
        if decisive is not None and decisive["final"]:
            reason = decisive["reason"]
            self._say("failed", f"not started again, since the error would come back: {reason}")
            return int(decisive["code"]) or 1
        if decisive is not None or code == PREEMPTED:
            self._say(
                "preempted", f"preempted: start the same command again (exit code {PREEMPTED})"
            )
            return PREEMPTED
        if code == _WRONG_USAGE:  # of the launcher, or of ranks whose exit code it returns
            reason = f"the command ended with exit code {code}: wrong usage, or a missing package"
            self._say("failed", f"not started again, since {reason}")
            return code
        return None if self._signalled is None else self._code_of_signal()

    def _failure(self, launch: _Launch, ended_at: float, ended_time: float) -> Failure:
        failed_at, failed_time = ended_at, ended_time
        if launch.failed_at is not None and launch.failed_time is not None:
            failed_at, failed_time = launch.failed_at, launch.failed_time
        ended_time = failed_time + ended_at - failed_at  # the date may have been set meanwhile
        self._last_here = _Moments(failed_at=failed_at, ended_at=ended_at, failed_time=failed_time)
        begun, completed = self._memory.furthest()
        rank = _rank_of_cause(launch)
        told = None if rank is None else launch.endings.get(rank)
        if told is None:
            told = next((ending for ending in launch.endings.values() if ending["code"]), None)
        if told is not None:
            reason = told["reason"]
        elif rank is not None:
            reason = "its process was killed or crashed"
        else:
            code = launch.process.returncode
            reason = (
                "the launcher did not end"
                if code is None
                else f"the launcher ended with code {code}"
            )
        samples = self._memory.samples_of(begun) if begun > completed else {}
        for path in [
            *self._memory.folder.glob("progress-*"),
            *self._memory.folder.glob("samples-*"),
        ]:
            path.unlink(missing_ok=True)
        return Failure(
            failed_at=failed_time,
            ended_at=ended_time,
            rank=rank,
            reason=reason,
            begun_step=begun,
            completed_step=completed,
            is_consequence=launch.is_stopped,
            samples=samples,
            errors=[] if launch.has_stepped else _errors(launch),
        )

    def _report_recovery(self, recovery: dict[str, Any]) -> None:
        """Report a recovery, which a rank has measured (`RankLink.stepped`)."""
        parts = {shown_name(part): recovery[part] for part in RECOVERY_PARTS}
        total = sum(parts.values())
        lost = recovery["steps_lost"]
        shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
        self._say(
            "recovered",
            f"recovered in {total:.1f} s ({shown}); {lost} steps lost",
            parts | {"steps_lost": lost},
        )

    def _forward(self, number: int, frame: Any) -> None:
        """Pass a signal on; nothing is started again after it.

        A launcher of several ranks passes SIGTERM and SIGINT on to them. SIGUSR1 would end it, unless it is
        `exit_code.py`, so the ranks receive that directly. So they do where the launcher has no handler: that of a
        single process (`accelerate launch` without a distributed type) would end at once, and its rank with it.
        """
        self._signalled = number
        self._stop.set()
        if self._group is not None:
            self._group.wake()
        if self._launch is None:
            return
        launcher = self._launch.process.pid
        is_for_ranks = number == signal.SIGUSR1 and not is_wrapped(self._settings.command)
        receivers: Iterable[int] = (launcher,)
        if is_for_ranks or (self._launch.ranks and not catches(launcher, number)):
            receivers = tuple(self._launch.ranks)
        for pid in receivers:
            send(pid, number)


def _check_ending(message: dict[str, Any]) -> None:
    """Raise a KeyError or TypeError for a message whose fields are not those of an ending."""
    if not isinstance(message["code"], int) or not isinstance(message["final"], bool):
        raise TypeError("code or final of an ending")
    if not isinstance(message["reason"], str) or not isinstance(message["hosts"], list):
        raise TypeError("reason or hosts of an ending")


def _note_code(launch: _Launch, rank: int, code: int | None) -> None:
    """Note the exit code of a rank that has said nothing, or code 0: `sys.exit` leaves no exception to report."""
    said = launch.endings.get(rank)
    if code is None or code <= 0 or (said is not None and said["code"] != 0):
        return
    reason = f"exit code {code}"
    if code == _WRONG_USAGE:
        reason = f"exit code {code}: wrong usage, or a missing package"
    launch.endings[rank] = {
        "code": code,
        "final": code == _WRONG_USAGE,
        "reason": reason,
        "hosts": [],
    }


def _rank_of_cause(launch: _Launch) -> int | None:
    """Return the rank that has ended first, or the one whose error it took for a hang; None if it is not known."""
    first = launch.first_dead
    said = None if first is None else launch.endings.get(first)
    if said is None or said.get("error"):
        return first
    return next((rank for rank, one in launch.endings.items() if one.get("error")), first)


def _errors(launch: _Launch) -> list[str]:
    return sorted({str(ending.get("error") or "") for ending in launch.endings.values()} - {""})


def _decisive_ending(launch: _Launch) -> dict[str, Any] | None:
    """Return the first word after which nothing is started again: of a final error or a preemption; None without."""
    endings = launch.endings.values()
    return next((one for one in endings if one["final"] or one["code"] == PREEMPTED), None)


def add_lines(path: Path, lines: Sequence[str]) -> list[str]:
    """Add lines to a file that supervisors of several nodes may write, each line once.

    Args:
        path (`Path`): the file; it is made if it does not exist.
        lines (`Sequence[str]`): the lines, without their ends.

    Returns:
        `list[str]`: the lines that the file did not have.

    Raises:
        OSError: the file cannot be read or written.
    """
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        added = [line for line in dict.fromkeys(lines) if line not in text.splitlines()]
        unended = "\n" if text and not text.endswith("\n") else ""
        file.write(unended + "".join(f"{line}\n" for line in added) if added else "")
    return added
