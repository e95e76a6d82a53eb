"""Writes the variables that a launcher has set in the environment of rank 0, as JSON."""

import json
import os
from pathlib import Path

PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_", "TORCH_", "OMP_")
if os.environ["RANK"] == "0":
    mine = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    Path("environment.json").write_text(json.dumps(mine))
