"""An error about a value names the parameter in Python and the flag on a command line."""

import copy
import inspect
import re
from dataclasses import fields

import pytest
from conftest import REPOSITORY
from tiny import tiny_trainer

from hfscale import (
    CommHealthCallback,
    DiLoCoCallback,
    LRScalingCallback,
    ParallelArguments,
    SampleGenerationCallback,
    ScalingCallback,
    ScalingMetricsCallback,
    SpotCheckpointCallback,
    WeightAveragingCallback,
)
from hfscale.core.flags import parse_bandwidth
from hfscale.core.option_flags import flags_of, options_from
from hfscale.core.options import options_of
from hfscale.core.spelling import speaking, spelled
from hfscale.errors import ParameterError, UsageError
from hfscale.health.options import HealthOptions
from hfscale.islands.flags import island_callbacks
from hfscale.islands.options import IslandOptions
from hfscale.islands.rendezvous import TOKEN_VARIABLE
from hfscale.metrics.profiler import ProfilerCallback
from hfscale.parallel.stages import StagePlan
from hfscale.recipe.arguments import OF_CALLBACKS, ScalingArguments, SourceArguments
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.recipe.parsing import parse_arguments

BAD_VALUES = [
    (SpotCheckpointCallback, {"every_steps": 0}),
    (SpotCheckpointCallback, {"every_minutes": -1.0}),
    (SpotCheckpointCallback, {"notice_s": 0}),
    (SpotCheckpointCallback, {"cloud": "nimbus"}),
    (SpotCheckpointCallback, {"on_preemption": "stay"}),
    (SpotCheckpointCallback, {"remote": "runs/out"}),
    (SpotCheckpointCallback, {"remote": "s3://key:secret@bucket/run"}),
    (SpotCheckpointCallback, {"remote": "nosuch://bucket/run"}),
    (SpotCheckpointCallback, {"memory_interval_steps": 0}),
    (SpotCheckpointCallback, {"state_limit": 0}),
    (CommHealthCallback, {"hang_after_s": 0}),
    (CommHealthCallback, {"on_hang": "kill"}),
    (CommHealthCallback, {"on_bad_training": "cry"}),
    (CommHealthCallback, {"replay_every_steps": 0}),
    (CommHealthCallback, {"skip_bad_batches": 0}),
    (LRScalingCallback, {"rule": "cubic"}),
    (LRScalingCallback, {"base_global_batch_size": 0}),
    (LRScalingCallback, {"block_size": 0}),
    (LRScalingCallback, {"base_block_size": 0}),
    (LRScalingCallback, {"base_block_size": 8, "base_global_batch_size": 1}),
    (LRScalingCallback, {"critical_batch_size": 0}),
    (LRScalingCallback, {"warmup_scale": 0}),
    (ScalingMetricsCallback, {"peak_tflops": 0}),
    (ScalingMetricsCallback, {"usd_per_gpu_hour": -2}),
    (SampleGenerationCallback, {"prompts": []}),
    (SampleGenerationCallback, {"prompts": ["a"], "every_steps": 0}),
    (SampleGenerationCallback, {"prompts": ["a"], "max_new_tokens": 0}),
    (SampleGenerationCallback, {"prompts": ["a"], "temperature": -1}),
    (ProfilerCallback, {"steps": [0]}),
    (WeightAveragingCallback, {"ema_decay": 1.5}),
    (WeightAveragingCallback, {"average_last": 1}),
    (ParallelArguments, {"tp_size": 0}),
    (ParallelArguments, {"dry_run": -8}),
]
"""A class, and parameters of which one has a bad value: the last one of `prompts` and others, else the first."""

ISLANDS = {"islands": 2, "rendezvous": "127.0.0.1:29600"}
BAD_ISLANDS = [
    ({"islands": 0}, "it must be greater than 0"),
    ({"island_rank": 2}, "it must be less than `islands` (2)"),
    ({"island_rank": -1}, "it must be at least 0"),
    ({"rendezvous": "here"}, "give host:port, such as 10.0.0.1:29600"),
    ({"every_steps": 0}, "it must be greater than 0"),
    ({"overlap_steps": -1}, "it must be at least 0"),
    ({"overlap_steps": 100}, "it must be less than `every_steps` (100), so that a round ends before the next one"),
    (
        {"overlap_steps": 25, "fragments": 4},
        "it must be less than `every_steps` (100) / `fragments` (4), so that a round ends before the next one",
    ),
    ({"fragments": 0}, "it must be greater than 0"),
    (
        {"fragments": 11, "every_steps": 10},
        "it must be at most `every_steps` (10), so that each fragment has a step of its own",
    ),
    ({"quorum": 0}, "it must be greater than 0"),
    ({"quorum": 3}, "it must be at most `islands` (2)"),
    ({"deadline_s": -1.0}, "it must be greater than 0"),
    ({"outer_lr": -1.0}, "it must be greater than 0"),
    ({"outer_momentum": 1.0}, "it must be at least 0 and less than 1"),
    ({"islands": 3, "rendezvous": None}, "give `rendezvous` too, host:port of island 0"),
]
"""Parameters of `DiLoCoCallback` of which the first has a bad value, and the rule that it breaks."""

