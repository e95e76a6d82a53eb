"""Reads YAML of other programs that may be hostile."""

from pathlib import Path
from typing import Any

import yaml

from hfscale.core.text_files import read_text


def read_plain_yaml(path: Path) -> Any:
    """Return the content of a YAML file of another program, without hfscale's own rules.

    Args:
        path (`Path`): the file.

    Raises:
        OSError: it cannot be read, or is too large.
        ValueError: it is not UTF-8, is nested too deeply, or has a value that does not fit its tag.
        yaml.YAMLError: it is not YAML.
    """
    try:
        return yaml.safe_load(read_text(path))
    except (RecursionError, TypeError, LookupError, AttributeError) as error:
        # PyYAML's own constructors raise these for !!bool x or !!timestamp x
        raise ValueError(f"a value does not fit its tag ({type(error).__name__})") from None
