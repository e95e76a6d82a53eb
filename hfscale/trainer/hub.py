"""Uploads a Trainer's checkpoints to the hub without the files that hfscale keeps in the output directory."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer

from hfscale.core.run_files import JSONL_NAME, LOCK_NAME, MANIFEST_NAME, PARAMETERS_NAME, UNFINISHED
from hfscale.core.versions import hub_client

WORKING_FILES = (
    LOCK_NAME,
    JSONL_NAME,
    "hfscale_*",
    f"{UNFINISHED}/*",
    ".*.tmp",
    ".initial-weights/*",
)
"""Patterns of the files in the output directory that are not uploaded."""


def without_working_files(trainer: Trainer, push: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a Trainer that uploads its output directory, without hfscale's working files.

    Args:
        trainer (`Trainer`): the Trainer.
        push (`Callable`): its method.
    """

    @functools.wraps(push)
    def push_without_working_files(*args: Any, **kwargs: Any) -> Any:
        client = hub_client()
        upload, replaced = client.upload_folder, vars(client).get("upload_folder")

        def upload_folder(**options: Any) -> Any:
            if options["folder_path"] == trainer.args.output_dir:
                options["ignore_patterns"] = [
                    *(options.get("ignore_patterns") or ()),
                    *WORKING_FILES,
                ]
            return upload(**options)

        client.upload_folder = upload_folder
        try:
            return push(*args, **kwargs)
        finally:
            if replaced is None:
                del client.upload_folder
            else:
                client.upload_folder = replaced

    return push_without_working_files


def push_checkpoint(trainer: Trainer, checkpoint: Path) -> None:
    """Upload a checkpoint, as Trainer does at the end of its save.

    Args:
        trainer (`Trainer`): the Trainer.
        checkpoint (`Path`): the folder of the checkpoint.
    """
    trainer._push_from_checkpoint(str(checkpoint))
    if trainer.is_world_process_zero():
        assert trainer.args.output_dir is not None  # TrainingArguments gives it a default
        # A subclass may copy all files of the checkpoint
        for name in (MANIFEST_NAME, PARAMETERS_NAME):
            Path(trainer.args.output_dir, name).unlink(missing_ok=True)
