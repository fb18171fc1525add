"""Settings that do not go together are refused with the reason, and what to type is accepted."""

from __future__ import annotations

import copy
import importlib
import re
import shlex
from functools import cache, reduce
from pathlib import Path

import pytest
import yaml

from app import config
from app.config.load import settings_of
from app.config.verbs import PARTS, TYPED_KEYS
from app.evaluation.tasks.questions import TaskConfig
from app.preflight import check_compatibility
from app.preflight.couplings import GROUPS, devices, strategy
from app.preflight.couplings.devices import find_conflicts, is_installed
from app.strategy.settings import STRATEGY_CONFIGS, ZeroConfig
from app.training.optimizers import LrPattern
from common.facts import hints_of, is_settings
from data_modules import DatasetConfig, dataset_names


@cache
def default(data: str = "skills") -> config.TrainConfig:
    loaded = config.load_config("train", ["model=tiny", f"data={data}"])
    assert isinstance(loaded, config.TrainConfig)
    return loaded


def settings(words: str = "") -> config.TrainConfig:
    """Return the default settings with `words`, without the second that composing them takes.

    A first word `data=NAME` chooses other data.
    """
    typed = [word.partition("=")[::2] for word in shlex.split(words)]
    of_data = [typed.pop(0)[1]] if typed[:1] and typed[0][0] == "data" else []
    changed = copy.deepcopy(default(*of_data))
    for key, text in typed:
        *path, name = TYPED_KEYS.get(key, key).split(".")
        value = settings_of(key, text) if key in PARTS else yaml.safe_load(text)
        part = reduce(getattr, path, changed)
        if key not in PARTS and is_settings(section := getattr(part, name)):
            part, name = section, next(iter(hints_of(type(section))))  # its option
        setattr(part, name, value)
    return changed


def problems_of(gpus: int, words: str) -> list[str]:
    return check_compatibility(settings(words), gpus)


@pytest.fixture(autouse=True)
def all_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_installed", lambda module: True)


