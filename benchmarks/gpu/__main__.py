"""`python -m benchmarks.gpu [PART …]`: runs parts of a day on GPUs, and writes one file under `benchmarks/results/`.

With two nodes, the same command runs on both, with `--node 0,ADDRESS,PORT` and `--node 1,ADDRESS,PORT`.
"""

import argparse
import json
import os
import re
import signal
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu import machine, wheels
from benchmarks.gpu.registry import PARTS, Part, parts_named
from benchmarks.gpu.runner import Outcome, run_parts
from benchmarks.gpu.settings import NODE_VARIABLE, REPOSITORY
from benchmarks.gpu.table import document_table
from hfscale.errors import UsageError
from hfscale.recovery.children import adopt_orphans

RESULTS = REPOSITORY / "benchmarks" / "results"
RUNS = REPOSITORY / "runs" / "gpu-day"
"""Logs and files of the days; git ignores it."""
A_DAY_S = 24 * 3600


class Day:
    """The result file of a day, which is written after each part.

    Args:
        path (`Path`): The file.
        facts (`dict[str, Any]`): What `machine.ask` has returned.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        self.document: dict[str, Any] = {
            "benchmark": "gpu_day",
            "date": datetime.now(UTC).date().isoformat(),
            **facts,
            "data": "random tokens, random weights of the named shapes",
            "parts": [],
            "runs": [],
            "results": [],
        }

    def add(self, outcome: Outcome) -> None:
        """Print what became of a part, and write the file.

        Args:
            outcome (`Outcome`): What became of it.
        """
        for line in outcome.lines():
            print(line, flush=True)
        row = asdict(outcome)
        for result in row.pop("results"):
            reason = result.get("failed") or result.get("not_run")
            if row["reason"] is None and reason:
                row["reason"] = reason
            kind = "results"
            if "tokens_s" in result and "shape" in result:
                kind = "runs"
            self.document[kind].append({"part": outcome.part, **result})
        self.document["parts"].append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.document, indent=1) + "\n")


def main() -> None:
    """Run what the command line asks for."""
    asked = _arguments()
    if asked.table:
        print(document_table(json.loads(asked.table.read_text())))
        return
    try:
        parts = parts_named(asked.parts)
    except UsageError as error:
        sys.exit(f"python -m benchmarks.gpu: error: {error}")
    if asked.list:
        print(_listed(parts))
        return
    run_day(parts, asked)


def run_day(parts: list[Part], asked: argparse.Namespace) -> None:
    """Run parts and print their table.

    Args:
        parts (`list[Part]`): The parts.
        asked (`argparse.Namespace`): The options of the command line.
    """
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part that runs is ended as well
    now = datetime.now(UTC)
    folder = asked.folder or RUNS / f"{now:%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True, exist_ok=True)
    wheels.use(asked.wheels, folder.parent / "site")
    facts = machine.ask()
    nodes = 1
    if asked.node:
        nodes = 2
        os.environ[NODE_VARIABLE] = asked.node
    day = Day(asked.result or _result_file(folder, facts["machine"], now), facts)
    print(json.dumps(facts), flush=True)
    run_parts(
        parts,
        machine=facts["machine"],
        folder=folder.resolve(),
        seconds=asked.seconds,
        nodes=nodes,
        after_each=day.add,
    )
    print(f"\n{document_table(day.document)}\n\nresults: {day.path}\nlogs: {folder}")


def _result_file(folder: Path, found: dict[str, Any], now: datetime) -> Path:
    """Return the file of a day; what a CPU has shown does not belong to the results of the project."""
    if not found["gpus"]:
        return folder / "result.json"
    name = re.sub(r"[^a-z0-9]+", "-", found.get("accelerator", found["gpu"]).lower()).strip("-")
    return RESULTS / f"gpu_{name}_{found['gpus']}_{now:%Y-%m-%d}.json"


def _listed(parts: list[Part]) -> str:
    lines = []
    for part in parts:
        where = f"{part.gpus} GPUs"
        if part.nodes > 1:
            where = f"{part.nodes} x {where}"
        lines.append(f"{part.name:<22}{part.limit_s:>5} s  {where:<10}  {part.summary}")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=f"{len(PARTS)} parts; --list.")
    parser.add_argument("parts", nargs="*", metavar="PART", help="what to run; by default all parts in their order")
    parser.add_argument("--list", action="store_true", help="print the parts with their limits and GPUs, and exit")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a result file, and exit")
    parser.add_argument(
        "--seconds", type=float, default=A_DAY_S, help="time for all parts; what does not fit is left out"
    )
    parser.add_argument("--folder", type=Path, help="for logs and files; by default a new one in runs/gpu-day/")
    parser.add_argument("--result", type=Path, metavar="FILE", help="the result file")
    parser.add_argument("--wheels", type=Path, default=REPOSITORY / wheels.FOLDER, help="wheels to install and use")
    parser.add_argument("--node", metavar="RANK,ADDRESS,PORT", help="this is one of two nodes: 0 or 1, and where 0 is")
    return parser.parse_args()


if __name__ == "__main__":
    main()
