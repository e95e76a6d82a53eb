"""Reading YAML recipe files: a flat mapping of flag names to values."""

import difflib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from hfscale.errors import ConfigFileError


def read_yaml_mapping(path: str, known: Collection[str]) -> dict[str, Any]:
    """The mapping in a YAML file, each of whose keys must be in `known`.

    Raises:
        ConfigFileError: the file is missing, unreadable, not YAML, not a mapping, or has an unknown key.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from None
    except OSError as error:
        raise ConfigFileError(f"{path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigFileError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigFileError(f"{path} holds a {type(content).__name__}, not 'flag: value' lines")
    for key in content:
        if key not in known:
            raise ConfigFileError(f"{path} has an unknown key '{key}'{nearest(str(key), known)}")
    return content


def to_argv(path: str, values: Mapping[str, Any]) -> list[str]:
    """The mapping as command-line tokens: a list becomes several values, a mapping becomes JSON, null is left out.

    Raises:
        ConfigFileError: a list that holds anything but plain values.
    """
    argv: list[str] = []
    for key, value in values.items():
        if value is None:
            continue
        argv.append(f"--{key}")
        if isinstance(value, list):
            if any(isinstance(item, list | dict) for item in value):
                raise ConfigFileError(f"{path}: '{key}' is a list of lists or mappings; give plain values")
            argv.extend(_plain(item) for item in value)
        else:
            argv.append(json.dumps(value) if isinstance(value, dict) else _plain(value))
    return argv


def nearest(name: str, known: Collection[str], prefix: str = "") -> str:
    """`"; did you mean …?"` with the most similar known name, or nothing where none is similar."""
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
