"""How long training stalls for a checkpoint of about 300 MB, with the callback and with a plain Trainer.

Two Trainers take turns in one process, with the same model, data and saves; the order within a pair of turns
alternates. A stall is the time that Trainer's own "log, save, evaluate" takes in a step that saves. The first
save of each turn is excluded, because with the callback it also allocates the buffers that later saves reuse; its
stall is a separate entry of the result. The duration of steps during which a checkpoint is being written is compared
with that of the other steps of the turn. The total cost of a save is its stall plus the time by which those steps are
longer.

The plain Trainer neither flushes nor hashes its files; the callback does both in the background.
"""

import statistics
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from hfscale import SpotCheckpointCallback

PAIRS = 3
SAVES = 4
EVERY = 8
LENGTH = 16


class RandomTokens(Dataset):
    """Random rows that take no time to prepare."""

    def __init__(self) -> None:
        self.rows = torch.randint(3, 4096, (1000, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Stopwatch(TrainerCallback):
    """Requests the saves of one turn; records the seconds of each step, by whether a checkpoint was being written."""

    def __init__(self, spot: SpotCheckpointCallback | None) -> None:
        self.spot = spot
        self.saves = self.steps_since_save = 0
        self.quiet_s: list[float] = []
        self.writing_s: list[float] = []

    def _is_writing(self) -> bool:
        return self.spot is not None and self.spot._saving is not None and self.spot._saving.writer.in_flight

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started_at = time.perf_counter()
        self.was_writing = self._is_writing()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds = time.perf_counter() - self.started_at
        if state.global_step > 2:
            (self.writing_s if self.was_writing else self.quiet_s).append(seconds)
        self.steps_since_save += 1
        if self.steps_since_save >= EVERY and not self._is_writing():
            if self.saves == SAVES:
                control.should_training_stop = True
            else:
                control.should_save = True
                self.saves += 1
                self.steps_since_save = 0


def one_turn(with_callback: bool, output_dir: str) -> dict[str, Any]:
    """Train until `SAVES` saves are done, `EVERY` steps apart or more if the previous save is still being written."""
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=7,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=LENGTH,
        )
    )
    arguments = TrainingArguments(
        output_dir=output_dir,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=1,
        max_steps=900,
        logging_strategy="no",
        save_strategy="steps",
        save_steps=1000,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        optim="adamw_torch",
    )
    spot = SpotCheckpointCallback(every_minutes=None) if with_callback else None
    watch = Stopwatch(spot)
    callbacks = [watch] if spot is None else [spot, watch]
    trainer = Trainer(model=model, args=arguments, train_dataset=RandomTokens(), callbacks=callbacks)
    stalls_s = []
    original = trainer._maybe_log_save_evaluate

    def timed(*args: Any, **kwargs: Any) -> None:
        saves = trainer.control.should_save
        started_at = time.perf_counter()
        original(*args, **kwargs)
        if saves:
            stalls_s.append(time.perf_counter() - started_at)

    trainer._maybe_log_save_evaluate = timed
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        trainer.train()
    (checkpoint,) = Path(output_dir).glob("checkpoint-*")
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    return {"stalls_s": stalls_s, "quiet_s": watch.quiet_s, "writing_s": watch.writing_s, "bytes": size}


def measure() -> dict[str, Any]:
    """Run `PAIRS` pairs of turns and return all stalls and a summary of medians."""
    turns: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for pair in range(PAIRS):
        for with_callback in (True, False) if pair % 2 else (False, True):
            with tempfile.TemporaryDirectory() as folder:
                turns[with_callback].append(one_turn(with_callback, folder))
    warm = {kind: [stall for turn in turns[kind] for stall in turn["stalls_s"][1:]] for kind in turns}
    stall_s = {kind: statistics.median(warm[kind]) for kind in warm}
    slowdowns: list[float] = []
    lost_s: list[float] = []
    for turn in turns[True]:
        quiet_s = statistics.median(turn["quiet_s"])
        slowdowns.append(statistics.median(turn["writing_s"]) / quiet_s)
        lost_s.append(sum(seconds - quiet_s for seconds in turn["writing_s"]) / SAVES)
    summary = {
        "checkpoint_mb": round(turns[True][0]["bytes"] / 1e6),
        "stall_ms_stock": round(stall_s[False] * 1e3, 1),
        "stall_ms": round(stall_s[True] * 1e3, 1),
        "stall_over_stock": round(stall_s[True] / stall_s[False], 4),
        "first_stall_ms": round(statistics.median(turn["stalls_s"][0] for turn in turns[True]) * 1e3, 1),
        "step_ms": round(statistics.median(second for turn in turns[True] for second in turn["quiet_s"]) * 1e3, 1),
        "step_while_writing_over_step": round(statistics.median(slowdowns), 4),
        "steps_while_writing": round(statistics.mean(len(turn["writing_s"]) / SAVES for turn in turns[True]), 1),
        "lost_ms_per_save": round((stall_s[True] + statistics.median(lost_s)) * 1e3, 1),
    }
    stalls_ms = {
        name: [round(stall * 1e3, 1) for turn in turns[kind] for stall in turn["stalls_s"]]
        for name, kind in (("stock", False), ("with_callback", True))
    }
    return {"summary": summary, "stalls_ms": stalls_ms}
