"""The options of `DiLoCoCallback`."""

from dataclasses import dataclass
from typing import Any

from hfscale.core.options import Options, from_0, option, positive
from hfscale.core.spelling import spelled
from hfscale.errors import ParameterError
from hfscale.facts.compression import Compression


def parse_address(text: str, name: str = "rendezvous") -> tuple[str, int]:
    """Return host and port of `host:port`.

    Args:
        text (`str`): the address of the rendezvous.
        name (`str`): the parameter that has this value.

    Raises:
        ParameterError: it has another form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ParameterError(name, text, "give host:port, such as 10.0.0.1:29600")
    return host.strip("[]"), int(port)


def an_address(name: str, value: Any) -> None:
    """Check that a value is `host:port`."""
    parse_address(value, name)


def below_1(name: str, value: Any) -> None:
    """Check that a number is at least 0 and less than 1."""
    if not 0 <= value < 1:
        raise ParameterError(name, value, "it must be at least 0 and less than 1")


@dataclass(frozen=True, kw_only=True)
class IslandOptions(Options):
    """The options of `DiLoCoCallback`."""

    islands: int = option(
        1,
        check=positive,
        help="Number of islands that train together across slow links (DiLoCo)",
        details="With 1 the callback does nothing.",
    )
    island_rank: int = option(0, check=from_0, help="Number of this island, from 0")
    rendezvous: str | None = option(
        None,
        flag="island_rendezvous",
        check=an_address,
        help="host:port where the islands meet, on the machine of island 0, which starts it",
        details="It may also be that of a process `python -m hfscale.islands.rendezvous` on another machine.",
    )
    every_steps: int = option(
        100,
        flag="island_steps",
        check=positive,
        help="Optimizer steps between two rounds of the islands (H)",
    )
    overlap_steps: int = option(
        0,
        flag="island_overlap_steps",
        check=from_0,
        help="Steps that train while a round exchanges; its result is used then",
        details="The parameters are then set to the new anchor plus what these steps have changed. With 0 training "
        "waits for the exchange. The last round is not overlapped, so that all islands end with equal parameters.",
    )
    fragments: int = option(
        1,
        flag="island_fragments",
        check=positive,
        help="Parts of the parameters, of whole layers, that have rounds in turn (P; Streaming DiLoCo, arXiv "
        "2501.18512)",
        details="Each has a round every `every_steps` steps, so that a round takes place every "
        "`every_steps / fragments` steps with about 1/P of the bytes. The last round is of all parameters.",
    )
    quorum: int = option(
        1,
        flag="island_quorum",
        check=positive,
        help="Least number of islands that a round needs",
    )
    deadline_s: float = option(
        600.0,
        flag="island_deadline_s",
        check=positive,
        help="Seconds that a round waits for islands that are late, after the first has contributed",
    )
    outer_lr: float | None = option(
        None,
        check=positive,
        help="Learning rate of the outer optimizer",
        unset="0.7, with a density (top-k) 1",
    )
    outer_momentum: float | None = option(
        None,
        check=below_1,
        help="Nesterov momentum of the outer optimizer",
        unset="0.9, with a density (top-k) 0, which is plain SGD",
        details="With top-k the error feedback stands in for the momentum (arXiv 2508.15706).",
    )
    compression: Compression | None = option(
        None,
        no_flag="--island_bits and --island_density are its fields",
        help="How pseudo-gradients are sent",
        unset="in fp32",
    )

    def check(self) -> None:
        """Check that rounds, fragments and islands fit together."""
        if self.fragments > self.every_steps:
            steps = f"{spelled('every_steps')} ({self.every_steps})"
            raise self.error(
                "fragments",
                f"it must be at most {steps}, so that each fragment has a step of its own",
            )
        if self.overlap_steps >= self.every_steps // self.fragments:
            between = f"{spelled('every_steps')} ({self.every_steps})"
            if self.fragments > 1:
                between += f" / {spelled('fragments')} ({self.fragments})"
            raise self.error(
                "overlap_steps",
                f"it must be less than {between}, so that a round ends before the next one",
            )
        islands = f"{spelled('islands')} ({self.islands})"
        if self.island_rank >= self.islands:
            raise self.error("island_rank", f"it must be less than {islands}")
        if self.quorum > self.islands:
            raise self.error("quorum", f"it must be at most {islands}")
        if self.islands > 1 and self.rendezvous is None:
            raise self.error("islands", f"give {spelled('rendezvous')} too, host:port of island 0")
