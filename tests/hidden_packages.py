"""An environment that has the installed packages except some of them."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path


def python_without(
    folder: Path, *hidden: str, also_on_path: Path, timeout_s: float = 60
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs Python with the installed packages except those whose name begins with `hidden`.

    Args:
        folder (`Path`): an empty folder for links to the packages.
        hidden (`str`): the beginnings of the names of modules and of the folders with their metadata.
        also_on_path (`Path`): a folder that is searched for modules too.
        timeout_s (`float`): time limit of a run in seconds.

    Returns:
        `callable`: `run(*argv, cwd=None, **env)`, which runs `python *argv`.
    """
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(hidden) and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)

    def run(*argv: str, cwd: Path = folder, **env: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(map(str, (folder, also_on_path)))
        command = [sys.executable, "-S", *argv]
        return subprocess.run(
            command,
            cwd=cwd,
            env={"PYTHONPATH": path, **env},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run
