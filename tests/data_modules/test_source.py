"""Reading rows with their line numbers, and the errors of unreadable files."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError
from data_modules.source import (
    BadRow,
    Budget,
    find_files,
    fingerprint,
    is_hub_id,
    opening,
    parse_split,
    read_chunks,
    resolved_revision,
    text_bytes,
)
from data_modules.types import Row
from tests.data_modules.conftest import arrow_bytes, parquet_bytes, read_rows


def test_which_paths_are_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_hub_id("databricks/dolly-15k")
    for path in ("data/rows.json", "data/rows.jsonl.zst", "rows", "./a/b", "s3://bucket/rows"):
        assert not is_hub_id(path), path
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("data/rows"), "an existing folder is no owner"


def test_fingerprint_depends_on_file_names_and_boundaries(tmp_path: Path) -> None:
    def prints() -> tuple[str, str]:
        return fingerprint(str(tmp_path)), fingerprint(str(tmp_path / "*"))

    (tmp_path / "a.jsonl").write_text(lines(0, 1))
    (tmp_path / "b.jsonl").write_text(lines(2))
    seen = [prints()]
    (tmp_path / "b.jsonl").rename(tmp_path / "c.jsonl")
    seen.append(prints())
    (tmp_path / "c.jsonl").rename(tmp_path / "b.txt")
    seen.append(prints())
    (tmp_path / "b.txt").rename(tmp_path / "b.jsonl")
    (tmp_path / "a.jsonl").write_text(lines(0))
    (tmp_path / "b.jsonl").write_text(lines(1, 2))
    seen.append(prints())
    assert len({one for pair in zip(*seen, strict=True) for one in pair}) == 4
    # It does not depend on where the files are.
    shutil.copytree(tmp_path, tmp_path / "c" / "copy")
    for end in ("", "/*.jsonl", "/a.jsonl"):
        assert fingerprint(f"{tmp_path}{end}") == fingerprint(f"{tmp_path}/c/copy{end}")
    plain = hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()
    assert fingerprint(f"{tmp_path}/a.jsonl") == plain
    before = fingerprint(str(tmp_path), by_stamp=True)
    os.utime(tmp_path / "a.jsonl", ns=(0, 0))
    later = fingerprint(str(tmp_path), by_stamp=True)
    os.truncate(tmp_path / "a.jsonl", 1)
    os.utime(tmp_path / "a.jsonl", ns=(0, 0))
    assert len({before, later, fingerprint(str(tmp_path), by_stamp=True)}) == 3


def test_the_budget_limits_the_rows_read_of_all_files_together(tmp_path: Path) -> None:
    row = {"a": "x" * 92}
    for name, content in (
        ("d.json", json.dumps([row] * 100)),
        ("d.jsonl", (json.dumps(row) + "\n") * 100),
        ("d.csv", "a,b\n" + f"{'x' * 92},1\n" * 100),
    ):
        file = tmp_path / name
        file.write_text(content)
        assert 5 < len(list(read_rows(str(file), budget=Budget(1000)))) < 15
        # One whose first row exceeds the budget is not called empty.
        assert list(read_rows(str(file), budget=Budget(50))) == []
    for name in "abcd":
        file = tmp_path / f"all/{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text((json.dumps(row) + "\n") * 10)
    (tmp_path / "all/e.jsonl").write_text("never read")
    assert len(list(read_rows(str(tmp_path / "all"), budget=Budget(2500)))) in (24, 25)


def test_shipped_samples() -> None:
    row = next(read_rows("sample:lists.json"))
    assert row.origin.line == 2 and row.values["instruction"]
    with pytest.raises(DataError, match=r"no such sample; there are .*lists\.json"):
        find_files("sample:skills")


def lines(*values: object) -> str:
    return "".join(json.dumps({"a": value}) + "\n" for value in values)


def write(file: Path, num_rows: int, first: int = 0) -> Path:
    """Write rows in the format of the file name; column `a` counts from `first`."""
    import pyarrow

    values = range(first, first + num_rows)
    rows = [{"a": value} for value in values]
    file.parent.mkdir(exist_ok=True)
    if file.suffix == ".parquet":
        file.write_bytes(parquet_bytes(rows, row_group_size=3))
    elif file.suffix == ".arrow":
        file.write_bytes(arrow_bytes(rows, pyarrow.ipc.new_stream))
    elif file.suffix == ".csv":
        file.write_text("a\n" + "".join(f"{value}\n" for value in values))
    elif file.suffix == ".txt":
        file.write_text("\n\n".join(map(str, values)))
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("\n" + lines(*values).replace("\n", "\n \n"))
    return file


def good_rows(path: Path | str, **settings: Any) -> list[Row]:
    rows = [row for chunk in read_chunks(str(path), **settings) for row in chunk.rows()]
    good = [row for row in rows if isinstance(row, Row)]
    assert good == rows
    return good


def numbers(path: Path | str, split: str = "train", **settings: Any) -> list[int]:
    rows = good_rows(path, split=split, **settings)
    return [int(row.values.get("a", row.values.get("text"))) for row in rows]


FORMATS = ("json", "jsonl", "csv", "parquet", "arrow", "txt")


@pytest.mark.parametrize("suffix", FORMATS)
def test_slices_of_every_format(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "CHUNK_BYTES", 32)
    file = write(tmp_path / f"d.{suffix}", 10)
    assert numbers(file) == list(range(10))
    for split, rows in (
        ("train[:90%]", range(9)),
        ("train[2:5]", range(2, 5)),
        ("train[8:1_000]", range(8, 10)),
        ("train[-3:]", range(7, 10)),
        ("train[:-30%]", range(7)),
        ("train[12.5%:50%]", range(1, 5)),
        ("train[:2]+train[8:]", [0, 1, 8, 9]),
    ):
        assert numbers(file, split) == list(rows), split
    for cut in ("12.5%", "33%", "-67%"):
        assert numbers(file, f"train[:{cut}]") + numbers(file, f"train[{cut}:]") == [*range(10)]
    for split in ("train[10:12]", "train[:4%]", "train[-1%:]"):
        with pytest.raises(DataError, match=r"0 rows in 'train\[.*of 10 rows; give another slice"):
            numbers(file, split)
    for split, message in (
        ("train[", "cannot be read; use NAME"),
        ("train[5:2]", "has no row: its end is not after its start"),
        ("train[:101%]", "use a percentage up to 100"),
        ("train[1.5:]", "use a whole number, or a percentage"),
    ):
        with pytest.raises(ValueError, match=r"^split '.*" + message):
            parse_split(split)


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(1, 9),
    st.sampled_from(FORMATS),
    st.sampled_from(["train", "train[1:]", "train[:60%]"]),
    st.sampled_from([20, 1 << 20]),
)
def test_shards_have_every_row_once_and_are_even(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    count: int,
    suffix: str,
    split: str,
    chunk_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    for index, size in enumerate(sizes):
        write(folder / f"part{index}.{suffix}", size, sum(sizes[:index]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "CHUNK_BYTES", chunk_bytes)
        try:
            whole = numbers(folder, split)
        except DataError:
            assert split != "train" and sum(sizes) == 1
            return
        shards = [numbers(folder, split, shard=(index, count)) for index in range(count)]
    assert sorted(row for shard in shards for row in shard) == whole
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_a_bad_row_counts_in_slices_and_is_reported_only_inside(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(lines(0) + "broken\n\n" + lines(2, 3))
    rows = list(read_rows(str(file), "train[50%:]"))
    assert [(row.origin.line, row.values["a"]) for row in rows] == [(4, 2), (5, 3)]
    with pytest.raises(DataError, match=r"d\.jsonl:2:1 invalid JSON"):
        list(read_rows(str(file), "train[:50%]"))


def test_the_check_of_a_slice_reads_rows_of_the_slice(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text("broken\n" + lines(*range(100)))
    budget = Budget(200)
    assert list(read_rows(str(file), "train[50%:]", budget)) == [] and budget.spent
    with pytest.raises(DataError, match=r"d\.jsonl:1:1 invalid JSON"):
        list(read_rows(str(file), "train[:50%]", Budget(200)))
    assert len(list(read_rows(str(file), "train[50%:]", Budget(1 << 20)))) > 40


def test_splits_of_a_folder_are_joined_and_one_file_is_train(tmp_path: Path) -> None:
    file = write(tmp_path / "train.jsonl", 4)
    with pytest.raises(DataError, match="no split 'validation': a single file"):
        numbers(file, "validation")
    write(tmp_path / "validation.csv", 3, first=4)
    assert numbers(tmp_path, "train+validation") == list(range(7))
    assert numbers(tmp_path, "validation[1:]+train[:1]") == [5, 6, 0]
    assert [f.name for f in find_files(str(tmp_path), "train[:2]+train[2:]")] == ["train.jsonl"]
    with pytest.raises(DataError, match=r"no data file for split 'test'.*train.jsonl"):
        numbers(tmp_path, "test")
    assert numbers(write(tmp_path / "test-0.jsonl", 2), "test") == [0, 1]
    assert numbers(tmp_path / "*.jsonl", "test") == [0, 1]


def test_folders_saved_by_datasets_are_read(tmp_path: Path) -> None:
    import datasets

    data = {"train": counted(5), "test": counted(2)}
    datasets.DatasetDict(data).save_to_disk(tmp_path / "both")
    data["train"].save_to_disk(tmp_path / "one", num_shards=2)
    assert numbers(tmp_path / "both") == [0, 1, 2, 3, 4]
    assert numbers(tmp_path / "both", "test") == [0, 1]
    assert numbers(tmp_path / "one") == [0, 1, 2, 3, 4]
    missing = r"no data file for split 'validation'.*found .*test, train"
    with pytest.raises(DataError, match=missing):
        numbers(tmp_path / "both", "validation")


MIXED = [
    {"n": [1, None], "calls": [{"name": "f", "arguments": {"x": 1}}], "any": [1, {"b": None}]},
    {"n": [], "calls": [{"name": "g", "arguments": {"x": "s"}, "id": "7"}], "any": {"c": "d"}},
    {"n": [3], "calls": None, "any": None},
]


def test_json_columns_and_structs_of_datasets_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    text = datasets.Value("string")
    calls = datasets.List({"name": text, "arguments": datasets.Json(), "id": text})
    whole = datasets.List(datasets.Value("int64"))
    features = datasets.Features({"n": whole, "calls": calls, "any": datasets.Json()})
    saved = datasets.Dataset.from_list(MIXED, features=features)
    saved.save_to_disk(tmp_path / "saved")
    saved.to_parquet(tmp_path / "d.parquet")
    Hub(monkeypatch, saved)
    for path in (tmp_path / "saved", tmp_path / "d.parquet", "owner/name"):
        assert [row.values for row in read_rows(str(path))] == MIXED, path
    assert [row.values for row in good_rows("owner/name", streaming=True)] == MIXED


def test_file_that_changes_behind_a_slice_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "CHUNK_BYTES", 1000)
    file = tmp_path / "d.jsonl"
    file.write_text(lines(*range(3000)))
    rows = read_rows(str(file), "train[:200]")
    next(rows)
    with file.open("a") as stream:
        stream.write(lines("late"))
    with pytest.raises(DataError, match=r"d.jsonl: changed while it was being read; start again"):
        list(rows)
    # Also where the change breaks the file.
    files = [write(tmp_path / "two" / name, 1) for name in ("a.json", "b.json")]
    chunks = read_chunks(str(tmp_path / "two"))
    next(chunks)
    files[1].write_text('[{"a": 1},')
    with pytest.raises(DataError, match=r"b\.json: changed while it was being read"):
        list(chunks)


def test_unreadable_files_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "d.jsonl", 1)
    refuse = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(opening.os, "open", refuse)
    for read in (numbers, fingerprint):
        with pytest.raises(DataError, match=r"d\.jsonl: cannot be read: Permission denied"):
            read(str(file))


@pytest.fixture
def memory() -> Any:
    """Return fsspec's in-memory file system, emptied."""
    import fsspec

    file_system = fsspec.filesystem("memory")
    file_system.store.clear()
    file_system.pseudo_dirs[:] = [""]
    return file_system


