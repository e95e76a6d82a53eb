"""How much longer a step of many ranks takes because single ranks pause, before and after what hfscale advises.

A small Llama trains on as many processes as this machine has cores, with as many layers as an 8B model, since
garbage is made per module and not per weight. In each step a process measures how long its main thread

- collects Python's garbage, in CPU time, so that other programs do not count;
- could run and had no core (`/proc/thread-self/schedstat` of Linux).

| variant | garbage | threads of each process |
|---|---|---|
| `before` | Python collects by itself | one per core, torch's default without torchrun |
| `collection` | all ranks collect in the same steps (`gc_every_steps`) | one per core |
| `after` | in the same steps | one |

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
from collections.abc import Mapping
from contextlib import redirect_stdout
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

RANKS = (8, 64, 512)
DRAWN_STEPS = 20_000
VARIANTS = ("before", "collection", "after")
ROUNDS = 2
"""Each variant is measured so often, in turn, so that other work on the machine affects all."""
STEPS = 250
UNTIMED_STEPS = 50  # the start makes and drops objects that no later step does
EVERY_STEPS = 50
LAYERS = 32
_VOCABULARY, _LENGTH = 64, 16
_SCHEDULED = Path("/proc/thread-self/schedstat")
_COLUMNS = ("worked_s", "collected_s", "waited_s", "collects")

Pauses = npt.NDArray[np.float64]


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of the same tokens."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(_LENGTH) % _VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


class Stopwatch(TrainerCallback):
    """Measures the pauses of each step.

    Args:
        together_every (`int`, *optional*): the ranks collect together in so many steps.
    """

    def __init__(self, together_every: int | None) -> None:
        self.steps: list[tuple[float, float, float, float]] = []
        self._together_every = together_every
        self._collected_s = 0.0
        self._since = 0.0
        self._last = self._counts()

    def _counts(self) -> tuple[float, float, float]:
        """Return the CPU time, that of collections, and the time without a core, of this thread so far."""
        waited_s = int(_SCHEDULED.read_text().split()[1]) / 1e9
        return time.thread_time(), self._collected_s, waited_s

    def _on_collection(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._since = time.thread_time()
        else:
            self._collected_s += time.thread_time() - self._since

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start to measure."""
        gc.callbacks.append(self._on_collection)
        self._last = self._counts()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note what the step has taken."""
        now = self._counts()
        used_s, collected_s, waited_s = (new - old for new, old in zip(now, self._last, strict=True))
        every = self._together_every
        collects = every is not None and state.global_step % every == 0
        if state.global_step > UNTIMED_STEPS:
            self.steps.append((used_s - collected_s, collected_s, waited_s, float(collects)))
        self._last = now

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop measuring."""
        gc.callbacks.remove(self._on_collection)


def train(variant: str, results: Connection) -> None:
    """Train in one process, and send what each step has taken to `results`.

    Args:
        variant (`str`): one of `VARIANTS`.
        results (`Connection`): takes the rows of `Stopwatch.steps`.
    """
    torch.set_num_threads(1 if variant == "after" else _cores())
    every = None if variant == "before" else EVERY_STEPS
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
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
    results.send(watch.steps)


def measured(variant: str) -> Pauses:
    """Train on each core at the same time, and return what each step of each process has taken.

    Args:
        variant (`str`): one of `VARIANTS`.

    Returns:
        `ndarray` of shape (steps of all processes, 4): see `_COLUMNS`.
    """
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe(duplex=False) for _ in range(_cores())]
    processes = [spawn.Process(target=train, args=(variant, end)) for _, end in pipes]
    for process in processes:
        process.start()
    steps = [row for receiver, _ in pipes for row in receiver.recv()]
    for process in processes:
        process.join()
    return np.array(steps)


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


def simulate(steps: Pauses, ranks: int, base_s: float) -> dict[str, Any]:
    """Return how long the steps of many ranks take, in milliseconds.

    Args:
        steps (`ndarray` of shape (measured steps, 4)): what `measured` has returned.
        ranks (`int`): number of ranks.
        base_s (`float`): seconds of a step without pauses.
    """
    _, collected, waited, collects = steps.T
    together = collects > 0
    maxima = {
        "collection": drawn_maxima(collected, together, ranks, DRAWN_STEPS),
        "waiting": drawn_maxima(waited, together, ranks, DRAWN_STEPS),
        "both": drawn_maxima(collected + waited, together, ranks, DRAWN_STEPS),
    }
    found = {f"longest_{name}_ms": round(float(values.mean()) * 1e3, 3) for name, values in maxima.items()}
    step_s = base_s + maxima["both"]
    found["step_ms"] = round(float(step_s.mean()) * 1e3, 2)
    found["step_p99_ms"] = round(float(np.quantile(step_s, 0.99)) * 1e3, 2)
    return found


def measure() -> dict[str, Any]:
    """Measure the variants in turn, and simulate the ranks."""
    load = os.getloadavg()[0]
    parts: dict[str, list[Pauses]] = {variant: [] for variant in VARIANTS}
    for _ in range(ROUNDS):
        for variant in VARIANTS:
            parts[variant].append(measured(variant))
    steps = {variant: np.concatenate(rounds) for variant, rounds in parts.items()}
    base_s = statistics.median(steps["after"][:, 0])
    simulated = {
        str(ranks): {variant: simulate(steps[variant], ranks, base_s) for variant in VARIANTS} for ranks in RANKS
    }
    return {
        "summary": simulated,
        "step_without_pauses_ms": round(base_s * 1e3, 2),
        "gc_every_steps": EVERY_STEPS,
        "processes": _cores(),
        "load_before": round(load, 1),
        "measured_ms": {variant: _distributions(steps[variant]) for variant in VARIANTS},
    }


def _distributions(steps: Pauses) -> dict[str, Any]:
    """Return what a process has measured, in milliseconds."""
    found: dict[str, Any] = {"steps": len(steps)}
    for name in ("collected_s", "waited_s"):
        values = steps[:, _COLUMNS.index(name)] * 1e3
        found[name.removesuffix("_s")] = {
            "mean": round(float(values.mean()), 4),
            "p50": round(float(np.quantile(values, 0.5)), 4),
            "p99": round(float(np.quantile(values, 0.99)), 4),
            "longest": round(float(values.max()), 4),
        }
    return found
