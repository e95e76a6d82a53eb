"""Every recipe YAML begins with its command, parses, and has a batch that fits; README commands use existing paths."""

import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from conftest import REPOSITORY

from hfscale import ParallelArguments
from hfscale.errors import ConfigFileError, UsageError
from hfscale.recipe.parsing import flag_groups, parse_arguments

RECIPES = sorted((REPOSITORY / "recipes").rglob("*.yaml"))
A_RECIPE = REPOSITORY / "recipes" / "ddp" / "smollm2-135m-full.yaml"
READMES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "recipes").rglob("README.md"))]
TRL_TASKS = ("sft", "vision", "dpo", "grpo", "distillation")
"""The folders of TRL's recipes."""
FLAGS = {
    "config",
    "help",
    *(
        flag.name
        for task in ("text", *TRL_TASKS)
        for group in (*flag_groups(task), ParallelArguments)
        for flag in fields(group)
        if flag.init
    ),
}
SHELL_BLOCK = re.compile(r"^ *```(?:bash|sh|shell|console)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
REPOSITORY_PATH = re.compile(r"(?:accelerate_configs|ds_configs|recipes)/")
SCRIPT = re.compile(r"recipes/.+\.py")
SUMMARY_LENGTH = 100
TEXT_DATASETS = ("HuggingFaceFW/", "Salesforce/wikitext", "wikimedia/")
"""How the names of datasets begin that are plain text."""


def named(path: Path) -> str:
    """Return a path as commands write it."""
    return path.relative_to(REPOSITORY).as_posix()


def launch_line(recipe: Path) -> tuple[Namespace, list[str]]:
    """Parse the command in a recipe's first line into the launcher's arguments and the flags of the script."""
    first = recipe.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# accelerate launch "), first
    launcher = launch_command_parser().parse_args(shlex.split(first)[3:])
    return launcher, launcher.training_script_args


def batch_problem(recipe: Path) -> str | None:
    """Return how the batch flags of a recipe contradict the number of processes in its command, or None."""
    launcher, _ = launch_line(recipe)
    flags = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    if launcher.num_processes is None or "base_global_batch_size" not in flags:
        return None
    sharing = (
        flags.get("cp_size", 1) * flags.get("tp_size", 1) * flags.get("pp_size", 1)
    )  # ranks that share a sequence
    ranks = launcher.num_processes // sharing
    sequences = flags["per_device_train_batch_size"] * flags["gradient_accumulation_steps"] * ranks
    base = flags["base_global_batch_size"]
    return None if sequences == base else f"{launcher.num_processes} processes make {sequences} sequences, not {base}"


def shell_commands(markdown: str) -> Iterator[list[str]]:
    """Yield the commands of all fenced shell blocks as tokens."""
    for block in SHELL_BLOCK.findall(markdown):
        for line in block.replace("\\\n", " ").splitlines():
            command: list[str] = []
            for token in [*shlex.split(line.strip().removeprefix("$ "), comments=True), "&&"]:
                if token not in ("&&", "||", ";", "|", "&"):
                    command.append(token)
                elif command:
                    yield command
                    command = []


def command_problems(command: list[str]) -> list[str]:
    """Return the paths of a command that do not exist and its flags that no recipe has."""
    words = [word for token in command for part in token.split() for word in part.split("=")]
    paths = [word for word in words if REPOSITORY_PATH.match(word)]
    problems = [f"no path {path}" for path in paths if not any(REPOSITORY.glob(path.rstrip("/")))]
    script = next((index for index, token in enumerate(command) if SCRIPT.fullmatch(token)), None)
    if script is not None:
        given = [token.partition("=")[0][2:] for token in command[script + 1 :] if token.startswith("--")]
        problems += [f"no flag --{name}" for name in given if not {name, name.removeprefix("no_")} & FLAGS]
    if command[:2] == ["accelerate", "launch"]:
        try:
            launch_command_parser().parse_args(command[2:])
        except SystemExit:
            problems.append(f"accelerate rejects: {shlex.join(command)}")
    return problems


def test_there_are_recipes():
    assert RECIPES


@pytest.mark.parametrize("folder", ["ddp", "sharded", "tp_pp"])
def test_the_page_names_the_models_of_a_folder(folder):
    page = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
    section = page.partition(f": `recipes/{folder}/`\n")[2].partition("\n## ")[0]
    shown = set(re.findall(r"`([\w.-]+)`", section.partition("\nYAML files: ")[2]))
    models = {path.stem.rpartition("-")[0] for path in (REPOSITORY / "recipes" / folder).glob("*.yaml")}
    assert models == {name for name in shown if "-" in name}


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_first_line_launches_this_recipe(recipe):
    launcher, script_flags = launch_line(recipe)
    assert (REPOSITORY / launcher.config_file).is_file()
    assert (REPOSITORY / launcher.training_script).is_file()
    assert script_flags == ["--config", named(recipe)]


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_second_line_is_a_summary(recipe):
    second = recipe.read_text(encoding="utf-8").splitlines()[1]
    assert re.fullmatch(rf"# \S.{{10,{SUMMARY_LENGTH}}}", second)


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_parses_and_is_flat(recipe):
    folder = recipe.parent.name
    also = [ParallelArguments] if folder in ("sharded", "tp_pp") else []
    task = folder if folder in TRL_TASKS else "text"
    model, data, _, training, *_ = parse_arguments(["--config", str(recipe)], task=task, also=also)
    assert model.model_name_or_path or model.config_name
    assert data.dataset_name or data.train_file
    method = f"{folder}-" if folder in (*TRL_TASKS, "tp_pp") else ""
    assert training.output_dir == f"runs/{method}{recipe.stem}"
    assert training.max_steps > 0 or not data.streaming  # a streamed text has no known length


def test_no_two_recipes_share_an_output_directory():
    """DPO after SFT of one model is the usual order: neither may find the checkpoints of the other."""
    folders = [yaml.safe_load(recipe.read_text(encoding="utf-8"))["output_dir"] for recipe in RECIPES]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_the_batch_is_the_one_of_the_learning_rate(recipe):
    assert batch_problem(recipe) is None


def rate_problem(text: str) -> str | None:
    """Return what the text of a recipe leaves open about its learning rate, or None.

    It must name a source, or say that the rate is a starting point; and a rate that was published for chats must train
    on chats, not on plain text.
    """
    comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    if "Learning rate" not in comment:
        return "no learning rate"
    _, rate = comment.split("Learning rate", 1)
    if not re.search(r"[\w.-]+/[\w.-]+", rate) and "starting point" not in rate:
        return "no source"
    has_text = any(f"dataset_name: {name}" in text for name in TEXT_DATASETS)
    return "plain text" if has_text != ("re-training" in comment) else None


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_the_learning_rate_has_a_source_and_belongs_to_the_data(recipe):
    assert rate_problem(recipe.read_text(encoding="utf-8")) is None


def test_a_rate_of_chats_on_plain_text_is_found():
    text = A_RECIPE.read_text(encoding="utf-8")
    assert rate_problem(re.sub("dataset_name: .*", "dataset_name: Salesforce/wikitext", text)) == "plain text"
    assert rate_problem(text.replace("Learning rate", "Rate")) == "no learning rate"


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("learning_rate:", "learning_rte:", ConfigFileError),
        ("block_size: 2048", "block_size: long", UsageError),
        ("block_size: 2048", "block_size: [", ConfigFileError),
    ],
)
def test_a_broken_recipe_is_refused(tmp_path, old, new, error):
    text = A_RECIPE.read_text(encoding="utf-8")
    assert old in text
    broken = tmp_path / "broken.yaml"
    broken.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(error):
        parse_arguments(["--config", str(broken)])


