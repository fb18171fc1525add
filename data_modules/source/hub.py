"""Read a data set from the Hugging Face hub, or its downloaded copy.

Decides which commit is read, and reports a hub that does not answer, after a single query. Never
interprets a row.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from common.errors import DataError, Origin, RemoteError
from common.text import reason_of
from data_modules.source import opening
from data_modules.source.locating import Part, rows_of, take
from data_modules.source.opening import BadRow, Chunk, ReadLimits, ReadOptions, Url, grouped
from data_modules.source.tables import BatchChunk, restore
from data_modules.types import Row

_COMMIT = re.compile(r"[0-9a-f]{40}")
_NEWEST = (None, "main")
_TIMEOUT = 5.0
_BATCH_ROWS = 1000
_VALUE_BYTES = 8


class _UnreachableError(Exception):
    """Why the hub does not answer."""


def commit_of(path: str, revision: str | None) -> str | None:
    """Return the commit that `revision` refers to on the hub, or that of the downloaded copy.

    None if the hub has no such data set, or if it does not answer and there is no copy.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    try:
        return _query_hub(path, revision)
    except _UnreachableError:
        if revision not in _NEWEST:
            return None
    try:
        return str(_copy_of(path).hash)
    except ValueError:
        return None


def hub_chunks(
    path: str,
    name: str | None,
    revision: str | None,
    options: ReadOptions,
    shard: tuple[int, int],
    streaming: bool,
    part: Part,
) -> Iterator[Chunk]:
    """Yield the rows of a slice of a hub data set, in a stream those of `shard`.

    The origin of a row names the split: `owner/name (train):7`. Raises DataError if the hub does
    not provide them.
    """
    import datasets

    limit_hub(options.limits.remote_seconds, options.limits.remote_bytes_per_second)
    try:
        builder = _builder_of(path, name, revision)
        if streaming:
            rows = builder.as_streaming_dataset(split=part.name)
            yield from _stream(path, part, rows, shard, options.max_row_bytes)
        else:
            with _over_http():
                builder.download_and_prepare()
            rows = builder.as_dataset(split=part.name)
            chunks = _load(path, part, rows, options)
            yield from take(chunks, *rows_of(path, part, len(rows)))
    except DataError:
        raise
    except _errors(ValueError, RuntimeError, datasets.exceptions.DatasetsError) as e:
        if aborted := _find_remote_error(e):
            raise aborted from e
        if (why := _hub_error(path, revision)) is not None:
            raise DataError(f"{path}: {why}") from e
        cause = e.__cause__ if isinstance(e, datasets.exceptions.DatasetGenerationError) else None
        requested = f"split '{part.name}'" + (f", revision '{revision}'" if revision else "")
        raise DataError(
            f"{path}: no such file here, and the hub has no such data set "
            f"({requested}): {reason_of(cause if isinstance(cause, Exception) else e)}"
        ) from e


@cache
def limit_hub(seconds: float, bytes_per_second: int) -> None:
    """Limit how slow the hub may be, once: replacing the client again would break open streams."""
    limits = ReadLimits(remote_seconds=seconds, remote_bytes_per_second=bytes_per_second)
    _HubPace(limits).limit()
    # `hf_xet` opens its own connections, and reads its limits at the first one.
    for name in ("CONNECT_TIMEOUT", "READ_TIMEOUT", "RETRY_MAX_DURATION"):
        os.environ.setdefault(f"HF_XET_CLIENT_{name}", f"{seconds * 1000:.0f}ms")


