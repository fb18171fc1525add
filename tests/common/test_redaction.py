"""Secrets are redacted in any context; other text is unchanged."""

from __future__ import annotations

import json
import time

import pytest

from common.redaction import REDACTED, holds_token, redact, redacted, redacted_keys

SECRET = "Zq7planted0secret9"
JWT = f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.{SECRET}"
URLS = [
    f"https://user:{SECRET}@host/d.jsonl",
    f"https://{SECRET}@host:8080/d.jsonl",
    f"s3://AKIA:{SECRET}@bucket/d.jsonl",
    f"https://user:a/{SECRET}@host/d.jsonl",
    f"https:/user:{SECRET}@host/d.jsonl",
    f"s3:/AKIA:{SECRET}@bucket/d?nobody-knows={SECRET}and-more",
    f"https://user:a@{SECRET}@host/d.jsonl",
    f"https://host/d.jsonl?X-Amz-Algorithm=AWS4&X-Amz-Signature={SECRET}&x=1",
    f"https://host/d.jsonl?X-Amz-Credential={SECRET}%2F2026&X-Amz-Security-Token=a{SECRET}",
    f"https://host/d.jsonl?sv=2024&sig={SECRET}%3D",
    f"https://host/d.jsonl?AWSAccessKeyId=1&Signature={SECRET}&Expires=1",
    f"https://host/d.jsonl?GoogleAccessId=1&Key-Pair-Id={SECRET}",
    *(
        f"https://host/d.jsonl?a=1&{name}={SECRET}"
        for name in ("token", "access_token", "api_key", "apikey", "password", "auth", "key", "sig")
    ),
    f"https://host/d.jsonl?nobody-knows={SECRET}and-more",
    f"https://host/d.jsonl#access_token={SECRET}",
]
TOKENS = [
    f"ghp_{SECRET}{SECRET}",
    f"gho_{SECRET}{SECRET}",
    f"github_pat_{SECRET}_{SECRET}",
    f"glpat-{SECRET}-",
    f"xoxb-123-{SECRET}",
    f"hf_{SECRET}{SECRET}",
    f"sk-proj-{SECRET}{SECRET}",
    "AKIAZQ7PLANTEDSECRET",
    JWT,
    f"Bearer {SECRET}",
    f"Authorization: Basic {SECRET}",
    f"{{'Authorization': 'token {SECRET}'}}",
    f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
]
AROUND = ["{}", "cannot read {}: 403", "url='{}'. What now?", '["{}", 1]', "[{{path: {}}}]"]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("secret", [*URLS, *TOKENS])
def test_secrets_are_redacted(secret: str, around: str) -> None:
    text = around.format(secret)
    result = redact(text)
    assert SECRET not in result and "PLANTED" not in result
    assert REDACTED in result
    assert redact(result) == result
    before, after = around.format("\0").split("\0")
    assert result.startswith(before) and result.endswith(after)


PLAIN = [
    "https://host/d.jsonl",
    "https://host:8080/a@b/d.jsonl?download=true&version=2",
    "https://host/d.jsonl?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Date=20260101T000000Z",
    "optimizer.lr=0.001 data.datasets=[{path: a.jsonl, format: alpaca}]",
    "the bearer of good news, a task-force, me@host.org, the token <|im_end|>",
    "type trainer.max_steps=4; sk-learn, hf_hub, ghp_ and key=value are words",
    "f" * 64,
    r"C:/Users/me@host/d.jsonl C:\\data /a:b/c@d/e.jsonl",
]


@pytest.mark.parametrize("text", PLAIN)
def test_other_text_is_unchanged(text: str) -> None:
    assert redact(text) == text
    assert not holds_token(text)


def test_the_rest_of_a_url_is_unchanged() -> None:
    url = f"https://me:{SECRET}@host/d.jsonl?version=2&token={SECRET}&x=1"
    assert redact(url) == f"https://{REDACTED}@host/d.jsonl?version=2&token={REDACTED}&x=1"


def test_nested_values_are_redacted_and_their_keys_listed() -> None:
    value = {"data": {"datasets": [{"path": URLS[0], "name": "d"}]}, "seed": 1, "x": (TOKENS[0],)}
    clean = redacted(value)
    assert SECRET not in json.dumps(clean)
    assert clean["seed"] == 1
    assert list(redacted_keys(clean)) == ["data.datasets[0].path", "x[0]"]
    assert list(redacted_keys({"a": [{"b": "c"}], "d": None})) == []


def test_a_token_inside_a_url_may_be_typed() -> None:
    assert all(holds_token(token) for token in TOKENS[:9])
    assert not holds_token(f"https://{TOKENS[0]}@host/d.jsonl?token={JWT}")


LONG = [
    *[("", part, "") for part in ("://", "aaaaaa", "?a=", "://a:", "eyJ", "eyJ-", "?key=)")],
    *[("", "bearer ", ""), ("", "authorization: ", ""), ("https://", "a=&", "")],
    *[("", "aaaaaa", "="), ("?", "aaaaaa", "=")],
]
"""start, repeated middle and end of long texts"""


def test_redaction_takes_linear_time() -> None:
    def seconds(repetitions: int) -> float:
        texts = [first + part * repetitions + last for first, part, last in LONG]
        began = time.process_time()
        for text in texts:
            redact(text)
        return time.process_time() - began

    seconds(100)
    assert min(seconds(8_000) for _ in range(2)) < 9 * seconds(2_000)  # 4, else 16
