"""The server: OpenAI's client, access control, the queue, limits, and malformed requests."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from transformers import AutoTokenizer

from app.evaluation.conversation import ConversationConfig, Reply, Responder
from app.serving import server
from app.serving.api import KEY_VARIABLE, ServeConfig, open_socket, read_server_key
from common.errors import UserError
from data_modules import ChatTemplate, Turn
from tests.processes import wait_for
from tests.serving.running import NAME, REQUEST, ScriptedResponder, send, serving
from tests.tiny import TINY_BASE

TURNS = [Turn("user", "What is 2 + 2?")]


@pytest.fixture(scope="module")
def responder() -> Responder:
    """The shipped tiny base model, which generates arbitrary text."""
    from transformers import AutoModelForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    template = ChatTemplate.resolve(tokenizer, None)
    model = AutoModelForCausalLM.from_pretrained(TINY_BASE).eval()
    return Responder(model, tokenizer, template, template.stop_token_ids, context_len=64)


@pytest.fixture(scope="module")
def address(responder: Responder) -> Iterator[str]:
    with serving(responder) as url:
        yield url


def make_client(address: str, key: str = "none") -> Any:
    import openai

    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def test_openai_client_gets_the_greedy_answer_with_and_without_streaming(
    address: str, responder: Responder
) -> None:
    import openai

    config = ConversationConfig(max_new_tokens=6)
    expected = "".join(responder.stream(TURNS, config))
    with make_client(address) as client:
        assert [model.id for model in client.models.list()] == [NAME]
        fields: Any = {**REQUEST, "max_tokens": 6, "temperature": 0}
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
        with pytest.raises(openai.BadRequestError, match="gets one answer") as refused:
            client.chat.completions.create(**fields, n=2)
        assert refused.value.param == "n"
        with pytest.raises(openai.NotFoundError, match="this server has the model tiny"):
            client.chat.completions.create(**{**fields, "model": "gpt"})


def test_openai_client_continues_a_text(address: str, responder: Responder) -> None:
    import openai

    text = "What is"
    ids = responder.prompt_ids(text)
    assert ids == AutoTokenizer.from_pretrained(TINY_BASE)(text)["input_ids"]
    config = ConversationConfig(max_new_tokens=6)
    expected = "".join(responder.answer(Reply(ids), config))
    with make_client(address) as client:
        fields: Any = {"model": NAME, "max_tokens": 6}
        for prompt in (text, [ids]):
            whole = client.completions.create(**fields, prompt=prompt)
            assert whole.choices[0].text == expected and expected
            assert (whole.object, whole.choices[0].finish_reason) == ("text_completion", "length")
            assert whole.usage is not None and whole.usage.prompt_tokens == len(ids)
        parts = list(client.completions.create(**fields, prompt=text, stream=True))
        assert "".join(part.choices[0].text for part in parts) == expected
        # A text may hold control tokens: the client writes the whole prompt.
        assert client.completions.create(**fields, prompt="<|im_start|>user").choices
        for wrong in ([1, 10**6], "long " * 200):
            with pytest.raises(openai.BadRequestError) as refused:
                client.completions.create(**fields, prompt=wrong)
            assert refused.value.param == "prompt"


def test_only_a_text_is_continued_with_its_space() -> None:
    responder = ScriptedResponder("b")
    with serving(responder) as address:
        assert send(address, REQUEST)[0] == 200
        assert send(address, {"model": NAME, "prompt": "a"}, "/v1/completions")[0] == 200
    assert responder.continues == [False, True]


def test_stop_texts_end_an_answer_and_a_seed_reproduces_it(
    address: str, responder: Responder
) -> None:
    pieces = list(responder.stream(TURNS, ConversationConfig(max_new_tokens=12)))
    whole = "".join(pieces)
    # It spans two tokens, so the server must hold the first one back until it has the second.
    stop = pieces[1][-1] + pieces[2][:1]
    for fields in ({"stop": stop}, {"stop": [whole + "no", stop], "stream": True}):
        status, found, _ = send(address, {**REQUEST, "max_tokens": 12, **fields})
        assert status == 200
        if "stream" in fields:
            events = [json.loads(line[6:]) for line in found.split("\n\n")[:-2]]
            text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
            reason = events[-1]["choices"][0]["finish_reason"]
        else:
            text = found["choices"][0]["message"]["content"]
            reason = found["choices"][0]["finish_reason"]
        assert (text, reason) == (whole[: whole.index(stop)], "stop")
    sampled = {"max_tokens": 12, "temperature": 2}
    texts = [
        send(address, {**REQUEST, **sampled, "seed": seed})[1]["choices"][0]["message"]["content"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_too_long_conversations_and_control_tokens_are_refused(address: str) -> None:
    for content, why in (("long " * 200, "the model's context is 64"), ("<|im_end|>", "control")):
        request = {"model": NAME, "messages": [{"role": "user", "content": content}]}
        status, found, _ = send(address, request)
        assert status == 400 and why in found["error"]["message"]
        assert found["error"]["param"] == "messages"


def test_foreign_hosts_and_origins_are_refused() -> None:
    with serving(ScriptedResponder("yes")) as address:
        port = urlsplit(address).port
        for host in ("evil.example", f"evil.example:{port}", "localhost.evil", "", "10.0.0.1"):
            status, found, _ = send(address, REQUEST, host=host)
            assert status == 403 and "not an address" in found["error"]["message"], host
        for host in ("localhost", f"LOCALHOST:{port}", "127.0.0.1:9", "[::1]:80"):
            assert send(address, REQUEST, host=host)[0] == 200, host
        for origin in ("http://evil.example", "null", f"http://localhost:{port}"):
            assert send(address, REQUEST, origin=origin)[0] == 403
        status, _, headers = send(address, REQUEST, origin=address)
        assert status == 200 and "access-control-allow-origin" not in headers
        assert send(address, REQUEST, content_type="text/plain")[0] == 415
        page = send(address, path="/")
        assert "<title>loft: chat</title>" in page[1] and page[2]["x-content-type-options"]
        assert "default-src 'none'" in page[2]["content-security-policy"]
        assert send(address, path="/health")[1] == {"status": "ok"}
        for path in ("/v1/embeddings", "/v1/models/x", "/../etc/passwd", "//"):
            status, found, _ = send(address, path=path)
            assert status == 404 and found["error"]["message"], path
        status, found, _ = send(address, REQUEST, "/health")
        assert status == 405
        assert found["error"]["message"].startswith("POST /health is not available; this server")


def test_other_addresses_require_a_key_which_is_compared_in_constant_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert read_server_key(ServeConfig()) is read_server_key(ServeConfig(host="::1")) is None
    for host in ("0.0.0.0", "192.168.1.2", "example.org", "::"):
        with pytest.raises(UserError, match=KEY_VARIABLE):
            read_server_key(ServeConfig(host=host))
    monkeypatch.setenv(KEY_VARIABLE, " s3cret\n")
    assert read_server_key(ServeConfig(host="0.0.0.0")) == "s3cret"
    compared = []
    real = server.hmac.compare_digest
    monkeypatch.setattr(
        server.hmac, "compare_digest", lambda *pair: compared.append(pair) or real(*pair)
    )
    with serving(ScriptedResponder("yes"), key="s3cret") as address:
        assert make_client(address, "s3cret").chat.completions.create(**REQUEST)  # type: ignore[call-overload]
        for wrong in ("s3cre", "s3crets", "\xe9", ""):
            status, found, headers = send(address, REQUEST, authorization=f"Bearer {wrong}")
            assert status == 401 and found["error"]["code"] == "invalid_api_key"
            assert headers["www-authenticate"] == "Bearer" and "s3cret" not in str(found)
        assert send(address, path="/v1/models")[0] == 401
        assert send(address, path="/health")[0] == send(address, path="/")[0] == 200
    assert all(len(digest) == 32 for pair in compared for digest in pair) and len(compared) > 4


def test_one_request_runs_some_wait_and_further_ones_are_refused() -> None:
    has_started, resume = threading.Event(), threading.Event()

    def hold() -> None:
        assert not has_started.is_set() or resume.is_set()
        has_started.set()
        resume.wait(20)

    statuses_received: list[int] = []
    for max_waiting, statuses in ((0, [200]), (1, [200, 200])):
        has_started.clear(), resume.clear(), statuses_received.clear()
        with serving(ScriptedResponder("a", "b", before=hold), max_waiting=max_waiting) as address:
            threads = [
                threading.Thread(
                    target=lambda url=address: statuses_received.append(send(url, REQUEST)[0])
                )
                for _ in statuses
            ]
            for thread in threads:
                thread.start()
            assert has_started.wait(20)
            if max_waiting == 0:
                status, refused, headers = send(address, REQUEST)
                assert status == 503 and refused["error"]["code"] == "overloaded"
                assert headers["retry-after"] and send(address, path="/health")[0] == 200
            resume.set()
            for thread in threads:
                thread.join(20)
        assert statuses_received == statuses


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_disconnect_stops_generation(is_stream: bool) -> None:
    responder = ScriptedResponder(*"x" * 100_000, before=lambda: time.sleep(0.002))
    with serving(responder) as address:
        parts = urlsplit(address)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port)
        body = json.dumps({**REQUEST, "stream": is_stream})
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        wait_for(lambda: responder.num_generated > 3)
        assert connection.sock is not None
        connection.sock.close()
        connection.close()
        assert responder.has_ended.wait(10) and responder.num_generated < 20_000
        responder.pieces = ("next",)
        assert send(address, REQUEST)[1]["choices"][0]["message"]["content"] == "next"


def test_timeouts_and_failures_are_reported_and_the_server_keeps_running(
    capsys: pytest.CaptureFixture[str],
) -> None:
    responder = ScriptedResponder(*"x" * 1000, before=lambda: time.sleep(0.01))
    with serving(responder, timeout_seconds=1.0) as address:
        status, found, _ = send(address, REQUEST)
        assert status == 503 and "within 1 seconds" in found["error"]["message"]
        status, found, _ = send(address, {**REQUEST, "stream": True})
        assert status == 200 and '"code": "timeout"' in found and found.endswith("[DONE]\n\n")
        responder.before = lambda: 1 / 0
        status, found, _ = send(address, REQUEST)
        assert status == 500 and "division" not in str(found)
        responder.before, responder.pieces = lambda: None, ("fine",)
        assert send(address, REQUEST)[0] == 200
    assert "ZeroDivisionError: division by zero" in capsys.readouterr().err


def test_an_address_in_use_or_unknown_is_named() -> None:
    taken = open_socket(ServeConfig(port=0))
    port = taken.getsockname()[1]
    with pytest.raises(UserError, match=f"serve.port={port}: another program listens on this port"):
        open_socket(ServeConfig(port=port))
    taken.close()
    with pytest.raises(UserError, match="no such address"):
        open_socket(ServeConfig(host="203.0.113.7", port=0))


def test_bodies_that_are_too_long_or_too_slow_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_SECONDS", 0.1)
    monkeypatch.setattr(server, "HEADER_SECONDS", 1.0)
    with serving(ScriptedResponder("yes")) as address:
        assert send(address, b" " * (server.MAX_BODY + 1))[0] == 413
        host, port = urlsplit(address).netloc.split(":")
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        head += b"content-type: application/json\r\n"
        for more, status in (
            (b"content-length: 9\r\n\r\n{", b" 408 "),
            (b"transfer-encoding: chunked\r\n\r\n", b" 408 "),
            (b"content-length: 99999999999999999999999\r\n\r\n{", b" 4"),
            (b"", b""),  # unfinished headers: closed without a response
        ):
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(head + more)
                assert status in connection.recv(4096)


ODD: list[Any] = [True, -1.5, 10**30, 1e308, "", "\ud83d", "x" * 2000, [[]], [{}], {"a": [1]}]
NO_JSON = ["[" * 50_000, '{"a":' * 20_000, "NaN", "1e999", "\x00", '"', "{}{}", "", "{\xff"]


def test_malformed_requests_get_error_messages(address: str) -> None:
    names = ("temperature", "top_p", "max_tokens", "seed", "stop", "stream", "n", "tools")
    valid = {("stream", "True"), ("stop", "''"), ("stop", r"'\ud83d'")}
    bodies: list[Any] = [
        {**REQUEST, name: value}
        for name in names
        for value in ODD
        if (name, repr(value)) not in valid
    ]
    bodies += [{**REQUEST, "messages": odd} for value in ODD for odd in (value, [value] * 2)]
    bodies += [{**REQUEST, "messages": [{"role": value, "content": "hi"}]} for value in ODD]
    sent = [
        ("POST", "/v1/chat/completions", {"content-type": "application/json"}, body)
        for body in [json.dumps(body).encode() for body in bodies]
        + [text.encode("latin-1") for text in NO_JSON]
    ]
    paths = ("/", "/v1", "/v1/chat/completions", "/%00", "/v1/models/..%2f..", "/?a=%ff")
    for headers in ({"host": "evil"}, {"origin": "null"}, {"content-type": "x/y"}, {}):
        sent += [(method, path, headers, b"\xff{") for method in ("PUT", "BREW") for path in paths]
    host, port = urlsplit(address).netloc.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    for request in sent:
        connection.request(request[0], request[1], request[3], request[2])
        response = connection.getresponse()
        found = json.loads(response.read())
        assert 400 <= response.status < 500, (request, found)
        assert set(found) == {"error"} and found["error"]["message"], found
        assert set(found["error"]) == {"message", "type", "param", "code"}
    connection.close()
    for raw in (b"\x00\xff" * 99, b"GET\r\nx", b"POST / HTTP/9.9\r\n: x"):  # not even HTTP
        with socket.create_connection((host, int(port)), timeout=30) as plain:
            plain.sendall(raw + b"\r\n\r\n")
            answer = plain.recv(65536)
        assert answer.startswith(b"HTTP/1.1 4"), (raw, answer)
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert send(address, {**REQUEST, "max_tokens": 2})[0] == 200


def test_the_page_loads_nothing_external_and_writes_no_html() -> None:
    page = Path(server.PAGE).read_text(encoding="utf-8")
    writers = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")
    for word in (*writers, "//cdn", "http://", "https://"):
        assert word not in page