class _HubPace:
    """Abort downloads from the Hugging Face hub that are too slow or silent, before any retries.

    Does not cover models downloaded by `hf_xet`, which has its own limit for silence but none for a
    low rate. Data sets are downloaded without it.
    """

    def __init__(self, limits: ReadLimits) -> None:
        self._limits = limits
        self._silent = 0.0
        self._client: Any = None

    def limit(self) -> None:
        import huggingface_hub

        self._client = huggingface_hub.get_session()
        huggingface_hub.set_client_factory(self._build_client)

    def _build_client(self) -> Any:
        default = self._client
        # httpx or httpx2, depending on the version of huggingface_hub.
        library = importlib.import_module(type(default).__module__.partition(".")[0])
        client = type(default)(event_hooks=default.event_hooks, follow_redirects=True, timeout=None)
        send = client.send

        class Timed(library.SyncByteStream):  # type: ignore[name-defined]
            def __init__(self, stream: Any, url: Url, pace: _HubPace) -> None:
                self._stream, self._url, self._pace = stream, url, pace

            def __iter__(self) -> Iterator[bytes]:
                return self._pace.timed(self._stream, self._url, library.TimeoutException)

            def close(self) -> None:
                self._stream.close()

        def send_timed(request: Any, *, stream: bool = False, **options: Any) -> Any:
            url, started = Url(str(request.url)), time.monotonic()
            try:
                answer = partial(send, request, stream=True, **options)
                response = opening.answer_within(self._limits, answer)
            except (library.TimeoutException, TimeoutError) as error:
                self._count_silence(url, started, error)
                raise
            self._silent = 0.0
            response.stream = Timed(response.stream, url, self)
            if not stream:
                response.read()
            return response

        client.send = send_timed
        return client

    def timed(self, stream: Any, url: Url, timeout: type[Exception]) -> Iterator[bytes]:
        """Yield the received bytes; raises RemoteError if they are too slow."""
        limits = self._limits
        allowed = limits.remote_seconds + opening.PACED_BYTES / limits.remote_bytes_per_second
        block, waited, started = 0, 0.0, time.monotonic()
        try:
            for data in stream:
                self._silent = 0.0
                block, waited = block + len(data), waited + time.monotonic() - started
                if waited > allowed:
                    raise RemoteError(f"{url}: {opening.too_slow(block, waited, limits)}")
                if block >= opening.PACED_BYTES:
                    block, waited = 0, 0.0
                yield data
                started = time.monotonic()  # excludes the reader's own time
        except timeout as error:
            self._count_silence(url, started, error)
            raise

    def _count_silence(self, url: Url, started: float, error: Exception) -> None:
        self._silent += time.monotonic() - started
        seconds = self._limits.remote_seconds
        if self._silent >= seconds:
            raise RemoteError(
                f"{url}: no answer within {self._silent:.1f} seconds; data.limits.remote_seconds "
                f"is {seconds:g}; {opening.TRY_AGAIN}"
            ) from error


@contextmanager
def _over_http() -> Iterator[None]:
    """Download without `hf_xet`, which has no limit for a slow server, only for a silent one."""
    from huggingface_hub import constants

    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before


def _find_remote_error(error: BaseException | None) -> RemoteError | None:
    """Return our RemoteError in the chain of a library's error, None if there is none."""
    while error is not None and not isinstance(error, RemoteError):
        error = error.__cause__ or error.__context__
    return error


def _query_hub(path: str, revision: str | None) -> str | None:
    """Return the commit on the hub, None if the hub has no such data set."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        info = huggingface_hub.HfApi().dataset_info(path, revision=revision, timeout=_TIMEOUT)
    except HFValidationError as error:
        raise DataError(
            f"{path}: no such file here, and not a valid hub name: {reason_of(error)}"
        ) from error
    except HfHubHTTPError:
        return None
    except OfflineModeIsEnabled as error:
        raise _UnreachableError("HF_HUB_OFFLINE is set") from error
    except _errors(ValueError) as error:
        raise _UnreachableError(f"{reason_of(error)}; no network?") from error
    return info.sha


def _hub_error(path: str, revision: str | None) -> str | None:
    """Query the hub for why it provides no rows; None if it reports no reason."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    api = huggingface_hub.HfApi()
    try:
        api.dataset_info(path, revision=revision, timeout=_TIMEOUT)
        # A gated data set can be listed even without access to its files.
        api.auth_check(path, repo_type="dataset")
    except HfHubHTTPError as error:
        response = error.response
        return explain_refusal(
            response.status_code,
            response.headers.get("X-Error-Code") or "",
            kind="data set",
            page=f"{api.endpoint}/datasets/{path}",
            revision=f"{revision}; leave revision out, or give a commit",
            has_token=huggingface_hub.get_token() is not None,
        )
    except _errors(ValueError):
        return None
    return None


def explain_refusal(
    status: int, code: str, *, kind: str, page: str, revision: str, has_token: bool
) -> str | None:
    """Return what an HTTP error of the hub means and what to type; None if that is unknown.

    `kind` is what was requested (data set, model), `page` its address, `revision` the requested one
    with advice if it does not exist.
    """
    if code == "GatedRepo":
        login = "" if has_token else "; then type hf auth login, or export HF_TOKEN"
        return f"gated: its owner must grant you access; request it at {page}{login}"
    if code == "RevisionNotFound":
        return f"has no revision {revision}"
    if code == "RepoNotFound" or (status == 404 and code != "EntryNotFound"):
        login = (
            "your token may not see it"
            if has_token
            else "if it is private, type hf auth login or export HF_TOKEN"
        )
        return f"no such {kind} on the hub (HTTP {status}); check the name; {login}"
    if status == 401:
        reason = "refuses your token" if has_token else "requires a token"
        return f"the hub {reason} (HTTP 401); type hf auth login, or export HF_TOKEN"
    if status == 403:
        return "your token may not read it (HTTP 403); use one with read access to it"
    return None


