"""Checks of files that may be hostile before any parser of another library reads them.

- `check_archive`: a file of `torch.save` is a zip archive. There are several ways to write one that Python's `zipfile`
  and torch's own reader understand differently, so that a check of one says nothing about the other (a pickle in front
  of the archive, two members of one name or of names that differ in case, two directories of members). And a
  compressed member can be far larger than the file. Only the one form that torch writes is accepted.
- `check_opcodes`: six bytes of a pickle can make the unpickler allocate gigabytes (an index of its memo, a length).
- `check_no_link`, `check_links`: a symbolic link leads to a file that is not part of the checkpoint.
"""

import os
import re
import struct
import zipfile
from pathlib import Path
from pickletools import (
    TAKEN_FROM_ARGUMENT1,
    TAKEN_FROM_ARGUMENT4,
    TAKEN_FROM_ARGUMENT4U,
    TAKEN_FROM_ARGUMENT8U,
    UP_TO_NEWLINE,
    OpcodeInfo,
    opcodes,
)
from typing import IO

from hfscale.errors import CheckpointError

PICKLE_MEMBER = "data.pkl"
_MEMBER = re.compile(
    r"data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id"
)
"""Names in an archive of `torch.save`, after the name of the archive. TorchScript's have others."""
_END, _END_SIZE = b"PK\x05\x06", 22
_END64, _END64_SIZE = b"PK\x06\x06", 56
_LOCATOR, _LOCATOR_SIZE = b"PK\x06\x07", 20
_ZIP64 = b"\x01\x00"
"""Kind of the one extra field that torch writes into the directory: lengths and offset of a member beyond 4 GiB."""


class HostileFileError(Exception):
    """A file is not of the only form in which its library writes it; the message says what is different."""


def check_no_link(checkpoint: Path, name: str) -> None:
    """Check that neither a file of a checkpoint nor a folder on the way to it is a symbolic link.

    Args:
        checkpoint (`Path`): the checkpoint, which may be a link itself.
        name (`str`): relative path of the file.

    Raises:
        CheckpointError: the file or a folder is a link.
    """
    path = checkpoint / name
    while path != checkpoint:
        if path.is_symlink():
            link = path.relative_to(checkpoint)
            raise CheckpointError(
                f"{checkpoint} is corrupt: {link} is a symbolic link; copy the checkpoint with cp -rL"
            )
        path = path.parent


def check_links(checkpoint: Path) -> None:
    """Check that neither a file nor a folder of a checkpoint is a symbolic link.

    Args:
        checkpoint (`Path`): the folder of the checkpoint.

    Raises:
        CheckpointError: there is a link.
    """
    for folder, folders, files in os.walk(checkpoint, followlinks=False):
        for name in (*folders, *files):
            check_no_link(checkpoint, (Path(folder) / name).relative_to(checkpoint).as_posix())


# ---- Archives


def check_archive(file: IO[bytes]) -> list[zipfile.ZipInfo]:
    """Check that a file is an archive as `torch.save` writes it, which every reader of zip files reads alike.

    Args:
        file (`IO[bytes]`): the complete file, which can seek.

    Returns:
        `list[ZipInfo]`: its members.

    Raises:
        HostileFileError: it is an archive of another form.
        zipfile.BadZipFile: it is no archive.
    """
    file.seek(0)
    # torch takes everything else for its format of before 2020, a bare pickle
    if file.read(4) != b"PK\x03\x04":
        raise zipfile.BadZipFile("it does not begin as an archive of torch.save")
    start, count = _directory(file)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if archive.start_dir != start or len(members) != count:
            raise HostileFileError("it has more than one directory of members")
    prefixes = {member.filename.partition("/")[0] for member in members}
    names = [member.filename.partition("/")[2] for member in members]
    if len(prefixes) != 1 or len({name.casefold() for name in names}) != len(names):
        raise HostileFileError("two of its members have the same name")
    for member, name in zip(members, names, strict=True):
        if not _MEMBER.fullmatch(name) or "\0" in member.orig_filename:
            raise HostileFileError(
                f"it has a member '{member.filename[:80]}', which torch.save does not write"
            )
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise HostileFileError(f"its member '{member.filename[:80]}' is compressed")
        if member.extra and (
            member.extra[:2] != _ZIP64 or len(member.extra) != 4 + member.extra[2]
        ):
            raise HostileFileError(f"its member '{member.filename[:80]}' has more than one size")
        if member.flag_bits & 1 or member.header_offset + member.file_size > start:
            raise HostileFileError(
                f"its member '{member.filename[:80]}' is encrypted or outside of the file"
            )
    if PICKLE_MEMBER not in names:
        raise HostileFileError(f"it has no {PICKLE_MEMBER}")
    return members


