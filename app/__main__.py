"""The console script: `loft VERB ...` is `python -m app.VERB ...`; and its shell completion."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from app.config.schema import list_settings
from app.config.verbs import ALL_VERBS, PARTS, VERBS
from app.process.reporting import report
from common.errors import DONE, USER_ERROR, UserError, nearest
from common.installation import PROGRAM, record_script

_ELSEWHERE = {
    "label": "; a run stores what its teacher says before its first step: type loft train "
    "objective=distill objective.teacher=FOLDER_OR_HUB_ID objective.teacher_logits=cached"
}
"""word that is looked for among the verbs -> what to type instead"""


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
        shell = sys.argv[2] if len(sys.argv) > 2 else ""
        try:
            print(_install_completion(shell, Path.home()))
        except (UserError, OSError) as error:
            sys.exit(report(error))
        sys.exit(DONE)
    if typed not in ALL_VERBS:
        hint = _ELSEWHERE.get(typed) or nearest(typed, ALL_VERBS) or "; loft --help lists the verbs"
        print(f"error: loft has no verb {typed}{hint}", file=sys.stderr)
        sys.exit(USER_ERROR)
    if Path(sys.argv[0]).name == PROGRAM:  # not `python -m app VERB`
        record_script(sys.argv[0])
    del sys.argv[1]  # the verb reads its settings from here, and passes them to its ranks
    runpy.run_module(f"app.{typed}", run_name="__main__", alter_sys=True)


FILES = {
    "bash": Path(".local/share/bash-completion/completions/loft"),
    "zsh": Path(".zfunc/_loft"),
    "fish": Path(".config/fish/completions/loft.fish"),
}
"""where each shell looks for completions, relative to the home folder"""
_BASH = """\
_loft() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" key="" words
  [ "$word" = "=" ] && {{ key="$before"; word=""; }}
  [ "$before" = "=" ] && key="${{COMP_WORDS[COMP_CWORD-2]}}"
  if [ -n "$key" ]; then
    case "$key" in
{options}
      *) COMPREPLY=($(compgen -f -- "$word")); return ;;
    esac
  elif [ "$COMP_CWORD" -eq 1 ]; then
    words="{verbs}"
  else
    case "${{COMP_WORDS[1]}}" in
{settings}
    esac
    [[ "$word" != --* ]] && compopt -o nospace
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -F _loft loft
"""
_ZSH = "#compdef loft\nautoload -U +X bashcompinit && bashcompinit\n"


def completion_script(shell: str) -> str:
    """Return a script that completes verbs, settings and options of groups."""
    from app.config.conf_files import CONF, list_groups

    options = {group: [*names] for group, names in list_groups(CONF).items()}
    settings = {
        verb: [
            f"{setting.typed_key}="
            for setting in list_settings(schema, PARTS)
            if "[]" not in setting.key
        ]
        for verb, schema in VERBS.items()
    }
    for words in settings.values():
        words += ["+experiment=", "--help", "--verbose"]
    if shell == "fish":
        lines = [
            f'complete -c loft -f -n __fish_use_subcommand -a {name} -d "{verb.what}"'
            for name, verb in ALL_VERBS.items()
        ]
        for verb, words in settings.items():
            choices = [f"{group}={name}" for group, names in options.items() for name in names]
            candidates = " ".join(dict.fromkeys([*words, *choices]))
            seen = f"__fish_seen_subcommand_from {verb}"
            lines.append(f"complete -c loft -n '{seen}' -a '{candidates}'")
        return "\n".join(lines) + "\n"
    by_key = [
        f'      {group}|+{group}) words="{" ".join(names)}" ;;' for group, names in options.items()
    ]
    by_verb = [f'      {verb}) words="{" ".join(words)}" ;;' for verb, words in settings.items()]
    script = _BASH.format(
        verbs=" ".join([*ALL_VERBS, "--help", "--version"]),
        options="\n".join(by_key),
        settings="\n".join(by_verb),
    )
    return _ZSH * (shell == "zsh") + script


def _install_completion(shell: str, home: Path) -> str:
    if shell not in FILES:
        known = "|".join(FILES)
        raise UserError(f"--install-completion {shell}: expected --install-completion {known}")
    file = home / FILES[shell]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(completion_script(shell), encoding="utf-8")
    next_step = "; ~/.zshrc needs: fpath+=~/.zfunc; autoload -U compinit; compinit"
    return f"written: {file}{next_step if shell == 'zsh' else ''}; open a new terminal"


if __name__ == "__main__":
    main()
