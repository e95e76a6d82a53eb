"""Checkpoints of every kind of PEFT adapter: the files of plain Trainer, and an exact resume in another process."""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    TaskType,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from tiny import RandomTokens, tiny_arguments, tiny_model, tiny_trainer
from transformers import Trainer, set_seed

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.facts.support import Combination, why_not

STEPS = 4
SAVED = 2
MODULES = ["q_proj", "v_proj"]


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=16, task_type=TaskType.CAUSAL_LM, target_modules=MODULES, **options)


def with_config(config: Any) -> Callable[[Any], PeftModel]:
    return lambda base: get_peft_model(base, config)


def with_frozen_matrices(base: Any) -> PeftModel:
    """LoRA-FA (Zhang et al., arXiv 2308.03303) trains the B matrices only; the A matrices stay random."""
    model = get_peft_model(base, lora())
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    return model


def with_two_adapters(base: Any) -> PeftModel:
    model = get_peft_model(base, lora(), "first")
    model.add_adapter("second", lora())  # it is frozen, as a reference of DPO
    return model


def with_an_adapter_named(base: Any) -> PeftModel:
    return get_peft_model(base, lora(), "mine")


ADAPTERS: dict[str, Callable[[Any], PeftModel]] = {
    "lora": with_config(lora()),
    "dora": with_config(lora(use_dora=True)),
    "lora-fa": with_frozen_matrices,
    "pissa": with_config(lora(init_lora_weights="pissa")),
    "lora with bias": with_config(lora(bias="lora_only")),
    "modules to save": with_config(lora(modules_to_save=["lm_head"])),
    "trained tokens": with_config(lora(trainable_token_indices=[3, 5])),
    "lora on embeddings": with_config(
        LoraConfig(r=4, task_type=TaskType.CAUSAL_LM, target_modules=["embed_tokens", *MODULES])
    ),
    "two adapters": with_two_adapters,
    "named adapter": with_an_adapter_named,
    "ia3": with_config(IA3Config(task_type=TaskType.CAUSAL_LM)),
    "vera": with_config(VeraConfig(r=4, task_type=TaskType.CAUSAL_LM, target_modules=MODULES)),
    "adalora": with_config(
        AdaLoraConfig(
            task_type=TaskType.CAUSAL_LM,
            target_modules=MODULES,
            init_r=4,
            target_r=2,
            total_step=20,
            tinit=1,
            tfinal=2,
        )
    ),
    "prompt tuning": with_config(PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)),
}


def adapter_model(kind: str, *, seed: int) -> PeftModel:
    """Return a model with adapters whose random values depend on the seed, unlike those of its base model."""
    base = tiny_model()
    set_seed(seed)
    return ADAPTERS[kind](base)


