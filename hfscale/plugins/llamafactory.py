"""Runs LLaMA-Factory with the callback: `python -m hfscale.plugins.llamafactory sft.yaml`, or by `torchrun -m`.

The YAML file is that of `llamafactory-cli train`; a section `hfscale:` of it has options of the callback's parts. The
same command resumes a run that was stopped. Tried with LLaMA-Factory 0.9.5.
"""

import os
import sys
from pathlib import Path
from typing import Any

import yaml

from hfscale.core.logging import print_line
from hfscale.core.plain_yaml import read_plain_yaml
from hfscale.errors import HfScaleError, UsageError
from hfscale.plugins.section import callback_of, checkpoint_of


def main(words: list[str]) -> int:
    """Train as a YAML file says.

    Args:
        words (`list[str]`): the arguments of the command: the file.

    Returns:
        `int`: 0, or 2 for wrong usage.
    """
    try:
        arguments = _read(words)
        section = arguments.pop("hfscale", None)
        callback = callback_of(section)
        checkpoint = arguments.get("resume_from_checkpoint")
        if checkpoint is None:  # the program's own examples have the key without a value
            output_dir = arguments.get("output_dir")
            checkpoint = checkpoint_of(output_dir, section)
        arguments["resume_from_checkpoint"] = checkpoint
    except HfScaleError as error:
        print_line(f"hfscale: error: {error}")
        return 2
    from llamafactory.train.tuner import run_exp

    run_exp(args=arguments, callbacks=[callback])
    return 0


def _read(words: list[str]) -> dict[str, Any]:
    if len(words) != 1:
        raise UsageError("name one YAML file: python -m hfscale.plugins.llamafactory sft.yaml")
    if os.environ.get("USE_V1", "0").lower() in ("1", "true", "y"):
        raise UsageError("USE_V1: LLaMA-Factory's v1 has a Trainer of its own: unset it")
    try:
        found = read_plain_yaml(Path(words[0]))
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise UsageError(f"{words[0]} cannot be read: {problem}") from None
    if not isinstance(found, dict):
        raise UsageError(
            f"{words[0]} has no arguments: write one per line, as for llamafactory-cli train"
        )
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
