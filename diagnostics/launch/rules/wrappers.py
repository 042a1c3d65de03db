"""Scripts around the trainer: what they no longer run, and the signals they keep to themselves."""

from collections.abc import Iterator

from diagnostics.launch.layers import Chain, Launch, Layer
from diagnostics.launch.rules.rule import Edit, Hit, Rule, Severity, before
from diagnostics.launch.shell import Pipeline, Span


def _dead_code(launch: Launch) -> Iterator[Hit]:
    for shell in launch.shells:
        for pipeline in shell.script.pipelines:
            command = pipeline.commands[0]
            replaces = command.argv[:1] == ["exec"] and len(command.argv) > 1
            if not replaces or len(pipeline.commands) > 1 or pipeline.background:
                continue
            dead = next((p for p in shell.script.after(pipeline) if _follows(pipeline, p)), None)
            if dead is not None:
                shown = dead.span.text.split("\n")[0]
                yield Hit(dead.span, f"`{shown}` is never run")


def _follows(pipeline: Pipeline, later: Pipeline) -> bool:
    """Whether nothing but this pipeline decides that the later one is reached."""
    return later.block[: len(pipeline.block)] == pipeline.block and (
        later.block == pipeline.block or not pipeline.block
    )


def _swallowed(launch: Launch) -> Iterator[Hit]:
    seen = set[Span]()
    for chain in launch.trainers:
        path = _in_script(chain)
        pipelines = [layer.pipeline for layer in path]
        if not path or path[-1].command.span in seen or any(p.background for p in pipelines):
            continue
        layer = path[-1]
        seen.add(layer.command.span)
        traps = [c for c in layer.shell.front(layer.pipeline) if c.argv[:1] == ["trap"]]
        if layer.name == "exec" or any("TERM" in " ".join(trap.argv) for trap in traps):
            continue
        last = not any(layer.shell.rest(layer.pipeline)) and not any(p.block for p in pipelines)
        alone = all(len(pipeline.commands) == 1 for pipeline in pipelines)
        source = layer.shell.script.text.source
        name = source.name if source.path else "the script"
        yield Hit(
            layer.command.span,
            f"SIGTERM ends the shell of {name}, and the trainer runs on",
            edits=(Edit(before(_start(layer)), "exec "),) if last and alone else (),
            instead="trap 'kill $!' TERM; PROGRAM >> LOG 2>&1 & wait $!"
            if alone
            else "without the pipe, as the script's last line: exec PROGRAM >> LOG 2>&1",
        )


def _in_script(chain: Chain) -> list[Layer]:
    """The statement of the innermost script file that starts the program, if it is in one.

    Last; in front of it are the calls of the functions that it stands in. Not of a batch job's: its
    end is the end of all its processes.
    """
    own = [layer for layer in chain.layers if layer.own]
    script = own[-1].shell.process if own else None
    if script is None or script.kind != "file":
        return []
    job = any(layer.name == "sbatch" for layer in script.opened_by[-1:])
    return [layer for layer in own if layer.shell.process is script and not job]


def _start(layer: Layer) -> Span:
    """Where the program's name stands, behind assignments (`exec A=1 program` is no command)."""
    return layer.command.words[0].span


RULES = (
    Rule(
        "DL025",
        "what stands behind exec is never run",
        Severity.MISLEADS,
        "exec replaces the shell with the program: cleaning up, copying the log or writing the"
        " status behind it does not happen, not even if the program cannot be started.",
        "bash -c 'exec python -u train.py >> /tmp/train.log 2>&1; echo $? > /tmp/status'",
        "bash -c 'python -u train.py >> /tmp/train.log 2>&1; echo $? > /tmp/status'",
        "the shell sets execfail and the rest is meant for a program that cannot be started.",
        _dead_code,
    ),
    Rule(
        "DL026",
        "the script keeps signals to itself",
        Severity.MISLEADS,
        "SIGTERM to a script ends its shell and not the program that the shell waits for: docker"
        " stop, scancel and kill leave the trainer running, with the GPUs taken and no parent.",
        "bash keeps-signals.sh >> train.log 2>&1",
        "bash passes-signals.sh >> train.log 2>&1",
        "the whole process group or container is ended.",
        _swallowed,
        given="keeps-signals.sh runs `python -u train.py`, the other one with `exec` in front",
    ),
)
