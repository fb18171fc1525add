"""Render conversations as text through a chat template.

Decides what the template receives. Templates differ in the message format that they read: the key
of the reasoning, arguments as an object or as JSON, the content of a message that only calls tools,
the ids of calls; `Renderer.message_format` finds it by rendering small probe chats. Turns that a
template rejects are rewritten, as users of these models do: Gemma 2 and 3, Cohere's and LLaVA's
templates reject tool results, two user turns in a row, or a system turn; calls and results become
text between `<tool_call>` and `<tool_response>` tags, a system turn is put in front of the next
question, and turns of one role are joined.

Templates run only in the sandbox of `tokenizer.apply_chat_template`. For a row that the template
rejects, a RowRefusedError is returned, not raised.

The only reader of `<think>` tags: a template that reads a field gets reasoning from tags in that
field; for any other, reasoning from a field is put into tags before the text.
"""

from __future__ import annotations

import json
import operator
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from common.text import shown
from data_modules.types import Conversation, ToolCall, Turn

if TYPE_CHECKING:
    import transformers

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_INPUT_HEADER = "\n\n### Input:\n"
"""separates instruction and input in Alpaca's prompt; its preamble depends on whether it occurs"""
TOOL_TURNS, SYSTEM_TURNS = "tool turns", "system turns"
LATER_SYSTEM_TURNS = "later system turns"
_JOINED = {"user": "user after user", "assistant": "answer after answer"}
UNSUPPORTED_BY = {
    TOOL_TURNS: ("T u c t a", "T u ac t a"),
    SYSTEM_TURNS: ("s u a",),
    LATER_SYSTEM_TURNS: ("u a s u a",),
    _JOINED["user"]: ("u u a",),
    _JOINED["assistant"]: ("u a a u a",),
}
"""turns that a template may reject -> the patterns of test chats that it then rejects all"""
_CALL_ID_STYLES = ("given", "nine", "named")
# Private-use characters, which neither rows nor templates contain.
_PROBE, _PROBE_ARGUMENT = "\ue0f1probe\ue0f2", "\ue0f1argument\ue0f2"
_TOOLS_TEXT = (
    "<tools>\n{tools}\n</tools>\n"
    'Call a tool by <tool_call>{{"name": NAME, "arguments": OBJECT}}</tool_call>.'
)
MAX_SLOW = 8
"""rows beyond the time limit after which no more are rendered: each costs the limit"""
_SLOW = "took the chat template longer than data.template_seconds"
_SLOW_FIX = (
    "look for a loop over the row's text in the template, change the row, or raise "
    "data.template_seconds"
)
OUT_OF_MEMORY = "it ran out of memory"
OPENING, CLOSING = "<think>", "</think>"
_BLOCK = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_LINES = re.compile(r"\A(?:\s*\n|[^\S\n]*)")
"""white space before a text, except the indentation of its first line"""
_QUOTES = tuple("`'\"\u2018\u2019\u201c\u201d")


class RowRefusedError(ValueError):
    """Why a row cannot be encoded; the caller adds the row's file and line."""


class _TimeUpError(Exception):
    """Rendering takes longer than its limit."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TimeUpError after some seconds; only the main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _TimeUpError

    handler = signal.signal(signal.SIGALRM, stop)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, handler)


class UnusableTemplateError(RowRefusedError):
    """A row cannot be encoded by this chat template, and may be fine with another one."""


class Chat(NamedTuple):
    """The part of a conversation that the template receives."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    kwargs: Mapping[str, Any] | None = None


