"""Records of conversations and of prompts with completions as token documents with labels.

A document is `{"input_ids": [...], "labels": [...]}`; a label of -100 marks a token that is not trained on. The
formats are `messages` (roles, tools, thinking parts), `prompt` and `completion` (texts or messages), and ShareGPT's
`conversations`.
"""

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from hfscale.core.logging import get_logger
from hfscale.core.spelling import spelled, spelled_value
from hfscale.core.text_files import parse_json, read_text
from hfscale.errors import DataError, UsageError
from hfscale.recipe.arguments import DataArguments
from hfscale.recipe.preparation import kept_environment, worker_processes
from hfscale.recipe.sources import AnyDataset, columns_of, errors_name_source, shorten, source_name

logger = get_logger(__name__)

IGNORED = -100
"""The label of a token that is not trained on."""
Message = dict[str, Any]
Span = tuple[int, int]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "function_response": "tool",
    "observation": "tool",
    "tool": "tool",
}
"""The role of `messages` for each value of ShareGPT's `from`."""
_THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""The keys under which messages of different origins hold the assistant's thinking."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

_BROKEN = "broken roles or messages"
_REFUSED = "refused by the chat template"
_LOST = "not rendered completely by the chat template"
_UNTRAINED = "without a trained token"


class _RejectedError(Exception):
    """A record that is left out and counted: the kind of its fault, and what is wrong with it."""


class _RowError(Exception):
    """A record that ends the run: its row and what is wrong with it, without the source."""


# Formats.


def chat_format(dataset: AnyDataset) -> str | None:
    """Return the format of a dataset's records.

    Args:
        dataset (`Dataset` or `IterableDataset`): the raw records.

    Returns:
        `str` or None: `messages`, `conversations` or `completion`; None for text and for an empty dataset.
    """
    columns = columns_of(dataset)
    for column in ("messages", "conversations"):
        if column in columns:
            return column
    return "completion" if {"prompt", "completion"} <= set(columns) else None


def to_documents(
    dataset: AnyDataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments, *, split: str
) -> AnyDataset:
    """Convert chat records to documents of at most `block_size` tokens, and report what was left out or cut.

    Args:
        dataset (`Dataset` or `IterableDataset`): records in one of the formats of `chat_format`.
        tokenizer (`PreTrainedTokenizerBase`): the model's tokenizer; its chat template renders the messages.
        args (`DataArguments`): `loss_on`, the longest document, and the names for error messages.
        split (`str`): `train` or `validation`.

    Returns:
        The documents: records with `input_ids` and `labels`. A streamed dataset is converted when it is read.

    Raises:
        DataError: a record has another format than the first one or is empty, the chat template cannot mark the
            assistant's turns, or no record is left.
        UsageError: the tokenizer has no chat template, or `--loss_on` does not fit the format.
    """
    source = source_name(args, split)
    with errors_name_source(args, split):
        first = next(iter(dataset), None)
        if first is None:
            raise DataError(f"{source} has no records")
        convert = _converter(first, chat_format(dataset), tokenizer, args, source=source)
        # `datasets` hashes this function with all that it refers to into the name of the cache: it must not refer to
        # what does not change the result, such as the source.
        options: dict[str, Any] = {
            "with_indices": True,
            "remove_columns": dataset.column_names or list(first),
        }
        if isinstance(dataset, IterableDataset):
            documents = dataset.map(_name_source(source)(convert), **options)
            return documents.filter(_StreamReport(source)).remove_columns(["fault", "cut"])
        workers = worker_processes(args.preprocessing_num_workers, len(dataset))
        options |= {
            "num_proc": workers if workers > 1 else None,
            "desc": f"Tokenising {split} conversations",
        }
        with _name_source(source), kept_environment():
            documents = dataset.map(convert, **options)
    documents = _without_faults(documents, args, source=source)
    if args.loss_on != "all":
        _check_end_of_turn(documents[0]["labels"], tokenizer)
    return documents