ON_DISK = "strategy.offload_optimizer=disk strategy.offload_dir=/var/tmp"
STAGED = "strategy=fsdp_pp trainer.devices=2 trainer.gradient_accumulation_steps=4"
SLICED = "strategy=ddp trainer.devices=2 strategy.context_parallel_size=2"
SITES = (
    "strategy=hsdp_local_sgd strategy.sites=2 strategy.site_address=host:29400 "
    "strategy.synchronous_steps=0 trainer.max_steps=20"
)
FULL_FP8 = "adapter=full trainer.precision=fp8"
APART = "strategy=fsdp trainer.devices=4 strategy.expert_parallel_size=2"
LABELS = "model.labels=[first,inside,last]"
CONFLICTS = [
    # GPUs, and what was typed; what is said to type instead is right
    (0, "sweep.trials=3"),
    (0, "sweep.prune=median"),
    (0, "launcher.cpus=2"),
    (0, "launcher.name=slurm trainer.num_nodes=2 strategy=ddp"),
    (0, "launcher.name=sky"),
    (0, "trainer.precision=fp16"),
    (0, "attention.backend=flash2"),
    (1, "attention.backend=flash2 trainer.precision=fp32"),
    (0, "trainer.accelerator=gpu"),
    (2, "trainer.devices=3"),
    (0, "strategy=single trainer.devices=2"),
    (0, "trainer.global_batch_size=7 trainer.micro_batch_size=2 trainer.devices=2"),
    (0, "evaluation.exact_match=true data.val_set_size=0 'data.test_datasets=[]'"),
    (0, "evaluation.every_steps=2 evaluation.metrics=[f1] data.val_set_size=0 "
     "'data.test_datasets=[]'"),
    (0, "evaluation.every_steps=2 evaluation.metrics=[f1] trainer.compile=true"),
    (0, "trainer.checkpoint.monitor=val/loss/lists data.val_set_size=0"),
    (0, "output.from=best data.val_set_size=0 'data.test_datasets=[]'"),
    (0, "trainer.early_stopping_patience=3 data.val_set_size=0 'data.test_datasets=[]'"),
    (2, "evaluation.harness=[arc_easy] strategy=fsdp"),
    (0, "data.streaming=true data.val_set_size=0 trainer.max_steps=3 packing.window=9"),
    (0, "adapter.init=pissa adapter.use_dora=true"),
    (0, "adapter.use_dora=true quantization.method=nf4 strategy=fsdp"),
    (2, "model.stream=host trainer.devices=2"),
    (0, "model.stream=host quantization.method=int8"),
    (0, "model.stream=disk quantization.method=nf4"),
    (0, "model.stream=host adapter=full"),
    (0, "model.stream=host adapter.init=olora"),
    (0, "model.stream=host strategy=fsdp"),
    (0, "model.stream=host trainer.compile=true"),
    (0, "adapter.init=pissa strategy=fsdp"),
    (0, "adapter.init=olora strategy=zero3"),
    (0, "adapter.init=olora quantization.method=nf4"),
    (0, "model.router_aux_loss=0.01"),
    (0, "adapter=ia3 'model.added_tokens=[<a>,<b>]'"),
    (0, "schedule.warmup_steps=10 trainer.max_steps=10"),
    (0, "optimizer=muon adapter.lora_plus_ratio=16"),
    (0, "optimizer=muon adapter=ia3"),
    (0, "strategy=zero3 quantization.method=nf4"),
    (0, "strategy=zero2_offload trainer.precision=bf16-pure"),
    (0, "strategy=fsdp quantization.method=int8"),
    (0, "strategy=tp trainer.devices=2 quantization.method=fp8"),
    (0, "adapter.use_dora=true quantization.method=fp8"),
    (0, f"{FULL_FP8} strategy=fsdp trainer.devices=2 strategy.expert_parallel_size=2"),
    (0, f"{FULL_FP8} trainer.compile=true"),
    (2, "trainer.precision=fp16 quantization.method=fp8"),
    (0, "strategy=tp trainer.devices=2 quantization.method=nf4"),
    (0, "strategy=fsdp_tp trainer.devices=2 adapter.use_dora=true"),
    (2, "strategy=fsdp_tp strategy.offload_parameters=true"),
    (0, "strategy=fsdp_offload"),
    (0, "strategy=zeropp"),
    (1, "strategy=zero3_nvme"),
    (0, f"{ON_DISK} optimizer=muon"),
    (1, f"{ON_DISK} trainer.precision=fp16"),
    (0, f"{ON_DISK} trainer.checkpoint.async=true"),
    (0, f"strategy=hsdp_local_sgd trainer.num_nodes=2 {ON_DISK}"),
    (0, "strategy=zero2_offload strategy.offload_parameters=cpu"),
    (0, "strategy=zero1 strategy.partition_within_node=true"),
    (0, "strategy=zero2 trainer.checkpoint.async=true"),
    (1, "strategy=fsdp trainer.precision=fp16"),
    (0, "strategy=fsdp trainer.compile=true"),
    (0, "strategy=zero1 optimizer=muon"),
    (0, "strategy=fsdp_tp trainer.devices=3"),
    (0, "strategy=fsdp_tp"),
    (0, "strategy=fsdp_hybrid strategy.replicas=3 trainer.devices=4"),
    (0, "strategy=hsdp_local_sgd trainer.devices=2"),
    (0, "strategy=hsdp_local_sgd trainer.num_nodes=2 strategy.replicas=1"),
    (0, "strategy=hsdp_local_sgd trainer.num_nodes=2 trainer.devices=2 "
     "strategy.tensor_parallel_size=2"),
    (1, "strategy=hsdp_local_sgd trainer.num_nodes=2 strategy.offload_parameters=true"),
    (0,
     "strategy=hsdp_local_sgd trainer.num_nodes=2 optimizer=schedule_free schedule.shape=constant"),
    (0, "strategy=hsdp_local_sgd trainer.num_nodes=2 trainer.max_steps=10"),
    (0, f"{SITES} trainer.num_nodes=2"),
    (0, f"{SITES} strategy.synchronous_steps=2"),
    (0, f"{SITES} trainer.early_stopping_patience=2"),
    (0, "strategy=fsdp_tp trainer.devices=4 strategy.context_parallel_size=2"),
    (0, "strategy=hsdp_local_sgd trainer.num_nodes=2 strategy.context_parallel_size=2"),
    (0, f"{SLICED} attention.backend=eager"),
    (0, f"{SLICED} trainer.compile=true"),
    (0, f"{SLICED} adapter.neftune_alpha=5"),
    (0, f"{SLICED} data.sequence_len=127"),
    (0, f"{APART} strategy.context_parallel_size=2"),
    (0,
     "strategy=fsdp_hybrid trainer.devices=4 strategy.replicas=2 strategy.expert_parallel_size=2"),
    (2, "strategy=fsdp_offload trainer.devices=2 strategy.expert_parallel_size=2"),
    (4, f"{FULL_FP8} {APART}"),
    (0, f"{APART} quantization.method=nf4"),
    (0, "strategy=fsdp trainer.devices=3 strategy.expert_parallel_size=2"),
    (0, f"{STAGED} packing.method=none"),
    (0, f"{STAGED} data.streaming=true trainer.max_steps=9 data.val_set_size=0"),
    (0, f"data=pairs objective=dpo {STAGED}"),
    (0, f"{STAGED} quantization.method=fp8"),
    (0, "strategy=fsdp_pp trainer.devices=4 trainer.gradient_accumulation_steps=4 "
     "strategy.context_parallel_size=2"),
    (0, f"{STAGED} strategy.replicas=null"),
    (0, f"{STAGED} adapter=full {ON_DISK}"),
    (0, f"{STAGED} recompute.num_layers=2"),
    (0, f"{STAGED} adapter.neftune_alpha=5"),
    (0, "strategy=fsdp_pp trainer.devices=2 trainer.global_batch_size=1"),
    (0, f"{STAGED} strategy.schedule=interleaved trainer.gradient_accumulation_steps=5"),
    (0, "strategy=fsdp_pp trainer.devices=3 trainer.gradient_accumulation_steps=4"),
    (0, f"{STAGED} optimizer=schedule_free schedule.shape=constant"),
    (0, "strategy=ddp trainer.devices=3 strategy.context_parallel_size=2"),
    (0, "strategy=fsdp_tp trainer.devices=4 trainer.global_batch_size=5"),
    (0, "attention.backend=flex"),
    (0, "quantization.method=nf4 adapter=full"),
    (0, "quantization.method=nf4 model.from_scratch=true"),
    (0, "model.from_scratch=true adapter=ia3"),
    (0, "trainer.compile=true recompute.mode=selective"),
    (0, "optimizer=schedule_free"),
    (0, "optimizer=schedule_free schedule.shape=constant trainer.precision=bf16-pure"),
    (0, "optimizer=schedule_free schedule.shape=constant optimizer.beta1=0"),
    (0, "schedule.shape=wsd schedule.decay_ratio=0.9 schedule.warmup_ratio=0.25"),
    (0, f"data=classes objective=classify {LABELS} adapter=ia3"),
    (0, f"data=classes objective=classify {LABELS} quantization.method=fp8"),
    (0, f"data=classes objective=classify {LABELS} strategy=tp trainer.devices=2"),
    (0, f"data=classes objective=classify {LABELS} model.added_tokens=[<x>,<y>]"),
    (0, f"data=classes objective=classify {LABELS} evaluation.exact_match=true"),
    (0, f"data=classes objective=classify {LABELS} data.last_turn_only=true"),
    (0, f"data=classes objective=classify {LABELS} 'data.roles_to_train=[user,assistant]'"),
    (0, f"data=classes objective=classify {LABELS} data.train_on_eos=none"),
    (0, f"data=classes objective=classify {LABELS} data.reasoning=mask"),
    (0, "data=pairs objective=dpo data.train_on_inputs=true"),
    (0, "data=pairs objective=orpo 'data.roles_to_train=[user,assistant]'"),
    (0, "data=pairs objective=simpo data.train_on_eos=all"),
    (0, "data=pairs objective=dpo data.on_long=split"),
    (0, "data=pairs objective=dpo adapter=full"),
    (0, "data=pairs objective=dpo objective.reference=cached data.streaming=true "
     "data.val_set_size=0 trainer.max_steps=9"),
    (0, "data=pairs objective=dpo objective.reference=cached quantization.method=int8"),
    (0, "data=pairs objective=dpo adapter=full objective.reference=cached model.from_scratch=true"),
    (0, "data=pairs objective=dpo adapter.init=pissa"),
    (0, "data=pairs objective=dpo trainer.compile=true"),
    (0, "objective=distill objective.teacher=a/b strategy=tp trainer.devices=2"),
    (0, "objective=distill objective.teacher=a/b objective.teacher_logits=cached "
     "objective.direction=reverse"),
    (0, "objective=distill objective.teacher=a/b objective.teacher_logits=cached "
     "data.streaming=true trainer.max_steps=5"),
    (0, "objective=distill objective.teacher=a/b trainer.compile=true"),
]  # fmt: skip
OTHERS = [
    # also what is right and what must be said, where that is no value to type
    (0, "data=pairs", "data=pairs objective=dpo", "type objective=dpo"),
    (0, "trainer.num_nodes=auto trainer.gradient_accumulation_steps=4",
     "trainer.num_nodes=auto trainer.global_batch_size=4", "type trainer.global_batch_size=N"),
    (0, "trainer.num_nodes=auto data.streaming=true trainer.max_steps=2",
     "trainer.num_nodes=auto trainer.max_steps=2", "trainer.num_nodes=N"),
    (0, "evaluation.every_steps=2", "evaluation.every_steps=2 evaluation.exact_match=true",
     "evaluation.tasks=[{name: mmlu}]"),
    (0, "trainer.checkpoint.monitor=val/loss/listz", "trainer.checkpoint.monitor=val/loss/lists",
     "did you mean val/loss/lists?"),
    (0, "trainer.checkpoint.monitor=val/exact_match/lists evaluation.exact_match=true",
     "trainer.checkpoint.monitor=val/exact_match/lists "
     "evaluation.exact_match=true evaluation.every_steps=2", "evaluation.every_steps=N"),
    (0, "data.streaming=true data.val_set_size=0",
     "data.streaming=true data.val_set_size=0 trainer.max_steps=3", "trainer.max_steps=N"),
    (0, "trainer.global_batch_size=4 trainer.gradient_accumulation_steps=4",
     "trainer.gradient_accumulation_steps=4", "set the same thing"),
    (0, "trainer.precision=fp8", f"{FULL_FP8} strategy=fsdp trainer.devices=2",
     "type quantization=fp8 for those of a frozen base"),
    (0, "strategy.offload_optimizer=disk strategy.offload_dir=/dev/shm", ON_DISK,
     "FOLDER on a local disk"),
    (0, "strategy=zero2 'strategy.config={zero_optimization: {stage: 3}, gradient_clipping: 2}'",
     "strategy=zero2 'strategy.config={zero_optimization: {overlap_comm: true}}'",
     "type strategy.stage, trainer.max_grad_norm instead"),
    (0, "strategy=zero2 'strategy.config={zero_optimisation: {overlap_comm: true}}'",
     "strategy=zero2 'strategy.config={zero_optimization: {overlap_comm: true}}'",
     "(did you mean zero_optimization?)"),
    (0, "strategy=zero2 'strategy.config=[1]'", "strategy=zero2 'strategy.config={}'",
     "strategy.config=FILE.json"),
    (0, "strategy=zero2 'strategy.config={flops_profiler: {output_file: x}}'",
     "strategy=zero2 'strategy.config={flops_profiler: {enabled: true}}'",
     "type strategy.config without them"),
    (0, f"{SITES} strategy.site_address=hospital", SITES,
     "type strategy.site_address=HOST:PORT, or strategy.sites=1"),
    (0, f"{SITES} strategy.site=3", SITES, "type strategy.site=N, from 1 to 2"),
    (0, f"{SITES} trainer.max_steps=null", SITES, "type trainer.max_steps=N, or strategy."),
    (0, f"data=pairs objective=dpo {SLICED}", "data=pairs objective=dpo", "type objective=sft, or"),
    (0, f"data=pairs objective=reward model.labels=[reward] {STAGED}",
     f"data=pairs objective=orpo {STAGED}", "type objective=sft, or"),
    (0, "model.trust_remote_code=true model.path=org/name model.revision=1234abc",
     f"model.trust_remote_code=true model.path=org/name model.revision={'0a' * 20}",
     "type model.revision=COMMIT"),
    (0, "model.trust_remote_code=true model.path=org/name model.tokenizer_path=org/other "
     f"model.revision={'0a' * 20}",
     f"model.trust_remote_code=true model.path=org/name model.revision={'0a' * 20}",
     "type model.tokenizer_path=FOLDER"),
    (0, f"data=classes objective=classify {LABELS} objective.class_weights=[1,2]",
     f"data=classes objective=classify {LABELS} objective.class_weights=[1,2,3]",
     "with a number for each class"),
    (0, "data=classes objective=classify model.labels=[a,A]",
     f"data=classes objective=classify {LABELS}", "model.labels=[a, A] has a name twice"),
    (0, "data=classes objective=classify model.labels=[a] model.multi_label=true",
     f"data=classes objective=classify {LABELS} model.multi_label=true",
     "several of 2 to 24 classes, and model.labels=[a]; type model.labels=[NAME, NAME, ...]"),
    (0, LABELS, f"data=classes objective=classify {LABELS}",
     "replaces the language model's head, which objective=sft trains; type objective=classify"),
    (0, "data=pairs objective=reward model.labels=[a,b]",
     "data=pairs objective=reward model.labels=[reward]",
     "model.labels=[a, b]: a reward is one number, with a name; type model.labels=[reward]"),
    (0, "objective=dpo", "data=pairs objective=dpo", "type format: preference for them"),
    (0, "data=pairs objective=dpo adapter.path=old", "data=pairs objective=dpo",
     "model.path=MERGED here"),
    (0, "objective=distill", "objective=distill objective.teacher=a/b",
     "learns from a teacher, and none is named; type objective.teacher=FOLDER_OR_HUB_ID"),
]  # fmt: skip


