"""Model cards, and the push of a run to the hub, whose client is replaced."""

from __future__ import annotations

import itertools
import json
import re
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import yaml
from httpx2 import Request, Response
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError

from app import report
from app.config import TrainConfig, changed_settings, load_config, save_config
from app.config.dispatch import run_plain_verb
from app.config.schema import list_settings
from app.config.verbs import PARTS
from app.model.adapter import write_origin
from app.push import PushConfig, push
from app.report import render_template
from app.report.model_card import license_of, render_run_card, write_card
from app.report.run_page import read_run_files, write_page
from tests.killed import killed_at
from tests.report.test_run_page import HOSTILE, write_run
from tests.tiny import small_base, small_run

REPO = "someone/lists-adapter"
GIVES = ("code", "write", "host")
NOT_OF_A_RUN = [".env", ".git/config", "notes.txt", "adapter_model.bin", "x.py", "state.pt"]
NOT_OF_A_RUN += ["model.safetensors/key.pem", "secrets.json", "tokenizer.json.orig", "id_rsa"]
OF_A_RUN = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "base.json"]
OF_A_RUN += ["additional_chat_templates/tool_use.jinja", "special_tokens_map.json", "merges.txt"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The files of a finished run, with a small adapter that only its owner can read."""
    folder = write_run(tmp_path / "run")
    save_config(load_config("train", small_run("optimizer.lr=1e-3")), folder / "config.yaml")
    data = {"name": HOSTILE + "|", "path": "owner/rows", "train_rows": 8, "validation_rows": 1,
            "trained_tokens": 90, "sha256": "ab" * 32}  # fmt: skip
    manifest = json.loads((folder / "manifest.json").read_text()) | {"data": [data], "base": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "training_curves.png").write_bytes(b"\x89PNG of curves")
    adapter = folder / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
    config["base_model_name_or_path"] = str(small_base())
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.safetensors").write_bytes(b"weights" * 1000)
    (adapter / "adapter_model.safetensors").chmod(0o600)
    return folder


def test_the_card_describes_the_run_and_is_valid_on_the_hub(run: Path) -> None:
    write_card(run / "adapter", run, [("optimizer.lr", "0.001", "null")])
    text = (run / "adapter/README.md").read_text()
    card = ModelCard(text)
    assert card.data.to_dict() == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "datasets": ["owner/rows"],
        "tags": ["loft", "sft", "lora"],
    }
    for expected in (
        "# tiny_base, fine-tuned",
        "A lora adapter (r 16, alpha 32) for `tiny_base`",
        "| 8 | 1 | 90 | `abababababababab` |",
        "| orders | exact match | 0.0 % | 90.0 % | +90.0 % |",
        "| `optimizer.lr` | 0.001 |",
        "![curves of training and validation](training_curves.png)",
    ):
        assert expected in text, expected
    assert "<img" not in text and "&lt;img src=x onerror=" in text
    for file in (run / "adapter").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o644, file.name


def test_the_card_names_a_hub_base_and_its_license(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub/models--org--base/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A base\n")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    config = (run / "config.yaml").read_text().replace(str(small_base()), "org/base")
    (run / "config.yaml").write_text(config)
    text = render_run_card(run / "adapter", read_run_files(run), [])
    data = ModelCard(text).data
    assert (data.base_model, data.license) == ("org/base", "apache-2.0")
    assert license_of("org/other", is_local=False) is None
    for odd in ("---\nlicense: [a\n---\n", "---\nlicense: [a]\n---\n", "---\n3\n---\n"):
        (snapshot / "README.md").write_text(odd)
        assert license_of("org/base", is_local=False) is None


class Hub:
    """The hub as its client shows it; it keeps what is uploaded, or refuses all with a status."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.refuses: int | None = None
        self.client = mock.create_autospec(HfApi, instance=True)
        self.client.whoami.side_effect = self._whoami
        self.client.create_repo.side_effect = self._create_repo
        self.client.list_repo_files.side_effect = lambda _: list(self.files)
        self.client.upload_folder.side_effect = self._upload_folder

    def _whoami(self) -> dict[str, str]:
        self._check()
        return {"name": REPO.partition("/")[0]}

    def _create_repo(self, repo_id: str, **options: Any) -> None:
        self._check()
        self.created.append({"name": repo_id, **options})

    def _upload_folder(self, *, folder_path: Path, repo_id: str, **_: Any) -> SimpleNamespace:
        self._check()
        files = (file for file in folder_path.rglob("*") if file.is_file())
        self.files |= {str(file.relative_to(folder_path)): file.read_bytes() for file in files}
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/abc")

    def _check(self) -> None:
        if self.refuses is not None:
            response = Response(self.refuses, request=Request("POST", "https://hub"))
            raise HfHubHTTPError("no", response=response)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub.client)
    return hub


