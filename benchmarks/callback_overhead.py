"""Measures what ScalingCallback with every measurement on adds to a small Trainer step.

Two Trainers, with and without the callback, run in two processes that take turns step by step, so that other work on
the machine affects both equally. Model, data and seed are the same, there are two micro-batches per step (the noise
scale needs two), and a log every ten steps. Ten steps, which include one log, make one ratio; the first steps are left
out. The time spent inside hfscale's own code per step is measured too, because other work affects it less.
"""

import gc
import statistics
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from hfscale import CommHealthCallback, ScalingCallback, ScalingMetricsCallback
from hfscale.core.clocks import PhaseClock
from hfscale.health.local_time import LocalTimer
from hfscale.metrics.meters.noise_scale import LeafProbe
from hfscale.metrics.tokens import TokenCounter
from hfscale.trainer.collector import LogCollector

LOGGED_EVERY = 10
UNTIMED_STEPS = 15  # they include the first log, which looks up what does not change afterwards
STEPS = UNTIMED_STEPS + 60 * LOGGED_EVERY
LENGTH = 128


class RandomTokens(Dataset):
    """A dataset of random rows that are made in advance."""

    def __init__(self) -> None:
        self.rows = torch.randint(3, 512, (4 * STEPS, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Stopwatch(TrainerCallback):
    """Measures the seconds of each step; between two steps the other process takes its step.

    Args:
        other (`Connection`): Connection to the other process.
        own (`OwnTime`, *optional*): Counts the time in hfscale's code; None in the process without the callback.
    """

    def __init__(self, other: Connection, own: "OwnTime | None") -> None:
        self.other = other
        self.own = own
        self.seconds: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > UNTIMED_STEPS:
            self.seconds.append(time.perf_counter() - self.begun)
        elif state.global_step == UNTIMED_STEPS:
            gc.freeze()  # otherwise a collection, which takes a tenth of a second, would count as part of some step
            if self.own is not None:
                self.own.restart()
        goes_first = self.own is not None
        if state.global_step > UNTIMED_STEPS:
            self.other.send(None)
        if UNTIMED_STEPS < state.global_step < STEPS or (state.global_step == UNTIMED_STEPS and not goes_first):
            self.other.recv()
        if state.global_step == STEPS and self.own is not None:
            self.own.is_counting = False
        self.begun = time.perf_counter()


class OwnTime:
    """Adds up the time spent inside hfscale's entry points."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start to count from zero."""
        self.seconds = 0.0
        self.is_counting = True
        self._is_inside = False

    def wrap_all(self) -> None:
        """Time everything that Trainer and the hooks of the model call during a step."""
        for event in (
            "on_step_begin",
            "on_step_end",
            "on_substep_end",
            "on_pre_optimizer_step",
            "on_log",
            "on_optimizer_step",
        ):
            self.wrap(ScalingCallback, event)
        self.wrap(LogCollector, "keys")
        for hook in ("_enter", "_leave"):
            self.wrap(TokenCounter, hook)
        self.wrap(LeafProbe, "_measure")
        self.wrap(PhaseClock, "end")  # called when a batch arrives
        for hook in ("_begin", "_end"):
            self.wrap(LocalTimer, hook)

    def wrap(self, owner: Any, name: str) -> None:
        """Time the calls of the function `name` of `owner`, but not calls inside other timed calls."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or not self.is_counting:
                return inner(*args, **kwargs)
            self._is_inside = True
            begun = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begun
                self._is_inside = False

        setattr(owner, name, timed)


def full_callback(comm_health: CommHealthCallback | None = None) -> ScalingCallback:
    """Return the callback with every measurement on."""
    metrics = ScalingMetricsCallback(peak_tflops=1.0, usd_per_gpu_hour=1.0, noise_scale=True)
    return ScalingCallback(comm_health=comm_health, metrics=metrics)


def small_trainer(output_dir: str, callbacks: list[TrainerCallback]) -> Trainer:
    """Return a Trainer of a small model; model and data are the same at every call."""
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=320,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )
    arguments = TrainingArguments(
        output_dir=output_dir,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        logging_steps=LOGGED_EVERY,
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return Trainer(model=model, args=arguments, train_dataset=RandomTokens(), callbacks=callbacks)


def train(with_callback: bool, other: Connection, results: Connection) -> None:
    """Train in one of the two processes, and send the measured times to `results`."""
    own = OwnTime() if with_callback else None
    if own is not None:
        own.wrap_all()
    watch = Stopwatch(other, own)
    with tempfile.TemporaryDirectory() as output_dir, redirect_stdout(StringIO()):
        small_trainer(output_dir, [full_callback(), watch] if with_callback else [watch]).train()
    results.send((watch.seconds, own.seconds if own is not None else 0.0))


def measure() -> dict[str, Any]:
    """Run both processes; the summary has medians."""
    spawn = get_context("spawn")
    ends = spawn.Pipe()
    results = {kind: spawn.Pipe(duplex=False) for kind in (True, False)}
    processes = [
        spawn.Process(target=train, args=(kind, end, results[kind][1]))
        for kind, end in zip(results, ends, strict=True)
    ]
    for process in processes:
        process.start()
    found = {kind: results[kind][0].recv() for kind in results}
    for process in processes:
        process.join()
    sums = {
        kind: [sum(seconds[start : start + LOGGED_EVERY]) for start in range(0, len(seconds), LOGGED_EVERY)]
        for kind, (seconds, _) in found.items()
    }
    ratios = [mine / bare for mine, bare in zip(sums[True], sums[False], strict=True)]
    step_s = statistics.median(sums[False]) / LOGGED_EVERY
    own_s = found[True][1] / (STEPS - UNTIMED_STEPS)
    quartiles = statistics.quantiles(ratios, n=4)
    summary = {
        "step_ms": round(step_s * 1e3, 2),
        "ratio_with_over_without": round(statistics.median(ratios), 4),
        "quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "own_code_us_per_step": round(own_s * 1e6, 1),
        "own_code_share_of_step": round(own_s / step_s, 5),
    }
    return {"summary": summary, "ratios_of_ten_steps": [round(ratio, 4) for ratio in ratios]}
