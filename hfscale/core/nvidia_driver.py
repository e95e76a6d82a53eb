"""The GPUs that the NVIDIA driver of this machine lists, and why torch cannot use them.

Where driver and torch do not fit, torch reports no GPU, and transformers trains on the CPU without a message. The
driver's own files are read, so that NVML is not needed. torch is imported only where a function asks it.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hfscale.core.counts import counted
from hfscale.core.findings import Finding

_ROOT = Path("/")
_MODEL = re.compile(r"^Model:\s*(.+?)\s*$", re.MULTILINE)
_MINOR = re.compile(r"^Device Minor:\s*(\d+)", re.MULTILINE)
_VERSION = re.compile(r"\b\d{3}\.\d+(\.\d+)?\b")


def nvidia_driver(root: Path = _ROOT) -> tuple[str | None, tuple[str, ...]]:
    """Return the version of the NVIDIA driver and the names of the GPUs that it lists here.

    Args:
        root (`Path`, *optional*): the folder that holds `/dev` and `/proc`.

    Returns:
        The version and the names: of the GPUs that have a device file here, since a container has the files of its own
        GPUs only. Where there are none, as in WSL, those that `nvidia-smi` prints. None and no names without a GPU.
    """
    files = root / "proc" / "driver" / "nvidia"
    names = []
    for information in sorted(files.glob("gpus/*/information")):
        text = information.read_text(errors="replace")
        model = _MODEL.search(text)
        minor = _MINOR.search(text)
        if minor is not None and (root / "dev" / f"nvidia{minor[1]}").exists():
            names.append(model[1] if model is not None else "NVIDIA GPU")
    if not names:
        return _by_nvidia_smi()
    version = files / "version"
    found = _VERSION.search(version.read_text(errors="replace")) if version.is_file() else None
    return found[0] if found is not None else None, tuple(names)


def _by_nvidia_smi() -> tuple[str | None, tuple[str, ...]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, ()
    command = [program, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None, ()
    rows = [line.partition(", ") for line in done.stdout.splitlines() if ", " in line]
    return (
        (rows[0][0], tuple(name for _, _, name in rows))
        if done.returncode == 0 and rows
        else (None, ())
    )


def why_torch_sees_none(
    driver: str | None,
    gpus: tuple[str, ...],
    *,
    cuda: str | None,
    reason: str | None,
    visible: str | None,
) -> Finding:
    """Explain why torch sees none of the GPUs that the driver lists.

    Args:
        driver (`str`, *optional*): the version of the driver.
        gpus (`tuple[str, ...]`): the names of the GPUs, at least one.
        cuda (`str`, *optional*): the version of CUDA that torch is built for; None: it is built without CUDA.
        reason (`str`, *optional*): what torch says.
        visible (`str`, *optional*): the value of CUDA_VISIBLE_DEVICES.

    Returns:
        `Finding`: an error; a note if CUDA_VISIBLE_DEVICES hides all GPUs.
    """
    count = counted(len(gpus), "GPU")
    if visible is not None and visible.strip() in ("", "-1"):
        problem = f"CUDA_VISIBLE_DEVICES={visible} hides {count}"
        return Finding(level="note", check="gpu", problem=problem, fix="unset it to use them")
    if cuda is None:
        problem = f"torch is built without CUDA, and the driver lists {count}"
        return Finding(
            level="error",
            check="gpu",
            problem=problem,
            fix="install a CUDA build of torch (pytorch.org)",
        )
    of_driver = f" of driver {driver}" if driver is not None else ""
    named = f" with CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
    problem = f"torch (CUDA {cuda}) cannot use {count}{of_driver}{named}: {reason or 'no reason is given'}"
    fix = "update the driver, or install a torch for an older CUDA"
    return Finding(level="error", check="gpu", problem=problem, fix=fix)


def check_gpus_of_driver(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Find why this process cannot use the GPUs that the driver of this machine lists.

    Where torch sees none of them, it tries to initialize CUDA, which fails with the reason.

    Args:
        environ (`Mapping[str, str]`): the environment variables.

    Returns:
        `list[Finding]`: one error or note; none if torch sees a GPU, and on a machine without one.
    """
    import torch

    if torch.accelerator.is_available():
        return []
    driver, gpus = nvidia_driver()
    if not gpus:
        return []
    reason = None
    try:
        torch.cuda.init()
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # an AssertionError where torch is built without CUDA
        reason = " ".join(str(error).split())
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    finding = why_torch_sees_none(
        driver, gpus, cuda=torch.version.cuda, reason=reason, visible=visible
    )
    return [replace(finding, host=os.uname().nodename)]
