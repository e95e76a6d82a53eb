"""How long the slowest of many ranks pauses in a step for Python's garbage collection, by itself and in agreed steps.

The pauses are measured in one process that trains a small model with a Trainer; the ranks are simulated. By itself
Python collects in another step of each rank, so that pauses of ranks are independent draws from the measured steps;
with `gc_every_steps` all ranks collect in the same ones.

    python -m benchmarks jitter
"""

import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hfscale import CommHealthCallback

RANKS = (8, 64, 512)
STEPS = 600
FIRST_STEPS = 100
"""Steps that are left out: the start makes and drops objects that no later step does."""
EVERY_STEPS = 50
DRAWS = 20_000
_VOCABULARY, _LENGTH = 64, 16


class _Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(_LENGTH) % _VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


class _Pauses(TrainerCallback):
    """Adds up the time of collections in each step."""

    def __init__(self) -> None:
        self.of_steps: list[float] = []
        self._paused_s = 0.0
        self._since = 0.0

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._since = time.perf_counter()
        else:
            self._paused_s += time.perf_counter() - self._since

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        gc.callbacks.append(self._on_collection)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.of_steps.append(self._paused_s)
        self._paused_s = 0.0

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        gc.callbacks.remove(self._on_collection)


def pauses_of(every_steps: int | None) -> npt.NDArray[np.float64]:
    """Return the seconds that each step of a training pauses for collections.

    Args:
        every_steps (`int`, *optional*): steps between agreed collections; None: Python collects by itself.
    """
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    pauses = _Pauses()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=str(Path(folder)),
            max_steps=STEPS,
            per_device_train_batch_size=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_steps=STEPS,
        )
        callbacks = [CommHealthCallback(gc_every_steps=every_steps), pauses]
        Trainer(LlamaForCausalLM(config), arguments, train_dataset=_Rows(), callbacks=callbacks).train()
    return np.array(pauses.of_steps[FIRST_STEPS:])


def expected_longest(pauses: npt.NDArray[np.float64], ranks: int) -> float:
    """Return the mean, over steps, of the longest pause of ranks that pause independently, in seconds.

    Args:
        pauses (`ndarray`): measured pauses of the steps of one rank, in seconds.
        ranks (`int`): number of ranks.
    """
    generator = np.random.default_rng(0)
    longest = np.zeros(DRAWS)
    for _ in range(ranks):
        longest = np.maximum(longest, generator.choice(pauses, size=DRAWS))
    return float(longest.mean())


def measure() -> dict[str, Any]:
    """Measure both ways, and simulate the ranks."""
    alone, agreed = pauses_of(None), pauses_of(EVERY_STEPS)
    collecting = agreed[agreed > 0]
    share_of_steps = len(collecting) / len(agreed)
    expected_ms = {}
    for ranks in RANKS:
        # In agreed steps all ranks pause together, each of them for another time
        of_agreed = expected_longest(collecting, ranks) * share_of_steps
        expected_ms[str(ranks)] = {
            "alone": round(expected_longest(alone, ranks) * 1e3, 3),
            "agreed": round(of_agreed * 1e3, 3),
        }
    return {
        "summary": expected_ms,
        "steps": len(alone),
        "mean_ms": {"alone": alone.mean() * 1e3, "agreed": agreed.mean() * 1e3},
        "longest_ms": {"alone": alone.max() * 1e3, "agreed": agreed.max() * 1e3},
    }
