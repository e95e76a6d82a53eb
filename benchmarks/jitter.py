"""How much longer a step of many ranks takes because single ranks pause, before and after what hfscale advises.

A small Llama trains, with as many layers as an 8B model, since garbage is made per module and not per weight. In each
step a process measures, on its main thread,

- the CPU time of Python's garbage collections, which other programs do not change;
- on an idle machine, where a process trains on each core, how long it could run and had no core
  (`/proc/thread-self/schedstat` of Linux). Where other programs run, that would be due to them.

| variant | garbage | threads of each process |
|---|---|---|
| `before` | Python collects by itself | one per core, torch's default without torchrun |
| `collection`, on an idle machine | all ranks collect in the same steps (`gc_every_steps`) | one per core |
| `after` | in the same steps | one |

Complete collections are too rare to be seen in some hundred steps. Python makes one where more than a quarter of the
objects that the last one has left were added to the oldest generation since, after more than ten collections of the
middle one (CPython 3.11, Modules/gcmodule.c, `gc_collect_generations`). How often that is follows from what is
measured: the objects that each collection of the middle generation leaves, and the objects in all. How long it takes
is measured in the last steps.

The ranks are simulated: in each step every rank pauses as long as one measured step of its kind, drawn at random and
independently of the other ranks. A step is of the kind in which the ranks collect together, or not. All ranks wait for
the one that pauses longest. `expected_maximum` has the closed form of what the draws show.

    python -m benchmarks jitter
"""

import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hfscale import CommHealthCallback, ScalingCallback
from hfscale.health.jitter import FULL_COLLECTION_EVERY

RANKS = (8, 64, 512)
DRAWN_STEPS = 20_000
VARIANTS = ("before", "collection", "after")
STEPS = 200
UNTIMED_STEPS = 40  # the start makes and drops objects that no later step does
COMPLETE_STEPS = 5
"""In so many of the last steps, everything is collected to measure how long that takes."""
EVERY_STEPS = 50
LAYERS = 32
IDLE_LOAD = 0.25
"""Load per core up to which a machine counts as idle."""
MIDDLE_COLLECTIONS = 10
OLD_SHARE = 0.25
"""Python's limits for a complete collection."""
_VOCABULARY, _LENGTH = 64, 16
_SCHEDULED = Path("/proc/thread-self/schedstat")

Pauses = npt.NDArray[np.float64]


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of the same tokens."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(_LENGTH) % _VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a process, or several, have measured."""

    worked_s: Pauses
    """CPU time of each step, without collections."""
    collected_s: Pauses
    """CPU time of the collections of each step, without complete ones."""
    waited_s: Pauses
    """Time in which the main thread could run and had no core, of each step."""
    collects: npt.NDArray[np.bool_]
    """Whether the ranks collect together in the step."""
    complete_s: Pauses
    """CPU time of a complete collection, several times."""
    complete_share: float
    """Share of the steps in which Python would make a complete collection by itself."""

    @classmethod
    def of_processes(cls, found: Sequence["Measured"]) -> "Measured":
        """Put the steps of processes together."""
        names = ("worked_s", "collected_s", "waited_s", "collects", "complete_s")
        columns = {name: np.concatenate([getattr(one, name) for one in found]) for name in names}
        return cls(**columns, complete_share=statistics.mean(one.complete_share for one in found))


