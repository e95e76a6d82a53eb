"""Command-line flags: checks of their values, and YAML files that give them (`--config`)."""

import difflib
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hfscale.core.spelling import plain_value, spelled
from hfscale.core.text_files import read_text
from hfscale.errors import ConfigFileError, ParameterError, UsageError


def require_positive(arguments: object, *names: str) -> None:
    """Check that fields are greater than 0; fields that are None are not checked.

    Args:
        arguments (`object`): an object with these fields.
        names (`str`): names of the fields; by default all with a number.

    Raises:
        ParameterError: a field is not greater than 0.
    """
    for name in names or [
        name for name, value in vars(arguments).items() if type(value) in (int, float)
    ]:
        value = getattr(arguments, name)
        if value is not None and not value > 0:  # so that nan does not pass
            raise ParameterError(name, value, "it must be greater than 0")


def require_from_0(arguments: object, *names: str, **limits: float) -> None:
    """Check that fields are at least 0 and less than their limit; fields that are None are not checked.

    Args:
        arguments (`object`): an object with these fields.
        names (`str`): names of fields without an upper limit.
        limits (`float`): further fields with their upper limits, which they must stay below.

    Raises:
        ParameterError: a field is less than 0 or not less than its limit.
    """
    for name, limit in (dict.fromkeys(names) | limits).items():
        value = getattr(arguments, name)
        if value is not None and not (value >= 0 and (limit is None or value < limit)):
            below = f" and less than {limit}" if limit else ""
            raise ParameterError(name, value, f"it must be at least 0{below}")


