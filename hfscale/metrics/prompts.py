"""Prompts from which a model generates during its training, and the file that holds them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfscale.core.text_files import parse_json, read_text
from hfscale.errors import DataError

Prompt = str | Mapping[str, Any]
"""A text that the model continues, or `{"messages": […], "tools": […]}`, which the chat template renders; `tools` may
be absent."""


def read_prompts(path: Path | str) -> list[Prompt]:
    """Read prompts from a text file with one per line, or from a .jsonl file with one record per line.

    A record has `prompt` (a text, which the model continues as it is, or a list of messages) or `messages`, and may
    have `tools`. Empty lines are skipped.

    Args:
        path (`Path` or `str`): the file.

    Raises:
        DataError: the file cannot be read, has no prompt, or has a record of another form.
    """
    path = Path(path)
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"the prompts {path} cannot be read: {reason}") from error
    is_records = path.suffix in (".jsonl", ".json")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    prompts = [
        _prompt_of(line, f"{path}:{number}") if is_records else line for number, line in numbered
    ]
    if not prompts:
        raise DataError(f"{path} has no prompt: write one per line")
    return prompts


def _prompt_of(line: str, place: str) -> Prompt:
    try:
        record = parse_json(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place} is not JSON: {error.msg}: write one record per line") from error
    prompt = record.get("messages", record.get("prompt")) if isinstance(record, dict) else None
    if isinstance(prompt, str) and prompt:
        return prompt
    if not (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(turn, dict) and "role" in turn for turn in prompt)
    ):
        raise DataError(
            f'{place} has neither "prompt" (a text or messages) nor "messages" (each with a role): add one of them'
        )
    if prompt[-1]["role"] == "assistant":
        raise DataError(
            f"{place}: the last message is the assistant's, which the model is to write: remove it"
        )
    return {"messages": prompt, **({"tools": record["tools"]} if record.get("tools") else {})}
