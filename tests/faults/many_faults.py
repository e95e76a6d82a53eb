"""Draws faults of one small supervised training, with the moment of each, and applies them.

A `ManyRun` is a training of some ranks under `hfscale run` that are forked from a warm process, with steps of
milliseconds, a snapshot at each step, and saves, uploads and evaluations every few steps. A fault is a signal, a disk
that is full or slow, a folder that is removed, a step of the date, or a network that is cut, or two of these at once,
in a step, a save, an evaluation, an upload or a start. A supervisor that has ended is started again, as a scheduler
does it; it must have said why.
"""

import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import psutil
from conftest import REPOSITORY
from random_faults import IN_MEMORY, RUN_FILES, SAVE_STEPS, WAIT_S, Fault, Run, can_mount
from test_recovery import SERVER
from workers.shifted_clock import shift

from hfscale.core.run_files import UNFINISHED

STEPS, EVAL_STEPS = 60, 7
MOMENTS = ("step", "save", "evaluation", "upload", "start")
MOMENT_S = 6.0  # until the moment must have come: after that the fault is applied whatever the run does
SHIFTS_S = (-86_400.0, -600.0, -5.0, 5.0, 600.0, 86_400.0)
SYS_PIDFD_GETFD = 438
SIGNALS = ("SIGKILL", "SIGTERM", "pause")
TARGETS = {
    "rank": [*SIGNALS, "SIGKILL", "SIGKILL"],
    "launcher": [*SIGNALS],
    "supervisor": [*SIGNALS],
    "output directory": ["slow", "removed", "removed", "full"],
    "memory": ["removed", "removed", "full"],
    "date": ["set", "set", "set"],
    "network": ["cut", "cut", "cut"],
    "rank that hangs": ["SIGSTOP"],
}
CODES = {0, 1, 75, -signal.SIGKILL, -signal.SIGTERM}  # the last one before it has imported its modules
SAID = ("not started again", "gives up", "preempted", "stopped by")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Moment:
    """One or two faults at one moment."""

    faults: list[Fault]
    moment: str
    applied_at: float = 0.0
    """In seconds of `time.monotonic`; 0: the training was over before."""

    @property
    def name(self):
        return " and ".join(sorted(fault.name for fault in self.faults))

    @property
    def kind(self):
        return "two at once" if len(self.faults) > 1 else self.faults[0].name


def draw(chance: random.Random, number: int, world: int) -> list[Moment]:
    """Return random faults, one in five of them two at once."""
    pairs = [(target, kind) for target, kinds in TARGETS.items() for kind in kinds]
    # A rank that is alone has nobody who finds that it hangs, and no connection
    pairs = [(target, kind) for target, kind in pairs if world > 1 or target not in ("network", "rank that hangs")]
    pairs = [(target, kind) for target, kind in pairs if kind != "full" or can_mount()]
    moments = []
    for _ in range(number):
        chosen = chance.sample(pairs, 2 if chance.random() < 0.2 else 1)
        faults = [
            Fault(
                "rank" if target == "rank that hangs" else target,
                kind,
                delay_s=chance.uniform(0, 0.08),
                seconds=chance.uniform(0.05, 0.5),
                rank=chance.randrange(world),
            )
            for target, kind in chosen
        ]
        moments.append(Moment(faults, chance.choice(MOMENTS)))
    return moments


