"""Completions that are used for several steps are kept between these steps; tests/trainers resumes real trainers."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hfscale.checkpoint import generated_batches
from hfscale.checkpoint.contents import take_tensors
from hfscale.checkpoint.generated_batches import NAME, GeneratedBatches
from hfscale.checkpoint.rank_files import take_json
from hfscale.errors import CheckpointError

PERIOD = 6
BATCHES = [
    {
        "ids": torch.arange(6).reshape(2, 3),
        "logps": torch.tensor([0.1, float("-inf")], dtype=torch.bfloat16),
        "number": torch.tensor(3),
        "sizes": (2, None, "text"),
        "images": [torch.ones(1, 2, dtype=torch.bool)],
    },
    {},
]


def trainer(count=0, batches=None, **changes):
    """What is read of a Trainer whose pass has 12 micro-batches."""
    args = SimpleNamespace(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        steps_per_generation=3,
        num_iterations=2,
        device=torch.device("cpu"),
    )
    vars(args).update(changes)
    return SimpleNamespace(_step=count, _buffered_inputs=batches, args=args, state=SimpleNamespace(global_step=8))


def generated_of(made: SimpleNamespace) -> GeneratedBatches:
    adapter = SimpleNamespace(trainer=made, set_attributes=vars(made).update)
    return GeneratedBatches(adapter, "_step")


def save(folder: Path, of: SimpleNamespace) -> None:
    generated = generated_of(of)
    take_tensors({NAME: generated.tensors})(folder)
    take_json({NAME: generated.saved})(folder)


def flat(value):
    return str(torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: (t.dtype, t.tolist()), value))


def test_what_is_still_to_be_used_comes_back(tmp_path):
    save(tmp_path, trainer(count=PERIOD + 2, batches=BATCHES))
    other = trainer()
    saved, problem = generated_of(other).read(tmp_path)
    assert problem is None
    generated_of(other).resume(saved)
    assert (other._step, flat(other._buffered_inputs)) == (PERIOD + 2, flat(BATCHES))


def test_what_is_used_up_is_not_kept(tmp_path):
    save(tmp_path, trainer(count=2 * PERIOD, batches=BATCHES))
    assert [path.name for path in tmp_path.iterdir()] == [f"{NAME}_0.json"]
    saved, _ = generated_of(trainer()).read(tmp_path)
    assert (saved["count"], saved["batches"]) == (2 * PERIOD, None)


@pytest.mark.parametrize(
    ("batches", "changes", "reason"),
    [
        (BATCHES, {"per_device_train_batch_size": 2}, "another number"),
        (BATCHES, {"num_iterations": 1}, "another number"),
        ([{"image": object()}], {}, "object"),
        (None, None, "does not hold"),
    ],
)
def test_what_cannot_be_used_is_generated_again(tmp_path, monkeypatch, caplog, batches, changes, reason):
    if changes is not None:
        save(tmp_path, trainer(count=8, batches=batches))
    other = trainer(count=1, batches=[], **changes or {})
    generated = generated_of(other)
    saved, problem = generated.read(tmp_path)
    assert saved is None
    assert reason in problem
    monkeypatch.setattr(generated_batches, "micro_batches_of_pass", lambda trainer, steps: steps)
    generated.generate_again(problem)
    assert (other._step, other._buffered_inputs) == (8, None)
    assert f"after 2 of the {PERIOD if changes != {'num_iterations': 1} else 3} micro-batches" in caplog.text


def test_broken_files_are_named(tmp_path):
    save(tmp_path, trainer(count=1, batches=BATCHES))
    (tmp_path / f"{NAME}_outer_0.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"{NAME}_0.json"):
        generated_of(trainer()).read(tmp_path)