FIX = re.compile(r"; type '?((?:[a-z_]+[\w.]*=[^\s,;']+\s?)+)")
"""what a problem says to type first"""


@pytest.mark.parametrize(("gpus", "bad"), CONFLICTS, ids=[row[1] for row in CONFLICTS])
def test_a_conflict_names_its_settings_and_what_it_says_to_type_is_accepted(
    gpus: int, bad: str
) -> None:
    found = problems_of(gpus, bad)
    assert found and len(set(found)) == len(found)
    groups = [re.split("[.=]", word)[0] for word in shlex.split(bad)]
    fixes = []
    for problem in found:
        assert any(re.search(rf"\b{group}[.=]", problem) for group in groups), problem
        fix = FIX.search(problem)
        assert fix is not None, problem
        fixes.append(fix[1])
    assert problems_of(gpus, " ".join([bad, *fixes])) == []


@pytest.mark.parametrize(
    ("gpus", "bad", "good", "fragment"), OTHERS, ids=[row[1] for row in OTHERS]
)
def test_a_conflict_is_explained_and_its_twin_passes(
    gpus: int, bad: str, good: str, fragment: str
) -> None:
    problems = "\n".join(problems_of(gpus, bad))
    assert fragment in problems and "; type " in problems
    assert problems_of(gpus, good) == []


