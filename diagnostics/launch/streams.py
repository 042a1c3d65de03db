"""Where a program's standard output and error go, and which files end up holding them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from diagnostics.launch.batch import Options, job_options, keeps_earlier, output
from diagnostics.launch.layers import Chain, Launch, Layer
from diagnostics.launch.shell import Command, Redirect, Span, Word
from diagnostics.launch.whereabouts import said_path
from diagnostics.launch.wrappers import Handed, split_options


@dataclass(frozen=True)
class Sink:
    """The end of one stream.

    `kind`: `terminal`, `file`, `pipe`, `discarded`, or `elsewhere` (a container's or a batch
    system's own log). `readers` are the commands behind a pipe or a process substitution; `log` is
    the file that a batch system opens for a job.
    """

    kind: str
    layer: Layer | None = None
    redirect: Redirect | None = None
    readers: tuple[Command, ...] = ()
    log: "Log | None" = None


@dataclass(frozen=True)
class Streams:
    """Both streams, as one side of a pseudo-terminal sees them."""

    out: Sink
    err: Sink


@dataclass(frozen=True)
class Log:
    """A file that output is written to.

    `word` is its path (None: nohup.out), `span` covers path and operator, `layer` is the command
    whose shell opens it, `writer` is `redirect`, `tee`, `script`, `nohup` or `sbatch`.
    """

    word: Word | None
    layer: Layer
    writer: str
    appends: bool
    span: Span
    redirect: Redirect | None = None
    command: Command | None = None


def streams(chain: Chain) -> list[Streams]:
    """Level by level: a wrapper that passes output on (ssh, script, docker exec) starts a new one.

    With a terminal of its own the program writes to that, otherwise to a pipe. The last level is
    what the program itself writes to. A wrapper that returns at once (tmux -d) leaves nothing of
    the levels outside it.
    """
    start = Sink("terminal" if chain.layers[0].tty else "elsewhere")
    levels = [Streams(start, start)]
    for layer, inner in zip_longest(chain.layers, chain.layers[1:]):
        if layer.own:
            levels[-1] = _redirected(layer, levels[-1])
        handed = layer.handed
        fresh = Sink("terminal" if handed and handed.tty is not False else "elsewhere", layer)
        if layer.name == "nohup" and levels[-1].out.kind == "terminal":
            out = Sink("file", layer)
            levels[-1] = Streams(out, out if levels[-1].err.kind == "terminal" else levels[-1].err)
        if handed and handed.detached:
            levels = [Streams(fresh, fresh)]
            if layer.name == "sbatch":
                levels = [_job(layer, handed, inner, fresh)]
        elif handed and handed.tty is not None:
            inner = fresh if handed.tty else Sink("pipe", layer)
            levels.append(Streams(inner, inner))
    return levels


def _job(layer: Layer, handed: Handed, inner: Layer | None, otherwise: Sink) -> Streams:
    """Of a batch job; standard error goes where the output does unless it is told another file."""
    options = job_options(handed.options, inner.shell.script if inner else None)
    out = _job_file(layer, options, "--output") or otherwise
    return Streams(out, _job_file(layer, options, "--error") or out)


def _job_file(layer: Layer, options: Options, name: str) -> Sink | None:
    word = output(options, name)
    if word is None:
        return None
    log = Log(word, layer, "sbatch", keeps_earlier(options, word), word.span)
    return Sink("discarded" if word.value == "/dev/null" else "file", layer, log=log)


def _redirected(layer: Layer, before: Streams) -> Streams:
    now = before
    for command in layer.shell.commands(layer.pipeline):
        if command.argv == ["exec"]:
            now = _apply(now, command.redirects, layer)
    index = next(i for i, c in enumerate(layer.pipeline.commands) if c is layer.command)
    readers = layer.pipeline.commands[index + 1 :]
    if readers:
        now = replace(now, out=Sink("pipe", layer, readers=readers))
    now = _apply(now, layer.command.redirects, layer)
    if readers and layer.pipeline.pipes[index] == "|&":
        now = replace(now, err=now.out)
    return now


def _apply(now: Streams, redirects: tuple[Redirect, ...], layer: Layer) -> Streams:
    for redirect in redirects:
        sink = _target(redirect, now, layer)
        if sink is None:
            continue
        if redirect.operator.startswith("&>") or redirect.both_by_name:
            now = Streams(sink, sink)
        elif redirect.fd == 1:
            now = replace(now, out=sink)
        elif redirect.fd == 2:
            now = replace(now, err=sink)
    return now


def _target(redirect: Redirect, now: Streams, layer: Layer) -> Sink | None:
    value = redirect.target.value if redirect.target else ""
    if redirect.into:
        return Sink("pipe", layer, redirect, redirect.into)
    if value == "/dev/null" or redirect.operator == ">&-":
        return Sink("discarded", layer, redirect)
    if redirect.writes:
        return Sink("file", layer, redirect)
    if redirect.operator == ">&":
        return {"1": now.out, "2": now.err}.get(value)
    return None


def logs(chain: Chain) -> list[Log]:
    """The files that hold the program's output, each once."""
    found: list[Log] = []
    for level in streams(chain):
        for sink in (level.out, level.err):
            found += [log for log in _files(sink) if log.span not in [f.span for f in found]]
    found += [log for layer in chain.layers for log in _typescript(layer)]
    return found


def all_logs(launch: Launch) -> Iterator[Log]:
    """The logs of all programs that train, each once; `$1` is another one in each call."""
    seen = set[tuple[Span, str]]()
    for log in (log for chain in launch.trainers for log in logs(chain)):
        said = said_path(log.word, log.layer) if log.word else ""
        if (log.span, said) not in seen:
            seen.add((log.span, said))
            yield log


def _files(sink: Sink) -> Iterator[Log]:
    layer, redirect = sink.layer, sink.redirect
    if layer is None:
        return
    if sink.log is not None and sink.kind == "file":
        yield sink.log
    elif sink.kind == "file" and redirect is None:
        yield Log(None, layer, "nohup", True, layer.command.words[0].span)
    elif sink.kind == "file" and redirect is not None:
        yield Log(redirect.target, layer, "redirect", redirect.appends, redirect.span, redirect)
    for command in sink.readers:
        yield from tee_logs(command, layer)
        yield from (
            Log(r.target, layer, "redirect", r.appends, r.span, r)
            for r in command.redirects
            if r.writes and r.fd == 1 and r.target and r.target.value != "/dev/null"
        )


def tee_logs(command: Command, layer: Layer) -> Iterator[Log]:
    """The files that a `tee` writes; nothing for another command."""
    if command.argv[:1] != ["tee"]:
        return
    options, words = split_options(command.words[1:], lambda _: False)
    appends = "-a" in options or "--append" in options
    for word in words:
        if word.value != "/dev/null" and not word.value.startswith(">("):
            yield Log(word, layer, "tee", appends, word.span, command=command)


def _typescript(layer: Layer) -> Iterator[Log]:
    if layer.name == "script" and layer.own and layer.handed:
        _, words = split_options(layer.command.words[1:], {"-c", "-E", "-m"}.__contains__)
        for word in words[:1]:
            appends = "-a" in layer.handed.options
            yield Log(word, layer, "script", appends, word.span, command=layer.command)
