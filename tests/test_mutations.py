"""The lists of `make test-mutations`: each mutation can be applied, and names tests that exist."""

import runpy
import shlex

import pytest
from conftest import REPOSITORY

mutations = runpy.run_path(str(REPOSITORY / "tests" / "mutations" / "__main__.py"))
LEAST = 10


@pytest.mark.parametrize("package", mutations["packages"]())
def test_every_mutation_can_be_applied_and_names_tests(package):
    listed = mutations["read"](package)
    assert len(listed) >= LEAST
    assert len({(one["file"], one["old"], one["new"]) for one in listed}) == len(listed)
    for one in listed:
        assert set(one) == {"file", "old", "new", "tests"}
        assert (REPOSITORY / one["file"]).read_text(encoding="utf-8").count(one["old"]) == 1, one
        assert one["old"] != one["new"]
        path, *selection = shlex.split(one["tests"])
        assert (REPOSITORY / path).is_file(), one
        if selection[:2] == ["-m", "faults"]:
            selection = selection[2:]
        assert selection in ([], ["-k", *selection[1:]]), one
