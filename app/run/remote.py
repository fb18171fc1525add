"""A run whose output.dir is a URL: it works in a local folder, and an object store gets a copy.

The store holds what the folder does; the newest checkpoint with a marker counts. Here are the URL,
the store and what is downloaded, `upload` copies the folder. Credentials come from the environment,
where s3fs and gcsfs look for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from app.process.launch import is_child, is_first_rank, read_launch
from app.process.reporting import REASON_FILE
from app.process.status import STATUS_FILE
from app.run.folder import (
    CONFIG_FILE,
    METRICS_FILE,
    OUTPUTS,
    WRITTEN_AT_START,
    expand_home,
    into_folder,
)
from app.run.manifest import MANIFEST_FILE
from app.training.checkpoint.checkpoint import MARKER, DamageError, load_checkpoint
from app.training.checkpoint.store import CHECKPOINTS, STEP_FOLDER, CheckpointStore
from common.errors import UserError
from common.files import open_no_follow
from common.redaction import redact
from common.text import printable, reason_of
from common.untrusted import read_json_object

if TYPE_CHECKING:
    from app.config import TrainConfig

log = logging.getLogger(__name__)

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
"""scheme of the URLs -> package with its file system"""
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE, or the machine's role)",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS (or the machine's service account)",
}
_ADDRESS = re.compile(r"(s3|gs):/{1,2}([a-z0-9][a-z0-9._-]+)/([\w.=-]+(?:/[\w.=-]+)*)/?")
"""bucket and path; a Path drops the second slash"""
_PART_BYTES = 16 << 20
"""bytes of a file that are in memory while it is uploaded"""
REQUEST_SECONDS = 600.0
"""time of one request, of at most a part, after which it counts as failed"""
_NOT_FETCHED = {STATUS_FILE, REASON_FILE}
"""what the first rank has begun anew when another one downloads the run"""
_PROBE = ".writable"


def is_store_url(typed: str) -> bool:
    """Return whether a folder is typed as the URL of an object store."""
    return typed.startswith(tuple(f"{scheme}:/" for scheme in _PACKAGES))


def run_folder(key: str, typed: str, *, takes_url: bool = True) -> Path:
    """Return the local folder of the run that is typed as a folder or as a URL."""
    return (
        working_folder(key, typed) if takes_url and is_store_url(typed) else expand_home(key, typed)
    )


def fetched_folder(key: str, typed: str, *, resumes: bool) -> Path:
    """Return the local folder of a typed run, into which a run at a URL is downloaded."""
    folder = run_folder(key, typed)
    if (url := url_of(folder)) is not None and (resumes or is_store_url(typed)):
        with _one_rank_at_a_time(folder):
            fetch_run(url, folder, resumes=resumes)
    return folder


@contextlib.contextmanager
def _one_rank_at_a_time(folder: Path) -> Iterator[None]:
    """Lock a working folder against the other ranks of this machine that torchrun has started."""
    import fcntl

    with into_folder(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        stream = open_no_follow(folder.with_name(f".{folder.name}.lock"), "a")
    with stream:
        fcntl.lockf(stream, fcntl.LOCK_EX)  # until it is closed
        yield


def working_folder(key: str, url: str) -> Path:
    """Return the local folder of the run at `url`; UserError if it cannot be the URL of a run."""
    match = _ADDRESS.fullmatch(url)
    if match is None or {".", ".."} & set(match[3].split("/")):
        raise UserError(
            f"{key}={url}: expected s3://BUCKET/PATH or gs://BUCKET/PATH of letters, digits and "
            "._=-, without a password, which belongs into the environment"
        )
    return OUTPUTS / f"{match[1]}:" / match[2] / match[3]


def url_of(folder: Path) -> str | None:
    """Return the URL whose working folder `folder` is; None for any other folder."""
    parts = folder.parts
    for number, part in enumerate(parts):
        if part.removesuffix(":") in _PACKAGES and part.endswith(":"):
            return f"{part}//{'/'.join(parts[number + 1 :])}"
    return None


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """The files under one URL."""

    url: str
    files: Any
    """fsspec's file system"""
    root: str

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file, by its path below the URL."""
        found = self.files.find(self.root, detail=True).items()
        below = {place.removeprefix(f"{self.root}/"): info["size"] for place, info in found}
        return {name: size for name, size in below.items() if ".." not in PurePosixPath(name).parts}

    def put(self, name: str, source: IO[bytes], on_progress: Callable[[], object]) -> None:
        """Upload an open file in parts; it is there as a whole or not at all.

        `on_progress` is called after each MiB.
        """
        source.seek(0)
        with self.files.open(f"{self.root}/{name}", "wb", block_size=_PART_BYTES) as target:
            while block := source.read(1 << 20):
                target.write(block)
                on_progress()

    def get(self, name: str, file: Path) -> None:
        """Download a file; it is there as a whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f".{file.name}.{os.getpid()}")
        self.files.get_file(f"{self.root}/{name}", str(unfinished))
        os.replace(unfinished, file)

    def remove(self, name: str) -> None:
        self.files.rm_file(f"{self.root}/{name}")


