"""Launches that leave no log, each in one way: what to do, and the mechanism that it makes real."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from diagnostics import processes
from diagnostics.launch import family
from diagnostics.launch.post_mortem import probe
from tests.launch.launching import WITHIN_S

STAY = "import signal, sys\nprint('step 1', flush=True)\nopen('ready', 'w')\nsignal.pause()"
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux here")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="mounts and other roots take root")


class Scene:
    """A launch that fails in one way; `log` is the one that is looked for afterwards."""

    def __init__(self, work):
        self.work = work
        self.log = work / f"{uuid.uuid4().hex}.log"  # found among all processes by its name
        self.session = None
        self.unreadable = None  # or so many processes
        self.since = time.time()
        self.gpu = work / "gpu0"
        self.gpu.touch()
        self.started = []
        (work / "train.py").write_text(STAY)
        self.python = f"{sys.executable} -S {work / 'train.py'}"

    def bash(self, line, cwd=None):
        """Type a line that goes on; returns when the trainer in it has said `ready`."""
        started = subprocess.Popen(
            ["bash", "-c", line],
            cwd=cwd or self.work,
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        self.started.append(started)
        folder = Path(cwd or self.work)
        assert family.wait_until(lambda: (folder / "ready").exists(), WITHIN_S)

    def dies(self, line, cwd=None):
        """Type a line that ends; its exit status."""
        null = subprocess.DEVNULL
        return subprocess.run(
            ["bash", "-c", line], cwd=cwd or self.work, stdin=null, stderr=null
        ).returncode

    def tmux(self, *words):
        return subprocess.run(
            ["tmux", *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=30
        ).returncode

    def wait_until_gone(self, session):
        def gone():
            return self.tmux("has-session", "-t", f"={session}") == 1

        assert family.wait_until(gone, WITHIN_S)

    def probe(self, **options):
        wanted = {"log": self.log, "session": self.session, "since": self.since}
        gpu = re.compile(re.escape(str(self.gpu)))
        with pytest.MonkeyPatch.context() as patch:
            if self.unreadable is not None:
                table = processes.look()
                patch.setattr(processes, "look", lambda: self._with_unreadable(table))
            return probe(**{**wanted, **options}, gpu=gpu)

    def _with_unreadable(self, table):
        readable = [process for process in table.processes if process.is_readable]
        hidden = [replace(readable[0], is_readable=False, links=(), maps=())] * self.unreadable
        return replace(table, processes=(*readable, *hidden))

    def found(self):
        """The verdict's code and status, and which mechanisms fit or cannot be known."""
        verdict, cases = self.probe()
        outcomes = {case.name: case.outcome.value for case in cases}
        code = verdict.code.removeprefix("post-mortem-")
        return code, verdict.status.value, outcomes

    def end(self):
        for each in self.started:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()


# Each makes one mechanism real, and returns what is found, if that takes looking from inside.


def directory_missing(scene):
    scene.log = scene.work / "missing" / scene.log.name
    assert scene.dies(f"{scene.python} > {scene.log} 2>&1") != 0


def is_directory(scene):
    scene.log.mkdir()
    assert scene.dies(f"{scene.python} > {scene.log} 2>&1") != 0


