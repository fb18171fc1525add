"""The mask of all styles of templates, with contents that could mislead it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_modules.template import ChatTemplate, MaskConfig
from data_modules.template.named_templates import TEMPLATE_NAMES, named_template
from data_modules.template.rendering import Chat, RowRefusedError
from data_modules.types import Conversation, Encoded, Turn
from tests.data_modules.conftest import ORIGIN, build_tokenizer
from tests.data_modules.published import tokenizer_for
from tests.data_modules.test_template import NO_GENERATION_PROMPT, NO_PREFIX, encode, runs


@dataclass
class Style:
    """A template, and how it writes an answer."""

    text: str
    stop: str
    written: Callable[[str], str] = field(default=lambda content: content)


def _named(name: str, stop: str, written: Callable[[str], str] = lambda text: text) -> Style:
    return Style(named_template(name), stop, written)


def _after_blank(text: str) -> str:
    return f" {text}"


STYLES = {
    "plain": _named("plain", "</s>"),
    "chatml": _named("chatml", "<|im_end|>"),
    "alpaca": _named("alpaca", "</s>"),
    "deepseek": _named("deepseek", "<｜end▁of▁sentence｜>"),
    "gemma": _named("gemma", "<end_of_turn>", str.strip),
    "gemma4": _named("gemma4", "<turn|>", str.strip),
    "granite": _named("granite", "<|end_of_text|>"),
    "llama2": _named("llama2", "</s>", lambda text: f" {text.strip()} "),
    "llama3": _named("llama3", "<|eot_id|>", str.strip),
    "llama3_1": _named("llama3_1", "<|eot_id|>", str.strip),
    "mistral": _named("mistral", "</s>", _after_blank),
    "mistral_v3": _named("mistral_v3", "</s>", lambda text: f" {text.strip()}"),
    "mistral_v7": _named("mistral_v7", "</s>"),
    "phi3": _named("phi3", "<|end|>"),
    "phi4": _named("phi4", "<|im_end|>"),
    "t5": _named("t5", "</s>", lambda text: f"\n{text}"),
    "vicuna": _named("vicuna", "</s>", _after_blank),
    "zephyr": _named("zephyr", "</s>"),
    "no prefix": Style(NO_PREFIX, "<|im_end|>"),
    "no generation prompt": Style(NO_GENERATION_PROMPT, "<|im_end|>"),
}
OTHERS = {"qwen3": _named("qwen3", "<|im_end|>"), "harmony": _named("harmony", "<|return|>")}
"""styles that write the last answer in another way than earlier ones"""


IN_MAKE_TEST = {
    *("plain", "chatml", "alpaca", "gemma4", "llama2", "llama3", "mistral", "mistral_v3", "vicuna"),
    *("no prefix", "no generation prompt", *OTHERS),
}
"""one style for each way to write an answer, its end, and a system turn"""


def cases(*styles: str) -> list[Any]:
    """Return the styles, marked slow if a similar one is in IN_MAKE_TEST."""
    return [
        pytest.param(style, marks=() if style in IN_MAKE_TEST else pytest.mark.slow)
        for style in styles
    ]


@cache
def template_of(style: str, adds_bos: bool = False) -> ChatTemplate:
    """Resolve the template of a style, with a tokenizer that has its tokens."""
    return ChatTemplate.resolve(
        tokenizer_for((STYLES | OTHERS)[style].text, adds_bos=adds_bos), None
    )


def trained_texts(template: ChatTemplate, encoded: Encoded) -> str:
    ids, weights = encoded.input_ids, encoded.weights
    return str(template.tokenizer.decode(ids[weights > 0].tolist()))


PIECES = [
    *("yes", " two", "one", "a", "user", "assistant", "model", "ASSISTANT:", "[INST]", "[/INST]"),
    *("### Assistant:\n", "### Response:\n", "\n", "\n\n", " ", "\t", "\u00e9t\u00e9", "\u2603"),
    *("e\u0301", "\U0001f600", "im_end", "<think>", "{{ x }}", "\u00a0", "\u3000"),
]
contents = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
answers = contents.filter(lambda text: bool(text.strip()))


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """Draw 1 to 3 rounds with tricky contents; some answers repeat an earlier text."""
    turns = [Turn("system", draw(contents))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        turns.append(Turn("user", draw(contents)))
        earlier = [turn.content for turn in turns if turn.content.strip()]
        texts = answers | st.sampled_from(earlier) if earlier else answers
        turns.append(Turn("assistant", draw(texts)))
    return Conversation(tuple(turns), ORIGIN)


@pytest.mark.parametrize("style", cases(*STYLES, *OTHERS))
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(chat=conversations(), adds_bos=st.booleans())
def test_ids_are_those_of_apply_chat_template_and_answers_are_trained_on(
    style: str, adds_bos: bool, chat: Conversation
) -> None:
    template = template_of(style, adds_bos)
    encoded = encode(template, chat)
    messages = [{"role": turn.role, "content": turn.content} for turn in chat.turns]
    expected = template.tokenizer.apply_chat_template(messages, return_dict=False)
    bos = template.tokenizer.bos_token_id
    if adds_bos and expected[0] != bos:
        expected = [bos, *expected]
    num_ids = len(encoded.input_ids)
    assert encoded.input_ids.tolist() == expected[:num_ids]
    assert not any(expected[num_ids:].count(stop) for stop in template.stop_token_ids)
    if style in STYLES:
        check_mask(template, STYLES[style], chat, encoded)
    check_that_skeleton_and_search_agree(template, Chat(chat.turns), has_skeleton=style in STYLES)


def check_mask(template: ChatTemplate, style: Style, chat: Conversation, encoded: Encoded) -> None:
    """Answers and their stop tokens are trained on, and nothing else."""
    answers = [turn.content for turn in chat.turns if turn.role == "assistant"]
    expected = "".join(style.written(answer) + style.stop for answer in answers)
    assert trained_texts(template, encoded) == expected
    stop = template.tokenizer.convert_tokens_to_ids(style.stop)
    assert template.stop_token_ids == {stop}
    trained = encoded.weights > 0
    ends = [*(trained[:-1] & ~trained[1:]), trained[-1]]
    assert (encoded.input_ids[ends] == stop).all() and trained[-1]
    first = next(i for i, turn in enumerate(chat.turns) if turn.role == "assistant")
    before = template._renderer.render([Chat(chat.turns[:first])])[0]
    num_before = len(template.tokenizer(before, add_special_tokens=False)["input_ids"])
    # One token less: the last one may be merged with the text after it.
    assert not trained[: max(num_before - 1, 0)].any()


def check_that_skeleton_and_search_agree(
    template: ChatTemplate, chat: Chat, *, has_skeleton: bool
) -> None:
    finder = template._finder
    (text,) = finder._renderer.render([chat])
    assert isinstance(text, str)
    skeleton = finder._build_skeleton(chat)
    fast = skeleton.match(text, chat) if skeleton else None
    slow = finder.search(chat, text)
    assert fast is not None or not has_skeleton
    if fast is not None:
        answers = {n for n, turn in enumerate(chat.turns) if turn.role == "assistant"}
        assert [span for span in fast.spans if span.turn in answers] == [
            span for span in slow.spans if span.turn in answers
        ]
        assert fast.lost == slow.lost


def test_the_end_of_an_empty_question_is_not_trained_on() -> None:
    """For a template without generation prompt that writes the last question in another way."""
    tokenizer = build_tokenizer(["</s>", "[INST]", "[/INST]"], eos="</s>")
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}{{ '[INST] ' }}"
        "{% if loop.last %}{{ messages[0].content + '\n\n' }}{% endif %}"
        "{{ m.content + '[/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}"
        "{% endfor %}"
    )
    template = ChatTemplate.resolve(tokenizer, None)
    turns = (Turn("system", ""), Turn("user", ""), Turn("assistant", "yes"))
    chat = Conversation((*turns, Turn("user", ""), Turn("assistant", "no")), ORIGIN)
    assert trained_texts(template, encode(template, chat)) == " yes</s> no</s>"


def test_an_answer_starts_with_a_special_token_that_differs_from_the_prompts() -> None:
    """Not after a space inside it, as in Dolly's `### Response:`."""
    tokenizer = build_tokenizer(["### Ask:\n", "### Reply:\n", "### Prompt:\n", "</s>"], eos="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '### Ask:\n' + m.content }}"
        "{% else %}{{ '\n\n### Reply:\n' + m.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n\n### Prompt:\n' }}{% endif %}"
    )
    template = ChatTemplate.resolve(tokenizer, None)
    chat = Chat((Turn("user", "what"), Turn("assistant", "yes")))
    (rendered,) = template._finder.render([chat])
    assert not isinstance(rendered, RowRefusedError)
    span = rendered.spans[-1]
    assert rendered.text[span.start : span.stop_end] == "### Reply:\nyes</s>"


