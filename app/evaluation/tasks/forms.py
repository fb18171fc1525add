"""The published forms of benchmarks: how rows are parsed and prompts are built.

Prompts are those of lm-evaluation-harness 0.4.13, so that scores are comparable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from app.evaluation.metrics import last_number

_Values = Mapping[str, Any]
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskItem:
    """A parsed row of a task."""

    contexts: tuple[str, ...]
    """one prompt for all choices, or one for each choice that is part of its prompt"""
    continuations: tuple[str, ...] = ()
    """one for each choice, or one for all contexts; empty if the model generates an answer"""
    correct: int = 0
    """index of the correct choice"""
    reference: str = ""
    """the correct choice or a worked answer, as few-shot examples show it"""
    delimiter: str = " "
    """text between the context and a continuation or answer"""
    group: str = ""
    """group within the task, such as MMLU's subject"""
    program: str = ""
    """tests that run after a generated program"""
    needle: str = ""
    """sentence with the answer, which is hidden in a long text before the context"""
    haystack: str = ""
    """that text; empty = the needles of the other rows"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a benchmark's rows are parsed, prompted and scored."""

    kind: str
    fields: tuple[str, ...]
    """columns that a row must have"""
    parse: Callable[[_Values], TaskItem]
    """parses a row; raises ValueError naming the value that is wrong"""
    file: str = ""
    """file name in evaluation.task_dir"""
    few_shot: int = 0
    """default number of few-shot examples"""
    few_shot_file: str = ""
    """file name of the few-shot examples in evaluation.task_dir"""
    describe_group: Callable[[str], str] = lambda group: ""
    """group -> text before the examples"""
    stop_texts: tuple[str, ...] = ()
    """texts that end an answer"""
    max_new_tokens: int | None = None
    """maximum length of an answer in tokens; None = evaluation.max_new_tokens"""
    extract: Callable[[str], object] = str.strip
    """returns the part of an answer or reference that is compared, None if there is none"""
    categories: Mapping[str, str] | None = None
    """group -> category"""


def _correct_index(answer: Any, choices: tuple[str, ...], labels: tuple[str, ...] = ()) -> int:
    text = str(answer).strip()
    if isinstance(answer, int):  # 2 is the third choice, even if the text of another one is "2"
        index = int(answer)
    elif matching := [names for names in (labels, choices) if text in names]:
        index = matching[0].index(text)
    elif text.isdecimal():
        index = int(text)
    else:
        index = _LETTERS.find(text) if len(text) == 1 else -1
    if not 0 <= index < len(choices):
        raise ValueError(
            f"answer {text[:40]!r} is not one of the {len(choices)} choices: give its index from "
            "0, its letter, or its text"
        )
    return index


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) < 2:
        raise ValueError(f"choices: expected a list of two or more, found {str(value)[:40]!r}")
    return tuple(map(str, value))


