"""What a step moves besides gradients is put back after a replay, and what cannot be put back is refused by name."""

import functools
import os
import random
import socket
from collections import Counter, UserDict, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from recipe_runs import environment_of
from torch import nn
from transformers import Trainer, TrainingArguments

from hfscale import CommHealthCallback, ScalingCallback
from hfscale.core.replaying import is_replaying
from hfscale.core.run_memory import FOLDER_VARIABLE, RunMemory
from hfscale.errors import HealthError, UsageError
from hfscale.replays.kept_state import KeptState

SAMPLES = [
    {"x": 3 * torch.randn(8, generator=torch.Generator().manual_seed(number)) + 1, "labels": float(number % 3)}
    for number in range(32)
]


class Model(nn.Module):
    """A linear model that changes its inputs by what it has kept of earlier forward passes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.out = nn.Linear(8, 8), nn.Linear(8, 1)
        self.prepare()

    def prepare(self):
        """Make what the model keeps."""

    def changed(self, x):
        """Return the inputs that are used."""
        return x

    def forward(self, x, labels):
        if self.training:
            x = self.changed(x)
        return {"loss": (self.out(torch.tanh(self.hidden(x)))[:, 0] - labels).pow(2).mean()}


class ReplacesBuffers(Model):
    def prepare(self):
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def changed(self, x):
        self.mean, self.seen = 0.9 * self.mean + 0.1 * x.mean(0), self.seen + 1
        return x - self.mean + self.seen


class MakesBuffers(Model):
    def changed(self, x):
        if "calls" not in self._buffers:
            self.register_buffer("calls", torch.zeros(()))
        self.calls += 1
        return x + self.calls


class Counts(Model):
    def prepare(self):
        self.calls, self.seen, self.kinds, self.last = 0, [], defaultdict(int), deque(maxlen=2)
        self.cache = SimpleNamespace(total=0.0, rows=np.zeros(8))

    def changed(self, x):
        self.calls += 1
        self.seen.append(x.mean().item())
        self.kinds["train"] += 1
        self.last.append(self.calls)
        self.cache.total += 1.0
        self.cache.rows += 1
        extra = self.calls + len(self.seen) + self.kinds["train"] + sum(self.last)
        return x + 0.1 * (extra + self.cache.total + self.cache.rows[0])


class Draws(Model):
    def prepare(self):
        self.noise = torch.Generator().manual_seed(5)
        self.of_numpy, self.of_python = np.random.default_rng(5), random.Random(5)

    def changed(self, x):
        drawn = torch.rand(1, generator=self.noise) + self.of_numpy.random() + self.of_python.random()
        return x + drawn.float()


class KeepsTensors(Model):
    def prepare(self):
        self.queue = torch.zeros(4, 8)
        self.shown = {"at": [torch.zeros(8).expand(4, 8)]}

    def changed(self, x):
        self.queue.data = torch.cat([x.detach(), self.queue])[:4]
        self.shown["at"][0][0].add_(1)
        return x + self.queue.mean() + self.shown["at"][0][1]


class ChangesBatch(Model):
    def changed(self, x):
        return x.add_(torch.randn_like(x))


class ClosesOver(Model):
    def prepare(self):
        calls = 0

        def count():
            nonlocal calls
            calls += 1
            return calls

        self.count = functools.partial(count)

    def changed(self, x):
        return x + self.count()


def train(folder, model, every, kind=Trainer, **options):
    """Return the losses of six steps, and the Trainer."""
    given = {"max_steps": 6, "per_device_train_batch_size": 4, "logging_steps": 1} | options
    args = TrainingArguments(
        str(folder), use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, **given
    )
    health = CommHealthCallback(replay_every_steps=every, preflight=False, hang_after_s=None)
    trainer = kind(model, args, train_dataset=SAMPLES, callbacks=[ScalingCallback(comm_health=health)])
    trainer.train()
    logs = trainer.state.log_history
    found = [log["health/replay_mismatches"] for log in logs if "health/replay_mismatches" in log]
    assert not any(found), found
    return [log["loss"] for log in logs if "loss" in log], trainer


KINDS = [ReplacesBuffers, MakesBuffers, Counts, Draws, KeepsTensors, ChangesBatch, ClosesOver]


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_leaves_the_state_of_the_model_as_it_was(tmp_path, kind):
    plain, _ = train(tmp_path, kind(), None)
    for every in (1, 2):
        replayed, _ = train(tmp_path, kind(), every)
        assert replayed == plain, every


class TakesPart(Trainer):
    """Takes entries out of the batch, changes its tensors in place, and counts what it has seen."""

    def compute_loss(self, model, inputs, **kwargs):
        kept = vars(self).setdefault("of_mine", {"calls": 0, "sums": defaultdict(list), "mean": torch.zeros(())})
        kept["calls"] += 1
        kept["sums"]["x"].append(inputs["x"].mean().item())
        kept["mean"].mul_(0.9).add_(0.1 * inputs["x"].mean())
        inputs["x"].mul_(0.5).add_(kept["mean"] + 0.1 * kept["calls"] + 0.1 * len(kept["sums"]["x"]))
        labels = inputs.pop("labels").mul_(0.5)
        self.log({"mine": float(kept["calls"])})
        return super().compute_loss(model, {**inputs, "labels": labels}, **kwargs)


def test_a_replay_leaves_batch_and_trainer_as_they_were(tmp_path):
    plain, first = train(tmp_path, Model(), None, TakesPart)
    replayed, second = train(tmp_path, Model(), 2, TakesPart)
    assert replayed == plain
    assert second.of_mine["calls"] == first.of_mine["calls"] == 6
    of_trainers = [[log["mine"] for log in one.state.log_history if "mine" in log] for one in (first, second)]
    assert of_trainers[0] == of_trainers[1]


class WithHead(Trainer):
    """Trains a further module in its loss, which the model does not have."""

    def compute_loss(self, model, inputs, **kwargs):
        return super().compute_loss(model, inputs, **kwargs) + self.head(inputs["x"]).pow(2).mean()


def test_gradients_outside_of_the_model_are_not_added_twice(tmp_path):
    def gradient(every):
        torch.manual_seed(3)
        WithHead.head = None
        head = nn.Linear(8, 1)
        made = functools.partial(_with_head, head)
        train(tmp_path, Model(), every, made)
        return head.weight.grad

    assert torch.equal(gradient(None), gradient(1))  # also that of the first step, before which it was None


def _with_head(head, *args, **kwargs):
    trainer = WithHead(*args, **kwargs)
    trainer.head = head
    return trainer


class OwnStep(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


class OwnInputs(Trainer):
    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(inputs)


class ReadsFurtherData(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.unlabelled = iter(SAMPLES)


class TeachesItself(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = Model().requires_grad_(False)

    def compute_loss(self, model, inputs, **kwargs):
        for own, trained in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            own.data.mul_(0.9).add_(0.1 * trained.data)
        return super().compute_loss(model, inputs, **kwargs)


class ReadsInModel(Model):
    def prepare(self):
        self.numbers = (number for number in range(100))


class WritesWeights(Model):
    def changed(self, x):
        self.hidden.weight.data.mul_(1.01)
        return x


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (OwnStep, r"OwnStep\.training_step"),
        (type("Derived", (OwnInputs,), {}), r"OwnInputs\._prepare_inputs"),
        (ReadsFurtherData, r"trainer\.unlabelled is of the type list_iterator"),
        (TeachesItself, r"changes the parameter trainer\.teacher\."),
    ],
)
def test_a_trainer_that_cannot_be_replayed_is_refused_by_name(tmp_path, kind, named):
    with pytest.raises(UsageError, match=rf"replay_every_steps is 2: .*{named}"):
        train(tmp_path, Model(), 2, kind)


def test_a_step_replaced_on_the_instance_is_refused(tmp_path):
    def made(*args, **kwargs):
        trainer = Trainer(*args, **kwargs)
        trainer.training_step = lambda model, inputs, *rest: Trainer.training_step(trainer, model, inputs, *rest)
        return trainer

    with pytest.raises(UsageError, match=r"Trainer\.training_step, which was replaced on the instance"):
        train(tmp_path, Model(), 2, made)


@pytest.mark.parametrize(
    ("model", "named"),
    [(ReadsInModel, r"model\.numbers is of the type generator"), (WritesWeights, r"model\.hidden\.weight")],
)
def test_a_model_that_cannot_be_replayed_is_refused_by_name(tmp_path, model, named):
    with pytest.raises(UsageError, match=rf"replay_every_steps is 2: .*{named}"):
        train(tmp_path, model(), 2)


def test_an_optimizer_that_updates_in_the_backward_pass_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("hfscale.replays.replayable.requested_optimizer", lambda args: "lomo")
    with pytest.raises(UsageError, match="optim=lomo"):
        train(tmp_path, Model(), 2)


def test_objects_stay_the_same_and_get_their_contents_back():
    shared = torch.arange(4.0)
    leaf = torch.ones(2, requires_grad=True)
    batch = UserDict(x=shared, rows=[{"y": (shared[:2], torch.zeros(2, dtype=torch.complex64))}])
    held = SimpleNamespace(counts=Counter("ab"), names={"a"}, raw=bytearray(b"ab"), leaf=leaf, batch=batch)
    kept = KeptState({"held": held})
    for _ in range(2):
        (leaf * 2).sum().backward()
        batch["rows"][0]["y"][0].add_(1)
        batch.pop("x").resize_(2)
        batch["rows"].clear()
        held.counts.update("ccc")
        held.names.clear()
        held.raw.extend(b"c")
        held.new = 1
        kept.put_back()
        assert vars(held).keys() == {"counts", "names", "raw", "leaf", "batch"}
        assert (held.counts, held.names, held.raw, leaf.grad) == (Counter("ab"), {"a"}, bytearray(b"ab"), None)
        assert held.batch is batch
        assert batch["x"] is shared
        assert batch["x"].tolist() == [0, 1, 2, 3]
        assert len(batch["rows"]) == 1


class RunningMean(Model):
    def prepare(self):
        self.register_buffer("mean", torch.zeros(8))

    def changed(self, x):
        x = x - self.mean
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x


def train_on_two_ranks(folder):
    """Compare trainings with and without replays in this process, which is a rank."""
    torch.set_num_threads(1)
    plain, _ = train(folder, RunningMean(), None)
    for every in (1, 2):
        replayed, trainer = train(folder, RunningMean(), every)
        assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
        assert replayed == plain, every


def test_a_replay_broadcasts_buffers_as_the_step_does(tmp_path):
    codes = run_ranks(2, train_on_two_ranks, tmp_path / "out", log=tmp_path / "log", env=environment_of("ddp"))
    assert codes == [0, 0], "\n".join(path.read_text()[-3000:] for path in sorted((tmp_path / "log").iterdir()))


class ComputesWrongly(Model):
    """Computes a wrong number on rank 1, once, in step 4."""

    def prepare(self):
        self.calls = 0

    def changed(self, x):
        if is_replaying():
            return x
        self.calls += 1
        return x + float(self.calls == 4 and os.environ["RANK"] == "1")


def train_with_one_supervisor(folder):
    """Train in this process, which is a rank; only rank 0 has a supervisor."""
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        if os.environ["RANK"] == "0":
            folder.mkdir()
            memory = RunMemory.create(folder)
            os.environ[FOLDER_VARIABLE] = str(memory.folder)
            listener.bind(str(memory.socket))
            listener.listen()
        with pytest.raises(HealthError, match="step 4 gave two different results"):
            train(folder, ComputesWrongly(), 2)


def test_a_supervisor_of_one_rank_ends_the_run_on_all(tmp_path):
    options = {"log": tmp_path / "log", "env": environment_of("ddp"), "ends_all": False}
    codes = run_ranks(2, train_with_one_supervisor, tmp_path / "out", **options)
    assert codes == [0, 0], "\n".join(path.read_text()[-3000:] for path in sorted((tmp_path / "log").iterdir()))