def test_urls_are_read_like_files(memory: Any, tmp_path: Path) -> None:
    memory.pipe("/data/train-0.jsonl", lines(0, 1).encode())
    memory.pipe("/data/train-1.jsonl.gz", gzip.compress(lines(2).encode()))
    memory.pipe("/data/test.csv", b"a\n7\n")
    memory.pipe("/data/notes.md", b"none")
    memory.pipe("/one/d.parquet", write(tmp_path / "d.parquet", 10).read_bytes())
    assert numbers("memory://data") == [0, 1, 2]
    assert numbers("memory://data", "test") == [7]
    assert numbers("memory://data/train-*") == [0, 1, 2]
    assert numbers("memory://data/train-1.jsonl.gz") == [2]
    assert numbers("memory://data", "train[1:]", shard=(1, 2)) == [2]
    assert numbers("memory://one/d.parquet", "train[90%:]") == [9]
    (row,) = read_rows("memory://data/test.csv")
    assert str(row.origin) == "memory://data/test.csv:2"
    local = write(tmp_path / "d.jsonl", 3)
    assert numbers(f"file://{local}") == [0, 1, 2]
    assert numbers(f"file://{tmp_path}/*.jsonl") == [0, 1, 2]


def test_problems_of_urls_are_reported(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe("/test/test.jsonl", lines(0).encode())
    memory.pipe("/data/d.jsonl.gz", lines(0).encode())
    memory.pipe("/data/e.jsonl", b"")
    for url, message in (
        ("memory://data/no.jsonl", "memory://data/no.jsonl: no such file"),
        ("memory://data/*.csv", "no file matches"),
        ("memory://nothing", "cannot read a file without suffix"),
        ("memory://data/d.jsonl.gz", "is not gzip-compressed"),
        ("memory://data/e.jsonl", "e.jsonl: 0 rows"),
        ("memory://test", "no data file for split 'train'"),
        ("s4://bucket/d.jsonl", "Protocol not known: s4"),
    ):
        with pytest.raises(DataError, match=message.replace("*", r"\*")):
            numbers(url)
    lacks = mock.Mock(side_effect=ImportError("Install s3fs to access S3"))
    monkeypatch.setattr("fsspec.core.url_to_fs", lacks)
    with pytest.raises(DataError, match=r"Install s3fs to access S3\); pip install s3fs datasets$"):
        numbers("s3://bucket/d.jsonl")


def test_host_that_cannot_be_reached_is_named() -> None:
    for address, host in (
        ("http://127.0.0.1:1/d.jsonl?token=secret", "127.0.0.1:1"),
        ("https://user:word@example.invalid/d.jsonl", "example.invalid"),
    ):
        with pytest.raises(DataError, match=rf"d\.jsonl: host {host} cannot be reached") as caught:
            numbers(address)
        assert "secret" not in str(caught.value) and "word@" not in str(caught.value)


def test_a_change_is_detected_despite_the_listing_cache(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    info = type(memory).info

    def remembered(self: Any, path: str, **settings: Any) -> Any:
        return seen.setdefault(path, info(self, path, **settings))

    monkeypatch.setattr(type(memory), "info", remembered)
    monkeypatch.setattr(type(memory), "invalidate_cache", lambda self, path=None: seen.clear())
    memory.pipe("/data/d.jsonl", lines(0, 1).encode())
    before = fingerprint("memory://data/d.jsonl")
    chunks = read_chunks("memory://data/d.jsonl")
    next(chunks)
    memory.pipe("/data/d.jsonl", lines(0, 1, 2).encode())
    with pytest.raises(DataError, match=r"memory://data/d\.jsonl: changed while it was being read"):
        list(chunks)
    assert fingerprint("memory://data/d.jsonl") != before


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A fake hub: its data sets, and the requests it received."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: Any, num_shards: int = 1) -> None:
        self.rows, self.num_shards = rows, num_shards
        self.commit = self.given = COMMIT
        self.options: list[tuple[Any, ...]] = []
        self.configs = {"default": True}
        """name -> whether it is read if none is chosen"""
        monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", self.dataset_info)
        monkeypatch.setattr("datasets.load_dataset_builder", self.load_dataset_builder)

    def dataset_info(self, path: str, *, revision: str | None, timeout: float) -> Any:
        return SimpleNamespace(sha=self.commit)

    def load_dataset_builder(self, path: str, name: Any = None, *, revision: Any) -> Any:
        self.options.append((path, revision))
        name = name or next((each for each in self.configs if self.configs[each]), None)
        if name is None:
            listed = f"Please pick one among the available configs: {list(self.configs)}"
            raise ValueError(f"Config name is missing.\n{listed}\nExample of usage: ...")
        return SimpleNamespace(
            hash=self.given,
            config=SimpleNamespace(name=name),
            builder_configs=self.configs,
            download_and_prepare=lambda: None,
            as_dataset=self.as_dataset,
            as_streaming_dataset=self.as_streaming_dataset,
        )

    def as_dataset(self, split: str) -> Any:
        if split not in ("train", "test"):
            raise ValueError(f"Unknown split \"{split}\". Should be one of ['train'].\nMore")
        return self.rows

    def as_streaming_dataset(self, split: str) -> Any:
        return self.as_dataset(split).to_iterable_dataset(num_shards=self.num_shards)


def counted(num_rows: int) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"a": list(range(num_rows))})


