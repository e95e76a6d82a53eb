"""What hfscale changes on a Trainer is undone, and each package lists the internals that it uses."""

import ast
import logging
import os
import re
import signal
import sys
from collections import deque
from functools import cache
from typing import ClassVar

import accelerate
import pytest
import torch
import transformers.trainer
from conftest import REPOSITORY
from test_public_surface import modules
from tiny import RandomTokens, tiny_arguments, tiny_model, tiny_trainer
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, default_data_collator

import hfscale
from hfscale import (
    CommHealthCallback,
    LRScalingCallback,
    ScalingCallback,
    ScalingMetricsCallback,
    SpotCheckpointCallback,
)
from hfscale.core.versions import has_epoch_methods, is_at_least
from hfscale.errors import HfScaleError
from hfscale.trainer.adapter import AdapterCallback, TrainerAdapter
from hfscale.trainer.frames import resumed_from, training_frame
from hfscale.trainer.state import unwrap_compiled

SAVING = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
LASTING = {"train", "get_eval_dataloader", "push_to_hub", "_push_from_checkpoint", "_hfscale_adapter"}


class Raise(TrainerCallback):
    """Raises at an event, while `on` is set."""

    def __init__(self, event="on_step_end"):
        self.on = True
        setattr(self, event, self._raise)

    def _raise(self, args, state, control, **kwargs):
        if self.on and state.global_step in (0, 3):
            raise RuntimeError("broken off")


def changes(trainer):
    """Everything that can be replaced on a Trainer, by name."""
    methods = {name for name in vars(trainer) if hasattr(type(trainer), name)}
    return {
        "methods": methods - LASTING,
        "adapter": "_hfscale_adapter" in vars(trainer),
        "callbacks": [type(callback).__name__ for callback in trainer.callback_handler.callbacks],
        "args": {name: value for name, value in vars(trainer.args).items() if name != "learning_rate"},
        "accelerator": {name for name in vars(trainer.accelerator) if hasattr(type(trainer.accelerator), name)},
        "dataset": id(trainer.train_dataset),
        "process": [list(sys.argv), {name for name in os.environ if name.startswith("WANDB")}],
        "signal": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)],
    }


