"""Each option of the planner is declared once, and errors name it as its caller wrote it."""

import ast
import inspect
import io
import re
import shlex
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from conftest import REPOSITORY

import hfscale
from hfscale.cli import main
from hfscale.core.options import Option, options_of
from hfscale.errors import UsageError
from hfscale.facts.hardware import accelerator
from hfscale.planner import estimate_command, options, plan_command
from hfscale.planner.option_fields import GROUPS, default_of, flag_of
from hfscale.planner.options import EstimateOptions, PlanOptions
from hfscale.tune import tune_command
from hfscale.tune.launch_command import read_command
from hfscale.tune.tune_command import TuneOptions

CLASSES = [cls for _, cls in inspect.getmembers(options, is_dataclass) if cls is not Option]
DECLARED = {name: option for cls in CLASSES for name, option in options_of(cls).items()}
FUNCTIONS = {"plan": PlanOptions, "estimate": EstimateOptions}
RESOLVED = {
    "seq_len": 1,
    "micro_batch": 1,
    "global_batch": 1,
    "compile": 1,
    "liger": 1,
    "sequence_parallel": 1,
    "loss_parallel": 1,
    "layout": 1,
    "gpus": 1,
    "gpu": 2,
}
"""Options whose types a `Job` or a `PlanRequest` narrows: there they are never None, or an object, not a name."""
SOURCES = {
    path.relative_to(REPOSITORY).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for package in ("planner", "tune")
    for path in sorted((REPOSITORY / "hfscale" / package).glob("*.py"))
}
PLAN = {"gpu": "H100-80GB", "gpus": 8}
ESTIMATE = {"gpu": "H100-80GB", "layout": {"dp_shard": 8}, "seq_len": 4096}


def spellings(name):
    return {name, *DECLARED[name].aliases}


def names_of(function):
    arguments = function.args
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def help_of(command):
    shown = io.StringIO()
    with redirect_stdout(shown):
        assert main([command, "--help"]) == 0
    return shown.getvalue()


def shown_flags(text):
    found = re.findall(r"^  (--[a-z0-9-]+)(?: / (--[a-z0-9-]+))?", text, re.MULTILINE)
    return {flag for flags in found for flag in flags if flag}


def test_an_option_is_a_field_of_one_class():
    """A class that inherits it, as `Job` does, does not declare it again, except to narrow its type."""
    declared = Counter(
        node.target.id
        for file, tree in SOURCES.items()
        for cls in ast.walk(tree)
        if isinstance(cls, ast.ClassDef)
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and node.target.id in DECLARED and is_run(file, cls.name)
    )
    assert {name: number for name, number in declared.items() if number != 1 + RESOLVED.get(name, 0)} == {}
    assert set(declared) == set(DECLARED)


def is_run(file, name):
    """Whether a class describes a run or a request; results, such as a memory's part `optimizer`, are not options."""
    of_job = file.endswith(("/job.py", "/request.py")) and name in ("Job", "PlanRequest")
    return of_job or (file.endswith("options.py") and name != "Option")