@contextlib.contextmanager
def open_store(url: str) -> Iterator[ObjectStore]:
    """Open the store of `url`; within it, every failure is a UserError with what to do."""
    scheme, _, rest = url.partition("://")
    bucket = rest.partition("/")[0]
    try:
        import fsspec

        options: dict[str, Any] = {"use_listings_cache": False}
        if scheme == "s3":
            options["config_kwargs"] = {"http_session_cls": _session_class()}
        files = fsspec.filesystem(scheme, **options)
        yield ObjectStore(url, files, rest)
    except UserError:
        raise
    except ImportError as error:
        raise UserError(
            f"{url}: type pip install {_PACKAGES[scheme]} ({reason_of(error)})"
        ) from error
    except Exception as error:  # each file system raises errors of its own
        text = f"{type(error).__name__}: {error} {error.__cause__}"
        if "TimeTooSkewed" in text or "difference between the request time" in text:
            fix = "this machine's clock is wrong: set it (timedatectl set-ntp true)"
        elif "NoSuchBucket" in text or "bucket does not exist" in text:
            fix = f"there is no bucket {bucket}: create it, or type the name of one that exists"
        elif isinstance(error, PermissionError) or "redential" in text:
            fix = (
                "no right to list, read, write and delete there: set "
                f"{_CREDENTIALS[scheme]}, or type a URL of your own"
            )
        else:
            fix = (
                "check the name, the network and AWS_ENDPOINT_URL"
                if scheme == "s3"
                else ("check the name and the network")
            )
        reason = printable(redact(reason_of(error)))
        raise UserError(f"{url}: {fix} ({reason})") from error


@cache
def _session_class() -> type:
    """Return an HTTP client of S3 whose requests end.

    Two answers of 100 Continue make aiohttp 3.14 forget its timeout.
    """
    from aiobotocore.httpsession import AIOHTTPSession
    from botocore.exceptions import ReadTimeoutError

    class Session(AIOHTTPSession):
        async def send(self, request: Any) -> Any:
            try:
                return await asyncio.wait_for(super().send(request), REQUEST_SECONDS)
            except asyncio.TimeoutError as error:
                raise ReadTimeoutError(endpoint_url=request.url) from error

    return Session


