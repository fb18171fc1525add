"""Install a base trained by `+experiment=tiny_base`, if it passes the gate.

`python -m tools.tiny_base.install RUN` takes the model from the run's folder.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from common.text import percent
from tools.tiny_base.probes import GATE, probe_rows

TINY_BASE = Path(__file__).parents[2] / "data_modules" / "samples" / "tiny_base"


def probe_accuracies(folder: Path) -> dict[str, float]:
    """Return, by skill, the share of held-out probes that the model in `folder` gets right."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    return {skill: probe_accuracy(model, tokenizer, skill) for skill in GATE}


def probe_accuracy(model: Any, tokenizer: Any, skill: str) -> float:
    """Return the share of probes whose answer tokens are all the most likely ones."""
    import torch

    rows = probe_rows(skill)
    right = 0
    model.eval()
    with torch.no_grad():
        for row in rows:
            encoded = tokenizer(row["prompt"] + row["answer"], return_offsets_mapping=True)
            ids = torch.tensor([encoded["input_ids"]])
            hits = (model(input_ids=ids).logits[0, :-1].argmax(-1) == ids[0, 1:]).tolist()
            starts = [start for start, _ in encoded["offset_mapping"]]
            answer = [i for i, start in enumerate(starts) if start >= len(row["prompt"])]
            right += all(hits[i - 1] for i in answer)
    return right / len(rows)


def install(run: Path) -> None:
    """Copy the run's model into the shipped base; SystemExit if it misses the gate."""
    accuracies = probe_accuracies(run / "model")
    for skill, accuracy in accuracies.items():
        print(
            f"{skill}: {percent(accuracy)} of the probes right, "
            f"the gate is {percent(GATE[skill], 0)}"
        )
    if any(accuracy < GATE[skill] for skill, accuracy in accuracies.items()):
        raise SystemExit("the base misses the gate and is not installed")
    shutil.copyfile(run / "model" / "model.safetensors", TINY_BASE / "model.safetensors")
    print(f"installed in {TINY_BASE}")


if __name__ == "__main__":
    install(Path(sys.argv[1]))
