"""A preview of training samples that shows which tokens are trained on."""

from itertools import groupby, islice

from transformers import PreTrainedTokenizerBase

from hfscale.recipe.chat import IGNORED
from hfscale.recipe.sources import AnyDataset


def describe_samples(dataset: AnyDataset, tokenizer: PreTrainedTokenizerBase, count: int) -> str:
    """Describe the first samples of a dataset: for each stretch of masked or trained tokens a line with its text.

    Args:
        dataset (`Dataset` or `IterableDataset`): records with `input_ids` and `labels`.
        tokenizer (`PreTrainedTokenizerBase`): decodes the tokens.
        count (`int`): the number of samples.
    """
    lines = []
    for number, sample in enumerate(islice(dataset, count), start=1):
        tokens = list(zip(sample["input_ids"], sample["labels"], strict=True))
        trained = sum(label != IGNORED for _, label in tokens)
        lines.append(f"sample {number}: {len(tokens)} tokens, {trained} trained on")
        for is_trained, stretch in groupby(tokens, key=lambda token: token[1] != IGNORED):
            text = tokenizer.decode([token for token, _ in stretch], clean_up_tokenization_spaces=False)
            lines.append(f"  {'trained' if is_trained else 'masked '} {text!r}")
    return "\n".join(lines)
