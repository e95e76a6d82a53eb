"""Models by name: a file, the built-in catalogue, or the Hugging Face hub."""

import difflib
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from hfscale.errors import MissingDependencyError, UnsupportedModelError
from hfscale.facts.model_shape import ModelShape


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """The built-in models: name -> config keys, with the hub ids under `hub`."""
    text = resources.files("hfscale.facts.models").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def catalogue_names() -> tuple[str, ...]:
    """Names of the built-in models."""
    return tuple(catalogue())


@cache
def catalogue_shape(name: str) -> ModelShape | None:
    """The built-in model of this name or hub id, whatever its case; None where there is none."""
    plain = name.casefold()
    for known, entry in catalogue().items():
        if plain == known or plain in (hub.casefold() for hub in entry["hub"]):
            config = {key: value for key, value in entry.items() if key != "hub"}
            if config["model_type"] in _WINDOW_BY_DEFAULT:
                config.setdefault("sliding_window", None)
            return ModelShape.from_config(config)
    return None


_WINDOW_BY_DEFAULT = ("mistral", "mixtral", "phi3")
"""Families whose class assumes a sliding window, and whose published files set it to null; TOML has no null."""


def find_model(name: str) -> ModelShape:
    """The shape of a model: a `config.json` or its folder, a built-in name or hub id, else the hub's `config.json`.

    Raises:
        `UnsupportedModelError`: No such model is known here or on the hub; the message names the nearest built-in
        ones. `ConfigFileError`: The file is no model config.
    """
    path = Path(name)
    if path.exists():
        return ModelShape.from_config(path)
    known = catalogue_shape(name)
    if known is not None:
        return known
    if name.count("/") == 1 and not name.startswith((".", "/")):
        return ModelShape.from_config(_from_hub(name))
    raise UnsupportedModelError(f"model {name!r} is no file, no built-in name and no hub id: {_nearest(name)}")


def _from_hub(name: str) -> str:
    """Path of the hub's config.json, from the local cache or downloaded."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise MissingDependencyError("huggingface_hub is not installed: pip install huggingface_hub") from None
    try:
        return hf_hub_download(name, "config.json")
    except Exception as error:  # the library raises a dozen kinds: no such repository, gated, offline, timeout
        reason = type(error).__name__
        raise UnsupportedModelError(
            f"model {name!r} is not built in, and the hub does not give its config.json ({reason}): {_nearest(name)}"
        ) from error


def _nearest(name: str) -> str:
    plain = name.rpartition("/")[2].casefold()
    close = difflib.get_close_matches(plain, catalogue_names(), n=3, cutoff=0.5)
    return f"use {', '.join(close or ['llama-3.1-8b', 'qwen3-8b'])}, or a folder with a config.json"