def _converter(
    first: dict[str, Any],
    record_format: str | None,
    tokenizer: PreTrainedTokenizerBase,
    args: DataArguments,
    *,
    source: str,
) -> Callable[[dict[str, Any], int], dict[str, Any]]:
    """Return the function that converts one record and its index to a document with `fault` and `cut`."""
    is_text = record_format == "completion" and isinstance(first["prompt"], str)
    loss_on = args.loss_on or ("completion" if record_format == "completion" else "assistant")
    if is_text and loss_on == "assistant":
        given = spelled("loss_on", loss_on)
        fix = f"{spelled('loss_on', 'completion')} or {spelled_value('all')}"
        raise UsageError(
            f"{given} needs messages, and {source} has prompts and completions as text: give {fix}"
        )
    if not is_text and tokenizer.chat_template is None:
        raise UsageError(
            f"the tokenizer {tokenizer.name_or_path or ''} has no chat template and {source} has messages: give "
            "--chat_template FILE, or the --tokenizer_name of a model that was trained to chat"
        )
    kind = _kind(first, record_format)
    block_size = args.block_size
    encoder = _Encoder(tokenizer, loss_on, has_own_template=args.chat_template is not None)

    def convert(record: dict[str, Any], index: int) -> dict[str, Any]:
        where = f"row {index + 1}"
        _check_format(record, record_format, kind, where=where)
        try:
            if is_text:
                ids, trained = encoder.complete(record["prompt"], record["completion"])
            else:
                ids, trained = encoder.converse(*_conversation(record, record_format), where=where)
            is_cut = len(ids) > block_size
            ids, trained = ids[:block_size], trained[:block_size]
            if not any(trained):
                raise _RejectedError(_UNTRAINED, f"none in its first {len(ids)} tokens")
        except _RejectedError as fault:
            return {"input_ids": [], "labels": [], "fault": ": ".join(fault.args), "cut": False}
        labels = [
            token if is_trained else IGNORED for token, is_trained in zip(ids, trained, strict=True)
        ]
        return {"input_ids": ids, "labels": labels, "fault": "", "cut": is_cut}

    return convert


@contextmanager
def _name_source(source: str) -> Iterator[None]:
    """Turn a record that ends the run into one line that names the source of the record."""
    try:
        yield
    except _RowError as error:
        raise DataError(f"{source}, {error}") from None


def _without_faults(documents: Dataset, args: DataArguments, *, source: str) -> Dataset:
    """Report and leave out the documents with a fault."""
    faults = list(documents["fault"])
    kept = [index for index, fault in enumerate(faults) if not fault]
    report = _describe(faults)
    if not kept:
        raise DataError(f"{source}: none of {len(faults)} samples can be trained on: {report}")
    if report:
        logger.warning(
            "%s: %d of %d samples are left out: %s",
            source,
            len(faults) - len(kept),
            len(faults),
            report,
        )
    cut = sum(documents["cut"])
    if cut:
        logger.warning(
            "%s: %d of %d samples are cut to %d tokens (--block_size)",
            source,
            cut,
            len(faults),
            args.block_size,
        )
    documents = documents.remove_columns(["fault", "cut"])
    return documents if len(kept) == len(faults) else documents.select(kept)


