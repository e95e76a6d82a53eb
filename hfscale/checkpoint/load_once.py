"""Loading once: a job of several nodes reads each byte of a model or checkpoint once from the file system they share.

transformers and Trainer read on every node, some on every rank: a job of 8 nodes reads a model of 1.4 TB eight times.
Here all nodes together copy the files to a folder of each node (`hfscale.checkpoint.transfer`), and everything is
loaded from there, by the same code and under every strategy. What a checkpoint's manifest has hashes of is compared
with them on each node after it has come over the network.

A sharded checkpoint is copied in parts where as many ranks read it as wrote it: the files of a rank go to the node of
that rank. In the copies of the others they are links to the original, so that a rank that needs a part of another
node's file reads it from there.

The folder has

    models/HASH/NAME/             the weights of a model and its small files; they stay for the next launch
    checkpoints/RUN/HASH/NAME/    one checkpoint of a run; a newer one takes its place

`copy.json` next to NAME is written last. It names the boot of the machine: what a machine had not written to its disk
when it lost power is not used. A folder `*.partial` is of a copy that was not completed.
"""

import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from hfscale.checkpoint.manifest import FileRecord, Manifest, checkpoint_files, read_manifest
from hfscale.checkpoint.pickles import check_pickles
from hfscale.checkpoint.resumable import check_complete, check_pickles_on_all_ranks
from hfscale.checkpoint.store import check_files
from hfscale.checkpoint.transfer import CopiedFile, Nodes, Transfer
from hfscale.core.collectives import START
from hfscale.core.distributed import is_distributed
from hfscale.core.durable_files import write_atomically
from hfscale.core.exchanges import Exchanges
from hfscale.core.launch_variables import launch_number
from hfscale.core.logging import get_logger
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.core.spelling import spelled
from hfscale.core.text_files import read_json
from hfscale.errors import CheckpointError, StorageError, UsageError
from hfscale.facts.strategies import facts_of

logger = get_logger(__name__)

MOST_NODES = 256
"""Each rank has a connection to its rank of every other node, as gloo makes them."""
_COPY_NAME = "copy.json"
_PARTIAL, _LOCK = ".partial", ".lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_in_use: dict[Path, IO[str]] = {}
"""By the folder of a run's copies, the file by whose lock this process holds one."""
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
            set, there are more than 256 nodes, or the model has no safetensors files or is an adapter.
        CheckpointError: the model's folder has a manifest, and a file is not as it says.
        StorageError: a node has not enough room, or a file cannot be read or written.
    """
    _check_has_group()
    found: list[Any] = START.on_rank_0(
        "files of the model", lambda: _files_of_model(name_or_path, revision)
    )
    source, names = Path(found[0]), found[1]
    copies = _Copies(folder, START)
    has_manifest = START.on_rank_0("manifest", lambda: (source / MANIFEST_NAME).is_file())
    manifest = START.on_rank_0("hashes", lambda: _hashes(source, names)) if has_manifest else {}
    place = _Place(folder=copies.folder / "models", source=source, holds_one=False)
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
    copies = _Copies(folder, exchanges)
    described = exchanges.on_rank_0("files of the checkpoint", lambda: _describe(checkpoint))
    problem: str | None = described["problem"]
    if problem is not None:
        return None, problem
    run = xxhash.xxh3_64_hexdigest(str(checkpoint.parent.resolve()).encode())
    place = _Place(folder=copies.folder / "checkpoints" / run, source=checkpoint, holds_one=True)
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


def _expanded(folder: str) -> str:
    expanded = str(Path(os.path.expandvars(folder)).expanduser())
    if "$" in expanded:
        given = spelled("load_once", folder)
        host = socket.gethostname()
        raise UsageError(
            f"{given} contains a variable that is not set on {host}: set it, or name a folder on the disk of each node"
        )
    return expanded


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


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where the copies of a source go."""

    folder: Path
    """Contains a folder for each version of the source."""
    source: Path
    """The folder that is copied."""
    holds_one: bool
    """Whether a new version takes the place of all others."""


