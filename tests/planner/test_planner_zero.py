"""The planner's bytes of ZeRO's states, compared with those that DeepSpeed allocates under the shipped configs."""

import gc
import json
from pathlib import Path

import deepspeed
import pytest
import torch
from conftest import REPOSITORY
from forked_ranks import run_ranks
from planner_jobs import job

from hfscale.planner.frameworks import find_framework
from hfscale.planner.memory import state_bytes

SIZES = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "zero_allow_untested_optimizer": True,
}


def storages():
    """Return the sizes of all tensors' memory by address."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def count_bytes(stage, result):
    """Take two steps, and write the bytes per parameter before the update of the third."""
    config = json.loads((REPOSITORY / "ds_configs" / f"zero{stage}.json").read_text())
    for section, value in SIZES.items():
        config[section] = config.get(section, {}) | value if isinstance(value, dict) else value
    del config["train_batch_size"]
    config["zero_optimization"] |= {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
    others = sum(storages().values())
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(8)))
    parameters = sum(p.numel() for p in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    for micro_batch in range(4):
        loss = engine(torch.ones(1, 128, dtype=torch.bfloat16)).float().square().mean()
        engine.backward(loss)
        found = sum(storages().values()) - others
        if micro_batch < 3:
            engine.step()
    Path(result).write_text(str(found / parameters))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.long
def test_deepspeed_allocates_the_states_that_are_planned(tmp_path, stage):
    codes = run_ranks(1, count_bytes, stage, tmp_path / "result", log=tmp_path)
    assert codes == [0], (tmp_path / "rank-0.log").read_text()[-4000:]
    run = job(zero=stage, dp_replicate=1)
    states = state_bytes(run, find_framework("hf"))
    planned = (states.parameters + states.gradients + states.optimizer) / run.shape.total_parameters
    assert float((tmp_path / "result").read_text()) == pytest.approx(planned, rel=0.03)
