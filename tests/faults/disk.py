"""Computes what is on the disk when a machine is lost, from the log of `crash_shim.cpp`.

POSIX promises that the content of a file is on the disk after fsync of the file, and that the names in a folder (of
files and folders that were created, renamed or deleted) are on the disk after fsync of that folder; each may arrive
earlier, in any order. A rename changes the names in two folders. So the model keeps as much of a file as was flushed,
and loses the names that were not flushed in each of the ways of `SURVIVORS`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SURVIVORS: dict[str, tuple[str, ...]] = {
    "flushed names": (),
    "flushed names and new ones": ("create", "mkdir", "symlink"),
    "flushed names, renames and new folders": ("rename", "mkdir"),
    "flushed names and deletions": ("unlink", "rmdir"),
    "all names": ("create", "rename", "mkdir", "symlink", "unlink", "rmdir"),
}
"""What reaches the disk, with the operations whose changes of names do so without fsync."""


@dataclass(frozen=True)
class Operation:
    """One line of the shim's log."""

    number: int
    """Number in its process, from 1."""
    pid: int
    thread: int
    name: str
    size: int
    """Length in bytes of a file that is flushed, else -1."""
    path: Path
    other: str
    """Source of a rename, target of a link."""

    @classmethod
    def of(cls, line: str) -> "Operation":
        """Read a line of the log."""
        number, pid, thread, name, size, path, other = line.split("\t")
        return cls(int(number), int(pid), int(thread), name, int(size), Path(path), other)


@dataclass(eq=False)
class File:
    """A file or a link; `number` is the same in every replay of a log."""

    number: int
    flushed: int = 0
    """Length in bytes that is on the disk."""
    link: str | None = None
    """Target, if it is a link."""


@dataclass(eq=False)
class Folder:
    """A folder: its names now, and those that have been flushed."""

    names: dict[str, "File | Folder"] = field(default_factory=dict)
    on_disk: dict[str, "File | Folder"] = field(default_factory=dict)


Tree = dict[str, "int | str | Tree"]
"""The names in a folder: the length of a file, the target of a link, or the names in a subfolder."""


def tree_of(folder: Path) -> Tree:
    """Return the names below `folder`."""
    found: Tree = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_symlink():
            found[path.name] = str(path.readlink())
        else:
            found[path.name] = tree_of(path) if path.is_dir() else path.stat().st_size
    return found


