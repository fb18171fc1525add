"""Serve: OpenAI's chat API and a page for the browser, over a base with its adapter.

`python -m app.serve run=FOLDER`, or `model.path=... [adapter_path=...]`; Ctrl-C ends it.

The server is our own over what chat and evaluation answer with, since tokens and stops are then
those of training by construction, for encoder-decoder models too. `transformers serve` (5.23) is
not started: its stop tokens are those of the base's generation config, a request's own template
arguments change the tokens, it has no key, queue or limits, and it cuts from a decoder's answer as
many tokens as the encoder read. vLLM is for throughput; it pins another torch, so that
`serve.engine=vllm` prints the line that starts it in an environment of its own, with the template
and the stop tokens of training.
"""

from __future__ import annotations

import json
import logging
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from app.config import ServerConfig, run_verb, save_config
from app.model.adapter import is_adapter
from app.model.hub import is_offline
from app.process.environment import keep_streams, quiet_libraries
from app.process.errors import Interrupted, UserError
from app.process.files import write_whole
from app.process.signals import (
    end_process,
    install_signal_handlers,
    signal_received,
    wait_for_step,
)
from app.run.folder import CONFIG_FILE, decide_run_dir
from app.serving.address import KEY_VARIABLE, open_socket, read_key, url_of
from app.serving.vllm import build_vllm_command, find_unsupported_feature
from data_modules import printable

if TYPE_CHECKING:
    import socket

    from starlette.types import ASGIApp

    from app.assembly.tuned import Tuned

log = logging.getLogger(__name__)


def serve(config: ServerConfig) -> None:
    """Serve as `config` says until a signal comes."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ImportError("a server needs Starlette and uvicorn: pip install -e '.[serve]'")
    key = read_key(config.serve)
    listener = None if config.serve.engine == "vllm" else open_socket(config.serve)
    folder = decide_run_dir(config.output)
    quiet_libraries(offline=is_offline(config.model))

    # Imported here and not above: --help and a config error must not wait for torch.
    from app.assembly.tuned import open_tuned
    from app.evaluation.conversation import check_served_tokens
    from app.serving.application import build_app
    from app.training.trainer import resolve_single_device

    env = resolve_single_device(config.trainer.accelerator, config.trainer.precision)
    tuned = open_tuned(config, env)
    problems = check_served_tokens(tuned.template, tuned.tokenizer)
    if problems and listener is None:  # vLLM would render by the tokenizer
        raise UserError([f"serve.engine=vllm: chat template: {one}" for one in problems])
    for problem in problems:
        log.warning("chat template: %s", problem)
    if not problems:
        print("chat template verified: the same tokens in training and in the server")
    save_config(config, folder / CONFIG_FILE)
    if listener is None:
        print(vllm_lines(config, tuned, folder, has_key=key is not None))
        print(f"run: {printable(str(folder))}")
        return
    responder = tuned.responder(tuned.load(env), env)
    app = build_app(responder, config.serve, config.chat, name_of(config), key)
    run_server(app, listener, name_of(config), folder)


def name_of(config: ServerConfig) -> str:
    """Return what clients call the model."""
    if config.serve.model_name is not None:
        return config.serve.model_name
    if config.run is None:
        return Path(str(config.model.path)).name
    return str(config.output.name).removesuffix("-serve")


def run_server(app: ASGIApp, listener: socket.socket, name: str, folder: Path) -> None:
    """Serve until a signal comes, which ends the process as everywhere else."""
    from app.serving.server import build_server

    server = build_server(app)
    address = url_of(listener)
    print(
        f"serving {printable(name)}: page {address}/, API {address}/v1; Ctrl-C ends it", flush=True
    )
    wait_for_step(True)  # a signal is looked for by the server, so that answers end before it does
    server.run([listener])
    signum = signal_received()
    print(f"run: {printable(str(folder))}", flush=True)
    if signum is not None:
        raise Interrupted(signum, "the server has ended")


def vllm_lines(config: ServerConfig, tuned: Tuned, folder: Path, *, has_key: bool) -> str:
    """Write the stop tokens of training to `folder`; return the lines that start vLLM with them.

    `has_key`: whether clients must have the key of the environment.
    """
    if tuned.template.is_encoder_decoder:
        raise UserError("serve.engine=vllm: vLLM serves no encoder-decoder models; leave it out")
    stops = {"eos_token_id": sorted(tuned.stop_ids)}
    write_whole(folder / "generation_config.json", json.dumps(stops, indent=2) + "\n")
    tuned.tokenizer.save_pretrained(folder)
    model, adapter, rank = str(tuned.folder or config.model.path), None, 0
    lines = ["# in an environment of its own, where vLLM is installed"]
    if tuned.folder is not None and is_adapter(tuned.folder):
        settings = json.loads((tuned.folder / "adapter_config.json").read_text(encoding="utf-8"))
        why = find_unsupported_feature(settings)
        if why is None and config.quantization.method != "none":
            why = "the quantized base that the adapter was trained on"
        if why is None:
            model, adapter, rank = str(config.model.path), tuned.folder, int(settings["r"])
        else:
            model = str(folder.parent / f"{folder.name}-merged")
            run = (
                f"run={config.run}"
                if config.run is not None
                else (f"model.path={config.model.path}")
            )
            words = [run, f"adapter_path={tuned.folder}", f"output.dir={model}"]
            lines.append(f"# vLLM does not serve {why}: merge first, here")
            lines.append(shlex.join(["python", "-m", "app.merge", *words]))
    key = f"VLLM_API_KEY=${KEY_VARIABLE} " if has_key else ""
    line = build_vllm_command(
        model,
        name_of(config),
        host=config.serve.host,
        port=config.serve.port,
        tokenizer=folder,
        generation=folder,
        adapter=adapter,
        rank=rank,
        revision=config.model.revision if model == config.model.path else None,
    )
    return "\n".join([*lines, key + line])


if __name__ == "__main__":
    keep_streams()
    install_signal_handlers()
    end_process(run_verb("serve", serve))
