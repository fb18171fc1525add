"""Speed of likelihoods and generation, compared with lm-evaluation-harness and `generate`.

A random Llama of 7M weights with a vocabulary of 16,384, in fp32 on one thread; CPU seconds, which
other programs hardly change. Likelihoods: the same texts, zero-shot as for ARC and LAMBADA and
five-shot as for MMLU, each round in separate processes, alternating, from the texts to the numbers.
Answers: the same prompts and batch sizes, in one process, alternating with a padded `generate`
loop.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figure import Figure
from benchmarks.peers import peer_python
from tools.tiny_base.corpus import WORDS_FILE

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "data_modules" / "samples"
ROUNDS = 3
MAX_LEN = 1024
HARNESS_BATCH = 1
"""rows, the default; 4, 16 and 64 are slower on a CPU"""
NUM_PROMPTS, ANSWER_BATCH, ANSWER_TOKENS = 96, 16, 64

OURS = """
import json, sys, time
import torch, transformers
from app.evaluation.likelihood import encode_pair, score
folder, asked, out, max_len, _ = sys.argv[1:]
torch.set_num_threads(1)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
seconds, found = {}, {}
for name, pairs in json.load(open(asked)).items():
    started = time.process_time()
    requests = [encode_pair(tokenizer, *pair) for pair in pairs]
    batches = score(model, requests, max_len=int(max_len), batch_tokens=None)
    ours = dict(one for batch in batches for one in batch)
    found[name] = [[ours[n].logprob, ours[n].is_greedy] for n in range(len(pairs))]
    seconds[name] = time.process_time() - started
json.dump([seconds, found], open(out, "w"))
"""
THEIRS = """
import json, sys, time
import torch, transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
folder, asked, out, max_len, batch_size = sys.argv[1:]
torch.set_num_threads(1)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
language_model = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=int(batch_size),
                      max_length=int(max_len), device="cpu")
seconds, found = {}, {}
for name, pairs in json.load(open(asked)).items():
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=tuple(pair), idx=n)
        for n, pair in enumerate(pairs)
    ]
    started = time.process_time()
    found[name] = language_model.loglikelihood(requests, disable_tqdm=True)
    seconds[name] = time.process_time() - started
json.dump([seconds, found], open(out, "w"))
"""


def measure() -> list[Figure]:
    """Measure both speeds, and check that numbers and answers are equal."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _save_model(folder / "model")
        figures = _measure_answers(folder / "model")
        try:
            python = peer_python("lm_eval")
        except SystemExit as error:
            print(f"evaluate: likelihoods are skipped: {error}")
            return figures
        return _measure_likelihoods(folder, python) + figures


def _measure_likelihoods(folder: Path, python: Path) -> list[Figure]:
    asked = folder / "asked.json"
    asked.write_text(json.dumps({"zero_shot": _zero_shot(), "few_shot": _few_shot()}))
    sides = {"ours": (sys.executable, OURS), "lm_eval": (str(python), THEIRS)}
    seconds: dict[str, list[dict[str, float]]] = {"ours": [], "lm_eval": []}
    found: dict[str, dict[str, list[list[Any]]]] = {}
    for _ in range(ROUNDS):
        for who, (program, code) in sides.items():
            out = folder / f"{who}.json"
            words = (folder / "model", asked, out, MAX_LEN, HARNESS_BATCH)
            _run(program, code, *map(str, words))
            taken, found[who] = json.loads(out.read_text())
            seconds[who].append(taken)
    figures = []
    for name in seconds["ours"][0]:
        ours, theirs = (median(one[name] for one in seconds[who]) for who in sides)
        rows = list(zip(found["ours"][name], found["lm_eval"][name], strict=True))
        apart = max(abs(one[0] - other[0]) / abs(other[0]) for one, other in rows)
        alike = sum(one[1] == other[1] for one, other in rows) / len(rows)
        print(f"{name}: {len(rows)} likelihoods in {ours:.1f} s, lm-eval {theirs:.1f} s")
        figures += [
            Figure(
                figure=f"evaluate/{name}_over_lm_eval",
                value=theirs / ours,
                bar=1.5,
                better="higher",
            ),
            Figure(figure=f"evaluate/{name}_apart", value=apart, bar=1e-5),
            Figure(figure=f"evaluate/{name}_greedy", value=alike, bar=1.0, better="higher"),
        ]
    return figures


