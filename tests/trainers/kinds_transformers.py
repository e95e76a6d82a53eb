"""Kinds of transformers' own Trainers, on tiny models of each modality, and subclasses as people write them."""

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader, Dataset, IterableDataset
from trainer_contract import PAD, VOCAB, Kind, launched
from transformers import Trainer, TrainerCallback, TrainingArguments

ROWS = 64
LENGTH = 12
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
LLAMA = LAYERS | {"num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": PAD}
VISION = LAYERS | {"image_size": 16, "patch_size": 8}
IMAGE_TOKEN = VOCAB - 1


class Rows(Dataset):
    """Rows that are made from their number, so that they are the same in every run."""

    def __init__(self, make: Callable[[torch.Generator], dict[str, Any]], size: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = [make(generator) for _ in range(size)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.rows[index])


def words(generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    """Return random tokens."""
    return torch.randint(3, IMAGE_TOKEN, (length,), generator=generator)


def some_words(generator: torch.Generator) -> torch.Tensor:
    """Return random tokens of a random length."""
    return words(generator, int(torch.randint(4, LENGTH, (), generator=generator)))


def text(generator: torch.Generator) -> dict[str, Any]:
    """Return a row for a causal language model."""
    tokens = words(generator)
    return {"input_ids": tokens, "labels": tokens}


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Make a batch of rows of different lengths."""
    batch = {}
    for name in rows[0]:
        values = [torch.as_tensor(row[name]) for row in rows]
        if values[0].ndim == 0:
            batch[name] = torch.stack(values)
            continue
        fill = -100 if name == "labels" else PAD
        batch[name] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
    batch["attention_mask"] = (batch["input_ids"] != PAD).long()
    return batch


def builder(
    model: Callable[[], torch.nn.Module],
    row: Callable[[torch.Generator], dict[str, Any]],
    *,
    trainer: Callable[..., Trainer] = Trainer,
    arguments: Callable[..., TrainingArguments] = TrainingArguments,
    dataset: Callable[..., Any] = Rows,
    **options: Any,
) -> Callable[..., Trainer]:
    """Return the `build` of a kind: the Trainer class with a model and rows of random data."""

    def build(folder: Path, callbacks: list[TrainerCallback], *, args: Any = None, **given: Any) -> Trainer:
        return trainer(
            model=model(),
            args=args or launched(arguments(**given)),
            train_dataset=dataset(row),
            eval_dataset=Rows(row, 8),
            callbacks=callbacks,
            **options,
        )

    return build


def llama(**overrides: Any) -> torch.nn.Module:
    """Return a tiny Llama."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(LLAMA | overrides)))


@functools.cache
def saved_experts() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with a tiny mixture of experts. With a process group, only rank 0 would save it."""
    sizes = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    folder = tempfile.TemporaryDirectory()
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**(LLAMA | sizes))).save_pretrained(folder.name)
    return folder


def experts() -> torch.nn.Module:
    """Return the tiny mixture of experts as transformers has distributed it: two ranks share its experts."""
    from transformers.distributed import DistributedConfig

    return transformers.AutoModelForCausalLM.from_pretrained(
        saved_experts().name,
        dtype=torch.float32,
        experts_implementation="eager",  # torch counts the FLOPs of its products
        distributed_config=DistributedConfig(fsdp_size=2, ep_size=2),
    )


def frozen(model: torch.nn.Module) -> torch.nn.Module:
    """Freeze all but the head and the last layer."""
    for parameter in [*model.model.embed_tokens.parameters(), *model.model.layers[0].parameters()]:
        parameter.requires_grad = False
    return model


def bert(kind: str, **overrides: Any) -> torch.nn.Module:
    """Return a tiny BERT with a head."""
    config = transformers.BertConfig(**LAYERS, vocab_size=VOCAB, max_position_embeddings=64, **overrides)
    return getattr(transformers, kind)(config)


def t5() -> torch.nn.Module:
    """Return a tiny T5."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=2
        )
    )


def vit() -> torch.nn.Module:
    """Return a tiny ViT."""
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**VISION, hidden_dropout_prob=0.1, num_labels=3)
    )


