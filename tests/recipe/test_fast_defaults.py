"""Defaults of the recipes that an expert would set: nothing waits for the GPU, and the fast kernels are chosen."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import RandomTokens, tiny_model, tiny_trainer
from transformers import Trainer, default_data_collator

from hfscale import CommHealthCallback, ScalingCallback
from hfscale.recipe.arguments import RecipeTrainingArguments
from hfscale.recipe.parsing import parse_arguments

SYNC_EACH_BATCH = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}


def recipe_arguments(folder: Path, **flags: Any) -> RecipeTrainingArguments:
    """Return the arguments of a short training on the CPU, with the recipes' defaults."""
    short: dict[str, Any] = {"use_cpu": True, "max_steps": 4, "logging_steps": 1, "save_strategy": "no"}
    short |= {"dataloader_num_workers": 0, "disable_tqdm": True}
    return RecipeTrainingArguments(output_dir=str(folder), **(short | flags))


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The lines of hfscale's logger."""
    monkeypatch.setattr(logging.getLogger("hfscale"), "propagate", True)
    caplog.set_level("INFO", logger="hfscale")
    return caplog


# A loss that is not finite is seen.


def return_nan_once(model: torch.nn.Module, *, at: int) -> None:
    """Let the loss of one forward pass be NaN, with gradients as if it were not."""
    calls = 0

    def replace_loss(module: torch.nn.Module, args: Any, output: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            output["loss"] = output["loss"] + (math.nan - output["loss"].detach())

    model.register_forward_hook(replace_loss)


def test_the_loss_guard_of_a_recipe_sees_one_loss_that_is_nan(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    return_nan_once(model, at=3)
    trainer = Trainer(
        model=model,
        args=recipe_arguments(tmp_path),
        train_dataset=RandomTokens(),
        data_collator=default_data_collator,
        callbacks=[ScalingCallback()],
    )
    trainer.train()
    assert "the loss is nan at step 3" in log.text
    assert "logging_nan_inf_filter" not in log.text


def test_arguments_that_hide_nan_from_the_loss_guard_are_warned_about(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    model = tiny_model()
    return_nan_once(model, at=3)
    tiny_trainer(tmp_path, CommHealthCallback(), model=model).train()  # the default of transformers
    warnings = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    assert [text for text in warnings if "set logging_nan_inf_filter=False" in text] == warnings[:1]
    assert "the loss is nan" not in log.text


# Arguments of Trainer.


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the recipes believe that there is an accelerator, from whose pinned memory batches are copied."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("given", "sync_each_batch", "non_blocking"),
    [
        (None, False, True),
        (SYNC_EACH_BATCH, True, True),
        (SYNC_EACH_BATCH | {"non_blocking": False}, True, False),
        ({"non_blocking": True}, False, True),
    ],
)
@pytest.mark.parametrize("form", ["python", "flag", "file"])
def test_copies_of_batches_do_not_wait_unless_the_user_wants_it(
    given: dict[str, Any] | None, sync_each_batch: bool, non_blocking: bool, form: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given or {}))
    if form == "python":
        arguments = RecipeTrainingArguments(output_dir=str(tmp_path), accelerator_config=given)
    else:
        value = str(path) if form == "file" else json.dumps(given or {})
        (*_, arguments) = parse_arguments(["--output_dir", str(tmp_path), "--accelerator_config", value])
    config: Any = arguments.accelerator_config
    assert config.non_blocking is non_blocking
    kwargs = config.gradient_accumulation_kwargs or {}
    assert kwargs.get("sync_each_batch", False) is sync_each_batch


def test_nothing_is_pinned_or_copied_asynchronously_on_a_cpu(tmp_path: Path) -> None:
    config: Any = recipe_arguments(tmp_path).accelerator_config
    assert config.non_blocking is False


def test_a_value_of_the_user_wins_over_a_fast_default(tmp_path: Path) -> None:
    default = recipe_arguments(tmp_path)
    assert (default.logging_nan_inf_filter, default.ddp_broadcast_buffers) == (False, False)
    own = {"logging_nan_inf_filter": True, "ddp_broadcast_buffers": True}
    given = recipe_arguments(tmp_path, **own)
    assert {name: getattr(given, name) for name in own} == own
