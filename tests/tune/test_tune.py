"""hfscale tune: reading the launch command, choosing and running configurations, correcting the hardware row."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import psutil
import pytest
import torch
from conftest import RECIPE, REPOSITORY
from launch_words import launched_words
from tiny import tiny_model

from hfscale.cli import main
from hfscale.errors import UsageError
from hfscale.facts.hardware import accelerator
from hfscale.facts.own_hardware import find_accelerator
from hfscale.planner.estimate import estimate_job
from hfscale.planner.plan import plan
from hfscale.tune import launch_command
from hfscale.tune.decisions import candidates, correct, number_of_runs, successive_halving
from hfscale.tune.launch_command import read_command
from hfscale.tune.trial import Trial, run_trial
from hfscale.tune.tune_command import Tuning

H100 = accelerator("H100-80GB")


def launch(*flags, script=RECIPE, launcher=("--num_processes", "2")):
    return ["accelerate", "launch", *launcher, str(script), *flags]


class TestCommand:
    def test_flags_of_the_launcher_the_file_and_the_command_line(self, tmp_path):
        config = tmp_path / "c.yaml"
        config.write_text("config_name: here\nper_device_train_batch_size: 4\nblock_size: 512\n")
        launcher = ("--num_processes", "4", "--num_cpu_threads_per_process", "3")
        flags = ("--config", str(config), "--block-size=256", "--lora_target_modules", "a", "b", "--use_peft")
        found = read_command(launch(*flags, launcher=launcher))
        assert found.processes == 4
        assert found.launcher == ["--num_cpu_threads_per_process", "3"]
        assert (found.model, found.seq_len, found.global_batch, found.method) == ("here", 256, 16, "lora")
        assert found.kept_values == {
            "config_name": "here",
            "block_size": "256",
            "lora_target_modules": ["a", "b"],
            "use_peft": True,
        }

    def test_the_global_batch_counts_data_parallel_ranks(self):
        script = REPOSITORY / "recipes" / "tp_pp" / "train.py"
        flags = ("--config_name", "x", "--tp_size", "2", "--per_device_train_batch_size", "8")
        assert read_command(launch(*flags, script=script, launcher=("--num_processes", "8"))).global_batch == 32

    def test_number_of_processes_in_the_config_file(self, tmp_path):
        config = tmp_path / "a.yaml"
        config.write_text("num_processes: 3\nnum_machines: 1\n")
        assert read_command(launch(launcher=("--config_file", str(config)))).processes == 3

    @pytest.mark.parametrize(
        "start",
        [
            ["accelerate", "launch"],
            ["/opt/venv/bin/accelerate", "launch"],
            ["accelerate-launch"],
            ["/opt/venv/bin/accelerate-launch"],
            ["python", "-m", "accelerate.commands.launch"],
            ["/usr/bin/python3.11", "-m", "accelerate.commands.launch"],
            ["python3", "-m", "accelerate.commands.accelerate_cli", "launch"],
        ],
    )
    def test_every_way_to_start_accelerate(self, start):
        found = read_command([*start, *launch("--block_size", "64")[2:]])
        assert (found.processes, found.seq_len, found.script) == (2, 64, RECIPE)

    @pytest.mark.parametrize(
        "start",
        [
            ["torchrun", "--nproc-per-node", "2"],
            ["/opt/venv/bin/torchrun", "--standalone", "--nproc_per_node=2", "--nnodes=1"],
            ["python", "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend", "c10d"],
        ],
    )
    def test_a_command_of_torchrun_is_one_of_accelerate(self, start):
        found = read_command([*start, str(RECIPE), "--block_size", "64", "--use_peft"])
        assert (found.processes, found.seq_len, found.script, found.method) == (2, 64, RECIPE, "lora")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "after --"),
            (["deepspeed", "train.py"], "deepspeed train.py"),
            (["python", "-m", "somewhere"], "python -m somewhere"),
            (["python", str(RECIPE)], "python"),
            (["accelerate", "config"], "accelerate config"),
            (["torchrun", "--nnodes", "2", str(RECIPE)], "2 machines"),
            (["torchrun", "--nproc-per-node", "many", str(RECIPE)], "--nproc-per-node is many"),
            (["torchrun", "--turbo", "2", str(RECIPE)], "--turbo"),
            (["torchrun", "train.py"], "train.py is not a file"),
            (launch(launcher=("--num_machines", "2")), "2 machines"),
            (launch(launcher=("--num_procs", "2")), "--num_procs"),
            (launch(script="no.py"), "no.py"),
            (launch(script=str(REPOSITORY / "tests" / "conftest.py")), "neither a recipe .* ScalingCallback"),
            (launch(script=str(REPOSITORY / "tests" / "workers" / "own_script.py")), "give --model and --seq-len"),
            (launch("stray"), "'stray'"),
            (launch("--block_size", "many"), "many"),
            (launch(script=REPOSITORY / "recipes" / "grpo" / "train.py"), "GRPO"),
            (launch(script=REPOSITORY / "recipes" / "vision" / "train.py"), "images"),
            (launch(script=REPOSITORY / "recipes" / "distillation" / "train.py"), "DistillationTrainer"),
            (launch(script=REPOSITORY / "recipes" / "sft" / "train.py"), "--model_name_or_path"),
        ],
    )
    def test_wrong_commands(self, words, message):
        with pytest.raises(UsageError, match=message):
            read_command(words)

    def test_a_script_of_the_user(self):
        script = REPOSITORY / "tests" / "workers" / "own_script.py"
        words = launch("--rows", "64", "--gradient_accumulation_steps", "2", "--use_peft", script=script)
        found = read_command(words, model="llama-3.2-1b", seq_len=16)
        assert (found.model, found.seq_len, found.global_batch, found.method) == ("llama-3.2-1b", 16, 32, "lora")
        assert found.precision(has_bf16=True) == "fp32"  # TrainingArguments' default, not the recipes'
        assert found.kept_values == {"rows": "64", "use_peft": True}
        with pytest.raises(UsageError, match=r"^model and seq_len are for other scripts"):
            read_command(launch(), model="llama-3.2-1b")


class TestChoosing:
    def test_candidates_are_different_layouts_and_micro_batches(self):
        found = plan("llama-3.1-8b", gpu=H100, gpus=8, top=1000)
        best = candidates(found, 6, can_run=lambda job: True)
        assert len({one.name for one in best}) == 6
        assert len({one.choice.estimate.job.layout for one in best}) > 1
        assert len({one.choice.estimate.job.micro_batch for one in best}) > 1
        fastest = found.choices[0].estimate.time.total
        assert all(one.choice.estimate.time.total < 1.5 * fastest for one in best)
        sharded = candidates(found, 6, can_run=lambda job: job.zero == 3 and job.layout.pp == 1)
        assert {one.choice.estimate.job.zero for one in sharded} == {3}

    def test_the_faster_half_runs_longer_and_a_failure_is_left_out(self):
        runs = []
        speeds = {"a": 10.0, "b": 30.0, "c": None, "d": 20.0, "e": 40.0}

        def run(name, steps):
            runs.append((name, steps))
            return speeds[name]

        successive_halving("abcde", 4, run, is_over=lambda: False)
        assert runs == [(name, 4) for name in "abcde"] + [(name, 8) for name in "ebd"] + [(name, 16) for name in "eb"]
        assert number_of_runs(5) == len(runs)

    def test_one_that_becomes_slower_loses_its_place(self):
        runs = []
        speeds = {"a": [50.0, 5.0], "b": [40.0, 40.0, 40.0], "c": [30.0, 30.0, 30.0], "d": [20.0], "e": [10.0]}

        def run(name, steps):
            runs.append(name)
            return speeds[name].pop(0)

        successive_halving("abcde", 1, run, is_over=lambda: False)
        assert runs == [*"abcde", *"abc", *"bc"]

    def test_no_run_begins_after_the_limit(self):
        runs = []
        successive_halving("abc", 1, lambda name, steps: runs.append(name), is_over=lambda: len(runs) == 2)
        assert runs == ["a", "b"]


class TestCorrection:
    @pytest.mark.parametrize(
        ("rate", "link"),
        [(0.5, 0.25), *(pytest.param(*each, marks=pytest.mark.long) for each in ((0.5, 1.0), (2.0, 1.0)))],
    )
    @pytest.mark.long
    def test_the_rates_of_a_slower_machine_are_found(self, rate, link):
        choices = plan("llama-3.1-8b", gpu=H100, gpus=8, top=1000).choices
        jobs = [choice.estimate.job for choice in choices[:6]]
        slower = replace(
            H100,
            achieved_bf16_tflops=H100.achieved_bf16_tflops * rate,
            achieved_memory_tb_s=(H100.achieved_memory_tb_s or 0.9 * H100.memory_tb_s) * rate,
            link_gb_s=H100.link_gb_s * link,
        )
        measured = [(job, job.tokens_per_step / estimate_job(replace(job, gpu=slower)).time.total) for job in jobs]
        found = correct(H100, measured, name="local-H100-80GB", source="test")
        assert found.rate == pytest.approx(rate, rel=0.2)
        assert found.error_before > 0.2
        assert found.error_after < 0.06
        assert (found.gpu.name, found.gpu.base) == ("local-H100-80GB", "H100-80GB")


class TestTrials:
    def trial(self, folder, script, **options):
        file = folder / "run.py"
        file.write_text(script)
        (folder / "out").mkdir()
        options = {"steps": 3, "timeout_s": 60.0, "environment": {}} | options
        return run_trial([sys.executable, str(file), str(folder / "out")], folder / "out", **options)

    def test_a_run_is_measured_after_its_first_steps_and_ended_with_its_processes(self, tmp_path):
        steps = []
        found = self.trial(
            tmp_path,
            """import json, pathlib, subprocess, sys, time
