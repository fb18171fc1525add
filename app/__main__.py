"""The console script: `loft VERB ...` is `python -m app.VERB ...`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from app.config.verbs import ALL_VERBS
from app.process.reporting import report
from common.errors import DONE, USER_ERROR, UserError, nearest
from common.installation import PROGRAM, record_script


def main() -> None:
    """Run the verb named on the command line; exit code 2 if it does not exist."""
    typed = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if typed in ("--help", "-h"):
        print("usage: loft VERB [SETTING=VALUE ...]\n")
        for name, verb in ALL_VERBS.items():
            print(f"  {name:<10}{verb.what}")
        print("\n`loft VERB --help` lists the settings of a verb; other options: --version,")
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
            print(install_completion(shell, Path.home()))
        except (UserError, OSError) as error:
            sys.exit(report(error))
        sys.exit(DONE)
    if typed not in ALL_VERBS:
        hint = nearest(typed, ALL_VERBS) or "; loft --help lists the verbs"
        print(f"error: loft has no verb {typed}{hint}", file=sys.stderr)
        sys.exit(USER_ERROR)
    if Path(sys.argv[0]).name == PROGRAM:  # not `python -m app VERB`
        record_script(sys.argv[0])
    del sys.argv[1]  # the verb reads its settings from here, and passes them to its ranks
    runpy.run_module(f"app.{typed}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
