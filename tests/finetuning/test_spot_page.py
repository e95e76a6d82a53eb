"""The script of docs/trl_spot.md runs, is preempted, loses its disk, and resumes exactly on the next machine."""

import json
import re
import shutil

import pytest
from conftest import REPOSITORY
from tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.finetuning

PAGE = REPOSITORY / "docs" / "trl_spot.md"
STEPS = 6
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def script_of_the_page(remote, *more):
    """Return the script with a model, data and a store that are here, and a run of six steps that logs each."""
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    small = (
        ('"Qwen/Qwen3-0.6B"', '"model"'),
        (
            'load_dataset("trl-lib/Capybara", split="train")',
            'load_dataset("json", data_files="data.jsonl", split="train")',
        ),
        ('"s3://my-bucket/sft"', repr(remote)),
        ("max_length=2048", f"max_length=16, use_cpu=True, max_steps={STEPS}"),
        ("logging_steps=10", "logging_steps=1"),
        ("callbacks=[scaling]", f"callbacks=[{', '.join(['scaling', *more])}]"),
    )
    for original, replacement in small:
        assert script.count(original) == 1, original
        script = script.replace(original, replacement)
    return "from tests_here import Notice\n" + script if more else script


NOTICE = """
import os, signal
from transformers import TrainerCallback
from hfscale.checkpoint.preemption import stop

stop.PreemptionStop.exchange_every_s = 0.0  # these steps take milliseconds: the ranks ask each other at each

class Notice(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture
def machine(tmp_path, python):
    model = tiny_model()
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"w{row % 40 + 3} w{row % 7 + 2} w9"},
                {"role": "assistant", "content": f"w{row % 11 + 20} w{row % 5 + 30} w8 w7"},
            ]
        }
        for row in range(64)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tests_here.py").write_text(NOTICE)

    def start(name, script):
        (tmp_path / name).write_text(script)
        return python(name, env={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"})

    return start


def losses(folder):
    rows = [json.loads(line) for line in (folder / "scaling.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_the_script_survives_a_notice_and_the_loss_of_the_disk(machine, tmp_path):
    run, store = tmp_path / "runs" / "sft", f"file://{tmp_path}/store"
    script = script_of_the_page(f"file://{tmp_path}/other-store")
    assert "hfscale" in script
    done = machine("complete.py", script)
    assert done.code == 0, done.err[-4000:]
    assert f"step {STEPS}/{STEPS}  loss" in done.out.replace("\r", "\n") + done.err
    assert (run / "model.safetensors").is_file()
    complete = losses(run)
    assert sorted(complete) == list(range(1, STEPS + 1))
    shutil.rmtree(run)

    stopped = machine("stopped.py", script_of_the_page(store, "Notice()"))
    assert stopped.code == 75, stopped.err[-4000:]
    (shown,) = re.findall(r"hfscale: SIGTERM.*: (every process stops after step) 431 (and saves it)", PAGE.read_text())
    assert f"{shown[0]} 4 {shown[1]}" in stopped.err
    assert json.loads((run / "hfscale_status.json").read_text())["status"] == "preempted"
    assert not (run / "model.safetensors").exists(), "save_model was reached"
    shutil.rmtree(run)  # the next machine

    resumed = machine("resumed.py", script_of_the_page(store))
    assert resumed.code == 0, resumed.err[-4000:]
    assert (run / "model.safetensors").is_file()
    again = losses(run)
    assert sorted(again) == [5, 6]
    assert again == {step: complete[step] for step in again}