def wav2vec2() -> torch.nn.Module:
    """Return a tiny wav2vec2 with a classifier."""
    return transformers.Wav2Vec2ForSequenceClassification(
        transformers.Wav2Vec2Config(
            **LAYERS,
            conv_dim=(16, 16),
            conv_stride=(5, 4),
            conv_kernel=(10, 8),
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=4,
            mask_time_length=2,
            layerdrop=0.0,
            classifier_proj_size=16,
            num_labels=3,
        )
    )


def whisper() -> torch.nn.Module:
    """Return a tiny Whisper."""
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=VOCAB,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=32,
            pad_token_id=PAD,
            bos_token_id=1,
            eos_token_id=1,
            decoder_start_token_id=2,
        )
    )


def llava() -> torch.nn.Module:
    """Return a tiny LLaVA: CLIP and a Llama."""
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**VISION, projection_dim=32),
            text_config=transformers.LlamaConfig(**LLAMA),
            image_token_index=IMAGE_TOKEN,
            vision_feature_layer=-1,
        )
    )


def qwen2_vl() -> torch.nn.Module:
    """Return a tiny Qwen2-VL."""
    return transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(
            vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4},
            text_config=LLAMA | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
            image_token_id=IMAGE_TOKEN,
            video_token_id=1,
            vision_start_token_id=2,
        )
    )


def classified(generator: torch.Generator) -> dict[str, Any]:
    """Return a row for sequence classification."""
    tokens = some_words(generator)
    return {"input_ids": tokens, "labels": tokens[0] % 3}


def tagged(generator: torch.Generator) -> dict[str, Any]:
    """Return a row for token classification."""
    tokens = some_words(generator)
    return {"input_ids": tokens, "labels": tokens % 5}


def translated(generator: torch.Generator) -> dict[str, Any]:
    """Return a row for an encoder-decoder model."""
    return {"input_ids": some_words(generator), "labels": some_words(generator)}


def image(generator: torch.Generator) -> dict[str, Any]:
    """Return a row for image classification."""
    return {"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": 1}


def sound(generator: torch.Generator) -> dict[str, Any]:
    """Return a row for audio classification."""
    return {"input_values": torch.randn(400, generator=generator), "labels": 1}


def speech(generator: torch.Generator) -> dict[str, Any]:
    """Return a row for speech recognition."""
    return {"input_features": torch.randn(8, 40, generator=generator), "labels": words(generator, 6)}


def captioned(generator: torch.Generator) -> dict[str, Any]:
    """Return a row for LLaVA: four image tokens, then text."""
    tokens = torch.cat([torch.full((4,), IMAGE_TOKEN), words(generator, 6)])
    return {"input_ids": tokens, "labels": tokens, "pixel_values": torch.randn(3, 16, 16, generator=generator)}


def qwen_captioned(generator: torch.Generator) -> dict[str, Any]:
    """Return a row for Qwen2-VL: an image of 4 x 4 patches, which become four tokens."""
    tokens = torch.cat([torch.tensor([2]), torch.full((4,), IMAGE_TOKEN), words(generator, 6)])
    return {
        "input_ids": tokens,
        "labels": tokens,
        "mm_token_type_ids": (tokens == IMAGE_TOKEN).long(),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([1, 4, 4]),
    }


def qwen_batch(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Make a batch for Qwen2-VL, whose patches of all images are in one dimension."""
    return {
        name: torch.cat([row[name] for row in rows])
        if name == "pixel_values"
        else torch.stack([row[name] for row in rows])
        for name in rows[0]
    }


class OwnTrainer(Trainer):
    """A subclass that overrides what people override most, each time around the method of Trainer."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = loss + 1e-3 * outputs.logits.float().pow(2).mean()
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model, inputs, *args, **kwargs):
        self.steps = getattr(self, "steps", 0) + 1
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs, *args, **kwargs):
        super().log({**logs, "steps": getattr(self, "steps", 0) > 0}, *args, **kwargs)

    def get_train_dataloader(self):
        dataset = torch.utils.data.Subset(self.train_dataset, range(0, ROWS, 2))
        loader = DataLoader(dataset, batch_size=self._train_batch_size, shuffle=True, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        (folder / "mine.txt").write_text("saved by a subclass")


class Stream(IterableDataset):
    """A stream without a length."""

    def __init__(self, row: Callable[[torch.Generator], dict[str, Any]]) -> None:
        self.rows = Rows(row)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.rows.__getitem__, range(len(self.rows)))