class Disk:
    """The files below a folder while the operations of a log are applied one after the other.

    Args:
        root (`Path`): the folder.
        start: its files before the first operation, all of them on the disk.
    """

    def __init__(self, root: Path, start: Tree) -> None:
        self._root = root
        self._files: list[File] = []
        self._top = self._read(start)
        self._unflushed: list[tuple[str, Folder, str, File | Folder | None]] = []
        self._deleted: dict[int, str] = {}

    def _read(self, tree: Tree) -> Folder:
        names = {
            name: self._read(value)
            if isinstance(value, dict)
            else self._new_file(link=value)
            if isinstance(value, str)
            else self._new_file(value)
            for name, value in tree.items()
        }
        return Folder(names, dict(names))

    def _new_file(self, flushed: int = 0, link: str | None = None) -> File:
        self._files.append(File(len(self._files), flushed, link))
        return self._files[-1]

    def find(self, path: Path) -> File | Folder | None:
        """Return the file or folder that has this name now."""
        node: File | Folder | None = self._top
        for part in path.relative_to(self._root).parts:
            node = node.names.get(part) if isinstance(node, Folder) else None
        return node

    def apply(self, operation: Operation) -> None:
        """Apply an operation; one that must have failed, such as the creation of an existing folder, does nothing."""
        path, parent = operation.path, self.find(operation.path.parent) if operation.path != self._root else None
        if operation.name == "flushed" and isinstance(parent, Folder) and path.name not in parent.names:
            self._rename_temporary(parent, path.name)
        node = self.find(path)
        if operation.name == "flushed" and isinstance(node, Folder):
            node.on_disk = dict(node.names)
            self._unflushed = [change for change in self._unflushed if change[1] is not node]
        elif operation.name == "flushed" and isinstance(node, File):
            node.flushed = operation.size
        elif not isinstance(parent, Folder):
            return
        elif operation.name in ("create", "mkdir", "symlink") and node is None:
            link = operation.other if operation.name == "symlink" else None
            new = Folder() if operation.name == "mkdir" else self._new_file(link=link)
            self._change(operation.name, parent, path.name, new)
        elif (
            operation.name in ("unlink", "rmdir")
            and node is not None
            and not (isinstance(node, Folder) and node.names)
        ):
            self._note_deleted(operation, node)
            self._change(operation.name, parent, path.name, None)
        elif operation.name == "rename":
            source = Path(operation.other)
            moved, folder = self.find(source), self.find(source.parent)
            if moved is not None and isinstance(folder, Folder):
                self._note_deleted(operation, node)
                self._change("rename", folder, source.name, None)
                self._change("rename", parent, path.name, moved)

    def _rename_temporary(self, parent: Folder, name: str) -> None:
        """Rename the newest `.tmp…`: safetensors does it with a system call that the shim does not see."""
        temporary = [entry for entry in parent.names if entry.startswith(".tmp")]
        if temporary:
            moved = parent.names[temporary[-1]]
            self._change("rename", parent, temporary[-1], None)
            self._change("rename", parent, name, moved)

    def _note_deleted(self, operation: Operation, node: File | Folder | None) -> None:
        if isinstance(node, File):
            self._deleted[node.number] = f"{operation.pid}-{operation.number}"

    def _change(self, operation: str, parent: Folder, name: str, node: File | Folder | None) -> None:
        _set(parent.names, name, node)
        self._unflushed.append((operation, parent, name, node))

    def contents(self, trash: Path) -> dict[int, Path]:
        """Return the file in which the content of each file of this log is now.

        Args:
            trash (`Path`): where the shim keeps deleted files.
        """
        found = {number: trash / name for number, name in self._deleted.items()}

        def visit(folder: Folder, path: Path) -> None:
            for name, node in folder.names.items():
                if isinstance(node, Folder):
                    visit(node, path / name)
                else:
                    found[node.number] = path / name

        visit(self._top, self._root)
        return found

    def after_loss(self, survivors: Iterable[str]) -> Folder:
        """Return the top folder as it is on the disk: `on_disk` has the names that survive, in every folder.

        Args:
            survivors: the operations whose changes of names reach the disk although they were not flushed.
        """
        copies: dict[int, Folder] = {}

        def copy(node: File | Folder) -> File | Folder:
            if isinstance(node, File):
                return node
            if id(node) not in copies:
                copies[id(node)] = Folder()
                names = dict(node.on_disk)
                for operation, parent, name, changed in self._unflushed:
                    if parent is node and operation in survivors:
                        _set(names, name, changed)
                copies[id(node)].on_disk = {name: copy(entry) for name, entry in names.items()}
            return copies[id(node)]

        top = copy(self._top)
        assert isinstance(top, Folder)
        return top


def _set(names: dict[str, File | Folder], name: str, node: File | Folder | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def names_on_disk(folder: Folder, path: str = "") -> Iterator[tuple[str, File | Folder]]:
    """Yield the relative path of each file and folder on the disk."""
    for name, node in folder.on_disk.items():
        yield f"{path}{name}", node
        if isinstance(node, Folder):
            yield from names_on_disk(node, f"{path}{name}/")


def signature(folder: Folder) -> frozenset[tuple[str, int, int]]:
    """Return a value that is equal for folders with the same files of the same lengths on the disk."""
    return frozenset(
        (path, node.number, node.flushed) if isinstance(node, File) else (path, -1, 0)
        for path, node in names_on_disk(folder)
    )


def with_two_names(folder: Folder) -> list[str]:
    """Return the paths of the folders that have a second name: whoever deletes one deletes both."""
    seen: dict[int, str] = {}
    twice = []
    for path, node in names_on_disk(folder):
        if isinstance(node, Folder) and seen.setdefault(id(node), path) != path:
            twice += [seen[id(node)], path]
    return twice


def restore(folder: Folder, contents: dict[int, Path], target: Path) -> None:
    """Create in the new folder `target` what is on the disk of `folder`.

    Args:
        folder (`Folder`): as `Disk.after_loss` returns it.
        contents: as `Disk.contents` returns it, after the whole log.
        target (`Path`): a folder that does not exist.
    """
    target.mkdir(parents=True)
    for name, node in folder.on_disk.items():
        path = target / name
        if isinstance(node, Folder):
            restore(node, contents, path)
        elif node.link is not None:
            path.symlink_to(node.link)
        elif node.flushed:
            path.write_bytes(contents[node.number].read_bytes()[: node.flushed])
        else:
            path.touch()
