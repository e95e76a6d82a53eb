"""Applies random faults to supervised trainings, and checks what each of them has cost and what is left afterwards.

A `Run` is one training under `hfscale run`, on one or two nodes of this machine. Faults come one after another: the
run has completed further steps before the next one. A supervisor that has ended as it should is started again with the
same command, as a scheduler does it, until the training is done.
"""

import json
import os
import random
import re
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from test_kill import RUN_FILES
from test_node_loss import Nodes

STEPS, SAVE_STEPS, GAP = 80, 5, 8
STANDSTILL_S = 120.0  # without a step: two processes on two busy cores, which start again after a failure
WAIT_S = 60.0  # for the processes of an ended supervisor to end
IN_MEMORY = 2  # steps: the last one, and the one whose snapshot was being written
ON_DISK = SAVE_STEPS + 1  # the one whose save was being written
ON_PARTNER = 4  # a copy on another node takes up to two steps where four ranks share two cores
KILLS = ("SIGKILL", "SIGTERM", "pause")
ENDED = {
    "SIGTERM": 75,
    "SIGKILL": -signal.SIGKILL,
    "stop and SIGKILL": -signal.SIGKILL,
    "full": 1,
    "full and SIGKILL": 1,
}
"""The exit code of a supervisor that is right after a fault, besides 0."""


@dataclass
class Fault:
    """One fault, and what is known of it afterwards."""

    target: str
    kind: str
    delay_s: float
    """Seconds after the step before it is complete."""
    seconds: float = 0.0
    """How long a pause or a full disk lasts."""
    node: int = 0
    rank: int = 0
    applied_at: float = 0.0
    over_at: float = 0.0
    """When the pause was over, or the disk had room again."""

    @property
    def name(self):
        return f"{self.kind}: {self.target}"


def one_node(chance: random.Random, number: int) -> list[Fault]:
    """Return random faults of a run on one node."""
    kinds = {
        "rank": [*KILLS, "SIGKILL", "SIGKILL", "SIGSTOP"],
        "launcher": [*KILLS, "SIGSTOP"],
        "supervisor": [*KILLS, "stop and SIGKILL"],
        "standard error": ["closed"],
    }
    if can_mount():
        kinds |= {"output directory": ["full"], "memory": ["full", "full and SIGKILL"], "log": ["full"]}
    return _faults(chance, number, kinds, nodes=1)


def two_nodes(chance: random.Random, number: int) -> list[Fault]:
    """Return random faults of a run on two nodes; node 0 has the coordinator."""
    kinds = {"coordinator": [*KILLS], "supervisor": [*KILLS], "rank": [*KILLS], "launcher": [*KILLS]}
    return _faults(chance, number, kinds, nodes=2)


def _faults(chance, number, kinds, nodes):
    faults = []
    pairs = [(target, kind) for target, of_target in kinds.items() for kind in of_target]
    for _ in range(number):
        target, kind = chance.choice(pairs)
        node = chance.randrange(nodes) if target in ("rank", "launcher") else int(nodes > 1 and target == "supervisor")
        delay_s, seconds = chance.uniform(0, 0.15), chance.uniform(0.1, 1.5)
        faults.append(Fault(target, kind, delay_s, seconds, node, chance.randrange(2)))
    return faults


def can_mount() -> bool:
    """Return whether this process may mount a file system in memory, which can be filled up."""
    return os.geteuid() == 0


