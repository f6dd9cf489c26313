"""Shell completion: a script for bash, zsh or fish, made from the commands themselves.

It holds every command, flag and word, so that a press of Tab starts no Python; and it is made without torch, so
that a shell may ask for it whenever it starts.
"""

from __future__ import annotations

import inspect
import re
import shlex
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument

from protosteer.cli.common import app
from protosteer.settings import PRESETS

PANEL = "Your shell"

# As the lists have them that these names come from, which would import torch; a test holds them against those.
METHODS = [
    "protosteer", "cpp", "ncm", "knn", "slda", "fecam", "ranpac", "aper", "ease", "l2p", "dualprompt",
    "coda-prompt", "s-prompts", "esn", "ewc", "lwf", "pass", "slca", "er", "der++", "icarl", "gdumb", "bic",
    "co2l", "finetune", "joint", "probe",
]  # fmt: skip
BACKBONES = ["mini", "nano", "vit-small", "dinov2-small", "vit", "deit", "dino", "mae"]
STREAMS = [
    "split-cifar100",
    "five-datasets",
    "imagenet-subset",
    "imagenet-r",
    "cub200",
    "split-digits",
    "split-details",
]
DATASETS = [
    "cifar100", "cifar10", "mnist", "fashion-mnist", "svhn", "notmnist", "imagenet-r", "cub200",
    "imagenet-subset", "digits", "details",
]  # fmt: skip
SUBJECTS = ["prediction", "training", "photos", "matrix", "scaling", "service"]

# By the name of a parameter, or by its command and name.
WORDS = {
    "method": [*METHODS, "all"],
    "backbone": ["auto", *BACKBONES],
    "preset": list(PRESETS),
    "device": ["auto", "cpu", "cuda", "mps"],
    "stream": STREAMS,
    "methods name": METHODS,
    "datasets get names": DATASETS,
    "bench subjects": SUBJECTS,
}
_FILES = re.compile("MODEL|FILE|FOLDER|PATH|DIR|RUN")  # what metavars call them


@dataclass(frozen=True)
class Values:
    """What may follow: words, files."""

    words: tuple[str, ...] = ()
    files: bool = False


@dataclass(frozen=True)
class Flag:
    names: tuple[str, ...]
    help: str
    values: Values | None  # None: it takes none


@dataclass(frozen=True)
class Command:
    path: str  # such as "datasets get"; "" is protosteer itself
    help: str
    flags: list[Flag] = field(default_factory=list)
    arguments: Values = Values()


@app.command(rich_help_panel=PANEL)
def completion(
    shell: Annotated[
        str, Argument(metavar="bash|zsh|fish", help="The shell that it is for.", show_default=False)
    ],
) -> None:
    """Print a script with which the Tab key completes commands, flags, names and files.

    For bash, in ~/.bashrc: eval "$(protosteer completion bash)"; for zsh the same with zsh, in ~/.zshrc after
    compinit; for fish, once: protosteer completion fish > ~/.config/fish/completions/protosteer.fish
    """
    if shell not in SHELLS:
        raise typer.BadParameter(f"{shell!r} is not known; choose one of {', '.join(SHELLS)}")
    print(SHELLS[shell](commands()))


def commands() -> list[Command]:
    return list(_walk("", typer.main.get_command(app)))


def _walk(path: str, command: Any) -> Iterator[Command]:
    """A command as typer made it, and those below it."""
    hints = typing.get_type_hints(inspect.unwrap(command.callback))
    flags, words, files = [Flag(("--help",), "Show what there is.", None)], list[str](), False
    for parameter in command.params:
        values = _values(path, parameter, hints.get(parameter.name))
        if parameter.param_type_name == "argument":
            words, files = [*words, *values.words], files or values.files
        else:
            taken = None if parameter.is_flag else values
            flags.append(Flag((*parameter.opts, *parameter.secondary_opts), _short(parameter.help), taken))
    below = getattr(command, "commands", {})
    yield Command(path, _short(command.help), flags, Values((*words, *below), files))
    for name, inner in below.items():
        yield from _walk(f"{path} {name}".strip(), inner)


def _values(path: str, parameter: Any, hint: Any) -> Values:
    metavar = parameter.metavar or ""
    words = WORDS.get(f"{path} {parameter.name}") or WORDS.get(parameter.name)
    if words is None:
        words = [word for word in metavar.split("|") if re.fullmatch(r"[a-z][a-z0-9-]*", word)]
    return Values(tuple(words), bool(_FILES.search(metavar)) or _is_path(hint))


def _is_path(hint: Any) -> bool:
    return hint is Path or any(_is_path(inner) for inner in typing.get_args(hint))


def _short(text: str | None) -> str:
    """The first sentence, in one line."""
    first = " ".join((text or "").split("\n\n")[0].split())
    return re.split(r"(?<=\w)[.:;] ", first)[0].rstrip(".")


def _cases(found: Sequence[Command]) -> dict[Values, list[str]]:
    """Flags that take the same values, each with its command before it."""
    cases: dict[Values, list[str]] = {}
    for command in found:
        for flag in command.flags:
            if flag.values is not None:
                cases.setdefault(flag.values, []).extend(f"{command.path} {name}" for name in flag.names)
    return cases


