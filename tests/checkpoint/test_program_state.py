"""What the objects of a program count is restored where it decides what follows, and said where it is not."""

import copy
import dataclasses
import functools
import itertools
import logging
import math
import random
import time
from collections import deque

import numpy as np
import pytest
import torch
from datasets import Dataset as HubDataset
from tiny import RandomTokens, logged, tiny_arguments, tiny_model
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, default_data_collator
from transformers.trainer_callback import ExportableState

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint.program_state import state
from hfscale.checkpoint.program_state.kept_values import KeptValues, check_values
from hfscale.checkpoint.program_state.objects import Search, names_of_libraries
from hfscale.checkpoint.program_state.values import NOTHING, are_equal, from_json, kept, put_back, to_json
from hfscale.errors import CheckpointError

ROWS, BATCH = 24, 4
STEPS = 3 * ROWS // BATCH
CALLS = [0]
CALLED = 0


def masked(batch, drawn, share=0.3):
    batch["input_ids"] = torch.where(torch.as_tensor(drawn) < share, 1, batch["input_ids"])
    return batch


def drawn_by(rows, rng):
    batch = default_data_collator(rows)
    return masked(batch, rng.random(batch["input_ids"].shape))


@dataclasses.dataclass(slots=True)
class Slots:
    rng: random.Random
    calls: int = 0

    def __call__(self, rows):
        batch = default_data_collator(rows)
        self.calls += 1
        return masked(batch, [[self.rng.random() for _ in row] for row in batch["input_ids"]], self.calls / STEPS)


class Counting:
    """Masks more the longer it runs."""

    def __init__(self, words=()):
        self.calls = 0
        self.recent = deque(maxlen=3)
        self.words = words

    def __call__(self, rows):
        self.calls += 1
        self.recent.append(float(self.calls))
        batch = default_data_collator(rows)
        drawn = torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(0))
        return masked(batch, drawn, sum(self.recent) / 60)


class Transformed(Dataset):
    """Passes each row through a module with a generator of its own, and counts the rows."""

    def __init__(self):
        self.rows, self.noise, self.read = RandomTokens(ROWS), Noise(), 0

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        self.read += 1
        row = self.noise(self.rows[index])
        return row | {"input_ids": row["input_ids"].clone().fill_(self.read % 7)} if self.read % 5 == 0 else row


