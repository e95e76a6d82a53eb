"""`hfscale_status.json`: how a run stands, for schedulers and people."""

import json
from pathlib import Path
from typing import Any

from hfscale.checkpoint.store import write_atomically
from hfscale.utils.redaction import redact

STATUS_NAME = "hfscale_status.json"
STATUSES = ("running", "completed", "preempted", "failed")


def write_status(output_dir: Path, status: str, *, step: int, checkpoint: str | None, reason: str | None) -> None:
    """Write the status file; one process per run calls it.

    Args:
        status (`str`): one of `STATUSES`.
        step (`int`): optimizer steps taken.
        checkpoint (`str`, *optional*): name of the newest committed checkpoint, `checkpoint-N`.
        reason (`str`, *optional*): why the run ended, in words; secrets in them are left out.
    """
    reason = redact(reason) if reason is not None else None
    fields = {"status": status, "step": step, "checkpoint": checkpoint, "reason": reason}
    write_atomically(output_dir / STATUS_NAME, json.dumps(fields) + "\n")


def read_status(output_dir: Path) -> dict[str, Any] | None:
    """The status, or None where no run has begun or the file is not readable JSON."""
    try:
        fields = json.loads((output_dir / STATUS_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return fields if isinstance(fields, dict) else None
