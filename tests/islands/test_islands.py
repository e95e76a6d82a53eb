"""Training on several islands: each is one launch of one or two processes that are forks of this one."""

import json
import os
import re
import threading
import time

import psutil
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from ports import free_port
from tiny import RandomTokens, tiny_arguments, tiny_model, tiny_trainer
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, default_data_collator

from hfscale import DiLoCoCallback, SpotCheckpointCallback
from hfscale.checkpoint.store import verify
from hfscale.errors import UsageError
from hfscale.facts.compression import Compression
from hfscale.health.diagnosis import slow_activity
from hfscale.islands import client as client_module
from hfscale.islands.client import IslandClient, Reply
from hfscale.islands.outer import OuterOptimizer
from hfscale.islands.rendezvous import TOKEN_VARIABLE
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.fsdp2 import let_fsdp_run_on_cpu

TOKEN = "a secret of the tests"  # noqa: S105
TRAINING = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0, "max_steps": 6}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}


class InOrder(Trainer):
    """Reads the data in their order, so that two islands read together what two ranks read."""

    def _get_train_sampler(self, *args):
        return SequentialSampler(self.train_dataset)


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


def trained(folder, *callbacks, **arguments):
    """Train a tiny model on this rank, and write its parameters."""
    dataset = arguments.pop("train_dataset", None) or RandomTokens()
    args = tiny_arguments(folder, **(TRAINING | {"per_device_train_batch_size": 2} | arguments))
    if "ACCELERATE_USE_FSDP" in os.environ:
        let_fsdp_run_on_cpu()
    trainer = InOrder(
        model=tiny_model(),
        args=args,
        train_dataset=dataset,
        data_collator=default_data_collator,
        callbacks=list(callbacks),
    )
    assert Strategy.of(trainer).name.removeprefix("single") == os.environ.get("EXPECTED", "")
    trainer.train(resume_from_checkpoint=arguments.get("resume_from_checkpoint"))
    write_parameters(trainer, folder)
    return trainer


def write_parameters(trainer, folder):
    """Write the parameters, complete ones also where they are sharded."""
    parameters = {}
    for name, parameter in trainer.model.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        parameters[name] = full.detach().clone()
    if trainer.args.process_index == 0:
        safetensors.torch.save_file(parameters, folder / "parameters.safetensors")
        (folder / "log.json").write_text(json.dumps(trainer.state.log_history))


def parameters_of(folder):
    return safetensors.torch.load_file(folder / "parameters.safetensors")


def largest_difference(first, second):
    return max((first[name] - second[name]).abs().max().item() for name in first)


