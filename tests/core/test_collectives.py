"""Exchanges between ranks: their values, the check of their names, and errors of one rank that all ranks raise."""

import contextlib
import math
import os
import re
import resource
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import REPOSITORY
from forked_ranks import run_ranks
from tiny import tiny_trainer
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import TrainerCallback

from hfscale import CommHealthCallback, ScalingCallback, SpotCheckpointCallback
from hfscale.checkpoint import writer
from hfscale.checkpoint.formats.dcp import save_shards
from hfscale.checkpoint.writer import CheckpointJob, CheckpointWriter
from hfscale.core import collectives, tree
from hfscale.core.collectives import DEBUG_VARIABLE, SAVING, START, TRAINING
from hfscale.core.distributed import rank
from hfscale.errors import HealthError, StorageError, UsageError


def wait_for(files):
    """Wait until all files exist, at most a minute."""
    until = time.monotonic() + 60
    while not all(file.exists() for file in files) and time.monotonic() < until:
        time.sleep(0.01)


def in_ranks(function, folder, *, debug="120", ranks=2, ends_all=False, failing=None):
    """Run `function` in a gloo world; return the exit code and the output of each rank.

    Ranks of `failing`, by default all, are those that raise if one does.
    """

    def main():
        dist.init_process_group("gloo")
        try:
            function()
        except Exception:
            (folder / f"failed-{rank()}").touch()
            if rank() == 0:  # this process hosts the store, which the others are still reading
                wait_for([folder / f"failed-{number}" for number in failing])
            raise
        dist.barrier()
        dist.destroy_process_group()

    failing = range(ranks) if failing is None else failing
    codes = run_ranks(ranks, main, log=folder, env={DEBUG_VARIABLE: debug}, ends_all=ends_all)
    return codes, [(folder / f"rank-{number}.log").read_text() for number in range(ranks)]


def test_one_process_exchanges_with_itself():
    assert TRAINING.gather("a", {"x": (1, 2)}) == [{"x": [1, 2]}]
    assert TRAINING.gather_numbers("b", [1.0, 2.0]).tolist() == [[1.0, 2.0]]
    shared, total = TRAINING.combine_numbers("h", [1.0, 2.0], lambda table: table.sum().item(), shared=1)
    assert (shared.tolist(), total) == ([[1.0]], 3.0)
    assert TRAINING.maximum("c", [1.0, 2.0]) == [1.0, 2.0]
    TRAINING.barrier("d")
    assert TRAINING.combine("f", 3, sum) == 3
    assert TRAINING.distribute("g", (1, 2), lambda values: [(value,) for value in values]) == ((1, 2),)
    with pytest.raises(StorageError, match="full"), TRAINING.agreed("e"):
        raise StorageError("full")


@pytest.mark.world(2)
def test_values_of_all_ranks_arrive_in_rank_order(tmp_path):
    def fail():
        raise UsageError("no checkpoint")

    def values():
        assert TRAINING.gather("log", {"rank": rank(), "text": "x" * rank()}) == [
            {"rank": 0, "text": ""},
            {"rank": 1, "text": "x"},
        ]
        assert SAVING.gather_numbers("files", [rank(), 2.5]).tolist() == [[0.0, 2.5], [1.0, 2.5]]
        assert TRAINING.maximum("stop", [-rank(), rank()]) == [0.0, 1.0]
        assert TRAINING.combine("steps", rank() + 2, lambda values: (rank(), values)) == [0, [2, 3]]
        assert TRAINING.on_rank_0("step", rank) == 0
        with pytest.raises(UsageError, match=r"^(rank 0: )?no checkpoint$"):
            TRAINING.on_rank_0("resume", fail)
        wait = TRAINING.start_max("vote", [float(rank())])
        assert wait() == [1.0]

    codes, _ = in_ranks(values, tmp_path)
    assert codes == [0, 0]


