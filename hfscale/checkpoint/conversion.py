"""Converts a checkpoint to another strategy or number of ranks: weights, optimizer, schedule, counters, RNG states.

    read_view(source)  ->  CheckpointView  ->  write_view(target)

Tensors are converted one at a time, so the memory needed is that of the largest tensor, not that of the model.
(DeepSpeed's flat partitions are larger than a tensor; they are memory-mapped.) A checkpoint that plain Trainer wrote
has no manifest; `inferred_manifest` makes one from its files.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from hfscale.checkpoint import store
from hfscale.checkpoint.formats import FORMATS, read_view, write_view
from hfscale.checkpoint.formats.average import average_files
from hfscale.checkpoint.formats.parallel import PARALLEL_NAME
from hfscale.checkpoint.formats.parameter_names import ParameterNames
from hfscale.checkpoint.formats.view import CheckpointView, ParameterGroup, check_states, saved_name
from hfscale.checkpoint.manifest import Manifest, checkpoint_files
from hfscale.checkpoint.pickles import load_archive
from hfscale.checkpoint.rng_states import write_rng_states
from hfscale.core.durable_files import flush_parents
from hfscale.core.logging import get_logger
from hfscale.core.run_files import PARAMETERS_NAME
from hfscale.core.text_files import read_json
from hfscale.errors import CheckpointError
from hfscale.facts.strategies import facts_of
from hfscale.trainer.parameter_groups import entries_by_group, group_count, with_entries

logger = get_logger(__name__)

CONVERSION_NAME = "hfscale_conversion.json"
# Small files that every strategy reads. training_args.bin is never among them: it is a pickle.
_SMALL_FILE = re.compile(r"scheduler\.pt|[^.].*\.(json|jsonl|txt|jinja|model|md)")
_RNG_FILE = re.compile(r"rng_state(_\d+)?\.pth")
_FORMAT_FILES = (PARALLEL_NAME, PARAMETERS_NAME)
_NOT_COPIED = re.compile(
    rf".*\.safetensors\.index\.json|hfscale_manifest\.json|{CONVERSION_NAME}|training_args\.bin"
)


def can_read(manifest: Manifest, *, strategy: str, world_size: int) -> bool:
    """Return whether a launch can read the checkpoint without conversion, including the RNG states of every rank.

    `ParallelTrainer` and natively distributed models read their checkpoints with any layout and restore the RNG states
    themselves.

    Args:
        manifest (`Manifest`): manifest of the checkpoint.
        strategy (`str`): strategy of the launch.
        world_size (`int`): number of processes of the launch.
    """
    written, reader = facts_of(manifest.strategy), facts_of(strategy)
    if written.file_layout != reader.file_layout:
        return False
    return reader.reads_any_world_size or manifest.world_size == world_size


def convert(
    source: Path,
    target: Path,
    *,
    manifest: Manifest,
    strategy: str,
    world_size: int,
    link: bool = False,
) -> Manifest:
    """Write `target`, a checkpoint that `strategy` reads on `world_size` ranks, from the checkpoint `source`.

    It is written to a temporary folder next to `target` and renamed when it is complete and committed, so `target` is
    either complete or does not exist. The source is not changed.

    Args:
        source (`Path`): a checkpoint.
        target (`Path`): path of the new checkpoint.
        manifest (`Manifest`): manifest of the source, which has been verified.
        strategy (`str`): one of `hfscale.facts.strategies.CONVERTIBLE`.
        world_size (`int`): number of processes that will resume from `target`.
        link (`bool`): hard-link the files that do not change, if the file system has hard links; else copy them.

    Returns:
        `Manifest`: manifest of the new checkpoint.

    Raises:
        CheckpointError: the conversion is not possible, or a file would have to be unpickled.
        OSError: the disk is full or read-only, or `target` exists and is not an empty folder.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        if _same_files(manifest, source, strategy):
            files = [name for name in checkpoint_files(source) if not _is_rewritten(name)]
            _copy(source, unfinished, files, link=link)
        else:
            view = read_view(source, manifest.strategy)
            _write_view(
                view,
                source,
                unfinished,
                step=manifest.step,
                strategy=strategy,
                world_size=world_size,
                link=link,
            )
        # Ranks that share a matrix must drop out the same elements, and other strategies have no such ranks
        shares_matrices = facts_of(strategy).reads_any_world_size
        did_share = facts_of(manifest.strategy).reads_any_world_size
        write_rng_states(
            source,
            unfinished,
            world_size=world_size,
            same_on_all_ranks=shares_matrices and not did_share,
        )
        # For a source that was itself converted, the training that wrote it first is kept.
        written_by = {
            "strategy": manifest.strategy,
            "world_size": manifest.world_size,
            **(read_origin(source) or {}),
        }
        (unfinished / CONVERSION_NAME).write_text(json.dumps(written_by) + "\n", encoding="utf-8")
        converted = store.commit(
            unfinished,
            step=manifest.step,
            strategy=strategy,
            world_size=world_size,
            global_batch_size=manifest.global_batch_size,
            identity=manifest.identity,
        )
        unfinished.chmod(0o755)  # mkdtemp has made it private
        unfinished.rename(target)
        flush_parents(target)
    finally:
        if unfinished.exists():
            shutil.rmtree(unfinished)
    return converted


