"""Snapshots of a run on several nodes: copies on a partner node, and complete snapshots made of parts.

On several nodes a snapshot has one part per node: the files that the ranks of this node have written, with a manifest
of these files. In the folder of one training in the memory of a node (`RunMemory.snapshots`) are

    checkpoint-N/            a complete snapshot, from which a launch resumes
    parts/checkpoint-N/      the part that this node has written
    replicas/checkpoint-N/   the part of the node before it; a file that this node has written too is a link to that
    assembling/              files of other nodes that are being fetched or received
    replicated               the last step whose parts all have a replica

After a failure all nodes assemble the newest step of which every part exists somewhere: they link what they have, and
fetch the rest from each other. Every file is compared with the hash in its manifest.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from hfscale.core.best_effort import best_effort
from hfscale.core.connections import Address, Connection
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.core.run_memory import PARTS, REPLICATED, RunMemory, trusted_step
from hfscale.core.text_files import read_json
from hfscale.recovery.connections import Server, connect, receive

REPLICAS = "replicas"
COMPLETE = "."
"""Place of a complete snapshot, beside `PARTS` and `REPLICAS`."""
_ASSEMBLING = "assembling"
_CHUNK_BYTES = 2**20
_OWN_PART_TIMEOUT_S = 60.0  # all nodes commit a snapshot at the same time, up to their speed


def keep_only(folder: Path, step: int) -> None:
    """Delete what is older than a step that has a replica of each part, and record that it has.

    Args:
        folder (`Path`): the folder of one training in the memory of this node.
        step (`int`): the step.
    """
    # The training has ended, and the next one has begun
    if not (folder / PARTS / f"checkpoint-{step}").is_dir():
        return
    for place in (COMPLETE, PARTS, REPLICAS):
        for snapshot in (folder / place).glob("checkpoint-*"):
            if _step(snapshot) < step:
                shutil.rmtree(snapshot, ignore_errors=True)
    temporary = folder / f".{REPLICATED}"
    with best_effort("recording a copied snapshot", folder):
        temporary.write_text(str(step), encoding="utf-8")
        temporary.replace(folder / REPLICATED)


def list_parts(memory: Path, index: int, count: int) -> list[dict[str, Any]]:
    """List what this node has of all snapshots.

    Args:
        memory (`Path`): the memory folder of this node's run.
        index (`int`): which node of the last launch this was.
        count (`int`): how many nodes it had.

    Returns:
        `list[dict]`: `folder` (the training), `step`, `index` and `count` (the part), `place`, and `manifest`.
    """
    found = []
    whose = {COMPLETE: (0, 1), PARTS: (index, count), REPLICAS: ((index - 1) % count, count)}
    for manifest in memory.glob("*/**/checkpoint-*/" + MANIFEST_NAME):
        snapshot = manifest.parent
        folder, *places = snapshot.parent.relative_to(memory).parts
        place = "/".join(places) or COMPLETE
        trusted = trusted_step(memory / folder)
        if place in whose and (trusted is None or _step(snapshot) <= trusted):
            part = {"folder": folder, "step": _step(snapshot), "place": place}
            part |= {"index": whose[place][0], "count": whose[place][1]}
            found.append(part | {"manifest": read_json(manifest)})
    return found


def choose(parts: Iterable[dict[str, Any]], excluded: set[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return for each training the newest snapshot of which every part exists.

    A file that several parts have is taken from the first: rank 0 is on that node.

    Args:
        parts (`Iterable[dict]`): what `list_parts` returns on all nodes, each with the `address` of its node.
        excluded (`set[tuple[str, int]]`): folder and step of snapshots that could not be assembled.

    Returns:
        `list[dict]`: `folder`, `step`, `manifest` of the complete snapshot, `part_of` (file: part) and `sources`
            (part: list of address and place).
    """
    known: dict[tuple[str, int, int], dict[int, list[dict[str, Any]]]] = {}
    for part in parts:
        if (part["folder"], part["step"]) not in excluded:
            snapshot = known.setdefault((part["folder"], part["step"], part["count"]), {})
            snapshot.setdefault(part["index"], []).append(part)
    chosen: dict[str, dict[str, Any]] = {}
    for (folder, step, count), by_index in sorted(known.items()):
        if set(by_index) != set(range(count)):
            continue
        manifest: dict[str, Any] = {**by_index[0][0]["manifest"], "files": {}}
        part_of: dict[str, int] = {}
        for index in range(count):
            for name, record in by_index[index][0]["manifest"]["files"].items():
                if name not in part_of:
                    part_of[name] = index
                    manifest["files"][name] = record
        sources = {
            str(i): [[p["address"], p["place"]] for p in found] for i, found in by_index.items()
        }
        parts_of_it = {"manifest": manifest, "part_of": part_of, "sources": sources}
        chosen[folder] = {"folder": folder, "step": step, **parts_of_it}  # later ones are newer
    return list(chosen.values())


