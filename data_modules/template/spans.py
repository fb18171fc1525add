"""Find the characters of each turn in a rendered conversation; never uses `{% generation %}`.

An answer starts where the generation prompt ends, and ends with the stop token that the template
writes after it whatever comes next. AnswerFinder reads both off renders of a marked conversation
that are cut before or after the answer. As all turns are marked, text of another turn ends a part
of an answer. It renders each kind of place once, however many turns have it.

SpanFinder builds a skeleton for each kind of conversation and matches rows against it. For a row
that no skeleton matches, it puts marks around the row's own texts (`search`); without the marks,
that render must equal the row's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from common.text import shown
from data_modules.template.marks import (
    PRIVATE,
    TOOLS_TURN,
    WRAPS,
    AnswerSpans,
    Mark,
    MarkRun,
    RenderedChat,
    Skeleton,
    TurnSpan,
    Wrap,
    append_stop,
    call_ranges,
    find_marks,
    has_content_mark,
    kwargs_key,
    remove_marks,
    replace_with_marks,
    runs_by_turn,
    skeleton_key,
    strings_in,
)
from data_modules.template.rendering import Chat, Renderer, RowRefusedError, UnusableTemplateError
from data_modules.types import Turn

_T = TypeVar("_T")
_MAX_SKELETONS = 1024
_MAX_PLACES = 4096
_LOST = {
    "system": "lost_system",
    "user": "lost_user",
    "assistant": "lost_content",
    "tool": "lost_tool_turn",
}
"""role -> note on a row whose template does not write the content of such a turn"""
_QUESTION, _ANSWER = Turn("user", "\ue0f1c0\ue0f2"), Turn("assistant", "\ue0f1c1\ue0f2")
Tails = list[tuple[tuple[str, int], str]]
"""the key of each mark of a turn, with the text between it and the next mark"""


class _Ending(NamedTuple):
    """The end of a run of marks: the number of its last mark, and offsets from that mark's end."""

    last: int
    end: int
    stop_end: int
    stop: str
    suffix: str = ""


_NO_STOP = _Ending(0, 0, 0, "")


class _Style(NamedTuple):
    """How a template writes a small chat.

    `header` precedes an answer although the generation prompt does not end with it; `added` is the
    generation prompt alone, or the end of a question if the template has none. `usual_stop` is the
    stop token of a template that writes it only before the next message, None for other templates.
    `opener` is the token that starts a message, "" without one.
    """

    header: str = ""
    added: str = ""
    usual_stop: str | None = None
    opener: str = ""


