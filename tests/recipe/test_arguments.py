"""Flags, YAML files and the embedded defaults: which one wins, how values are read, and one line for a mistake."""

import argparse
import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from hfscale import ParallelArguments
from hfscale.errors import CheckpointError, ConfigFileError, HfScaleError, UsageError
from hfscale.recipe.arguments import (
    RecipeTrainingArguments,
    check_evaluation,
    complete_early_stopping,
    errors_name_flag,
)
from hfscale.recipe.parsing import EMBEDDED, flag_groups, help_text, parse_arguments

GROUPS = flag_groups()
EMBEDDED_DEFAULTS = EMBEDDED["text"]
ON_FILE = ("--train_file", "text.txt")


def test_no_checkpoint_contains_a_hub_token(tmp_path, monkeypatch):
    """Trainer saves its arguments unchanged in every checkpoint."""
    monkeypatch.setenv("HF_TOKEN", "before")
    arguments = RecipeTrainingArguments(output_dir=str(tmp_path), hub_token="hf_planted")
    torch.save(arguments, tmp_path / "training_args.bin")
    assert b"hf_planted" not in (tmp_path / "training_args.bin").read_bytes()
    assert os.environ["HF_TOKEN"] == "hf_planted"  # noqa: S105


def read(*argv: str) -> argparse.Namespace:
    """Parse flags and return the fields of all groups."""
    values: dict[str, Any] = {}
    for group in parse_arguments(argv):
        values |= vars(group)
    return argparse.Namespace(**values)


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[[str | bytes], str]:
    """Return a function that writes a YAML file and returns its path: `recipe("max_steps: 7")`."""

    def write(text: str | bytes) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def refuses(*argv: str, parts: tuple[str, ...], kind: type[HfScaleError] = UsageError) -> None:
    """Assert that the flags raise a UsageError of one line that contains all of `parts`."""
    with pytest.raises(kind) as caught:
        parse_arguments(argv)
    message = str(caught.value)
    assert isinstance(caught.value, UsageError)
    assert caught.value.exit_code == 2
    assert "\n" not in message
    for part in parts:
        assert part in message


# Precedence.


def test_a_flag_wins_over_yaml_and_yaml_over_the_embedded_default(recipe: Any) -> None:
    path = recipe("max_steps: 7\nlearning_rate: 3e-4\n")
    assert EMBEDDED_DEFAULTS["max_steps"] == "90"
    assert read().max_steps == 90
    assert read("--config", path).max_steps == 7
    assert read("--config", path, "--max_steps", "9").max_steps == 9
    assert read("--max_steps", "9", f"--config={path}").max_steps == 9
    assert read("--config", path, "--max-steps=9").max_steps == 9
    assert read("--config", path, "--max_steps", "9").learning_rate == 3e-4
    assert read("--config", path).block_size == int(EMBEDDED_DEFAULTS["block_size"])


def test_a_text_of_the_command_line_replaces_that_of_the_file(recipe: Any) -> None:
    path = recipe("dataset_name: a\ndataset_config_name: b\ndataset_train_split: c\nblock_size: 64\n")
    assert read("--config", path).dataset_name == "a"
    for flag in ("train_file", "data_mix"):
        found = read("--config", path, f"--{flag}", "x.jsonl")
        named = (found.dataset_name, found.dataset_config_name, found.dataset_train_split, found.block_size)
        assert (*named, getattr(found, flag)) == (None, None, "train", 64, "x.jsonl")
    found = read("--config", path, "--dataset-name=other")
    assert (found.dataset_name, found.dataset_config_name, found.dataset_train_split) == ("other", "b", "c")
    refuses("--config", path, "--train_file", "x", "--data_mix", "y", parts=("--train_file", "--data_mix"))


@pytest.mark.parametrize("flag", ["model_name_or_path", "config_name", "dataset_name", "train_file"])
def test_the_embedded_defaults_are_for_the_embedded_run_only(flag: str, recipe: Any) -> None:
    hyphens = flag.replace("_", "-")
    for argv in ([f"--{flag}", "x"], [f"--{hyphens}=x"], ["--config", recipe(f"{flag}: x")]):
        arguments = read(*argv)
        assert arguments.max_steps == -1
        assert arguments.block_size == 1024
        assert arguments.base_global_batch_size is None


def test_given_epochs_replace_the_steps_of_the_embedded_run(recipe: Any) -> None:
    for argv in (["--num_train_epochs", "2"], ["--num-train-epochs=2"], ["--config", recipe("num_train_epochs: 2")]):
        assert (read(*argv).max_steps, read(*argv).num_train_epochs) == (-1, 2)
    assert read("--num_train_epochs", "2", "--max_steps", "5").max_steps == 5


