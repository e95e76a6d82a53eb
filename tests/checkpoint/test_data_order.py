"""A resumed run trains on the samples and the random numbers of an uninterrupted one, in any step of any epoch."""

import hashlib
import json
import os
import random

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from forked_ranks import run_ranks
from tiny import LENGTH, VOCAB, RandomTokens, StopAt, tiny_arguments, tiny_model, tiny_trainer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from transformers import Trainer, TrainerCallback, default_data_collator

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint.data_order.owners import DataState
from hfscale.checkpoint.random_states import (
    generator_state,
    plain,
    set_generator_state,
    set_global_states,
)
from hfscale.errors import UsageError
from hfscale.trainer.adapter import TrainerAdapter

ROWS, BATCH = 24, 4
EPOCH = ROWS // BATCH
STEPS = 3 * EPOCH
CRASHES = [2, EPOCH, EPOCH + 3, 2 * EPOCH + 1]
OWN = np.random.default_rng(5)


class OwnGenerator(Sampler):
    """Draws each pass from a generator that is seeded when it is made, as TRL's RepeatSampler does."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(torch.randperm(ROWS, generator=self.generator).tolist())


class CountsPasses(Sampler):
    """Orders the rows by the number of the pass, which it counts itself."""

    def __init__(self):
        self.passes = 0

    def __len__(self):
        return ROWS

    def __iter__(self):
        self.passes += 1
        return iter(torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.passes)).tolist())


class ShufflesInPlace(Sampler):
    """Shuffles an order that it keeps, so that each pass depends on the one before."""

    def __init__(self):
        self.order = list(range(ROWS))

    def __len__(self):
        return ROWS

    def __iter__(self):
        random.shuffle(self.order)
        return iter(list(self.order))


class Curriculum(Sampler):
    """Draws each pass from NumPy's global generator."""

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(np.random.permutation(ROWS).tolist())


class DrawsFromTheSystem(Sampler):
    """Has another order in each launch."""

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(random.SystemRandom().sample(range(ROWS), ROWS))


class Augmented(Dataset):
    """Changes a token of each row at random when the row is read."""

    rows = RandomTokens(ROWS)

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        row = {name: value.clone() for name, value in self.rows[index].items()}
        row["input_ids"][random.randrange(LENGTH)] = 3 + int(OWN.integers(VOCAB - 3))
        return row


class RandomStream(IterableDataset):
    """Reads each pass in an order that it draws from torch's global generator; the last batch is not full."""

    rows = RandomTokens(ROWS + 2)

    def __iter__(self):
        return (self.rows[index] for index in torch.randperm(ROWS + 2).tolist())


class EpochStream(IterableDataset):
    """Reads each pass in the order of its number, as sharded readers of files do, and counts its samples."""

    rows = RandomTokens(ROWS)

    def __init__(self):
        self.epoch = 0
        self.samples = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for index in torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch)).tolist():
            self.samples += 1
            yield self.rows[(index + self.samples) % ROWS]


class OwnStream(IterableDataset):
    """Has a length, and draws from a generator of its own."""

    rows = RandomTokens(ROWS)

    def __init__(self):
        self.generator = random.Random(9)

    def __len__(self):
        return ROWS

    def __iter__(self):
        return (self.rows[self.generator.randrange(ROWS)] for _ in range(ROWS))


class SystemStream(IterableDataset):
    """Has another order in each launch."""

    rows = RandomTokens(ROWS)

    def __iter__(self):
        return (self.rows[index] for index in random.SystemRandom().sample(range(ROWS), ROWS))


class Masks:
    """A collator that masks at random, from a global generator or one of its own."""

    def __init__(self, kind):
        self.kind = kind
        self.own = np.random.RandomState(4)

    def __call__(self, rows):
        batch = default_data_collator(rows)
        shape = batch["input_ids"].shape
        draw = {"torch": torch.rand, "numpy": np.random.rand, "own": self.own.rand}[self.kind]
        batch["labels"] = batch["labels"].masked_fill(torch.as_tensor(draw(*shape)) < 0.3, -100)
        return batch


class Sampled(Trainer):
    """A Trainer with a sampler of the user."""

    def _get_train_sampler(self, train_dataset=None):
        return self.make_sampler()


class PacksByEpoch(BatchSampler):
    """Orders the batches of a pass once, also for their number, until `set_epoch` names another, as axolotl's does."""

    def __init__(self):
        super().__init__(SequentialSampler(range(ROWS)), BATCH, drop_last=True)
        self.epoch, self.batches = 0, None
        len(self)

    def set_epoch(self, epoch):
        self.epoch, self.batches = epoch, None

    def packed(self):
        if self.batches is None:
            order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch)).tolist()
            self.batches = [order[first : first + BATCH] for first in range(0, ROWS, BATCH)]
        return self.batches

    def __len__(self):
        return len(self.packed())

    def __iter__(self):
        return iter(self.packed())