def test_every_row_of_the_table_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()

    def say(changed: config.TrainConfig | config.TunedConfig, gpus: int = 0) -> str:
        requested = devices.requested_devices(changed, gpus)
        told = list(find_conflicts(GROUPS, changed, requested))
        found.update(row for row, _ in told)
        return "\n".join(text for _, text in told)

    for gpus, bad, *_ in (*CONFLICTS, *OTHERS):
        say(settings(bad), gpus)
    monkeypatch.setattr(devices, "is_installed", lambda module: False)
    say(settings("attention.backend=flash2 strategy=zero3"), 1)
    say(settings("logger.name=wandb"), 1)
    changed = settings()
    changed.optimizer.lr_by_pattern = [LrPattern(pattern="a", ratio=0.0)]
    assert "not 0 (a); type ratio: 0.1" in say(changed)
    changed = settings()
    assert say(changed) == ""
    changed.evaluation.tasks = [TaskConfig(name=dataset_names(changed.data.datasets)[0])]
    assert "is the name of a data set, too" in say(changed)
    chat = config.load_config("chat", ["model.path=base", LABELS])
    assert not isinstance(chat, config.TrainConfig)
    assert "a reward writes no text; type" in say(chat)
    assert found == {row for group in GROUPS for row in group.rows}


UNUSED = [
    # what was typed, of which the last word has no effect; what is typed, too, for an effect
    ("adapter.lora_plus_weight_decay=0.1", "adapter.lora_plus_ratio=16"),
    ("quantization.double_quant=false", "quantization.method=nf4"),
    ("quantization.method=int8 quantization.double_quant=false", "quantization.method=nf4"),
    ("recompute.mode=none recompute.every=2", "recompute.mode=full"),
    ("recompute.mode=none recompute.num_layers=2", "recompute.mode=full"),
    ("data.train_on_inputs=true data.roles_to_train=[user]", "data.train_on_inputs=false"),
    ("model.rope_scaling=linear", "model.context_len=9999"),
    ("data.train_on_inputs=true data.last_turn_only=true", "data.train_on_inputs=false"),
    ("data.mixture.temperature=2.0", None),
    ("data.mixture.stop=first", None),
    ("data.mixture.weights=tokens", None),
    ("data.audit.overlap=false data.audit.max_overlap_share=0.1", "data.audit.overlap=true"),
    ("packing.method=none packing.window=8", "packing.method=multipack"),
    ("optimizer.base_batch_size=4", "optimizer.scale_lr=sqrt"),
    ("adapter=ia3 optimizer.weight_decay=0.1", "adapter=lora"),
    ("schedule.decay_ratio=0.1", "schedule.shape=wsd"),
    ("schedule.shape=wsd schedule.start_lr_ratio=0.1", "schedule.shape=one_cycle"),
    ("schedule.shape=constant schedule.min_lr_ratio=0.1", "schedule.shape=linear"),
    ("data.val_set_size=0 trainer.validate_every_steps=2", "data.val_set_size=0.1"),
    ("data.val_set_size=0 trainer.checkpoint.keep_best=2", "data.val_set_size=0.1"),
    ("output.from=last trainer.checkpoint.monitor=val/loss/lists", "output.from=auto"),
    ("strategy=ddp_compressed strategy.topk_share=0.05", "strategy.compression=topk"),
    ("strategy=hsdp_local_sgd trainer.num_nodes=2 strategy.share_counts=true", None),
    ("strategy=ddp_compressed strategy.powersgd_rank=8", "strategy.compression=powersgd"),
    (f"{STAGED} strategy.stages_per_rank=4", "strategy.schedule=interleaved"),
    ("strategy=tp trainer.devices=2 strategy.reshard_after_forward=false",
     "strategy.shards_data_parallel=true"),
    (f"{STAGED} strategy.sync_each_micro_batch=false", None),
    ("strategy=fsdp trainer.devices=2 strategy.reduce_dtype=bf16",
     "adapter=full trainer.precision=bf16"),
    ("strategy=tp trainer.devices=2 strategy.sync_each_micro_batch=false",
     "strategy.shards_data_parallel=true strategy.tensor_parallel_size=1"),
    ("strategy=tp trainer.devices=2 strategy.replicas=2", "strategy.shards_data_parallel=true "
     "strategy.tensor_parallel_size=1"),
    ("logger.name=csv logger.details=true", "logger.name=tensorboard"),
    ("evaluation.harness_dir=tasks", "evaluation.harness=[arc_easy]"),
    ("objective=distill objective.teacher=a/b objective.teacher_top_k=9",
     "objective.teacher_logits=cached"),
    ("strategy.offload_dir=/var/tmp", "strategy.offload_optimizer=disk"),
    ("evaluation.task_dir=tasks", None),
    ("evaluation.during_rows=9", "evaluation.every_steps=2 evaluation.exact_match=true"),
    ("data.val_set_size=0 evaluation.max_regression=0.1", "data.val_set_size=0.1"),
    ("data.val_set_size=0 evaluation.max_regression=0.1", "evaluation.exact_match=true"),
    ("output.dtype=fp32", "adapter=full"),
]  # fmt: skip
ON_A_RESULT = [
    ("merge", "merge.llama_cpp=FOLDER", "merge.gguf=true"),
    ("evaluate", "evaluation.judge.reward_model=RUN", "evaluation.judge.questions=FILE"),
    ("evaluate", "evaluation=mt_bench evaluation.judge.reward_model=RUN evaluation.judge.url=URL",
        "evaluation.judge.reward_model=null"),
    ("evaluate", "evaluation=mt_bench evaluation.judge.best_of=4",
        "evaluation.judge.reward_model=RUN"),
    ("evaluate", "evaluation=mt_bench evaluation.judge.temperature=0.5",
        "evaluation.judge.reward_model=RUN evaluation.judge.best_of=4"),
    ("serve", "serve.engine=vllm serve.max_waiting=1", "serve.engine=loft"),
    ("serve", "serve.engine=vllm serve.timeout_seconds=9.0", "serve.engine=loft"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "more"), UNUSED, ids=[f"{a} + {b}" for a, b in UNUSED])
