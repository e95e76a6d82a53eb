"""A checkpoint of one strategy and number of ranks, made into one of another: weights, optimizer, schedule, counters.

    read_view(source)  ->  CheckpointView  ->  writer(target)

Tensors go through one at a time, so that the memory needed is that of the largest tensor (of its flat partition,
where DeepSpeed wrote it: those are mapped), not that of the model.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from hfscale.checkpoint import store
from hfscale.checkpoint.formats import STRATEGIES, check_target, layout_of, read_view, writer
from hfscale.checkpoint.formats.archives import load_archive
from hfscale.checkpoint.formats.parallel import PARALLEL_NAME
from hfscale.checkpoint.formats.parameter_names import PARAMETERS_NAME, ParameterNames
from hfscale.checkpoint.formats.universal import is_universal
from hfscale.checkpoint.formats.view import CheckpointView, ParameterGroup, check_states, saved_name
from hfscale.checkpoint.manifest import Manifest, checkpoint_files
from hfscale.checkpoint.rng import write_rng_states
from hfscale.errors import CheckpointError
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

CONVERSION_NAME = "hfscale_conversion.json"
# Small files that every strategy reads alike. Never training_args.bin: it is a pickle.
_SIDE_FILE = re.compile(r"scheduler\.pt|[^.].*\.(json|jsonl|txt|jinja|model|md)")
_RNG_FILE = re.compile(r"rng_state(_\d+)?\.pth")
_OF_ONE_LAYOUT = (PARALLEL_NAME, PARAMETERS_NAME)
_NOT_CARRIED = re.compile(rf".*\.safetensors\.index\.json|hfscale_manifest\.json|{CONVERSION_NAME}|training_args\.bin")


def can_read(manifest: Manifest, *, strategy: str, world_size: int) -> bool:
    """Whether a launch of that strategy and size reads the checkpoint as it is, RNG states of every rank included.

    `ParallelTrainer` reads its own in any layout, and sees to the states itself.
    """
    if manifest.strategy == strategy == "parallel":
        return True
    return layout_of(manifest.strategy) == layout_of(strategy) and manifest.world_size == world_size


def convert(
    source: Path, target: Path, *, manifest: Manifest, strategy: str, world_size: int, link: bool = False
) -> Manifest:
    """Make `target`, a checkpoint that `strategy` reads on `world_size` ranks, from the checkpoint `source`.

    It is written beside `target` and moved there once it is whole and committed, so `target` exists whole or not at
    all. The source is not changed.

    Args:
        manifest (`Manifest`): of the source, which has been verified.
        strategy (`str`): one of `hfscale.checkpoint.formats.STRATEGIES`.
        link (`bool`): files that stay as they are become hard links where the file system has them, else copies.

    Raises:
        CheckpointError: the pair cannot be converted, or a file would have to be unpickled.
        OSError: the disk is full or read-only.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        if _same_files(manifest, source, strategy, world_size):
            files = [name for name in checkpoint_files(source) if not _is_replaced(name)]
            _carry(source, unfinished, files, link=link)
        else:
            view = read_view(source, manifest.strategy)
            _write_view(
                view, source, unfinished, step=manifest.step, strategy=strategy, world_size=world_size, link=link
            )
        write_rng_states(source, unfinished, world_size=world_size, alike=strategy == "parallel" != manifest.strategy)
        origin = {"strategy": manifest.strategy, "world_size": manifest.world_size, **_origin(source)}
        (unfinished / CONVERSION_NAME).write_text(json.dumps(origin) + "\n", encoding="utf-8")
        made = store.commit(
            unfinished,
            step=manifest.step,
            strategy=strategy,
            world_size=world_size,
            global_batch_size=manifest.global_batch_size,
        )
        unfinished.chmod(0o755)  # mkdtemp made it private
        unfinished.rename(target)
    finally:
        if unfinished.exists():
            shutil.rmtree(unfinished)
    return made


