"""Draws programs as users write them, and compares hfscale with plain Trainer: `make test-differential`.

Each program runs as a whole with plain Trainer, as a whole with hfscale, and interrupted with hfscale and resumed
until it ends. Every difference is a fault unless hfscale said it in a line before it took effect
(`comparing.EXPLANATIONS`); so is a crash that plain Trainer does not have. Hypothesis draws the programs. A fault is
shrunk to its smallest program, which is printed as a script, and the run goes on. The table at the end counts
programs. The exit code is 1 if there was a fault.

    python tests/differential --programs 200 --seed 1
    python tests/differential --run 'Program(sampler="group_by_length", interruptions=(Interruption(),))'
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

from program import Interruption, Program  # noqa: E402

ROUND = 20
"""Programs of one call of hypothesis: the later ones of a call are often variations of the earlier ones."""
VERDICTS = ("exact", "said", "fault", "impossible")


class Search:
    """The search of one worker.

    Args:
        results (`Path`): the folder into which all workers write what they find.
        number (`int`): the number of this worker.
        seed (`int`): where its random numbers begin.
    """

    def __init__(self, results: Path, number: int, seed: int) -> None:
        from running import Runner

        self.results = results
        self.number = number
        self.seed = seed
        self.runner = Runner()
        self.tried: set[Program] = set()

    def run(self, programs: int) -> None:
        """Run that many programs, and those that shrink a fault."""
        import hypothesis
        from drawing import programs as strategy

        rounds = 0
        while len(self.tried) < programs:
            settings = hypothesis.settings(
                max_examples=ROUND,
                database=None,
                deadline=None,
                suppress_health_check=list(hypothesis.HealthCheck),
                phases=[hypothesis.Phase.generate],
            )
            test = settings(hypothesis.given(strategy())(lambda program: self._try(program, programs)))
            hypothesis.seed(self.seed * 10_000 + self.number * 1_000 + rounds)(test)()
            rounds += 1
        self.runner.close()

    def _try(self, program: Program, programs: int) -> None:
        """Run one program, if fewer than `programs` were; shrink it if it shows a fault of a kind that is not known.

        A call of hypothesis for the few that are left would not do: its first example is always the simplest program.
        """
        from running import check
        from shrinking import shrunk

        if program in self.tried or len(self.tried) >= programs:
            return
        self.tried.add(program)
        outcome = check(program, self.runner)
        self._keep_outcome(outcome)
        if outcome.verdict != "fault" or self._is_known(outcome):
            return
        kind = outcome.fault.kind

        def fails(candidate: Program) -> bool:
            found = check(candidate, self.runner, phase=kind[0])
            return found.verdict == "fault" and found.fault.kind == kind and not self._is_known(found)

        smallest = check(shrunk(program, fails), self.runner)
        self._keep_kind(smallest if smallest.verdict == "fault" else outcome)

    def _is_known(self, outcome: Any) -> bool:
        """Whether a kind that was found already has the same fault with no other features than this program."""
        features = outcome.program.features()
        for path in self.results.glob("kind-*.json"):
            kind = json.loads(path.read_text())
            if tuple(kind["kind"]) == outcome.fault.kind and set(kind["features"]) <= features:
                return True
        return False

    def _keep_outcome(self, outcome: Any) -> None:
        program = outcome.program
        kept = {"program": str(program), "verdict": outcome.verdict, "seconds": outcome.seconds}
        kept["trainer"] = program.trainer
        kept["order"] = program.sampler if "stream" not in program.data else program.data
        kept["collator"] = program.collator
        kept["reason"] = outcome.reason
        kept["fault"] = [*outcome.fault.kind, outcome.fault.detail] if outcome.fault is not None else None
        with (self.results / f"outcomes-{self.number}.jsonl").open("a") as file:
            file.write(json.dumps(kept) + "\n")

    def _keep_kind(self, outcome: Any) -> None:
        features = sorted(outcome.program.features())
        kind = {"kind": outcome.fault.kind, "features": features, "program": str(outcome.program)}
        kind["text"] = outcome.describe()
        kind["script"] = outcome.program.script(f"{outcome.fault.phase}: {outcome.fault.quantity} differs")
        number = len(list(self.results.glob("kind-*.json")))
        path = self.results / f"kind-{self.number}-{number:03}.json"
        path.with_suffix(".part").write_text(json.dumps(kind))
        path.with_suffix(".part").rename(path)
        print(f"\nFAULT {kind['text']}\n\n{kind['script']}", flush=True)


def table(outcomes: list[dict[str, Any]]) -> str:
    """Return the counts of verdicts per Trainer class, per order of the data and per collator."""
    lines = [f"{'':34}{'programs':>9}" + "".join(f"{verdict:>11}" for verdict in VERDICTS)]
    for column in ("trainer", "order", "collator"):
        lines.append(column)
        for value in sorted({outcome[column] for outcome in outcomes}):
            counts = Counter(outcome["verdict"] for outcome in outcomes if outcome[column] == value)
            numbers = "".join(f"{counts[verdict]:>11}" for verdict in VERDICTS)
            lines.append(f"  {value:32}{counts.total():>9}{numbers}")
    return "\n".join(lines)


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200, help="programs to run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="where the drawing begins (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="programs at a time (default: %(default)s)")
    parser.add_argument("--run", metavar="PROGRAM", help="run this program only")
    parser.add_argument("--results", type=Path, help="keep outcomes and kinds of faults in this folder")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        from running import show

        show(eval(options.run, {"Program": Program, "Interruption": Interruption}))  # noqa: S307  the caller's own text
    if options.worker is not None:
        Search(options.results, options.worker, options.seed).run(options.programs)
        return 0
    results = options.results or Path(tempfile.mkdtemp(prefix="hfscale-differential-results-"))
    results.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    workers = []
    for number in range(options.processes):
        share = len(range(number, options.programs, options.processes))
        command = [sys.executable, str(FOLDER), "--worker", str(number), "--programs", str(share)]
        command += ["--seed", str(options.seed), "--results", str(results)]
        workers.append(subprocess.Popen(command, env=os.environ.copy()))
    codes = [worker.wait() for worker in workers]
    outcomes = [json.loads(line) for path in results.glob("outcomes-*.jsonl") for line in path.open()]
    kinds = [json.loads(path.read_text()) for path in sorted(results.glob("kind-*.json"))]
    minutes = (time.monotonic() - begin) / 60
    print(f"\nSeed {options.seed}: {len(outcomes)} programs in {minutes:.1f} minutes\n\n{table(outcomes)}\n")
    for kind in kinds:
        print(f"FAULT {kind['text']}\n")
    print(f"{len(kinds)} kinds of faults; outcomes and scripts: {results}")
    faults = sum(outcome["verdict"] == "fault" for outcome in outcomes)
    return 1 if faults or any(codes) or len(outcomes) < options.programs else 0


if __name__ == "__main__":
    sys.exit(main())
