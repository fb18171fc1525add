"""Render a plan: lines for the terminal, and a page with the memory of each strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.report import render_template
from common.text import duration, percent

_BAR_WIDTH = 40
"""characters of a bar that stands for the whole memory of a GPU"""
MAX_ROWS = 16
"""rows of advice that are shown in the terminal"""
_NOTABLE_GAIN = 1.01
"""speed of other settings, as a factor, from which they count as faster"""
HUES = {
    "weights": 215,
    "teacher": 240,
    "trainable": 265,
    "gradients": 300,
    "optimizer": 340,
    "gathered": 180,
    "copies": 160,
    "activations": 35,
    "received": 110,
    "loss": 60,
    "overhead": 0,
}
"""part of a GPU's memory -> hue of its color, in degrees"""


ASSUMED = "FP8 rates are assumed, not yet measured; a run compares them with bf16 at its start"


def plan_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the lines of a plan for the terminal; `facts`: the content of plan.json."""
    settings = facts["settings"]
    streams = {None: "", "host": ", layers from host memory"}
    streams["disk"] = ", layers from the disk, counted at the speed of the host link"
    lines = [
        _headline(facts),
        f"{facts['model']} on {facts['hardware']}: {facts['num_weights'] / 1e9:.2f} B parameters, "
        f"{facts['num_trained'] / 1e6:,.1f} M trainable",
        f"  strategy {settings['strategy']}, quantization {settings['quantization']}, recompute "
        f"{settings['recompute']}, {settings['precision']}{streams[settings['stream']]}; "
        f"micro-batch: {settings['micro_batch_size']} x {settings['sequence_len']:,} tokens, "
        f"{settings['accumulation']} per step",
        *(f"  {line}" for line in facts["chosen"]),
        "",
        _memory_line(facts),
        f"  at the peak, {facts['peak']}:",
        *(
            f"  {name:<12}{gib:8.2f} GiB  "
            f"{'#' * round(_BAR_WIDTH * min(gib / facts['gpu_memory_gib'], 1))}".rstrip()
            for name, gib in facts["gpu_gib"].items()
        ),
        *_memory_notes(facts),
        "",
        "\n  ".join(_speed_lines(facts)),
        "  "
        + ", ".join(f"{name} {value:.2f} s" for name, value in facts["seconds"].items() if value),
        *(f"  {line}" for line in (facts["verdict"], facts["batch"], *_message_lines(facts))),
        _time_line(facts),
    ]
    return lines


def _headline(facts: Mapping[str, Any]) -> str:
    """Say how fast the planned settings are, and what the fastest ones that fit would change."""
    settings, speed = facts["settings"], facts["tokens_per_second"]
    fastest = next((row for row in facts["advice"] if row["fits"]), None)
    if not facts["fits"]:
        words = next(iter(facts["to_fit"]), None)
        return f"does not fit: type {words}" if words else "does not fit, whatever is changed"
    if fastest is None or fastest["tokens_per_second"] < speed * _NOTABLE_GAIN:
        others = "none of the settings below that fit is notably faster"
        return f"fits: {speed:,.0f} tokens/s, and {others}"
    kept = [
        f"{name.replace('_', ' ')} {settings[name]}"
        for name in ("strategy", "quantization", "recompute", "micro_batch_size")
        if settings[name] != fastest[name]
    ]
    gain = percent(fastest["tokens_per_second"] / speed - 1, 0)
    return (
        f"fits: {speed:,.0f} tokens/s with {' and '.join(kept[:2])}, which a plan never changes by "
        f"itself; the fastest that fits is {gain} faster: type {fastest['type']}"
        f"{f' ({ASSUMED})' * fastest['is_assumed']}"
    )


def _memory_line(facts: Mapping[str, Any]) -> str:
    usable, memory = facts["gpu_usable_gib"], facts["gpu_memory_gib"]
    verdict = "fits" if facts["gpu_total_gib"] <= usable else "DOES NOT FIT"
    return (
        f"{verdict}: {facts['gpu_total_gib']:.1f} GiB per GPU, of {usable:.1f} usable "
        f"({memory:.1f} less fragmentation), estimated"
    )


def _memory_notes(facts: Mapping[str, Any]) -> list[str]:
    lines = []
    if not facts["is_compared"]:
        lines.append(
            "  the estimate of activations is uncertain: it was never compared with a simulated "
            f"step of model type {facts['model_type']}"
        )
    host = facts["host_gib"]
    of = f" of {host['memory']:,.0f}" if host["memory"] else ""
    verdict = "" if facts["fits_host"] else "DOES NOT FIT: "
    lines.append(
        f"{verdict}host memory per machine: {host['loading']:.1f} GiB while loading, "
        f"{host['offloaded']:.1f} offloaded{of}"
    )
    verdict = "" if facts["fits_disk"] else "DOES NOT FIT: "
    of = f" of {facts['nvme_gib']:,.0f}" if facts["nvme_gib"] else ""
    states = ", and optimizer states" if facts["has_disk_states"] else ""
    lines.append(
        f"{verdict}disk: {facts['disk_gib']:.1f} GiB of checkpoints and the result{states}{of}"
    )
    return lines


def _speed_lines(facts: Mapping[str, Any]) -> list[str]:
    return [
        f"a step of {facts['tokens_per_step']:,} tokens: {facts['step_seconds']:.2f} s, "
        f"{facts['tokens_per_second']:,.0f} tokens/s "
        f"({facts['tokens_per_second_per_gpu']:,.0f} per GPU), "
        f"MFU {percent(facts['mfu'], 0)}; estimated",
        "between {:,.0f} and {:,.0f} tokens/s: {}".format(
            *facts["tokens_per_second_between"], facts["range_by"]
        ),
    ]


def _message_lines(facts: Mapping[str, Any]) -> list[str]:
    lines = []
    for message in facts["messages"]:
        between = message["gib_between_nodes"]
        nodes = f", {between:.2f} GiB between nodes" if between else ""
        lines.append(
            f"sent per step: {message['what']} ({message['kind']} x {message['times']:g}): "
            f"{message['gib_per_gpu']:.2f} GiB per GPU{nodes}"
        )
    return lines


def _time_line(facts: Mapping[str, Any]) -> str:
    source = f" ({facts['tokens_by']})" if facts["tokens_by"] else ""
    if facts["hours"] is None:
        return f"time to finish: type plan.tokens=N, the tokens of all epochs{source}"
    cost = "" if facts["cost"] is None else f", cost {facts['cost']:,.2f}"
    about = "about " if source else ""
    return f"{about}{facts['tokens']:,} tokens take {duration(3600 * facts['hours'])}{cost}{source}"


def advice_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the lines of a plan that name settings to type."""
    rows: Sequence[Mapping[str, Any]] = [row for row in facts["advice"] if row["fits"]]
    lines = []
    if facts["to_fit"]:
        lines += ["", "to make it fit, type:", *(f"  {words}" for words in facts["to_fit"])]
    elif not facts["fits"]:
        lines += ["", "no known change of settings makes it fit"]
    if not rows:
        return [*lines, "", "advice: no known strategy and quantization fits this hardware"]
    lines += [
        "",
        "fastest settings that fit, for each strategy and quantization:",
        f"  {'tokens/s':>9} {'GiB':>6}  type",
    ]
    lines += [
        f"  {row['tokens_per_second']:9,.0f} {row['gpu_total_gib']:6.1f}  "
        f"{row['type'] or '(no change)'}"
        for row in rows[:MAX_ROWS]
    ]
    if any(row["is_assumed"] for row in rows[:MAX_ROWS]):
        lines.append(f"  quantization=fp8: {ASSUMED}")
    if len(rows) > MAX_ROWS:
        lines.append(f"  and {len(rows) - MAX_ROWS} more on the page")
    return lines


def render_plan(facts: Mapping[str, Any]) -> str:
    """Return the page of a plan as HTML; `facts`: the content of plan.json."""
    rows = facts["advice"]
    longest = max([facts["gpu_memory_gib"], *(row["gpu_total_gib"] for row in rows)])
    settings = [
        [name.replace("_", " "), str(value)]
        for name, value in facts["settings"].items()
        if value is not None
    ]
    seconds = {name: value for name, value in facts["seconds"].items() if value}
    verdict = "fits" if facts["fits"] else "does not fit"
    return render_template(
        "plan",
        title=f"{facts['name'] or facts['model']}: {verdict}",
        lead=_headline(facts),
        plan=facts,
        settings=[["setting", "value"], *settings],
        memory=[_memory_line(facts), *_memory_notes(facts)],
        seconds=seconds,
        speed=[*_speed_lines(facts), facts["verdict"], facts["batch"], *_message_lines(facts)],
        time=_time_line(facts),
        assumed=ASSUMED * any(row["is_assumed"] for row in rows),
        fitting=[row for row in rows if row["fits"]],
        others=[row for row in rows if not row["fits"]],
        longest=min(longest, 2 * facts["gpu_memory_gib"]),
        hues=HUES,
    )