@pytest.mark.parametrize(("streaming", "num_shards"), [(False, 1), (True, 1), (True, 4)])
def test_hub_data_set(monkeypatch: pytest.MonkeyPatch, streaming: bool, num_shards: int) -> None:
    hub = Hub(monkeypatch, counted(2500), num_shards)
    settings: dict[str, Any] = {"revision": "v1", "streaming": streaming}
    assert numbers("owner/name", **settings) == list(range(2500))
    assert hub.options == [("owner/name", "v1")]
    assert numbers("owner/name", "train[2400:]", **settings) == list(range(2400, 2500))
    cut = good_rows("owner/name", split="train[5:7]+test[:1]", **settings)
    places = [str(row.origin).removeprefix("owner/name ") for row in cut]
    assert places == ["(train):6", "(train):7", "(test):1"]
    held_out = numbers("owner/name", rows=(0, 100), **settings)
    for split, rows in (("train", (0, None)), ("train[:100]", (0, None)), ("train", (100, None))):
        how = settings | {"rows": rows}
        shards = [numbers("owner/name", split, shard=(i, 4), **how) for i in range(4)]
        expected = held_out if split != "train" else list(range(rows[0], 2500))
        assert sorted(row for shard in shards for row in shard) == expected
        assert {len(shard) for shard in shards} == {len(expected) // 4}
    halves = [good_rows("owner/name", shard=(i, 2), **settings) for i in range(2)]
    assert len({str(row.origin) for half in halves for row in half}) == 2500
    unknown = r"split 'dev', revision 'v1'\): Unknown split \"dev\"[^\n]*$"
    with pytest.raises(DataError, match=unknown):
        numbers("owner/name", "dev", **settings)
    if streaming:
        with pytest.raises(DataError, match="is unknown while it is streamed"):
            numbers("owner/name", "train[50%:]", **settings)
    else:
        assert numbers("owner/name", "train[50%:]", **settings) == list(range(1250, 2500))


def test_a_configuration_of_the_hub_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, counted(3))
    hub.configs = {"main": False, "socratic": False}
    with pytest.raises(DataError, match=r"has several configurations; choose .*'main', 'socratic'"):
        numbers("owner/name")
    assert numbers("owner/name", name="main") == [0, 1, 2]
    hub.configs, hub.options = {"main": True, "socratic": False}, []
    for name, requests in ((None, 1), ("mine", 1), ("main", 1), ("socratic", 2)):
        hub.options = []
        assert numbers("owner/name", name=name) == [0, 1, 2] and len(hub.options) == requests


