"""Check quickly whether the Hugging Face hub can be reached and what is in its local cache.

Without this check, the hub's library would retry for half a minute when there is no network.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from app.model.base import INDEX, WEIGHTS
from common.errors import UserError
from common.untrusted import read_json_object
from data_modules import DataConfig, explain_refusal, is_hub_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.model.base import ModelConfig

CONNECT_SECONDS = 2.5
"""timeout of one connection"""
_MAX_NAMED = 4
"""largest number of file names in a message"""
COMMIT = re.compile(r"[0-9a-f]{40}")
"""matches a full commit hash, in contrast to a branch or tag"""


def is_offline_by_setting() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _home() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(caches) / "huggingface")


def cache_folder() -> Path:
    return Path(os.environ.get("HF_HUB_CACHE") or _home() / "hub")


def newest_cached_file(hub_id: str, name: str) -> Path | None:
    """Return the newest cached version of a hub id's file `name`; None if it is not cached."""
    snapshots = _cached(hub_id).glob(f"snapshots/*/{name}")
    files = sorted(snapshots, key=lambda file: file.stat().st_mtime)
    return files[-1] if files else None


def is_cached(hub_id: str) -> bool:
    return _cached(hub_id).is_dir()


def _cached(hub_id: str, kind: str = "models") -> Path:
    return cache_folder() / f"{kind}--{hub_id.replace('/', '--')}"


def find_offline_problem(key: str, hub_id: str) -> str | None:
    """Return why a hub id cannot be read because HF_HUB_OFFLINE is set; None if it can."""
    if not is_offline_by_setting() or is_cached(hub_id):
        return None
    return (
        f"{key}={hub_id}: HF_HUB_OFFLINE is set and it is not in the cache ({cache_folder()}); "
        "unset HF_HUB_OFFLINE, or type the folder of a copy"
    )


def check_hub(ids: dict[str, str], revision: str | None = None) -> bool:
    """Check the hub ids `ids`, by settings key, and return whether the hub can be reached.

    UserError if HF_HUB_OFFLINE is set and an id is not cached, or if the hub refuses an id; OSError
    if there is no network and an id is not cached. Each connection takes up to CONNECT_SECONDS: one
    to the hub, and one for each id that is not cached.
    """
    if problems := [p for key, name in ids.items() if (p := find_offline_problem(key, name))]:
        raise UserError(problems)
    if is_offline_by_setting() or not ids:
        return False
    address, why = reach_hub()
    if why is None:
        missing = {key: name for key, name in ids.items() if not is_cached(name)}
        # The revision is that of the base if the base is on the hub, else of the tokenizer.
        pinned = "model.path" if "model.path" in ids else next(iter(ids))
        refused = [
            refusal
            for key, name in missing.items()
            if (refusal := find_refusal(key, name, revision if key == pinned else None))
        ]
        if refused:
            raise UserError(refused)
        return True
    for key, name in ids.items():
        if not is_cached(name):
            raise OSError(
                f"{key}={name}: no network: {address} cannot be reached ({why}), and it is not "
                f"in the cache ({cache_folder()}); type the folder of a copy, or download it on "
                f"another machine (hf download {name} --local-dir FOLDER) and copy the folder here"
            )
    return False


def find_refusal(key: str, hub_id: str, revision: str | None) -> str | None:
    """Request a model's config.json from the hub; return why it is refused, None if it is not.

    Responses that are not about the model (of a proxy or a mirror) count as no refusal: the hub's
    library will handle them.
    """
    import urllib.error

    endpoint, at = _endpoint().rstrip("/"), quote(revision or "main", safe="")
    url = f"{endpoint}/{quote(hub_id)}/resolve/{at}/config.json"
    token = hub_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, method="HEAD", headers=headers)
    try:
        urllib.request.build_opener(_NoRedirect).open(request, timeout=CONNECT_SECONDS).close()
    except urllib.error.HTTPError as error:
        why = explain_refusal(
            error.code,
            error.headers.get("X-Error-Code") or "",
            kind="model",
            page=f"{endpoint}/{hub_id}",
            revision=f"{revision}; leave model.revision out, or type a commit",
            has_token=token is not None,
        )
        return None if why is None else f"{key}={hub_id}: {why}"
    except OSError:
        return None
    return None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Does not follow redirects to the file: the token must be sent only to the hub."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def hub_token() -> str | None:
    """Return the token that the hub's library would send; None if there is none."""
    file = Path(os.environ.get("HF_TOKEN_PATH") or _home() / "token")
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if not token and file.is_file():
        token = file.read_text(encoding="utf-8", errors="replace")
    return token.strip() or None if token else None


