"""Makes the helpers and tests of every folder of `tests/` importable by their names, which are unique."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent
sys.path[:0] = [
    str(TESTS),
    *sorted(str(path) for path in TESTS.iterdir() if path.is_dir() and path.name != "__pycache__"),
]