class Packed(Trainer):
    """A Trainer with a batch sampler of the user."""

    def get_train_dataloader(self):
        loader = DataLoader(self.train_dataset, batch_sampler=PacksByEpoch(), collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, ROWS + 1), ROWS),
    "own generator": OwnGenerator,
    "counts its passes": CountsPasses,
    "shuffles in place": ShufflesInPlace,
    "numpy": Curriculum,
}


class Rows(TrainerCallback):
    """The rows of each step, by their tokens."""

    def __init__(self):
        self.of_step, self._now = {}, []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module, args, kwargs):
        if module.training:
            self._now.append(kwargs["input_ids"].tolist())

    def on_step_end(self, args, state, control, **kwargs):
        self.of_step[state.global_step], self._now = self._now, []


def train(folder, *callbacks, sampler=None, collator=None, data=None, accumulation=1, steps=STEPS, resume=None):
    """Train with dropout, so that the training itself draws from torch's global generator between two batches."""
    OWN.bit_generator.state = np.random.default_rng(5).bit_generator.state
    random.seed(0)
    np.random.seed(0)
    args = tiny_arguments(
        folder,
        max_steps=steps // accumulation,
        gradient_accumulation_steps=accumulation,
        save_strategy="steps",
        save_steps=1000,
        train_sampling_strategy="group_by_length" if sampler == "group_by_length" else "random",
    )
    if isinstance(collator, str):
        collator = Masks(collator)
    kind = Sampled if sampler in SAMPLERS or isinstance(sampler, type) else Trainer
    kind = Packed if sampler == "batches by epoch" else kind
    model = tiny_model(attention_dropout=0.1)
    rows = Rows()
    trainer = kind(
        model=model,
        args=args,
        train_dataset=data() if data else RandomTokens(ROWS),
        data_collator=collator or default_data_collator,
        callbacks=[*callbacks, rows],
    )
    trainer.make_sampler = SAMPLERS.get(sampler, sampler)
    trainer.train(resume_from_checkpoint=resume)
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return rows.of_step, {step: losses[step] for step in rows.of_step}


def check_equal(tmp_path, stops, **program):
    """Compare an uninterrupted run of plain Trainer with one that is stopped and resumed several times."""
    rows, losses = train(tmp_path / "plain", **program)
    seen, logs = {}, {}
    for stop in [*stops, None]:
        resume = latest_checkpoint(tmp_path / "run")
        ends = [StopAt(stop)] if stop else []
        of_step, of_log = train(tmp_path / "run", SpotCheckpointCallback(), *ends, resume=resume, **program)
        seen |= of_step
        logs |= of_log
    assert seen == rows
    assert logs == losses


@pytest.mark.parametrize("sampler", [*SAMPLERS, "group_by_length", "batches by epoch"])
def test_a_sampler_repeats_its_order(tmp_path, sampler):
    check_equal(tmp_path, CRASHES, sampler=sampler)


