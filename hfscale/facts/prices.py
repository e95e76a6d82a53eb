"""Prices of GPUs and of egress at providers, from `prices.toml` and the user's own price list."""

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hfscale.core.tables import check_keys, is_number, read_table, read_user_tables, user_file
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
        """Return the days since the price was read."""
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
    """Return the path of the user's own price list, `$XDG_CONFIG_HOME/hfscale/prices.toml`, which may not exist."""
    return user_file("prices.toml")


@cache
def shipped_prices() -> tuple[Price, ...]:
    """Read the prices in hfscale's `prices.toml`."""
    return tuple(_prices(*_shipped()))


def all_prices(path: Path | None = None) -> tuple[Price, ...]:
    """Read hfscale's prices and the user's.

    A user's row replaces the shipped row of the same provider, GPU and region.

    Args:
        path (`Path`, *optional*): the user's price list; by default `user_price_file()`, if it exists.

    Raises:
        ConfigFileError: the file cannot be read, or a row is wrong.
        UnknownHardwareError: the GPU of a row is in no table.
    """
    merged = {(row.provider.casefold(), row.gpu, row.region): row for row in shipped_prices()}
    for row in (row for source in _own(path) for row in _prices(*source)):
        merged[row.provider.casefold(), row.gpu, row.region] = row
    return tuple(merged.values())


def all_egress(path: Path | None = None) -> dict[str, Egress]:
    """Read hfscale's egress prices and the user's. A user's row replaces the shipped row of the same provider.

    Args:
        path (`Path`, *optional*): the user's price list; by default `user_price_file()`, if it exists.

    Returns:
        `dict[str, Egress]`: The egress prices by provider, in lower case.

    Raises:
        ConfigFileError: the file cannot be read, or a row is wrong.
    """
    sources = (_shipped(), *_own(path))
    return {row.provider.casefold(): row for source in sources for row in _egress(*source)}


Source = tuple[dict[str, Any], str]
"""The content of a price list, and its name for messages."""


def _shipped() -> Source:
    return read_table("facts/prices.toml"), "hfscale/facts/prices.toml"


def _own(path: Path | None) -> list[Source]:
    """The user's price list; empty if there is none."""
    chosen = path or user_price_file()
    if path is None and not chosen.is_file():
        return []
    return [
        (
            read_user_tables(chosen, "price list", fix="write rows of [[price]] and [[egress]]"),
            str(chosen),
        )
    ]


def prices_of(gpu: Accelerator, prices: tuple[Price, ...]) -> tuple[Price, ...]:
    """Select the prices of a GPU, sorted by on-demand price; rows with only a spot price come last.

    Args:
        gpu (`Accelerator`): the GPU. For a measured device these are the prices of its `base` too.
        prices (`tuple[Price, ...]`): the prices of all GPUs (`all_prices`).
    """
    rows = [row for row in prices if row.gpu in (gpu.name, gpu.base)]
    return tuple(
        sorted(
            rows,
            key=lambda row: (row.on_demand_usd is None, row.on_demand_usd or row.spot_usd or 0.0),
        )
    )


def _egress(document: Mapping[str, Any], where: str) -> Iterator[Egress]:
    for number, row in enumerate(document.get("egress", []), 1):
        place = f"{where}, egress {number}"
        check_keys(row, Egress, place)
        rate = row["usd_per_gb"]
        if not (is_number(rate) and 0 <= rate < 100):
            raise ConfigFileError(
                f"{place}: usd_per_gb is {rate!r}: it must be a number from 0 to 100"
            )
        yield Egress(**{**row, "date": _date(row["date"], place)})


def _date(value: Any, where: str) -> datetime.date:
    try:
        return (
            value if isinstance(value, datetime.date) else datetime.date.fromisoformat(str(value))
        )
    except ValueError:
        raise ConfigFileError(f"{where}: date is {value!r}: write it as 2026-11-09") from None


def _prices(document: Mapping[str, Any], where: str) -> Iterator[Price]:
    for number, row in enumerate(document.get("price", []), 1):
        yield _price(row, f"{where}, price {number}")


def _price(row: Mapping[str, Any], where: str) -> Price:
    check_keys(row, Price, where)
    for key in ("on_demand_usd", "spot_usd"):
        value = row.get(key)
        if value is not None and not (is_number(value) and 0 < value < 1e4):
            raise ConfigFileError(
                f"{where}: {key} is {value!r}: it must be USD per GPU and hour, above 0"
            )
    if not isinstance(row.get("one_node", False), bool):
        raise ConfigFileError(f"{where}: one_node is {row['one_node']!r}: it must be true or false")
    if row.get("on_demand_usd") is None and row.get("spot_usd") is None:
        raise ConfigFileError(f"{where} has no price: give on_demand_usd or spot_usd")
    return Price(
        **{**row, "gpu": accelerator(str(row["gpu"])).name, "date": _date(row["date"], where)}
    )
