"""Check whether the Hugging Face hub can be reached, before a library retries for half a minute."""

from __future__ import annotations

import os
import re
import socket
import threading
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from app.model.base_files import INDEX, WEIGHTS
from app.process.errors import UserError
from app.process.untrusted import read_json_object
from data_modules import DataConfig, DatasetConfig, explain_refusal, is_hub_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.model.base import ModelConfig

ENDPOINT = "https://huggingface.co"
CONNECT_SECONDS = 2.5
MAX_NAMED = 4
"""files that a message names"""
COMMIT = re.compile(r"[0-9a-f]{40}")
"""a revision that does not move"""


def is_offline_by_setting() -> bool:
    """Return whether HF_HUB_OFFLINE is set."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def _home() -> Path:
    """Return the folder of the hub's libraries."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(caches) / "huggingface")


def cache_folder() -> Path:
    """Return the hub's cache folder."""
    return Path(os.environ.get("HF_HUB_CACHE") or _home() / "hub")


def newest_cached_file(hub_id: str, name: str) -> Path | None:
    """Return the newest file of a name that the cache has of a hub id; None where it has none."""
    snapshots = cache_folder() / f"models--{hub_id.replace('/', '--')}" / "snapshots"
    files = sorted(snapshots.glob(f"*/{name}"), key=lambda file: file.stat().st_mtime)
    return files[-1] if files else None


def is_cached(hub_id: str) -> bool:
    """Return whether a hub id is in the cache."""
    return (cache_folder() / f"models--{hub_id.replace('/', '--')}").is_dir()


def find_offline_problem(key: str, hub_id: str) -> str | None:
    """Return why a hub id cannot be read with HF_HUB_OFFLINE set, None where it can."""
    if not is_offline_by_setting() or is_cached(hub_id):
        return None
    return (
        f"{key}={hub_id}: HF_HUB_OFFLINE is set and it is not in the cache ({cache_folder()}); "
        "unset HF_HUB_OFFLINE, or type the folder of a copy"
    )


def check_hub(ids: dict[str, str], revision: str | None = None) -> bool:
    """Check the hub ids `ids`, by settings key, and return whether the hub can be reached.

    UserError if HF_HUB_OFFLINE is set and an id is not cached, or if the hub refuses an id; OSError
    if there is no network and an id is not cached. Takes at most two times CONNECT_SECONDS.
    """
    if problems := [p for key, name in ids.items() if (p := find_offline_problem(key, name))]:
        raise UserError(problems)
    if is_offline_by_setting() or not ids:
        return False
    address, why = reach_hub()
    if why is None:
        missing = {key: name for key, name in ids.items() if not is_cached(name)}
        # It is that of the base, where the hub has one.
        pinned = "model.path" if "model.path" in ids else next(iter(ids))
        refused = [
            why
            for key, name in missing.items()
            if (why := find_refusal(key, name, revision if key == pinned else None))
        ]
        if refused:
            raise UserError(refused)
        return True
    for key, name in ids.items():
        if not is_cached(name):
            raise OSError(
                f"{key}={name}: no network: {address} cannot be reached ({why}), and it is not "
                f"in the cache ({cache_folder()}); type the folder of a copy, or download it on "
                f"another machine (hf download {name} --local-dir FOLDER) and bring the folder here"
            )
    return False


def find_refusal(key: str, hub_id: str, revision: str | None) -> str | None:
    """Ask the hub for a model's config.json; return why it is refused, None where it is not.

    An answer that says nothing of the model (a proxy's, a mirror's) is left to the library.
    """
    import urllib.error

    endpoint = (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    at = quote(revision or "main", safe="")
    url = f"{endpoint}/{quote(hub_id)}/resolve/{at}/config.json"
    token = hub_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, method="HEAD", headers=headers)
    try:
        urllib.request.build_opener(_NoRedirect).open(request, timeout=CONNECT_SECONDS).close()
    except urllib.error.HTTPError as error:
        return _describe(error.code, error.headers.get("X-Error-Code") or "", key, hub_id, revision)
    except OSError:
        return None
    return None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Take a redirect to the file for the answer: the token is for the hub alone."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _describe(status: int, code: str, key: str, hub_id: str, revision: str | None) -> str | None:
    why = explain_refusal(
        status,
        code,
        kind="model",
        page=f"{(os.environ.get('HF_ENDPOINT') or ENDPOINT).rstrip('/')}/{hub_id}",
        revision=f"{revision}; leave model.revision out, or type a commit",
        has_token=hub_token() is not None,
    )
    return None if why is None else f"{key}={hub_id}: {why}"


def hub_token() -> str | None:
    """Return the token that the hub's library would send."""
    file = Path(os.environ.get("HF_TOKEN_PATH") or _home() / "token")
    named = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if not named and file.is_file():
        named = file.read_text(encoding="utf-8", errors="replace")
    return named.strip() or None if named else None


