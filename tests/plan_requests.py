"""Random requests to `hfscale plan`: models of the catalogue and of every family, hardware, and every other option."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from hfscale.facts.families import FAMILIES
from hfscale.facts.hardware import accelerators
from hfscale.facts.models import catalogue, catalogue_names
from hfscale.planner.option_fields import flag_of

MODELS_BY_FILE = 0.25
"""Part of the requests whose model is a folder with a config.json, of any family that the planner knows."""
NOT_SAMPLED = {
    "emit": "the harness gives it",
    "force": "nothing is replaced",
    "choice": "the harness chooses a strategy first, so that all of them are started",
    "as_json": "always given",
    "calibrate": "measures this machine and plans nothing",
    "batch_schedule": "its recipes are started by tests/lr_scaling",
    "plot": "draws the choices and changes no file",
    "details": "prints more and changes no file",
    "base_width": "its recipes are started by tests/lr_scaling",
    "load_once": "its recipes are started by tests/checkpoint",
    "average_device": "an average in the CPU's memory is started by tests/averaging",
    "provider": "chooses prices and changes no file",
    "spot": "chooses prices and changes no file",
}
"""Options of `hfscale plan` that no sampler draws, and why."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What is drawn first, on which other options depend."""

    random: Random
    """The generator."""
    folder: Path
    """Where files that options name are written."""
    task: str
    """What a step trains on."""
    gpus: int
    """Number of GPUs."""
    has_islands: bool
    """Whether islands are planned for."""
    has_tokens: bool
    """Whether the number of tokens is given."""

    def one_of(self, *values: Any) -> Any:
        """Return one of the values."""
        return self.random.choice(values)

    def rarely(self, value: Any, probability: float = 0.1) -> Any:
        """Return a value, or with the rest of the probability None, which leaves the option out."""
        return value if self.random.random() < probability else None


def _weighted(draw: Draw, **weights: float) -> str:
    return draw.random.choices(list(weights), list(weights.values()))[0]


def _batch(draw: Draw) -> int | None:
    sizes = (
        draw.gpus * 2 ** draw.random.randrange(6),
        8 * draw.random.randrange(1, 40),
        draw.random.randrange(1, 200),
    )
    return draw.rarely(draw.one_of(*sizes), 0.6)


def _hardware_file(draw: Draw) -> Path:
    path = draw.folder / "hardware.toml"
    path.write_text(
        '[[accelerator]]\nname = "local-test"\nmemory_gib = 60.0\nbf16_tflops = 300.0\nfp32_tflops = 40.0\n'
        'memory_tb_s = 2.0\nlink_gb_s = 200.0\nnetwork_gb_s = 25.0\nsource = "a test"\ndate = "2026-11-09"\n',
        encoding="utf-8",
    )
    return path


def _price_file(draw: Draw) -> Path:
    path = draw.folder / "prices.toml"
    path.write_text(
        '[[price]]\nprovider = "here"\ngpu = "H100-80GB"\nregion = "here"\nproduct = "a node"\non_demand_usd = 2.0\n'
        'source = "a test"\ndate = "2026-11-09"\n',
        encoding="utf-8",
    )
    return path


