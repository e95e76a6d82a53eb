"""A training script of a user, with the flags of TrainingArguments and two of its own, for `hfscale tune`."""

from dataclasses import dataclass

from tiny import RandomTokens, tiny_model
from transformers import HfArgumentParser, Trainer, TrainingArguments, default_data_collator

from hfscale import ScalingCallback


@dataclass
class Data:
    rows: int = 64
    use_peft: bool = False


def main():
    data, args = HfArgumentParser((Data, TrainingArguments)).parse_args_into_dataclasses()
    trainer = Trainer(
        model=tiny_model(),
        args=args,
        train_dataset=RandomTokens(data.rows),
        data_collator=default_data_collator,
        callbacks=[ScalingCallback()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