_PARAMETERS = {"type": "object", "properties": {}}
_TOOL = {"name": "f", "description": "d", "parameters": _PARAMETERS}
_CALLING_CHATS = tuple(
    Chat(
        (
            Turn("user", "a"),
            Turn("assistant", "", tool_calls=(ToolCall(_PROBE, {"x": _PROBE_ARGUMENT}, id_),)),
            Turn("tool", "e", tool_call_id=id_),
            Turn("assistant", "b"),
        ),
        ({"type": "function", "function": _TOOL},),
    )
    for id_ in (None, "call_a")
)
"""small chats that call a tool, with a call id and without"""


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The message format that a template reads.

    `reasoning_key` is the key of the reasoning, "" if the template reads none; `has_parts`:
    contents are lists of parts; `arguments_as_json`: a call's arguments are a JSON string;
    `null_content`: a message that only calls tools has the content None; `call_ids`: the row's ids
    (given), ids of nine characters (nine), or `functions.NAME:NUMBER` (named).
    """

    reasoning_key: str = ""
    has_parts: bool = False
    arguments_as_json: bool = False
    null_content: bool = False
    call_ids: str = "given"


class ReasoningTails(NamedTuple):
    """What a template writes between the reasoning of an answer and its text, or its first call."""

    before_text: str
    before_call: str


class Renderer:
    """Render chats through the template `text`; None = the tokenizer's template."""

    def __init__(
        self, tokenizer: transformers.PreTrainedTokenizerBase, text: str | None = None
    ) -> None:
        self._tokenizer, self._text = tokenizer, text
        self.seconds = 10.0
        """limit of a row's rendering, in the main thread"""
        self._num_slow = 0

    def prepare(self, chat: Conversation, reasoning: str) -> Chat:
        """Return the part of `chat` that the template receives.

        With `reasoning` "strip" all reasoning is removed. Otherwise it is moved into the field that
        the template reads, or into `<think>` tags before the content if the template reads none.
        _INPUT_HEADER is put before an input if the template looks for it.
        """
        turns = chat.turns
        header = _INPUT_HEADER.replace("\n", "\\n")  # as it is written in a template's source
        if any(turn.input_start for turn in turns) and header in str(self._tokenizer.chat_template):
            turns = tuple(_with_input_header(turn) for turn in turns)
        reasoned = {
            number
            for number, turn in enumerate(turns)
            if turn.role == "assistant" and (turn.reasoning is not None or "think>" in turn.content)
        }
        if reasoned:
            move = self._mover(reasoning)
            turns = tuple(move(turn) if n in reasoned else turn for n, turn in enumerate(turns))
        return Chat(turns, chat.tools, chat.template_kwargs)

    def unread(self, kwargs: Iterable[str]) -> list[str]:
        """Return the names of arguments that do not occur in the template."""
        text = str(self._text or self._tokenizer.chat_template)
        return [name for name in kwargs if not re.search(rf"\b{re.escape(name)}\b", text)]

    def render(
        self, chats: Sequence[Chat], *, add_prompt: bool = False
    ) -> list[str | RowRefusedError]:
        """Return the text of each chat, in order; `add_prompt` appends the generation prompt."""
        indices_by_tools: dict[str, list[int]] = {}
        for index, chat in enumerate(chats):
            key = ""
            if chat.tools or chat.kwargs:
                key = json.dumps([chat.tools, chat.kwargs], default=str)
            indices_by_tools.setdefault(key, []).append(index)
        texts: list[str | RowRefusedError] = [""] * len(chats)
        for indices in indices_by_tools.values():
            rendered = self._render_same_tools([chats[index] for index in indices], add_prompt)
            for index, text in zip(indices, rendered, strict=True):
                texts[index] = text
        return texts

    def apply_template(
        self,
        chats: Sequence[Chat],
        *,
        add_prompt: bool = False,
        message_format: MessageFormat | None = None,
    ) -> list[str]:
        """Render chats with the first one's tools and arguments; raise what the template raises."""
        tools = [dict(tool) for tool in chats[0].tools] or None
        message_format = message_format or self.message_format
        texts: list[str] = self._tokenizer.apply_chat_template(
            [self.messages(chat, message_format) for chat in chats],
            tools=tools,
            chat_template=self._text,
            tokenize=False,
            add_generation_prompt=add_prompt,
            **(chats[0].kwargs or {}),
        )
        return texts

    def messages(
        self, chat: Chat, message_format: MessageFormat | None = None
    ) -> list[dict[str, Any]]:
        """Return the turns of a chat as OpenAI messages, by default as the template reads them."""
        message_format = message_format or self.message_format
        turns: Sequence[Turn] = chat.turns
        if message_format.call_ids != "given":
            turns = _with_call_ids(turns, message_format.call_ids)
        return [_message(turn, message_format) for turn in turns]

    def _mover(self, reasoning: str) -> Callable[[Turn], Turn]:
        """Return the function that puts an answer's reasoning where the template reads it."""
        if reasoning == "strip":
            return remove_reasoning
        return move_to_field if self.message_format.reasoning_key else move_to_tags

    @cached_property
    def message_format(self) -> MessageFormat:
        """Return the first message format in which the template renders the probe chats."""
        question = Turn("user", "a")
        found = MessageFormat()
        plain = Chat((question, Turn("assistant", _PROBE)))
        parts = replace(found, has_parts=True)
        if not self._renders_probe(plain, found) and self._renders_probe(plain, parts):
            found = parts
        reasoned = Chat((question, Turn("assistant", "b", reasoning=_PROBE)))
        found = self._with_reasoning_key(found, reasoned)
        for call_ids, null, as_json in product(_CALL_ID_STYLES, (False, True), (False, True)):
            candidate = replace(
                found, call_ids=call_ids, null_content=null, arguments_as_json=as_json
            )
            if all(self._renders_probe(chat, candidate) for chat in _CALLING_CHATS):
                found = candidate
                break
        if found.reasoning_key:
            return found
        # Some templates write the reasoning only before calls.
        turn = Turn(
            "assistant", "", reasoning=_PROBE, tool_calls=(ToolCall("f", {"x": _PROBE_ARGUMENT}),)
        )
        return self._with_reasoning_key(found, Chat((question, turn)))

    @cached_property
    def reasoning_tails(self) -> ReasoningTails:
        """Return what follows the reasoning of answers."""
        text = self._after_reasoning(Turn("assistant", _PROBE_ARGUMENT, reasoning=_PROBE))
        call = ToolCall(_PROBE_ARGUMENT, {})
        turn = Turn("assistant", "", reasoning=_PROBE, tool_calls=(call,))
        pairs = zip(text, self._after_reasoning(turn), strict=False)
        same = takewhile(lambda pair: pair[0] == pair[1], pairs)
        return ReasoningTails(text, "".join(character for character, _ in same))

    def _after_reasoning(self, answer: Turn) -> str:
        turns = (Turn("user", "a"), self._mover("keep")(answer))
        (text,) = self.render([Chat(turns)])
        after = text.rpartition(_PROBE)[2] if isinstance(text, str) else ""
        return after.partition(_PROBE_ARGUMENT)[0]

    def _with_reasoning_key(self, found: MessageFormat, probe: Chat) -> MessageFormat:
        candidates = (replace(found, reasoning_key=key) for key in _REASONING_KEYS)
        return next((known for known in candidates if self._renders_probe(probe, known)), found)

    def _renders_probe(self, chat: Chat, message_format: MessageFormat) -> bool:
        try:
            (text,) = self.apply_template([chat], message_format=message_format)
        except render_errors():
            return False
        if message_format.null_content and "None" in text:
            return False
        has_call = any(turn.tool_calls for turn in chat.turns)
        return _PROBE in text and (not has_call or _PROBE_ARGUMENT in text)

    def _render_same_tools(
        self, chats: list[Chat], add_prompt: bool
    ) -> list[str | RowRefusedError]:
        errors = render_errors()
        errors_and_time: tuple[type[Exception], ...] = (*errors, _TimeUpError)
        try:
            with _time_limit(self.seconds):
                return list(self.apply_template(chats, add_prompt=add_prompt))
        except errors_and_time:
            pass  # Render them one by one, to find the rows that fail.
        texts: list[str | RowRefusedError] = []
        for chat in chats:
            if self._num_slow >= MAX_SLOW:
                reason = f"not rendered: {MAX_SLOW} rows before it {_SLOW}"
                texts.append(UnusableTemplateError(reason))
                continue
            try:
                with _time_limit(self.seconds):
                    texts += self.apply_template([chat], add_prompt=add_prompt)
            except _TimeUpError:
                self._num_slow += 1
                reason = f"the chat template does not render this row within {self.seconds:g} s"
                texts.append(UnusableTemplateError(f"{reason}; {_SLOW_FIX}"))
            except errors as error:
                roles = ", ".join(turn.role for turn in chat.turns)
                reason = OUT_OF_MEMORY if isinstance(error, MemoryError) else shown(str(error))
                texts.append(
                    UnusableTemplateError(
                        f"the chat template refuses this row (turns: {roles}): "
                        f"{reason}; change the row, or set data.chat_template=plain"
                    )
                )
        return texts


