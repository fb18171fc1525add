"""Verify a merged model against base + adapter: its logits, its chat template, its GGUF file."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from app.evaluation.conversation import check_served_tokens
from app.evaluation.evaluator import PREDICTIONS_FILE
from app.evaluation.generation import override_generation_config
from app.model.adapter import load_weighted_adapters, probe_logits, required_embedding_rows
from app.model.architecture import model_class
from app.model.base import ModelConfig
from app.model.experts import RoutingTrace
from app.model.gguf import (
    MODEL_FILE,
    OLLAMA_FILE,
    Q4_K_M,
    find_turn_texts,
    greedy_tokens,
    ollama_file,
)
from app.model.merging import BOUNDS, Difference, measure_difference
from app.model.quantization import QuantizationConfig
from app.model.tokenizer import build_tokenizer, resize_embeddings
from app.training.run_documents import read_lines
from common.errors import TrainingFault
from common.text import percent
from data_modules import Turn

if TYPE_CHECKING:
    from app.assembly.base import Tuned
    from app.config import MergeConfig
    from app.training.trainer import Environment

log = logging.getLogger(__name__)

CHECKED, _AS_TRAINED = "base + adapter", "the quantized base + adapter, as trained"
BY_SAME_EXPERTS = "base + adapter, by the same experts"
_PROBE_ROWS, _PROBE_TOKENS = 16, 128
"""number of compared rows, and their maximum length in tokens"""
_GREEDY_TOKENS = 16
"""tokens that the merged model generates for each prompt, and the GGUF file predicts"""
_MIN_AGREEMENT = {True: 0.9, "f16": 0.9, "q8_0": 0.9, Q4_K_M: 0.5}
"""share of them that must be equal, by type of the GGUF file's weights"""
TEXTS = (
    "The sea is calm tonight. The tide is full, the moon lies fair upon the straits.\n",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    '{"name": "loft", "numbers": [1, 2, 3], "is_true": true}\n',
)
"""texts to compare models on if there are no predictions of the run"""


def check_tokens(tuned: Tuned, folder: Path, *, is_fault: bool) -> None:
    """Check that training, chat and the exported tokenizer render conversations as equal tokens.

    Raises TrainingFault if they differ, or logs a warning without `is_fault`.
    """
    exported = build_tokenizer(ModelConfig(path=str(folder)))
    if problems := check_served_tokens(tuned.template, exported):
        if is_fault:
            listed = "\n".join(problems)
            raise TrainingFault(
                f"{folder}: its tokenizer renders prompts as other tokens than training did; "
                f"merge.verify=false merges it anyway\n{listed}"
            )
        for problem in problems:
            log.warning("chat template: %s", problem)
        return
    print("chat template verified: training, chat and the exported tokenizer give equal tokens")


def verify(
    config: MergeConfig,
    tuned: Tuned,
    env: Environment,
    adapters: Sequence[tuple[Path, float]],
    folder: Path,
    dtype: torch.dtype,
) -> dict[str, Difference]:
    """Compare the merged logits with those of base + adapter; raise TrainingFault if they differ.

    Only one model at a time is in memory. With merge.onto=original, the base is not quantized; the
    difference to the quantized base, which the adapter was trained on, is measured but not bounded.
    If rounding changes which experts a mixture chooses, no bound on rounding applies, and base +
    adapter is compared again with the experts that the merged model chooses.
    """
    rows = list(_probe_rows(config, tuned))
    dtype_name = str(dtype).removeprefix("torch.")
    merged_routing, bounded = RoutingTrace(), CHECKED
    merged = _logits(load_merged(tuned, folder, env), rows, env, merged_routing)
    references = {CHECKED: config.merge.onto == "dequantized"}
    if tuned.base.quantization.method != "none" and config.merge.onto == "original":
        references[_AS_TRAINED] = True
    differences = {}
    for name, is_quantized in references.items():
        model = _load_unmerged(tuned, adapters, env, is_quantized=is_quantized)
        routing = RoutingTrace()
        differences[name] = measure_difference(_logits(model, rows, env, routing), merged)
        print(f"merged vs {name}: {differences[name]}")
        num_changed, total = routing.count_changed(merged_routing)
        if name == CHECKED and num_changed:
            bounded = BY_SAME_EXPERTS
            logits = _logits(model, rows, env, RoutingTrace(replay=merged_routing))
            differences[bounded] = measure_difference(logits, merged)
            hint = "" if dtype == torch.float32 else "; merge.dtype=fp32 changes fewer"
            print(
                f"experts: rounding to {dtype_name} changes {num_changed:,} of {total:,} choices "
                f"({percent(num_changed / total)}){hint}\n"
                f"merged vs {bounded}: {differences[bounded]}"
            )
        del model
    method = tuned.base.quantization.method
    rounding = method if references[CHECKED] and method in ("int8", "fp8") else dtype_name
    bound = BOUNDS[rounding]
    if not differences[bounded].is_within(bound):
        raise TrainingFault(
            f"{folder}: the merged model differs from base + adapter: {differences[bounded]}; "
            f"rounding to {rounding} explains only {bound}"
        )
    print(f"merge verified: within {bound}{', by the same experts' * (bounded != CHECKED)}")
    return differences


