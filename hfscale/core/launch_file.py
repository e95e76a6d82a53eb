"""The script `launch.sh` of a plan or a tuned configuration, and how words are quoted in shell and YAML."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

SHUTDOWN_S = 100
"""Seconds that ranks get to save after a SIGTERM, as in launch/multinode/accelerate.sh; PyTorch's default is 30."""
RUN_PORT = 29501
"""Port at which `hfscale run` of several machines meets, next to that of the launcher."""


@dataclass(frozen=True)
class Expanded:
    """A word of a command in which the shell expands a variable."""

    variable: str
    """The variable, one of the script's own."""
    rest: str = ""
    """What follows it."""


@dataclass(frozen=True)
class Beside:
    """A word of a command that is the path of a file beside the script."""

    name: str
    """The file's name."""


Word = str | Expanded | Beside


def quoted(words: Sequence[Word]) -> str:
    """Return words as a command line for the shell; it expands nothing but the variables of `Expanded` and `Beside`.

    Args:
        words (`Sequence[Word]`): the words.
    """
    return " ".join(map(_quoted_word, words))


def _quoted_word(word: Word) -> str:
    if isinstance(word, Expanded):
        return f'"${word.variable}{word.rest}"'
    if isinstance(word, Beside):
        return f'"$here/{word.name}"'
    return shlex.quote(word)


def comment(text: str) -> str:
    """Return a comment of a shell script or a YAML file, which is one line whatever names the text contains.

    Args:
        text (`str`): the text.
    """
    return f"# {_printable(text)}"


def yaml_text(value: str) -> str:
    """Return a text as YAML: quoted as in JSON, so that YAML reads no other type, with escapes that YAML knows.

    Args:
        value (`str`): the text.
    """
    return _printable(json.dumps(value, ensure_ascii=False))


def _printable(text: str) -> str:
    """Escape what YAML reads as the end of a line or does not allow; lone surrogates are left, as no file has them."""
    return "".join(
        one if one.isprintable() or "\ud800" <= one <= "\udfff" else _escape(one) for one in text
    )


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def launch_script(
    command: Sequence[Word], *, about: Sequence[str], nodes: int = 1, offload_ranks: int = 0
) -> str:
    """Return the text of `launch.sh`.

    Args:
        command (`Sequence[Word]`): the launcher and its arguments; those of the script's caller are appended.
        about (`Sequence[str]`): comments.
        nodes (`int`): machines on which it is started.
        offload_ranks (`int`): ranks of a machine that share its cores for an optimizer on the CPU; 0 without offload.
    """
    lines = ["#!/bin/sh", *map(comment, about), "set -eu"]
    # Not `dirname`: a command substitution would drop a newline at the end of a name.
    lines += [
        "case $0 in",
        "  /*) here=${0%/*} ;;",
        "  */*) here=./${0%/*} ;;",
        "  *) here=. ;;",
        "esac",
        "# Seconds to save after a SIGTERM; whatever stops this script must wait longer.",
        f': "${{TORCH_ELASTIC_SHUTDOWN_TIMEOUT:={SHUTDOWN_S}}}"',
        "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    ]
    if offload_ranks:
        lines += [
            "# The optimizer runs on the CPU, for which accelerate would set one thread.",
            f"threads=$(($(getconf _NPROCESSORS_ONLN) / {offload_ranks}))",
            ': "${OMP_NUM_THREADS:=$((threads > 0 ? threads : 1))}"',
            "export OMP_NUM_THREADS",
        ]
    lines += [
        f'set -- {quoted(command)} "$@"',
        "# hfscale run ends with 75 after a preemption, where accelerate ends with 1, and restarts a failed training.",
        "if ! command -v hfscale > /dev/null; then",
        '  echo "launch.sh: hfscale is not in PATH: a failed training is not restarted" >&2',
        *_supervised(nodes),
        "fi",
        'exec "$@"',
    ]
    return "\n".join(lines) + "\n"


def _supervised(nodes: int) -> list[str]:
    """Lines that put `hfscale run` before the command."""
    if nodes == 1:
        return ["else", '  set -- hfscale run -- "$@"']
    meeting = quoted(
        [
            *("hfscale", "run", "--nodes", str(nodes), "--node-rank", Expanded("MACHINE_RANK")),
            *("--rendezvous", Expanded("MAIN_IP", f":{RUN_PORT}"), "--"),
        ]
    )
    return [
        'elif [ -n "${HFSCALE_RUN_TOKEN+x}" ]; then # a secret, the same on all machines',
        f'  set -- {meeting} "$@"',
        "else # a failure ends the run on all machines",
        '  set -- hfscale run --max-restarts 0 --no-standby -- "$@"',
    ]
