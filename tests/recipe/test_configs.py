"""Every Accelerate and DeepSpeed config is read by its library, and a key that the library does not know fails.

That each runs, and is the strategy it names, is seen in test_strategies.py.
"""

import json
import re

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from conftest import REPOSITORY

ACCELERATE = sorted((REPOSITORY / "accelerate_configs").rglob("*.yaml"))
DEEPSPEED = sorted((REPOSITORY / "ds_configs").rglob("*.json"))
LAUNCHER_FLAGS = set(vars(launch_command_parser().parse_args(["script.py"])))
# Accelerate copies a section's keys to launcher flags of the same name and silently drops the others.
SECTIONS = {"fsdp_config": "", "parallelism_config": "", "deepspeed_config": "", "fp8_config": "fp8_"}


def by_name(path):
    return path.stem


def unknown_keys(config):
    """Return the keys of a config's sections that are not launcher flags."""
    sections = {name: content for name, content in config.items() if isinstance(content, dict)}
    assert sections.keys() <= SECTIONS.keys()
    return [
        f"{name}.{key}"
        for name, content in sections.items()
        for key in content
        if f"{SECTIONS[name]}{key}" not in LAUNCHER_FLAGS
    ]


def read_deepspeed(config):
    """Let DeepSpeed itself read a config without its "auto" values; raise an error for an unknown key."""
    from deepspeed.runtime import constants
    from deepspeed.runtime.config import DeepSpeedConfig

    known = {value for value in vars(constants).values() if isinstance(value, str)} | {"zero_optimization", "aio"}
    for key in config:
        if key not in known:
            raise ValueError(f"DeepSpeed does not know {key}")
    sizes = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}

    def filled(section):
        found = {key: filled(value) if isinstance(value, dict) else value for key, value in section.items()}
        return {key: value for key, value in found.items() if value != "auto"}

    return DeepSpeedConfig(filled(config) | sizes)


def test_there_are_configs():
    assert len(ACCELERATE) >= 18
    assert len(DEEPSPEED) >= 9


@pytest.mark.parametrize("path", ACCELERATE, ids=by_name)
def test_an_accelerate_config_begins_with_its_command_and_loads(path):
    text = path.read_text(encoding="utf-8")
    first = text.splitlines()[0]
    assert first.startswith(f"# accelerate launch --config_file {path.relative_to(REPOSITORY)} ")
    assert len(re.findall(r"^#", text, re.MULTILINE)) >= 6  # when to use it, what it costs, its options
    assert "# Use it " in text
    assert "# Costs " in text or "Costs " in text
    config = load_config_from_file(str(path))
    assert config.distributed_type.value == yaml.safe_load(text)["distributed_type"]
    assert unknown_keys(yaml.safe_load(text)) == []


@pytest.mark.parametrize("path", ACCELERATE, ids=by_name)
def test_the_number_of_processes_fits_the_sizes(path):
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    sizes = [value for key, value in config.get("parallelism_config", {}).items() if key.endswith("_size")]
    launcher = launch_command_parser().parse_args(path.read_text(encoding="utf-8").splitlines()[0].split()[3:])
    assert (launcher.num_processes or 2) == config["num_processes"]
    product = 1
    for size in sizes:
        product *= size
    assert config["num_processes"] % product == 0
    assert product == config["num_processes"] or not sizes


@pytest.mark.parametrize("path", ACCELERATE, ids=by_name)
def test_the_deepspeed_config_that_is_named_exists(path):
    section = yaml.safe_load(path.read_text(encoding="utf-8")).get("deepspeed_config")
    if section is not None:
        assert (REPOSITORY / section["deepspeed_config_file"]).is_file()
        stage = json.loads((REPOSITORY / section["deepspeed_config_file"]).read_text())["zero_optimization"]["stage"]
        assert section["zero3_init_flag"] == (stage == 3)


@pytest.mark.parametrize("path", DEEPSPEED, ids=by_name)
def test_deepspeed_reads_the_config(path):
    config = json.loads(path.read_text(encoding="utf-8"))
    read = read_deepspeed(config)
    assert read.zero_optimization_stage == config["zero_optimization"]["stage"]
    named = [yaml.safe_load(other.read_text()).get("deepspeed_config", {}) for other in ACCELERATE]
    assert f"ds_configs/{path.name}" in {section.get("deepspeed_config_file") for section in named}


def test_unknown_keys_fail(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text((REPOSITORY / "accelerate_configs" / "ddp.yaml").read_text() + "num_proceses: 2\n")
    with pytest.raises(ValueError, match="num_proceses"):
        load_config_from_file(str(path))
    wrong = {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_afterwards": True}, "fp8_config": {"backends": "AO"}}
    assert unknown_keys(wrong) == ["fsdp_config.fsdp_reshard_afterwards", "fp8_config.backends"]
    with pytest.raises(ValueError, match="stage_3"):
        read_deepspeed({"zero_optimization": {"stage": 3, "stage_3_prefetch": 1}})
    with pytest.raises(ValueError, match="gradient_cliping"):
        read_deepspeed({"gradient_cliping": 1.0, "zero_optimization": {"stage": 1}})