def test_every_embedded_default_is_a_flag() -> None:
    arguments = read()
    for name, value in EMBEDDED_DEFAULTS.items():
        parsed = getattr(arguments, name)
        assert parsed == type(parsed)(value)


# Forms of flags and values.


@pytest.mark.parametrize(
    "argv", [["--block_size", "77"], ["--block_size=77"], ["--block-size", "77"], ["--block-size=77"]]
)
def test_four_ways_to_write_a_flag(argv: list[str]) -> None:
    assert read(*argv).block_size == 77


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("use_peft: true", "use_peft", True),
        ("use_peft: False", "use_peft", False),
        ("dataloader_persistent_workers: no", "dataloader_persistent_workers", False),
        ("save_strategy: no", "save_strategy", "no"),
        ("eval_strategy: no", "eval_strategy", "no"),
        ("report_to: none", "report_to", []),
        ("report_to: wandb", "report_to", ["wandb"]),
        ("report_to: [wandb, tensorboard]", "report_to", ["wandb", "tensorboard"]),
        ("lora_target_modules: [q_proj, v_proj]", "lora_target_modules", ["q_proj", "v_proj"]),
        ("lora_target_modules:\n  - q_proj", "lora_target_modules", ["q_proj"]),
        ("lora_target_modules: q_proj", "lora_target_modules", ["q_proj"]),
        ("max_steps: null", "max_steps", 90),
        ("max_steps:", "max_steps", 90),
        ("max_steps: ~", "max_steps", 90),
        ("max_steps: -1", "max_steps", -1),
        ("learning_rate: 2e-5", "learning_rate", 2e-5),
        ("learning_rate: 2.0e-5", "learning_rate", 2e-5),
        ("learning_rate: .5", "learning_rate", 0.5),
        ("run_name: -x", "run_name", "-x"),
        ("run_name: --max_steps", "run_name", "--max_steps"),
        ("run_name: 2026-01-01", "run_name", "2026-01-01"),
        ("run_name: 007", "run_name", "007"),
        ("run_name: on", "run_name", "on"),
        ("run_name: 12:30:45", "run_name", "12:30:45"),
        ("run_name: 'a = b: c'", "run_name", "a = b: c"),
        ("run_name: grüße 🦊", "run_name", "grüße 🦊"),
        ("\ufeffmax_steps: 7", "max_steps", 7),
        ("max_steps: 7\r\nseed: 1\r\n", "seed", 1),
        ("resume_from_checkpoint: true", "resume_from_checkpoint", "true"),
        ("resume_from_checkpoint: false", "resume_from_checkpoint", "false"),
        (
            "activation_checkpointing_kwargs: {use_reentrant: false}",
            "activation_checkpointing_kwargs",
            {"use_reentrant": False},
        ),
        (
            "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-6}",
            "lr_scheduler_kwargs",
            {"min_lr": 1e-6},
        ),
        ("", "max_steps", 90),
        ("# nothing yet\n", "max_steps", 90),
    ],
)
def test_yaml_values(text: str, name: str, value: Any, recipe: Any) -> None:
    assert getattr(read("--config", recipe(text)), name) == value


def test_lists_on_the_command_line() -> None:
    assert read("--lora_target_modules", "q", "v", "--max_steps", "3").lora_target_modules == ["q", "v"]
    assert read("--report_to", "wandb", "tensorboard").report_to == ["wandb", "tensorboard"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--model_name_or_path", "", "--train_file", "a.jsonl"],
        ["--output-dir="],
        ["", "--max_steps", "3"],
        ["--max_steps", "3", "--train_file", ""],
    ],
)
def test_an_empty_value_is_a_variable_that_is_not_set(argv: list[str]) -> None:
    with pytest.raises(UsageError, match="is empty: set the variable"):
        parse_arguments(argv)


def test_an_empty_value_takes_back_an_earlier_one() -> None:
    model, *_ = parse_arguments(["--config_name", "somewhere", "--use_cpu", "--config-name", ""])
    assert not model.config_name


def test_help_prints_the_flags_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "-h"):
        with pytest.raises(SystemExit) as caught:
            parse_arguments([flag])
        assert caught.value.code == 0
        assert "--train_file" in capsys.readouterr().out


def test_the_default_flags_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--seed", "3"])
    assert parse_arguments()[-1].seed == 3


# Defaults on a machine without an accelerator.


@pytest.mark.skipif(torch.accelerator.is_available(), reason="about machines without an accelerator")
def test_on_a_cpu_the_defaults_are_those_of_a_cpu() -> None:
    arguments = read()
    assert arguments.use_cpu
    assert arguments.bf16 is False
    assert arguments.dataloader_pin_memory is False
    assert read("--bf16", "true").bf16 is True


