"""Loading once on four nodes with a network each: bytes read and sent, and memory, as the kernel counts them.

What a process reads are also its node's copies, which it verifies. So the bytes that it reads of the original are
counted where they are read, too.
"""

import json
import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from node_networks import NetworksNotAllowedError, address_of, bytes_of_node, enter, node_networks
from recipe_runs import FLAGS, SHARDED, TP_PP, _recipe, environment_of, logged, make_workplace, output
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import hfscale
from hfscale.checkpoint import load_once, transfer
from hfscale.core.collectives import DEBUG_VARIABLE, START

RANKS = 16
NODES = 4
SETTLED_S = 0.3
"""Time in which what was sent arrives, after all ranks have what they wait for."""
HEADERS = 1.03
"""Bytes on the network per byte sent: headers of TCP/IP and Ethernet, acknowledgements, and small exchanges."""
FLAGS_OF = {
    "native": ["--fsdp_size", str(RANKS)],
    "parallel": ["--tp_size", "2", "--pp_size", "2", "--gradient_accumulation_steps", "2"],
}
"""Flags of the strategies that have sizes."""
OTHER_BYTES = 2**20
"""What a rank may read in addition: its own state in /proc, small files."""

pytestmark = [pytest.mark.long, pytest.mark.world(RANKS), pytest.mark.timeout(900)]


@pytest.fixture
def networks():
    try:
        with node_networks(NODES) as nodes:
            yield nodes
    except NetworksNotAllowedError as error:
        pytest.skip(str(error))