class Noise(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(9)

    def forward(self, row):
        return masked(dict(row), torch.rand(row["input_ids"].shape, generator=self.generator))


class Reordered(Dataset):
    """Another object gives it the order of each pass."""

    def __init__(self):
        self.rows, self.order = RandomTokens(ROWS), np.arange(ROWS)

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return self.rows[int(self.order[index])]


class Annealed(Trainer):
    """Weighs the loss by the number of its calls, and by a mean of the losses before."""

    calls = 0
    mean = None
    past: dict = {}  # noqa: RUF012  as in programs

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.past = {}

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss = super().compute_loss(model, inputs, **kwargs)
        if model.training:
            self.calls += 1
            self.past["last"] = loss.item()
            self.mean = loss.detach() if self.mean is None else 0.9 * self.mean + 0.1 * loss.detach()
        return loss * min(1.0, self.calls / STEPS) / (self.mean + self.past.get("last", 0.0))


class CountedModel(LlamaForCausalLM):
    """Draws noise from a generator of its own, and counts its passes in a plain attribute."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if self.training:
            self.passes = getattr(self, "passes", 0) + 1
            output.loss = output.loss * (self.passes / STEPS + torch.rand((), generator=self.generator))
        return output


def counted_model():
    model = tiny_model()
    model.__class__ = CountedModel
    model.generator = torch.Generator().manual_seed(2)
    return model


def count_globally(outputs, labels, num_items_in_batch=None):
    global CALLED
    CALLED += 1
    CALLS[0] += 1
    return outputs["logits"].float().pow(2).mean() * (CALLED + CALLS[0]) / STEPS


def counting_closure():
    calls = 0

    def loss(outputs, labels, num_items_in_batch=None):
        nonlocal calls
        calls += 1
        return outputs["logits"].float().pow(2).mean() * calls / STEPS

    return loss


class SetsTheModel(TrainerCallback):
    """Sets an attribute of the Trainer from the number of the pass, which it counts."""

    def __init__(self, trainer=None):
        self.passes = 0

    def on_epoch_begin(self, args, state, control, model=None, **kwargs):
        model.scale = getattr(model, "scale", 1.0) * 0.5


class Reorders(TrainerCallback):
    """Draws the order of each pass."""

    def __init__(self, data):
        self.data, self.rng = data, np.random.default_rng(2)

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.data.order = self.rng.permutation(ROWS)


def reordered(folder, *more):
    data = Reordered()
    return program(folder, Reorders(data), *more, data=data)


class Mines(Trainer):
    """Draws the rows of the next pass by their losses; the weights of sampler and dataset are the same numbers."""

    def _get_train_sampler(self, *args):
        return WeightedRandomSampler(self.train_dataset.weights, ROWS)

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.train_dataset.weights[int(inputs["input_ids"].sum()) % ROWS] += 5 * loss.item()
        return loss


class Weighted(Dataset):
    def __init__(self):
        self.rows, self.weights = RandomTokens(ROWS), np.ones(ROWS)

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return self.rows[index]


def hooked_model():
    model, passes = tiny_model(), [0]

    def grows(module, inputs, output):
        passes[0] += module.training
        return output * (1 + passes[0] / STEPS)

    model.model.layers[0].mlp.register_forward_hook(grows)
    return model


def hooked_gradients():
    model, steps = tiny_model(), {"done": 0}

    def grows(gradient):
        steps["done"] += 1
        return gradient * (1 + steps["done"])

    model.lm_head.weight.register_hook(grows)
    return model


class Drifts(torch.nn.Module):
    """Follows a mean in a buffer that its `state_dict` leaves out."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("mean", torch.zeros(1), persistent=False)

    def forward(self, hidden):
        if self.training:
            self.mean.lerp_(hidden.detach().abs().mean().view(1), 0.1)
        return self.inner(hidden) * (1 + self.mean)


def drifting_model():
    model = tiny_model()
    model.model.layers[0].mlp = Drifts(model.model.layers[0].mlp)
    return model


class Rehearses(Trainer):
    """Trains on inputs of earlier steps too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.past = []

    def training_step(self, model, inputs, *args, **kwargs):
        now = {name: value.clone() for name, value in inputs.items()}
        if len(self.past) == 2:
            inputs = {name: torch.cat([value, self.past[0][name]]) for name, value in inputs.items()}
        self.past = [*self.past, now][-2:]
        return super().training_step(model, inputs, *args, **kwargs)


class Teaches(Trainer):
    """Follows the model with a second one, steps a multiplier with an optimizer of its own, and fills a queue."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher, self.frozen = copy.deepcopy(self.model), copy.deepcopy(self.model)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.optimizer_of_scale = torch.optim.Adam([self.scale])
        self.queue = torch.zeros(5000)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        for mine, other in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(other.data, alpha=0.1)
        (self.scale * loss.detach()).backward()
        self.optimizer_of_scale.step()
        self.queue[: self.state.global_step + 1] = 1.0
        return loss


class Scaled(LlamaForCausalLM):
    scale = 1.0

    def forward(self, input_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        output.loss = output.loss * self.scale
        return output


def scaled_model():
    model = tiny_model()
    model.__class__ = Scaled
    return model


class Iterates(Trainer):
    """Trains on a second stream of batches, whose position nobody can read."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        if not hasattr(self, "others"):
            self.others = iter(DataLoader(RandomTokens(400), batch_size=1))
        return super().compute_loss(model, next(self.others), *args, **kwargs)


class Crash(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise RuntimeError("planned")


def scheduled(folder, *more):
    model, calls = tiny_model(), 0

    def factor(step):
        nonlocal calls
        calls += 1
        return 1 / (1 + calls)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return program(
        folder, *more, model=model, optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor))
    )


class MasksGlobally:
    """Draws masks from NumPy's global generator."""

    def __call__(self, rows):
        batch = default_data_collator(rows)
        return masked(batch, np.random.rand(*batch["input_ids"].shape))


def streamed(folder, *more, collator):
    rows = [{name: value.tolist() for name, value in RandomTokens(ROWS)[index].items()} for index in range(ROWS - 3)]
    stream = HubDataset.from_list(rows).to_iterable_dataset().with_format("torch")
    np.random.seed(1)
    return program(folder, *more, data=stream, data_collator=collator, max_steps=STEPS)


def program(output_dir, *callbacks, kind=Trainer, model=None, data=None, max_steps=-1, **options):
    arguments = tiny_arguments(
        output_dir,
        max_steps=max_steps,
        num_train_epochs=3,
        save_strategy="steps",
        save_steps=1,
        logging_steps=1,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-2,
    )
    return kind(
        model=tiny_model() if model is None else model,
        args=arguments,
        train_dataset=RandomTokens(ROWS) if data is None else data,
        callbacks=[SpotCheckpointCallback(asynchronous=False), *callbacks],
        **{"data_collator": default_data_collator} | options,
    )


def begin_again():
    """As in a new process."""
    global CALLED
    CALLED, CALLS[0] = 0, 0


PROGRAMS = {
    "partial": lambda folder, *more: program(
        folder, *more, data_collator=functools.partial(drawn_by, rng=np.random.default_rng(5))
    ),
    "slots": lambda folder, *more: program(folder, *more, data_collator=Slots(random.Random(4))),
    "counting collator": lambda folder, *more: program(folder, *more, data_collator=Counting()),
    "dataset and module": lambda folder, *more: program(folder, *more, data=Transformed()),
    "trainer": lambda folder, *more: program(folder, *more, kind=Annealed),
    "model": lambda folder, *more: program(folder, *more, model=counted_model()),
    "globals": lambda folder, *more: program(folder, *more, compute_loss_func=count_globally),
    "closure": lambda folder, *more: program(folder, *more, compute_loss_func=counting_closure()),
    "hard examples": lambda folder, *more: program(folder, *more, kind=Mines, data=Weighted()),
    "schedule": scheduled,
    "stream": lambda folder, *more: streamed(folder, *more, collator=Counting()),
    "stream with masks": lambda folder, *more: streamed(folder, *more, collator=MasksGlobally()),
    "hook": lambda folder, *more: program(folder, *more, model=hooked_model()),
    "hook of a parameter": lambda folder, *more: program(folder, *more, model=hooked_gradients()),
    "buffer that is not saved": lambda folder, *more: program(folder, *more, model=drifting_model()),
    "rehearsal": lambda folder, *more: program(folder, *more, kind=Rehearses),
    "reordered by a callback": reordered,
    "set from outside": lambda folder, *more: program(folder, *more, SetsTheModel(), model=scaled_model()),
}


def losses(name, folder, crash=None):
    begin_again()
    trainer = PROGRAMS[name](folder)
    trainer.train()
    whole = logged(trainer, "loss")
    crashed = folder / "crashed"
    begin_again()
    with pytest.raises(RuntimeError, match="planned"):
        PROGRAMS[name](crashed, Crash(crash)).train()
    begin_again()
    again = PROGRAMS[name](crashed)
    again.train(resume_from_checkpoint=latest_checkpoint(crashed))
    return whole, logged(again, "loss"), again


EPOCH = ROWS // BATCH
CASES = [(name, EPOCH + 3) for name in PROGRAMS]
CASES += [
    (name, crash)
    for name in ("counting collator", "reordered by a callback", "set from outside")
    for crash in (3, EPOCH)
]


@pytest.mark.parametrize(("name", "crash"), CASES)
def test_what_a_program_counts_is_restored(tmp_path, name, crash):
    whole, resumed, _ = losses(name, tmp_path, crash)
    assert len(set(whole)) == len(whole)
    assert resumed == whole


def test_a_second_resume_restores_it_too(tmp_path):
    begin_again()
    whole = PROGRAMS["trainer"](tmp_path / "whole")
    whole.train()
    for crash in (3, 8):
        with pytest.raises(RuntimeError, match="planned"):
            PROGRAMS["trainer"](tmp_path / "crashed", Crash(crash)).train(
                resume_from_checkpoint=latest_checkpoint(tmp_path / "crashed")
            )
    again = PROGRAMS["trainer"](tmp_path / "crashed")
    again.train(resume_from_checkpoint=latest_checkpoint(tmp_path / "crashed"))
    assert logged(again, "loss") == logged(whole, "loss")


def test_what_is_restored_is_said(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(state.logger, "info", lambda text, *values: lines.append(text % values))
    losses("trainer", tmp_path, 4)
    (line,) = lines
    assert line.startswith("restored from the checkpoint")
    assert all(name in line for name in ("trainer.calls", "trainer.mean", "trainer.past"))


class CountsSteps(TrainerCallback):
    def __init__(self):
        self.steps, self.began, self.kept, self.record = 0, time.time(), 5, {}

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
        self.record[state.global_step] = 1.0
        self.began = time.time()


class Exported(CountsSteps, ExportableState):
    def state(self):
        return {"args": {}, "attributes": {"steps": self.steps}}


def test_a_callback_that_counts_is_named_and_left_alone(tmp_path, log):
    counts = CountsSteps()
    program(tmp_path, counts, Exported()).train()
    (line,) = [line for line in log.messages if line.startswith("the callback")]
    assert "CountsSteps changes steps while" in line
    again = CountsSteps()
    program(tmp_path, again, Crash(99)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.steps == STEPS - 4


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"kind": Iterates}, "trainer.others"),
        ({"data_collator": Counting(itertools.cycle([1, 2]))}, "collator.words"),
    ],
    ids=["trainer", "collator"],
)
def test_an_iterator_is_named(tmp_path, log, options, name):
    program(tmp_path, **options).train()
    (line,) = [line for line in log.messages if "is an iterator" in line]
    assert line.startswith(name)


