"""A script is told where the documents of a batch without padding see each other, and trains as before."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_families import small_config
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hfscale import ScalingCallback
from hfscale.trainer import flattened_rows

FLATTENING = DataCollatorWithFlattening()
OF_TRL = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
PADDED = DataCollatorForLanguageModeling(pad_token_id=0)


def documents() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 60, (length,), generator=generator).tolist() for length in (5, 9, 7, 11)]
    return [{"input_ids": row} for row in rows]


def train(family: str, collator: Any, folder: Path, *callbacks: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(family))
    args = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], max_steps=1, per_device_train_batch_size=2
    )
    args.remove_unused_columns = False
    Trainer(model=model, args=args, train_dataset=documents(), data_collator=collator, callbacks=[*callbacks]).train()


@pytest.mark.parametrize(
    ("family", "collator", "mixes"),
    [
        ("gpt_oss", FLATTENING, True),
        ("gpt_oss", OF_TRL, True),
        ("gpt_oss", PADDED, False),
        ("llama", FLATTENING, False),
        ("llama", OF_TRL, False),
    ],
)
def test_a_script_is_told_that_documents_see_each_other(
    family: str, collator: Any, mixes: bool, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    train(family, collator, tmp_path, ScalingCallback())
    found = [record for record in log.records if "see each other" in record.message]
    assert len(found) == mixes
    if found:
        assert found[0].levelno == logging.WARNING
        assert found[0].message.startswith("GptOssForCausalLM does not cut its attention")


def test_where_it_cannot_be_tried_that_is_said(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(flattened_rows, "_small_model", fail)
    train("llama", FLATTENING, tmp_path, ScalingCallback())
    (line,) = (line for line in log.messages if "see each other" in line)
    assert line.endswith("is not known: a small model of its config could not be tried (ZeroDivisionError)")


class Counts(DataCollatorWithFlattening):
    """A collator of a script, which counts its batches."""

    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **kwargs)


def test_a_collator_of_a_script_is_not_called_before_the_training(tmp_path: Path) -> None:
    plain, collator = Counts(), Counts()
    train("gpt_oss", plain, tmp_path / "plain")
    train("gpt_oss", collator, tmp_path / "run", ScalingCallback())
    assert collator.calls == plain.calls > 0
