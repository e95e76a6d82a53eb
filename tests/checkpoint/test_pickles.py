"""Hostile files in a checkpoint: no code of theirs runs, and none makes the check allocate much memory."""

import collections
import io
import json
import pickle
import random
import resource
import struct
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path, PosixPath

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from attacks import RunsCode
from forked_ranks import run_ranks
from tiny import tiny_trainer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
)

from hfscale import SpotCheckpointCallback
from hfscale.checkpoint.formats.parameter_names import model_of_config
from hfscale.checkpoint.manifest import read_manifest
from hfscale.checkpoint.pickles import check_pickles, load_archive, read_dcp_metadata
from hfscale.checkpoint.resumable import check_complete
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.errors import CheckpointError

QUICK, LONG = 400, 10_000
GIB = 2**30


def saved(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def zipped(members, *, prefix=b"", **options):
    buffer = io.BytesIO()
    buffer.write(prefix)
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


def legacy_before_the_offsets(checkpoint, evil):
    """The archive counts its offsets from the beginning of the file, so that only the first bytes show the pickle."""
    prefix = saved(evil, _use_new_zipfile_serialization=False)
    (checkpoint / "optimizer.pt").write_bytes(zipped(unzipped(GOOD), prefix=prefix))


def compressed(checkpoint, evil):
    (checkpoint / "optimizer.pt").write_bytes(zipped(unzipped(GOOD), compression=zipfile.ZIP_DEFLATED))


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


@pytest.mark.filterwarnings("ignore:Duplicate name")
def duplicate_at_the_end(checkpoint, evil):
    (checkpoint / "optimizer.pt").write_bytes(zipped([*unzipped(GOOD), ("archive/data.pkl", pickle.dumps(evil, 2))]))


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


def distributed(checkpoint, values):
    """Write a distributed checkpoint, and return its folder and metadata."""
    folder = checkpoint / "optimizer_0"
    dcp.save({"weight": torch.ones(4), **values}, checkpoint_id=folder, no_dist=True)
    return folder, pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - made here


def metadata_of_a_rank(checkpoint, evil):
    """torch reads the metadata of its rank where it cannot read that of all ranks."""
    folder, _ = distributed(checkpoint, {"value": 1})
    (folder / ".metadata").rename(folder / "metadata")
    (folder / "__0.metadata").write_bytes(pickle.dumps(evil))


class WithAttributes:
    """Is unpickled as an OrderedDict with the given content, and with an attribute in place of its method `items`."""

    def __init__(self, content):
        self.content = content

    def __reduce__(self):
        return (OrderedDict, (), {"items": OrderedDict}, None, iter(self.content.items()))


def hidden_entries(checkpoint, evil):
    """Whoever calls `items` sees no entries, and who looks for a name finds it."""
    folder, metadata = distributed(checkpoint, {"value": evil})
    metadata.state_dict_metadata = WithAttributes(metadata.state_dict_metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


class ByArguments:
    """Is unpickled as a place in a file that is compressed, which is said in the arguments and not in the state."""

    def __init__(self, info):
        self.info = info

    def __reduce__(self):
        state = {name: getattr(self.info, name) for name in ("relative_path", "offset", "length")}
        return (type(self.info), (*state.values(), ["stream.zstd/1"]), state)


def hidden_compression(checkpoint, evil):
    folder, metadata = distributed(checkpoint, {"value": 1})
    metadata.storage_data = {index: ByArguments(info) for index, info in metadata.storage_data.items()}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def change_places(checkpoint, **fields):
    folder, metadata = distributed(checkpoint, {"value": 1})
    for index, info in metadata.storage_data.items():
        if index.fqn == "value":
            vars(info).update(fields)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def compressed_value(checkpoint, evil):
    change_places(checkpoint, transform_descriptors=["stream.zstd/1"])


def long_value(checkpoint, evil):
    change_places(checkpoint, length=2**40)


def endless_number(checkpoint, evil):
    """A number that Python refuses to write in decimal."""
    change_places(checkpoint, length=2**50_000)


def two_offsets(checkpoint, evil):
    """Of two zip64 fields `zipfile` takes the second if the first has the greatest value, and torch the first."""
    zip64 = struct.pack("<HHQHHQ", 1, 8, 2**32 - 1, 1, 8, 0)
    good = bytearray(zipped(unzipped(GOOD)))
    *_, size, start, _ = struct.unpack("<4s4H2LH", good[-22:])
    name_length = struct.unpack_from("<H", good, start + 28)[0]
    struct.pack_into("<H", good, start + 30, len(zip64))
    struct.pack_into("<L", good, start + 42, 2**32 - 1)
    struct.pack_into("<L", good, len(good) - 10, size + len(zip64))
    good[start + 46 + name_length : start + 46 + name_length] = zip64
    (checkpoint / "optimizer.pt").write_bytes(good)


def linked_text(checkpoint, evil):
    (checkpoint.parent / "elsewhere.json").write_text("{}")
    (checkpoint / "trainer_state.json").symlink_to(checkpoint.parent / "elsewhere.json")


ATTACKS = (
    linked_file,
    linked_folder,
    legacy_then_zip,
    legacy_before_the_offsets,
    compressed,
    upper_case,
    only_upper_case,
    duplicates,
    duplicate_at_the_end,
    second_directory,
    torchscript,
    plain_pickle,
    harmful_value,
    latest_outside,
    latest_is_a_link,
    changed_path,
    metadata_of_a_rank,
    hidden_entries,
    hidden_compression,
    compressed_value,
    long_value,
    endless_number,
    two_offsets,
    linked_text,
)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_before_anything_loads_it(checkpoint, attack):
    check_pickles(checkpoint)
    attack(checkpoint, RunsCode(checkpoint.parent / "ran"))
    with pytest.raises(CheckpointError) as caught:
        check_pickles(checkpoint)
    assert "MemoryError" not in str(caught.value)
    assert not (checkpoint.parent / "ran").exists()


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "attack", [legacy_then_zip, legacy_before_the_offsets, only_upper_case, plain_pickle, harmful_value, linked_file]
)
def test_control_torch_runs_the_code_of_the_attack(checkpoint, attack):
    attack(checkpoint, RunsCode(checkpoint.parent / "ran"))
    with suppress(Exception):
        torch.load(checkpoint / "optimizer.pt", weights_only=False)
    assert (checkpoint.parent / "ran").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("attack", [metadata_of_a_rank, hidden_entries])
def test_control_torch_runs_the_code_of_a_distributed_checkpoint(checkpoint, attack):
    attack(checkpoint, RunsCode(checkpoint.parent / "ran"))
    with suppress(CheckpointException):
        dcp.load({"weight": torch.ones(4), "value": 0}, checkpoint_id=checkpoint / "optimizer_0", no_dist=True)
    assert (checkpoint.parent / "ran").exists()


def test_control_zipfile_takes_the_second_of_two_offsets(checkpoint):
    two_offsets(checkpoint, None)
    with zipfile.ZipFile(checkpoint / "optimizer.pt") as archive:
        assert archive.infolist()[0].header_offset == 0


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


def test_json_that_is_nested_deeply_is_an_error_of_the_checkpoint(checkpoint):
    deep = "[" * 200_000
    (checkpoint / "trainer_state.json").write_text(deep)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        check_complete(checkpoint)
    (checkpoint / MANIFEST_NAME).write_text(deep)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        read_manifest(checkpoint)


def test_a_config_builds_only_models_of_transformers(tmp_path, monkeypatch):
    config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "vocab_size": 16, "attn_implementation": "somebody/kernel"}
    called = []
    monkeypatch.setattr(transformers, "pipeline", called.append)
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["pipeline"]}))
    model = model_of_config(tmp_path)
    assert (type(model).__name__, called, model.config._attn_implementation) == ("LlamaForCausalLM", [], "eager")
    names = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    (tmp_path / "code.py").write_text(
        f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass C: pass\nclass M: pass\n"
    )
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "new", "auto_map": names}))
    with pytest.raises(CheckpointError, match="contains custom code"):
        model_of_config(tmp_path)
    assert not (tmp_path / "ran").exists()


