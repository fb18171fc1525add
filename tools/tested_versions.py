"""Whether the sweeps over model families, and simulated GPUs, passed with these versions and files.

Their results change only with the versions in constraints.txt and with the files in DEPENDS_ON.
`python -m tools.tested_versions` exits with 1 if any of them changed since the sweeps passed;
`make test-versions` runs the sweeps and records that they passed.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "tested_versions.txt"
MARKER = "pytest.mark.versions"
DEPENDS_ON = (
    "constraints.txt",
    "conf/model",
    "conf/experiment",
    "app/model",
    "app/planning",
    "app/strategy",
    "app/training",
    "benchmarks",
    "tools/simulate",
)


def digest(root: Path = ROOT) -> str:
    """Return the SHA-256 of the files that the sweeps depend on, and of the sweeps."""
    files = [root / DEPENDS_ON[0]]
    files += [file for folder in DEPENDS_ON[1:] for file in (root / folder).rglob("*.*")]
    files += [file for file in (root / "tests").rglob("*.py") if MARKER in file.read_text("utf-8")]
    found = hashlib.sha256()
    for file in sorted(file for file in files if file.suffix in (".txt", ".yaml", ".py", ".cpp")):
        found.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def main(words: list[str]) -> int:
    """Record that the sweeps passed (`record`), or return 1 if they have to run again."""
    if words == ["record"]:
        RECORD.write_text(digest() + "\n", encoding="utf-8")
        print(f"{RECORD.relative_to(ROOT)} is written")
        return 0
    if RECORD.is_file() and RECORD.read_text("utf-8").strip() == digest():
        print("make test-versions passed with these versions and files")
        return 0
    print("versions or files changed since make test-versions passed")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
