"""Speed and memory of tokenizing and masking, compared with TRL's SFT preparation.

Same rows, tokenizer, chat template and number of processes, alternating, medians. TRL is measured
from a loaded data set on, and without its truncation; ours starts with the file's bytes and ends
with the cache on disk. TRL needs `{% generation %}` in the template to find the answers; ours gets
the plain template. The tokens and the mask of every row are compared. Memory is the sum over all
processes, with shared memory counted once.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.figure import Figure
from benchmarks.peers import peer_python

ROOT = Path(__file__).resolve().parent.parent
NUM_ROWS = 20_000
NUM_PROC = 2
REPEATS = 3
LONG_TURNS = 4_000
LARGE_BYTES = 1 << 30
SAMPLE_SECONDS = 0.5
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}{{ '\\n' }}"
    "{% if message['role'] == 'assistant' %}BEGIN{{ message['content'] }}<|im_end|>END"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)
PLAIN = CHATML.replace("BEGIN", "").replace("END", "")
MARKED = CHATML.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")

OURS = """
import sys, time
from pathlib import Path
import transformers
from data_modules.tokens.encode import TokenSpec
from data_modules.tokens.prepare import hash_of, prepare_dataset
from data_modules.settings import DataConfig, DatasetConfig
from data_modules.template import ChatTemplate, MaskConfig
rows, tokenizer, template, cache, num_proc = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
dataset = DatasetConfig(path=rows)
data = DataConfig(datasets=[dataset], cache_dir=cache, num_proc=int(num_proc))
started = time.perf_counter()
chat = ChatTemplate.resolve(tokenizer, template, MaskConfig.of(data))
spec = TokenSpec(
    config=data, template=chat, sequence_len=4096, tokenizer_hash=hash_of(tokenizer)
)
prepared = prepare_dataset(dataset, spec)
print(time.perf_counter() - started)
with Path(cache, "tokens.txt").open("w") as file:
    for index in range(min(len(prepared.store), 20_000)):
        example = prepared.store.example(index, 0)
        print(*example.input_ids, "|", *(example.weights > 0).astype(int), file=file)