def name_of(module, name):
    return f"c{module}\n{name}\n".encode()


def metadata_bombs():
    """Metadata of at most a megabyte that makes a placeholder, or an error message, copy it again and again."""
    layout, size = name_of("torch.serialization", "_get_layout"), name_of("torch", "Size")
    path, ordered = name_of("pathlib", "PosixPath"), name_of("collections", "OrderedDict")
    doubled = b"]" + b"".join(b"q%ch%c\x86" % (level, level) for level in range(60))
    numbers = b"".join(b"J" + struct.pack("<i", number) + b"N" for number in range(50_000))
    text = b"X" + struct.pack("<I", 2**20) + b"a" * 2**20
    nested = ()
    for _ in range(60):
        nested = (nested, nested)
    places = {MetadataIndex("value"): _StorageInfo(nested, 0, 1)}
    metadata = Metadata({"value": BytesStorageMetadata()}, storage_data=places)
    return {
        "text of a nested tuple": layout + doubled + b"\x85R.",
        "file name that is a nested tuple": pickle.dumps(metadata, 2)[2:],
        "copies of a list": b"](" + b"N" * 50_000 + b"e\x85q\0" + size + b"q\1(" + b"h\1h\0R" * 50_000 + b"t.",
        "long path": text + b"q\0" + path + b"(" + b"h\0" * 50_000 + b"tR.",
        "copies of a dictionary": b"}(" + numbers + b"u\x85q\0" + ordered + b"q\1(" + b"h\1h\0R" * 50_000 + b"t.",
    }


