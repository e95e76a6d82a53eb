"""What an emitted `launch.sh` starts: the script runs with a program `accelerate` that keeps its arguments."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

MACHINE = {"MACHINE_RANK": "0", "MAIN_IP": "127.0.0.1"}
"""The variables that a script for several machines needs, as on the first of them."""


def launched_words(
    script: Path | str, folder: Path, environ: Mapping[str, str] = MACHINE, *, cwd: Path | None = None
) -> list[str]:
    """Run a launch.sh without a launcher; return the words that it would start, `accelerate` first.

    Args:
        script (`Path`): the script.
        folder (`Path`): where the program in place of `accelerate` is written.
        environ (`Mapping[str, str]`): further variables of the environment.
        cwd (`Path`, *optional*): the working folder.
    """
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    program = programs / "accelerate"
    program.write_text(
        "#!/bin/sh\nprintf 'accelerate\\0'\nprintf '%s\\0' \"$@\"\nprintf 'OMP=%s' \"${OMP_NUM_THREADS:-}\"\n"
    )
    program.chmod(0o755)
    path = f"{programs}:/usr/bin:/bin"
    clean = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        ["sh", str(script)],
        cwd=cwd,
        env={**clean, **environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert "hfscale is not in PATH" in done.stderr
    return done.stdout.split("\0")[:-1]
