"""Programs drawn from layouts, adapters, losses and optimizers: ParallelTrainer trains, resumes in another layout and
exports what one process does, or refuses the program before the first step.

`DRAWS=100 SEED=1 RECORD=1 make test-recipes ARGS="tests/parallel/test_parallel_draws.py -n 0"` runs the programs 1000
to 1099 and records in draws.json how each has ended; hfscale/facts/support.toml is compared with it.
"""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from drawn_programs import SAVED, axis_of, describe, draw, evaluations_of_exports, kinds_of, run
from parallel_world import in_world

from hfscale.errors import UsageError
from hfscale.facts.support import Rule, rules

DRAWS = int(os.environ.get("DRAWS", "200"))
SEED = int(os.environ.get("SEED", "0"))
PER_SEED = 1000
"""Programs of a seed: those of seed 1 have the numbers from 1000."""
CHUNK = 10
RECORD = Path(__file__).parent / "draws.json"
TOLERANCE = {"loss": 2e-5, "grad_norm": 3e-4, "eval": 2e-5}
"""Of the size of a value, which is about 4: fp32 adds in another order, and the norm's relative error is larger."""
RIGHT = ("equal", "refused", "neither")
"""How a program may end; `neither` is one that fails in one process too."""


# --- many programs in one world --------------------------------------------------------------------------------------


def run_all(jobs: list[dict[str, Any]]) -> bool:
    """Run jobs one after the other, on every rank; the results are written as they come.

    An error of another kind than a refusal ends the rank: others may wait in an exchange that it has left.
    """
    for job in jobs:
        folder = Path(job["folder"])
        try:
            result = run(job)
        except Exception as error:
            if job["layout"] is not None and not isinstance(error, UsageError):
                raise
            result = {"refused": str(error), "type": type(error).__name__}
        if os.environ.get("RANK", "0") == "0":
            (folder / "result.json").write_text(json.dumps(result))
    return True


