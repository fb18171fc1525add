"""Push: upload a run's adapter or model, with its model card, to the Hugging Face hub.

`python -m app.push run=FOLDER repo=NAME`. The token comes from HF_TOKEN or `hf auth login`.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config import changed_settings, load_config, load_run_config, words_to_type
from app.config.dispatch import run_plain_verb
from app.model.adapter.settings import ADAPTER_CONFIG, ORIGIN_FILE, SETTINGS_KEY
from app.model.hub import is_offline
from app.process.environment import configure_libraries, run_program
from app.report.model_card import write_card
from app.report.run_page import PAGE_FILE, read_run_files, refuse_damaged
from app.run import find_run
from app.run.find import FINAL, check_selected, saved_folder
from app.run.folder import open_empty
from app.training.run_documents import read_object
from common.errors import UserError
from common.facts import setting
from common.redaction import redact
from common.text import counted, printable

_NAMES_BASE = {ADAPTER_CONFIG: "base_model_name_or_path", ORIGIN_FILE: "path"}
"""files of an adapter that name its base, and the key under which they do"""

_WRITTEN = re.compile(
    r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|base\.json|"
    r"((adapter|generation|tokenizer|preprocessor|processor|video_preprocessor)_)?config\.json|"
    r"(tokenizer|special_tokens_map|added_tokens|vocab)\.json|(vocab|merges)\.txt|"
    r"(tokenizer|spiece|sentencepiece(\.bpe)?)\.model|chat_template\.jinja|"
    r"additional_chat_templates(/[\w.-]+\.jinja)?"
)
"""what a run writes into `adapter/` or `model/`: nothing else there is uploaded"""

_WEIGHTS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|adapter_config\.json"
)
"""files of a repository that would be loaded in place of, or on top of, a model's"""


@dataclass(kw_only=True, slots=True)
class PushConfig:
    """Upload the adapter or model of a finished run, with its card, to the Hugging Face hub."""

    repo: str = setting()
    """NAME of one of your repositories, or OWNER/NAME; created if it does not exist"""
    run: str | None = None
    """folder of a finished run; null = the newest under outputs/"""
    checkpoint: str = "final"
    """which weights of the run: final = its result; or best, newest or step-N of its checkpoints"""
    trust_remote_code: bool | None = setting(None, typed="model.trust_remote_code")
    """whether to run Python files that come with the base, to open one of its checkpoints; asked
    for if the run did"""
    private: bool = True
    """whether a new repository is private"""
    page: bool = False
    """whether to upload report.html, which contains prompts and answers of held-out rows"""


def push(config: PushConfig) -> str:
    """Upload the run's adapter or model; print and return the URL of the commit."""
    is_final = config.checkpoint == FINAL
    run = _find_undamaged(config, is_final=is_final)

    # Imported late, so that --help does not wait for them.
    from httpx2 import HTTPError
    from huggingface_hub import HfApi, ModelCard
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(config.repo)
    except HFValidationError as error:
        raise UserError(f"repo={config.repo}: {error}") from error
    api: Any = HfApi()
    try:
        repo = config.repo if "/" in config.repo else f"{api.whoami()['name']}/{config.repo}"
    except LocalTokenNotFoundError as error:
        raise UserError(
            f"repo={config.repo}: no token found; export HF_TOKEN, or type hf auth login"
        ) from error
    except HfHubHTTPError as error:
        raise OSError(_describe_refusal(config.repo, error)) from error
    except HTTPError as error:
        raise _unreachable(config.repo, error) from error
    # Upload a copy, whose card and configs name no folders of this machine.
    with contextlib.ExitStack() as stack:
        folder = open_empty(run / ".push")
        stack.callback(shutil.rmtree, folder)
        saved = saved_folder(run) if is_final else save_checkpoint(config, run, folder)
        copy = folder / "files"
        left_out = _copy_written(saved, copy)
        for name, key in _NAMES_BASE.items():
            _replace_base_path(copy / name, key)
        write_card(copy, run, changed_settings(load_run_config(run)), repo=repo)
        if config.page and (run / PAGE_FILE).is_file():
            shutil.copyfile(run / PAGE_FILE, copy / PAGE_FILE)
        ModelCard((copy / "README.md").read_text(encoding="utf-8"))  # validates the metadata block
        _print_files(repo, copy, left_out)
        try:
            api.create_repo(repo, private=config.private, exist_ok=True)
            _refuse_other_weights(repo, api.list_repo_files(repo), copy)
            commit = api.upload_folder(
                repo_id=repo, folder_path=copy, commit_message=f"Trained by loft: {run.name}"
            )
        except HfHubHTTPError as error:
            raise OSError(_describe_refusal(repo, error)) from error
        except HTTPError as error:
            raise _unreachable(repo, error) from error
    print(f"pushed: {printable(str(commit.commit_url))}")
    print(f"run: {printable(str(run))}")
    return str(commit.commit_url)


