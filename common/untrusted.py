"""The only way that untrusted files are read, and the limits that it enforces.

Any error that a library or our own code raises while reading a file is reported as a problem of
that file. What is interpreted of such files, as chat templates are, runs in a process of its own,
and what waits for the network in a thread, both with limits.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import math
import multiprocessing
import os
import queue
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ENVIRONMENT_ERROR, TRAINING_FAULT, TrainingFault, UserError, exit_code
from common.files import kind_of

_T = TypeVar("_T")
_PATIENCE = 3
"""ratio of the time that is waited for to the limit, which is of a processor: others may be busy"""
LIMITS_VARIABLE = "LOFT_LIMITS"
_MAX_MESSAGE = 300
"""maximum number of characters printed of a library's message"""
_CAUSED_BY_CONTENT = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
)
"""system errors caused by the content of a file, such as a path in it that does not exist"""
_NETWORK = ("httpx", "httpcore", "requests", "urllib3")
"""libraries whose errors are network errors"""
_LFS_MARK = b"version https://git-lfs"
_ITEM_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""safetensors' name of a dtype -> bits per number"""
SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's name of each dtype that we write -> safetensors' name"""
FLOATS = {"F64", "F32", "F16", "BF16"}
"""dtypes of weights that are not quantized"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of untrusted files; LOFT_LIMITS=json_mib=512,json_depth=200 changes them."""

    json_mib: int = 256
    """size of a JSON file, such as tokenizer.json"""
    json_depth: int = 64
    """nesting depth of lists and objects"""
    json_key: int = 65_536
    """characters per key"""
    json_string: int = 1 << 24
    """characters per string"""
    header_mib: int = 100
    """size of a safetensors header"""
    yaml_mib: int = 1
    """size of a YAML file"""
    yaml_depth: int = 64
    """nesting depth of lists and mappings"""
    yaml_nodes: int = 100_000
    """keys and values, with every alias expanded"""
    yaml_parts: int = 4000
    """lists and mappings of an experiment, each of which takes milliseconds to compose"""
    regex_seconds: int = 5
    """time to match a regular expression against all names of a model"""


def limits() -> Limits:
    """Return the limits, as changed by LOFT_LIMITS; raises UserError for an unknown name."""
    return _read_limits(os.environ.get(LIMITS_VARIABLE, ""))


@cache
def _read_limits(words: str) -> Limits:
    known = [each.name for each in fields(Limits)]
    values: dict[str, int] = {}
    for word in filter(None, words.split(",")):
        name, _, number = word.strip().partition("=")
        if name not in known or not number.isascii() or not number.isdigit() or int(number) < 1:
            raise UserError(
                f"{LIMITS_VARIABLE}={words}: {word!r} is not understood; expected NAME=NUMBER, "
                f"with the names {', '.join(known)}"
            )
        values[name] = int(number)
    return Limits(**values)


def over_limit(file: Path, what: str, name: str) -> str:
    """Return the problem of a file that exceeds the limit `name`, and how to raise the limit."""
    limit = getattr(limits(), name)
    return f"{file}: {what} (limit {limit:,}; {LIMITS_VARIABLE}={name}=NUMBER changes it)"