def _same_files(manifest: Manifest, source: Path, strategy: str, world_size: int) -> bool:
    """Whether the tensors' files of the source serve the target too."""
    if strategy.startswith("zero") and manifest.strategy.startswith("zero"):
        return is_universal(source)
    return layout_of(manifest.strategy) == layout_of(strategy)


def _is_replaced(name: str) -> bool:
    return bool(_RNG_FILE.fullmatch(name) or _NOT_CARRIED.fullmatch(name)) and not name.endswith(".index.json")


def _write_view(
    view: CheckpointView, source: Path, folder: Path, *, step: int, strategy: str, world_size: int, link: bool
) -> None:
    check_states(view)
    check_target(view, strategy)
    view = _with_an_empty_group(view)
    writer(strategy)(view, folder, step=step, world_size=world_size)
    side = [path.name for path in sorted(source.iterdir()) if path.is_file() and not path.is_symlink()]
    side = [name for name in side if _SIDE_FILE.fullmatch(name) and name not in _OF_ONE_LAYOUT]
    _carry(source, folder, [name for name in side if not _NOT_CARRIED.fullmatch(name)], link=link)
    if not (folder / "scheduler.pt").is_file():
        raise CheckpointError(
            f"{source} has no scheduler.pt: a learning-rate schedule that DeepSpeed's config sets up is kept in its "
            "own files and cannot be converted; let the Trainer make it (--lr_scheduler_type)"
        )
    stepped = sum(bool(group.names) for group in view.groups)
    _fit_schedule(folder / "scheduler.pt", stepped if strategy.startswith("zero") else len(view.groups))
    if (source / "scaler.pt").is_file():
        logger.info("the loss scale of fp16 is not converted: it begins at its default and finds its value again")
    names = ParameterNames(groups=[group.names for group in view.groups], aliases=dict(view.aliases))
    (folder / PARAMETERS_NAME).write_text(names.to_json(), encoding="utf-8")


def _fit_schedule(path: Path, groups: int) -> None:
    """A scheduler keeps lists with an entry per group of parameters: as many as the optimizer will have."""
    state = load_archive(path)
    known = len(state.get("base_lrs", ()))
    if known in (0, groups) or len(set(state["base_lrs"])) > 1:
        return
    fitted = {k: v[:1] * groups if isinstance(v, list) and len(v) == known else v for k, v in state.items()}
    path.unlink()  # it may be a link to the source's
    torch.save(fitted, path)


def _with_an_empty_group(view: CheckpointView) -> CheckpointView:
    """Trainer always makes two groups, with and without weight decay; DeepSpeed drops an empty one (as LoRA has it).
    torch's loaders ask for as many as there were."""
    if len(view.groups) != 1 or not view.groups[0].names:
        return view
    if any(saved_name(name) == name for name in view.groups[0].names):
        return view  # no adapters
    empty = ParameterGroup(options=view.groups[0].options | {"weight_decay": 0.0}, names=[])
    return CheckpointView(weights=view.weights, groups=[*view.groups, empty], state=view.state, aliases=view.aliases)


def _carry(source: Path, folder: Path, names: Iterable[str], *, link: bool) -> None:
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if link:
            try:
                os.link(source / name, target)
                continue
            except OSError:  # another file system, or one without links
                pass
        shutil.copyfile(source / name, target)


def _origin(source: Path) -> dict[str, object]:
    """Who wrote it first, where the source was converted itself."""
    return read_origin(source) or {}


def read_origin(checkpoint: Path) -> dict[str, object] | None:
    """Strategy and number of ranks of the training that wrote a converted checkpoint; None for any other."""
    try:
        fields = json.loads((checkpoint / CONVERSION_NAME).read_text(encoding="utf-8"))
        return {"strategy": str(fields["strategy"]), "world_size": int(fields["world_size"])}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{checkpoint / CONVERSION_NAME} cannot be read: {error}") from None


__all__ = ["CONVERSION_NAME", "STRATEGIES", "can_read", "convert", "read_origin"]
