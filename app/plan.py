"""Plan: whether a run fits, how fast it is, and what to change, estimated from its settings.

`python -m app.plan +experiment=llama70b hardware=8xa100_80gb`. Needs no weights, GPU or network.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.config import PlanConfig, run_verb, save_config, settings_of, write_experiment
from app.planning import advice, planned
from app.planning.communication import list_collectives
from app.planning.flops import estimate_flops
from app.planning.hardware import HardwareConfig, check_hardware, detect_card, with_local_host
from app.planning.memory import (
    GIB,
    PlannedRun,
    estimate_disk,
    estimate_gpu_memory,
    estimate_host_memory,
    fits,
    fits_host,
    usable_bytes,
)
from app.planning.speed import describe_batch, describe_range, estimate_speed
from app.process.environment import configure_libraries, run_program
from app.process.launch import quote_words
from app.process.logs import show
from app.report import render_template
from app.run.folder import CONFIG_FILE, decide_run_dir
from app.strategy.settings import ranks_per_row
from app.training.trainer import adapts_to_small_data
from common.errors import DataError, UserError
from common.files import write_atomically
from common.installation import verb_command
from common.text import counted, duration, percent, printable
from data_modules import fit_accumulation

_BAR_WIDTH = 40
"""characters of a bar that stands for the whole memory of a GPU"""
MAX_ADVICE_ROWS = 16
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
_ASSUMED = "FP8 rates are assumed, not yet measured; a run compares them with bf16 at its start"


def plan(config: PlanConfig) -> Path:
    """Estimate memory, speed and cost of `config`, print them with advice; return the folder."""
    if config.plan.write is not None:
        _check_written(Path(config.plan.write))
    facts, candidates, hardware = make_plan(config)
    folder = decide_run_dir(config.output)
    save_config(config, folder / CONFIG_FILE)
    write_atomically(folder / "plan.json", json.dumps(facts, indent=2) + "\n")
    write_atomically(folder / "plan.html", render_plan(facts))
    for line in plan_lines(facts):
        show(printable(line, keep="\n"))
    for line in _advice_lines(facts):
        show(printable(line), is_copied=True)
    if config.plan.write is not None:
        _write_best(config, candidates, hardware, Path(config.plan.write))
    shown = printable(str(folder))
    print(f"\n{shown}/plan.html, plan.json: this plan with more details")
    print(f"run: {shown}")
    return folder


def make_plan(config: PlanConfig) -> tuple[dict[str, Any], list[advice.Candidate], HardwareConfig]:
    """Return the figures of a plan, its alternatives, the fastest first, and the hardware."""
    hardware = planned.on_hardware(config, find_hardware(config.hardware))
    config_json = planned.read_config_json(config.model)
    if problems := planned.check_planned(config, hardware, config_json):
        raise UserError(problems)
    strategies = planned.load_strategies(settings_of)
    run, chosen = planned.plan_run(config, hardware, config_json, strategies=strategies)
    tokens, tokens_by = training_tokens(config, run)
    if (fewer := _accumulation_for(config, run, tokens)) is not None:
        trainer = replace(config.trainer, gradient_accumulation_steps=fewer)
        config = replace(config, trainer=trainer)
        run, chosen = planned.plan_run(config, hardware, config_json, strategies=strategies)
        chosen = [*chosen, f"accumulation: {fewer}, for more steps in an epoch of little data"]
    candidates = advice.list_candidates(config, hardware, config_json, run.model, strategies)
    change = advice.smallest_change(candidates)
    changes = [] if change is None else [" ".join(change.overrides)]
    if not changes:
        changes = advice.suggest_larger_changes(
            config, hardware, config_json, run.model, strategies, run.sequence_len
        )
    facts = _describe_run(run, tokens, tokens_by)
    facts |= {
        "name": (config.output.name or "").removesuffix("-plan"),
        "chosen": chosen,
        "to_fit": [] if facts["fits"] else changes,
        "advice": [_describe_candidate(each) for each in advice.best_of_each(candidates)],
    }
    return facts, candidates, hardware


def find_hardware(config: HardwareConfig) -> HardwareConfig:
    """Return the hardware with all its numbers; `auto` means the GPUs of this machine."""
    if config.name == "auto" and not config.memory_gib:
        card, memory_gib, num_gpus = detect_card()
        known: HardwareConfig = settings_of("hardware", card)
        config = replace(
            with_local_host(known),
            memory_gib=memory_gib,
            gpus_per_node=num_gpus,
            num_nodes=config.num_nodes,
            price_per_hour=config.price_per_hour,
        )
    if problems := check_hardware(config):
        raise UserError(problems)
    return config


def training_tokens(config: PlanConfig, run: PlannedRun) -> tuple[int | None, str]:
    """Return the number of tokens that the run trains on, and how it was estimated, or why not."""
    if config.plan.tokens is not None:
        return config.plan.tokens, ""
    if config.trainer.max_steps is not None:
        return config.trainer.max_steps * run.tokens_per_step, ""
    try:
        return planned.estimate_tokens(config, run.sequence_len)
    except (DataError, UserError) as error:
        return None, error.problems[0]


def _accumulation_for(config: PlanConfig, run: PlannedRun, tokens: int | None) -> int | None:
    """Return the accumulation to which a run lowers `auto` for so few tokens; None if it does not.

    The packs of an epoch are estimated from its tokens, as if packing filled them.
    """
    if (
        tokens is None
        or config.packing.method == "none"
        or not adapts_to_small_data(config.trainer, config.strategy)
    ):
        return None
    packs = math.ceil(tokens / config.trainer.num_epochs / run.sequence_len)
    # A run does so before `auto` chooses a strategy whose ranks share rows.
    groups = run.num_ranks // ranks_per_row(config.strategy, run.hardware.gpus_per_node)
    most = config.trainer.accumulation(groups)
    at_once = config.trainer.least_micro_batch * groups
    fewer = fit_accumulation(most, packs, at_once)
    return fewer if fewer < most else None


def _check_written(file: Path) -> None:
    if file.suffix != ".yaml":
        raise UserError(f"plan.write={file}: an experiment is a .yaml file; type {file}.yaml")
    if not file.parent.is_dir():
        raise UserError(
            f"plan.write={file}: the folder {file.parent} does not exist; create it first"
        )
    if file.exists():
        raise UserError(f"plan.write={file}: the file exists; remove it, or type another name")


def _write_best(
    config: PlanConfig, candidates: list[advice.Candidate], hardware: HardwareConfig, file: Path
) -> None:
    best = next((each for each in candidates if each.fits), None)
    if best is None:
        raise UserError(f"plan.write={file}: nothing fits {hardware}, so nothing was written")
    header = (
        f"# Planned for {hardware}: {best.memory.total / 2**30:.1f} GiB per GPU and "
        f"{best.speed.tokens_per_second:,.0f} tokens/s are estimates. Not yet run."
    )
    write_experiment(planned.with_devices_of(best.config, hardware), file, header)
    word = quote_words(f"+experiment={file}")
    print(f"\nwritten: {printable(str(file))}; {verb_command('train')} {word}")


def _describe_run(run: PlannedRun, tokens: int | None, tokens_by: str = "") -> dict[str, Any]:
    """Return memory, communication and speed of a planned run.

    `tokens`: number of tokens that the run trains on. `tokens_by`: how they were estimated, or why
    they are unknown.
    """
    hardware, memory = run.hardware, estimate_gpu_memory(run)
    host, speed = estimate_host_memory(run), estimate_speed(run)
    flops, disk_gib = estimate_flops(run), estimate_disk(run) / GIB
    hours = None if tokens is None else tokens / speed.tokens_per_second / 3600
    price = hardware.price_per_hour
    return {
        "model": run.model.name,
        "num_weights": run.model.num_weights,
        "num_trained": run.model.count(trained=True),
        "hardware": str(hardware),
        "fits": fits(run, memory),
        "fits_host": fits_host(run),
        "settings": _settings(run),
        "gpu_gib": {name: value / GIB for name, value in memory.parts.items()},
        "gpu_total_gib": memory.total / GIB,
        "peak": memory.moment,
        "model_type": run.model.widths.model_type,
        "is_compared": run.model.widths.is_compared,
        "gpu_usable_gib": usable_bytes(hardware) / GIB,
        "gpu_memory_gib": hardware.memory_gib,
        "host_gib": {
            "loading": host.loading / GIB,
            "offloaded": host.offloaded / GIB,
            "memory": hardware.host_memory_gib,
        },
        "disk_gib": disk_gib,
        "has_disk_states": run.strategy.offload_optimizer == "disk",
        "nvme_gib": hardware.nvme_gib,
        "fits_disk": not hardware.nvme_gib or disk_gib <= hardware.nvme_gib,
        "messages": _messages(run),
        "gflop_per_token": flops.total / 1e9,
        "step_seconds": speed.step,
        "seconds": {
            "products": speed.products,
            "attention": speed.attention,
            "traffic": speed.traffic,
            "messages": speed.messages,
            "host copies": speed.host,
            "waiting": speed.exposed,
            "other stages": speed.idle,
        },
        "tokens_per_step": run.tokens_per_step,
        "tokens_per_second": speed.tokens_per_second,
        "tokens_per_second_per_gpu": speed.tokens_per_second / run.num_ranks,
        "tokens_per_second_between": list(speed.between),
        "range_by": describe_range(run),
        "mfu": speed.mfu,
        "verdict": speed.verdict,
        "batch": describe_batch(run),
        "tokens_by": tokens_by,
        "tokens": tokens,
        "hours": hours,
        "cost": None if hours is None or price is None else hours * price * run.num_ranks,
    }


def _messages(run: PlannedRun) -> list[dict[str, Any]]:
    return [
        {
            "what": each.what,
            "kind": each.kind,
            "times": each.times,
            "gib_per_gpu": each.sent / GIB,
            "gib_between_nodes": each.sent_between_nodes / GIB,
        }
        for each in list_collectives(run)
        if each.num_ranks > 1
    ]


def _settings(run: PlannedRun) -> dict[str, Any]:
    return {
        "strategy": run.strategy.name,
        "quantization": run.quantization.method,
        "recompute": run.recompute,
        "recompute_layers": run.recomputed_layers,
        "stream": run.stream,
        "precision": run.precision,
        "micro_batch_size": run.micro_batch_size,
        "sequence_len": run.sequence_len,
        "accumulation": run.accumulation,
    }


def _describe_candidate(candidate: advice.Candidate) -> dict[str, Any]:
    run, memory = candidate.run, candidate.memory
    return _settings(run) | {
        "type": " ".join(candidate.overrides),
        "fits": candidate.fits,
        "gpu_gib": {name: value / GIB for name, value in memory.parts.items()},
        "gpu_total_gib": memory.total / GIB,
        "tokens_per_second": candidate.speed.tokens_per_second,
        "is_assumed": run.computes_in_fp8,
        "verdict": candidate.speed.verdict,
    }


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
        f"{_recompute_words(settings)}, {settings['precision']}{streams[settings['stream']]}; "
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


def _recompute_words(settings: Mapping[str, Any]) -> str:
    number = settings["recompute_layers"]
    return settings["recompute"] + (f" of {counted(number, 'layer')}" if number else "")


def _headline(facts: Mapping[str, Any]) -> str:
    settings, speed = facts["settings"], facts["tokens_per_second"]
    fastest = next((row for row in facts["advice"] if row["fits"]), None)
    if not facts["fits"]:
        words = next(iter(facts["to_fit"]), None)
        return f"does not fit: type {words}" if words else "does not fit, whatever is changed"
    if fastest is None or fastest["tokens_per_second"] < speed * _NOTABLE_GAIN:
        others = "none of the settings below that fit is notably faster"
        return f"fits: {speed:,.0f} tokens/s, and {others}"
    names = ("strategy", "quantization", "recompute", "micro_batch_size")
    kept = [
        f"{name.replace('_', ' ')} {settings[name]}"
        for name in names
        if settings[name] != fastest[name]
    ]
    gain = percent(fastest["tokens_per_second"] / speed - 1, 0)
    by_itself = f" with {' and '.join(kept[:2])}, which a plan never changes by itself"
    return (
        f"fits: {speed:,.0f} tokens/s{by_itself * bool(kept)}; the fastest that fits is {gain} "
        f"faster: type {fastest['type']}{f' ({_ASSUMED})' * fastest['is_assumed']}"
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


def _advice_lines(facts: Mapping[str, Any]) -> list[str]:
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
        for row in rows[:MAX_ADVICE_ROWS]
    ]
    if any(row["is_assumed"] for row in rows[:MAX_ADVICE_ROWS]):
        lines.append(f"  quantization=fp8: {_ASSUMED}")
    if len(rows) > MAX_ADVICE_ROWS:
        lines.append(f"  and {len(rows) - MAX_ADVICE_ROWS} more on the page")
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
        assumed=_ASSUMED * any(row["is_assumed"] for row in rows),
        fitting=[row for row in rows if row["fits"]],
        others=[row for row in rows if not row["fits"]],
        longest=min(longest, 2 * facts["gpu_memory_gib"]),
        hues=HUES,
    )


if __name__ == "__main__":
    configure_libraries(offline=False)  # a plan makes no requests anyway
    run_program(lambda: run_verb("plan", plan))
