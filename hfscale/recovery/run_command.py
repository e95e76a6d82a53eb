"""`hfscale run`: start a training, and start it again from its snapshot in host memory after a failure."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfscale.core.run_memory import DEFAULT_ROOT
from hfscale.core.spelling import spelled
from hfscale.errors import ParameterError, UsageError

if TYPE_CHECKING:
    from hfscale.recovery.nodes import NodeSettings

_LOCAL = ("accelerate", "deepspeed", "python", "torchrun")
"""How the names of programs begin that read a script from this machine; others may start a container, or use ssh."""

_NO_SCRIPT = frozenset({"-c", "-m", "--module"})
"""Options of these programs that run something else; a file that ends in `.py` may then be anything."""


def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND …", help="Run without a shell.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(help="Restarts in any 24 hours, after which it gives up.")
    ] = 10,
    memory_dir: Annotated[
        Path,
        typer.Option(help="Folder of a file system in memory, for the snapshots of this node."),
    ] = DEFAULT_ROOT,
    memory_interval_steps: Annotated[
        int | None,
        typer.Option(
            help="Steps between snapshots (default: as many as keep their cost below 1%)."
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option(help="Nodes of the run: start hfscale run on each of them.")
    ] = 1,
    node_rank: Annotated[int, typer.Option(help="Number of this node, from 0.")] = 0,
    rendezvous: Annotated[
        str | None, typer.Option(help="HOST:PORT of node 0, where the nodes meet.")
    ] = None,
    min_nodes: Annotated[
        int | None,
        typer.Option(help="Nodes that are enough when a lost one is not replaced (default: all)."),
    ] = None,
    node_wait: Annotated[
        float, typer.Option(help="Seconds to wait for nodes that are missing.")
    ] = 600.0,
    replica_bandwidth: Annotated[
        str | None,
        typer.Option(help="Limit of the copies to another node, such as 1Gbps (default: none)."),
    ] = None,
    standby: Annotated[
        bool,
        typer.Option(
            help="Keep a process with the imports of the training ready for the next launch."
        ),
    ] = True,
    exclude_bad_hosts: Annotated[
        Path | None,
        typer.Option(help="Add hosts that the health checks blame to a file, one per line."),
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="Append one JSON line per failure and recovery to a file.")
    ] = None,
) -> int:
    """Start COMMAND, a launcher such as accelerate launch, and start it again when a process of it dies."""
    if not command:
        raise UsageError(
            "there is no command: give it after --, such as hfscale run -- accelerate launch train.py"
        )
    if shutil.which(command[0]) is None:
        raise UsageError(f"command {command[0]} is not found: give a program in PATH, or its path")
    script = next(
        (word for word in command if word.endswith(".py") and not word.startswith("-")), None
    )
    is_local = Path(command[0]).name.startswith(_LOCAL) and _NO_SCRIPT.isdisjoint(command)
    if is_local and script is not None and not Path(script).exists():
        raise UsageError(
            f"{script} does not exist in {Path.cwd()}: start the command where it is, or give its path"
        )
    if max_restarts < 0:
        raise ParameterError("max_restarts", max_restarts, "it must be 0 or greater")
    if memory_interval_steps is not None and memory_interval_steps < 1:
        raise ParameterError(
            "memory_interval_steps", memory_interval_steps, "it must be 1 or greater"
        )
    if exclude_bad_hosts is not None and not exclude_bad_hosts.absolute().parent.is_dir():
        raise ParameterError(
            "exclude_bad_hosts", str(exclude_bad_hosts), "its folder does not exist: make it first"
        )
    if log is not None and (log.is_dir() or not log.absolute().parent.is_dir()):
        raise ParameterError("log", str(log), "give a file in a folder that exists")
    from hfscale.recovery.supervisor import RunSettings, Supervisor

    several = {
        "node_rank": node_rank != 0,
        "rendezvous": rendezvous is not None,
        "min_nodes": min_nodes is not None,
        "replica_bandwidth": replica_bandwidth is not None,
    }
    if nodes < 1:
        raise ParameterError("nodes", nodes, "it must be 1 or greater")
    useless = [spelled(option) for option, is_given in several.items() if is_given]
    if nodes == 1 and useless:
        raise UsageError(f"{useless[0]} needs {spelled('nodes')}: give the number of nodes")
    settings = RunSettings(
        command=command,
        max_restarts=max_restarts,
        root=memory_dir,
        memory_interval_steps=memory_interval_steps,
        nodes=_nodes(nodes, node_rank, rendezvous, min_nodes, node_wait, replica_bandwidth)
        if nodes > 1
        else None,
        standby=standby,
        exclude_file=exclude_bad_hosts,
        log=log,
    )
    return Supervisor(settings).run()


def _nodes(
    nodes: int,
    node_rank: int,
    rendezvous: str | None,
    min_nodes: int | None,
    wait_s: float,
    bandwidth: str | None,
) -> "NodeSettings":
    from hfscale.recovery.connections import read_token
    from hfscale.recovery.nodes import NodeSettings

    of_nodes = f"with {spelled('nodes', nodes)} it must be"
    if not 0 <= node_rank < nodes:
        raise ParameterError("node_rank", node_rank, f"{of_nodes} 0 to {nodes - 1}")
    host, _, port = (rendezvous or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        given = "missing" if rendezvous is None else rendezvous
        fix = "give the host of node 0 and a free port, such as node0:29400"
        raise UsageError(f"{spelled('rendezvous')} is {given}: {fix}")
    if min_nodes is not None and not 1 <= min_nodes <= nodes:
        raise ParameterError("min_nodes", min_nodes, f"{of_nodes} 1 to {nodes}")
    if wait_s <= 0:
        raise UsageError(f"{spelled('node_wait')} is {wait_s:g}: it must be positive")
    bytes_per_s = None
    if bandwidth is not None:
        from hfscale.core.flags import parse_bandwidth

        bytes_per_s = parse_bandwidth(bandwidth, "replica_bandwidth")
    return NodeSettings(
        nodes=nodes,
        node_rank=node_rank,
        rendezvous=(host, int(port)),
        token=read_token(),
        min_nodes=min_nodes or nodes,
        wait_s=wait_s,
        bytes_per_s=bytes_per_s,
    )


COMMAND = run
