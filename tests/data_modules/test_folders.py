"""Which files of a folder or a pattern are read: by split, card and shard, without what is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import DataError
from data_modules.source import find_files, notes_on_files, read_rows
from data_modules.source.locating import SPLIT_WORDS, missing_shards, split_word


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"a": name}) + "\n")
    return folder


def read(path: Path, split: str = "train", name: str | None = None) -> list[str]:
    root = path if path.is_dir() else path.parent
    while "*" in str(root):
        root = root.parent
    return [
        str(Path(f).relative_to(root)) for f in map(str, find_files(str(path), split, None, name))
    ]


def refusal(path: Path, split: str = "train", name: str | None = None) -> str:
    with pytest.raises(DataError) as caught:
        find_files(str(path), split, None, name)
    return str(caught.value)


SHAPES = ("{}.jsonl", "my_{}.jsonl", "my-{}-2.jsonl", "a.{}.jsonl", "{}/a.jsonl", "b {}.csv")


@pytest.mark.parametrize("shape", SHAPES)
def test_every_word_for_a_split_is_known_in_every_place(shape: str, tmp_path: Path) -> None:
    for word, kind in SPLIT_WORDS.items():
        for written in (word, word.upper(), word.capitalize()):
            assert split_word(shape.format(written)) == word
        beside = "my_train.jsonl" if kind != "train" else "my_test.jsonl"
        in_folders = "/" in shape
        names = [shape.format(word), f"x/{beside}" if in_folders else beside]
        fill(tmp_path / word, *names)
        trained = [n for n in names if SPLIT_WORDS[str(split_word(n))] == "train"]
        for pattern in ["**/*.*"] if in_folders else ["", "*", "*.*"]:
            path = tmp_path / word / pattern
            assert read(path) == trained, pattern
            assert read(path, word) == [names[0]], pattern
            (note,) = notes_on_files(str(path))
            assert note.startswith("left out 1 files of other splits: ")
    names = ["contest", "developer", "evaluate", "latest", "testimonials", "training2day", "valley"]
    found = [split_word(shape.format(name)) for name in names]
    assert found == [None] * 5 + ["training", None]


def test_a_pattern_that_names_a_split_is_read_as_typed(tmp_path: Path) -> None:
    fill(tmp_path, "a_test.jsonl", "a.jsonl", "b.jsonl", "dev/c.jsonl")
    assert read(tmp_path / "*_test.jsonl") == ["a_test.jsonl"]
    assert read(tmp_path / "dev" / "*.jsonl") == ["c.jsonl"]
    assert read(tmp_path / "*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert read(tmp_path / "*_t*.jsonl") == ["a_test.jsonl"]
    assert "found a.jsonl, a_test.jsonl, b.jsonl, dev, with the splits test; give" in refusal(
        tmp_path
    )


ASIDE = [
    *(".a.jsonl", "._a.jsonl", ".~lock.a.jsonl#", "a.jsonl~", "~$a.csv", "#a.jsonl#"),
    *(".#a.jsonl", ".a.jsonl.swp", ".ipynb_checkpoints/a.jsonl", "__MACOSX/._a.jsonl"),
]


@pytest.mark.parametrize("layout", ["{}", "data/{}", "train/{}"])
def test_hidden_lock_and_backup_files_are_left_out_and_counted(layout: str, tmp_path: Path) -> None:
    for number, name in enumerate(ASIDE):
        folder = tmp_path / f"n{number}"
        fill(folder, layout.format("a.jsonl"), layout.format(name), ".gitattributes", "README.md")
        for path in (folder, folder / layout.format("*"), folder / "**" / "*.jsonl"):
            assert [Path(file).name for file in read(path)] == ["a.jsonl"]
        if "/" not in name:
            inner = f"{'data/' * ('data' in layout)}{name}"
            said = f"left out 1 hidden, lock or backup files: ['{inner}']"
            assert notes_on_files(str(folder)) == [said]
    (values,) = [values for values, _ in read_rows(str(tmp_path / "n0"))]
    assert values["a"] == layout.format("a.jsonl")


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        (["train-00000-of-00004.parquet", "train-00002-of-00004.parquet"],
         ["train-00001-of-00004.parquet", "train-00003-of-00004.parquet"]),
        (["c4-train.00001-of-00003.json.gz", "c4-train.00002-of-00003.json.gz"],
         ["c4-train.00000-of-00003.json.gz"]),
        (["a_1_of_3.csv", "a_3_of_3.csv"], ["a_2_of_3.csv"]),
        (["train-00001-of-00002-0a1b.parquet"], ["train-00000-of-00002-0a1b.parquet"]),
        (["x-00000-of-00003-aa.csv", "x-00001-of-00003-bb.csv"], ["x-00002-of-00003*"]),
        (["best_1_of_4.csv"], []),
        (["a-00001-of-00002.csv", "a-00002-of-00002.csv"], []),
        (["a-00000-of-00001.csv", "b-00000-of-00002.csv", "b-00001-of-00002.csv"], []),
    ],
)  # fmt: skip
def test_missing_shards_are_named(there: list[str], missing: list[str], tmp_path: Path) -> None:
    assert list(missing_shards([f"en/{name}" for name in there])) == [f"en/{n}" for n in missing]
    assert len(list(missing_shards(["a-00000-of-99999999999999.csv"]))) < 2000  # found at once
    fill(tmp_path / "data", *there)
    for path in (tmp_path, tmp_path / "data", tmp_path / "data" / "*", tmp_path / "data" / "*.*"):
        if not missing:
            assert len(read(path)) == len(there)
            continue
        problem = refusal(path)
        assert f"{len(missing)} shards are missing" in problem and missing[0] in problem
    assert len(read(tmp_path / "data" / there[0])) == 1
    exact = tmp_path / "data" / there[0].replace("of", "o[f]")
    assert len(read(exact)) == 1, "the pattern asks for no more"


def test_the_layouts_of_the_hub_are_read(tmp_path: Path) -> None:
    two = [f"data/{s}-0000{n}-of-00002.parquet" for s in ("test", "train") for n in range(2)]
    fill(tmp_path / "a", *two, "README.md", "dataset_infos.json")
    assert read(tmp_path / "a") == two[2:] and read(tmp_path / "a", "test") == two[:2]
    fill(tmp_path / "b", "data/train_sft-00000-of-00001.parquet", "data/gen-00000-of-00001.parquet")
    assert read(tmp_path / "b", "train_sft") == ["data/train_sft-00000-of-00001.parquet"]
    assert "with the splits gen, train_sft" in refusal(tmp_path / "b")
    fill(tmp_path / "c", "en/train/0.jsonl", "fr/train/0.jsonl", "fr/test/0.jsonl")
    assert read(tmp_path / "c") == ["en/train/0.jsonl", "fr/train/0.jsonl"]
    fill(tmp_path / "d", "a/x.jsonl", "b/y.jsonl", ".git/z.jsonl", "1/2/3/4/deep.jsonl")
    assert read(tmp_path / "d") == ["a/x.jsonl", "b/y.jsonl"]
    fill(tmp_path / "e", "x.jsonl", "old/y.jsonl")
    assert read(tmp_path / "e") == ["x.jsonl"]


CONFIGS: list[tuple[Any, str | None, str, list[str]]] = [
    ([{"config_name": "default", "data_files": "a.jsonl"}], None, "train", ["a.jsonl"]),
    ([{"config_name": "x", "data_files": ["b.jsonl", "a.*"]}], "y", "train",
     ["b.jsonl", "a.jsonl"]),
    ([{"data_files": [{"split": "train", "path": ["in/*.jsonl"]}]}], None, "train",
     ["in/c.jsonl", "in/d_test.jsonl"]),
    ([{"data_files": [{"split": "train", "path": "a.jsonl"}, {"split": "dev", "path": "b.jsonl"}]}],
     None, "validation", ["b.jsonl"]),
    ([{"data_files": {"train": "**/c.jsonl"}}], None, "train", ["in/c.jsonl"]),
    ([{"config_name": "u", "data_files": "a.jsonl"}, {"config_name": "v", "data_files": "b.jsonl"}],
     "v", "train", ["b.jsonl"]),
    ([{"config_name": "x"}], None, "train", ["a.jsonl", "b.jsonl"]),
    ([{"config_name": "u", "data_files": "a.jsonl"},
      {"config_name": "v", "data_files": "b.jsonl", "default": True}], None, "train", ["b.jsonl"]),
    ([{"config_name": "u", "data_files": "a.jsonl"},
      {"config_name": "default", "data_files": "b.jsonl"}], "z", "train", ["b.jsonl"]),
    ([{"config_name": "u", "data_dir": "in"}], None, "test", ["in/d_test.jsonl"]),
    ([{"config_name": "u", "data_dir": "./in", "data_files": "*.jsonl"}], None, "train",
     ["in/c.jsonl", "in/d_test.jsonl"]),
]  # fmt: skip


def card(folder: Path, configs: Any) -> Path:
    fill(folder, "a.jsonl", "b.jsonl", "in/c.jsonl", "in/d_test.jsonl", "in/.c.jsonl")
    (folder / "README.md").write_text(
        f"---\nlicense: mit\nconfigs: {json.dumps(configs)}\n---\n# x\n"
    )
    return folder


@pytest.mark.parametrize(("configs", "name", "split", "files"), CONFIGS)
def test_the_files_that_a_card_declares_are_read(
    configs: Any, name: str | None, split: str, files: list[str], tmp_path: Path
) -> None:
    folder = card(tmp_path, configs)
    assert read(folder, split, name) == files


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ([{"config_name": "u", "data_files": "a.jsonl"}, {"config_name": "v", "data_files": "b"}],
         "declares several configurations, ['u', 'v']; choose one by its name"),
        ([{"data_files": [{"split": "test", "path": "a.jsonl"}]}],
         "declares no split 'train'; it has ['test']"),
        ([{"data_files": "gone.jsonl"}], "declares 'gone.jsonl' for split 'train', and no such"),
        *(([{"data_files": path}], "does not lead into this folder")
          for path in ("../a.jsonl", "/etc/*", "https://x.org/a.jsonl", 7)),
        ([{"data_dir": "gone"}], "declares the folder 'gone', which is missing"),
        ([{"data_files": [{"path": "a.jsonl"}]}], "its configs cannot be read"),
        (7, "its configs cannot be read"),
        (["x"], "its configs are not a list of mappings"),
    ],
)  # fmt: skip
def test_a_card_that_cannot_be_followed_is_refused(
    configs: Any, message: str, tmp_path: Path
) -> None:
    problem = refusal(card(tmp_path, configs))
    assert f"{tmp_path / 'README.md'}: " in problem and message in problem


def test_a_card_without_files_changes_nothing_and_a_broken_one_is_named(tmp_path: Path) -> None:
    fill(tmp_path, "a.jsonl")
    for text in ("# a page\n", "---\nlicense: mit\n---\n", "---"):
        (tmp_path / "README.md").write_text(text)
        assert read(tmp_path) == ["a.jsonl"]
    for text in ("configs: [\n", "configs: " + "[" * 500 + "\n", "configs: *x\n"):
        (tmp_path / "README.md").write_text(f"---\n{text}---\n")
        assert "README.md: its configs cannot be read" in refusal(tmp_path)


def test_folders_behind_urls_are_read_alike() -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.store.clear()
    names = ("my_train.jsonl", "my_test.jsonl", ".a.jsonl")
    for name in (*names, "hub/data/train-00000-of-00002.jsonl", "card/a.jsonl", "card/b.jsonl"):
        memory.pipe(f"/rows/{name}", b'{"a": 1}\n')
    for path in ("memory://rows", "memory://rows/*"):
        assert [file.name for file in find_files(path)] == ["my_train.jsonl"]
    assert len(notes_on_files("memory://rows")) == 2
    with pytest.raises(DataError, match=r"1 shards are missing: \['data/train-00001-of-00002"):
        find_files("memory://rows/hub")
    memory.pipe("/rows/card/README.md", b"---\nconfigs:\n- data_files: b.jsonl\n---\n")
    assert [file.name for file in find_files("memory://rows/card")] == ["b.jsonl"]
    memory.store.clear()
