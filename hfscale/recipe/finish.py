"""Training and the end of a run: what is set on the Trainer first, the exported model, the metrics, the summary."""

import shlex
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from hfscale.core.best_effort import best_effort
from hfscale.core.counts import counted
from hfscale.core.redaction import redact_argv
from hfscale.core.run_files import JSONL_NAME
from hfscale.core.spelling import spelled
from hfscale.errors import HfScaleError, MissingDependencyError, UsageError
from hfscale.metrics.progress import use_compact_progress
from hfscale.recipe.arguments import RecipeTrainingArguments, RecipeTrainingMixin
from hfscale.recipe.compilation import compile_layers
from hfscale.recipe.compression import compress_gradients, store_gradients_in_buckets
from hfscale.recipe.document_masks import documents_are_known
from hfscale.recipe.entrypoint import end_if_preempted
from hfscale.recipe.export import MERGED, save_final_model
from hfscale.recipe.gradient_precision import sum_gradients_in_fp32
from hfscale.recipe.kernels import Kernels, choose_loss
from hfscale.recipe.layout import finish_on_cpu
from hfscale.recipe.model_card import CARD_NAME, write_model_card
from hfscale.recipe.optimizer import use_muon
from hfscale.recipe.resume import is_finished
from hfscale.recipe.router_bias import balance_by_bias
from hfscale.recipe.router_loss import average_router_loss
from hfscale.recipe.sequence_parallel import fix_sequence_parallel
from hfscale.recipe.weight_casts import cast_weights_once
from hfscale.scaling import ScalingCallback
from hfscale.trainer.fsdp2_buffers import load_buffers_under_fsdp2
from hfscale.trainer.state import output_folder

if TYPE_CHECKING:
    from transformers import Trainer

_LAUNCHERS = ("accelerate", "torchrun", "accelerate-launch")


def train(trainer: "Trainer", checkpoint: str | None) -> dict[str, float] | None:
    """Call `trainer.train`, from the checkpoint to the last step, on every rank.

    Before, the progress bar is replaced by one that fits a terminal, the loss and whether layers are compiled are
    chosen, experts are balanced and Muon is used as the flags ask, DDP is set up as `--gradient_compression` asks,
    FSDP2 to load buffers and to sum gradients in fp32, and what the strategy needs on this machine is set on the
    Trainer.

    Args:
        trainer (`Trainer`): the trainer of the run, with the callbacks of `start_run`.
        checkpoint (`str`, *optional*): `RunStart.checkpoint`.

    Returns:
        `dict[str, float]`, *optional*: the metrics of the training, or None if an earlier launch has completed the run
        and nothing is left to do.

    Raises:
        UsageError: the trainer lacks the callbacks of `start_run`, the checkpoint is that of another task, model or
            dataset, or the run cannot compress its gradients or compute its loss as the flags ask.
        MissingDependencyError: a flag asks for a kernel that is not installed.
        Preempted: the training was stopped before its end; `run` turns it into exit code 75.
    """
    scaling = _scaling_callback(trainer)
    scaling.spot_checkpoint.check_identity(trainer, checkpoint)
    use_compact_progress(trainer)
    finish_on_cpu(trainer)
    sum_gradients_in_fp32(trainer)
    load_buffers_under_fsdp2(trainer)
    fix_sequence_parallel(trainer)
    use_muon(trainer)
    store_gradients_in_buckets(trainer)
    _compress_gradients(trainer)
    if is_finished(trainer, checkpoint):
        return None
    kernels = Kernels.here(trainer.args)
    compile_layers(trainer, kernels)
    choose_loss(trainer, kernels)
    cast_weights_once(trainer)
    average_router_loss(trainer)
    balance_by_bias(trainer)
    _make_image_batches(trainer)
    with _errors_name_packing(), documents_are_known(trainer):
        metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    end_if_preempted(scaling)
    return metrics


@contextmanager
def _errors_name_packing() -> Iterator[None]:
    """Name the flag where layers that carry a state along the sequence miss the kernel that keeps documents apart.

    transformers raises it in the first step, from the first of these layers (`integrations/hub_kernels.py`).
    """
    try:
        yield
    except ValueError as error:
        if "packed sequences apart" not in str(error):
            raise
        unpacked = spelled("packing", False)
        raise MissingDependencyError(f"{error} Or give {unpacked}") from None


def finish_run(
    trainer: "Trainer", metrics: dict[str, float], *, merge_adapters: bool = False
) -> None:
    """Write the model with its card, tokenizer and metrics into the output directory, print a summary, on every rank.

    Args:
        trainer (`Trainer`): the trainer of the completed run.
        metrics (`dict[str, float]`): the metrics of `train` and `trainer.evaluate`, merged, for `all_results.json`.
        merge_adapters (`bool`): whether to write the model with its adapters merged too, into the folder `merged`.

    Raises:
        UsageError: the adapters cannot be merged, since their base model has no name.
    """
    save_final_model(trainer, merge_adapters=merge_adapters)
    trainer.save_metrics("all", metrics, combined=False)
    if trainer.is_world_process_zero():
        folder = output_folder(trainer.args)
        for written in filter(
            Path.is_dir, (folder, folder / MERGED) if merge_adapters else (folder,)
        ):
            with best_effort(
                "writing the model card", written / CARD_NAME, (OSError, ValueError, HfScaleError)
            ):
                write_model_card(trainer, written)
    _print_summary(trainer, _scaling_callback(trainer), metrics)