def results(size: int, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run jobs in worlds of `size` ranks. After one that failed, the next begins behind the job in which it did."""
    found: list[dict[str, Any]] = []
    while len(found) < len(jobs):
        left = jobs[len(found) :]
        failure = None
        try:
            in_world(size, run_all, [left])
        except AssertionError as error:
            failure = str(error)
        for job in left:
            path = Path(job["folder"], "result.json")
            if not path.exists():
                break
            found.append(json.loads(path.read_text()))
        if failure is not None and len(found) < len(jobs):
            found.append({"failed": failure})
    return found


def outcomes(numbers: Sequence[int]) -> Iterator[str]:
    """Yield how each program ends: `equal`, `refused: …`, `neither: …`, or what differs."""
    programs = [draw(number) for number in numbers]
    alone = [{"number": n, "layout": None, "folder": tempfile.mkdtemp()} for n in numbers]
    wholes = [{"number": p["number"], "layout": p["first"], "folder": tempfile.mkdtemp()} for p in programs]
    again = [
        {
            "number": program["number"],
            "layout": program["second"],
            "folder": tempfile.mkdtemp(),
            "resume": f"{whole['folder']}/checkpoint-{SAVED}",
        }
        for program, whole in zip(programs, wholes, strict=True)
    ]
    wanted = results(1, alone)
    first = results(2, wholes)
    is_trained = ["loss" in got for got in first]
    second = iter(results(2, [job for job, trained in zip(again, is_trained, strict=True) if trained]))
    for program, want, got, whole in zip(programs, wanted, first, wholes, strict=True):
        yield _outcome(program, want, got, next(second) if "loss" in got else got, whole["folder"])


def _outcome(program: dict[str, Any], want: Any, whole: Any, resumed: Any, folder: str) -> str:
    for got, layout in ((whole, program["first"]), (resumed, program["second"])):
        if "failed" in got and "loss" in want:
            return f"failed: {got['failed']}"
        if "refused" in got and "loss" in want:
            return f"refused: {axis_of(layout)}: {got['refused']}"
    if "loss" not in want and program["beyond"] and "refused" not in whole:
        return f"failed: ids beyond the vocabulary are not refused: {whole}"
    if "loss" not in want:
        return "trains what one process does not" if "loss" in whole else f"neither: {want['refused']}"
    for name, got, start in (("whole", whole, 0), ("resumed", resumed, SAVED)):
        for key, tolerance in TOLERANCE.items():
            expected = want[key] if key == "eval" else want[key][start:]
            if not _is_near(got[key], expected, tolerance):
                return f"{name} differs: {key} {got[key]} instead of {expected}"
    is_plain = program["loss"] is None and "label_smoothing_factor" not in program["arguments"]
    try:
        exported = evaluations_of_exports(program, folder)
    except Exception as error:
        return f"export fails: {type(error).__name__}: {error}"
    for name, loss in exported.items():
        if is_plain and abs(loss - whole["eval"][0]) > 1e-4:
            return f"export differs: {name} has {loss} instead of {whole['eval'][0]}"
    return "equal"


def _is_near(got: list[float], wanted: list[float], tolerance: float) -> bool:
    return len(got) == len(wanted) and all(
        abs(a - b) <= tolerance * max(1.0, abs(b)) for a, b in zip(got, wanted, strict=True)
    )


def check(numbers: range) -> Counter[str]:
    """Run programs; return how many ended in which way.

    Raises:
        AssertionError: a program differs or fails.
    """
    counts: Counter[str] = Counter()
    faults = []
    for number, found in zip(numbers, outcomes(numbers), strict=True):
        if "RECORD" in os.environ:
            record(number, found)
        kind = found.partition(":")[0]
        counts[kind] += 1
        if kind not in RIGHT:
            faults.append(f"{json.dumps(draw(number), default=str)}\n  {found}")
    assert not faults, f"{dict(counts)}\n" + "\n".join(faults)
    return counts


def drawn_numbers() -> range:
    """Return the numbers of the programs that `DRAWS` and `SEED` ask for."""
    return range(SEED * PER_SEED, SEED * PER_SEED + DRAWS)


@pytest.mark.long
def test_a_few_programs():
    counts = check(range(4))
    assert counts["equal"]


@pytest.mark.recipes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", drawn_numbers()[::CHUNK])
def test_many_programs(start):
    check(range(start, min(start + CHUNK, drawn_numbers().stop)))


# --- what the table says ---------------------------------------------------------------------------------------------

BY_TABLE, BY_PROGRAM = "refused by the table", "refused by the program"
CAUSES = {
    "adapter": ("adapter", "adapter_part", "adapter_init", "tied_adapters"),
    "loss": ("compute_loss",),
    "optimizer": ("optimizers", "optimizer"),
    "argument": ("neftune", "auto_find_batch_size"),
    "family": ("family", "tp_plan", "ep_plan"),
}
"""Kind of what is drawn -> properties of a rule that refuses it."""
WORDS = {
    "compute_loss": "loss",
    "optimizer": "optimizer",
    "update": "optimizer",
    "trained parameters": "optimizer",
    "tied weight": "optimizer",
    "vocabulary": "vocabulary",
    "adapter": "adapter",
}
"""Word of a refusal that no rule of the table makes -> the kind that it refuses."""
Counts = dict[str, dict[str, dict[str, dict[str, int]]]]
"""Kind -> value -> axis -> `equal` or `refused` -> number of programs."""


def recorded() -> dict[int, str]:
    """Return the recorded outcomes by number."""
    outcomes = json.loads(RECORD.read_text())["outcomes"]
    return {number: outcome for outcome, numbers in outcomes.items() for number in numbers}


def as_recorded(number: int, outcome: str) -> str:
    """Return an outcome in the form of the record: a refusal with its axis and the rule that makes it, if one does."""
    kind, _, rest = outcome.partition(": ")
    if kind != "refused":
        return kind
    axis, _, sentence = rest.partition(": ")
    for rule, text in broken_rules(number):
        if text == sentence:
            return f"{BY_TABLE}, {axis}: {rule.name}"
    return f"{BY_PROGRAM}, {axis}: {sentence[:60]}"


def broken_rules(number: int, names: Sequence[str] = ("first", "second")) -> list[tuple[Rule, str]]:
    """Return the rules that a program breaks under one of its layouts, with their sentences."""
    program = draw(number)
    asked = [one for name in names for one in describe(program, program[name])]
    return [(rule, rule.text(one)) for one in asked for rule in rules() if rule.applies(one)]


def cause_of(outcome: str) -> str:
    """Return the kind of what was drawn for which a program was refused."""
    whom, _, name = outcome.partition(": ")
    if whom.startswith(BY_PROGRAM):
        return next((kind for word, kind in WORDS.items() if word in name), "other")
    properties = next(rule for rule in rules() if rule.name == name).when
    return next(kind for kind, names in CAUSES.items() if properties.keys() & set(names))  # in this order


def counts_of(outcomes: dict[int, str]) -> Counts:
    """Count equal programs for all that they have, and refused ones for what they are refused for."""
    counts: Counts = {}
    for number, outcome in sorted(outcomes.items()):
        program = draw(number)
        if outcome == "equal":
            counted, word = kinds_of(program), "equal"
            axes = sorted({axis_of(program["first"]), axis_of(program["second"])})
        elif outcome == "neither" and program["beyond"]:
            counted, word = [("vocabulary", "ids beyond it")], "refused"
            axes = [axis_of(program["first"])]
        elif outcome.startswith("refused"):
            cause = cause_of(outcome)
            counted, word = [pair for pair in kinds_of(program) if pair[0] == cause], "refused"
            axes = [outcome.partition(": ")[0].partition(", ")[2]]
        else:
            continue
        for kind, value in counted:
            for axis in axes:
                cell = counts.setdefault(kind, {}).setdefault(value, {}).setdefault(axis, {})
                cell[word] = cell.get(word, 0) + 1
    return counts


def record(number: int, outcome: str) -> None:
    """Add an outcome to the record."""
    ended = recorded() if RECORD.exists() else {}
    ended[number] = as_recorded(number, outcome)
    by_outcome: dict[str, list[int]] = {}
    for known in sorted(ended):
        by_outcome.setdefault(ended[known], []).append(known)
    lines = {"outcomes": dict(sorted(by_outcome.items())), "kinds": counts_of(ended)}
    RECORD.write_text(json.dumps(lines, indent=1, sort_keys=True) + "\n")


def test_the_table_refuses_what_the_drawn_programs_were_refused_for():
    """A rule that is added, or a list that is widened, without programs that show it, fails here."""
    for number, outcome in recorded().items():
        names = [rule.name for rule, _ in broken_rules(number)]
        if outcome.startswith(BY_TABLE):
            assert outcome.partition(": ")[2] in names, (number, names)
        if outcome == "equal":
            assert not names, (number, names)
        if outcome.startswith(BY_PROGRAM):
            # The second layout is not reached where the first one is refused
            assert not broken_rules(number, ["first"]), (number, names)


def test_the_counts_of_the_page_are_those_of_the_outcomes():
    """docs/support.md is written from them."""
    assert json.loads(RECORD.read_text())["kinds"] == counts_of(recorded())
    assert all(outcome.partition(",")[0] in (BY_TABLE, BY_PROGRAM, *RIGHT) for outcome in recorded().values())