SAMPLERS: Mapping[str, Callable[[Draw], Any]] = {
    "gpus": lambda draw: draw.gpus,
    "task": lambda draw: draw.task,
    "seq_len": lambda draw: draw.one_of(256, 512, 1024, 1024, 2048, 2048, 4096, 4096, 8192, 16384, 32768),
    "global_batch": _batch,
    "num_generations": lambda draw: draw.rarely(draw.one_of(2, 4, 5, 16), 0.5) if draw.task == "grpo" else None,
    "max_completion_length": lambda draw: draw.one_of(64, 200, 255) if draw.task == "grpo" else None,
    "beta": lambda draw: draw.rarely(draw.one_of(0.0, 0.04), 0.6) if draw.task == "grpo" else None,
    "precompute_ref_log_probs": lambda draw: draw.rarely(True, 0.4) if draw.task == "dpo" else None,
    "teacher": lambda draw: None,
    "teacher_dtype": lambda draw: None,
    "whole_teacher": lambda draw: None,
    "images": lambda draw: None,
    "train_vision_tower": lambda draw: None,
    "frozen_projector": lambda draw: None,
    "stack": lambda draw: draw.rarely(draw.one_of("hf", "titan", "megatron"), 0.05),
    "method": lambda draw: _weighted(draw, full=0.6, lora=0.25, qlora=0.15),
    "lora_rank": lambda draw: draw.rarely(draw.one_of(1, 8, 64), 0.3),
    "lora_target_modules": lambda draw: draw.rarely(draw.one_of("q_proj,v_proj", "all-linear")),
    "lora_dropout": lambda draw: draw.rarely(0.05),
    "precision": lambda draw: _weighted(draw, bf16=0.68, fp16=0.1, fp32=0.1, fp8=0.12),
    "pure_bf16": lambda draw: draw.rarely(True, 0.03),
    "optimizer": lambda draw: _weighted(
        draw,
        adamw=0.7,
        adamw_foreach=0.02,
        adamw_8bit=0.07,
        sgd=0.07,
        adafactor=0.08,
        adamw_bf16=0.02,
        sgd_momentum=0.02,
        muon=0.02,
    ),
    "activation_offload": lambda draw: draw.rarely(True) if draw.task in ("sft", "dpo") else None,
    "ema_decay": lambda draw: draw.rarely(0.99),
    "compile": lambda draw: draw.rarely(True, 0.2),
    "liger": lambda draw: draw.rarely(draw.one_of(True, False), 0.3),
    "gpus_per_node": lambda draw: draw.rarely(draw.one_of(1, 2, 4, 16), 0.25),
    "link_gb_s": lambda draw: draw.rarely(3.0),
    "network_gb_s": lambda draw: draw.rarely(draw.one_of(1.5, 12.5, 50)),
    "tokens": lambda draw: draw.one_of("500M", "3B", "1T") if draw.has_tokens else None,
    "objective": lambda draw: draw.one_of("time", "time", "cost", "gpus") if draw.has_tokens else "time",
    "top": lambda draw: draw.one_of(1, 3, 20, 100),
    "expert_imbalance": lambda draw: draw.rarely(draw.one_of(1.0, 1.5)),
    "min_gpus": lambda draw: draw.rarely(True),
    "deadline": lambda draw: draw.rarely(draw.one_of(200, 1e6)) if draw.has_tokens else None,
    "budget": lambda draw: draw.rarely(draw.one_of(1000, 1e8)) if draw.has_tokens else None,
    "usd_per_gpu_hour": lambda draw: draw.rarely(2.5),
    "spot_interruptions": lambda draw: draw.rarely(0.05),
    "hardware": lambda draw: draw.rarely(_hardware_file(draw)),
    "prices": lambda draw: draw.rarely(_price_file(draw)),
    "islands": lambda draw: draw.one_of(2, 3, 8) if draw.has_islands else None,
    "island_bandwidth": lambda draw: draw.one_of("100Mbps", "1Gbps", "25Gbps") if draw.has_islands else None,
    "island_steps": lambda draw: draw.rarely(draw.one_of(10, 500), 0.5) if draw.has_islands else None,
    "island_overlap_steps": lambda draw: draw.rarely(2, 0.5) if draw.has_islands else None,
    "island_fragments": lambda draw: draw.rarely(2, 0.5) if draw.has_islands else None,
    "island_bits": lambda draw: draw.rarely(draw.one_of(8, 4), 0.5) if draw.has_islands else None,
    "island_density": lambda draw: draw.rarely(0.0156, 0.2) if draw.has_islands else None,
    "skip_bad_batches": lambda draw: draw.rarely(10),
    "gc_every_steps": lambda draw: draw.rarely(50),
    "storage_gb_s": lambda draw: draw.rarely(2.5),
}
"""Option -> how its value is drawn; None leaves it out."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request to `hfscale plan`."""

    model: str
    """A name of the catalogue, or a folder with a config.json."""
    family: str
    """The model's family, transformers' `model_type`."""
    config: PreTrainedConfig
    """The config of the model at its real size."""
    flags: tuple[str, ...]
    """The flags of `hfscale plan`."""


def random_request(seed: str, folder: Path) -> Request:
    """Draw a request.

    Args:
        seed (`str`): the same one gives the same request.
        folder (`Path`): where the files that it names are written.
    """
    random = Random(seed)  # no secret
    folder.mkdir(parents=True, exist_ok=True)
    model, config = _model(random, folder)
    draw = Draw(
        random=random,
        folder=folder,
        task=random.choices(("text", "sft", "dpo", "grpo"), (0.61, 0.13, 0.13, 0.13))[0],
        gpus=random.choice((1, 2, 2, 3, 4, 6, 8, 8, 8, 12, 16, 16, 24, 32, 48, 64, 128, 256, 512, 1024)),
        has_islands=random.random() < 0.1,
        has_tokens=random.random() < 0.3,
    )
    values = {name: sample(draw) for name, sample in SAMPLERS.items()}
    values["gpu"] = "local-test" if values["hardware"] else random.choice(accelerators()).name
    flags = [word for name, value in values.items() for word in _words(name, value)]
    return Request(model=model, family=config.model_type, config=config, flags=tuple(flags))


def built_in(name: str) -> PreTrainedConfig:
    """Return the config of a model of the catalogue, at its real size."""
    keys = {key: value for key, value in catalogue()[name].items() if key != "hub"}
    return AutoConfig.for_model(keys.pop("model_type"), **keys)


def _model(random: Random, folder: Path) -> tuple[str, PreTrainedConfig]:
    """A model of the catalogue, or a family with the sizes that transformers gives it by default."""
    if random.random() < MODELS_BY_FILE:
        config = AutoConfig.for_model(random.choice(sorted(FAMILIES)))
        config.save_pretrained(folder / "model")
        return str(folder / "model"), config
    # First a family, so that those with few models are not rare.
    by_family: dict[str, list[str]] = {}
    for name in catalogue_names():
        by_family.setdefault(catalogue()[name]["model_type"], []).append(name)
    name = random.choice(by_family[random.choice(sorted(by_family))])
    return name, built_in(name)


def _words(name: str, value: Any) -> list[str]:
    """A flag as words of a command line."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag_of(name)] if value else [f"--no-{name}"]
    return [flag_of(name), str(value)]
