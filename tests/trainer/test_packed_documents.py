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
from hfscale.trainer.flattened_rows import BOUNDARIES, _boundaries_passed

FLATTENING = DataCollatorWithFlattening()
OF_TRL = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
PADDED = DataCollatorForLanguageModeling(pad_token_id=0)


def documents() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 60, (length,), generator=generator).tolist() for length in (5, 9, 7, 11)]
    return [{"input_ids": row} for row in rows]


def train(family: str, collator: Any, folder: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(family))
    args = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], max_steps=1, per_device_train_batch_size=2
    )
    args.remove_unused_columns = False
    Trainer(
        model=model, args=args, train_dataset=documents(), data_collator=collator, callbacks=[ScalingCallback()]
    ).train()


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
    train(family, collator, tmp_path)
    found = [record for record in log.records if "see each other" in record.message]
    assert len(found) == mixes
    if found:
        assert found[0].levelno == logging.WARNING
        assert found[0].message.startswith("GptOssForCausalLM does not cut its attention")


def test_a_model_is_called_with_what_the_collator_passes() -> None:
    for options, expected in (
        ({}, {"position_ids"}),
        ({"return_position_ids": False}, set()),
        ({"return_flash_attn_kwargs": True, "return_seq_idx": True}, set(BOUNDARIES)),
    ):
        collator = DataCollatorWithFlattening(**options)
        assert set(_boundaries_passed(collator)) == expected
        passed = collator([dict(row) for row in documents()]).keys() & BOUNDARIES
        assert passed == expected
    assert _boundaries_passed(OF_TRL) == BOUNDARIES
    assert not _boundaries_passed(PADDED)