def test_a_wrong_batch_is_found(tmp_path):
    text = A_RECIPE.read_text(encoding="utf-8")
    broken = tmp_path / "broken.yaml"
    broken.write_text(text.replace("--num_processes 8", "--num_processes 4"), encoding="utf-8")
    assert batch_problem(broken) == "4 processes make 64 sequences, not 128"


@pytest.mark.parametrize("readme", READMES, ids=named)
def test_shell_blocks_use_existing_paths_and_flags(readme):
    commands = list(shell_commands(readme.read_text(encoding="utf-8")))
    assert [problem for command in commands for problem in command_problems(command)] == []


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("cp recipes/ddp/trian.py .", "no path recipes/ddp/trian.py"),
        ("cd x && accelerate launch \\\n  --config_file ds_configs/no.json x.py", "no path ds_configs/no.json"),
        ("python recipes/ddp/train.py --block_sise 4", "no flag --block_sise"),
        ("accelerate launch --no_such_option 8 recipes/ddp/train.py", "accelerate rejects"),
    ],
)
def test_a_wrong_shell_block_is_found(block, problem):
    commands = list(shell_commands(f"text\n```bash\n# a comment\n{block}\n```\n"))
    problems = [found for command in commands for found in command_problems(command)]
    assert [found for found in problems if found.startswith(problem)]
