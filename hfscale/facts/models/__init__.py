"""Finds a model by name: a file, a name in the built-in catalogue, or a hub id."""

import difflib
import re
from functools import cache
from pathlib import Path
from typing import Any

from hfscale.core.logging import get_logger
from hfscale.core.tables import read_table
from hfscale.errors import MissingDependencyError, UnsupportedModelError
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.tower_shape import FAMILIES, TowerShape, tower_parameters

logger = get_logger(__name__)


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Read the built-in models: name -> config keys of the language model, and hub ids under the key `hub`."""
    return read_table("facts/models/catalogue.toml")


def catalogue_names() -> tuple[str, ...]:
    """List the names of the built-in models."""
    return tuple(catalogue())


@cache
def catalogue_shape(name: str) -> ModelShape | None:
    """Return the shape of the built-in model with this name or hub id, ignoring case; None if there is none."""
    known = _catalogue_name(name)
    if known is None:
        return None
    config = {key: value for key, value in catalogue()[known].items() if key != "hub"}
    if config["model_type"] in _WINDOW_BY_DEFAULT:
        config.setdefault("sliding_window", None)
    return ModelShape.from_config(config)


def _catalogue_name(name: str) -> str | None:
    """Return the built-in name of the model with this name or hub id, ignoring case; None if there is none."""
    plain = name.casefold()
    for known, entry in catalogue().items():
        if plain == known or plain in (hub.casefold() for hub in entry["hub"]):
            return known
    return None


_WINDOW_BY_DEFAULT = ("mistral", "mixtral", "phi3")
"""Families whose class has a sliding window by default, which their published configs set to null; TOML has no
null."""


def find_model(name: str, *, counts_tower: bool = False) -> ModelShape:
    """Find the shape of a model by name.

    Args:
        name (`str`): a `config.json` or its folder, a built-in name, or a hub id, whose `config.json` is downloaded if
            the model is not built in.
        counts_tower (`bool`): whether the vision tower of an image-and-text model is counted too, with `find_tower`;
            otherwise a line says that it is left out.

    Raises:
        UnsupportedModelError: the model is neither a file, nor built in, nor on the hub, or hfscale does not support
            it; the message gives the nearest names or the key.
        ConfigFileError: the file is not a model config.
        MissingDependencyError: the model is on the hub, and huggingface_hub is not installed.
    """
    known = None if Path(name).exists() else catalogue_shape(name)
    if known is not None:
        return known
    path = _config_path(name)
    if counts_tower:
        return ModelShape.from_config(path)
    return _shape_of(path)


def find_tower(name: str) -> TowerShape:
    """Find the shape of the vision tower and the projector of an image-and-text model by name.

    Args:
        name (`str`): as in `find_model`.

    Raises:
        UnsupportedModelError: the model cannot be found, reads no images, or its tower was not counted.
        ConfigFileError: the file is not a model config.
        MissingDependencyError: the model is on the hub, and huggingface_hub is not installed.
    """
    known = None if Path(name).exists() else _catalogue_name(name)
    if known is None:
        return TowerShape.from_config(_config_path(name))
    tower = read_table("facts/towers.toml")["models"].get(known)
    if tower is None:
        raise UnsupportedModelError(
            f"{name} reads no images as it is built in: give the config.json of an image-and-text model, of "
            f"{', '.join(FAMILIES)}"
        )
    return TowerShape.from_config({**tower, "text_config": catalogue()[known]})


def _config_path(name: str) -> Path:
    """Return the path of a model's config: a file, its folder, or of a hub id."""
    path = Path(name)
    if path.exists():
        return path
    if name.count("/") == 1 and not name.startswith((".", "/")):
        return Path(_from_hub(name))
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
            "frozen in bf16, 4 in fp32, 16 trained; with images, plan --task vision (docs/trl_recipes.md)",
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
