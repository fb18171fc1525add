"""Every causal and encoder-decoder family of the installed transformers, each as a tiny model.

`python -m tests.parity.every_family` writes the table of docs/models.md, or prints the rows of the
given families (`make test-floor`: with an older transformers). A family is either equal to plain
transformers (loss and all gradients of the first step; then two steps, saved, reopened and
evaluated), or refused with advice that was tried and leads to an equal run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.conftest import ROOT

TABLE = ROOT / "docs" / "models.md"
SECONDS = 240
"""time limit of one family"""
DROPOUT = re.compile(r".*(drop_rate|dropout|_pdrop|layerdrop|jitter_noise).*")
LAYERS = 2


def registry() -> list[str]:
    """Return the sorted model types with a causal or an encoder-decoder model."""
    from transformers.models.auto import modeling_auto as auto

    pairs = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    return sorted({*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *pairs})


def tiny_config(family: str) -> Any:
    """Build a config of a family: the defaults of its class, except for sizes."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[family]
    numbers = _shrunk(config_class().to_dict()) | SHAPES.get(family, {})
    for part in ("text_config", "vision_config", "audio_config"):
        if isinstance(SHAPES.get(family, {}).get(part), dict):
            numbers[part] = _shrunk(config_class().to_dict()[part]) | SHAPES[family][part]
    config = config_class(**numbers)
    if config.is_encoder_decoder:
        config.decoder_start_token_id = 2
    return config