def test_a_name_without_owner_belongs_to_the_token_owner(
    run: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"run={run}", "repo=lists-adapter"]
    assert run_plain_verb("push", PushConfig, push, words) == 0
    assert f"/{REPO}/commit/abc" in capsys.readouterr().out
    assert f"from_pretrained(base, '{REPO}')" in hub.files["README.md"].decode()
    for status, fix in ((401, "hf auth login"), (403, "may not write"), (404, "does not exist")):
        hub.refuses = status
        # Refused when asked for the owner, or at the upload.
        typed = words if status == 401 else [words[0], f"repo={REPO}"]
        assert run_plain_verb("push", PushConfig, push, typed) == 3
        said = capsys.readouterr().err
        assert fix in said and f"(status {status})" in said
    monkeypatch.setattr("huggingface_hub.HfApi", HfApi)
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: None)
    assert run_plain_verb("push", PushConfig, push, words) == 2
    assert (
        "repo=lists-adapter: no token found; export HF_TOKEN, or type hf auth login"
        in capsys.readouterr().err
    )


def test_a_push_of_nothing_or_to_nowhere_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "adapter").rename(run / "other")
    for words, said in (
        (["repo=a/b/c"], "the folder has neither an adapter nor a model"),
        ([], "repo=... is missing: NAME of one of your repositories, or OWNER/NAME"),
    ):
        assert run_plain_verb("push", PushConfig, push, [f"run={run}", *words]) == 2
        assert said in capsys.readouterr().err
    (run / "other").rename(run / "adapter")
    assert run_plain_verb("push", PushConfig, push, [f"run={run}", "repo=a/b/c"]) == 2
    assert "repo=a/b/c: " in capsys.readouterr().err


