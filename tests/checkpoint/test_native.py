"""Checkpoints of models loaded with `distributed_config`: saved, resumed under other layouts, converted, exported."""

import itertools
import json
import math
import os
import random
import shutil
import signal

import pytest
import torch
from conftest import REPOSITORY
from native_runs import EVERY, FILE, STEPS, Layout, Run, attempt, launch, make_model, output, records
from safetensors.torch import load_file
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, TrainerCallback

from hfscale import latest_checkpoint
from hfscale.checkpoint.conversion import convert
from hfscale.checkpoint.formats import read_view
from hfscale.checkpoint.formats.pieces import held_intervals
from hfscale.checkpoint.manifest import read_manifest
from hfscale.checkpoint.store import read_status, verify
from hfscale.cli import main
from hfscale.core.torch_internals import StridedShard
from hfscale.facts.strategies import CONVERTIBLE
from hfscale.health import node

EXPERTS = Layout(fsdp=2, ep=2)
SAVED_BY_TRAINER = {"save_strategy": "steps", "save_steps": EVERY, "save_only_model": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """The folder of a run of two ranks that share the experts, which saved at steps 3 and 6, and exported its end."""
    folder = tmp_path_factory.mktemp("trained")
    launch(Run(layout=EXPERTS, after=lambda trainer: trainer.save_model(folder / "saved")), model, folder)
    return folder


@pytest.fixture
def interrupted(trained, tmp_path):
    """A copy of that run as it was after step 3."""
    return lose_the_end(shutil.copytree(trained, tmp_path / "run"))


def lose_the_end(folder):
    shutil.rmtree(folder / "out" / f"checkpoint-{STEPS}")
    return folder


def assert_same_end(folder, control, tolerance=1e-5):
    """The last launch in `folder` took the steps after the checkpoint, with the losses of the uninterrupted run."""
    assert list(records(folder)) == list(range(EVERY + 1, STEPS + 1))
    for step, values in records(folder).items():
        assert values == pytest.approx(records(control)[step], abs=tolerance), step


def errors(folder):
    """The error lines of the last launch."""
    return [line for line in output(folder).splitlines() if line.startswith("hfscale.errors.")]


@pytest.mark.world(2)
class TestResume:
    def test_the_complete_state_is_committed(self, trained):
        manifest = verify(trained / "out" / f"checkpoint-{EVERY}")
        assert (manifest.strategy, manifest.world_size, manifest.global_batch_size) == ("native", 2, 8)
        assert manifest.layout == {"dp_replicate": 1, "fsdp": 2, "tp": 1, "ep": 2, "pp": 1}
        assert read_status(trained / "out")["checkpoint"] == f"checkpoint-{STEPS}"

    def test_the_same_layout_resumes_bit_by_bit(self, trained, model, interrupted):
        launch(Run(layout=EXPERTS), model, interrupted)
        assert_same_end(interrupted, trained, tolerance=0)

    @pytest.mark.parametrize(
        "layout",
        [
            # The test of accumulated gradients has this layout, too.
            pytest.param(Layout(fsdp=2), marks=pytest.mark.faults),
            pytest.param(Layout(rep=2), marks=pytest.mark.long),
            Layout(tp=2),
            pytest.param(Layout(tp=2, ep=2), marks=pytest.mark.faults),
        ],
        ids=str,
    )
    def test_another_layout_resumes_with_the_same_losses(self, trained, model, interrupted, layout):
        launch(Run(layout=layout), model, interrupted)
        assert_same_end(interrupted, trained)

    @pytest.mark.long
    def test_a_shard_of_several_rectangles_is_read_by_other_layouts(self, trained, model, tmp_path):
        """Gate and up of all experts are one parameter, of which tensor parallelism shards each by itself."""
        launch(Run(layout=Layout(tp=2)), model, tmp_path)
        launch(Run(layout=EXPERTS), model, lose_the_end(tmp_path))
        assert_same_end(tmp_path, trained)

    @pytest.mark.long
    def test_random_numbers_continue(self, tmp_path):
        """Bit by bit with dropout: each rank restores its own generators."""
        model = make_model(tmp_path / "model", attention_dropout=0.2)
        launch(Run(layout=EXPERTS), model, tmp_path / "whole")
        resumed = lose_the_end(shutil.copytree(tmp_path / "whole", tmp_path / "resumed"))
        launch(Run(layout=EXPERTS), model, resumed)
        assert_same_end(resumed, tmp_path / "whole", tolerance=0)

    def test_gradients_are_accumulated_and_a_schedule_restarts_in_other_groups(self, trained, model, interrupted):
        """Trainer divides its parameter groups by mesh: with experts on their own mesh there are more of them."""
        launch(Run(layout=Layout(fsdp=2), accumulation=2), model, interrupted)
        assert_same_end(interrupted, trained)


@pytest.mark.world(2)
class TestSave:
    @pytest.mark.long
    def test_save_only_model_saves_the_complete_state_too(self, model, trained, tmp_path):
        """At the Trainer's own steps, and the best model is loaded at the end."""
        arguments = SAVED_BY_TRAINER | {"eval_strategy": "steps", "eval_steps": EVERY, "load_best_model_at_end": True}
        losses = tmp_path / "eval.json"

        def evaluate(trainer):
            found = trainer.evaluate()["eval_loss"]
            if trainer.is_world_process_zero():
                losses.write_text(json.dumps([found, trainer.state.best_metric, trainer.state.best_model_checkpoint]))

        run = Run(layout=EXPERTS, every=None, arguments=arguments | {"greater_is_better": True}, after=evaluate)
        launch(run, model, tmp_path)
        found, best, checkpoint = json.loads(losses.read_text())
        assert found == pytest.approx(best)
        assert checkpoint.endswith(f"checkpoint-{EVERY}")
        launch(Run(layout=EXPERTS, every=None, arguments=arguments), model, lose_the_end(tmp_path))
        assert_same_end(tmp_path, trained, tolerance=0)

    @pytest.mark.long
    def test_nothing_is_saved_unless_it_is_asked_for(self, model, tmp_path):
        printed = launch(Run(layout=EXPERTS, every=None, steps=2), model, tmp_path)
        assert list((tmp_path / "out").glob("checkpoint-*")) == []
        assert "nothing will be saved" in printed

    @pytest.mark.parametrize("every", [1, None])
    @pytest.mark.long
    def test_the_space_for_checkpoints_is_checked_if_some_are_saved(self, model, tmp_path, every):
        printed = launch(Run(layout=EXPERTS, every=every, steps=1, prepare=on_a_full_disk), model, tmp_path)
        assert ("two checkpoints need" in printed) == (every is not None)

    @pytest.mark.parametrize("layout", [EXPERTS, pytest.param(Layout(tp=2), marks=pytest.mark.faults)], ids=str)
    @pytest.mark.long
    def test_a_synchronous_save_has_the_same_content(self, model, trained, tmp_path, layout):
        printed = launch(Run(layout=layout, spot={"asynchronous": False}), model, tmp_path)
        assert "training waits for each save" not in printed
        launch(Run(layout=EXPERTS), model, lose_the_end(tmp_path))
        assert_same_end(tmp_path, trained)

    def test_a_signal_to_one_rank_saves_the_step_and_ends_all(self, model, trained, tmp_path):
        stopped = Run(layout=EXPERTS, callbacks=(SignalAt(2),))
        assert attempt(stopped, model, tmp_path, ends_all=False) == [75, 75], output(tmp_path)
        step = read_status(tmp_path / "out")["step"]
        assert verify(latest_checkpoint(tmp_path / "out")).step == step < STEPS
        launch(Run(layout=EXPERTS), model, tmp_path)
        assert list(records(tmp_path)) == list(range(step + 1, STEPS + 1))
        assert records(tmp_path)[STEPS] == records(trained)[STEPS]

    @pytest.mark.long
    def test_a_remote_copy_is_fetched(self, model, trained, tmp_path):
        remote = {"remote": f"file://{tmp_path}/remote"}
        launch(Run(layout=EXPERTS, spot=remote), model, tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "out")
        shutil.rmtree(tmp_path / "remote" / f"checkpoint-{STEPS}")
        launch(Run(layout=Layout(fsdp=2), spot=remote), model, tmp_path / "run")
        assert_same_end(tmp_path / "run", trained)


def on_a_full_disk(model):
    node.free_bytes = lambda folder: 1000  # in this process, which is a rank
    return model


class WithRows(torch.optim.SGD):
    """Keeps a number for each row that this rank holds, as Adafactor does for undistributed parameters."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["row"] = torch.zeros(parameter.to_local().shape[0])
        return super().step(closure)


class SignalAt(TrainerCallback):
    """Sends SIGTERM to rank 1 in a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class TestConversion:
    @pytest.mark.world(2)
    def test_to_one_process_and_back(self, model, trained, tmp_path, capsys):
        """By the command line in one direction; a natively distributed model converts what it resumes from itself."""
        source = trained / "out" / f"checkpoint-{EVERY}"
        target = tmp_path / "converted" / "checkpoint-3"
        assert main(["checkpoints", "convert", str(source), str(target), "--to", "single"]) == 0
        single = {"save_strategy": "steps", "save_steps": EVERY}
        launch(Run(layout=Layout(), arguments=single, resume=str(target)), model, tmp_path)
        assert_same_end(tmp_path, trained)
        whole = tmp_path / "whole"
        launch(Run(layout=Layout(), arguments=single), model, whole)
        printed = launch(Run(layout=EXPERTS), model, lose_the_end(whole))
        assert "was written under single by 1 process and has been converted for native on 2" in printed
        assert_same_end(whole, trained)

    @pytest.mark.world(2)
    @pytest.mark.parametrize("strategy", CONVERTIBLE)
    def test_every_strategy_and_back_keeps_every_bit(self, trained, tmp_path, strategy):
        """Weights, optimizer states and groups of a mixture of experts."""
        source = trained / "out" / f"checkpoint-{EVERY}"
        there, back = tmp_path / "there", tmp_path / "back"
        ranks = 1 if strategy == "single" else 2
        converted = convert(source, there, manifest=read_manifest(source), strategy=strategy, world_size=ranks)
        convert(there, back, manifest=converted, strategy="native", world_size=4)
        expected, found = (read_view(folder, "native") for folder in (source, back))
        assert found.weights.keys() == expected.weights.keys()
        assert [n for n, ref in expected.weights.items() if not torch.equal(found.weights[n].read(), ref.read())] == []
        assert found.state.keys() == expected.state.keys()
        for name, keys in expected.state.items():
            assert [
                key for key, ref in keys.items() if not torch.equal(found.state[name][key].read(), ref.read())
            ] == []
        groups = [sorted(group.names) for group in expected.groups]
        assert [sorted(group.names) for group in found.groups] == groups

    @pytest.mark.world(2)
    def test_the_export_is_what_the_trainer_saves(self, trained, tmp_path, capsys):
        """Experts have the names and shapes of the hub, and `from_pretrained` misses nothing."""
        source, target = trained / "out" / f"checkpoint-{STEPS}", tmp_path / "exported"
        assert main(["checkpoints", "export", str(source), str(target)]) == 0
        found, expected = (load_file(folder / "model.safetensors") for folder in (target, trained / "saved"))
        assert found.keys() == expected.keys()
        assert "model.layers.0.mlp.experts.3.gate_proj.weight" in found
        assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
        _, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]