@pytest.mark.parametrize("kind", ["torch", "numpy", "own"])
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_collator_draws_the_same_masks(tmp_path, kind, accumulation):
    stops = [stop // accumulation for stop in (2, EPOCH + 4)]
    check_equal(tmp_path, stops, collator=kind, accumulation=accumulation)


def test_augmentations_are_the_same(tmp_path):
    check_equal(tmp_path, [1, EPOCH + 2], data=Augmented, sampler="own generator")


@pytest.mark.parametrize(
    ("stream", "accumulation"),
    [(RandomStream, 1), (RandomStream, 2), (EpochStream, 1), (OwnStream, 1)],
)
def test_a_stream_of_a_user_repeats_its_order(tmp_path, stream, accumulation):
    stops = [stop // accumulation for stop in (*CRASHES, 2 * EPOCH + 2)]
    check_equal(tmp_path, stops, data=stream, accumulation=accumulation)


class Mixture(BatchSampler):
    """Takes batches of its parts in turns, as the mixtures of sentence-transformers do."""

    def __init__(self):
        self.batch_size, self.drop_last = BATCH, False
        self.batch_samplers = [BatchSampler(CountsPasses(), BATCH, drop_last=False) for _ in range(2)]

    def __len__(self):
        return 2 * ROWS // BATCH

    def __iter__(self):
        for parts in zip(*self.batch_samplers, strict=True):
            yield from parts


@pytest.mark.parametrize("kind", [Mixture, PacksByEpoch])
def test_a_batch_sampler_in_another_launch_of_several_processes_has_the_order_of_the_pass(kind):
    """Trainer tells a sampler the epoch; not where Accelerate leaves out batches of one that it divides by ranks."""
    first, second = kind(), kind()
    states = [DataState(BatchSamplerShard(each, num_processes=2, process_index=1)) for each in (first, second)]
    list(first)
    if kind is PacksByEpoch:
        first.set_epoch(1)
    counters = states[0].counters()
    assert list(first) != list(second)
    states[1].set_counters(counters)
    states[0].set_counters(counters)
    assert list(first) == list(second)


class SavesBeforeItReads(TrainerCallback):
    """Saves the step again from which the training resumes, as an evaluation that is made up may, and stops."""

    def on_epoch_begin(self, args, state, control, **kwargs):
        adapter = TrainerAdapter.current()
        adapter.checkpoints.load_rng_state(adapter.resumes_from)
        trainer = adapter.trainer
        trainer._save_checkpoint(trainer.model, None)
        raise InterruptedError


def test_a_checkpoint_that_is_saved_again_before_a_batch_is_read_resumes(tmp_path):
    plain, _ = train(tmp_path / "plain", sampler="numpy")
    train(tmp_path / "run", SpotCheckpointCallback(), StopAt(9), sampler="numpy")
    resume = latest_checkpoint(tmp_path / "run")
    with pytest.raises(InterruptedError):
        train(tmp_path / "run", SpotCheckpointCallback(), SavesBeforeItReads(), sampler="numpy", resume=resume)
    resume = latest_checkpoint(tmp_path / "run")
    rows, _ = train(tmp_path / "run", SpotCheckpointCallback(), sampler="numpy", resume=resume)
    assert rows == {step: plain[step] for step in range(10, STEPS + 1)}


@pytest.mark.parametrize("data", [RandomStream, None], ids=["stream", "inside an epoch"])
def test_a_complete_run_takes_no_further_step(tmp_path, data):
    # Plain Trainer takes one more.
    train(tmp_path, SpotCheckpointCallback(), StopAt(8), data=data)
    folder = latest_checkpoint(tmp_path)
    of_step, _ = train(tmp_path, SpotCheckpointCallback(), data=data, steps=8, resume=folder)
    assert of_step == {}


def test_a_stream_that_cannot_repeat_its_order_is_named(tmp_path, caplog):
    train(tmp_path, SpotCheckpointCallback(), StopAt(3), data=SystemStream)
    train(tmp_path, SpotCheckpointCallback(), StopAt(4), data=SystemStream, resume=latest_checkpoint(tmp_path))
    assert any("SystemStream does not repeat the order of the samples" in line for line in caplog.messages)


def test_a_sampler_that_cannot_repeat_its_order_is_named(tmp_path, caplog):
    train(tmp_path, SpotCheckpointCallback(), StopAt(2), sampler=DrawsFromTheSystem)
    assert "does not repeat" not in caplog.text
    train(
        tmp_path, SpotCheckpointCallback(), StopAt(3), sampler=DrawsFromTheSystem, resume=latest_checkpoint(tmp_path)
    )
    assert "DrawsFromTheSystem does not repeat the order of the samples" in caplog.text


@pytest.mark.parametrize("damage", ["[1]", "state"])
def test_a_checkpoint_with_a_broken_file_is_refused(tmp_path, damage):
    train(tmp_path, SpotCheckpointCallback(), StopAt(2))
    file = tmp_path / "checkpoint-2" / "data_order_0.json"
    if damage == "state":
        saved = json.loads(file.read_text())
        saved["begin"]["random"]["torch"]["tensor"] = "00"
        damage = json.dumps(saved)
    file.write_text(damage)
    (tmp_path / "checkpoint-2" / "hfscale_manifest.json").unlink()
    with pytest.raises(Exception, match=r"data_order_0\.json cannot be read"):
        train(tmp_path, SpotCheckpointCallback(), resume=str(tmp_path / "checkpoint-2"))


def test_states_of_earlier_versions_are_read():
    """As they are in the position in a stream: torch's and NumPy's as hexadecimal digits, Python's as a list."""
    name, keys, *others = np.random.get_state()
    states = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "numpy": [name, keys.tobytes().hex(), *others],
        "python": json.loads(json.dumps(random.getstate())),
    }
    drawn = torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]
    set_global_states(states)
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]) == drawn


def test_states_are_json_values_and_come_back():
    of_numpy = [np.random.RandomState(2), np.random.default_rng(3), np.random.Generator(np.random.MT19937(4))]
    for generator in [torch.Generator().manual_seed(1), *of_numpy, random.Random(5)]:
        state = json.loads(json.dumps(plain(generator_state(generator))))
        drawn = draw(generator)
        assert draw(generator) != drawn
        set_generator_state(generator, state)
        assert draw(generator) == drawn


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    return [generator.random() for _ in range(3)] if hasattr(generator, "random") else generator.rand(3).tolist()


