"""Kinds of sentence-transformers' Trainers, on a tiny BERT."""

import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from datasets import Dataset
from kinds_transformers import LAYERS
from kinds_trl import say, tokenizer
from trainer_contract import VOCAB, Kind
from transformers import Trainer, TrainerCallback


@functools.cache
def model_folder(kind: str = "BertModel") -> str:
    """Return a folder with a tiny BERT and a tokenizer."""
    folder = tempfile.mkdtemp()
    transformers.set_seed(0)
    config = transformers.BertConfig(**LAYERS, vocab_size=VOCAB, max_position_embeddings=64)
    getattr(transformers, kind)(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def paired(numbers: random.Random) -> dict[str, Any]:
    """Return a row with two texts that belong together."""
    return {"anchor": say(numbers), "positive": say(numbers)}


def judged(numbers: random.Random) -> dict[str, Any]:
    """Return a row with two texts and whether they belong together."""
    return paired(numbers) | {"label": float(numbers.random() < 0.5)}


def ranked(numbers: random.Random) -> dict[str, Any]:
    """Return a row with a question, texts, and how well each of them answers it."""
    labels = [float(numbers.random() < 0.5) for _ in range(3)]
    return {"question": say(numbers), "answers": [say(numbers) for _ in labels], "label": labels}


def embedding_model() -> Any:
    """Return a tiny model of sentence embeddings."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    transformer = Transformer(model_folder())
    pooling = Pooling(transformer.get_embedding_dimension())
    return SentenceTransformer(modules=[transformer, pooling], device="cpu")


def embedding_loss(model: Any) -> Any:
    """Return the loss of pairs, with the other pairs of the batch as negatives."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    return MultipleNegativesRankingLoss(model)


def cached_embedding_loss(model: Any) -> Any:
    """Return the same loss, computed in parts of the batch."""
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    return CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)


def sparse_encoder() -> Any:
    """Return a tiny model of sparse embeddings, SPLADE."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    transformer = Transformer(model_folder("BertForMaskedLM"), transformer_task="fill-mask")
    return SparseEncoder(modules=[transformer, SpladePooling()], device="cpu")


def sparse_encoder_loss(model: Any) -> Any:
    """Return the loss of pairs, which also asks for few numbers that are not 0."""
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

    return SpladeLoss(
        model,
        loss=SparseMultipleNegativesRankingLoss(model),
        document_regularizer_weight=1e-3,
        query_regularizer_weight=1e-3,
    )


def multi_vector_encoder() -> Any:
    """Return a tiny model with an embedding for each token, ColBERT."""
    from sentence_transformers import MultiVectorEncoder

    return MultiVectorEncoder(model_folder(), device="cpu")


def multi_vector_loss(model: Any) -> Any:
    """Return the loss of pairs."""
    from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss

    return MultiVectorMultipleNegativesRankingLoss(model)


def reranker_loss(model: Any) -> Any:
    """Return the loss of texts that are to be ranked."""
    from sentence_transformers.cross_encoder.losses import LambdaLoss

    return LambdaLoss(model)


def cross_encoder() -> Any:
    """Return a tiny model that judges pairs."""
    from sentence_transformers import CrossEncoder

    return CrossEncoder(model_folder(), num_labels=1, device="cpu")


def cross_encoder_loss(model: Any) -> Any:
    """Return the loss of judged pairs."""
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    return BinaryCrossEntropyLoss(model)


def builder(
    prefix: str,
    model: Callable[[], Any],
    loss: Callable[[Any], Any],
    row: Callable[[random.Random], dict[str, Any]],
    rates: Callable[[float], dict[str, float]] = lambda rate: {},
) -> Callable[..., Trainer]:
    """Return the `build` of a kind: the Trainer whose name begins with `prefix`."""

    def build(folder: Path, callbacks: list[TrainerCallback], **given: Any) -> Trainer:
        import sentence_transformers  # takes seconds

        def rows(size: int) -> Dataset:
            numbers = random.Random(0)
            return Dataset.from_list([row(numbers) for _ in range(size)])

        model_folder()  # made once, from random numbers of its own
        transformers.set_seed(0)
        made = model()
        return getattr(sentence_transformers, f"{prefix}Trainer")(
            model=made,
            args=getattr(sentence_transformers, f"{prefix}TrainingArguments")(
                **given, learning_rate_mapping=rates(given["learning_rate"])
            ),
            train_dataset=rows(24),
            eval_dataset=rows(4),
            loss=loss(made),
            callbacks=callbacks,
        )

    return build


KINDS = (
    Kind(
        name="sentence_transformer",
        trainer="`SentenceTransformerTrainer`",
        model="embeddings (BERT)",
        build=builder("SentenceTransformer", embedding_model, embedding_loss, paired),
    ),
    Kind(
        name="sentence_transformer_rates",
        trainer="`SentenceTransformerTrainer`, `learning_rate_mapping`",
        model="embeddings (BERT)",
        build=builder(
            "SentenceTransformer", embedding_model, embedding_loss, paired, lambda rate: {r"embeddings\.": rate / 4}
        ),
    ),
    Kind(
        name="sentence_transformer_cached",
        trainer="`SentenceTransformerTrainer`, a cached loss",
        model="embeddings (BERT)",
        build=builder("SentenceTransformer", embedding_model, cached_embedding_loss, paired),
    ),
    Kind(
        name="sparse_encoder",
        trainer="`SparseEncoderTrainer`",
        model="sparse embeddings (BERT)",
        build=builder("SparseEncoder", sparse_encoder, sparse_encoder_loss, paired),
    ),
    Kind(
        name="multi_vector_encoder",
        trainer="`MultiVectorEncoderTrainer`",
        model="embeddings of tokens (BERT)",
        build=builder("MultiVectorEncoder", multi_vector_encoder, multi_vector_loss, paired),
    ),
    Kind(
        name="cross_encoder",
        trainer="`CrossEncoderTrainer`",
        model="sequence classification (BERT)",
        build=builder("CrossEncoder", cross_encoder, cross_encoder_loss, judged),
    ),
    Kind(
        name="reranker",
        trainer="`CrossEncoderTrainer`, lists to rank",
        model="sequence classification (BERT)",
        build=builder("CrossEncoder", cross_encoder, reranker_loss, ranked),
    ),
)