class Run(Nodes):
    """One training with faults.

    Args:
        faults: applied in their order.
        nodes: of the run.
    """

    def __init__(self, address, folder, env, faults, nodes):
        self.faults, self.readers, self.mounts = faults, {}, []
        arguments = {"max_steps": STEPS, "save_steps": SAVE_STEPS, "save_total_limit": 2}
        more = {"world": 2, "trace": True, "env": env | {"TMPDIR": str(folder / "tmp")}}
        if any(fault.kind == "SIGSTOP" and fault.target == "rank" for fault in faults):
            more["hang_after_s"] = 3
        arguments, more = self.of_ranks(folder, arguments, more)
        super().__init__(address, folder, count=nodes, launches=len(faults) + 20, arguments=arguments, **more)
        for name in ("tmp", "out", "log"):
            (folder / name).mkdir()
        if any(fault.kind.startswith("full") for fault in faults):
            for name, size in (("out", "64m"), ("log", "64k"), ("memory-0", "64m")):
                (folder / name).mkdir(exist_ok=True)
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder / name)], check=True)
                self.mounts.append(folder / name)

    def of_ranks(self, folder, arguments, more):
        """The arguments of the Trainer, and what the spec of the ranks has besides."""
        return arguments, more

    def log(self, node):
        return self.folder / "log" / f"run-{node}.jsonl"

    def standard_error(self, node):
        """A pipe, whose reader a fault can end."""
        reading, writing = os.pipe()
        with (self.folder / f"stderr-{node}").open("a") as file:
            self.readers[node] = subprocess.Popen(["cat"], stdin=reading, stdout=file)
        os.close(reading)
        return os.fdopen(writing, "w")

    # --- what happens -----------------------------------------------------------------------------------------------

    def trace(self):
        """The lines of all ranks in the order of time: time, event, step, and the loss."""
        lines = []
        for path in self.folder.glob("trace-*"):
            lines += [json.loads(line) for line in path.read_text().splitlines()]
        return sorted(lines)

    def done(self):
        """Return how many steps are complete; a resumed run counts from its checkpoint."""
        steps = [line for line in self.trace() if line[1] in ("begin", "done")]
        return steps[-1][2] if steps else 0

    def run(self):
        """Apply all faults, one after another, and wait for the end of the training."""
        for node in range(self.count):
            self.start(node)
        for fault in self.faults:
            if not self.wait_for_steps(fault):
                break
            time.sleep(fault.delay_s)
            if not self.running:
                break
            fault.applied_at = time.time()
            self.apply(fault)
            fault.over_at = time.time()
        last = next((fault for fault in reversed(self.faults) if fault.applied_at), None)
        self.watch(lambda: not self.running, last)

    def wait_for_steps(self, fault):
        """Wait until the training has completed steps since it has begun again; return False if it is done."""
        before = [one for one in self.faults if one.applied_at]
        begun = before[-1].over_at if before else 0.0

        def has_stepped():
            after = [line for line in self.trace() if line[1] == "done" and line[0] > begun]
            return len({line[2] for line in after}) >= GAP or not self.running

        self.watch(has_stepped, before[-1] if before else None)
        return bool(self.running)

    def watch(self, condition, fault):
        """Wait for a condition, and start supervisors again that have ended as they should after a fault."""
        moved, known = time.monotonic(), -1
        while not condition():
            if (length := len(self.trace())) != known:
                moved, known = time.monotonic(), length
            assert time.monotonic() - moved < STANDSTILL_S, f"a standstill after {fault}: {self.report()}"
            for node, process in list(self.running.items()):
                code = process.poll()
                if code == 0:
                    self.running.pop(node)
                elif code is not None:
                    assert fault is not None, self.report()
                    assert code == ENDED.get(fault.kind), f"code {code} after {fault}: {self.report()}"
                    self.wait_for_the_end_of(node)
                    self.start(node)
            time.sleep(0.05)

    def wait_for_the_end_of(self, node):
        """A supervisor has ended: so do its launcher and its ranks; the launcher of a killed one passes SIGTERM on."""
        until = time.monotonic() + WAIT_S
        while left := [one for one in self.processes() if self.node_of(one) == node]:
            assert time.monotonic() < until, f"left by a supervisor that has ended: {left}: {self.report()}"
            for process in left:  # nobody else continues a launcher that an earlier fault has stopped
                with suppress(psutil.NoSuchProcess):
                    process.resume()
            time.sleep(0.05)
        self.readers.pop(node).wait(WAIT_S)

    # --- faults -----------------------------------------------------------------------------------------------------

    def apply(self, fault):
        kind, _, and_kill = fault.kind.partition(" and ")
        if kind == "full":
            self.fill(self.folder / {"output directory": "out", "memory": "memory-0", "log": "log"}[fault.target])
            if and_kill:
                self.send(Fault("rank", "", 0, rank=fault.rank), signal.SIGKILL)
            until = len(self.trace()) + 32  # lines: eight steps of two ranks
            self.watch(lambda: len(self.trace()) > until or self.has_ended() or not self.running, fault)
            for mount in self.mounts:
                (mount / "filler").unlink(missing_ok=True)
        elif kind == "closed":
            self.readers[fault.node].kill()
        elif kind in ("stop", "pause", "SIGSTOP"):
            if fault.name == "SIGSTOP: rank":  # during a save a rank may be silent for half an hour (docs/health.md)
                self.watch(lambda: self.done() % SAVE_STEPS in (1, 2) or not self.running, fault)
            found = self.send(fault, signal.SIGSTOP)
            if kind != "SIGSTOP":
                time.sleep(fault.seconds)
                if found is not None:
                    with suppress(psutil.NoSuchProcess):
                        found.send_signal(signal.SIGKILL if and_kill else signal.SIGCONT)
        else:
            self.send(fault, signal.Signals[kind])

    def has_ended(self):
        return any(process.poll() is not None for process in self.running.values())

    @staticmethod
    def fill(folder):
        """Leave no free block in a file system."""
        with (folder / "filler").open("wb", buffering=0) as file:
            for size in (65_536, 4096):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def send(self, fault, number):
        """Send a signal to the target, once there is one; return the process, or None if there is none any more."""
        with suppress(psutil.NoSuchProcess):
            found = self.target(fault)
            if found is not None:
                found.send_signal(number)
            return found
        return None

    def target(self, fault):
        node = self.running[fault.node if fault.node in self.running else next(iter(self.running))]
        if fault.target in ("supervisor", "coordinator"):
            return psutil.Process(node.pid)
        if fault.target == "launcher":
            return next((one for one in self.processes() if one.ppid() == node.pid), None)
        ranks = sorted((one for one in self.processes() if self.is_rank(one)), key=lambda one: one.pid)
        return ranks[min(fault.rank, len(ranks) - 1)] if ranks else None

    def processes(self):
        """All processes of the run, except the supervisors that run."""
        found, known = [], {process.pid for process in self.running.values() if process.poll() is None}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_own = self.is_rank(process) or str(self.folder / "spec.json") in process.cmdline()
                if is_own and process.pid not in known and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def is_rank(self, process):
        with suppress(psutil.Error):
            return process.cwd() == str(self.folder)
        return False

    def node_of(self, process):
        """Return the node of a launcher or of a rank."""
        if self.count == 1:
            return 0
        with suppress(psutil.Error):
            if not self.is_rank(process):
                return int(process.environ()["HFSCALE_RUN_NODE_RANK"])
            (log,) = [Path(one.path) for one in process.open_files() if Path(one.path).name.startswith("log-")][:1]
            return int(log.name.partition("-")[2]) // 2
        return None

    # --- what is left -----------------------------------------------------------------------------------------------

    def check(self, expected):
        """Assert that each loss is that of the run without faults, and that nothing is left; return the lost steps."""
        trace = self.trace()
        found = {step: loss for _, event, step, *loss in trace if event == "loss"}
        assert found.keys() == expected.keys(), (sorted(expected.keys() - found.keys()), self.report())
        for _, event, step, *loss in trace:
            assert event != "loss" or loss == expected[step], f"step {step}: {loss} instead of {expected[step]}"
        until = time.monotonic() + WAIT_S
        while left := self.processes():
            assert time.monotonic() < until, f"left: {left}"
            time.sleep(0.05)
        for memory in self.folder.glob("memory-*"):
            assert list(memory.iterdir()) == [], "host memory is left"
        assert list((self.folder / "tmp").iterdir()) == []
        names = {path.name for path in (self.folder / "out").iterdir()} - {"hfscale_ranks.jsonl", ".unfinished"}
        names -= {"hfscale_hang"} if any(fault.kind == "SIGSTOP" for fault in self.faults) else set()
        kept = {f"checkpoint-{STEPS - SAVE_STEPS}", f"checkpoint-{STEPS}"}
        assert names - kept <= RUN_FILES, names
        assert f"checkpoint-{STEPS}" in names
        return self.lost_steps(trace)

    def lost_steps(self, trace):
        """The steps that each fault has cost, by its name; a fault after which no launch has begun has cost none."""
        costs = []
        applied = [fault for fault in self.faults if fault.applied_at]
        for fault, after in zip(applied, [*applied[1:], None], strict=True):
            end = after.applied_at if after is not None else float("inf")
            begun = [(at, step) for at, event, step, *_ in trace if event == "begin" and fault.applied_at < at < end]
            done = [(at, step) for at, event, step, *_ in trace if event == "done"]
            lost = max((max((s for t, s in done if t < at), default=0) - step for at, step in begun), default=0)
            seconds = None
            if begun:
                first = next((t for t, _ in done if t > begun[0][0]), None)
                seconds = first and round(first - fault.applied_at, 2)
            costs.append({"fault": fault.name, "lost": lost, "launches": len(begun), "seconds": seconds})
            limit = IN_MEMORY
            at = max((step for t, step in done if t < fault.applied_at), default=0)
            has_no_memory = any(first <= at + 1 and at <= last + 1 for first, last in self.pauses())
            is_lost = fault.target in ("supervisor", "coordinator") or fault.kind.startswith("full")
            if is_lost or has_no_memory:
                limit = ON_DISK if self.count == 1 else ON_PARTNER
            assert lost <= limit, (costs, self.report())
        return costs

    def pauses(self):
        """First and last steps of the times without snapshots in host memory, which was full."""
        text = "".join(path.read_text() for path in self.folder.glob("log-*"))
        return [
            tuple(map(int, found))
            for found in re.findall(r"no snapshots in host memory from step (\d+) to (\d+)", text)
        ]

    def report(self):
        return json.dumps({"faults": [vars(fault) for fault in self.faults], "output": self.output()}, indent=1)

    def output(self):
        logs = [*super().output(), *((p.name, p.read_text()[-1500:]) for p in sorted(self.folder.glob("log-*")))]
        return [*logs, [line[1:] for line in self.trace()[-20:]]]

    def end(self):
        """End whatever is left, also after a failed assertion."""
        for process in [*self.running.values(), *self.processes(), *self.readers.values()]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for process in [*self.running.values(), *self.readers.values()]:
            process.wait()
        for mount in self.mounts:
            subprocess.run(["umount", "-l", str(mount)], check=False)
        self.mounts = []
