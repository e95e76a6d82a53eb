"""What the whole ScalingCallback, with all that can be switched on, adds to a Trainer step of about 30 ms.

Two Trainers, with and without the callback, take turns in one process: same model, same data, same seed, two
micro-batches per step (without which there is no noise scale), a log every ten steps. Each turn is timed from its 16th
to its last step; a pair is two turns next to each other, and the order within a pair alternates. The ratio of a pair
is noisy on a shared machine, so beside it stands what can be measured without noise from elsewhere: the time spent
inside hfscale's own code, per step.
"""

import statistics
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from hfscale import ScalingCallback, ScalingMetricsCallback
from hfscale.callbacks.log_keys import LogKeys
from hfscale.health.local_time import LocalTimer
from hfscale.metrics.noise_scale import LeafProbe
from hfscale.metrics.phases import PhaseClock
from hfscale.metrics.throughput import TokenCounter

PAIRS = 15
STEPS = 55
UNTIMED_STEPS = 15  # the first log among them, which looks up what does not change afterwards
LENGTH = 128


class RandomTokens(Dataset):
    """Rows that cost nothing to make."""

    def __init__(self) -> None:
        self.rows = torch.randint(3, 512, (4 * STEPS, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Stopwatch(TrainerCallback):
    """Seconds per step of one turn, and in `own` those of the same steps."""

    def __init__(self, own: "OwnTime | None") -> None:
        self.own = own

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == UNTIMED_STEPS:
            self.begun = time.perf_counter()
            if self.own is not None:
                self.own.restart()
        if state.global_step == STEPS:
            self.step_s = (time.perf_counter() - self.begun) / (STEPS - UNTIMED_STEPS)
            if self.own is not None:
                self.own.is_counting = False


class OwnTime:
    """Sums the time spent inside hfscale's entry points, while it is active."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Count from zero."""
        self.seconds, self.is_counting, self._is_inside = 0.0, True, False

    def wrap(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or not self.is_counting:
                return inner(*args, **kwargs)
            self._is_inside, begun = True, time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begun
                self._is_inside = False

        setattr(owner, name, timed)


def everything() -> ScalingCallback:
    """The callback with every measurement on."""
    metrics = ScalingMetricsCallback(peak_tflops=1.0, usd_per_gpu_hour=1.0, noise_scale=True)
    return ScalingCallback(metrics=metrics)


def one_turn(callback: TrainerCallback | None, output_dir: str, own: OwnTime | None = None) -> float:
    """Seconds per step of `STEPS` steps."""
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=128, intermediate_size=320, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=output_dir, use_cpu=not torch.cuda.is_available(), per_device_train_batch_size=1,
        gradient_accumulation_steps=2, max_steps=STEPS, logging_steps=10, save_strategy="epoch", report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    watch = Stopwatch(own)
    callbacks = [watch] if callback is None else [callback, watch]
    trainer = Trainer(model=model, args=arguments, train_dataset=RandomTokens(), callbacks=callbacks)
    with redirect_stdout(StringIO()):
        trainer.train()
    return watch.step_s


def measure() -> dict[str, Any]:
    """Alternate `PAIRS` pairs; the summary holds medians."""
    own, ratios, bare_s, own_s = OwnTime(), [], [], []
    for event in ("on_step_begin", "on_step_end", "on_substep_end", "on_log", "on_optimizer_step"):
        own.wrap(ScalingCallback, event)
    own.wrap(LogKeys, "on_log")
    own.wrap(TokenCounter, "_count")
    own.wrap(LeafProbe, "_see")
    own.wrap(PhaseClock, "end")  # which a batch's arrival calls
    for hook in ("_begin", "_end"):
        own.wrap(LocalTimer, hook)
    with tempfile.TemporaryDirectory() as root:
        one_turn(None, f"{root}/warm-up")  # the allocator and the caches of both
        for pair in range(PAIRS):
            turns = {}
            for with_callback in (True, False) if pair % 2 else (False, True):
                own.restart()
                callback = everything() if with_callback else None
                turns[with_callback] = one_turn(callback, f"{root}/{pair}-{with_callback}", own)
                if with_callback:
                    own_s.append(own.seconds / (STEPS - UNTIMED_STEPS))
            ratios.append(turns[True] / turns[False])
            bare_s.append(turns[False])
    step_s = statistics.median(bare_s)
    summary = {
        "step_ms": round(step_s * 1e3, 2),
        "ratio_with_over_without": round(statistics.median(ratios), 4),
        "own_code_us_per_step": round(statistics.median(own_s) * 1e6, 1),
        "own_code_share_of_step": round(statistics.median(own_s) / step_s, 5),
    }
    return {"summary": summary, "pairs": [round(ratio, 4) for ratio in ratios]}
