"""hfscale sweep: its command lines, its arithmetic, and a real sweep on two processes."""

import json
import sys

import pytest
from conftest import REPOSITORY

from hfscale.cli import main
from hfscale.errors import HfScaleError, UsageError
from hfscale.report.page import sweep_page
from hfscale.report.sweep import Measurement, Sweep, environment, run_sweep
from hfscale.report.sweep_command import parse_gpus, to_dict


def make_sweep(tmp_path, *flags, script="", **changed):
    recipe = tmp_path / "train.py"
    recipe.write_text(script)
    options = {
        "recipe": [str(recipe), *flags],
        "gpus": (1, 2),
        "mode": "weak",
        "repeats": 1,
        "steps": 16,
        "config_file": REPOSITORY / "accelerate_configs" / "ddp.yaml",
        "output_dir": tmp_path / "sweep",
        "timeout_s": 60,
    }
    return Sweep(**(options | changed))


class TestBatches:
    def test_weak_scaling_keeps_the_batch_of_each_process(self, tmp_path):
        assert make_sweep(tmp_path).batch_flags(2) == []

    @pytest.mark.parametrize(
        ("flags", "number", "expected"),
        [
            (["--per_device_train_batch_size", "8"], 1, (8, 1)),
            (["--per_device_train_batch_size", "8"], 2, (4, 1)),
            (["--per_device_train_batch_size=4", "--gradient_accumulation_steps=4"], 2, (4, 2)),
            (["--per_device_train_batch_size=4", "--gradient_accumulation_steps=4"], 8, (2, 1)),
        ],
    )
    def test_strong_scaling_keeps_the_global_batch(self, tmp_path, flags, number, expected):
        sweep = make_sweep(tmp_path, *flags, mode="strong", gpus=(1, 2, 8) if "=4" in flags[0] else (1, 2))
        per_device, accumulation = expected
        assert sweep.batch_flags(number) == [
            f"--per_device_train_batch_size={per_device}",
            f"--gradient_accumulation_steps={accumulation}",
        ]

    def test_the_batch_may_be_in_the_recipes_config_file(self, tmp_path):
        config = tmp_path / "c.yaml"
        config.write_text("per_device_train_batch_size: 4\nsomething_else: x\n")
        assert make_sweep(tmp_path, "--config", str(config), mode="strong").batch_flags(2)[0].endswith("=2")

    @pytest.mark.parametrize(
        ("flags", "gpus", "message"),
        [
            ([], (1, 2), "--per_device_train_batch_size"),
            (["--per_device_train_batch_size", "2"], (1, 4), "batch of 2 .* 4 processes"),
            (["--per_device_train_batch_size", "many"], (1, 2), "--per_device_train_batch_size is many"),
        ],
    )
    def test_a_batch_that_cannot_be_kept_is_reported_before_anything_runs(self, tmp_path, flags, gpus, message):
        with pytest.raises(UsageError, match=message):
            make_sweep(tmp_path, *flags, mode="strong", gpus=gpus)


def test_wrong_usage(tmp_path, capsys):
    for argv, message in (
        (["--gpus", "1,1", "--", "x"], "--gpus is 1,1"),
        (["--gpus", "0", "--", "x"], "--gpus is 0"),
        (["--mode", "wide", "--", "x"], "--mode is wide"),
        (["--gpus", "1"], "recipe"),
        (["--", str(tmp_path / "no.py")], "no.py"),
        (["--steps", "3", "--", __file__], "--steps is 3"),
        (["--config-file", "nothing", "--", __file__], "no shipped config is named 'nothing'"),
    ):
        assert main(["sweep", *argv]) == 2, argv
        assert message in capsys.readouterr().err
    assert parse_gpus("4,1, 2") == (1, 2, 4)


def measurement(gpus, rates, **keys):
    named = {f"scaling/{name}": value for name, value in keys.items()}
    return Measurement(gpus=gpus, rates=rates, keys=[named] * len(rates), facts={"tokens_per_gpu": 512})


