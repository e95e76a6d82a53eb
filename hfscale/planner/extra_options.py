"""The options of `hfscale.plan` for what a run does beside its steps (`hfscale.planner.extras`)."""

from dataclasses import dataclass

from hfscale.core.options import positive
from hfscale.planner.option_fields import HARDWARE, METHOD, option


@dataclass(frozen=True, kw_only=True)
class ExtraOptions:
    """Options that change no step time that is known: they leave out layouts, or are written for the recipe."""

    base_width: int | None = option(
        None,
        group=METHOD,
        check=positive,
        help="Width at which the learning rate was tuned (--base_width of the recipes)",
        unset="the learning rate does not follow the width",
    )
    skip_bad_batches: int | None = option(
        None,
        group=METHOD,
        unit="batches",
        check=positive,
        help="How many bad batches the run may leave out (--skip_bad_batches of the recipes)",
        unset="none is looked for",
    )
    gc_every_steps: int | None = option(
        None,
        group=METHOD,
        check=positive,
        help="Steps between collections of garbage that all ranks make together (--gc_every_steps of the recipes)",
        unset="each rank collects by itself",
    )
    load_once: str | None = option(
        None,
        group=HARDWARE,
        help="Folder of each node, to which all nodes together copy the weights (--load_once of the recipes)",
        unset="each reads what it needs",
    )
    storage_gb_s: float | None = option(
        None,
        group=HARDWARE,
        unit="GB/s",
        check=positive,
        help="Rate at which the shared file system serves all nodes together; the time to read the weights needs it",
    )
