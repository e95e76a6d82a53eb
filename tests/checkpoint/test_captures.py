"""Every strategy has a capture, and every capture obeys one contract (tests/capture_contract.py)."""

import json
from types import SimpleNamespace

import pytest
from capture_contract import SAVED, WRITTEN, ObeysContract
from conftest import REPOSITORY
from native_runs import Layout, Run, make_model
from native_runs import launch as launch_native
from parallel_world import in_world, train
from tiny import tiny_trainer

from hfscale import SpotCheckpointCallback
from hfscale.checkpoint.captures import CAPTURES, capture_of
from hfscale.checkpoint.captures.unsharded import UnshardedCapture
from hfscale.facts.strategies import STRATEGIES
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.replicated import Replicated

ARGUMENTS = {"save_strategy": "steps", "save_steps": SAVED, "max_steps": WRITTEN + 1}


def saves_now(**options):
    """A callback that saves while training waits, as Trainer does."""
    return SpotCheckpointCallback(asynchronous=False, every_minutes=None, cloud=None, **options)


def test_every_strategy_has_one():
    assert set(CAPTURES) == set(Strategy.kinds)


def test_a_strategy_that_extends_another_has_its_capture(monkeypatch, tmp_path):
    class Toy(Replicated):
        """All that a new strategy needs."""

    trainer = tiny_trainer(tmp_path)
    monkeypatch.setattr(Strategy, "of", lambda trainer: Toy(trainer, STRATEGIES["single"]))
    assert type(capture_of(trainer)) is UnshardedCapture


@pytest.mark.parametrize("adapters", [False, True])
def test_on_one_process(tmp_path, adapters):
    from test_checkpoint_writer import lora_model

    contract = ObeysContract(tmp_path / "written")
    model = lora_model() if adapters else None
    trainer = tiny_trainer(tmp_path / "out", saves_now(), contract, model=model, **ARGUMENTS)
    trainer.train()
    copied = capture_of(trainer).live().weights
    assert all("lora_" in name for name in copied) == adapters, "the base model is not copied with its adapters"
    weights = "adapter_model.safetensors" if adapters else "model.safetensors"
    assert {weights, "optimizer.pt", "scheduler.pt", "training_args.bin"} <= set(contract.files)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ddp", "model.safetensors"),
        pytest.param("fsdp2", "optimizer_0/__1_0.distcp", marks=pytest.mark.long),
        pytest.param("zero2", "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt", marks=pytest.mark.faults),
    ],
)
def test_on_two_ranks(tmp_path, launch, strategy, expected):
    config = REPOSITORY / "accelerate_configs" / f"{strategy}.yaml"
    (tmp_path / "ds_configs").symlink_to(REPOSITORY / "ds_configs")
    done = launch(2, REPOSITORY / "tests" / "workers" / "captures.py", config=config)
    assert done.code == 0, done.err[-3000:]
    assert expected in json.loads((tmp_path / "files.json").read_text())


@pytest.mark.world(2)
@pytest.mark.long
def test_of_a_model_that_transformers_distributes(tmp_path):
    contract = ObeysContract(tmp_path / "written")
    model = make_model(tmp_path / "model")
    spot = {"asynchronous": False}
    run = Run(layout=Layout(fsdp=2), steps=WRITTEN + 1, every=SAVED, spot=spot, callbacks=(contract,), after=report)
    launch_native(run, model, tmp_path / "run")
    files = json.loads((tmp_path / "files.json").read_text())
    assert {"dcp/__1_0.distcp", "scheduler.pt", "config.json"} <= set(files)


def report(trainer):
    """Write what the contract has compared."""
    (contract,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, ObeysContract))
    if trainer.is_world_process_zero():
        (contract.folder.parent / "files.json").write_text(json.dumps(contract.files))


def train_parallel(job):
    contract = ObeysContract(job["written"])
    train(job | {"callbacks": [saves_now(), contract]})
    return contract.files


@pytest.mark.world(2)
@pytest.mark.long
def test_of_the_parallel_trainer(tmp_path):
    arguments = ARGUMENTS | {"eval_strategy": "no"}
    job = SimpleNamespace(output_dir=str(tmp_path / "out"), written=tmp_path / "written", args=arguments)
    (files,) = in_world(2, train_parallel, [vars(job) | {"parallel": {"tp_size": 2}}])
    assert {"dcp/__1_0.distcp", "scheduler.pt", "config.json"} <= set(files)