def test_bf16_is_the_default_if_the_hardware_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    monkeypatch.setattr("transformers.training_args.TrainingArguments.__post_init__", lambda self: None)
    monkeypatch.setattr("hfscale.recipe.arguments._check_scheduler", lambda args: None)
    assert RecipeTrainingArguments(report_to=None).bf16 is True
    assert RecipeTrainingArguments(report_to=None).use_cpu is False
    assert RecipeTrainingArguments(report_to=None, fp16=True).bf16 is False
    assert RecipeTrainingArguments(report_to=None, use_cpu=True).bf16 is False
    assert RecipeTrainingArguments(report_to=None, bf16=False).bf16 is False


def test_no_workers_need_no_worker_options() -> None:
    arguments = read("--dataloader_num_workers", "0")
    assert (arguments.dataloader_persistent_workers, arguments.dataloader_prefetch_factor) == (False, None)


# Mistakes in the file.


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("max_stepz: 3", ("unknown key 'max_stepz'", "did you mean max_steps?")),
        ("learning-rate: 3", ("unknown key 'learning-rate'", "did you mean learning_rate?")),
        ("zzz: 3", ("unknown key 'zzz'",)),
        ("1: 2", ("unknown key '1'",)),
        ("max_steps: 1\nseed: 3\nmax_steps: 2\n", ("line 3", "'max_steps' is given twice")),
        ("a: [1\nb: 2", ("not valid YAML", "line 2")),
        ("a: b: c", ("not valid YAML", "line 1")),
        ("\tmax_steps: 1", ("not valid YAML", "line 1")),
        ("run_name: !!python/object/apply:os.getcwd []", ("not valid YAML",)),
        ("seed: 1\x00", ("not valid YAML",)),
        ("---\nseed: 1\n---\nseed: 2\n", ("not valid YAML", "line 3")),
        ("? [a, b]\n: 3", ("not valid YAML",)),
        ("- max_steps", ("holds a list", "'flag: value' lines")),
        ("max_steps 3", ("holds plain text", "'flag: value' lines")),
        (b"run_name: caf\xe9", ("not UTF-8 text", "byte 13 is 0xe9", "save it as UTF-8")),
        ("lora_target_modules: []", ("'lora_target_modules'", "a list of values")),
        ("lora_target_modules: [[q]]", ("'lora_target_modules'", "a list of values")),
        ("lora_target_modules: [{q: v}]", ("'lora_target_modules'", "a list of values")),
    ],
)
def test_an_error_in_yaml_names_the_file_and_the_fault(text: str | bytes, parts: tuple[str, ...], recipe: Any) -> None:
    path = recipe(text)
    refuses("--config", path, parts=(f"--config {path}", *parts), kind=ConfigFileError)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("max_steps: [1, 2]", ("'2' is not a flag",)),
        ("max_steps: {a: 1}", ("--max_steps", "invalid int value")),
        ("max_steps: many", ("--max_steps", "'many'")),
        ("bf16: maybe", ("--bf16", "maybe")),
        ("learning_rate: -1e-5", ("--learning_rate is -1e-05",)),
        ("learning_rate: .inf", ("--learning_rate", "'.inf'")),
        ("optim: adamx", ("--optim", "'adamx'")),
    ],
)
def test_a_wrong_value_in_yaml_names_the_flag(text: str, parts: tuple[str, ...], recipe: Any) -> None:
    refuses("--config", recipe(text), parts=parts)


def test_a_config_that_is_missing_or_not_a_file(tmp_path: Path) -> None:
    refuses("--config", "gone.yaml", parts=("--config gone.yaml", "No such file"), kind=ConfigFileError)
    refuses("--config", str(tmp_path), parts=(f"--config {tmp_path}", "Is a directory"), kind=ConfigFileError)
    refuses("--config", parts=("--config needs a YAML file",))
    refuses("--config=", parts=("--config needs a YAML file",))
    refuses("--config", "--max_steps", "3", parts=("--config needs a YAML file",))
    refuses("--config", "a.yaml", "--config=b.yaml", parts=("--config is given twice, a.yaml and b.yaml",))


