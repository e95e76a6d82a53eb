"""Runs a launch command, listens to its ranks, and ends it at the first collective that cannot match."""

import os
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hfscale.check.rehearsal.comparison import Comparison
from hfscale.check.rehearsal.entries import Difference, Entry
from hfscale.check.rehearsal.hook import ADDRESS, FOLDER, SMALL, STEPS
from hfscale.core.text_files import parse_json
from hfscale.errors import UsageError

_SITECUSTOMIZE = "from hfscale.check.rehearsal.hook import install\ninstall({folder!r})\n"
_PATIENCE_S = 15.0
"""Longest time for the processes of a command to end by themselves."""
_TAIL_LINES = 25


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What `hfscale check --collectives` has found."""

    command: str
    """The launch command."""
    world_size: int
    """The number of ranks that were seen."""
    difference: Difference | None
    """The first collective that depends on the rank."""
    failure: str
    """Why a command failed in the same way on all ranks, in words; empty if it did not."""
    groups: dict[str, tuple[int, ...]]
    """The process groups that were used, and their ranks."""
    phases: dict[str, int]
    """The collectives by phase, over all ranks."""
    events: dict[str, int]
    """How often rank 0 has logged, evaluated, saved, reached the end of the data, and its steps."""

    @property
    def is_good(self) -> bool:
        """Whether no collective depends on the rank, and the command ran to its end."""
        return self.difference is None and not self.failure

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {"ok": self.is_good, **asdict(self)}


class _Rank:
    """The connection of one process."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank = -1
        self.pid = 0
        self.argv: list[str] = []
        self.error = ""
        self._buffer = b""

    def messages(self) -> Iterator[dict[str, Any]] | None:
        """Read what has come; None at the end."""
        with suppress(ConnectionResetError):
            received = self.connection.recv(1 << 20)
            if received:
                *lines, self._buffer = (self._buffer + received).split(b"\n")
                return (parse_json(line) for line in lines)
        return None


class Listener:
    """Takes the messages of all ranks until one differs or the command has ended."""

    def __init__(self, server: socket.socket, ended: socket.socket, quiet_s: float) -> None:
        self.comparison = Comparison()
        self.difference: Difference | None = None
        self.ranks: list[_Rank] = []
        self.world_size = 0
        self.events: Counter[str] = Counter()
        self._quiet_s = quiet_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._selector.register(ended, selectors.EVENT_READ)
        self._server = server
        self._ended = ended

    def run(self) -> None:
        """Read until a difference is found, or the command has ended and all that its ranks have said is read."""
        has_ended = False
        while self.difference is None:
            ready = self._selector.select(0 if has_ended else self._quiet_s)
            if not ready and has_ended:
                return
            if not ready:
                self.difference = self.comparison.waiting()
            for key, _ in ready:
                if key.fileobj is self._server:
                    rank = _Rank(self._server.accept()[0])
                    self.ranks.append(rank)
                    self._selector.register(rank.connection, selectors.EVENT_READ, rank)
                elif key.fileobj is self._ended:
                    self._selector.unregister(self._ended)
                    has_ended = True
                elif self.difference is None:
                    self._take(key.data)

    def _take(self, rank: _Rank) -> None:
        messages = rank.messages()
        if messages is None:
            self._selector.unregister(rank.connection)
            self.difference = self.comparison.ended(rank.rank, rank.error)
            return
        for message in messages:
            if message["kind"] == "hello":
                rank.rank, rank.pid = message["rank"], message["pid"]
                rank.argv = message["argv"]
                self.world_size = max(self.world_size, message["world_size"])
            elif message["kind"] == "error":
                rank.error = "\n  ".join(
                    [f"it has ended with {message['text']}", *message["stack"]]
                )
            elif message["kind"] == "event" and rank.rank == 0:
                self.events[message["name"]] += 1
            elif message["kind"] == "entry":
                self.difference = self.comparison.add(rank.rank, Entry.from_dict(message["entry"]))
                if self.difference is not None:
                    return


