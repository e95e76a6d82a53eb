"""How a recipe starts and ends: errors as one line, the output directory, exit codes, the exported model, the summary.

A recipe calls `run(main)`. Its `main` calls `check_output_dir` before it loads anything and, after training,
`end_if_preempted`, `save_final_model` and `print_summary`.
"""

import gc
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from hfscale.checkpoint.lock import lock_output_dir
from hfscale.checkpoint.preemption import PeerWatch, Preempted, end_workers, siblings, watch_signals
from hfscale.core import distributed
from hfscale.core.build_locks import remove_abandoned_locks
from hfscale.core.disk_errors import storage_error
from hfscale.core.flags import parameters_are_flags
from hfscale.core.logging import is_main_process
from hfscale.core.rank_link import connect
from hfscale.core.run_files import JSONL_NAME
from hfscale.errors import HfScaleError, MissingDependencyError, StorageError, UsageError
from hfscale.recipe.arguments import CALLBACK_FLAGS
from hfscale.recipe.export import save_final_model as save_final_model  # recipes import it from here

if TYPE_CHECKING:
    from transformers import Trainer

    from hfscale.scaling import ScalingCallback

_SAYS_WHAT_TO_INSTALL = re.compile(r"pip install|requires \S+ to be installed")
_MAIN_PROCESS_GRACE_S = 10.0
_LAUNCHERS = ("accelerate", "torchrun", "accelerate-launch")


def run(main: Callable[[], None]) -> None:
    """Run a recipe's `main` and exit the process with a meaningful code.

    An `HfScaleError` becomes one line on standard error and its exit code (2: wrong usage, 1: it cannot be done). So
    does a full or read-only output directory, and a missing package that transformers asks to install. Any other
    exception keeps its traceback. With several ranks the main process prints the line: the other ranks wait until the
    launcher ends them, and print a line of their own only if the main process did not fail.

    Preemption signals are handled from here on. A run that was preempted (`end_if_preempted`) ends with exit code 75
    on every rank, and the main process prints one line about it.

    Args:
        main (`Callable[[], None]`): the recipe.

    Raises:
        SystemExit: the recipe ended with an error of hfscale, or the run was preempted.
    """
    link = connect()  # to the supervisor, if there is one
    watch = watch_signals(whole_process=True)
    if others := siblings():
        PeerWatch(others).start()  # until training begins
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and os.environ.get("LOCAL_RANK", "0") == "0":
        remove_abandoned_locks(os.environ)  # on a CPU DeepSpeed loads an extension as soon as the process group exists
    preempted = None
    transformers.utils.logging.disable_progress_bar()  # one bar per saved file would interrupt the training's own bar
    try:
        with watch.restored_by_an_error(), parameters_are_flags(**CALLBACK_FLAGS):
            main()
    except Preempted as ended:
        preempted = ended
    except HfScaleError as error:
        _exit_with_line(error)
    except Exception as error:
        known = storage_error(error) or missing_dependency(error)
        if known is None:
            raise
        _exit_with_line(known)
    end_workers()
    if dist.is_available() and dist.is_initialized():
        distributed.last_barrier()
        gc.collect()  # without it a sharded model keeps process groups alive, and one exit in eight aborts
        dist.destroy_process_group()
    if preempted is None:
        watch.restore()
    else:
        if link is not None:
            link.ending(preempted.code)
        watch.ignore()  # the launcher signals the other ranks as soon as the first one has ended
        if is_main_process():
            print(f"hfscale: {preempted.words}", file=sys.stderr, flush=True)
        sys.exit(preempted.code)


def _exit_with_line(error: HfScaleError) -> None:
    link = connect()
    if link is not None:
        link.ending_by(error)
    sys.last_value = error  # as Python does for an uncaught error, so that exit handlers can read the reason
    message = " ".join(str(error).split())
    where = ""
    if not is_main_process():
        time.sleep(_MAIN_PROCESS_GRACE_S)  # if the main process failed too, the launcher ends this one meanwhile
        where = f" on rank {os.environ['RANK']}"
    print(f"hfscale: error{where}: {message}", file=sys.stderr, flush=True)
    sys.exit(error.exit_code)


