"""Is a merged model what it was made of: its logits, its tokens, and its GGUF file's."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.evaluation.evaluator import PREDICTIONS_FILE
from app.model.gguf import greedy_tokens
from app.process.errors import TrainingFault

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from app.assembly.tuned import Tuned
    from app.config import MergeConfig
    from app.model.experts import RoutingTrace
    from app.model.merging import Difference
    from app.training.trainer import Environment

log = logging.getLogger(__name__)

CHECKED, AS_TRAINED = "base + adapter", "the quantized base + adapter, as trained"
BY_SAME_EXPERTS = "base + adapter, by the same experts"
FEWER = "; merge.dtype=fp32 changes fewer"
PROBE_ROWS, PROBE_TOKENS = 16, 128
GREEDY_TOKENS, LEAST_SAME = 16, 0.9
"""tokens that a GGUF file and the merged model go on with, and how many must be the same"""
TEXT = (
    "The sea is calm tonight. The tide is full, the moon lies fair upon the straits.\n",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    '{"name": "loft", "numbers": [1, 2, 3], "is_true": true}\n',
)
"""what a model is asked where its run has left no predictions"""


def check_tokens(tuned: Tuned, folder: Path, *, is_fault: bool) -> None:
    """Compare the tokens of conversations in training, in a chat and as others load the folder.

    TrainingFault where they differ, or a warning without `is_fault`.
    """
    from transformers import AutoTokenizer

    from app.evaluation.conversation import check_served_tokens

    exported = AutoTokenizer.from_pretrained(folder)
    if problems := check_served_tokens(tuned.template, exported):
        if is_fault:
            listed = "\n".join(problems)
            raise TrainingFault(
                f"{folder}: others who load it ask the model in other tokens than it has learned; "
                f"merge.verify=false merges it as it is\n{listed}"
            )
        for problem in problems:
            log.warning("chat template: %s", problem)
        return
    print("chat template verified: the same tokens in training, in chat and by the folder itself")


def verify(
    config: MergeConfig,
    tuned: Tuned,
    env: Environment,
    adapters: Sequence[tuple[Path, float]],
    folder: Path,
    dtype: torch.dtype,
) -> dict[str, Difference]:
    """Compare the merged model with what it was made of; TrainingFault above the bound.

    One model at a time is in memory. With merge.onto=original, base + adapter is the unquantized
    one, and the difference to the quantized one, with which the adapter was trained, is measured.
    Where rounding lets a mixture choose other experts, which no bound of rounding can judge, the
    model that it was made of is judged by the experts that the merged one chooses.
    """
    import torch

    from app.model.experts import RoutingTrace
    from app.model.merging import BOUNDS, measure_difference

    rows = list(probe_rows(config, tuned))
    name_of_dtype = str(dtype).removeprefix("torch.")
    by_merged, judged = RoutingTrace(), CHECKED
    merged = _logits(load_merged(tuned, folder, env), rows, env, by_merged)
    references = {CHECKED: config.merge.onto == "dequantized"}
    if tuned.base.quantization.method != "none" and config.merge.onto == "original":
        references[AS_TRAINED] = True
    differences = {}
    for name, is_quantized in references.items():
        model = load_unmerged(tuned, adapters, env, is_quantized=is_quantized)
        own = RoutingTrace()
        differences[name] = measure_difference(_logits(model, rows, env, own), merged)
        print(f"merged vs {name}: {differences[name]}")
        changed, of_all = own.count_changed(by_merged)
        if name == CHECKED and changed:
            judged = BY_SAME_EXPERTS
            logits = _logits(model, rows, env, RoutingTrace(replay=by_merged))
            differences[judged] = measure_difference(logits, merged)
            print(
                f"experts: rounding to {name_of_dtype} changes {changed:,} of {of_all:,} choices "
                f"({changed / of_all:.1%}){FEWER if dtype != torch.float32 else ''}\n"
                f"merged vs {judged}: {differences[judged]}"
            )
        del model
    rounds_inputs = references[CHECKED] and tuned.base.quantization.method == "int8"
    rounding = "int8" if rounds_inputs else name_of_dtype
    bound = BOUNDS[rounding]
    if not differences[judged].is_within(bound):
        raise TrainingFault(
            f"{folder}: the merged model is not what it was made of: {differences[judged]}; "
            f"{rounding} explains {bound}"
        )
    print(f"merge verified: within {bound}{', by the same experts' * (judged != CHECKED)}")
    return differences


def load_merged(tuned: Tuned, folder: Path, env: Environment) -> Any:
    """Load the merged folder with stock transformers, in fp32."""
    import torch

    from app.model.architecture import model_class

    kind = model_class(tuned.base.architecture)
    return kind.from_pretrained(folder, dtype=torch.float32).to(env.torch_device).eval()


def load_unmerged(
    tuned: Tuned,
    adapters: Sequence[tuple[Path, float]],
    env: Environment,
    *,
    is_quantized: bool,
) -> Any:
    """Load base + adapters: in fp32, or quantized as in training."""
    import torch

    from app.model.adapter import load_weighted_adapters, required_embedding_rows
    from app.model.quantization import QuantizationConfig
    from app.model.tokenizer import resize_embeddings

    base = tuned.base
    if not is_quantized or base.quantization.method == "none":
        base = replace(base, dtype=torch.float32, quantization=QuantizationConfig())
    model = base.load()
    rows = model.get_input_embeddings().num_embeddings
    needed = max(required_embedding_rows(model, folder) for folder, _ in adapters)
    resize_embeddings(model, range(rows, needed))
    return load_weighted_adapters(model, adapters).to(env.torch_device)


def _logits(
    model: Any, rows: Sequence[dict[str, list[int]]], env: Environment, experts: RoutingTrace
) -> list[Tensor]:
    import torch

    from app.model.adapter import probe_logits

    # Whole weights compute in fp32; quantized ones as in training.
    is_whole = all(weight.dtype == torch.float32 for weight in model.parameters())
    found = []
    with contextlib.nullcontext() if is_whole else env.autocast(), experts:
        for row in rows:
            inputs = {name: torch.tensor([ids], device=model.device) for name, ids in row.items()}
            found.append(probe_logits(model, inputs).cpu())
    return found


def probe_rows(config: MergeConfig, tuned: Tuned) -> Iterator[dict[str, list[int]]]:
    """Yield rows to compare models on: what the run has answered, or fixed texts."""
    pairs = [(text, text) for text in TEXT]
    predictions = None if config.run is None else Path(config.run) / PREDICTIONS_FILE
    if predictions is not None and predictions.is_file():
        lines = predictions.read_text(encoding="utf-8").splitlines()
        few = [json.loads(line) for line in lines[:: max(1, len(lines) // PROBE_ROWS)]]
        pairs = [(str(one["prompt"]), str(one["reference"])) for one in few[:PROBE_ROWS]]
    start = tuned.base.spec.decoder_start_token_id
    encode = tuned.tokenizer.encode
    for prompt, answer in pairs:
        if start is None:
            ids = encode(prompt + answer, add_special_tokens=False)[:PROBE_TOKENS]
            row = {"input_ids": ids}
        else:
            answered = [start, *encode(answer)][:PROBE_TOKENS]
            row = {"input_ids": encode(prompt)[:PROBE_TOKENS], "decoder_input_ids": answered}
        if row["input_ids"]:
            yield row


def check_gguf(config: MergeConfig, tuned: Tuned, folder: Path, file: Path) -> None:
    """Compare the greedy tokens of a GGUF file with those of the merged model, on the CPU."""
    import torch

    why = None
    if find_spec("xllamacpp") is None:
        why = "type pip install xllamacpp, which runs it"
    if tuned.base.architecture.is_encoder_decoder:
        why = "xllamacpp does not generate with encoder-decoder models"
    if why is not None:
        print(f"{file.name}: written; not compared: {why}")
        return
    from app.evaluation.generation import override_generation_config
    from app.model.architecture import model_class

    kind = model_class(tuned.base.architecture)
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [row["input_ids"][: PROBE_TOKENS // 2] for row in probe_rows(config, tuned)][:4]
    ours = []
    pad = tuned.tokenizer.pad_token_id
    with torch.no_grad(), override_generation_config(model, [], pad, GREEDY_TOKENS):
        for prompt in prompts:
            ids = torch.tensor([prompt])
            answer = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
            ours.append(answer[0, len(prompt) :].tolist())
    theirs = greedy_tokens(file, prompts, GREEDY_TOKENS)
    pairs = [
        pair
        for one, other in zip(ours, theirs, strict=True)
        for pair in zip(one, other, strict=False)  # llama.cpp stops at an end of text
    ]
    same = sum(one == other for one, other in pairs) / len(pairs)
    if same < LEAST_SAME:
        raise TrainingFault(
            f"{file}: llama.cpp goes on with other greedy tokens than the merged model: "
            f"{same:.1%} of {len(pairs)} agree, expected {LEAST_SAME:.0%}"
        )
    print(f"{file.name}: greedy tokens of llama.cpp agree on {same:.1%} of {len(pairs)}")