def rehearse(
    command: Sequence[str], *, steps: int, quiet_s: float, small: bool = False
) -> Rehearsal:
    """Run a launch command for a few steps on CPUs and compare what its ranks enter.

    Args:
        command (`Sequence[str]`): the command, one word per element.
        steps (`int`): optimizer steps of each training.
        quiet_s (`float`): seconds without any news after which ranks that wait are reported.
        small (`bool`): whether transformers models are made with fewer and narrower layers, and random weights.

    Raises:
        UsageError: the command is missing or not a program, or it has started fewer than two ranks.
    """
    words = find_program(command)
    with tempfile.TemporaryDirectory(prefix="hfscale-check-") as name:
        code, listener, tail = run_watched(words, Path(name), _variables(steps, small), quiet_s)
    if listener.world_size < 2 and code == 0:
        raise too_few_ranks(command, listener.world_size)
    comparison = listener.comparison
    return Rehearsal(
        command=shlex.join(command),
        world_size=listener.world_size,
        difference=listener.difference,
        failure=failure_of(listener, tail) if code and listener.difference is None else "",
        groups=comparison.groups,
        phases=dict(comparison.counts),
        events=dict(listener.events),
    )


def find_program(command: Sequence[str]) -> list[str]:
    """Return a command with the path of its program.

    Args:
        command (`Sequence[str]`): the command, one word per element.

    Raises:
        UsageError: it is missing or not a program.
    """
    program = shutil.which(command[0]) if command else None
    if program is None:
        given = f"'{command[0]}' is not a program" if command else "it is missing"
        raise UsageError(
            "give the launch command after --, such as hfscale check --collectives -- torchrun --nproc-per-node 2 "
            f"train.py; {given}"
        )
    return [program, *command[1:]]


def too_few_ranks(command: Sequence[str], world_size: int) -> UsageError:
    """Return the error about a command that has started fewer than two ranks.

    Args:
        command (`Sequence[str]`): the command.
        world_size (`int`): the number of ranks.
    """
    return UsageError(
        f"{shlex.join(command)} has started {'one rank' if world_size else 'no rank'}, and nothing to "
        "compare: give the number of processes, as in accelerate launch --multi_gpu --num_processes 2 or "
        "torchrun --nproc-per-node 2"
    )


def failure_of(listener: Listener, tail: str) -> str:
    """Return why a command has failed: the error of its lowest rank with one, or the end of its output.

    Args:
        listener (`Listener`): what its ranks have said.
        tail (`str`): the end of its output.
    """
    failed = sorted((rank.rank, rank.error) for rank in listener.ranks if rank.error)
    return f"rank {failed[0][0]}: {failed[0][1]}" if failed else tail


def _variables(steps: int, small: bool) -> dict[str, str]:
    return {STEPS: str(steps)} | ({SMALL: "1"} if small else {})


def run_watched(
    words: list[str], folder: Path, variables: Mapping[str, str], quiet_s: float
) -> tuple[int, Listener, str]:
    """Run a command whose ranks announce what they enter.

    Args:
        words (`list[str]`): the command.
        folder (`Path`): an empty folder; the training writes into its folder `output`.
        variables (`Mapping[str, str]`): environment variables of `hook`.
        quiet_s (`float`): seconds without any news after which ranks that wait are reported.

    Returns:
        `tuple[int, Listener, str]`: its exit code, what its ranks have said, and the end of its output.
    """
    log = folder / "output.log"
    address = folder / "ranks"
    ended, tell = socket.socketpair()
    with socket.socket(socket.AF_UNIX) as server, log.open("wb") as output, ended, tell:
        server.bind(str(address))
        server.listen(1024)
        process = subprocess.Popen(  # noqa: S603 (the user's own command)
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(folder, address, variables),
            start_new_session=True,
        )

        def wait() -> None:
            process.wait()
            tell.send(b"x")

        waits = threading.Thread(target=wait, daemon=True)
        waits.start()
        listener = Listener(server, ended, quiet_s)
        with _ended_at_the_end(process, listener):
            listener.run()
            if listener.difference is None:
                process.wait()
        waits.join()
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    return process.returncode, listener, tail


def _environment(folder: Path, address: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the command: no GPU, no trackers, and our module in front of the search path."""
    injected = folder / "injected"
    injected.mkdir()
    (injected / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(folder=str(injected)))
    path = os.pathsep.join(filter(None, (str(injected), os.environ.get("PYTHONPATH"))))
    changes = {
        "PYTHONPATH": path,
        ADDRESS: str(address),
        FOLDER: str(folder / "output"),
        "CUDA_VISIBLE_DEVICES": "",
        "WANDB_MODE": "disabled",
    }
    defaults = {"OMP_NUM_THREADS": "1"}
    return defaults | os.environ | changes | dict(variables)


@contextmanager
def _ended_at_the_end(process: subprocess.Popen[bytes], listener: Listener) -> Iterator[None]:
    """End all processes of the command when the block is left."""
    try:
        yield
    finally:
        pids = [rank.pid for rank in listener.ranks if rank.pid]
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            for pid in pids:  # torchrun starts each in a session of its own
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
