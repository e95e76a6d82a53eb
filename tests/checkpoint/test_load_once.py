"""Loading once: ranks of two nodes read each byte of a model or checkpoint once, and train on from equal copies."""

import filecmp
import json
import os
import re
import resource
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from recipe_runs import FLAGS, SHARDED, TP_PP, _recipe, environment_of, logged, make_workplace, output
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import hfscale
from hfscale.checkpoint import load_once, node_copies, transfer
from hfscale.checkpoint.store import commit
from hfscale.core.collectives import START
from hfscale.errors import HfScaleError, UsageError

NODES, RANKS = 2, 4
CHUNK = 4096


def make_model(folder):
    """Make the files of a model in two shards, and others that no model is loaded from."""
    folder.mkdir(parents=True)
    shards = {f"model-{n}-of-2.safetensors": {f"weight.{n}": torch.randn(5000 + n)} for n in (1, 2)}
    for name, tensors in shards.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: name for name, tensors in shards.items() for key in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.randn(50000)}, folder / "consolidated.safetensors")
    torch.save({"weight": torch.randn(50000)}, folder / "pytorch_model.bin")
    return folder


def make_checkpoint(folder, step, strategy="ddp"):
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    if strategy == "fsdp2":
        for number in range(RANKS):
            path = checkpoint / "optimizer_0" / f"__{number}_0.distcp"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(os.urandom(9000 + number))
    else:
        save_file({"weight": torch.randn(9000)}, checkpoint / "model.safetensors")
    torch.save({"state": torch.randn(5000)}, checkpoint / "optimizer.pt")
    torch.save({"last_epoch": step}, checkpoint / "scheduler.pt")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    commit(checkpoint, step=step, strategy=strategy, world_size=RANKS, global_batch_size=4)
    return checkpoint


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def be_on_a_node(disks, nodes=NODES):
    """Make this rank one of a node that has its share of the ranks and a disk of its own."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    node, local_rank = divmod(rank, ranks // nodes)
    os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(ranks // nodes)}
    os.environ["NODE_DISK"] = str(disks / f"node-{node}")
    return node, rank


def on_rank(disks, calls):
    """Make calls on a rank of a simulated node, and print the result of each, and the bytes that it has read."""
    node, rank = be_on_a_node(disks)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name, arguments, changes in calls:
        read = []
        of = transfer.read_chunk

        def counted(folder, chunk, buffer, read=read, of=of):
            read.append([str(folder), chunk.length])
            of(folder, chunk, buffer)

        for change in changes:
            change(node, rank)
        dist.barrier()
        with patch.object(transfer, "read_chunk", counted), patch.object(transfer, "CHUNK_BYTES", CHUNK):
            try:
                found = getattr(hfscale, name)(*arguments[:-1], **arguments[-1])
            except HfScaleError as error:
                found = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps([found, read]) + "\n")


@pytest.fixture
def on_nodes(tmp_path):
    """Return a function that makes calls on four ranks, and returns for each call what each rank has got and read."""

    def call(*calls):
        codes = run_ranks(RANKS, on_rank, tmp_path, calls, log=tmp_path / "log", timeout_s=100)
        logs = [(tmp_path / "log" / f"rank-{rank}.log").read_text() for rank in range(RANKS)]
        assert codes == [0] * RANKS, logs
        found = [[json.loads(line) for line in text.splitlines() if line.startswith("[")] for text in logs]
        return list(zip(*found, strict=True))

    return call


def bytes_from(result, folder):
    """Return how many bytes each rank has read from a folder."""
    return [sum(length for source, length in read if source.startswith(str(folder))) for _, read in result]


def content(folder):
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


DISK = {"folder": "$NODE_DISK"}
LATEST = {"load_once": "$NODE_DISK"}


@pytest.mark.world(4)
class TestModel:
    def test_is_read_once_by_all_and_again_from_the_copies(self, on_nodes, tmp_path):
        model = make_model(tmp_path / "shared" / "model")
        wanted = {name: data for name, data in content(model).items() if not name.startswith(("cons", "pytorch"))}
        total = sum(map(len, wanted.values()))

        def lose_a_disk(node, rank):
            if rank == 3:
                shutil.rmtree(tmp_path / "node-1")

        call = ("load_once", (str(model), DISK))
        first, second, third = on_nodes((*call, []), (*call, []), (*call, [lose_a_disk]))
        for rank, (copy, _) in enumerate(first):
            assert Path(copy).is_relative_to(tmp_path / f"node-{rank // 2}")
            assert content(copy) == wanted
        assert sum(bytes_from(first, model)) == total
        assert min(bytes_from(first, model)) > total / RANKS / 2
        assert [found for found, _ in second] == [found for found, _ in first]
        assert sum(len(read) for _, read in second) == 0
        assert sum(bytes_from(third, tmp_path)) == total
        assert 0 < sum(bytes_from(third, tmp_path / "node-0")) < total

    def test_a_node_that_does_not_see_it_gets_it_from_the_others(self, on_nodes, tmp_path):
        model = make_model(tmp_path / "shared" / "model")

        def lose_sight(node, rank):
            if node == 1:
                patch.object(node_copies, "_sees", lambda *_: False).start()

        (result,) = on_nodes(("load_once", (str(model), DISK), [lose_sight]))
        assert len({str(sorted(content(copy).items())) for copy, _ in result}) == 1
        assert bytes_from(result, model)[2:] == [0, 0]

    @pytest.mark.parametrize(
        ("folder", "message"),
        [
            ("{shared}", "UsageError: .*is a folder that nodes share, such as those of ranks 0 and 2"),
            ("$NO_SUCH_DISK/copies", "UsageError: .*contains a variable that is not set"),
            ("/proc/copies", "StorageError: .*cannot be written"),
        ],
    )
    def test_a_folder_that_cannot_be_used_is_refused_on_all(self, on_nodes, tmp_path, folder, message):
        model = make_model(tmp_path / "shared" / "model")
        folder = folder.format(shared=tmp_path)
        (result,) = on_nodes(("load_once", (str(model), {"folder": folder}), []))
        for found, read in result:
            assert re.match(message, found)
            assert read == []

    def test_without_room_or_safetensors_is_refused_on_all(self, on_nodes, tmp_path):
        model = make_model(tmp_path / "shared" / "model")
        (tmp_path / "shared" / "pickled").mkdir()

        def fill_disk(node, rank):
            if node == 1:
                usage = SimpleNamespace(free=1000)
                patch.object(node_copies.shutil, "disk_usage", lambda _: usage).start()

        pickled = ("load_once", (str(tmp_path / "shared" / "pickled"), DISK), [])
        without, full = on_nodes(pickled, ("load_once", (str(model), DISK), [fill_disk]))
        assert {found.split(":")[0] for found, _ in without} == {"UsageError"}
        for found, read in full:
            assert "e-07 GiB free on" in found
            assert read == []

    def test_nodes_may_have_several_numbers_of_ranks(self, on_nodes, tmp_path):
        model = make_model(tmp_path / "shared" / "model")

        def move(node, rank):
            """Ranks 0 to 2 are of one node, with the disk of rank 0, and rank 3 is alone."""
            os.environ["LOCAL_RANK"] = str(rank % 3)
            os.environ["NODE_DISK"] = str(tmp_path / f"node-{rank // 3}")

        (result,) = on_nodes(("load_once", (str(model), DISK), [move]))
        assert len({str(sorted(content(copy).items())) for copy, _ in result}) == 1
        assert sum(bytes_from(result, model)) == sum(map(len, content(result[0][0]).values()))

    def test_files_of_the_hubs_cache_are_links(self, on_nodes, tmp_path):
        blobs = make_model(tmp_path / "shared" / "blobs")
        snapshot = tmp_path / "shared" / "snapshots" / "0123"
        snapshot.mkdir(parents=True)
        for path in blobs.iterdir():
            (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
        (result,) = on_nodes(("load_once", (str(snapshot), DISK), []))
        for copy, _ in result:
            assert not any(path.is_symlink() for path in Path(copy).iterdir())
            assert content(copy).items() <= content(blobs).items()

    def test_without_a_process_group_or_local_rank_is_refused(self, on_nodes, tmp_path, monkeypatch):
        model = make_model(tmp_path / "shared" / "model")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(UsageError, match="needs the process group"):
            hfscale.load_once(str(model), str(tmp_path))
        (result,) = on_nodes(("load_once", (str(model), DISK), [lambda *_: os.environ.pop("LOCAL_RANK")]))
        assert {found.split(",")[0] for found, _ in result} == {"UsageError: load_once needs LOCAL_RANK"}


def large_model_on_rank(disks, small, large):
    """Write by how much the memory of this rank grows while a large model is copied."""
    be_on_a_node(disks, nodes=4)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    hfscale.load_once(str(small), "$NODE_DISK")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    copy = hfscale.load_once(str(large), "$NODE_DISK")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    is_equal = filecmp.cmp(Path(copy) / "model.safetensors", large / "model.safetensors", shallow=False)
    sys.stdout.write(json.dumps([is_equal, grown]) + "\n")


@pytest.mark.long
@pytest.mark.world(16)
def test_sixteen_ranks_of_four_nodes_hold_two_chunks_each(tmp_path):
    small = make_model(tmp_path / "shared" / "small")
    large = tmp_path / "shared" / "large"
    large.mkdir()
    tensor = torch.arange(30 * 2**20, dtype=torch.int32)
    save_file({"weight": tensor}, large / "model.safetensors")
    log = tmp_path / "log"
    assert run_ranks(16, large_model_on_rank, tmp_path, small, large, log=log, timeout_s=300) == [0] * 16
    for rank in range(16):
        is_equal, grown = json.loads((log / f"rank-{rank}.log").read_text().strip().splitlines()[-1])
        assert is_equal
        assert grown <= transfer.BUFFER_BYTES + 16 * 2**20 < tensor.nbytes


@pytest.mark.world(4)
class TestCheckpoint:
    def test_is_verified_while_it_is_copied_and_a_damaged_one_skipped(self, on_nodes, tmp_path):
        older, newer = (make_checkpoint(tmp_path / "run", step) for step in (2, 4))
        damage(newer / "optimizer.pt")
        call = ("latest_checkpoint", (str(tmp_path / "run"), LATEST))

        def add_one(node, rank):
            if rank == 0:
                make_checkpoint(tmp_path / "run", 6)

        first, second = on_nodes((*call, []), (*call, [add_one]))
        for copy, _ in first:
            assert Path(copy).name == older.name
        total = sum(map(len, content(older).values()))
        assert sum(bytes_from(first, older)) == total
        assert "the content of optimizer.pt has changed" in (tmp_path / "log" / "rank-0.log").read_text()
        for rank, (copy, _) in enumerate(second):
            assert content(copy) == content(tmp_path / "run" / "checkpoint-6")
            runs = tmp_path / f"node-{rank // 2}" / "checkpoints"
            assert len(list(runs.glob("*/*/checkpoint-*"))) == 1

    def test_what_is_damaged_on_the_way_is_not_loaded(self, on_nodes, tmp_path):
        make_checkpoint(tmp_path / "run", 2)

        def damage_writes(node, rank):
            write = transfer.Transfer._write

            def damaged(self, chunk, buffer):
                if node == 1 and chunk.name == "optimizer.pt":
                    buffer = buffer ^ 1
                write(self, chunk, buffer)

            patch.object(transfer.Transfer, "_write", damaged).start()

        (result,) = on_nodes(("latest_checkpoint", (str(tmp_path / "run"), LATEST), [damage_writes]))
        for found, _ in result:
            assert found.startswith("StorageError")
            assert "check the memory, the disk" in found

    def test_each_node_gets_the_shards_of_its_ranks(self, on_nodes, tmp_path):
        checkpoint = make_checkpoint(tmp_path / "run", 2, "fsdp2")
        (result,) = on_nodes(("latest_checkpoint", (str(tmp_path / "run"), LATEST), []))
        assert sum(bytes_from(result, checkpoint)) == sum(map(len, content(checkpoint).values()))
        for rank, (copy, _) in enumerate(result):
            assert content(copy) == content(checkpoint)
            links = {path.name for path in Path(copy).rglob("*") if path.is_symlink()}
            others = (2, 3) if rank < 2 else (0, 1)
            assert links == {f"__{other}_0.distcp" for other in others}


def recipe_on_a_node(script, folder, flags):
    """Run a recipe on a rank of a node; what it has copied is gone when it loads, apart from what torch shards."""
    be_on_a_node(folder)
    copy_checkpoint, check_pickles = load_once.copy_checkpoint, load_once.check_copied_pickles
    weights_to_load = load_once.weights_to_load
    read_chunk, read = transfer.read_chunk, []

    def counted(source, chunk, buffer):
        read.append(chunk.length)
        read_chunk(source, chunk, buffer)

    def hide(files):
        START.barrier("copied")
        if os.environ["RANK"] == "0":
            for path in files:
                path.rename(path.with_suffix(".gone"))
        START.barrier("hidden")

    def load_weights(arguments, name, **options):
        found = weights_to_load(arguments, name, **options)
        hide(Path(name).glob("*.safetensors"))
        return found

    def load_checkpoint(checkpoint, *arguments):
        read.clear()
        found = copy_checkpoint(checkpoint, *arguments)
        (folder / f"read-{os.environ['RANK']}").write_text(str(sum(read)))
        return found

    def check(copy, checkpoint, exchanges):
        check_pickles(copy, checkpoint, exchanges)
        hide(path for path in checkpoint.rglob("*") if path.suffix in (".pt", ".pth", ".safetensors", ".bin"))

    with (
        patch.object(transfer, "read_chunk", counted),
        patch("hfscale.recipe.models.weights_to_load", load_weights),
        patch("hfscale.parallel.trainer.weights_to_load", load_weights),
        patch("hfscale.checkpoint.load_once.copy_checkpoint", load_checkpoint),
        patch("hfscale.checkpoint.load_once.check_copied_pickles", check),
    ):
        _recipe(script, folder, flags)


def train(folder, strategy, ranks, *flags):
    script = TP_PP if strategy == "parallel" else SHARDED
    arguments = ["--model_name_or_path", "base", "--load_once", "$NODE_DISK", "--save_steps", "3", *flags]
    if strategy == "parallel":
        arguments += ["--tp_size", str(ranks), "--gradient_accumulation_steps", "1"]
    without = [flag for flag in FLAGS if flag not in ("--config_name", "model")]
    env = environment_of(strategy)
    codes = run_ranks(
        ranks, recipe_on_a_node, script, folder, [*without, *arguments], log=folder / "log", env=env, timeout_s=200
    )
    assert codes == [0] * ranks, output(folder)[-8000:]


@pytest.mark.long
@pytest.mark.world(4)
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        *((name, 2) for name in ("ddp", "fsdp2", "zero1", "zero2", "zero3", "parallel")),
        *((name, 4) for name in ("ddp", "fsdp2", "zero3")),
    ],
)
def test_a_recipe_loads_and_resumes_from_the_copies(strategy, ranks, tmp_path):
    folder = make_workplace(tmp_path / "place")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "deep"))
    model.save_pretrained(folder / "base")
    shutil.copytree(folder / "base", folder / "weights")
    train(folder, strategy, ranks)
    uninterrupted = logged(folder, "loss")
    assert len(uninterrupted) == 6
    shutil.rmtree(folder / "out" / "checkpoint-6")
    shutil.rmtree(folder / "base")
    (folder / "weights").rename(folder / "base")
    checkpoint = folder / "out" / "checkpoint-3"
    total = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    train(folder, strategy, ranks)
    assert logged(folder, "loss") == uninterrupted
    assert sum(int((folder / f"read-{rank}").read_text()) for rank in range(ranks)) == total
    assert AutoConfig.from_pretrained(folder / "out").name_or_path != ""