def test_what_cannot_be_kept_is_named(tmp_path, log):
    program(tmp_path, kind=Teaches).train()
    lines = [line.partition(" changes while")[0] for line in log.messages if "no checkpoint keeps it" in line]
    assert sorted(lines) == ["trainer.optimizer_of_scale", "trainer.queue", "trainer.teacher"]


def test_plain_trainers_keep_nothing_and_say_nothing(tmp_path, log):
    trainer = program(tmp_path)
    trainer.train()
    texts = [path.read_text() for path in tmp_path.glob("checkpoint-*/hfscale_program_state_0.json")]
    launch = '{"processes": 1, "rows per device": 4}'
    assert set(texts) == {f'{{"values": {{}}, "generators": {{}}, "launch": {launch}}}'}
    assert not [line for line in log.messages if "iterator" in line or "restored from" in line]


@pytest.mark.parametrize("damage", ["{", "[]", '{"values": {"a": {"b": {"tensor": "x"}}}, "generators": {}}'])
def test_a_broken_file_is_refused(tmp_path, damage):
    with pytest.raises(RuntimeError, match="planned"):
        program(tmp_path, Crash(3)).train()
    checkpoint = latest_checkpoint(tmp_path)
    trainer = program(tmp_path)
    path = tmp_path / checkpoint / "hfscale_program_state_0.json"
    path.write_text(damage)
    (path.parent / "hfscale_manifest.json").unlink()  # or the damage is found before
    with pytest.raises(CheckpointError, match=r"hfscale_program_state_0\.json cannot be read"):
        trainer.train(resume_from_checkpoint=checkpoint)


