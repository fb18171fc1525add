"""A plan for people: lines for a terminal, and a page with a bar a strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BAR = 40
"""characters of a bar as long as a GPU's memory"""
MAX_ROWS = 16
HUES = {
    "weights": 215,
    "trainable": 265,
    "gradients": 300,
    "optimizer": 340,
    "gathered": 180,
    "copies": 160,
    "activations": 35,
    "loss": 60,
    "overhead": 0,
}
"""of the parts of a bar, in degrees"""


def plan_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return what a terminal shows of a plan."""
    typed = facts["settings"]
    lines = [
        f"{facts['model']} on {facts['hardware']}: {facts['num_weights'] / 1e9:.2f} B weights, "
        f"{facts['num_trained'] / 1e6:,.1f} M train",
        f"  strategy {typed['strategy']}, quantization {typed['quantization']}, recompute "
        f"{typed['recompute']}, {typed['precision']}; a micro-batch: {typed['micro_batch_size']} x "
        f"{typed['sequence_len']:,} tokens, {typed['accumulation']} a step",
        *(f"  {line}" for line in facts["chosen"]),
        "",
        *_memory_lines(facts),
        "",
        *_simulated_lines(facts["simulated"]),
        *_speed_lines(facts),
    ]
    if facts["to_fit"]:
        lines += ["", "to make it fit, type:", *(f"  {words}" for words in facts["to_fit"])]
    elif not facts["fits"]:
        lines += ["", "nothing that is known here makes it fit"]
    return [*lines, "", *_advice_lines(facts)]


def _memory_lines(facts: Mapping[str, Any]) -> list[str]:
    usable, memory = facts["gpu_usable_gib"], facts["gpu_memory_gib"]
    verdict = "fits" if facts["gpu_total_gib"] <= usable else "DOES NOT FIT"
    lines = [
        f"{verdict}: {facts['gpu_total_gib']:.1f} GiB a GPU of {usable:.1f} that can be filled "
        f"({memory:.1f} less what is lost between blocks), by arithmetic",
        f"  at the peak, {facts['peak']}:",
    ]
    for name, gib in facts["gpu_gib"].items():
        bar = "#" * round(BAR * min(gib / memory, 1))
        lines.append(f"  {name:<12}{gib:8.2f} GiB  {bar}".rstrip())
    if not facts["is_compared"]:
        lines.append(
            f"  activations are a guess: no step of model type {facts['model_type']} was "
            "simulated and found to keep as much; plan.simulate=true takes one"
        )
    host = facts["host_gib"]
    of = f" of {host['memory']:,.0f}" if host["memory"] else ""
    verdict = "" if facts["fits_host"] else "DOES NOT FIT: "
    lines.append(
        f"{verdict}a machine's host memory: {host['loading']:.1f} GiB while loading, "
        f"{host['offloaded']:.1f} offloaded{of}"
    )
    verdict = "" if facts["fits_disk"] else "DOES NOT FIT: "
    of = f" of {facts['nvme_gib']:,.0f}" if facts["nvme_gib"] else ""
    lines.append(f"{verdict}disk: {facts['disk_gib']:.1f} GiB of checkpoints and the result{of}")
    if (known := facts["deepspeed_states_gib"]) is not None:
        lines.append(
            f"DeepSpeed's estimator, for fp32 states beside half-precision weights and without "
            f"activations: {known['gpu']:.1f} GiB a GPU, {known['host']:.1f} a machine"
        )
    return lines


def _simulated_lines(found: Mapping[str, Any] | None) -> list[str]:
    """Return what a simulation found beside the arithmetic; nothing where there was none."""
    if found is None:
        return []
    verdict = "fits" if found["fits"] else "DOES NOT FIT"
    lines = [
        f"simulated by the program's own code, {verdict}: {found['gpu_total_gib']:.2f} GiB in the "
        f"{found['phase']} phase, and {found['overhead_gib']:.1f} of CUDA's own",
        f"  {'':<12}{'simulated':>10}{'arithmetic':>12}",
    ]
    traced, said = found["gpu_gib"], found["arithmetic_gib"]
    lines += [
        f"  {name:<12}{traced.get(name, 0.0):10.2f}{said.get(name, 0.0):12.2f} GiB"
        for name in HUES
        if name in traced or name in said
    ]
    lines.append(
        f"  {'together':<12}{found['gpu_total_gib']:10.2f}{found['arithmetic_total_gib']:12.2f} "
        f"GiB: the arithmetic's is {found['difference']:+.1%}"
    )
    lines.append(
        f"  a step: {found['step_seconds']:.2f} s, {found['compute_seconds']:.2f} of them by its "
        "kernels, and the rest for the arithmetic's messages; the arithmetic's is "
        f"{found['step_difference']:+.0%}"
    )
    return [*lines, ""]


def _speed_lines(facts: Mapping[str, Any]) -> list[str]:
    lines = [
        f"a step of {facts['tokens_a_step']:,} tokens: {facts['step_seconds']:.2f} s, "
        f"{facts['tokens_per_second']:,.0f} tokens/s ({facts['tokens_per_second_a_gpu']:,.0f} a "
        f"GPU), MFU {facts['mfu']:.0%}; modelled, without what launching kernels takes",
        "  "
        + ", ".join(f"{name} {value:.2f} s" for name, value in facts["seconds"].items() if value),
        f"  {facts['verdict']}",
        f"  {facts['batch']}",
    ]
    for each in facts["messages"]:
        between = each["gib_between_nodes"]
        nodes = f", {between:.2f} GiB from node to node" if between else ""
        lines.append(
            f"  sent a step: {each['what']} ({each['kind']} x {each['times']:g}): "
            f"{each['gib_a_gpu']:.2f} GiB a GPU{nodes}"
        )
    by = f" ({facts['tokens_by']})" if facts["tokens_by"] else ""
    if facts["hours"] is None:
        return [*lines, f"time to finish: type plan.tokens=N, the tokens of all epochs{by}"]
    cost = "" if facts["cost"] is None else f", cost {facts['cost']:,.2f}"
    about = "about " if by else ""
    return [*lines, f"{about}{facts['tokens']:,} tokens take {facts['hours']:.1f} h{cost}{by}"]


def _advice_lines(facts: Mapping[str, Any]) -> list[str]:
    rows: Sequence[Mapping[str, Any]] = [each for each in facts["advice"] if each["fits"]]
    if not rows:
        return ["advice: nothing that is known fits this hardware"]
    lines = [
        "fastest of each strategy and quantization that fits:",
        f"  {'tokens/s':>9} {'GiB':>6}  type",
    ]
    lines += [
        f"  {each['tokens_per_second']:9,.0f} {each['gpu_total_gib']:6.1f}  "
        f"{each['type'] or '(as it is)'}"
        for each in rows[:MAX_ROWS]
    ]
    if len(rows) > MAX_ROWS:
        lines.append(f"  and {len(rows) - MAX_ROWS} more on the page")
    return lines


def render_plan(facts: Mapping[str, Any]) -> str:
    """Return one HTML file that needs no script, font or network."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    rows = [*facts["advice"]]
    longest = max([facts["gpu_memory_gib"], *(each["gpu_total_gib"] for each in rows)])
    longest = min(longest, 2 * facts["gpu_memory_gib"])
    return environment.get_template("plan.html.jinja").render(
        plan=facts, rows=rows, longest=longest, hues=HUES, lines=plan_lines(facts)
    )
