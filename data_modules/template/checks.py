"""Check a chat template on small chats before any row: what it costs, masks and refuses.

It is rendered first in a process whose time and memory are limited. Conversations of the forms that
rows have, each text in them a word of its own, then go the way that rows go; every trained token is
traced back to the turn whose word it spells. A form that the template refuses is counted, a token
of the wrong turn is a fault that ends the run before it begins.

Gemma 2 and 3, Cohere's and LLaVA's templates refuse a tool's result, two user turns in a row or a
system turn. A row that has one is written as people who use these models do: calls and results as
text between `<tool_call>` and `<tool_response>` tags, a system turn at the head of the next
question, turns of one role joined.
"""

from __future__ import annotations

import json
import multiprocessing
import operator
import os
import re
import signal
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from data_modules.messages import Origin
from data_modules.template.rendering import (
    NO_MEMORY,
    Chat,
    Renderer,
    RowRefusedError,
    TemplateRefusedError,
    render_errors,
)
from data_modules.types import Conversation, ToolCall, Turn

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from data_modules.template.encoding import TokenizedText

T = TypeVar("T")
FORMS = {
    "one answer": "u a",
    "two answers": "u a u a",
    "system": "s u a",
    "system, three answers": "s u a u a u a",
    "tools, unused": "T u a",
    "system and tools, unused": "T s u a",
    "a call alone": "T u c t a",
    "a call after words": "T u ac t a",
    "calls one after another": "T u c t c t a",
    "calls one after another, with words": "T s u ac t ac t a",
    "two calls at once": "T u cc tt a",
    "calls in two rounds": "T u c t a u c t a",
    "a call, then talk": "T u c t a u a",
    "ends with a call": "T u c",
    "ends with a call after words": "T u ac",
    "ends with a result": "T u c t",
    "thoughts": "u ra",
    "thoughts in two answers": "u ra u ra",
    "thoughts before calls": "T u rc t ra",
    "thoughts, words and a call": "T u rac t ra",
    "thoughts before calls in two rounds": "T u rc t ra u rc t ra",
    "thoughts in tags": "u x u x",
    "user after user": "u u a",
    "answer after answer": "u a a u a",
    "an empty answer": "u e u a",
    "ends with a question": "u a u",
    "answer first": "a u a",
    "system later": "u a s u a",
}
"""form -> its turns: s system, u user, t result, e an empty answer, and of answers r reasoning, a
words, c a call, x words after a thought in tags; T declares a tool"""
_ORIGIN = Origin("proof", 1)
_WORD = re.compile(r"([a-z])(\d+)vq(\d)")
_TOOLS_TEXT = (
    "<tools>\n{tools}\n</tools>\n"
    'Call a tool by <tool_call>{{"name": NAME, "arguments": OBJECT}}</tool_call>.'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Say what a template may take for some 30 chats of a few turns."""

    seconds: float = 10.0
    memory_mb: int = 1024


class LimitError(Exception):
    """Say which limit was reached."""


def attempt(work: Callable[[], T], limits: Limits) -> T:
    """Return what `work` returns in a process of its own; LimitError where that takes too much.

    Where processes cannot be forked, `work` runs in this one, without limits.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return work()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(work, sender, limits), daemon=True)
    with warnings.catch_warnings():
        # From Python 3.12 on, where other threads run: none of theirs is waited for here.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    try:
        if not receiver.poll(limits.seconds):
            raise LimitError(f"within {limits.seconds:g} s")
        is_done, result = receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGXCPU:
            raise LimitError(f"within {limits.seconds:g} s") from None
        if process.exitcode and process.exitcode > 0:
            raise RuntimeError("what a process did first failed; its error stands above") from None
        raise LimitError(f"within {limits.memory_mb:,} MB") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if not is_done:
        raise LimitError(f"within {limits.memory_mb:,} MB")
    value: T = result
    return value


def _work(work: Callable[[], object], sender: Connection, limits: Limits) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads were not forked
    _limit(limits)
    try:
        sender.send((True, work()))
    except MemoryError:
        sender.send((False, None))


def _limit(limits: Limits) -> None:
    import resource

    seconds = int(limits.seconds) + 1
    _lower(resource.RLIMIT_CPU, seconds)
    statm = Path("/proc/self/statm")
    if statm.is_file():  # what is mapped already counts, on Linux
        mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, mapped + limits.memory_mb * 2**20)


def _lower(kind: int, most: int) -> None:
    """Lower a limit of this process; one that is lower stays."""
    import resource

    soft, hard = resource.getrlimit(kind)
    known = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min([most, *known]), hard))


class Traced(NamedTuple):
    """Hold a conversation as it is trained on: `weights` float32 [tokens] of the whole text."""

    text: str
    tokenized: TokenizedText
    weights: npt.NDArray[np.float32]
    notes: frozenset[str]