@pytest.mark.parametrize("style", ["plain", "gemma", "no prefix"])
def test_each_row_is_rendered_once(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = template_of(style)
    chat = Conversation(
        (
            *(Turn("user", " what\n"), Turn("assistant", " yes\n ")),
            *(Turn("user", ""), Turn("assistant", "what")),
        ),
        ORIGIN,
    )
    encode(template, chat)
    rendered = 0
    render = template.tokenizer.apply_chat_template

    def count(chats: list[Any], **options: Any) -> Any:
        nonlocal rendered
        rendered += len(chats)
        return render(chats, **options)

    monkeypatch.setattr(template.tokenizer, "apply_chat_template", count)
    assert len(list(template.encode([chat] * 9))) == 9
    assert rendered == 9


def test_skeleton_matches_exactly_or_not_at_all() -> None:
    finder = template_of("chatml")._finder
    chat = Chat((Turn("user", "yes"), Turn("assistant", "no")))
    (text,) = finder._renderer.render([chat])
    skeleton = finder._build_skeleton(chat)
    assert skeleton is not None and isinstance(text, str)
    assert skeleton.match(text, chat) is not None
    for other in (f"{text} ", f" {text}", text[:-1], text.replace("no", "yes"), ""):
        assert skeleton.match(other, chat) is None


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("answer", [" two", "\n\ntwo"])
def test_prompt_is_a_prefix_of_the_trained_tokens(style: str, answer: str) -> None:
    template = template_of(style, adds_bos=True)
    turns = (Turn("user", "q"), Turn("assistant", "one"), Turn("user", "r"))
    item = Conversation((*turns, Turn("assistant", answer)), ORIGIN)
    prompt = template.prompt(item)
    assert prompt is not None and (prompt.answer, prompt.origin) == (answer, ORIGIN)
    if style == "no prefix":
        assert template.tokenizer.decode(prompt.input_ids).endswith("<think>\n")
        return
    encoded = encode(template, item)
    ids, weights = encoded.input_ids, encoded.weights
    last = [i for i in range(1, len(ids)) if weights[i] > 0 and weights[i - 1] == 0][-1]
    assert prompt.input_ids == ids[:last].tolist()


def test_reasoning_of_earlier_answers_is_left_out_as_the_template_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = template_of("qwen3")
    answers = [f"<think>\nhm\n</think>\n\n{text}" for text in ("one", "two")]
    turns = [turn for text in answers for turn in (Turn("user", "q"), Turn("assistant", text))]
    monkeypatch.setattr(template._finder, "search", None)  # only skeletons are used
    trained = runs(template, Conversation(tuple(turns), ORIGIN))
    assert trained == ["one<|im_end|>", answers[1] + "<|im_end|>"]


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_named_templates_resolve_or_list_the_missing_tokens(name: str) -> None:
    chosen = (STYLES | OTHERS)[name]
    whole = tokenizer_for(chosen.text)
    template = ChatTemplate.resolve(whole, name, MaskConfig())
    assert template.note == f"chat template: {name}"
    assert template.stop_token_ids == {whole.convert_tokens_to_ids(chosen.stop)}
    bare = build_tokenizer(["<s>"], bos="<s>")
    with pytest.raises(ValueError, match=r"no eos token|needs the tokens [<\[]"):
        ChatTemplate.resolve(bare, name)
