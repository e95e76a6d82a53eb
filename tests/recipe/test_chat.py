"""Chat data: which tokens are trained on for each format and chat template, and one clear line for a broken file."""

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hfscale.errors import DataError, UsageError
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
"""The system prompt is rendered only if a question comes last, as in Mistral-7B-Instruct-v0.3."""
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
        defaults = {"block_size": BLOCK, "validation_split_percentage": 0, "train_file": str(path), "packing": "none"}
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


PUBLISHED = Path(trl.origin).parent / "chat_templates" if (trl := find_spec("trl")) and trl.origin else Path("none")


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs the extra trl")
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507", "llama3", "gemma", "gemma3", "cohere", "lfm2"])
def test_prefixes_of_published_templates_mark_the_same_tokens_as_generation_marks(name, load, tokenizer):
    messages = CHAT[1:] if name == "gemma" else CHAT
    found = {}
    for variant in ("", "_training"):
        template = (PUBLISHED / f"{name}{variant}.jinja").read_text()
        text, trained = parts(load([{"messages": messages}], template)[0], tokenizer)
        found[variant] = text, [turn.strip() for turn in trained]  # some marks include the line end after a turn
    assert found[""] == found["_training"]
    assert len(found[""][1]) == 2


def test_qwen3_trains_the_turns_without_thinking_and_refuses_to_drop_the_thinking_of_earlier_turns(load, tokenizer):
    rows = load([{"messages": CHAT}], QWEN3)
    assert parts(rows[0], tokenizer)[1] == ["Four.<|im_end|>", "<think>\n\n</think>\n\n  5!<|im_end|>"]
    thinking = [*CHAT[:2], ANSWER | {"reasoning_content": "2 + 2 = 4"}]
    assert parts(load([{"messages": thinking}], QWEN3)[0], tokenizer)[1] == [
        "<think>\n2 + 2 = 4\n</think>\n\nFour.<|im_end|>"
    ]
    with pytest.raises(DataError, match=r"c.jsonl, row 2: .* 1 to 3 .*--chat_template FILE with {% generation %}"):
        load([{"messages": CHAT}, {"messages": [*thinking, *CHAT[3:]]}], QWEN3)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": [2, 2]}}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": [2, 2]}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize("as_text", [False, True])
def test_tool_calls_are_trained_on_and_their_results_are_not(as_text, load, tokenizer):
    call = {"function": CALL["function"] | {"arguments": '{"a": [2, 2]}'}} if as_text else CALL
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "I add."},
        {"role": "tool", "content": "4", "tool_calls": None},
        ANSWER,
    ]
    tools = json.dumps([TOOL]) if as_text else [TOOL]
    text, trained = parts(load([{"messages": messages, "tools": tools}], QWEN3)[0], tokenizer)
    assert trained == [f"<think>\nI add.\n</think>\n\n{CALLED}", "<think>\n\n</think>\n\nFour.<|im_end|>"]
    assert json.dumps(TOOL) in text
    assert "<tool_response>\n4\n</tool_response>" in text


def test_parts_of_a_message_are_its_text_and_its_thinking(load, tokenizer):
    answer = [
        {"type": "thinking", "thinking": "2 + 2"},
        {"type": "text", "text": "Fo"},
        {"type": "text", "text": "ur."},
    ]
    question = [{"type": "text", "text": QUESTION["content"]}]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    assert parts(load([{"messages": messages}], QWEN3)[0], tokenizer)[1] == [
        "<think>\n2 + 2\n</think>\n\nFour.<|im_end|>"
    ]
    with pytest.raises(DataError, match=r"row 1 has a thinking part, which .* leaves out"):
        load([{"messages": messages}], CHATML)