def in_child(scene, act):
    """Found by a child that has mounts, a root or a user of its own."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            answer = act()
        except BaseException as error:
            answer = repr(error)
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    found = json.loads(text)
    assert isinstance(found, list), found
    return found


def mount(*words):
    subprocess.run(["mount", *map(str, words)], check=True, capture_output=True)


def on_tmpfs(options):
    def launch(scene):
        def act():
            family.own_mounts()
            folder = scene.work / "disk"
            folder.mkdir()
            mount("-t", "tmpfs", "-o", options, "none", folder)
            scene.log = folder / scene.log.name
            assert scene.dies(f"{scene.python} > {scene.log} 2>&1") != 0
            assert not scene.log.exists()
            return scene.found()

        return in_child(scene, act)

    return launch


def disk_full(scene):
    def act():
        family.own_mounts()
        folder = scene.work / "disk"
        folder.mkdir()
        mount("-t", "tmpfs", "-o", "size=8k", "none", folder)
        scene.log = folder / scene.log.name
        write = "import sys; sys.stdout.write('x' * 4000 + '\\n' + 'y' * 9000)"
        scene.dies(f'{sys.executable} -S -c "{write}" > {scene.log}')
        return scene.found()

    return in_child(scene, act)


def not_writable(scene):
    def act():
        if os.getuid() == 0:
            os.chdir("/")
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        assert scene.dies(f"echo step 1 > {scene.log}", cwd="/") != 0
        return scene.found()

    # pytest's own directories are closed to other users.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        scene.log = Path(folder, scene.log.name)
        return in_child(scene, act)


def name_taken(scene):
    scene.tmux("new-session", "-d", "-s", "train", "cat")
    assert scene.tmux("new-session", "-d", "-s", "train", f"{scene.python} > {scene.log}") == 1
    # tmux knows the second in which a session was made, not more.
    scene.session, scene.since = "train", scene.since + 2


def in_tmux_with(*options):
    def launch(scene):
        scene.tmux("-f", "/dev/null", "new-session", "-d", "-s", "other", "cat")
        for option, value in options:
            assert scene.tmux("set", "-g", option, value) == 0
        # Its client says nothing, and ends with 0.
        scene.tmux("new-session", "-d", "-s", "train", f"{scene.python} > {scene.log} 2>&1")
        scene.wait_until_gone("train")
        assert not (scene.work / "ready").exists()
        scene.session = "train"

    return launch


def unattached(option):
    """tmux and the shell race: this shell is slower than any tmux."""

    def launch(scene):
        (Path.home() / ".tmux.conf").write_text(f"set -g {option} on\n")
        line = f"read nothing; {scene.python} > {scene.log}"
        assert scene.tmux("new-session", "-d", "-s", "train", line) == 0
        scene.wait_until_gone("train")

    return launch


def csh(scene):
    """The real one, where there is one; else what it does with the line."""
    csh = shutil.which("bsd-csh")
    line = f"{scene.python} > {scene.log.name} 2>&1"
    scene.bash(f"exec {csh} -fc '{line}'" if csh else f"exec {scene.python} 2 > 1")


def csh_that_is_over(scene):
    scene.dies("echo step 1 > 1")


def tcsh(scene):
    shell = shutil.which("tcsh")
    if shell is None:
        path = scene.work / "tcsh"
        path.write_text("#!/bin/sh\necho 'Ambiguous output redirect.' >&2\nexit 1\n")
        path.chmod(0o755)
        shell = str(path)
    in_tmux_with(("default-shell", shell))(scene)


def deleted(scene):
    scene.bash(f"rm -f {scene.log}; exec > {scene.log} 2>&1; rm {scene.log}; exec {scene.python}")


def relative(scene):
    (scene.work / "elsewhere").mkdir()
    scene.bash(f"exec {scene.python} > {scene.log.name} 2>&1", cwd=scene.work / "elsewhere")


def relative_that_is_over(scene):
    scene.log = scene.work / "runs" / scene.log.name
    scene.log.parent.mkdir()
    assert scene.dies(f"echo step 1 > {scene.log.name}") == 0


def other_namespace(scene):
    (scene.work / "disk").mkdir()
    scene.log = scene.work / "disk" / scene.log.name
    line = f"mount -t tmpfs none {scene.log.parent}; exec {scene.python} > {scene.log} 2>&1"
    scene.bash(f"exec unshare --mount bash -c '{line}'")


def mounted_over(scene):
    def act():
        family.own_mounts()
        scene.log = scene.work / "volume" / scene.log.name
        scene.log.parent.mkdir()
        scene.bash(f"exec {scene.python} > {scene.log} 2>&1")
        mount("-t", "tmpfs", "none", scene.log.parent)
        return ended(scene)

    return in_child(scene, act)


def bound_outside(scene):
    """Seen from inside of a root into which the log's directory does not lead."""

    def act():
        family.own_mounts()
        root = scene.work / "root"
        (root / "proc").mkdir(parents=True)
        (root / "runs").mkdir()
        mount("--rbind", "/proc", root / "proc")
        scene.bash(f"exec {scene.python} > {scene.log} 2>&1")
        os.chroot(root)
        os.chdir("/")
        scene.log = Path("/runs", scene.log.name)
        return ended(scene)

    return in_child(scene, act)


def ended(scene):
    try:
        return scene.found()
    finally:
        scene.end()


def tee_without_file(scene):
    scene.log = scene.work / "missing" / scene.log.name
    scene.bash(f"{scene.python} 2>&1 | tee {scene.log} > tee.out")
    # Made afterwards, it would hide that.
    scene.log.parent.mkdir()