def _paths(found: Sequence[Command]) -> list[str]:
    """Commands as they are met word by word: what has been met so far, a space, the next."""
    return [command.path if " " in command.path else f" {command.path}" for command in found if command.path]


def _either(patterns: Sequence[str]) -> str:
    return "|".join(f'"{pattern}"' for pattern in patterns)


def bash(found: Sequence[Command]) -> str:
    def offer(values: Values) -> str:
        return f"_protosteer_offer {int(values.files)} {shlex.quote(' '.join(values.words))}"

    lines = [
        "_protosteer_offer() {  # whether files, words",
        '    COMPREPLY=($(compgen -W "$2" -- "$word"))',
        "    [[ $1 == 0 ]] && return",
        "    compopt -o default -o filenames 2>/dev/null",
        "    local file",
        '    while IFS= read -r file; do COMPREPLY+=("$file"); done < <(compgen -f -- "$word")',
        "}",
        "_protosteer() {",
        '    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command="" i',
        "    COMPREPLY=()",
        "    for ((i = 1; i < COMP_CWORD; i++)); do",
        '        case "$command ${COMP_WORDS[i]}" in',
        f'            {_either(_paths(found))}) command="${{command:+$command }}${{COMP_WORDS[i]}}" ;;',
        "        esac",
        "    done",
        '    if [[ $word == "=" ]]; then word=""; fi',  # --flag=value comes in three words
        '    if [[ $before == "=" ]]; then before=${COMP_WORDS[COMP_CWORD-2]}; fi',
        '    case "$command $before" in',
        *(f"        {_either(flags)}) {offer(values)}; return ;;" for values, flags in _cases(found).items()),
        "    esac",
        '    case "$command" in',
    ]
    for command in found:
        flags = " ".join(name for flag in command.flags for name in flag.names)
        either = (
            f"if [[ $word == -* ]]; then _protosteer_offer 0 '{flags}'; else {offer(command.arguments)}; fi"
        )
        lines.append(f'        "{command.path}") {either} ;;')
    return "\n".join([*lines, "    esac", "}", "complete -F _protosteer protosteer"])


def zsh(found: Sequence[Command]) -> str:
    helps = {command.path: command.help for command in found}

    def told(name: str, about: str) -> str:
        return shlex.quote(f"{name}:{about}" if about else name)

    def offer(path: str, values: Values) -> str:
        words = " ".join(told(word, helps.get(f"{path} {word}".strip(), "")) for word in values.words)
        return "; ".join([f"offered=({words})", *(["files=1"] if values.files else [])])

    lines = [
        "#compdef protosteer",
        "_protosteer() {",
        '    local command="" word before=${words[CURRENT-1]} files=0',
        "    local -a offered",
        "    for word in ${words[2,CURRENT-1]}; do",
        '        case "$command $word" in',
        f'            {_either(_paths(found))}) command="${{command:+$command }}$word" ;;',
        "        esac",
        "    done",
        "    if [[ $PREFIX == --*=* ]]; then before=${PREFIX%%=*}; compset -P '*='; fi",
        '    case "$command $before" in',
        *(f"        {_either(flags)}) {offer('-', values)} ;;" for values, flags in _cases(found).items()),
        "        *)",
        '            case "$command" in',
    ]
    for command in found:
        flags = " ".join(told(name, flag.help) for flag in command.flags for name in flag.names)
        either = f"if [[ $PREFIX == -* ]]; then offered=({flags}); else {offer(command.path, command.arguments)}; fi"
        lines.append(f'                "{command.path}") {either} ;;')
    lines += ["            esac ;;", "    esac"]
    lines += ["    (( $#offered )) && _describe protosteer offered", "    (( files )) && _files", "}"]
    return "\n".join([*lines, "compdef _protosteer protosteer"])


def fish(found: Sequence[Command]) -> str:
    helps = {command.path: command.help for command in found}
    lines = [
        "function __protosteer_is  # whether this is the command so far",
        '    set -l command ""',
        "    for word in (commandline -opc)[2..]",
        '        switch "$command $word"',
        f"            case {' '.join(map(_fish, _paths(found)))}",
        '                set command (string trim "$command $word")',
        "        end",
        "    end",
        '    test "$command" = "$argv[1]"',
        "end",
        "complete -c protosteer -f",
    ]
    for command in found:
        begin = f"complete -c protosteer -n {_fish(f'__protosteer_is {_fish(command.path)}')}"
        for word in command.arguments.words:
            about = helps.get(f"{command.path} {word}".strip(), "")
            lines.append(f"{begin} -a {_fish(word)}{about and f' -d {_fish(about)}'}")
        if command.arguments.files:
            lines.append(f"{begin} -F")
        for flag in command.flags:
            names = " ".join(f"-{'l' if name[:2] == '--' else 's'} {name.lstrip('-')}" for name in flag.names)
            takes = "" if flag.values is None else " -r -F" if flag.values.files else " -x"
            words = f" -a {_fish(' '.join(flag.values.words))}" if flag.values and flag.values.words else ""
            lines.append(f"{begin} {names}{takes}{words} -d {_fish(flag.help)}")
    return "\n".join(lines)


def _fish(text: str) -> str:
    """Quoted: in its single quotes a backslash escapes itself and the quote."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