@dataclass(slots=True)
class Proof:
    """Hold what the forms showed: how many are proven, why others are refused, and the faults.

    `is_whole`: in all that the template renders, the answers can be told apart.
    """

    num_proven: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    is_whole: bool = True


def prove(trace: Callable[[Conversation], Traced | RowRefusedError]) -> Proof:
    """Trace every form; `trace` renders, masks and tokenizes one conversation.

    Raises MemoryError where the template takes more than the process may have.
    """
    proof = Proof()
    for name, form in FORMS.items():
        chat = conversation(form)
        traced = trace(chat)
        if isinstance(traced, RowRefusedError):
            proof.refused[name] = str(traced)
            proof.is_whole &= isinstance(traced, TemplateRefusedError)
            if NO_MEMORY in str(traced):
                raise MemoryError
            continue
        faults = list(faults_of(chat, traced))
        proof.faults += [f"in the form `{name}` {fault}" for fault in faults]
        proof.num_proven += not faults
        proof.is_whole &= not faults
    return proof


def conversation(form: str) -> Conversation:
    """Return a conversation of `form`, each of its texts a word that says whose it is."""
    words = form.split()
    turns: list[Turn] = []
    for word in words:
        if word == "T":
            continue
        if word[0] in "sut":
            role = {"s": "system", "u": "user", "t": "tool"}[word[0]]
            turns += [Turn(role, _word("c", len(turns) + number)) for number in range(len(word))]
            continue
        number = len(turns)
        content = _word("c", number)
        if "x" in word:
            content = f"<think>\n{_word('r', number)}\n</think>\n\n{content}"
        thought = _word("r", number) if "r" in word else None
        calls = tuple(
            ToolCall(
                _word("f", number, index), {_word("p", number, index): _word("k", number, index)}
            )
            for index in range(word.count("c"))
        )
        speaks = "a" in word or "x" in word
        turns.append(Turn("assistant", content if speaks else "", None, thought, calls))
    return Conversation(tuple(turns), _ORIGIN, _TOOLS if words[0] == "T" else ())


def faults_of(chat: Conversation, traced: Traced) -> Iterator[str]:
    """Yield what is wrong: trained words of others, and own words that are not trained on."""
    trained = set()
    for found in _WORD.finditer(traced.text):
        number = int(found[2]) if found[1] != "t" else -1
        start, end = found.span()
        first = traced.tokenized.first(start, end)
        weights = traced.weights[first : traced.tokenized.after(end)]
        if number >= 0 and chat.turns[number].role == "assistant":
            if len(weights) and weights.all():
                trained.add(found[0])
            continue
        if weights.any():
            role = chat.turns[number].role if number >= 0 else "declared tools"
            where = f"turn {number + 1} ({role})" if number >= 0 else f"the {role}"
            yield f"{where} is trained on"
    lost = {
        "c": {"lost_content"},
        "r": {"lost_reasoning"},
        "f": {"lost_tool_calls"},
        "p": {"lost_tool_calls"},
        "k": {"lost_tool_calls"},
    }
    for number, turn in enumerate(chat.turns):
        if turn.role != "assistant":
            continue
        for word in _words_of(turn):
            if word not in trained and not lost[word[0]] & traced.notes:
                yield f"turn {number + 1} (assistant) is not trained on whole: `{word}` is left out"


def _words_of(turn: Turn) -> list[str]:
    texts = [turn.content, turn.reasoning or ""]
    for call in turn.tool_calls:
        texts += [call.name, *map(str, call.arguments.items())]
    return [found[0] for text in texts for found in _WORD.finditer(text)]


def _word(part: str, turn: int, call: int = 0) -> str:
    return f"{part}{turn}vq{call}"


def _tool() -> dict[str, object]:
    name, says, key, of = (_word("t", number) for number in range(4))
    properties = {key: {"type": "string", "description": of}}
    parameters = {"type": "object", "properties": properties, "required": [key]}
    return {
        "type": "function",
        "function": {"name": name, "description": says, "parameters": parameters},
    }


_TOOLS: tuple[dict[str, object], ...] = (_tool(),)


@dataclass(frozen=True, slots=True)
class Refused:
    """Say what a template stops at: tool turns, a system turn at all or later than first, two user
    turns and two answers in a row.
    """

    tools: bool = False
    system: bool = False
    later_system: bool = False
    questions: bool = False
    answers: bool = False

    @property
    def words(self) -> list[str]:
        """Name what is refused, in words."""
        names = {
            "tool turns": self.tools,
            "system turns": self.system,
            "later system turns": self.later_system and not self.system,
            "user after user": self.questions,
            "answer after answer": self.answers,
        }
        return [name for name, is_refused in names.items() if is_refused]


