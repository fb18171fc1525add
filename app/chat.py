"""Chat: talk to a base model with its adapter, in the terminal or through a pipe.

`python -m app.chat run=FOLDER`, or `model.path=... [adapter_path=...]`; `/help` lists the commands.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config import ChatConfig, run_verb, save_config
from app.model.hub import is_offline
from app.process.environment import configure_libraries, run_program
from app.process.logs import print_table
from app.run.folder import CONFIG_FILE, decide_run_dir
from common.errors import DataError, UserError
from common.files import write_atomically
from common.redaction import redact
from common.text import printable
from data_modules import Turn

if TYPE_CHECKING:
    from app.assembly.base import Tuned
    from app.evaluation.conversation import Responder
    from app.training.trainer import Environment

_CONVERSATIONS_FILE = "conversations.jsonl"
_HELP = """\
/reset           start a new conversation
/compare [TEXT]  answers of base and tuned side by side, to TEXT or to the last question
/save [FILE]     save all conversations as training rows (messages)
/exit            end the chat, as does the end of the input"""


def chat(config: ChatConfig) -> None:
    """Answer the input until it ends, and save the conversations in the run's folder."""
    folder = decide_run_dir(config.output)
    configure_libraries(offline=is_offline(config.model))

    # Imported late, so that --help and config errors do not wait for torch.
    from app.assembly.base import open_tuned, with_checkpoint
    from app.training.trainer import resolve_single_device

    env = resolve_single_device(config.trainer.accelerator, config.trainer.precision)
    config = with_checkpoint(config, env, folder)
    tuned = open_tuned(config, env)
    session = Session(config, tuned, env, folder)
    save_config(config, folder / CONFIG_FILE)
    print(f"{printable(str(tuned.folder or config.model.path))}: {tuned.template.note}; /help")
    session.run()
    session.save(folder / _CONVERSATIONS_FILE)
    print(f"run: {printable(str(folder))}")


class Session:
    """A chat session of one or more conversations."""

    def __init__(self, config: ChatConfig, tuned: Tuned, env: Environment, folder: Path) -> None:
        self.config, self._tuned, self._env, self._folder = config, tuned, env, folder
        self._finished: list[list[Turn]] = []
        self._responder = tuned.responder(tuned.load(env), env)
        self.turns = self._opening()

    def run(self) -> None:
        """Read lines and answer them until `/exit` or the end of the input."""
        while (line := self._read()) is not None:
            command, _, rest = line.strip().partition(" ")
            try:
                if command == "/exit":
                    return
                if command.startswith("/"):
                    self._run_command(command, rest.strip())
                elif line.strip():
                    self._answer(line)
            except (UserError, DataError) as error:
                print(printable(str(error), keep="\n"))
            except KeyboardInterrupt:
                print()  # Ctrl-C ends an answer; at the prompt it ends the chat

    def save(self, file: Path) -> None:
        """Write each conversation as a row of `messages`."""
        lines = []
        for turns in (*self._finished, self.turns):
            messages = [{"role": turn.role, "content": turn.content} for turn in turns]
            if messages and messages[0]["role"] == "system":  # as in saved settings
                messages[0]["content"] = redact(messages[0]["content"])
            lines += [json.dumps({"messages": messages}) + "\n"] if len(turns) > 1 else []
        write_atomically(file, "".join(lines))

    def _read(self) -> str | None:
        try:
            return input("> ") if sys.stdin.isatty() else input()
        except EOFError:
            return None

    def _run_command(self, command: str, rest: str) -> None:
        if command == "/reset":
            self._finished.append(self.turns)
            self.turns = self._opening()
            print("new conversation")
        elif command == "/save":
            file = Path(rest).expanduser() if rest else self._folder / _CONVERSATIONS_FILE
            self.save(file)
            print(f"saved: {printable(str(file))}")
        elif command == "/compare":
            self._compare(rest)
        elif command == "/help":
            print(_HELP)
        else:
            print(f"no command {printable(command)}\n{_HELP}")

    def _answer(self, question: str) -> None:
        turns = [*self.turns, Turn("user", question)]
        pieces = []
        for piece in self._responder.stream(turns, self.config.chat):
            print(printable(piece, keep="\n\t"), end="", flush=True)
            pieces.append(piece)
        print()
        self.turns = [*turns, Turn("assistant", "".join(pieces))]

    def _compare(self, question: str) -> None:
        from rich.table import Table
        from rich.text import Text

        from app.model.adapter import is_adapter

        if self._tuned.folder is None:
            raise UserError("/compare: there is no tuned model, only a base")
        if question:
            turns = [*self.turns, Turn("user", question)]
        elif self.turns and self.turns[-1].role == "assistant":
            turns = self.turns[:-1]
        else:
            raise UserError("/compare: no question has been asked; type /compare TEXT")
        model: Any = self._responder.model
        is_adapted = is_adapter(self._tuned.folder)
        with model.disable_adapter() if is_adapted else nullcontext():
            base = self._answer_of(self._responder if is_adapted else self._base, turns)
        answers = {"base": base, "tuned": self._answer_of(self._responder, turns)}
        table = Table(*answers, show_lines=False, expand=True)
        table.add_row(*(Text(printable(text, keep="\n\t")) for text in answers.values()))
        print_table(table)
        self.turns = [*turns, Turn("assistant", answers["tuned"])]

    def _answer_of(self, responder: Responder, turns: list[Turn]) -> str:
        return "".join(responder.stream(turns, self.config.chat))

    @cached_property
    def _base(self) -> Responder:
        """The base of a fully tuned model, loaded for the first comparison."""
        model: Any = self._tuned.base.load(self._env.rank_device)
        return self._tuned.responder(model.to(self._env.rank_device), self._env)

    def _opening(self) -> list[Turn]:
        system = self.config.chat.system
        return [] if system is None else [Turn("system", system)]


if __name__ == "__main__":
    run_program(lambda: run_verb("chat", chat))