@pytest.mark.world(2)
class TestAdapters:
    """LoRA on a natively distributed model; the adapters are plain tensors on every rank."""

    @pytest.mark.parametrize(
        "target",
        [
            "attention",
            pytest.param("experts", marks=pytest.mark.faults),
            pytest.param("spread experts", marks=[pytest.mark.faults, pytest.mark.world(4)]),
        ],
    )
    @pytest.mark.long
    def test_they_resume_under_another_layout(self, model, tmp_path, target):
        single = {"save_strategy": "steps", "save_steps": EVERY}
        prepare, saved, other = {
            "attention": (with_adapters, EXPERTS, Layout(fsdp=2)),
            "experts": (with_adapters_of_experts, Layout(fsdp=2), Layout(rep=2)),
            "spread experts": (with_adapters_of_experts, EXPERTS, Layout(fsdp=4, ep=2)),
        }[target]
        launch(Run(layout=Layout(), prepare=prepare, arguments=single), model, tmp_path / "single")
        launch(Run(layout=saved, prepare=prepare), model, tmp_path / "run")
        for step, values in records(tmp_path / "single").items():
            assert records(tmp_path / "run")[step] == pytest.approx(values, abs=1e-5), step
        resumed = lose_the_end(shutil.copytree(tmp_path / "run", tmp_path / "resumed"))
        launch(Run(layout=other, prepare=prepare), model, resumed)
        assert_same_end(resumed, tmp_path / "run")

    def test_they_are_refused_with_tensor_parallelism(self, model, tmp_path):
        run = Run(layout=Layout(tp=2), prepare=with_adapters)
        assert 0 not in attempt(run, model, tmp_path)
        assert "tensor parallelism" in errors(tmp_path)[0]


