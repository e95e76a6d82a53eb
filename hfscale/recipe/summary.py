"""What a person wants to read when a run has ended."""

import shlex
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from hfscale.metrics.records import JSONL_NAME

if TYPE_CHECKING:
    from transformers import Trainer

    from hfscale.callbacks.scaling import ScalingCallback

_LAUNCHERS = ("accelerate", "torchrun", "accelerate-launch")


def print_summary(trainer: "Trainer", callback: "ScalingCallback", metrics: dict[str, float]) -> None:
    """Print the summary of a finished run, on the main process.

    Args:
        metrics (`dict[str, float]`): what `trainer.train()` and `trainer.evaluate()` returned.
    """
    if not trainer.is_world_process_zero():
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary_rows(trainer, callback, metrics):
        table.add_row(name, value)
    Console().print(Panel(table, title=f"{trainer.state.global_step} steps done", title_align="left", expand=False))


def summary_rows(trainer: "Trainer", callback: "ScalingCallback", metrics: dict[str, float]) -> list[tuple[str, str]]:
    """The lines of the summary, as pairs of a name and a text; what is not known has no line."""
    history, output_dir = trainer.state.log_history, Path(trainer.args.output_dir)
    rows: list[tuple[str, str]] = []
    losses = [entry["loss"] for entry in history if "loss" in entry]
    if losses:
        rows.append(("loss", f"{losses[0]:.4f} -> {losses[-1]:.4f}"))
    if "eval_loss" in metrics:
        rows.append(("evaluation loss", f"{metrics['eval_loss']:.4f}"))
    rates = [entry["scaling/tokens_per_s_per_gpu"] for entry in history if "scaling/tokens_per_s_per_gpu" in entry]
    if rates:
        processes = trainer.args.world_size
        rows.append(("throughput", f"{statistics.median(rates):,.0f} tokens/s per process, {processes} processes"))
    utilisation = [entry["scaling/mfu"] for entry in history if "scaling/mfu" in entry]
    if utilisation:
        rows.append(("MFU", f"{statistics.median(utilisation):.1%}"))
    scaling = callback.lr_scaling.scaling
    if scaling is not None:
        rows.append(("learning rate", f"x {scaling.factor:.4g}: {scaling.reason}"))
    committed = callback.spot_checkpoint.last_committed
    if committed is not None:
        rows.append(("checkpoint", f"{output_dir / committed} (committed, every file hashed)"))
    rows.append(("metrics", str(output_dir / JSONL_NAME)))
    rows.append(("model", str(output_dir)))
    longer = _with_flag(launch_command(), "--max_steps", str(2 * trainer.state.max_steps))
    rows.append(("continue with", shlex.join(longer)))
    return rows


def launch_command() -> list[str]:
    """What started this run, as it can be typed again: the launcher's words where one is the parent process."""
    parent = psutil.Process().parent()
    command = parent.cmdline() if parent is not None else []
    for index, token in enumerate(command[:3]):
        if Path(token).name in _LAUNCHERS:
            return [Path(token).name, *command[index + 1 :]]
    return ["python", *sys.argv]


def _with_flag(command: list[str], flag: str, value: str) -> list[str]:
    """`command` with `flag value` at its end, in the place of an earlier one."""
    if flag in command:
        at = command.index(flag)
        command = command[:at] + command[at + 2 :]
    return [*command, flag, value]
