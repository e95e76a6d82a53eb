"""The folder of a node that has copies of models and checkpoints: what is in it, and which job may change it.

The folder has

    models/HASH/NAME/             the weights of a model and its small files; they stay for the next launch
    checkpoints/RUN/HASH/NAME/    one checkpoint of a run; a newer one takes its place

`copy.json` next to NAME is written last. It names the boot of the machine: what a machine had not written to its disk
when it lost power is not used. A folder `*.partial` is of a copy that was not completed.

Several jobs of a node may use one folder. Each writes a partial copy of its own, whose lock it holds meanwhile; a
killed job holds none. A job that has loaded a checkpoint holds a lock of its copy until it ends. A job that completes,
takes or removes copies holds the lock of the folder meanwhile.
"""

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from hfscale.checkpoint.manifest import FileRecord
from hfscale.checkpoint.transfer import CopiedFile, Nodes, Transfer
from hfscale.core.collectives import START
from hfscale.core.durable_files import write_atomically
from hfscale.core.exchanges import Exchanges
from hfscale.core.logging import get_logger
from hfscale.core.spelling import spelled
from hfscale.core.text_files import read_json
from hfscale.errors import CheckpointError, StorageError, UsageError

logger = get_logger(__name__)

_COPY_NAME = "copy.json"
_PARTIAL, _LOCK = ".partial", ".lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_in_use: dict[Path, IO[str]] = {}
"""By the folder of a run's copies, the file by whose lock this process holds one."""


@dataclass(frozen=True, kw_only=True)
class Place:
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


class NodeCopies:
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

    def copy(
        self,
        place: Place,
        names: Collection[str],
        hashes: Mapping[str, list[Any]],
        shards: Mapping[str, int] | None = None,
    ) -> Path:
        """Copy files of a source, unless every node has them, and return their folder on this node.

        Args:
            place (`Place`): from where and where to.
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

    def _states(self, place: Place, copied: Path, listing: Mapping[str, list[int]]) -> list[_State]:
        """Return what each node has, after what it does not need any more is removed."""
        with self._exchanges.agreed("folders of the nodes"), self._writing():
            place.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._nodes.local_rank == 0:
                with _alone(place.folder):
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
        place: Place,
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
        transfer = Transfer(source, target, nodes=self._nodes, readers=readers, name=partial.stem)
        with self._exchanges.agreed("copy"):
            try:
                transfer.run(files)
            except OSError as error:
                given = spelled("load_once", str(self.folder))
                raise StorageError(
                    f"{place.source} cannot be copied to {given} of {mine.host}: {error}; check both, or leave it out"
                ) from None

    def _make_room(self, place: Place, target: Path, files: list[CopiedFile]) -> None:
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
        self, place: Place, partial: Path, copied: Path, listing: Mapping[str, list[int]]
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
            with _alone(place.folder):
                if _is_complete(copied, listing):  # another job was faster
                    shutil.rmtree(partial)
                    return
                write_atomically(partial / _COPY_NAME, json.dumps({"boot": _boot()}))
                shutil.rmtree(copied, ignore_errors=True)
                partial.rename(copied)

    def _hold(self, place: Place, copied: Path) -> None:
        """Keep other jobs of this node from removing a copy that this job loads from."""
        with self._exchanges.agreed("copy in use"):
            if self._nodes.local_rank != 0 or not place.holds_one:
                return
            with _alone(place.folder):
                path = copied / _COPY_NAME
                if not path.is_file():
                    host = socket.gethostname()
                    raise StorageError(
                        f"{copied} was removed on {host} by another job, which resumes the same run from another "
                        "checkpoint: end one of them, and start again"
                    )
                file = path.open()
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
def _alone(folder: Path) -> Iterator[None]:
    """Let no other job of this node complete, take or remove a copy in the folder meanwhile."""
    with (folder / _LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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


def _remove_abandoned(place: Place, wanted: Path) -> None:
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


def _expanded(folder: str) -> str:
    expanded = str(Path(os.path.expandvars(folder)).expanduser())
    if "$" in expanded:
        given = spelled("load_once", folder)
        host = socket.gethostname()
        raise UsageError(
            f"{given} contains a variable that is not set on {host}: set it, or name a folder on the disk of each node"
        )
    return expanded