class AnswerFinder:
    """Find the answers in marked texts.

    `specials` are the texts that can end a turn, `framing` the tokenizer's BOS and EOS. `follows`
    matches a special token (group 1), after white space at most.
    """

    def __init__(self, renderer: Renderer, specials: Iterable[str], framing: Iterable[str]) -> None:
        self._renderer = renderer
        self.special = re.compile("|".join(map(re.escape, specials)) or "(?!)")
        self.follows = re.compile(rf"\s*({self.special.pattern})")
        self._starts: dict[object, tuple[int, str]] = {}
        self._endings: dict[object, _Ending] = {}
        self._framing = frozenset(framing)
        self._styles: dict[object, _Style] = {}

    def find(self, chat: Chat, text: str, marks: Sequence[Mark]) -> AnswerSpans:
        """Return the spans of the answers of `chat` in its marked `text`.

        Raises RowRefusedError, with turn and reason, if the span of an answer cannot be determined.
        """
        runs = runs_by_turn(marks)
        spans: list[TurnSpan] = []
        calls: list[tuple[int, int]] = []
        suffix = ""
        for number, turn in enumerate(chat.turns):
            if turn.role != "assistant":
                continue
            own_runs = runs.get(number, [])
            written = {mark.part for run in own_runs for mark in run.marks}
            if "c" not in written and not turn.tool_calls and has_content_mark(turn.content):
                answer = remove_marks(turn.content)[0] or "..."
                reason = f"the chat template does not write the answer `{shown(answer)}`"
                raise _unusable_template(number, turn, reason)
            if not own_runs:
                continue
            first_run, *later_runs = own_runs
            start, other_prompt, ending = self._find_answer(chat, number, text, first_run)
            suffix = ending.suffix or suffix
            last = first_run.marks[ending.last].end
            stop_end = last + ending.stop_end
            end = last + ending.end
            spans.append(TurnSpan(number, start, end, stop_end, ending.stop, other_prompt))
            calls += call_ranges(first_run.marks[: ending.last + 1])
            seen = {mark.key for mark in first_run.marks}
            for run in later_runs:
                if not seen.issuperset(mark.key for mark in run.marks):
                    spans.append(self._later_part(number, text, run))
                    calls += call_ranges(run.marks)
                seen.update(mark.key for mark in run.marks)
        return AnswerSpans(spans, suffix, calls)

    def _find_answer(
        self, chat: Chat, number: int, text: str, run: MarkRun
    ) -> tuple[int, str, _Ending]:
        """Return where an answer starts, `TurnSpan.other_prompt`, and the end of its marks."""
        first = run.marks[0]
        before_start = run.before.end if run.before else 0
        before = text[before_start : first.start]
        # What a template may depend on: the turn, and its neighbours.
        turn = chat.turns[number]
        neighbours = (
            chat.turns[n] if 0 <= n < len(chat.turns) else None for n in (number - 1, number + 1)
        )
        surroundings = (
            *(other and (other.role, bool(other.tool_calls)) for other in neighbours),
            *(bool(turn.content), bool(turn.reasoning), len(turn.tool_calls)),
            *(bool(chat.tools), kwargs_key(chat)),
        )
        start_key = surroundings, _relative_turn(run.before, number), before, first.key
        find_start = partial(self._find_start, chat, number, run, before)
        num_shared, other_prompt = _cached(self._starts, start_key, _MAX_PLACES, find_start)
        tails = _tails_of(text, run)
        end_key = surroundings, _relative_turn(run.after, number), tuple(tails)
        find_ending = partial(self._find_ending, chat, number, run, tails)
        ending = _cached(self._endings, end_key, _MAX_PLACES, find_ending)
        return before_start + num_shared, other_prompt, ending

    def _find_start(self, chat: Chat, number: int, run: MarkRun, before: str) -> tuple[int, str]:
        """Return how much of `before` belongs to the prompt, and the prompt if it is another."""
        before_answer = chat._replace(turns=chat.turns[:number])
        (prompt,) = self._renderer.render([before_answer], add_prompt=True)
        (no_prompt,) = self._renderer.render([before_answer])
        style = self._style(chat)
        if isinstance(prompt, RowRefusedError) or isinstance(no_prompt, RowRefusedError):
            # The template cannot prompt for this answer.
            return self._end_of_prompt(before, style.added), ""
        marks = find_marks(prompt, chat) or []
        last = marks[-1] if marks else None
        if _relative_turn(last, number) != _relative_turn(run.before, number):
            raise _unusable_template(
                number,
                chat.turns[number],
                "the text before this answer differs from the text before the generation prompt, "
                "so the start of the answer cannot be determined",
            )
        expected = prompt[last.end if last else 0 :] + style.header
        num_shared = _common_prefix(expected, before)
        if num_shared == len(expected):
            return num_shared, ""
        added = prompt[_common_prefix(prompt, no_prompt) :] + style.header or style.added
        if num_shared == len(before):
            return num_shared, added or expected
        # The text before an answer may differ, by a count of turns or by reasoning left out.
        start = max(self._boundary(before, num_shared), self._end_of_prompt(before, added))
        return start, added or expected

    def _end_of_prompt(self, before: str, added: str) -> int:
        """Return where the longest prefix of a generation prompt last ends in `before`."""
        for most in range(len(added), 0, -1):
            if most == len(added) or self._boundary(added, most) == most:
                found = before.rfind(added[:most])
                if found >= 0:
                    return found + most
        return 0

    def _boundary(self, text: str, most: int) -> int:
        """Return the last position up to `most` that is not inside a special token or a word."""
        tokens = self.special.finditer(text)
        most = min((t.start() for t in tokens if t.start() < most < t.end()), default=most)
        ends = (token.end() for token in self.special.finditer(text))
        token_end = max((end for end in ends if end <= most), default=0)
        while most > token_end and not text[most - 1].isspace():
            most -= 1
        return most

    def _find_ending(self, chat: Chat, number: int, run: MarkRun, own: Tails) -> _Ending:
        """Return where a turn ends: after the text that follows its marks in all renders."""
        turns = chat.turns[: number + 1]
        closed = self._tails(chat._replace(turns=turns), number)
        continued = self._tails(chat._replace(turns=(*turns, *_next_turns(turns[-1]))), number)
        is_written = [{key for key, _ in tails} for tails in (closed, continued)]
        if continued and ("c", 0) in is_written[0] - is_written[1]:
            # Some templates write the content after the tool results; without results, it hides
            # the end of the call.
            no_content = replace(turns[-1], content="")
            closed = self._tails(chat._replace(turns=(*turns[:-1], no_content)), number) or closed
        renders = [tails for tails in (own, closed, continued) if tails]
        # Reasoning is not always written.
        common = set.intersection(*({key for key, _ in tails} for tails in renders))
        shared = [[tail for tail in tails if tail[0] in common] for tails in renders]
        num_shared = _common_prefix(*([key for key, _ in tails] for tails in shared))
        if not num_shared:
            raise _no_stop(number, turns[-1])
        is_shared = [index for index, tail in enumerate(own) if tail in shared[0]]
        after, *after_elsewhere = (tails[num_shared - 1][1] for tails in shared)
        style = self._style(chat)
        ending = self._find_stop(style, after, after_elsewhere, bool(closed), run.after is None)
        if ending is not None:
            return ending._replace(last=is_shared[num_shared - 1])
        if run.after and chat.turns[run.after.turn].role == "assistant":
            # The next answer continues this one.
            return _NO_STOP._replace(last=is_shared[num_shared - 1])
        raise _no_stop(number, turns[-1])

    def _find_stop(
        self,
        style: _Style,
        after: str,
        after_elsewhere: Sequence[str],
        is_closed: bool,
        is_last: bool,
    ) -> _Ending | None:
        """Find the stop token in the text after an answer; None without one.

        `after_elsewhere` is the text after it in other renders: at the end of a conversation (if
        `is_closed`), then before a next message. `is_last`: in `after`, no message follows.
        """
        if style.usual_stop is not None:
            return self._find_open_stop(after, after_elsewhere, style.usual_stop, is_last)
        tokens = [list(self.special.finditer(text)) for text in (after, *after_elsewhere)]
        num_shared = _common_prefix(*([token[0] for token in found] for found in tokens))
        # Some templates always end a conversation with the header of the next answer.
        headers = (n for n in range(1, num_shared) if tokens[0][n][0] == style.opener)
        num_shared = next(headers, num_shared)
        if num_shared:
            # If the end alone cannot be rendered, the next header may be shared as well.
            stop = tokens[0][num_shared - 1 if is_closed else 0]
            return _Ending(0, stop.start(), stop.end(), stop[0])
        stop_here = self.follows.match(after)
        if stop_here is None or is_last or not is_closed:
            return stop_here and _Ending(0, stop_here.start(1), stop_here.end(), stop_here[1])
        # This token ends past messages only; the model is to end its own with another one.
        return _NO_STOP

    def _find_open_stop(
        self, after: str, after_elsewhere: Sequence[str], usual: str, is_last: bool
    ) -> _Ending | None:
        """Find the stop token of a template that writes the `usual` one before messages only."""
        shared = after[: _common_prefix(after, *after_elsewhere)]
        usual_stops = [token for token in self.special.finditer(shared) if token[0] == usual]
        if usual_stops:
            return _Ending(0, usual_stops[-1].start(), usual_stops[-1].end(), usual)
        position = len(shared)
        for token in self.special.finditer(after):
            if token.start() < position < token.end():
                position = token.start()
        follows = self.follows.match(after, position)
        expected = self.follows.match(after_elsewhere[-1], position) if after_elsewhere else None
        if follows and expected and follows[1] != expected[1]:
            return _NO_STOP  # the next message is not one that usually follows an answer
        if follows is not None:
            return _Ending(0, follows.start(1), follows.end(), follows[1])
        if expected is not None and is_last:
            return _Ending(0, len(after), len(after), expected[1], expected[1])
        tokens = list(self.special.finditer(shared))
        if not tokens:
            return None
        return _Ending(0, tokens[-1].start(), tokens[-1].end(), tokens[-1][0])

    def _later_part(self, number: int, text: str, run: MarkRun) -> TurnSpan:
        """Return the span of a part of an answer that follows another turn written inside it."""
        start, end = run.marks[0].start, run.marks[-1].end
        until = run.after.start if run.after else len(text)
        stop = self.follows.match(text, end, until)
        if stop is None or stop[1] not in {ending.stop for ending in self._endings.values()}:
            return TurnSpan(number, start, end, end, "")
        return TurnSpan(number, start, stop.start(1), stop.end(1), stop[1])

    def _tails(self, chat: Chat, number: int) -> Tails:
        """Render `chat` and return the tails of a turn's first run; none if it is rejected."""
        (text,) = self._renderer.render([chat])
        if isinstance(text, RowRefusedError):
            return []
        runs = runs_by_turn(find_marks(text, chat) or []).get(number)
        return _tails_of(text, runs[0]) if runs else []

    def _style(self, chat: Chat) -> _Style:
        """Return the style of the template with the arguments of `chat`."""
        find = partial(self._find_style, Chat((), (), chat.kwargs))
        return _cached(self._styles, kwargs_key(chat), _MAX_SKELETONS, find)

    def _find_style(self, chat: Chat) -> _Style:
        question = chat._replace(turns=(_QUESTION,))
        dialog = chat._replace(turns=(_QUESTION, _ANSWER))
        (prompt,) = self._renderer.render([question], add_prompt=True)
        no_prompt, whole = (self._renderer.render([chat])[0] for chat in (question, dialog))
        if not (isinstance(no_prompt, str) and isinstance(prompt, str) and isinstance(whole, str)):
            return _Style()
        marks = [mark for mark in find_marks(whole, dialog) or [] if mark.turn == 1]
        if not marks:
            return _Style()
        header = question_end = ""
        if no_prompt == prompt:
            question_end = no_prompt[no_prompt.rfind("\ue0f2") + 1 :]
            before = whole[whole.find("\ue0f2") + 1 : marks[0].start]
            header = before[_common_prefix(question_end, before) :]
        header = header if header.strip() else ""
        # The first message starts with a special token, perhaps after BOS or EOS: it ends none.
        opener = self.follows.match(no_prompt)
        while opener and opener[1] in self._framing:
            opener = self.follows.match(no_prompt, opener.end())
        end, usual_stop = whole[marks[-1].end :], None
        if not self.special.search(end):
            continued = dialog._replace(turns=(*dialog.turns, *_next_turns(_ANSWER)))
            after = "".join(text for _, text in self._tails(continued, 1)[-1:])
            stop = self.follows.match(after, _common_prefix(end, after))
            usual_stop = stop[1] if stop else ""
        added = prompt[_common_prefix(no_prompt, prompt) :] or header or question_end
        return _Style(header, added, usual_stop, opener[1] if opener else "")


