"""The published forms of benchmarks: what a row means, and how it is asked.

Prompts are those of lm-evaluation-harness 0.4.13, so that figures can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from app.evaluation.metrics import last_number

Values = Mapping[str, Any]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A row of a task, before the examples of other rows."""

    contexts: tuple[str, ...]
    """one for all choices, or one for each where a choice is part of the context"""
    continuations: tuple[str, ...] = ()
    """one for each choice, or one for all contexts; none where the model writes an answer"""
    right: int = 0
    """number of the right choice"""
    reference: str = ""
    """what an example answers: the right choice, or a worked answer"""
    delimiter: str = " "
    """between context and continuation, or answer"""
    group: str = ""
    """which of several groups in a task it is of, such as MMLU's subject"""
    program: str = ""
    """checks that run after an answer which is code"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How the rows of a benchmark are read and asked."""

    kind: str
    fields: tuple[str, ...]
    """columns that a row must have"""
    read: Callable[[Values], Asked]
    """read a row; ValueError says in words which value is not what it should be"""
    file: str = ""
    """name in evaluation.task_dir"""
    few_shot: int = 0
    few_shot_file: str = ""
    describe: Callable[[str], str] = lambda group: ""
    """group -> text before the examples"""
    stops: tuple[str, ...] = ()
    """texts that end an answer"""
    max_new_tokens: int | None = None
    """of an answer; None = evaluation.max_new_tokens"""
    extract: Callable[[str], object] = str.strip
    """what of an answer, and of its reference, is compared; None where there is nothing"""
    categories: Mapping[str, str] | None = None
    """group -> category"""


def _right_of(answer: Any, choices: tuple[str, ...], labels: tuple[str, ...] = ()) -> int:
    """Return the number of the right choice: an index, a label, or the choice's text."""
    text = str(answer).strip()
    if isinstance(answer, int):  # 2 is the third choice, also where one of them is "2"
        index = int(answer)
    elif named := [names for names in (labels, choices) if text in names]:
        index = named[0].index(text)
    elif text.isdecimal():
        index = int(text)
    else:
        index = LETTERS.find(text) if len(text) == 1 else -1
    if not 0 <= index < len(choices):
        raise ValueError(
            f"answer {text[:40]!r} is none of the {len(choices)} choices: give its number from 0, "
            "its letter, or its text"
        )
    return index


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) < 2:
        raise ValueError(f"choices: expected a list of two or more, found {str(value)[:40]!r}")
    return tuple(map(str, value))


