"""Builds DeepSpeed's C++ operators into this environment before the tests run.

If a test built them, it could reach its time limit on a slow machine; the killed process would leave torch's lock in
the folder, and every later process would wait for that lock forever.
"""

import os
import sys
from pathlib import Path

os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix, "torch_extensions"))  # as in conftest.py

from deepspeed.accelerator import get_accelerator

OPERATORS = ("ShareMemCommBuilder", "CPUAdamBuilder")

if __name__ == "__main__":
    for operator in OPERATORS:
        get_accelerator().create_op_builder(operator).load(verbose=False)
