"""Part: how long a launch takes from its command to its second step, before and after layers have been compiled."""

import json
import os
import re
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.part import report
from benchmarks.gpu.recipe_runs import run_recipe
from benchmarks.gpu.settings import work_folder
from benchmarks.gpu.shapes import shape_named
from hfscale.core.run_files import JSONL_NAME

LIMIT_S = 120
LAUNCHES = ("first launch", "next launch")
FLAGS = ("--torch_compile_regional", "true", "--logging_steps", "1", "--max_steps", "2")
FIRST_STEP = re.compile(r"the first step took ([\d.]+) s")


def start(shape: str) -> None:
    """Launch a recipe twice with a cache of compiled kernels that is empty at first.

    Args:
        shape (`str`): The name of a shape.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=work_folder(), prefix="inductor-")
    for launch in LAUNCHES:
        watch = SecondStep()
        done = run_recipe(shape, FLAGS, limit_s=LIMIT_S, cut=watch)
        first = next((match[1] for line in done.lines if (match := FIRST_STEP.search(line))), None)
        report(
            shape=shape,
            method=shape_named(shape).method,
            run=f"recipe, {launch}",
            second_step_s=watch.seconds,
            first_step_s=first and float(first),
        )


class SecondStep:
    """Notes when a run has logged its second step; it never ends the run."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._begun = time.monotonic()

    def __call__(self, folder: Path) -> bool:
        """Look at the records of the run.

        Args:
            folder (`Path`): Its output directory.
        """
        records = folder / JSONL_NAME
        if self.seconds is None and records.is_file():
            *lines, _ = records.read_text().split("\n")  # the last one may not be complete
            if any(json.loads(line)["step"] >= 2 for line in lines):
                self.seconds = round(time.monotonic() - self._begun, 1)
        return False
