"""The one answer to "which checkpoint does this run resume from?", for scripts and recipes.

Importing this module loads no torch; nor does the answer where a single process has no checkpoints.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hfscale.checkpoint.store import (
    LAST_CHECKPOINT,
    list_checkpoints,
    list_with_snapshots,
    name_last_checkpoint,
)
from hfscale.core.best_effort import best_effort
from hfscale.core.exchanges import Exchanges, OneProcess, StoreExchanges
from hfscale.core.launch_variables import launch_number
from hfscale.core.logging import get_logger
from hfscale.core.run_files import UNFINISHED
from hfscale.core.run_memory import RunMemory
from hfscale.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from hfscale.checkpoint.remote import RemoteStore

logger = get_logger(__name__)

ARRIVAL_S = 1800.0
"""Longest time between the first rank that calls `latest_checkpoint` and the last one, in seconds: the time limit of
gloo for a collective."""
_STORE_S = 60.0  # for one call of the launcher's store
_NAME = "latest_checkpoint"
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Latest:
    """The result of looking for the checkpoint to resume from."""

    path: Path | None
    """The newest checkpoint that a run can resume from; None if there is none."""
    skipped: tuple[str, ...] = ()
    """Why newer ones cannot be resumed from, the newest first."""
    original: Path | None = None
    """The folder of which `path` is this node's copy; None: `path` is no copy."""


def latest_checkpoint(
    output_dir: str | os.PathLike[str],
    remote: str | None = None,
    *,
    load_once: str | None = None,
) -> str | None:
    """Return the checkpoint for `trainer.train(resume_from_checkpoint=...)`: the newest that a run can resume from.

    That is one whose files all match the hashes of its manifest, or one that plain Trainer has completed; that one has
    no hashes, which a warning says. Its pickles are checked before any library loads them. Candidates are read
    completely, newest first; under `hfscale run` its snapshots in host memory are among them. A warning says why one
    was skipped. If all are skipped, and one of them was complete once, a training with `SpotCheckpointCallback` that
    starts at step 0 in `output_dir` is refused, so that nothing that a run has saved is replaced unseen.

    With several processes, call it on every rank, before or after the Trainer is made: all ranks get the same answer,
    and each reads a share of the files. Before there is a process group the ranks exchange through the launcher's
    store.

    Args:
        output_dir (`str`): output directory of the run.
        remote (`str`, *optional*): URL of the remote copy of the checkpoints, as `SpotCheckpointCallback` takes it. If
            it has a newer checkpoint than `output_dir`, that one is fetched first.
        load_once (`str`, *optional*): a folder of each node, to which the checkpoint is copied as `hfscale.load_once`
            copies a model: all nodes together read each byte once. By default every rank reads what it needs, after
            all have read everything once to verify it. It needs the process group.

    Returns:
        `str` or `None`: the path of the checkpoint, or of this node's copy; None if there is none.

    Raises:
        CheckpointError: a pickle of the newest checkpoint has more than tensors and plain values, or a rank does not
            see the checkpoint that rank 0 sees; raised on every rank.
        StorageError: the remote store cannot be read and there is no local checkpoint, or a download failed; raised on
            every rank.
        HealthError: a rank has not called it within half an hour, or the launcher's store does not answer.
        UsageError: `remote` is not a valid URL; or there are several processes without a process group, and their
            launcher has no store.
        MissingDependencyError: the package for the protocol of `remote` is not installed.
    """
    path = find_resumable(output_dir, remote, load_once=load_once).path
    return str(path) if path is not None else None


def find_resumable(
    output_dir: str | os.PathLike[str],
    remote: str | None = None,
    *,
    load_once: str | None = None,
) -> Latest:
    """Find the checkpoint that `latest_checkpoint` returns, and why newer ones are skipped. Every rank must call it.

    Args:
        output_dir (`str`): output directory of the run.
        remote (`str`, *optional*): URL of the remote copy of the checkpoints.
        load_once (`str`, *optional*): a folder of each node.

    Raises:
        HfScaleError: as `latest_checkpoint`.
    """
    store = None
    if remote is not None:
        from hfscale.checkpoint.remote import RemoteStore

        store = RemoteStore(remote)
    exchanges = exchanges_of_launch()
    exchanges.arrive(_NAME, timeout_s=ARRIVAL_S)
    latest = newest_resumable(output_dir, store, exchanges=exchanges, load_once=load_once)
    if latest.original is not None:
        from hfscale.checkpoint.load_once import check_copied_pickles

        assert latest.path is not None  # the copy
        check_copied_pickles(latest.path, latest.original, exchanges)
    elif latest.path is not None:
        from hfscale.checkpoint.resumable import check_pickles_on_all_ranks

        check_pickles_on_all_ranks(latest.path, exchanges)
    return latest


