"""Files of `torch.save`, read without unpickling: mapped, `weights_only`, and never a second try without it."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from hfscale.errors import CheckpointError


def load_archive(path: Path, allowed: Iterable[Any] = ()) -> Any:
    """What `torch.save` wrote to `path`; tensors are mapped, and reach memory when they are used.

    Args:
        allowed: classes beside torch's own that may be built, as for `torch.serialization.safe_globals`: a class, or
            a stand-in and the name it stands for.

    Raises:
        CheckpointError: the file is missing, broken, or would load anything else.
    """
    try:
        with torch.serialization.safe_globals(list(allowed)) if allowed else contextlib.nullcontext():
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except Exception as error:  # a broken archive raises anything
        first = next((line for line in str(error).splitlines() if "Unsupported" in line), str(error).split("\n")[0])
        raise CheckpointError(f"{path} cannot be read without unpickling it: {first.strip()[:300]}") from None