BAD_FLAGS = [
    ("base_global_batch_size", "0"),
    ("base_block_size", "0"),
    ("critical_batch_size", "0"),
    ("warmup_scale", "0"),
    ("save_minutes", "0"),
    ("cloud", "nimbus"),
    ("hang_after_s", "-1"),
    ("memory_interval_steps", "0"),
    ("state_limit", "0"),
    ("replay_every_steps", "0"),
    ("skip_bad_batches", "0"),
    ("sample_temperature", "-0.5"),
    ("notice_s", "0"),
    ("peak_tflops", "0"),
    ("usd_per_gpu_hour", "0"),
    ("sample_steps", "0"),
    ("lora_r", "0"),
    ("block_size", "0"),
    ("powersgd_rank", "0"),
    ("tp_size", "0"),
]


def case_name(value):
    return value.__name__ if isinstance(value, type) else "-".join(map(str, value)) if value else ""


@pytest.mark.parametrize(("kind", "given"), BAD_VALUES, ids=case_name)
def test_an_error_names_the_parameter_as_it_is_written_in_python(kind, given, tmp_path):
    name = [*given][-1] if "prompts" in given else next(iter(given))
    with pytest.raises(ParameterError) as caught:
        tiny_trainer(tmp_path, kind(**given))  # those of the learning rate are checked when the Trainer is made
    assert caught.value.parameter == name
    assert name in inspect.signature(kind).parameters
    assert str(caught.value).startswith(f"{name} is ")
    assert "--" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_value_of_another_type_is_named():
    with pytest.raises(UsageError, match="every_minutes is '10': it cannot be of the type str"):
        SpotCheckpointCallback(every_minutes="10")


def test_the_errors_of_a_schedule_name_the_fields_of_parallel_arguments():
    with pytest.raises(ParameterError, match=r"^pipeline_schedule is '2F2B': "):
        StagePlan(schedule="2F2B")
    with pytest.raises(ParameterError, match=r"^virtual_stages is 3: ZBV .*; leave virtual_stages out$"):
        StagePlan(schedule="ZBV", pp=2, virtual_stages=3)
    assert {"pipeline_schedule", "virtual_stages"} <= set(inspect.signature(ParallelArguments).parameters)


@pytest.mark.parametrize(("given", "rule"), BAD_ISLANDS)
def test_an_error_about_islands_names_the_parameter_or_the_flag(given, rule, monkeypatch):
    name, value = next(iter(given.items()))
    with pytest.raises(ParameterError) as caught:
        DiLoCoCallback(**(ISLANDS | given))
    assert str(caught.value) == f"{name} is {value!r}: {rule.replace('`', '')}"
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    flags = flags_of(IslandOptions)
    for parameter in re.findall("`(.*?)`", rule):
        rule = rule.replace(f"`{parameter}`", f"--{flags[parameter]}")
    with pytest.raises(UsageError) as caught, speaking("recipe"):
        island_callbacks(ScalingArguments(**{flags[key]: value for key, value in (ISLANDS | given).items()}))
    assert str(caught.value) == f"--{flags[name]} is {value}: {rule}"


@pytest.mark.parametrize(("flag", "value"), BAD_FLAGS)
def test_an_error_of_a_recipe_names_the_flag(flag, value):
    with pytest.raises(UsageError, match=rf"^--{flag} is {value}"):
        parse_arguments([f"--{flag}", value], also=[ParallelArguments])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--checkpoint_remote", "runs/out"], "--checkpoint_remote is runs/out: give a URL"),
        (["--profile_steps", "3", "0"], "--profile_steps is [3, 0]: 0 is below 1"),
        (["--alert_webhook", "ftp://x/y"], "--alert_webhook is …: it"),
        (["--trace_steps", "3,0"], "--trace_steps is [3, 0]: 0 is below 1"),
        (["--replay_every_steps", "0"], "--replay_every_steps is 0: it must be greater than 0"),
    ],
)
def test_an_error_of_a_callback_in_a_recipe_names_the_flag(flags, line, python):
    done = python(REPOSITORY / "recipes" / "ddp" / "train.py", "--output_dir", "out", *flags)
    assert done.code == 2, done.err[-2000:]
    assert [found.removeprefix("hfscale: error: ")[: len(line)] for found in done.lines("hfscale: error")] == [line]


