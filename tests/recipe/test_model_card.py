"""The card of an exported model: what it says of the run, and that a second run replaces it."""

import hashlib
import json

import pytest
from huggingface_hub import ModelCard
from tiny import tiny_trainer

from hfscale import ScalingCallback, ScalingMetricsCallback
from hfscale.recipe.finish import finish_run
from hfscale.recipe.model_card import write_model_card
from hfscale.report.card import card_facts

BEGIN = 1_790_000_000.0


def write_run(folder, *, device="NVIDIA H100", power=None):
    """Write the files of a run on 4 GPUs that was launched twice, with a log every 10 minutes."""
    folder.mkdir()
    records = [
        {"step": step, "time": BEGIN + 60 * step, "loss": 5.0, "scaling/tokens_seen": 1e6 * step, "scaling/usd": step}
        | ({"gpu/power_w": power} if power else {})
        for step in range(10, 61, 10)
    ]
    workload = {"strategy": "fsdp2", "world_size": 4, "device": device, "precision": "bf16", "global_batch_size": 64}
    events = [
        {"event": "launch", "step": 0, "time": BEGIN, "world_size": 4},
        {"event": "workload", "step": 10, "time": BEGIN + 600, "sequence_length": 4096, **workload},
        {"event": "save", "step": 30, "time": BEGIN + 1800, "seconds": 1.0},
        {"event": "launch", "step": 30, "time": BEGIN + 1800, "world_size": 4, "previous_alive": BEGIN + 1800},
        {"event": "end", "step": 60, "time": BEGIN + 3600, "seconds": {}},
    ]
    (folder / "scaling.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    (folder / "hfscale_timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    return folder


def test_facts_of_a_run(tmp_path):
    assert dict(card_facts(write_run(tmp_path / "run", power=700.0))) == {
        "layout": "fsdp2 on 4 processes",
        "hardware": "NVIDIA H100",
        "precision": "bf16",
        "batch": "64 sequences of 4,096 tokens",
        "steps": "60",
        "tokens": "60M",
        "time": "1 h, 1 restart, 4 process-hours",
        "cost": "$60.00",
        "energy": "2.33 kWh of the GPUs, from their power at 6 logs",  # 4 x 700 W over 5 x 10 minutes
    }


def test_what_is_not_known_is_left_out(tmp_path):
    facts = dict(card_facts(write_run(tmp_path / "run", device="")))
    assert "energy" not in facts
    assert "hardware" not in facts


@pytest.fixture
def trainer(tmp_path):
    trainer = tiny_trainer(tmp_path / "out", ScalingMetricsCallback(usd_per_gpu_hour=2), max_steps=2, logging_steps=1)
    trainer.train()
    trainer.save_model()
    return trainer


def test_the_card_of_a_model_has_its_run_and_its_checksums_once(tmp_path, trainer):
    path = tmp_path / "out" / "README.md"
    path.write_text("---\nlicense: mit\nlibrary_name: peft\n---\n# Mine\n\nKept.\n")
    for _ in range(2):
        write_model_card(trainer, tmp_path / "out")
    card = ModelCard.load(path)
    assert card.data.license == "mit"
    assert card.data.library_name == "peft"
    assert card.data.tags == ["hfscale"]
    assert card.text.lstrip().startswith("# Mine\n\nKept.\n")
    assert card.text.count("## How it was trained") == 1
    assert "| layout | single on 1 process |" in card.text
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert f"| `model.safetensors` | `{hashlib.sha256(weights).hexdigest()}` |" in card.text


def test_a_new_card_names_the_base_model_of_the_hub_and_no_folder_of_this_machine(tmp_path, trainer):
    trainer.model.config.name_or_path = str(tmp_path)
    write_model_card(trainer, tmp_path / "out")
    assert ModelCard.load(tmp_path / "out" / "README.md").data.base_model is None
    trainer.model.config.name_or_path = "HuggingFaceTB/SmolLM2-135M"
    write_model_card(trainer, tmp_path / "out")
    assert ModelCard.load(tmp_path / "out" / "README.md").data.base_model == "HuggingFaceTB/SmolLM2-135M"
    assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text()


def test_text_of_the_run_stays_in_its_cell(tmp_path, trainer):
    timeline = tmp_path / "out" / "hfscale_timeline.jsonl"
    events = [json.loads(line) for line in timeline.read_text().splitlines()]
    for event in events:
        if event["event"] == "workload":
            event["device"] = "x | <script>alert(1)</script>\n# Title `"
    timeline.write_text("".join(json.dumps(event) + "\n" for event in events))
    write_model_card(trainer, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| hardware | x \\| &lt;script>alert(1)&lt;/script> # Title ' |" in text
    assert "<script>" not in text


def test_a_card_that_cannot_be_written_does_not_end_a_completed_run(tmp_path, log):
    trainer = tiny_trainer(tmp_path, ScalingCallback(), max_steps=2, logging_steps=1)
    trainer.train()
    (tmp_path / "README.md").write_text("---\n[not: yaml\n---\n# Mine\n")
    finish_run(trainer, {"train_loss": 1.0})
    assert (tmp_path / "README.md").read_text().endswith("# Mine\n")
    assert "writing the model card failed" in log.text
    assert (tmp_path / "all_results.json").is_file()