def render_errors() -> tuple[type[Exception], ...]:
    """Return the errors that a template can raise: Jinja's, and those of Python's operators."""
    import jinja2

    return (
        jinja2.TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    )


def _with_input_header(turn: Turn) -> Turn:
    if not turn.input_start:
        return turn
    instruction, row_input = turn.content[: turn.input_start - 2], turn.content[turn.input_start :]
    return replace(turn, content=instruction + _INPUT_HEADER + row_input, input_start=0)


def _message(turn: Turn, message_format: MessageFormat) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if message_format.has_parts:
        message["content"] = [{"type": "text", "text": turn.content}]
    if turn.reasoning is not None:
        message[message_format.reasoning_key or _REASONING_KEYS[0]] = turn.reasoning
    if turn.tool_calls:
        if message_format.null_content and not turn.content:
            message["content"] = None
        message["tool_calls"] = [
            {
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _json(dict(call.arguments))
                    if message_format.arguments_as_json
                    else dict(call.arguments),
                },
                **({} if call.id is None else {"id": call.id}),
            }
            for call in turn.tool_calls
        ]
    if turn.name is not None:
        message["name"] = turn.name
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    return message


def _with_call_ids(turns: Sequence[Turn], style: str) -> list[Turn]:
    """Return the turns with new ids of `style` for calls and for the results that answer them."""
    new_ids: dict[str, str] = {}
    unanswered: deque[str] = deque()
    renamed: list[Turn] = []
    num_calls = 0
    for turn in turns:
        if turn.tool_calls:
            calls = []
            for call in turn.tool_calls:
                new_id = (
                    f"call{num_calls:05d}"
                    if style == "nine"
                    else f"functions.{call.name}:{num_calls}"
                )
                num_calls += 1
                unanswered.append(new_id)
                if call.id is not None:
                    new_ids[call.id] = new_id
                calls.append(replace(call, id=new_id))
            turn = replace(turn, tool_calls=tuple(calls))
        elif turn.role == "tool":
            answered = new_ids.get(turn.tool_call_id or "")
            if answered is None:
                answered = unanswered.popleft() if unanswered else None
            elif answered in unanswered:
                unanswered.remove(answered)
            turn = replace(turn, tool_call_id=answered)
        renamed.append(turn)
    return renamed


