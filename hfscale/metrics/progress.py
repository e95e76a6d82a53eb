"""Progress callbacks whose log lines fit a terminal."""

from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

_SHOWN_KEYS = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval_loss {:.4f}",
    "grad_norm": "grad_norm {:.2f}",
    "learning_rate": "lr {:.2e}",
    "scaling/tokens_per_s_per_gpu": "tokens/s/GPU {:,.0f}",
    "scaling/samples_per_s": "samples/s {:,.1f}",
    "scaling/mfu": "MFU {:.1%}",
    "scaling/data_wait_fraction": "data wait {:.1%}",
}


class CompactProgressCallback(ProgressCallback):
    """Shows Trainer's progress bar, with one short line per log instead of every key. It logs no metric keys."""

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
        elif line:  # an evaluation after the training has no bar
            print(line, flush=True)


class CompactPrinterCallback(PrinterCallback):
    """Prints the same lines without a bar, for `--disable_tqdm`. It logs no metric keys."""

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
    """Replace the progress bar of a Trainer, or its printer under `--disable_tqdm`, by the compact one.

    Args:
        trainer (`Trainer`): its callbacks are changed. Call it before `train()`.
    """
    if trainer.args.disable_tqdm:
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(CompactPrinterCallback())
    else:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(CompactProgressCallback())


def _line(state: TrainerState, logs: dict[str, Any] | None) -> str:
    """Return the line of one log; it is empty on ranks other than 0, and if the log has none of the shown keys."""
    known = {key: logs[key] for key in _SHOWN_KEYS if logs and key in logs}
    if "scaling/tokens_per_s_per_gpu" in known:
        known.pop("scaling/samples_per_s", None)
    shown = [_SHOWN_KEYS[key].format(float(value)) for key, value in known.items()]
    if not (state.is_world_process_zero and shown):
        return ""
    return f"step {state.global_step}/{state.max_steps}  " + "  ".join(shown)