class StreamWithLength(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return len(self.rows)


class OwnOptimizerTrainer(Trainer):
    """A subclass that makes its optimizer: the last layer has another rate."""

    def create_optimizer(self, *args, **kwargs):
        rate = self.args.learning_rate
        last = list(self.model.lm_head.parameters())
        others = [p for p in self.model.parameters() if all(p is not other for other in last)]
        self.optimizer = torch.optim.AdamW([{"params": last, "lr": rate / 2}, {"params": others, "lr": rate}])
        return self.optimizer


def with_own_optimizer(folder: Path, callbacks: list[TrainerCallback], **given: Any) -> Trainer:
    """Return a Trainer that got an optimizer with two groups, and a scheduler."""
    model = llama()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    rate = given["learning_rate"]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "lr": rate / 4, "weight_decay": 0}], lr=rate
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    return builder(lambda: model, text, optimizers=(optimizer, scheduler))(folder, callbacks, **given)


def with_optimizer_class(folder: Path, callbacks: list[TrainerCallback], **given: Any) -> Trainer:
    """Return a Trainer that got the class of its optimizer."""
    chosen = (torch.optim.RMSprop, {"lr": given["learning_rate"]})
    return builder(llama, text, optimizer_cls_and_kwargs=chosen)(folder, callbacks, **given)


def averaged_by_trainer(model: torch.nn.Module) -> torch.nn.Module:
    """Return a model whose head drops `num_items_in_batch`, told apart so that Trainer divides its loss."""
    model.accepts_loss_kwargs = False
    return model


translating = builder(
    lambda: averaged_by_trainer(t5()),
    translated,
    trainer=transformers.Seq2SeqTrainer,
    arguments=transformers.Seq2SeqTrainingArguments,
    data_collator=padded,
)