def _no_stop(number: int, turn: Turn) -> UnusableTemplateError:
    answer = remove_marks(turn.content)[0].strip()
    what = f"the answer `{shown(answer)}`" if answer else "its call"
    reason = (
        f"the chat template writes no stop token after {what}, so the model would not learn to end "
        "its answers"
    )
    return _unusable_template(number, turn, reason)


def _unusable_template(number: int, turn: Turn, reason: str) -> UnusableTemplateError:
    fix = "set data.chat_template=plain, or give a .jinja file that does"
    return UnusableTemplateError(f"turn {number + 1} ({turn.role}): {reason}; {fix}")


def _cached(cache: dict[object, _T], key: object, max_size: int, find: Callable[[], _T]) -> _T:
    """Return the value of `key`, found once; a full cache forgets its oldest value."""
    if key not in cache:
        value = find()
        if len(cache) >= max_size:
            del cache[next(iter(cache))]
        cache[key] = value
    return cache[key]


def _common_prefix(first: Sequence[object], *others: Sequence[object]) -> int:
    """Return the length of the longest common prefix of sequences."""
    most = min(map(len, others), default=len(first))
    for index, element in enumerate(first[:most]):
        if any(other[index] != element for other in others):
            return index
    return min(len(first), most)


def _tails_of(text: str, run: MarkRun) -> Tails:
    """Return the key of each mark of a run, with the text up to the next mark."""
    until = run.after.start if run.after else len(text)
    ends = [*(mark.start for mark in run.marks[1:]), until]
    return [(mark.key, text[mark.end : end]) for mark, end in zip(run.marks, ends, strict=True)]


