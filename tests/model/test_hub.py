"""What the hub refuses is told apart, within seconds, against a server that speaks as it does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.model.base import ModelConfig
from app.model.hub import check_hub, is_offline, missing_weights
from common.errors import UserError
from tests.local_server import Handler, local_server

ANSWERS = {
    "org/open": (307, ""),
    "org/none": (401, "RepoNotFound"),
    "org/gated": (401, "GatedRepo"),
    "org/not_yet": (403, "GatedRepo"),
    "org/forbidden": (403, ""),
    "org/tagged": (404, "RevisionNotFound"),
}
COMMIT = "a1" * 20
asked: list[tuple[str, str | None]] = []


class Hub(Handler):
    def do_HEAD(self) -> None:
        asked.append((self.path, self.headers["Authorization"]))
        status, code = ANSWERS["/".join(self.path.split("/")[1:3])]
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if status == 307:
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.end_headers()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    asked.clear()
    with local_server(Hub) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield address


def test_another_response_is_no_refusal(hub: str) -> None:
    assert check_hub({"model.path": "org/open"})
    assert asked == [("/org/open/resolve/main/config.json", None)]


@pytest.mark.parametrize(
    ("name", "without", "with_token"),
    [
        ("org/none", "no such model on the hub (HTTP 401)", "your token may not see it"),
        (
            "org/gated",
            "gated: its owner must grant you access; request it at http",
            "request it at http",
        ),
        ("org/not_yet", "then type hf auth login", "gated: its owner"),
        ("org/forbidden", "(HTTP 403)", "use one with read access"),
        ("org/tagged", "has no revision v9", "model.revision"),
    ],
)
def test_each_refusal_has_its_message(
    name: str, without: str, with_token: str, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token, said in ((None, without), ("hf_not_a_token", with_token)):
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(UserError) as caught:
            check_hub({"model.path": name}, "v9")
        (problem,) = caught.value.problems
        assert problem.startswith(f"model.path={name}: ") and said in problem
        assert "hf_not_a" not in problem
    assert asked[-1] == (f"/{name}/resolve/v9/config.json", "Bearer hf_not_a_token")


def test_a_copy_in_the_cache_is_not_asked_for(hub: str, tmp_path: Path) -> None:
    (tmp_path / "hub" / "models--org--none").mkdir(parents=True)
    assert check_hub({"model.path": "org/none"}) and not asked


@pytest.fixture
def part_of_a_base(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache has one of three shards of org/part, and nobody answers."""
    home = tmp_path / "hub" / "models--org--part"
    snapshot = home / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    weight_map = {f"layers.{number}.weight": name for number, name in enumerate(names * 2)}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (snapshot / names[1]).touch()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return snapshot


@pytest.mark.parametrize(
    ("why", "revision"), [("HF_HUB_OFFLINE is set", None), ("there is no network", COMMIT)]
)
def test_shards_that_a_download_has_left_out_are_named(
    why: str, revision: str | None, part_of_a_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if "OFFLINE" in why else "0")
    model = ModelConfig(path="org/part", revision=revision)
    with pytest.raises(OSError, match="download did not finish") as caught:
        is_offline(model)
    at = f" --revision {COMMIT}" if revision else ""
    for word in (
        "2 of its weight files",
        "(model-00001-of-00003.safetensors, model-00003-of-00003.safetensors)",
        why,
        f"hf download org/part{at} ",
    ):
        assert word in str(caught.value)
    assert is_offline(model, needs_weights=False)
    for name in ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"):
        (part_of_a_base / name).touch()
    assert is_offline(model)


def test_a_copy_without_weights_is_named(part_of_a_base: Path) -> None:
    (part_of_a_base / "model.safetensors.index.json").unlink()
    assert missing_weights("org/part", None) == ["model.safetensors"]
    assert missing_weights("org/part", "of_which_there_is_no_copy") == []
    (part_of_a_base / "model.safetensors").touch()
    assert missing_weights("org/part", None) == []


def test_a_revision_is_that_of_the_base(hub: str) -> None:
    name = "org/tagged"
    with pytest.raises(UserError):
        check_hub({"model.path": name, "model.tokenizer_path": name}, "v9")
    assert [path.split("/")[4] for path, _ in asked] == ["v9", "main"]
    asked.clear()
    with pytest.raises(UserError):
        check_hub({"model.tokenizer_path": name}, "v9")
    assert [path.split("/")[4] for path, _ in asked] == ["v9"]
