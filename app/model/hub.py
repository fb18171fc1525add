"""Check whether the Hugging Face hub can be reached, before a library retries for half a minute."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from app.process.errors import UserError
from data_modules import DataConfig, is_hub_id

if TYPE_CHECKING:
    from app.model.base import ModelConfig

ENDPOINT = "https://huggingface.co"
CONNECT_SECONDS = 4.0


def is_offline_by_setting() -> bool:
    """Return whether HF_HUB_OFFLINE is set."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def cache_folder() -> Path:
    """Return the hub's cache folder."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub"))


def is_cached(hub_id: str) -> bool:
    """Return whether a hub id is in the cache."""
    return (cache_folder() / f"models--{hub_id.replace('/', '--')}").is_dir()


def problem_offline(key: str, hub_id: str) -> str | None:
    """Return why a hub id cannot be read with HF_HUB_OFFLINE set, None where it can."""
    if not is_offline_by_setting() or is_cached(hub_id):
        return None
    return (
        f"{key}={hub_id}: HF_HUB_OFFLINE is set and it is not in the cache ({cache_folder()}); "
        "unset HF_HUB_OFFLINE, or type the folder of a copy"
    )


def check_hub(ids: dict[str, str]) -> bool:
    """Return whether the hub can be reached, for hub ids by setting.

    UserError where HF_HUB_OFFLINE is set, OSError where there is no network, and an id is not in
    the cache. Takes at most CONNECT_SECONDS.
    """
    if problems := [p for key, name in ids.items() if (p := problem_offline(key, name))]:
        raise UserError(problems)
    if is_offline_by_setting() or not ids:
        return False
    host, port = _address()
    why = _why_unreachable(host, port)
    if why is None:
        return True
    for key, name in ids.items():
        if not is_cached(name):
            raise OSError(
                f"{key}={name}: no network: {host}:{port} cannot be reached ({why}), and it is not "
                f"in the cache ({cache_folder()}); type the folder of a copy, or download it on "
                f"another machine (hf download {name} --local-dir FOLDER) and bring the folder here"
            )
    return False


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


def is_offline(model: ModelConfig, data: DataConfig | None = None) -> bool:
    """Return whether all files of a run are on this machine, in folders or in the hub's cache.

    OSError where a base or tokenizer does not, and there is no network.
    """
    paths = {"model.path": model.path, "model.tokenizer_path": model.tokenizer_path}
    ids = {key: path for key, path in paths.items() if path and not Path(path).is_dir()}
    datasets = () if data is None else (*data.datasets, *data.test_datasets)
    return not check_hub(ids) and not any(is_hub_id(dataset.path) for dataset in datasets)
