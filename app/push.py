"""Push: what a run has saved, with its card, to a repository of the Hugging Face hub.

`python -m app.push run=FOLDER repo=NAME`. The key comes from HF_TOKEN or `hf auth login`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config import changed_settings, load_run_config
from app.config.plain import run_plain_verb
from app.process.environment import keep_streams
from app.process.errors import UserError
from app.process.signals import end_process, install_signal_handlers
from app.report.model_card import write_card
from app.report.run_page import PAGE_FILE
from app.run import find_run
from app.run.find import saved_folder
from data_modules import printable, redact, setting

NAMES_BASE = {"adapter_config.json": "base_model_name_or_path", "base.json": "path"}
"""files of an adapter that name its base, and the key"""


@dataclass(kw_only=True, slots=True)
class PushConfig:
    """Push the adapter or model of a finished run to the Hugging Face hub, with its card."""

    repo: str = setting()
    """NAME of a repository of yours, or OWNER/NAME; it is made where it is not there"""
    run: str | None = None
    """folder of a finished run; the newest under outputs/ where none is typed"""
    private: bool = True
    """whether a repository that is made can be read by its owner alone"""
    page: bool = False
    """also report.html: it holds prompts and answers of the held-out rows"""


def push(config: PushConfig) -> str:
    """Upload what the run has saved; print and return the address of the commit."""
    run = find_run(config.run, verb="push")
    saved = saved_folder(run)
    if not saved.is_dir():
        raise UserError(f"run={run}: there is neither an adapter nor a model in it")

    # Imported here and not above: --help must not wait for it.
    from httpx2 import HTTPError
    from huggingface_hub import HfApi, ModelCard
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(config.repo)
    except HFValidationError as error:
        raise UserError(f"repo={config.repo}: {error}") from error
    api: Any = HfApi()
    try:
        repo = config.repo if "/" in config.repo else f"{api.whoami()['name']}/{config.repo}"
    except LocalTokenNotFoundError as error:
        raise UserError(f"repo={config.repo}: yours? type hf auth login first") from error
    except HfHubHTTPError as error:
        raise OSError(describe_refusal(config.repo, error)) from error
    except HTTPError as error:
        raise _unreachable(config.repo, error) from error
    # A copy beside the run: what is pushed has a card that names no folder of this machine.
    with tempfile.TemporaryDirectory(prefix=".push-", dir=run) as folder:
        copy = Path(folder) / "files"
        shutil.copytree(saved, copy, copy_function=_link)
        for name in ("README.md", "training_curves.png"):
            (copy / name).unlink(missing_ok=True)  # a link: written to, the run's own would change
        for name, key in NAMES_BASE.items():
            name_base(copy / name, key)
        write_card(copy, run, changed_settings(load_run_config(run)), repo=repo)
        if config.page and (run / PAGE_FILE).is_file():
            shutil.copyfile(run / PAGE_FILE, copy / PAGE_FILE)
        ModelCard((copy / "README.md").read_text(encoding="utf-8"))  # its front is valid
        try:
            api.create_repo(repo, private=config.private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo, folder_path=copy, commit_message=f"Trained by loft: {run.name}"
            )
        except HfHubHTTPError as error:
            raise OSError(describe_refusal(repo, error)) from error
        except HTTPError as error:
            raise _unreachable(repo, error) from error
    print(f"pushed: {printable(str(commit.commit_url))}")
    print(f"run: {printable(str(run))}")
    return str(commit.commit_url)


def name_base(file: Path, key: str) -> None:
    """Name a base that is a folder of this machine by its last part, in a file that is pushed."""
    if not file.is_file():
        return
    document = json.loads(file.read_text(encoding="utf-8"))
    path = document.get(key)
    if isinstance(path, str) and Path(path).is_dir():
        file.unlink()  # a link: written to, the run's own would change
        named = document | {key: Path(path).resolve().name}
        file.write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")


def describe_refusal(repo: str, error: Any) -> str:
    """Return why the hub has refused a push, and what to do."""
    status = error.response.status_code if error.response is not None else None
    known: dict[int | None, str] = {
        401: "the hub knows no key: export HF_TOKEN, or run `hf auth login`",
        403: "your key may not write there: type an owner that is yours, or make a key with write "
        "access on the hub's page of settings",
        404: "there is no such owner or repository that your key can see",
    }
    why = known.get(status) or next(iter(redact(str(error)).splitlines()), "")
    return f"repo={repo}: {why}" + ("" if status is None else f" (status {status})")


def _unreachable(repo: str, error: Exception) -> OSError:
    """Say that there is no network, or that the hub does not answer."""
    return OSError(f"repo={repo}: the hub cannot be reached: {redact(str(error))}")


def _link(source: str, target: str) -> None:
    """Name a file a second time: weights need not be copied to be read, but where they must."""
    try:
        Path(target).hardlink_to(source)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


if __name__ == "__main__":
    keep_streams()
    install_signal_handlers()
    end_process(run_plain_verb("push", PushConfig, push))