def test_a_pushed_run_gets_its_own_card_and_only_what_it_wrote_is_uploaded(
    run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    write_card(run / "adapter", run, [])
    own_card = (run / "adapter/README.md").read_text()
    for name in (*NOT_OF_A_RUN, *OF_A_RUN):
        file = run / "adapter" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    assert run_plain_verb("push", PushConfig, push, [f"run={run}", f"repo={REPO}"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"run: {run}"
    assert {line.split()[0] for line in said if line.startswith("  ")} == hub.files.keys()
    (left_out,) = (line for line in said if line.startswith("left out"))
    assert all(name.partition("/")[0] in left_out for name in NOT_OF_A_RUN)
    assert hub.created == [{"name": REPO, "private": True, "exist_ok": True}]
    always = {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert hub.files.keys() == always | {"training_curves.png"} | set(OF_A_RUN)
    assert hub.files["adapter_model.safetensors"] == b"weights" * 1000
    card = hub.files["README.md"].decode()
    assert f"from_pretrained(base, '{REPO}')" in card and str(small_base()) not in card
    assert (run / "adapter/README.md").read_text() == own_card
    assert "from_pretrained(base, 'adapter')" in own_card and str(small_base()) not in own_card
    pushed = json.loads(hub.files["adapter_config.json"])
    assert pushed["base_model_name_or_path"] == "tiny_base", "no local path"
    own = json.loads((run / "adapter/adapter_config.json").read_text())
    assert own["base_model_name_or_path"] == str(small_base())
    assert not list(run.glob(".push*"))


def test_a_model_is_not_pushed_beside_weights_that_would_be_loaded_instead(
    run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"run={run}", f"repo={REPO}"]
    assert run_plain_verb("push", PushConfig, push, words) == 0
    hub.files["model.safetensors"] = b"of a full run"
    assert run_plain_verb("push", PushConfig, push, words) == 0, "an adapter is found beside it"
    (run / "adapter").rename(run / "model")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (run / "model" / name).unlink()
    (run / "model/config.json").write_text('{"model_type": "llama"}')
    for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        (run / "model" / name).write_text("{}")
    before = dict(hub.files)
    assert run_plain_verb("push", PushConfig, push, words) == 2
    fix = f"`hf repos delete-files {REPO} adapter_config.json model.safetensors`"
    assert fix in capsys.readouterr().err and hub.files == before
    del hub.files["adapter_config.json"], hub.files["model.safetensors"]
    for _ in range(2):
        assert run_plain_verb("push", PushConfig, push, words) == 0
    assert hub.files["model-00001-of-00002.safetensors"] == b"{}"


def test_no_folder_of_this_machine_is_passed_on(
    run: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every setting that names a file; in the card, the page, and every file of a push."""
    planted = tmp_path / "home-of-somebody" / "a folder"
    planted.mkdir(parents=True)
    config = load_config("train", small_run())
    text = (run / "config.yaml").read_text()
    settings = yaml.safe_load(text)
    of_train = list_settings(TrainConfig, PARTS)
    paths = [each for each in of_train if each.facts.is_path or each.facts.grants in GIVES]
    for each in (each for each in paths if "[]" not in each.key and each.key != "resume"):
        *groups, name = each.key.split(".")
        if isinstance(each.field.default, bool):
            continue
        part, values = config, settings
        for group in groups:
            part, values = getattr(part, group), values[group]
        if name in values:
            setattr(part, name, f"{planted}/{name}")
            values[name] = f"{planted}/{name}"
    settings["data"]["datasets"][0]["path"] = f"{planted}/d.jsonl"
    config.data.datasets[0].path = config.data.val_datasets = f"{planted}/d.jsonl"
    (run / "config.yaml").write_text(text.splitlines()[0] + "\n" + yaml.safe_dump(settings))
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["data"][0]["path"] = f"{planted}/d.jsonl"
    manifest["command"] = [f"{planted}/python", "-m", "app.train", f"output.dir={planted}/out"]
    manifest["command"].append(f"data.datasets=[{{path: {planted}/d.jsonl}}]")
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "error.txt").write_text(f"{planted}/d.jsonl:3: expected a row; see '{planted}/x.log'")
    warned = {"warnings": [f"the longest is {planted}/d.jsonl:7"], "datasets": []}
    (run / "audit.json").write_text(json.dumps(warned))
    adapter = run / "adapter" / "adapter_config.json"
    base = json.loads(adapter.read_text()) | {"base_model_name_or_path": f"{planted}/gone"}
    adapter.write_text(json.dumps(base))
    write_origin(run / "adapter", {"path": f"{planted}/gone", "revision": None})
    finished = (run / "metrics.json").read_text()
    for metrics in ("{}", finished):  # stopped with an error, then finished
        (run / "metrics.json").write_text(metrics)
        page = write_page(run, changed_settings(config))
        assert page is not None and "d.jsonl" in page.read_text()
        assert "somebody" not in page.read_text()
    write_card(run / "adapter", run, changed_settings(config))
    card = (run / "adapter" / "README.md").read_text()
    assert "d.jsonl" in card and "somebody" not in card
    typed = [f"run={run}", f"repo={REPO}", "page=true"]
    assert run_plain_verb("push", PushConfig, push, typed) == 0
    assert {"base.json", "adapter_config.json", "report.html"} < hub.files.keys()
    for name, content in hub.files.items():
        assert b"somebody" not in content, name
    assert json.loads(hub.files["base.json"])["path"] == "gone"


def test_the_card_of_a_reward_model_opens_its_head(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["labels"] = ["reward"]
    config["objective"] = {"name": "reward", "beta": 0.1}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    write_card(run / "adapter", run, [])
    text = (run / "adapter/README.md").read_text()
    data = ModelCard(text).data.to_dict()
    assert data["pipeline_tag"] == "text-classification"
    assert data["tags"] == ["loft", "reward", "lora"]
    assert "for `tiny_base`, by objective=reward (beta 0.1)." in text
    assert "AutoModelForSequenceClassification.from_pretrained('tiny_base', num_labels=1" in text
    assert "generate" not in text and "AutoModelForCausalLM" not in text


def test_names_of_folders_are_text_in_cards_and_pages(run: Path, tmp_path: Path) -> None:
    """A received base, run or data set may be named like a tag, or hold terminal sequences."""
    base = tmp_path / "<img src=x onerror=alert(1)>`<b>"
    base.mkdir()
    config = (run / "config.yaml").read_text()
    named = re.sub(r"(?m)^  path: .*$", f"  path: {json.dumps(str(base))}", config, count=1)
    (run / "config.yaml").write_text(named)
    write_card(run / "adapter", run, [("a.<b>`", "<script>", "null")], repo="o/n")
    card = (run / "adapter/README.md").read_text()
    assert "# &lt;img src=x onerror=alert(1)>'&lt;b>, fine-tuned" in card
    front_and_code = re.sub(r"(?s)^---.*?---|```.*?```", "", card)
    assert "<" not in front_and_code
    names = [path.name.partition(".")[0] for path in Path(report.__file__).parent.glob("*.jinja")]
    assert len(names) > 2
    with mock.patch("jinja2.Template.render", return_value="a\x1b[31m\x00\tb\n\x7f"):
        assert {render_template(name) for name in names} == {"a\\x1b[31m\\x00\tb\n\\x7f"}


def test_a_step_of_a_run_that_trusts_code_of_its_base_is_pushed_once_that_is_typed(
    run: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bool] = []

    def with_checkpoint(config: Any, env: Any, folder: Path) -> Any:
        opened.append(config.model.trust_remote_code)
        return replace(config, adapter_path=str(run / "adapter"))

    monkeypatch.setattr("app.assembly.base.with_checkpoint", with_checkpoint)
    text = (run / "config.yaml").read_text()
    trusts = text.replace("trust_remote_code: false", "trust_remote_code: true")
    (run / "config.yaml").write_text(trusts)
    words = [f"run={run}", f"repo={REPO}", "checkpoint=newest"]
    assert run_plain_verb("push", PushConfig, push, words) == 2 and not opened
    said = capsys.readouterr().err
    typed = re.findall(r"model\.trust_remote_code=\w+(?= \(or)|model\.\w+=false", said)
    assert len(typed) == 2
    for word in typed:
        assert run_plain_verb("push", PushConfig, push, [*words, word]) == 0
    assert opened == [True, False]


def test_a_push_killed_at_any_change_leaves_the_run_as_it_was_and_is_repeated(
    run: Path, hub: Hub
) -> None:
    def files() -> dict[str, bytes]:
        """Return the run's files, but what the push makes for itself."""
        every = (file for file in run.rglob("*") if file.is_file())
        names = {str(file.relative_to(run)): file for file in every}
        return {n: f.read_bytes() for n, f in names.items() if not n.startswith(".push/")}

    write_origin(run / "adapter", {"path": str(small_base()), "revision": None})
    words = [f"run={run}", f"repo={REPO}", "page=true"]
    assert run_plain_verb("push", PushConfig, push, words) == 0
    whole, pushed = files(), dict(hub.files)
    for number in itertools.count(1):
        hub.files.clear()
        change = killed_at(
            number, run, lambda: push(PushConfig(run=str(run), repo=REPO, page=True))
        )
        assert files() == whole, change
        assert hub.files in ({}, pushed), change
        if change is None:
            break
        assert run_plain_verb("push", PushConfig, push, words) == 0, change
        assert hub.files == pushed and files() == whole, change
        assert not (run / ".push").exists()
    assert number > 15
