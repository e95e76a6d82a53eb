"""Command-line flags as dataclass fields, and checks of their values that name the flag."""

from dataclasses import field

from hfscale.errors import UsageError


def flag(help: str, default: object = None, **metadata: object) -> object:
    """A dataclass field that `HfArgumentParser` shows as a flag.

    Args:
        help (`str`): the text that `--help` prints.
        default (`object`, *optional*): the value of a flag that is not given.
        metadata (`object`): further keys of the field's metadata, such as `choices`.

    Returns:
        The field.
    """
    return field(default=default, metadata={"help": help, **metadata})


def require_positive(arguments: object, *names: str) -> None:
    """Raise a UsageError for the first of these fields that is set and not greater than 0."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not value > 0:  # so that nan does not pass
            raise UsageError(f"--{name} {value} must be greater than 0")


def require_from_0(arguments: object, *names: str, **limits: float) -> None:
    """Raise a UsageError for the first of these fields that is set and negative, or not below its limit."""
    for name, limit in (dict.fromkeys(names) | limits).items():
        value = getattr(arguments, name)
        if value is not None and not (value >= 0 and (limit is None or value < limit)):
            below = f" and less than {limit}" if limit else ""
            raise UsageError(f"--{name} {value} must be at least 0{below}")
