"""The files that `hfscale plan --task ... --emit` writes train."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from conftest import REPOSITORY, accelerate_launch
from launch_words import launched_words
from recipe_runs import save_model

from hfscale import estimate, plan
from hfscale.planner.emit import emit
from hfscale.planner.plan import Choice
from hfscale.recipe import corpus

pytestmark = pytest.mark.finetuning

ROWS = {"dpo": corpus.preference_records, "grpo": corpus.prompt_records}
FLAGS = {"dpo": (), "grpo": ("--reward_functions", "hfscale.recipe.rewards:similarity_to_answer")}
OPTIONS = {
    "dpo": {
        "layout": {"dp_shard": 2},
        "zero": 3,
        "activation_checkpointing": "full",
        "micro_batch": 1,
        "global_batch": 4,
    },
    "grpo": {
        "layout": {"dp_replicate": 2},
        "micro_batch": 2,
        "global_batch": 8,
        "num_generations": 2,
        "max_completion_length": 8,
        "generation_rounds": 2,
    },
}


@pytest.mark.parametrize("task", OPTIONS)
def test_the_emitted_command_trains(tmp_path, task):
    model = save_model(tmp_path / "model", max_position_embeddings=2048)
    options = {"gpu": "H100-80GB", "seq_len": 128, "task": task}
    length = {"max_completion_length": 8} if task == "grpo" else {}
    found = plan(str(model), gpus=1, **options, **length)
    chosen = Choice(estimate=estimate(str(model), **options, **OPTIONS[task]))
    emit(replace(found, choices=(chosen,)), tmp_path / "plan")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in islice(ROWS[task]("train"), 32)), encoding="utf-8")
    command = launched_words(tmp_path / "plan" / "launch.sh", tmp_path)
    flags = [
        "--train_file",
        str(rows),
        "--validation_split_percentage",
        "0",
        "--max_steps",
        "2",
        "--disable_tqdm",
        "true",
    ]
    done = accelerate_launch(
        REPOSITORY,
        Path(command[3]),
        2,
        command[4],
        *command[5:],
        *flags,
        *FLAGS[task],
        "--output_dir",
        tmp_path / "out",
    )
    assert done.code == 0, done.err[-4000:]
    status = json.loads((tmp_path / "out" / "hfscale_status.json").read_text(encoding="utf-8"))
    assert (status["status"], status["step"]) == ("completed", 2)
