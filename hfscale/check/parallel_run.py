"""Makes a `ParallelTrainer` of a compared process comparable with one process: layout, weights, cases of parity, and
what is kept of the run: its evaluation, its export, and a checkpoint to resume.

Only the processes that `hfscale check --parity` starts call this.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfscale.check.equal_start import start_equally
from hfscale.check.small_model import read_pretrained
from hfscale.core.text_files import read_json
from hfscale.errors import HealthError
from hfscale.trainer.small_model import switch_dropout_off

if TYPE_CHECKING:
    from torch import nn

PARITY = "parity"
"""The attribute of a `ParallelTrainer` with the cases that it has compared."""
EXPORTED = "exported"
"""The folder of a run into which its model is exported at its end."""
_FILE = "parity_cases.json"
_RESULTS = "parity_results.json"


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
        self: Any, model: Any, args: Any, *arguments: Any, weights_from: Any = None, **options: Any
    ) -> None:
        if any(parameter.is_meta for parameter in model.parameters()):
            switch_dropout_off(model)
        else:
            start_equally(model)
        _save_in_the_middle(args)
        init(self, model, args, *arguments, **options)

    module.ParallelTrainer.__init__ = equally


def _save_in_the_middle(args: Any) -> None:
    """Have a run save a checkpoint that can be resumed, after half of its steps."""
    from transformers.trainer_utils import SaveStrategy

    args.save_strategy = SaveStrategy.STEPS
    args.save_total_limit = None
    args.save_only_model = False


def keep_results(
    module: Any, folder: Path, *, checkpoint: str | None, other_export: str | None
) -> None:
    """Have each `ParallelTrainer` keep its evaluation and export its model after its training.

    Args:
        module (`module`): `hfscale.parallel.trainer`.
        folder (`Path`): the run's folder.
        checkpoint (`str`, *optional*): a checkpoint from which the training is resumed.
        other_export (`str`, *optional*): in one process, the folder that another run has exported: it is loaded at the
            end, and evaluated.
    """
    train = module.ParallelTrainer.train

    @functools.wraps(train)
    def kept(self: Any, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any) -> Any:
        result = train(self, checkpoint or resume_from_checkpoint, *arguments, **options)
        found = {"evaluation": _evaluation(self)}
        self.save_model(str(folder / EXPORTED))
        if other_export is not None:
            load_exported(self.model, Path(other_export))
            found["loaded"] = _evaluation(self)
        if self.is_world_process_zero():
            (folder / _RESULTS).write_text(json.dumps(found), encoding="utf-8")
        return result

    module.ParallelTrainer.train = kept


def _evaluation(trainer: Any) -> dict[str, float]:
    """Return the losses of an evaluation, by metric; without evaluation data, of the rows that were trained."""
    data = trainer.eval_dataset
    if data is None:
        data = trainer.train_dataset
    metrics: Mapping[str, Any] = trainer.evaluate(data)
    return {name: float(value) for name, value in metrics.items() if name.endswith("loss")}


def load_exported(model: "nn.Module", folder: Path) -> None:
    """Load what a run has exported into a model, with the functions by which users load it.

    Args:
        model (`PreTrainedModel` or `PeftModel`): the model of the same program in one process; its weights change.
        folder (`Path`): the exported folder.

    Raises:
        HealthError: the folder has not all weights that the program trains.
    """
    import torch

    from hfscale.core.versions import is_peft_model

    if is_peft_model(model):
        from peft import load_peft_weights, set_peft_model_state_dict

        state = load_peft_weights(str(folder), device="cpu")
        expected: Any = set_peft_model_state_dict(model, state)
        trained = {name for name, one in model.named_parameters() if one.requires_grad}
        missing = sorted(trained.intersection(expected.missing_keys))
    else:
        loaded = read_pretrained(type(model), folder, dtype=torch.float32)
        missing = sorted(model.load_state_dict(loaded.state_dict(), strict=False).missing_keys)
    if missing:
        raise HealthError(f"the exported model has no {missing[0]}, which is trained")


def read_results(folder: Path) -> dict[str, dict[str, float]]:
    """Read what `keep_results` has kept: losses by name, for `evaluation`, and in one process for `loaded`.

    Args:
        folder (`Path`): the run's folder.
    """
    return dict(read_json(folder / _RESULTS))


def data_replicas(trainer: Any) -> int:
    """Return how many ranks of a Trainer have rows of their own.

    Args:
        trainer (`Trainer`): any Trainer.
    """
    if hasattr(trainer, PARITY):
        return int(trainer.layout.data_parallel_size)
    return int(trainer.args.world_size)


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