def trainer_of(folder: Path, kind: str, *callbacks: Any, seed: int = 1) -> Trainer:
    options = {"save_strategy": "steps", "save_steps": SAVED, "max_steps": STEPS, "learning_rate": 0.05}
    return tiny_trainer(folder, *callbacks, model=adapter_model(kind, seed=seed), **options)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def adapter_files(checkpoint: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of each adapter file of a checkpoint, by its path in it."""
    files = checkpoint.rglob("adapter_model.safetensors")
    return {path.relative_to(checkpoint).as_posix(): load_file(path) for path in files}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_checkpoint_holds_what_plain_trainer_saves(tmp_path: Path, kind: str) -> None:
    trainer_of(tmp_path / "plain", kind).train()
    trainer_of(tmp_path / "ours", kind, SpotCheckpointCallback()).train()
    plain = adapter_files(tmp_path / "plain" / f"checkpoint-{SAVED}")
    ours = adapter_files(tmp_path / "ours" / f"checkpoint-{SAVED}")
    assert plain
    assert {name: sorted(tensors) for name, tensors in ours.items()} == {
        name: sorted(tensors) for name, tensors in plain.items()
    }
    for name, tensors in plain.items():
        for key, tensor in tensors.items():
            assert torch.equal(ours[name][key], tensor), (name, key)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_resume_with_another_seed_continues_the_run(tmp_path: Path, kind: str) -> None:
    complete = trainer_of(tmp_path / "complete", kind, SpotCheckpointCallback())
    complete.train()
    interrupted = trainer_of(tmp_path / "run", kind, SpotCheckpointCallback())
    interrupted.args.max_steps = SAVED
    interrupted.train()
    resumed = trainer_of(tmp_path / "run", kind, SpotCheckpointCallback(), seed=2)
    resumed.train(resume_from_checkpoint=latest_checkpoint(tmp_path / "run"))
    assert losses(resumed)[SAVED:] == losses(complete)[SAVED:]


class ConvertsPissa(Trainer):
    """Keeps the first weights of PiSSA beside the checkpoints, and subtracts them in each save, as ms-swift does."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        config = self.model.peft_config["default"]
        before, config.init_lora_weights = config.init_lora_weights, True
        self.model.save_pretrained(Path(self.args.output_dir, "initial_model"))
        config.init_lora_weights = before
        return super().train(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        config = copy.copy(self.model.peft_config["default"])
        trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        initial = Path(str(output_dir)).parent / "initial_model"
        converted = Path(str(output_dir), "converted")
        self.model.save_pretrained(converted, path_initial_model_for_weight_conversion=str(initial))
        self.model.peft_config["default"] = config
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in trained)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_subclass_finds_its_own_files_beside_the_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    def train(name: str, *callbacks: Any) -> dict[str, dict[str, torch.Tensor]]:
        options = {"save_strategy": "steps", "save_steps": SAVED, "max_steps": STEPS, "learning_rate": 0.05}
        trainer = ConvertsPissa(
            model=adapter_model("pissa", seed=1),
            args=tiny_arguments(tmp_path / name, **options),
            train_dataset=RandomTokens(),
            callbacks=list(callbacks),
        )
        trainer.train()
        return adapter_files(tmp_path / name / f"checkpoint-{SAVED}")

    plain = train("plain")
    ours = train("ours", SpotCheckpointCallback(asynchronous=asynchronous))
    assert set(plain) == {"adapter_model.safetensors", "converted/adapter_model.safetensors"}
    assert content(ours) == content(plain)
    assert {
        path.name for path in (tmp_path / "ours").iterdir() if path.is_dir() and "checkpoint" not in path.name
    } == {
        "initial_model",
        ".unfinished",
    }


def content(files: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, list[float]]]:
    return {file: {key: tensor.tolist() for key, tensor in tensors.items()} for file, tensors in files.items()}


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "parallel", "native"])
def test_checkpoints_of_trained_parameters_alone_refuse_frozen_matrices(strategy: str) -> None:
    saved = Combination(strategy=strategy, saves=True)
    assert "begin at random" in str(why_not(replace(saved, frozen_adapter=True)))
    assert why_not(replace(saved, frozen_adapter=False)) is None
    assert why_not(replace(saved, frozen_adapter=True, saves=False)) is None


ON_TWO_RANKS = ("lora", "lora-fa", "two adapters", "modules to save")
REFUSED = {
    "fsdp2": {"adalora": "of type adalora", "prompt tuning": "of type prompt_tuning"},
    "zero2": {"lora-fa": "begin at random"},
    "zero3": {"lora-fa": "begin at random"},
}


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "strategy", ["fsdp2", *(pytest.param(name, marks=pytest.mark.faults) for name in ("zero2", "zero3"))]
)
@pytest.mark.long
def test_two_ranks_resume_adapters_exactly_or_refuse_them_at_the_start(tmp_path, launch, strategy):
    shutil.copytree(REPOSITORY / "ds_configs", tmp_path / "ds_configs")
    config = REPOSITORY / "accelerate_configs" / f"{strategy}.yaml"
    kinds = dict.fromkeys([*ON_TWO_RANKS, *REFUSED[strategy]])
    done = launch(2, REPOSITORY / "tests" / "workers" / "adapters.py", *kinds, config=config)
    assert done.code == 0, done.err[-3000:]
    found = json.loads((tmp_path / "losses.json").read_text())
    for kind, outcome in found.items():
        if kind in REFUSED[strategy]:
            assert REFUSED[strategy][kind] in outcome["error"], kind
        else:
            assert outcome["resumed"] == outcome["complete"], kind
