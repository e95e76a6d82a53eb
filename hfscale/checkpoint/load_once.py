"""Loading once: a job of several nodes reads each byte of a model or checkpoint once from the file system they share.

transformers and Trainer read on every node, some on every rank: a job of 8 nodes reads a model of 1.4 TB eight times.
Here all nodes together copy the files to a folder of each node (`hfscale.checkpoint.transfer`), and everything is
loaded from there, by the same code and under every strategy. What a checkpoint's manifest has hashes of is compared
with them on each node after it has come over the network.

A sharded checkpoint is copied in parts where as many ranks read it as wrote it: the files of a rank go to the node of
that rank. In the copies of the others they are links to the original, so that a rank that needs a part of another
node's file reads it from there. `hfscale.checkpoint.node_copies` has the folder of a node.
"""

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import xxhash

from hfscale.checkpoint.manifest import Manifest, checkpoint_files, read_manifest
from hfscale.checkpoint.node_copies import NodeCopies, Place
from hfscale.checkpoint.pickles import check_pickles
from hfscale.checkpoint.resumable import check_complete, check_pickles_on_all_ranks
from hfscale.checkpoint.store import check_files
from hfscale.checkpoint.transfer import Nodes
from hfscale.core.collectives import START
from hfscale.core.distributed import is_distributed
from hfscale.core.exchanges import Exchanges
from hfscale.core.launch_variables import launch_number
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.core.spelling import spelled
from hfscale.errors import CheckpointError, StorageError, UsageError
from hfscale.facts.strategies import facts_of

_OF_RANK = re.compile(r"(?:__|_pp_rank_)(\d+)_")
"""The number of the rank in the names of torch's and DeepSpeed's shards: `__3_0.distcp`, `zero_pp_rank_3_mp_…`."""
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.py", "*.jinja")
"""What a model's folder has apart from its weights, for configs, tokenizers and code."""
_ADAPTER_NAME = "adapter_config.json"


def load_once(name_or_path: str, folder: str, *, revision: str | None = None) -> str:
    """Copy a model to a folder of each node, reading each byte of it once in the whole job, and return its path there.

    Use it around the name for `from_pretrained`. All nodes read equal parts of the files, if they see them, and send
    them to each other over gloo; each rank needs 32 MiB for that. A model of the hub is downloaded by one process. A
    copy that an earlier launch has left is used again, and a node that lacks it gets it from the others. With one
    process the files are copied.

    Every rank must call it, after the process group is made (`TrainingArguments` makes it).

    Args:
        name_or_path (`str`): a folder with safetensors files, or a hub id.
        folder (`str`): a folder of each node, on its own disk or in its memory, with room for the model; variables
            such as `$TMPDIR` are expanded on each node.
        revision (`str`, *optional*): the revision of a hub id.

    Returns:
        `str`: the folder of the copy on this node.

    Raises:
        UsageError: there is no process group, the folder is one that nodes share, it contains a variable that is not
            set, or the model has no safetensors files or is an adapter.
        CheckpointError: the model's folder has a manifest, and a file is not as it says.
        StorageError: a node has not enough room, or a file cannot be read or written.
    """
    _check_has_group()
    found: list[Any] = START.on_rank_0(
        "files of the model", lambda: _files_of_model(name_or_path, revision)
    )
    source, names = Path(found[0]), found[1]
    copies = NodeCopies(folder, START)
    has_manifest = START.on_rank_0("manifest", lambda: (source / MANIFEST_NAME).is_file())
    manifest = START.on_rank_0("hashes", lambda: _hashes(source, names)) if has_manifest else {}
    place = Place(folder=copies.folder / "models", source=source, holds_one=False)
    return str(copies.copy(place, names, manifest))


def weights_to_load(arguments: object, name_or_path: str, *, revision: str | None = None) -> str:
    """Return where a recipe reads the weights of a model: its copy on this node if the flags ask for one.

    Args:
        arguments (`object`): the training arguments, with `load_once` if they are a recipe's.
        name_or_path (`str`): the name of the model.
        revision (`str`, *optional*): the revision of a hub id.

    Raises:
        HfScaleError: as `load_once`.
    """
    folder = vars(arguments).get("load_once")
    if folder is None:
        return name_or_path
    return load_once(name_or_path, folder, revision=revision)


