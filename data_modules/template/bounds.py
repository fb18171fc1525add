"""Find where each answer begins and ends in a conversation whose own texts are marked.

An answer begins where the generation prompt ends, and ends with the stop token that the template
writes after it whatever comes next: both are read off renders of the same turns, cut behind the
answer or before it. Nothing of another turn can stand between, since the marks of all turns are in
the text. What a place looks like decides what is found there, so that each kind of place is
rendered once, however many turns have it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

from data_modules.messages import shown
from data_modules.template.marks import CALL_PARTS, TOOLS, Mark, holds_content, marks_in, unmarked
from data_modules.template.rendering import Chat, Renderer, RowRefusedError
from data_modules.types import Turn

MAX_PLACES = 4096
_QUESTION, _ANSWER = Turn("user", "\ue0f1c0\ue0f2"), Turn("assistant", "\ue0f1c1\ue0f2")


Tails = list[tuple[tuple[str, int], str]]
"""marks of a turn by what they stand for, each with the text up to the next one"""


class TurnSpan(NamedTuple):
    """Say where a turn stands in the text: `start` to `end`, its stop token up to `stop_end`.

    `start` is the first character that an assistant has to say. `stop` is the token's text, empty
    where none follows. A turn that another one interrupts has a span for each of its parts.
    """

    turn: int
    start: int
    end: int
    stop_end: int
    stop: str


class Bounds(NamedTuple):
    """Hold where the answers of a marked text stand.

    `suffix` is a stop token that the template writes in front of the next message only, and that
    ends the text therefore. `calls` are the stretches that calls take, from mark to mark.
    """

    spans: list[TurnSpan]
    suffix: str
    calls: list[tuple[int, int]]


class _Ending(NamedTuple):
    """Say where a run of marks ends: at mark number `last`, and how far behind that one."""

    last: int
    end: int
    stop_end: int
    stop: str
    suffix: str = ""


class _Style(NamedTuple):
    """Say how a template writes a small chat.

    `header` is what an answer has in front of it although no generation prompt ends in that,
    `added` what a generation prompt adds, or what ends a question where there is no such prompt.
    `usual_stop` is the token that ends an answer where it stands in front of the next message only,
    None for other templates; `openers` begin a text.
    """

    header: str = ""
    added: str = ""
    usual_stop: str | None = None
    openers: frozenset[str] = frozenset()


class _Run(NamedTuple):
    """Hold marks of one turn with no other turn's between them, and the marks around."""

    marks: list[Mark]
    before: Mark | None
    after: Mark | None