@pytest.mark.parametrize(
    ("loss_on", "trained"),
    [("assistant", ["Four.<|im_end|>", "  5!<|im_end|>"]), ("completion", ["  5!<|im_end|>"]), ("all", None)],
)
@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_loss_on(template, loss_on, trained, load, tokenizer):
    text, found = parts(load([{"messages": CHAT}], template, loss_on=loss_on)[0], tokenizer)
    assert found == (trained or [text])


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(
    ("record", "trained"),
    [
        ({"messages": [QUESTION, ANSWER]}, "Four.<|im_end|>"),
        ({"prompt": [QUESTION], "completion": [ANSWER]}, "Four.<|im_end|>"),
        ({"prompt": "Two and two is", "completion": " four."}, " four.<|end|>"),
        (
            {
                "system": "Hi",
                "conversations": [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "Four."}],
            },
            "Four.<|im_end|>",
        ),
    ],
    ids=["messages", "prompt and completion as messages", "as text", "sharegpt"],
)
def test_formats(kind, record, trained, load, tokenizer):
    rows = load([record] * 3, name=f"c.{kind}")
    assert [parts(row, tokenizer)[1] for row in rows] == [[trained]] * 3
    text = parts(rows[0], tokenizer)[0]
    if "system" in record:
        assert text.startswith("<|im_start|>system\nHi<|im_end|>\n<|im_start|>user\nTwo?")
    if isinstance(record.get("prompt"), str):
        assert text == "<s>Two and two is four.<|end|>"


def test_sharegpt_function_calls(load, tokenizer):
    turns = [
        {"from": "human", "value": "Add."},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": [2, 2]}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "Four."},
    ]
    trained = parts(load([{"conversations": turns}], QWEN3, loss_on="completion")[0], tokenizer)[1]
    assert trained == ["<think>\n\n</think>\n\nFour.<|im_end|>"]
    assert parts(load([{"conversations": turns}], QWEN3)[0], tokenizer)[1] == [CALLED, *trained]


GOOD = {"messages": [QUESTION, ANSWER]}
TEXT = {"prompt": "Two and two is", "completion": " four."}


def test_unusable_samples_are_counted_and_reported_with_their_first_row(load, tokenizer, caplog):
    long = {"role": "user", "content": "word " * BLOCK}
    records = [
        GOOD,
        {"messages": [QUESTION, {"role": "narrator", "content": "x"}]},
        {"messages": [QUESTION]},
        {"messages": [QUESTION, {"role": "assistant", "content": None}]},
        {"messages": [long, ANSWER]},
        {"messages": [ANSWER]},
        {"messages": [QUESTION, ANSWER, long]},
    ]
    rows = load(records)
    assert [parts(row, tokenizer)[1] for row in rows] == [["Four.<|im_end|>"]] * 2
    assert [len(row["labels"]) == BLOCK for row in rows] == [False, True]
    report = caplog.text
    assert "5 of 7 samples are left out" in report
    assert "3 broken roles or messages (first: row 2, message 2 has the role 'narrator'" in report
    assert "2 without a trained token (first: row 3" in report
    assert f"1 of 7 samples are cut to {BLOCK} tokens" in report
    with pytest.raises(DataError, match=r"none of 2 samples can be trained on: 1 broken.*, 1 without a trained token"):
        load(records[1:3])


def test_a_stream_reports_unusable_samples_when_it_reads_them(load, tokenizer, caplog):
    broken = {"messages": [QUESTION, {"role": "narrator", "content": "x"}]}
    rows = load([GOOD, *[broken] * 12, {"messages": [QUESTION]}, GOOD], streaming=True)
    assert [parts(row, tokenizer)[1] for row in rows] == [["Four.<|im_end|>"]] * 2
    assert "1 samples so far are left out" in caplog.text
    assert "(it has no message of the assistant)" in caplog.text  # and not "token: [redacted]"
    assert "10 samples so far are left out, broken roles or messages (message 2 has the role 'narrator'" in caplog.text


@pytest.mark.parametrize("loss_on", ["assistant", "completion", "all"])
def test_conversations_of_which_the_template_leaves_out_a_part_are_reported(loss_on, load, caplog):
    called = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert len(load([GOOD, {"messages": called}, {"messages": CHAT}], MISTRAL, loss_on=loss_on)) == 1
    assert "2 not rendered completely by the chat template (first: row 2, it leaves out message 2" in caplog.text


