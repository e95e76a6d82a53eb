"""Accelerators of the user's own hardware file, beside those of `hardware.toml`."""

from pathlib import Path
from typing import Any

from hfscale.core.tables import check_keys, is_number, read_user_tables, user_file
from hfscale.errors import ConfigFileError, UnknownHardwareError
from hfscale.facts.hardware import Accelerator, accelerator, plain_name

_TEXTS = ("name", "source", "date", "base")
_LISTS = ("aliases", "device_names")
_CALIBRATE = "write it with hfscale plan --calibrate"


def user_hardware_file() -> Path:
    """Return the path of the user's own hardware file, `$XDG_CONFIG_HOME/hfscale/hardware.toml`, which may not exist.

    `hfscale plan --calibrate` writes it with measured accelerators.
    """
    return user_file("hardware.toml")


def find_accelerator(name: str, path: Path | None = None) -> Accelerator:
    """Return the accelerator called `name` in the user's hardware file, or else in `hardware.toml`.

    Args:
        name (`str`): a name or an alias.
        path (`Path`, *optional*): the user's file; by default `user_hardware_file()`, if it exists.

    Raises:
        ConfigFileError: the file cannot be read, or a row is wrong.
        UnknownHardwareError: there is no such accelerator.
    """
    chosen = path or user_hardware_file()
    rows = read_hardware_file(chosen) if path is not None or chosen.is_file() else ()
    for row in rows:
        if plain_name(name) in map(plain_name, (row.name, *row.aliases)):
            return row
    try:
        return accelerator(name)
    except UnknownHardwareError as error:
        if not rows:
            raise
        raise UnknownHardwareError(
            f"{error}; {chosen} has {', '.join(row.name for row in rows)}"
        ) from None


def read_hardware_file(path: Path) -> tuple[Accelerator, ...]:
    """Read the accelerators of a hardware file.

    Raises:
        ConfigFileError: the file cannot be read, or a row is wrong.
    """
    rows = read_hardware_document(path).get("accelerator", [])
    return tuple(_row(row, f"{path}, accelerator {number}") for number, row in enumerate(rows, 1))


def read_hardware_document(path: Path) -> dict[str, Any]:
    """Read a hardware file without checking its rows.

    Returns:
        `dict`: The content of the file: rows of `accelerator`, and the measurements that they come from.

    Raises:
        ConfigFileError: the file cannot be read, or is not TOML with lists of tables.
    """
    return read_user_tables(path, "hardware file", fix=_CALIBRATE)


def _row(row: dict[str, Any], where: str) -> Accelerator:
    """The accelerator of a row, after checking its keys and values."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    row = dict.fromkeys(_LISTS, ()) | values
    check_keys(row, Accelerator, where, fix=f"add it, or {_CALIBRATE}")
    # A file of the user, or one that a calibration has written: wrong values must not become a plan.
    for key, value in row.items():
        if key in _TEXTS:
            is_valid = isinstance(value, str) and bool(value.strip())
        elif key in _LISTS:
            is_valid = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        else:
            is_valid = is_number(value) and value > 0
        if not is_valid:
            kinds = dict.fromkeys(_TEXTS, "text") | dict.fromkeys(_LISTS, "a list of texts")
            raise ConfigFileError(
                f"{where}: {key} is {value!r}: it must be {kinds.get(key, 'a number above 0')}"
            )
    return Accelerator(**row)