class BoundFinder:
    """Find answers.

    `specials` are the texts that can end a turn, `framing` the tokenizer's BOS and EOS.
    """

    def __init__(self, renderer: Renderer, specials: Iterable[str], framing: Iterable[str]) -> None:
        self._renderer = renderer
        self.special = re.compile("|".join(map(re.escape, specials)) or "(?!)")
        self._follows = re.compile(rf"\s*({self.special.pattern})")
        self._starts: dict[object, int] = {}
        self._endings: dict[object, _Ending] = {}
        self._framing = frozenset(framing)

    def find(self, chat: Chat, text: str, marks: Sequence[Mark]) -> Bounds:
        """Return where the answers of `chat` stand in its `text`.

        RowRefusedError, with turn and reason, where the span of an answer cannot be determined.
        """
        runs = _runs(marks)
        spans: list[TurnSpan] = []
        calls: list[tuple[int, int]] = []
        suffix = ""
        for number, turn in enumerate(chat.turns):
            if turn.role != "assistant":
                continue
            own = runs.get(number, [])
            written = {mark.part for run in own for mark in run.marks}
            if "c" not in written and not turn.tool_calls and holds_content(turn.content):
                answer = unmarked(turn.content)[0] or "..."
                why = f"the chat template does not write the answer `{shown(answer)}`"
                raise self._lost(number, turn, why)
            if not own:
                continue
            start, ending = self._answer(chat, number, text, own[0])
            suffix = ending.suffix or suffix
            last = own[0].marks[ending.last].end
            stop_end = last + ending.stop_end
            spans.append(TurnSpan(number, start, last + ending.end, stop_end, ending.stop))
            calls += _calls(own[0].marks[: ending.last + 1])
            seen = {mark.what for mark in own[0].marks}
            for run in own[1:]:
                if not seen.issuperset(mark.what for mark in run.marks):
                    spans.append(self._later_part(number, text, run))
                    calls += _calls(run.marks)
                seen.update(mark.what for mark in run.marks)
        for span in spans:
            _check_alone(span, marks)
        return Bounds(spans, suffix, calls)

    def _answer(self, chat: Chat, number: int, text: str, run: _Run) -> tuple[int, _Ending]:
        """Return where an answer begins, and where the run of its marks ends."""
        first = run.marks[0]
        after_other = run.before.end if run.before else 0
        before = text[after_other : first.start]
        shape = _shape(chat, number)
        place = shape, _whose(run.before, number), before, first.what
        if place not in self._starts:
            _forget_oldest(self._starts)
            self._starts[place] = self._find_start(chat, number, run, before)
        start = after_other + self._starts[place]
        until = run.after.start if run.after else len(text)
        seams = [m.end for m in run.marks]
        borders = [*(m.start for m in run.marks[1:]), until]
        tails = [text[a:b] for a, b in zip(seams, borders, strict=True)]
        key = shape, _whose(run.after, number), tuple(m.what for m in run.marks), tuple(tails)
        if key not in self._endings:
            _forget_oldest(self._endings)
            self._endings[key] = self._find_ending(chat, number, run, tails)
        return start, self._endings[key]

    def stop_at(self, text: str, position: int) -> re.Match[str] | None:
        """Return the control token, as group 1, that follows in `text` but for blanks."""
        return self._follows.match(text, position)

    def _find_start(self, chat: Chat, number: int, run: _Run, before: str) -> int:
        """Return how many characters of `before` the template writes as generation prompt."""
        before_answer = Chat(chat.turns[:number], chat.tools)
        prompt, plain = (self._renderer.render([before_answer], adds)[0] for adds in (True, False))
        style = self._style
        if isinstance(prompt, RowRefusedError) or isinstance(plain, RowRefusedError):
            # Nothing stands in front of this answer: no prompt is ever generated from there.
            return self._aligned(before, style.added)
        marks = marks_in(prompt, chat) or []
        last = marks[-1] if marks else None
        if _whose(last, number) != _whose(run.before, number):
            raise self._lost(
                number,
                chat.turns[number],
                "the chat template writes other texts in front of this answer than in front of the "
                "generation prompt, so where it begins cannot be determined",
            )
        asks = prompt[last.end if last else 0 :] + style.header
        shared = _shared(asks, before)
        if shared in (len(asks), len(before)):
            return shared
        # What comes before the answers may differ, by a count of turns or thoughts left out.
        added = prompt[_shared(prompt, plain) :] + style.header or style.added
        return max(self._border(before, shared), self._aligned(before, added))

    def _aligned(self, before: str, added: str) -> int:
        """Return where the last and longest beginning of a generation prompt ends in `before`."""
        for most in range(len(added), 0, -1):
            if most == len(added) or self._border(added, most) == most:
                found = before.rfind(added[:most])
                if found >= 0:
                    return found + most
        return 0

    def _border(self, text: str, most: int) -> int:
        """Return the last place up to `most` that cuts no control token and no word."""
        behind = 0
        for control in self.special.finditer(text):
            if control.end() > most:
                most = min(most, control.start())
                break
            behind = control.end()
        while most > behind and not text[most - 1].isspace():
            most -= 1
        return most

    def _find_ending(self, chat: Chat, number: int, run: _Run, tails: Sequence[str]) -> _Ending:
        """Return where a turn ends: with what follows its own marks whatever comes next."""
        turns = chat.turns[: number + 1]
        closed = self._tails(Chat(turns, chat.tools), number)
        goes_on = self._tails(Chat((*turns, *_following(turns[-1])), chat.tools), number)
        written = [{what for what, _ in one} for one in (closed, goes_on)]
        if goes_on and ("c", 0) in written[0] - written[1]:
            # Some write its words behind the results: without results they hide how a call ends.
            silent = replace(turns[-1], content="")
            closed = self._tails(Chat((*turns[:-1], silent), chat.tools), number) or closed
        own: Tails = [(mark.what, tail) for mark, tail in zip(run.marks, tails, strict=True)]
        known = _in_all([other for other in (own, closed, goes_on) if other])
        shared = _shared(*([what for what, _ in one] for one in known))
        if not shared:
            raise self._no_stop(number, turns[-1])
        last = [index for index, one in enumerate(own) if one in known[0]][shared - 1]
        here, *there = (one[shared - 1][1] for one in known)
        stop = self._stop(here, there, bool(closed), run.after is None)
        if stop is not None:
            return stop._replace(last=last)
        if run.after and chat.turns[run.after.turn].role == "assistant":
            return _Ending(last, 0, 0, "")  # the next answer goes on with this one
        raise self._no_stop(number, turns[-1])

    def _stop(
        self, here: str, there: Sequence[str], is_closed: bool, is_last: bool
    ) -> _Ending | None:
        """Find the stop token in what follows an answer, None where there is none.

        `there` is what follows it in other renders: first at the end of a conversation, where
        `is_closed`, then in front of a next message. `is_last`: nothing comes next `here`.
        """
        style = self._style
        if style.usual_stop is not None:
            return self._open_stop(here, there, style.usual_stop, is_last)
        controls = [list(self.special.finditer(one)) for one in (here, *there)]
        shared = _shared(*([control[0] for control in one] for one in controls))
        # Some write the header of the next answer behind each conversation, with or without prompt.
        headers = (n for n in range(1, shared) if controls[0][n][0] in style.openers)
        shared = next(headers, shared)
        if shared:
            # Where the end alone cannot be rendered, the next header may be shared as well.
            stop = controls[0][shared - 1 if is_closed else 0]
            return _Ending(0, stop.start(), stop.end(), stop[0])
        stop_here = self._follows.match(here)
        if stop_here is None or is_last or not is_closed:
            return stop_here and _Ending(0, stop_here.start(1), stop_here.end(), stop_here[1])
        # It ends messages of the past; the model is to end its own with another one.
        return _Ending(0, 0, 0, "")

    def _open_stop(
        self, here: str, there: Sequence[str], usual: str, is_last: bool
    ) -> _Ending | None:
        """Find the stop token where a template writes the `usual` one in front of messages."""
        common = here[: _shared(here, *there)]
        known = [one for one in self.special.finditer(common) if one[0] == usual]
        if known:
            return _Ending(0, known[-1].start(), known[-1].end(), usual)
        at = len(common)
        for control in self.special.finditer(here):
            if control.start() < at < control.end():
                at = control.start()
        follows = self._follows.match(here, at)
        expected = self._follows.match(there[-1], at) if there else None
        if follows and expected and follows[1] != expected[1]:
            return _Ending(0, 0, 0, "")  # the next message is not what an answer is followed by
        if follows is not None:
            return _Ending(0, follows.start(1), follows.end(), follows[1])
        if expected is not None and is_last:
            return _Ending(0, len(here), len(here), expected[1], expected[1])
        written = list(self.special.finditer(common))
        if not written:
            return None
        return _Ending(0, written[-1].start(), written[-1].end(), written[-1][0])

    def _later_part(self, number: int, text: str, run: _Run) -> TurnSpan:
        """Return the span of what an answer says after another turn was written inside it."""
        start, end = run.marks[0].start, run.marks[-1].end
        until = run.after.start if run.after else len(text)
        stop = self._follows.match(text, end, until)
        if stop is None or stop[1] not in {one.stop for one in self._endings.values()}:
            return TurnSpan(number, start, end, end, "")
        return TurnSpan(number, start, stop.start(1), stop.end(1), stop[1])

    def _tails(self, chat: Chat, number: int) -> Tails:
        """Return the marks of a turn's first run with what follows each; none if refused."""
        (text,) = self._renderer.render([chat], False)
        marks = None if isinstance(text, RowRefusedError) else marks_in(text, chat)
        runs = _runs(marks or []).get(number)
        if not runs or isinstance(text, RowRefusedError):
            return []
        run = runs[0]
        until = run.after.start if run.after else len(text)
        borders = [*(mark.start for mark in run.marks[1:]), until]
        return [
            (mark.what, text[mark.end : border])
            for mark, border in zip(run.marks, borders, strict=True)
        ]

    @cached_property
    def _style(self) -> _Style:
        question, dialog = Chat((_QUESTION,)), Chat((_QUESTION, _ANSWER))
        texts = [self._renderer.render([question], adds)[0] for adds in (False, True)]
        plain, prompt, whole = *texts, self._renderer.render([dialog], False)[0]
        if not (isinstance(plain, str) and isinstance(prompt, str) and isinstance(whole, str)):
            return _Style()
        marks = marks_in(whole, dialog) or []
        own = [mark for mark in marks if mark.turn == 1]
        if not own:
            return _Style()
        header = asks = ""
        if plain == prompt:
            asks = plain[plain.rfind("\ue0f2") + 1 :]
            before = whole[whole.find("\ue0f2") + 1 : own[0].start]
            header = before[_shared(asks, before) :]
        header = header if header.strip() else ""
        return _Style(
            header,
            prompt[_shared(plain, prompt) :] or header or asks,
            self._usual_stop(dialog, whole[own[-1].end :]),
            frozenset(self._openers(plain)),
        )

    def _usual_stop(self, dialog: Chat, end: str) -> str | None:
        if self.special.search(end):
            return None
        tails = self._tails(Chat((*dialog.turns, *_following(dialog.turns[-1]))), 1)
        stop = self._follows.match(tails[-1][1], _shared(end, tails[-1][1])) if tails else None
        return stop[1] if stop else ""

    def _openers(self, text: str) -> Iterator[str]:
        """Yield the control token that begins the first message: it opens messages, ends none."""
        position = 0
        while found := self._follows.match(text, position):
            position = found.end()
            if found[1] not in self._framing:
                yield found[1]
                return

    def _no_stop(self, number: int, turn: Turn) -> RowRefusedError:
        answer = unmarked(turn.content)[0].strip()
        what = f"the answer `{shown(answer)}`" if answer else "its call"
        why = f"the chat template writes no stop token after {what}, so no end can be trained on"
        return self._lost(number, turn, why)

    def _lost(self, number: int, turn: Turn, why: str) -> RowRefusedError:
        fix = "set data.chat_template=plain, or give a .jinja file that does"
        return RowRefusedError(f"turn {number + 1} ({turn.role}): {why}; {fix}")


