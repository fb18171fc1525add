"""Serve: an OpenAI-compatible chat API and a web page for a base model with its adapter.

`python -m app.serve run=FOLDER`, or `model.path=... [adapter_path=...]`; Ctrl-C ends it.

We run our own server on the generation code of chat and evaluation, so that prompts and stop tokens
are those of training, also for encoder-decoder models. `transformers serve` (5.23) does not ensure
that: it takes stop tokens from the base's generation config, lets requests change the template's
arguments, has no API key, queue or limits, and cuts the length of the prompt from answers of
encoder-decoder models. vLLM has a higher throughput but pins another torch version:
`serve.engine=vllm` only prints the command that starts it in a separate environment, with the
template and stop tokens of training.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config import ServerConfig, run_verb, save_config
from app.model.adapter import is_adapter
from app.model.adapter.settings import ADAPTER_CONFIG
from app.model.hub import is_offline
from app.process.environment import configure_libraries, run_program
from app.process.signals import defer_signals, signal_received
from app.run.folder import CONFIG_FILE, decide_run_dir
from app.serving.api import KEY_VARIABLE, address_of, open_socket, read_server_key
from app.training.run_documents import read_object
from common.errors import Interrupted, UserError
from common.files import write_atomically
from common.installation import install_extra, verb_command
from common.text import printable

if TYPE_CHECKING:
    from app.assembly.base import Tuned

log = logging.getLogger(__name__)
_MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""values that vLLM accepts for --max-lora-rank"""


def serve(config: ServerConfig) -> None:
    """Serve as `config` says until a signal is received."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ImportError(f"a server needs Starlette and uvicorn: {install_extra('serve')}")
    key = read_server_key(config.serve)
    listener = None if config.serve.engine == "vllm" else open_socket(config.serve)
    folder = decide_run_dir(config.output)
    configure_libraries(offline=is_offline(config.model))

    # Imported late, so that --help and config errors do not wait for torch.
    from app.assembly.base import open_tuned, with_checkpoint
    from app.evaluation.conversation import check_served_tokens
    from app.serving.server import build_app, build_server
    from app.training.trainer import resolve_single_device

    env = resolve_single_device(config.trainer.accelerator, config.trainer.precision)
    config = with_checkpoint(config, env, folder)
    tuned = open_tuned(config, env)
    problems = check_served_tokens(tuned.template, tuned.tokenizer)
    if problems and listener is None:  # vLLM renders prompts with the tokenizer
        raise UserError([f"serve.engine=vllm: chat template: {each}" for each in problems])
    for problem in problems:
        log.warning("chat template: %s", problem)
    if not problems:
        print("chat template verified: the same tokens in training and in the server")
    save_config(config, folder / CONFIG_FILE)
    if listener is None:
        print(_vllm_lines(config, tuned, folder, has_key=key is not None))
        print(f"run: {printable(str(folder))}")
        return
    responder, name = tuned.responder(tuned.load(env), env), model_name(config)
    server = build_server(build_app(responder, config.serve, config.chat, name, key))
    address = address_of(listener)
    print(
        f"serving {printable(name)}: page {address}/, API {address}/v1; Ctrl-C ends it", flush=True
    )
    defer_signals(True)  # the server polls for signals, to finish the running answers first
    server.run([listener])
    signum = signal_received()
    print(f"run: {printable(str(folder))}", flush=True)
    if signum is not None:
        raise Interrupted(signum, "the server has stopped")


def model_name(config: ServerConfig) -> str:
    """Return the name of the model in the API."""
    if config.serve.model_name is not None:
        return config.serve.model_name
    if config.run is None:
        return Path(str(config.model.path)).name
    return str(config.output.name).removesuffix("-serve")


def _vllm_lines(config: ServerConfig, tuned: Tuned, folder: Path, *, has_key: bool) -> str:
    """Write stop tokens and tokenizer to `folder`; return the commands that start vLLM with them.

    `has_key`: whether clients must send the API key that is set in the environment.
    """
    from app.model.tokenizer_file import save_tokenizer

    if tuned.template.is_encoder_decoder:
        raise UserError(
            "serve.engine=vllm: vLLM does not serve encoder-decoder models; leave it out"
        )
    stops = {"eos_token_id": sorted(tuned.stop_ids)}
    write_atomically(folder / "generation_config.json", json.dumps(stops, indent=2) + "\n")
    save_tokenizer(tuned.tokenizer, folder)
    model, adapter, rank = str(tuned.folder or config.model.path), None, 0
    lines = ["# in a separate environment with vLLM"]
    if tuned.folder is not None and is_adapter(tuned.folder):
        settings = read_object(tuned.folder / ADAPTER_CONFIG)
        unsupported = _find_unsupported_feature(settings)
        if unsupported is None and config.quantization.method != "none":
            unsupported = "the quantized base that the adapter was trained on"
        if unsupported is None and config.model.context_len is not None:
            unsupported = "the longer context (model.context_len) of the base"
        if unsupported is None:
            model, adapter, rank = str(config.model.path), tuned.folder, int(settings["r"])
        else:
            model = str(folder.parent / f"{folder.name}-merged")
            is_run = config.run is not None
            run = f"run={config.run}" if is_run else f"model.path={config.model.path}"
            words = [run, f"adapter_path={tuned.folder}", f"output.dir={model}"]
            lines.append(f"# vLLM does not serve {unsupported}: first merge, in this environment")
            lines.append(f"{verb_command('merge')} {shlex.join(words)}")
    name = model_name(config)
    words = ["vllm", "serve", model, "--tokenizer", str(folder)]
    words += ["--chat-template", str(folder / "chat_template.jinja")]
    words += ["--generation-config", str(folder)]
    words += ["--host", config.serve.host, "--port", str(config.serve.port)]
    if config.model.revision and model == config.model.path:
        words += ["--revision", config.model.revision]
    if adapter is None:
        words += ["--served-model-name", name]
    else:
        max_rank = next(allowed for allowed in _MAX_LORA_RANKS if allowed >= rank)
        words += ["--enable-lora", "--max-lora-rank", str(max_rank)]
        words += ["--lora-modules", f"{name}={adapter}"]
    key = f"VLLM_API_KEY=${KEY_VARIABLE} " if has_key else ""
    return "\n".join([*lines, key + shlex.join(words)])


def _find_unsupported_feature(adapter: Mapping[str, Any]) -> str | None:
    """Return the feature of an adapter_config.json that vLLM cannot serve unmerged, or None."""
    kind = adapter.get("peft_type")
    if kind != "LORA":
        return f"{kind} adapters"
    unsupported = {
        "use_dora": "DoRA",
        "modules_to_save": "fully trained modules",
        "trainable_token_indices": "trained token rows",
        "target_parameters": "adapters on experts",
        "rank_pattern": "per-module ranks",
        "alpha_pattern": "per-module alphas",
    }
    found = next((what for name, what in unsupported.items() if adapter.get(name)), None)
    if found is None and adapter.get("bias", "none") != "none":
        found = "trained biases"
    if found is None and int(adapter["r"]) > _MAX_LORA_RANKS[-1]:
        found = f"ranks above {_MAX_LORA_RANKS[-1]}"
    return found


if __name__ == "__main__":
    run_program(lambda: run_verb("serve", serve))