def copy_checkpoint(
    checkpoint: Path, folder: str, exchanges: Exchanges
) -> tuple[Path | None, str | None]:
    """Copy a checkpoint to a folder of each node, where a run can resume from it. Every rank must call it.

    Args:
        checkpoint (`Path`): the folder of the checkpoint, which every node sees.
        folder (`str`): as for `load_once`.
        exchanges (`Exchanges`): between all ranks.

    Returns:
        `tuple`: the copy, and None; or None, and why no run can resume from the checkpoint.

    Raises:
        HfScaleError: as `load_once`.
    """
    _check_has_group()
    copies = NodeCopies(folder, exchanges)
    described = exchanges.on_rank_0("files of the checkpoint", lambda: _describe(checkpoint))
    problem: str | None = described["problem"]
    if problem is not None:
        return None, problem
    run = xxhash.xxh3_64_hexdigest(str(checkpoint.parent.resolve()).encode())
    place = Place(folder=copies.folder / "checkpoints" / run, source=checkpoint, holds_one=True)
    hashes = described["hashes"]
    shards = _of_ranks(described["names"]) if described["shards"] else {}
    copy: Path | None = None
    failure: list[str] | None = None
    try:
        copy = copies.copy(place, described["names"], hashes, shards)
    except (CheckpointError, StorageError) as error:
        failure = [type(error).__name__, str(error)]
    # Ranks that fail in the same exchange have errors of their own
    failures = exchanges.combine(
        "failed copies", failure, lambda ranks: [one for one in ranks if one]
    )
    of_storage = [message for kind, message in failures if kind == StorageError.__name__]
    if of_storage:
        raise StorageError(of_storage[0])
    if failures:
        return None, failures[0][1]
    return copy, None


def check_copied_pickles(copy: Path, checkpoint: Path, exchanges: Exchanges) -> None:
    """Check the pickles of a checkpoint that has been copied. Every rank must call it.

    Each node checks its copy. Where it has links in place of files, the original is checked, of which that reads the
    tables and pickles of the archives alone.

    Args:
        copy (`Path`): what `copy_checkpoint` has returned.
        checkpoint (`Path`): the original.
        exchanges (`Exchanges`): between all ranks.

    Raises:
        CheckpointError: a pickle has more than tensors and plain values; raised on every rank.
    """
    has_links = any(path.is_symlink() for path in copy.rglob("*"))
    if exchanges.combine("links", has_links, any):
        check_pickles_on_all_ranks(checkpoint, exchanges)
        return
    nodes = Nodes.of_launch(exchanges)
    with exchanges.agreed("pickles of the copy"):
        check_pickles(copy, nodes.share(checkpoint_files(copy)))


def _check_has_group() -> None:
    if launch_number("WORLD_SIZE", 1) > 1 and not is_distributed():
        given = spelled("load_once")
        raise UsageError(
            f"{given} needs the process group, through which nodes send each other what they read: call it after "
            "TrainingArguments is made"
        )


def _files_of_model(name: str, revision: str | None) -> list[Any]:
    """Return the folder of a model's files, which are downloaded if need be, and their names."""
    if (Path(name) / _ADAPTER_NAME).is_file():
        given = spelled("load_once")
        raise UsageError(
            f"{given} with {name}, which is an adapter: merge it first, or leave {given} out"
        )
    # torch and transformers are imported where a model is loaded
    from hfscale.checkpoint.formats.safetensors_files import weight_files

    weights = [Path(path) for path in weight_files(name, revision)]
    source = weights[0].parent
    if not Path(name).is_dir():
        from huggingface_hub import snapshot_download

        snapshot_download(name, revision=revision, allow_patterns=list(_SMALL_FILES))
    names = {path.name for path in weights}
    for pattern in _SMALL_FILES:
        names |= {path.name for path in source.glob(pattern)}
    return [str(source), sorted(names)]


def _hashes(source: Path, names: Collection[str]) -> dict[str, list[Any]]:
    """Return the lengths and hashes that a manifest has of files, by name."""
    manifest = read_manifest(source)
    return {
        name: [record.bytes, record.xxh3_128]
        for name, record in manifest.files.items()
        if name in names
    }


def _describe(checkpoint: Path) -> dict[str, Any]:
    """Return what all ranks need to know of a checkpoint, or why it cannot be resumed from."""
    names = [*checkpoint_files(checkpoint)]
    described: dict[str, Any] = {"problem": None, "hashes": {}, "shards": False, "names": names}
    try:
        if not (checkpoint / MANIFEST_NAME).is_file():
            check_complete(checkpoint)
            return described
        manifest = check_files(checkpoint)
    except CheckpointError as error:
        return {"problem": str(error)}
    model_only = manifest.why_model_only()
    if model_only is not None:
        return {"problem": f"{checkpoint}: {model_only}"}
    names.append(MANIFEST_NAME)
    described["hashes"] = _hashes(checkpoint, names)
    described["shards"] = _can_be_shared(manifest)
    return described


def _can_be_shared(manifest: Manifest) -> bool:
    """Return whether each rank of this launch reads the shards that the rank of its number has written."""
    return bool(facts_of(manifest.strategy).shards) and manifest.world_size == START.world_size


def _of_ranks(names: Iterable[str]) -> dict[str, int]:
    """Return the rank that wrote a file, by name, for those that have it in their name."""
    found = {name: _OF_RANK.search(Path(name).name) for name in names}
    return {name: int(match[1]) for name, match in found.items() if match is not None}
