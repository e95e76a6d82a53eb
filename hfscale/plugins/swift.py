"""The plug-in of ms-swift: `--external_plugins $(hfscale plugins swift) --callbacks hfscale`.

ms-swift imports this file by its path. The environment variable `HFSCALE_OPTIONS` may name a YAML file with options of
the callback's parts. With `--add_version false` the same command resumes a run that was stopped. Tried with ms-swift
4.6.
"""

import os
import sys
from pathlib import Path
from typing import Any

from swift.callbacks import callbacks_map

OPTIONS = "HFSCALE_OPTIONS"


def make_callback(args: Any, trainer: Any) -> Any:
    """Return the callback, for `--callbacks hfscale`.

    Args:
        args (`TrainingArguments`): not read.
        trainer (`Trainer`): not read.
    """
    from hfscale.plugins.section import callback_of

    return callback_of(read_options())


def read_options() -> object:
    """Return what the file of `HFSCALE_OPTIONS` says; None without one.

    Raises:
        UsageError: it cannot be read.
    """
    name = os.environ.get(OPTIONS)
    if not name:
        return None
    import yaml

    from hfscale.core.plain_yaml import read_plain_yaml
    from hfscale.errors import UsageError

    try:
        found: object = read_plain_yaml(Path(name))
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise UsageError(f"{OPTIONS}={name} cannot be read: {problem}") from None
    return found


def resume() -> None:
    """Have the arguments that import this file name the newest verified checkpoint, unless they name one."""
    arguments = _importing_arguments()
    # A worker of a data loader imports this file too, and has no arguments
    if arguments is None or getattr(arguments, "resume_from_checkpoint", None):
        return
    if "hfscale" not in (getattr(arguments, "callbacks", None) or []):
        return
    from hfscale.plugins.section import checkpoint_of

    arguments.resume_from_checkpoint = checkpoint_of(arguments.output_dir, read_options())


def _importing_arguments() -> Any:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_import_external_plugins":
            return frame.f_locals.get("self")
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return None


callbacks_map["hfscale"] = make_callback
resume()