def _next_turns(turn: Turn) -> tuple[Turn, ...]:
    """Return the turns that usually follow an answer: the results of its calls, or a question."""
    content = "\ue0f1c99999999\ue0f2"
    if not turn.tool_calls:
        return (Turn("user", content),)
    return tuple(Turn("tool", content, tool_call_id=call.id) for call in turn.tool_calls)


def _relative_turn(mark: Mark | None, number: int) -> tuple[int, str] | None:
    """Return the turn of a mark, counted from turn `number`, and its part."""
    if mark is None:
        return None
    return (mark.turn if mark.turn == TOOLS_TURN else mark.turn - number), mark.part


class SpanFinder:
    """Render conversations and find their turns.

    `specials` are the texts that can end a turn, `framing` the tokenizer's BOS and EOS.
    """

    def __init__(
        self, renderer: Renderer, specials: Iterable[str], framing: Iterable[str] = ()
    ) -> None:
        self._renderer = renderer
        self._answers = AnswerFinder(renderer, specials, framing)
        self._skeletons: dict[object, Skeleton | None] = {}

    def render(self, chats: Sequence[Chat]) -> list[RenderedChat | RowRefusedError]:
        """Render each chat once, and find its turns."""
        texts = self._renderer.render(chats)
        rendered: list[RenderedChat | RowRefusedError] = []
        for chat, text in zip(chats, texts, strict=True):
            if isinstance(text, RowRefusedError):
                rendered.append(text)
                continue
            build = partial(self._build_skeleton, chat)
            skeleton = _cached(self._skeletons, skeleton_key(chat), _MAX_SKELETONS, build)
            found = skeleton.match(text, chat) if skeleton else None
            try:
                rendered.append(found or self.search(chat, text))
            except RowRefusedError as error:
                rendered.append(error)
        return rendered

    def search(self, chat: Chat, text: str) -> RenderedChat:
        """Find the turns by marks around the row's own texts: slow, but correct for any row."""
        texts = [
            [t.content, t.reasoning, [[call.name, call.arguments] for call in t.tool_calls]]
            for t in chat.turns
        ]
        if any(map(PRIVATE.search, strings_in(texts))):
            raise UnusableTemplateError(
                "its text contains a private-use character (U+E0F1 to U+E0F4), and the chat "
                "template does not copy that text unchanged; remove the character"
            )
        first_error: RowRefusedError | None = None
        for wrap in WRAPS:
            try:
                rendered = self._search(chat, wrap, text)
            except RowRefusedError as error:
                first_error = first_error or error
                continue
            if rendered is not None:
                return rendered
        raise first_error or UnusableTemplateError(
            "the chat template renders this row differently when a text in it changes, so its "
            "answers cannot be located; set data.chat_template=plain"
        )

    def _search(self, chat: Chat, wrap: Wrap, text: str) -> RenderedChat | None:
        """Return the turns by this wrap; None if the render differs from `text`."""
        wrapped = chat._replace(turns=tuple(wrap(turn, n) for n, turn in enumerate(chat.turns)))
        (rendered,) = self._renderer.render([wrapped])
        if (
            isinstance(rendered, RowRefusedError)
            or (marks := find_marks(rendered, wrapped)) is None
        ):
            return None
        unmarked, new_position = remove_marks(rendered)
        if unmarked != text:
            return None
        answers = self._answers.find(wrapped, rendered, marks)
        _check_answers_unchanged(chat, rendered, marks)
        spans = [
            span._replace(
                start=new_position(span.start),
                end=new_position(span.end),
                stop_end=new_position(span.stop_end),
            )
            for span in self._all_spans(wrapped, rendered, marks, answers)
        ]
        spans = [_with_trailing_space(span, chat.turns[span.turn], text) for span in spans]
        lost = _find_lost(wrapped, marks, answers)
        if chat.tools and self._renderer.render([chat._replace(tools=())]) == [text]:
            lost = ("lost_tools", *lost)
        return RenderedChat(*append_stop(text, spans, answers.suffix), lost)

    def _build_skeleton(self, chat: Chat) -> Skeleton | None:
        """Render `chat` with marks in place of its texts, and find its turns."""
        chat = replace_with_marks(chat)
        (text,) = self._renderer.render([chat])
        if isinstance(text, RowRefusedError) or (marks := find_marks(text, chat)) is None:
            return None
        try:
            answers = self._answers.find(chat, text, marks)
        except RowRefusedError:
            return None
        spans = self._all_spans(chat, text, marks, answers)
        lost = _find_lost(chat, marks, answers)
        if chat.tools and not any(mark.turn == TOOLS_TURN for mark in marks):
            lost = ("lost_tools", *lost)
        answers = answers._replace(spans=spans)
        return Skeleton.build(text, marks, answers, self._answers.special, lost)

    def _all_spans(
        self, chat: Chat, text: str, marks: Sequence[Mark], answers: AnswerSpans
    ) -> list[TurnSpan]:
        """Return the spans of the answers and of other turns, each where its content first is."""
        stops = {span.stop for span in answers.spans if span.stop}
        spans = {}
        for mark in marks:
            is_other = mark.part == "c" and chat.turns[mark.turn].role != "assistant"
            if is_other and mark.turn not in spans:
                stop = self._answers.follows.match(text, mark.end)
                is_stop = stop is not None and stop[1] in stops
                end = (stop.end(), stop[1]) if stop and is_stop else (mark.end, "")
                spans[mark.turn] = TurnSpan(mark.turn, mark.start, mark.end, *end)
        return sorted([*answers.spans, *spans.values()])


