"""Activations that wait for the backward pass in the CPU's memory, as TRL's trainers keep them."""

import inspect
import json
import tempfile
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trl import DPOConfig, SFTConfig
from trl.models.activation_offloading import OffloadActivations

from hfscale import estimate, plan
from hfscale.cli import main
from hfscale.errors import UsageError
from hfscale.facts.hardware import accelerator
from hfscale.planner.activations import end_activations, kept_and_working
from hfscale.planner.emit import emit
from hfscale.planner.frameworks import find_framework
from hfscale.planner.host_activations import PINNED_ROUNDING, STASHED_TENSORS, copied_bytes, exposed_copies_s
from hfscale.planner.memory import GIB, host_gib

HF = find_framework("hf")
RUN = {"gpu": "H100-80GB", "layout": {"dp_shard": 8}, "zero": 3, "seq_len": 8192, "micro_batch": 2, "compile": False}


def estimated(**options):
    return estimate("llama-3.1-8b", **RUN | {"activation_checkpointing": "full"} | options)


def saved_tensors(model, context):
    """Shape of each saved tensor, and whether TRL takes it for a parameter: by its class or its storage."""
    parameters = {getattr(p, "_local_tensor", p).untyped_storage().data_ptr() for p in model.parameters()}
    found = []

    def pack(tensor):
        is_parameter = isinstance(tensor, nn.Parameter) or tensor.untyped_storage().data_ptr() in parameters
        found.append((tuple(tensor.shape), is_parameter))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context:
        model(torch.randn(4, 64))
    return found


def two_layers():
    return nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False))


@pytest.fixture
def mesh():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
        dist.destroy_process_group()


class TestCopied:
    def test_with_full_recomputation_it_is_the_input_of_each_layer(self):
        job = estimated(activation_offload=True).job
        kept, _ = kept_and_working(job, HF)
        assert copied_bytes(job, HF) == kept
        assert copied_bytes(estimated().job, HF) == 0

    def test_copies_of_weights_are_copied_too(self, mesh):
        """Parameters stay on the device; what autocast converts and FSDP2 gathers is no parameter."""
        weights = {(96, 64), (64, 96)}

        def copied(model, context):
            return {shape for shape, is_parameter in saved_tensors(model, context) if not is_parameter}

        assert copied(two_layers(), nullcontext()).isdisjoint(weights)
        assert copied(two_layers(), torch.autocast("cpu", torch.bfloat16)) & weights
        sharded = two_layers()
        for layer in sharded:
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert copied(fully_shard(sharded, mesh=mesh), nullcontext()) & weights

    @pytest.mark.parametrize(
        ("options", "of_weight"),
        [
            ({"layout": {"dp_shard": 8}, "zero": 3}, 2.0),
            ({"layout": {"dp_replicate": 8}, "zero": 0}, 2.0),
            ({"layout": {"dp_replicate": 8}, "zero": 2}, 0.0),
            ({"layout": {"dp_replicate": 8}, "zero": 0, "method": "lora"}, 0.0),
        ],
    )
    def test_without_recomputation_these_weights_are_counted(self, options, of_weight):
        job = estimated(activation_offload=True, activation_checkpointing="none", **options).job
        kept, _ = kept_and_working(job, HF)
        assert copied_bytes(job, HF) == pytest.approx(kept + of_weight * job.shape.mean_layer_parameters)