@pytest.mark.world(2)
def test_a_rank_in_another_exchange_is_named(tmp_path):
    def differ():
        TRAINING.barrier("both")
        TRAINING.barrier("log" if rank() == 0 else "save")

    codes, texts = in_ranks(differ, tmp_path)
    assert all(codes)
    assert all("exchange 2 of 'training'" in text and "{0: 'log', 1: 'save'}" in text for text in texts), texts


@pytest.mark.world(3)
def test_a_rank_that_enters_no_exchange_is_named(tmp_path):
    def one_is_absent():
        if rank() != 1:
            TRAINING.barrier("log")
        wait_for([tmp_path / "failed-0", tmp_path / "failed-2"])

    codes, texts = in_ranks(one_is_absent, tmp_path, debug="3", ranks=3, failing=(0, 2))
    assert codes[0]
    assert codes[2]
    assert all("in 'log', ranks [1] in none" in texts[number] for number in (0, 2)), texts


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StorageError("the disk is full"), "StorageError: rank 1: the disk is full"),
        (
            OSError(28, "No space left on device", "a/b"),
            "OSError: [Errno 28] No space left on device (on rank 1): 'a/b'",
        ),
        (KeyError("lost"), "RuntimeError: rank 1: KeyError: 'lost'"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(tmp_path, error, expected):
    def fail():
        with TRAINING.agreed("prepare"):
            if rank() == 1:
                raise error

    codes, texts = in_ranks(fail, tmp_path)
    assert all(codes)
    assert expected in texts[0]
    assert type(error).__name__ in texts[1]
    assert "rank 1" not in texts[1].splitlines()[-1]


@pytest.mark.world(2)
def test_a_rank_that_fails_before_a_collective_of_another_library_raises_though_the_others_wait_there(tmp_path):
    """The others never reach the end of the block; that rank must not wait for them for hours."""

    def fail():
        collectives.PATIENCE_S = 0.5
        with TRAINING.agreed("save"):
            if rank() == 1:
                raise OSError(28, "No space left on device")
            dist.barrier()

    codes, texts = in_ranks(fail, tmp_path, ends_all=True)
    assert codes[1] == 1
    assert "No space left on device" in texts[1]
    assert codes[0] != 0


@pytest.mark.world(2)
def test_an_error_waits_once_for_the_others_and_not_at_each_exchange_on_its_way_out(tmp_path):
    """As that of a Trainer's own `_save_checkpoint`, which two channels learn of."""

    def fail():
        collectives.PATIENCE_S = 1.0
        other = collectives.Channel("saving", timedelta(minutes=1))
        if rank() == 0:
            time.sleep(30)  # it waits elsewhere
            return
        began = time.monotonic()
        with pytest.raises(OSError, match="No space left on device") as raised, TRAINING.agreed("write"):
            raise OSError(28, "No space left on device")
        first = time.monotonic() - began
        with pytest.raises(OSError, match="No space left on device"):
            other.combine_outcomes("files", None, len, error=raised.value)
        assert first >= 1.0
        assert time.monotonic() - began < first + 0.5
        raise SystemExit(3)

    codes, texts = in_ranks(fail, tmp_path, ends_all=True)
    assert codes[1] == 3, texts[1]


@pytest.mark.world(2)
def test_exchanges_leave_no_keys_in_the_store(tmp_path):
    def exchange():
        store = dist.distributed_c10d._get_default_store()
        counts = []
        for number in range(20):
            with TRAINING.agreed("save"):
                pass
            TRAINING.combine_outcomes("sizes", number, sum, error=None)
            dist.barrier()
            counts.append(store.num_keys())
            dist.barrier()
        assert counts[-1] == counts[1], counts

    codes, texts = in_ranks(exchange, tmp_path, debug="0")  # names are compared through the store
    assert codes == [0, 0], texts


def test_an_exchange_within_an_agreed_block_is_refused():
    with (
        pytest.raises(RuntimeError, match="'log' is nested in the agreed block 'prepare'"),
        TRAINING.agreed("prepare"),
    ):
        TRAINING.barrier("log")


@pytest.mark.parametrize("ranks", [2, 5, 32, 33, 1024, 1025, 16384])
def test_the_groups_of_a_tree_are_small_and_lead_to_rank_0(ranks):
    members = list(range(ranks))
    for groups in tree.groups_of_levels(ranks):
        assert [rank for group in groups for rank in group] == members
        assert max(map(len, groups)) <= tree.LARGEST_GROUP
        assert len(groups) == 1 or len(set(map(len, groups[:-1]))) == 1, "rows are filled up at the end only"
        members = [group[0] for group in groups]
    assert members == [0]


@pytest.mark.world(5)
@pytest.mark.parametrize("largest", [2, tree.LARGEST_GROUP])
def test_a_tree_of_groups_exchanges_what_one_group_exchanges(tmp_path, largest):
    """Five ranks in groups of at most two, on three levels: (0, 1), (2, 3), (4); (0, 2), (4); (0, 4)."""

    def fail_on(guilty):
        if rank() == guilty:
            raise StorageError("full")

    def values():
        tree.Tree.over_all_ranks.__func__.__kwdefaults__["largest"] = largest
        texts = ["x" * 1000 * number for number in range(5)]
        assert TRAINING.gather("texts", texts[rank()]) == texts
        assert SAVING.gather("again", texts[rank()]) == texts, "leaders have created more groups than others before"
        text = TRAINING.combine("count", texts[rank()], lambda found: f"{rank()} {len(''.join(found))}")
        assert text == "0 10000"
        table = [[float(number), 0.5] for number in range(5)]
        assert TRAINING.gather_numbers("numbers", table[rank()]).tolist() == table
        first, total = TRAINING.combine_numbers("sum", table[rank()], lambda rows: rows.sum(0).tolist(), shared=1)
        assert first.tolist() == [[0.0], [1.0], [2.0], [3.0], [4.0]]
        assert total == [10.0, 2.5]
        assert TRAINING.combine_numbers("rank", table[rank()], lambda _: rank())[1] == 0
        wait = TRAINING.start_max("vote", [float(rank()), -float(rank())])
        TRAINING.barrier("all")
        assert wait() == [4.0, 0.0]
        with pytest.raises(StorageError), TRAINING.agreed("write"):
            fail_on(4)
        part = TRAINING.distribute("parts", (texts[rank()],), lambda found: found[::-1])
        assert part == (texts[4 - rank()],)
        with pytest.raises(StorageError), TRAINING.agreed("write again"):
            fail_on(0)
        with pytest.raises(StorageError, match="full"):
            TRAINING.distribute("nothing", None, lambda _: fail_on(0))
        assert TRAINING._tree._depth == (3 if largest == 2 else 1)

    codes, texts = in_ranks(values, tmp_path, ranks=5)
    assert codes == [0] * 5, texts


@pytest.mark.world(5)
def test_the_checkpoint_of_a_tree_is_that_of_torch(tmp_path):
    """Shards, a tensor that all ranks have, and plain values; a rank that fails ends the others."""

    def write():
        tree.Tree.over_all_ranks.__func__.__kwdefaults__["largest"] = 2
        mesh = init_device_mesh("cpu", (5,))
        whole = torch.arange(33.0)
        state = {"a": {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "same": whole + 1}, "step": 3}
        ours, theirs = tmp_path / "ours", tmp_path / "theirs"
        save_shards(state, ours, SAVING)
        dcp.save(state, checkpoint_id=theirs)
        dist.barrier()
        names = sorted(path.name for path in theirs.iterdir())
        assert sorted(path.name for path in ours.iterdir()) == names
        assert all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in names if name[0] == "_")
        target = tmp_path / "occupied"
        if rank() == 0:
            target.mkdir()
            (target / "__3_0.distcp").mkdir()  # where rank 3 writes its file
        dist.barrier()
        with pytest.raises(OSError, match="directory"):
            save_shards(state, target, SAVING)

    codes, texts = in_ranks(write, tmp_path, ranks=5)
    assert codes == [0] * 5, texts


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("writer", ["ours", "control"])
def test_shards_in_host_memory_are_written_without_a_stream_of_the_gpu(tmp_path, monkeypatch, writer):
    """The thread that writes has the training's stream: to wait for it is to wait for the queued steps.

    The control is torch's own default, so that the test fails if torch asks for the stream in another way.
    """
    used = []

    class Stream:
        device_type = "cuda"

        def synchronize(self):
            used.append("synchronize")

        def wait_stream(self, other):
            used.append("wait_stream")

    class Gpu:
        @staticmethod
        def current_stream():
            used.append("current_stream")
            return Stream()

        @staticmethod
        def stream(stream):
            return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(filesystem, "_get_available_device_type", lambda: "cuda")
    monkeypatch.setattr(filesystem, "_get_device_module", lambda device_type: Gpu)
    state = {"model": {str(number): torch.zeros(2 * 2**20) for number in range(4)}}  # of 8 MiB each
    if writer == "ours":
        save_shards(state, tmp_path / "shards", SAVING)
        assert used == []
    else:
        dcp.save(state, storage_writer=filesystem.FileSystemWriter(tmp_path / "shards"), no_dist=True)
        assert used.count("synchronize") > 1


