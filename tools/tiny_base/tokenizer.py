"""Build the tokenizer and the architecture of the tiny base model.

The words that the skills copy (names, cities, jobs) are made rare in what the tokenizer learns
from, so that each stays in several pieces, as words of a real model's rare names do: copying one
then is following it piece by piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from tools.tiny_base.corpus import WRITERS, Document, words

if TYPE_CHECKING:
    import tokenizers

SHARES = {"list": 0.6, "extract": 0.4}
"""skill -> its share of the documents"""
VOCAB_SIZE = 768
NUM_DOCUMENTS = 20_000
WORD_COPIES = 150
MIN_PIECES_PER_WORD = 3.0
PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
ROLES = "system\nuser\nassistant\n"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 352,
    "max_position_embeddings": 1024,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}

TOKENIZER_CONFIG = {
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": END,
    "model_max_length": 1024,
    "pad_token": PAD,
    "padding_side": "right",
    "tokenizer_class": "PreTrainedTokenizerFast",
}


def skills_corpus(num_documents: int, seed: int = 0) -> Iterator[Document]:
    """Yield documents of all skills by their SHARES; deterministic for a seed."""
    rng = Random(seed)
    for _ in range(num_documents):
        skill = rng.choices(tuple(SHARES), tuple(SHARES.values()))[0]
        yield {"segments": WRITERS[skill](rng)}


def write_base(folder: Path) -> None:
    """Write the tokenizer, its chat template and the model's `config.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    check_pieces(tokenizer)
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(TOKENIZER_CONFIG, indent=2),
        "config.json": json.dumps(MODEL_CONFIG, indent=2),
    }
    for name, text in files.items():
        (folder / name).write_text(text + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def build_tokenizer() -> tokenizers.Tokenizer:
    """Train a byte-level BPE on the corpus, with the copied words made rare."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            # A capital starts a piece of its own, so that a name is the same pieces at the start of
            # a line and after a space.
            pre_tokenizers.Split(tokenizers.Regex("(?=[A-Z])"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        show_progress=False,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_texts_with_rare_words(), trainer)
    return tokenizer


def check_pieces(tokenizer: tokenizers.Tokenizer) -> None:
    """Raise ValueError if the words to be copied have too few pieces each."""
    for kind in ("names", "cities", "jobs"):
        copied = words()[kind]
        pieces = sum(len(tokenizer.encode(word).ids) for word in copied) / len(copied)
        if pieces < MIN_PIECES_PER_WORD:
            raise ValueError(
                f"{kind} have {pieces:.2f} pieces on average, fewer than "
                f"{MIN_PIECES_PER_WORD}: lower WORD_COPIES (now {WORD_COPIES})."
            )


def _texts_with_rare_words() -> Iterator[str]:
    names, cities, jobs = (words()[kind] for kind in ("names", "cities", "jobs"))
    rare = re.compile("|".join(sorted((*names, *cities, *jobs), key=len, reverse=True)))
    for document in skills_corpus(num_documents=NUM_DOCUMENTS):
        text = "".join(segment["text"] for segment in document["segments"])
        yield from filter(None, rare.split(text))
    for _ in range(WORD_COPIES):
        yield ROLES
        yield from (*names, *cities)
        yield from (f" {job}" for job in jobs)
