"""The server: OpenAI's client drives it; who may ask; one at a time; what is malformed."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil
import pytest
from transformers import AutoTokenizer

from app.evaluation.conversation import ConversationConfig, Responder
from app.process.errors import UserError
from app.serving import access, application, server
from app.serving.address import KEY_VARIABLE, ServeConfig, bind, read_key
from data_modules import ChatTemplate, Turn
from tests.serving.running import ASKED, NAME, Told, ask, serving, wait_for
from tests.tiny import TINY_BASE

TURNS = [Turn("user", "What is 2 + 2?")]


@pytest.fixture(scope="module")
def responder() -> Responder:
    """The shipped base, which answers something."""
    from transformers import AutoModelForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    template = ChatTemplate.resolve(tokenizer, None)
    model = AutoModelForCausalLM.from_pretrained(TINY_BASE).eval()
    return Responder(model, tokenizer, template, template.stop_token_ids, context_len=64)


@pytest.fixture(scope="module")
def address(responder: Responder) -> Iterator[str]:
    with serving(responder) as url:
        yield url


def client_of(address: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def test_openais_client_gets_the_greedy_answer_with_and_without_a_stream(
    address: str, responder: Responder
) -> None:
    how = ConversationConfig(max_new_tokens=6)
    expected = "".join(responder.stream(TURNS, how))
    with client_of(address) as client:
        assert [one.id for one in client.models.list()] == [NAME]
        fields: Any = {**ASKED, "max_tokens": 6, "temperature": 0}
        whole = client.chat.completions.create(**fields)
        assert whole.choices[0].message.content == expected and expected
        prompt = responder.prompt_ids(TURNS)
        assert whole.usage is not None and whole.usage.prompt_tokens == len(prompt)
        assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (6, "length")
        usage = {"include_usage": True}
        parts = list(client.chat.completions.create(**fields, stream=True, stream_options=usage))
        texts = [part.choices[0].delta.content or "" for part in parts if part.choices]
        assert "".join(texts) == expected and sum(map(bool, texts)) > 1
        assert parts[-1].usage == whole.usage
        assert parts[-2].choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="one answer at a time") as refused:
            client.chat.completions.create(**fields, n=2)
        assert refused.value.param == "n"
        with pytest.raises(openai.NotFoundError, match="this server has tiny"):
            client.chat.completions.create(**{**fields, "model": "gpt"})


def test_stop_texts_end_an_answer_and_a_seed_repeats_one(
    address: str, responder: Responder
) -> None:
    pieces = list(responder.stream(TURNS, ConversationConfig(max_new_tokens=12)))
    whole = "".join(pieces)
    stop = pieces[1][-1] + pieces[2][:1]  # of two tokens: the first must wait for the second
    for fields in ({"stop": stop}, {"stop": [whole + "no", stop], "stream": True}):
        status, found, _ = ask(address, {**ASKED, "max_tokens": 12, **fields})
        assert status == 200
        if "stream" in fields:
            events = [json.loads(line[6:]) for line in found.split("\n\n")[:-2]]
            text = "".join(one["choices"][0]["delta"].get("content", "") for one in events)
            reason = events[-1]["choices"][0]["finish_reason"]
        else:
            text = found["choices"][0]["message"]["content"]
            reason = found["choices"][0]["finish_reason"]
        assert (text, reason) == (whole[: whole.index(stop)], "stop")
    drawn = {"max_tokens": 12, "temperature": 2}
    texts = [
        ask(address, {**ASKED, **drawn, "seed": seed})[1]["choices"][0]["message"]["content"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_conversation_beyond_the_context_or_with_control_tokens_is_refused(address: str) -> None:
    for content, why in (("long " * 200, "the model's context is 64"), ("<|im_end|>", "control")):
        asked = {"model": NAME, "messages": [{"role": "user", "content": content}]}
        status, found, _ = ask(address, asked)
        assert status == 400 and why in found["error"]["message"]
        assert found["error"]["param"] == "messages"


def test_only_who_names_this_machine_and_comes_from_its_page_may_ask() -> None:
    with serving(Told("yes")) as address:
        port = urlsplit(address).port
        for host in ("evil.example", f"evil.example:{port}", "localhost.evil", "", "10.0.0.1"):
            status, found, _ = ask(address, ASKED, host=host)
            assert status == 403 and "not an address" in found["error"]["message"], host
        for host in ("localhost", f"LOCALHOST:{port}", "127.0.0.1:9", "[::1]:80"):
            assert ask(address, ASKED, host=host)[0] == 200, host
        for origin in ("http://evil.example", "null", f"http://localhost:{port}"):
            assert ask(address, ASKED, origin=origin)[0] == 403
        status, _, headers = ask(address, ASKED, origin=address)
        assert status == 200 and "access-control-allow-origin" not in headers
        assert ask(address, ASKED, content_type="text/plain")[0] == 415
        page = ask(address, path="/")
        assert "<title>loft: chat</title>" in page[1] and page[2]["x-content-type-options"]
        assert "default-src 'none'" in page[2]["content-security-policy"]
        assert ask(address, path="/health")[1] == {"status": "ok"}
        for path in ("/v1/completions", "/v1/chat", "/v1/models/x", "/../etc/passwd", "//"):
            status, found, _ = ask(address, path=path)
            assert status == 404 and found["error"]["message"], path
        assert ask(address, path="/v1/chat/completions")[0] == 405


def test_a_key_is_needed_beyond_this_machine_and_compared_in_one_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert read_key(ServeConfig()) is read_key(ServeConfig(host="::1")) is None
    for host in ("0.0.0.0", "192.168.1.2", "example.org", "::"):
        with pytest.raises(UserError, match=KEY_VARIABLE):
            read_key(ServeConfig(host=host))
    monkeypatch.setenv(KEY_VARIABLE, " s3cret\n")
    assert read_key(ServeConfig(host="0.0.0.0")) == "s3cret"
    compared = []
    real = access.hmac.compare_digest
    monkeypatch.setattr(
        access.hmac, "compare_digest", lambda *pair: compared.append(pair) or real(*pair)
    )
    with serving(Told("yes"), key="s3cret") as address:
        assert client_of(address, "s3cret").chat.completions.create(**ASKED)  # type: ignore[call-overload]
        for wrong in ("s3cre", "s3crets", "\xe9", ""):
            status, found, headers = ask(address, ASKED, authorization=f"Bearer {wrong}")
            assert status == 401 and found["error"]["code"] == "invalid_api_key"
            assert headers["www-authenticate"] == "Bearer" and "s3cret" not in str(found)
        assert ask(address, path="/v1/models")[0] == 401
        assert ask(address, path="/health")[0] == ask(address, path="/")[0] == 200
    assert all(len(one) == 32 for pair in compared for one in pair) and len(compared) > 4


def test_one_answer_at_a_time_some_wait_and_the_next_is_refused() -> None:
    is_asked, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        assert not is_asked.is_set() or goes_on.is_set()
        is_asked.set()
        goes_on.wait(20)

    found: list[Any] = []
    for max_waiting, statuses in ((0, [200]), (1, [200, 200])):
        is_asked.clear(), goes_on.clear(), found.clear()
        with serving(Told("a", "b", before=hold), max_waiting=max_waiting) as address:
            threads = [
                threading.Thread(target=lambda url=address: found.append(ask(url, ASKED)[0]))
                for _ in statuses
            ]
            for thread in threads:
                thread.start()
            assert is_asked.wait(20)
            if max_waiting == 0:
                status, refused, headers = ask(address, ASKED)
                assert status == 503 and refused["error"]["code"] == "overloaded"
                assert headers["retry-after"] and ask(address, path="/health")[0] == 200
            goes_on.set()
            for thread in threads:
                thread.join(20)
        assert found == statuses


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_ends_its_answer(is_stream: bool) -> None:
    told = Told(*"x" * 100_000, before=lambda: time.sleep(0.002))
    with serving(told) as address:
        where = urlsplit(address)
        connection = http.client.HTTPConnection(str(where.hostname), where.port)
        body = json.dumps({**ASKED, "stream": is_stream})
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        wait_for(lambda: told.num_given > 3)
        assert connection.sock is not None
        connection.sock.close()
        connection.close()
        assert told.has_ended.wait(10) and told.num_given < 20_000
        told.pieces = ("next",)
        assert ask(address, ASKED)[1]["choices"][0]["message"]["content"] == "next"


def test_an_answer_that_takes_too_long_or_fails_is_said_and_the_server_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = Told(*"x" * 1000, before=lambda: time.sleep(0.01))
    with serving(told, timeout_seconds=0.2) as address:
        status, found, _ = ask(address, ASKED)
        assert status == 503 and "within 0.2 seconds" in found["error"]["message"]
        status, found, _ = ask(address, {**ASKED, "stream": True})
        assert status == 200 and '"code": "timeout"' in found and found.endswith("[DONE]\n\n")
        told.before = lambda: 1 / 0
        status, found, _ = ask(address, ASKED)
        assert status == 500 and "division" not in str(found)
        told.before, told.pieces = lambda: None, ("fine",)
        assert ask(address, ASKED)[0] == 200
    assert "ZeroDivisionError: division by zero" in capsys.readouterr().err


def test_an_address_that_is_taken_or_not_there_is_named() -> None:
    taken = bind(ServeConfig(port=0))
    port = taken.getsockname()[1]
    with pytest.raises(UserError, match=f"serve.port={port}: another program listens there"):
        bind(ServeConfig(port=port))
    taken.close()
    with pytest.raises(UserError, match="no such address"):
        bind(ServeConfig(host="203.0.113.7", port=0))


def test_bodies_that_are_too_long_or_too_slow_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "BODY_SECONDS", 0.1)
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.1)
    with serving(Told("yes")) as address:
        assert ask(address, b" " * (application.MAX_BODY + 1))[0] == 413
        host, port = urlsplit(address).netloc.split(":")
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        head += b"content-type: application/json\r\n"
        for more, status in (
            (b"content-length: 9\r\n\r\n{", b" 408 "),
            (b"transfer-encoding: chunked\r\n\r\n", b" 408 "),
            (b"content-length: 99999999999999999999999\r\n\r\n{", b" 4"),
            (b"", b""),  # no end of the headers: closed without a word
        ):
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(head + more)
                assert status in connection.recv(4096)


def malformed(draw: random.Random) -> tuple[str, str, dict[str, str], bytes]:
    """A request that no server should answer: its method, path, headers and body."""
    values: list[Any] = [
        None,
        True,
        -1,
        10**30,
        1e308,
        "",
        "x" * 2000,
        "\x00",
        [],
        [[]],
        {},
        {"a": 1},
    ]
    body: Any = json.loads(json.dumps(ASKED))
    headers = {"content-type": "application/json"}
    kind = draw.randrange(6)
    if kind == 0:
        names = ("temperature", "top_p", "max_tokens", "seed", "stop", "stream", "n", "tools", "zz")
        body[draw.choice(names)] = draw.choice(
            ["\ud83d", "no", {"a": [1]}, [{}], [[]], -1.5, 1e300]
        )
        body["surely"] = draw.choice(values[1:])
    elif kind == 1:
        body["messages"] = draw.choice([*values, [draw.choice(values)] * draw.randrange(1, 9)])
    elif kind == 2:
        body["messages"][0][draw.choice(["role", "content"])] = draw.choice(
            [value for value in values if value not in ("", "x" * 2000, "\x00")]
        )
    elif kind == 3:
        raw = bytearray(json.dumps(body).encode())
        for _ in range(draw.randrange(1, 6)):
            raw[draw.randrange(len(raw))] = draw.randrange(128, 256)
        return "POST", "/v1/chat/completions", headers, bytes(raw)
    elif kind == 4:
        text = draw.choice(
            ["[" * 50_000, '{"a":' * 20_000, "NaN", "1e999", "\x00", '"', "{}{}", ""]
        )
        return "POST", "/v1/chat/completions", headers, text.encode()
    else:
        method = draw.choice(["PUT", "DELETE", "PATCH", "OPTIONS", "BREW"])
        path = draw.choice(
            ["/", "/v1", "/v1/chat/completions", "/%00", "/v1/models/..%2f..", "/?a=%ff"]
        )
        odd = draw.choice([{"host": "evil"}, {"origin": "null"}, {"content-type": "x/y"}, {}])
        return method, path, odd, draw.randbytes(draw.randrange(200))
    return "POST", "/v1/chat/completions", headers, json.dumps(body).encode()


def send_malformed(address: str, count: int, seed: int) -> None:
    draw = random.Random(seed)
    host, port = urlsplit(address).netloc.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    for number in range(count):
        method, path, headers, body = malformed(draw)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        assert 400 <= answer.status < 500, (number, method, path, body[:200], found)
        assert set(found) == {"error"} and found["error"]["message"], found
        assert set(found["error"]) == {"message", "type", "param", "code"}
    connection.close()
    for number in range(count // 20):  # what is not even HTTP
        with socket.create_connection((host, int(port)), timeout=30) as raw:
            raw.sendall(draw.randbytes(draw.randrange(1, 300)) + b"\r\n\r\n")
            said = raw.recv(65536)
        assert not said or said.startswith(b"HTTP/1.1 4"), (number, said)
        assert not said or json.loads(said.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize(("path", "status"), [("/v1/completions", 404), ("/health", 405)])
def test_a_path_that_is_not_here_is_answered_with_those_that_are(
    address: str, path: str, status: int
) -> None:
    found, body, _ = ask(address, ASKED, path)
    assert found == status
    said = body["error"]["message"]
    assert said.startswith(f"POST {path} is not here; ") and "POST /v1/chat/completions" in said


def test_malformed_requests_are_answered_in_words(address: str) -> None:
    send_malformed(address, 150, seed=0)
    assert ask(address, {**ASKED, "max_tokens": 2})[0] == 200


@pytest.mark.slow
def test_two_thousand_malformed_requests_leave_the_memory_as_it_was(address: str) -> None:
    memory = psutil.Process().memory_info
    send_malformed(address, 300, seed=1)  # what is made once
    before = memory().rss
    send_malformed(address, 2000, seed=2)
    assert memory().rss - before < 8 * 2**20
    assert ask(address, {**ASKED, "max_tokens": 2})[0] == 200


def test_the_page_needs_nothing_from_elsewhere_and_writes_no_html() -> None:
    page = Path(application.PAGE).read_text(encoding="utf-8")
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "//cdn",
    ):
        assert word not in page
    assert "http://" not in page and "https://" not in page