def be_on_a_node(networks, disks):
    """Make this rank one of a node that has its own network, host name and disk."""
    node, local_rank = divmod(int(os.environ["RANK"]), RANKS // NODES)
    enter(networks[node])
    os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(RANKS // NODES)}
    os.environ["NODE_DISK"] = str(disks / f"node-{node}")
    return node


class Counted:
    """Counts what this rank reads and its node receives and sends within the context, and by how much its memory
    grows. Every rank must enter it."""

    def __init__(self, file, node):
        self.file = file
        self.node = node

    def __enter__(self):
        self.of_original = 0
        self.patch = patch.object(transfer, "read_chunk", self._counting(transfer.read_chunk))
        self.patch.start()
        START.barrier("before")
        time.sleep(SETTLED_S)
        self.before = [*bytes_of_node(), bytes_read()]
        START.barrier("counted")  # no rank begins before the counters of its node are read
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the memory is that from now on
        self.memory = memory_of("VmRSS")

    def _counting(self, read_chunk):
        def counted(folder, chunk, buffer):
            self.of_original += chunk.length
            read_chunk(folder, chunk, buffer)

        return counted

    def __exit__(self, *_):
        self.patch.stop()
        grown = memory_of("VmHWM") - self.memory
        read = bytes_read()
        START.barrier("after")
        time.sleep(SETTLED_S)
        received, sent = (now - old for now, old in zip(bytes_of_node(), self.before[:2], strict=True))
        read -= self.before[2]
        found = {"node": self.node, "received": received, "sent": sent, "read": read, "grown": grown}
        self.file.write_text(json.dumps(found | {"of_original": self.of_original}))
        START.barrier("noted")


def bytes_read():
    """Return how many bytes this process has read by system calls."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def memory_of(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def counted_of(folder, name):
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(RANKS)]


def check_counts(found, total, verified=0):
    """Check that all nodes together have read some bytes once, and each has sent and received them at most once.

    Args:
        found (`list[dict]`): what `Counted` has written, of each rank.
        total (`int`): the bytes.
        verified (`int`): bytes of the copies of all nodes that were compared with hashes.
    """
    assert sum(one["of_original"] for one in found) == total
    read = sum(one["read"] for one in found)
    assert total <= read <= total + verified + RANKS * OTHER_BYTES, (total, verified, read)
    # Ranks of a node see the same counters
    nodes = {one["node"]: one for one in found}
    for way in ("received", "sent"):
        assert max(node[way] for node in nodes.values()) <= total * HEADERS + OTHER_BYTES, (total, nodes)
        in_all = sum(node[way] for node in nodes.values())
        assert in_all <= (NODES - 1) * total * HEADERS + NODES * OTHER_BYTES, (total, nodes)
    for one in found:
        assert one["grown"] <= transfer.BUFFER_BYTES + 16 * 2**20, found


def files_of(folders):
    """Return the bytes of the files in folders, without links."""
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)


def copy_on_rank(networks, folder, models):
    torch.set_num_threads(1)
    node = be_on_a_node(networks, folder)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    hfscale.load_once(str(models / "small"), "$NODE_DISK")
    with Counted(folder / f"copy-{os.environ['RANK']}.json", node):
        copy = hfscale.load_once(str(models / "large"), "$NODE_DISK")
    names = ("model.safetensors", "config.json")
    assert all((Path(copy) / name).read_bytes() == (models / "large" / name).read_bytes() for name in names)


def environment(**more):
    # The check of exchanges that the other tests have polls the store, which is on the first node
    return {"MASTER_ADDR": address_of(0), DEBUG_VARIABLE: "0", **more}


def test_a_model_is_read_once_and_passes_each_network_once(networks, tmp_path):
    for name, length in (("small", 1000), ("large", 40 * 2**20)):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        save_file({"weight": torch.arange(length, dtype=torch.int32)}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
    log = tmp_path / "log"
    codes = run_ranks(
        RANKS, copy_on_rank, networks, tmp_path, tmp_path / "models", log=log, env=environment(), timeout_s=300
    )
    assert codes == [0] * RANKS, [path.read_text()[-2000:] for path in log.iterdir()]
    total = files_of([tmp_path / "models" / "large"])
    check_counts(counted_of(tmp_path, "copy"), total)


def recipe_on_rank(networks, folder, script, flags):
    """Run the recipe on a rank of a node, and count while it copies the model, and the checkpoint."""
    node = be_on_a_node(networks, folder)
    rank = os.environ["RANK"]
    weights_to_load, copy_checkpoint = load_once.weights_to_load, load_once.copy_checkpoint

    def load_weights(*arguments, **options):
        with Counted(folder / f"model-{rank}.json", node):
            return weights_to_load(*arguments, **options)

    def load_checkpoint(*arguments):
        with Counted(folder / f"checkpoint-{rank}.json", node):
            return copy_checkpoint(*arguments)

    with (
        patch("hfscale.recipe.models.weights_to_load", load_weights),
        patch("hfscale.parallel.trainer.weights_to_load", load_weights),
        patch("hfscale.checkpoint.load_once.copy_checkpoint", load_checkpoint),
    ):
        _recipe(script, folder, flags)


def train(networks, folder, strategy):
    without = [flag for flag in FLAGS if flag not in ("--config_name", "model")]
    flags = ["--model_name_or_path", "base", "--load_once", "$NODE_DISK", "--save_steps", "2", "--max_steps", "4"]
    flags += ["--per_device_train_batch_size", "1", *FLAGS_OF.get(strategy, [])]
    script = TP_PP if strategy == "parallel" else SHARDED
    env = environment(**environment_of(strategy))
    codes = run_ranks(
        RANKS, recipe_on_rank, networks, folder, script, [*without, *flags], log=folder / "log", env=env, timeout_s=600
    )
    assert codes == [0] * RANKS, output(folder)[-8000:]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2", "zero3", "native", "parallel"])
def test_a_training_loads_and_resumes_from_what_was_read_once(strategy, networks, tmp_path):
    folder = make_workplace(tmp_path / "place")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "deep", hidden_size=256, intermediate_size=1024)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    train(networks, folder, strategy)
    if strategy != "fsdp2":
        check_counts(counted_of(folder, "model"), files_of([folder / "base"]))
    else:  # rank 0 reads the model, and Accelerate sends the shards
        assert list(folder.glob("model-*.json")) == []
    losses = logged(folder, "loss")
    shutil.rmtree(folder / "out" / "checkpoint-4")
    total = files_of([folder / "out" / "checkpoint-2"])
    train(networks, folder, strategy)
    # DDP sums the gradients of its first step in other parts than those of later ones
    assert logged(folder, "loss") == pytest.approx(losses, rel=1e-6)
    verified = files_of(folder.glob("node-*/checkpoints"))
    assert (verified > NODES * total) == (strategy == "ddp")  # the copies of shards are links on the other nodes
    check_counts(counted_of(folder, "checkpoint"), total, verified)
