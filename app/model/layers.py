"""Find modules of a model: repeated layers, matches of patterns, those whose weights are read.

- `by_ending`: `q_proj` or `self_attn.q_proj` matches names that end in these parts (in lists);
- `by_expression`: a regular expression over the full name (a string instead of a list), as in peft;
- `by_key`: a regular expression over the end of the name (rank_pattern, alpha_pattern), as in peft;
- `by_wildcard`: the full name with * for any text (lr_by_pattern).

Python's `re` may take forever for a pattern such as (a+)+$ and cannot be interrupted. Therefore
`check_patterns` first runs each expression on the names of the model in a process with limited
time.

Some layers read a module's weight directly instead of calling the module: its adapter would
silently have no effect, and its packed 4-bit weight would be read as plain values. They are found
by a search in transformers' source code. Imports torch only where it is needed.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from app.model.config_values import read_source
from common.errors import UserError, nearest
from common.untrusted import LIMITS_VARIABLE, LimitError, ProcessLimits, limits, run_limited

if TYPE_CHECKING:
    import torch

_MIN_LAYERS_TO_KEEP_ONE = 10
"""decoder layers from which on `quantization=fp8` leaves the last one as it is"""
_TOP = re.compile(r"top\s+(\d+)")
Rule = Callable[[str, Iterable[str]], list[str]]
"""(pattern, names) -> the names that the pattern matches"""
_PLAIN = re.compile(r"[\w.-]*")
"""matches patterns without special characters, which are always fast"""
_MAX_EXCLUSIONS = 8
"""largest number of prefixes that a pattern of `pattern_without` excludes, to keep it readable"""
_READ = re.compile(r"\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape)\b)")
_PRODUCT = re.compile(r"\bself\.(\w+)\.weight @|@ self\.(\w+)\.weight\b")
_CALL = re.compile(r"\bself\.(\w+)\(")
_LINEAR = re.compile(r"\bself\.(\w+) = nn\.Linear\(")


def decoder_layers(model: torch.nn.Module, instead: str = "adapter.layers=all") -> list[str]:
    """Return the full names of the repeated layers in forward order, those of an encoder first.

    `instead`: setting that the message of the ValueError suggests if the model does not declare the
    class of its layers.
    """
    layers = repeated_layers(model)
    if not layers:
        raise ValueError(unknown_layers_problem(model.config.model_type, instead))
    return layers


def unknown_layers_problem(model_type: str | None, instead: str) -> str:
    """Return the error message for a model that does not declare the class of its layers."""
    return (
        f"{instead.partition('=')[0]}: {model_type} models do not declare the class of their "
        f"layers; type {instead}"
    )


def repeated_layers(model: torch.nn.Module) -> list[str]:
    """Return the same as `decoder_layers`; an empty list if the layer class is not declared."""
    classes = set(model._no_split_modules or ())
    layers: list[str] = []
    for name, module in model.named_modules():
        is_numbered = name.rpartition(".")[2].isdigit()
        is_inside = layers and name.startswith(f"{layers[-1]}.")
        # Base classes count too: FSDP2 replaces a layer's class by a class derived from it.
        is_layer = any(base.__name__ in classes for base in type(module).__mro__)
        if is_numbered and not is_inside and is_layer:
            layers.append(name)
    return layers


def num_layers_in_fp8(num_layers: int) -> int:
    """Return how many decoder layers, from the first on, `quantization=fp8` quantizes of these."""
    return num_layers - (num_layers >= _MIN_LAYERS_TO_KEEP_ONE)


def compile_error(numbers: Mapping[str, Any]) -> str | None:
    """Return why a model with these config.json values cannot be compiled; None if it can."""
    if not numbers.get("is_encoder_decoder"):
        return None
    return (
        f"trainer.compile=true: {numbers.get('model_type')} models are encoder-decoders: each new "
        "pair of input and output lengths would be compiled again; type trainer.compile=false"
    )


def layer_numbers(setting: Any, num_layers: int) -> Sequence[int]:
    """Return the indices of the layers that `adapter.layers` selects, ascending from 0.

    Raises UserError for an invalid value or a layer that the model does not have.
    """
    numbers = range(num_layers)
    if setting == "all":
        return numbers
    if isinstance(setting, str) and (top := _TOP.fullmatch(setting.strip())):
        count = int(top[1])
        if not 1 <= count <= num_layers:
            raise UserError(
                f"adapter.layers={setting!r}, but the model has {num_layers} layers; "
                f"type a number from 1 to {num_layers}, for example 'adapter.layers=top "
                f"{num_layers}'"
            )
        return numbers[-count:]
    if isinstance(setting, (list, tuple)) and setting and all(type(n) is int for n in setting):
        missing = [number for number in setting if number not in numbers]
        if missing:
            raise UserError(
                f"adapter.layers={list(setting)}: the model has no layer {missing[0]}; "
                f"its {num_layers} layers are numbered 0 to {num_layers - 1}"
            )
        return sorted(set(setting))
    if type(setting) is int:
        raise UserError(
            f"adapter.layers={setting} could mean a count of layers or a single layer; "
            f"type 'adapter.layers=top {setting}' or adapter.layers=[{setting}]"
        )
    raise UserError(
        f"adapter.layers={setting!r} is not valid; type all, 'adapter.layers=top 8' for the last "
        "eight layers, or a list of layer numbers such as adapter.layers=[0,1]"
    )


def by_ending(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name == pattern or name.endswith(f".{pattern}")]


def by_expression(pattern: str, names: Iterable[str]) -> list[str]:
    return list(filter(re.compile(pattern).fullmatch, names))


def by_key(pattern: str, names: Iterable[str]) -> list[str]:
    return list(filter(re.compile(expression_of_key(pattern)).match, names))


def by_wildcard(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def by_ending_or_expression(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that end in `pattern`; if there are none, those that it matches in full."""
    names = list(names)
    return by_ending(pattern, names) or by_expression(pattern, names)