class TestMemory:
    def test_layers_keep_a_few_tensors_on_the_device(self):
        plain, offloaded = estimated(), estimated(activation_offload=True)
        kept, _ = kept_and_working(plain.job, HF)
        left = plain.job.shape.layers - STASHED_TENSORS
        saved = left * kept + end_activations(plain.job, HF)
        assert plain.memory.activations - offloaded.memory.activations == pytest.approx(saved / GIB)

    def test_the_node_needs_pinned_memory_for_all_of_a_micro_batch(self):
        job = estimated(activation_offload=True).job
        kept, _ = kept_and_working(job, HF)
        pinned = PINNED_ROUNDING * (32 * kept + end_activations(job, HF))
        assert host_gib(job) == pytest.approx(pinned / GIB)
        with_states = estimated(activation_offload=True, offload="full").job
        without = estimated(offload="full").job
        assert host_gib(with_states) > host_gib(without)

    def test_a_run_does_not_fit_if_the_node_has_too_little(self):
        small = replace(accelerator("H100-80GB"), link_gb_s=None, memory_gib=500.0)
        large = estimated(gpu=small, micro_batch=8, activation_checkpointing="none", activation_offload=True)
        assert large.memory.needed < small.memory_gib
        assert not large.fits
        assert large.fits_probability == 0


class TestTime:
    def test_only_what_exceeds_the_computation_is_exposed(self):
        job = estimated(activation_offload=True).job
        copy = copied_bytes(job, HF) / 1e9
        assert exposed_copies_s(job, HF, 1e9, copy / 2, copy / 4) == pytest.approx(copy * 1.25)
        assert exposed_copies_s(job, HF, 1e9, 2 * copy, 2 * copy) == 0

    def test_a_slow_link_to_the_cpu_makes_the_step_longer(self):
        slow = replace(accelerator("H100-80GB"), host_gb_s=1.0)
        assert estimated(activation_offload=True).time.total == pytest.approx(estimated().time.total)
        assert estimated(gpu=slow, activation_offload=True).time.total > 1.2 * estimated(gpu=slow).time.total


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_checkpointing": "selective"}, "use activation_checkpointing='full'"),
        ({"stack": "titan"}, "not for titan"),
        ({"layout": {"pp": 2, "dp_shard": 4}, "global_batch": 64}, "not for parallel_trainer"),
    ],
)
def test_what_is_not_planned_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        estimated(activation_offload=True, **options)


class TestPlan:
    def test_choices_of_sft_have_the_flag_of_trl(self, tmp_path):
        found = plan("llama-3.1-8b", gpu="H100-80GB", gpus=8, seq_len=16384, task="sft", activation_offload=True)
        assert found.choices
        assert {choice.estimate.job.activation_checkpointing for choice in found.choices} <= {"none", "full"}
        emit(found, tmp_path / "plan")
        assert "\nactivation_offloading: true\n" in (tmp_path / "plan" / "recipe.yaml").read_text(encoding="utf-8")

    def test_no_recipe_runs_it_for_text(self, capsys):
        words = ["--gpu", "H100-80GB", "--gpus", "8", "--activation-offload", "--json", "--top", "1"]
        assert main(["plan", "llama-3.1-8b", *words]) == 0
        choice = json.loads(capsys.readouterr().out)["choices"][0]
        assert choice["recipe"] is None

    def test_a_plan_says_what_it_would_save(self):
        found = plan("llama-3.1-8b", gpu="H100-80GB", gpus=8, seq_len=65536, task="sft")
        change = next(one for one in found.improvements if "--activation-offload" in one.change)
        assert change.memory_gib < found.choices[0].estimate.memory.needed


def test_trl_has_this_flag_and_keeps_so_many_tensors():
    """The flag, and the number of stashed tensors."""
    assert "activation_offloading" in inspect.signature(SFTConfig).parameters
    assert "activation_offloading" in inspect.signature(DPOConfig).parameters
    defaults = inspect.signature(OffloadActivations).parameters
    assert defaults["max_fwd_stash_size"].default == STASHED_TENSORS


def test_a_folder_of_another_flag_is_not_written(tmp_path, capsys):
    folder = tmp_path / "plan"
    words = ["--gpu", "H100-80GB", "--gpus", "8", "--activation-offload", "--emit", str(folder)]
    assert main(["plan", "llama-3.1-8b", *words]) == 2
    assert "--activation-offload is an option of recipes/sft and recipes/dpo alone" in capsys.readouterr().err
    assert not folder.exists()