# Mistakes in the flags.


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--max_step", "1"], ("unknown flag --max_step", "did you mean --max_steps?")),
        (["--max-step=1"], ("unknown flag --max-step", "did you mean --max_steps?")),
        (["--evaluation_strategy", "no"], ("did you mean --eval_strategy?",)),
        (["--foo"], ("unknown flag --foo", "--help")),
        (["--ep_size", "2"], ("--ep_size is a flag of recipes/sharded/train.py", "data parallel")),
        (["--no_max_steps", "3"], ("'--no_max_steps' is not a flag",)),
        (["stray"], ("'stray' is not a flag",)),
        (["-x"], ("'-x' is not a flag",)),
        (["--max_steps"], ("--max_steps: expected one argument",)),
        (["--max_steps", "1.5"], ("--max_steps: invalid int value: '1.5'",)),
        (["--learning_rate", "fast"], ("--learning_rate: invalid float value: 'fast'",)),
        (["--use_cpu", "maybe"], ("--use_cpu", "maybe", "true/false")),
        (["--lr_scaling_rule", "cubic"], ("--lr_scaling_rule", "'cubic'", "'linear'")),
        (["--lr_scheduler_type", "sine"], ("--lr_scheduler_type", "'sine'", "'cosine'")),
        (["--report_to", "wandbb"], ("--report_to wandbb", "wandb", "none")),
        (["--torch_compile_backend", "nope"], ("--torch_compile_backend nope", "inductor", "eager")),
        (["--save_strategy", "best"], ("--save_strategy best", "--metric_for_best_model")),
        (["--lr_scheduler_kwargs", "{bad"], ("--lr_scheduler_kwargs {bad is not JSON",)),
        (["--lr_scheduler_kwargs", "3"], ("--lr_scheduler_kwargs 3 is not a JSON mapping",)),
        (["--lr_scheduler_kwargs", '{"bad": 1}'], ("--lr_scheduler_type", "--lr_scheduler_kwargs", '"bad"')),
        (["--lr_scheduler_type", "cosine_with_min_lr"], ("cosine_with_min_lr", "--lr_scheduler_kwargs", "min_lr")),
        (["--accelerator_config", "gone.json"], ("--accelerator_config gone.json",)),
        (["--deepspeed", "gone.json"], ("gone.json",)),
        (["--max_steps", "0"], ("--max_steps 0", "1 or more")),
        (["--num_train_epochs", "0"], ("--num_train_epochs is 0.0",)),
        (["--logging_steps", "0"], ("--logging_steps is 0.0",)),
        (["--validation_split_percentage", "100"], ("--validation_split_percentage is 100", "less than 100")),
        (["--lora_dropout", "1"], ("--lora_dropout is 1.0", "less than 1")),
        (["--adam_beta2", "1"], ("--adam_beta2 is 1.0", "less than 1")),
        (["--seed", str(2**32)], (f"--seed is {2**32}", "less than")),
    ],
)
def test_a_wrong_flag_or_value_is_named(argv: list[str], parts: tuple[str, ...]) -> None:
    refuses(*argv, parts=parts)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (
            ["--model_name_or_path", "a", "--config_name", "b"],
            ("--model_name_or_path", "--config_name", "one of them"),
        ),
        (["--dataset_name", "a", "--train_file", "b"], ("--dataset_name", "--train_file", "one of them")),
        (["--validation_file", "a"], ("--validation_file", "--train_file")),
        (["--streaming", "true"], ("--streaming", "--train_file")),
        (["--dataset_config_name", "a"], ("--dataset_config_name a", "--dataset_name")),
        ([*ON_FILE, "--streaming", "true"], ("--streaming", "--max_steps")),
        (["--fp16", "true", "--bf16", "true"], ("fp16", "bf16", "not both")),
        (["--load_best_model_at_end", "true"], ("--load_best_model_at_end", "eval")),
    ],
)
def test_flags_that_contradict_each_other_are_both_named(argv: list[str], parts: tuple[str, ...]) -> None:
    refuses(*argv, parts=parts)


NUMERIC = [
    flag.name
    for group in GROUPS
    for flag in fields(group)
    if flag.init and flag.type in (int, float, int | None, float | None) and flag.name != "local_rank"
]


def test_the_numeric_flags_are_found() -> None:
    assert len(NUMERIC) > 40
    assert {"block_size", "learning_rate", "eval_steps", "save_minutes", "lora_r", "seed"} <= set(NUMERIC)


@pytest.mark.parametrize("name", NUMERIC)
def test_a_number_must_be_neither_negative_nor_nan(name: str) -> None:
    refuses(*ON_FILE, f"--{name}=-3", parts=(name, "-3"))
    refuses(*ON_FILE, f"--{name}=nan", parts=(f"--{name}", "nan"))


# Errors of libraries that come from a flag.


