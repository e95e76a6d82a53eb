"""What an hour of the GPU at hand costs: as the user says, or as the price list does."""

from dataclasses import dataclass
from pathlib import Path

from hfscale.facts.hardware import match_device_name
from hfscale.facts.prices import all_prices, prices_of


@dataclass(frozen=True, kw_only=True)
class Rate:
    """USD per GPU and hour, and where the number comes from."""

    usd_per_gpu_hour: float
    """One device, one hour."""
    source: str
    """In words: `as given`, or provider, kind and date."""


def rate(device_name: str, usd_per_gpu_hour: float | None, *, prices: Path | None = None) -> Rate | None:
    """What one device costs per hour; None where it is not in the price list and nobody has said.

    Of several offers the cheapest on-demand one is taken: what the run costs at least without a contract.

    Args:
        device_name (`str`): as `torch.cuda.get_device_name()` has it.
        usd_per_gpu_hour (`float`, *optional*): the user's own number, which wins.
        prices (`Path`, *optional*): a price list, by default the shipped one with the user's rows on top.
    """
    if usd_per_gpu_hour is not None:
        return Rate(usd_per_gpu_hour=usd_per_gpu_hour, source="as given")
    gpu = match_device_name(device_name)
    offers = prices_of(gpu, all_prices(prices)) if gpu is not None else ()
    for offer in offers:
        if offer.on_demand_usd is not None:
            where = f" {offer.region}" if offer.region else ""
            return Rate(
                usd_per_gpu_hour=offer.on_demand_usd,
                source=f"{offer.provider}{where} on demand, read {offer.date.isoformat()}",
            )
    return None