def assemble(
    memory: Path,
    snapshot: dict[str, Any],
    token: bytes,
    *,
    progressed: Callable[[], None] = lambda: None,
) -> str | None:
    """Collect all files of a snapshot, from this node and the others.

    Args:
        memory (`Path`): the memory folder of this node's run.
        snapshot (`dict`): what `choose` returned.
        token (`bytes`): the token of the run.
        progressed (`Callable`): called after each file.

    Returns:
        `str` or `None`: which file no node could give; None if the snapshot is complete.

    Raises:
        OSError: a file cannot be written or linked.
        ValueError: a name leads out of the folder.
    """
    folder = memory / snapshot["folder"]
    name = f"checkpoint-{snapshot['step']}"
    target = folder / _ASSEMBLING / name
    shutil.rmtree(target, ignore_errors=True)
    RunMemory(memory).make_folder(target)
    connections: dict[Address, Connection] = {}
    try:
        for file, record in snapshot["manifest"]["files"].items():
            progressed()
            own = [folder / place / name / file for place in (COMPLETE, PARTS, REPLICAS)]
            path = _inside(target, file)
            RunMemory(memory).make_folder(path.parent)
            if any(_link(source, path, record) for source in own):
                continue
            for (host, port), place in snapshot["sources"][str(snapshot["part_of"][file])]:
                try:
                    if (host, port) not in connections:
                        connections[host, port] = connect((host, port), token)
                    wanted = {
                        "event": "get",
                        "folder": snapshot["folder"],
                        "place": place,
                        "snapshot": name,
                    }
                    connections[host, port].send(wanted | {"file": file})
                    if _receive_file(connections[host, port], path, record):
                        break
                except OSError:
                    connections.pop((host, port), None)
            else:
                return f"{name}/{file}"
    finally:
        for connection in connections.values():
            connection.close()
    (target / MANIFEST_NAME).write_text(
        json.dumps(snapshot["manifest"], indent=1) + "\n", encoding="utf-8"
    )
    return None


def adopt(memory: Path, folders: Iterable[str], snapshots: Iterable[tuple[str, int]]) -> None:
    """Make the assembled snapshots those from which the next launch resumes, and delete all others.

    Args:
        memory (`Path`): the memory folder of this node's run.
        folders (`Iterable[str]`): the trainings that any node knows.
        snapshots (`Iterable[tuple[str, int]]`): folder and step of what was assembled.
    """
    steps = dict(snapshots)
    for name in folders:
        folder = memory / _plain(name)
        folder.mkdir(exist_ok=True)
        for old in [path for path in folder.iterdir() if path.name != _ASSEMBLING]:
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink()
        if name in steps:
            snapshot = f"checkpoint-{steps[name]}"
            (folder / _ASSEMBLING / snapshot).rename(folder / snapshot)
        shutil.rmtree(folder / _ASSEMBLING, ignore_errors=True)


class ReplicaServer:
    """Takes the parts of the node before this one, and gives files to nodes that lack them.

    Args:
        memory (`Path`): the memory folder of this node's run.
        host (`str`): address of this node.
        token (`bytes`): the token of the run.
    """

    def __init__(self, memory: Path, host: str, token: bytes) -> None:
        self._memory = memory
        self._changed = threading.Condition()
        self._launch = 0
        self._server = Server((host, 0), token, self._serve)
        self.address: Address = self._server.address
        """Where the others reach it."""

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()

    def begin(
        self, launch: int, folders: Iterable[str], snapshots: Iterable[tuple[str, int]]
    ) -> None:
        """Call `adopt`, and take only parts of this launch from now on.

        Args:
            launch (`int`): its number.
            folders (`Iterable[str]`): as for `adopt`.
            snapshots (`Iterable[tuple[str, int]]`): as for `adopt`.
        """
        with self._changed:
            self._launch = launch
            adopt(self._memory, folders, snapshots)
            self._changed.notify_all()

    def committed(self) -> None:
        """Tell waiting transfers that this node has committed a part."""
        with self._changed:
            self._changed.notify_all()

    def _serve(self, connection: Connection) -> None:
        while True:
            message = receive(connection)
            folder = self._memory / _plain(message["folder"])
            snapshot = _plain(message["snapshot"])
            if message["event"] == "put":
                self._take(connection, folder, snapshot, message["manifest"], message["launch"])
            elif message["place"] in (COMPLETE, PARTS, REPLICAS):
                _send_file(
                    connection,
                    _inside(folder / message["place"] / snapshot, message["file"]),
                    Pace(None),
                )

    def _take(
        self,
        connection: Connection,
        folder: Path,
        snapshot: str,
        manifest: dict[str, Any],
        launch: int,
    ) -> None:
        """Take one part; files that this node has written too are not sent."""
        own = folder / PARTS / snapshot
        with self._changed:
            self._changed.wait_for(
                lambda: launch != self._launch or (own / MANIFEST_NAME).is_file(),
                _OWN_PART_TIMEOUT_S,
            )
            if launch != self._launch:
                raise ConnectionAbortedError("the launch has ended")
        target = folder / _ASSEMBLING / f"replica-{snapshot}"
        shutil.rmtree(target, ignore_errors=True)
        RunMemory(self._memory).make_folder(target)
        files = manifest["files"]
        wanted = []
        for name, record in files.items():
            path = _inside(target, name)
            RunMemory(self._memory).make_folder(path.parent)
            if not _link(own / name, path, record):
                wanted.append(name)
        connection.send({"files": wanted})
        for name in wanted:
            if not _receive_file(connection, _inside(target, name), files[name]):
                connection.send({"problem": f"{name} has another content than its manifest says"})
                return
        (target / MANIFEST_NAME).write_text(json.dumps(manifest), encoding="utf-8")
        with self._changed:
            if launch != self._launch:
                raise ConnectionAbortedError("the launch has ended")
            (folder / REPLICAS).mkdir(exist_ok=True)
            target.rename(folder / REPLICAS / snapshot)
        connection.send({"problem": None})