@pytest.mark.world(4)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nodes_that_hold_the_same_shards_write_the_same_files(tmp_path):
    """Two nodes of two ranks; a replica on each node, and shards over both nodes."""

    def write():
        whole = torch.arange(33.0)
        replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        sharded = {
            "hsdp": distribute_tensor(whole, replicated, [Replicate(), Shard(0)]),
            "fsdp": distribute_tensor(whole, init_device_mesh("cpu", (4,)), [Shard(0)]),
        }
        for name, tensor in sharded.items():
            state = {"tensor": tensor, "same": whole + 1, "step": 3}
            save_shards(state, tmp_path / f"node-{rank() // 2}" / name, SAVING, ranks_per_node=2)

    codes, texts = in_ranks(write, tmp_path, ranks=4)
    assert codes == [0] * 4, texts
    for name, of_second in {
        "hsdp": ["__0_0.distcp", "__1_0.distcp"],
        "fsdp": ["__2_0.distcp", "__3_0.distcp"],
    }.items():
        first, second = (tmp_path / node / name for node in ("node-0", "node-1"))
        assert sorted(path.name for path in first.glob("__*")) == ["__0_0.distcp", "__1_0.distcp"]
        assert sorted(path.name for path in second.glob("__*")) == of_second
        for path in second.glob("__*"):
            if name == "hsdp":
                assert path.read_bytes() == (first / path.name).read_bytes()
            path.rename(first / path.name)
        loaded = {"tensor": torch.zeros(33), "same": torch.zeros(33), "step": 0}
        dcp.load(loaded, checkpoint_id=first, no_dist=True)
        assert loaded["tensor"].equal(torch.arange(33.0))
        assert loaded["same"].equal(torch.arange(33.0) + 1)
        assert loaded["step"] == 3