def run_islands(folder, train, *, islands=2, ranks=1, env=None, timeout_s=240.0):
    """Call `train(island, rendezvous)` on each rank of each island; return the exit codes and the output by island."""
    rendezvous, ports = f"127.0.0.1:{free_port()}", [str(free_port()) for _ in range(islands)]

    def as_island():
        island, rank = divmod(int(os.environ["RANK"]), ranks)
        os.environ.update(MASTER_PORT=ports[island], RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        if ranks == 1:
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                del os.environ[name]
        train(island, rendezvous)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    codes = run_ranks(islands * ranks, as_island, log=folder / "logs", env=env, ends_all=False, timeout_s=timeout_s)
    logs = [(folder / "logs" / f"rank-{number}.log").read_text() for number in range(islands * ranks)]
    return codes, logs


def test_with_one_step_and_plain_sgd_two_islands_are_ddp(tmp_path):
    def as_ddp():
        trained(tmp_path / "ddp")
        dist.destroy_process_group()

    def train(island, rendezvous):
        callback = DiLoCoCallback(
            islands=2, island_rank=island, rendezvous=rendezvous, every_steps=1, outer_lr=1.0, outer_momentum=0.0
        )
        if island == 1:
            answer_go_twice()
        else:
            expect_that_exchanges_are_reported()
        trained(tmp_path / f"island-{island}", callback, logging_steps=3)

    assert run_ranks(2, as_ddp, log=tmp_path / "logs-ddp", env={"EXPECTED": "ddp"}) == [0, 0]
    codes, logs = run_islands(tmp_path, train)
    assert codes == [0, 0], "\n".join(logs)
    first, second = (parameters_of(tmp_path / f"island-{island}") for island in range(2))
    assert largest_difference(first, second) == 0.0
    assert largest_difference(first, parameters_of(tmp_path / "ddp")) < 1e-6
    log = [row for row in json.loads((tmp_path / "island-0" / "log.json").read_text()) if "loss" in row]
    assert all(row["islands/contributors"] == 2 and row["islands/dropped_samples"] == 0 for row in log)
    assert all(row["islands/round_s"] > 0 and 0 < row["islands/stall_fraction"] < 1 for row in log)
    assert log[0]["islands/drift"] > 0
    payload = 4 * sum(parameter.numel() for parameter in tiny_model().parameters())
    assert 3 * payload < log[1]["islands/bytes"] < 3 * payload + 3000  # three rounds, and their headers


def expect_that_exchanges_are_reported():
    """The hang watch must know why training waits; an exception here ends the island."""
    exchange = IslandClient.exchange

    def watched(client, *args, **kwargs):
        assert slow_activity(threading.get_ident()) == "exchanging"
        return exchange(client, *args, **kwargs)

    IslandClient.exchange = watched


def answer_go_twice():
    """As if other islands had been ahead twice, and had ended: then this one contributes again."""
    exchange, answers = IslandClient.exchange, iter([Reply(kind="go", anchor=0)] * 2)
    IslandClient.exchange = lambda client, *args, **kwargs: next(answers, None) or exchange(client, *args, **kwargs)


@pytest.mark.parametrize(
    ("strategy", "env", "fragments"), [("ddp", {}, 1), pytest.param("fsdp2", FSDP2, 2, marks=pytest.mark.long)]
)
def test_islands_of_two_ranks_end_with_the_weights_of_islands_of_one(tmp_path, strategy, env, fragments):
    """Rank i of one island exchanges with rank i of the other: the outer step is the same on shards."""

    def train(island, rendezvous):
        flags = {"islands": 2, "island_rank": island, "rendezvous": rendezvous}
        callback = DiLoCoCallback(**flags, every_steps=3, fragments=fragments)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        trained(tmp_path / f"{ranks}-{island}", callback, per_device_train_batch_size=4 // ranks)

    for ranks in (1, 2):
        codes, logs = run_islands(
            tmp_path, train, ranks=ranks, env=env | {"EXPECTED": strategy} if ranks == 2 else None
        )
        assert codes == [0] * 2 * ranks, logs
        first, second = (parameters_of(tmp_path / f"{ranks}-{island}") for island in range(2))
        assert largest_difference(first, second) == 0.0
    assert largest_difference(parameters_of(tmp_path / "1-0"), parameters_of(tmp_path / "2-0")) < 1e-5


class BecomesNan(TrainerCallback):
    """Spoils one parameter of this island at a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == self.step:
            next(model.parameters()).data.view(-1)[5] = float("nan")


def test_a_contribution_that_is_not_finite_is_dropped_by_all_islands_and_counted(tmp_path):
    def train(island, rendezvous):
        flags = {"islands": 2, "island_rank": island, "rendezvous": rendezvous, "deadline_s": 60.0}
        callback = DiLoCoCallback(**flags, every_steps=2, compression=Compression(bits=4))
        spoils = [BecomesNan(4)] if island == 1 else []  # before the second of three rounds
        trained(tmp_path / str(island), *spoils, callback, logging_steps=1)

    codes, logs = run_islands(tmp_path, train)
    assert codes == [0, 0], "\n".join(logs)
    ends = [parameters_of(tmp_path / name) for name in ("0", "1")]
    assert all(value.isfinite().all() for value in ends[0].values())
    assert largest_difference(*ends) == 0.0
    for island in ("0", "1"):
        log = {row["step"]: row for row in json.loads((tmp_path / island / "log.json").read_text()) if "loss" in row}
        assert [log[step]["islands/contributors"] for step in (2, 4, 6)] == [2, 1, 2]
        assert [log[step]["islands/dropped_contributions"] for step in (2, 4, 6)] == [0, 1, 1]
        assert log[6]["islands/dropped_samples"] == 4
        assert "round 4: the contribution of island 1 has NaN or infinity" in logs[int(island)]


class KilledAt(TrainerCallback):
    """Ends this process without a word at a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        """Die."""
        if state.global_step == self.step:
            os._exit(9)


@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.long
def test_overlapped_rounds_of_equal_islands_change_nothing(tmp_path, bits):
    """With equal data and an outer SGD of rate 1 the mean is what each has trained, also during the exchange."""

    def train(island, rendezvous):
        flags = {"islands": 2, "island_rank": island, "rendezvous": rendezvous, "deadline_s": 60.0}
        flags |= {"every_steps": 4, "overlap_steps": 2, "outer_lr": 1.0, "outer_momentum": 0.0}
        callback = DiLoCoCallback(**flags, compression=Compression(bits=bits))
        trained(tmp_path / str(island), callback, max_steps=10, train_dataset=Twice(), logging_steps=1)

    codes, logs = run_islands(tmp_path, train)
    assert codes == [0, 0], "\n".join(logs)
    trained(tmp_path / "alone", max_steps=10)
    ends = [parameters_of(tmp_path / name) for name in ("0", "1", "alone")]
    assert largest_difference(ends[0], ends[1]) == 0.0
    assert largest_difference(ends[0], ends[2]) < (1e-6 if bits == 32 else 2e-2)
    log = json.loads((tmp_path / "0" / "log.json").read_text())
    assert [row["step"] for row in log if "islands/contributors" in row] == [6, 10], log


CASES = {  # H, P, overlapped steps, all steps
    "overlap": (4, 1, 2, 10),
    "fragments": (5, 2, 0, 12),
    "overlapped_fragments": (4, 2, 1, 11),
    "a_fragment_at_every_step": (2, 2, 0, 5),
}


@pytest.mark.parametrize("case", CASES)
def test_islands_with_different_data_end_where_the_formulas_lead(tmp_path, case):
    """DiLoCo's outer step, overlapped and by fragments, against the same steps in one process, written out."""
    every, fragments, overlap, steps = CASES[case]

    def train(island, rendezvous):
        flags = {"islands": 2, "island_rank": island, "rendezvous": rendezvous, "deadline_s": 60.0}
        callback = DiLoCoCallback(**flags, every_steps=every, fragments=fragments, overlap_steps=overlap)
        trained(tmp_path / str(island), callback, max_steps=steps)

    codes, logs = run_islands(tmp_path, train)
    assert codes == [0, 0], "\n".join(logs)
    first, second = (parameters_of(tmp_path / str(island)) for island in range(2))
    assert largest_difference(first, second) == 0.0
    assert largest_difference(first, trained_by_hand(*CASES[case])) < 1e-6


def trained_by_hand(every, fragments, overlap, steps, lr=0.7, momentum=0.9):
    """Train two islands with SGD, and return the parameters at the end."""
    models, rows = [tiny_model() for _ in range(2)], RandomTokens().rows
    local = [dict(model.named_parameters()) for model in models]
    anchor = {name: value.detach().clone() for name, value in local[0].items()}
    velocity = {name: torch.zeros_like(value) for name, value in anchor.items()}
    sent = None  # step, names, and parameters of both islands

    def names_of(fragment):
        return [name for name in anchor if fragment == fragments - 1 and "layers" not in name] + [
            name for name in anchor for layer in range(fragment, 2, fragments) if f"layers.{layer}." in name
        ]

    def finish():
        _, names, values = sent
        for name in names:
            gradient = anchor[name] - (values[0][name] + values[1][name]) / 2
            velocity[name] = momentum * velocity[name] + gradient
            anchor[name] = anchor[name] - lr * (gradient + momentum * velocity[name])
            for island in range(2):
                local[island][name].data = anchor[name] + (local[island][name].data - values[island][name])

    # Fragment f has its rounds at the first steps that are not before (f + 1) H / P, and then every H steps.
    first = [-(-(fragment + 1) * every // fragments) for fragment in range(fragments)]
    for step in range(1, steps + 1):
        for island, model in enumerate(models):
            batch = rows[island::2][2 * step - 2 : 2 * step]
            model(input_ids=batch, labels=batch).loss.backward()
            for parameter in model.parameters():
                parameter.data -= TRAINING["learning_rate"] * parameter.grad
                parameter.grad = None
        is_last = step == steps
        if sent is not None and (is_last or step == sent[0] + overlap):
            finish()
            sent = None
        due = [
            fragment
            for fragment in range(fragments)
            if step >= first[fragment] and (step - first[fragment]) % every == 0
        ]
        if due or is_last:
            names = list(anchor) if is_last else names_of(due[0])
            values = [{name: local[island][name].detach().clone() for name in names} for island in range(2)]
            sent = (step, names, values)
            if overlap == 0 or is_last:
                finish()
                sent = None
    return {name: value.detach() for name, value in local[0].items()}


class Twice(RandomTokens):
    """Has each sample twice, so that two islands read the same."""

    def __len__(self):
        return 2 * super().__len__()

    def __getitem__(self, index):
        return super().__getitem__(index // 2)


@pytest.mark.parametrize(("every", "fragments"), [(4, 1), (8, 2)])
def test_islands_stopped_during_an_exchange_resume_and_end_equal(tmp_path, every, fragments):
    """The checkpoint has no round that is on its way; the next round carries its steps."""
    saving = {"max_steps": 12, "save_strategy": "steps", "save_steps": 5, "logging_steps": 1}

    def run(name, *callbacks, resumes=False):
        def train(island, rendezvous):
            islands = {"islands": 2, "island_rank": island, "rendezvous": rendezvous, "deadline_s": 60.0}
            rounds = {"every_steps": every, "overlap_steps": 3, "fragments": fragments}
            diloco = DiLoCoCallback(**islands, **rounds, compression=Compression(bits=4))
            checkpoint = str(tmp_path / str(island) / "checkpoint-5") if resumes else None
            spot = SpotCheckpointCallback(cloud=None, asynchronous=False)
            trained(tmp_path / str(island), spot, diloco, *callbacks, resume_from_checkpoint=checkpoint, **saving)

        (tmp_path / name).mkdir()
        return run_islands(tmp_path / name, train)  # its end is waited for: no island is still in this run

    codes, logs = run("killed", KilledAt(6))
    assert codes == [9, 9], "\n".join(logs)
    codes, logs = run("resumed", resumes=True)
    assert codes == [0, 0], "\n".join(logs)
    ends = [parameters_of(tmp_path / name) for name in ("0", "1")]
    assert largest_difference(*ends) == 0.0


@pytest.mark.parametrize("fragment", [None, 1])
def test_a_withdrawn_pseudo_gradient_is_not_sent_twice(fragment):
    """Nor is it lost: the error feedback of its own fragment has it, if the next one is from another anchor."""
    compression, values = Compression(bits=4), torch.linspace(-1, 1, 512)
    sizes = [512] if fragment is None else [256, 512]
    outer = OuterOptimizer(torch.zeros(sum(sizes)), lr=1.0, momentum=0.0, compression=compression, sizes=sizes)
    outer.pseudo_gradient(values, fragment)
    on_its_way = outer.state_dict()["residual"]
    assert on_its_way.abs().max() < 1e-6
    outer.withdraw(anchor_stays=True)
    assert outer.state_dict()["residual"].abs().max() < 1e-6
    outer.pseudo_gradient(values, fragment)
    outer.withdraw(anchor_stays=False)
    residual = outer.state_dict()["residual"]
    assert torch.allclose(residual[-512:], -values, atol=1e-6)
    assert residual[:-512].abs().sum() == 0


@pytest.mark.parametrize(("every", "fragments"), [(2, 1), (4, 2)])
@pytest.mark.long
def test_an_island_that_dies_and_returns_ends_with_the_weights_of_the_other(tmp_path, every, fragments):
    """The other island continues; the relaunched one takes its state, and both end at the same step."""
    saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": 40, "logging_steps": 1}

    def train(island, rendezvous):
        folder = tmp_path / str(island)
        flags = {"islands": 2, "island_rank": island, "rendezvous": rendezvous, "deadline_s": 60.0}
        flags |= {"every_steps": every, "fragments": fragments}
        if island == 1 and os.fork() == 0:
            trained(
                folder,
                SpotCheckpointCallback(cloud=None, asynchronous=False),
                DiLoCoCallback(**flags),
                KilledAt(5),
                **saving,
            )
        if island == 1:
            os.wait()
            receive = IslandClient._next
            IslandClient._next = lambda client: ((tmp_path / "returns").touch(), receive(client))[1]
            resumed = {"resume_from_checkpoint": str(folder / "checkpoint-4")}
            trained(
                folder,
                SpotCheckpointCallback(cloud=None, asynchronous=False),
                DiLoCoCallback(**flags),
                train_dataset=NotesReads(folder / "read"),
                **saving,
                **resumed,
            )
        else:
            waits = WaitsFor(9, tmp_path / "returns")
            trained(
                folder,
                SpotCheckpointCallback(cloud=None, asynchronous=False),
                DiLoCoCallback(**flags),
                waits,
                **saving,
            )

    codes, logs = run_islands(tmp_path, train)
    assert codes == [0, 0], "\n".join(logs)
    assert largest_difference(parameters_of(tmp_path / "0"), parameters_of(tmp_path / "1")) == 0.0
    log = json.loads((tmp_path / "0" / "log.json").read_text())
    assert {row["islands/contributors"] for row in log if "islands/contributors" in row} == {1, 2}
    step = int(re.search(r"has taken the parameters of another one, of step (\d+)", logs[1])[1])
    samples = 2 * step  # its data continue there, and not at the checkpoint
    assert int((tmp_path / "1" / "read").read_text().split()[0]) == 2 * (samples % 32) + (1 + samples // 32) % 2


class NotesReads(RandomTokens):
    """Writes the numbers of the samples that are read."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def __getitem__(self, index):
        with self.path.open("a") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)


def test_a_rendezvous_that_is_killed_is_started_again_and_the_islands_end_equal(tmp_path):
    """Each island trains alone for a round; island 0 starts the rendezvous again, and both join it."""

    def train(island, rendezvous):
        flags = {"islands": 2, "island_rank": island, "rendezvous": rendezvous, "every_steps": 2, "deadline_s": 60.0}
        if island == 0:
            start = client_module.start_rendezvous
            client_module.start_rendezvous = lambda address: (start(address), killer.is_back())
            killer = KillsRendezvous(5, tmp_path / "back")
            others = [WaitsFor(5, tmp_path / "both have round 4"), killer]
        else:
            others = [Touches(4, tmp_path / "both have round 4"), WaitsFor(7, tmp_path / "back")]
        trained(tmp_path / str(island), DiLoCoCallback(**flags), *others, max_steps=12, logging_steps=1)

    codes, logs = run_islands(tmp_path, train)
    assert codes == [0, 0], "\n".join(logs)
    assert largest_difference(parameters_of(tmp_path / "0"), parameters_of(tmp_path / "1")) == 0.0
    log = json.loads((tmp_path / "0" / "log.json").read_text())
    contributors = [row["islands/contributors"] for row in log if "islands/contributors" in row]
    assert contributors == [2.0] * 5, contributors
    assert all("round 6: the connection is lost; this island trains alone" in text for text in logs), logs


class KillsRendezvous(TrainerCallback):
    """Kills the rendezvous that this process has started, and tells when it has started another one."""

    def __init__(self, step, flag):
        self.step = step
        self.flag = flag
        self.has_killed = False

    def on_step_begin(self, args, state, control, **kwargs):
        """Kill it once."""
        if state.global_step == self.step and not self.has_killed:
            [rendezvous] = [
                child for child in psutil.Process().children() if "rendezvous" in " ".join(child.cmdline())
            ]
            rendezvous.kill()
            rendezvous.wait(60)
            self.has_killed = True

    def is_back(self):
        """Write the file if it was killed before."""
        if self.has_killed:
            self.flag.touch()


class Touches(TrainerCallback):
    """Writes a file when a step begins, for `WaitsFor`."""

    def __init__(self, step, flag):
        self.step = step
        self.flag = flag

    def on_step_begin(self, args, state, control, **kwargs):
        """Write it."""
        if state.global_step == self.step:
            self.flag.touch()


class WaitsFor(TrainerCallback):
    """Keeps an island in a step until another one has reached the rendezvous."""

    def __init__(self, step, flag):
        self.step = step
        self.flag = flag

    def on_step_begin(self, args, state, control, **kwargs):
        """Wait for the file that the other island writes."""
        while state.global_step == self.step and not self.flag.exists():
            time.sleep(0.05)


def test_islands_at_different_steps_meet_at_the_later_one(tmp_path):
    """After a round of a fragment, and after the last round, all islands are at the same step."""

    def train(island, rendezvous):
        flags = {"islands": 2, "island_rank": island, "rendezvous": rendezvous, "deadline_s": 60.0}
        callback = DiLoCoCallback(**flags, every_steps=4, fragments=2, compression=Compression(bits=8))
        others = [Skips({1: 3, 5: 7})] if island == 1 else []
        trained(tmp_path / str(island), callback, *others, max_steps=8, logging_steps=1)

    codes, logs = run_islands(tmp_path, train)
    assert codes == [0, 0], "\n".join(logs)
    assert largest_difference(parameters_of(tmp_path / "0"), parameters_of(tmp_path / "1")) == 0.0
    log = json.loads((tmp_path / "0" / "log.json").read_text())
    assert [(row["step"], row["islands/contributors"]) for row in log if "islands/contributors" in row] == [
        (4, 2.0),
        (8, 2.0),
    ]


class Skips(TrainerCallback):
    """Has an island be ahead, as if it had trained alone for longer."""

    def __init__(self, steps):
        self.steps = steps

    def on_step_begin(self, args, state, control, **kwargs):
        """Change the number of the step."""
        state.global_step = self.steps.get(state.global_step, state.global_step)


@pytest.mark.parametrize(("bits", "fragments"), [(32, 1), (4, 2)])
@pytest.mark.long
def test_islands_resume_with_their_outer_state(tmp_path, bits, fragments):
    """Two runs of six steps and one of twelve end with equal weights, also where error feedback is carried over.

    With another number of fragments the outer optimizer starts from scratch.
    """

    def run(name, *, fragments=fragments, **flags):
        def train(island, rendezvous):
            folder = tmp_path / str(island)
            checkpoint = folder / "uninterrupted" / "checkpoint-6"
            if name != "uninterrupted":
                assert (checkpoint / "islands_outer_0.safetensors").is_file()
                verify(checkpoint)
                flags["resume_from_checkpoint"] = str(checkpoint)
            outer = {"every_steps": 4, "fragments": fragments, "compression": Compression(bits=bits)}
            diloco = DiLoCoCallback(islands=2, island_rank=island, rendezvous=rendezvous, **outer)
            spot = SpotCheckpointCallback(cloud=None, asynchronous=False)
            trained(folder / name, spot, diloco, save_strategy="steps", save_steps=6, **flags)

        (tmp_path / name).mkdir()
        codes, logs = run_islands(tmp_path / name, train)  # its end is waited for: no island is still in this run
        assert codes == [0, 0], "\n".join(logs)
        return logs

    run("uninterrupted", max_steps=12)
    run("resumed", max_steps=12)
    logs = run("other", fragments=3 - fragments, max_steps=9)
    for island in range(2):
        expected = parameters_of(tmp_path / str(island) / "uninterrupted")
        assert largest_difference(parameters_of(tmp_path / str(island) / "resumed"), expected) == 0.0
    assert largest_difference(*[parameters_of(tmp_path / str(island) / "other") for island in range(2)]) == 0.0
    reason = f"the outer optimizer starts anew: the number of fragments was {fragments} and is {3 - fragments}"
    assert all(reason in text for text in logs), logs


def test_a_run_of_two_islands_continues_with_three(tmp_path):
    """The outer state is kept, and an island without a checkpoint takes it."""
    saving = {"save_strategy": "steps", "save_steps": 4}

    def train(island, rendezvous):
        folder = tmp_path / str(island)
        spot = SpotCheckpointCallback(cloud=None, asynchronous=False)
        flags = {"island_rank": island, "rendezvous": rendezvous, "every_steps": 2}
        checkpoint = folder / "checkpoint-4"
        if checkpoint.is_dir():
            trained(folder, spot, DiLoCoCallback(islands=3, **flags), resume_from_checkpoint=str(checkpoint), **saving)
        else:
            trained(folder, spot, DiLoCoCallback(islands=count, **flags), max_steps=steps, **saving)

    count, steps = 2, 4
    codes, logs = run_islands(tmp_path, train)
    assert codes == [0, 0], "\n".join(logs)
    count, steps = 3, 6
    codes, logs = run_islands(tmp_path, train, islands=3)
    assert codes == [0] * 3, logs
    weights = [parameters_of(tmp_path / str(island)) for island in range(3)]
    assert all(largest_difference(weights[0], other) == 0.0 for other in weights[1:])
    assert all("the checkpoint is of 2 islands, and now there are 3" in text for text in logs[:2]), logs
    assert "16 samples of this epoch were trained" in logs[0]
    assert re.search("has taken the parameters of another one, of step [46]", logs[2]), logs  # 6: it began late


def test_islands_of_different_models_are_told_in_one_line_each(tmp_path):
    def train(island, rendezvous):
        model = tiny_model(num_hidden_layers=1 + island)
        callback = DiLoCoCallback(islands=2, island_rank=island, rendezvous=rendezvous)
        with pytest.raises(UsageError, match=r"differs from the others in: model .*use the same model") as raised:
            tiny_trainer(tmp_path / str(island), callback, model=model).train()
        assert "\n" not in str(raised.value)

    codes, logs = run_islands(tmp_path, train)
    assert codes == [0, 0], "\n".join(logs)


def test_islands_that_do_not_train_the_same_weights_are_refused(tmp_path):
    """Of adapters only the trained weights are exchanged: those of the base model must be the same already."""

    def train(island, rendezvous):
        model = tiny_model()
        frozen = model.get_input_embeddings().requires_grad_(False)
        frozen.weight.data[0, 0] += 0.5 * island
        callback = DiLoCoCallback(islands=2, island_rank=island, rendezvous=rendezvous)
        with pytest.raises(UsageError, match=r"differs from the others in: weights that are not trained"):
            tiny_trainer(tmp_path / str(island), callback, model=model).train()

    codes, logs = run_islands(tmp_path, train)
    assert codes == [0, 0], "\n".join(logs)


def test_more_fragments_than_layers_are_refused(tmp_path):
    callback = DiLoCoCallback(islands=2, rendezvous="127.0.0.1:29600", fragments=3)
    with pytest.raises(UsageError, match=r"^fragments is 3: .* 2 layers"):
        tiny_trainer(tmp_path, callback).train()
