"""Compares the planner with published runs of fine-tuning and training, to which its constants of time are not fitted.

    python -m benchmarks planner_published                   # results/planner_published.json
    python -m benchmarks.planner_published                   # and print the table

`data/published.csv` has a run in each row: the words after `hfscale estimate` that describe it, the config of a model
that is not built in (`SHAPE` in the words), whether it ran (`fits`) or did not (`oom`), tokens per second and GPU, and
the peak of memory with what measured it: `nvidia-smi`, `reserved` by torch's allocator, `allocated`, or `card`, which
says that a card was full and is compared with nothing. `unknown` is what the source does not say, or what it ran that
the planner does not plan. The constants that depend on these runs (`cached` and `reading_range` of the stack hf in
frameworks.toml) were chosen with the sources of the half `fit`; the other half checks them.
"""

import contextlib
import csv
import io
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hfscale.cli import main as hfscale

DATA = Path(__file__).parent / "data" / "published.csv"
LARGE = 0.15
"""Error from which a row is listed with its reason."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the planner says about a published run."""

    id: str
    source: str
    kind: str
    """`full`, `lora`, `qlora` or `moe`, a mixture of experts."""
    half: str
    """`fit` or `check`."""
    compiled: bool
    stack: str
    tokens_error: float | None
    """Predicted over published tokens per second, less 1."""
    in_time_range: bool | None
    """Whether the published speed is in the range that is stated for 80% of the runs."""
    memory_error: float | None
    """Predicted over published peak, in what the source measured, less 1."""
    in_memory_range: bool | None
    fits_probability: float
    fits: bool
    """Whether it ran."""
    unknown: str


def estimated(words: str, shape: str) -> dict[str, Any]:
    """Return what `hfscale estimate --json` prints.

    Args:
        words (`str`): the words after `hfscale estimate`.
        shape (`str`): the config in place of the word `SHAPE`.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(shape or "{}")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = hfscale(["estimate", *words.replace("SHAPE", str(config)).split(), "--json"])
    if code:
        raise ValueError(f"hfscale estimate {words} ended with {code}")
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def compare(row: dict[str, str]) -> Row:
    """Compare an estimate with its published run."""
    found = estimated(row["command"], row["shape"])
    tokens = float(row["tokens_per_s_per_gpu"] or 0)
    peak = float(row["peak_gib"] or 0)
    predicted = {
        "nvidia-smi": found["memory_gib"]["total"],
        "reserved": found["memory_reserved_gib"],
        "allocated": found["memory_allocated_gib"],
    }.get(row["measure"])
    memory_error = in_memory = tokens_error = in_time = None
    if peak and predicted:
        memory_error = round(predicted / peak - 1, 4)
        low, high = (bound / found["memory_gib"]["total"] for bound in found["memory_range_gib"])
        in_memory = low <= peak / predicted <= high
    if tokens:
        tokens_error = round(found["tokens_per_s_per_gpu"] / tokens - 1, 4)
        fastest, slowest = (seconds / found["step_time_s"] for seconds in found["step_time_range_s"])
        in_time = fastest <= found["tokens_per_s_per_gpu"] / tokens <= slowest
    words = row["command"].split()
    return Row(
        id=row["id"],
        source=row["source"],
        kind=row["kind"],
        half=row["half"],
        compiled="--compile" in words or "--stack" in words,
        stack=words[words.index("--stack") + 1] if "--stack" in words else "hf",
        tokens_error=tokens_error,
        in_time_range=in_time,
        memory_error=memory_error,
        in_memory_range=in_memory,
        fits_probability=round(found["fits_probability"], 3),
        fits=row["outcome"] == "fits",
        unknown=row["unknown"],
    )


def compared(path: Path = DATA) -> list[Row]:
    """Compare all rows of a table."""
    with path.open(newline="", encoding="utf-8") as file:
        return [compare(row) for row in csv.DictReader(file)]


def _errors(values: Sequence[float], inside: Sequence[bool | None]) -> dict[str, Any]:
    if not values:
        return {"rows": 0}
    quarters = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {
        "rows": len(values),
        "median_error": round(statistics.median(map(abs, values)), 4),
        "bias": round(statistics.median(values), 4),
        "quartiles": [round(quarters[0], 4), round(quarters[2], 4)],
        "in_the_stated_range": round(sum(map(bool, inside)) / len(values), 4),
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return errors of speed and memory, and how often it is right whether a run fits."""
    timed = [row for row in rows if row.tokens_error is not None]
    peaks = [row for row in rows if row.memory_error is not None]
    right = sum((row.fits_probability >= 0.5) == row.fits for row in rows)
    return {
        "tokens_per_s": _errors(
            [row.tokens_error for row in timed if row.tokens_error is not None], [row.in_time_range for row in timed]
        ),
        "memory": _errors(
            [row.memory_error for row in peaks if row.memory_error is not None], [row.in_memory_range for row in peaks]
        ),
        "fits": {"rows": len(rows), "right": right},
    }


def measure() -> dict[str, Any]:
    """Compare all rows, and summarise them by half, by kind, and by whether layers are compiled or fused."""
    rows = compared()
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups["all"].append(row)
        groups[f"half: {row.half}"].append(row)
        groups[f"kind: {row.kind}"].append(row)
        groups["compiled or fused layers" if row.compiled else "eager layers"].append(row)
    return {
        "summary": {name: summary(group) for name, group in sorted(groups.items())},
        "rows": [asdict(row) for row in rows],
    }


def main() -> None:
    """Print the table."""
    found = measure()
    for row in found["rows"]:
        errors = [
            "" if row[key] is None else f"{row[key]:+.0%}{'' if row[inside] else ' !'}"
            for key, inside in (("tokens_error", "in_time_range"), ("memory_error", "in_memory_range"))
        ]
        ran = "ran" if row["fits"] else "oom"
        print(
            f"{row['id']:4} {row['half']:5} {row['kind']:5} {row['stack']:8} tokens/s {errors[0]:8} memory "
            f"{errors[1]:7} {ran} {row['fits_probability']:.2f}  {row['unknown']}"
        )
    for name, figures in found["summary"].items():
        print(name, json.dumps(figures))


if __name__ == "__main__":
    main()
