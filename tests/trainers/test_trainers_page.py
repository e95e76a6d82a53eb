"""docs/trainers.md lists the Trainers of the matrix and what the tests find; run this file to rewrite its table."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import kinds_sentence_transformers
import kinds_transformers
import kinds_trl
from trainer_contract import Kind

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "trainers.md"
HEADER = "| Trainer | model | processes | losses | resume | background save | counts | MFU |\n"
KINDS = (*kinds_transformers.KINDS, *kinds_trl.KINDS, *kinds_sentence_transformers.KINDS)
PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "sentence-transformers", "optuna")


def row(kind: Kind) -> str:
    """Return the row of a kind."""

    def cell(test: str, text: str) -> str:
        return "no" if test in kind.xfail else text

    cells = (
        kind.trainer,
        kind.model,
        str(kind.processes),
        cell("losses", "equal"),
        cell("resume", "exact (plain Trainer drifts)" if kind.plain_drifts else "exact"),
        cell("background_save", "yes" if kind.background else "no"),
        cell("tokens", kind.counts),
        "approximate" if kind.xfail.get("flops", "").startswith("TRL") else cell("flops", "yes" if kind.mfu else "no"),
    )
    return f"| {' | '.join(cells)} |\n"


def table() -> str:
    """Return the table of all kinds."""
    return HEADER + "|---|---|---|---|---|---|---|---|\n" + "".join(map(row, KINDS))


def versions() -> str:
    """Return the versions that the tests run with."""
    pinned = dict(re.findall(r"^([\w-]+)==(.+)$", (TESTS.parent / "constraints.txt").read_text(), re.MULTILINE))
    return ", ".join(f"{package} {pinned[package]}" for package in PACKAGES)


def test_the_page_has_a_row_for_each_kind():
    assert table() in PAGE.read_text(encoding="utf-8")


def test_the_page_names_the_versions_that_the_tests_run_with():
    assert versions() in " ".join(PAGE.read_text(encoding="utf-8").split())


def test_the_names_of_the_kinds_differ():
    assert len({kind.name for kind in KINDS}) == len(KINDS)


def test_every_known_defect_is_a_limit():
    limits = " ".join((TESTS.parent / "docs" / "limits.md").read_text(encoding="utf-8").split())
    reasons = {reason for kind in KINDS for reason in kind.xfail.values()}
    assert [reason for reason in reasons if reason not in limits] == []


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(re.escape(HEADER) + r"(\|.*\n)*", lambda _: table(), page), encoding="utf-8")
