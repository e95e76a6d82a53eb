"""The embedded default of the vision recipe: a small LLaVA, and pictures of coloured shapes with questions about them.

Nothing is downloaded: the pictures are drawn, and the tokenizer is that of the embedded text.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import PIL.Image
import PIL.ImageDraw
from transformers import CLIPVisionConfig, LlavaConfig, LlavaProcessor, PreTrainedTokenizerBase
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from hfscale.recipe import corpus

SIDE = 32
"""Pixels of a side of a picture."""
PATCH = 8
"""Pixels of a side of a patch, of which each becomes a token."""
IMAGE_TOKEN = "<image>"  # noqa: S105 (not a password)
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '### ' + message['role'] + '\\n' }}
{%- for part in message['content'] if part['type'] == 'image' -%}<image>{%- endfor -%}
{%- if message['role'] == 'assistant' -%}
{% generation %}\
{%- for part in message['content'] if part['type'] == 'text' -%}{{ part['text'] }}{%- endfor -%}\
{{ eos_token }}{% endgeneration %}{{ '\\n' }}
{%- else -%}
{%- for part in message['content'] if part['type'] == 'text' -%}{{ part['text'] }}{%- endfor -%}{{ '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '### assistant\\n' }}
{%- endif -%}
"""
"""The chat template of `default_processor`. It marks what the assistant says, with the end-of-text token after it."""
COLOURS = ("red", "green", "blue", "yellow", "black", "purple")
SHAPES = ("square", "circle", "cross")
_PICTURES = {"train": 240, "validation": 24}
_WITHOUT_IMAGE = 4
"""Of so many records one is of text alone."""


def picture_records(split: str) -> Iterator[dict[str, Any]]:
    """Yield conversations `{"images": [image], "messages": […]}` about drawn pictures; some have no image.

    Args:
        split (`str`): `validation` or `train`.
    """
    numbers = random.Random(split)  # noqa: S311 (no secret)
    kinds = itertools.cycle(itertools.product(COLOURS, SHAPES))
    for number, (colour, shape) in enumerate(itertools.islice(kinds, _PICTURES[split])):
        if number % _WITHOUT_IMAGE == _WITHOUT_IMAGE - 1:
            question, answer, images = f"Is {colour} a colour?", "yes", []
        else:
            question, answer = "What is this?", f"a {colour} {shape}"
            images = [_draw(colour, shape, numbers)]
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        yield {"images": images, "messages": messages}


def _draw(colour: str, shape: str, numbers: random.Random) -> PIL.Image.Image:
    """Draw a shape of a colour at a random place."""
    image = PIL.Image.new("RGB", (SIDE, SIDE), "white")
    draw = PIL.ImageDraw.Draw(image)
    left, top = numbers.randrange(SIDE // 2), numbers.randrange(SIDE // 2)
    box = (left, top, left + SIDE // 2, top + SIDE // 2)
    if shape == "square":
        draw.rectangle(box, fill=colour)
    elif shape == "circle":
        draw.ellipse(box, fill=colour)
    else:
        draw.line(box, fill=colour, width=4)
        draw.line((box[0], box[3], box[2], box[1]), fill=colour, width=4)
    return image


def default_processor() -> LlavaProcessor:
    """Return a processor for pictures of `SIDE` pixels, with the tokenizer of the embedded text and `IMAGE_TOKEN`.

    Raises:
        DataError: this Python has no source files, on which the tokenizer is trained.
        StorageError: the cache cannot be written.
    """
    tokenizer = corpus.default_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    tokenizer.chat_template = CHAT_TEMPLATE
    size = {"height": SIDE, "width": SIDE}
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=size, crop_size=size),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )


def default_config(tokenizer: PreTrainedTokenizerBase) -> LlavaConfig:
    """Return the config of a LLaVA of about four million parameters.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): gives the vocabulary size and the special tokens.
    """
    tower = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=64,
    )
    token: Any = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    return LlavaConfig(
        vision_config=tower,
        text_config=corpus.default_config(tokenizer),
        image_token_index=token,
        image_seq_length=(SIDE // PATCH) ** 2,
        tie_word_embeddings=True,
    )