class TestArithmetic:
    BASE = measurement(1, [1000.0, 500.0, 1000.0], data_wait_fraction=0.01)

    def test_speeds_are_compared_inside_a_repeat(self):
        """In the second repeat the machine was slow for both numbers of GPUs."""
        assert measurement(2, [900.0, 450.0, 900.0]).efficiency(self.BASE) == pytest.approx(0.9)

    def test_losses_add_up_to_the_missing_efficiency(self):
        slow = measurement(8, [600.0, 300.0, 600.0], data_wait_fraction=0.11, comm_fraction=0.2)
        losses = slow.losses(self.BASE)
        assert losses["data wait"] == pytest.approx(0.1)
        assert losses["exposed communication"] == pytest.approx(0.2)
        assert losses["not measured"] == pytest.approx(0.1)
        assert slow.bottleneck(self.BASE).check == "exposed communication"
        much = measurement(8, [900.0, 450.0, 900.0], data_wait_fraction=0.51, comm_fraction=0.5)
        assert sum(much.losses(self.BASE).values()) == pytest.approx(0.1)

    def test_the_page_has_every_row_and_escapes_text(self):
        slow = measurement(8, [600.0, 300.0, 600.0], comm_fraction=0.2)
        answer = to_dict([self.BASE, slow], "weak") | {"strategy": "<b>x</b>"}
        text = sweep_page(answer)
        assert "8 GPUs: 600 tokens/s/GPU" in text
        assert "60% efficiency on 8" in text
        assert "exposed communication" in text
        assert "<b>x</b>" not in text


def test_one_process_alone_does_not_use_all_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert environment((1, 2, 8), {})["OMP_NUM_THREADS"] == "8"
    assert environment((1,), {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


class TestFailures:
    @pytest.mark.parametrize(
        ("script", "message"),
        [
            ("import sys; print('hfscale: error: the reason, hub_token=abcdefgh'); sys.exit(2)", "the reason"),
            ("print('nothing measured')", "scaling.jsonl"),
        ],
    )
    def test_a_failed_run_is_an_error_with_its_reason(self, tmp_path, monkeypatch, script, message):
        launcher = [sys.executable]
        monkeypatch.setattr(Sweep, "command", lambda self, number, output_dir: [*launcher, self.recipe[0]])
        with pytest.raises(HfScaleError, match=message) as caught:
            run_sweep(make_sweep(tmp_path, script=script), log=print)
        assert "abcdefgh" not in str(caught.value)
        assert "abcdefgh" not in (tmp_path / "sweep" / "1-gpus" / "repeat-1" / "output.txt").read_text()

    def test_a_run_that_takes_too_long_is_ended(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Sweep, "command", lambda self, number, output_dir: [sys.executable, self.recipe[0]])
        with pytest.raises(HfScaleError, match="1 s"):
            run_sweep(make_sweep(tmp_path, script="import time; time.sleep(99)", timeout_s=1), log=print)


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.world(2)
def test_a_sweep_records_the_baseline_of_later_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    recipe = REPOSITORY / "recipes" / "ddp" / "train.py"
    flags = ["--block_size", "64", "--per_device_train_batch_size", "2", "--dataloader_num_workers", "0"]
    argv = ["sweep", "--gpus", "1,2", "--repeats", "1", "--steps", "24", "--output-dir", str(tmp_path / "sweep")]
    assert main([*argv, "--json", "--html", str(tmp_path / "s.html"), "--", str(recipe), *flags]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["gpus"] for row in answer["rows"]] == [1, 2]
    assert answer["rows"][0]["efficiency"] == 1.0
    assert 0.05 < answer["rows"][1]["efficiency"] < 1.5
    assert [row["global_batch_size"] for row in answer["rows"]] == [2, 4]
    assert answer["baseline"]["workload"]["tokens_per_gpu"] == 128
    assert "efficiency on 2" in (tmp_path / "s.html").read_text()
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == ["1-gpus", "2-gpus", "sweep.json"]
    again = [*argv, "--json", "--", str(recipe), *flags]
    again[2] = "2"
    assert main(again) == 0
    (line,) = (tmp_path / "sweep" / "2-gpus" / "repeat-1" / "scaling.jsonl").read_text().splitlines()[-1:]
    assert json.loads(line)["scaling/efficiency"] > 0
