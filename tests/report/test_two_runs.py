"""`hfscale report A B`: what each of two runs needed to reach the same loss, and the settings that differ."""

import json

import pytest

from hfscale.cli import main
from hfscale.report.run_data import load_run
from hfscale.report.two_runs import answer, compare_two, loss_curve

BEGIN = 1_790_000_000.0


def write_run(folder, *, per_step, seconds_per_step=10.0, usd_per_step=0.5, evaluations=(), optim="adamw_torch"):
    """Write the files of a run of 100 steps whose loss falls from 9 by so much per step."""
    folder.mkdir(parents=True)
    records = [
        {
            "step": step,
            "time": BEGIN + seconds_per_step * step,
            "loss": 9 - per_step * step,
            "scaling/tokens_per_s": 1000 / seconds_per_step,
            "scaling/tokens_seen": 1000.0 * step,
            "scaling/usd": usd_per_step * step,
        }
        for step in range(10, 101, 10)
    ]
    events = [
        {"event": "launch", "step": 0, "time": BEGIN, "world_size": 2, "strategy": "ddp"},
        {"event": "setup", "step": 0, "time": BEGIN, "arguments": {"optim": optim, "output_dir": str(folder)}},
        *evaluations,
        {"event": "end", "step": 100, "time": BEGIN + 100 * seconds_per_step, "seconds": {"compute": 900.0}},
    ]
    (folder / "scaling.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    (folder / "hfscale_timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    return folder


def evaluation(step, loss):
    return {"event": "evaluation", "step": step, "time": BEGIN + step, "metrics": {"eval_loss": loss}}


@pytest.fixture
def two(tmp_path):
    a = write_run(tmp_path / "slow", per_step=0.02)
    b = write_run(tmp_path / "fast", per_step=0.04, seconds_per_step=15.0, usd_per_step=0.75, optim="muon")
    return a, b


def test_the_cost_to_the_lowest_loss_that_both_have_reached(two):
    found = compare_two(*two)
    # The mean of the last five logs of the slow run: steps 60 to 100.
    assert found.loss_key == "loss"
    assert found.loss == pytest.approx(9 - 0.02 * 80)
    slow, fast = found.reached
    assert (slow.step, slow.tokens, slow.seconds, slow.usd) == (100, 100_000, 1000, 50)
    # 9 - 0.04 * (step - 20) is at or below that loss from step 60.
    assert (fast.step, fast.tokens, fast.seconds, fast.usd) == (60, 60_000, 900, 45)
    assert answer(found) == "To reach training loss 7.4, fast needed 0.90 times the cost of slow"


def test_settings_that_differ_are_named_and_names_of_folders_are_not(two):
    assert [(one.name, one.first, one.second) for one in compare_two(*two).settings] == [
        ("optim", "adamw_torch", "muon")
    ]


def test_the_evaluation_loss_is_compared_if_both_have_it_and_repeated_steps_count_once(tmp_path):
    killed = {"event": "launch", "step": 20, "time": BEGIN + 40, "world_size": 2}
    lost = [evaluation(20, 6.0), evaluation(30, 0.1), killed, evaluation(30, 5.0)]
    a = write_run(tmp_path / "a", per_step=0.02, evaluations=lost)
    b = write_run(tmp_path / "b", per_step=0.04, evaluations=[evaluation(40, 5.5), evaluation(50, 4.0)])
    assert load_run(a).series("eval_loss") == [(20, 6.0), (30, 5.0)]
    found = compare_two(a, b)
    assert (found.loss_key, found.loss) == ("eval_loss", 5.0)
    assert [one.step for one in found.reached] == [30, 50]


def test_the_training_loss_is_a_mean_because_one_log_is_noisy(two):
    curve = loss_curve(load_run(two[0]), "loss")
    assert curve[0] == (50, pytest.approx(9 - 0.02 * 30))
    assert len(curve) == 6


def test_runs_without_a_common_loss_still_give_their_numbers(tmp_path, two):
    empty = write_run(tmp_path / "empty", per_step=0.02)
    lines = [json.loads(line) for line in (empty / "scaling.jsonl").read_text().splitlines()]
    (empty / "scaling.jsonl").write_text(
        "".join(json.dumps({key: one[key] for key in one if key != "loss"}) + "\n" for one in lines)
    )
    found = compare_two(two[0], empty)
    assert (found.loss, found.reached) == (None, None)
    assert "no loss in common" in answer(found)


def test_text_page_and_json(two, tmp_path, capsys):
    page = tmp_path / "two.html"
    assert main(["report", *map(str, two), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    for expected in ("fast needed 0.90 times the cost of slow", "Cost to loss 7.4", "Settings that differ", "muon"):
        assert expected in out
    text = page.read_text()
    assert text.count("<figure") == 2
    assert "Settings that differ" in text
    assert main(["report", *map(str, two), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["runs"]] == ["slow", "fast"]
    assert found["reached"][1]["usd"] == 45
    assert found["settings"] == [{"name": "optim", "a": "adamw_torch", "b": "muon"}]


def test_names_from_files_are_escaped(tmp_path, two):
    hostile = write_run(tmp_path / "<img src=x>", per_step=0.03, optim="<script>alert(1)</script>")
    page = tmp_path / "two.html"
    assert main(["report", str(two[0]), str(hostile), "--html", str(page)]) == 0
    assert "<script>" not in page.read_text()
    assert "<img" not in page.read_text()


def test_two_runs_of_one_name_are_told_apart(tmp_path, capsys):
    a = write_run(tmp_path / "x" / "run", per_step=0.02)
    b = write_run(tmp_path / "y" / "run", per_step=0.04)
    assert main(["report", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "run (A)" in out
    assert "run (B)" in out


def test_a_second_folder_without_a_run_is_an_error(two, tmp_path, capsys):
    assert main(["report", str(two[0]), str(tmp_path / "absent")]) == 2
    assert "absent is not a directory" in capsys.readouterr().err
