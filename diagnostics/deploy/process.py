"""Whether a running process executes certain files: looked at through its own root."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil

from diagnostics.deploy import places
from diagnostics.deploy.compare import Comparison
from diagnostics.deploy.fingerprint import real_path
from diagnostics.deploy.places import Unreachable
from diagnostics.interpreter import Program, program
from diagnostics.processes import TICKS_PER_S, started_s


@dataclass(frozen=True)
class Running:
    """A Python process and the directory that it takes a package from.

    Attributes:
        directory: as the process names it, below its own root.
        is_said: whether it said so itself; else it is the first on its path.
        copies: every directory of that name on what can be known of its path.
    """

    pid: int
    root: Path
    directory: str
    is_said: bool
    started_s: float
    copies: tuple[str, ...]

    @property
    def source(self) -> str:
        """How the directory is known."""
        return "it said so in its log" if self.is_said else "first on its path"

    @property
    def others(self) -> list[str]:
        """The other copies."""
        return [copy for copy in self.copies if copy != self.directory]

    def fingerprint(self, names: list[str]) -> dict[str, Any]:
        """What lies there now. Raises Unreachable."""
        return places.here(self.directory, names, root=self.root)

    def rivals(self, files: Mapping[str, Any]) -> list[str]:
        """Copies with other files that it may have taken instead. Raises Unreachable.

        It may have set its path, or changed its working directory, before it imported the package;
        none are left where it said itself which one it took.
        """
        possible = [] if self.is_said else self.others
        found = {copy: places.here(copy, root=self.root)["files"] for copy in possible}
        return [copy for copy, there in found.items() if Comparison(files, there).lines()]

    def changed_since_start(self, files: Iterable[str]) -> list[tuple[float, str]]:
        """(when, file) of those that changed later: it may have read what stood there before.

        By the time of the last change of the inode, which a copy that keeps its times does not
        hide.
        """
        # It started within a clock tick, and no Python has read a package by the end of that.
        began_s = self.started_s + 1 / TICKS_PER_S
        changes = ((self._changed_s(path), path) for path in files)
        return sorted(change for change in changes if change[0] > began_s)

    def _changed_s(self, path: str) -> float:
        """When the file was changed, or a link that leads to it."""
        whole = os.path.join(self.directory, path)
        steps = accumulate(whole.split("/")[1:], "{}/{}".format, initial=str(self.root))
        links = [os.lstat(step).st_ctime for step in [*steps][1:] if os.path.islink(step)]
        return max([os.stat(real_path(whole, str(self.root))).st_ctime, *links])


def running(pid: int, package: str) -> Running:
    """Where the process takes the package from. Raises Unreachable."""
    try:
        process = psutil.Process(pid)
        began_s, cwd = started_s(pid), process.cwd()
        command, environment = process.cmdline(), process.environ()
    except (psutil.NoSuchProcess, ProcessLookupError) as error:
        raise Unreachable(f"there is no process {pid}") from error
    except (psutil.AccessDenied, PermissionError) as error:
        raise Unreachable(f"process {pid} cannot be read", "Run this as root.") from error
    if not command:
        raise Unreachable(f"process {pid} has no command line: it is no Python")
    root = Path(f"/proc/{pid}/root")
    found = dict.fromkeys(_copies(root, package, cwd, command, environment))
    copies = tuple(copy for copy in found if _has_init(root, copy)) or tuple(found)
    if run := _own_manifest(pid):
        return Running(pid, root, run, True, began_s, copies)
    if not copies:
        raise Unreachable(
            f"process {pid} has no directory {package} on what can be known of its path",
            f"Name it: deploy-check verify MANIFEST DIRECTORY --root /proc/{pid}/root",
        )
    return Running(pid, root, copies[0], False, began_s, copies)


def _own_manifest(pid: int) -> str | None:
    """A run of `dflash train` maps its heartbeat, beside which its manifest lies."""
    from dflash import heartbeat

    for mapping in psutil.Process(pid).memory_maps():
        path = Path(mapping.path)
        if path.name == heartbeat.FILE:
            manifest = Path(f"/proc/{pid}/root{path.with_name('manifest.json')}")
            if manifest.is_file():
                return _import_path(manifest)
    return None


def _import_path(manifest: Path) -> str:
    """Raises Unreachable."""
    try:
        path: str = os.fspath(json.loads(manifest.read_text(encoding="utf-8"))["import_path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{manifest} does not say where dflash was imported from: {error}"
        raise Unreachable(why) from error
    return path


def _copies(
    root: Path, package: str, cwd: str, command: list[str], environment: dict[str, str]
) -> Iterator[str]:
    """In the order in which Python would look: script or working directory, PYTHONPATH, site."""
    for entry in _path(root, cwd, command, environment):
        directory = os.path.normpath(os.path.join(cwd, entry, *package.split(".")))
        if os.path.isdir(real_path(directory, str(root))):
            yield directory


def _has_init(root: Path, directory: str) -> bool:
    """Whether it is a package of its own; Python takes others only where there is none."""
    return os.path.isfile(real_path(os.path.join(directory, "__init__.py"), str(root)))


def _path(root: Path, cwd: str, command: list[str], environment: dict[str, str]) -> Iterator[str]:
    told = program(command)
    variables = {} if told.flags & {"E", "I"} else environment
    if not (told.flags & {"P", "I"} or variables.get("PYTHONSAFEPATH")):
        yield _beside(root, cwd, told)
    if entries := variables.get("PYTHONPATH"):
        yield from entries.split(os.pathsep)  # an empty one is the working directory
    for prefix in (environment.get("VIRTUAL_ENV"), os.path.dirname(os.path.dirname(command[0]))):
        if prefix:
            for site in Path(f"{root}{os.path.join(cwd, prefix)}").glob(
                "lib/python3*/site-packages"
            ):
                inside = "/" + str(site.relative_to(root))
                yield inside
                yield from _editable(site)


def _beside(root: Path, cwd: str, told: Program) -> str:
    """What Python itself puts first: the directory of the script, where links lead to it."""
    if told.how or told.what in {"", "-"}:
        return cwd
    script = real_path(os.path.join(cwd, told.what), str(root))
    folder = script if os.path.isdir(script) else os.path.dirname(script)
    return folder.removeprefix(str(root)) or "/"


def _editable(site: Path) -> Iterator[str]:
    """Directories that .pth files of editable installations add to the path."""
    for file in site.glob("*.pth"):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("/"):
                yield line.strip()