@dataclass(frozen=True, kw_only=True)
class _State:
    """What the ranks of a node have found."""

    has_copy: bool
    """Whether the node has a complete copy."""
    sees_source: bool
    """Whether all its ranks see all files."""
    free_bytes: int
    """Room in its folder."""
    host: str
    """Its name, for messages."""

    @classmethod
    def of_ranks(cls, ranks: Sequence[list[Any]]) -> "_State":
        """Combine what the ranks of a node have found."""
        copies = [rank[1] for rank in ranks]
        sights = [rank[2] for rank in ranks]
        room = [rank[3] for rank in ranks]
        host = ranks[0][4]
        return cls(has_copy=all(copies), sees_source=all(sights), free_bytes=min(room), host=host)


class _Copies:
    """The copies in a folder of each node.

    Args:
        folder (`str`): the folder as the user has given it.
        exchanges (`Exchanges`): between all ranks.
    """

    def __init__(self, folder: str, exchanges: Exchanges) -> None:
        self._exchanges = exchanges
        with exchanges.agreed("folder of this node"):
            self.folder = Path(_expanded(folder))
        self._nodes = Nodes.of_launch(exchanges)
        count = len(self._nodes.ranks)
        if count > MOST_NODES:
            given = spelled("load_once", folder)
            raise UsageError(
                f"{given} on {count} nodes: at most {MOST_NODES} send each other what they read; leave it out"
            )

    def copy(
        self,
        place: _Place,
        names: Collection[str],
        hashes: Mapping[str, list[Any]],
        shards: Mapping[str, int] | None = None,
    ) -> Path:
        """Copy files of a source, unless every node has them, and return their folder on this node.

        Args:
            place (`_Place`): from where and where to.
            names (`Collection[str]`): the files, the same on every rank.
            hashes (`Mapping`): length and hash of those that a manifest has.
            shards (`Mapping[str, int]`, *optional*): the rank that needs a file, for those that only one needs.
        """
        listing: dict[str, list[int]]
        version: str
        token: str
        listing, version, token = self._exchanges.on_rank_0(
            "lengths", lambda: _version_of(place.source, names, hashes, shards)
        )
        copied = place.folder / version
        states = self._states(place, copied, listing)
        if all(state.has_copy for state in states):
            logger.info("%s is read from %s, where every node has it", place.source.name, copied)
            self._verify(copied / place.source.name, place.source, hashes)
            self._hold(place, copied)
            return copied / place.source.name
        files = self._files(listing, states, shards or {})
        self._check_room(states, files)
        partial = copied.with_name(f"{token}{_PARTIAL}")
        with _held(partial, is_leader=self._nodes.local_rank == 0):
            self._copy(place, partial, copied, files, states)
            target = copied if states[self._nodes.number].has_copy else partial
            self._verify(target / place.source.name, place.source, hashes)
            self._complete(place, partial, copied, listing)
        self._hold(place, copied)
        return copied / place.source.name

    def _states(
        self, place: _Place, copied: Path, listing: Mapping[str, list[int]]
    ) -> list[_State]:
        """Return what each node has, after what it does not need any more is removed."""
        with self._exchanges.agreed("folders of the nodes"), self._writing():
            place.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._nodes.local_rank == 0:
                _remove_abandoned(place, copied)
        self._check_is_own()
        mine = [
            self._nodes.number,
            _is_complete(copied, listing),
            _sees(place.source, listing),
            shutil.disk_usage(self.folder).free,
            socket.gethostname(),
        ]
        found = self._exchanges.combine("copies of the nodes", mine, lambda ranks: ranks)
        by_node: dict[int, list[list[Any]]] = {}
        for of_rank in found:
            by_node.setdefault(of_rank[0], []).append(of_rank)
        return [_State.of_ranks(by_node[number]) for number in sorted(by_node)]

    def _check_is_own(self) -> None:
        """Check that no two nodes share the folder, by a file that the first rank of each makes."""
        token = self._exchanges.on_rank_0("token", lambda: os.urandom(8).hex())
        probes = [
            self.folder / f".node-{token}-{number}" for number in range(len(self._nodes.ranks))
        ]
        mine = probes[self._nodes.number]
        with self._exchanges.agreed("own folders"), self._writing():
            if self._nodes.local_rank == 0:
                mine.touch()
        others = [number for number, probe in enumerate(probes) if probe != mine and probe.exists()]
        found = self._exchanges.combine("shared folders", others, lambda ranks: ranks)
        if self._nodes.local_rank == 0:
            mine.unlink(missing_ok=True)
        sharing = next((number for number, seen in enumerate(found) if seen), None)
        if sharing is None:
            return
        given = spelled("load_once", str(self.folder))
        other = self._nodes.ranks[found[sharing][0]][0]
        raise UsageError(
            f"{given} is a folder that nodes share, such as those of ranks {sharing} and {other}: name one on the "
            "disk of each node, or in its memory"
        )

    def _files(
        self, listing: Mapping[str, list[int]], states: list[_State], shards: Mapping[str, int]
    ) -> list[CopiedFile]:
        """Return what is copied, and to which nodes."""
        node_of = {rank: number for number, ranks in enumerate(self._nodes.ranks) for rank in ranks}
        # A link needs the original, and a node that has a copy has no other node's files
        can_share = all(state.sees_source and not state.has_copy for state in states)
        owners = {name: node_of.get(rank) for name, rank in shards.items()} if can_share else {}
        return [
            CopiedFile(name=name, bytes=length, node=owners.get(name))
            for name, (length, _) in listing.items()
        ]

    def _check_room(self, states: list[_State], files: list[CopiedFile]) -> None:
        for number, state in enumerate(states):
            needed = sum(file.bytes for file in files if file.node in (None, number))
            if state.has_copy or needed <= state.free_bytes:
                continue
            given = spelled("load_once", str(self.folder))
            free_gib = state.free_bytes / 2**30
            needed_gib = needed / 2**30
            raise StorageError(
                f"{given} has {free_gib:.3g} GiB free on {state.host}, and the copy needs {needed_gib:.3g} GiB: make "
                "room, or name another folder"
            )

    def _copy(
        self,
        place: _Place,
        partial: Path,
        copied: Path,
        files: list[CopiedFile],
        states: list[_State],
    ) -> None:
        """Copy files into the partial copy of each node that has no complete one."""
        mine = states[self._nodes.number]
        target = None if mine.has_copy else partial / place.source.name
        with self._exchanges.agreed("room for the copy"), self._writing():
            if target is not None and self._nodes.local_rank == 0:
                self._make_room(place, target, files)
        # Those that can read every file that all nodes need
        readers = [n for n, state in enumerate(states) if state.has_copy or state.sees_source]
        source = copied / place.source.name if mine.has_copy else place.source
        total_gib = sum(file.bytes for file in files) / 2**30
        logger.info("%.3g GiB of %s are copied to %s", total_gib, place.source, self.folder)
        transfer = Transfer(source, target, nodes=self._nodes, readers=readers)
        with self._exchanges.agreed("copy"):
            try:
                transfer.run(files)
            except OSError as error:
                given = spelled("load_once", str(self.folder))
                raise StorageError(
                    f"{place.source} cannot be copied to {given} of {mine.host}: {error}; check both, or leave it out"
                ) from None

    def _make_room(self, place: _Place, target: Path, files: list[CopiedFile]) -> None:
        """Create the files of a copy with their lengths, and the links."""
        target.mkdir(parents=True, mode=0o700)
        for file in files:
            path = target / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.node in (None, self._nodes.number):
                with path.open("wb") as created:
                    created.truncate(file.bytes)
            else:
                path.symlink_to((place.source / file.name).resolve())

    def _verify(
        self,
        copy: Path,
        source: Path,
        hashes: Mapping[str, list[Any]],
    ) -> None:
        """Compare the files of this node with the manifest's hashes."""
        # Behind a link is the file of another node, which verifies it
        here = [name for name in hashes if not (copy / name).is_symlink()]
        with self._exchanges.agreed("hashes of the copy"):
            for name in self._nodes.share(here):
                if _hash_of(copy / name) == hashes[name]:
                    continue
                # Either the original is damaged, or its way to this node
                if _hash_of(source / name) != hashes[name]:
                    raise CheckpointError(f"{source} is corrupt: the content of {name} has changed")
                host = socket.gethostname()
                given = spelled("load_once")
                raise StorageError(
                    f"{copy / name} on {host} is not what {source} has: check the memory, the disk and the network of "
                    f"this machine, and remove {copy}, or leave {given} out"
                )

    def _complete(
        self, place: _Place, partial: Path, copied: Path, listing: Mapping[str, list[int]]
    ) -> None:
        """Give the partial copy of this node its name, unless the source has changed while it was read."""
        with self._exchanges.agreed("unchanged source"):
            if self._exchanges.rank == 0 and _listing(place.source, listing) != listing:
                raise StorageError(
                    f"{place.source} has changed while it was read: start again when it is complete"
                )
        with self._exchanges.agreed("complete copy"):
            if self._nodes.local_rank != 0 or not partial.is_dir():
                return
            if _is_complete(copied, listing):  # another job was faster
                shutil.rmtree(partial)
                return
            write_atomically(partial / _COPY_NAME, json.dumps({"boot": _boot()}))
            shutil.rmtree(copied, ignore_errors=True)
            partial.rename(copied)

    def _hold(self, place: _Place, copied: Path) -> None:
        """Keep other jobs of this node from removing a copy that this job loads from."""
        with self._exchanges.agreed("copy in use"):
            if self._nodes.local_rank == 0 and place.holds_one:
                file = (copied / _COPY_NAME).open()
                fcntl.flock(file, fcntl.LOCK_SH)
                _in_use[place.folder] = file

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Name the flag, the folder and the host in errors of the block."""
        try:
            yield
        except OSError as error:
            given = spelled("load_once", str(self.folder))
            host = socket.gethostname()
            reason = error.strerror or error
            raise StorageError(
                f"{given} cannot be written on {host}: {reason}; name another folder"
            ) from None


def _version_of(
    source: Path,
    names: Iterable[str],
    hashes: Mapping[str, list[Any]],
    shards: Mapping[str, int] | None,
) -> list[Any]:
    """Return the listing of a source, a name for its present content, and a name for what this job copies."""
    listing = _listing(source, names)
    described = json.dumps([str(source.resolve()), listing, hashes, shards, START.world_size])
    return [listing, xxhash.xxh3_64_hexdigest(described.encode()), os.urandom(8).hex()]


@contextmanager
def _held(partial: Path, *, is_leader: bool) -> Iterator[None]:
    """Hold the lock that tells other jobs of this node that the partial copy is being written; a killed process holds
    none. What is left of the copy is removed at the end."""
    if not is_leader:
        yield
        return
    lock = partial.with_suffix(_LOCK)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            lock.unlink()


def _remove_abandoned(place: _Place, wanted: Path) -> None:
    """Remove the partial copies of jobs that were killed, and complete ones in whose place the wanted one comes."""
    used = _in_use.pop(place.folder, None)
    if used is not None:
        used.close()
    for folder in place.folder.iterdir():
        if folder.suffix == _PARTIAL:
            lock = folder.with_suffix(_LOCK)
            with (
                suppress(OSError),
                lock.open("a") as file,
            ):  # another job holds it, or removes the copy
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                lock.unlink()
        elif folder.is_dir() and folder != wanted and place.holds_one:
            with (
                suppress(OSError),
                (folder / _COPY_NAME).open() as file,
            ):  # another job may load from it
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


def _listing(source: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """Return length and time of the last change of files, by name."""
    stats = {name: (source / name).stat() for name in names}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _hash_of(path: Path) -> list[Any]:
    """Return length and hash of a file."""
    record = FileRecord.of(path)
    return [record.bytes, record.xxh3_128]


def _sees(source: Path, listing: Mapping[str, list[int]]) -> bool:
    """Return whether this rank sees the files as rank 0 does. Clocks of changes differ on some file systems."""
    try:
        return all((source / name).stat().st_size == size for name, (size, _) in listing.items())
    except OSError:
        return False


def _is_complete(copied: Path, listing: Mapping[str, list[int]]) -> bool:
    """Return whether a copy was completed since the machine has started, and has its files."""
    try:
        is_of_boot: bool = read_json(copied / _COPY_NAME)["boot"] == _boot()
    except (OSError, ValueError, KeyError, TypeError):
        return False
    folder = next((path for path in copied.iterdir() if path.is_dir()), copied)
    return is_of_boot and _sees(folder, listing)


def _boot() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip()
