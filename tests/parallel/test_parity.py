"""`--check_parity`: two steps of a small model on the ranks of a run are compared with one process."""

import copy
import re

import pytest
from parallel_families import parity, small_config
from parallel_world import in_world, tiny_config
from transformers import AutoConfig, LlamaForCausalLM

from hfscale.errors import UsageError
from hfscale.parallel.parity import TOLERANCE
from hfscale.parallel.parity import small_config as reduced
from hfscale.parallel.partition import StageEntry

WIDE = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}


def test_layouts_of_two_ranks_agree_with_one_process():
    jobs = [
        {"family": "roberta", "pp": 2},
        {"family": "llama", "pp": 2, "case": "adapters", "adapters": LORA},
        {"family": "qwen3_moe", "tp": 2, "sequence": True},
        {"family": "llama", "cp": 2},
        {"family": "llama", "config": WIDE},
    ]
    for job, steps in zip(jobs, in_world(2, parity, jobs), strict=True):
        assert len(steps) == 2
        assert max(steps) < TOLERANCE, job


def parity_with_a_fault(job):
    """The differences where the second stage computes with hidden states that are wrong by a thousandth."""
    receive = StageEntry.receive
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageEntry, "receive", lambda entry, hidden: receive(entry, hidden * 1.001))
        return parity(job)


def start_with_a_fault(job):
    """The error with which ParallelTrainer starts under that fault, and what it says before without `check_parity`."""
    from transformers import TrainingArguments

    from hfscale import ParallelArguments, ParallelTrainer

    class OwnLlama(LlamaForCausalLM):
        pass

    receive = StageEntry.receive
    lines = []
    for sizes in ({"pp_size": 2}, {"pp_size": 2, "check_parity": True}):
        args = TrainingArguments(
            output_dir=job["folder"], use_cpu=True, gradient_accumulation_steps=2, report_to="none"
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StageEntry, "receive", lambda entry, hidden: receive(entry, hidden * 1.001))
            with pytest.raises(UsageError) as found:
                ParallelTrainer(OwnLlama(tiny_config("llama")), args, parallel=ParallelArguments(**sizes))
        lines.append(str(found.value))
    return lines


def test_a_difference_is_found_and_ends_the_run_with_both_numbers(tmp_path):
    (steps,) = in_world(2, parity_with_a_fault, [{"family": "llama", "pp": 2}])
    assert min(steps) > TOLERANCE
    ((refused, compared),) = in_world(2, start_with_a_fault, [{"folder": str(tmp_path)}])
    assert "check_parity=True" in refused
    assert "OwnLlama" in refused
    numbers = re.search(
        r"step 1 of a small llama model \(family\).* ([\d.]+) under pp 2, but ([\d.]+) in one", compared
    )
    assert numbers
    assert numbers[1] != numbers[2]
    assert "\n" not in compared


def test_a_small_config_can_be_split_as_the_config_can():
    llama = AutoConfig.for_model("llama", num_hidden_layers=80, hidden_size=8192, num_attention_heads=64)
    llama.num_key_value_heads = 8
    llama.eos_token_id = [128001, 128008]
    before = copy.deepcopy(llama.to_dict())
    small = reduced(llama, tp=8, stages=4)
    assert llama.to_dict() == before
    assert small.num_hidden_layers == 8
    assert (small.num_attention_heads, small.num_key_value_heads) == (64, 8)
    assert (small.vocab_size, max(small.eos_token_id)) == (512, 511)
    assert (small.hidden_size, small.head_dim, small.intermediate_size) == (512, 8, 1024)
    assert reduced(llama, tp=2, stages=4).num_attention_heads == 16


def test_lists_with_an_element_for_each_layer_are_reduced_with_the_layers():
    config = small_config("qwen3_next", num_hidden_layers=8)
    assert len(config.layer_types) == 8
    small = reduced(config, tp=1, stages=2)
    assert len(small.layer_types) == small.num_hidden_layers == 4
    assert set(small.layer_types) == set(config.layer_types)