def reach_hub() -> tuple[str, str | None]:
    """Return the address of the hub, or of the proxy to it, and why no connection to it succeeds.

    None where one does. Takes at most CONNECT_SECONDS.
    """
    host, port = _address()
    return f"{host}:{port}", _why_unreachable(host, port)


def _address() -> tuple[str, int]:
    """Return host and port of the hub, or of the proxy to it."""
    import urllib.parse
    import urllib.request

    endpoint = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or ENDPOINT)
    proxies, host = urllib.request.getproxies(), endpoint.hostname or ""
    proxy = proxies.get(endpoint.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(host):
        endpoint = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    return endpoint.hostname or "", port


def _why_unreachable(host: str, port: int) -> str | None:
    """Return why a connection fails, None where it succeeds."""
    answers: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
            answers.append(None)
        except OSError as error:
            answers.append(error.strerror or str(error))

    # In a thread: a DNS lookup has no timeout.
    trial = threading.Thread(target=connect, daemon=True)
    trial.start()
    trial.join(CONNECT_SECONDS)
    return answers[0] if answers else f"no answer within {CONNECT_SECONDS:g} s"


def missing_weights(hub_id: str, revision: str | None) -> list[str]:
    """List the weight files that a copy in the cache lacks; nothing where there is no copy."""
    home = cache_folder() / f"models--{hub_id.replace('/', '--')}"
    named = home / "refs" / (revision or "main")
    commit = named.read_text(encoding="utf-8").strip() if named.is_file() else revision
    snapshot = home / "snapshots" / (commit or "main")
    if not snapshot.is_dir():
        return []
    names = {WEIGHTS}
    if (snapshot / INDEX).is_file():
        weight_map = read_json_object(snapshot / INDEX)[0].get("weight_map")
        names = (
            {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set()
        )
    return sorted(name for name in names if not (snapshot / name).is_file())


def _check_copy(hub_id: str, revision: str | None) -> None:
    """Raise OSError where the copy in the cache lacks weights, which cannot be fetched now."""
    missing = missing_weights(hub_id, revision)
    if not missing:
        return
    why = "HF_HUB_OFFLINE is set" if is_offline_by_setting() else "there is no network"
    shown = ", ".join(missing[:MAX_NAMED]) + (", ..." if len(missing) > MAX_NAMED else "")
    at = f" --revision {revision}" if revision else ""
    raise OSError(
        f"model.path={hub_id}: its download did not finish: {len(missing)} of its weight files are "
        f"not in the cache ({shown}), and {why}; where there is a network type hf download "
        f"{hub_id}{at} (what is there is not fetched again), and bring the cache "
        f"({cache_folder()}) here"
    )


def is_offline(
    model: ModelConfig, data: DataConfig | None = None, *, needs_weights: bool = True
) -> bool:
    """Return whether all files of a run are on this machine, in folders or in the hub's cache.

    OSError where those of a base, tokenizer or data set are not, and there is no network.
    """
    paths = {"model.path": model.path, "model.tokenizer_path": model.tokenizer_path}
    ids = {key: path for key, path in paths.items() if path and not Path(path).is_dir()}
    datasets = () if data is None else (*data.datasets, *data.test_datasets)
    is_reached = check_hub(ids, model.revision)
    if needs_weights and not is_reached and model.path and "model.path" in ids:
        _check_copy(model.path, model.revision)
    of_hub = [dataset for dataset in datasets if is_hub_id(dataset.path)]
    if not is_reached:
        _check_data_sets([dataset.path for dataset in of_hub if not _is_pinned(dataset)])
    return not is_reached and not of_hub


def _is_pinned(dataset: DatasetConfig) -> bool:
    """Return whether a data set's commit is known: its tokens may be here without its rows."""
    return COMMIT.fullmatch(dataset.revision or "") is not None


def _check_data_sets(paths: Sequence[str]) -> None:
    """Raise OSError for a data set of which no cache has a file, where there is no network."""
    home = Path(os.environ.get("HF_DATASETS_CACHE") or _home() / "datasets")
    absent = [
        path
        for path in paths
        if not (cache_folder() / f"datasets--{path.replace('/', '--')}").is_dir()
        and not any(home.glob(f"{path.partition('/')[0]}___*"))
    ]
    if not absent:
        return
    if is_offline_by_setting():
        why = "HF_HUB_OFFLINE is set"
    else:
        address, reason = reach_hub()
        if reason is None:
            return
        why = f"{address} cannot be reached ({reason}; no network?)"
    raise OSError(
        f"{', '.join(absent)}: no such file here, {why}, and no copy of it was downloaded before; "
        "type the path of a file or folder, or download it where there is a network and bring "
        f"the cache ({home}) here"
    )
