"""Compares a launch command with one process: small models, the same rows, weights and steps."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hfscale.check.parallel_run import EXPORTED, read_cases, read_results
from hfscale.check.rehearsal.hook import COMPARED, FOLDER, LOADED, RESUMED, SMALL, STEPS
from hfscale.check.rehearsal.launch import failure_of, find_program, run_watched, too_few_ranks
from hfscale.errors import HealthError
from hfscale.why.answer import compare_runs
from hfscale.why.run_folder import elements_on_cpu, read_run
from hfscale.why.tolerance import relative_difference, relative_tolerance

_NUMBERS = ("loss", "grad_norm")


@dataclass(frozen=True, kw_only=True)
class Step:
    """The numbers of one step."""

    step: int
    """The optimizer step, counted from 1."""
    one: dict[str, float]
    """Loss and gradient norm of one process."""
    asked: dict[str, float]
    """Those of the launch command."""
    differs: bool
    """Whether they differ by more than rounding explains."""
    differing: tuple[str, ...]
    """Those of them that do."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A loss at the end of a run, of which there are two that have to be equal."""

    what: str
    """`evaluation`, `exported model`, or `resumed` with a step."""
    name: str
    """The metric, such as `eval_loss`."""
    one: float
    """What it has to be: that of one process, or of the run that was not interrupted."""
    asked: float
    """What it is under the launch command."""
    differs: bool
    """Whether they differ by more than rounding explains."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """What `hfscale check --parity` has found."""

    world_size: int
    """The number of ranks of the command."""
    steps: list[Step]
    """The numbers by step."""
    first_difference: dict[str, Any]
    """The first difference, as `hfscale why` names it."""
    explanation: str
    """The same in words."""
    cases: list[dict[str, Any]]
    """What a `ParallelTrainer` has compared with small models: `hfscale.parallel.parity.CASES`; empty for others."""
    results: list[Result] = field(default_factory=list)
    """Of a `ParallelTrainer`: its evaluation, what it has exported, and the steps after a resume."""

    @property
    def is_good(self) -> bool:
        """Whether the command computes what one process computes."""
        return self.first_difference["kind"] == "none" and not self.differing

    @property
    def differing(self) -> list[str]:
        """What differs: `loss`, `grad_norm`, `evaluation`, `exported model`, `resumed`; each once."""
        names = [name for step in self.steps if step.differs for name in step.differing]
        names += [one.what.partition(" at ")[0] for one in self.results if one.differs]
        return list(dict.fromkeys(names))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {"ok": self.is_good, **asdict(self), "differing": self.differing}

    def text(self) -> str:
        """Return the report for people."""
        verdict = "computes the same as" if self.is_good else "does not compute the same as"
        lines = [f"The command on {self.world_size} ranks {verdict} one process."]
        # First what to look for in the tables below
        if self.differing:
            lines.append(f"What differs: {', '.join(self.differing)}.")
        lines.append("")
        lines.append(
            f"{'step':>4}  {'loss':>12} {'one process':>12}  {'grad_norm':>12} {'one process':>12}"
        )
        for row in self.steps:
            cells = [
                row.asked.get("loss"),
                row.one.get("loss"),
                row.asked.get("grad_norm"),
                row.one.get("grad_norm"),
            ]
            shown = ["-" if cell is None else f"{cell:.6f}" for cell in cells]
            mark = "  differs" if row.differs else ""
            lines.append(
                f"{row.step:>4}  {shown[0]:>12} {shown[1]:>12}  {shown[2]:>12} {shown[3]:>12}{mark}"
            )
        if self.results:
            lines += ["", *(_line_of_result(one) for one in self.results)]
        if self.cases:
            lines += ["", *(_line_of(case) for case in self.cases)]
        return "\n".join([*lines, "", self.explanation])


def _line_of_result(one: Result) -> str:
    mark = "  differs" if one.differs else ""
    return f"{one.what}: {one.name} {one.asked:.6f}, expected {one.one:.6f}{mark}"


def _line_of(case: dict[str, Any]) -> str:
    first = case["steps"][0]
    return (
        f"{case['case']}, small model: loss {first['asked']['loss']:.6f}, one process {first['one']['loss']:.6f}; "
        f"grad_norm {first['asked']['grad_norm']:.6f}, one process {first['one']['grad_norm']:.6f}"
    )


def check_parity(command: Sequence[str], *, steps: int, quiet_s: float) -> Parity:
    """Run a launch command and one process of its script, and compare what they compute.

    Args:
        command (`Sequence[str]`): the command, one word per element.
        steps (`int`): optimizer steps.
        quiet_s (`float`): seconds without any news after which ranks that wait are reported.

    Raises:
        UsageError: the command is missing or not a program, or it has started fewer than two ranks.
        HealthError: one of the runs has failed.
    """
    words = find_program(command)
    with tempfile.TemporaryDirectory(prefix="hfscale-check-") as name:
        asked, one = Path(name, "asked"), Path(name, "one")
        asked.mkdir()
        one.mkdir()
        variables = {STEPS: str(steps), SMALL: "1", COMPARED: "1"}
        code, listener, tail = run_watched(words, asked, variables, quiet_s)
        if listener.difference is not None:
            raise HealthError(
                "a rank would wait for ever: see hfscale check --collectives with the same command"
            )
        if code:
            raise HealthError(f"the command has failed: {failure_of(listener, tail)}")
        if listener.world_size < 2:
            raise too_few_ranks(command, listener.world_size)
        argv = next(rank.argv for rank in listener.ranks if rank.rank == 0)
        rows, cases = read_cases(asked / "output")
        replicas = rows or listener.world_size
        alone = variables | {COMPARED: str(replicas), FOLDER: str(one / "output")}
        if cases:
            alone[LOADED] = str(asked / "output" / EXPORTED)
        code, _, tail = run_watched(argv, one, alone, quiet_s)
        if code:
            raise HealthError(f"the script has failed in one process: {tail}")
        results = []
        if cases:
            resumed = _resume(words, Path(name), variables, quiet_s)
            results = _compare_results(
                one / "output", asked / "output", resumed, listener.world_size
            )
        return _compare(one / "output", asked / "output", listener.world_size, cases, results)


def _resume(words: list[str], folder: Path, variables: dict[str, str], quiet_s: float) -> Path:
    """Run the command once more from the checkpoint in the middle of its first run, and return its folder."""
    checkpoints = sorted(
        (folder / "asked" / "output").glob("checkpoint-*"),
        key=lambda path: int(path.name.partition("-")[2]),
    )
    if not checkpoints:
        raise HealthError(
            "the command has saved no checkpoint to resume: give it more steps, with --steps"
        )
    again = folder / "again"
    again.mkdir()
    code, listener, tail = run_watched(
        words, again, variables | {RESUMED: str(checkpoints[0])}, quiet_s
    )
    if code or listener.difference is not None:
        raise HealthError(
            f"the command has failed when it was resumed: {failure_of(listener, tail)}"
        )
    return again / "output"


def _compare_results(one: Path, asked: Path, resumed: Path, ranks: int) -> list[Result]:
    """Compare evaluations, exports and the steps after the resume."""
    alone, split = read_results(one), read_results(asked)
    trained = split["evaluation"]
    whole = read_run(asked).numbers
    again = read_run(resumed).numbers
    limit = relative_tolerance("float32", ranks=ranks, steps=len(whole) + 1, chained=True)
    evaluation = _losses("evaluation", alone["evaluation"], trained, limit)
    # One process evaluates what the layout has exported: the layout's own evaluation has to come out. Where that is
    # wrong itself, it says nothing about the export, and that of the process which trained the same has to.
    is_evaluated_alike = not any(one.differs for one in evaluation)
    of_trained = trained if is_evaluated_alike else alone["evaluation"]
    pairs: list[tuple[str, Mapping[str, float], Mapping[str, float]]] = [
        ("exported model", of_trained, alone["loaded"]),
    ]
    # The resumed run has the layout of the one that was not interrupted
    for step in sorted(again):
        pairs.append((f"resumed at step {step}", whole[step], again[step]))
    pairs.append(("resumed", trained, read_results(resumed)["evaluation"]))
    return evaluation + [one for pair in pairs for one in _losses(*pair, limit)]


def _losses(
    what: str, expected: Mapping[str, float], found: Mapping[str, float], limit: float
) -> list[Result]:
    results = []
    for name in sorted(expected.keys() & found.keys()):
        if name.endswith("loss"):
            one, asked = expected[name], found[name]
            differs = relative_difference(one, asked) > limit
            results.append(Result(what=what, name=name, one=one, asked=asked, differs=differs))
    return results


def _compare(
    one: Path, asked: Path, ranks: int, cases: list[dict[str, Any]], results: list[Result]
) -> Parity:
    runs = read_run(one), read_run(asked)
    a, b = (run.numbers for run in runs)
    elements = elements_on_cpu(*runs)
    rows = []
    # A step that one run has not logged is named by `compare_runs`
    for step in sorted(a.keys() & b.keys()):
        differing = []
        for name in _NUMBERS:
            is_norm = name == "grad_norm"
            of_norm = elements if is_norm else 0
            limit = relative_tolerance(
                "float32", ranks=ranks, steps=step, chained=is_norm, of_norm=of_norm
            )
            is_in_both = name in a[step] and name in b[step]
            if is_in_both and relative_difference(a[step][name], b[step][name]) > limit:
                differing.append(name)
        rows.append(
            Step(
                step=step,
                one=dict(a[step]),
                asked=dict(b[step]),
                differs=bool(differing),
                differing=tuple(differing),
            )
        )
    answer = compare_runs(one, asked)
    found = json.loads(json.dumps(answer.to_dict()))
    return Parity(
        world_size=ranks,
        steps=rows,
        first_difference=found["first_difference"],
        explanation=answer.explanation,
        cases=cases,
        results=results,
    )
