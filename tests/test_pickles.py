"""Hostile files in a checkpoint: no code of theirs runs, and none makes the check allocate much memory."""

import io
import os
import pickle
import random
import resource
import struct
import zipfile
from contextlib import suppress
from pathlib import Path, PosixPath

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked_ranks import run_ranks

from hfscale.checkpoint.pickles import check_pickles, load_archive, read_dcp_metadata
from hfscale.errors import CheckpointError

QUICK, LONG = 400, 10_000
GIB = 2**30


class RunsCode:
    """Creates a file when a pickle of it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def saved(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def zipped(members, **options):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **options) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return buffer.getvalue()


def unzipped(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def state_of_a_training():
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


GOOD = saved(state_of_a_training())


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "optimizer.pt").write_bytes(GOOD)
    torch.save({"numpy": np.random.RandomState(0).get_state(), "cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    return folder


def linked_file(checkpoint, evil):
    (checkpoint.parent / "elsewhere.pt").write_bytes(saved(evil))
    (checkpoint / "optimizer.pt").unlink()
    (checkpoint / "optimizer.pt").symlink_to(checkpoint.parent / "elsewhere.pt")


def linked_folder(checkpoint, evil):
    folder = checkpoint.parent / "elsewhere"
    folder.mkdir()
    (folder / "mp_rank_00_model_states.pt").write_bytes(saved(evil))
    (checkpoint / "global_step1").symlink_to(folder)


def legacy_then_zip(checkpoint, evil):
    content = saved(evil, _use_new_zipfile_serialization=False) + GOOD
    (checkpoint / "optimizer.pt").write_bytes(content)


def upper_case(checkpoint, evil):
    members = [("archive/DATA.PKL", pickle.dumps(evil, 2)), *unzipped(GOOD)]
    (checkpoint / "optimizer.pt").write_bytes(zipped(members))


def only_upper_case(checkpoint, evil):
    members = [(name.replace("data.pkl", "DATA.PKL"), content) for name, content in unzipped(saved(evil))]
    (checkpoint / "optimizer.pt").write_bytes(zipped(members))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def duplicates(checkpoint, evil):
    good = dict(unzipped(GOOD))["archive/data.pkl"]
    members = [("archive/data.pkl", pickle.dumps(evil, 2)), ("archive/data.pkl", good)]
    (checkpoint / "optimizer.pt").write_bytes(zipped([*members, ("archive/version", b"3\n")]))


def second_directory(checkpoint, evil):
    """Python takes the zip64 record in front of the locator, torch the one that the locator names."""
    good = zipped(unzipped(GOOD))
    _, *_, count, size, start, _ = struct.unpack("<4s4H2LH", good[-22:])
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, 7, 1)
    (checkpoint / "optimizer.pt").write_bytes(good[:-22] + record + locator + good[-22:])


def torchscript(checkpoint, evil):
    members = [*unzipped(GOOD), ("archive/constants.pkl", pickle.dumps((), 2))]
    (checkpoint / "optimizer.pt").write_bytes(zipped(members))


def plain_pickle(checkpoint, evil):
    (checkpoint / "optimizer.pt").write_bytes(pickle.dumps(evil))


def harmful_value(checkpoint, evil):
    (checkpoint / "optimizer.pt").write_bytes(saved({"step": evil}))


def latest_outside(checkpoint, evil):
    (checkpoint.parent / "global_step1").mkdir()
    (checkpoint.parent / "global_step1" / "mp_rank_00_model_states.pt").write_bytes(saved(evil))
    (checkpoint / "latest").write_text("../global_step1\n")


def latest_is_a_link(checkpoint, evil):
    (checkpoint.parent / "tag").write_text("global_step1")
    (checkpoint / "latest").symlink_to(checkpoint.parent / "tag")


class ChangedPath:
    """Is created as one path and changed to show another, which a pickle can do with its slots."""

    def __reduce__(self):
        return (PosixPath, ("/tmp/elsewhere",), (None, {"_str": "__0_0.distcp"}))


def changed_path(checkpoint, evil):
    dcp.save({"value": {"a": 1}}, checkpoint_id=checkpoint / "optimizer_0", no_dist=True)
    path = checkpoint / "optimizer_0" / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - made here
    for info in metadata.storage_data.values():
        info.relative_path = ChangedPath()
    path.write_bytes(pickle.dumps(metadata))


ATTACKS = (
    linked_file,
    linked_folder,
    legacy_then_zip,
    upper_case,
    only_upper_case,
    duplicates,
    second_directory,
    torchscript,
    plain_pickle,
    harmful_value,
    latest_outside,
    latest_is_a_link,
    changed_path,
)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_before_anything_loads_it(checkpoint, attack):
    check_pickles(checkpoint)
    attack(checkpoint, RunsCode(checkpoint.parent / "ran"))
    with pytest.raises(CheckpointError):
        check_pickles(checkpoint)
    assert not (checkpoint.parent / "ran").exists()


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("attack", [legacy_then_zip, only_upper_case, plain_pickle, harmful_value, linked_file])
def test_control_torch_runs_the_code_of_the_attack(checkpoint, attack):
    attack(checkpoint, RunsCode(checkpoint.parent / "ran"))
    with suppress(Exception):
        torch.load(checkpoint / "optimizer.pt", weights_only=False)
    assert (checkpoint.parent / "ran").exists()


def bombs():
    """Files of a few bytes to a megabyte for which a careless reader allocates gigabytes."""
    zeros = b"\x80\x02X" + struct.pack("<I", 4 * GIB - 100)
    for name, pickled in {
        "memo": b"\x80\x02K\x01r\xff\xff\xff\xff.",
        "text memo": b"\x80\x02K\x01p4294967295\n.",
        "length": b"\x80\x04\x8e" + struct.pack("<Q", 64 * GIB) + b"a.",
        "text length": zeros + b"a.",
    }.items():
        yield name, zipped([("archive/data.pkl", pickled), ("archive/version", b"3\n")])
    content = b"\x80\x02]" + b"N0" * (200 * 2**20) + b"."
    yield "compressed", zipped([("archive/data.pkl", content)], compression=zipfile.ZIP_DEFLATED, compresslevel=1)


def _check_under_a_limit(folder, limit):
    _limit_memory(limit)
    with pytest.raises(CheckpointError) as caught:
        check_pickles(folder)
    assert "MemoryError" not in str(caught.value)
    with suppress(CheckpointError):
        load_archive(folder / "optimizer.pt")


def _limit_memory(limit):
    """Limit the address space of this process to what it has now and `limit` more bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    now = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + limit, now + limit))