def _find_lost(chat: Chat, marks: Sequence[Mark], answers: AnswerSpans) -> tuple[str, ...]:
    """Return notes on the contents and calls of a marked chat that are in no span of their turn."""
    spans: dict[int, list[TurnSpan]] = {}
    for span in answers.spans:
        spans.setdefault(span.turn, []).append(span)
    written = {
        mark[:3]
        for mark in marks
        if mark.turn not in spans
        or any(span.start <= mark.start < span.stop_end for span in spans[mark.turn])
    }
    lost = []
    for number, turn in enumerate(chat.turns):
        if has_content_mark(turn.content) and (number, "c", 0) not in written:
            lost.append(_LOST[turn.role])
        if any((number, "f", call) not in written for call in range(len(turn.tool_calls))):
            lost.append("lost_tool_calls")
    return tuple(dict.fromkeys(lost))


def _with_trailing_space(span: TurnSpan, turn: Turn, text: str) -> TurnSpan:
    """Extend an answer without a stop token over the white space at its end, outside of marks."""
    core = turn.content.rstrip()
    start = span.end - len(core)
    is_answer = turn.role == "assistant" and bool(core) and not span.stop
    if not is_answer or start < 0 or not text.startswith(turn.content, start):
        return span
    end = start + len(turn.content)
    return span._replace(end=end, stop_end=end)


def _check_answers_unchanged(chat: Chat, text: str, marks: Sequence[Mark]) -> None:
    """Raise RowRefusedError if the template changes the text of an answer."""
    for mark in marks:
        turn = chat.turns[mark.turn]
        if mark.part != "c" or turn.role != "assistant":
            continue
        written, _ = remove_marks(text[mark.start : mark.end])
        if not written:  # a mark after the content
            written, _ = remove_marks(text[: mark.start])
            written = written[-len(turn.content.rpartition("</think>")[2].strip()) :]
        if written not in turn.content:
            raise UnusableTemplateError(
                f"turn {mark.turn + 1} (assistant): the chat template does not write the answer "
                f"`{shown(turn.content)}` unchanged; set data.chat_template=plain, or give a "
                ".jinja file that does"
            )
