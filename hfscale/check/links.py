"""Compares what the links of a run move with what their datasheets say."""

from typing import Any

from hfscale.core.findings import Finding
from hfscale.facts.hardware import Accelerator

LINK_SHARE = 0.5
"""Part of a link's datasheet bandwidth below which a large all-reduce is called slow. NCCL reaches 75% to 90% of it in
its own nccl-tests; half means a wrong route (PCIe instead of NVLink, TCP instead of InfiniBand), not a lack of
tuning."""


def compare_links(
    rows: list[dict[str, Any]], gpu: Accelerator | None, per_node: int
) -> list[Finding]:
    """Find links over which a large all-reduce is far below the datasheet's bandwidth.

    Args:
        rows (`list[dict[str, Any]]`): the rows of `check_collective` of all groups, each with `where` (`node` or
            `network`).
        gpu (`Accelerator`, *optional*): the accelerator; None if it is not in `hardware.toml` (a CPU): then nothing is
            compared.
        per_node (`int`): the number of ranks on each node, which share its network cards.

    Returns:
        `list[Finding]`: a warning for the links inside a node and one for those between nodes, if they are slow.
    """
    found = []
    for where in ("node", "network"):
        mine = [row for row in rows if row["kind"] == "all_reduce" and row["where"] == where]
        if not mine or gpu is None:
            continue
        link = (gpu.link_gb_s or gpu.host_gb_s) if where == "node" else gpu.network_gb_s
        if link is None:
            continue
        least = LINK_SHARE * link * (per_node if where == "network" else 1)
        best = max(row["gb_s"] for row in mine)
        if best < least:
            path = "inside a node" if where == "node" else "between nodes"
            look = (
                "nvidia-smi topo -m, NCCL_P2P_DISABLE"
                if where == "node"
                else "NCCL_IB_HCA, NCCL_SOCKET_IFNAME"
            )
            problem = (
                f"all-reduce {path} moves {best:.1f} GB/s past each rank, "
                f"its links should give {least:.0f} or more"
            )
            fix = f"check {look}, and the route that NCCL_DEBUG=INFO prints"
            found.append(Finding(level="warning", check="bandwidth", problem=problem, fix=fix))
    return found
