"""Chat data: which tokens are trained on for each format and chat template, and one clear line for a broken file."""

import json
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hfscale.recipe.arguments import DataArguments
from hfscale.recipe.data import load_packed_datasets

BLOCK = 512
SPECIAL = [
    "<|end|>",
    "<s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
]
CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
GENERATION = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else -%}{{ message.content + '<|im_end|>\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
LLAMA3 = """\
{{- '<|begin_of_text|>' -}}
{%- if messages[0].role != 'system' -%}
{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n<|eot_id|>' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}
"""
GEMMA = """\
{{- '<s>' -}}
{%- if messages[0].role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('Roles must alternate') }}{%- endif -%}
{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
{{- message.content | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
MISTRAL = """\
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content + '\n\n' -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- endif -%}
{{ '<s>' }}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{ '[INST] ' + (system if loop.last else '') + message.content + '[/INST]' }}
{%- else -%}{{ ' ' + message.content + '<|end|>' }}{%- endif -%}
{%- endfor -%}
"""
"""The system prompt is put before the last question, as in Mistral-7B-Instruct-v0.3."""
QWEN3 = """\
{%- set ns = namespace(last=0) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
{{ '<|im_start|>system\n<tools>' }}{%- for tool in tools -%}{{ '\n' }}{{ tool | tojson }}{%- endfor -%}
{{ '\n</tools><|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or message.reasoning_content) -%}
{{ '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}
{%- endif -%}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- elif message.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else -%}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
"""Thinking is rendered only after the last question, as in Qwen3."""

QUESTION = {"role": "user", "content": "What is two and two?"}
ANSWER = {"role": "assistant", "content": "Four."}
SYSTEM = {"role": "system", "content": "Answer briefly."}
CHAT = [
    SYSTEM,
    QUESTION,
    ANSWER,
    {"role": "user", "content": "And\n\nthree?"},
    {"role": "assistant", "content": "  5!"},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer that normalises text, like Qwen's, and adds `<s>`, like Llama's."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["assistant\n\n user question answer", "What is two and two? Four."] * 9, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|end|>",
        extra_special_tokens=[token for token in SPECIAL if token not in ("<s>", "<|end|>")],
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `datasets` keep its cache below `tmp_path` and show no progress bars."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


Load = Callable[..., Any]


@pytest.fixture
def load(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Load:
    """Return a function that writes records to a file and loads them: `load([record, …], template, loss_on=…)`."""

    def run(records: list[dict[str, Any]], template: str | None = CHATML, name: str = "c.jsonl", **flags: Any) -> Any:
        path = tmp_path / name
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(records))
        else:
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        tokenizer.chat_template = template
        defaults = {"block_size": BLOCK, "validation_split_percentage": 0, "train_file": str(path)}
        return load_packed_datasets(DataArguments(**(defaults | flags)), tokenizer, seed=0)[0]

    return run


def parts(row: dict[str, list[int]], tokenizer: PreTrainedTokenizerFast) -> tuple[str, list[str]]:
    """Return the text of a row without its padding, and its stretches of trained tokens."""
    pairs = list(zip(row["input_ids"], row["labels"], strict=True))
    assert all(label in (token, -100) for token, label in pairs)
    while pairs[-1] == (tokenizer.eos_token_id, -100):
        pairs.pop()
    stretches = groupby(pairs, key=lambda pair: pair[1] != -100)
    trained = [tokenizer.decode([token for token, _ in group]) for is_trained, group in stretches if is_trained]
    return tokenizer.decode([token for token, _ in pairs]), trained


@pytest.mark.parametrize(
    ("template", "messages", "trained"),
    [
        (CHATML, CHAT, ["Four.<|im_end|>", "  5!<|im_end|>"]),
        (GENERATION, CHAT, ["Four.<|im_end|>", "  5!<|im_end|>"]),
        (LLAMA3, CHAT, ["Four.<|eot_id|>", "5!<|eot_id|>"]),
        (LLAMA3, CHAT[1:], ["Four.<|eot_id|>", "5!<|eot_id|>"]),
        (GEMMA, CHAT[1:], ["Four.<end_of_turn>", "5!<end_of_turn>"]),
        (MISTRAL, CHAT[1:], [" Four.<|end|>", "   5!<|end|>"]),
        (QWEN3, CHAT[:3], ["<think>\n\n</think>\n\nFour.<|im_end|>"]),
    ],
    ids=["chatml", "generation", "llama3", "llama3 without system", "gemma", "mistral", "qwen3"],
)
def test_assistant_turns_are_trained_on_with_the_token_that_ends_them(template, messages, trained, load, tokenizer):
    rows = load([{"messages": messages}], template)
    text, found = parts(rows[0], tokenizer)
    assert found == trained
    assert text == tokenizer.apply_chat_template(messages, tokenize=False)  # the template's tokens, with one <s>
    assert len(rows[0]["input_ids"]) == BLOCK