def rewrite_turns(
    chat: Conversation,
    unsupported: Collection[str],
    roles_to_train: Collection[str] = ("assistant",),
) -> Conversation:
    """Return `chat` without turns that are `unsupported`, of UNSUPPORTED_BY; itself if it has none.

    Turns of one role are not joined if that would lose the weight or the reasoning of the second.
    A turn that becomes a user turn keeps the weight that its role has by `roles_to_train`.
    """
    turns, tools = chat.turns, chat.tools
    rejects_system = SYSTEM_TURNS in unsupported
    if TOOL_TURNS in unsupported and (
        tools or any(turn.role == "tool" or turn.tool_calls for turn in turns)
    ):
        is_tool_trained = "tool" in roles_to_train
        weight = None if is_tool_trained == ("user" in roles_to_train) else float(is_tool_trained)
        turns = tuple(_without_tool_turns(turns, weight))
        if tools:
            turns, tools = _with_declared_tools(turns, tools, rejects_system), ()
    same_weight = ("system" in roles_to_train) == ("user" in roles_to_train)
    if same_weight and (rejects_system or LATER_SYSTEM_TURNS in unsupported):
        turns = tuple(_without_system_turns(turns, keep_first=not rejects_system))
    joined = {role for role, name in _JOINED.items() if name in unsupported}
    if joined:
        turns = tuple(_join_turns(turns, joined))
    is_same = len(turns) == len(chat.turns) and all(map(operator.is_, turns, chat.turns))
    return chat if is_same else replace(chat, turns=turns, tools=tools)


def _without_tool_turns(turns: Iterable[Turn], weight: float | None) -> Iterable[Turn]:
    """Write calls as text of their answers, and consecutive tool results as one user turn.

    `weight` is given to a result without a weight; None = the weight of the user role.
    """
    pending: Turn | None = None
    for turn in turns:
        if turn.role == "tool":
            text = f"<tool_response>\n{turn.content}\n</tool_response>"
            result_weight = weight if turn.weight is None else turn.weight
            if pending is not None and pending.weight == result_weight:
                pending = replace(pending, content=f"{pending.content}\n{text}")
                continue
            if pending is not None:
                yield pending
            pending = Turn("user", text, result_weight)
            continue
        if pending is not None:
            yield pending
            pending = None
        if turn.tool_calls:
            calls = [
                {"name": call.name, "arguments": dict(call.arguments)} for call in turn.tool_calls
            ]
            texts = [f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls]
            content = "\n".join([turn.content, *texts] if turn.content else texts)
            turn = replace(turn, content=content, tool_calls=())
        yield turn
    if pending is not None:
        yield pending


