"""Runs the parts one after another, each in a process of its own session, and writes one result file."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import PREFIX
from benchmarks.gpu.registry import Part
from benchmarks.gpu.settings import (
    CARD_VARIABLE,
    FOLDER_VARIABLE,
    GPUS_VARIABLE,
    OFFLINE,
    REPOSITORY,
    TIMES_SLOWER,
    TINY,
)
from hfscale.recovery.children import end_descendants

KILL_LIMIT_S = 20
MIN_SHARE_OF_LIMIT = 0.5
"""A part is left out where less than this share of its limit is left."""
TAIL_LINES = 4


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a part."""

    part: str
    status: str
    """`ran`, `failed`, `not run`, or `ended at its limit`."""
    seconds: float = 0.0
    reason: str | None = None
    """Why it did not run to its end."""
    results: list[dict[str, Any]] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return a JSON line for each result, and one for the reason, where there is one."""
        rows = [{"part": self.part, **result} for result in self.results]
        if self.reason is not None:
            rows.append({"part": self.part, self.status.replace(" ", "_"): self.reason})
        return [json.dumps(row) for row in rows]


def reason_not_to_run(part: Part, *, gpus: int, nodes: int, left_s: float) -> str | None:
    """Say why a part cannot run here.

    Args:
        part (`Part`): The part.
        gpus (`int`): GPUs of this machine.
        nodes (`int`): Nodes on which this command was started.
        left_s (`float`): Seconds that are left of the day.

    Returns:
        `str`, *optional*: One line, or nothing where it can run.
    """
    for package in part.packages:
        if importlib.util.find_spec(package) is None:
            return f"needs {package}: it is not installed"
    if TINY and part.cuda_only:
        return "needs a CUDA GPU"
    if not TINY and gpus < part.gpus:
        return f"needs {_counted(part.gpus)}: this machine has {gpus}"
    if not TINY and nodes != part.nodes:
        return f"needs {part.nodes} nodes: this command was started on {nodes} (--node RANK,ADDRESS,PORT)"
    if left_s < MIN_SHARE_OF_LIMIT * part.limit_s:
        return f"needs up to {part.limit_s} s: {max(0, left_s):.0f} s are left"
    return None


def _counted(gpus: int) -> str:
    if gpus == 1:
        return "1 GPU"
    return f"{gpus} GPUs"


def run_part(part: Part, *, limit_s: float, folder: Path, environment: dict[str, str]) -> Outcome:
    """Run a part, and end everything that it has started.

    The caller has made this process adopt orphans (`adopt_orphans`): what the part has started is then found among its
    descendants, also in sessions of its own, as torch's launcher starts its ranks.

    Args:
        part (`Part`): The part.
        limit_s (`float`): Seconds after which it is killed.
        folder (`Path`): Where its log goes.
        environment (`dict[str, str]`): Its environment.
    """
    log = folder / f"{part.name}.log"
    command = [sys.executable, "-m", "benchmarks.gpu.part", part.function, *part.arguments]
    begun = time.monotonic()
    code: int | None = None
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            left = end_descendants((), limit_s=KILL_LIMIT_S)
    if left:
        print(f"part {part.name}: {len(left)} of its processes do not end", file=sys.stderr)
    return judge(part, code, log, limit_s=limit_s, seconds=round(time.monotonic() - begun, 1))


def judge(part: Part, code: int | None, log: Path, *, limit_s: float, seconds: float) -> Outcome:
    """Read the results of a part from its log, and say what became of it.

    Args:
        part (`Part`): The part.
        code (`int`, *optional*): Its exit code; nothing where it was killed at its limit.
        log (`Path`): Its log.
        limit_s (`float`): The limit.
        seconds (`float`): How long it took.
    """
    lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()
    results = [json.loads(line.removeprefix(PREFIX)) for line in lines if line.startswith(PREFIX)]
    others = [line.strip()[:200] for line in lines if line.strip() and not line.startswith(PREFIX)]
    status, reason = "ran", None
    if code is None:
        last = " / ".join(others[-1:])
        status, reason = "ended at its limit", f"did not end in {limit_s:.0f} s; last line: {last}"
    elif code:
        status, reason = "failed", f"exit code {code}: {' / '.join(others[-TAIL_LINES:])}"
    elif any("failed" in result for result in results):
        status = "failed"
    elif results and all("not_run" in result for result in results):
        status = "not run"
    elif not results:
        status, reason = "failed", "reported nothing"
    return Outcome(part=part.name, status=status, seconds=seconds, reason=reason, results=results)


def part_environment(folder: Path, machine: dict[str, Any]) -> dict[str, str]:
    """Return the environment of the parts.

    Args:
        folder (`Path`): Their files.
        machine (`dict[str, Any]`): What `benchmarks.gpu.machine` says.
    """
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    changes = {
        FOLDER_VARIABLE: str(folder),
        GPUS_VARIABLE: str(machine["gpus"]),
        CARD_VARIABLE: machine.get("accelerator", ""),
        # The parts share what they compile, as the runs of a user on one machine do.
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    if TINY:
        changes["CUDA_VISIBLE_DEVICES"] = ""
        changes.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    return os.environ | OFFLINE | changes


def run_parts(
    parts: Sequence[Part],
    *,
    machine: dict[str, Any],
    folder: Path,
    seconds: float,
    nodes: int = 1,
    after_each: Callable[[Outcome], None],
) -> None:
    """Run parts in their order within the time of a day.

    Args:
        parts (`Sequence[Part]`): The parts.
        machine (`dict[str, Any]`): What `benchmarks.gpu.machine` says.
        folder (`Path`): Logs and files of the parts.
        seconds (`float`): Time for all of them.
        nodes (`int`): Nodes on which this command was started.
        after_each (`Callable`): Called with what became of each part, so that a day that is cut keeps its results.
    """
    until = time.monotonic() + seconds
    environment = part_environment(folder, machine)
    for part in parts:
        left_s = until - time.monotonic()
        reason = reason_not_to_run(part, gpus=machine["gpus"], nodes=nodes, left_s=left_s)
        if reason is not None:
            after_each(Outcome(part=part.name, status="not run", reason=reason))
            continue
        limit_s = min(TIMES_SLOWER * part.limit_s, left_s)
        after_each(run_part(part, limit_s=limit_s, folder=folder, environment=environment))
