"""Reads text and JSON of files that may be hostile: every error is one of those that a reader expects.

Python's parser of JSON raises a RecursionError for deep nesting, and a plain ValueError for a number of thousands of
digits; a device such as `/dev/zero` has no end. Files are read through this module, which ruff checks for JSON.
"""

import errno
import json
from pathlib import Path
from typing import Any

MAX_BYTES = 2**28
"""Bytes of the largest file that is read at once: configs, records of a checkpoint, lists of prompts."""


def read_text(path: Path, *, errors: str = "strict", most_bytes: int = MAX_BYTES) -> str:
    """Return the text of a file in UTF-8.

    Args:
        path (`Path`): the file.
        errors (`str`): what to do with bytes that are no UTF-8, as for `bytes.decode`.
        most_bytes (`int`): the size from which a file is refused.

    Raises:
        OSError: it cannot be read, or is larger.
        UnicodeDecodeError: it is not UTF-8.
    """
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        limit = f"it is larger than {most_bytes // 2**20} MiB"
        raise OSError(errno.EFBIG, limit, str(path))
    return content.decode("utf-8", errors)


def parse_json(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text.

    Args:
        text (`str`, `bytes` or `bytearray`): the text.

    Raises:
        json.JSONDecodeError: it is not JSON, is nested too deeply, or has a number with too many digits.
        UnicodeDecodeError: the bytes are no text.
    """
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deeply", "", 0) from None
    except ValueError:
        raise json.JSONDecodeError("it has a number with too many digits", "", 0) from None


def read_plain_yaml(path: Path) -> Any:
    """Return the content of a YAML file of another program, without hfscale's own rules.

    Args:
        path (`Path`): the file.

    Raises:
        OSError: it cannot be read, or is too large.
        ValueError: it is not UTF-8, is nested too deeply, or has a value that does not fit its tag.
        yaml.YAMLError: it is not YAML.
    """
    import yaml

    try:
        return yaml.safe_load(read_text(path))
    except (RecursionError, TypeError, LookupError, AttributeError) as error:
        # PyYAML's own constructors raise these for !!bool x or !!timestamp x
        raise ValueError(f"a value does not fit its tag ({type(error).__name__})") from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Args:
        path (`Path`): the file.

    Raises:
        OSError: it cannot be read, or is too large.
        ValueError: it is not UTF-8 or not JSON.
    """
    return parse_json(read_text(path))
