"""Accelerators that `hfscale plan --calibrate` measured, from the user's own hardware file."""

import math
import os
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from hfscale.errors import ConfigFileError, UnknownHardwareError
from hfscale.facts.hardware import Accelerator, accelerator, plain_name

_TEXTS = ("name", "source", "date", "base")
_LISTS = ("aliases", "device_names")
_NEEDED = ("name", "memory_gib", "memory_tb_s", "source", "date")


def user_file() -> Path:
    """The user's own hardware file, `$XDG_CONFIG_HOME/hfscale/hardware.toml`; it need not exist."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "hfscale" / "hardware.toml"


def find_accelerator(name: str, path: Path | None = None) -> Accelerator:
    """The accelerator called `name` in the user's file, else in `hardware.toml`.

    Args:
        name (`str`): A name or an alias.
        path (`Path`, *optional*): The user's file; by default `user_file()`, if it exists.

    Raises:
        `ConfigFileError`: The file cannot be read, or a row is wrong.
        `UnknownHardwareError`: There is no such accelerator.
    """
    chosen = path or user_file()
    rows = read_rows(chosen) if path is not None or chosen.is_file() else ()
    for row in rows:
        if plain_name(name) in map(plain_name, (row.name, *row.aliases)):
            return row
    try:
        return accelerator(name)
    except UnknownHardwareError as error:
        if not rows:
            raise
        raise UnknownHardwareError(f"{error}; {chosen} has {', '.join(row.name for row in rows)}") from None


def read_rows(path: Path) -> tuple[Accelerator, ...]:
    """The accelerators of a file.

    Raises:
        `ConfigFileError`: It cannot be read, or a row is wrong.
    """
    rows = read_document(path).get("accelerator", [])
    return tuple(_row(row, f"{path}, accelerator {number}") for number, row in enumerate(rows, 1))


def read_document(path: Path) -> dict[str, Any]:
    """A hardware file as it stands: rows of `accelerator`, and the measurements they come from.

    Raises:
        `ConfigFileError`: It cannot be read, or is no TOML with lists of tables.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigFileError(f"hardware {path} cannot be read: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise ConfigFileError(f"hardware {path} is not UTF-8 text: write it with hfscale plan --calibrate") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigFileError(
            f"hardware {path} is no TOML ({error}): write it with hfscale plan --calibrate"
        ) from None
    for key, rows in document.items():
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ConfigFileError(f"hardware {path}: {key} is no list of tables: write rows of [[accelerator]]")
    return document


def _row(row: dict[str, Any], where: str) -> Accelerator:
    known = [field.name for field in fields(Accelerator)]
    if unknown := sorted(set(row) - set(known)):
        raise ConfigFileError(f"{where}: {unknown[0]!r} is no key: use {', '.join(known)}")
    for key in _NEEDED:
        if key not in row:
            raise ConfigFileError(f"{where} has no {key}: add it, or write it with hfscale plan --calibrate")
    for key, value in row.items():
        if key in _TEXTS:
            fine = isinstance(value, str) and bool(value.strip())
        elif key in _LISTS:
            fine = isinstance(value, list) and all(isinstance(item, str) for item in value)
        else:
            fine = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
        if not fine:
            kind = "text" if key in _TEXTS else "a list of texts" if key in _LISTS else "a number above 0"
            raise ConfigFileError(f"{where}: {key} {value!r} is not {kind}: give one")
    lists = {key: tuple(row.get(key, ())) for key in _LISTS}
    return Accelerator(**{**row, **lists})