@pytest.mark.parametrize(
    "error", [OSError("gone\nfor good"), ValueError("odd"), KeyError("odd"), TypeError("odd"), Exception("odd")]
)
def test_an_error_of_a_library_names_the_flag_in_one_line(error: Exception) -> None:
    with pytest.raises(UsageError) as caught, errors_name_flag("--config_name", "tiny"):
        raise error
    assert str(caught.value).startswith("--config_name tiny cannot be used: ")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_an_error_of_a_library_says_that_a_path_does_not_exist(tmp_path: Path) -> None:
    for path in (str(tmp_path / "gone"), "./gone", "~/gone-for-good"):
        with (
            pytest.raises(UsageError, match=r"does not exist: correct the path"),
            errors_name_flag("--config_name", path),
        ):
            raise OSError("a repo id must be in the form …")
    with pytest.raises(UsageError, match="must be in the form"), errors_name_flag("--config_name", str(tmp_path)):
        raise OSError("a repo id must be in the form …")


def test_errors_with_another_cause_are_not_changed() -> None:
    for error in (MemoryError(), torch.OutOfMemoryError("out of memory"), CheckpointError("corrupt")):
        with pytest.raises(type(error)) as caught, errors_name_flag("--config_name", "tiny"):
            raise error
        assert caught.value is error
    with contextlib.suppress(KeyboardInterrupt), errors_name_flag("--config_name", "tiny"):
        raise KeyboardInterrupt


def test_evaluation_without_text_or_patience_without_evaluation() -> None:
    evaluating = parse_arguments(["--eval_strategy", "steps", "--eval_steps", "5"])[-1]
    check_evaluation(evaluating, has_evaluation=True)
    with pytest.raises(UsageError, match=r"--eval_strategy steps .*--validation_file"):
        check_evaluation(evaluating, has_evaluation=False)
    silent = parse_arguments([])[-1]
    check_evaluation(silent, has_evaluation=False)
    complete_early_stopping(silent, None)
    with pytest.raises(UsageError, match=r"--early_stopping_patience .*--eval_strategy"):
        complete_early_stopping(silent, 2)


def test_patience_compares_the_loss_by_default() -> None:
    arguments = parse_arguments(["--eval_strategy", "steps", "--eval_steps", "5"])[-1]
    complete_early_stopping(arguments, 2)
    assert (arguments.metric_for_best_model, arguments.greater_is_better) == ("loss", False)


# The help.


def test_help_begins_with_the_config_file_and_its_precedence() -> None:
    usage, _, flags = help_text().partition("Model:")
    assert "[--config FILE.yaml]" in usage.splitlines()[0]
    assert re.search(r"--config FILE\.yaml\n +Read flags from a YAML file.*command line win", usage)
    assert "--model_name_or_path" in flags


def test_help_has_every_flag_once_with_ours_before_those_of_transformers() -> None:
    text = help_text(also=[ParallelArguments])
    shown = re.findall(r"^  --(\w+)", text, re.MULTILINE)
    known = [flag.name for group in (*GROUPS, ParallelArguments) for flag in fields(group) if flag.init]
    assert sorted(shown) == sorted([*known, "config"])
    titles = re.findall(r"^([A-Z]\w+).*:$", text, re.MULTILINE)
    assert titles == ["Model", "Data", "Learning", "Parallel", "Training", "Training"]
    inherited = shown[shown.index("topk_fraction") :]
    assert shown.index("tp_size") < shown.index("output_dir") < shown.index("adam_beta1")
    assert {"learning_rate", "seed", "fsdp"} <= set(inherited)
    assert not {"lora_r", "block_size", "save_minutes", "tp_size", "report_to"} & set(inherited)
    assert len(text.splitlines()) < 610


def test_help_shows_choices_and_defaults() -> None:
    text = " ".join(help_text(also=[ParallelArguments]).split())
    assert "--lora_r N Rank of the LoRA adapters. [16]" in text
    assert "--recompute {full,selective}" in text
    assert "--lr_scheduler_type {linear,cosine," in text
    assert re.search(r"--use_peft true\|false [^\[]*\[false\]", text)
    assert "%%" not in text


# A broken DeepSpeed config, which the libraries report without its name.


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b'{\n  "a": 1,\n  "b" 2\n}', ("is not JSON: line 3 column 7",)),
        (b"[1]", ("is not a JSON mapping",)),
        (b'{"a": "\xe9"}', ("is not UTF-8 text",)),
        (b"", ("is not JSON: line 1 column 1",)),
    ],
)
def test_a_broken_deepspeed_config_is_named_with_the_position(
    content: bytes, parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    refuses("--deepspeed", str(path), parts=(f"--deepspeed {path}", *parts))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    refuses(parts=(f"deepspeed_config_file {path}", *parts))
