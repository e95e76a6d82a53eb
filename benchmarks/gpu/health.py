"""Parts: what only CUDA shows of the callbacks: their cost, replayed steps, waits for the GPU, and traces."""

import statistics
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset, SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.gpu.part import CannotRunError, report, reported
from benchmarks.gpu.peers import wait_for_gpu
from benchmarks.gpu.settings import ON_GPU, TINY, work_folder
from hfscale import CommHealthCallback, ScalingCallback
from hfscale.why.callback import TraceCallback

SHORT_LENGTH = 64
LOGGING_STEPS = 50
TURN_STEPS = 10
PAIRS = 12
if TINY:
    TURN_STEPS, PAIRS = 2, 2
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class Tokens(Dataset):
    """Random tokens that depend on the index alone.

    Args:
        length (`int`): Tokens per row.
        short_rows (`int`): The first rows are shorter.
    """

    def __init__(self, length: int, short_rows: int = 0) -> None:
        self.length = length
        self.short_rows = short_rows

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = self.length
        if index < self.short_rows:
            length = min(SHORT_LENGTH, length)
        ids = torch.randint(3, 1000, (length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class InOrder(Trainer):
    """A Trainer that reads the rows in their order."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


@dataclass(frozen=True, kw_only=True)
class Load:
    """A small model, and how it is trained."""

    steps: int
    hidden: int = 512
    layers: int = 8
    length: int = 1024
    rows: int = 1
    short_rows: int = 0
    attention: str = "sdpa"
    accumulation: int = 1
    logging_steps: int = LOGGING_STEPS


def make_trainer(load: Load, *callbacks: TrainerCallback) -> Trainer:
    """Make a Trainer of a small Llama.

    Args:
        load (`Load`): The model and its training.
        callbacks (`TrainerCallback`): Callbacks.

    Raises:
        CannotRunError: The attention cannot train on a CPU.
    """
    if not ON_GPU and load.attention == "flex_attention":
        raise CannotRunError("needs a CUDA GPU: flex attention has no backward pass on CPUs")
    hidden, layers, length, steps = load.hidden, load.layers, load.length, load.steps
    if TINY:
        hidden, layers, length, steps = 64, 2, 64, min(steps, 6)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        vocab_size=8192,
        max_position_embeddings=8192,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(load.attention)
    arguments = TrainingArguments(
        str(work_folder() / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=load.rows,
        gradient_accumulation_steps=load.accumulation,
        logging_steps=load.logging_steps,
        bf16=ON_GPU,
        use_cpu=not ON_GPU,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_nan_inf_filter=False,  # it waits for the GPU in each step
    )
    data = Tokens(length, load.short_rows)
    return InOrder(model=model, args=arguments, train_dataset=data, callbacks=list(callbacks))


def callback_cost() -> None:
    """Measure steps of about 30 ms with and without ScalingCallback, in pairs in one process.

    Runs with and without the callback take turns, and within a pair every second one begins, so that a drift of the
    clocks adds to both.
    """
    steps = 8 * TURN_STEPS
    load = Load(steps=steps, rows=4, layers=16, hidden=1024, logging_steps=2 * TURN_STEPS)
    ratios = []
    step_ms = []
    for pair in range(PAIRS):
        seconds = {}
        for with_callback in (pair % 2 == 0, pair % 2 == 1):
            seconds[with_callback] = _turn_seconds(load, with_callback=with_callback)
        ratios.append(seconds[True] / seconds[False])
        step_ms.append(1e3 * seconds[False] / TURN_STEPS)
    lower, median, upper = statistics.quantiles(ratios, n=4)
    report(
        callback="ScalingCallback",
        pairs=PAIRS,
        step_ms=round(statistics.median(step_ms), 2),
        median_ratio=round(median, 4),
        quartiles=[round(lower, 4), round(upper, 4)],
        ratios=[round(ratio, 4) for ratio in ratios],
    )


class TurnTimes(TrainerCallback):
    """Measures turns of `TURN_STEPS` steps; one ends when the GPU has done its work."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % TURN_STEPS == 0:
            wait_for_gpu()
            self.begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % TURN_STEPS == 0:
            wait_for_gpu()
            self.seconds.append(time.perf_counter() - self.begun)


def _turn_seconds(load: Load, *, with_callback: bool) -> float:
    """Train, and return the median of the turns after the first two, which warm up."""
    times = TurnTimes()
    callbacks: list[TrainerCallback] = [times]
    if with_callback:
        callbacks.insert(0, ScalingCallback())
    make_trainer(load, *callbacks).train()
    return statistics.median(times.seconds[2:] or times.seconds)


@dataclass(frozen=True, kw_only=True)
class Replays:
    """One setting under which steps are replayed."""

    steps: int = 40
    backend: str = "default"
    attention: str = "sdpa"
    short_rows: int = 0
    deterministic: bool = False


REPLAYS = (
    Replays(steps=200),
    Replays(backend="cudnn"),
    Replays(backend="flash"),
    Replays(attention="flex_attention"),
    Replays(short_rows=3),
    Replays(deterministic=True),
)


def replays() -> None:
    """Count the false alarms of replayed steps by attention, and what a replay leaves out."""
    for case in REPLAYS:
        with reported(replays=vars(case)):
            _replay(case)


def _replay(case: Replays) -> None:
    health = CommHealthCallback(replay_every_steps=1)
    load = Load(steps=case.steps, attention=case.attention, short_rows=case.short_rows, logging_steps=1)
    run = make_trainer(load, ScalingCallback(comm_health=health))
    chosen: Any = nullcontext()
    if ON_GPU and case.backend in BACKENDS:
        chosen = sdpa_kernel(BACKENDS[case.backend])
    torch.use_deterministic_algorithms(case.deterministic, warn_only=True)
    begun = time.perf_counter()
    try:
        with chosen:
            run.train()
    finally:
        torch.use_deterministic_algorithms(False)
    logged = {key: value for row in run.state.log_history for key, value in row.items() if "replay" in key}
    report(
        replays=vars(case),
        steps=run.state.global_step,
        seconds=round(time.perf_counter() - begun, 1),
        logged=logged,
    )


class Waits(TrainerCallback):
    """Counts, in steps without a log, the lines of code that wait for the GPU."""

    def __init__(self) -> None:
        self.sites: Counter[str] = Counter()
        self.steps = 0
        self.active = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = (state.global_step + 1) % LOGGING_STEPS == 0
        self.active = ON_GPU and state.global_step > 4 and not logs
        if self.active:
            self.recording = warnings.catch_warnings(record=True)
            self.caught = self.recording.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.active:
            return
        torch.cuda.set_sync_debug_mode("default")
        self.recording.__exit__(None, None, None)
        self.steps += 1
        for warning in self.caught or ():
            if "synchroniz" in str(warning.message):
                file = warning.filename.split("site-packages/")[-1]
                self.sites[f"{file}:{warning.lineno}"] += 1


def waits() -> None:
    """Find what waits for the GPU between two logs."""
    for accumulation in (1, 4):
        found = Waits()
        make_trainer(Load(steps=40, accumulation=accumulation), ScalingCallback(), found).train()
        if not ON_GPU:
            raise CannotRunError("needs a CUDA GPU: the steps ran, and nothing waits on a CPU")
        per_step = {site: round(count / found.steps, 2) for site, count in found.sites.most_common(8)}
        report(waits="ScalingCallback", micro_batches=accumulation, steps=found.steps, per_step=per_step)


def trace() -> None:
    """Trace a step with both kinds of attention that recipes choose."""
    for attention in ("sdpa", "flex_attention"):
        with reported(trace=attention):
            load = Load(steps=3, attention=attention)
            make_trainer(load, ScalingCallback(), TraceCallback([2])).train()
            report(trace=attention, ok=True)