def load_merged(tuned: Tuned, folder: Path, env: Environment) -> Any:
    """Load the merged model with transformers alone, in fp32."""
    kind = model_class(tuned.base.architecture)
    return kind.from_pretrained(folder, dtype=torch.float32).to(env.rank_device).eval()


def _load_unmerged(
    tuned: Tuned, adapters: Sequence[tuple[Path, float]], env: Environment, *, is_quantized: bool
) -> Any:
    base = tuned.base
    if not is_quantized or base.quantization.method == "none":
        base = replace(base, dtype=torch.float32, quantization=QuantizationConfig())
    model = base.load()
    rows = model.get_input_embeddings().num_embeddings
    needed = max(required_embedding_rows(model, folder) for folder, _ in adapters)
    resize_embeddings(model, range(rows, needed))
    return load_weighted_adapters(model, adapters).to(env.rank_device)


def _logits(
    model: Any, rows: Sequence[dict[str, list[int]]], env: Environment, routing: RoutingTrace
) -> list[Tensor]:
    # Unquantized weights compute in fp32; quantized ones as in training.
    is_fp32 = all(weight.dtype == torch.float32 for weight in model.parameters())
    logits = []
    with contextlib.nullcontext() if is_fp32 else env.autocast(), routing:
        for row in rows:
            inputs = {name: torch.tensor([ids], device=model.device) for name, ids in row.items()}
            logits.append(probe_logits(model, inputs).cpu())
    return logits


def _probe_rows(config: MergeConfig, tuned: Tuned) -> Iterator[dict[str, list[int]]]:
    """Yield model inputs to compare models on: prompts and references of the run, or `TEXTS`."""
    pairs = [(text, text) for text in TEXTS]
    predictions = None if config.run is None else Path(config.run) / PREDICTIONS_FILE
    if predictions is not None and predictions.is_file():
        lines = [line for line in read_lines(predictions) if line.keys() >= {"prompt", "reference"}]
        spread = lines[:: max(1, len(lines) // _PROBE_ROWS)][:_PROBE_ROWS]
        pairs = [(str(line["prompt"]), str(line["reference"])) for line in spread] or pairs
    start = tuned.base.spec.decoder_start_token_id
    encode = tuned.tokenizer.encode
    for prompt, answer in pairs:
        if start is None:
            ids = encode(prompt + answer, add_special_tokens=False)[:_PROBE_TOKENS]
            row = {"input_ids": ids}
        else:
            decoder_ids = [start, *encode(answer)][:_PROBE_TOKENS]
            row = {"input_ids": encode(prompt)[:_PROBE_TOKENS], "decoder_input_ids": decoder_ids}
        if row["input_ids"]:
            yield row


def check_gguf(config: MergeConfig, tuned: Tuned, folder: Path, file: Path) -> None:
    """Compare greedy tokens of a GGUF file with those of the merged model, on the CPU.

    Raises TrainingFault if they differ; prints why if they cannot be compared.
    """
    reason = None
    if find_spec("llama_cpp") is None:
        reason = "llama-cpp-python is not installed, which runs it"
    if tuned.base.architecture.is_encoder_decoder:
        reason = "llama-cpp-python does not generate with encoder-decoder models"
    if reason is not None:
        print(f"{file.name}: written; not compared: {reason}")
        return
    kind = model_class(tuned.base.architecture)
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [row["input_ids"][: _PROBE_TOKENS // 2] for row in _probe_rows(config, tuned)][:4]
    rows = []
    pad = tuned.tokenizer.pad_token_id
    with torch.no_grad(), override_generation_config(model, [], pad, _GREEDY_TOKENS):
        for prompt in prompts:
            ids = torch.tensor([prompt])
            answer = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
            rows.append(answer[0].tolist())
    theirs = greedy_tokens(file, rows, _GREEDY_TOKENS)
    pairs = [
        pair
        for row, predicted in zip(rows, theirs, strict=True)
        for pair in zip(row[-_GREEDY_TOKENS:], predicted, strict=True)
    ]
    agreement = sum(own == other for own, other in pairs) / len(pairs)
    least = _MIN_AGREEMENT[config.merge.gguf]
    if agreement < least:
        raise TrainingFault(
            f"{file}: llama.cpp generates other greedy tokens than the merged model: "
            f"{percent(agreement)} of {len(pairs)} agree, expected {percent(least, 0)}"
        )
    print(f"{file.name}: greedy tokens of llama.cpp agree on {percent(agreement)} of {len(pairs)}")


def render_ollama_file(tuned: Tuned, folder: Path) -> str:
    """Return the Modelfile of a merged model, with its chat template and stop tokens.

    Prints what Ollama does if its template language cannot express the chat template.
    """
    exported = build_tokenizer(ModelConfig(path=str(folder)))

    def render(chat: Sequence[tuple[str, str]]) -> str | None:
        messages = tuned.template.messages([Turn(role, content) for role, content in chat])
        try:
            text = exported.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except TemplateError:
            return None
        return str(text)

    texts = find_turn_texts(render)
    if texts is None:
        print(
            f"{OLLAMA_FILE}: no TEMPLATE, which cannot express this chat template turn by turn; "
            f"Ollama takes the one in {MODEL_FILE} if it knows it"
        )
    bos = exported.bos_token if exported("x")["input_ids"][:1] == [exported.bos_token_id] else None
    return ollama_file(texts, bos, map(exported.decode, sorted(tuned.stop_ids)))