def test_a_setting_that_nothing_reads_is_refused(words: str, more: str | None) -> None:
    *others, typed = shlex.split(words)
    changed = settings(words)
    if typed.startswith("data.mixture"):
        assert check_compatibility(changed, 0) == []
        changed.data.datasets = changed.data.datasets[:1]
    (problem,) = check_compatibility(changed, 0)
    assert problem.startswith(f"{typed} has no effect with")
    assert "; type " in problem and problem.endswith(", or leave it out")
    if more is not None:
        assert problems_of(0, f"{words} {more}") == []
    assert problems_of(0, shlex.join(others)) == []


@pytest.mark.parametrize(("verb", "words", "more"), ON_A_RESULT)
def test_a_setting_that_nothing_reads_on_a_result_is_refused(
    verb: str, words: str, more: str
) -> None:
    def problems(words: str) -> list[str]:
        loaded = config.load_config(verb, ["model.path=base", *words.split()])
        assert not isinstance(loaded, config.TrainConfig)
        return check_compatibility(loaded, 0)

    (problem,) = problems(words)
    assert problem.startswith(f"{words.split()[-1]} has no effect with")
    assert problems(f"{words} {more}") == []


@pytest.mark.parametrize(
    ("name", "gpus", "instead"),
    [
        ("zero1", 0, "fsdp_grad_op"),
        ("zero2_offload", 0, "fsdp"),
        ("zero2_offload", 1, "fsdp_offload"),
    ],
)
def test_without_deepspeed_the_nearest_strategy_of_pytorch_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, gpus: int, instead: str
) -> None:
    monkeypatch.setattr(devices, "is_installed", lambda module: False)
    (problem,) = problems_of(gpus, f"strategy={name}")
    assert f"strategy={name} needs the package deepspeed, which is not installed" in problem
    assert f"; type strategy={instead}, or DS_BUILD_OPS=0 pip install -e '.[deepspeed]'" in problem
    assert problems_of(gpus, f"strategy={instead}") == []


