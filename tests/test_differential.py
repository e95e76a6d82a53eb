"""How `make test-differential` judges: what is a fault, what hfscale has said, and which kinds are told apart."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent / "differential"))

from comparing import compare
from program import CHOICES, Interruption, Program
from running import Launch, Run, moved

PROGRAM = Program(sampler="weighted", interruptions=(Interruption(),))


def launch(first=1, last=4, *, order=(0, 1, 2, 3), lines=(), ends=True, code=0, **end):
    """Return a launch that trained the given steps on one row each."""
    events = [{"event": "line", "step": step, "text": text} for step, text in lines]
    for step in range(first, last + 1):
        events.append({"event": "rows", "step": step, "rows": [order[step - 1]]})
        events.append({"event": "rates", "step": step, "rates": [0.1]})
        events.append({"event": "log", "step": step, "numbers": {"loss": 1.0 / step, "grad_norm": 1.0}})
    if ends:
        final = {"step": last, "tokens": 0, "best": None, "checkpoints": ["checkpoint-3"], "digest": "a", "total": 1.0}
        final["drawn"] = [0.5]
        events.append({"event": "end", **(final | end)})
    else:
        events.append({"event": "raised", "type": "PlannedCrashError", "mro": [], "message": "", "step": last})
    return Launch(events, code)


def resumed(*launches, program=PROGRAM):
    """Return how a resumed run compares with one of four steps."""
    return compare(program, Run([launch()]), None, Run([launch(last=3, ends=False, code=1), *launches]))


def test_equal_runs_are_exact():
    assert resumed(launch(first=3)).verdict == "exact"


def test_other_rows_after_a_resume_are_a_fault():
    outcome = resumed(launch(first=3, order=(0, 1, 3, 2)))
    assert outcome.verdict == "fault"
    assert outcome.fault.kind == ("resumed", "rows")
    assert outcome.fault.step == 3


def test_a_step_that_nobody_trained_is_a_fault():
    assert resumed(launch(first=5, last=4)).fault.step == 4


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ((1, "Curriculum does not repeat the order of the samples"), "said"),
        ((4, "the sampler cannot be restored"), "fault"),
    ],
)
def test_a_line_counts_before_the_difference_only(line, verdict):
    assert resumed(launch(first=3, order=(0, 1, 3, 2), lines=[line])).verdict == verdict


def test_a_line_explains_programs_that_it_is_about_only():
    line = (1, "Curriculum does not repeat the order of the samples")
    program = replace(PROGRAM, sampler="default")
    assert resumed(launch(first=3, order=(0, 1, 3, 2), lines=[line]), program=program).verdict == "fault"


@pytest.mark.parametrize(("path", "verdict"), [(None, "said"), ("out/checkpoint-2", "fault")])
def test_rows_of_a_launch_that_begins_anew_with_another_batch_are_explained(path, verdict):
    """The last batch of a pass is filled up; a launch that resumes must have the rows all the same."""
    again = launch(first=3, order=(0, 1, 3, 2))
    again.events.append({"event": "resume", "path": path})
    assert resumed(again, program=replace(PROGRAM, move="batch")).verdict == verdict


@pytest.mark.parametrize(
    ("loaded_by_plain", "loaded", "verdict"),
    [
        (2.0, 2.0, "said"),  # only this run ends with what its best checkpoint has
        (2.0, 3.0, "fault"),
        (1.0, 2.0, "fault"),  # another best checkpoint
        (None, None, "fault"),
    ],
)
def test_the_best_checkpoint_that_plain_trainer_loads_in_part_is_explained(loaded_by_plain, loaded, verdict):
    plain = Run([launch(best=3, loaded=loaded_by_plain)])
    ours = Run([launch(best=3, loaded=loaded, total=2.0, digest="b")])
    program = replace(PROGRAM, best="lowest")
    assert compare(program, plain, ours, None).verdict == verdict


@pytest.mark.parametrize(
    ("changed", "quantity"),
    [
        ({"step": 5}, "steps"),
        ({"best": 3}, "best"),
        ({"checkpoints": []}, "checkpoints"),
        ({"digest": "b", "total": 2.0}, "weights"),
        ({"drawn": [0.25]}, "drawn"),
    ],
)
def test_the_end_of_the_run_is_compared(changed, quantity):
    assert resumed(launch(first=3, **changed)).fault.quantity == quantity


def test_an_error_that_no_interruption_explains_is_a_fault():
    failed = Launch([{"event": "raised", "type": "KeyError", "mro": [], "message": "'a'", "step": 3}], 1)
    assert resumed(failed).fault.quantity.startswith("KeyError")


def test_a_refusal_before_the_first_step_is_said():
    event = {
        "event": "raised",
        "type": "UsageError",
        "mro": ["UsageError", "HfScaleError"],
        "message": "no",
        "step": 0,
    }
    outcome = compare(PROGRAM, Run([launch()]), Run([Launch([event], 1)]), None)
    assert outcome.verdict == "said"


@pytest.mark.parametrize("name", CHOICES)
def test_a_printed_program_is_the_same_program(name):
    for value in CHOICES[name]:
        program = replace(PROGRAM, **{name: value})
        assert eval(str(program), {"Program": Program, "Interruption": Interruption}) == program  # noqa: S307


def test_the_first_choice_is_the_default():
    assert all(getattr(Program(), name) == values[0] for name, values in CHOICES.items())


def test_features_tell_kinds_apart_but_not_sizes():
    assert PROGRAM.features() == {"sampler=weighted"}
    assert replace(PROGRAM, rows=64, epochs=4).features() == PROGRAM.features()
    killed = replace(PROGRAM, interruptions=(Interruption("kill", "evaluation"),))
    assert killed.features() == {"sampler=weighted", "kill", "evaluation"}


def test_a_renamed_folder_keeps_its_contents(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    out, name, _ = moved("renamed", tmp_path, tmp_path / "out", 1)
    assert name == str(out)
    assert [path.name for path in out.iterdir()] == ["file"]


def test_a_worker_ends_after_its_programs(tmp_path, monkeypatch):
    import running

    from tests.differential import __main__ as command

    monkeypatch.setattr(running, "check", lambda program, runner: compare(program, Run([launch()]), None, None))
    search = command.Search.__new__(command.Search)
    search.results, search.number, search.seed, search.tried = tmp_path, 0, 5, set()
    search.runner = SimpleNamespace(close=lambda: None)
    search.run(command.ROUND + 1)
    assert len((tmp_path / "outcomes-0.jsonl").read_text().splitlines()) == command.ROUND + 1