def _forget_oldest(places: dict[object, Any]) -> None:
    if len(places) >= MAX_PLACES:
        del places[next(iter(places))]


def _shared(first: Sequence[object], *others: Sequence[object]) -> int:
    """Return how many elements sequences have in common from their beginning on."""
    most = min(map(len, others), default=len(first))
    for index, one in enumerate(first[:most]):
        if any(other[index] != one for other in others):
            return index
    return min(len(first), most)


def _runs(marks: Sequence[Mark]) -> dict[int, list[_Run]]:
    """Return the runs of each turn's marks, in order."""
    runs: dict[int, list[_Run]] = {}
    first = 0
    for index, mark in enumerate(marks):
        after = marks[index + 1] if index + 1 < len(marks) else None
        if after is None or after.turn != mark.turn:
            before = marks[first - 1] if first else None
            runs.setdefault(mark.turn, []).append(
                _Run(list(marks[first : index + 1]), before, after)
            )
            first = index + 1
    return runs


def _calls(marks: Sequence[Mark]) -> list[tuple[int, int]]:
    """Return the stretches that calls take among the marks of an answer."""
    stretches: list[tuple[int, int]] = []
    is_call = False
    for mark in marks:
        if mark.part in CALL_PARTS:
            start = stretches.pop()[0] if is_call else mark.start
            stretches.append((start, mark.end))
        is_call = mark.part in CALL_PARTS
    return stretches


