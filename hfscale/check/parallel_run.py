"""Makes a `ParallelTrainer` of a compared process comparable with one process: layout, weights, and cases of parity.

Only the processes that `hfscale check --parity` starts call this.
"""

import functools
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hfscale.core.text_files import read_json
from hfscale.trainer.small_model import start_equally, switch_dropout_off

PARITY = "parity"
"""The attribute of a `ParallelTrainer` with the cases that it has compared."""
_FILE = "parity_cases.json"


def ask_for_cases(module: Any, *, alone: bool) -> None:
    """Have each rank compare the cases of parity, and one process use no layout.

    Args:
        module (`module`): `hfscale.parallel.arguments`.
        alone (`bool`): whether this is one process for a command of several.
    """
    post_init = module.ParallelArguments.__post_init__

    @functools.wraps(post_init)
    def asked(self: Any) -> None:
        if alone:
            for field in fields(self):
                setattr(self, field.name, field.default)
        else:
            self.check_parity = True
        post_init(self)

    module.ParallelArguments.__post_init__ = asked


def start_parallel_trainers_equally(module: Any) -> None:
    """Give each model its weights before a `ParallelTrainer` splits it, and read none.

    A model on the meta device gets weights that depend on the seed and the names of its modules only.

    Args:
        module (`module`): `hfscale.parallel.trainer`.
    """
    init = module.ParallelTrainer.__init__

    @functools.wraps(init)
    def equally(
        self: Any, model: Any, *arguments: Any, weights_from: Any = None, **options: Any
    ) -> None:
        if any(parameter.is_meta for parameter in model.parameters()):
            switch_dropout_off(model)
        else:
            start_equally(model)
        init(self, model, *arguments, **options)

    module.ParallelTrainer.__init__ = equally


def keep_cases(trainer: Any, folder: Path) -> None:
    """Write what the main process of a `ParallelTrainer` has compared.

    Args:
        trainer (`ParallelTrainer`): the Trainer.
        folder (`Path`): the run's folder.
    """
    if not trainer.is_world_process_zero():
        return
    folder.mkdir(parents=True, exist_ok=True)
    cases = [asdict(case) for case in trainer.parity]
    found = {"data_parallel_size": trainer.layout.data_parallel_size, "cases": cases}
    (folder / _FILE).write_text(json.dumps(found), encoding="utf-8")


def read_cases(folder: Path) -> tuple[int | None, list[dict[str, Any]]]:
    """Read what `keep_cases` has written.

    Args:
        folder (`Path`): the run's folder.

    Returns:
        The number of ranks that have rows of their own, and the cases; None and nothing without a `ParallelTrainer`.
    """
    path = folder / _FILE
    if not path.exists():
        return None, []
    found = read_json(path)
    return found["data_parallel_size"], found["cases"]
