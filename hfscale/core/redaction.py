"""Removes secrets from text before it reaches a log, a report or a metrics service."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "[redacted]"
_SECRET_NAME = re.compile(
    r"token|secret|passw|webhook|(?:api|access|private)[-_]?key|credential|signature|auth(?!or)",
    re.IGNORECASE,
)
_NO_SECRET_NAME = re.compile(
    r"tokens|tokeni[sz]\w*|(?:bos|eos|pad|unk|sep|cls|mask|image|per)[-_]token", re.IGNORECASE
)
_SHAPES = re.compile(
    r"hf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|sk-[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic
    r"|gh[pousr]_[A-Za-z0-9]{20,}"  # GitHub
    r"|A[KS]IA[0-9A-Z]{16}"  # AWS access key ids
    r"|xox[abprs]-[A-Za-z0-9-]{10,}"  # Slack
    r"|glpat-[A-Za-z0-9_-]{16,}"  # GitLab
    r"|AIza[0-9A-Za-z_-]{35}"  # Google
    r"|(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"  # JSON web tokens
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"  # user:password in a URL
    r"|(?<=:/)[^/\s:@]+:[^/\s@]+(?=@)"  # in a URL that was taken for a path
    r"|(?<=https://)[^/\s:@]{8,}(?=@)"  # a token in the place of the user
    r"|(?<=Bearer )[^\s,;'\"]+|(?<=Basic )[A-Za-z0-9+/=]{8,}"  # the header of a request
    r"|(?<=[?&]sig=)[^\s&'\"]+"  # a signed URL of Azure
)
# Each word is tried once, from its beginning: the text of an error may have a word of a megabyte
_ASSIGNED = re.compile(r"(?<![\w-])([\w-]+)['\"]?\s*[=:]\s*['\"]?")
_VALUE = re.compile(r"[^\s,;&'\"]+")
_SHORTEST = 6
"""Shorter values of variables with such names ("1", "true") occur in every text and are kept."""


def is_secret_name(name: str) -> bool:
    """Return whether the value of a variable, flag or key with this name is secret.

    It is for `HF_TOKEN`, `--hub_token` and `aws_secret_access_key`, but not for token counts such as `tokens_seen` and
    `num_tokens`, and tokens of a vocabulary such as `eos_token`.
    """
    return bool(_SECRET_NAME.search(_NO_SECRET_NAME.sub("", name)))


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Replace secrets in a text by `MASK` and return the result.

    Secrets are strings that have the form of a known kind of key, values that are assigned to a secret name, and the
    values, of at least six characters, of environment variables with a secret name.

    Args:
        text (`str`): the text.
        environ (`Mapping[str, str]`): the environment variables.
    """
    for name, value in environ.items():
        if len(value) >= _SHORTEST and is_secret_name(name):
            text = text.replace(value, MASK)
    return _without_assigned(_SHAPES.sub(MASK, text))


def _without_assigned(text: str) -> str:
    """Replace the values that are assigned to secret names: `token=...`, `"api_key": "..."`."""
    parts: list[str] = []
    end = 0
    for found in _ASSIGNED.finditer(text):
        is_rate = text.endswith("per ", 0, found.start())  # 3 ms per token: 4
        if found.start() < end or is_rate or not is_secret_name(found[1]):
            continue
        value = _VALUE.match(text, found.end())
        if value is not None:
            parts += (text[end : found.end()], MASK)
            end = value.end()
    return "".join((*parts, text[end:]))


def redact_argv(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Replace secrets in the arguments of a command line, including the value after a flag such as `--hub_token`.

    Args:
        argv (`Sequence[str]`): the arguments.
        environ (`Mapping[str, str]`): the environment variables, whose secret values are replaced too.

    Returns:
        `list[str]`: as many arguments, with `MASK` for secrets.
    """
    redacted = []
    previous = ""
    for argument in argv:
        is_value = previous.startswith("--") and "=" not in previous
        redacted.append(
            MASK if is_value and is_secret_name(previous) else redact(argument, environ)
        )
        previous = argument
    return redacted


def redact_json(value: Any, environ: Mapping[str, str] = os.environ) -> Any:
    """Replace secrets in every text of a JSON value, and the whole text of a key with a secret name.

    Args:
        value (`Any`): what JSON can represent.
        environ (`Mapping[str, str]`): the environment variables, whose secret values are replaced too.

    Returns:
        `Any`: the value, with `MASK` for secrets.
    """
    if isinstance(value, str):
        return redact(value, environ)
    if isinstance(value, Mapping):
        return {
            key: MASK
            if isinstance(one, str) and one and is_secret_name(str(key))
            else redact_json(one, environ)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_json(one, environ) for one in value]
    return value
