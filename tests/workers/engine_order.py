"""Makes optimizers from names in orders that differ between ranks and launches, and writes what hfscale says of each.

accelerate launch --config_file accelerate_configs/zero2.yaml … tests/workers/engine_order.py
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
import torch
from tiny import RandomTokens, tiny_arguments, tiny_model
from transformers import Trainer, default_data_collator

from hfscale import SpotCheckpointCallback
from hfscale.errors import HfScaleError

RANK = os.environ["RANK"]


class Ordered(Trainer):
    """Makes its optimizer from a list of names, in one order or the other."""

    is_reversed = False

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            parameters = list(self.model.parameters())
            self.optimizer = torch.optim.AdamW(parameters[::-1] if self.is_reversed else parameters, lr=1e-2)
        return self.optimizer


def begin(*, is_reversed, resumes=False, max_steps=2):
    kind = type("Ordered", (Ordered,), {"is_reversed": is_reversed, "__module__": __name__})
    trainer = kind(
        model=tiny_model(),
        args=tiny_arguments("out", max_steps=max_steps, save_strategy="steps", save_steps=2),
        train_dataset=RandomTokens(),
        data_collator=default_data_collator,
        callbacks=[SpotCheckpointCallback(cloud=None, every_minutes=None)],
    )
    try:
        trainer.train(resume_from_checkpoint=resumes)
    except HfScaleError as error:
        return f"{type(error).__name__}: {error}"
    return f"trained with {type(trainer.model_wrapped).__name__}"


def main():
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(
        Path(os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).resolve()
    )
    outcomes = {
        "ranks differ": begin(is_reversed=RANK == "1"),
        "equal": begin(is_reversed=False),
        "same order": begin(is_reversed=False, resumes=True, max_steps=3),
        "another order": begin(is_reversed=True, resumes=True, max_steps=4),
    }
    Path(f"outcomes-{RANK}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