@pytest.mark.world(2)
def test_a_start_and_a_save_may_take_hours(tmp_path):
    """Rank 0 reads 2 TB in 33 minutes at 1 GB/s while the others wait; torch's own limit is 30 minutes."""

    def values():
        for channel in (START, SAVING):
            channel.open()
            (level,) = channel._tree._levels
            limit = level.group._get_backend(torch.device("cpu")).options._timeout
            assert limit == channel.timeout >= timedelta(hours=2)

    codes, texts = in_ranks(values, tmp_path)
    assert codes == [0, 0], texts


def test_the_connections_of_four_trees_fit_in_1024_open_files():
    """That is the usual limit of a process; two groups over all ranks exceed it from about 400 ranks."""
    assert 4 * (tree.LARGEST_GROUP - 1) + tree._SPARE_FILES <= 1024


def test_a_limit_of_open_files_that_is_too_low_is_raised_or_named():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 300), hard))
        tree._allow_files(512)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 768
        with pytest.raises(HealthError, match=f"open files is {hard}.*need"):
            tree._allow_files(hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def trained(folder, *callbacks, before=lambda trainer: None, **arguments):
    """Train a tiny model on each rank of a world, as a user does."""
    trainer = tiny_trainer(folder / "out", *callbacks, **({"max_steps": 8, "logging_steps": 2} | arguments))
    before(trainer)
    trainer.train()
    return trainer


def train_in_ranks(folder, train):
    codes = run_ranks(2, train, log=folder, env={DEBUG_VARIABLE: "120"}, timeout_s=240.0)
    return codes, [(folder / f"rank-{number}.log").read_text() for number in range(2)]


class OnSave(TrainerCallback):
    """Reads what was saved, as a user's upload does."""

    def on_save(self, args, state, control, **kwargs):
        """Look for the checkpoint of this step."""
        assert (Path(args.output_dir) / f"checkpoint-{state.global_step}").is_dir()


class Logs(TrainerCallback):
    """Logs on the main process only, as user code does."""

    def __init__(self):
        self.trainer = None

    def of(self, trainer):
        """Log through this Trainer."""
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        """Log a loss of its own."""
        if state.global_step == 5 and state.is_world_process_zero:
            self.trainer.log({"loss": 1.0, "extra": 2.0})


@pytest.mark.world(2)
def test_a_callback_on_one_rank_that_reads_checkpoints_makes_all_ranks_wait_for_saves(tmp_path):
    def train():
        callbacks = [ScalingCallback(spot_checkpoint=SpotCheckpointCallback(cloud=None))]
        trained(
            tmp_path, *callbacks, *([OnSave()] if os.environ["RANK"] == "0" else []),
            save_strategy="steps", save_steps=5,
        )  # fmt: skip
        dist.destroy_process_group()

    codes, texts = train_in_ranks(tmp_path, train)
    assert codes == [0, 0], texts


@pytest.mark.world(2)
def test_user_code_may_log_a_loss_on_one_rank_only(tmp_path):
    def train():
        logs = Logs()
        trainer = trained(tmp_path, ScalingCallback(), logs, save_strategy="no", before=logs.of)
        assert all("scaling/tokens_per_s" in row for row in trainer.state.log_history if "grad_norm" in row)
        assert not any("scaling/tokens_per_s" in row for row in trainer.state.log_history if "extra" in row)
        dist.destroy_process_group()

    codes, texts = train_in_ranks(tmp_path, train)
    assert codes == [0, 0], texts


@pytest.mark.world(2)
def test_a_gradient_norm_that_is_not_finite_on_one_rank_stops_all_ranks(tmp_path):
    def break_norm(trainer):
        original = trainer._get_grad_norm

        def norm(model, grad_norm=None):
            is_broken = trainer.state.global_step == 5 and os.environ["RANK"] == "1"
            return torch.tensor(math.nan) if is_broken else original(model, grad_norm=grad_norm)

        trainer._get_grad_norm = norm

    def train():
        callback = CommHealthCallback(on_bad_training="stop", preflight=False)
        with pytest.raises(HealthError, match="gradient norm is nan at step 6"):
            trained(tmp_path, callback, before=break_norm, save_strategy="no")
        os._exit(0)

    codes, texts = train_in_ranks(tmp_path, train)
    assert codes == [0, 0], texts


@pytest.mark.world(2)
@pytest.mark.parametrize("when", ["before", "folders"])
def test_an_error_of_one_rank_in_a_save_is_raised_on_all(tmp_path, when):
    """Before the save is handed over (DeepSpeed's own part), and in the folders of the shards, before collectives."""
    full = OSError(28, "No space left on device", "part")

    def write(folder):
        if rank() == 1 and when == "folders":
            raise full

    def save():
        error = full if rank() == 1 and when == "before" else None
        job = CheckpointJob(
            run_dir=tmp_path / "out", step=1, strategy="fsdp2", global_batch_size=1, commits=rank() == 0, error=error,
            write=write, write_collectively=lambda folder: SAVING.barrier("shards"),
        )  # fmt: skip
        with pytest.raises(StorageError, match=r"written on rank 1: .*No space left on device"):
            CheckpointWriter().run(job)

    codes, texts = in_ranks(save, tmp_path)
    assert codes == [0, 0], texts


@pytest.mark.world(2)
def test_one_rank_lists_the_files_of_a_save_and_each_hashes_its_own(tmp_path, monkeypatch):
    """Where every rank lists all of them, 1,024 ranks make 6.3 million requests to the storage for one save."""
    listed, hashed = [], []
    list_files, record = writer.checkpoint_files, writer._record
    monkeypatch.setattr(writer, "checkpoint_files", lambda folder: (listed.append(1), list_files(folder))[1])
    monkeypatch.setattr(writer, "_record", lambda folder, names: (hashed.extend(names), record(folder, names))[1])

    def save():
        CheckpointWriter().run(
            CheckpointJob(
                run_dir=tmp_path / "out", step=1, strategy="fsdp2", global_batch_size=1, commits=rank() == 0,
                write=lambda folder: (folder / f"rng_state_{rank()}.pth").write_bytes(b"state"),
            )
        )  # fmt: skip
        assert bool(listed) == (rank() == 0)
        assert hashed == [f"rng_state_{rank()}.pth"]

    codes, texts = in_ranks(save, tmp_path)
    assert codes == [0, 0], texts


@pytest.mark.world(2)
def test_an_error_of_one_rank_while_shards_are_written_is_raised_on_all(tmp_path):
    """torch's own function hangs where a rank fails before its first collective, for example in making the folder."""

    def write(folder):
        occupied = folder / "optimizer_0"
        if rank() == 1:
            patch.setattr(Path, "mkdir", lambda *_, **__: fail(occupied))
        save_shards({"optimizer": {"a": torch.ones(4)}}, occupied, SAVING)

    def fail(path):
        raise OSError(28, "No space left on device", str(path))

    def save():
        job = CheckpointJob(
            run_dir=tmp_path / "out", step=1, strategy="fsdp2", global_batch_size=1, commits=rank() == 0,
            write_collectively=write,
        )  # fmt: skip
        with pytest.raises(StorageError, match=r"could not be written on rank 1: .*No space left"):
            CheckpointWriter().run(job)

    with pytest.MonkeyPatch().context() as patch:
        codes, texts = in_ranks(save, tmp_path)
    assert codes == [0, 0], texts


@pytest.mark.world(2)
def test_trainings_of_one_process_use_the_same_process_groups(tmp_path):
    def train():
        numbers = []
        for number in range(2):
            trained(tmp_path / str(number), ScalingCallback(), max_steps=2, save_strategy="steps", save_steps=2)
            numbers.append(len(dist.distributed_c10d._world.pg_map))
        assert numbers[0] == numbers[1], numbers
        dist.destroy_process_group()

    codes, texts = train_in_ranks(tmp_path, train)
    assert codes == [0, 0], texts


def test_only_channels_exchange_values_of_hfscale():
    """The others call collectives of the training itself, or measure collectives."""
    call = re.compile(r"\bdist\.(all_\w+|barrier|broadcast\w*|gather\w*|reduce\w*|scatter\w*|new_group)\(")
    package = REPOSITORY / "hfscale"
    users = {str(path.relative_to(package)) for path in package.rglob("*.py") if call.search(path.read_text("utf-8"))}
    measures = {"check/calibrate.py", "check/check.py", "health/measure.py", "health/preflight.py"}
    trains = {"metrics/meters/noise_scale.py", "recipe/compression.py", "recipe/entrypoint.py"}
    trains |= {"recipe/onebit.py", "recipe/sign_mean.py", "recipe/router_bias.py"}
    trains |= {"optim/newton_schulz.py", "trainer/fsdp2_buffers.py"}
    own = {"core/collectives.py", "core/replicas.py", "core/tree.py"}
    own.add("core/distributed.py")  # the barrier at the end
    assert {user for user in users if not user.startswith("parallel/")} <= measures | trains | own