@pytest.mark.parametrize(
    ("ask", "names", "rule"),
    [
        (lambda: SourceArguments(streaming=True), ["streaming", "train_file", "dataset_name"], "{} is given without "),
        (
            lambda: ModelArguments(merge_adapters=True),
            ["merge_adapters", "use_peft", "model_name_or_path"],
            "{} merges ",
        ),
        (lambda: parse_bandwidth("1", "replica_bandwidth"), ["replica_bandwidth"], "{} is '1': "),
    ],
    ids=lambda case: case[0] if isinstance(case, list) else "",
)
@pytest.mark.parametrize(("speaker", "dashes"), [("python", ""), ("recipe", "--")])
def test_an_error_about_several_parameters_spells_all_of_them_as_the_caller_does(speaker, dashes, ask, names, rule):
    with pytest.raises(UsageError) as caught, speaking(speaker):
        ask()
    assert str(caught.value).startswith(rule.format(f"{dashes}{names[0]}"))
    assert re.findall(r"(?:--)?\b[a-z]+_[a-z_]+\b", str(caught.value)) == [
        f"{dashes}{name}" for name in names if "_" in name
    ]


WITHOUT_FLAG = {
    "every_steps",  # transformers' --save_steps
    "on_preemption",  # `hfscale.recipe.train` ends a preempted recipe
    "block_size",  # the length of the data, --block_size or --max_length
}
"""Keywords of the callbacks that `ScalingCallback` holds, for which the recipes have no flag."""


def test_every_keyword_of_the_parts_of_scaling_callback_has_a_flag_or_a_reason():
    flags = {field.name for field in fields(ScalingArguments)}
    without = set()
    for part in ScalingCallback().parts:
        declared = options_of(type(part.options))
        keywords = set(inspect.signature(type(part)).parameters)
        assert keywords == set(declared)
        named = {name: one.flag or name for name, one in declared.items() if one.no_flag is None}
        assert set(named.values()) <= flags
        without |= keywords - set(named)
    assert without == WITHOUT_FLAG


def test_no_two_options_of_callbacks_have_the_same_flag():
    found = [flag for cls in OF_CALLBACKS for flag in flags_of(cls).values()]
    assert len(found) == len(set(found))
    assert set(found) < {field.name for field in fields(ScalingArguments)}


def test_an_option_that_can_be_switched_off_takes_none():
    _, _, off, _ = parse_arguments(["--hang_after_s", "none", "--stop_file=none", "--save_minutes", "none"])
    assert (off.hang_after_s, off.stop_file, off.save_minutes, off.cloud) == (None, None, None, "auto")
    assert options_from(HealthOptions, off)["hang_after_s"] is None
    with pytest.raises(UsageError, match=r"^--save_minutes: invalid float value: 'never'"):
        parse_arguments(["--save_minutes", "never"])
    with pytest.raises(UsageError, match="none"):
        parse_arguments(["--warmup_scale", "none"])


@pytest.mark.parametrize(
    ("speaker", "name", "with_value", "switch", "error"),
    [
        ("python", "lora_rank", "lora_rank=16", "lora_rank=True", "lora_rank is 'a': no"),
        ("recipe", "--lora_rank", "--lora_rank 16", "--lora_rank true", "--lora_rank is a: no"),
        ("command", "--lora-rank", "--lora-rank 16", "--lora-rank", "--lora-rank is a: no"),
        ("launcher", "lora_rank", "lora_rank: 16", "lora_rank: true", "lora_rank is a: no"),
    ],
)
def test_a_parameter_is_spelled_as_its_caller_wrote_it(speaker, name, with_value, switch, error):
    with speaking(speaker):
        assert (spelled("lora_rank"), spelled("lora_rank", 16), spelled("lora_rank", True)) == (
            name,
            with_value,
            switch,
        )
        assert str(ParameterError("lora_rank", "a", "no")) == error
    with speaking(speaker, {"rank": "lora_rank"}):
        assert spelled("rank") == name
    assert spelled("lora_rank") == "lora_rank"


def test_the_error_of_a_parameter_can_be_copied():
    with speaking("recipe", {"rule": "lr_scaling_rule"}):
        error = ParameterError("rule", "cubic", "use sqrt")
    copied = copy.copy(error)
    assert (str(copied), copied.parameter) == ("--lr_scaling_rule is cubic: use sqrt", "rule")
