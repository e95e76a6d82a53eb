"""What providers ask for a GPU, from `prices.toml` and the user's own file on top."""

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
"""Age from which a price is called old: list prices of 2025 and 2026 changed every few months."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """One provider's price of one GPU, USD per GPU and hour."""

    provider: str
    """Who rents it out."""
    gpu: str
    """The accelerator's name in hfscale."""
    region: str | None = None
    """Where, if the price depends on it."""
    product: str | None = None
    """What the provider calls the instance."""
    on_demand_usd: float | None = None
    """Without commitment, kept until given back."""
    spot_usd: float | None = None
    """Interruptible."""
    one_node: bool = False
    """Whether it is for single nodes: no fast network between them is named where the price was read."""
    source: str
    """Where it was read."""
    date: datetime.date
    """When."""

    def age_days(self, today: datetime.date) -> int:
        """Days since it was read."""
        return (today - self.date).days


def user_file() -> Path:
    """The user's own price list; it need not exist."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "hfscale" / "prices.toml"


@cache
def shipped_prices() -> tuple[Price, ...]:
    """The prices that come with hfscale."""
    text = resources.files("hfscale.facts").joinpath("prices.toml").read_text(encoding="utf-8")
    return _parse(text, "hfscale/facts/prices.toml")


def all_prices(path: Path | None = None) -> tuple[Price, ...]:
    """Shipped prices with the user's on top: a row of the same provider, GPU and region replaces the shipped one.

    Args:
        path (`Path`, *optional*): The user's file; by default `user_file()`, if it exists.

    Raises:
        `ConfigFileError`: The file cannot be read, or a row is wrong.
    """
    merged = {(row.provider.casefold(), row.gpu, row.region): row for row in shipped_prices()}
    chosen = path or user_file()
    if path is not None or chosen.is_file():
        try:
            text = chosen.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigFileError(f"prices {chosen} cannot be read: {error.strerror}; check the path") from None
        for row in _parse(text, str(chosen)):
            merged[row.provider.casefold(), row.gpu, row.region] = row
    return tuple(merged.values())


def prices_of(gpu: Accelerator, prices: tuple[Price, ...]) -> tuple[Price, ...]:
    """The rows for a GPU, cheapest on-demand first, those with spot prices only last."""
    rows = [row for row in prices if row.gpu in (gpu.name, gpu.base)]
    return tuple(sorted(rows, key=lambda row: (row.on_demand_usd is None, row.on_demand_usd or row.spot_usd or 0.0)))


def _parse(text: str, where: str) -> tuple[Price, ...]:
    try:
        rows = tomllib.loads(text).get("price", [])
    except tomllib.TOMLDecodeError as error:
        raise ConfigFileError(f"{where} is no TOML ({error}): write rows of [[price]]") from None
    if not isinstance(rows, list):
        raise ConfigFileError(f"{where}: price is no list of tables: write rows of [[price]]")
    return tuple(_row(row, f"{where}, price {number}") for number, row in enumerate(rows, 1))


def _row(row: Mapping[str, Any], where: str) -> Price:
    known = {field.name for field in fields(Price)}
    if unknown := set(row) - known:
        raise ConfigFileError(f"{where}: {sorted(unknown)[0]!r} is no key: use {', '.join(sorted(known))}")
    for key in ("provider", "gpu", "source", "date"):
        if key not in row:
            raise ConfigFileError(f"{where} has no {key}: add it")
    for key in ("on_demand_usd", "spot_usd"):
        value = row.get(key)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e4
        ):
            raise ConfigFileError(f"{where}: {key} {value!r} is not USD per GPU and hour: give a number above 0")
    if not isinstance(row.get("one_node", False), bool):
        raise ConfigFileError(f"{where}: one_node {row['one_node']!r} is neither true nor false: write one of them")
    if row.get("on_demand_usd") is None and row.get("spot_usd") is None:
        raise ConfigFileError(f"{where} has no price: give on_demand_usd or spot_usd")
    try:
        when = row["date"] if isinstance(row["date"], datetime.date) else datetime.date.fromisoformat(str(row["date"]))
    except ValueError:
        raise ConfigFileError(f"{where}: date {row['date']!r} is no date: write it as 2026-11-09") from None
    return Price(**{**row, "gpu": accelerator(str(row["gpu"])).name, "date": when})
