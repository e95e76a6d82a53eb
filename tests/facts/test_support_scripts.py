"""A script with any callback of hfscale is refused before its first step by the rules that recipes have."""

import ast
import re
from pathlib import Path

import pytest
from script_cases import SCRIPTS, WORKS, attempt
from tiny import make_callback, tiny_model, tiny_trainer
from transformers.distributed import DistributedConfig

import hfscale
from hfscale.errors import UsageError
from hfscale.facts.support import Rule, rules

PACKAGE = Path(hfscale.__file__).parent
MAX_DESCRIPTIONS = 5
"""Places that make a `Combination`, beside the planner's: two in description.py, the check of the launch, and two of
recipes that check flags while they are parsed. Add a property to description.py instead of a place."""

BY_PARALLEL_TRAINER = "its Trainer checks it when it is made, in scripts too (tests/facts/test_support.py)"
BY_LAUNCH = "checked when the Trainer is made, before there is a strategy (`check_launch`)"
BY_REQUEST = "a model loaded with distributed_config is refused under FSDP and DeepSpeed, whatever its sizes"
ONLY_FLAGS = "scripts have no such flag"
ELSEWHERE = {
    "a Trainer under Megatron-LM": BY_LAUNCH,
    "expert parallelism of families without a plan in transformers": "transformers refuses to load them",
    "pipeline parallelism of transformers itself": "tests/facts/test_support.py, in one process",
    "quantised weights in a model loaded with distributed_config": "the same",
    "sequence parallelism outside `ParallelTrainer`": ONLY_FLAGS,
    "a dry run outside `ParallelTrainer`": ONLY_FLAGS,
    "pipeline parallelism outside `ParallelTrainer`": "Accelerate has no such axis; transformers' is another rule",
    "expert parallelism under FSDP or DeepSpeed": BY_REQUEST,
    "sizes of transformers' own sharding under FSDP or DeepSpeed": BY_REQUEST,
    "expert parallelism with 4-bit weights": "quantised weights with distributed_config are refused before",
    "QLoRA with transformers' own sharding": "the same",
    "QLoRA with tensor parallelism": "the same",
    "QLoRA of weights that are quantised already": "transformers refuses to load them",
    "merging the adapters of QLoRA": ONLY_FLAGS,
    "adapters of experts that tensor parallelism splits": BY_PARALLEL_TRAINER,
    "compressed gradients without DDP": "a hook of DDP has no effect elsewhere, and is no request",
    "1-bit Adam and LAMB with another optimizer": ONLY_FLAGS,
    "1-bit Adam and LAMB with fp16": ONLY_FLAGS,
    "tensor parallelism of some families": "their models fail while transformers loads them, or need gigabytes",
    "tensor parallelism of families without a plan in transformers": "the same",
    "context parallelism of Accelerate with another attention than the launcher's": "Accelerate and Trainer refuse it",
    "attention between documents with rows of one document": ONLY_FLAGS,
    "generating from prompts with tensor or context parallelism": "`SampleGenerationCallback` asks the strategy",
    "generating from prompts with transformers' own sharding": "the same",
    "islands under ZeRO stage 0 in 16 bits": "needs a rendezvous: tests/checkpoint/test_zero0.py",
    "islands with gradients in DeepSpeed's round-robin order": "the same; tests/facts/test_support.py, for recipes",
    "updating the bias of routers with adapters": ONLY_FLAGS,
    "updating the bias of routers on islands": ONLY_FLAGS,
    **dict.fromkeys(
        [
            "generating from prompts with images",
            "sharded weights of vision-language models whose modules were not counted",
            "images on islands",
            "images with QLoRA",
            "images with torch.compile",
            "images with Muon",
        ],
        "recipes alone say that the data have images: tests/facts/test_support.py",
    ),
    **dict.fromkeys(
        [
            "averaged weights on islands",
            "averaged weights under ZeRO-3 that does not gather the weights for a save",
            "averaged weights with parameters on a disk",
            "averaged weights with states of the optimizer on a disk",
            "averaged weights under ZeRO stage 0 in 16 bits",
            "averaged weights with gradients in DeepSpeed's round-robin order",
            "evaluating averaged weights in GRPO",
        ],
        "tests/averaging/test_averaging.py, in one process",
    ),
}
ELSEWHERE |= {
    rule.name: "needs a schedule of the batch: tests/lr_scaling/test_growing_batch.py"
    for rule in rules()
    if "batch_schedule" in rule.when and "parallel_trainer" not in rule.when.values()
}
ELSEWHERE |= {
    rule.name: "needs an option of a callback: tests/facts/test_support.py, tests/replays/test_bad_batches.py"
    for rule in rules()
    if "skip_bad_batches" in rule.when and "parallel_trainer" not in rule.when.values()
}
ELSEWHERE |= {
    rule.name: "needs an option of a callback: tests/lr_scaling/test_width.py"
    for rule in rules()
    if "base_width" in rule.when and "parallel_trainer" not in rule.when.values()
}
"""Rules that no script of two ranks on a CPU can meet -> why."""


