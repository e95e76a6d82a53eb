"""What lies in a run's output directory: each checkpoint with its state and what its manifest says. No torch."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hfscale.checkpoint.manifest import MANIFEST_NAME, Manifest, checkpoint_files, read_manifest
from hfscale.checkpoint.store import list_checkpoints, verify
from hfscale.errors import CheckpointError, UsageError

GOOD, INCOMPLETE, CORRUPT = "good", "incomplete", "corrupt"


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """One checkpoint; what is not known is None."""

    name: str
    path: str
    state: str
    """`good` (every file matches the manifest), `incomplete` (no manifest) or `corrupt`."""
    reason: str | None
    """Why it is not good, in words."""
    step: int | None
    strategy: str | None
    world_size: int | None
    global_batch_size: int | None
    bytes: int
    """Of all its files."""
    age_s: float
    """Seconds since the newest file was written."""
    best: bool
    """Whether the run's newest `trainer_state.json` calls it the best."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def inspect(path: Path, *, read_files: bool = True) -> list[CheckpointInfo]:
    """The checkpoint at `path`, or the checkpoints of the run at `path` by rising step.

    Args:
        read_files (`bool`): compare every file's content with its hash; else its length only.

    Raises:
        UsageError: `path` is not a folder.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder: name a run's output directory or one checkpoint")
    found = [path] if is_checkpoint(path) else list_checkpoints(path)
    best = _best(found)
    return [_inspect(checkpoint, best, read_files) for checkpoint in found]


def is_checkpoint(path: Path) -> bool:
    """Whether the folder is one checkpoint, and not a run with several."""
    return (path / MANIFEST_NAME).is_file() or ((path / "trainer_state.json").is_file() and not list_checkpoints(path))


def _best(checkpoints: list[Path]) -> str | None:
    for checkpoint in reversed(checkpoints):
        try:
            state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
            return Path(state["best_model_checkpoint"]).name if state.get("best_model_checkpoint") else None
        except (OSError, ValueError, TypeError, AttributeError):
            continue
    return None


def _inspect(checkpoint: Path, best: str | None, read_files: bool) -> CheckpointInfo:
    manifest, state, reason = _judge(checkpoint, read_files)
    stats = [(checkpoint / name).stat() for name in checkpoint_files(checkpoint)] or [checkpoint.stat()]
    step = checkpoint.name.rpartition("-")[2]
    return CheckpointInfo(
        name=checkpoint.name,
        path=str(checkpoint),
        state=state,
        reason=reason,
        step=manifest.step if manifest else int(step) if step.isdigit() else None,
        strategy=manifest.strategy if manifest else None,
        world_size=manifest.world_size if manifest else None,
        global_batch_size=manifest.global_batch_size if manifest else None,
        bytes=sum(stat.st_size for stat in stats) if checkpoint_files(checkpoint) else 0,
        age_s=round(max(0.0, time.time() - max(stat.st_mtime for stat in stats)), 1),
        best=checkpoint.name == best,
    )


def _judge(checkpoint: Path, read_files: bool) -> tuple[Manifest | None, str, str | None]:
    if not (checkpoint / MANIFEST_NAME).is_file():
        return None, INCOMPLETE, f"it has no {MANIFEST_NAME}"
    manifest = None
    try:
        manifest = read_manifest(checkpoint)
        if read_files:
            verify(checkpoint)
        else:
            _compare_lengths(checkpoint, manifest)
    except CheckpointError as error:
        return manifest, CORRUPT, str(error).removeprefix(f"{checkpoint} is corrupt: ")
    return manifest, GOOD, None


def _compare_lengths(checkpoint: Path, manifest: Manifest) -> None:
    for name, record in manifest.files.items():
        path = checkpoint / name
        length = path.stat().st_size if path.is_file() and not path.is_symlink() else None
        if length != record.bytes:
            raise CheckpointError(f"{name} " + ("is missing" if length is None else f"has {length} bytes"))