def send_part(
    connection: Connection, memory: Path, folder: str, step: int, *, launch: int, pace: "Pace"
) -> int:
    """Send the part of a snapshot that this node has written to its partner.

    Args:
        connection (`Connection`): to the `ReplicaServer` of the partner.
        memory (`Path`): the memory folder of this node's run.
        folder (`str`): the training.
        step (`int`): the step of the snapshot.
        launch (`int`): the number of the launch that has written it.
        pace (`Pace`): limits the bytes per second.

    Returns:
        `int`: bytes sent.

    Raises:
        OSError: a file cannot be read, the connection is lost, or the partner could not take the part.
    """
    snapshot = memory / folder / PARTS / f"checkpoint-{step}"
    manifest = read_json(snapshot / MANIFEST_NAME)
    part = {"folder": folder, "snapshot": snapshot.name, "manifest": manifest}
    connection.send({"event": "put", "launch": launch} | part)
    sent = 0
    for name in receive(connection)["files"]:
        sent += _send_file(connection, _inside(snapshot, name), pace)
    problem = receive(connection)["problem"]
    if problem is not None:
        raise OSError(problem)
    return sent


class Pace:
    """Limits the bytes per second of a transfer.

    Args:
        bytes_per_s (`float`, *optional*): the limit; None: none.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def wait(self, size: int) -> None:
        """Wait until so many bytes may be sent.

        Args:
            size (`int`): the bytes that are sent next.
        """
        if self._bytes_per_s is not None:
            now = time.monotonic()
            time.sleep(max(self._free_at - now, 0.0))
            self._free_at = max(self._free_at, now) + size / self._bytes_per_s


def _send_file(connection: Connection, path: Path, pace: Pace) -> int:
    """Send the content of a file in pieces; an empty piece is its end, also if the file is missing."""
    sent = 0
    try:
        with path.open("rb") as file:
            while piece := file.read(_CHUNK_BYTES):
                pace.wait(len(piece))
                connection.send({}, piece)
                sent += len(piece)
    except FileNotFoundError:
        pass  # the receiver finds that the hash is another
    connection.send({})
    return sent


def _receive_file(connection: Connection, path: Path, record: dict[str, Any]) -> bool:
    """Write a file that `_send_file` sends, and return whether its length and hash are those of the record."""
    digest = xxhash.xxh3_128()
    length = 0
    with path.open("wb") as file:
        while piece := connection.receive(_CHUNK_BYTES, patient=True)[1]:
            digest.update(piece)
            length += len(piece)
            file.write(piece)
    return {"bytes": length, "xxh3_128": digest.hexdigest()} == record


def _link(source: Path, target: Path, record: dict[str, Any]) -> bool:
    """Link a file of this node if its length and hash are those of the record."""
    if not source.is_file() or source.is_symlink() or source.stat().st_size != record["bytes"]:
        return False
    digest = xxhash.xxh3_128()
    with source.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
    if digest.hexdigest() != record["xxh3_128"]:
        return False
    os.link(source, target)
    return True


def _step(snapshot: Path) -> int:
    return int(snapshot.name.rpartition("-")[2])


def _plain(name: str) -> str:
    if len(PurePosixPath(name).parts) != 1 or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not the name of a folder")
    return name


def _inside(folder: Path, name: str) -> Path:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or not name:
        raise ValueError(f"{name!r} leads out of {folder}")
    return folder / name
