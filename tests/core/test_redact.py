"""Secrets are removed from text, and nothing else is."""

import ast
import time

import pytest
from conftest import REPOSITORY

from hfscale.checkpoint.store import read_status, write_status
from hfscale.core.redaction import MASK, is_secret_name, redact, redact_argv, redact_json

NO_ENVIRONMENT: dict[str, str] = {}


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "aB3" * 10,
        "sk-" + "x1" * 12,
        "ghp_" + "a1" * 15,
        "AKIA" + "ABCD1234" * 2,
        "xoxb-123456789012-abc",
        "glpat-" + "a1" * 10,
        "AIza" + "a1b2c" * 7,
        "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2QT4",
    ],
)
def test_known_kinds_of_keys_are_removed(secret):
    text = redact(f"loading from x with {secret}, done", NO_ENVIRONMENT)
    assert secret not in text
    assert text == f"loading from x with {MASK}, done"


def test_values_assigned_to_a_secret_name_are_removed():
    quoted = redact("AWS_SECRET_ACCESS_KEY=abc123 X-Amz-Signature=f00 token: 'xyz' at bucket", NO_ENVIRONMENT)
    assert quoted == f"AWS_SECRET_ACCESS_KEY={MASK} X-Amz-Signature={MASK} token: '{MASK}' at bucket"
    assert redact("--hub_token=abc123 password: hunter2 x", NO_ENVIRONMENT) == f"--hub_token={MASK} password: {MASK} x"
    assert redact("https://me:pa55@host/path", NO_ENVIRONMENT) == f"https://{MASK}@host/path"
    assert (
        redact("https://0123456789abcdef@host ssh://git@host", NO_ENVIRONMENT) == f"https://{MASK}@host ssh://git@host"
    )
    assert redact("Authorization: Bearer abc, then", NO_ENVIRONMENT) == f"Authorization: Bearer {MASK}, then"
    assert redact("https://a/x?sig=a%2B&se=1", NO_ENVIRONMENT) == f"https://a/x?sig={MASK}&se=1"


def test_the_texts_of_a_json_value_are_redacted_and_all_else_is_kept():
    value = {"a": ["password=hunter2", 3, None], "hub_token": "plain", "num_tokens": 7, "token": "", "b": True}
    assert redact_json(value, NO_ENVIRONMENT) == value | {"a": [f"password={MASK}", 3, None], "hub_token": MASK}


def test_values_of_secret_variables_are_removed_and_of_others_kept():
    environ = {"WANDB_API_KEY": "f00dfeed", "HOME": "/home/me", "X_TOKEN": "true"}
    assert redact("key f00dfeed in /home/me is true", environ) == f"key {MASK} in /home/me is true"


@pytest.mark.parametrize(
    "text",
    [
        "tokens_seen: 1234",
        "--max_new_tokens=20",
        "scaling/usd_per_million_tokens=3",
        "tokenizer_name=gpt2",
        "12,288 tokens per step",
        "bytes per token: 4",
        "eos_token: '</s>'",
        "checkpoint-500 is committed",
    ],
)
def test_numbers_of_tokens_and_plain_words_are_kept(text):
    assert redact(text, NO_ENVIRONMENT) == text


def test_the_reason_of_a_failure_is_written_without_secrets(tmp_path):
    reason = "OSError: 401 for https://me:pa55@host/x?token=abcdefgh"
    write_status(tmp_path, "failed", step=3, checkpoint=None, reason=reason)
    assert read_status(tmp_path)["reason"] == f"OSError: 401 for https://{MASK}@host/x?token={MASK}"


def test_secret_names_are_recognised():
    assert all(map(is_secret_name, ("HF_TOKEN", "--hub_token", "aws_secret_access_key", "DB_PASSWORD", "api-key")))
    assert not any(map(is_secret_name, ("tokens", "num_tokens", "tokenizer_name", "--output_dir")))


def test_the_url_of_a_webhook_is_secret():
    argv = [
        "train.py",
        "--alert_webhook",
        "https://hooks.example.com/T0/B1/xyz",
        "--alert_webhook=https://a.example/b",
    ]
    assert redact_argv(argv, NO_ENVIRONMENT) == ["train.py", "--alert_webhook", MASK, f"--alert_webhook={MASK}"]
    assert redact_json({"alert_webhook": "https://a.example/b"}, NO_ENVIRONMENT) == {"alert_webhook": MASK}


def test_the_value_after_a_secret_flag_is_removed():
    argv = ["train.py", "--hub_token", "plain", "--api-key=abc", "--tokenizer_name", "gpt2", "--push_to_hub"]
    assert redact_argv(argv, NO_ENVIRONMENT) == [
        "train.py",
        "--hub_token",
        MASK,
        f"--api-key={MASK}",
        "--tokenizer_name",
        "gpt2",
        "--push_to_hub",
    ]


def messages_of_package():
    """Each text with a space in the code of the package, with words in place of its values, and where it stands."""
    for path in sorted((REPOSITORY / "hfscale").rglob("*.py")):
        if path.name == "redaction.py":  # its patterns
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        others = {part for node in formatted for part in node.values}
        others |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        plain = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in others]
        for node in formatted + plain:
            values = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "value" for part in values)
            if " " in text:
                yield f"{path.relative_to(REPOSITORY)}:{node.lineno}", text


def test_no_message_of_the_package_is_taken_for_a_secret():
    """ "no special token: the model" would lose a word."""
    served = "this page needs its token: open it once with ?token=TOKEN\n"
    changed = [
        where for where, text in messages_of_package() if text != served and redact(text, NO_ENVIRONMENT) != text
    ]
    assert changed == []


@pytest.mark.parametrize(
    "word", ["a", "-", "token", "token=", "token: ", "eyJ", "hf_", "sk-", "://a:", " ", "Bearer ", "?sig="]
)
def test_a_long_text_takes_time_in_proportion(word):
    text = word * (100_000 // len(word))
    begun = time.process_time()
    redact(text, {})
    assert time.process_time() - begun < 5.0


def test_a_secret_inside_another_assignment_is_found():
    assert redact("url=token=abc&x=1", {}) == "url=token=[redacted]&x=1"
    assert redact('{"api_key": "abc", "tokens": 3}', {}) == '{"api_key": "[redacted]", "tokens": 3}'
    assert redact("3 ms per token: 4", {}) == "3 ms per token: 4"