def test_every_deepspeed_strategy_has_a_nearest_one_of_pytorch() -> None:
    zero = {name for name, settings in STRATEGY_CONFIGS.items() if settings is ZeroConfig}
    assert set(strategy.NEAREST_IN_PYTORCH) == zero - {"zero3_nvme"}  # refused by a row of its own


def test_a_folder_without_a_package_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "flash_attn_of_a_test" / "cute").mkdir(parents=True)
    assert not is_installed("flash_attn_of_a_test")
    (tmp_path / "flash_attn_of_a_test" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert is_installed("flash_attn_of_a_test")


def test_a_preview_counts_no_ranks_of_another_machine() -> None:
    for words, count in (("trainer.accelerator=gpu", 0), ("trainer.devices=3", 1)):
        changed = settings(f"strategy=fsdp_tp {words}")
        assert len(check_compatibility(changed, on_this_machine=False)) == count


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("0,-1,1", 1)]
)
def test_gpus_are_counted_by_their_device_files(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    files = [Path(f"/dev/{name}") for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(files))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.count_gpus() == count


@pytest.mark.parametrize("asked", ["trainer.early_stopping_patience=2", "evaluation.every_steps=2"])
def test_test_data_alone_are_no_validation_rows(asked: str) -> None:
    changed = settings(f"{asked} evaluation.exact_match=true data.val_set_size=0")
    changed.data.test_datasets = [DatasetConfig(path="sample:orders_test")]
    (problem,) = check_compatibility(changed)
    assert problem.startswith(asked) and "there are no validation rows" in problem
