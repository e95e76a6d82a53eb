"""The callback that the section `hfscale:` of a program's YAML file describes."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfscale import latest_checkpoint
from hfscale.core.flags import nearest
from hfscale.errors import UsageError
from hfscale.scaling import PARTS, ScalingCallback


def callback_of(section: object) -> ScalingCallback:
    """Return the callback that a section describes.

    Args:
        section (`object`): the value of the key `hfscale` of a YAML file: a mapping from options of the callback's
            parts to their values, such as `{"usd_per_gpu_hour": 2.5, "remote": "s3://bucket/run"}`, or None for the
            defaults.

    Returns:
        `ScalingCallback`: the callback.

    Raises:
        UsageError: the section is no mapping, or no part has such an option.
        ParameterError: an option has a value that its part refuses.
    """
    if section is None:
        section = {}
    if not isinstance(section, Mapping):
        raise UsageError(
            f"hfscale: {section!r} is no section: write options of ScalingCallback's parts below it, one per line"
        )
    owners = {option: part for part in PARTS for option in _options(part)}
    given: dict[str, dict[str, Any]] = {}
    for option, value in section.items():
        if option not in owners:
            hint = nearest(str(option), owners)
            raise UsageError(f"hfscale: no part of the callback has the option {option!r}{hint}")
        given.setdefault(owners[option], {})[option] = value
    parts: dict[str, Any] = {part: PARTS[part](**options) for part, options in given.items()}
    return ScalingCallback(**parts)


def _options(part: str) -> list[str]:
    return list(inspect.signature(PARTS[part]).parameters)


def checkpoint_of(output_dir: str | Path | None, section: object = None) -> str | None:
    """Return the newest verified checkpoint of a run, or None to start from scratch. Every rank must call it.

    Args:
        output_dir (`str` or `Path`, *optional*): the output directory of the run; None if the program has none.
        section (`object`): as for `callback_of`; its `remote` is searched too.

    Raises:
        HfScaleError: as `latest_checkpoint`.
    """
    if output_dir is None:
        return None
    remote = section.get("remote") if isinstance(section, Mapping) else None
    found: str | None = latest_checkpoint(str(output_dir), remote=remote)
    return found