def expression_of_key(pattern: str) -> str:
    """Return the regular expression that peft uses for a key of rank_pattern or alpha_pattern."""
    return rf"(.*\.)?({pattern})$"


def match(
    patterns: Sequence[str], names: Iterable[str], rule: Rule, *, key: str, what: str, where: str
) -> tuple[list[str], list[str]]:
    """Return the names that any of `patterns` matches, in order, and a problem per unused pattern.

    `key`: setting of the patterns, `what`: kind of the names ("linear module"), `where`: owner of
    the names; all for the text of problems.
    """
    names = list(names)
    matches = {pattern: rule(pattern, names) for pattern in patterns}
    matched = {name for matches_of_pattern in matches.values() for name in matches_of_pattern}
    problems = []
    for pattern in [each for each in matches if not matches[each]]:
        known = last_parts(names)
        hint = nearest(pattern, known)
        if rule is by_expression and by_ending(pattern, names):
            hint = f" by its full name; type {key}=[{pattern}]"
        problems.append(
            f"{key}: {pattern} matches no {what}{hint} ({where} has {', '.join(known)})"
        )
    return [name for name in names if name in matched], problems


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Return whether a module is one of `modules` or inside one of them."""
    return f"{name}.".startswith(tuple(f"{module}." for module in modules))


def last_parts(names: Iterable[str]) -> list[str]:
    """Return the distinct last parts of names, sorted, without layer numbers."""
    last = {name.rpartition(".")[2] for name in names} - {""}
    return sorted(part for part in last if not part.isdigit())


def shortest(names: Sequence[str], candidates: Iterable[str], every: Iterable[str]) -> list[str]:
    """Return `candidates` if, as endings, they match exactly `names` among `every`; else `names`.

    Other programs read an adapter's config too, and some expect short names.
    """
    short, every = sorted(set(candidates)), list(every)
    matched = {name for pattern in short for name in by_ending(pattern, every)}
    return short if matched == set(names) else sorted(names)


def pattern_without(included: Sequence[str], excluded: Sequence[str]) -> str | None:
    """Return a regular expression over full names that matches `included` but not `excluded`.

    None if it would have to exclude more than _MAX_EXCLUSIONS prefixes.
    """
    included_prefixes = {
        ".".join(name.split(".")[:end]) for name in included for end in range(name.count(".") + 2)
    }
    exclusions: dict[str, None] = {}
    for name in excluded:
        parts = name.split(".")
        prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        # The shortest prefix that no included name has.
        shortest_prefix = next((each for each in prefixes if each not in included_prefixes), name)
        exact = re.escape(shortest_prefix)
        in_any_layer = re.sub(r"\d+", r"\\d+", exact)
        is_included = any(re.match(rf"{in_any_layer}\b", other) for other in included)
        exclusions[exact if is_included else in_any_layer] = None
    if len(exclusions) > _MAX_EXCLUSIONS:
        return None
    return rf"(?!({'|'.join(exclusions)})\b).*\.({'|'.join(last_parts(included))})"


def check_patterns(patterns: Mapping[str, Sequence[str]], names: Iterable[str]) -> list[str]:
    """Return a problem for each label with an invalid regular expression, and the first slow one.

    LOFT_LIMITS=regex_seconds limits the time of a label's expressions on `names`.
    """
    problems: list[str] = []
    names, seconds = list(names), limits().regex_seconds
    for label, expressions in patterns.items():
        if all(map(_PLAIN.fullmatch, expressions)):
            continue
        work = partial(_try_expressions, expressions, names)
        try:
            problem = run_limited(work, ProcessLimits(seconds=seconds))
        except LimitError:
            return [
                *problems,
                f"{label} is a regular expression that takes more than {seconds} s or 1 GiB on the "
                "names of the model; write it without nested repeats, or as a list of names "
                f"({LIMITS_VARIABLE}=regex_seconds=NUMBER changes it)",
            ]
        if problem:
            problems.append(f"{label} is not a valid regular expression ({problem})")
    return problems


def _try_expressions(expressions: Sequence[str], names: Sequence[str]) -> str:
    """Match names by expressions; return why one of these is invalid, or nothing."""
    try:
        for expression in map(re.compile, expressions):
            for name in names:
                expression.match(name)
                expression.fullmatch(name)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return ""


@cache
def find_bypassed_linears(model_type: str | None) -> tuple[str, ...]:
    """Return the names of linear modules whose weights a model type's layers use directly.

    Empty for a model type that transformers does not have.
    """
    name = (model_type or "").replace("-", "_")
    for folder in (name, name.removesuffix("_text")):
        if source := read_source(f"models/{folder}/modeling_{folder}.py"):
            products = {name for pair in _PRODUCT.findall(source) for name in pair if name}
            never_called = set(_READ.findall(source)) - set(_CALL.findall(source))
            return tuple(sorted((never_called | products) & set(_LINEAR.findall(source))))
    return ()


def disable_bypassing_kernels(model: torch.nn.Module) -> None:
    """Make layers with training-only fused kernels run their unfused path if a kernel would bypass
    an adapter or read a packed weight.

    Mamba's fused kernels, for example, read the weights of several modules. The layer then calls
    these modules one by one, as it does in evaluation.
    """
    for module in model.modules():
        for method, names in _reads_in_training(module.__class__):
            children = [vars(module)["_modules"].get(name) for name in names]
            if not all(child is None or _is_plain(child) for child in children):
                setattr(module, method, UnfusedMethod(module, getattr(module, method)))


class UnfusedMethod:
    """Runs a layer's method in evaluation mode, while its child modules stay in training mode."""

    def __init__(self, module: Any, plain: Any) -> None:
        self._module, self._plain = module, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with replaced([(self._module, "training", False)]):
            return self._plain(*args, **kwargs)


