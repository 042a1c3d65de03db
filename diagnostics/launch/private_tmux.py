"""A tmux that meets nobody's server and runs nobody's plugins."""

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

CONFIGS = ("/etc/tmux.conf", "~/.tmux.conf", "~/.config/tmux/tmux.conf")
SETS = ("set ", "set-option ", "setw ", "set-window-option ")


def shim_tmux(folder: Path, config: str) -> Path | None:
    """`folder/bin/tmux`: with this configuration and with a server in `folder`, whatever is set.

    None where tmux is not installed.
    """
    found = shutil.which("tmux")
    if found is None:
        return None
    shim = folder / "bin" / "tmux"
    shim.parent.mkdir(exist_ok=True)
    own = f"TMUX_TMPDIR={shlex.quote(str(folder))}"
    tmux = f"{shlex.quote(found)} -f {shlex.quote(config)}"
    shim.write_text(f'#!/bin/sh\nunset TMUX\n{own} exec {tmux} "$@"\n')
    shim.chmod(0o700)
    return shim


def shim_with_settings(folder: Path) -> Path | None:
    """The same, with what the user's own configuration sets, and nothing that it runs."""
    config = folder / "tmux.conf"
    config.write_text("".join(f"{line}\n" for line in _settings()))
    return shim_tmux(folder, str(config))


def _settings() -> Iterator[str]:
    """The lines of the user's tmux configuration that only set something."""
    for path in (Path(name).expanduser() for name in CONFIGS):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        yield from (line for line in lines if line.lstrip().startswith(SETS) and "#(" not in line)
