"""What only a CUDA GPU can show: `make test-gpu`."""

import json

import pytest
import torch
from conftest import RECIPE

pytestmark = pytest.mark.gpu


def test_the_recipe_trains_in_bf16_and_knows_the_gpu(python, tmp_path):
    assert torch.cuda.is_available(), "make test-gpu needs a CUDA GPU"
    done = python(
        RECIPE,
        "--max_steps",
        "20",
        "--logging_steps",
        "10",
        "--block_size",
        "1024",
        "--output_dir",
        "out",
        "--per_device_train_batch_size",
        "8",
        "--max_eval_samples",
        "8",
    )
    assert done.code == 0, done.err[-4000:]
    record = json.loads((tmp_path / "out" / "scaling.jsonl").read_text().splitlines()[-1])
    assert 0 < record["scaling/mfu"] < 1
    assert 0 < record["gpu/memory_peak_gib"] < torch.cuda.get_device_properties(0).total_memory / 2**30
    assert done.lines("hfscale: strategy") == ["hfscale: strategy single on 1 processes (cuda)"]
