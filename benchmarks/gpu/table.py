"""The table of a day: measured beside predicted, and beside Trainer, TRL and a loop in PyTorch on the same card."""

import json
from collections.abc import Iterable
from typing import Any

CONTEXT_GIB = 0.75
"""What `hfscale estimate` counts for the CUDA context, which the peak of torch's allocator does not have."""
BASELINES = {"Trainer": "Trainer", "TRL's SFTTrainer": "TRL", "loop in PyTorch, eager": "loop"}
"""Runs that others are compared with, and how the columns call them."""
COLUMNS = (
    "run",
    "tokens/s",
    "predicted",
    "MFU",
    "memory GiB",
    "predicted",
    *(f"x {name}" for name in BASELINES.values()),
)


def document_table(document: dict[str, Any]) -> str:
    """Return the table of a result file, as Markdown.

    Args:
        document (`dict[str, Any]`): What the file holds.

    Returns:
        `str`: A heading, a table for each model and method, the other results, and the parts that have none.
    """
    machine = document["machine"]
    card = machine.get("gpu", "CPU in tiny shapes: shows that the parts run, not how fast")
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [f"{card}, {document['date']}, commit {document.get('commit', 'unknown')}", versions]
    for (shape, method), rows in _by_model(document["runs"]).items():
        lines += ["", f"{shape}, {method}", *_table(rows)]
    others = document.get("results", [])
    if others:
        lines += ["", "Other results:", *map(_shortened, others)]
    without = [row for row in document.get("parts", ()) if row["status"] != "ran"]
    if without:
        lines += ["", "Parts without a result:"]
        lines += [f"- {row['part']}: {row['status']}: {row['reason']}" for row in without]
    return "\n".join(lines)


def _by_model(runs: Iterable[dict[str, Any]]) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Group runs by model and method, and by their names; of two of the same name the later one counts."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for run in runs:
        found.setdefault((run["shape"], run["method"]), {})[run["run"]] = run
    return found


def _table(rows: dict[str, dict[str, Any]]) -> list[str]:
    lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
    for name, row in rows.items():
        memory = row.get("peak_gib")
        if memory is not None:
            memory = memory + CONTEXT_GIB
        cells = [
            name,
            _number(row["tokens_s"]),
            _predicted(row.get("predicted_tokens_s"), row["tokens_s"], _number),
            _percent(row.get("mfu")),
            _gib(memory),
            _predicted(row.get("predicted_gib"), memory, _gib),
        ]
        for baseline in BASELINES:
            cells.append(_ratio(row, rows.get(baseline)))
        lines.append(_line(cells))
    return lines


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _gib(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}"


def _percent(share: float | None) -> str:
    if share is None:
        return ""
    return f"{share:.1%}"


def _predicted(predicted: float | None, measured: float | None, shown: Any) -> str:
    """Show a prediction, and by how much it is higher than what was measured."""
    if predicted is None or measured is None:
        return ""
    return f"{shown(predicted)} ({predicted / measured - 1:+.0%})"


def _ratio(row: dict[str, Any], baseline: dict[str, Any] | None) -> str:
    if baseline is None or baseline is row:
        return ""
    return f"{row['tokens_s'] / baseline['tokens_s']:.2f}"


def _shortened(row: dict[str, Any]) -> str:
    return f"- {json.dumps(row)[:240]}"
