"""Run in a process that believes in a GPU; prints what was found there as one line of JSON."""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path

from benchmarks.fake_device.trace import Job, Numbers, architecture_of, trace
from benchmarks.gpu_ops import FULL_PACKS, real_lengths, words_of
from tools.simulate.device import start

LAYERS = 4
METHODS = {
    "lora": [*words_of("lora"), "recompute=none"],
    "lora fp8": [*words_of("lora fp8"), "recompute=none"],
    "qlora": [*words_of("qlora"), "recompute=none"],
    "full": [*words_of("full"), "recompute=none"],
    "full fp8": [*words_of("full fp8"), "recompute=none", "trainer.micro_batch_size=1"],
    "selective": [*words_of("lora"), "recompute=selective"],
}
FEWER = {"lora": 2, "lora fp8": 2, "qlora": 2, "full fp8": 3, "selective": 2}
"""layers of methods whose other layers would take the test's time and show nothing new"""
DEPTHS = (1, 2)


def job(name: str, words: list[str], num_layers: int = LAYERS) -> Job:
    return Job(name=name, model="llama8b", num_layers=num_layers, words=words, lengths=FULL_PACKS)


def traced() -> dict[str, Numbers]:
    found = {
        name: trace(job(name, words, FEWER.get(name, LAYERS))) for name, words in METHODS.items()
    }
    for depth in DEPTHS:
        found[f"full {depth}"] = trace(job("full", METHODS["full"], depth))
    return found


def graphs() -> list[int]:
    """Graphs after each of three batches of other documents."""
    from benchmarks.fake_device import ours

    words = [*METHODS["lora"], "trainer.compile=true", "trainer.max_steps=3"]
    with tempfile.TemporaryDirectory() as folder:
        shape = architecture_of("llama8b")
        run = ours.open_run(words, shape, 1, real_lengths(), Path(folder))
        return run.graphs()


def known_program() -> dict[str, object]:
    """What is counted of a few lines that can be counted by hand."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tools.simulate.counting import OperatorCounter

    count = OperatorCounter(num_pairs=0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        left = torch.empty(256, 512, device="cuda", dtype=torch.bfloat16)
        right = torch.empty(512, 1024, device="cuda", dtype=torch.bfloat16)
        with count:
            product = left.t().t() @ right
            product.add_(1)
            live = count.tally.live_bytes
            del product
            freed = count.tally.live_bytes
            left.sum().item()
            left.cpu()
            torch.zeros(3).to("cuda")
            torch.zeros(3).pin_memory().to("cuda", non_blocking=True)
    kernels = {one.name: one for one in count.tally.kernels}
    return {
        "flops": kernels["mm"].flops,
        "bytes": kernels["mm"].num_bytes,
        "in_place": kernels["add_"].num_bytes,
        "live": [live, freed],
        "syncs": sorted(count.tally.syncs),
        "to_host": len(count.tally.to_host),
        "pageable": sum(count.tally.pageable.values()),
    }


def main() -> None:
    gc.disable()  # a trace leaves few cycles, and each look for them takes longer
    start()
    from torch.nn.attention import current_flash_attention_impl

    found: dict[str, object] = {"known": known_program(), "traced": traced()}
    found |= {"attention": current_flash_attention_impl(), "graphs": graphs()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