def check_output_dir(output_dir: str) -> None:
    """Create the output directory, write a file in it and lock it against other runs, before anything is loaded.

    Args:
        output_dir (`str`): the run's `--output_dir`.

    Raises:
        UsageError: it is a file or lies in one, or another run is using it.
        StorageError: it cannot be created or written.
    """
    folder = Path(output_dir)
    probe = folder / f".hfscale-write-probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"\0" * 4096)
        finally:
            probe.unlink(missing_ok=True)  # processes on two machines can have the same id, and so the same probe
    except OSError as error:
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise UsageError(f"--output_dir {output_dir} is a file, or lies in one: name a folder") from None
        raise StorageError(
            f"--output_dir {output_dir} cannot be written: {error.strerror}: make it writable or name another"
        ) from None
    if is_main_process():
        lock_output_dir(output_dir)


def missing_dependency(error: BaseException) -> MissingDependencyError | None:
    """Return a MissingDependencyError if an error's message tells what to install, None for any other error.

    Args:
        error (`BaseException`): an error that a library raised.
    """
    message = str(error)
    says_so = (isinstance(error, ImportError) and error.name is None) or _SAYS_WHAT_TO_INSTALL.search(message)
    return MissingDependencyError(message) if says_so else None


def end_if_preempted(scaling: "ScalingCallback") -> None:
    """End a preempted run. Call it after `Trainer.train`: only a completed run is evaluated and exported.

    The callbacks of the recipes have `on_preemption="return"`, so that `run` ends all ranks in the same way.

    Args:
        scaling (`ScalingCallback`): the callback of the run.

    Raises:
        Preempted: the training was stopped before its end; `run` turns it into exit code 75.
    """
    reason = scaling.spot_checkpoint.preempted
    if reason is not None:
        raise Preempted(f"preempted by {reason}; relaunch the same command to resume (exit code 75)")


def print_summary(trainer: "Trainer", callback: "ScalingCallback", metrics: dict[str, float]) -> None:
    """Print the summary of a completed run, on the main process.

    Args:
        trainer (`Trainer`): the trainer of the run.
        callback (`ScalingCallback`): its callback.
        metrics (`dict[str, float]`): the metrics that `trainer.train()` and `trainer.evaluate()` returned, merged.
    """
    if not trainer.is_world_process_zero():
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _summary_rows(trainer, callback, metrics):
        table.add_row(name, value)
    Console().print(Panel(table, title=f"{trainer.state.global_step} steps done", title_align="left", expand=False))


def _summary_rows(trainer: "Trainer", callback: "ScalingCallback", metrics: dict[str, float]) -> list[tuple[str, str]]:
    """Return the lines of the summary as pairs of a name and a text; an unknown value has no line."""
    history = trainer.state.log_history
    output_dir = Path(trainer.args.output_dir)
    rows: list[tuple[str, str]] = []
    losses = [entry["loss"] for entry in history if "loss" in entry]
    if losses:
        rows.append(("loss", f"{losses[0]:.4f} -> {losses[-1]:.4f}"))
    rewards = [entry["reward"] for entry in history if "reward" in entry]  # of TRL's trainers that generate
    if rewards:
        rows.append(("reward", f"{rewards[0]:.4f} -> {rewards[-1]:.4f}"))
    if "eval_reward" in metrics:  # the loss of these trainers is about 0 whatever the model does
        rows.append(("evaluation reward", f"{metrics['eval_reward']:.4f}"))
    elif "eval_loss" in metrics:
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
    longer = _with_flag(_launch_command(), "--max_steps", str(2 * trainer.state.max_steps))
    rows.append(("continue with", shlex.join(longer)))
    return rows


def _launch_command() -> list[str]:
    """The command that started this run, as a user can type it again; it includes a launcher that is the parent."""
    parent = psutil.Process().parent()
    command = parent.cmdline() if parent is not None else []
    for index, token in enumerate(command[:5]):  # python -m hfscale.recovery.standby FD torchrun
        if Path(token).name in _LAUNCHERS:
            return [Path(token).name, *command[index + 1 :]]
    return ["python", *sys.argv]


def _with_flag(command: list[str], flag: str, value: str) -> list[str]:
    """`command` with `flag value` at its end; an earlier value of the flag is removed."""
    if flag in command:
        index = command.index(flag)
        command = command[:index] + command[index + 2 :]
    return [*command, flag, value]