def _errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the exceptions that a failing network raises, and `more`."""
    # The HTTP library (httpx, httpx2, requests) depends on the version of huggingface_hub.
    from huggingface_hub.errors import HTTPError

    return OSError, HTTPError, *more


def _builder_of(path: str, name: str | None, revision: str | None) -> Any:
    """Return the `datasets` builder of the requested commit and, if `name` is one, configuration.

    If the hub does not answer, `datasets` is not called: it would retry for half a minute.
    """
    import datasets

    try:
        commit = _query_hub(path, revision)
    except _UnreachableError as error:
        return _builder_of_copy(path, revision, error)
    try:
        builder = datasets.load_dataset_builder(path, revision=revision)
    except ValueError as error:
        if "Config name is missing" not in str(error):
            raise
        if name is None:
            several = " ".join(str(error).splitlines()[1:2])
            raise DataError(
                f"{path}: has several configurations; choose one by its name: "
                f"data.datasets[].name=NAME. {several}"
            ) from error
        builder = datasets.load_dataset_builder(path, name, revision=revision)
    else:
        if name in builder.builder_configs and name != builder.config.name:
            builder = datasets.load_dataset_builder(path, name, revision=revision)
    # If the network fails, it returns a downloaded copy of any commit.
    requested = commit or (builder.hash if revision in _NEWEST else revision)
    if builder.hash != requested:
        raise DataError(
            f"{path}: received commit {builder.hash} instead of {requested}; start again"
        )
    return builder


def _builder_of_copy(path: str, revision: str | None, why: _UnreachableError) -> Any:
    unreachable = f"the Hugging Face hub cannot be reached ({why})"
    try:
        builder = _copy_of(path)
    except ValueError as error:
        raise RemoteError(
            f"{path}: no such file here, {unreachable}, and there is no downloaded copy "
            f"({reason_of(error)}); give a local file or folder, check the name, or download the "
            "data set on a machine with network access and copy its cache (HF_HOME) here"
        ) from error
    if revision not in (*_NEWEST, builder.hash):
        raise DataError(
            f"{path}: {unreachable}; the downloaded copy is of commit {builder.hash}, revision "
            f"'{revision}' was requested; set revision: {builder.hash} to use the copy"
        )
    return builder


def _copy_of(path: str) -> Any:
    from datasets.packaged_modules.cache.cache import Cache

    return Cache(repo_id=path, dataset_name=path.rpartition("/")[2], version="auto", hash="auto")


def _load(path: str, part: Part, rows: Any, options: ReadOptions) -> Iterator[Chunk]:
    if not len(rows):
        raise DataError(f"{path}: 0 rows in split '{part.name}'; give one with at least one row")
    # The feature types say which text is JSON; see BatchChunk.
    described = rows.features.arrow_schema.metadata
    name, first = f"{path} ({part.name})", 1
    for table in rows.with_format("arrow").iter(batch_size=_BATCH_ROWS):
        for batch in table.replace_schema_metadata(described).combine_chunks().to_batches():
            numbers = range(first, first + batch.num_rows)
            first = numbers.stop
            yield BatchChunk(name, batch.nbytes, numbers, batch, options)


def _stream(
    path: str, part: Part, rows: Any, shard: tuple[int, int], max_row_bytes: int
) -> Iterator[Chunk]:
    index, count = shard
    name = f"{path} ({part.name})"
    if count > 1 and rows.num_shards % count == 0:
        # Each shard reads its own files, so none is downloaded twice.
        from datasets.distributed import split_dataset_by_node

        rows = split_dataset_by_node(rows, rank=index, world_size=count)
        name, shard = f"{path} ({part.name}, part {index + 1} of {count})", (0, 1)
    total = None
    if part.needs_total:
        infos = rows.info.splits or {}
        if part.name not in infos or not infos[part.name].num_examples:
            raise DataError(
                f"{path}: the number of rows of split '{part.name}' is unknown while it is "
                f"streamed; give '{part}' in numbers of rows, or set data.streaming=false"
            )
        total = int(infos[part.name].num_examples)
    kinds = {} if rows.features is None else rows.features.to_dict()
    read = (
        _sized(
            # without the nulls that arrow added to its structs
            {key: restore(value, kinds.get(key), is_parsed=True) for key, value in values.items()},
            Origin(name, number),
            max_row_bytes,
        )
        for number, values in enumerate(rows, 1)
    )
    start, stop = rows_of(path, part, total)
    num_rows = yield from take(grouped(read, name), start, stop, shard)
    if start and num_rows <= start:
        raise DataError(f"{path}: 0 rows in '{part}' of {num_rows:,} rows; give another slice")


def _sized(values: dict[str, Any], origin: Origin, max_row_bytes: int) -> tuple[int, Row | BadRow]:
    """Return a row and its size in characters, which is at most its size in bytes."""
    size = _size_of(values)
    if size <= max_row_bytes:
        return size, Row(values, origin)
    raw = ", ".join(str(name) for name in values)
    return size, opening.too_large(origin, f"{size:,} or more", max_row_bytes, raw)


def _size_of(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, (dict, list)):
        return sum(map(_size_of, value.values() if isinstance(value, dict) else value))
    return _VALUE_BYTES
