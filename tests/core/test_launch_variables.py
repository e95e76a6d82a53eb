"""Numbers in the environment that a launcher sets: odd ones are one line, in every module that reads them."""

import re

import pytest
from conftest import REPOSITORY

from hfscale.core.launch_variables import launch_number
from hfscale.errors import UsageError

CHECKED = {"checkpoint/preemption/signals.py"}
"""Modules that handle what is no number themselves."""
OWN = {"check/rehearsal/hook.py", "core/collectives.py", "core/rank_link.py"}
"""Modules that read what only hfscale sets."""


@pytest.mark.parametrize(("text", "number"), [(None, 7), ("", 7), (" ", 7), ("-1", 7), ("0", 0), (" 3 ", 3)], ids=repr)
def test_a_number_or_none(text, number):
    assert launch_number("RANK", 7, {} if text is None else {"RANK": text}) == number


@pytest.mark.parametrize("text", ["x", "1.5", "-2", "0x1", "²"])
def test_what_is_no_number_is_named(text):
    with pytest.raises(UsageError, match=f"LOCAL_RANK={re.escape(text)} is not a number"):
        launch_number("LOCAL_RANK", 0, {"LOCAL_RANK": text})


def test_no_module_reads_them_in_another_way():
    package = REPOSITORY / "hfscale"
    reads = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"\b(?:int|float)\((?:os\.)?environ\b", path.read_text(encoding="utf-8"))
    }
    assert reads == CHECKED | OWN
