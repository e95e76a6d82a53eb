"""Tables in TOML files: those of the package, and the user's own in `$XDG_CONFIG_HOME/hfscale`."""

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from hfscale.core.text_files import read_text
from hfscale.errors import ConfigFileError

_PACKAGE = Path(__file__).parent.parent


def read_table(name: str) -> dict[str, Any]:
    """Read a TOML file of the package.

    Args:
        name (`str`): its path in the package, such as `facts/hardware.toml`.
    """
    return tomllib.loads((_PACKAGE / name).read_text(encoding="utf-8"))


def user_file(name: str) -> Path:
    """Return the path of a file of the user's settings, `$XDG_CONFIG_HOME/hfscale/NAME`, which may not exist.

    Args:
        name (`str`): the name of the file, such as `prices.toml`.
    """
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "hfscale" / name


def read_user_tables(path: Path, what: str, *, fix: str) -> dict[str, list[dict[str, Any]]]:
    """Read a TOML file of the user, which holds lists of tables.

    Args:
        path (`Path`): the file.
        what (`str`): what it is, for messages: `price list`.
        fix (`str`): how to write it, for messages.

    Returns:
        `dict`: the rows of each list, by its name; the rows are not checked.

    Raises:
        ConfigFileError: the file cannot be read, or is not TOML with lists of tables.
    """
    try:
        document = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigFileError(
            f"{what} {path} cannot be read: {error.strerror}; check the path"
        ) from None
    except UnicodeDecodeError:
        raise ConfigFileError(f"{what} {path} is not UTF-8: {fix}") from None
    except RecursionError:
        raise ConfigFileError(f"{what} {path} is nested too deeply: {fix}") from None
    except ValueError as error:  # of tomllib, also about a number with too many digits
        raise ConfigFileError(f"{what} {path} is not TOML ({error}): {fix}") from None
    for key, rows in document.items():
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ConfigFileError(f"{what} {path}: {key} is not a list of tables: {fix}")
    return document


def check_keys(row: Mapping[str, Any], kind: type, where: str, *, fix: str = "add it") -> None:
    """Check that a row has only keys that are fields of a dataclass, and all those without a default.

    Args:
        row (`Mapping`): the row.
        kind (`type`): the dataclass.
        where (`str`): the file and the row, for messages.
        fix (`str`): what to do about a missing key, for messages.

    Raises:
        ConfigFileError: a key is unknown or missing.
    """
    known = {field.name: field for field in fields(kind)}
    if unknown := sorted(set(row) - set(known)):
        raise ConfigFileError(f"{where}: unknown key {unknown[0]!r}: use {', '.join(known)}")
    for name, field in known.items():
        if field.default is MISSING and name not in row:
            raise ConfigFileError(f"{where} has no {name}: {fix}")


def is_number(value: Any) -> bool:
    """Return whether a value of a table is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
