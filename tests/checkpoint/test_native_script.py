"""The script of docs/experts.md: trained on two ranks, killed, and resumed under another layout."""

import json
import re
import runpy
import shutil

import pytest
from conftest import REPOSITORY
from forked_ranks import run_ranks
from native_runs import make_model, output
from tiny import tiny_tokenizer

from hfscale.checkpoint.store import verify

CHANGES = {
    "Qwen/Qwen3-30B-A3B": "model",
    "TrainingArguments(": "TrainingArguments(use_cpu=True, logging_steps=1, report_to='none', ",
    "max_steps=2000, save_steps=200": "max_steps=6, save_steps=3",
    "fsdp_size=8, ep_size=8": "fsdp_size=2, ep_size=2",
}


def script(**changes):
    """The first Python block of the page, with a model, a text and sizes of this test."""
    page = (REPOSITORY / "docs" / "experts.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    for before, after in (CHANGES | changes).items():
        assert before in code, before
        code = code.replace(before, after)
    return code


def launch(folder, code, ranks=2):
    (folder / "train.py").write_text(code)

    def run():
        import os

        os.chdir(folder)
        runpy.run_path("train.py", run_name="__main__")

    codes = run_ranks(ranks, run, log=folder / "log", timeout_s=180.0)
    assert codes == [0] * ranks, output(folder)[-8000:]


def losses(folder):
    lines = (folder / "runs" / "experts" / "scaling.jsonl").read_text().splitlines()
    return {log["step"]: log["loss"] for log in map(json.loads, lines)}


@pytest.mark.world(2)
@pytest.mark.long
def test_the_script_resumes_under_another_layout(tmp_path):
    make_model(tmp_path / "model", max_position_embeddings=2048)
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    text = [" ".join(f"w{2 + (row * 7 + word * word) % 60}" for word in range(16)) for row in range(64)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in text))
    launch(tmp_path, script())
    whole = losses(tmp_path)
    checkpoints = tmp_path / "runs" / "experts"
    shutil.rmtree(checkpoints / "checkpoint-6")
    assert verify(checkpoints / "checkpoint-3").strategy == "native"
    launch(tmp_path, script(**{"fsdp_size=8, ep_size=8": "dp_replicate_size=2"}))
    layouts = {step: verify(checkpoints / f"checkpoint-{step}").layout for step in (3, 6)}
    assert (layouts[3]["ep"], layouts[6]["ep"], layouts[6]["dp_replicate"]) == (2, 1, 2)  # the first three are kept
    assert list(whole) == [1, 2, 3, 4, 5, 6]
    assert losses(tmp_path) == pytest.approx(whole, abs=2e-3)  # products in bf16
    assert (checkpoints / "model.safetensors").is_file()