def test_row_of_the_hub_above_the_limit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = [{"turns": [{"role": "user", "content": "x" * size}]} for size in (5, 500)]
    Hub(monkeypatch, datasets.Dataset.from_list(rows))
    for streaming, size in ((True, "504 or more bytes"), (False, "bytes")):
        (chunk,) = read_chunks("owner/name", max_row_bytes=100, streaming=streaming)
        good, bad = chunk.rows()
        assert isinstance(good, Row) and isinstance(bad, BadRow)
        assert bad.problem.startswith("owner/name (train):2 row of ")
        assert f"{size}; data.max_row_bytes is 100" in bad.reason


def test_an_unexpected_commit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, counted(3))
    assert resolved_revision("owner/name") == fingerprint("owner/name") == COMMIT
    # As where the network breaks off, and `datasets` takes what was downloaded before.
    hub.given = COMMIT[::-1]
    for revision in (None, "v1", COMMIT):
        with pytest.raises(DataError, match=f"received commit {COMMIT[::-1]} instead of {COMMIT}"):
            numbers("owner/name", revision=revision)


def unreachable(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    """Make the hub unreachable, with the error of its library without a network."""
    from huggingface_hub.errors import HTTPError

    def fail(*_: object, **__: object) -> None:
        raise error or HTTPError("[Errno -2] Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", fail)
    # The library retries for long, so it must not be called.
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *_, **__: pytest.fail("called"))


