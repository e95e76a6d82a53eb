"""All ranks have the same rows, labels and parameters, or the training does not begin."""

import json

import pytest
from conftest import REPOSITORY


@pytest.mark.world(2)
def test_ranks_that_differ_do_not_train(tmp_path, launch):
    done = launch(2, REPOSITORY / "tests" / "workers" / "unequal_ranks.py")
    assert done.code == 0, done.err[-3000:]
    outcomes, others = (json.loads((tmp_path / f"outcomes-{rank}.json").read_text()) for rank in range(2))
    assert {name for name, outcome in outcomes.items() if outcome == "trained"} == {
        "equal",
        "own loader",
        "own loader of the object",
        "dispatched",
    }
    assert outcomes == others, "every rank stops, with the same line"
    assert "rank 1 does not train what rank 0 trains" in outcomes["shuffled"]
    assert "in rows: " in outcomes["shuffled"]
    assert "in indices: " in outcomes["split"]
    assert "rank 0 trains: 56 rows, rank 0 64; " in outcomes["numbers"]
    assert "its labels have other numbers" in outcomes["labels"]
    assert "its model has the parameters in another order" in outcomes["heads"]
    assert outcomes["unreadable"] == "every rank stops"
