"""Runs on data behind a password and a signed address: nothing written or printed holds them."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.in_process import accepted, refused, run_command
from tests.reliability.shell import Shell
from tests.tiny import SAMPLES, small_run

pytestmark = pytest.mark.slow

PASSWORD = "Zq7password0planted"
PLANTED = {
    "X-Amz-Signature": "Zq7signature0planted",
    "sig": "Zq7sig0planted%3D",
    "token": "Zq7token0planted",
    "access_token": "Zq7access0planted",
    "AWSAccessKeyId": "AKIAZQ7PLANTED0KEYID",
    "note": "ghp_Zq7planted0github0token",
    "pat": "github_pat_11Zq7planted0_github",
    "chat": "xoxb-123456-Zq7planted0slack",
    "who": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3In0.Zq7planted0jwt",
}
SECRETS = [PASSWORD, *PLANTED.values(), "Zq7", "PLANTED0KEYID"]
ROWS = (SAMPLES / "lists_test.json").read_bytes()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The host of a server that gives rows to who knows the password and the token."""
    basic = "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers.get("Authorization") == basic
            known = known and f"token={PLANTED['token']}" in self.path
            self.send_response(200 if known else 403)
            self.send_header("Content-Length", str(len(ROWS) if known else 0))
            self.send_header("ETag", hashlib.md5(ROWS).hexdigest())
            self.end_headers()
            if known and self.command == "GET":
                self.wfile.write(ROWS)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{listening.server_port}"
        listening.shutdown()


def address(server: str, path: str = "lists.json", **changed: str) -> str:
    query = "&".join(f"{name}={value}" for name, value in (PLANTED | changed).items())
    return f"http://me:{PASSWORD}@{server}/{path}?version=2&{query}"


def data(url: str) -> str:
    return f"data.datasets=[{{path: '{url}', format: alpaca, name: lists}}]"