def sentence(rule: Rule) -> str:
    """Return a pattern of a rule's sentence, whatever its parameters."""
    return re.sub(r"\\\{[^}]*\\\}", ".*", re.escape(rule.why))


# A rank that is refused first ends, and the other one may just be connecting to it
@pytest.mark.flaky(reruns=2, only_rerun=["DistNetworkError"])
@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, scripts in SCRIPTS.items() for number in range(len(scripts))]
)
def test_a_script_is_refused_before_its_first_step_with_the_sentence_of_the_table(tmp_path, name, number):
    script = SCRIPTS[name][number]
    rule = next(rule for rule in rules() if rule.name == name)
    for ended in attempt(script, tmp_path):
        assert ended["kind"] == rule.error, ended
        assert re.fullmatch(sentence(rule), ended["message"]), ended
        assert script.spelled in ended["message"]
        assert ended["steps"] == 0
    assert not (tmp_path / "out" / "checkpoint-2").exists()


@pytest.mark.world(2)
@pytest.mark.parametrize("name", WORKS)
@pytest.mark.long
def test_a_script_that_works_is_not_refused_by_a_rule_for_recipes(tmp_path, name):
    for ended in attempt(WORKS[name], tmp_path):
        assert ended["kind"] is None, ended
        assert ended["steps"] == 2


def test_every_rule_is_met_by_a_script_or_says_why_not():
    known = {rule.name: rule for rule in rules()}
    common = {
        name
        for name, rule in known.items()
        if not {"planned", "for_recipe"} & rule.when.keys() and rule.when.get("engine") != "parallel_trainer"
    }
    assert {*SCRIPTS, *ELSEWHERE} == common
    assert not {*SCRIPTS} & {*ELSEWHERE}


CALLBACKS = [name for name in hfscale.__all__ if name.endswith("Callback")]


@pytest.mark.parametrize("name", CALLBACKS)
def test_every_callback_alone_refuses(tmp_path, name):
    model = tiny_model()
    model._is_distributed_loading_by_transformers = True  # in one process transformers distributes nothing
    model.config.distributed_config = DistributedConfig(pp_size=2)
    options = {"islands": 1} if name == "DiLoCoCallback" else {}
    trainer = tiny_trainer(tmp_path / "out", make_callback(name, **options), model=model)
    with pytest.raises(UsageError, match="pipeline stages compute forwards only"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_run_is_described_in_one_place():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        folder = path.relative_to(PACKAGE).parts[0]
        if folder in ("planner", "facts"):
            continue
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        found += [path for call in calls if ast.unparse(call.func).split(".")[-1] == "Combination"]
    assert len(found) <= MAX_DESCRIPTIONS, found
