"""Pipes and the order of redirects: the exit status, and what does not reach the log."""

import re
from collections.abc import Iterator
from itertools import pairwise

from diagnostics.launch.layers import Launch, Layer, Shell
from diagnostics.launch.rules.rule import Edit, Hit, Rule, Severity, behind
from diagnostics.launch.shell import Command, Redirect, Span
from diagnostics.launch.streams import streams
from diagnostics.launch.wrappers import SHELLS


def _piped(launch: Launch) -> Iterator[tuple[Layer, Command]]:
    """Layers of training programs that write into a pipe, each with the pipeline's last command."""
    seen = set[Span]()
    for layer in launch.training_layers:
        last = layer.pipeline.commands[-1]
        if layer.own and last is not layer.command and last.span not in seen:
            seen.add(last.span)
            yield layer, last


def _no_pipefail(launch: Launch) -> Iterator[Hit]:
    for layer, last in _piped(launch):
        if not _pipefail(layer.shell, layer):
            yield Hit(
                last.words[0].span if last.words else last.span,
                f"the status is that of {last.argv[0] if last.argv else 'the last command'}",
                edits=_set_pipefail(layer.shell),
            )


def _set_pipefail(shell: Shell) -> tuple[Edit, ...]:
    """In front of everything; not in a shell that does not know it."""
    if _is_posix(shell):
        return ()
    script = shell.process.script
    lines = "\n" if "\n" in script.text.value.strip() else "; "
    return (Edit(script.start, f"set -o pipefail{lines}"),)


def _pipefail(shell: Shell, layer: Layer) -> bool:
    """Whether it is set, or the script looks into PIPESTATUS."""
    if "PIPESTATUS" in shell.script.code + shell.process.script.code:
        return True
    opened_by = shell.process.opened_by
    opener = opened_by[-1].handed if opened_by else None
    option = opener.options.get("-o") if opener else None
    found = option is not None and option.value == "pipefail"
    for command in shell.settings(layer.pipeline):
        found = _setting(command.argv, found)
    return found


def _setting(argv: list[str], before: bool) -> bool:
    """Whether pipefail is set behind a command: `set -euo pipefail`, `shopt -so pipefail`."""
    options = "".join(argv[1:-1])
    if argv[:1] == ["shopt"] and argv[-1] == "pipefail" and "o" in options:
        return "s" in options or (before and "u" not in options)
    for option, name in pairwise(argv if argv[:1] == ["set"] else ()):
        if name == "pipefail" and re.fullmatch(r"[-+]\w*o", option):
            before = option.startswith("-")
    return before


def _not_waited_for(launch: Launch) -> Iterator[Hit]:
    seen = set[Span]()
    for chain in launch.trainers:
        for level in streams(chain):
            redirect = level.out.redirect
            if redirect is None or not redirect.into or redirect.span in seen:
                continue
            seen.add(redirect.span)
            layer = level.out.layer
            waits = layer and any(
                p.commands[0].argv[:1] == ["wait"] for p in layer.shell.rest(layer.pipeline)
            )
            if not waits:
                who = " ".join(redirect.into[0].argv[:1]) or "it"
                yield Hit(redirect.span, f"nothing waits for {who}")


def _commands(launch: Launch) -> Iterator[tuple[Layer, Command]]:
    """The commands of training programs that stand in a shell text."""
    return ((layer, layer.command) for layer in launch.training_layers if layer.own)


def _swapped(command: Command) -> tuple[Redirect, Redirect] | None:
    """`2>&1` with a `> file` behind it."""
    errors = [r for r in command.redirects if r.fd == 2 and r.operator == ">&"]
    files = [r for r in command.redirects if r.fd == 1 and r.writes]
    if errors and files and errors[-1].span.end <= files[0].span.start:
        return errors[-1], files[0]
    return None


def _order(launch: Launch) -> Iterator[Hit]:
    for _, command in _commands(launch):
        if swapped := _swapped(command):
            error, file = swapped
            both = Span(error.span.source, error.span.start, file.span.end)
            adjacent = both.source.text[error.span.end : file.span.start].strip() == ""
            text = f"{file.span.text} {error.span.text}"
            yield Hit(
                both,
                f"standard error does not go to {file.target.value if file.target else 'it'}",
                edits=(Edit(both, text),) if adjacent else (),
            )


