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


@dataclass(frozen=True, kw_only=True)
class Egress:
    """What a provider asks for data that leaves it for the internet."""

    provider: str
    """Who."""
    usd_per_gb: float
    """USD per 10^9 bytes; 0 where it asks for nothing."""
    source: str
    """Where it was read."""
    date: datetime.date
    """When."""


def user_file() -> Path:
    """The user's own price list; it need not exist."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "hfscale" / "prices.toml"


@cache
def shipped_prices() -> tuple[Price, ...]:
    """The prices that come with hfscale."""
    return _parse(*_shipped())


def all_prices(path: Path | None = None) -> tuple[Price, ...]:
    """Shipped prices with the user's on top: a row of the same provider, GPU and region replaces the shipped one.

    Args:
        path (`Path`, *optional*): The user's file; by default `user_file()`, if it exists.

    Raises:
        `ConfigFileError`: The file cannot be read, or a row is wrong.
    """
    merged = {(row.provider.casefold(), row.gpu, row.region): row for row in shipped_prices()}
    for row in _parse(*own) if (own := _own(path)) else ():
        merged[row.provider.casefold(), row.gpu, row.region] = row
    return tuple(merged.values())


def all_egress(path: Path | None = None) -> dict[str, Egress]:
    """What data costs on its way out, by provider in lower case; argument and errors as for `all_prices`."""
    rows = [row for text, where in filter(None, (_shipped(), _own(path))) for row in _parse_egress(text, where)]
    return {row.provider.casefold(): row for row in rows}


def _shipped() -> tuple[str, str]:
    text = resources.files("hfscale.facts").joinpath("prices.toml").read_text(encoding="utf-8")
    return text, "hfscale/facts/prices.toml"


def _own(path: Path | None) -> tuple[str, str] | None:
    """The user's file and its name; None where there is none."""
    chosen = path or user_file()
    if path is None and not chosen.is_file():
        return None
    try:
        return chosen.read_text(encoding="utf-8"), str(chosen)
    except OSError as error:
        raise ConfigFileError(f"prices {chosen} cannot be read: {error.strerror}; check the path") from None


def prices_of(gpu: Accelerator, prices: tuple[Price, ...]) -> tuple[Price, ...]:
    """The rows for a GPU, cheapest on-demand first, those with spot prices only last."""
    rows = [row for row in prices if row.gpu in (gpu.name, gpu.base)]
    return tuple(sorted(rows, key=lambda row: (row.on_demand_usd is None, row.on_demand_usd or row.spot_usd or 0.0)))


def _tables(text: str, where: str, name: str) -> list[Any]:
    try:
        rows = tomllib.loads(text).get(name, [])
    except tomllib.TOMLDecodeError as error:
        raise ConfigFileError(f"{where} is no TOML ({error}): write rows of [[{name}]]") from None
    if not isinstance(rows, list):
        raise ConfigFileError(f"{where}: {name} is no list of tables: write rows of [[{name}]]")
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
            raise ConfigFileError(f"{place}: usd_per_gb {rate!r} is not USD per GB: give a number, 0 where it is free")
        found.append(Egress(**{**row, "date": _date(row["date"], place)}))
    return found


def _check_keys(row: Mapping[str, Any], kind: type, required: tuple[str, ...], where: str) -> None:
    known = {field.name for field in fields(kind)}
    if unknown := set(row) - known:
        raise ConfigFileError(f"{where}: {sorted(unknown)[0]!r} is no key: use {', '.join(sorted(known))}")
    for key in required:
        if key not in row:
            raise ConfigFileError(f"{where} has no {key}: add it")


def _date(value: Any, where: str) -> datetime.date:
    try:
        return value if isinstance(value, datetime.date) else datetime.date.fromisoformat(str(value))
    except ValueError:
        raise ConfigFileError(f"{where}: date {value!r} is no date: write it as 2026-11-09") from None


def _row(row: Mapping[str, Any], where: str) -> Price:
    _check_keys(row, Price, ("provider", "gpu", "source", "date"), where)
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
    return Price(**{**row, "gpu": accelerator(str(row["gpu"])).name, "date": _date(row["date"], where)})
