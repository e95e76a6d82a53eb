"""Compares what the runs of a program have recorded, and knows which lines of hfscale explain a difference."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from program import Program
from running import Launch, Run, is_unplanned

ORDER = (
    "rows",
    "rates",
    "loss",
    "grad_norm",
    "metrics",
    "steps",
    "tokens",
    "best",
    "checkpoints",
    "weights",
    "drawn",
    "average",
)
"""What is compared. Where several differ, the first one is the fault, as the others may follow from it."""
ZERO = 1e-8
"""Where the terms of a loss cancel, as GRPO's do, what is left is rounding; a float32 near 1 has steps of 1e-7."""
CLOSE = 1e-4
"""Relative difference of numbers that may come from another batch per device."""


@dataclass
class Fault:
    """One difference.

    Args:
        phase (`str`): `whole` for the run without interruptions, `resumed` for the other.
        quantity (`str`): what differs: one of `ORDER`, or the error of a crash.
        step (`int`): the first step at which it differs.
        detail (`str`): both values.
    """

    phase: str
    quantity: str
    step: int
    detail: str

    @property
    def kind(self) -> tuple[str, str]:
        """Phase and quantity."""
        return self.phase, self.quantity


@dataclass
class Comparison:
    """The outcome of a program.

    Args:
        program (`Program`): the program.
        verdict (`str`): `exact`, `said` (hfscale said the difference in a line), `fault`, or `impossible` (plain
            Trainer cannot run it).
        fault (`Fault`, *optional*): the difference.
        reason (`str`): the line that said it, or why plain Trainer failed.
        plain (`str`): what plain Trainer does with the same interruptions; empty where it was not tried.
        seconds (`float`): how long it took.
    """

    program: Program
    verdict: str
    fault: Fault | None = None
    reason: str = ""
    plain: str = ""
    seconds: float = 0.0

    def describe(self) -> str:
        """Return the outcome as text."""
        lines = [f"{self.verdict}: {self.program}"]
        if self.fault is not None:
            lines.append(f"  {self.fault.phase}: {self.fault.quantity} at step {self.fault.step}: {self.fault.detail}")
            if self.plain:
                lines.append(f"  plain Trainer: {self.plain}")
        if self.reason:
            lines.append(f"  {self.reason}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """A line of hfscale that says a difference before it takes effect.

    Args:
        feature (`Callable[[Program], bool]`): the programs that it is about.
        line (`str`): a pattern of the line, or of the error.
        explains (`tuple[str, ...]`): the quantities.
    """

    feature: Callable[[Program], bool]
    line: str
    explains: tuple[str, ...]


FROM_LOSS = ("loss", "grad_norm", "metrics", "best", "checkpoints", "steps", "weights", "drawn", "average")
REFUSED = "refused"
"""A launch ends with a `CheckpointError`, where an earlier one has said that none of its checkpoints can be used."""
EXPLANATIONS = (
    Explanation(
        lambda program: program.move in ("batch", "processes"),
        r"does not divide its loss by num_items_in_batch",
        FROM_LOSS,
    ),
    Explanation(lambda program: program.only_model, r"save_only_model", ("rows", "rates", *FROM_LOSS, REFUSED)),
    Explanation(
        lambda program: program.extra == "draws_between_steps",
        r"ended in on_save of its callbacks, which is not called again",
        FROM_LOSS,
    ),
    Explanation(
        lambda program: program.optimizer == "counting",
        r"no run will be able to resume from the checkpoints",
        (REFUSED,),
    ),
    Explanation(
        lambda program: program.optimizer == "inside", r"keeps states that its state_dict does not restore", FROM_LOSS
    ),
    Explanation(
        lambda program: program.data == "shuffled_stream", r"shuffle buffer|buffer.*read again", ("rows", *FROM_LOSS)
    ),
    Explanation(
        lambda program: program.move in ("batch", "processes"),
        r"resumed with \d+ (processes|rows per device)",
        FROM_LOSS,
    ),
    Explanation(
        lambda program: program.move in ("batch", "processes") and program.sampler != "default",
        r"the order of later passes of a sampler without a seed",
        ("rows", *FROM_LOSS),
    ),
    Explanation(  # its dataset pairs each completion with the prompt of another row of the batch
        lambda program: program.move in ("batch", "processes") and program.trainer == "KTOTrainer",
        r"a loss that compares the rows of a device's batch",
        ("rows", *FROM_LOSS),
    ),
    Explanation(  # their sampler repeats rows as often as a step has batches
        lambda program: program.move == "batch" and program.trainer in ("GRPOTrainer", "RLOOTrainer"),
        r"resumed with \d+ rows per device",
        ("rows", *FROM_LOSS),
    ),
    Explanation(  # Trainer then takes the batch per device of the checkpoint, and the accumulation of the arguments
        lambda program: program.move == "batch" and program.extra == "find_batch_size",
        r"the global batch was \d+ sequences and is now",
        ("rows", "rates", *FROM_LOSS, "tokens"),
    ),
    Explanation(
        lambda program: program.move in ("batch", "processes"),
        r"a pass over the \d+ trained on \d+, and",
        ("rows", "rates", *FROM_LOSS, "tokens"),
    ),
    Explanation(
        lambda program: program.data.endswith("stream") and program.workers > 1,
        r"read the stream in turns of \d+ sequences, and now of",
        ("rows", *FROM_LOSS),
    ),
    Explanation(
        lambda program: program.data.endswith("stream") and program.move in ("batch", "processes"),
        r"where a pass over the stream ends within a step",
        ("rows", *FROM_LOSS, "tokens"),
    ),
    Explanation(
        lambda program: program.data.endswith("stream") and program.accumulation > 1,
        r"a pass over the stream ends within step \d+: the checkpoint",
        ("rows", *FROM_LOSS, "tokens"),
    ),
    Explanation(
        lambda program: program.data.endswith("stream") and (program.processes > 1 or program.move == "processes"),
        r"the last one is filled up with others",
        ("rows", *FROM_LOSS, "tokens"),
    ),
    Explanation(
        lambda program: program.workers > 0,
        r"random numbers that the \d+ processes of the data loader draw",
        FROM_LOSS,
    ),
    Explanation(
        lambda program: program.data == "random_stream" and program.extra == "persistent_workers",
        r"random numbers that the \d+ processes of the data loader draw for this pass and later ones",
        ("rows", *FROM_LOSS),
    ),
    Explanation(
        lambda program: program.sampler not in ("default", "sequential", "set_epoch"),
        r"does not repeat the order of the samples",
        ("rows", *FROM_LOSS),
    ),
    Explanation(
        lambda program: program.processes > 1 and program.model in ("running_mean", "batch_norm"),
        r"a checkpoint has the buffers of the first process",
        FROM_LOSS,
    ),
    Explanation(
        lambda program: program.extra == "stops_when_asked",
        r"a callback had ended the training at step \d+ .*, and it goes on",
        ("rows", "rates", *FROM_LOSS, "tokens"),
    ),
    Explanation(
        lambda program: program.extra == "ignore_data_skip",
        r"ignore_data_skip is on: what was read before",
        ("rows", "rates", *FROM_LOSS, "tokens"),
    ),
    Explanation(lambda program: program.average != "none", r"the average starts anew", ("average",)),
    Explanation(
        lambda program: any(each.where == "evaluation" or each.how != "crash" for each in program.interruptions),
        r"the last evaluation of the training is cut short",
        ("metrics", "best", "checkpoints", "steps", "weights", "rates", "loss", "grad_norm"),
    ),
)
"""The lines that explain a difference, each with the programs and the quantities that it is about."""


def compare(program: Program, plain: Run, whole: Run | None, broken: Run | None) -> Comparison:
    """Compare the runs with hfscale that there are with the one of plain Trainer."""
    for phase, run in (("whole", whole), ("resumed", broken)):
        if run is None:
            continue
        lines = lines_of(run)
        crash = crash_of(phase, run)
        if crash is not None:
            first = run.launches[0] if phase == "whole" else None
            if first is not None and is_refusal(first):
                return Comparison(program, "said", crash, crash.detail)
            return judged(program, crash, lines)
        fault = difference(program, phase, plain, run)
        if fault is not None and fault.quantity in ("rows", *FROM_LOSS) and begins_anew(program, run):
            # Ranks fill up the last batch of a pass, too, which another batch per device makes a larger one
            return Comparison(program, "said", fault, "no checkpoint was left, and another launch draws other numbers")
        if fault is not None and fault.quantity == "weights" and loads_its_best(program, plain, run):
            return Comparison(program, "said", fault, "plain Trainer loads a part of its best checkpoint")
        if fault is not None:
            return judged(program, fault, lines)
    if whole is not None and broken is not None:
        fault = difference_of_averages(program, whole, broken)
        if fault is not None:
            return judged(program, fault, lines_of(broken))
    return Comparison(program, "exact")


def difference_of_averages(program: Program, whole: Run, broken: Run) -> Fault | None:
    """Return how the averaged weights of an interrupted run differ from those of the one that was not."""
    expected, got = whole.end, broken.end
    assert expected is not None
    assert got is not None
    averages = (expected["average"], got["average"])
    is_there = program.average != "none"
    if all((average is not None) == is_there for average in averages) and not differs(program, *averages):
        return None
    return Fault("resumed", "average", got["step"], f"{averages[0]} became {averages[1]}")


def loads_its_best(program: Program, plain: Run, run: Run) -> bool:
    """Whether a run ends with the weights of its best checkpoint, and plain Trainer with others.

    transformers 5.23 leaves out weights that have another name in the file, such as those of ViT, when it loads them
    into a model that is there.
    """
    expected, got = plain.end, run.end
    assert expected is not None
    assert got is not None
    if program.best == "none" or None in (expected["loaded"], got["loaded"]):
        return False
    is_same = not differs(program, expected["loaded"], got["loaded"])
    is_loaded = not differs(program, got["loaded"], got["total"])
    return is_same and is_loaded and differs(program, expected["loaded"], expected["total"])


def begins_anew(program: Program, run: Run) -> bool:
    """Whether a launch with other processes, or other rows per device, begins the run again."""
    paths = [event["path"] for launch in run.launches[1:] for event in launch.of("resume")]
    return program.move in ("batch", "processes") and None in paths


def judged(program: Program, fault: Fault, lines: list[tuple[int, str]]) -> Comparison:
    """Return the verdict on a difference, given the lines of hfscale with the step of each."""
    for explanation in EXPLANATIONS:
        quantity = REFUSED if fault.quantity.startswith("CheckpointError") else fault.quantity
        if not explanation.feature(program) or quantity not in explanation.explains:
            continue
        for step, line in lines:
            is_before = quantity == REFUSED or step <= fault.step  # of an earlier launch, or of an earlier step
            if is_before and re.search(explanation.line, line):
                return Comparison(program, "said", fault, line[:300])
    last = [line for _, line in lines][-3:]
    return Comparison(program, "fault", fault, " | ".join(line[:160] for line in last))


def lines_of(run: Run) -> list[tuple[int, str]]:
    """Return the warnings and errors of hfscale, each with its step."""
    return [(event["step"], event["text"]) for launch in run.launches for event in launch.of("line")]


def is_refusal(launch: Launch) -> bool:
    """Whether hfscale has refused the training before its first step."""
    return any("HfScaleError" in event["mro"] and event["step"] == 0 for event in launch.of("raised"))


def crash_of(phase: str, run: Run) -> Fault | None:
    """Return the fault of a run that did not end as planned."""
    if run.end is not None:
        if run.launches[-1].code in (0, None):
            return None if run.launches[-1].code == 0 else Fault(phase, "hang at exit", run.end["step"], "")
        return Fault(phase, f"exit code {run.launches[-1].code}", run.end["step"], run.launches[-1].output[-300:])
    last = run.launches[-1]
    step = max([event["step"] for event in last.events if "step" in event], default=0)
    if last.code is None:
        return Fault(phase, "hang", step, last.output[-300:])
    for event in last.of("raised"):
        if is_unplanned(last):
            words = re.sub(r"'[^']*/[^']*'|\S*/\S*|\d+", "#", event["message"])[:60].replace("\n", " ")
            detail = f"{event['message'][:400]}\n{event.get('trace', '')}"
            return Fault(phase, f"{event['type']}: {words}", event["step"], detail)
    if is_unplanned(last):
        return Fault(phase, f"ended with {last.code}", step, last.output[-300:])
    return Fault(phase, "never ends", step, f"{len(run.launches)} launches")


def per_step(run: Run, event: str, value: str) -> list[dict[int, Any]]:
    """Return, for each launch, step -> what it has recorded there last."""
    return [{each["step"]: each[value] for each in launch.of(event)} for launch in run.launches]


def numbers_of(run: Run, name: str) -> list[dict[int, Any]]:
    """Return, for each launch, step -> a number of the log."""
    return [
        {each["step"]: each["numbers"][name] for each in launch.of("log") if name in each["numbers"]}
        for launch in run.launches
    ]


def metrics_of(run: Run) -> list[dict[tuple[int, str], Any]]:
    """Return, for each launch, step and name -> a metric of its evaluations; several sets log one after another."""
    return [
        {
            (log["step"], name): value
            for log in launch.of("log")
            for name, value in log["numbers"].items()
            if name.startswith("eval_")
        }
        for launch in run.launches
    ]


def differs(program: Program, left: Any, right: Any) -> bool:
    """Whether two values differ by more than another batch per device explains."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) != len(right) or any(differs(program, *pair) for pair in zip(left, right, strict=True))
    if not isinstance(left, float) or not isinstance(right, float):
        return left != right
    if math.isnan(left) and math.isnan(right):
        return False
    tolerance = CLOSE if program.move in ("batch", "processes") else 0.0
    return not math.isclose(left, right, rel_tol=tolerance, abs_tol=max(tolerance / 100, ZERO))


def difference(program: Program, phase: str, plain: Run, run: Run) -> Fault | None:
    """Return the first quantity that differs."""
    expected, got = plain.end, run.end
    assert expected is not None
    assert got is not None
    steps = {
        "rows": (per_step(plain, "rows", "rows"), per_step(run, "rows", "rows")),
        "rates": (per_step(plain, "rates", "rates"), per_step(run, "rates", "rates")),
        "loss": (numbers_of(plain, "loss"), numbers_of(run, "loss")),
        "grad_norm": (numbers_of(plain, "grad_norm"), numbers_of(run, "grad_norm")),
        "metrics": (metrics_of(plain), metrics_of(run)),
    }
    if program.extra == "eval_on_start":  # as the user asks for, also when a later launch starts
        later = zip(steps["metrics"][1][1:], run.launches[1:], strict=True)
        for metrics, launch in later:
            begun = {event["step"] for event in launch.of("begin")}
            for key in [key for key in metrics if key[0] in begun]:
                del metrics[key]
    for quantity, (reference, launches) in steps.items():
        found = first_difference(program, reference[0], launches)
        if found is not None:
            place, detail = found
            step = place[0] if isinstance(place, tuple) else place
            return Fault(phase, quantity, step, detail)
    for quantity, key in (("steps", "step"), ("tokens", "tokens"), ("best", "best"), ("checkpoints", "checkpoints")):
        if quantity == "checkpoints" and program.move == "lost" and phase == "resumed":
            continue  # only what a resume needs is fetched
        if quantity == "checkpoints" and not expected[key] and len(got[key]) == 1 and len(run.launches) > 1:
            continue  # that of a stop is left where a run has no other
        if expected[key] != got[key]:
            return Fault(phase, quantity, got["step"], f"{expected[key]} became {got[key]}")
    total = (expected["total"], got["total"])
    if differs(program, *total) or (
        program.move not in ("batch", "processes") and expected["digest"] != got["digest"]
    ):
        return Fault(phase, "weights", got["step"], f"{total[0]} became {total[1]}")
    if program.move not in ("batch", "processes") and expected["drawn"] != got["drawn"]:
        return Fault(phase, "drawn", got["step"], f"{expected['drawn']} became {got['drawn']}")
    return None


def first_difference(
    program: Program, reference: dict[Any, Any], launches: list[dict[Any, Any]]
) -> tuple[Any, str] | None:
    """Return the first step, or step and name, that differs in one of the launches, or that is in none of them."""
    for launch in launches:
        for step, value in sorted(launch.items()):
            if differs(program, reference.get(step), value):
                return step, f"{shortened(reference.get(step))} became {shortened(value)}"
    missing = sorted(set(reference) - {step for launch in launches for step in launch})
    return (missing[0], f"{shortened(reference[missing[0]])} never came") if missing else None


def shortened(value: Any) -> str:
    """Return a value as text that fits into a line."""
    return str(value)[:120]
