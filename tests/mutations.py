"""Seeded damage to files: flipped, removed and repeated bytes, values of other types."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

HUGE_DIGITS = "9" * 5000
"""a number with more digits than Python parses, inserted as text since json cannot write it"""
DEEP = 3000
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 3, 7, 10**6, 10**12, 10**30, -(10**30), 0.5, -0.5, 5.0),
    *(1e308, float("nan"), float("inf"), "", "nope", "0", "-1", "null", "../../etc/passwd", "\0"),
    *("\ud800", "x" * 200_000, "(a+)+$", "(", "*" * 50, [], [[]], {}, {"a": 1}, [0, 1], ["a", 1]),
    *(HUGE_DIGITS, "DEEP LIST", "DEEP OBJECT"),
]
KEYS = [
    *("", "nope", "model_type", "r", "__class__", "self", "x" * 10_000, "\0", "torch_dtype"),
    *("role", "weight", "\u00e9"),
]


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flip, truncate, repeat, remove or insert some bytes."""
    if not content:
        return b"\xff"
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.choice([1, 2, 8, 64, 1000]))
    piece = content[start:end]
    kind = rng.randrange(6)
    if kind == 0:
        place = start
        return (
            content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[start + 1 :]
        )
    if kind == 1:
        return content[:start]
    if kind == 2:
        return content[:end] + piece * rng.choice([1, 2, 50]) + content[end:]
    if kind == 3:
        return content[:start] + content[end:]
    if kind == 4:
        return content[:start] + rng.randbytes(len(piece)) + content[end:]
    return content[:start] + rng.choice([b"\0", b"\xff\xfe", b"\xef\xbb\xbf"]) + content[start:]


def mutate_tree(tree: Any, rng: random.Random) -> Any:
    """Return a copy of a tree of dicts and lists with one changed value."""
    tree = copy.deepcopy(tree)
    holders = list(_holders(tree))
    if not holders:
        return rng.choice(VALUES)
    holder, key = rng.choice(holders)
    kind = rng.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        holder[key] = [holder[key]]
    elif kind == 2 and isinstance(holder, dict):
        holder[rng.choice(KEYS)] = holder.pop(key)
    elif kind == 3 and isinstance(holder, dict):
        holder[rng.choice(KEYS)] = rng.choice(VALUES)
    elif kind == 4 and isinstance(holder[key], (int, float)):
        holder[key] = holder[key] * rng.choice([-1, 2, 10**9, 0.5])
    elif kind == 5:
        holder[key] = str(holder[key])
    else:
        holder[key] = rng.choice(VALUES)
    return tree


def _holders(tree: Any) -> Any:
    """Yield (container, key) of every value; of long containers only the first and the last."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    for key in keys if len(keys) <= 40 else [*keys[:3], *keys[-3:]]:
        yield tree, key
        if isinstance(tree[key], (dict, list)):
            yield from _holders(tree[key])


def dump_json(tree: Any) -> bytes:
    """Return a tree as JSON, with placeholders replaced by what `json` cannot write."""
    text = json.dumps(tree)
    text = text.replace(f'"{HUGE_DIGITS}"', HUGE_DIGITS)
    text = text.replace('"DEEP LIST"', "[" * DEEP + "]" * DEEP)
    return text.replace('"DEEP OBJECT"', '{"a":' * DEEP + "1" + "}" * DEEP).encode()


def mutate_json(content: bytes, rng: random.Random) -> bytes:
    """Damage a JSON file: its bytes, one value, or two."""
    if rng.random() < 0.25:
        return mutate_bytes(content, rng)
    tree = mutate_tree(json.loads(content), rng)
    if rng.random() < 0.3 and isinstance(tree, (dict, list)):
        tree = mutate_tree(tree, rng)
    return dump_json(tree)


def mutate_safetensors(content: bytes, rng: random.Random) -> bytes:
    """Damage a safetensors file: its header, the header's length, its bytes."""
    length = int.from_bytes(content[:8], "little")
    header, body = content[8 : 8 + length], content[8 + length :]
    kind = rng.randrange(6)
    if kind == 0:
        return mutate_bytes(content, rng)
    if kind == 1:
        size = rng.choice([0, 1, length - 1, length + 8, 2**31, 2**63, 2**64 - 1, len(content)])
        return size.to_bytes(8, "little") + content[8:]
    if kind == 2:
        header = mutate_bytes(header, rng)
    elif kind == 3:  # all bits of a number set: NaN
        place = rng.randrange(0, max(len(body) - 8, 1))
        body = body[:place] + b"\xff" * 8 + body[place + 8 :]
    else:
        header = dump_json(mutate_tree(json.loads(header), rng))
    return len(header).to_bytes(8, "little") + header + body


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
LINES = [
    *("a: &a [*a]", "? [a, b]\n: 1", "x: !!python/object/apply:os.system [id]", "1: 2", "- a"),
    *("x: 2001-99-99", "x: !!binary =", "x: !!timestamp nope", "trainer: 3", "null: null"),
    *("x: " + HUGE_DIGITS, "x: " + "[" * 200 + "]" * 200, "model: []", "defaults: 3"),
    *("defaults: [[1]]", "defaults: [{a: {b: c}}]", "defaults: [null]", "defaults: {a: b}", "\t"),
    *("x: ${oc.env:HOME}", "seed: ${seed}", "x: '\0'", ALIASES, "model: {path: {a: b}}"),
    *("defaults: [override /model: [tiny]]", "defaults: ['@@@']", "defaults: [override /model: 1]"),
]


def mutate_yaml(content: bytes, rng: random.Random) -> bytes:
    """Damage a YAML file: its bytes, an invalid line, or one value."""
    import yaml

    kind = rng.randrange(4)
    if kind == 0:
        return mutate_bytes(content, rng)
    if kind == 1:
        return content + b"\n" + rng.choice(LINES).encode() + b"\n"
    if kind == 2:
        lines = content.split(b"\n")
        lines[rng.randrange(len(lines))] = rng.choice(LINES).encode()
        return b"\n".join(lines)
    tree = mutate_tree(yaml.safe_load(content), rng)
    first = content.split(b"\n")[0] + b"\n" if content.startswith(b"#") else b""
    return first + yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass")


Mutate = Callable[[bytes, random.Random], bytes]
