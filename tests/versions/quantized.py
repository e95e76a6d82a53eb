"""QLoRA with the real bitsandbytes on a CPU: python tests/versions/quantized.py FOLDER.

Compiled layers compute what the others do, and a training that is interrupted and resumed has the losses of a whole
one.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.other import compile_regions
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hfscale import ScalingCallback
from hfscale.facts.support import LISTS

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
    "pad_token_id": 0,
}
FOUR_BITS = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.bfloat16,
    bnb_4bit_use_double_quant=True,
)
STEPS, INTERRUPTED_AT = 6, 4


class Rows(Dataset):
    """Random tokens, those of a row always the same."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, 90, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def save_model(family: str, folder: Path) -> None:
    """Write a small model of a family."""
    known = AutoConfig.for_model(family).to_dict()
    config = AutoConfig.for_model(family, **{name: value for name, value in SIZES.items() if name in known})
    set_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def load(folder: Path) -> Any:
    """Load it in 4 bits, with adapters in all linear layers."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=FOUR_BITS, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    set_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()


def loss_and_norm(model: Any, rows: torch.Tensor) -> tuple[float, float]:
    """Return the loss of a batch and the norm of its gradients."""
    model.zero_grad()
    loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return loss.item(), torch.nn.utils.get_total_norm(gradients).item()


def compare_compiled(folder: Path) -> None:
    """Compare compiled layers with those that are not, for batches of several lengths."""
    plain, other = load(folder), load(folder)
    assert "bitsandbytes" in type(plain.get_base_model().model.layers[0].self_attn.o_proj.base_layer).__module__
    torch._dynamo.reset()
    counters.clear()
    compiled = compile_regions(other, backend="aot_eager")
    graphs = []
    for length in (16, 24, 20, 28):
        rows = torch.randint(3, 90, (2, length), generator=torch.Generator().manual_seed(length))
        wanted, found = loss_and_norm(plain, rows), loss_and_norm(compiled, rows)
        assert all(abs(a - b) <= 1e-5 * abs(a) for a, b in zip(wanted, found, strict=True)), (wanted, found)
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] <= graphs[1] == graphs[2] == graphs[3], graphs
    assert not counters["graph_break"], counters["graph_break"]


def train(model_folder: Path, folder: Path, steps: int, *, resume: bool = False) -> list[dict[str, float]]:
    """Train to a step, and return what was logged in this launch and before."""
    set_seed(2)
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=True,
        max_steps=STEPS,
        lr_scheduler_type="constant",
        per_device_train_batch_size=2,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-3,
        report_to=[],
        disable_tqdm=True,
    )
    args.max_steps = steps
    trainer = Trainer(
        model=load(model_folder),
        args=args,
        train_dataset=Rows(),
        data_collator=default_data_collator,
        callbacks=[ScalingCallback()],
    )
    trainer.train(resume_from_checkpoint=resume)
    return [
        {key: row[key] for key in ("step", "loss", "grad_norm")} for row in trainer.state.log_history if "loss" in row
    ]


def main() -> None:
    """Run both comparisons."""
    folder = Path(sys.argv[1])
    for family in LISTS["compiled_families"]:
        save_model(family, folder / family)
        compare_compiled(folder / family)
        print(f"{family}: compiled layers with 4-bit weights compute the same", flush=True)
    whole = train(folder / "llama", folder / "whole", STEPS)
    train(folder / "llama", folder / "parts", INTERRUPTED_AT)
    resumed = train(folder / "llama", folder / "parts", STEPS, resume=True)
    assert len(whole) == STEPS
    assert resumed == whole, (whole, resumed)
    print("a training that was interrupted has the losses of a whole one")


if __name__ == "__main__":
    main()
