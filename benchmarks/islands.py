"""Islands: bytes and waiting on a link of 10 Mbit/s, the final loss beside DDP, and islands that are killed.

`python -m benchmarks islands` takes about half an hour on two CPU cores.
"""

from typing import Any

from benchmarks.islands_kills import kills
from benchmarks.islands_link import link
from benchmarks.islands_quality import quality


def measure() -> dict[str, Any]:
    """Measures all three."""
    links = {f"{bits}_bits": link(bits) for bits in (32, 4)}
    links["32_bits_overlapped"] = link(32, overlap_steps=40)
    links |= {f"{islands}_islands": link(32, islands=islands) for islands in (3, 4)}
    links["2_islands_of_2_ranks"] = link(32, ranks=2)
    for overlap, name in ((0, ""), (8, "_overlapped")):
        for fragments in (1, 4):
            links[f"8_layers_{fragments}_fragments{name}"] = link(32, overlap, fragments, layers=8)
    return summarize(links, quality(), kills())


def summarize(links: dict[str, Any], losses: dict[str, Any], killed: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of the result file."""
    summary = {
        **{f"times_fewer_bytes_than_ddp_{name}": found["times_fewer_than_ddp"] for name, found in links.items()},
        **{f"stall_fraction_{name}": found["stall_fraction"] for name, found in links.items()},
        **{f"loss_relative_to_ddp_{name}": found["relative_to_ddp"] for name, found in losses.items()},
        "kills": killed["trials"],
        **killed["outcomes"],
    }
    return {"summary": summary, "link": links, "loss": losses, "kills": killed}