def _labelled(value: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if isinstance(value, dict) and "text" in value and "label" in value:
        return _texts(value["text"]), _texts(value["label"])
    return _texts(value), ()


def _choice(question: str, choices: tuple[str, ...], correct: int, group: str = "") -> TaskItem:
    return TaskItem(
        contexts=(question,),
        continuations=choices,
        correct=correct,
        reference=choices[correct],
        group=group,
    )


def _multiple_choice(values: _Values) -> TaskItem:
    choices, labels = _labelled(values["choices"])
    correct = _correct_index(values["answer"], choices, labels)
    return _choice(str(values["question"]), choices, correct, str(values.get("group", "")))


def _answer(values: _Values) -> TaskItem:
    reference = str(values["answer"])
    if not reference.strip():
        raise ValueError("answer is empty: there is no reference to compare with")
    group = str(values.get("group", ""))
    return TaskItem(contexts=(str(values["question"]),), reference=reference, group=group)


def _likelihood(values: _Values) -> TaskItem:
    continuation = str(values["continuation"])
    if not continuation.strip():
        raise ValueError("continuation is empty: there is nothing to measure")
    context = str(values["context"])
    has_space = not context or context[-1].isspace() or continuation[0].isspace()
    return TaskItem(
        contexts=(context,),
        continuations=(continuation,),
        reference=continuation,
        delimiter="" if has_space else " ",
    )


def _text(values: _Values) -> TaskItem:
    text = str(values["text"])
    if not text:
        raise ValueError("text is empty: there is nothing to measure")
    return TaskItem(contexts=("",), continuations=(text,), reference=text, delimiter="")


def _gsm8k(values: _Values) -> TaskItem:
    return TaskItem(
        contexts=(f"Question: {values['question']}\nAnswer:",), reference=str(values["answer"])
    )


def _mmlu(values: _Values) -> TaskItem:
    choices = _texts(values["choices"])
    listed = "".join(f"\n{_LETTERS[n]}. {choice}" for n, choice in enumerate(choices))
    question = f"{str(values['question']).strip()}{listed}\nAnswer:"
    letters = tuple(_LETTERS[: len(choices)])
    correct = _correct_index(values["answer"], letters)
    return _choice(question, letters, correct, str(values["subject"]))


def _arc(values: _Values) -> TaskItem:
    choices, labels = _labelled(values["choices"])
    correct = _correct_index(values["answerKey"], choices, labels)
    return _choice(f"Question: {values['question']}\nAnswer:", choices, correct)


def _openbookqa(values: _Values) -> TaskItem:
    choices, labels = _labelled(values["choices"])
    correct = _correct_index(str(values["answerKey"]).lstrip(), choices, labels)
    return _choice(str(values["question_stem"]), choices, correct)


def _wikihow(text: str) -> str:
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _hellaswag(values: _Values) -> TaskItem:
    context = f"{values['ctx_a']} {str(values['ctx_b']).capitalize()}"
    endings = tuple(map(_wikihow, _texts(values["endings"])))
    correct = _correct_index(int(values["label"]), endings)
    return _choice(_wikihow(f"{values['activity_label']}: {context}"), endings, correct)


def _winogrande(values: _Values) -> TaskItem:
    sentence = str(values["sentence"])
    before, blank, after = sentence.partition("_")
    if not blank:
        raise ValueError(f"sentence has no _ for the blank: {sentence[:40]!r}")
    options = (str(values["option1"]), str(values["option2"]))
    correct = _correct_index(values["answer"], options, ("1", "2"))
    return TaskItem(
        contexts=tuple(before + option for option in options),
        continuations=(after.strip(),),
        correct=correct,
        reference=after.strip(),
    )


def _boolq(values: _Values) -> TaskItem:
    question = f"{values['passage']}\nQuestion: {values['question']}?\nAnswer:"
    answer = values["answer"]
    if str(answer).lower() not in ("true", "false", "yes", "no", "0", "1"):
        raise ValueError(f"answer {str(answer)[:40]!r}: expected true or false")
    return _choice(question, ("no", "yes"), int(str(answer).lower() in ("true", "yes", "1")))


def _lambada(values: _Values) -> TaskItem:
    context, continuation = values.get("context"), values.get("continuation")
    if continuation is None:
        context, _, continuation = str(values["text"]).rpartition(" ")
    return _likelihood({"context": context, "continuation": continuation})


def _math(values: _Values) -> TaskItem:
    if boxed(str(values["solution"])) is None:
        raise ValueError("solution has no \\boxed{...}: there is no reference to compare with")
    return TaskItem(
        contexts=(f"Problem:\n{values['problem']}\n\nSolution:",),
        reference=str(values["solution"]),
        group=str(values.get("type", "")),
    )


def _humaneval(values: _Values) -> TaskItem:
    return TaskItem(
        contexts=(str(values["prompt"]),),
        reference=str(values["canonical_solution"]),
        delimiter="",
        program=f"{values['test']}\ncheck({values['entry_point']})\n",
    )


def _needle(values: _Values) -> TaskItem:
    return replace(
        _answer(values),
        contexts=(f"\n\nQuestion: {values['question']}\nAnswer:",),
        needle=str(values["needle"]).strip(),
        haystack=str(values.get("haystack") or "").strip(),
    )


def boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...} in a solution, up to the matching brace."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    first, depth = text.index("{", start) + 1, 1
    for index in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if not depth:
            return text[first:index]
    return None


def math_answer(text: str) -> str | None:
    """Return the final answer of a solution in normalized form (Lewkowycz et al. 2022)."""
    answer = boxed(text)
    if answer is None:
        match = re.search(r"[Ff]inal answer is:?\s*(.+?)(?:\. I hope|\.?\s*$)", text, re.MULTILINE)
        answer = match and match[1]
    if answer is None:
        return None
    answer = re.sub(r"\\(?:text|mbox|mathrm|textbf)\s*\{(.*?)\}", r"\1", answer)
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    answer = re.sub(r"\\frac\s*([0-9a-z])\s*([0-9a-z])", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\(?:left|right|[!,;: ]|%|\$)|[$%]|\^\{?\\circ\}?", "", answer)
    answer = re.sub(r"(?<=\d),(?=\d{3})", "", re.sub(r"\s+", "", answer))
    return answer.rstrip(".")


def _describe_mmlu_subject(group: str) -> str:
    subject = group.replace("_", " ")
    return f"The following are multiple choice questions (with answers) about {subject}.\n\n"


_SUBJECTS = {
    "stem": "abstract_algebra anatomy astronomy college_biology college_chemistry "
    "college_computer_science college_mathematics college_physics computer_security "
    "conceptual_physics electrical_engineering elementary_mathematics high_school_biology "
    "high_school_chemistry high_school_computer_science high_school_mathematics "
    "high_school_physics high_school_statistics machine_learning",
    "humanities": "formal_logic high_school_european_history high_school_us_history "
    "high_school_world_history international_law jurisprudence logical_fallacies moral_disputes "
    "moral_scenarios philosophy prehistory professional_law world_religions",
    "social_sciences": "econometrics high_school_geography high_school_government_and_politics "
    "high_school_macroeconomics high_school_microeconomics high_school_psychology "
    "human_sexuality professional_psychology public_relations security_studies sociology "
    "us_foreign_policy",
    "other": "business_ethics clinical_knowledge college_medicine global_facts human_aging "
    "management marketing medical_genetics miscellaneous nutrition professional_accounting "
    "professional_medicine virology",
}
MMLU_CATEGORIES = {
    subject: category for category, listed in _SUBJECTS.items() for subject in listed.split()
}

BY_KIND = {
    "multiple_choice": Form(
        kind="multiple_choice", fields=("question", "choices", "answer"), parse=_multiple_choice
    ),
    "exact_match": Form(
        kind="exact_match", fields=("question", "answer"), parse=_answer, stop_texts=("\n",)
    ),
    "numeric": Form(
        kind="numeric", fields=("question", "answer"), parse=_answer, extract=last_number
    ),
    "likelihood": Form(kind="likelihood", fields=("context", "continuation"), parse=_likelihood),
    "perplexity": Form(kind="perplexity", fields=("text",), parse=_text),
}
"""kind of a custom task, one without a published form -> its form"""
_choices = partial(Form, kind="multiple_choice")
FORMS = {
    "gsm8k": Form(
        kind="numeric",
        fields=("question", "answer"),
        parse=_gsm8k,
        file="gsm8k_test.jsonl",
        few_shot=5,
        stop_texts=("Question:", "</s>", "<|im_end|>"),
        max_new_tokens=256,
        extract=last_number,
    ),
    "mmlu": _choices(
        fields=("question", "choices", "answer", "subject"),
        parse=_mmlu,
        file="mmlu_test.jsonl",
        few_shot=5,
        few_shot_file="mmlu_dev.jsonl",
        describe_group=_describe_mmlu_subject,
        categories=MMLU_CATEGORIES,
    ),
    "arc": _choices(
        fields=("question", "choices", "answerKey"), parse=_arc, file="arc_easy_validation.jsonl"
    ),
    "openbookqa": _choices(
        fields=("question_stem", "choices", "answerKey"),
        parse=_openbookqa,
        file="openbookqa_validation.jsonl",
    ),
    "hellaswag": _choices(
        fields=("activity_label", "ctx_a", "ctx_b", "endings", "label"),
        parse=_hellaswag,
        file="hellaswag_val.jsonl",
    ),
    "winogrande": _choices(
        fields=("sentence", "option1", "option2", "answer"),
        parse=_winogrande,
        file="winogrande_dev.jsonl",
    ),
    "boolq": _choices(
        fields=("question", "passage", "answer"), parse=_boolq, file="boolq_dev.jsonl"
    ),
    "lambada": Form(kind="likelihood", fields=(), parse=_lambada, file="lambada_openai.jsonl"),
    "math": Form(
        kind="exact_match",
        fields=("problem", "solution"),
        parse=_math,
        file="math_test.jsonl",
        few_shot=4,
        stop_texts=("Problem:",),
        max_new_tokens=512,
        extract=math_answer,
    ),
    "humaneval": Form(
        kind="code",
        fields=("prompt", "canonical_solution", "test", "entry_point"),
        parse=_humaneval,
        file="HumanEval.jsonl.gz",
        stop_texts=("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
        max_new_tokens=512,
    ),
    "needle": Form(
        kind="exact_match",
        fields=("needle", "question", "answer"),
        parse=_needle,
        file="needle.jsonl",
        stop_texts=("\n",),
        max_new_tokens=16,
        extract=lambda text: text.strip().rstrip(".").casefold(),
    ),
}
