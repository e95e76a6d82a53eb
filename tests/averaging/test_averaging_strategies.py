"""Averaged weights under every strategy: a reference in float64, an exact resume, another layout, and the export."""

import os
import time
from pathlib import Path

import pytest
import torch
from average_runs import run, stored
from forked_ranks import run_ranks
from tiny import tiny_trainer
from transformers import AutoModelForCausalLM

from hfscale import WeightAveragingCallback

EMA = {"ema_decay": 0.9, "evaluate_average": True}
LAST = {"average_last": 2, "average_every_steps": 1, "evaluate_average": True, "average_device": "cpu"}
SHORT = ("ddp", "pp")
LAYOUTS = (
    "fsdp2",
    "zero1",
    "zero2",
    "zero3",
    "hsdp",
    "native-fsdp",
    "native-tp",
    "native-ep",
    "tp",
    "dp",
    "ep",
    "tp-pp",
)
DTYPE_BOUND = 1e-6
ALL = [
    *(pytest.param(layout, EMA, id=layout) for layout in SHORT),
    *(pytest.param(layout, EMA, id=layout, marks=pytest.mark.long) for layout in LAYOUTS),
    *(pytest.param(layout, LAST, id=f"{layout}-last", marks=pytest.mark.long) for layout in ("ddp", "fsdp2", "zero1")),
]


def assert_equal(first, second):
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.world(2)
@pytest.mark.parametrize(("layout", "options"), ALL)
def test_the_average_is_right_resumes_and_is_exported(layout, options, tmp_path):
    found = run(layout, tmp_path, options)
    for of_rank in found:
        assert of_rank["differences"]
        assert max(of_rank["differences"]) <= DTYPE_BOUND
        assert of_rank["changed"] == []
    average = stored(tmp_path / "out" / "checkpoint-4")
    assert_equal(average, stored(tmp_path / "resumed" / "checkpoint-4"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "average", dtype=torch.float32)
    exported = dict(model.named_parameters())
    assert set(average) <= set(exported)
    for name, tensor in average.items():
        assert torch.allclose(exported[name], tensor, atol=1e-7, rtol=0), name
    assert len(average) == len({id(one) for one in exported.values()})


@pytest.mark.world(2)
@pytest.mark.long
def test_another_layout_resumes_with_the_same_bits(tmp_path):
    """Each continues from the checkpoint of the one before: one process, DDP, FSDP2, and the stages of ZeRO."""
    run("single", tmp_path / "first", EMA)
    checkpoint = tmp_path / "first" / "out" / "checkpoint-2"
    for number, layout in enumerate(("ddp", "fsdp2", "zero3", "zero1", "single", "zero2")):
        steps = 4 + 2 * number
        run(layout, tmp_path / layout, EMA, source=checkpoint, steps=steps)
        checkpoint = tmp_path / layout / "resumed" / f"checkpoint-{steps}"


@pytest.mark.world(2)
@pytest.mark.long
def test_another_layout_of_parallel_trainer_resumes_with_the_same_bits(tmp_path):
    run("pp", tmp_path / "pp", EMA)
    for layout in ("tp", "dp", "tp-pp"):
        run(layout, tmp_path / layout, EMA, source=tmp_path / "pp" / "out" / "checkpoint-2")


def train_with_writers_on_all_ranks(folder):
    """Train with a Trainer that writes its final files on every rank, on the second one later."""
    torch.set_num_threads(1)
    trainer = tiny_trainer(folder / "out", WeightAveragingCallback(ema_decay=0.9), max_steps=2, save_strategy="no")
    save = trainer._save

    def save_everywhere(output_dir=None, state_dict=None):
        save(output_dir, state_dict)
        if os.environ["RANK"] == "1":
            time.sleep(1.0)
        (Path(output_dir) / f"README-{os.environ['RANK']}.md").write_text("a model card")

    trainer._save = save_everywhere
    trainer.train()


@pytest.mark.world(2)
def test_the_average_is_complete_when_a_trainer_writes_on_every_rank(tmp_path):
    """`SentenceTransformerTrainer` does: the folder must not get its name before all have written."""
    codes = run_ranks(2, train_with_writers_on_all_ranks, tmp_path, log=tmp_path / "log", timeout_s=100)
    assert codes == [0, 0], [path.read_text()[-3000:] for path in (tmp_path / "log").iterdir()]
    assert {path.name for path in (tmp_path / "out" / "average").glob("*.md")} == {"README-0.md", "README-1.md"}
