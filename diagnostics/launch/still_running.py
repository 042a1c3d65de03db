"""The trainer was started, and still runs: where its output goes instead of into the log."""

import os
from collections.abc import Iterator
from pathlib import Path

from diagnostics.launch import tmux_session
from diagnostics.launch.finding import Finding, excluded, first, fits, unknown
from diagnostics.launch.remains import CSH_LOG, Output, Process, Remains, opened_by, place_of

NO_WRITER = "no process that can be read writes to such a file"


def other_namespace(remains: Remains) -> Finding:
    """The file is where it should be, in mounts that cannot be seen from here."""
    here = os.readlink("/proc/self/ns/mnt")

    def found() -> Iterator[Finding]:
        for process, output in remains.writers:
            if process.namespace != here and not output.is_deleted:
                yield fits(
                    f"{process} sees other mounts than you: its log is"
                    f" /proc/{process.pid}/root{output.path}",
                    process,
                    output,
                )

    return first(found(), "every process seen has the mounts that you have")


def deleted(remains: Remains) -> Finding:
    """The file has no name any more; its writer still has it open."""

    def found() -> Iterator[Finding]:
        for process, output in remains.writers:
            if output.is_deleted:
                yield fits(
                    f"{process} writes to {output.path}, deleted: {output.size} bytes",
                    process,
                    output,
                )

    return first(found(), NO_WRITER)


def _hidden(remains: Remains) -> Iterator[tuple[Process, Output]]:
    """Files that lie on a path under which something else is found here, or nothing."""
    here = os.readlink("/proc/self/ns/mnt")
    for process, output in remains.writers:
        if process.namespace == here and not output.is_deleted and not output.is_at_its_path:
            yield process, output


def mounted_over(remains: Remains) -> Finding:
    """A volume was mounted on its directory afterwards."""
    found = (
        fits(
            f"{process} writes to {output.path}, over which something was mounted",
            process,
            output,
        )
        for process, output in _hidden(remains)
        if output.visible
    )
    return first(found, NO_WRITER)


def bound_outside(remains: Remains) -> Finding:
    """The redirect was opened by a shell outside of the container."""
    found = (
        fits(
            f"{process} writes to {output.path} of a file system that is not seen from here: the"
            " redirect was opened outside of this root or container",
            process,
            output,
        )
        for process, output in _hidden(remains)
        if not output.visible
    )
    return first(found, NO_WRITER)


def _elsewhere(remains: Remains) -> Iterator[tuple[Process, Output]]:
    here = os.readlink("/proc/self/ns/mnt")
    for process, output in remains.writers:
        seen = process.namespace == here and output.is_at_its_path
        if seen and output.place != place_of(remains.log):
            yield process, output


def csh_file(remains: Remains) -> Finding:
    """csh takes `> log 2>&1` for a redirect into a file `1`."""

    def found() -> Iterator[Finding]:
        for process, output in _elsewhere(remains):
            if os.path.basename(output.path) == CSH_LOG:
                yield fits(f"{process} writes to {output.path}, which csh makes of 2>&1")
        for path in _files_named(remains, CSH_LOG):
            yield fits(f"{path} was written since, which csh makes of 2>&1")

    return first(found(), f"no file called {CSH_LOG} was written")


def other_directory(remains: Remains) -> Finding:
    """A relative path, from another directory than one thought."""

    def found() -> Iterator[Finding]:
        for process, output in _elsewhere(remains):
            if os.path.basename(output.path) == remains.log.name:
                said = f"{process} writes to {output.path}"
                if remains.since is None:
                    yield unknown(f"say --since TIME: {said}, but since {process.since}")
                yield fits(f"{said}: the path was relative")
        for path in _files_named(remains, remains.log.name):
            yield fits(f"{path} was written since: the path was relative")

    return first(found(), f"no other file called {remains.log.name} was found")


def _files_named(remains: Remains, name: str) -> Iterator[Path]:
    """Such files, written since the launch, where shells usually stand."""
    if remains.since is None or remains.log_is_new:
        return
    asked = tmux_session.ask("list-sessions", "-F", "#{session_path}") or ""
    folders = dict.fromkeys(
        (Path.cwd(), Path.home(), Path("/"), remains.log.parent, *map(Path, asked.splitlines()))
    )
    for path in (folder / name for folder in folders):
        try:
            written_s = path.stat().st_mtime
        except OSError:
            continue
        if path.is_file() and written_s >= remains.since and path != remains.log:
            yield path


def other_output(remains: Remains) -> Finding:
    """A GPU holder whose output is not redirected at all, or into another file."""

    def found() -> Iterator[Finding]:
        related = {remains.log.name, CSH_LOG}
        for process in remains.ours:
            standard = next((output for output in process.outputs if output.fd == 1), None)
            if standard is None or (process.command.split() or [""])[0].endswith("tee"):
                continue
            elsewhere = not standard.regular or os.path.basename(standard.path) not in related
            if elsewhere and process.gpus and standard.place != place_of(remains.log):
                yield fits(f"{process} writes to {standard.link}")

    return first(found(), "no process of the launch that can be read writes elsewhere")


def tee_without_file(remains: Remains) -> Finding:
    """tee could not open the file, and passes everything on."""

    def found() -> Iterator[Finding]:
        for process in remains.ours:
            if (
                process.command.split()[:1]
                and os.path.basename(process.command.split()[0]) == "tee"
            ):
                files = [name for name in opened_by(process.pid) if name.startswith("/")]
                if not any(Path(name).name == remains.log.name for name in files):
                    yield fits(f"{process} passes everything on, and has no file open")

    return first(found(), "no tee that was to write it runs without a file")


def buffered(remains: Remains) -> Finding:
    """The file is there and empty, since nothing was flushed yet."""
    for process, output in remains.writers:
        if output.place == place_of(remains.log) and output.size == 0:
            return fits(
                f"{process} has it open, and has written nothing: its output is buffered", process
            )
    return excluded("no process has it open, empty")