def _same_files(manifest: Manifest, source: Path, strategy: str) -> bool:
    """Return whether the target has the same tensor files as the source."""
    written = facts_of(manifest.strategy).file_format
    if written != facts_of(strategy).file_format:
        return False
    return FORMATS[written].keeps_tensor_files(source)


def _is_rewritten(name: str) -> bool:
    return bool(_RNG_FILE.fullmatch(name) or _NOT_COPIED.fullmatch(name)) and not name.endswith(
        ".index.json"
    )


def _write_view(
    view: CheckpointView,
    source: Path,
    folder: Path,
    *,
    step: int,
    strategy: str,
    world_size: int,
    link: bool,
) -> None:
    check_states(view)
    view = _with_empty_group(view)
    write_view(view, folder, strategy, step=step, world_size=world_size)
    names = [
        path.name for path in sorted(source.iterdir()) if path.is_file() and not path.is_symlink()
    ]
    names = [name for name in names if _SMALL_FILE.fullmatch(name) and name not in _FORMAT_FILES]
    small = [name for name in names if not _NOT_COPIED.fullmatch(name)]
    _copy(source, folder, [*small, *average_files(source)], link=link)
    if not (folder / "scheduler.pt").is_file():
        raise CheckpointError(
            f"{source} has no scheduler.pt: a learning-rate schedule from DeepSpeed's config is stored in DeepSpeed's "
            "own files and cannot be converted; let the Trainer create the schedule (--lr_scheduler_type)"
        )
    drops_empty = FORMATS[facts_of(strategy).file_format].drops_empty_groups
    _fit_schedule(folder / "scheduler.pt", view.groups, drops_empty=drops_empty)
    if (source / "scaler.pt").is_file():
        logger.info(
            "the loss scale of fp16 is not converted: it restarts at its default and adapts again"
        )
    parameters = ParameterNames(
        groups=[group.names for group in view.groups], aliases=dict(view.aliases)
    )
    (folder / PARAMETERS_NAME).write_text(parameters.to_json(), encoding="utf-8")


def _fit_schedule(path: Path, groups: list[ParameterGroup], *, drops_empty: bool) -> None:
    """Give the lists of a scheduler an entry for each parameter group of the optimizer that will be loaded with it.

    Args:
        path (`Path`): scheduler.pt of the new checkpoint, with the entries of the source.
        groups (`list[ParameterGroup]`): the optimizer's groups.
        drops_empty (`bool`): whether an optimizer that is read from the new checkpoint has no empty groups.

    Raises:
        CheckpointError: the source has entries for other groups, which are not all the same.
    """
    state = load_archive(path)
    known = group_count(state)
    if not known:
        return
    filled = [number for number, group in enumerate(groups) if group.names]
    if known == len(groups):
        source_of = list(range(known))
    elif known == len(filled):  # the source has dropped the empty ones
        source_of = [
            filled.index(number) if number in filled else 0 for number in range(len(groups))
        ]
    elif _has_equal_entries(state, known):
        source_of = [0] * len(groups)
    else:
        raise CheckpointError(
            f"{path.name} has a learning rate for each of {known} parameter groups, and the optimizer has "
            f"{len(groups)}: which group a rate belongs to is not known"
        )
    numbers = [source_of[number] for number in (filled if drops_empty else range(len(groups)))]
    if numbers == list(range(known)):
        return
    path.unlink()  # it may be a hard link to the source's file
    torch.save(with_entries(state, known, numbers), path)


def _has_equal_entries(state: dict[str, Any], groups: int) -> bool:
    first, *others = entries_by_group(state, groups)
    return all(entries == first for entries in others)


def _with_empty_group(view: CheckpointView) -> CheckpointView:
    """Add the empty group that DeepSpeed drops.

    Trainer always makes two groups, with and without weight decay, of which LoRA leaves one empty. torch's loaders
    require the number of groups that the optimizer has.
    """
    if len(view.groups) != 1 or not view.groups[0].names:
        return view
    if any(saved_name(name) == name for name in view.groups[0].names):
        return view  # there are no adapters
    empty = ParameterGroup(options=view.groups[0].options | {"weight_decay": 0.0}, names=[])
    return CheckpointView(
        weights=view.weights, groups=[*view.groups, empty], state=view.state, aliases=view.aliases
    )


def _copy(source: Path, folder: Path, names: Iterable[str], *, link: bool) -> None:
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if link:
            try:
                os.link(source / name, target)
                continue
            except OSError:  # the file systems differ, or this one has no hard links
                pass
        shutil.copyfile(source / name, target)


def read_origin(checkpoint: Path) -> dict[str, object] | None:
    """Return the strategy and number of ranks of the training that wrote a converted checkpoint; None for others.

    Raises:
        CheckpointError: `hfscale_conversion.json` is broken.
    """
    try:
        fields = read_json(checkpoint / CONVERSION_NAME)
        return {"strategy": str(fields["strategy"]), "world_size": int(fields["world_size"])}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{checkpoint / CONVERSION_NAME} cannot be read: {error}") from None