def read_yaml(path: str, flag: str = "--config") -> Any:
    """Read a YAML file.

    Args:
        path (`str`): the file.
        flag (`str`): the flag to which it was given, for errors.

    Returns:
        The content: a mapping, a list, a plain value, or None for an empty file.

    Raises:
        ConfigFileError: the file is missing, unreadable, not YAML, or has a repeated key.
    """
    try:
        return _Loader(read_text(Path(path))).get_single_data()
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{error.object[error.start]:02x}"
        raise ConfigFileError(
            f"{flag} {path} is not UTF-8 text ({byte}): save it as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigFileError(
            f"{flag} {path} cannot be read ({error.strerror}): check the path"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigFileError(f"{flag} {path} is not valid YAML: {_reason(error)}") from None
    except RecursionError:
        raise ConfigFileError(f"{flag} {path} is nested too deeply: write it flat") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # PyYAML's own constructors raise these for a value that is none of its tag: !!int x, !!bool x, a 13th month
        kind = type(error).__name__
        reason = f"a value does not fit its tag ({kind}: {error})"
        raise ConfigFileError(f"{flag} {path} is not valid YAML: {reason}") from None


def read_yaml_mapping(path: str, known: Collection[str] | None) -> dict[str, Any]:
    """Read the mapping of flags to values in a YAML file.

    Args:
        path (`str`): the file, as given to `--config`.
        known (`Collection[str]`, *optional*): the allowed keys; None allows all keys.

    Returns:
        `dict[str, Any]`: the mapping; empty for an empty file.

    Raises:
        ConfigFileError: the file is missing, unreadable, not YAML, not a mapping, or has an unknown or repeated key.
    """
    content = read_yaml(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else "plain text"
        raise ConfigFileError(f"--config {path} holds {kind}: write 'flag: value' lines")
    for key in content:
        if known is not None and key not in known:
            raise ConfigFileError(
                f"--config {path} has an unknown key '{key}'{nearest(str(key), known)}"
            )
    return content


def to_argv(path: str, values: Mapping[str, Any]) -> list[str]:
    """Convert a mapping to command-line arguments.

    A list becomes several values, a mapping becomes JSON, and null is left out.

    Args:
        path (`str`): the file of the mapping, for errors.
        values (`Mapping[str, Any]`): what `read_yaml_mapping` returned.

    Returns:
        `list[str]`: `--key=value` for each single value, or `--key` followed by the values of a list.

    Raises:
        ConfigFileError: a list is empty or contains anything but plain values.
    """
    argv: list[str] = []
    for key, value in values.items():
        if value is None:
            continue
        if not isinstance(value, list):
            # With "=", since a value may begin with "-"
            argv.append(f"--{key}={plain_value(value)}")
        elif not value or any(isinstance(item, list | dict | None) for item in value):
            raise ConfigFileError(
                f"--config {path}: '{key}' must be a value or a list of values, not {value}"
            )
        else:
            argv += [f"--{key}", *(plain_value(item) for item in value)]
    return argv


def split_off_config(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """Split a command line into its arguments without `--config FILE`, and that file.

    Args:
        argv (`Sequence[str]`): the arguments, without the name of the program.

    Returns:
        `tuple[list[str], str | None]`: the other arguments, and the file; None if `--config` is not given.

    Raises:
        UsageError: there is no file after `--config`, or `--config` is given twice.
    """
    rest: list[str] = []
    files: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--config":
            files.append(next(arguments, ""))
        elif argument.startswith("--config="):
            files.append(argument.removeprefix("--config="))
        else:
            rest.append(argument)
    if any(not file or file.startswith("--") for file in files):
        raise UsageError("--config needs a YAML file: --config FILE.yaml")
    if len(files) > 1:
        raise UsageError(f"--config is given twice, {files[0]} and {files[1]}: give one file")
    return rest, files[0] if files else None


def nearest(name: str, known: Collection[str], prefix: str = "") -> str:
    """Return `"; did you mean …?"` with the most similar known name, or an empty string if none is similar.

    Args:
        name (`str`): the unknown name.
        known (`Collection[str]`): the known names.
        prefix (`str`): text before the suggested name, such as `--`.
    """
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.7)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


class _Loader(yaml.SafeLoader):
    """Reads plain values as YAML 1.2 does (unlike PyYAML's 1.1, `no` is a string and 2e-5 a number).

    A key that is given twice is an error.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                mark = node.value[number][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"'{key}' is given twice", mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9]\d*)", list("-+0123456789")),
    ("float", r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), _first
    )


def _reason(error: Exception) -> str:
    """Return the problem and its line, without the excerpt of several lines that PyYAML adds."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())


_BITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_network(text: str, gpus_per_node: int) -> float:
    """Parse the bandwidth between nodes per GPU: GB/s such as `12.5`, or bits per second such as `100Gbps`.

    Args:
        text (`str`): the bandwidth; with `/node` behind a unit it is that of a node, which its GPUs share.
        gpus_per_node (`int`): GPUs of a node.

    Returns:
        `float`: GB/s per GPU.

    Raises:
        UsageError: it is neither.
    """
    try:
        return float(text)
    except ValueError:
        pass
    link, of_node, _ = text.strip().partition("/node")
    try:
        gigabytes = parse_bandwidth(link, "network_gb_s") / 1e9
    except UsageError:
        given = spelled("network_gb_s")
        raise UsageError(
            f"{given} is {text!r}: give the GB/s of each GPU, such as 12.5, or bits per second, such as 100Gbps for a "
            "card per GPU or 100Gbps/node for a card per node"
        ) from None
    return gigabytes / gpus_per_node if of_node else gigabytes


def parse_bandwidth(text: str, option: str = "island_bandwidth") -> float:
    """Parse a bandwidth in bits per second such as `1Gbps`, `100Mbit/s` or `2.5 Gbit`.

    Args:
        text (`str`): the bandwidth; K, M, G and T are powers of 1000.
        option (`str`): its option, for the error.

    Returns:
        `float`: bytes per second.

    Raises:
        UsageError: it has no unit, or is not above 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KkMmGgTt])(?:bps|bit|bit/s)", text.strip())
    bits = 0.0 if found is None else float(found[1]) * _BITS[found[2].lower()]
    if not 0 < bits < 1e15:
        raise UsageError(
            f"{spelled(option)} is {text!r}: write the bits per second of the link, such as 1Gbps or 100Mbps"
        )
    return bits / 8