@contextlib.contextmanager
def reading(what: str | Path, fix: str) -> Iterator[None]:
    """Convert any error inside to one UserError about `what`, with the `fix`.

    UserError and DataError pass through. Errors of the machine (memory, disk, devices, missing
    packages) keep their type, with `what` before the message.
    """
    try:
        yield
    except (TrainingFault, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # also a panic of a library in Rust
        code = exit_code(error)
        # transformers raises an OSError without a number for errors in the content of a file.
        is_of_content = isinstance(error, OSError) and error.errno in (None, *_CAUSED_BY_CONTENT)
        is_machine = code == ENVIRONMENT_ERROR and not is_of_content
        if is_machine or _is_network_error(error):
            reason = f"{what}: {short_message(error)}"
            if isinstance(error, OSError) and error.filename is not None:
                reason = f"{error.filename}: cannot be read: {error.strerror}"  # `what` is another
            raise _type_of(error)(reason) from error
        if code not in (ENVIRONMENT_ERROR, TRAINING_FAULT):
            raise
        raise UserError(f"{what}: {short_message(error)}; {fix}") from error


def short_message(error: BaseException) -> str:
    """Return a library's error message as one line."""
    words = " ".join(str(error).split())
    if not words or isinstance(error, (KeyError, IndexError)) or " " not in words:
        words = f"{type(error).__name__} {words}".strip()
    return words if len(words) <= _MAX_MESSAGE else f"{words[:_MAX_MESSAGE]}..."


def _is_network_error(error: BaseException | None) -> bool:
    while error is not None:
        library, kind = type(error).__module__.partition(".")[0], type(error).__name__
        is_answer = kind in ("HTTPStatusError", "HTTPError")  # the hub answered
        if isinstance(error, (ConnectionError, TimeoutError)) or (
            library in _NETWORK and not is_answer
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _type_of(error: BaseException) -> type[Exception]:
    if isinstance(error, ImportError):
        return ImportError
    is_memory = isinstance(error, MemoryError) or exit_code(error) == ENVIRONMENT_ERROR
    return MemoryError if is_memory and not isinstance(error, OSError) else OSError


def _problem_of_kind(file: Path) -> str | None:
    """Return why `file` is not a readable file: missing, a folder, a pipe, a device, a socket."""
    try:
        mode = file.stat().st_mode
    except OSError as error:
        return f"{file}: cannot be read: {error.strerror}"
    kind = kind_of(mode)
    return f"{file} is {kind}, not a file; replace it by a file" if kind else None


def check_kinds(folder: Path) -> list[str]:
    """List the entries of a folder that cannot be read: pipes, devices, broken links."""
    entries = sorted(entry for entry in folder.iterdir() if not entry.is_dir())
    broken = [entry for entry in entries if entry.is_symlink() and not entry.exists()]
    return [f"{entry} is a broken link; copy or download the folder again" for entry in broken] + [
        problem
        for entry in entries
        if entry not in broken and (problem := _problem_of_kind(entry)) is not None
    ]


def read_text(file: Path, limit: str) -> tuple[str, str | None]:
    """Read a UTF-8 file within the size limit named `limit`; return text, and a problem or None."""
    if not file.is_file() and (problem := _problem_of_kind(file)) is not None:
        return "", problem
    max_bytes = getattr(limits(), limit) << 20
    with file.open("rb") as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        return "", over_limit(file, f"more than {max_bytes >> 20} MiB", limit)
    try:
        return content.decode("utf-8-sig"), None
    except UnicodeDecodeError as error:
        return "", f"{file}: not UTF-8 text (byte {error.start}); save it as UTF-8"


def read_json_object(file: Path) -> tuple[dict[str, Any], str | None]:
    """Read a JSON object; returns it, and a problem of the file or None."""
    try:
        text, problem = read_text(file, "json_mib")
    except OSError as error:
        return {}, f"{file}: cannot be read: {error.strerror}"
    if problem is not None:
        return {}, problem
    content, problem = parse_json(text, file)
    if problem is None and not isinstance(content, dict):
        problem = f"{file}: expected a JSON object, found {type(content).__name__}"
    return ({}, problem) if problem is not None else (content, None)


def parse_json(text: str | bytes, file: Path) -> tuple[Any, str | None]:
    """Parse JSON within the limits; returns its content, and a problem of `file` or None."""
    try:
        with collect_later():
            content = json.loads(text)
    except json.JSONDecodeError as error:
        return None, f"{file}:{error.lineno}:{error.colno} invalid JSON: {error.msg}"
    except RecursionError:
        return None, over_limit(file, "nested too deep", "json_depth")
    except UnicodeDecodeError as error:
        return None, f"{file}: not UTF-8 text (byte {error.start}); save it as UTF-8"
    except ValueError:  # the only other ValueError: Python's limit on digits
        return (
            None,
            f"{file}: contains a number with thousands of digits; repair it, or download it again",
        )
    return content, _exceeded_limit([content], len(text), file)


def _exceeded_limit(content: Any, size: int, file: Path) -> str | None:
    """Return the limit that the content of a JSON file of `size` characters exceeds, or None."""
    allowed = limits()
    level, depth = [content], 0
    while level:
        if (depth := depth + 1) > allowed.json_depth:
            return over_limit(file, "nested too deep", "json_depth")
        # A tokenizer.json has 100,000s of values, so they are not looped over in Python.
        objects = [holder for holder in level if type(holder) is dict]
        values = list(chain.from_iterable(map(dict.values, objects)))
        values += chain.from_iterable(holder for holder in level if type(holder) is list)
        if size > allowed.json_key:  # no key is longer than its file
            longest = max(map(len, chain.from_iterable(objects)), default=0)
            if longest > allowed.json_key:
                return over_limit(file, f"a key of {longest:,} characters", "json_key")
        if size > allowed.json_string:
            longest = max((len(value) for value in values if type(value) is str), default=0)
            if longest > allowed.json_string:
                return over_limit(file, f"a string of {longest:,} characters", "json_string")
        has_more = not {dict, list}.isdisjoint(map(type, values))
        level = [v for v in values if type(v) in (dict, list)] if has_more else []
    return None


@contextlib.contextmanager
def collect_later() -> Iterator[None]:
    """Collect no garbage inside: of large content that is kept, looking for it costs a third."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a safetensors file, by tensor name; empty for a damaged file."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)

    def non_floats(self, names: re.Pattern[str]) -> list[str]:
        """List the tensors whose names match `names` and are not floats, as `NAME is DTYPE`."""
        return sorted(
            f"{name[:80]!r} is {dtype}"
            for name, dtype in self.dtypes.items()
            if dtype not in FLOATS and names.search(name)
        )


def read_header(file: Path) -> tuple[Header, list[str]]:
    """Read the header of a safetensors file, and compare it with the file's size.

    Returns the header, and the problems for which safetensors would refuse the file.
    """
    if not file.exists():
        return Header(), [f"{file} is missing, but the index lists it; download the model again"]
    if (problem := _problem_of_kind(file)) is not None:
        return Header(), [problem]
    size, max_bytes = file.stat().st_size, limits().header_mib << 20
    with file.open("rb") as stream:
        start = stream.read(len(_LFS_MARK))
        if start == _LFS_MARK:
            problem = f"{file} is a git-lfs pointer of {size} bytes; fetch it with git lfs pull"
            return Header(), [problem]
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or length > size - 8:
            return Header(), [f"{file} ({size} bytes) has no safetensors header; download it again"]
        if length > max_bytes:
            return Header(), [over_limit(file, f"a header of {length:,} bytes", "header_mib")]
        stream.seek(8)
        text = stream.read(length)
    damaged = f"{file}: its safetensors header is damaged"
    header, problem = parse_json(text, file) if text.startswith(b"{") else (None, "no object")
    if problem is not None or not isinstance(header, dict):
        return Header(), [f"{damaged} ({problem}); download it again"]
    metadata = header.pop("__metadata__", None)
    framework = metadata.get("format") if isinstance(metadata, dict) else None
    if framework in ("tf", "flax"):
        return Header(), [
            f"{file}: its header has format={framework}, but TensorFlow and Flax store weights "
            "transposed; export the model from PyTorch (format=pt)"
        ]
    result = Header()
    extents: list[tuple[int, int, str]] = []
    for name, tensor in header.items():
        try:
            result.shapes[name], begin, end = _extent_of(tensor)
        except (ValueError, KeyError, TypeError) as error:
            why = f"{name[:80]!r}: {short_message(error)}"
            return Header(), [f"{damaged}: {why}; download it again"]
        result.dtypes[name] = tensor["dtype"]
        extents.append((begin, end, name))
    expected = 0
    for begin, end, name in sorted(extents):
        if begin != expected:
            why = f"{name[:80]!r} begins at byte {begin}, expected {expected}"
            return Header(), [f"{damaged}: {why}; download it again"]
        expected = end
    if size != (end := 8 + length + expected):
        return Header(), [
            f"{file} has {size} bytes, but its header describes {end}: "
            f"{'cut off' if size < end else 'damaged'}; download it again"
        ]
    return result, []


def _extent_of(tensor: Any) -> tuple[tuple[int, ...], int, int]:
    """Return a tensor's shape, and where its bytes begin and end; raises ValueError if invalid."""
    if not isinstance(tensor, dict) or not {"dtype", "shape", "data_offsets"} <= tensor.keys():
        raise ValueError("expected dtype, shape and data_offsets")
    dtype, shape, offsets = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"{str(numbers)[:80]} is not a list of sizes")
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS or len(offsets) != 2:
        raise ValueError(f"dtype {str(dtype)[:80]!r}, data_offsets {str(offsets)[:80]}")
    begin, end = offsets
    if 8 * (end - begin) != math.prod(shape) * _ITEM_BITS[dtype]:
        raise ValueError(f"{dtype} of shape {str(shape)[:80]} does not have {end - begin} bytes")
    return tuple(shape), begin, end


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessLimits:
    """The processor's time and the memory that work in a process of its own may take."""

    seconds: float = 10.0
    memory_mb: int = 1024


class LimitError(Exception):
    """Which limit was exceeded."""


def call_within(seconds: float, call: Callable[[], _T]) -> _T:
    """Return what `call` returns, or raise what it raises; LimitError after `seconds`.

    It runs in a separate thread, which is abandoned after that time: a library's call that waits
    for the network cannot be interrupted.
    """
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        except BaseException as error:  # noqa: BLE001  raised by the thread that waits
            outcome.put((None, error))

    threading.Thread(target=run, name="limited", daemon=True).start()
    try:
        answer, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise LimitError(f"within {seconds:g} s") from None
    if error is not None:
        raise error
    found: _T = answer
    return found


def run_limited(work: Callable[[], _T], limits: ProcessLimits) -> _T:
    """Return the result of `work`, run in a forked process; raise LimitError if it takes too much.

    Without `fork`, `work` runs in this process, without limits.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return work()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_in_child, args=(work, sender, limits), daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork while other threads run; the child never waits for those.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    try:
        if not receiver.poll(_PATIENCE * limits.seconds):
            raise LimitError(f"within {limits.seconds:g} s")
        is_done, result = receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGXCPU:
            raise LimitError(f"within {limits.seconds:g} s") from None
        if process.exitcode and process.exitcode > 0:
            raise RuntimeError(
                "a process with limited time and memory failed; its error is printed above"
            ) from None
        raise LimitError(f"within {limits.memory_mb:,} MB") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if not is_done:
        raise LimitError(f"within {limits.memory_mb:,} MB")
    value: _T = result
    return value


def _run_in_child(work: Callable[[], object], sender: Connection, limits: ProcessLimits) -> None:
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    _lower_limit(resource.RLIMIT_CPU, int(limits.seconds) + 1)
    statm = Path("/proc/self/statm")
    if statm.is_file():  # Linux: RLIMIT_AS includes the memory that is mapped already
        mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
        _lower_limit(resource.RLIMIT_AS, mapped + limits.memory_mb * 2**20)
    try:
        sender.send((True, work()))
    except MemoryError:
        sender.send((False, None))


def _lower_limit(kind: int, most: int) -> None:
    import resource

    soft, hard = resource.getrlimit(kind)
    finite = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min([most, *finite]), hard))