def test_hub_that_cannot_be_reached_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.errors

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    offline = huggingface_hub.errors.OfflineModeIsEnabled("offline mode is enabled")
    for error, cause in (
        (None, r"Name or service not known; no network\?"),
        (offline, "HF_HUB_OFFLINE is set"),
        (TimeoutError("timed out"), "timed out; no network"),
    ):
        unreachable(monkeypatch, error)
        start = r"^owner/name: no such file here, the Hugging Face hub cannot be reached .*"
        with pytest.raises(DataError, match=start + cause + r".*; give a local file.*HF_HOME"):
            numbers("owner/name")
        assert resolved_revision("owner/name") is None
        assert fingerprint("owner/name") == ""


@pytest.mark.parametrize("streaming", [False, True])
def test_a_downloaded_copy_is_read_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    from datasets.packaged_modules.json.json import Json

    files = [str(write(tmp_path / "rows.jsonl", 5))]
    data_files = {"train": files, "test": files}
    builder = Json(dataset_name="name", data_files=data_files, cache_dir=str(tmp_path / "made"))
    # Where `datasets` keeps what it has fetched from the hub.
    cache = tmp_path / "cache"
    builder.download_and_prepare(str(cache / "owner___name" / "default" / "0.0.0" / COMMIT))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    unreachable(monkeypatch)
    for revision in (None, "main", COMMIT):
        settings: dict[str, Any] = {"revision": revision, "streaming": streaming}
        assert numbers("owner/name", "train[3:]+test[:1]", **settings) == [3, 4, 0]
        assert resolved_revision("owner/name", revision) == COMMIT
    assert fingerprint("owner/name") == COMMIT
    assert resolved_revision("owner/name", "v1") is None
    with pytest.raises(DataError, match=f"is of commit {COMMIT}, revision 'v1'"):
        numbers("owner/name", revision="v1", streaming=streaming)


def test_revision_belongs_to_hub_data_sets(tmp_path: Path) -> None:
    for ask in (numbers, fingerprint, resolved_revision):
        with pytest.raises(DataError, match=r"a-/b: .*not a valid hub name: Repo id must"):
            ask("a-/b")
    with pytest.raises(DataError, match="revision 'v1' is given, but only a hub data set has one"):
        numbers(write(tmp_path / "d.jsonl", 1), revision="v1")
    assert fingerprint("owner/name", revision=COMMIT) == COMMIT
    assert resolved_revision("owner/name", COMMIT) == COMMIT
    assert resolved_revision(str(tmp_path / "d.jsonl")) is None
    assert resolved_revision("sample:lists.json") is None


def test_num_bytes_is_known_only_for_plain_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    assert text_bytes(str(tmp_path)) == 16
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n'))
    assert [text_bytes(path) for path in (str(tmp_path), "owner/name")] == [None, None]
