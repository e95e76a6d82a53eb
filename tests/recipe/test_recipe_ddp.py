"""The DDP recipe, launched as users launch it: training, a lost machine, relaunch, completion."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from conftest import RECIPE, REPOSITORY, run_process
from fork_client import fork_server

from hfscale import latest_checkpoint
from hfscale.checkpoint.store import verify

pytestmark = pytest.mark.recipes
QUICK = [
    "--block_size",
    "64",
    "--per_device_train_batch_size",
    "2",
    "--max_train_samples",
    "64",
    "--max_eval_samples",
    "4",
    "--max_steps",
    "6",
    "--save_steps",
    "2",
    "--logging_steps",
    "1",
    "--dataloader_num_workers",
    "0",
    "--disable_tqdm",
    "true",
    "--lr_scheduler_type",
    "linear",
]


def records(output_dir):
    return [json.loads(line) for line in (output_dir / "scaling.jsonl").read_text().splitlines()]


def status(output_dir):
    return json.loads((output_dir / "hfscale_status.json").read_text())


def losses(output_dir):
    return {record["step"]: record["loss"] for record in records(output_dir)}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A complete run of two processes, with which the tests below compare theirs."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    config = str(REPOSITORY / "accelerate_configs" / "ddp.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    done = run_process([*command, "--num_processes", "2", str(RECIPE), *QUICK, "--output_dir", "out"], folder)
    assert done.code == 0, done.err[-4000:]
    return folder / "out", done


def in_time(interrupt, folder):
    """Interrupt runs until one is interrupted before its end: it has few steps, and this process may be slow.

    Args:
        interrupt: a function that runs in a new output directory and returns whether the interruption was in time.
        folder: where the output directories are.

    Returns:
        The output directory.
    """
    for number in range(5):
        if interrupt(folder / f"out-{number}"):
            return folder / f"out-{number}"
    raise AssertionError("five runs were interrupted too late")


@pytest.mark.world(2)
class TestTwoProcesses:
    def test_trains_and_prints_a_summary(self, uninterrupted):
        output_dir, done = uninterrupted
        text = re.sub(r"\s*│\s*", " ", done.out)
        last = records(output_dir)[-1]["loss"]
        for wanted in (
            "6 steps done",
            f"-> {last:.4f}",
            "evaluation loss",
            "tokens/s per process, 2 processes",
            "x 1: ",
            "checkpoint-6 (committed",
            "scaling.jsonl",
            "--max_steps 12",
        ):
            assert wanted in text, text
        assert text.count("steps done") == 1

    def test_writes_the_promised_files(self, uninterrupted):
        output_dir, _ = uninterrupted
        assert status(output_dir) == {"status": "completed", "step": 6, "checkpoint": "checkpoint-6", "reason": None}
        assert latest_checkpoint(output_dir) == str(output_dir / "checkpoint-6")
        manifest = verify(output_dir / "checkpoint-6")
        assert (manifest.strategy, manifest.world_size, manifest.global_batch_size) == ("ddp", 2, 4)
        tokens = [record["scaling/tokens_seen"] for record in records(output_dir)]
        assert tokens == [2 * 2 * 64 * step for step in range(1, 7)]

    def test_from_pretrained_loads_the_output_folder(self, uninterrupted):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        output_dir, _ = uninterrupted
        model = AutoModelForCausalLM.from_pretrained(output_dir)
        tokenizer = AutoTokenizer.from_pretrained(output_dir)
        assert 3e6 < model.num_parameters() < 6e6
        assert tokenizer.decode(tokenizer("def main():\n    return 1\n")["input_ids"]) == "def main():\n    return 1\n"

    def test_a_killed_run_resumes_with_the_same_losses(self, uninterrupted, launch, tmp_path):
        """It is killed after its first commit; the relaunched command gives the losses of the uninterrupted run."""
        config = REPOSITORY / "accelerate_configs" / "ddp.yaml"

        def kill(output_dir):
            """Return whether the kill came before the end of the run."""
            log = output_dir.with_suffix(".log")
            flags = [*QUICK, "--output_dir", output_dir.name]
            command = ["--config_file", str(config), "--num_processes", "2", str(RECIPE), *flags]
            job = fork_server().start("launch", command, cwd=tmp_path, env=dict(os.environ), out=log, err=log)
            fork_server().wait_until(job, lambda: latest_checkpoint(output_dir) is not None, 240)
            with suppress(psutil.NoSuchProcess):
                ranks = psutil.Process(job.pids[0]).children()
                job.signal(signal.SIGKILL)
                for rank in ranks:
                    rank.kill()
                psutil.wait_procs(ranks, timeout=60)  # until the lock of the output directory is free
            codes = fork_server().wait(job, 240)
            assert codes in ([-signal.SIGKILL], [0]), log.read_text()
            return status(output_dir)["status"] == "running"

        output_dir = in_time(kill, tmp_path)
        assert latest_checkpoint(output_dir) is not None
        done = launch(2, RECIPE, *QUICK, "--output_dir", output_dir.name)
        assert done.code == 0, done.err[-4000:]
        assert len(done.lines("hfscale: continues from checkpoint-")) == 1
        assert losses(output_dir) == losses(uninterrupted[0])

    def test_a_preempted_run_ends_with_75_and_resumes_with_the_same_losses(self, uninterrupted, launch, tmp_path):
        """SIGTERM goes to one rank, which has data loader workers. The launcher turns exit code 75 into 1."""
        saved = {"rng_state_0.pth", "rng_state_1.pth"}
        flags = [*QUICK, "--save_steps", "1", "--dataloader_num_workers", "1", "--output_dir"]
        config = REPOSITORY / "accelerate_configs" / "ddp.yaml"
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        command += ["--num_processes", "2", str(RECIPE), *flags]

        def terminate(output_dir):
            """Return whether the signal came before the end of the run."""
            with output_dir.with_suffix(".log").open("w") as log:
                process = subprocess.Popen([*command, output_dir.name], cwd=tmp_path, stdout=log, stderr=log)
                deadline = time.monotonic() + 240
                while not (output_dir / "hfscale_status.json").is_file() and time.monotonic() < deadline:
                    time.sleep(0.005)
                with suppress(psutil.NoSuchProcess, IndexError):
                    psutil.Process(process.pid).children()[-1].terminate()
                return process.wait(240) == 1

        output_dir = in_time(terminate, tmp_path)
        said = output_dir.with_suffix(".log").read_text()
        assert len(re.findall(r"exitcode +: 75", said)) >= 1, said
        assert set(re.findall(r"exitcode +: (\S+)", said)) == {"75"}, said
        found = status(output_dir)
        step = found["step"]
        assert 1 <= step < 6
        assert found == {
            "status": "preempted",
            "step": step,
            "checkpoint": f"checkpoint-{step}",
            "reason": f"SIGTERM: checkpoint-{step} is committed",
        }
        assert saved <= set(verify(output_dir / f"checkpoint-{step}").files)
        assert "hfscale: preempted by SIGTERM" in said
        assert "steps done" not in said
        assert not (output_dir / "model.safetensors").exists(), "it was exported"
        done = launch(2, RECIPE, *flags, output_dir.name)
        assert done.code == 0, done.err[-4000:]
        assert losses(output_dir) == losses(uninterrupted[0])

    def test_a_damaged_checkpoint_is_skipped_for_the_one_before(self, uninterrupted, launch, tmp_path):
        shutil.copytree(uninterrupted[0], tmp_path / "out")
        with (tmp_path / "out" / "checkpoint-6" / "model.safetensors").open("r+b") as file:
            file.seek(100_000)
            file.write(b"\xff\xff")
        done = launch(2, RECIPE, *QUICK, "--output_dir", "out")
        assert done.code == 0, done.err[-4000:]
        assert "the content of model.safetensors has changed" in done.err
        assert len(done.lines("hfscale: continues from checkpoint-4")) == 1
        assert losses(tmp_path / "out") == losses(uninterrupted[0])


def test_fewer_processes_keep_the_global_batch_the_samples_and_the_rate(uninterrupted, python, tmp_path):
    """One of two processes resumes alone, with the losses and learning rates of the uninterrupted run."""
    shutil.copytree(uninterrupted[0], tmp_path / "out")
    for step in (4, 6):
        shutil.rmtree(tmp_path / "out" / f"checkpoint-{step}")
    done = python(RECIPE, *QUICK, "--output_dir", "out")
    assert done.code == 0, done.err[-4000:]
    assert "1 process instead of 2: the global batch stays 4 sequences, by 2 per device x 2" in done.err
    expected, found = losses(uninterrupted[0]), losses(tmp_path / "out")
    assert found == pytest.approx(expected, abs=2e-5)
    assert found != pytest.approx({step: loss + 1e-3 for step, loss in expected.items()}, abs=2e-5)
    rates = [
        [record["learning_rate"] for record in records(folder)] for folder in (uninterrupted[0], tmp_path / "out")
    ]
    assert rates[0] == rates[1]


def test_one_process_resumes_by_every_form_of_the_flag(python, tmp_path):
    def train(*flags):
        done = python(RECIPE, *QUICK, "--output_dir", "out", *flags)
        assert done.code == 0, done.err[-4000:]
        return done

    train("--max_steps", "2")
    first = losses(tmp_path / "out")
    again = train("--max_steps", "2", "--resume_from_checkpoint", "true")
    assert "nothing to do" in again.err
    train("--max_steps", "3", "--resume_from_checkpoint", "out/checkpoint-2")
    assert list(losses(tmp_path / "out")) == [1, 2, 3]
    train("--max_steps", "2", "--resume_from_checkpoint", "false")
    assert losses(tmp_path / "out") == first
    assert (tmp_path / "out" / "checkpoint-3.superseded").is_dir()


def test_lora_from_a_checkpoint_with_a_yaml_and_early_stopping(uninterrupted, python, tmp_path):
    (tmp_path / "run.yaml").write_text(
        f"model_name_or_path: {uninterrupted[0]}\nuse_peft: true\nlora_r: 4\nlora_target_modules: [q_proj, v_proj]\n"
        "train_file: text.txt\nblock_size: 32\nmax_steps: 20\nlearning_rate: 0\nlogging_steps: 1\nsave_steps: 1\n"
        "eval_strategy: steps\neval_steps: 1\nearly_stopping_patience: 2\nvalidation_file: text.txt\n"
        "per_device_train_batch_size: 1\noutput_dir: out\ndataloader_num_workers: 0\npeak_tflops: 1\n"
    )
    (tmp_path / "text.txt").write_text("".join(f"line {number} of a text of one's own\n" for number in range(200)))
    done = python(RECIPE, "--config", "run.yaml", "--lora_r", "2")
    assert done.code == 0, done.err[-4000:]
    adapter = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (adapter["r"], sorted(adapter["target_modules"])) == (2, ["q_proj", "v_proj"])
    # With a learning rate of zero no evaluation is better than the first: two more, and it stops.
    assert status(tmp_path / "out")["step"] == 3
    assert all(record["scaling/mfu"] > 0 for record in records(tmp_path / "out"))
    trainable = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    assert trainable["global_step"] == 3


def test_from_scratch_with_a_config_and_options_of_hugging_face(uninterrupted, python, tmp_path):
    """Compiled, with activation checkpointing, another optimizer, streaming text."""
    config = json.loads((uninterrupted[0] / "config.json").read_text()) | {"num_hidden_layers": 1, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 8}))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": "word " * 40}) + "\n" for _ in range(50)))
    done = python(
        RECIPE,
        "--config_name",
        "config.json",
        "--tokenizer_name",
        uninterrupted[0],
        "--train_file",
        "text.jsonl",
        "--streaming",
        "--max_steps",
        "3",
        "--block_size",
        "32",
        "--per_device_train_batch_size",
        "2",
        "--optim",
        "sgd",
        "--base_global_batch_size",
        "1",
        "--learning_rate",
        "0.1",
        "--lr_scheduler_type",
        "constant",
        "--activation_checkpointing",
        "--torch_compile",
        "--torch_compile_backend",
        "eager",
        "--logging_steps",
        "1",
        "--output_dir",
        "out",
        "--dataloader_num_workers",
        "0",
        "--save_strategy",
        "no",
    )
    assert done.code == 0, done.err[-4000:]
    assert [record["learning_rate"] for record in records(tmp_path / "out")] == pytest.approx([0.2] * 3)
    assert [record["scaling/tokens_seen"] for record in records(tmp_path / "out")] == [64, 128, 192]
    assert "save_strategy is 'no'" in done.err
