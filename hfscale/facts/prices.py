"""Prices of GPUs and of egress at providers, from `prices.toml` and the user's own price list."""

import datetime
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from hfscale.errors import ConfigFileError
from hfscale.facts.hardware import Accelerator, accelerator

STALE_DAYS = 90
"""Age in days from which a price is reported as old: list prices of 2025 and 2026 changed every few months."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """Holds a provider's price of a GPU, in USD per GPU and hour."""

    provider: str
    """The provider's name."""
    gpu: str
    """The accelerator's name in hfscale."""
    region: str | None = None
    """The region, if the price depends on it."""
    product: str | None = None
    """The provider's name of the instance type."""
    on_demand_usd: float | None = None
    """On-demand price; None if the provider has none."""
    spot_usd: float | None = None
    """Price of interruptible instances; None if the provider has none."""
    one_node: bool = False
    """Whether the price is for single nodes: its source names no fast network between nodes."""
    source: str
    """Where the price was read."""
    date: datetime.date
    """When the price was read."""

    def age_days(self, today: datetime.date) -> int:
        """Returns the days since the price was read."""
        return (today - self.date).days


@dataclass(frozen=True, kw_only=True)
class Egress:
    """Holds a provider's price of data that is copied out to the internet."""

    provider: str
    """The provider's name."""
    usd_per_gb: float
    """USD per 10^9 bytes; 0 where egress is free."""
    source: str
    """Where the price was read."""
    date: datetime.date
    """When the price was read."""


def user_price_file() -> Path:
    """Returns the path of the user's own price list, `$XDG_CONFIG_HOME/hfscale/prices.toml`, which may not exist."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "hfscale" / "prices.toml"


@cache
def shipped_prices() -> tuple[Price, ...]:
    """Reads the prices in hfscale's `prices.toml`."""
    return _parse(*_shipped())


def all_prices(path: Path | None = None) -> tuple[Price, ...]:
    """Reads hfscale's prices and the user's.

    A user's row replaces the shipped row of the same provider, GPU and region.

    Args:
        path (`Path`, *optional*): The user's price list; by default `user_price_file()`, if it exists.

    Raises:
        `ConfigFileError`: The file cannot be read, or a row is wrong.
        `UnknownHardwareError`: The GPU of a row is in no table.
    """
    merged = {(row.provider.casefold(), row.gpu, row.region): row for row in shipped_prices()}
    for row in _parse(*own) if (own := _own(path)) else ():
        merged[row.provider.casefold(), row.gpu, row.region] = row
    return tuple(merged.values())


def all_egress(path: Path | None = None) -> dict[str, Egress]:
    """Reads hfscale's egress prices and the user's. A user's row replaces the shipped row of the same provider.

    Args:
        path (`Path`, *optional*): The user's price list; by default `user_price_file()`, if it exists.

    Returns:
        `dict[str, Egress]`: The egress prices by provider, in lower case.

    Raises:
        `ConfigFileError`: The file cannot be read, or a row is wrong.
    """
    rows = [row for text, where in filter(None, (_shipped(), _own(path))) for row in _parse_egress(text, where)]
    return {row.provider.casefold(): row for row in rows}


def _shipped() -> tuple[str, str]:
    """The text of the shipped price list, and its name for messages."""
    text = resources.files("hfscale.facts").joinpath("prices.toml").read_text(encoding="utf-8")
    return text, "hfscale/facts/prices.toml"


def _own(path: Path | None) -> tuple[str, str] | None:
    """The text of the user's price list, and its name for messages; None if there is none."""
    chosen = path or user_price_file()
    if path is None and not chosen.is_file():
        return None
    try:
        return chosen.read_text(encoding="utf-8"), str(chosen)
    except OSError as error:
        raise ConfigFileError(f"price list {chosen} cannot be read: {error.strerror}; check the path") from None


def prices_of(gpu: Accelerator, prices: tuple[Price, ...]) -> tuple[Price, ...]:
    """Selects the prices of a GPU, sorted by on-demand price; rows with only a spot price come last.

    Args:
        gpu (`Accelerator`): The GPU. For a measured device these are the prices of its `base` too.
        prices (`tuple[Price, ...]`): The prices of all GPUs (`all_prices`).
    """
    rows = [row for row in prices if row.gpu in (gpu.name, gpu.base)]
    return tuple(sorted(rows, key=lambda row: (row.on_demand_usd is None, row.on_demand_usd or row.spot_usd or 0.0)))


def _tables(text: str, where: str, name: str) -> list[Any]:
    try:
        rows = tomllib.loads(text).get(name, [])
    except tomllib.TOMLDecodeError as error:
        raise ConfigFileError(f"{where} is not TOML ({error}): write rows of [[{name}]]") from None
    if not isinstance(rows, list):
        raise ConfigFileError(f"{where}: {name} is not a list of tables: write rows of [[{name}]]")
    return rows


def _parse(text: str, where: str) -> tuple[Price, ...]:
    rows = _tables(text, where, "price")
    return tuple(_row(row, f"{where}, price {number}") for number, row in enumerate(rows, 1))


def _parse_egress(text: str, where: str) -> list[Egress]:
    found = []
    for number, row in enumerate(_tables(text, where, "egress"), 1):
        place = f"{where}, egress {number}"
        _check_keys(row, Egress, ("provider", "usd_per_gb", "source", "date"), place)
        rate = row["usd_per_gb"]
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 100:
            raise ConfigFileError(f"{place}: usd_per_gb is {rate!r}: it must be a number from 0 to 100")
        found.append(Egress(**{**row, "date": _date(row["date"], place)}))
    return found


def _check_keys(row: Mapping[str, Any], kind: type, required: tuple[str, ...], where: str) -> None:
    known = {field.name for field in fields(kind)}
    if unknown := set(row) - known:
        raise ConfigFileError(f"{where}: unknown key {sorted(unknown)[0]!r}: use {', '.join(sorted(known))}")
    for key in required:
        if key not in row:
            raise ConfigFileError(f"{where} has no {key}: add it")


def _date(value: Any, where: str) -> datetime.date:
    try:
        return value if isinstance(value, datetime.date) else datetime.date.fromisoformat(str(value))
    except ValueError:
        raise ConfigFileError(f"{where}: date is {value!r}: write it as 2026-11-09") from None


def _row(row: Mapping[str, Any], where: str) -> Price:
    _check_keys(row, Price, ("provider", "gpu", "source", "date"), where)
    for key in ("on_demand_usd", "spot_usd"):
        value = row.get(key)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e4
        ):
            raise ConfigFileError(f"{where}: {key} is {value!r}: it must be USD per GPU and hour, above 0")
    if not isinstance(row.get("one_node", False), bool):
        raise ConfigFileError(f"{where}: one_node is {row['one_node']!r}: it must be true or false")
    if row.get("on_demand_usd") is None and row.get("spot_usd") is None:
        raise ConfigFileError(f"{where} has no price: give on_demand_usd or spot_usd")
    return Price(**{**row, "gpu": accelerator(str(row["gpu"])).name, "date": _date(row["date"], where)})
