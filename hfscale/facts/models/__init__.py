"""Finds a model by name: a file, a name in the built-in catalogue, or a hub id."""

import difflib
import re
from functools import cache
from pathlib import Path
from typing import Any

from hfscale.core.logging import get_logger
from hfscale.core.tables import read_table
from hfscale.errors import MissingDependencyError, UnsupportedModelError
from hfscale.facts.config_reader import tower_parameters
from hfscale.facts.model_shape import ModelShape

logger = get_logger(__name__)


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Read the built-in models: name -> config keys, and hub ids under the key `hub`."""
    return read_table("facts/models/catalogue.toml")


def catalogue_names() -> tuple[str, ...]:
    """List the names of the built-in models."""
    return tuple(catalogue())


@cache
def catalogue_shape(name: str) -> ModelShape | None:
    """Return the shape of the built-in model with this name or hub id, ignoring case; None if there is none."""
    plain = name.casefold()
    for known, entry in catalogue().items():
        if plain == known or plain in (hub.casefold() for hub in entry["hub"]):
            config = {key: value for key, value in entry.items() if key != "hub"}
            if config["model_type"] in _WINDOW_BY_DEFAULT:
                config.setdefault("sliding_window", None)
            return ModelShape.from_config(config)
    return None


_WINDOW_BY_DEFAULT = ("mistral", "mixtral", "phi3")
"""Families whose class has a sliding window by default, which their published configs set to null; TOML has no
null."""


def find_model(name: str) -> ModelShape:
    """Find the shape of a model by name.

    Args:
        name (`str`): a `config.json` or its folder, a built-in name, or a hub id, whose `config.json` is downloaded if
            the model is not built in.

    Raises:
        UnsupportedModelError: the model is neither a file, nor built in, nor on the hub, or hfscale does not support
            it; the message gives the nearest names or the key.
        ConfigFileError: the file is not a model config.
        MissingDependencyError: the model is on the hub, and huggingface_hub is not installed.
    """
    path = Path(name)
    if path.exists():
        return _shape_of(path)
    known = catalogue_shape(name)
    if known is not None:
        return known
    if name.count("/") == 1 and not name.startswith((".", "/")):
        return _shape_of(Path(_from_hub(name)))
    raise UnsupportedModelError(
        f"model {name!r} is not a file, a built-in name or a hub id: {_nearest(name)}"
    )


def _shape_of(path: Path) -> ModelShape:
    """Return the shape of a config's language model, and say what is left out of an image-and-text model."""
    shape = ModelShape.from_config(path)
    tower = tower_parameters(path)
    if tower is not None:
        logger.warning(
            "%s: the language model alone is counted; its vision tower has about %.3g M parameters more, of 2 bytes "
            "frozen in bf16, 4 in fp32, 16 trained (docs/trl_recipes.md)",
            path,
            tower / 1e6,
        )
    return shape


def _from_hub(name: str) -> str:
    """Path of a hub model's config.json, from the local cache or downloaded."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise MissingDependencyError(
            "huggingface_hub is not installed: pip install huggingface_hub"
        ) from None
    try:
        return hf_hub_download(name, "config.json")
    except Exception as error:  # many classes: no such repository, gated, offline, timeout
        reason = type(error).__name__
        raise UnsupportedModelError(
            f"model {name!r} is not built in, and its config.json cannot be read from the hub ({reason}): "
            f"{_nearest(name)}"
        ) from error


def _nearest(name: str) -> str:
    """Advice with the built-in names that resemble `name`."""
    plain = name.rpartition("/")[2].casefold()
    first = re.match("[a-z]*", plain)
    # A name that only shares its size, such as whisper-large, is none of these
    resembling = [
        known
        for known in catalogue_names()
        if first and difflib.SequenceMatcher(a=first[0], b=known[: len(first[0])]).ratio() > 0.7
    ]
    close = difflib.get_close_matches(plain, resembling, n=3, cutoff=0.5)
    built_in = f"use {', '.join(close)}, or" if close else "use"
    return (
        f"{built_in} a folder with a config.json; for encoders, speech and images estimate a script that trains them "
        "(hfscale estimate --script train.py)"
    )
