"""What makes the steps of one rank take longer now and then, which every other rank waits for.

Counted on each rank between two logs:

- the time in Python's automatic garbage collection, which each rank makes at another step;
- the time in which the thread that trains could run and had no CPU core (`/proc/self/schedstat`, Linux);
- how often that thread was taken off its core while it could run on (involuntary context switches, `getrusage`);
- how far the clock of its core is below the highest one (`cpufreq` of Linux, which virtual machines do not show);
- graphs that `torch.compile` has compiled;
- pages of memory that were read back from a disk, and those that the system had to provide (`getrusage`).

With `gc_every_steps` all ranks collect garbage in the same steps, and Python not by itself (`AgreedCollection`).
Processes that are forked meanwhile, such as data loader workers, make no steps: there Python collects by itself.
Steps of torchtitan (FSDP, 512 GPUs) were about 1.5% shorter so (read: https://github.com/pytorch/torchtitan/pull/148).
"""

import gc
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import TrainerState

from hfscale.core.findings import Finding
from hfscale.trainer.collector import Arrays

LOGS = 3
"""A share is reported when it was above its limit in so many logs in a row."""
REPORT_AFTER_S = 60.0
"""Seconds of training before something is reported: a run that ends sooner has nothing to gain from it."""
LOGGED_FROM = 0.1
"""A share is logged from this part of its limit on, so that a run without jitter has no more keys."""
FULL_COLLECTION_EVERY = 20
"""Of so many agreed collections one is of all generations; the others leave out old objects, mostly the model's."""
_SCHEDULED = Path("/proc/self/schedstat")
_THREAD = Path("/proc/thread-self/stat")
_CPU = Path("/sys/devices/system/cpu")
_CORE_FIELD = 36
"""Position of the number of the core in `stat` of a thread, counted after its name (proc(5): field 39)."""


_agreed: set["AgreedCollection"] = set()
"""Those in force in this process."""


def _collect_in_child() -> None:
    """Let Python collect in a process that was forked, if it does so where no collection is agreed."""
    if any(one.was_enabled for one in _agreed):
        gc.enable()
    _agreed.clear()


os.register_at_fork(after_in_child=_collect_in_child)


class AgreedCollection:
    """Collects Python's garbage in the same steps on all ranks, as long as a training lasts.

    Args:
        every_steps (`int`): optimizer steps from one collection to the next.
    """

    def __init__(self, every_steps: int) -> None:
        self._every_steps = every_steps
        self.was_enabled = gc.isenabled()
        """Whether Python has collected by itself before."""
        self._freezes = gc.get_freeze_count() == 0  # what others have frozen stays so

    def begin(self) -> None:
        """Collect what the start has left, and stop Python from collecting by itself."""
        gc.collect()
        if self._freezes:
            gc.freeze()  # modules and the model are not looked at again
        gc.disable()
        _agreed.add(self)

    def step_ended(self, step: int) -> None:
        """Collect, if it is the turn of this step.

        Args:
            step (`int`): the number of the step that has ended.
        """
        if step % self._every_steps:
            return
        is_full = step // self._every_steps % FULL_COLLECTION_EVERY == 0
        gc.collect(2 if is_full else 1)

    def saved(self) -> None:
        """Collect what a save has left: copies of the state may be in it (pytorch/torchtitan#839)."""
        gc.collect(1)

    def end(self) -> None:
        """Leave the collection to Python again."""
        if self._freezes:
            gc.unfreeze()
        if self.was_enabled:
            gc.enable()
        _agreed.discard(self)