def _measure_answers(folder: Path) -> list[Figure]:
    """Measure our generation compared with `generate` on rows in order."""
    import torch
    import transformers

    from app.evaluation.generation import EvaluationConfig, answer_batches
    from common.errors import Origin
    from data_modules import Prompt

    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = [_words(chance, 4, 120) for chance in [random.Random(3)] for _ in range(NUM_PROMPTS)]
    # A random model rarely produces the single stop token, so one token in 24 is one.
    stops = set(range(0, model.config.vocab_size, 24))
    config = EvaluationConfig(max_new_tokens=ANSWER_TOKENS, batch_size=ANSWER_BATCH)

    def plain() -> list[list[int]]:
        found = []
        for start in range(0, len(texts), ANSWER_BATCH):
            batch = tokenizer(
                texts[start : start + ANSWER_BATCH], padding=True, return_tensors="pt"
            )
            with torch.no_grad():
                rows = model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    max_new_tokens=ANSWER_TOKENS,
                    do_sample=False,
                    eos_token_id=sorted(stops),
                    pad_token_id=tokenizer.pad_token_id,
                )
            found += rows[:, batch["input_ids"].shape[1] :].tolist()
        return found

    def ours() -> list[str]:
        prompts = [
            Prompt(tokenizer.encode(text), "", Origin("", n)) for n, text in enumerate(texts)
        ]
        found = dict(
            one
            for batch in answer_batches(model, tokenizer, prompts, stops, config)
            for one in batch
        )
        return [found[number].text for number in range(len(texts))]

    def text_of(tokens: list[int]) -> str:
        end = next((n for n, token in enumerate(tokens) if token in stops), None)
        return str(tokenizer.decode(tokens[:end], skip_special_tokens=True))

    seconds: dict[str, list[float]] = {"ours": [], "generate": []}
    for _ in range(ROUNDS):
        started = time.process_time()
        answers = ours()
        seconds["ours"].append(time.process_time() - started)
        started = time.process_time()
        expected = plain()
        seconds["generate"].append(time.process_time() - started)
    lengths = [next((n for n, t in enumerate(row) if t in stops), len(row)) for row in expected]
    alike = sum(text_of(row) == text for row, text in zip(expected, answers, strict=True))
    mine, theirs = (median(taken) for taken in seconds.values())
    print(
        f"{len(texts)} answers of {sum(lengths) / len(texts):.0f} tokens: {mine:.1f} s, "
        f"generate {theirs:.1f} s"
    )
    return [
        Figure(
            figure="evaluate/answers_over_generate", value=theirs / mine, bar=2.0, better="higher"
        ),
        Figure(figure="evaluate/answers_alike", value=alike / len(texts), bar=1.0, better="higher"),
    ]


def _zero_shot() -> list[tuple[str, str]]:
    """Return questions with four choices, and texts with their last word."""
    chance = random.Random(1)
    found = []
    for _ in range(30):
        question = f"Question: {_words(chance, 8, 40)}?\nAnswer:"
        found += [(question, f" {_words(chance, 1, 8)}") for _ in range(4)]
    for _ in range(30):
        found.append((_words(chance, 50, 90), f" {_words(chance, 1, 1)}"))
    return found


def _few_shot() -> list[tuple[str, str]]:
    """Return questions of four subjects, each after five examples, answered by a letter."""
    chance = random.Random(2)

    def question() -> str:
        choices = "".join(f"\n{letter}. {_words(chance, 1, 4)}" for letter in "ABCD")
        return f"{_words(chance, 6, 20)}?{choices}\nAnswer:"

    found = []
    for _ in range(4):
        examples = "".join(f"{question()} {chance.choice('ABCD')}\n\n" for _ in range(5))
        for _ in range(4):
            context = examples + question()
            found += [(context, f" {letter}") for letter in "ABCD"]
    return found


def _words(chance: random.Random, least: int, most: int) -> str:
    """Return random words of the shipped samples."""
    known = json.loads(WORDS_FILE.read_text(encoding="utf-8"))
    return " ".join(chance.choices(known["names"] + known["cities"], k=chance.randint(least, most)))


def _save_model(folder: Path) -> None:
    """Save a random Llama with the tokenizer of the shipped base."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16_384,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(SAMPLES / "tiny_base").save_pretrained(folder)


def _run(python: str, code: str, *words: str) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, "-c", code, *words], env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{python} ended with {done.returncode}:\n{done.stderr}")