KINDS = (
    Kind(
        name="causal_lm",
        trainer="`Trainer`",
        model="causal LM (Llama)",
        build=builder(llama, text),
        short=True,
    ),
    Kind(
        name="causal_lm_accumulation",
        trainer="`Trainer`, gradient accumulation, checkpointed activations",
        model="causal LM (Llama)",
        build=builder(llama, text),
        arguments={"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "max_grad_norm": 0.5},
    ),
    Kind(
        name="frozen",
        trainer="`Trainer`, frozen layers",
        model="causal LM (Llama)",
        build=builder(lambda: frozen(llama()), text),
    ),
    Kind(
        name="sequence_classification",
        trainer="`Trainer`, padding",
        model="sequence classification (BERT)",
        build=builder(lambda: bert("BertForSequenceClassification", num_labels=3), classified, data_collator=padded),
    ),
    Kind(
        name="token_classification",
        trainer="`Trainer`, padding",
        model="token classification (BERT)",
        build=builder(lambda: bert("BertForTokenClassification", num_labels=5), tagged, data_collator=padded),
    ),
    Kind(
        name="image",
        trainer="`Trainer`",
        model="image classification (ViT)",
        build=builder(vit, image),
        counts="samples",
        plain_drifts=True,
    ),
    Kind(
        name="audio",
        trainer="`Trainer`",
        model="audio classification (wav2vec2)",
        build=builder(wav2vec2, sound),
        counts="samples",
    ),
    Kind(
        name="speech",
        trainer="`Seq2SeqTrainer`",
        model="speech recognition (Whisper)",
        build=builder(
            whisper, speech, trainer=transformers.Seq2SeqTrainer, arguments=transformers.Seq2SeqTrainingArguments
        ),
    ),
    Kind(
        name="llava",
        trainer="`Trainer`",
        model="vision-language (LLaVA)",
        build=builder(llava, captioned),
        plain_drifts=True,
    ),
    Kind(
        name="qwen2_vl",
        trainer="`Trainer`",
        model="vision-language (Qwen2-VL)",
        build=builder(qwen2_vl, qwen_captioned, data_collator=qwen_batch),
        plain_drifts=True,
    ),
    Kind(
        name="seq2seq",
        trainer="`Seq2SeqTrainer`, `predict_with_generate`",
        model="encoder-decoder (T5)",
        padding_is_known=False,
        build=translating,
        arguments={"predict_with_generate": True, "generation_max_length": 5},
    ),
    Kind(
        name="own_subclass",
        trainer="own subclass: `compute_loss`, `training_step`, `log`, `get_train_dataloader`, `_save_checkpoint`",
        model="causal LM (Llama)",
        build=builder(llama, text, trainer=OwnTrainer),
        short=True,
        background=False,  # it writes a file after Trainer has saved
    ),
    Kind(
        name="own_optimizer",
        trainer="`Trainer(optimizers=(optimizer, scheduler))`",
        model="causal LM (Llama)",
        build=with_own_optimizer,
    ),
    Kind(
        name="create_optimizer",
        trainer="own subclass: `create_optimizer`",
        model="causal LM (Llama)",
        build=builder(llama, text, trainer=OwnOptimizerTrainer),
    ),
    Kind(
        name="optimizer_class",
        trainer="`Trainer(optimizer_cls_and_kwargs=...)`",
        model="causal LM (Llama)",
        build=with_optimizer_class,
    ),
    Kind(
        name="stream",
        trainer="`Trainer`, `IterableDataset`",
        model="causal LM (Llama)",
        build=builder(llama, text, dataset=Stream),
    ),
    Kind(
        name="stream_with_length",
        trainer="`Trainer`, `IterableDataset` with a length",
        model="causal LM (Llama)",
        build=builder(llama, text, dataset=StreamWithLength),
    ),
    Kind(
        name="compiled",
        trainer="`Trainer`, `torch_compile`",
        model="causal LM (Llama)",
        build=builder(llama, text),
        arguments={"torch_compile": True, "torch_compile_backend": "aot_eager"},
    ),
    Kind(
        name="causal_lm_ddp",
        trainer="`Trainer`, DDP",
        model="causal LM (Llama)",
        build=builder(llama, text),
        processes=2,
    ),
    Kind(
        name="causal_lm_fsdp2",
        trainer="`Trainer`, FSDP2",
        model="causal LM (Llama)",
        build=builder(llama, text),
        processes=2,
        strategy="fsdp2",
    ),
    Kind(
        name="experts",
        trainer="`Trainer`, `distributed_config` (FSDP2, expert parallelism)",
        model="mixture of experts (Qwen3-MoE)",
        build=builder(experts, text),
        arguments={"save_only_model": True, "load_best_model_at_end": False},
        processes=2,
        is_distributed=True,
    ),
    Kind(
        name="experts_compiled",
        trainer="`Trainer`, `distributed_config`, `torch_compile`",
        model="mixture of experts (Qwen3-MoE)",
        build=builder(experts, text),
        arguments={
            "save_only_model": True,
            "load_best_model_at_end": False,
            "torch_compile": True,
            "torch_compile_backend": "aot_eager",
        },
        processes=2,
        is_distributed=True,
    ),
    Kind(
        name="seq2seq_ddp",
        trainer="`Seq2SeqTrainer`, DDP",
        model="encoder-decoder (T5)",
        padding_is_known=False,
        build=translating,
        arguments={"predict_with_generate": True, "generation_max_length": 5},
        processes=2,
    ),
    Kind(
        name="sequence_classification_zero2",
        trainer="`Trainer`, padding, ZeRO-2",
        model="sequence classification (BERT)",
        build=builder(
            lambda: averaged_by_trainer(bert("BertForSequenceClassification", num_labels=3)),
            classified,
            data_collator=padded,
            # The contract calls `train` of one Trainer twice. Under DeepSpeed, Trainer itself cannot take another
            # step in the second one; after two complete epochs it takes none.
            dataset=lambda row: Rows(row, 24),
        ),
        processes=2,
        strategy="zero2",
    ),
)