def newest_resumable(
    output_dir: str | os.PathLike[str],
    store: "RemoteStore | None" = None,
    *,
    exchanges: Exchanges,
    load_once: str | None = None,
) -> Latest:
    """Find the newest checkpoint that a run can resume from, without a check of its pickles.

    Every rank of `exchanges` must call it, and gets the same result.

    Args:
        output_dir (`str`): output directory of the run.
        store (`RemoteStore`, *optional*): the remote copy; a checkpoint that is newer there is fetched.
        exchanges (`Exchanges`): between the ranks that search together.
        load_once (`str`, *optional*): a folder of each node to which it is copied.

    Raises:
        HfScaleError: as `latest_checkpoint`.
    """
    folder = Path(output_dir)
    exchanges.on_rank_0("unfinished renames", lambda: _finish_renames(folder))
    latest = _newest_local(folder, exchanges, load_once)
    if store is None:
        return latest
    from hfscale.checkpoint.remote import fetch_best, fetch_newer

    fetched = fetch_newer(store, folder, latest.path, exchanges)
    if fetched is not None and load_once is not None:
        latest = _newest_local(folder, exchanges, load_once)
    elif fetched is not None:
        latest = Latest(path=fetched, skipped=latest.skipped)
    if latest.path is not None:
        fetch_best(store, folder, latest.path, exchanges)
    return latest


def refuse_to_replace_unread(run_dir: Path) -> None:
    """Refuse to train in a folder that has checkpoints of which none can be resumed from.

    What an interrupted save of plain Trainer left, which was never complete, is no checkpoint; it is archived.

    Args:
        run_dir (`Path`): the folder of a run that starts at step 0.

    Raises:
        CheckpointError: there are such checkpoints.
    """
    from hfscale.checkpoint.resumable import has_been_complete

    if not any(has_been_complete(checkpoint) for checkpoint in list_checkpoints(run_dir)):
        return
    latest = newest_resumable(run_dir, exchanges=OneProcess())
    if latest.path is None:
        raise CheckpointError(
            f"{run_dir} has checkpoints and none of them is verified, so the training would start at step 0 "
            f"({latest.skipped[0]}): pass the path of one as resume_from_checkpoint, or move them; with "
            'resume_from_checkpoint="false" in the training arguments they are archived'
        )


def _newest_local(output_dir: Path, exchanges: Exchanges, load_once: str | None = None) -> Latest:
    memory = RunMemory.of_environment()
    snapshots = memory.snapshots(output_dir) if memory is not None else None

    def candidates() -> list[tuple[str, bool]]:
        return [(path.name, path.parent == snapshots) for path in list_with_snapshots(output_dir)]

    skipped: list[str] = []
    found: list[tuple[str, bool]] = exchanges.on_rank_0("checkpoints", candidates)
    for name, is_snapshot in reversed(found):
        from hfscale.checkpoint.resumable import why_not_resumable

        checkpoint = (snapshots if is_snapshot and snapshots is not None else output_dir) / name
        copy: Path | None = None
        if load_once is None or is_snapshot:
            problem = why_not_resumable(checkpoint, exchanges)
        else:
            from hfscale.checkpoint.load_once import copy_checkpoint

            copy, problem = copy_checkpoint(checkpoint, load_once, exchanges)
        if problem is None:
            original = checkpoint if copy is not None else None
            return Latest(path=copy or checkpoint, skipped=tuple(skipped), original=original)
        logger.warning("checkpoint skipped: %s", problem)
        skipped.append(problem)
    return Latest(path=None, skipped=tuple(skipped))


def _finish_renames(output_dir: Path) -> None:
    """Commit what an ended process left complete but not yet renamed, and name `last-checkpoint` by its step."""
    if (output_dir / LAST_CHECKPOINT).is_dir():
        with best_effort(f"renaming {LAST_CHECKPOINT}", output_dir):
            name_last_checkpoint(output_dir)
    memory = RunMemory.of_environment()
    folders = [output_dir] if memory is None else [output_dir, memory.snapshots(output_dir)]
    for folder in folders:
        if (folder / UNFINISHED).is_dir():
            from hfscale.checkpoint.writer import finish_renames

            # The folder may be read-only
            with best_effort("renaming complete checkpoints", folder):
                finish_renames(folder)


def exchanges_of_launch(environ: Mapping[str, str] = os.environ) -> Exchanges:
    """Return the exchanges between all ranks of this launch, which may not have a process group yet.

    Args:
        environ (`Mapping[str, str]`): the launcher's variables.

    Raises:
        UsageError: there are several processes without a process group, and their launcher has no store.
    """
    if "torch.distributed" in sys.modules:  # without it there is no process group
        from hfscale.core.collectives import START
        from hfscale.core.distributed import is_distributed

        if is_distributed():
            return START
    is_launched = all(name in environ for name in _LAUNCHER_VARIABLES)
    if not is_launched or launch_number("WORLD_SIZE", 1, environ) == 1:
        return OneProcess()
    from hfscale.core.rank_store import RankStore, launcher_has_store

    if not launcher_has_store(environ):
        raise UsageError(
            f"{_NAME} is called in one of {environ['WORLD_SIZE']} processes before they have a process group, and "
            "their launcher has no store: call it after TrainingArguments is made, or start with torchrun or "
            "accelerate launch"
        )
    number = RankStore.connect(_NAME, environ, timeout_s=_STORE_S).next_number()
    return StoreExchanges(RankStore.connect(f"{_NAME}/{number}", environ, timeout_s=_STORE_S))