def _directory(file: IO[bytes]) -> tuple[int, int]:
    """Return offset and number of entries of the directory, which must end where the end records begin."""
    end = file.seek(0, 2) - _END_SIZE
    if end < 0:
        raise zipfile.BadZipFile("it is too short for an archive")
    record = _read(file, end, _END_SIZE)
    signature, *_, count, size, start, comment = struct.unpack("<4s4H2LH", record)
    if signature != _END or comment:
        raise zipfile.BadZipFile("it does not end as an archive of torch.save")
    locator = _read(file, end - _LOCATOR_SIZE, _LOCATOR_SIZE) if end >= _LOCATOR_SIZE else b""
    if locator.startswith(_LOCATOR):
        end -= _LOCATOR_SIZE + _END64_SIZE
        if end < 0 or struct.unpack("<4sLQL", locator)[2] != end:
            raise HostileFileError("its zip64 record is not where it belongs")
        signature, length, *_, count, size, start = struct.unpack(
            "<4sQ2H2L4Q", _read(file, end, _END64_SIZE)
        )
        if signature != _END64 or length != _END64_SIZE - 12:
            raise HostileFileError("its zip64 record is not where it belongs")
    if start + size != end:
        raise HostileFileError("there are bytes between its members and its end")
    return start, count


def _read(file: IO[bytes], offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)


# ---- Pickles


_LENGTHS = {
    TAKEN_FROM_ARGUMENT4: struct.Struct("<i"),
    TAKEN_FROM_ARGUMENT4U: struct.Struct("<I"),
    TAKEN_FROM_ARGUMENT8U: struct.Struct("<Q"),
}
"""How an opcode with an argument of any length stores that length."""
_TWO_LINES = ("GLOBAL", "INST")


def _argument_pattern(opcode: OpcodeInfo) -> bytes:
    """Return a pattern of the argument of an opcode."""
    length = opcode.arg.n if opcode.arg is not None else 0
    if length == UP_TO_NEWLINE:
        return rb"[^\n]*\n" * (2 if opcode.name in _TWO_LINES else 1)
    if length == TAKEN_FROM_ARGUMENT1:
        return b"(?:" + b"|".join(re.escape(bytes([n])) + b".{%d}" % n for n in range(256)) + b")"
    return b".{%d}" % length


def _simple_opcodes() -> re.Pattern[bytes]:
    """Return the pattern of the longest run of opcodes that cannot make an unpickler allocate more than they take."""
    codes: dict[bytes, list[bytes]] = {}
    for opcode in opcodes:
        length = opcode.arg.n if opcode.arg is not None else 0
        if length not in _LENGTHS and opcode.name not in ("PUT", "LONG_BINPUT", "STOP"):
            codes.setdefault(_argument_pattern(opcode), []).append(
                re.escape(opcode.code.encode("latin-1"))
            )
    kinds = [b"[" + b"".join(code) + b"]" + argument for argument, code in codes.items()]
    return re.compile(b"(?:" + b"|".join(kinds) + b")*+", re.DOTALL)


_SIMPLE = _simple_opcodes()
_BY_CODE = {opcode.code.encode("latin-1"): opcode for opcode in opcodes}


def check_opcodes(pickled: bytes) -> None:
    """Check that no opcode of a pickle asks for more memory than the pickle's own length justifies.

    Runs of harmless opcodes are skipped by one regular expression, so that hundreds of megabytes take seconds.

    Args:
        pickled (`bytes`): the complete pickle.

    Raises:
        HostileFileError: a length or a memo index is larger than the pickle, or it does not end with its last opcode.
    """
    at = 0
    while True:
        run = _SIMPLE.match(pickled, at)
        at = run.end() if run is not None else at
        opcode = _BY_CODE.get(pickled[at : at + 1])
        at += 1
        if opcode is None:
            raise HostileFileError("its pickle is broken")
        if opcode.name == "STOP":
            if at != len(pickled):
                raise HostileFileError("its pickle is followed by other bytes")
            return
        at = _end_of_argument(pickled, at, opcode)


def _end_of_argument(pickled: bytes, at: int, opcode: OpcodeInfo) -> int:
    """Return the offset behind the argument at `at` of an opcode that `_SIMPLE` leaves out."""
    try:
        if opcode.name == "PUT":
            end = pickled.index(b"\n", at) + 1
            index = int(pickled[at : end - 1])
        elif opcode.name == "LONG_BINPUT":
            (index,) = struct.unpack_from("<I", pickled, at)
            end = at + 4
        else:
            length = _LENGTHS[opcode.arg.n]  # type: ignore[union-attr]
            index = 0
            end = at + length.size + length.unpack_from(pickled, at)[0]
    except (struct.error, ValueError, KeyError):
        raise HostileFileError("its pickle is broken") from None
    if not at <= end <= len(pickled) or not 0 <= index <= len(pickled):
        raise HostileFileError("its pickle asks for more memory than it can need")
    return end
