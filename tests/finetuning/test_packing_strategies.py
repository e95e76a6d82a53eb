"""Under every strategy, a step on packed documents has the loss and the gradients of the documents alone."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from parallel_world import VOCAB, empty_causal_lm, in_world, tiny_causal_lm
from recipe_runs import environment_of, output, warm_up
from test_packing import batch_of, pack, use_variable_length_attention
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from hfscale import ParallelArguments, ParallelTrainer, ScalingCallback
from hfscale.parallel.weights import build_model
from hfscale.recipe.document_attention import cut_attention
from hfscale.recipe.export import save_final_model
from hfscale.recipe.layout import finish_on_cpu, set_up_parallelism
from hfscale.recipe.packing import RowCollator, pack_rows

pytestmark = pytest.mark.finetuning

ROWS, SIZE, STEPS, RATE = 8, 24, 2, 0.5
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4},
}
LAYOUTS = {
    "tp x pp": {"tp_size": 2, "pp_size": 2},
    "sequence parallel": {"tp_size": 2, "pp_size": 2, "sequence_parallel": True},
    "context parallel": {"cp_size": 2, "pp_size": 2},
    "data parallel x pp": {"pp_size": 2},
    "lengths of documents": {"tp_size": 2, "pp_size": 2},
}


@functools.cache
def documents() -> list[tuple[list[int], list[int]]]:
    """Return documents that fill ROWS rows; few tokens of some and all tokens of others are trained on."""
    generator = torch.Generator().manual_seed(5)
    made: list[tuple[list[int], list[int]]] = []
    while len(rows_of(made)["input_ids"]) < ROWS:
        length = int(torch.randint(3, 20, (), generator=generator))
        tokens = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        first = length - 2 if len(made) % 2 else 0
        made.append((tokens, [-100] * first + tokens[first:]))
    return made


def rows_of(made: list[tuple[list[int], list[int]]]) -> dict[str, list[list[int]]]:
    return pack_rows(made, packing="bestfit", block_size=SIZE, cut=True, pad=0)


class Rows(torch.utils.data.Dataset):
    """All rows in each step."""

    def __init__(self) -> None:
        self.columns = rows_of(documents())

    def __len__(self) -> int:
        return ROWS * STEPS

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {name: values[index % ROWS] for name, values in self.columns.items()}


def alone(family: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on one document at a time, and return the losses of the steps and the weights after them."""
    model = tiny_causal_lm(family, seed=7, **FAMILIES[family]).train()
    trained = sum(label != -100 for _, labels in documents() for label in labels[1:])
    losses = []
    for _ in range(STEPS):
        total = 0.0
        model.zero_grad()
        for tokens, labels in documents():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
            loss = nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum") / trained
            loss.backward()
            total += loss.item()
        losses.append(total)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def arguments(folder: Path, ranks: int, batch: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=ROWS // ranks // batch,
        logging_steps=1,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
        seed=7,
    )


def finish(trainer: Trainer, folder: Path) -> None:
    """Train, save the model, and write the losses."""
    trainer.train()
    save_final_model(trainer)
    if trainer.is_world_process_zero():
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        (folder / "log.json").write_text(json.dumps(history))


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))


def train(folder: Path) -> None:
    """Train all families on this rank, one after the other, under the strategy that the environment asks for."""
    torch.set_num_threads(1)
    for family, sizes in FAMILIES.items():
        args = arguments(folder / family, 2, 2)
        set_up_parallelism(ParallelArguments(), args)
        model = build_model(tiny_causal_lm(family, **sizes).config, seed=7, dtype=torch.float32)
        cut_attention(model)
        trainer = Trainer(
            model=model,
            args=args,
            data_collator=RowCollator(tokenizer()),
            train_dataset=Rows(),
            callbacks=[ScalingCallback()],
        )
        finish_on_cpu(trainer)
        finish(trainer, folder / family)


def train_parallel(job: list[str]) -> None:
    """Train a family under a layout of `ParallelTrainer`."""
    family, layout, name = job
    folder = Path(name)
    sizes = LAYOUTS[layout]
    replicas = 4 // (sizes.get("tp_size", 1) * sizes.get("pp_size", 1) * sizes.get("cp_size", 1))
    model = empty_causal_lm(family, **FAMILIES[family])
    if layout == "lengths of documents":  # as FlashAttention gets them, which needs a GPU
        use_variable_length_attention(model)
    else:
        cut_attention(model)
    trainer = ParallelTrainer(
        model=model,
        args=arguments(folder, replicas, 2),
        parallel=ParallelArguments(**sizes),
        data_collator=RowCollator(tokenizer()),
        train_dataset=Rows(),
    )
    finish(trainer, folder)


def check(family: str, folder: Path) -> None:
    """Compare losses and weights after a training with those of the documents alone."""
    losses, weights = alone(family)
    history = json.loads((folder / "log.json").read_text())
    assert [entry["loss"] for entry in history] == pytest.approx(losses, abs=1e-5), folder
    saved = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    assert saved.keys() == weights.keys()
    for name, weight in weights.items():
        difference = (saved[name] - weight).abs().max().item()
        assert difference <= RATE * 1e-5, f"{folder}: {name} differs by {difference}"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_losses_and_gradients_are_those_of_documents_alone(strategy, tmp_path):
    warm_up()
    codes = run_ranks(2, train, tmp_path, log=tmp_path / "log", env=environment_of(strategy))
    assert codes == [0, 0], output(tmp_path)[-8000:]
    padding = 1 - sum(len(tokens) for tokens, _ in documents()) / (ROWS * SIZE)
    for family in FAMILIES:
        check(family, tmp_path / family)
        history = json.loads((tmp_path / family / "log.json").read_text())
        assert [entry["scaling/padding_fraction"] for entry in history] == pytest.approx([padding] * STEPS)


def test_losses_and_gradients_are_those_of_documents_alone_in_pipelines(tmp_path):
    jobs = [[family, "tp x pp", str(tmp_path / family)] for family in FAMILIES]
    jobs += [["mistral", layout, str(tmp_path / layout)] for layout in LAYOUTS if layout != "tp x pp"]
    in_world(4, train_parallel, jobs)
    for family, _, folder in jobs:
        check(family, Path(folder))


def test_compiled_models_are_cut_too():
    model = tiny_causal_lm("mistral", **FAMILIES["mistral"]).train()
    batch = batch_of(pack(documents(), SIZE))
    expected = model(**batch, use_cache=False).logits
    compiled = torch.compile(model, backend="aot_eager")(**batch, use_cache=False).logits
    torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-5)