def _shrunk(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the changes that make a config small, including the configs of its parts."""
    changed: dict[str, Any] = {}
    for key, value in numbers.items():
        if isinstance(value, dict) and "model_type" in value:
            changed[key] = {"model_type": value["model_type"]} | _shrunk(value)
        elif key in SMALL:
            changed[key] = SMALL[key]
        elif DROPOUT.fullmatch(key) and isinstance(value, float):
            changed[key] = 0.0
        elif key in PER_LAYER and isinstance(value, (list, tuple)) and value:
            kinds = list(dict.fromkeys(value))
            changed[key] = (kinds * LAYERS)[: max(LAYERS, len(kinds))]
    count = max((len(v) for k, v in changed.items() if k in PER_LAYER), default=LAYERS)
    for key in PER_LAYER & changed.keys():
        changed[key] = (changed[key] * count)[:count]
    for key in NUM_LAYERS & numbers.keys():
        changed[key] = count
    return changed


PER_LAYER = {
    "attn_type_list",
    "indexer_types",
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "no_rope_layers",
}
NUM_LAYERS = {"n_layer", "n_layers", "num_hidden_layers", "num_layers"}
_TABLE = yaml.safe_load(Path(__file__).with_name("tiny_families.yaml").read_text())
SMALL = {name: value for value, names in _TABLE["small"] for name in names.split()}
"""keys of config.json that make a model small, applied to every config that has them"""
SHAPES: dict[str, dict[str, Any]] = _TABLE["families"]
"""keys that single families need in addition"""


def outcome(family: str, folder: Path) -> str:
    """Train a tiny model of `family` in `folder`; return its result for the table.

    AssertionError if its numbers differ, or if the advice of a refusal does not work.
    """
    from app.model.attention import packing_error
    from common.errors import UserError
    from tests.parity import first_step

    if refused := _opening_error(family, folder):
        return f"refused: {refused}"
    try:
        save_tiny(family, folder)
    except Exception as error:  # noqa: BLE001  invalid config, or missing package
        return f"not tried: {_first_sentence(error)}"
    try:
        plain = first_step.plain_step(folder)
    except UserError as error:
        return f"refused: {str(error).replace(str(folder), 'BASE')}"
    except Exception as error:  # noqa: BLE001  whatever transformers raises
        message = _first_sentence(error).replace(str(folder), "BASE")
        return f"not tried: plain transformers fails alone ({message})"
    found = {}
    for packing in ("none", "multipack"):
        try:
            ours = first_step.our_step(folder, packing)
            first_step.check_equal(ours, plain)
            found[packing] = "equal"
        except UserError as error:
            message = str(error).replace(str(folder), "BASE")
            found[packing] = re.sub(r" \([^()]*\d\.?\d*[^()]*\)", "", message)  # measured numbers
            _try_advice(found[packing], folder, plain, packing)
    if found["multipack"] == "equal":
        first_step.check_two_steps(folder)
        reason = packing_error(json.loads((folder / "config.json").read_text()))
        return "equal" if reason is None else f"equal, in padded rows: {reason}"
    if found["none"] == "equal":
        return f"equal with packing=none; else refused: {found['multipack']}"
    return f"refused: {found['none']}"


def _opening_error(family: str, folder: Path) -> str | None:
    """Return a run's refusal of a `family` without a class of text models, None if it has one."""
    from transformers import CONFIG_MAPPING

    from app.model.architecture import DRAFTS, load_architecture, model_class
    from app.model.base import ModelConfig
    from app.model.multimodal import language_model_class
    from common.errors import UserError

    if family in DRAFTS:
        (folder / "config.json").write_text(json.dumps({"model_type": family}))
    else:
        config = CONFIG_MAPPING[family]()
        with suppress(UserError):
            if language_model_class(config) is not None:
                return None
            if type(config) in model_class(config)._model_mapping:
                return None
        config.save_pretrained(folder)
    with pytest.raises(UserError) as refused:
        load_architecture(ModelConfig(path=str(folder)))
    return str(refused.value).removeprefix(f"model.path={folder}: ")


def save_tiny(family: str, folder: Path) -> None:
    """Save a random fp32 model all of whose weights affect its logits."""
    import torch

    from app.model.architecture import model_class
    from tests.tiny import randomize

    torch.manual_seed(0)
    config = tiny_config(family)
    model = model_class(config).from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    randomize(model)
    model.save_pretrained(folder)
    config.save_pretrained(folder)  # the family's config, if the class saves that of a part


def _try_advice(message: str, folder: Path, plain: Any, packing: str) -> None:
    """Try the advice of a refusal, except for another base."""
    from tests.parity import first_step

    if field := re.search(r'says "(\w+)": true', message):
        file = folder / "config.json"
        numbers = json.loads(file.read_text())
        file.write_text(json.dumps(numbers | {field[1]: True}))
        # Only the loss: rounding weights by 1e-7 changes gradients of a tiny XLM by 1e-4.
        ours, plain = first_step.our_step(folder, packing), first_step.plain_step(folder)
        assert ours[0] == pytest.approx(plain[0], rel=1e-5)
        file.write_text(json.dumps(numbers))
        return
    advised = re.search(r"type ([^:;]+?)(?:;|$)", message)
    assert advised, f"no advice: {message}"
    for choice in advised[1].split(", or "):
        words = dict(word.split("=", 1) for word in choice.split())
        if set(words) & {"model.path", "data.sequence_len"}:
            continue
        assert set(words) <= {"packing", "attention"}, message
        ours = first_step.our_step(
            folder, words.get("packing", packing), words.get("attention", "auto")
        )
        first_step.check_equal(ours, plain)


def _first_sentence(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return " ".join(text.split()).split(". ")[0][:110]


def in_process(family: str) -> str:
    """Return `outcome` from a separate process; a difference or a crash is a result, too."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(SECONDS)
        message = "crashed"
        try:
            with tempfile.TemporaryDirectory() as folder, ExitStack() as quiet:
                for stream in (1, 2):
                    os.dup2(quiet.enter_context(open(os.devnull, "w")).fileno(), stream)
                message = outcome(family, Path(folder))
        except AssertionError as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            message = f"DIFFERENT: {where.line} {_first_sentence(error)}"
        except BaseException as error:  # noqa: BLE001  reported in the table
            message = f"CRASHED: {type(error).__name__}: {_first_sentence(Exception(str(error)))}"
        os.write(writing, message.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        message = pipe.read().decode()
    os.waitpid(child, 0)
    return message or "CRASHED: took too long, or was killed"


def rows(families: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each family and its result, with one process per core."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from zip(families, pool.map(in_process, families), strict=True)


def read_table() -> dict[str, str]:
    """Return the table of docs/models.md: family -> result."""
    cells = (line.strip("| \n").split(" | ", 1) for line in TABLE.read_text().splitlines())
    return {row[0].strip("`"): row[1] for row in cells if len(row) == 2 and row[0].startswith("`")}


def write_table(found: dict[str, str]) -> None:
    import transformers

    counts = {
        "equal to plain transformers, packed": sum(row == "equal" for row in found.values()),
        "equal, in padded rows": sum(row.startswith("equal,") for row in found.values()),
        "equal with packing=none": sum(row.startswith("equal with pack") for row in found.values()),
        "refused": sum(row.startswith("refused") for row in found.values()),
        "not tried": sum(row.startswith("not tried") for row in found.values()),
    }
    text = HEAD.format(
        version=transformers.__version__,
        counts="\n".join(f"- {what}: {count}" for what, count in counts.items() if count),
    )
    lines = (f"| `{family}` | {row} |" for family, row in sorted(found.items()))
    TABLE.write_text(text + "\n".join(lines) + "\n")


HEAD = """# Models

Every causal and encoder-decoder family in transformers {version}, as a tiny model made from its
config class. The loss and all gradients of the first step, in fp32 on a CPU, are compared with
plain transformers run one document at a time; then the model is trained for two steps, saved,
reopened and evaluated. `python -m tests.parity.every_family` writes this table, and the tests
compare it.

{counts}

Equal means within 1e-5, packed and in padded rows. Recurrent layers and convolutions (Mamba, Gated
DeltaNet, lightning attention, RWKV, short convolutions) are detected by a probe at the start of a
run, so that no state crosses a document boundary: kernels that support boundaries get them (on a
GPU the installed ones of flash-linear-attention, causal-conv1d and mamba-ssm; on a CPU our own for
Gated DeltaNet and short convolutions), all others run document by document. These kernels are
verified in training mode too, with gradients. If a fused kernel would read the weight of a module
that has an adapter or is quantized, the layer uses the unfused operations instead. Linear modules
whose weight is used without calling the module (`dt_proj` of Mamba, LongCat's router) get no LoRA
or IA3, and are not quantized.

| family | result |
|---|---|
"""


def main(families: list[str]) -> bool:
    """Print results, and write the table if no family is given; return whether all are valid."""
    found = {}
    for family, row in rows(families or registry()):
        found[family] = row
        print(json.dumps({"family": family, "row": row}), flush=True)
    if not families:
        write_table(found)
    return not any(row.startswith(("DIFFERENT", "CRASHED")) for row in found.values())


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        import torch
        import transformers

        import tests.parity.first_step  # noqa: F401  once, before processes fork

        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        sys.exit(not main(sys.argv[1:]))
