"""The callback that the flags of the islands ask for."""

from typing import Any

from hfscale.core.option_flags import from_flags, options_from
from hfscale.core.options import names_of
from hfscale.core.spelling import speaking
from hfscale.facts.compression import Compression
from hfscale.islands.callback import DiLoCoCallback
from hfscale.islands.client import own_token


@speaking("recipe")
def island_callbacks(args: Any) -> list[DiLoCoCallback]:
    """Return the callback for training on several islands, or an empty list with `--islands 1`.

    Call it before the model is loaded, so that a mistake is reported at once.

    Args:
        args (`Any`): an object with the flags of `IslandOptions` and `Compression`.

    Raises:
        UsageError: a flag is out of range, or the token of the islands is not set.
    """
    if args.islands == 1:
        return []
    own_token()
    with names_of(Compression):
        compression = Compression(**options_from(Compression, args))
    return [from_flags(DiLoCoCallback, args, compression=compression)]
