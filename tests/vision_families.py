"""Small vision-language models of several families with their processors, built without the hub."""

import json
from itertools import islice
from pathlib import Path

from transformers import (
    Gemma3Config,
    Gemma3Processor,
    Idefics3Config,
    Idefics3Processor,
    LlamaConfig,
    LlavaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from hfscale.recipe import corpus, pictures

LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWER = LAYERS | {"image_size": pictures.SIDE, "patch_size": pictures.PATCH}
TOKENS = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<pixels>"}


def tokenizer_of(placeholder: str) -> PreTrainedTokenizerFast:
    """Return the embedded tokenizer with tokens for images, and a template that writes `placeholder` for an image."""
    tokenizer = corpus.default_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [placeholder]})
    tokenizer.chat_template = pictures.CHAT_TEMPLATE.replace(pictures.IMAGE_TOKEN, placeholder)
    return tokenizer


def text_sizes(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Return the sizes of a small language model."""
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return LAYERS | ends | {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "max_position_embeddings": 256}


def llava() -> tuple[ProcessorMixin, PreTrainedConfig]:
    """Return LLaVA: CLIP, of which the last layer and the norm are not used, and a projector beside it."""
    processor = pictures.default_processor()
    text = LlamaConfig(**text_sizes(processor.tokenizer), tie_word_embeddings=True)
    config = pictures.default_config(processor.tokenizer)
    vision = config.vision_config
    vision.update({"hidden_size": 32, "intermediate_size": 64})
    index = processor.tokenizer.convert_tokens_to_ids(pictures.IMAGE_TOKEN)
    sizes = {"image_token_index": index, "image_seq_length": 16, "tie_word_embeddings": True}
    return processor, LlavaConfig(vision_config=vision, text_config=text, **sizes)


def gemma3() -> tuple[ProcessorMixin, PreTrainedConfig]:
    """Return Gemma 3: SigLIP, and attention in both directions between the tokens of an image."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=corpus.default_tokenizer().backend_tokenizer,
        eos_token=corpus.EOS_TOKEN,
        pad_token=corpus.EOS_TOKEN,
        extra_special_tokens=TOKENS,
    )
    tokenizer.chat_template = pictures.CHAT_TEMPLATE.replace(pictures.IMAGE_TOKEN, TOKENS["boi_token"])
    size = {"height": pictures.SIDE, "width": pictures.SIDE}
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(size=size),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=tokenizer.chat_template,
    )
    text = text_sizes(tokenizer) | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
    ids = {f"{name.partition('_')[0]}_token_index": tokenizer.convert_tokens_to_ids(t) for name, t in TOKENS.items()}
    config = Gemma3Config(
        text_config=text, vision_config={**TOWER, "vision_use_head": False}, mm_tokens_per_image=4, **ids
    )
    return processor, config


def idefics3() -> tuple[ProcessorMixin, PreTrainedConfig]:
    """Return Idefics3: an image becomes several tiles, and a connector packs four patches into a token."""
    tokenizer = tokenizer_of(pictures.IMAGE_TOKEN)
    edge = {"longest_edge": pictures.SIDE}
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(size={"longest_edge": 2 * pictures.SIDE}, max_image_size=edge),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=tokenizer.chat_template,
    )
    config = Idefics3Config(
        text_config=LlamaConfig(**text_sizes(tokenizer)),
        vision_config=TOWER,
        image_token_id=processor.image_token_id,
        scale_factor=2,
        pad_token_id=0,
    )
    return processor, config


FAMILIES = {"llava": llava, "gemma3": gemma3, "idefics3": idefics3}


def save_family(name: str, folder: Path) -> Path:
    """Write the processor and the config of a family into a folder, and return it."""
    processor, config = FAMILIES[name]()
    processor.save_pretrained(folder)
    config.save_pretrained(folder)
    return folder


def write_pictures(folder: Path, *, records: int = 32) -> Path:
    """Write pictures and a file of conversations about them, in which every second record is of text alone.

    Returns:
        `Path`: the JSONL file, with paths that are relative to its folder.
    """
    (folder / "pictures").mkdir(parents=True)
    rows = []
    for number, record in enumerate(islice(pictures.picture_records("train"), records)):
        names = []
        if number % 2 == 0:
            for image in record["images"]:
                names.append(f"pictures/{number}.png")
                image.save(folder / names[-1])
        rows.append({"images": names, "messages": record["messages"]})
    file = folder / "pictures.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