def test_a_bomb_is_refused_without_its_memory(checkpoint, tmp_path):
    for name, content in bombs():
        (checkpoint / "optimizer.pt").write_bytes(content)
        assert run_ranks(1, _check_under_a_limit, checkpoint, GIB // 4, log=tmp_path / "log") == [0], (
            name,
            (tmp_path / "log" / "rank-0.log").read_text(),
        )


def test_the_placeholders_cannot_be_changed_by_a_pickle(tmp_path):
    """`BUILD` with a slot state sets attributes, also those of a class, which would stay for the next file."""
    name = b"torch.distributed.checkpoint.metadata"
    hostile = b"\x80\x04\x8c%c%s\x8c\x08Metadata\x93N}\x8c\x06offsetK\x00s\x86b." % (len(name), name)
    (tmp_path / ".metadata").write_bytes(hostile)
    with pytest.raises(CheckpointError, match="an attribute of"):
        read_dcp_metadata(tmp_path)


# ---- Fuzzing

HARMFUL = (b"cos\nmkdir\n(V%s\ntR", b"\x8c\x02os\x8c\x05mkdir\x93\x8c%c%s\x85R")


def mutated_bytes(content, rng, fragments):
    """Return `content` after one to four random changes: flipped, overwritten, removed, doubled or foreign bytes."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 4, 8, 40))
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + length] = rng.randbytes(length)
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at:at] = data[at : at + length]
        elif kind == 4:
            data[at:at] = rng.choice(fragments)
        else:
            source = rng.randrange(len(data) + 1)
            data[at : at + length] = data[source : source + length]
    return bytes(data)


def mutated_archive(rng, evil, fragments):
    """Return an archive with random changes of its bytes, its pickle, its members, or what is in front or behind."""
    kind = rng.randrange(5)
    if kind == 0:
        return mutated_bytes(GOOD, rng, fragments)
    members = unzipped(GOOD)
    index = next(i for i, (name, _) in enumerate(members) if name.endswith("data.pkl"))
    if kind == 1:
        members[index] = (members[index][0], mutated_bytes(members[index][1], rng, fragments))
    elif kind == 2:
        name = rng.choice(("archive/DATA.PKL", "archive/data.pkl", "other/data.pkl", "archive/data.pkl\0", "data.pkl"))
        members.insert(rng.randrange(len(members) + 1), (name, evil))
    elif kind == 3:
        name, pickled = members[index]
        at = rng.randrange(2, len(pickled))
        members[index] = (name, pickled[:at] + rng.choice(fragments) + pickled[at:])
    content = zipped(members, compression=rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))
    if kind == 4:
        hidden = zipped([("archive/data.pkl", evil), ("archive/version", b"3\n")])
        return rng.choice((evil + content, hidden + content, content + hidden, content[:-22] + hidden + content[-22:]))
    return content


def _fuzz(folder, trials, seed):
    _limit_memory(2 * GIB)
    rng, marker = random.Random(seed), folder / "ran"
    path = str(marker).encode()
    fragments = [HARMFUL[0] % path, HARMFUL[1] % (len(path), path), b"r\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 8]
    evil = pickle.dumps(RunsCode(marker), 2)
    target, accepted = folder / "checkpoint" / "optimizer.pt", 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    passing = []
    for _ in range(trials):
        target.write_bytes(mutated_archive(rng, evil, fragments))
        try:
            check_pickles(target.parent)
        except CheckpointError:
            continue
        finally:
            assert not marker.exists(), "the check itself ran code"
        accepted += 1
        passing.append(target.read_bytes())
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < GIB // 4, f"the check took {grown} bytes"
    for content in passing:
        target.write_bytes(content)
        with suppress(Exception):
            torch.load(target, weights_only=False)
        assert not marker.exists(), f"code ran: {content!r}"
    print(f"{accepted} of {trials} accepted")  # noqa: T201
    assert accepted > trials / 100, "hardly any file passes, so this proves nothing"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("trials", [QUICK, pytest.param(LONG, marks=pytest.mark.faults)])
def test_no_mutated_archive_runs_code(tmp_path, trials):
    """In a process of its own: what passes is really loaded."""
    (tmp_path / "checkpoint").mkdir()
    codes = run_ranks(1, _fuzz, tmp_path, trials, 0, log=tmp_path / "log", timeout_s=540)
    assert codes == [0], (tmp_path / "log" / "rank-0.log").read_text()[-3000:]


def _fuzz_metadata(folder, trials, seed):
    _limit_memory(2 * GIB)
    rng, marker = random.Random(seed), folder / "ran"
    path = str(marker).encode()
    fragments = [HARMFUL[0] % path, HARMFUL[1] % (len(path), path), b"r\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 8]
    metadata = folder / "checkpoint" / ".metadata"
    good, accepted = metadata.read_bytes(), 0
    for _ in range(trials):
        metadata.write_bytes(mutated_bytes(good, rng, fragments))
        with suppress(CheckpointError):
            check_pickles(metadata.parent)
            accepted += 1
            with suppress(Exception):
                pickle.loads(metadata.read_bytes())  # noqa: S301 - what torch does with it
            with suppress(Exception):
                read_dcp_metadata(metadata.parent)
        assert not marker.exists(), f"code ran: {metadata.read_bytes()!r}"
    assert accepted > trials / 100, "hardly any file passes, so this proves nothing"


@pytest.mark.parametrize("trials", [QUICK, pytest.param(LONG, marks=pytest.mark.faults)])
def test_no_mutated_metadata_runs_code(tmp_path, trials):
    state = {"weight": torch.ones(4), "value": {"a": 1}, "bias": torch.zeros(3)}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    codes = run_ranks(1, _fuzz_metadata, tmp_path, trials, 0, log=tmp_path / "log", timeout_s=540)
    assert codes == [0], (tmp_path / "log" / "rank-0.log").read_text()[-3000:]