def find_refused(renderer: Renderer) -> Refused:
    """Return what the template of `renderer` stops at; nothing where it refuses the smallest chat.

    Templates that refuse the smallest chat refuse every row, in their own words.
    """
    if not _takes(renderer, "u a"):
        return Refused()
    return Refused(
        tools=not (_takes(renderer, "T u c t a") or _takes(renderer, "T u ac t a")),
        system=not _takes(renderer, "s u a"),
        later_system=not _takes(renderer, "u a s u a"),
        questions=not _takes(renderer, "u u a"),
        answers=not _takes(renderer, "u a a u a"),
    )


def rewrite(
    chat: Conversation, refused: Refused, trained: Collection[str] = ("assistant",)
) -> Conversation:
    """Return `chat` without what is refused; itself where it has nothing of that kind.

    Turns of one role stay apart where joining them would lose a weight or a thought of the second.
    `trained` are the roles that are trained on: what becomes a question keeps the weight it had.
    """
    turns, tools = chat.turns, chat.tools
    if refused.tools and (tools or any(turn.role == "tool" or turn.tool_calls for turn in turns)):
        weight = None if ("tool" in trained) == ("user" in trained) else float("tool" in trained)
        turns = tuple(_without_tools(turns, weight))
        if tools:
            turns, tools = _declared(turns, tools, refused.system), ()
    is_alike = ("system" in trained) == ("user" in trained)
    if is_alike and (refused.system or refused.later_system):
        turns = tuple(_without_system(turns, keeps_first=not refused.system))
    if refused.questions or refused.answers:
        turns = tuple(_joined(turns, refused))
    is_same = len(turns) == len(chat.turns) and all(map(operator.is_, turns, chat.turns))
    return chat if is_same else replace(chat, turns=turns, tools=tools)


def _takes(renderer: Renderer, form: str) -> bool:
    chat = conversation(form)
    try:
        renderer.apply([Chat(chat.turns, chat.tools)], False)
    except render_errors():
        return False
    return True


def _without_tools(turns: Iterable[Turn], weight: float | None) -> Iterable[Turn]:
    """Write calls as text of their answers, and results that follow each other as one question.

    `weight`: of a result that has none of its own; None where the role's is right.
    """
    waiting: Turn | None = None
    for turn in turns:
        if turn.role == "tool":
            text = f"<tool_response>\n{turn.content}\n</tool_response>"
            own = weight if turn.weight is None else turn.weight
            if waiting is not None and waiting.weight == own:
                waiting = replace(waiting, content=f"{waiting.content}\n{text}")
                continue
            if waiting is not None:
                yield waiting
            waiting = Turn("user", text, own)
            continue
        if waiting is not None:
            yield waiting
            waiting = None
        if turn.tool_calls:
            calls = [
                {"name": call.name, "arguments": dict(call.arguments)} for call in turn.tool_calls
            ]
            texts = [f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls]
            content = "\n".join([turn.content, *texts] if turn.content else texts)
            turn = replace(turn, content=content, tool_calls=())
        yield turn
    if waiting is not None:
        yield waiting


def _declared(
    turns: tuple[Turn, ...], tools: Iterable[object], refuses_system: bool
) -> tuple[Turn, ...]:
    """Write the tools that may be called at the head of the system turn or the first question."""
    text = _TOOLS_TEXT.format(tools="\n".join(map(_json, tools)))
    if turns[0].role == "system":
        return (replace(turns[0], content=f"{turns[0].content}\n\n{text}"), *turns[1:])
    if not refuses_system:
        return (Turn("system", text), *turns)
    first = next((n for n, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        return turns
    return (*turns[:first], _headed(text, turns[first]), *turns[first + 1 :])


def _without_system(turns: Iterable[Turn], keeps_first: bool) -> Iterable[Turn]:
    """Write system turns at the head of the question that follows; one without it stays."""
    waiting: list[Turn] = []
    for number, turn in enumerate(turns):
        if turn.role == "system" and not (keeps_first and number == 0) and not turn.weight:
            waiting.append(turn)
            continue
        if waiting and turn.role == "user":
            turn = _headed("\n\n".join(one.content for one in waiting), turn)
            waiting = []
        yield from waiting
        waiting = []
        yield turn
    yield from waiting


def _joined(turns: Iterable[Turn], refused: Refused) -> Iterable[Turn]:
    """Join turns of one role that follow each other."""
    roles = {"user": refused.questions, "assistant": refused.answers}
    last: Turn | None = None
    for turn in turns:
        if last is None:
            last = turn
        elif (
            roles.get(turn.role)
            and last.role == turn.role
            and last.weight == turn.weight
            and turn.reasoning is None
            and not (last.tool_calls or turn.tool_calls)
            and last.content.strip()
            and turn.content.strip()
        ):
            last = replace(last, content=f"{last.content}\n\n{turn.content}")
        else:
            yield last
            last = turn
    if last is not None:
        yield last


def _headed(head: str, turn: Turn) -> Turn:
    """Put `head` in front of the content of a turn."""
    moved = len(head) + 2
    start = turn.input_start + moved if turn.input_start else 0
    return replace(turn, content=f"{head}\n\n{turn.content}", input_start=start)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
