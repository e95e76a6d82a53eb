"""Takes secrets out of text before it reaches a log, a report or a metrics service."""

import os
import re
from collections.abc import Mapping, Sequence

MASK = "[redacted]"
_SECRET_NAME = re.compile(r"token|secret|passw|(?:api|access|private)[-_]?key|credential|auth(?!or)", re.IGNORECASE)
_SHAPES = re.compile(
    r"hf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|sk-[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic
    r"|gh[pousr]_[A-Za-z0-9]{20,}"  # GitHub
    r"|AKIA[0-9A-Z]{16}"  # AWS access key ids
    r"|xox[abprs]-[A-Za-z0-9-]{10,}"  # Slack
    r"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"  # JSON web tokens
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"  # user:password in a URL
)
_ASSIGNED = re.compile(rf"((?:--)?[\w-]*(?:{_SECRET_NAME.pattern})[\w-]*\s*[=:]\s*)([^\s,;&'\"]+)", re.IGNORECASE)
_SHORTEST = 6
"""Shorter values of secret-looking variables ("1", "true") are words of every text."""


def is_secret_name(name: str) -> bool:
    """Whether a variable, flag or key of this name holds a secret: `HF_TOKEN`, `--hub_token`, `aws_secret_access_key`.

    Counts are none: `tokens_seen`, `num_tokens`.
    """
    return bool(_SECRET_NAME.search(re.sub(r"tokens|tokeni[sz]\w*", "", name, flags=re.IGNORECASE)))


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """`text` without what looks like a secret, and without the value of any variable whose name says it is one."""
    for name, value in environ.items():
        if len(value) >= _SHORTEST and is_secret_name(name):
            text = text.replace(value, MASK)
    text = _SHAPES.sub(MASK, text)
    return _ASSIGNED.sub(lambda found: found[1] + MASK if is_secret_name(found[1]) else found[0], text)


def redact_argv(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """A command line without secrets: also the word that follows a flag like `--hub_token`."""
    out: list[str] = []
    for word in argv:
        follows = bool(out) and argv[len(out) - 1].startswith("--") and "=" not in argv[len(out) - 1]
        out.append(MASK if follows and is_secret_name(argv[len(out) - 1]) else redact(word, environ))
    return out