VALUES = [
    True,
    3,
    -0.0,
    float("inf"),
    None,
    [1, 2.5, None],
    (1, 2),
    deque([1.0, 2.0]),
    {"a": 1, 2: 0.5},
    torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    torch.zeros(0),
    torch.arange(6).reshape(2, 3),
    np.arange(4, dtype=np.int16),
    np.float32(1.5),
    [{"input_ids": torch.arange(3), "weights": (0.5, [np.float64(2.0)])}],
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_from_json(value):
    copied = kept(value)
    assert copied is not NOTHING
    restored = put_back(kept(value), from_json(to_json(copied)))
    assert are_equal(restored, copied)


@pytest.mark.parametrize(
    "value",
    ["text", [1, "a"], {"a": [object()]}, torch.zeros(5000), list(range(5000)), object(), {1.5: 2}, np.array("a")],
)
def test_other_values_are_not_kept(value):
    assert kept(value) is NOTHING


def test_what_others_hold_too_is_changed_in_place():
    shared = [1, 2]
    assert put_back(shared, [3]) is shared
    assert shared == [3]
    counts = torch.zeros(2)
    assert put_back(counts, torch.ones(2)) is counts
    assert counts.sum() == 2


@pytest.mark.parametrize(
    "saved", [None, {"a": 1}, {"a": {"b": "text"}}, {"a": {"b": {"array": "O", "shape": [1], "bytes": "00"}}}]
)
def test_values_of_a_hostile_file_are_refused(saved):
    with pytest.raises(ValueError, match=r"value|array"):
        check_values(saved)


def test_what_a_clock_shows_is_left_out():
    timer = CountsSteps()
    search = Search()
    search.enter("timer", timer)
    values = KeptValues(search.found.holders)
    timer.began, timer.kept, timer.steps = time.monotonic(), time.time(), 2
    assert values.changed() == {"timer": {"steps": 2}}


def test_objects_of_others_are_left_alone():
    class Logs:
        def __init__(self):
            self.logger, self.calls = logging.getLogger(), 0

        def __call__(self, rows):
            return rows

    search = Search()
    search.enter("collator", Logs())
    assert set(search.found.holders) == {"collator", "collator.__call__"}
    assert list(search.found.holders["collator"].read()) == ["logger", "calls"]


def test_a_count_as_large_as_a_clock_of_the_machine_is_kept():
    timer = CountsSteps()
    search = Search()
    search.enter("timer", timer)
    began = math.floor(time.monotonic()) - 10.0
    values = KeptValues(search.found.holders)
    values._began = (*values._began[:3], began, began)
    timer.steps = int(began) + 5
    assert values.changed() == {"timer": {"steps": int(began) + 5}}


def test_a_place_that_is_gone_is_named(caplog):
    values = KeptValues({})
    values.restore({"collator": {"calls": 3}})
    assert "values of collator (calls), which this launch does not have" in caplog.text


def test_attributes_of_trainer_are_no_program_state():
    names = names_of_libraries(Annealed)
    assert {"model", "optimizer", "state", "is_in_train"} <= names
    assert not {"calls", "mean", "past"} & names
