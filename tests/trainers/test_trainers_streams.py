"""Streams of all kinds, read in all ways, on one process and on two: the losses are those without the callback."""

import json

import pytest
from conftest import REPOSITORY


@pytest.mark.trainers
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stream_trains_and_resumes_as_without_the_callback(python, launch, tmp_path, processes):
    worker = REPOSITORY / "tests" / "workers" / "streams.py"
    done = python(worker) if processes == 1 else launch(2, worker)
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "streams.json").read_text())
    assert len(found) == 48
    assert [name for name, equal in found.items() if not equal["first"]] == []
    # Each process reads its own files: they are read again, and a map draws other random numbers then.
    unlike = ["datasets with a random map, not dispatched, 0 workers"] if processes == 2 else []
    assert [name for name, equal in found.items() if not equal["resumed"]] == unlike
