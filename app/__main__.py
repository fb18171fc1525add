"""The console script: `loft VERB ...` is `python -m app.VERB ...`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from app.process.errors import DONE, USER_ERROR, UserError, nearest
from app.process.reporting import report

VERBS = {
    "doctor": "what is wrong with this machine, and how fast its ranks talk",
    "init": "write a commented experiment for your model and data",
    "train": "config in, verified adapter out",
    "evaluate": "losses per data set and exact match, base vs tuned",
    "report": "the page of a run, or several runs side by side",
    "preview": "what a run would learn from, before it is paid for",
    "plan": "will it fit, how fast, what to change",
    "merge": "adapter into base, checked; a Hugging Face folder, GGUF",
    "push": "what a run has saved, with its card, to the Hugging Face hub",
    "chat": "talk to base + adapter in the terminal",
    "serve": "OpenAI's chat API and a page for the browser, on this machine",
}


def main() -> None:
    """Run the verb that was typed; exit 2 where there is no such verb."""
    typed = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if typed in ("--help", "-h"):
        print("usage: loft VERB [SETTING=VALUE ...]\n")
        for verb, what in VERBS.items():
            print(f"  {verb:<10}{what}")
        print("\n`loft VERB --help` lists the settings of a verb; --version;")
        print("--install-completion bash|zsh|fish")
        sys.exit(DONE)
    if typed == "--version":
        from app.config.dispatch import version

        print(f"loft {version()}")
        sys.exit(DONE)
    if typed == "--install-completion":
        from app.config.completion import install_completion

        shell = sys.argv[2] if len(sys.argv) > 2 else ""
        try:
            print(install_completion(shell, VERBS, Path.home()))
        except (UserError, OSError) as error:
            sys.exit(report(error))
        sys.exit(DONE)
    if typed not in VERBS:
        hint = nearest(typed, VERBS) or "; loft --help lists the verbs"
        print(f"error: loft has no verb {typed}{hint}", file=sys.stderr)
        sys.exit(USER_ERROR)
    del sys.argv[1]  # the verb and the ranks that it starts read their words from here
    runpy.run_module(f"app.{typed}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
