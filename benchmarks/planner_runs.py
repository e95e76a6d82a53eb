"""Reads the published runs in `data/throughput.csv`, with which the planner is compared."""

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hfscale.errors import HfScaleError
from hfscale.planner.frameworks import Framework, SharedConstants
from hfscale.planner.job import Job
from hfscale.planner.memory import GIB
from hfscale.planner.table import job_of

HERE = Path(__file__).parent
Constants = Mapping[str, Framework | SharedConstants]
"""The constants by framework, and under `shared` those of all frameworks."""


@dataclass(frozen=True)
class Run:
    """A published run and its job."""

    row: int
    source: str
    job: Job
    tokens_per_s_per_gpu: float | None
    memory_gib: float | None
    is_doubted: bool
    is_memory_doubted: bool
    is_allocated: bool


def load(path: Path = HERE / "data" / "throughput.csv", *, hidden: Iterable[str] = ()) -> tuple[list[Run], list[str]]:
    """The runs of a table, and a message for each row that cannot be read; columns in `hidden` are treated as
    blank."""
    runs = []
    failed = []
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file)):
            blanked = {**row, **dict.fromkeys(hidden, "")}
            memory = number_of(row["peak_mem_gb"])
            try:
                job = job_of(blanked)
            except HfScaleError as error:
                failed.append(f"row {number}: {error}")
                continue
            source = re.sub(r" §.*|@[^:]*", "", row["source"])
            tokens = number_of(row["tokens_per_s_per_gpu"])
            gib = memory * 1e9 / GIB if memory else None
            doubts = bool(row["doubt"]), bool(row["memory_doubt"])
            runs.append(Run(number, source, job, tokens, gib, *doubts, row["memory_measure"] == "allocated"))
    return runs, failed


def number_of(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
