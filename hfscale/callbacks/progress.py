"""A progress bar whose log lines fit the terminal."""

from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

_SHOWN = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval_loss {:.4f}",
    "grad_norm": "grad_norm {:.2f}",
    "learning_rate": "lr {:.2e}",
    "scaling/tokens_per_s_per_gpu": "tokens/s/GPU {:,.0f}",
    "scaling/mfu": "MFU {:.1%}",
    "scaling/data_wait_fraction": "data wait {:.1%}",
}


class CompactProgressCallback(ProgressCallback):
    """Trainer's progress bar, with one short line per log instead of every key. Logs no metric keys."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        line = _line(state, logs)
        if line and self.training_bar is not None:
            self.training_bar.write(line)
        elif line:  # an evaluation after the training
            print(line, flush=True)


class CompactPrinterCallback(PrinterCallback):
    """The same lines without a bar, for `--disable_tqdm`. Logs no metric keys."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if line := _line(state, logs):
            print(line, flush=True)


def use_compact_progress(trainer: Trainer) -> None:
    """Put the compact bar, or printer, in the place of the Trainer's own."""
    own, compact = (
        (PrinterCallback, CompactPrinterCallback)
        if trainer.args.disable_tqdm
        else (ProgressCallback, CompactProgressCallback)
    )
    trainer.remove_callback(own)
    trainer.add_callback(compact())


def _line(state: TrainerState, logs: dict[str, Any] | None) -> str:
    """The line of one log; empty on other ranks than the first, and for a record that has nothing to show."""
    shown = [form.format(float(logs[key])) for key, form in _SHOWN.items() if logs and key in logs]
    if not (state.is_world_process_zero and shown):
        return ""
    return f"step {state.global_step}/{state.max_steps}  " + "  ".join(shown)