class JitterWatch:
    """Counts on each rank, and judges on rank 0: a part of the exchange of the log (`LogPart`).

    Args:
        hosts (`Sequence[str]`): the host of each rank.
        report (`Callable`): called on every rank with the findings of a log and its step.
    """

    def __init__(
        self, hosts: Sequence[str], report: Callable[[Sequence[Finding], int], None]
    ) -> None:
        self._hosts = hosts
        self._report = report
        self._collected_s = 0.0
        self._collecting_since: float | None = None
        self._windows: deque[dict[str, npt.NDArray[np.float64]]] = deque(maxlen=LOGS)
        self._reported: set[str] = set()
        self._begun = time.monotonic()
        self._last = self._counts()

    def begin(self) -> None:
        """Start to count."""
        gc.callbacks.append(self._on_collection)

    def end(self) -> None:
        """Stop counting."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._collecting_since = time.perf_counter()
        elif self._collecting_since is not None:
            self._collected_s += time.perf_counter() - self._collecting_since
            self._collecting_since = None

    def _counts(self) -> dict[str, float]:
        """Return what this process has counted since it began, NaN where the system does not say."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "window_s": time.monotonic(),
            "gc_s": self._collected_s,
            "cpu_wait_s": _waited_for_cpu_s(),
            "compiled": float(_compiled_graphs()),
            "faults": float(used.ru_majflt),
            "new_pages": float(used.ru_minflt),
            "switches": float(_involuntary_switches()),
        }

    def numbers(
        self, state: TrainerState, logs: Mapping[str, float], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Return what this rank has counted since the last log (see `LogPart`).

        Args:
            state (`TrainerState`): the state of the Trainer.
            logs (`Mapping[str, float]`): the keys that Trainer logs.
            seconds (`Mapping[str, float]`): seconds of each phase since the previous log.
        """
        now = self._counts()
        last, self._last = self._last, now
        counted = {name: now[name] - last[name] for name in now}
        counted["compiled"] = max(counted["compiled"], 0.0)  # torch can set its counters back
        counted["slow_clock"] = _missing_clock()
        return counted

    def judge(self, columns: Arrays, state: TrainerState) -> dict[str, Any]:
        """Compare with the limits; called on rank 0 only.

        Args:
            columns (`Mapping[str, ndarray]`): the numbers of every rank, by name.
            state (`TrainerState`): the state of the Trainer.

        Returns:
            `dict[str, Any]`: `keys` and `findings`, as JSON can represent them.
        """
        window_s = np.maximum(columns["window_s"], 1e-9)
        now = {name: columns[name] / window_s for name in PER_SECOND}
        for name in ("compiled", "slow_clock"):
            now[name] = np.asarray(columns[name], dtype=np.float64)
        self._windows.append(now)
        # A rank whose system does not say it is not the worst one
        known = {name: np.nan_to_num(values) for name, values in now.items()}
        keys = {check.key: float(np.max(known[check.name])) for check in CHECKS if check.key}
        limits = {check.key: check.limit for check in CHECKS}
        found: list[Finding] = []
        if time.monotonic() - self._begun >= REPORT_AFTER_S:
            found = [finding for finding in map(self._finding, CHECKS) if finding is not None]
        if any(finding.check == CPU_WAIT for finding in found):
            # It has the same cause and the same fix
            found = [finding for finding in found if finding.check != CONTENTION]
        return {
            "keys": {
                key: value for key, value in keys.items() if value > LOGGED_FROM * limits[key]
            },
            "findings": [finding.to_dict() for finding in found],
        }

    def _finding(self, check: "_Check") -> Finding | None:
        """Return what a check has found in the last logs, once until it has ended."""
        if len(self._windows) < LOGS:
            return None
        least = np.min([window[check.name] for window in self._windows], axis=0)
        worst = int(np.argmax(np.nan_to_num(least)))
        if not least[worst] > check.limit:
            self._reported.discard(check.name)
            return None
        if check.name in self._reported:
            return None
        self._reported.add(check.name)
        return Finding(
            check=check.title,
            problem=check.problem.format(value=float(least[worst])),
            fix=check.fix,
            ranks=(worst,),
            host=self._hosts[worst],
            blames_host=False,
        )

    def keys(
        self, judgement: Mapping[str, Any], state: TrainerState, logs: Mapping[str, float]
    ) -> dict[str, float]:
        """Report the findings, and return the metric keys; called on every rank.

        Args:
            judgement (`Mapping[str, Any]`): what `judge` has returned on rank 0.
            state (`TrainerState`): the state of the Trainer.
            logs (`Mapping[str, float]`): the keys that Trainer logs.
        """
        found = [Finding.from_dict(fields) for fields in judgement["findings"]]
        if found:
            self._report(found, state.global_step)
        return dict(judgement["keys"])


_FEWER_THREADS = (
    "start fewer threads and data loader workers than the node has cores (OMP_NUM_THREADS), or ask for "
    "more"
)


@dataclass(frozen=True, kw_only=True)
class _Check:
    """A limit, and what is said of the rank that is above it the most."""

    name: str
    limit: float
    title: str
    problem: str
    fix: str
    key: str = ""
    """The metric key of the worst rank."""


PER_SECOND = ("gc_s", "cpu_wait_s", "faults", "new_pages", "switches")
"""What is judged per second of the time between two logs."""
CPU_WAIT, CONTENTION = "cpu wait", "thread contention"

CHECKS = (
    _Check(
        name="gc_s",
        limit=0.01,
        title="garbage collection",
        problem="Python's garbage collection takes {value:.1%} of its time, and each rank collects in other steps",
        fix="set gc_every_steps=50",
        key="health/gc_fraction",
    ),
    _Check(
        name="cpu_wait_s",
        limit=0.10,
        title=CPU_WAIT,
        problem="it waits for a CPU core {value:.0%} of the time",
        fix=_FEWER_THREADS,
        key="health/cpu_wait_fraction",
    ),
    _Check(
        name="switches",
        limit=200.0,  # per second: Linux takes a core away after 3 ms at the earliest (sched(7)), 333 times per second
        title=CONTENTION,
        problem="its main thread is taken off its core {value:.0f} times per second",
        fix=_FEWER_THREADS,
        key="health/context_switches_per_s",
    ),
    _Check(
        name="slow_clock",
        limit=0.4,
        title="cpu clock",
        problem="the clock of its core is {value:.0%} below the highest one",
        fix="set the governor of the CPU to performance (cpupower frequency-set -g performance), or check the cooling",
        key="health/cpu_clock_missing",
    ),
    _Check(
        name="compiled",
        limit=0.0,
        title="recompilation",
        problem="torch.compile compiles in every log, at least {value:.0f} graphs in the last ones",
        fix="pad or pack batches to equal lengths, or let a graph take all (accelerate launch --dynamo_use_dynamic)",
        key="health/compiled_graphs",
    ),
    _Check(
        name="faults",
        limit=10.0,  # per second: at some 100 µs each, 0.1% of the time
        title="page faults",
        problem="it reads {value:.0f} pages of its memory per second from a disk",
        fix="the node is short of memory: use fewer data loader workers, or a node with more",
    ),
    _Check(
        name="new_pages",
        limit=40_000.0,  # per second: at some 0.25 µs each, 1% of the time
        title="new memory pages",
        problem="it asks the system for {value:,.0f} new pages of memory per second",
        fix="let the allocator keep memory: set MALLOC_TOP_PAD_=134217728 and MALLOC_TRIM_THRESHOLD_=134217728",
        key="health/new_pages_per_s",
    ),
)


def _waited_for_cpu_s() -> float:
    """Return the seconds that this process's main thread was ready to run and had no core; NaN if it is not known."""
    try:
        return int(_SCHEDULED.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return float("nan")


def _involuntary_switches() -> int:
    """Return how often this thread was taken off its core while it could have run on."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _missing_clock() -> float:
    """Return the share by which the clock of this thread's core is below its highest one; NaN if it is not known."""
    try:
        core = int(_THREAD.read_text().rpartition(")")[2].split()[_CORE_FIELD])
        folder = _CPU / f"cpu{core}" / "cpufreq"
        now_khz = int((folder / "scaling_cur_freq").read_text())
        highest_khz = int((folder / "cpuinfo_max_freq").read_text())
        return 1 - now_khz / highest_khz
    except (OSError, ValueError, IndexError, ZeroDivisionError):
        return float("nan")


def _compiled_graphs() -> int:
    """Return how many graphs torch.compile has compiled in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"]["unique_graphs"]) if utils is not None else 0
