"""What a run records of its settings."""

import json

import pytest
import torch
from tiny import tiny_trainer
from transformers.utils.import_utils import enable_tf32

from hfscale.trainer import setup
from hfscale.trainer.setup import run_setup


@pytest.fixture
def fp32_afterwards():
    yield
    torch.set_float32_matmul_precision("highest")  # which the two lines below do not undo
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.fp32_precision = "none"


def enable_legacy():
    torch.backends.cuda.matmul.allow_tf32 = True


def enable_as_trainer():
    enable_tf32.__wrapped__(True)  # without its cache


@pytest.mark.usefixtures("fp32_afterwards")
@pytest.mark.parametrize("enable", [enable_legacy, enable_as_trainer])
def test_tf32_is_recorded_however_it_was_switched_on(tmp_path, monkeypatch, enable):
    trainer = tiny_trainer(tmp_path)
    enable()
    assert run_setup(trainer)["numerics"]["tf32"] is False  # a CPU has none
    monkeypatch.setattr(setup, "allows_tf32", lambda: True)
    monkeypatch.setattr(type(trainer.args), "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    recorded = run_setup(trainer)
    assert recorded["numerics"]["tf32"] is True
    assert json.loads(json.dumps(recorded)) == recorded
