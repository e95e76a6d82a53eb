"""A folder for PYTHONPATH, with the module that Python imports first in each process of `hfscale run`.

| module | what it does |
|---|---|
| `sitecustomize` | lets a rank report an error that comes before its script has imported hfscale |
"""

import os
from pathlib import Path

FOLDER = str(Path(__file__).parent)
"""The folder, as it stands in PYTHONPATH."""
IN_RANK = "HFSCALE_RUN_IN_RANK"
"""The environment variable that a rank sets, by which what it starts is known to be no rank."""


def with_folder(paths: str) -> str:
    """Return PYTHONPATH with the folder at its beginning, once.

    Args:
        paths (`str`): the value of PYTHONPATH; "" if it is not set.
    """
    others = [path for path in paths.split(os.pathsep) if path and path != FOLDER]
    return os.pathsep.join([FOLDER, *others])