def _check_metadata_under_a_limit(folder, limit):
    _limit_memory(limit)
    with pytest.raises(CheckpointError) as caught:
        read_dcp_metadata(folder)
    assert "MemoryError" not in str(caught.value)
    assert len(str(caught.value)) < 1000


class OfDebian:
    """Is pickled as Python 3.11.2, that of Debian 12, pickles a member of an enum."""

    def __init__(self, owner, name):
        self.arguments = owner, name

    def __reduce__(self):
        return getattr, self.arguments


@pytest.mark.parametrize(
    ("owner", "name", "is_taken"),
    [
        (_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT", True),
        (_MEM_FORMAT_ENCODING, "__class__", False),
        (_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT.__class__", False),
        (Metadata, "TORCH_CONTIGUOUS_FORMAT", False),
        (OrderedDict, "fromkeys", False),
    ],
)
def test_memory_formats_are_read_as_every_python_writes_them(tmp_path, owner, name, is_taken):
    folder, metadata = distributed(tmp_path, {"value": torch.ones(2)})
    metadata.planner_data = {"a member": OfDebian(owner, name)}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    if is_taken:
        assert read_dcp_metadata(folder)["value"].shape == (2,)
    else:
        with pytest.raises(CheckpointError, match=r"builtins\.getattr"):
            read_dcp_metadata(folder)


@pytest.mark.parametrize("kind", metadata_bombs())
def test_metadata_that_multiplies_itself_is_refused_without_its_memory(tmp_path, kind):
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + metadata_bombs()[kind])
    codes = run_ranks(1, _check_metadata_under_a_limit, tmp_path, GIB // 4, log=tmp_path / "log", timeout_s=60)
    assert codes == [0], (tmp_path / "log" / "rank-0.log").read_text()[-2000:]


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


def problem_of(checkpoint):
    """Return why the check refuses a checkpoint, or an empty text."""
    try:
        check_pickles(checkpoint)
    except CheckpointError as error:
        return str(error)
    return ""


def _fuzz(target, trials, mutated, load):
    """Check mutated files, in a process of its own; load those that pass.

    `mutated(rng, evil, fragments)` gives the content of a file, which `load(content)` loads as torch would.
    """
    _limit_memory(2 * GIB)
    rng, marker = random.Random(0), target.parent.with_name("ran")
    path = str(marker).encode()
    fragments = [HARMFUL[0] % path, HARMFUL[1] % (len(path), path), b"r\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 8]
    evil, passing = pickle.dumps(RunsCode(marker), 2), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(trials):
        content = mutated(rng, evil, fragments)
        target.write_bytes(content)
        problem = problem_of(target.parent)
        assert not marker.exists(), "the check itself ran code"
        assert "MemoryError" not in problem, "the check asked for more than the limit"
        if not problem:
            passing.append(content)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < GIB // 4, f"the check took {grown} bytes"
    for content in passing:
        with suppress(Exception):
            load(content)
        assert not marker.exists(), f"code ran: {content!r}"
    print(f"{len(passing)} of {trials} accepted")  # noqa: T201
    assert len(passing) > trials / 100, "hardly any file passes, so this proves nothing"


def load_as_torch(content):
    torch.load(io.BytesIO(content), weights_only=False)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("trials", [QUICK, pytest.param(LONG, marks=pytest.mark.faults)])
def test_no_mutated_archive_runs_code(tmp_path, trials):
    """In a process of its own: what passes is really loaded."""
    (tmp_path / "checkpoint").mkdir()
    target = tmp_path / "checkpoint" / "optimizer.pt"
    codes = run_ranks(1, _fuzz, target, trials, mutated_archive, load_as_torch, log=tmp_path / "log", timeout_s=540)
    assert codes == [0], (tmp_path / "log" / "rank-0.log").read_text()[-3000:]


@pytest.mark.parametrize("trials", [QUICK, pytest.param(LONG, marks=pytest.mark.faults)])
def test_no_mutated_metadata_runs_code(tmp_path, trials):
    state = {"weight": torch.ones(4), "value": {"a": 1}, "bias": torch.zeros(3)}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    target = tmp_path / "checkpoint" / ".metadata"
    good = target.read_bytes()

    def mutated(rng, evil, fragments):
        return mutated_bytes(good, rng, fragments)

    codes = run_ranks(1, _fuzz, target, trials, mutated, pickle.loads, log=tmp_path / "log", timeout_s=540)
    assert codes == [0], (tmp_path / "log" / "rank-0.log").read_text()[-3000:]


def save_states(folder, **states):
    folder.mkdir(exist_ok=True)
    for name, state in states.items():
        torch.save(state, folder / f"{name}.pt")


def test_what_torch_loads_and_numbers_of_numpy_are_accepted(tmp_path):
    milestones = collections.Counter([2, 4])
    parameter = torch.nn.Parameter(torch.ones(2))
    rates = {"lr": np.float32(0.1), "betas": np.array([0.9, 0.99]), "step": np.int64(3)}
    tensors = [torch.ones(2).to(torch.float8_e4m3fn), torch.eye(3).to_sparse(), parameter]
    save_states(tmp_path / "checkpoint-1", optimizer={"groups": [rates], "state": tensors}, scheduler=milestones)
    check_pickles(tmp_path / "checkpoint-1")


@pytest.mark.parametrize("state", [collections.defaultdict(int, {3: 1}), collections.deque([1])])
def test_a_state_that_torch_does_not_load_again_is_refused(tmp_path, state):
    save_states(tmp_path / "checkpoint-1", optimizer={"state": state}, scheduler={})
    with pytest.raises(CheckpointError, match=r"optimizer\.pt (cannot be loaded again|is refused)"):
        check_pickles(tmp_path / "checkpoint-1")


class Counting(torch.optim.SGD):
    """An optimizer whose state torch does not load with `weights_only`."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"][:1]:
            self.state[parameter].setdefault("counts", collections.defaultdict(int))[1] += 1


def test_the_first_save_says_that_no_run_could_resume(tmp_path, caplog):
    trainer = tiny_trainer(tmp_path, SpotCheckpointCallback(), max_steps=3, save_strategy="steps", save_steps=1)
    trainer.optimizer = Counting(trainer.model.parameters(), lr=0.1)
    trainer.train()
    said = [record.getMessage() for record in caplog.records if "no run will be able to resume" in record.getMessage()]
    assert len(said) == 1
    assert "checkpoint-1/optimizer.pt cannot be loaded again" in said[0]
