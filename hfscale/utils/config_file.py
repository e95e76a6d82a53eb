"""Reading YAML recipe files: a flat mapping of flag names to values."""

import difflib
import json
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hfscale.errors import ConfigFileError, UsageError


def read_yaml_mapping(path: str, known: Collection[str] | None) -> dict[str, Any]:
    """The mapping in a YAML file, each of whose keys must be in `known`; None takes any.

    Raises:
        ConfigFileError: the file is missing, unreadable, not YAML, not a mapping, or has an unknown or repeated key.
    """
    try:
        content = _Loader(Path(path).read_text(encoding="utf-8")).get_single_data()
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{error.object[error.start]:02x}"
        raise ConfigFileError(f"--config {path} is not UTF-8 text: {byte}: save it as UTF-8") from None
    except OSError as error:
        raise ConfigFileError(f"--config {path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigFileError(f"--config {path} is not valid YAML: {_reason(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else "plain text"
        raise ConfigFileError(f"--config {path} holds {kind}: write 'flag: value' lines")
    for key in content:
        if known is not None and key not in known:
            raise ConfigFileError(f"--config {path} has an unknown key '{key}'{nearest(str(key), known)}")
    return content


def to_argv(path: str, values: Mapping[str, Any]) -> list[str]:
    """The mapping as command-line tokens: a list becomes several values, a mapping becomes JSON, null is left out.

    Raises:
        ConfigFileError: a list that is empty or holds anything but plain values.
    """
    argv: list[str] = []
    for key, value in values.items():
        if value is None:
            continue
        if not isinstance(value, list):
            argv.append(f"--{key}={_plain(value)}")  # with "=", as a value may begin with "-"
        elif not value or any(isinstance(item, list | dict | None) for item in value):
            raise ConfigFileError(f"--config {path}: '{key}' must be a value or a list of values, not {value}")
        else:
            argv += [f"--{key}", *(_plain(item) for item in value)]
    return argv


def split_off_config(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """The command line without `--config FILE`, and that file.

    Raises:
        UsageError: no file after `--config`, or a second one.
    """
    rest: list[str] = []
    files: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--config":
            files.append(next(words, ""))
        elif word.startswith("--config="):
            files.append(word.removeprefix("--config="))
        else:
            rest.append(word)
    if any(not file or file.startswith("--") for file in files):
        raise UsageError("--config needs a YAML file: --config FILE.yaml")
    if len(files) > 1:
        raise UsageError(f"--config is given twice, {files[0]} and {files[1]}: give one file")
    return rest, files[0] if files else None


def nearest(name: str, known: Collection[str], prefix: str = "") -> str:
    """`"; did you mean …?"` with the most similar known name, or nothing where none is similar."""
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.7)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values (unlike in PyYAML's 1.1, `no` is a word and 2e-5 a number), and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                place = node.value[number][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"'{key}' is given twice", place)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9]\d*)", list("-+0123456789")),
    ("float", r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), _first)


def _reason(error: Exception) -> str:
    """What is wrong and where, without the excerpt that PyYAML draws over several lines."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
