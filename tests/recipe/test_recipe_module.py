"""The scripts of the recipes stand on one module: short, flat, and with few documented names."""

import ast
import inspect
import re

import pytest
from conftest import REPOSITORY

import hfscale
import hfscale.recipe

SCRIPTS = sorted((REPOSITORY / "recipes").glob("*/train.py"))
LIBRARIES = {"transformers", "trl", "peft", "torch"}
MAX_LINES = 70
MAX_NAMES = 12


def imports(script):
    """Return the imports of a script: pairs of a module and a name."""
    found = []
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.Import), f"{script}: import {node.names[0].name}"
        if isinstance(node, ast.ImportFrom):
            found += [(node.module, name.name) for name in node.names]
    return found


def test_there_are_eight_scripts():
    names = ["ddp", "distillation", "dpo", "grpo", "sft", "sharded", "tp_pp", "vision"]
    assert [script.parent.name for script in SCRIPTS] == names


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_a_script_is_short(script):
    assert len(script.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_a_script_imports_public_names_only(script):
    public = {"hfscale": hfscale.__all__, "hfscale.recipe": hfscale.recipe.__all__}
    for module, name in imports(script):
        if module in public:
            assert name in public[module], f"{script}: {module}.{name}"
        else:
            assert module.partition(".")[0] in LIBRARIES, f"{script}: {module}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_hfscale_is_imported_first(script):
    """It reports a missing or too old package in one line; an import of TRL would end with a traceback."""
    modules = [module for module, _ in imports(script)]
    of_hfscale = [module.partition(".")[0] == "hfscale" for module in modules]
    assert of_hfscale == sorted(of_hfscale, reverse=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_the_trainer_is_made_in_the_script(script):
    """Model, data and callbacks are its arguments, which people change."""
    (trainer,) = (
        node
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Trainer")
    )
    given = {keyword.arg for keyword in trainer.keywords}
    assert {"model", "args", "train_dataset", "eval_dataset", "processing_class", "callbacks"} <= given


def test_the_names_are_few_and_the_scripts_need_each():
    names = hfscale.recipe.__all__
    assert len(names) == len(set(names)) <= MAX_NAMES
    used = {name for script in SCRIPTS for module, name in imports(script) if module == "hfscale.recipe"}
    assert used == set(names)


@pytest.mark.parametrize("name", hfscale.recipe.__all__)
def test_a_name_is_documented(name):
    thing = getattr(hfscale.recipe, name)
    text = inspect.getdoc(thing)
    assert text
    assert text.splitlines()[0].endswith(".")
    parameters = [p for p in inspect.signature(thing).parameters if p != "self"]
    for parameter in parameters:
        assert f"\n    {parameter} (`" in text, f"{name}: {parameter}"
    assert f"| `{name}` |" in hfscale.recipe.__doc__
    assert f"::: hfscale.recipe.{name}\n" in (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8") + "\n"


def test_the_pages_name_the_limits_and_every_name():
    for page in ("docs/recipes.md", "recipes/README.md", "CONTRIBUTING.md"):
        text = " ".join((REPOSITORY / page).read_text(encoding="utf-8").split())
        assert f"at most {MAX_LINES} lines" in text, page
    for page in ("recipes/README.md", "CONTRIBUTING.md"):
        text = " ".join((REPOSITORY / page).read_text(encoding="utf-8").split())
        assert re.search(rf"{MAX_NAMES} names of `hfscale.recipe`", text), page
    steps = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8").partition("## Copy a recipe")[2]
    for name in hfscale.recipe.__all__:
        assert f"`{name}`" in steps or f"`{name}(" in steps, name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        hfscale.recipe.no_such_name  # noqa: B018