def check_store(config: TrainConfig) -> list[str]:
    """List what keeps a run from being copied to its URL: bucket, rights, clock, another run."""
    url = None if config.output.dir is None else url_of(Path(config.output.dir))
    if url is None or not is_first_rank() or is_child():
        return []
    try:
        with open_store(url) as store:
            store.files.pipe_file(f"{store.root}/{_PROBE}", b"")
            store.remove(_PROBE)
            names = store.sizes().keys()
    except UserError as error:
        return error.problems
    if CONFIG_FILE in names and config.resume == "never":
        return [
            f"output.dir={url} holds another run: type another URL, or resume=auto to continue it"
        ]
    others = [name for name in names if not WRITTEN_AT_START.fullmatch(name.partition("/")[0])]
    if others and CONFIG_FILE not in names:
        return [f"output.dir={url} holds other files ({min(others)}): type a URL without any"]
    return []


def fetch_run(url: str, folder: Path, *, resumes: bool) -> None:
    """Download the run at `url` into `folder`, unless the folder holds a newer checkpoint.

    The newest whole checkpoint comes along if the run `resumes` or has not finished. On several
    machines newer ones are removed, since the others do not have them, and a run has finished only
    if the store says so.
    """
    with open_store(url) as store:
        names = store.sizes()
        places = (PurePosixPath(name) for name in names)
        marked = (STEP_FOLDER.fullmatch(one.parent.name) for one in places if one.name == MARKER)
        steps = sorted({int(match[1]) for match in marked if match}, reverse=True)
        here = CheckpointStore(folder / CHECKPOINTS)
        newest_here, newest = here.newest_step() or 0, max(steps, default=0)
        _check_same_run(store, names, folder)
        has_others = resumes and read_launch().num_nodes > 1
        if has_others and newest_here > newest:
            if CONFIG_FILE not in names:
                raise UserError(
                    f"{url} does not hold the run whose step-{newest_here} is in {folder}, and the "
                    "other machines do not have it: copy the folder to the URL, remove it, or type "
                    "another output.dir"
                )
            for step in here.drop_newer(newest):
                log.warning("RESUME: step-%d is removed: %s does not have it yet", step, url)
            newest_here = here.newest_step() or 0
        if has_others and CONFIG_FILE in names and METRICS_FILE not in names:
            # A machine that ends here would leave one with an empty folder waiting.
            (folder / METRICS_FILE).unlink(missing_ok=True)
        if CONFIG_FILE not in names or newest_here > newest:
            return
        with into_folder(folder):
            skipped = set(_NOT_FETCHED)
            if METRICS_FILE in names and not (folder / STATUS_FILE).exists():
                skipped.remove(STATUS_FILE)  # a finished run begins nothing anew
            for name in names.keys() - skipped:
                if not name.startswith(f"{CHECKPOINTS}/"):
                    store.get(name, folder / name)
        if resumes or METRICS_FILE not in names:
            for step in steps:
                if step == newest_here or fetch_checkpoint(store, names, folder, step):
                    return


def _check_same_run(store: ObjectStore, names: dict[str, int], folder: Path) -> None:
    here, _ = read_json_object(folder / MANIFEST_FILE)
    if not here or MANIFEST_FILE not in names:
        return
    there = json.loads(store.files.cat_file(f"{store.root}/{MANIFEST_FILE}"))
    if there.get("run", {}).get("id") != here.get("run", {}).get("id"):
        raise UserError(
            f"{store.url} holds another run than {folder}, where its copy belongs: remove the "
            "folder to take the one at the URL, or type another output.dir"
        )


def fetch_checkpoint(store: ObjectStore, names: dict[str, int], folder: Path, step: int) -> bool:
    """Download a checkpoint; False, with a warning, if it is damaged."""
    target = folder / CHECKPOINTS / f"step-{step}"
    unfinished = target.with_suffix(".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    for name in names:
        place = PurePosixPath(name)
        if place.parent == PurePosixPath(CHECKPOINTS, target.name):
            store.get(name, unfinished / place.name)
    try:
        load_checkpoint(unfinished, step)
    except DamageError as error:
        log.warning("%s/%s is damaged: %s", store.url, target.name, error)
        shutil.rmtree(unfinished)
        return False
    os.replace(unfinished, target)
    return True