def _labelled(value: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return texts and labels of choices as ARC has them: {text: [...], label: [...]}."""
    if isinstance(value, dict) and "text" in value and "label" in value:
        return _texts(value["text"]), _texts(value["label"])
    return _texts(value), ()


def _choice(question: str, choices: tuple[str, ...], right: int, group: str = "") -> Asked:
    return Asked(
        contexts=(question,),
        continuations=choices,
        right=right,
        reference=choices[right],
        group=group,
    )


def _multiple_choice(values: Values) -> Asked:
    choices, labels = _labelled(values["choices"])
    right = _right_of(values["answer"], choices, labels)
    return _choice(str(values["question"]), choices, right, str(values.get("group", "")))


def _answer(values: Values) -> Asked:
    reference = str(values["answer"])
    if not reference.strip():
        raise ValueError("answer is empty: there is no reference to compare with")
    group = str(values.get("group", ""))
    return Asked(contexts=(str(values["question"]),), reference=reference, group=group)


def _likelihood(values: Values) -> Asked:
    continuation = str(values["continuation"])
    if not continuation.strip():
        raise ValueError("continuation is empty: there is nothing to measure")
    context = str(values["context"])
    has_space = not context or context[-1].isspace() or continuation[0].isspace()
    return Asked(
        contexts=(context,),
        continuations=(continuation,),
        reference=continuation,
        delimiter="" if has_space else " ",
    )


def _text(values: Values) -> Asked:
    text = str(values["text"])
    if not text:
        raise ValueError("text is empty: there is nothing to measure")
    return Asked(contexts=("",), continuations=(text,), reference=text, delimiter="")


def _gsm8k(values: Values) -> Asked:
    return Asked(
        contexts=(f"Question: {values['question']}\nAnswer:",), reference=str(values["answer"])
    )


def _mmlu(values: Values) -> Asked:
    choices = _texts(values["choices"])
    listed = "".join(f"\n{LETTERS[n]}. {choice}" for n, choice in enumerate(choices))
    question = f"{str(values['question']).strip()}{listed}\nAnswer:"
    letters = tuple(LETTERS[: len(choices)])
    right = _right_of(values["answer"], letters)
    return _choice(question, letters, right, str(values["subject"]))


def _arc(values: Values) -> Asked:
    choices, labels = _labelled(values["choices"])
    right = _right_of(values["answerKey"], choices, labels)
    return _choice(f"Question: {values['question']}\nAnswer:", choices, right)


def _openbookqa(values: Values) -> Asked:
    choices, labels = _labelled(values["choices"])
    right = _right_of(str(values["answerKey"]).lstrip(), choices, labels)
    return _choice(str(values["question_stem"]), choices, right)


def _wikihow(text: str) -> str:
    """Return a text of HellaSwag without the marks of its WikiHow pages."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _hellaswag(values: Values) -> Asked:
    context = f"{values['ctx_a']} {str(values['ctx_b']).capitalize()}"
    endings = tuple(map(_wikihow, _texts(values["endings"])))
    right = _right_of(int(values["label"]), endings)
    return _choice(_wikihow(f"{values['activity_label']}: {context}"), endings, right)


def _winogrande(values: Values) -> Asked:
    sentence = str(values["sentence"])
    before, blank, after = sentence.partition("_")
    if not blank:
        raise ValueError(f"sentence has no _ for the blank: {sentence[:40]!r}")
    options = (str(values["option1"]), str(values["option2"]))
    right = _right_of(values["answer"], options, ("1", "2"))
    return Asked(
        contexts=tuple(before + option for option in options),
        continuations=(after.strip(),),
        right=right,
        reference=after.strip(),
    )


def _boolq(values: Values) -> Asked:
    question = f"{values['passage']}\nQuestion: {values['question']}?\nAnswer:"
    answer = values["answer"]
    if str(answer).lower() not in ("true", "false", "yes", "no", "0", "1"):
        raise ValueError(f"answer {str(answer)[:40]!r}: expected true or false")
    return _choice(question, ("no", "yes"), int(str(answer).lower() in ("true", "yes", "1")))


def _lambada(values: Values) -> Asked:
    context, continuation = values.get("context"), values.get("continuation")
    if continuation is None:
        context, _, continuation = str(values["text"]).rpartition(" ")
    return _likelihood({"context": context, "continuation": continuation})


def _math(values: Values) -> Asked:
    if boxed(str(values["solution"])) is None:
        raise ValueError("solution has no \\boxed{...}: there is no reference to compare with")
    return Asked(
        contexts=(f"Problem:\n{values['problem']}\n\nSolution:",),
        reference=str(values["solution"]),
        group=str(values.get("type", "")),
    )


def _humaneval(values: Values) -> Asked:
    return Asked(
        contexts=(str(values["prompt"]),),
        reference=str(values["canonical_solution"]),
        delimiter="",
        program=f"{values['test']}\ncheck({values['entry_point']})\n",
    )


def boxed(text: str) -> str | None:
    """Return what stands in the last \\boxed{...} of a solution, its braces balanced."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin, depth = text.index("{", start) + 1, 1
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[begin:place]
    return None


def math_answer(text: str) -> str | None:
    """Return the final answer of a solution, written one way (as Lewkowycz et al. 2022 do)."""
    found = boxed(text)
    if found is None:
        said = re.search(r"[Ff]inal answer is:?\s*(.+?)(?:\. I hope|\.?\s*$)", text, re.MULTILINE)
        found = said and said[1]
    if found is None:
        return None
    found = re.sub(r"\\(?:text|mbox|mathrm|textbf)\s*\{(.*?)\}", r"\1", found)
    found = re.sub(r"\\[dt]frac", r"\\frac", found)
    found = re.sub(r"\\frac\s*([0-9a-z])\s*([0-9a-z])", r"\\frac{\1}{\2}", found)
    found = re.sub(r"\\(?:left|right|[!,;: ]|%|\$)|[$%]|\^\{?\\circ\}?", "", found)
    found = re.sub(r"(?<=\d),(?=\d{3})", "", re.sub(r"\s+", "", found))
    return found.rstrip(".")


def _mmlu_describes(group: str) -> str:
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
        kind="multiple_choice", fields=("question", "choices", "answer"), read=_multiple_choice
    ),
    "exact_match": Form(
        kind="exact_match", fields=("question", "answer"), read=_answer, stops=("\n",)
    ),
    "numeric": Form(
        kind="numeric", fields=("question", "answer"), read=_answer, extract=last_number
    ),
    "likelihood": Form(kind="likelihood", fields=("context", "continuation"), read=_likelihood),
    "perplexity": Form(kind="perplexity", fields=("text",), read=_text),
}
"""what a task without a published form is: its kind"""
_choices = partial(Form, kind="multiple_choice")
FORMS = {
    "gsm8k": Form(
        kind="numeric",
        fields=("question", "answer"),
        read=_gsm8k,
        file="gsm8k_test.jsonl",
        few_shot=5,
        stops=("Question:", "</s>", "<|im_end|>"),
        max_new_tokens=256,
        extract=last_number,
    ),
    "mmlu": _choices(
        fields=("question", "choices", "answer", "subject"),
        read=_mmlu,
        file="mmlu_test.jsonl",
        few_shot=5,
        few_shot_file="mmlu_dev.jsonl",
        describe=_mmlu_describes,
        categories=MMLU_CATEGORIES,
    ),
    "arc": _choices(
        fields=("question", "choices", "answerKey"), read=_arc, file="arc_easy_validation.jsonl"
    ),
    "openbookqa": _choices(
        fields=("question_stem", "choices", "answerKey"),
        read=_openbookqa,
        file="openbookqa_validation.jsonl",
    ),
    "hellaswag": _choices(
        fields=("activity_label", "ctx_a", "ctx_b", "endings", "label"),
        read=_hellaswag,
        file="hellaswag_val.jsonl",
    ),
    "winogrande": _choices(
        fields=("sentence", "option1", "option2", "answer"),
        read=_winogrande,
        file="winogrande_dev.jsonl",
    ),
    "boolq": _choices(
        fields=("question", "passage", "answer"), read=_boolq, file="boolq_dev.jsonl"
    ),
    "lambada": Form(kind="likelihood", fields=(), read=_lambada, file="lambada_openai.jsonl"),
    "math": Form(
        kind="exact_match",
        fields=("problem", "solution"),
        read=_math,
        file="math_test.jsonl",
        few_shot=4,
        stops=("Problem:",),
        max_new_tokens=512,
        extract=math_answer,
    ),
    "humaneval": Form(
        kind="code",
        fields=("prompt", "canonical_solution", "test", "entry_point"),
        read=_humaneval,
        file="HumanEval.jsonl.gz",
        stops=("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
        max_new_tokens=512,
    ),
}