"""

LONG = """
import sys, time
import transformers
from data_modules.template import ChatTemplate
from data_modules.types import Conversation, Origin, Turn
tokenizer, template, num_turns = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
chat = ChatTemplate.resolve(tokenizer, template)
ask, say = Turn("user", "What is next, d\u00e9j\u00e0 vu?"), Turn("assistant", "This comes next.")
turns = (ask, say) * (int(num_turns) // 2)
started = time.perf_counter()
(encoded,) = chat.encode([Conversation(turns, Origin("long", 1))])
assert encoded.weights.any()
print(time.perf_counter() - started)
"""

TRLS = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
import datasets, transformers
from trl import SFTConfig, SFTTrainer
rows, tokenizer, template, out, num_proc = sys.argv[1:]
datasets.disable_caching()
tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
template = Path(template).read_text()
data = datasets.load_dataset("json", data_files=rows, split="train")
config = SFTConfig(out, assistant_only_loss=True, max_length=None, report_to=[], bf16=False,
                   dataset_num_proc=int(num_proc), use_cpu=True)
trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=template, completion_only_loss=None)
started = time.perf_counter()
done = SFTTrainer._prepare_dataset(trainer, data, tokenizer, config, False, None, "train")
print(time.perf_counter() - started)
with Path(out, "tokens.txt").open("w") as file:
    for row in done:
        mask = (int(label != -100) for label in row["labels"])
        print(*row["input_ids"], "|", *mask, file=file)
"""


SCALING = """
import sys, time
import transformers
from data_modules import BatchSpec, DataSpec, DataConfig, DatasetConfig, FinetuneDataModule
from data_modules import ModelSpec, PackingConfig, check_datasets
tokenizer, template, cache, *files = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
datasets = [DatasetConfig(path=file) for file in files]
data = DataConfig(datasets=datasets, cache_dir=cache, num_proc=1, chat_template=template,
                  sequence_len=1 << 16)
spec = DataSpec(config=data, packing=PackingConfig(), tokenizer=tokenizer, seed=1,
                model=ModelSpec(context_len=1 << 20), batching=BatchSpec())
module = FinetuneDataModule(spec)
started = time.process_time()
assert not check_datasets(data)
module.setup()
module.audit, module.plan, module.mixture_report(), module.fingerprints()
print(time.process_time() - started)
"""
"""checks, tokenization, audit and plan of some files; prints the CPU seconds"""
SCALES: dict[str, tuple[int, int, int, int]] = {
    "data_sets": (40, 200, 8, 0),
    "rows": (1, 20_000, 8, 0),
    "bytes_per_row": (1, 500, 2_000, 0),
    "columns": (1, 5_000, 8, 500),
}
"""files, rows of each, words of an answer and columns beside it; of the first kind the
first is doubled, of the second the second, and so on"""


def measure() -> list[Figure]:
    """Measure rows per second compared with TRL, the memory for 1 GiB, and how the cost scales."""
    python = peer_python("trl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = folder / "rows.jsonl"
        words = _words()
        _write_rows(rows, words, lambda count, _: count < NUM_ROWS)
        _save_tokenizer(folder / "tokenizer", words)
        (folder / "plain.jinja").write_text(PLAIN)
        (folder / "marked.jinja").write_text(MARKED)
        seconds: dict[str, list[float]] = {"ours": [], "trl": []}
        for turn in range(REPEATS):
            for who, program, code, template in (
                ("ours", sys.executable, OURS, "plain.jinja"),
                ("trl", str(python), TRLS, "marked.jinja"),
            ):
                out = folder / f"{who}-{turn}"
                out.mkdir()
                words_typed = (rows, folder / "tokenizer", folder / template, out, NUM_PROC)
                seconds[who].append(_run(program, code, *map(str, words_typed)))
        same = _share_alike(folder / "ours-0/tokens.txt", folder / "trl-0/tokens.txt")
        for who, taken in seconds.items():
            print(f"{who}: {NUM_ROWS / median(taken):,.0f} rows/s of {NUM_ROWS:,} rows")
        ratios = [
            Figure(figure=f"prepare/time_of_2x_{what}", value=_ratio(folder, words, place), bar=2.3)
            for place, what in enumerate(SCALES)
        ]
        doubled = _ratio_of_twice_the_turns(folder)
        large = folder / "large.jsonl"
        _write_rows(large, words, lambda _, size: size < LARGE_BYTES)
        peak = _peak_bytes(folder, large)
    return [
        Figure(
            figure="prepare/speedup_over_trl",
            value=median(seconds["trl"]) / median(seconds["ours"]),
            bar=2.5,
            better="higher",
        ),
        Figure(figure="prepare/time_of_2x_turns", value=doubled, bar=2.3),
        Figure(figure="prepare/rows_alike", value=same, bar=1.0, better="higher"),
        Figure(figure="prepare/peak_gb_of_1_gib", value=peak / 1e9, bar=1.5),
        *ratios,
    ]


def _ratio_of_twice_the_turns(folder: Path) -> float:
    """Return the time of a long row with twice as many turns, relative to the original."""
    words = (str(folder / "tokenizer"), str(folder / "plain.jinja"))
    taken: dict[int, list[float]] = {LONG_TURNS: [], 2 * LONG_TURNS: []}
    for _ in range(REPEATS):
        for turns, seconds in taken.items():
            seconds.append(_run(sys.executable, LONG, *words, str(turns)))
    short, long = (median(seconds) for seconds in taken.values())
    print(f"a row of {LONG_TURNS:,} turns: {short:.1f} s, of twice as many: {long:.1f} s")
    return long / short


def _words() -> list[str]:
    """Return 20,000 random words."""
    chance = random.Random(1)
    parts = [a + b for a in "bcdfghklmnprstvw" for b in "aeiou"]
    return ["".join(chance.choices(parts, k=chance.randint(1, 4))) for _ in range(20_000)]


def _write_rows(file: Path, words: list[str], goes_on: Callable[[int, int], bool]) -> None:
    """Write chats of one to three questions, their lengths lognormal, their words Zipfian."""
    chance = random.Random(2)
    # Drawing words costs more than tokenizing them, so texts are cut out of a single long one.
    weights = [1 / (rank + 10) for rank in range(len(words))]
    text = chance.choices(words, weights, k=1_000_000)

    def say(median_words: float) -> str:
        count = max(1, min(1200, int(chance.lognormvariate(0, 0.8) * median_words)))
        start = chance.randrange(len(text) - count)
        return " ".join(text[start : start + count]).capitalize() + "."

    with file.open("w") as stream:
        count = size = 0
        while goes_on(count, size):
            turns = [{"role": "system", "content": "Answer in short."}]
            for _ in range(chance.randint(1, 3)):
                turns.append({"role": "user", "content": say(25)})
                turns.append({"role": "assistant", "content": say(60)})
            size += stream.write(json.dumps({"messages": turns}) + "\n")
            count += 1


def _ratio(folder: Path, words: list[str], place: int) -> float:
    """Return the relative time if size number `place` of a scale is doubled."""
    what = list(SCALES)[place]
    sizes = SCALES[what]
    twice = (*sizes[:place], 2 * sizes[place], *sizes[place + 1 :])
    taken: list[list[float]] = [[], []]
    for turn in range(REPEATS):
        for number, size in enumerate((sizes, twice)):
            made = folder / f"{what}-{turn}-{number}"
            made.mkdir()
            files = _write_files(made, words, *size)
            typed = (folder / "tokenizer", folder / "plain.jinja", made / "cache", *files)
            taken[number].append(_run(sys.executable, SCALING, *map(str, typed)))
    once, doubled = map(min, taken)
    print(f"{what}: {once:.2f} s, twice as many {doubled:.2f} s")
    return doubled / once


def _write_files(
    folder: Path, words: list[str], num_files: int, num_rows: int, num_words: int, columns: int
) -> list[Path]:
    """Write files of similar size with distinct rows."""
    chance = random.Random(3)
    more = {f"column{number}": number for number in range(columns)}
    files = []
    for number in range(num_files):
        file = folder / f"rows{number}.jsonl"
        with file.open("w") as stream:
            for row in range(num_rows):
                answer = " ".join(chance.choices(words, k=num_words))
                asked = {"instruction": f"what is {number} and {row}?", "output": answer}
                stream.write(json.dumps(asked | more) + "\n")
        files.append(file)
    return files


def _save_tokenizer(folder: Path, words: list[str]) -> None:
    """Train a byte-level BPE of 16,000 tokens on the words, and save it."""
    import tokenizers
    import transformers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=16_000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((" " + word for word in words), trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)


def _environment() -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    return os.environ | offline | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "true"}


def _run(python: str, code: str, *words: str) -> float:
    """Return the seconds that a program prints in its last line."""
    done = subprocess.run(
        [python, "-c", code, *words], env=_environment(), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{Path(python).parts[-3]} ended with {done.returncode}:\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def _share_alike(ours: Path, trl: Path) -> float:
    """Return the share of rows with the same tokens and mask up to the last trained token.

    Ours ends there, since nothing depends on what follows.
    """
    num_rows = alike = 0
    with ours.open() as one, trl.open() as other:
        for mine, theirs in zip(one, other, strict=True):
            ids, mask = (part.split() for part in mine.split("|"))
            other_ids, other_mask = (part.split() for part in theirs.split("|"))
            length = len(other_mask) - other_mask[::-1].index("1")
            num_rows += 1
            alike += (ids, mask) == (other_ids[:length], other_mask[:length])
    return alike / num_rows


def _peak_bytes(folder: Path, rows: Path) -> int:
    """Return the peak memory of preparing `rows`, over all processes together."""
    cache = folder / "large"
    cache.mkdir()
    words = (rows, folder / "tokenizer", folder / "plain.jinja", cache, NUM_PROC)
    process = subprocess.Popen(
        [sys.executable, "-c", OURS, *map(str, words)],
        env=_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(_shared_once, _family(process.pid))))
        time.sleep(SAMPLE_SECONDS)
    if process.returncode != 0 or process.stdout is None:
        raise SystemExit(f"preparing {rows.name} ended with {process.returncode}")
    seconds = float(process.stdout.read().splitlines()[-1])
    print(f"{rows.stat().st_size / 1e9:.2f} GB in {seconds:.0f} s, at most {peak / 1e9:.2f} GB")
    return peak


def _family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [pid, *(one for child in children for one in _family(int(child)))]


def _shared_once(pid: int) -> int:
    """Return the memory of a process in bytes, shared pages divided by who shares them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