@cache
def find_bypassed_children(kind: type) -> tuple[str, ...]:
    """Return the names of child modules whose weights the code of layer class `kind` reads."""
    return tuple(sorted(set(_READ.findall(_source_of(kind)))))


@cache
def _reads_in_training(kind: type) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return, by method of a class, the modules whose weights it reads if `self.training`."""
    source = _source_of(kind)
    if "self.training" not in source or not _READ.search(source):
        return ()
    found: dict[str, set[str]] = {}
    for method in ast.walk(ast.parse(textwrap.dedent(source))):
        if not isinstance(method, ast.FunctionDef):
            continue
        for node in ast.walk(method):
            if isinstance(node, ast.If) and "self.training" in ast.unparse(node.test):
                names = _READ.findall("\n".join(map(ast.unparse, node.body)))
                found.setdefault(method.name, set()).update(names)
    return tuple((method, tuple(sorted(names))) for method, names in found.items() if names)


def _source_of(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # a class that was created at run time
        return ""


def _is_plain(module: torch.nn.Module) -> bool:
    """Return whether a module is not wrapped and its weight is a plain parameter."""
    import torch

    is_wrapped = type(module).__module__.partition(".")[0] not in ("torch", "transformers")
    weight = module._parameters.get("weight")  # an Identity has none
    return not is_wrapped and (weight is None or type(weight) is torch.nn.Parameter)


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Disable dropout and gradients in this context; afterwards, the model has its mode again."""
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


@contextmanager
def replaced(attributes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, each (object, name, value); after this context they have their own again."""
    attributes = list(attributes)
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
    for owner, name, value in attributes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
