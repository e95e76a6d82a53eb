"""Build DeepSpeed's C++ operators into this environment, before any test that has a time limit needs them.

Where tests would build them, a slow machine's first test runs into its limit, and the process that is ended so leaves
torch's lock in the folder: all that come after wait for it without a word.
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