def _check_end_of_turn(labels: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn if a document's last trained tokens, of which one may be a line end, are not the end of a turn."""
    trained = [label for label in labels if label != IGNORED]
    if not set(trained[-2:]) & {*tokenizer.get_added_vocab().values(), tokenizer.eos_token_id}:
        logger.warning(
            "the first sample's trained tokens end in %r, not in a special token, so that the model does not learn to "
            "end its turns (put the token into {%% generation %%}, or give another --chat_template)",
            tokenizer.decode(trained[-5:]),
        )


def _describe(faults: Sequence[str]) -> str:
    """Return the number of samples with each kind of fault, and the first of each."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for row, fault in enumerate(faults, start=1):
        if fault:
            kind, _, reason = fault.partition(": ")
            counts[kind] += 1
            first.setdefault(kind, f"row {row}, {reason}")
    return ", ".join(
        f"{count} {kind} (first: {first[kind]})" for kind, count in counts.most_common()
    )


class _StreamReport:
    """The filter of a stream's documents, which logs their faults: the first of each kind, the tenth, the 100th, …"""

    def __init__(self, source: str) -> None:
        self.source = source
        self.counts: Counter[str] = Counter()

    def __call__(self, document: dict[str, Any]) -> bool:
        fault = document["fault"]
        kind, _, reason = fault.partition(": ") if fault else ("cut to --block_size tokens", "", "")
        if fault or document["cut"]:
            self.counts[kind] += 1
            count = self.counts[kind]
            if count == 10 ** (len(str(count)) - 1):
                action = "left out, " if fault else ""
                # "token: reason" would be taken for a secret
                first = f" ({reason})" if reason else ""
                logger.warning(
                    "%s: %d samples so far are %s%s%s", self.source, count, action, kind, first
                )
        return not fault


def _kind(record: dict[str, Any], record_format: str | None) -> str:
    """Return what a record's values are: `text`, `role/content` messages or `from/value` messages."""
    value = record["prompt" if record_format == "completion" else str(record_format)]
    if isinstance(value, str):
        return "text"
    is_sharegpt = bool(value) and isinstance(value[0], dict) and value[0].get("from") is not None
    return "from/value messages" if is_sharegpt else "role/content messages"


def _check_format(
    record: dict[str, Any], record_format: str | None, kind: str, *, where: str
) -> None:
    """Raise a _RowError if a record is empty or does not have the format of the first one."""
    columns: tuple[str, ...] = (str(record_format),)
    if record_format == "completion":
        columns = ("prompt", "completion")
    # The first row decides for all: what is in another format would be rendered in another way, without an error.
    for column in columns:
        value = record.get(column)
        if value is None:
            others = {"messages", "conversations", "prompt", "completion", "text"} - set(columns)
            filled = [name for name in sorted(others) if record.get(name)]
            if filled:
                raise _RowError(
                    f"{where} has '{filled[0]}' and no '{column}': keep one format per file"
                )
            raise _RowError(f"{where} has no '{column}': remove the row")
        if not isinstance(value, str | list):
            raise _RowError(
                f"{where}: '{column}' is neither text nor a list of messages: convert it"
            )
        if value == [] and column != "prompt":
            raise _RowError(f"{where} is an empty conversation: remove the row")
        found = kind
        if value != []:
            found = _kind(record | {"prompt": value}, "completion")
        if record_format != "completion" and found == "text":
            raise _RowError(f"{where}: '{column}' is text, not a list of messages: convert it")
        if found != kind:
            raise _RowError(
                f"{where} has {found}, the first row has {kind}: keep one format per file"
            )


# Tokens and masks.


def document_marks(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens before and after each document of text, the same as those that the model gets in use.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's tokenizer.
    """
    adds_bos = (
        tokenizer.bos_token_id is not None
        and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    )
    return (
        [tokenizer.bos_token_id] if adds_bos else [],
        [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id],
    )


def _encode(
    text: str, spans: Sequence[Span], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[bool]]:
    """Tokenise a text without adding special tokens, and mark the tokens that overlap its spans of characters."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    trained = []
    remaining = list(reversed(spans))
    for start, end in encoding["offset_mapping"]:
        while remaining and start >= remaining[-1][1] and not start == end == remaining[-1][1]:
            remaining.pop()
        # White space may have the offsets (end, end)
        trained.append(bool(remaining) and end > remaining[-1][0])
    return encoding["input_ids"], trained


class _Encoder:
    """The tokens of conversations or of prompts with completions, and which of them are trained on.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): renders conversations with its chat template and tokenises.
        loss_on (`str`): `assistant`, `completion` or `all`.
        has_own_template (`bool`): whether the chat template is that of `--chat_template`, for error messages.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, loss_on: str, *, has_own_template: bool
    ) -> None:
        self.tokenizer = tokenizer
        self.loss_on = loss_on
        name = tokenizer.name_or_path or "the tokenizer"
        self.template = (
            "the template of --chat_template"
            if has_own_template
            else f"the chat template of {name}"
        )
        self.marks = document_marks(tokenizer)
        self.special_tokens = tuple(tokenizer.get_added_vocab())

    def complete(self, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
        """Tokenise a prompt and its completion as one document."""
        if not completion.strip():
            raise _RejectedError(_UNTRAINED, "its completion is empty")
        text = prompt + completion
        ids, trained = _encode(text, [(len(prompt), len(text))], self.tokenizer)
        begin, end = self.marks
        if end == ids[-1:]:
            end = []
        ids = begin + ids + end
        return ids, [True] * len(ids) if self.loss_on == "all" else [False] * len(
            begin
        ) + trained + [True] * len(end)

    def converse(
        self, messages: list[Message], tools: list[Any] | None, completion: int, *, where: str
    ) -> tuple[list[int], list[bool]]:
        """Render and tokenise a conversation.

        Args:
            messages (`list[dict]`): the messages.
            tools (`list`, *optional*): the tools that the assistant may call.
            completion (`int`): the number of messages before the completion.
            where (`str`): the row, for error messages.
        """
        template = self.tokenizer.get_chat_template(tools=tools)
        renders_thinking = "reasoning_content" in template or "thinking" in template
        if not renders_thinking and any("reasoning_content" in message for message in messages):
            raise _RowError(
                f"{where} has a thinking part, which {self.template} leaves out: give --chat_template FILE that "
                "renders message.reasoning_content, or remove the part"
            )
        render = functools.partial(self._render, tools=tools)
        text = render(messages)
        _check_rendered(text, messages)
        # A template that marks what the assistant says is exact; of others the marks are found in the text.
        if self.loss_on == "assistant" and _GENERATION.search(template):
            rendered = render(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return rendered["input_ids"], [bool(mark) for mark in rendered["assistant_masks"]]
        if self.loss_on == "all":
            spans = [(0, len(text))]
        elif self.loss_on == "completion":
            if messages[-1]["role"] != "assistant":
                raise _RejectedError(_UNTRAINED, "the last message is not the assistant's")
            spans = [self._span(render, text, messages, completion, len(messages), where=where)]
        else:
            turns = [
                number for number, message in enumerate(messages) if message["role"] == "assistant"
            ]
            spans = [
                self._span(render, text, messages, number, number + 1, where=where)
                for number in turns
            ]
        return _encode(text, spans, self.tokenizer)

    def _span(
        self,
        render: Callable[..., str],
        text: str,
        messages: list[Message],
        begin: int,
        end: int,
        *,
        where: str,
    ) -> Span:
        """Return the characters of the messages from `begin` to `end` in the text of a conversation.

        They are what follows the prompt that asks the assistant for them. That holds only if both the prompt and the
        messages up to `end`, rendered for themselves, are beginnings of the text. A template may put something before
        the last turn alone, such as Qwen3's empty thinking part: the turn is then its remainder in the text.
        """
        prompt = render(messages[:begin], add_generation_prompt=True)
        turn = text if end == len(messages) else render(messages[:end])
        is_sound = text.startswith(turn) and turn.startswith(prompt)
        if not is_sound and text.startswith(prompt) and turn.startswith(prompt):
            ending = _common_ending(turn[len(prompt) :], text[len(prompt) :])
            is_sound = _says(ending, messages[begin])
            turn = prompt + ending
        if not is_sound:
            others = "all" if self.loss_on == "completion" else "completion or all"
            raise _RowError(
                f"{where}: {self.template} does not render message 1 to {begin + 1} as the beginning of the "
                "conversation, so that the assistant's tokens cannot be told apart: give --chat_template FILE with "
                f"{{% generation %}} … {{% endgeneration %}} around what the assistant says, or --loss_on {others}"
            )
        stripped = turn.rstrip()
        if stripped.endswith(self.special_tokens):  # the line end after the token that ends a turn
            turn = stripped
        return len(prompt), len(turn)

    def _render(
        self,
        messages: list[Message],
        *,
        tools: list[Any] | None,
        tokenize: bool = False,
        **options: Any,
    ) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=tokenize, **options
            )
        except (TemplateError, TypeError) as error:
            raise _RejectedError(_REFUSED, shorten(" ".join(str(error).split()))) from error


def _common_ending(turn: str, text: str) -> str:
    """Return the longest ending of a turn with which the text begins."""
    start = turn.find(text[:1])
    while start >= 0 and not text.startswith(turn[start:]):
        start = turn.find(text[:1], start + 1)
    return turn[start:] if start >= 0 else ""


def _says(text: str, message: Message) -> bool:
    """Return whether a rendered text has a message's content, its thinking and its calls."""
    said = [message.get("content") or "", message.get("reasoning_content") or ""]
    said += [call["function"]["name"] for call in message.get("tool_calls") or ()]
    return all(part.strip() in text for part in said)


def _check_rendered(text: str, messages: list[Message]) -> None:
    """Reject a conversation of which the template leaves out a message; results of tools may be rendered as JSON."""
    for number, message in enumerate(messages, start=1):
        # Earlier thinking may be left out
        answer = (message.get("content") or "").rpartition("</think>")[2]
        spoken = message | {"content": answer, "reasoning_content": ""}
        if message["role"] in ("system", "user", "assistant") and not _says(text, spoken):
            raise _RejectedError(_LOST, f"it leaves out message {number}, or a part of it")


# Messages.


def _conversation(
    record: dict[str, Any], record_format: str | None
) -> tuple[list[Message], list[Any] | None, int]:
    """Return a record's messages, its tools, and the number of messages before the completion."""
    if record_format == "completion":
        raw = record["prompt"] + record["completion"]
        completion = len(record["prompt"])
    else:
        raw = record[str(record_format)]
        completion = len(raw) - 1
    messages = [_message(message, number) for number, message in enumerate(raw, start=1)]
    if record_format == "conversations" and record.get("system"):
        messages.insert(0, {"role": "system", "content": record["system"]})
        completion += 1
    roles = [message["role"] for message in messages]
    if roles[0] == "assistant":
        raise _RejectedError(_BROKEN, "the first message is the assistant's")
    if "assistant" not in roles:
        raise _RejectedError(_UNTRAINED, "it has no message of the assistant")
    return messages, _tools(record.get("tools")), completion


def _message(raw: Any, number: int) -> Message:
    """Return a message of any origin as chat templates expect it."""
    if not isinstance(raw, dict):
        raise _RejectedError(_BROKEN, f"message {number} is not a mapping")
    raw = {name: value for name, value in raw.items() if value is not None}
    if "from" in raw:
        raw = _from_sharegpt(raw, number)
    role = raw.get("role")
    if role not in ROLES:
        raise _RejectedError(
            _BROKEN, f"message {number} has the role {role!r}, which is none of {', '.join(ROLES)}"
        )
    content, thinking = _split_parts(raw.pop("content", None), role, number)
    thinking = "".join(str(raw.pop(key, "")) for key in _THINKING_KEYS) + thinking
    calls = raw.pop("tool_calls", None)
    if content is None and not calls:
        raise _RejectedError(_BROKEN, f"message {number} is empty")
    message: Message = raw if content is None else raw | {"content": content}
    if calls:
        message["tool_calls"] = [_tool_call(call, number) for call in calls]
    if thinking:
        # Templates know one of the two
        message |= {"reasoning_content": thinking, "thinking": thinking}
    return message


def _from_sharegpt(raw: Message, number: int) -> Message:
    """Return ShareGPT's `from` and `value` as `role` and `content`."""
    role = _SHAREGPT_ROLES.get(raw["from"])
    if role is None:
        known = ", ".join(_SHAREGPT_ROLES)
        raise _RejectedError(
            _BROKEN, f"message {number} is from {raw['from']!r}, which is none of {known}"
        )
    if raw["from"] == "function_call":
        return {
            "role": role,
            "tool_calls": [_from_json(raw.get("value"), f"the function call of message {number}")],
        }
    return {"role": role, "content": raw.get("value")}


def _split_parts(content: Any, role: str, number: int) -> tuple[str | None, str]:
    """Return the text of a message's content, which may be a list of typed parts, and its thinking."""
    if content is None or isinstance(content, str):
        return content, ""
    texts = {"text": "", "thinking": ""}
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") for part in content
    ):
        for part in content:
            kind = "thinking" if part["type"] == "reasoning" else part["type"]
            if kind not in texts:
                raise _RejectedError(
                    _BROKEN,
                    f"message {number} has a part of type {kind!r}: only text is trained on",
                )
            texts[kind] += part.get("text") or part.get(kind) or part.get("reasoning") or ""
        return texts["text"], texts["thinking"]
    if role == "tool":  # the result of a call, which is any JSON value
        return json.dumps(content, ensure_ascii=False), ""
    raise _RejectedError(
        _BROKEN, f"the content of message {number} is neither text nor a list of parts with a type"
    )


def _tool_call(call: Any, number: int) -> Message:
    """Return a call with its arguments as a mapping, as chat templates expect it."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(function, dict) or not function.get("name"):
        raise _RejectedError(_BROKEN, f"a tool call of message {number} has no function name")
    arguments = _from_json(
        function.get("arguments") or {}, f"the arguments of {function['name']} in message {number}"
    )
    names = {name: call[name] for name in ("id",) if call.get(name)}
    return names | {
        "type": "function",
        "function": {"name": function["name"], "arguments": _without_none(arguments)},
    }


def _tools(raw: Any) -> list[Any] | None:
    """Return the tools of a record, which may be JSON text, or None if it has none."""
    tools = _from_json(raw, "the list of tools") if raw else None
    if tools is not None and not isinstance(tools, list):
        raise _RejectedError(_BROKEN, "its tools are not a list")
    return _without_none(tools) or None


def _from_json(value: Any, name: str) -> Any:
    try:
        return parse_json(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise _RejectedError(_BROKEN, f"{name} is not JSON: {error}") from error


def _without_none(value: Any) -> Any:
    """Remove the keys without a value, with which Arrow fills up mappings so that all rows have the same keys."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def use_chat_template(tokenizer: PreTrainedTokenizerBase, file: str) -> None:
    """Replace a tokenizer's chat template by that of a file; it is then saved with the model.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the tokenizer, which is changed.
        file (`str`): the value of `--chat_template`.

    Raises:
        UsageError: the file cannot be read, or is not a Jinja template.
    """
    named = spelled("chat_template", file)
    try:
        tokenizer.chat_template = read_text(Path(file))
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except OSError as error:
        raise UsageError(f"{named} cannot be read ({error.strerror}): check the path") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{named} is not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from None
    except TemplateSyntaxError as error:
        raise UsageError(
            f"{named} is not a Jinja template: line {error.lineno}: {error.message}"
        ) from None
    except (TemplateError, TypeError):
        pass  # it may need more than one message