class Stopwatch(TrainerCallback):
    """Measures the pauses of each step.

    Args:
        together_every (`int`, *optional*): the ranks collect together in so many steps.
    """

    def __init__(self, together_every: int | None) -> None:
        self._together_every = together_every
        self._rows: list[tuple[float, float, float]] = []
        self._together: list[bool] = []
        self._complete_s: list[float] = []
        self._left: list[int] = []
        self._collected_s = 0.0
        self._since = 0.0
        self._young = 0
        self._is_timed = False
        self._last = self._counts()

    def _counts(self) -> tuple[float, float, float]:
        """Return the CPU time, that of collections, and the time without a core, of this thread so far."""
        waited_s = int(_SCHEDULED.read_text().split()[1]) / 1e9
        return time.thread_time(), self._collected_s, waited_s

    def _on_collection(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "stop":
            self._collected_s += time.thread_time() - self._since
            if info["generation"] == 1 and self._is_timed:
                self._left.append(self._young - info["collected"])
            return
        if info["generation"] == 1:
            self._young = sum(len(gc.get_objects(generation=number)) for number in (0, 1))
        self._since = time.thread_time()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start to measure."""
        gc.callbacks.append(self._on_collection)
        self._last = self._counts()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note what the step has taken."""
        now = self._counts()
        used_s, collected_s, waited_s = (new - old for new, old in zip(now, self._last, strict=True))
        every = self._together_every
        step = state.global_step
        if UNTIMED_STEPS < step <= STEPS - COMPLETE_STEPS:
            self._rows.append((used_s - collected_s, collected_s, waited_s))
            self._together.append(every is not None and step % every == 0)
        self._is_timed = UNTIMED_STEPS <= step < STEPS - COMPLETE_STEPS
        if step > STEPS - COMPLETE_STEPS:
            begun = time.thread_time()
            gc.collect()
            self._complete_s.append(time.thread_time() - begun)
        self._last = self._counts()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop measuring."""
        gc.callbacks.remove(self._on_collection)

    def measured(self) -> Measured:
        """Return what was measured."""
        worked_s, collected_s, waited_s = np.array(self._rows).T
        return Measured(
            worked_s=worked_s,
            collected_s=collected_s,
            waited_s=waited_s,
            collects=np.array(self._together),
            complete_s=np.array(self._complete_s),
            complete_share=complete_share(self._left, len(self._rows), len(gc.get_objects())),
        )


def complete_share(left: Sequence[int], steps: int, objects: int) -> float:
    """Return the share of steps in which Python makes a complete collection by itself.

    Args:
        left (`Sequence[int]`): the objects that each collection of the middle generation has left.
        steps (`int`): the steps in which these collections were made.
        objects (`int`): the objects that a complete collection leaves.
    """
    if not left:
        return 0.0
    needed = max(MIDDLE_COLLECTIONS + 1, OLD_SHARE * objects / statistics.mean(left))
    return len(left) / steps / needed


def train(variant: str, threads: int, results: Connection) -> None:
    """Train in one process, and send what each step has taken to `results`.

    Args:
        variant (`str`): one of `VARIANTS`.
        threads (`int`): threads of torch.
        results (`Connection`): takes a `Measured`.
    """
    torch.set_num_threads(threads)
    every = None if variant == "before" else EVERY_STEPS
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    health = ScalingCallback(comm_health=CommHealthCallback(gc_every_steps=every))
    watch = Stopwatch(every)  # after it, so that the collection of a step is part of the step
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            logging_steps=10,
        )
        Trainer(LlamaForCausalLM(config), arguments, train_dataset=Rows(), callbacks=[health, watch]).train()
    results.send(watch.measured())


def measured(variant: str, processes: int) -> Measured:
    """Train in several processes at the same time, and return what they have measured.

    Args:
        variant (`str`): one of `VARIANTS`.
        processes (`int`): number of processes.
    """
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe(duplex=False) for _ in range(processes)]
    threads = processes if variant != "after" else 1
    started = [spawn.Process(target=train, args=(variant, threads, end)) for _, end in pipes]
    for process in started:
        process.start()
    found = [receiver.recv() for receiver, _ in pipes]
    for process in started:
        process.join()
    return Measured.of_processes(found)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def expected_maximum(pauses: Pauses, ranks: int) -> float:
    """Return the expected longest pause of ranks that each draw one of the measured pauses, in seconds.

    The longest of n draws is at most x with the probability F(x)^n, where F is the distribution of one draw.

    Args:
        pauses (`ndarray` of shape (steps,)): measured pauses, in seconds.
        ranks (`int`): number of ranks, n.
    """
    ordered = np.sort(pauses)
    at_most = np.arange(len(ordered) + 1) / len(ordered)
    return float(np.sum(ordered * np.diff(at_most**ranks)))


def drawn_maxima(pauses: Pauses, collects: npt.NDArray[np.bool_], ranks: int, steps: int, seed: int = 0) -> Pauses:
    """Draw the pauses of all ranks in each step, and return the longest of each step, in seconds.

    Args:
        pauses (`ndarray` of shape (measured steps,)): measured pauses, in seconds.
        collects (`ndarray` of shape (measured steps,)): whether the ranks collected together in the step. The share of
            such steps is that of the measured ones.
        ranks (`int`): number of ranks.
        steps (`int`): number of steps.
        seed (`int`): of the random numbers.

    Returns:
        `ndarray` of shape (steps,): the longest pause of each step.
    """
    generator = np.random.default_rng(seed)
    is_together = generator.random(steps) < collects.mean()
    longest = np.zeros(steps)
    for kind in (False, True):
        of_kind = pauses[collects == kind]
        where = is_together == kind
        for _ in range(ranks if len(of_kind) else 0):
            longest[where] = np.maximum(longest[where], generator.choice(of_kind, size=where.sum()))
    return longest


def simulate(found: Measured, variant: str, ranks: int, base_s: float, *, is_idle: bool) -> dict[str, float]:
    """Return how long the steps of many ranks take, in milliseconds.

    Args:
        found (`Measured`): what was measured.
        variant (`str`): one of `VARIANTS`.
        ranks (`int`): number of ranks.
        base_s (`float`): seconds of a step without pauses.
        is_idle (`bool`): whether the time without a core counts.
    """
    longest = drawn_maxima(found.collected_s, found.collects, ranks, DRAWN_STEPS)
    longest += _complete(found, variant, ranks)
    result = {"longest_collection_ms": _milliseconds(longest)}
    if is_idle:
        waited = drawn_maxima(found.waited_s, found.collects, ranks, DRAWN_STEPS, seed=2)
        result["longest_wait_ms"] = _milliseconds(waited)
        longest += waited
    result["step_ms"] = round((base_s + float(longest.mean())) * 1e3, 2)
    result["step_p99_ms"] = round((base_s + float(np.quantile(longest, 0.99))) * 1e3, 2)
    return result


def _complete(found: Measured, variant: str, ranks: int) -> Pauses:
    """Draw the longest complete collection of each step: of the ranks that make one, or of all in an agreed step."""
    generator = np.random.default_rng(1)
    if variant == "before":
        makers = generator.binomial(ranks, found.complete_share, DRAWN_STEPS)
    else:
        is_agreed = generator.random(DRAWN_STEPS) < 1 / EVERY_STEPS / FULL_COLLECTION_EVERY
        makers = np.where(is_agreed, ranks, 0)
    longest = [generator.choice(found.complete_s, size=number).max(initial=0.0) for number in makers]
    return np.array(longest)


def measure() -> dict[str, Any]:
    """Measure the variants, and simulate the ranks."""
    load = os.getloadavg()[0]
    is_idle = load <= IDLE_LOAD * _cores()
    variants = VARIANTS if is_idle else (VARIANTS[0], VARIANTS[-1])
    processes = _cores() if is_idle else 1
    found = {variant: measured(variant, processes) for variant in variants}
    base_s = float(np.median(found["after"].worked_s))
    simulated = {
        str(ranks): {name: simulate(one, name, ranks, base_s, is_idle=is_idle) for name, one in found.items()}
        for ranks in RANKS
    }
    result = {
        "summary": simulated,
        "step_without_pauses_ms": round(base_s * 1e3, 2),
        "gc_every_steps": EVERY_STEPS,
        "processes": processes,
        "measured": {variant: _distributions(one, is_idle=is_idle) for variant, one in found.items()},
    }
    if not is_idle:
        result["not_measured"] = f"the time without a core: other programs ran (load {load:.1f} on {_cores()} cores)"
    return result


def _distributions(found: Measured, *, is_idle: bool) -> dict[str, Any]:
    """Return what was measured, times in milliseconds."""
    columns = {"collection": found.collected_s, "complete_collection": found.complete_s}
    if is_idle:
        columns["waiting"] = found.waited_s
    result: dict[str, Any] = {"steps": len(found.worked_s)}
    for name, values in columns.items():
        result[f"{name}_ms"] = {
            "mean": _milliseconds(values),
            "p50": round(float(np.quantile(values, 0.5)) * 1e3, 3),
            "p99": round(float(np.quantile(values, 0.99)) * 1e3, 3),
            "longest": round(float(values.max()) * 1e3, 3),
        }
    if found.complete_share and not found.collects.any():
        result["steps_per_complete_collection"] = round(1 / found.complete_share)
    return result


def _milliseconds(values: Pauses) -> float:
    return round(float(values.mean()) * 1e3, 3)
