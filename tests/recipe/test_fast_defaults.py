"""Defaults of the recipes that an expert would set: nothing waits for the GPU, and the fast kernels are chosen."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from synchronizations import Synchronizations
from tiny import RandomTokens, tiny_model, tiny_trainer
from transformers import Trainer, TrainingArguments, default_data_collator

from hfscale import CommHealthCallback, ScalingCallback
from hfscale.recipe import models
from hfscale.recipe.arguments import DataArguments, RecipeTrainingArguments
from hfscale.recipe.kernels import Kernels, use_fast_document_attention
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.recipe.parsing import parse_arguments

SYNC_EACH_BATCH = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}


def recipe_arguments(folder: Path, **flags: Any) -> RecipeTrainingArguments:
    """Return the arguments of a short training on the CPU, with the recipes' defaults."""
    short: dict[str, Any] = {"use_cpu": True, "max_steps": 4, "logging_steps": 1, "save_strategy": "no"}
    short |= {"dataloader_num_workers": 0, "disable_tqdm": True}
    return RecipeTrainingArguments(output_dir=str(folder), **(short | flags))


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
    assert len([text for text in warnings if "set logging_nan_inf_filter=False" in text]) == 1
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


# Attention between packed documents.

FLASH_3, FLASH_2, FLEX = "flash_attention_3", "flash_attention_2", "flex_attention"


def kernels(*installed: str, capability: tuple[int, int] | None = (9, 0), half_precision: bool = True) -> Kernels:
    return Kernels(capability=capability, half_precision=half_precision, installed=frozenset(installed))


@pytest.mark.parametrize(
    ("found", "names"),
    [
        (kernels(FLASH_3, FLASH_2, FLEX), [FLASH_3, FLASH_2, FLEX]),
        (kernels(FLASH_3, FLASH_2, FLEX, capability=(8, 0)), [FLASH_2, FLEX]),  # A100
        (kernels(FLASH_3, FLASH_2, FLEX, capability=(10, 0)), [FLASH_2, FLEX]),  # B200
        (kernels(FLEX), [FLEX]),
        (kernels(FLASH_2, FLEX, half_precision=False), [FLEX]),
        (kernels(FLASH_2, FLEX, capability=(7, 5)), []),  # T4
        (kernels(FLASH_2, FLEX, capability=None), []),
        (kernels(), []),
    ],
)
def test_attention_follows_the_gpu_the_precision_and_the_packages(found: Kernels, names: list[str]) -> None:
    assert found.attention() == names


WIDE = {"hidden_size": 64}  # heads of 16


@pytest.mark.parametrize(
    ("sizes", "lacks", "chosen"),
    [
        (WIDE, (), FLEX),
        (WIDE, ("_supports_flex_attn",), "sdpa"),
        ({}, (), "sdpa"),  # heads of 8
        (WIDE | {"attention_dropout": 0.1}, (), "sdpa"),
    ],
)
def test_the_fastest_attention_that_the_model_supports_is_chosen(
    sizes: dict[str, Any],
    lacks: tuple[str, ...],
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model(**sizes)
    assert (model._supports_flash_attn, model._supports_flex_attn) == (True, True)
    for name in ("_supports_flash_attn", *lacks):
        monkeypatch.setattr(type(model), name, False)
    use_fast_document_attention(model, kernels(FLASH_2, FLEX))
    assert model.config._attn_implementation == chosen
    assert (f"attention: {FLEX} instead of sdpa" in log.text) is (chosen == FLEX)


def test_flash_attention_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(**WIDE)
    asked: list[str] = []
    monkeypatch.setattr(model, "set_attn_implementation", asked.append)  # the real one looks for the package
    use_fast_document_attention(model, kernels(FLASH_2, FLEX))
    monkeypatch.setattr(type(model), "_compatible_flash_implementations", ["somebody/kernel"], raising=False)
    use_fast_document_attention(model, kernels(FLASH_2, FLEX))
    assert asked == [FLASH_2, FLEX]


@pytest.mark.parametrize(
    ("given", "document_attention", "capability", "attention"),
    [
        (None, True, (8, 0), FLEX),
        ("eager", True, (8, 0), "eager"),
        (None, False, (8, 0), "sdpa"),
        (None, True, None, "sdpa"),
    ],
)
def test_a_recipe_loads_its_model_with_that_attention_unless_a_flag_names_one(
    given: str | None,
    document_attention: bool,
    capability: tuple[int, int] | None,
    attention: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny_model(**WIDE).config.save_pretrained(tmp_path)
    monkeypatch.setattr(Kernels, "here", lambda args: kernels(FLEX, capability=capability))
    model_args = ModelArguments(config_name=str(tmp_path), attn_implementation=given)
    data_args = DataArguments(packing="bestfit", document_attention=document_attention, block_size=16)
    model = models.load_model(model_args, recipe_arguments(tmp_path), None, data_args)
    assert model.config._attn_implementation == attention


def test_this_machine_is_described(tmp_path: Path) -> None:
    here = Kernels.here(recipe_arguments(tmp_path))
    assert (here.capability, here.attention()) == (None, [])
    assert FLEX in here.installed


@pytest.mark.parametrize(("device_type", "warns"), [("cuda", True), ("cpu", False)])
def test_a_dense_mask_of_any_size_on_a_gpu_is_warned_about(
    device_type: str, warns: bool, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    data_args = DataArguments(packing="bestfit", document_attention=True, block_size=64)
    models.cut_document_attention(tiny_model(), data_args, recipe_arguments(tmp_path), device_type=device_type)
    assert ("flash_attention_2 or flex_attention" in log.text) is warns


# Nothing waits for the GPU between two logs.


def count_synchronizations(arguments: Any) -> Synchronizations:
    """Train with logs at steps 4 and 8, and count in steps 5 to 7."""
    counter = Synchronizations(first=5, last=8)
    trainer = Trainer(
        model=tiny_model(),
        args=arguments,
        train_dataset=RandomTokens(),
        data_collator=default_data_collator,
        callbacks=[ScalingCallback(), counter],
    )
    with counter.installed():
        trainer.train()
    assert counter.counted_steps == 3
    return counter


LOGGED_EVERY_4: dict[str, Any] = {"max_steps": 8, "logging_steps": 4, "save_strategy": "no", "optim": "sgd"}
LOGGED_EVERY_4 |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "disable_tqdm": True}


def test_no_step_of_a_recipe_waits_for_the_gpu_between_two_logs(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        arguments = recipe_arguments(tmp_path, **LOGGED_EVERY_4, use_cpu=False)
    counter = count_synchronizations(arguments)
    # transformers looks once per forward pass whether documents are packed, which no argument of Trainer switches off.
    assert {line.partition(":")[0] for line in counter.lines} <= {"transformers.masking_utils"}
    assert all(count == 2 * counter.counted_steps for count in counter.lines.values())


def test_trainers_own_defaults_wait_and_hfscale_does_not(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **LOGGED_EVERY_4)
    counter = count_synchronizations(arguments)
    assert not counter.by("hfscale")
    assert any(line.endswith("__bool__") for line in counter.by("transformers.trainer"))  # logging_nan_inf_filter
    assert any(line.endswith(" to") for line in counter.by("accelerate"))  # blocking copies of batches