def _check_alone(span: TurnSpan, marks: Sequence[Mark]) -> None:
    """Raise RowRefusedError where a span holds anything of another turn."""
    first = bisect_right(marks, span.start, key=lambda mark: mark.end)
    for mark in islice(marks, first, None):
        if mark.start >= span.stop_end:
            return
        if mark.turn != span.turn:
            raise RowRefusedError(
                f"turn {span.turn + 1} (assistant): the chat template writes turn {mark.turn + 1} "
                "inside it, so its span cannot be determined; set data.chat_template=plain"
            )


def _in_all(tails: Sequence[Tails]) -> list[Tails]:
    """Leave out the marks that one of the texts lacks: thoughts are not always written."""
    shared = set.intersection(*({what for what, _ in one} for one in tails))
    return [[one for one in part if one[0] in shared] for part in tails]


def _following(turn: Turn) -> tuple[Turn, ...]:
    """Return what may follow an answer: the results of its calls, or another question."""
    content = "\ue0f1c99999999\ue0f2"
    if not turn.tool_calls:
        return (Turn("user", content),)
    return tuple(Turn("tool", content, tool_call_id=call.id) for call in turn.tool_calls)


def _whose(mark: Mark | None, number: int) -> tuple[int, str] | None:
    """Return whose a mark is, seen from turn `number`."""
    if mark is None:
        return None
    return (mark.turn if mark.turn == TOOLS else mark.turn - number), mark.part


def _shape(chat: Chat, number: int) -> tuple[object, ...]:
    """Return what of a turn and its neighbours a template may look at."""
    turn = chat.turns[number]
    neighbours = (
        chat.turns[n] if 0 <= n < len(chat.turns) else None for n in (number - 1, number + 1)
    )
    roles = tuple(one and (one.role, bool(one.tool_calls)) for one in neighbours)
    return roles, bool(turn.content), bool(turn.reasoning), len(turn.tool_calls), bool(chat.tools)
