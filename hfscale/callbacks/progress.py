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
    """Trainer's progress bar, with one short line per log instead of every key. Logs no metric keys.

    A callback that stands after the Trainer's own would come too late: exchange them with `replace_in(trainer)`.
    """

    @classmethod
    def replace_in(cls, trainer: Trainer) -> None:
        """Put this bar in the place of the Trainer's own, or of its printer where bars are off."""
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(cls())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        shown = [form.format(float(logs[key])) for key, form in _SHOWN.items() if logs and key in logs]
        if not (state.is_world_process_zero and shown):
            return
        line = f"step {state.global_step}/{state.max_steps}  " + "  ".join(shown)
        if self.training_bar is not None and not args.disable_tqdm:
            self.training_bar.write(line)
        else:
            print(line, flush=True)