@pytest.mark.parametrize(
    ("command", "words", "needed"),
    [
        ("plan", "--lora-rank 8", "--method"),
        ("estimate", "--lora-target-modules q_proj", "--method"),
        ("estimate", "--use-dora", "--method"),
        ("plan", "--island-steps 20", "--islands"),
        ("plan", "--force", "--emit"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(command, words, needed, capsys):
    assert main([command, "llama-3.2-1b", "--gpu", "H100-80GB", "--gpus", "1", *words.split()]) == 2
    assert f"{words} has no effect without {needed}" in capsys.readouterr().err


def test_no_function_takes_many_options_as_parameters():
    """A list of options is an object; formulas take the few that they compute with."""
    for file, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                taken = [name for name in names_of(node) if any(name in spellings(option) for option in DECLARED)]
                assert len(taken) <= 6, f"{file}: {node.name} takes {taken}"


def test_no_call_forwards_many_options():
    """A call such as `plan(..., stack=stack, method=method, ...)` repeats what the options say."""
    for file, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                same = [
                    one.arg for one in node.keywords if isinstance(one.value, ast.Name) and one.value.id == one.arg
                ]
                forwarded = [name for name in same if name in DECLARED]
                assert len(forwarded) <= 6, f"{file}:{node.lineno} forwards {forwarded}"


def test_the_flag_and_the_help_text_of_an_option_are_written_once():
    texts = Counter(
        node.value
        for tree in SOURCES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    assert {one.help: texts[one.help] for one in DECLARED.values() if texts[one.help] != 1} == {}
    flags = {flag_of(one.flag or name) for name, one in DECLARED.items()}
    in_strings = {text: number for text, number in texts.items() if text in flags}
    assert in_strings == {
        "--json": 1,
        "--calibrate": 1,
        "--emit": 1,
        "--choice": 1,
    }  # in commands that are started


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature_and_docstring_are_those_of_the_fields(name):
    function = getattr(hfscale, name)
    parameters = dict(inspect.signature(function).parameters)
    assert parameters.pop("model").default is inspect.Parameter.empty
    assert set(parameters) == {field.name for field in fields(FUNCTIONS[name])}
    for option, parameter in parameters.items():
        assert parameter.default == default_of(FUNCTIONS[name], option, name)
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert f"\n        {option} (`" in function.__doc__
        for alias in DECLARED[option].aliases:
            assert f"`{alias}`" in function.__doc__


COMMANDS = {
    "plan": (PlanOptions, options.IslandOptions, options.PlanOutput),
    "estimate": (EstimateOptions, options.GpusOption, options.AxisOptions, options.EstimateInput),
    "tune": (TuneOptions,),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_the_flags_in_groups_and_ends_with_examples(command):
    text = help_of(command)
    expected = {
        flag_of(option.flag or name)
        for cls in COMMANDS[command]
        for name, option in options_of(cls).items()
        if command in option.flag_of
    }
    tri_state = {"plan": {"--no-compile", "--no-liger"}, "estimate": {"--no-compile"}}.get(command, set())
    assert shown_flags(text) == expected | tri_state | {"--help"}
    groups = [line.removesuffix(":") for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert [group for group in groups if group in GROUPS] == [group for group in GROUPS if group in groups]
    assert {"Hardware", "Search and limits" if command != "estimate" else "Layout", "Output"} <= set(groups)
    assert groups[-1] == "Examples"
    examples = text.split("Examples:\n")[1].splitlines()
    assert len(examples) == (3 if command == "tune" else 2)
    assert all(line.startswith(f"  hfscale {command} ") for line in examples)


@pytest.mark.parametrize("example", [*plan_command.EXAMPLES, *estimate_command.EXAMPLES])
def test_the_examples_run(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs.csv").write_text("model,seq_len,gpus,gpu_type\nllama-3.1-8b,4096,8,H100-80GB\n")
    assert main(shlex.split(example)[1:]) == 0
    assert "tokens" in capsys.readouterr().out


@pytest.mark.parametrize("example", tune_command.EXAMPLES)
def test_the_examples_of_tune_are_read(example, monkeypatch, tmp_path):
    """They run for minutes: the launch command is read and planned for, but not started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    (tmp_path / "my_train.py").write_text("from hfscale import ScalingCallback\n")
    flags, _, launch = example.partition(" -- ")
    words = iter(shlex.split(flags)[2:])
    given = {word.removeprefix("--").replace("-", "_"): next(words) for word in words}
    tokens = int(given["seq_len"]) if "seq_len" in given else None
    asked = read_command(shlex.split(launch), model=given.get("model"), seq_len=tokens)
    assert tune_command.plan_command(asked, accelerator("H100-80GB")).choices


def test_a_flag_that_plan_and_tune_have_is_checked_in_the_same_way():
    both = options_of(TuneOptions).keys() & options_of(PlanOptions).keys() - {"gpu"}
    assert both == {"top", "deadline", "budget", "usd_per_gpu_hour", "seq_len"}
    for name in both - {"seq_len"}:  # which tune needs for scripts that are no recipes
        of_tune, of_plan = (options_of(cls)[name] for cls in (TuneOptions, PlanOptions))
        assert (of_tune.group, of_tune.unit, of_tune.check) == (of_plan.group, of_plan.unit, of_plan.check)
    tree = ast.parse(Path(tune_command.__file__).read_text(encoding="utf-8"))
    declared = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "option"]
    checks = [ast.unparse(one.value) for call in declared for one in call.keywords if one.arg == "check"]
    assert checks == ["a_count", "a_count"]  # of --steps, which plan does not have, and of --seq-len


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"fused_loss": True}, {"liger": True}),
        ({"pure": True}, {"pure_bf16": True}),
        ({"deadline_hours": 1e6, "tokens": 1e9}, {"deadline": 1e6, "tokens": 1e9}),
        ({"budget_usd": 1e9, "tokens": 1e9}, {"budget": 1e9, "tokens": 1e9}),
    ],
)
def test_both_public_names_of_an_option_mean_the_same(one, other):
    first, second = (hfscale.plan("smollm2-360m", **PLAN, **given).to_dict() for given in (one, other))
    reasons = str(first)
    for name, other_name in zip(one, other, strict=True):
        reasons = reasons.replace(f"{name}=", f"{other_name}=")  # an error names the option as its caller did
    assert reasons == str(second)
    assert first != hfscale.plan("smollm2-360m", **PLAN).to_dict()


def test_estimate_has_a_second_name_for_activation_checkpointing():
    first = hfscale.estimate("smollm2-360m", **ESTIMATE, recompute="full").to_dict()
    assert first == hfscale.estimate("smollm2-360m", **ESTIMATE, activation_checkpointing="full").to_dict()
    with pytest.raises(TypeError, match="'recompute' and 'activation_checkpointing'"):
        hfscale.estimate("smollm2-360m", **ESTIMATE, recompute="full", activation_checkpointing="full")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"nothing": 1}, "plan.* unexpected keyword argument 'nothing'"),
        ({"gpus": 8}, "plan.* gpu"),
    ],
)
def test_a_wrong_keyword_is_a_type_error(given, named):
    with pytest.raises(TypeError, match=named):
        hfscale.plan("smollm2-360m", **given)


@pytest.mark.parametrize(
    ("function", "given", "named"),
    [
        ("plan", {"gpus": 0}, "gpus is 0"),
        ("plan", {"gpus": 12}, "gpus is 12.* set gpus_per_node"),
        ("plan", {"seq_len": None}, "seq_len is None"),
        ("plan", {"stack": "jax"}, "stack is 'jax'"),
        ("plan", {"network_gb_s": 0.0, "gpus": 16}, "network_gb_s is 0.0"),
        ("plan", {"method": "lora", "lora_rank": 0}, "lora_rank is 0"),
        ("plan", {"deadline_hours": 0.0}, "deadline_hours is 0.0"),
        ("plan", {"deadline": 0.0}, "deadline is 0.0"),
        ("plan", {"budget_usd": 5.0}, "hours and costs .* give tokens"),
        ("plan", {"beta": 0.5}, "beta belongs to task grpo"),
        ("plan", {"task": "sft", "fused_loss": True}, "TRL fuses the loss itself: leave out fused_loss"),
        ("plan", {"top": 0}, "top is 0"),
        ("estimate", {"global_batch": 12}, "global_batch is 12.* micro_batch 1"),
        ("estimate", {"method": "lora", "lora_rank": 0}, "lora_rank is 0"),
        ("estimate", {"recompute": "some"}, "recompute is 'some'"),
        ("estimate", {"activation_checkpointing": "some"}, "activation_checkpointing is 'some'"),
        ("estimate", {"zero": 7}, "zero is 7"),
    ],
)
def test_an_error_names_the_keyword_of_a_call_from_python(function, given, named):
    base = PLAN if function == "plan" else ESTIMATE
    with pytest.raises(UsageError, match=f"^{named}") as caught:
        getattr(hfscale, function)("llama-3.1-8b", **{**base, **given})
    assert "--" not in str(caught.value)


@pytest.mark.parametrize(
    ("command", "flags", "named"),
    [
        ("plan", ["--gpus", "0"], "--gpus is 0"),
        ("plan", ["--gpus", "12"], "--gpus is 12.* set --gpus-per-node"),
        ("plan", ["--seq-len", "0"], "--seq-len is 0"),
        ("plan", ["--network-gb-s", "0", "--gpus", "16"], "--network-gb-s is 0"),
        ("plan", ["--method", "lora", "--lora-rank", "0"], "--lora-rank is 0"),
        ("plan", ["--deadline", "0"], "--deadline is 0"),
        ("plan", ["--beta", "0.5"], "--beta belongs to --task grpo"),
        ("plan", ["--task", "sft", "--liger"], "TRL fuses the loss itself: leave out --liger"),
        ("plan", ["--islands", "1", "--island-bandwidth", "1Gbps"], "--islands is 1"),
        ("estimate", ["--gpus", "0"], "--gpus is 0"),
        ("estimate", ["--global-batch", "12"], "--global-batch is 12.* --micro-batch 1"),
        ("estimate", ["--method", "lora", "--lora-rank", "0"], "--lora-rank is 0"),
        ("estimate", ["--tp", "0"], "--tp is 0"),
        ("estimate", ["--zero", "7"], "--zero is 7"),
        ("estimate", ["--virtual-stages", "2"], "--virtual-stages is 2.* --pp above 1"),
    ],
)
def test_an_error_names_the_flag_of_a_command(capsys, command, flags, named):
    assert main([command, "llama-3.1-8b", "--gpu", "H100-80GB", "--gpus", "8", *flags]) == 2
    assert re.match(f"hfscale: error: {named}", capsys.readouterr().err)
    with pytest.raises(UsageError, match=r"^gpus is 0"):  # the spelling ends with the command
        hfscale.plan("llama-3.1-8b", gpu="H100-80GB", gpus=0)


def test_an_error_of_a_row_names_its_column(tmp_path, capsys):
    table = tmp_path / "runs.csv"
    table.write_text("model,seq_len,gpus,gpu_type,global_batch_seqs,micro_batch\nllama-3.1-8b,4096,8,H100-80GB,12,1\n")
    assert main(["estimate", "--table", str(table)]) == 0
    assert '"error": "global_batch is 12' in capsys.readouterr().out
