"""The time from a failure of a supervised run to its next completed step, and the parts of it."""

from dataclasses import dataclass

RECOVERY_PARTS = ("ending_s", "waiting_s", "starting_s", "loading_s", "first_step_s")
"""Parts of a recovery's time, in seconds, in their order (docs/recovery.md)."""


@dataclass(frozen=True, kw_only=True)
class RecoveryTimes:
    """The moments of one recovery, in their order, in seconds of `time.monotonic`.

    That is one clock for all processes of a machine, and no setting of the date moves it.
    """

    failed_at: float
    """The first process of the failed launch ended."""
    ended_at: float
    """Its last process ended."""
    launched_at: float
    """The launcher was started again."""
    connected_at: float
    """A rank of the new launch had imported what it needs."""
    began_at: float
    """Its training began."""
    stepped_at: float
    """Its first step was complete."""

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part by its name; their sum is the time of the recovery."""
        return {
            "ending_s": self.ended_at - self.failed_at,
            "waiting_s": self.launched_at - self.ended_at,
            "starting_s": self.connected_at - self.launched_at,
            "loading_s": self.began_at - self.connected_at,
            "first_step_s": self.stepped_at - self.began_at,
        }


def shown_name(part: str) -> str:
    """Return the name of a part in lines for people and in the log of `hfscale run`, such as `first step`.

    Args:
        part (`str`): one of `RECOVERY_PARTS`.
    """
    return part.removesuffix("_s").replace("_", " ")
