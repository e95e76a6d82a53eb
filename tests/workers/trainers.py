"""The trainings of the Trainer contract in several processes; rank 0 writes what they have done.

accelerate launch … tests/workers/trainers.py kinds_transformers causal_lm_ddp
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
import torch.distributed as dist
from trainer_contract import run_contract

from hfscale.recipe.entrypoint import run


def main() -> None:
    """Run the kind of a module."""
    module, name = sys.argv[1:]
    (kind,) = [kind for kind in importlib.import_module(module).KINDS if kind.name == name]
    runs = run_contract(kind, Path(name))
    if dist.get_rank() == 0:
        Path("runs.json").write_text(runs.to_json())


run(main)
