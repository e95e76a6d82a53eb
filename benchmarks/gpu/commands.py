"""Parts: the GPU tests, the commands that look at a machine, and imports that open a CUDA context."""

import os
import subprocess
import sys

from benchmarks.gpu.part import report
from benchmarks.gpu.settings import OFFLINE, ON_GPU, REPOSITORY, TIMES_SLOWER, work_folder

LIMIT_S = 200 * TIMES_SLOWER
TAIL = 600
IMPORTS = ("torchao", "bitsandbytes", "liger_kernel.transformers", "deepspeed", "peft", "trl", "transformers.trainer")
_ASK = """
import importlib, torch
importlib.import_module({name!r})
print("opened" if torch.cuda.is_initialized() else "not opened")
"""


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    environment = os.environ | OFFLINE
    return subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def gpu_tests() -> None:
    """Run `make test-gpu` with this interpreter."""
    done = _run("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-rsf", "tests")
    lines = done.stdout.splitlines()
    kept = [line[:200] for line in lines if line.startswith(("FAILED", "ERROR"))]
    report(command="make test-gpu", code=done.returncode, summary=lines[-1:], failed_tests=kept)


def look_at_machine() -> None:
    """Run the commands that look at the machine."""
    calibrated = work_folder() / "hardware.toml"
    commands = [["doctor", "--json"], ["check"]]
    if ON_GPU:
        commands.append(["plan", "--calibrate", str(calibrated)])
    for words in commands:
        done = _run("-m", "hfscale", *words)
        name = f"hfscale {words[0]}"
        report(command=name, code=done.returncode, out=done.stdout[-TAIL:], err=done.stderr[-TAIL:])


def imports() -> None:
    """Find the imports after which a forked process cannot use the GPU."""
    for name in IMPORTS:
        done = _run("-W", "ignore", "-c", _ASK.format(name=name))
        printed = done.stdout
        if done.returncode:
            printed = done.stderr
        report(imported=name, cuda_context=printed.strip().splitlines()[-1])