out = pathlib.Path(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
(out / "pid").write_text(str(child.pid))
with (out / "scaling.jsonl").open("a") as file:
    for step in range(1, 6):
        rate = {1: 1, 2: 2, 3: 100, 4: 300, 5: 200}[step]
        record = {"step": step, "scaling/tokens_per_s": rate, "gpu/memory_peak_gib": step / 2}
        print(json.dumps(record), file=file, flush=True)
time.sleep(600)
""",
            on_step=steps.append,
        )
        assert (found.tokens_per_s, found.memory_gib, found.error) == (200, 2.5, None)
        assert steps[-1] == 5
        assert not psutil.pid_exists(int((tmp_path / "out" / "pid").read_text()))

    @pytest.mark.parametrize(
        ("script", "error"),
        [
            ("b'0' * 2**60", "out of memory"),
            ("raise SystemExit('hfscale: error: --block_size is 0')", "--block_size is 0"),
            ("", "ended before 3 steps"),
        ],
    )
    def test_why_a_run_was_not_measured(self, tmp_path, script, error):
        found = self.trial(tmp_path, script)
        assert found.tokens_per_s is None
        assert error in found.error

    def test_a_run_without_time_is_ended(self, tmp_path):
        assert "within 1 s" in self.trial(tmp_path, "import time; time.sleep(600)", timeout_s=1.0).error

    def test_torchs_message_on_a_cpu(self, tmp_path):
        with pytest.raises(RuntimeError) as raised:
            torch.empty(2**60, dtype=torch.uint8)
        script = f"raise SystemExit({str(raised.value)!r})"
        assert self.trial(tmp_path, script).error == "out of memory"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps is 0"),
        (["--top", "0"], "--top is 0"),
        (["--deadline", "nan"], "--deadline is nan"),
        (["--budget", "3"], "--usd-per-gpu-hour"),
        (["--", "python", "train.py"], "python train.py"),
    ],
)
def test_wrong_usage(flags, message, capsys):
    assert main(["tune", *flags]) == 2
    assert message in capsys.readouterr().err


def test_error_in_the_json_is_the_relative_error_of_the_prediction(tmp_path):
    found = plan("llama-3.1-8b", gpu=H100, gpus=8, seq_len=4096)
    chosen = candidates(found, 3, can_run=lambda job: True)
    tuning = Tuning(command=read_command(launch("--config_name", "x")), plan=found, output_dir=tmp_path, ends=0.0)
    tuning.configurations = {candidate.name: candidate for candidate in chosen}
    measured = Trial(tokens_per_s=chosen[0].predicted_tokens_per_s / 1.25, memory_gib=1.0, seconds=1.0)
    failed = Trial(error="out of memory", seconds=1.0)
    tuning.results = {chosen[0].name: (measured, 3), chosen[1].name: (failed, 3)}
    first, second, third = tuning.to_dict()["configurations"]
    assert (first["error"], first["reason"]) == (pytest.approx(0.25), None)
    assert (second["error"], second["reason"]) == (None, "out of memory")
    assert third["error"] is None
    assert "not run" in third["reason"]


def test_a_configuration_that_was_changed_is_kept(tmp_path):
    found = plan("llama-3.1-8b", gpu=H100, gpus=8, seq_len=4096)
    asked = read_command(launch("--config_name", "x"))
    tuning = Tuning(command=asked, plan=found, output_dir=tmp_path, ends=0.0)
    tuning.choose(2)
    written = tuning.write_best(next(iter(tuning.configurations)))
    tuning.write_best(list(tuning.configurations)[-1])  # nothing was changed
    words = launched_words(tmp_path / "best" / "launch.sh", tmp_path, cwd=tmp_path.parent)
    assert {str(path) for path in written} > {words[words.index(flag) + 1] for flag in ("--config_file", "--config")}
    recipe = tmp_path / "best" / "recipe.yaml"
    recipe.write_text("mine: true\n")
    again = replace(tuning, configurations={})
    with pytest.raises(UsageError, match=r"best/recipe.yaml was changed.*force"):
        again.choose(2)  # before anything is measured
    assert recipe.read_text() == "mine: true\n"
    replace(again, force=True).choose(2)


@pytest.fixture
def slow_cpu(tmp_path, monkeypatch):
    """A hardware file that describes this machine, so that it need not be measured."""
    settings = tmp_path / "settings" / "hfscale"
    settings.mkdir(parents=True)
    (settings / "hardware.toml").write_text(
        """[[accelerator]]
name = "local-cpu"
fp32_tflops = 0.1
achieved_fp32_tflops = 0.1
memory_tb_s = 0.01
achieved_memory_tb_s = 0.01
achieved_link_gb_s = 1.0
hop_us = 500.0
memory_gib = 8.0
source = "test"
date = "2026"
"""
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(settings.parent))


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_script_of_the_user_is_measured_and_its_best_command_runs(tmp_path, slow_cpu):
    tiny_model().config.save_pretrained(tmp_path / "model")
    script = REPOSITORY / "tests" / "workers" / "own_script.py"
    argv = ["tune", "--steps", "2", "--top", "2", "--gpu", "local-cpu", "--output-dir", "tuned", "--json"]
    argv += ["--model", str(tmp_path / "model"), "--seq-len", "16", "--", "torchrun", "--nproc-per-node", "2"]
    env = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}
    run = partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True, check=False, env=env)
    done = run([sys.executable, "-m", "hfscale", *argv, str(script), "--rows", "256", "--use_cpu", "true"])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["chosen"] is not None, answer  # on a CPU Accelerate turns FSDP into DDP, which the callback refuses
    best = (tmp_path / "tuned" / "best" / "launch.sh").read_text()
    assert "--rows 256 --use_cpu true" in best
    assert "--config " not in best
    command = launched_words(tmp_path / "tuned" / "best" / "launch.sh", tmp_path)
    assert command[:2] == ["accelerate", "launch"]
    more = ["--max_steps", "2", "--output_dir", "out", "--report_to", "none"]
    again = run([sys.executable, "-m", "accelerate.commands.launch", *command[2:], *more])
    assert again.returncode == 0, again.stderr[-3000:]


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_three_configurations_on_a_cpu(tmp_path, slow_cpu):
    argv = ["tune", "--steps", "3", "--top", "3", "--gpu", "local-cpu", "--output-dir", "tuned", "--json", "--"]
    command = launch("--block_size", "128", "--learning_rate", "1e-3")
    done = subprocess.run(
        [sys.executable, "-m", "hfscale", *argv, *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    rows = {row["name"]: row for row in answer["configurations"]}
    assert len(rows) == 3
    assert len({row["strategy"] for row in rows.values()}) == 3
    for row in rows.values():
        assert row["error"] == row["predicted_tokens_per_s"] / row["measured_tokens_per_s"] - 1
        assert row["reason"] is None
    assert answer["chosen"] == max(rows, key=lambda name: rows[name]["measured_tokens_per_s"])
    assert sorted(row["steps"] for row in rows.values()) == [3, 6, 6]
    assert len([line for line in done.stderr.splitlines() if "tokens/s" in line]) == number_of_runs(3)
    recipe = (tmp_path / "tuned" / "best" / "recipe.yaml").read_text()
    assert 'learning_rate: "1e-3"' in recipe
    assert "--max_steps" not in (tmp_path / "tuned" / "best" / "launch.sh").read_text()
    assert answer["hardware"]["median_error_after"] <= answer["hardware"]["median_error_before"]
    assert find_accelerator("local-cpu").source.startswith("test; corrected by hfscale tune from 3 runs")


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("from trl import (\n    DistillationTrainer,  # of TRL\n    ModelConfig,\n)", "DistillationTrainer"),
        ("from trl.experimental.gkd import GKDTrainer", "GKDTrainer"),
        ("from trl import ModelConfig\nfrom transformers import Seq2SeqTrainer", None),
        ("from trl import (", None),
    ],
)
def test_a_trainer_of_trl_is_found_in_the_imports_alone(script, found):
    assert launch_command._trainer_of_trl(script) == found
