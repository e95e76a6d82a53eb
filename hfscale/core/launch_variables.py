"""The numbers that a launcher gives its processes in environment variables: ranks, and numbers of processes."""

import os
from collections.abc import Mapping

from hfscale.errors import UsageError


def launch_number(name: str, default: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return a launcher's variable as a number of at least 0.

    Args:
        name (`str`): the name of the variable.
        default (`int`): the result if the variable is unset, empty or -1, which older launchers set without ranks.
        environ (`Mapping[str, str]`): the environment variables.

    Raises:
        UsageError: it is not a number.
    """
    text = environ.get(name, "").strip()
    if text in ("", "-1"):
        return default
    if not text.isdecimal():
        raise UsageError(
            f"{name}={text} is not a number: unset it, or start with accelerate launch"
        )
    return int(text)
