"""Which settings of a DeepSpeed config have been trained, saved and resumed by a test; all others are refused.

The list is in `deepspeed.toml`. It names what is known, not what is not: a mode that a later DeepSpeed adds is refused
until a test has shown that its state is saved and resumed. The rules are in `support.toml`, on the property
`deepspeed_setting`. No torch, and DeepSpeed is not imported.
"""

from collections.abc import Mapping
from typing import Any

from hfscale.core.tables import read_table

_TABLE: Mapping[str, Any] = read_table("facts/deepspeed.toml")

SHOWN: frozenset[str] = frozenset(_TABLE["shown"])
"""Paths of settings that may have any value, such as `zero_optimization.stage`; with all that is below them."""
VALUES: Mapping[str, list[Any]] = _TABLE["values"]
"""Path of a setting -> the values that have been shown."""
REFUSED: Mapping[str, str] = _TABLE["refused"]
"""Path of a setting that is known not to work -> the reason with how to fix it."""
INERT: Mapping[str, str] = _TABLE["inert"]
"""Path of a setting that has no effect in a Trainer -> what to use for its purpose."""
_PATHS = (*SHOWN, *VALUES, *REFUSED)
_AUTO = "auto"


def unshown_setting(config: Mapping[str, Any]) -> str:
    """Return the first setting of a DeepSpeed config that no test has shown.

    A setting that is off asks for nothing: null, false, an empty section, or a section whose `enabled` is false.

    Args:
        config (`Mapping[str, Any]`): the config of DeepSpeed.

    Returns:
        `str`: the path of the setting, such as `zero_optimization.zenflow`; `none` where all have been shown.
    """
    return _unshown(config, "") or "none"


def _unshown(section: Mapping[str, Any], above: str) -> str | None:
    for key, value in section.items():
        path = f"{above}{key}"
        if path in VALUES:  # where false may be what is not known
            if not _is_among(value, VALUES[path]):
                return path
            continue
        if path in SHOWN or path in INERT or _is_off(value):
            continue
        is_section = isinstance(value, Mapping) and any(
            known.startswith(f"{path}.") for known in _PATHS
        )
        if not is_section:
            return path
        below = _unshown(value, f"{path}.")
        if below is not None:
            return below
    return None


def _is_off(value: Any) -> bool:
    """Return whether a setting asks for nothing."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value is None or value is False or value == []


def _is_among(value: Any, shown: list[Any]) -> bool:
    """Return whether a value has been shown, or is the default; DeepSpeed ignores the case of names."""
    if value is None or value == _AUTO:
        return True
    return (value.lower() if isinstance(value, str) else value) in shown


def inert_settings(config: Mapping[str, Any]) -> list[str]:
    """Return the settings of a DeepSpeed config that have no effect in a Trainer.

    Args:
        config (`Mapping[str, Any]`): the config of DeepSpeed.

    Returns:
        `list[str]`: one line for each, with what to use for its purpose; empty where there is none.
    """
    lines = []
    for path, instead in INERT.items():
        section = config.get(path)
        asks = isinstance(section, Mapping) and not all(map(_is_off, section.values()))
        if asks:
            lines.append(f"{path} in the DeepSpeed config has no effect in a Trainer: {instead}")
    return lines