def _make_image_batches(trainer: "Trainer") -> None:
    """Let batches have images where the recipe's records do."""
    args = trainer.args
    if isinstance(args, RecipeTrainingMixin) and args.reads_images:
        from hfscale.recipe.images import make_image_batches  # it needs Pillow

        make_image_batches(trainer)


def _compress_gradients(trainer: "Trainer") -> None:
    """Let DDP compress its gradients as the flags ask; TRL's recipes have no such flags."""
    args = trainer.args
    if isinstance(args, RecipeTrainingArguments):
        compress_gradients(
            trainer,
            args.gradient_compression,
            powersgd_rank=args.powersgd_rank,
            topk_fraction=args.topk_fraction,
            start_step=args.compression_start_step,
        )


def _scaling_callback(trainer: "Trainer") -> ScalingCallback:
    """Return the ScalingCallback of a trainer."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ScalingCallback):
            return callback
    raise UsageError(
        "the Trainer of this recipe has no ScalingCallback: give it the callbacks of start_run"
    )


def _print_summary(trainer: "Trainer", scaling: ScalingCallback, metrics: dict[str, float]) -> None:
    """Print the summary of a completed run, on the main process."""
    if not trainer.is_world_process_zero():
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _summary_rows(trainer, scaling, metrics):
        table.add_row(name, value)
    Console().print(
        Panel(
            table, title=f"{trainer.state.global_step} steps done", title_align="left", expand=False
        )
    )


def _summary_rows(
    trainer: "Trainer", scaling: ScalingCallback, metrics: dict[str, float]
) -> list[tuple[str, str]]:
    """Return the lines of the summary as pairs of a name and a text; an unknown value has no line."""
    history = trainer.state.log_history
    output_dir = output_folder(trainer.args)
    rows: list[tuple[str, str]] = []
    losses = [entry["loss"] for entry in history if "loss" in entry]
    if losses:
        rows.append(("loss", f"{losses[0]:.4f} -> {losses[-1]:.4f}"))
    # Of TRL's trainers that generate
    rewards = [entry["reward"] for entry in history if "reward" in entry]
    if rewards:
        rows.append(("reward", f"{rewards[0]:.4f} -> {rewards[-1]:.4f}"))
    if "eval_reward" in metrics:  # the loss of these trainers is about 0 whatever the model does
        rows.append(("evaluation reward", f"{metrics['eval_reward']:.4f}"))
    elif "eval_loss" in metrics:
        rows.append(("evaluation loss", f"{metrics['eval_loss']:.4f}"))
    rates = [
        entry["scaling/tokens_per_s_per_gpu"]
        for entry in history
        if "scaling/tokens_per_s_per_gpu" in entry
    ]
    if rates:
        processes = trainer.args.world_size
        rows.append(
            (
                "throughput",
                f"{statistics.median(rates):,.0f} tokens/s per process, {counted(processes, 'process')}",
            )
        )
    utilisation = [entry["scaling/mfu"] for entry in history if "scaling/mfu" in entry]
    if utilisation:
        rows.append(("MFU", f"{statistics.median(utilisation):.1%}"))
    rate = scaling.lr_scaling.scaling
    if rate is not None:
        rows.append(("learning rate", f"x {rate.factor:.4g}: {rate.reason}"))
    committed = scaling.spot_checkpoint.last_committed
    if committed is not None:
        rows.append(("checkpoint", f"{output_dir / committed} (committed, every file hashed)"))
    rows.append(("metrics", str(output_dir / JSONL_NAME)))
    rows.append(("model", str(output_dir)))
    longer = _with_flag(_launch_command(), "--max_steps", str(2 * trainer.state.max_steps))
    rows.append(("continue with", shlex.join(redact_argv(longer))))
    return rows


def _launch_command() -> list[str]:
    """Return the command that started this run, as a user can type it again, with a launcher that is the parent."""
    parent = psutil.Process().parent()
    command = parent.cmdline() if parent is not None else []
    for index, token in enumerate(command[:5]):  # python -m hfscale.recovery.standby FD torchrun
        if Path(token).name in _LAUNCHERS:
            return [Path(token).name, *command[index + 1 :]]
    return ["python", *sys.argv]


def _with_flag(command: list[str], flag: str, value: str) -> list[str]:
    """Return `command` with `flag value` at its end; an earlier value of the flag is removed."""
    if flag in command:
        index = command.index(flag)
        command = command[:index] + command[index + 2 :]
    return [*command, flag, value]
