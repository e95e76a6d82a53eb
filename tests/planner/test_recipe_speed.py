"""The header of each recipe's YAML states the speed that the planner predicts for it."""

import pytest

from benchmarks.recipe_speed import REPOSITORY, as_the_recipe, job_of, recipes, statement, with_statement


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    """The launch commands in the YAML files name paths of the repository."""
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize("path", recipes(), ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_the_header_states_what_the_planner_predicts(path):
    text = path.read_text(encoding="utf-8")
    assert "# Speed, predicted and not measured: " in text
    assert text == with_statement(path), "run `python -m benchmarks.recipe_speed --write`"


def test_a_recipe_that_changes_has_another_speed(tmp_path):
    path = REPOSITORY / "recipes" / "sharded" / "llama-3.1-8b-full.yaml"
    text = path.read_text(encoding="utf-8")
    changed = tmp_path / "changed.yaml"
    changed.write_text(text.replace("8 GPUs of 80 GB", "8 GPUs of 40 GB"), encoding="utf-8")
    assert statement(changed) != statement(path)


def test_predicted_is_what_the_recipe_does_by_default():
    def by_default(name, *, is_text=True):
        return as_the_recipe(job_of(REPOSITORY / "recipes" / name), is_text=is_text)

    pipeline = job_of(REPOSITORY / "recipes" / "tp_pp" / "llama-3.3-70b-full.yaml")
    assert as_the_recipe(pipeline, is_text=True) == pipeline
    dense = by_default("sharded/llama-3.1-8b-full.yaml")
    assert (dense.liger, dense.compile) == (True, True)
    assert not by_default("sharded/llama-3.1-8b-full.yaml", is_text=False).compile
    experts = by_default("sharded/mixtral-8x7b-full.yaml")
    assert (experts.liger, experts.compile) == (True, False)
    assert by_default("sft/qwen3-8b-full.yaml").compile