def _with_declared_tools(
    turns: tuple[Turn, ...], tools: Iterable[object], rejects_system: bool
) -> tuple[Turn, ...]:
    """Write the declared tools into the system turn, or in front of the first question."""
    text = _TOOLS_TEXT.format(tools="\n".join(map(_json, tools)))
    if turns[0].role == "system":
        return (replace(turns[0], content=f"{turns[0].content}\n\n{text}"), *turns[1:])
    if not rejects_system:
        return (Turn("system", text), *turns)
    first = next((n for n, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        return turns
    return (*turns[:first], _prepend(text, turns[first]), *turns[first + 1 :])


def _without_system_turns(turns: Iterable[Turn], keep_first: bool) -> Iterable[Turn]:
    """Put system turns in front of the question that follows; one without a question is kept."""
    pending: list[Turn] = []
    for number, turn in enumerate(turns):
        if turn.role == "system" and not (keep_first and number == 0) and not turn.weight:
            pending.append(turn)
            continue
        if pending and turn.role == "user":
            turn = _prepend("\n\n".join(system.content for system in pending), turn)
            pending = []
        yield from pending
        pending = []
        yield turn
    yield from pending


def _join_turns(turns: Iterable[Turn], roles: Collection[str]) -> Iterable[Turn]:
    """Join consecutive turns of each of these roles."""
    last: Turn | None = None
    for turn in turns:
        if last is None:
            last = turn
        elif (
            turn.role in roles
            and last.role == turn.role
            and last.weight == turn.weight
            and turn.reasoning is None
            and last.trained is turn.trained is None
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


def _prepend(head: str, turn: Turn) -> Turn:
    start = turn.input_start + len(head) + 2 if turn.input_start else 0
    return replace(turn, content=f"{head}\n\n{turn.content}", input_start=start)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


class TaggedText(NamedTuple):
    """A content that starts with reasoning in tags; its parts, joined, are the content.

    `reasoning` and `answer` have no surrounding white space. `opening` is white space if the row
    has the closing tag alone, as text that a model wrote after a prompt with the opening tag.
    """

    opening: str
    reasoning: str
    closing: str
    answer: str
    end: str


def split_reasoning(content: str) -> TaggedText | None:
    """Split a content that starts with reasoning in tags; None for any other."""
    at = content.find(CLOSING)
    if at < 0:
        return None
    first = at - len(content[:at].lstrip())
    has_opening = content.startswith(OPENING, first)
    # A text may mention the tag, in quotes.
    end = at + len(CLOSING)
    is_quoted = content[at - 1 : at] in _QUOTES and content[end : end + 1] in _QUOTES
    if not has_opening and (OPENING in content[:at] or is_quoted):
        return None
    start = first + len(OPENING) if has_opening else first
    reasoning, answer = content[start:at].strip(), content[at + len(CLOSING) :].strip()
    start += len(content[start:at]) - len(content[start:at].lstrip()) if reasoning else 0
    after = len(content.rstrip()) - len(answer)
    return TaggedText(
        content[:start],
        reasoning,
        content[start + len(reasoning) : after],
        answer,
        content[after + len(answer) :],
    )


def move_to_field(turn: Turn) -> Turn:
    """Return an answer whose reasoning, if it has any, is all in its field.

    An answer with other tags gets an empty field, so that the template does not look for reasoning.
    """
    parts = split_reasoning(turn.content)
    if parts is None:
        return replace(turn, reasoning="") if turn.reasoning is None else turn
    text = turn.content[turn.content.index(CLOSING) + len(CLOSING) :]
    return replace(turn, content=_LINES.sub("", text), reasoning=_joined(turn, parts) or None)


def move_to_tags(turn: Turn) -> Turn:
    """Return an answer whose reasoning, if it has any, is in tags before its text."""
    parts = split_reasoning(turn.content)
    if not turn.reasoning and (parts is None or OPENING in parts.opening):
        return turn
    if parts is None:
        content = f"{OPENING}\n{turn.reasoning}\n{CLOSING}\n\n{turn.content}"
    elif not turn.reasoning:
        content = f"{OPENING}\n{turn.content.lstrip()}"
    else:
        content = f"{OPENING}\n{_joined(turn, parts)}\n{CLOSING}\n\n{parts.answer}"
    return replace(turn, content=content, reasoning=None)


def remove_reasoning(turn: Turn) -> Turn:
    """Return an answer without reasoning, also without a block that does not end."""
    parts = split_reasoning(turn.content)
    content = _BLOCK.sub("", parts.answer if parts else turn.content)
    if content.lstrip().startswith(OPENING):
        content = ""
    return replace(turn, content=content, reasoning=None)


def reasoning_of(turn: Turn) -> str:
    """Return the reasoning of an answer, without surrounding white space."""
    parts = split_reasoning(turn.content)
    return (_joined(turn, parts) if parts else turn.reasoning or "").strip()


def _joined(turn: Turn, parts: TaggedText) -> str:
    """Return the reasoning of the field and that of the tags, once if they are the same."""
    field = (turn.reasoning or "").strip()
    return "\n\n".join(dict.fromkeys(filter(None, (field, parts.reasoning))))