def other_output(scene):
    scene.bash(f"exec {scene.python} 3< {scene.gpu} > /dev/null 2>&1")


def buffered(scene):
    (scene.work / "train.py").write_text(STAY.replace(", flush=True", ""))
    scene.bash(f"exec {scene.python} > {scene.log} 2>&1")


def killed_with_its_buffer(scene):
    (scene.work / "train.py").write_text("import os\nprint('step 1')\nos.kill(os.getpid(), 9)")
    assert scene.dies(f"{scene.python} > {scene.log} 2>&1") == 137


def quotes_lost(scene):
    """What ssh makes of `ssh host bash -c 'python3 train.py' > log`: bash -c python3."""
    assert scene.dies(f"bash -c true train.py > {scene.log} 2>&1") == 0


def no_terminal(scene):
    assert scene.tmux("new-session", "-s", "train", f"{scene.python} > {scene.log}") == 1


def killed_early(scene):
    assert scene.dies(f"kill -9 $$; {scene.python} > {scene.log}") == -signal.SIGKILL


def hung_up_before_nohup(scene):
    assert scene.dies(f"kill -HUP $$; nohup {scene.python} > {scene.log}") == -signal.SIGHUP


def worker_left(scene):
    """Incident 2, second reading: the main process dies, a worker in its group lives on."""
    (scene.work / "train.py").write_text(
        "import os\nprint('step 1', flush=True)\nif os.fork() == 0:\n"
        "    open('ready', 'w')\n    import signal; signal.pause()\n"
        "while not os.path.exists('ready'): pass\nos.kill(os.getpid(), 9)"
    )
    scene.bash(f"exec {scene.python} 3< {scene.gpu} > {scene.log} 2>&1")
    assert scene.started[0].wait(WITHIN_S) == -signal.SIGKILL
    # So that nothing but the worker is left of the launch.
    scene.log.unlink() if scene.log.stat().st_size == 0 else None


def leftover(scene):
    """Incident 2, first reading: nothing was started, and an earlier run keeps the GPU busy."""
    scene.bash(f"exec {scene.python} 3< {scene.gpu} > earlier.out 2>&1")
    scene.since += 60


def ghost(scene):
    """Memory is taken, and whoever holds a GPU is seen; or, below, may be hidden."""
    scene.unreadable = 0
    tools = scene.work / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho '0, 40213, 100'\necho '1, 4, 0'\n")
    (tools / "nvidia-smi").chmod(0o755)
    os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"


def exec_target_missing(scene):
    """A control: it leaves a log that says so."""
    assert scene.dies(f"bash -c 'exec no-such-program' > {scene.log} 2>&1") == 127


SCENES = [
    (directory_missing, "directory-missing", ()),
    (is_directory, "is-directory", ()),
    (on_tmpfs("ro"), "read-only", needs_root),
    (on_tmpfs("nr_inodes=1"), "no-inodes", needs_root),
    (disk_full, "disk-full", needs_root),
    (not_writable, "not-writable", ()),
    (name_taken, "name-taken", needs_tmux),
    (in_tmux_with(("default-shell", "/usr/sbin/nologin")), "shell-runs-nothing", needs_tmux),
    (tcsh, "shell-is-csh", needs_tmux),
    (unattached("destroy-unattached"), "destroy-unattached", needs_tmux),
    (unattached("exit-unattached"), "exit-unattached", needs_tmux),
    (csh, "csh-file", ()),
    (csh_that_is_over, "csh-file", ()),
    (deleted, "log-deleted", ()),
    (relative, "relative-path", ()),
    (relative_that_is_over, "relative-path", ()),
    (other_namespace, "other-namespace", needs_root),
    (mounted_over, "mounted-over", needs_root),
    (bound_outside, "bound-outside", needs_root),
    (tee_without_file, "tee-without-file", ()),
    (other_output, "other-output", ()),
    (buffered, "buffered", ()),
    (killed_with_its_buffer, "log-empty", ()),
    (quotes_lost, "log-empty", ()),
    (no_terminal, "no-trace", needs_tmux),
    (killed_early, "no-trace", ()),
    (hung_up_before_nohup, "no-trace", ()),
    (worker_left, "worker-left", ()),
    (leftover, "leftover", ()),
    (ghost, "ghost", ()),
    (exec_target_missing, "log-there", ()),
]
