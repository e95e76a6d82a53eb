"""`axolotl plan CONFIG --gpu H100-80GB --gpus 8`: `hfscale plan` for the run that a YAML file of axolotl describes."""

import os
import sys
from pathlib import Path
from typing import Any

import click
import yaml

from hfscale.core.plain_yaml import read_plain_yaml
from hfscale.errors import UsageError

_ADAPTERS = ("lora", "qlora")
"""The adapters that `hfscale plan` knows."""


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="rank the layouts for this run on your GPUs, by hfscale",
)
@click.argument("config")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def plan(config: str, words: tuple[str, ...]) -> None:
    """Rank the layouts for this run; WORDS are flags of `hfscale plan`, such as --gpu H100-80GB --gpus 8."""
    try:
        given = words_of(Path(config))
    except UsageError as error:
        raise click.UsageError(str(error)) from None
    command = [sys.executable, "-m", "hfscale", "plan", *given, *words]
    os.execv(sys.executable, command)  # noqa: S606 - this program


def words_of(config: Path) -> list[str]:
    """Return the words of `hfscale plan` for what a YAML file of axolotl asks.

    Args:
        config (`Path`): the file.

    Returns:
        `list[str]`: the model, and flags for what the file says of the length and the adapters, which are planned on
            all linear layers whatever `lora_target_modules` says: `hfscale estimate` has a flag for fewer.

    Raises:
        UsageError: the file cannot be read, names no model or asks for other adapters than LoRA.
    """
    try:
        found = read_plain_yaml(config)
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise UsageError(f"{config} cannot be read: {problem}") from None
    if not isinstance(found, dict) or not found.get("base_model"):
        raise UsageError(f"{config} names no base_model")
    return [_model(str(found["base_model"])), *_flags(found)]


def _model(name: str) -> str:
    """Return what `hfscale plan` takes: a folder's config, or the name of a model of the hub without its owner."""
    config = Path(name, "config.json")
    if os.path.isfile(config):  # noqa: PTH113  a name is often no path: too long, or with odd letters
        return str(config)
    return name.rpartition("/")[2].lower()


def _flags(found: dict[str, Any]) -> list[str]:
    flags = []
    if found.get("sequence_len"):
        flags += ["--seq-len", str(found["sequence_len"])]
    adapter = found.get("adapter")
    if not adapter:
        return flags
    if adapter not in _ADAPTERS:
        raise UsageError(
            f"adapter: {adapter} is not planned: plan with lora or qlora, or leave it out"
        )
    method = "qlora" if found.get("load_in_4bit") else str(adapter)
    return [*flags, "--method", method, "--lora-rank", str(found.get("lora_r") or 8)]