def with_adapters(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def with_adapters_of_experts(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(
        r=4, target_modules=[], target_parameters=parameters, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


@pytest.mark.world(2)
class TestBadInput:
    def test_another_number_of_experts(self, trained, interrupted, tmp_path):
        other = make_model(tmp_path / "other", num_experts=8)
        assert 0 not in attempt(Run(layout=EXPERTS), other, interrupted)
        (message, *_) = errors(interrupted)
        assert "experts 4 -> 8" in message

    def test_a_checkpoint_of_plain_trainer_without_a_manifest(self, model, tmp_path):
        folder = tmp_path / "out" / "checkpoint-3"
        launch(Run(layout=Layout(), arguments={"save_strategy": "steps", "save_steps": EVERY}), model, tmp_path)
        (folder / "hfscale_manifest.json").unlink()
        assert 0 not in attempt(Run(layout=EXPERTS, resume=str(folder)), model, tmp_path)
        assert f"hfscale checkpoints convert {folder} NEW_FOLDER --to native" in errors(tmp_path)[0]

    def test_an_optimizer_whose_states_are_not_sharded_like_the_parameters(self, model, tmp_path):
        run = Run(layout=EXPERTS, every=1, steps=2, optimizer=lambda model: WithRows(model.parameters(), lr=1e-3))
        assert 0 not in attempt(run, model, tmp_path)
        assert "--optim adamw_torch" in errors(tmp_path)[0]

    @pytest.mark.parametrize("asked", ["FSDP", "ZERO", "ZERO by an argument"])
    def test_a_launcher_that_asks_for_another_strategy(self, model, tmp_path, asked):
        """It is refused while the Trainer is made, before anything is prepared for training."""
        config = str(REPOSITORY / "ds_configs" / "zero2.json")
        env, arguments = {
            "FSDP": ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, {}),
            "ZERO": ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": config}, {}),
            "ZERO by an argument": ({}, {"deepspeed": config}),
        }[asked]
        assert 0 not in attempt(Run(layout=EXPERTS, every=1, arguments=arguments), model, tmp_path, env=env)
        (message, *_) = errors(tmp_path)
        assert f"{asked.split()[0]} was asked for but NATIVE would run" in message
        assert "loaded with distributed_config; launch with torchrun" in message
        assert not (tmp_path / FILE).exists()

    def test_a_trainer_that_would_save_what_it_cannot_resume(self, model, tmp_path):
        """transformers refuses it itself, and says how to fix it."""
        assert 0 not in attempt(Run(layout=EXPERTS, arguments={"save_strategy": "steps"}), model, tmp_path)
        assert "Pass `save_only_model=True` or `save_strategy='no'`" in output(tmp_path)


def test_what_a_rank_holds_follows_torchs_placements():
    """Compared with torch for random shapes and placements: the local shape, the first index, and every index once."""
    generator = random.Random(0)
    for _ in range(300):
        mesh = [generator.randint(1, 4) for _ in range(generator.randint(1, 3))]
        size = generator.randint(1, 20)
        kinds = [Replicate(), Shard(0), StridedShard(0, split_factor=generator.randint(1, 4))]
        placements = [generator.choice(kinds) for _ in mesh]
        seen = []
        for coordinate in itertools.product(*map(range, mesh)):
            (found,) = held_intervals([size], placements, mesh, coordinate)
            held = [index for start, end in found for index in range(start, end)]
            shape, offset = _compute_local_shape_and_global_offset([size], mesh, list(coordinate), placements)
            assert len(held) == shape[0], (size, mesh, placements, coordinate)
            if held:
                assert held[0] == offset[0], (size, mesh, placements, coordinate)
            seen += held
        copies = math.prod(ranks for ranks, kind in zip(mesh, placements, strict=True) if kind.is_replicate())
        assert sorted(seen) == sorted([*range(size)] * copies), (size, mesh, placements)
