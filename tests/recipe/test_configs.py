"""Every Accelerate and DeepSpeed config is read by its library, and a key that the library does not know fails.

That each runs, and is the strategy it names, is seen in test_strategies.py.
"""

import json
import re
from collections.abc import KeysView

import pytest
import torch
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


class Recorder(dict):
    """A section of a DeepSpeed config that records which of its keys are asked for."""

    def __init__(self, content):
        super().__init__(
            {key: Recorder(value) if isinstance(value, dict) else value for key, value in content.items()}
        )
        self.asked = set()
        self.unpacked = []  # not empty once all keys have been passed on at once, by `**`

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def __iter__(self):
        self.unpacked.append(True)
        return super().__iter__()

    def keys(self):
        return KeysView(self)

    def unknown(self):
        """Return the keys that nobody has asked for. A section that was unpacked is checked by DeepSpeed itself."""
        if self.unpacked:
            return []
        inner = [
            f"{key}.{name}" for key, value in self.items() if isinstance(value, Recorder) for name in value.unknown()
        ]
        return [key for key, _ in self.items() if key not in self.asked] + inner


def read_deepspeed(config):
    """Let DeepSpeed itself read a config; raise an error for a key that it does not read.

    DeepSpeed asks for the keys that it knows, and ignores others silently. Sections of which it makes a pydantic model
    are passed on with all their keys, and the model forbids unknown ones, in the sections inside of it too. Values
    that are "auto" are replaced by numbers, because the models leave out "auto" before they check the key.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    def filled(key, value):
        if isinstance(value, dict):
            return {name: filled(name, content) for name, content in value.items()}
        return int(key != "enabled") if value == "auto" else value  # one of fp16 and bf16 may be enabled

    sizes = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    recorder = Recorder(filled("", config) | sizes)
    read = DeepSpeedConfig(recorder)
    unknown = recorder.unknown()
    if unknown:
        raise ValueError(f"DeepSpeed does not read {', '.join(unknown)}")
    return read


def test_there_are_configs():
    assert len(ACCELERATE) >= 18
    assert len(DEEPSPEED) >= 7


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
def test_deepspeed_reads_every_key_of_the_config(path):
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


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("", "gradient_cliping"),
        ("data_types", "grad_accumulation_dtype"),
        ("aio", "thread_count"),
        ("activation_checkpointing", "partition"),
        ("optimizer", "parameters"),
        ("checkpoint", "load_universal_checkpoint"),
        ("bf16", "immediate"),
        ("zero_optimization", "stage_3_prefetch"),
        ("zero_optimization.offload_optimizer", "devices"),
        ("zero_optimization.offload_param", "buffers"),
    ],
)
@pytest.mark.parametrize("value", [1, "auto"])
def test_a_key_that_deepspeed_does_not_read_is_found(section, key, value):
    config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}
    inside = config
    for name in section.split(".") if section else []:
        inside = inside.setdefault(name, {})
    read_deepspeed(config)
    inside[key] = value
    with pytest.raises(ValueError, match=key):
        read_deepspeed(config)


@pytest.mark.parametrize("path", DEEPSPEED, ids=by_name)
def test_deepspeed_has_the_optimizer_of_the_config(path):
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    optimizer = json.loads(path.read_text(encoding="utf-8")).get("optimizer", {}).get("type", "AdamW")
    assert optimizer.lower() in DEEPSPEED_OPTIMIZERS or hasattr(torch.optim, optimizer)