def _no_stderr(launch: Launch) -> Iterator[Hit]:
    seen = set[Span]()
    for level in (level for chain in launch.trainers for level in streams(chain)):
        layer = level.out.layer
        if layer is None or level.out.kind not in {"file", "pipe"} or not layer.own:
            continue
        if level.err.kind in {"file", "pipe"} or _swapped(layer.command):
            continue
        end = level.out.redirect.span if level.out.redirect else layer.command.span
        if end in seen:
            continue
        seen.add(end)
        gone = "is thrown away" if level.err.kind == "discarded" else "goes to the terminal only"
        edit = Edit(behind(end), " 2>&1")
        yield Hit(
            level.out.redirect.span if level.out.redirect else layer.command.words[0].span,
            f"standard error {gone}",
            edits=(edit,) if level.err.kind != "discarded" else (),
        )


def _bash_only(launch: Launch) -> Iterator[Hit]:
    for layer, command in _commands(launch):
        for redirect in command.redirects:
            if redirect.operator in {"&>", "&>>"} and redirect.target and _is_posix(layer.shell):
                operator = redirect.operator.removeprefix("&")
                text = f"{operator} {redirect.target.span.text} 2>&1"
                yield Hit(
                    redirect.span,
                    "sh reads it as `&` and an empty redirect",
                    edits=(Edit(redirect.span, text),),
                )


def _is_posix(shell: Shell) -> bool:
    """Whether sh reads the text: `sh -c`, `sh script`, or a script that asks for sh."""
    shell = shell.process
    if shell.kind == "file":
        openers = [layer.name for layer in shell.opened_by[-1:] if layer.name in SHELLS]
        first = shell.script.text.value.partition("\n")[0]
        asked = first.startswith("#!") and first.split()[-1].endswith(("/sh", "/dash", " dash"))
        return openers[-1] in {"sh", "dash"} if openers else asked
    return shell.kind in {"sh", "dash"}


RULES = (
    Rule(
        "DL007",
        "a pipe without pipefail",
        Severity.STATUS,
        "A pipeline ends with the status of its last command: whatever kills the trainer, tee"
        " ends with 0 and the launch looks fine.",
        "python -u train.py 2>&1 | tee -a train.log",
        "set -o pipefail; python -u train.py 2>&1 | tee -a train.log",
        "nothing and nobody looks at the status.",
        _no_pipefail,
    ),
    Rule(
        "DL008",
        "`> >(tee)` is not waited for",
        Severity.TAIL,
        "The shell goes on when the trainer ends, while tee still has lines to write: they are"
        " lost when the session or container ends.",
        "python -u train.py > >(tee -a train.log) 2>&1",
        "set -o pipefail; python -u train.py 2>&1 | tee -a train.log",
        "the shell lives on long after the trainer.",
        _not_waited_for,
    ),
    Rule(
        "DL009",
        "`2>&1` stands in front of `>`",
        Severity.TAIL,
        "Redirects are made from left to right: standard error becomes what standard output was"
        " at that moment, the terminal, so that no traceback reaches the log.",
        "python -u train.py 2>&1 >> train.log",
        "python -u train.py >> train.log 2>&1",
        "errors are meant for the terminal alone.",
        _order,
    ),
    Rule(
        "DL010",
        "standard error is not in the log",
        Severity.TAIL,
        "Tracebacks, warnings and the messages of CUDA and NCCL are written to standard error:"
        " the log ends without the reason.",
        "python -u train.py >> train.log",
        "python -u train.py >> train.log 2>&1",
        "the program logs its own exceptions to standard output.",
        _no_stderr,
    ),
    Rule(
        "DL033",
        "`&>` in a shell that does not know it",
        Severity.LOG,
        "In sh, `program &> log` is `program &` and `> log`: the program runs in the background,"
        " its output goes to the terminal, and the log is empty.",
        "sh -c 'exec python -u train.py &>> /workspace/train.log'",
        "sh -c 'exec python -u train.py >> /workspace/train.log 2>&1'",
        "sh is bash there.",
        _bash_only,
    ),
)