Type = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def type_command(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Type:
    def type_verb(verb: str, *words: str, cache: Path, lines: str = "") -> tuple[int, str]:
        """Run a verb in a process; return its exit code and output."""
        ending = shell.type_train(
            words,
            tmp_path_factory.mktemp("typed"),
            module=f"app.{verb}",
            lines=lines,
            environment={"LOFT_DATA_CACHE": str(cache)},
        )
        return ending.code, ending.output

    return type_verb


def check_clean(*places: Path | str) -> None:
    for place in places:
        files = {} if isinstance(place, str) else {f: f for f in place.rglob("*") if f.is_file()}
        # Numbers of weights may spell anything.
        texts = {
            f: f.read_bytes().decode(errors="replace") if f.suffix != ".safetensors" else ""
            for f in files
        }
        if isinstance(place, str):
            texts = {Path("what was printed"): place}
        for name, text in texts.items():
            found = [secret for secret in SECRETS if secret in text or secret in str(name)]
            assert not found, f"{found} in {name}: {text[max(0, text.find(found[0]) - 80) :][:300]}"


def small(url: str, folder: Path, *words: str) -> list[str]:
    chosen = dict(word.split("=", 1) for word in small_run("trainer.max_steps=2"))
    chosen["data.datasets"] = data(url).partition("=")[2]
    typed = [f"{key}={value}" for key, value in chosen.items()]
    return [*typed, f"output.dir={folder}", "evaluation.exact_match=false", *words]


@pytest.fixture(scope="module")
def ended(
    server: str, type_command: Type, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, str]:
    """A finished run, its cache, and what it printed."""
    folder = tmp_path_factory.mktemp("secrets")
    run, cache = folder / "run", folder / "cache"
    code, printed = type_command("train", *small(address(server), run), cache=cache)
    assert code == 0, printed
    return run, cache, printed


def test_a_run_leaves_no_secret_anywhere(ended: tuple[Path, Path, str], server: str) -> None:
    run, cache, printed = ended
    assert (run / "tensorboard").is_dir() and list(cache.rglob("key.json"))
    check_clean(run, cache, printed)
    # What is no secret of the address stays, so that a person knows which data it was.
    for file in ("config.yaml", "manifest.json"):
        assert f"http://<redacted>@{server}/lists.json?version=2&" in (run / file).read_text()
    assert "<redacted>" in json.loads((run / "manifest.json").read_text())["command"][-9:].__str__()


def test_errors_leave_no_secret_anywhere(server: str, type_command: Type, tmp_path: Path) -> None:
    wrong = {
        "refused": address(server, token="Zq7another"),
        "no-host": address("127.0.0.1:1"),
        "no-package": address(server).replace("http://", "s4://"),
    }
    for name, url in wrong.items():
        folder = tmp_path / name
        code, printed = type_command("train", *small(url, folder), cache=tmp_path / "cache")
        expected = 3 if name == "no-host" else 2  # a server that cannot be reached is no bad input
        assert code == expected, (name, printed)
        assert "Traceback" not in printed
        check_clean(printed, folder)
        assert (folder / "error.txt").exists() or name == "no-package"


@pytest.mark.parametrize("verb", ["evaluate", "preview"])
def test_other_verbs_leave_no_secret_anywhere(
    verb: str, ended: tuple[Path, Path, str], server: str, type_command: Type, tmp_path: Path
) -> None:
    run, cache, _ = ended
    words = small(address(server), tmp_path / "out")
    if verb == "evaluate":
        out = f"output.dir={tmp_path / 'out'}"
        words = [f"run={run}", data(address(server)), out, "evaluation.exact_match=false"]
        words.append("data.val_set_size=6")
    code, printed = type_command(verb, *words, cache=cache)
    assert code == 0, printed
    check_clean(tmp_path / "out", printed)


BEARER = "Authorization: Bearer Zq7planted0bearer9"


@pytest.mark.parametrize("verb", ["merge", "chat"])
def test_verbs_on_a_run_leave_no_secret_anywhere(
    verb: str, ended: tuple[Path, Path, str], type_command: Type, tmp_path: Path
) -> None:
    run, cache, _ = ended
    words = [f"run={run}", f"output.dir={tmp_path / 'out'}"]
    if verb == "chat":
        words += [f"chat.system={BEARER}", "chat.max_new_tokens=4"]
    code, printed = type_command(verb, *words, cache=cache, lines="hello\n/save\n/exit\n")
    assert code == 0, printed
    check_clean(tmp_path / "out", printed)
    kept = {"merge": "README.md", "chat": "conversations.jsonl"}
    assert (tmp_path / "out" / kept[verb]).stat().st_size > 0


def test_a_sweep_of_an_experiment_leaves_no_secret_anywhere(
    server: str, type_command: Type, tmp_path: Path
) -> None:
    values: dict[str, dict[str, object]] = {}
    for key, value in (word.split("=", 1) for word in small(address(server), tmp_path / "x")):
        group, _, name = key.partition(".")
        values.setdefault(group, {})[name] = yaml.safe_load(value)
    values.pop("output")
    experiment = tmp_path / "secret.yaml"
    experiment.write_text("# @package _global_\n" + yaml.safe_dump(values))
    words = ["-m", f"+experiment={experiment}", "adapter.r=4,8", f"output.dir={tmp_path / 'sweep'}"]
    code, printed = type_command("train", *words, cache=tmp_path / "cache")
    assert code == 0, printed
    check_clean(tmp_path / "sweep", tmp_path / "cache", printed)
    assert (tmp_path / "sweep" / "sweep.json").exists()


PLACES = {
    "train": ["output.name", "model.path", "resume", "+experiment", "no.such.key"],
    "evaluate": ["run", "adapter_path"],
}


@pytest.mark.parametrize("verb", PLACES)
def test_a_refused_word_is_repeated_without_its_secret(verb: str) -> None:
    url = address("127.0.0.1:1")
    for word in (url, *(f"{key}={{}}" for key in PLACES[verb])):
        for secret in (url, BEARER, PLANTED["note"], PLANTED["who"]):
            result = run_command(word.format(secret), verb=verb)
            assert result.code in (2, 3), (word, secret)
            check_clean(result.stderr + result.stdout)


def test_a_secret_that_was_left_out_is_asked_for(
    ended: tuple[Path, Path, str], server: str, tmp_path: Path
) -> None:
    run, _, _ = ended
    longer = ["trainer.max_steps=3", "resume_allow=[epochs]"]
    for verb, typed in (("train", [f"resume={run}", *longer]), ("evaluate", [f"run={run}"])):
        said = refused(*typed, verb=verb)
        assert f"{run}/config.yaml: the secret in data.datasets was replaced by" in said
        again = f"type it again: 'data.datasets=[{{path: http://<redacted>@{server}/lists.json?"
        assert again in said
        assert "name: lists, format: alpaca}]'" in said
        result = run_command(
            *typed, data(address(server).replace(PASSWORD, "<redacted>")), verb=verb
        )
        assert (result.code, "type the secret instead" in result.stderr) == (2, True)
        assert PASSWORD in accepted(*typed, data(address(server)), verb=verb).data.datasets[0].path
    # With all of the settings typed, nothing is taken from the file.
    accepted(*small(address(server), run, "resume=must"))


def test_the_cache_is_found_whatever_the_signature(
    ended: tuple[Path, Path, str], server: str, tmp_path: Path
) -> None:
    from common.redaction import redact
    from data_modules.tokens.prepare import Key

    _, cache, _ = ended
    paths = {json.loads(file.read_text())["path"] for file in cache.rglob("key.json")}
    assert paths == {redact(address(server, sig="Zq7other0signature"))}
    names = {
        Key(path=redact(url), split="train", parts={}).name
        for url in (address(server), address(server, sig="Zq7other"), address(server, "b.json"))
    }
    assert len(names) == 2