def test_records_that_the_template_refuses_are_counted_with_its_reason(load, tokenizer, caplog):
    assert len(load([GOOD, {"messages": CHAT}], GEMMA)) == 1
    assert "1 refused by the chat template (first: row 2, System role not supported)" in caplog.text


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([GOOD, {"messages": []}], "row 2 is an empty conversation: remove the row"),
        ([GOOD, {"conversations": [{"from": "human", "value": "x"}]}], "row 2 has 'conversations' and no 'messages'"),
        ([GOOD, {"text": "x"}], "row 2 has 'text' and no 'messages': keep one format"),
        ([GOOD, {"messages": [{"from": "human", "value": "x"}]}], "row 2 has from/value messages, the first row has"),
        ([GOOD, {"messages": "x"}], "row 2: 'messages' is text, not a list"),
        ([GOOD, {"messages": None}], "row 2 has no 'messages': remove the row"),
        (
            [{"prompt": "a", "completion": "b"}, {"prompt": [QUESTION], "completion": [ANSWER]}],
            "row 2 has role/content",
        ),
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a"}], "row 2 has no 'completion'"),
        (
            [{"prompt": [QUESTION], "completion": [ANSWER]}, {"prompt": [QUESTION], "completion": []}],
            "row 2 is an empty",
        ),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "has preferences .*recipes/dpo/train.py"),
        ([{"question": "a", "answer": "b"}], "no column 'text', only 'question', 'answer': rename"),
    ],
)
def test_broken_data_is_one_line_with_file_row_and_fix(records, expected, load):
    with pytest.raises(DataError, match=expected) as found:
        load(records)
    assert "c.jsonl" in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_in_messages_are_those_of_the_file(streaming, load):
    records = [*[GOOD] * 50, {"messages": []}]
    with pytest.raises(DataError, match=r"row 51 is an empty conversation"):
        list(load(records, validation_split_percentage=20, streaming=streaming))


def test_wrong_flags_are_refused(load, tokenizer, tmp_path):
    with pytest.raises(UsageError, match=r"has no chat template .*--chat_template FILE"):
        load([GOOD], None)
    with pytest.raises(UsageError, match=r"--loss_on assistant needs messages"):
        load([TEXT], loss_on="assistant")
    with pytest.raises(UsageError, match=r"--loss_on assistant is for conversations"):
        load([{"text": "a"}], loss_on="assistant")
    with pytest.raises(UsageError, match=r"--chat_template .* is not a file"):
        load([GOOD], chat_template=str(tmp_path / "none.jinja"))
    broken = tmp_path / "broken.jinja"
    broken.write_text("{{ messages }}\n{% for %}")
    with pytest.raises(UsageError, match=r"broken.jinja is not a Jinja template: line 2"):
        load([GOOD], chat_template=str(broken))
    (tmp_path / "v.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"has conversations and --validation_file .* has text"):
        load([GOOD], validation_file=str(tmp_path / "v.jsonl"))


def test_the_chat_template_of_the_flag_is_used_and_kept(load, tokenizer, tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text(GENERATION)
    assert parts(load([GOOD], CHATML, chat_template=str(path))[0], tokenizer)[1] == ["Four.<|im_end|>"]
    assert tokenizer.chat_template == GENERATION  # so that it is saved with the model


def test_show_samples_prints_masked_and_trained_tokens(load, caplog):
    load([GOOD, GOOD], show_samples=1)
    assert "sample 1: " in caplog.text
    assert "sample 2: " not in caplog.text
    assert r"masked  '<|im_start|>user\nWhat is two and two?<|im_end|>\n<|im_start|>assistant\n'" in caplog.text
    assert "trained 'Four.<|im_end|>'" in caplog.text


def test_a_template_that_does_not_train_the_end_of_turn_is_reported(load, caplog):
    load([GOOD], GENERATION)
    assert "does not learn to end" not in caplog.text
    load([GOOD], GENERATION.replace("+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>' }}"))
    assert "does not learn to end" in caplog.text