class ManyRun(Run):
    """One training with the faults that `draw` returns."""

    def __init__(self, address, folder, env, moments, world):
        self.moments, self.world, self.shifted_s = moments, world, 0.0
        self.chance = random.Random(len(moments))
        super().__init__(address, folder, env, [fault for moment in moments for fault in moment.faults], 1)
        shift(folder / "clock", 0.0)

    def of_ranks(self, folder, arguments, more):
        evaluated = {"eval_strategy": "steps", "eval_steps": EVAL_STEPS, "gradient_accumulation_steps": 1}
        arguments = arguments | {"max_steps": STEPS} | evaluated
        more |= {"world": self.world, "pauses": {}, "clock": str(folder / "clock"), "slow": str(folder / "slow")}
        more["spot"] = {"remote": f"file://{folder}/remote"}
        return arguments, more

    def start(self, node):
        memory = self.folder / "memory-0"
        memory.mkdir(exist_ok=True)
        self.began_at = time.monotonic()
        clock = str(REPOSITORY / "tests" / "workers" / "shifted_clock.py")
        with self.standard_error(node) as stderr:
            self.running[node] = subprocess.Popen(
                [
                    *(sys.executable, clock, str(self.folder / "clock"), "run", "--memory-dir", str(memory)),
                    *("--memory-interval-steps", "1", "--max-restarts", "50", "--log", str(self.log(node)), "--"),
                    *(sys.executable, str(SERVER), "launch", str(self.server), str(self.folder / "spec.json")),
                ],
                env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
                stderr=stderr,
            )

    def run(self):
        """Apply all faults, one after another, and wait for the end of the training."""
        self.start(0)
        for moment in self.moments:
            if not self.wait_for_moment(moment):
                break
            moment.applied_at = time.monotonic()
            for fault in moment.faults:
                time.sleep(fault.delay_s)
                fault.applied_at = time.time()
                self.apply_one(fault)
            self.last = moment
        self.watch(lambda: not self.running, None)

    def wait_for_moment(self, moment):
        """Wait until the run is where the fault is due; return False if the training is over."""
        if moment.moment == "start":  # of a launch, which the end of a rank begins
            self.watch(lambda: self.done_since() > 1 or not self.running, None)
            self.send(Fault("rank", "", 0), signal.SIGKILL)
            time.sleep(self.chance.uniform(0, 1.2))
            self.watch(lambda: True, None)
            return bool(self.running)
        self.watch(lambda: self.done_since() > 1 or not self.running, None)
        until = time.monotonic() + MOMENT_S
        at = self.events(moment.moment)
        while self.running and self.events(moment.moment) == at and time.monotonic() < until:
            time.sleep(0.003)
            self.watch(lambda: True, None)
        return bool(self.running)

    def events(self, moment):
        """A number that changes when the moment has come."""
        if moment == "save":
            return sum(1 for _ in (self.folder / "out" / UNFINISHED).glob("*")) or 0
        if moment == "upload":
            with suppress(FileNotFoundError):  # removed while it is listed
                return sum(1 for _ in (self.folder / "remote").rglob("*"))
            return -1
        return sum(1 for line in self.trace() if line[1] == ("evaluating" if moment == "evaluation" else "done"))

    def done_since(self):
        """Steps that are complete since the last launch has begun."""
        events = [line[1] for line in self.trace() if line[1] in ("begin", "done")]
        return events[::-1].index("begin") if "begin" in events else 0

    def watch(self, condition, fault):
        """Wait for a condition, and start a supervisor again that has ended; it must have said why."""
        moved, known = time.monotonic(), -1
        while True:
            if (length := len(self.trace())) != known:
                moved, known = time.monotonic(), length
            assert time.monotonic() - moved < 150, f"a standstill: {self.report()}"
            process = self.running.get(0)
            code = None if process is None else process.poll()
            if code == 0:
                self.running.pop(0)
            elif code is not None:
                said = (self.folder / "stderr-0").read_text()
                assert code in CODES, f"code {code}: {self.report()}"
                assert code < 0 or any(text in said for text in SAID), f"no reason: {self.report()}"
                self.make_room()
                self.wait_for_the_end_of(0)
                self.start(0)
            if condition():
                return
            time.sleep(0.02)

    def apply_one(self, fault):
        out, memory = self.folder / "out", self.folder / "memory-0"
        if fault.kind == "removed":
            for folder in [out] if fault.target == "output directory" else list(memory.glob("hfscale-run-*")):
                self.remove(folder)
        elif fault.kind == "slow":
            (self.folder / "slow").touch()
            time.sleep(fault.seconds)
            (self.folder / "slow").unlink()
        elif fault.kind == "set":
            self.shifted_s += self.chance.choice(SHIFTS_S)
            shift(self.folder / "clock", self.shifted_s)
        elif fault.kind == "cut":
            self.cut(fault)
        elif fault.kind == "full":
            self.fill(out if fault.target == "output directory" else memory)
            time.sleep(fault.seconds)
            self.make_room()
        elif fault.kind == "SIGSTOP":
            self.watch(lambda: self.finds_hang() or not self.running, None)
            self.send(fault, signal.SIGSTOP)
        else:
            self.apply(fault)

    def finds_hang(self):
        # In the first three steps, a save and an evaluation a rank may be silent for half an hour (docs/health.md)
        step = self.done()
        return step % SAVE_STEPS in (1, 2) and step % EVAL_STEPS != 0 and self.done_since() > 3 * self.world

    def make_room(self):
        for name in ("out", "memory-0"):
            (self.folder / name / "filler").unlink(missing_ok=True)

    def remove(self, folder):
        """Remove what is in a folder, and the folder where it is not mounted, while others write into it."""
        for _ in range(50):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists() or not any(folder.iterdir()):
                return
            time.sleep(0.005)

    def cut(self, fault):
        """Shut down all connections of a rank on the loopback."""
        ranks = [one for one in self.processes() if self.is_rank(one)]
        if not ranks:
            return
        rank = min(ranks, key=lambda one: (abs(one.pid - fault.rank), one.pid))
        with suppress(psutil.Error, OSError):
            pidfd = os.pidfd_open(rank.pid)
            for connection in rank.net_connections("tcp"):
                copied = _libc.syscall(SYS_PIDFD_GETFD, pidfd, connection.fd, 0)
                if copied >= 0:
                    with suppress(OSError), socket.socket(fileno=copied) as shared:
                        shared.shutdown(socket.SHUT_RDWR)
            os.close(pidfd)

    def check(self, expected):
        """Assert that the losses are those of the run without faults, with nothing left; return the repeated steps."""
        trace = self.trace()
        found = {step: loss for _, event, step, *loss in trace if event == "loss"}
        assert found.keys() == expected.keys(), (sorted(expected.keys() - found.keys()), self.report())
        for _, event, step, *loss in trace:
            assert event != "loss" or loss == expected[step], f"step {step}: {loss} instead of {expected[step]}"
        until = time.monotonic() + WAIT_S
        while left := self.processes():
            assert time.monotonic() < until, f"left: {left}"
            time.sleep(0.05)
        assert list((self.folder / "memory-0").iterdir()) == [], "host memory is left"
        assert list((self.folder / "tmp").iterdir()) == []
        names = {path.name for path in (self.folder / "out").iterdir()}
        assert f"checkpoint-{STEPS}" in names, self.report()
        loose = {name for name in names if not name.startswith("checkpoint-") and "-until-" not in name}
        assert loose <= {*RUN_FILES, "hfscale_ranks.jsonl", UNFINISHED, "hfscale_hang"}, names
        steps = [step for _, event, step, *_ in trace if event == "done"]
        return len(steps) // self.world - STEPS


def within_limits(lost, launches):
    return lost <= (IN_MEMORY + SAVE_STEPS) * max(launches, 1)