def _find_undamaged(config: PushConfig, *, is_final: bool) -> Path:
    run = find_run(
        config.run,
        verb="push",
        takes_unfinished=not is_final,
        typed_again=lambda run: words_to_type(load_run_config(run)),
    )
    if problems := check_selected(config.checkpoint, str(run), None):
        raise UserError(problems)
    if is_final and not saved_folder(run).is_dir():
        raise UserError(f"run={run}: the folder has neither an adapter nor a model")
    refuse_damaged(read_run_files(run))
    return run


def _copy_written(saved: Path, copy: Path) -> list[str]:
    left_out: list[str] = []

    def ignore(folder: str, names: list[str]) -> list[str]:
        inner = Path(folder).relative_to(saved)
        others = [name for name in names if not _WRITTEN.fullmatch(str(inner / name))]
        left_out.extend(str(inner / name) for name in others)
        return others

    shutil.copytree(saved, copy, copy_function=_link_or_copy, ignore=ignore)
    made_anew = {"README.md", "training_curves.png"}
    return sorted(set(left_out) - made_anew)


def _print_files(repo: str, folder: Path, left_out: Sequence[str]) -> None:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    print(f"uploading {counted(len(files), 'file')} to {printable(repo)}:")
    for file in files:
        print(printable(f"  {file.relative_to(folder)} ({file.stat().st_size:,} bytes)"))
    if left_out:
        print(f"left out, since the run did not write them: {printable(', '.join(left_out))}")
    sys.stdout.flush()


def _refuse_other_weights(repo: str, existing: Iterable[str], copy: Path) -> None:
    """Refuse a model beside other weights: transformers prefers an adapter, and one file to many.

    `existing`: the files of the repository. An adapter is found beside any of them.
    """
    if (copy / ADAPTER_CONFIG).is_file():
        return
    found = [name for name in existing if _WEIGHTS.fullmatch(name) and not (copy / name).is_file()]
    if found:
        names = shlex.join(sorted(found))
        raise UserError(
            f"repo={repo}: it has other weights, which would be loaded in place of these: {names}; "
            f"type another repo, or first `hf repos delete-files {repo} {names}`"
        )


def save_checkpoint(config: PushConfig, run: Path, folder: Path) -> Path:
    """Save the selected checkpoint under `folder` as a finished run saves its result."""
    from app.assembly.base import with_checkpoint
    from app.training.trainer import resolve_single_device

    words = [f"run={run}", f"checkpoint={config.checkpoint}"]
    if config.trust_remote_code is not None:
        words.append(f"model.trust_remote_code={config.trust_remote_code}")
    chat: Any = load_config("chat", words)  # a verb with the settings of the run's model alone
    configure_libraries(offline=is_offline(chat.model))
    env = resolve_single_device(chat.trainer.accelerator, chat.trainer.precision)
    return Path(with_checkpoint(chat, env, folder).adapter_path)


def _replace_base_path(file: Path, key: str) -> None:
    """Replace the path of a local base by the name of its folder, in a file to upload."""
    if not file.is_file():
        return
    document = read_object(file)
    path = document.get(key)
    if isinstance(path, str) and (Path(path).is_absolute() or Path(path).is_dir()):
        file.unlink()  # a hard link: writing would change the run's file
        name = Path(path).resolve().name
        named = document | {key: name}
        if isinstance(settings := document.get(SETTINGS_KEY), str):  # of adapter_config.json
            base = {_NAMES_BASE[ADAPTER_CONFIG]: name}
            named[SETTINGS_KEY] = json.dumps(json.loads(settings) | base)
        file.write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")


def _describe_refusal(repo: str, error: Any) -> str:
    status = error.response.status_code if error.response is not None else None
    known: dict[int | None, str] = {
        401: "the hub did not accept your token: export HF_TOKEN, or run `hf auth login`",
        403: "your token may not write there: type an owner that is yours, or create a token with "
        "write access in the hub's settings",
        404: "the owner or repository does not exist, or your token cannot see it",
    }
    why = known.get(status) or next(iter(redact(str(error)).splitlines()), "")
    return f"repo={repo}: {why}" + ("" if status is None else f" (status {status})")


def _unreachable(repo: str, error: Exception) -> OSError:
    return OSError(f"repo={repo}: the hub cannot be reached: {redact(str(error))}")


def _link_or_copy(source: str, target: str) -> None:
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)


if __name__ == "__main__":
    run_program(lambda: run_plain_verb("push", PushConfig, push))