class Repeated:
    """Gives each batch of a loader several times, as that of TRL's IW-OPD, which Accelerate does not see."""

    def __init__(self, loader, times):
        self.loader, self.times = loader, times

    def __len__(self):
        return len(self.loader) * self.times

    def __getattr__(self, name):
        return getattr(self.loader, name)


@pytest.mark.parametrize(("times", "trained"), [(1, 2), (2, 2), (2, 0)])
def test_a_loader_in_which_accelerate_cannot_skip_is_refused(monkeypatch, caplog, times, trained):
    """In the middle of an epoch; elsewhere it is said before it matters."""
    from types import SimpleNamespace

    from torch.utils.data import DataLoader

    from hfscale.checkpoint.data_order import skipping

    monkeypatch.setattr(skipping, "micro_batches_of_pass", lambda trainer, steps: trained)
    args = SimpleNamespace(ignore_data_skip=False)
    trainer = SimpleNamespace(args=args, state=SimpleNamespace(global_step=1))
    adapter = SimpleNamespace(trainer=trainer, resumes_from="checkpoint-1")
    loader = Repeated(DataLoader(range(6)), times)
    if times > 1 and trained:
        with pytest.raises(UsageError, match=r"Repeated.*2 batches.*checkpoint-1"):
            skipping.check_can_skip(adapter, loader)
        return
    skipping.check_can_skip(adapter, loader)
    assert ("cannot leave out batches" in caplog.text) == (times > 1)


@pytest.mark.parametrize("data", ["rows", "stream"])
@pytest.mark.parametrize("ignores", [True, False])
def test_data_that_are_not_skipped_are_named(tmp_path, caplog, data, ignores):
    """datasets#7444: a stream whose position a program keeps itself is one batch ahead of what was trained on."""

    def trainer(*callbacks, **arguments):
        made = tiny_trainer(tmp_path, SpotCheckpointCallback(), *callbacks, max_steps=4, save_steps=2, **arguments)
        if data == "stream":
            made.train_dataset = EpochStream()
        return made

    trainer(StopAt(2)).train()
    caplog.clear()
    trainer(ignore_data_skip=ignores).train(resume_from_checkpoint=latest_checkpoint(str(tmp_path)))
    assert ("ignore_data_skip is on: what was read before step 2" in caplog.text) == ignores


def test_whole_passes_are_not_named_where_data_are_not_skipped(tmp_path, caplog):
    arguments = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "epoch"}
    tiny_trainer(tmp_path, SpotCheckpointCallback(), StopAt(16), **arguments).train()
    resume = latest_checkpoint(str(tmp_path))
    tiny_trainer(tmp_path, SpotCheckpointCallback(), ignore_data_skip=True, **arguments).train(
        resume_from_checkpoint=resume
    )
    assert "ignore_data_skip" not in caplog.text


class NotesStates(TrainerCallback):
    """Notes the state of torch's generator when each step begins."""

    def __init__(self):
        self.states = {}

    def on_step_begin(self, args, state, control, **kwargs):
        found = torch.get_rng_state().numpy().tobytes()
        self.states[state.global_step] = hashlib.sha256(found).hexdigest()


def train_on_stream(folder, name, resume):
    torch.set_num_threads(1)
    seen = NotesStates()
    trainer = tiny_trainer(
        folder / name, SpotCheckpointCallback(), seen, model=tiny_model(attention_dropout=0.1), save_strategy="epoch"
    )
    trainer.train_dataset = EpochStream()
    trainer.args.max_steps = 2 * ROWS // (2 * BATCH)
    trainer.train(resume_from_checkpoint=resume)
    (folder / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(seen.states))


@pytest.mark.world(2)
def test_a_rank_that_does_not_read_the_stream_draws_as_before_after_a_pass(tmp_path):
    """Accelerate reads a stream on the first rank and sends the batches: the others do not hear where a pass ends."""
    for name, resume in (("whole", None), ("resumed", str(tmp_path / "whole" / f"checkpoint-{ROWS // (2 * BATCH)}"))):
        codes = run_ranks(2, train_on_stream, tmp_path, name, resume, log=tmp_path / f"log-{name}", timeout_s=100)
        assert codes == [0, 0], [path.read_text()[-2000:] for path in (tmp_path / f"log-{name}").iterdir()]
    for rank in (0, 1):
        whole, resumed = (json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for name in ("whole", "resumed"))
        assert resumed == {step: state for step, state in whole.items() if step in resumed}
        assert len(resumed) == ROWS // (2 * BATCH)