def reach_hub() -> tuple[str, str | None]:
    """Return the address of the hub, or of the proxy to it, and why a connection to it fails.

    The reason is None if it succeeds. Takes at most CONNECT_SECONDS.
    """
    endpoint, proxies = urlsplit(_endpoint()), urllib.request.getproxies()
    proxy = proxies.get(endpoint.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(endpoint.hostname or ""):
        endpoint = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    address = endpoint.hostname or "", endpoint.port or (443 if endpoint.scheme == "https" else 80)
    results: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=CONNECT_SECONDS).close()
            results.append(None)
        except OSError as error:
            results.append(error.strerror or str(error))

    # In a thread, because a DNS lookup has no timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    reason = results[0] if results else f"no answer within {CONNECT_SECONDS:g} s"
    return f"{address[0]}:{address[1]}", reason


def missing_weights(hub_id: str, revision: str | None) -> list[str]:
    """List the weight files missing from a cached snapshot; empty if nothing is cached."""
    home = _cached(hub_id)
    ref = home / "refs" / (revision or "main")
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    snapshot = home / "snapshots" / (commit or "main")
    if not snapshot.is_dir():
        return []
    names = {WEIGHTS}
    if (snapshot / INDEX).is_file():
        weight_map = read_json_object(snapshot / INDEX)[0].get("weight_map")
        names = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
    return sorted(name for name in names if not (snapshot / name).is_file())


def _check_download_complete(hub_id: str, revision: str | None) -> None:
    """Raise OSError if the cached snapshot lacks weights, which cannot be downloaded now."""
    missing = missing_weights(hub_id, revision)
    if not missing:
        return
    why = "HF_HUB_OFFLINE is set" if is_offline_by_setting() else "there is no network"
    shown = ", ".join(missing[:_MAX_NAMED]) + (", ..." if len(missing) > _MAX_NAMED else "")
    at = f" --revision {revision}" if revision else ""
    raise OSError(
        f"model.path={hub_id}: its download did not finish: {len(missing)} of its weight files are "
        f"not in the cache ({shown}), and {why}; on a machine with a network, type hf download "
        f"{hub_id}{at} (it resumes the download), and copy the cache ({cache_folder()}) here"
    )


def is_offline(
    model: ModelConfig, data: DataConfig | None = None, *, needs_weights: bool = True
) -> bool:
    """Return whether a run must and can work without the hub, from local folders and the cache.

    OSError if files of a base, tokenizer or data set are missing and there is no network.
    """
    paths = {"model.path": model.path, "model.tokenizer_path": model.tokenizer_path}
    ids = {key: path for key, path in paths.items() if path and not Path(path).is_dir()}
    datasets = () if data is None else (*data.loss_datasets, *data.test_datasets)
    is_reached = check_hub(ids, model.revision)
    if needs_weights and not is_reached and model.path and "model.path" in ids:
        _check_download_complete(model.path, model.revision)
    hub_datasets = [dataset for dataset in datasets if is_hub_id(dataset.path)]
    if not is_reached:
        # A pinned data set may be tokenized in our cache already, without its rows.
        unpinned = [each for each in hub_datasets if not COMMIT.fullmatch(each.revision or "")]
        _check_cached_datasets([dataset.path for dataset in unpinned])
    return not is_reached and not hub_datasets


def _check_cached_datasets(paths: Sequence[str]) -> None:
    """Raise OSError for data sets that are in no cache, if there is no network."""
    home = Path(os.environ.get("HF_DATASETS_CACHE") or _home() / "datasets")
    absent = [
        path
        for path in paths
        if not _cached(path, "datasets").is_dir()
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
        f"{', '.join(absent)}: no such file here, {why}, and it was not downloaded before; type "
        "the path of a file or folder, or download it on a machine with a network and copy the "
        f"cache ({home}) here"
    )
