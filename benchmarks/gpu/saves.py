"""Parts: FP8's final model, how long a save stalls the training, `kill -9` in a save, and pinned memory."""

import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from benchmarks.gpu.part import CannotRunError, report
from benchmarks.gpu.recipe_runs import Launch, RecipeRun, run_recipe
from benchmarks.gpu.settings import ON_GPU, TIMES_SLOWER, TINY, work_folder

LIMIT_S = 200
SAVE_EVERY, STEPS = 8, 30
KILL_SAVE_EVERY, KILL_STEPS = 5, 16
if TINY:
    SAVE_EVERY, STEPS = 10, 40  # a write takes several of these steps, and is logged when it has ended
    KILL_SAVE_EVERY, KILL_STEPS = 2, 6
NOT_COMPILED = ("--torch_compile_regional", "false")
"""The runs whose losses are compared compile nothing, which takes longer than their steps."""


def fp8_save() -> None:
    """Train in FP8, save on the way, and read the final model."""
    from safetensors import safe_open

    done = run_recipe("llama-1b", ["--save_steps", str(SAVE_EVERY)], limit_s=LIMIT_S, launch=Launch(config="fp8"))
    files = sorted(done.folder.glob("*.safetensors"))
    if not files:
        raise RuntimeError(f"no final model in {done.folder}")
    tensors = 0
    for path in files:
        with safe_open(path, framework="pt") as weights:
            tensors += len(list(weights.keys()))
    report(shape="llama-1b", method="full, fp8", run="recipe, fp8.yaml", tensors=tensors, **done.summary())


def stall(strategy: str, asynchronous: str) -> None:
    """Measure the seconds that the training waits for each of its saves.

    Args:
        strategy (`str`): `ddp`, or another config of `accelerate_configs`, for one GPU.
        asynchronous (`str`): `true` or `false`: whether files are written in the background.
    """
    launch = None
    if strategy != "ddp":
        launch = Launch(config=strategy)
    flags = ["--save_steps", str(SAVE_EVERY), "--max_steps", str(STEPS), "--logging_steps", str(SAVE_EVERY // 2)]
    flags += ["--save_total_limit", "1", "--asynchronous_save", asynchronous]
    done = run_recipe("llama-1b", flags, limit_s=LIMIT_S, launch=launch)
    rows = [row for row in done.records if "checkpoint/stall_s" in row]
    if not rows:
        raise RuntimeError(f"no save was recorded in {done.folder}/scaling.jsonl")
    stalls = dict.fromkeys(round(row["checkpoint/stall_s"], 3) for row in rows)
    writes = dict.fromkeys(round(row["checkpoint/write_s"], 3) for row in rows if "checkpoint/write_s" in row)
    report(
        save=strategy,
        asynchronous=asynchronous,
        stalls_s=list(stalls),
        write_s=list(writes),
        gb=round(rows[-1]["checkpoint/bytes"] / 1e9, 3),
        waits=[line for line in done.lines if "waits" in line],
    )


def kill() -> None:
    """Kill a run in its second save, resume it, and compare its losses with those of a run that was not killed."""
    compare_killed(None, lambda folder: psutil.Process().children(recursive=True))


def compare_killed(launch: Launch | None, victims: Callable[[Path], list[psutil.Process]]) -> None:
    """Kill processes of a run in its second save, start it again, and compare it with a run that was not killed.

    Args:
        launch (`Launch`, *optional*): How the run is launched.
        victims (`Callable`): Takes the output directory and returns the processes to kill.

    Raises:
        RuntimeError: No process was killed, the run did not end by itself after that, or losses differ.
    """
    flags = ["--save_steps", str(KILL_SAVE_EVERY), "--max_steps", str(KILL_STEPS), "--logging_steps", "1"]
    flags += ["--save_total_limit", "2", *NOT_COMPILED]
    killed_at: list[float] = []

    def kill_in_second_save(folder: Path) -> bool:
        if not _second_save_began(folder):
            return False
        for process in victims(folder):
            process.send_signal(signal.SIGKILL)
        killed_at.append(time.monotonic())
        return True

    def run(folder: Path | None, cut: Callable[[Path], bool] | None = None) -> RecipeRun:
        return run_recipe("smollm2-135m", flags, limit_s=LIMIT_S, launch=launch, folder=folder, cut=cut)

    first = run(None, kill_in_second_save)
    if not killed_at:
        raise RuntimeError(f"the run ended before its second save was seen ({first.folder})")
    ended_after_s = time.monotonic() - killed_at[0]
    if first.seconds >= LIMIT_S * TIMES_SLOWER:
        raise RuntimeError(f"the run did not end after the kill ({first.folder})")
    left = sorted(path.name for path in first.folder.glob("checkpoint-*"))
    resumed = run(first.folder).losses()
    whole = run(Path(tempfile.mkdtemp(dir=work_folder(), prefix="whole-"))).losses()
    report(
        killed="in the second save",
        checkpoints_left=left,
        ended_after_s=round(ended_after_s, 1),
        last_step=max(resumed),
        largest_difference_of_losses=max(abs(resumed[step] - whole[step]) for step in whole if step in resumed),
    )


def _second_save_began(folder: Path) -> bool:
    second = f"checkpoint-{2 * KILL_SAVE_EVERY}"
    return (folder / ".unfinished" / second).exists() or (folder / second).is_dir()


def pinned() -> None:
    """Measure the first and the second copy of 12 GiB from the GPU to host memory, which is pinned for it."""
    from hfscale.checkpoint.host_copy import HostCopy

    if not ON_GPU:
        raise CannotRunError("needs a CUDA GPU")
    values = [torch.empty(2**28, device="cuda") for _ in range(12)]
    host = HostCopy()
    for turn in ("first", "second"):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        host.take(values)
        report(host_copy=turn, gib=12, seconds=round(time.perf_counter() - begun, 2))