class TestRestore:
    @pytest.mark.parametrize("report_to", ["none", "wandb"])
    def test_nothing_is_left_after_a_training(self, tmp_path, report_to, monkeypatch):
        monkeypatch.setenv("WANDB_MODE", "disabled")
        trainer = tiny_trainer(tmp_path, ScalingCallback(), report_to=report_to, **SAVING)
        before = changes(trainer)
        trainer.train()
        assert changes(trainer) == before
        trainer.train()
        assert changes(trainer) == before
        assert trainer.state.global_step == 4

    @pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin", "on_step_end"])
    def test_nothing_is_left_after_a_training_that_broke_off(self, tmp_path, event):
        breaking = Raise(event)
        trainer = tiny_trainer(tmp_path, ScalingCallback(), breaking, **SAVING)
        before = changes(trainer)
        with pytest.raises(RuntimeError, match="broken off"):
            trainer.train()
        assert changes(trainer) == before
        breaking.on = False
        trainer.train()
        assert changes(trainer) == before
        assert trainer.state.global_step == 4
        assert hfscale.latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")

    def test_nothing_is_left_of_the_preparation_of_a_wandb_run(self, tmp_path, monkeypatch):
        monkeypatch.setenv("WANDB_MODE", "disabled")
        monkeypatch.setattr(sys, "argv", ["train.py", "--hub_token", "hf_secret"])
        trainer = tiny_trainer(tmp_path, Raise("on_train_begin"), ScalingCallback(), report_to="wandb")
        before = changes(trainer)
        with pytest.raises(RuntimeError, match="broken off"):
            trainer.train()
        assert changes(trainer) == before

    def test_a_removed_callback_leaves_nothing_after_the_next_training(self, tmp_path):
        plain = tiny_trainer(tmp_path / "plain")
        trainer = tiny_trainer(tmp_path, ScalingCallback(), report_to="none")
        trainer.remove_callback(ScalingCallback)
        trainer.train()
        assert not LASTING & set(vars(trainer))
        assert changes(trainer)["callbacks"] == changes(plain)["callbacks"]
        assert not [key for record in trainer.state.log_history for key in record if "/" in key]

    def test_what_the_user_replaced_meanwhile_stays(self, tmp_path):
        def mine(*args, **kwargs):
            return {}

        class Replace(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                trainer.evaluate = mine

        trainer = tiny_trainer(tmp_path, SpotCheckpointCallback(), Replace())
        trainer.train()
        assert trainer.evaluate is mine

    def test_all_undo_steps_run_when_one_of_them_raises(self, tmp_path):
        called = []

        def fail():
            raise ValueError("undo")

        class Add(TrainerCallback):
            def on_train_begin(self, args, state, control, **kwargs):
                adapter = TrainerAdapter.current()
                adapter.at_training_end(lambda: called.append("first"))
                adapter.at_training_end(fail)

        trainer = tiny_trainer(tmp_path, LRScalingCallback(), Add())
        with pytest.raises(ValueError, match="undo"):
            trainer.train()
        assert called == ["first"]


class TestAddedLater:
    """The callback meets its Trainer in a call of `train` that is already running."""

    def test_nothing_is_left_after_a_training(self, tmp_path):
        trainer = tiny_trainer(tmp_path, **SAVING)
        before = changes(trainer)
        trainer.add_callback(ScalingCallback())
        trainer.train()
        after = changes(trainer)
        assert after.pop("callbacks")[:-1] == before.pop("callbacks")
        assert after == before | {"adapter": True}

    @pytest.mark.parametrize("event", ["on_step_end", "on_train_end"])
    def test_nothing_is_left_after_a_training_that_broke_off(self, tmp_path, event):
        breaking = Raise(event)
        trainer = tiny_trainer(tmp_path, max_steps=3, **SAVING)
        before = changes(trainer)
        trainer.add_callback(ScalingCallback())
        trainer.add_callback(breaking)
        with pytest.raises(RuntimeError, match="broken off"):
            trainer.train()
        callbacks = before.pop("callbacks")
        if has_epoch_methods():  # otherwise the next training restores
            after = changes(trainer)
            assert after.pop("callbacks")[:-2] == callbacks
            assert after == before | {"adapter": True}
        breaking.on = False
        trainer.train()
        assert trainer.state.global_step == 3
        after = changes(trainer)
        assert after.pop("callbacks")[:-2] == callbacks
        assert after == before | {"adapter": True}


def test_one_adapter_for_all_callbacks_and_trainings(tmp_path):
    seen = set()

    class Look(TrainerCallback):
        def on_init_end(self, args, state, control, **kwargs):
            seen.add(TrainerAdapter.current())

        def on_train_begin(self, args, state, control, **kwargs):
            seen.add(TrainerAdapter.current())

    trainer = tiny_trainer(tmp_path, LRScalingCallback(), Look(), CommHealthCallback(), ScalingMetricsCallback())
    trainer.train()
    trainer.train()
    assert seen == {TrainerAdapter.of(trainer)}
    with pytest.raises(HfScaleError, match="Trainer"):
        TrainerAdapter.current()


def test_the_order_of_the_users_callbacks_stays(tmp_path):
    orders = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            orders.append([type(callback).__name__ for callback in trainer.callback_handler.callbacks])

    trainer = tiny_trainer(tmp_path, Look(), ScalingCallback(), Raise("on_nothing"))
    before = changes(trainer)["callbacks"]
    trainer.train()
    after = ["LogCollector", "_AfterOthers", "DataOrder", "ProgramState", "OptimizerStates"]
    assert orders[-1] == ["_Before", *before, *after]


def test_added_metrics_reach_callbacks_that_come_before(tmp_path):
    """As the reporting integrations do. The control: keys that a callback adds itself come too late for them."""
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(set(logs))

    class Adds(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            TrainerAdapter.current().add_metrics(lambda state, logs: {"through/adapter": 1.0})

        def on_log(self, args, state, control, logs=None, **kwargs):
            logs["late"] = 1.0

    tiny_trainer(tmp_path, Reporter(), Adds()).train()
    assert all("through/adapter" in keys and "late" not in keys for keys in seen)


def test_the_trainer_and_its_checkpoint_are_found_on_the_stack(tmp_path):
    found = []

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            frame = training_frame()
            found.append((TrainerAdapter.current().trainer, resumed_from(), frame.f_locals["self"]))

    first = tiny_trainer(tmp_path, Look(), save_strategy="steps", save_steps=2)
    first.train()
    second = tiny_trainer(tmp_path, Look(), max_steps=5)
    second.train(resume_from_checkpoint=True)
    assert found == [(first, None, first), (second, str(tmp_path / "checkpoint-4"), second)]
    assert training_frame() is None


class Chooses(Trainer):
    """Resumes from another checkpoint than it is asked for."""

    chosen = None

    def train(self, resume_from_checkpoint=None, **kwargs):
        return super().train(resume_from_checkpoint=self.chosen, **kwargs)


class TestResumesFrom:
    """`TrainerAdapter.resumes_from`, while `train` is being called and while the training runs."""

    @pytest.fixture(scope="class")
    def written(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("written")
        tiny_trainer(folder, save_strategy="steps", save_steps=2).train()
        return folder

    def look(self):
        class Look(AdapterCallback):
            found: ClassVar[list] = []

            def before_train(self, adapter):
                self.found.append(adapter.resumes_from)

            def on_train_begin(self, args, state, control, **kwargs):
                self.found.append(TrainerAdapter.current().resumes_from)

        return Look()

    @pytest.mark.parametrize("asked", [None, True, "checkpoint-2"])
    def test_is_what_train_is_asked_for(self, written, asked):
        expected = {None: None, True: str(written / "checkpoint-4")}.get(asked, str(written / "checkpoint-2"))
        look = self.look()
        tiny_trainer(written, look, max_steps=5, save_strategy="no").train(
            resume_from_checkpoint=str(written / asked) if isinstance(asked, str) else asked
        )
        assert look.found == [expected, expected]

    def test_is_what_a_subclass_chooses(self, written):
        look = self.look()
        trainer = Chooses(
            model=tiny_model(),
            args=tiny_arguments(written, max_steps=5, save_strategy="no"),
            train_dataset=RandomTokens(),
            callbacks=[look],
            data_collator=default_data_collator,
        )
        trainer.chosen = str(written / "checkpoint-2")
        trainer.train(resume_from_checkpoint=str(written / "checkpoint-4"))
        assert look.found == [str(written / "checkpoint-4"), str(written / "checkpoint-2")]

    def test_is_known_where_the_callback_joins_a_running_training(self, written):
        look = self.look()
        trainer = tiny_trainer(written, max_steps=5, save_strategy="no")
        trainer.add_callback(look)
        trainer.train(resume_from_checkpoint=str(written / "checkpoint-2"))
        assert look.found == [str(written / "checkpoint-2")]
        trainer.train()
        assert look.found[1:] == [None, None]


@pytest.mark.skipif(not is_at_least("transformers", "5.0"), reason="enable_jit_checkpoint came in transformers 5.0")
class TestJitCheckpoint:
    """`enable_jit_checkpoint` installs transformers' own handler of SIGTERM over ours."""

    @pytest.fixture(autouse=True)
    def _handler(self):
        before = signal.getsignal(signal.SIGTERM)
        yield
        signal.signal(signal.SIGTERM, before)

    @pytest.mark.parametrize("is_late", [False, True])
    def test_is_switched_off_with_one_line(self, tmp_path, caplog, is_late):
        """Also where our callback is added after the Trainer was made."""
        before = signal.getsignal(signal.SIGTERM)
        with caplog.at_level(logging.INFO, logger="hfscale"):
            spot = SpotCheckpointCallback()
            trainer = tiny_trainer(tmp_path, *([] if is_late else [spot]), enable_jit_checkpoint=True)
            if is_late:
                trainer.add_callback(spot)
            else:
                assert signal.getsignal(signal.SIGTERM) is before
            trainer.train()
        assert trainer.state.global_step == 4
        assert signal.getsignal(signal.SIGTERM) is before
        assert len([line for line in caplog.messages if "enable_jit_checkpoint is switched off" in line]) == 1
        trainer.train()  # the flag is still in the arguments, and nothing comes back
        assert signal.getsignal(signal.SIGTERM) is before

    def test_without_our_callback_transformers_handles_the_signal(self, tmp_path):
        """The control: its handler is not ours."""
        tiny_trainer(tmp_path, enable_jit_checkpoint=True)
        assert signal.getsignal(signal.SIGTERM).__module__.startswith("transformers.")


class Ulysses:
    """What DeepSpeed's loader for ranks that share a sequence does, on one process: each batch becomes two."""

    sp_world_size = 2

    def __init__(self, loader):
        self.dl, self.iter, self.micro_batches = loader, iter(loader), deque()

    def __len__(self):
        return len(self.dl) * self.sp_world_size

    def __iter__(self):
        return self

    def __next__(self):
        if not self.micro_batches:
            try:
                batch = next(self.iter)
            except StopIteration:
                self.iter = iter(self.dl)
                raise
            self.micro_batches.extend([(batch.tolist(), rank) for rank in range(self.sp_world_size)])
        return self.micro_batches.popleft()


class TestUlyssesLoader:
    def make(self, read=None):
        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 12

            def __getitem__(self, index):
                if read is not None:
                    read.append(index)
                return index

        return Ulysses(DataLoader(Rows(), batch_size=2))

    @pytest.mark.parametrize("count", [1, 2, 5, 11, 12])
    def test_skips_what_the_run_has_seen_without_reading_it(self, count):
        everything = list(self.make())
        read = []
        module = pytest.importorskip(
            "hfscale.recipe.sequence_parallel", exc_type=ImportError
        )  # needs transformers 5.15
        loader = module.SkippableUlyssesLoader(self.make(read))
        rest = accelerate.skip_first_batches(loader, count)
        assert len(rest) == 12 - count  # which a resume checks
        assert list(rest) == everything[count:]
        assert len(read) == 12 - count // 2 * 2
        assert list(loader) == everything  # the next pass
        assert len(loader) == 12

    def test_deepspeeds_own_cannot_be_skipped_in(self):
        """The control: when this fails, the class is no longer needed."""
        with pytest.raises(AttributeError, match="dataset"):
            accelerate.skip_first_batches(self.make(), 1)

    def test_is_in_place_during_the_training_only(self, tmp_path):
        seen = []

        class Look(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                seen.append(trainer.accelerator.deepspeed_ulysses_dl_adapter("loader", None))

        trainer = tiny_trainer(tmp_path, Look(), max_steps=1)
        trainer.accelerator.deepspeed_ulysses_dl_adapter = lambda loader, model: loader
        adapter = TrainerAdapter.of(trainer)
        adapter.before_each_training(lambda: adapter.wrap_ulysses_loader(lambda loader: f"wrapped {loader}"))
        for _ in range(2):
            trainer.train()
            assert trainer.accelerator.deepspeed_ulysses_dl_adapter("loader", None) == "loader"
        assert seen == ["wrapped loader"] * 2
        assert transformers.trainer.skip_first_batches is accelerate.skip_first_batches


def test_listeners_hear_of_each_batch_before_the_step(tmp_path):
    heard = []

    class Listen(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            TrainerAdapter.current().on_batch(lambda: heard.append("batch"))

        def on_step_begin(self, args, state, control, **kwargs):
            heard.append("step")

    tiny_trainer(tmp_path, Listen(), max_steps=2, gradient_accumulation_steps=2).train()
    assert heard == ["batch", "batch", "step"] * 2


def test_a_compiled_module_is_unwrapped():
    module = torch.nn.Linear(1, 1)
    assert unwrap_compiled(torch.compile(module)) is module
    assert unwrap_compiled(module) is module


# --- the structure ------------------------------------------------------------------------------------------------


def is_internal(name):
    return name.startswith("_") and not name.startswith("__") and name not in ("_", "_replace")  # of namedtuples


@cache
def defined_names(tree):
    """The names with a leading underscore that a module defines: functions, classes, variables, own attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
    return found


def is_own(value):
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def foreign_names(tree, defined_anywhere):
    """Names with a leading underscore that a module uses and hfscale does not define."""
    here = defined_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("hfscale"):
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from (part for part in parts if is_internal(part))
        elif isinstance(node, ast.Attribute) and is_internal(node.attr):
            is_stdlib = isinstance(node.value, ast.Name) and node.value.id in sys.stdlib_module_names
            known = defined_anywhere if is_own(node.value) else here
            if node.attr not in known and not is_stdlib:
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ATTRIBUTE_FUNCTIONS:
            name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else ""
            if is_internal(name) and name not in here:
                yield name


ATTRIBUTE_FUNCTIONS = ("getattr", "setattr", "hasattr", "delattr")


def patched(tree):
    """Assignments to attributes of modules and classes of other libraries, and to attributes of a Trainer."""
    libraries = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            home = node.module if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                root = (home or alias.name).split(".")[0]
                if root != "hfscale" and root not in sys.stdlib_module_names:
                    libraries.add(alias.asname or (alias.name if home else root))
    for node in ast.walk(tree):
        target = None
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            target = node.args[0]
        if target is None:
            continue
        text = ast.unparse(target)
        if text.split(".")[0] in libraries or text in ("trainer", "self.trainer", "self._trainer"):
            yield f"{text}: line {node.lineno}"


@cache
def parsed():
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules()}


def package_of(module):
    """The package of a module, given by its whole path; "" for a module that is in none."""
    return module.split(".")[1] if module.count(".") > 1 else ""


@cache
def inventories():
    """What the `__init__.py` of each package says about the internals that the package touches.

    It is read without importing the package, since old versions of transformers cannot import all of them.
    """
    trees = parsed()
    names = {package_of(name) for name in trees} - {""}
    return {name: " ".join((ast.get_docstring(trees[f"hfscale.{name}"]) or "").split()) for name in names}


def unlisted(trees, listed):
    """Internals of other libraries that the package which uses them does not list."""
    anywhere = {name for tree in trees.values() for name in defined_names(tree)}
    found = []
    for module, tree in trees.items():
        package = package_of(module)
        names = set(foreign_names(tree, anywhere))
        found += [f"{module} uses {name}" for name in sorted(names) if name not in listed.get(package, "")]
    return found


def test_each_package_lists_the_internals_of_other_libraries_that_it_uses():
    assert unlisted(parsed(), inventories()) == []


# `TrainerAdapter`; `ParallelTrainer` changes itself, and `hfscale check` the Trainers of the short runs that it starts
TRAINER_IS_CHANGED_BY = ("trainer", "parallel", "check")


def changes_of_a_trainer(trees):
    """Changes to a Trainer or to another library outside of the packages that may make them."""
    return [
        f"{module} changes {target}"
        for module, tree in trees.items()
        if package_of(module) not in TRAINER_IS_CHANGED_BY
        for target in patched(tree)
    ]


def test_a_trainer_is_changed_through_its_adapter_only():
    assert changes_of_a_trainer(parsed()) == []


@pytest.mark.parametrize(
    "code",
    [
        "trainer._save_checkpoint(None, None)",
        "getattr(trainer, '_load_rng_state')",
        "self._get_output_dir(None)",
        "from transformers.trainer import _is_peft_model",
        "from accelerate._internal import state",
    ],
)
def test_the_check_finds_internals(code):
    trees = {"hfscale.health.one": ast.parse(code)}
    assert unlisted(trees, {"health": "nothing"})
    assert not unlisted(trees, {"health": "_save_checkpoint _load_rng_state _get_output_dir _is_peft_model _internal"})


@pytest.mark.parametrize(
    "code",
    [
        "import transformers\ntransformers.trainer.skip_first_batches = None",
        "from transformers import Trainer\nTrainer.train = None",
        "from transformers import Trainer\nsetattr(Trainer, name, None)",
        "trainer.evaluate = None",
        "setattr(self._trainer, name, None)",
        "del trainer.train",
    ],
)
def test_the_check_finds_changes(code):
    assert changes_of_a_trainer({"hfscale.health.one": ast.parse(code)})
    assert not changes_of_a_trainer({"hfscale.trainer.one": ast.parse(code)})


@pytest.mark.parametrize(
    "code",
    ["self._own = 1\nself._own", "import os\nos._exit(1)", "def _f(): ...\nx._f()", "row._replace(a=1)", "args.x = 1"],
)
def test_the_check_accepts_what_is_our_own(code):
    trees = {"hfscale.health.one": ast.parse(code)}
    assert unlisted(trees, {}) + changes_of_a_trainer(trees) == []


def test_each_internal_is_used_in_one_module():
    trees = parsed()
    anywhere = {name for tree in trees.values() for name in defined_names(tree)}
    users = {}
    for module, tree in trees.items():
        for name in set(foreign_names(tree, anywhere)):
            users.setdefault(name, []).append(module)
    assert {name: modules for name, modules in users.items() if len(modules) > 1} == {}


def test_no_class_or_module_of_a_library_is_patched():
    """Not in the packages that may touch internals either."""
    found = [line for tree in parsed().values() for line in patched(tree)]
    assert [line for line in found if "trainer" not in line.split(":")[0]] == []


def test_the_inventories_name_real_functions_and_real_tests():
    trees = parsed()
    files = {path.name: path for path in (REPOSITORY / "tests").rglob("test_*.py")}
    for package, inventory in inventories().items():
        for file, name in re.findall(r"Test: (test_\w+\.py)(?:, (\w+))?", inventory):
            assert name in files[file].read_text(encoding="utf-8"), f"{file} has no {name}"
        own = {n for module, tree in trees.items() if package_of(module) == package for n in defined_names(tree)}
        for method in re.findall(r"By: ((?:`[\w.]+`(?:, )?)+)", inventory):
            for name in re.findall(r"`([\w.]+)`", method):
                assert name.split(".")[-1] in own, f"{package} has no {name}"
