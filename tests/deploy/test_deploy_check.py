"""The wrong copy of the code, in a directory, another root, behind a command, in a process."""

import json
import os
import py_compile
import shlex
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from dflash import heartbeat
from dflash.manifest import collect
from diagnostics.cli import main
from diagnostics.deploy import fingerprint
from diagnostics.prefix import behind
from diagnostics.processes import TICKS_PER_S, started_s

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
NAME = "trainer.compile:install_thread_local_flag"


def package(directory, *, patched):
    """A package with, or without, the patch."""
    directory.mkdir(parents=True)
    (directory / "__init__.py").write_text("")
    body = "def install_thread_local_flag(): pass\n" if patched else "def lock(): pass\n"
    (directory / "compile.py").write_text(body)
    (directory / "data.bin").write_bytes(b"\0\1")
    return directory


@pytest.fixture
def right(tmp_path):
    return package(tmp_path / "here" / "trainer", patched=True)


@pytest.fixture
def manifest(right, tmp_path):
    path = tmp_path / "manifest.json"
    assert check("write", right, path).exit_code == 0
    return path


def check(*words):
    return CliRunner().invoke(main, ["deploy-check", *map(str, words)])


def verdict(*words):
    answer = check(*words, "--json")
    return {**json.loads(answer.output), "exit": answer.exit_code}


def test_an_exact_copy_is_the_same_wherever_it_lies(right, manifest, tmp_path):
    shutil.copytree(right, tmp_path / "there" / "trainer")
    told = verdict("verify", manifest, tmp_path / "there" / "trainer")
    assert (told["code"], told["exit"]) == ("same-code", 0)


def test_python_s_own_bytecode_is_no_difference(right, manifest):
    (right / "__pycache__").mkdir()
    (right / "__pycache__" / "compile.cpython-311.pyc").write_bytes(b"x")
    assert verdict("verify", manifest, right)["exit"] == 0


def test_bytecode_that_hides_its_source_is_found(right, manifest):
    """Compiled without a check of its source: Python would run it whatever the source says."""
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(right / "compile.py"), invalidation_mode=mode)
    told = verdict("verify", manifest, right)
    assert told["code"] == "other-code"
    assert fingerprint.UNCHECKED in told["evidence"].values()


def test_stale_bytecode_of_a_process_is_noted_and_no_finding(right, manifest, runs):
    py_compile.compile(str(right / "compile.py"))
    os.utime(right / "compile.py", (0, 0))
    for path in right.iterdir():
        os.utime(path, (0, 0))
    told = verdict("process", manifest, runs(right.parent), "--package", "trainer")
    assert told["code"] == "same-code", told
    assert fingerprint.STALE in told["evidence"].values()
    assert told["evidence"]["git there"] == "not a git checkout"


@pytest.fixture
def linked(tmp_path):
    """A package whose core lies elsewhere, behind a link to a directory."""
    core = package(tmp_path / "elsewhere" / "core", patched=True)
    directory = package(tmp_path / "linked" / "trainer", patched=True)
    (directory / "core").symlink_to(core)
    (directory / "core" / "round").symlink_to(directory)
    return directory


@pytest.mark.parametrize("way", [(), ("--exec-in", "env --")])
def test_code_behind_a_link_to_a_directory_is_code_of_the_package(linked, tmp_path, way):
    path, copy = tmp_path / "linked.json", tmp_path / "copy" / "trainer"
    assert check("write", linked, path).exit_code == 0
    shutil.copytree(linked, copy, ignore=shutil.ignore_patterns("round"))  # real directories
    assert verdict("verify", path, copy, *way)["code"] == "same-code"
    shutil.rmtree(copy / "core")
    (copy / "core").symlink_to(package(tmp_path / "old" / "core", patched=False))
    told = verdict("verify", path, copy, *way)
    assert told["code"] == "other-code"
    assert told["evidence"]["core/compile.py"].startswith("differs: ")
    (copy / "core").unlink()
    assert verdict("verify", path, copy, *way)["evidence"]["core/compile.py"] == "missing there"


def test_a_link_to_data_is_not_followed(right, tmp_path):
    data = tmp_path / "data"
    (data / "day" / "hour").mkdir(parents=True)
    for path in (data / "rows.arrow", data / "day" / "hour" / "b.py"):
        path.write_text("x")
    (right / "data").symlink_to(data)
    check("write", right, tmp_path / "m.json")
    shutil.copytree(right, tmp_path / "there", symlinks=True)
    data.rename(tmp_path / "gone")
    assert "rows.arrow" not in (tmp_path / "m.json").read_text()
    assert verdict("verify", tmp_path / "m.json", tmp_path / "there")["code"] == "same-code"


def test_bytecode_behind_a_link_is_looked_at(linked, tmp_path):
    path = tmp_path / "linked.json"
    check("write", linked, path)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(linked / "core" / "compile.py"), invalidation_mode=mode)
    assert fingerprint.UNCHECKED in verdict("verify", path, linked)["evidence"].values()


def test_two_links_to_one_directory_are_two_copies(linked, tmp_path):
    (linked / "again").symlink_to(tmp_path / "elsewhere" / "core")
    check("write", linked, tmp_path / "linked.json")
    shutil.copytree(linked, tmp_path / "copy", ignore=shutil.ignore_patterns("round"))
    assert verdict("verify", tmp_path / "linked.json", tmp_path / "copy")["code"] == "same-code"


def test_links_lead_where_they_lead_those_who_have_that_root(right, manifest, tmp_path):
    root = tmp_path / "container"
    package(root / "data" / "trainer", patched=False)
    (root / "opt").mkdir()
    (root / "opt" / "trainer").symlink_to("/data/trainer")
    (root / "data" / "trainer" / "data.bin").unlink()
    (root / "data" / "trainer" / "data.bin").symlink_to("/../data/here.bin")
    (root / "data" / "here.bin").write_bytes(b"\0\1")
    (root / "data" / "trainer" / "round").symlink_to("/data/trainer/round")
    told = verdict("verify", manifest, "/opt/trainer", "--root", root)
    assert [path for path in told["evidence"] if path not in {"manifest", "there"}] == [
        "compile.py"
    ]
    shutil.copy(right / "compile.py", root / "data" / "trainer")
    told = verdict("verify", manifest, "/opt/trainer", "--root", root, "--expect", NAME)
    assert told["code"] == "same-code", told


def change(right):
    (right / "compile.py").write_text("def lock(): pass\n")


def remove(right):
    (right / "data.bin").unlink()


def add(right):
    (right / "old.py").write_text("")


@pytest.mark.parametrize(
    ("spoil", "path", "says"),
    [
        (change, "compile.py", "differs: "),
        (remove, "data.bin", "missing there"),
        (add, "old.py", "there, and not in the manifest"),
    ],
)
def test_each_difference_is_named_by_its_file(right, manifest, spoil, path, says):
    spoil(right)
    told = verdict("verify", manifest, right)
    assert (told["code"], told["exit"]) == ("other-code", 1)
    assert told["evidence"][path].startswith(says)


def test_names_are_looked_up_in_the_syntax_not_in_the_text(right, manifest):
    (right / "compile.py").write_text(f"# {NAME}\nclass Lock:\n    def first(self): pass\n")
    wrong = verdict("verify", manifest, right, "--expect", NAME)
    assert wrong["evidence"][NAME] == "not defined there"
    told = verdict("verify", manifest, right, "--forbid", "trainer.compile:Lock.first")
    assert told["evidence"]["trainer.compile:Lock.first"] == "still defined there"


SOURCE = """
import os.path
from sys import argv as words
first, (second, *third) = 1, (2, 3)
if first:
    fourth = 4
    class Lock:
        try:
            def take(self): inner = 1
        finally:
            held: bool = False
else:
    def fifth(): pass
try:
    import nonexistent as sixth
except ImportError as gone:
    sixth_too = None
with open("x") as seventh:
    for eighth, _ in []:
        while (ninth := 0): pass
squares = [hidden for hidden in ()]
function = lambda: (shadow := 1)
print(argv)
"""
BOUND = "os words first second third fourth fifth sixth sixth_too seventh eighth ninth squares"
UNBOUND = "path sys argv hidden shadow gone take inner"


@pytest.mark.parametrize(
    ("name", "defined"),
    [
        *((name, True) for name in [*BOUND.split(), "Lock.take", "Lock.held"]),
        *((name, False) for name in [*UNBOUND.split(), "Lock.inner"]),
    ],
)
def test_names_are_seen_in_whatever_block_binds_them(tmp_path, name, defined):
    directory, path = package(tmp_path / "trainer", patched=True), tmp_path / "manifest.json"
    (directory / "compile.py").write_text(SOURCE)
    check("write", directory, path)
    name = f"trainer.compile:{name}"
    expected = verdict("verify", path, directory, "--expect", name)
    forbidden = verdict("verify", path, directory, "--forbid", name)
    codes = ["same-code", "other-code"] if defined else ["other-code", "same-code"]
    assert [expected["code"], forbidden["code"]] == codes


@pytest.mark.parametrize("option", ["--expect", "--forbid"])
@pytest.mark.parametrize(
    ("module", "source", "says"),
    [
        ("compiled", "", "no module trainer.compiled"),
        ("compile", "from os import *", "import *"),
        ("compile", "def f(:", "compile.py: Python 3"),
        ("compile", "x = '\0'", "compile.py: Python 3"),
    ],
)
def test_a_name_that_cannot_be_looked_up_is_unknown(right, tmp_path, option, module, source, says):
    (right / "compile.py").write_text(source)
    path = tmp_path / "manifest.json"
    check("write", right, path)
    name = f"trainer.{module}:f"
    told = verdict("verify", path, right, option, name)
    assert (told["code"], told["exit"]) == ("name-not-told", 3)
    assert says in told["evidence"][name]
    assert says in told["summary"]


def test_a_name_that_is_wrong_counts_more_than_one_that_cannot_be_looked_up(right, manifest):
    names = ("--expect", "trainer.gone:f", "--expect", "trainer.compile:gone")
    told = verdict("verify", manifest, right, *names)
    assert told["code"] == "other-code"
    assert told["evidence"]["trainer.compile:gone"] == "not defined there"
    assert "no module" in told["evidence"]["trainer.gone:f"]


@pytest.mark.parametrize("name", ["trainer.compile", "trainer:", ":f", "trainer/compile.py:f"])
def test_a_name_is_a_module_and_a_name(right, manifest, name):
    answer = check("verify", manifest, right, "--forbid", name)
    assert answer.exit_code == 2
    assert f"'--forbid': {name}: must be MODULE:NAME, such as" in answer.output


def test_the_package_s_own_names_are_not_those_of_a_file_beside_it(right, manifest):
    right.with_suffix(".py").write_text("def f(): pass\n")
    assert verdict("verify", manifest, right, "--forbid", "trainer:f")["code"] == "same-code"


@NEEDS_ROOT
def test_the_host_and_container_mistake(manifest, tmp_path):
    """Incident 3: the patched file lies on the host; in the container's root the old one runs."""
    root = tmp_path / "container"
    package(root / "opt" / "trainer", patched=False)
    package(tmp_path / "opt" / "trainer", patched=True)
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import os; os.chroot({str(root)!r}); print(1, flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    child.stdout.readline()
    try:
        on_host = verdict("verify", manifest, tmp_path / "opt" / "trainer", "--expect", NAME)
        inside = verdict(
            *("verify", manifest, "/opt/trainer", "--expect", NAME),
            *("--root", f"/proc/{child.pid}/root"),
        )
    finally:
        child.kill()
        child.communicate(timeout=30)
    assert on_host["exit"] == 0
    assert inside["code"] == "other-code"
    assert inside["evidence"][NAME] == "not defined there"


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """A stand-in that does what ssh does: joins its words, and gives them to a shell."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    python3 = tmp_path / "bin" / "python3"
    python3.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return "ssh host"


def test_behind_a_command_nothing_but_python_is_needed(right, manifest, ssh, tmp_path):
    there = package(tmp_path / "a b; rm -rf $HOME" / "trainer", patched=False)
    told = verdict("verify", manifest, there, "--exec-in", ssh, "--expect", NAME)
    assert told["code"] == "other-code"
    assert told["evidence"][NAME] == "not defined there"
    assert verdict("verify", manifest, right, "--exec-in", ssh)["exit"] == 0
    assert verdict("verify", manifest, right, "--exec-in", "env --")["exit"] == 0


def test_every_ssh_takes_one_layer_of_quotes_away():
    words = ["python3", "-", '{"what": "a b"}']
    assert behind(["docker", "exec", "-i", "c"], words)[-3:] == words
    once = behind(["ssh", "host"], words)[2:]
    assert shlex.split(" ".join(once)) == words
    twice = behind(["ssh", "a", "ssh", "b"], words)[4:]
    assert shlex.split(" ".join(shlex.split(" ".join(twice)))) == words


@pytest.mark.parametrize(
    ("prefix", "says"),
    [
        ("/nonexistent/ssh", "there is no command"),
        ("/etc/passwd", "cannot be started"),
        ("ssh 'host", "No closing quotation"),
        ("false", "exit status 1"),
        ("echo", "said:"),
        ("printf {}", "directory is None, not text"),
        ("printf '\\377'", "said:"),
    ],
)
def test_a_place_that_cannot_be_reached_is_unknown(right, manifest, prefix, says):
    told = verdict("verify", manifest, right, "--exec-in", prefix)
    assert (told["status"], told["exit"]) == ("unknown", 3)
    assert says in told["summary"]


def test_it_runs_under_every_python_that_is_here(right, tmp_path):
    asked = json.dumps({"what": str(right), "names": [NAME]})
    source = Path(fingerprint.__file__).read_text()
    found = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python3")) or [Path(sys.executable)]
    for python in found:
        done = subprocess.run(
            [python, "-", asked], input=source, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, (python, done.stderr)
        assert json.loads(done.stdout)["defines"] == {NAME: True}


CODE = "import trainer; print(trainer.__file__, flush=True); input()"


@pytest.fixture
def runs(tmp_path):
    """Start a process that imports `trainer` from the given PYTHONPATH entries, or otherwise."""
    children = []

    def start(*paths, words=(), cwd=None):
        program = tmp_path / "run.py"
        program.write_text(CODE)
        child = subprocess.Popen(
            [sys.executable, *map(str, words or [program])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        )
        children.append(child)
        start.imported = Path(child.stdout.readline().decode().strip()).parent
        # Until what changes now is later than the clock tick in which it started: some Pythons
        # are ready within that, and a file's times are those of the kernel's last tick.
        clock = tmp_path / "clock"
        while clock.touch() or clock.stat().st_ctime <= started_s(child.pid) + 2 / TICKS_PER_S:
            pass
        return child.pid

    yield start
    for child in children:
        child.kill()
        child.communicate(timeout=30)


def test_a_process_that_runs_the_right_files(right, manifest, runs):
    pid = runs(right.parent)
    told = verdict("process", manifest, pid, "--package", "trainer", "--expect", NAME)
    assert (told["code"], told["exit"]) == ("same-code", 0), told


def test_a_process_that_runs_the_wrong_copy(right, manifest, runs, tmp_path):
    old = package(tmp_path / "old" / "trainer", patched=False)
    told = verdict("process", manifest, runs(old.parent, right.parent), "--package", "trainer")
    assert told["code"] == "other-code"
    assert "1 other copy on its path" in told["summary"]
    assert str(right) in told["evidence"]["other copies"]


@pytest.mark.parametrize(
    "words",
    [
        ("../b/run.py", "-c", "config.yaml"),
        ("../b/run.py", "-m", "small"),
        ("-X", "dev", "-W", "ignore", "../b/run.py"),
        ("-uBXdev", "-Wignore", "--", "../b/run.py"),
        ("--check-hash-based-pycs", "always", "../b/run.py"),
        ("linked.py",),
        ("-c", CODE, "../b/run.py"),
        ("-uBc", CODE, "-m"),
        (f"-c{CODE}",),
        ("-um", "run", "-c"),
        ("-Pc", CODE),
    ],
)
def test_of_two_copies_the_one_that_the_command_line_leads_to(manifest, runs, tmp_path, words):
    """Whatever stands among the script's own arguments."""
    for name in ("a", "b", "c"):
        package(tmp_path / name / "trainer", patched=False)
        (tmp_path / name / "trainer" / name).touch()
        (tmp_path / name / "run.py").write_text(CODE)
    (tmp_path / "a" / "linked.py").symlink_to(tmp_path / "b" / "run.py")
    pid = runs(tmp_path / "c", words=words, cwd=tmp_path / "a")
    told = verdict("process", manifest, pid, "--package", "trainer")
    assert told["evidence"]["directory"].startswith(f"{runs.imported}: "), told
    assert told["evidence"][runs.imported.parent.name] == "there, and not in the manifest"


@pytest.mark.parametrize("flags", ["-I", "-EP"])
def test_a_python_that_ignores_its_variables_takes_nothing_from_them(right, manifest, runs, flags):
    code = f"import sys; sys.path.insert(0, {str(right.parent)!r}); {CODE}"
    pid = runs(right.parent, words=(flags, "-c", code), cwd=right.parent)
    assert verdict("process", manifest, pid, "--package", "trainer")["code"] == "unreachable"


def test_a_directory_without_init_gives_way_to_a_package(right, manifest, runs, tmp_path):
    (tmp_path / "trainer").mkdir()
    told = verdict("process", manifest, runs(right.parent), "--package", "trainer")
    assert runs.imported == right
    assert told["code"] == "same-code"


def test_an_empty_entry_of_the_path_is_the_working_directory(manifest, runs, tmp_path):
    old = package(tmp_path / "old" / "trainer", patched=False)
    pid = runs("", tmp_path / "here", cwd=old.parent)
    assert runs.imported == old
    assert verdict("process", manifest, pid, "--package", "trainer")["code"] == "other-code"


def test_which_of_several_copies_a_process_took_is_only_guessed(right, manifest, runs, tmp_path):
    """It changed its path before it imported anything."""
    old = package(tmp_path / "old" / "trainer", patched=False)
    code = f"import sys; sys.path.insert(0, {str(old.parent)!r}); {CODE}"
    pid = runs(right.parent, old.parent, words=("-Pc", code))
    assert runs.imported == old
    told = verdict("process", manifest, pid, "--package", "trainer")
    assert (told["code"], told["exit"]) == ("which-copy", 3)
    assert str(old) in told["summary"]
    assert told["remedy"]


@pytest.fixture
def trained(runs, tmp_path):
    """Start a process that maps a heartbeat, beside which a manifest says this."""

    def start(said, *paths):
        beat = tmp_path / "run" / heartbeat.FILE
        beat.parent.mkdir()
        beat.write_bytes(b"x")
        (beat.parent / "manifest.json").write_text(json.dumps(said))
        code = f"import mmap; file = open({str(beat)!r}, 'r+b'); held = mmap.mmap(file.fileno(), 1)"
        return runs(*paths, words=("-c", f"{code}; {CODE}"))

    return start


def test_a_run_says_itself_which_copy_it_took(right, manifest, trained, tmp_path):
    old = package(tmp_path / "old" / "trainer", patched=False)
    pid = trained({"import_path": str(right)}, old.parent)
    told = verdict("process", manifest, pid, "--package", "trainer")
    assert (told["code"], told["exit"]) == ("same-code", 0)
    assert told["evidence"]["directory"] == f"{right}: it said so in its log"
    assert told["evidence"]["other copies"] == str(old)


@pytest.mark.parametrize("said", [{}, [], {"import_path": 3}])
def test_a_run_whose_manifest_says_something_else_is_unknown(right, manifest, trained, said):
    told = verdict("process", manifest, trained(said, right.parent), "--package", "trainer")
    assert (told["code"], told["exit"]) == ("unreachable", 3)
    assert "does not say where" in told["summary"]


def test_copies_that_are_the_same_leave_no_doubt(right, manifest, runs, tmp_path):
    shutil.copytree(right, tmp_path / "copy" / "trainer")
    told = verdict(
        "process", manifest, runs(right.parent, tmp_path / "copy"), "--package", "trainer"
    )
    assert (told["code"], told["exit"]) == ("same-code", 0)
    assert "1 other copy on its path" in told["summary"]


def test_files_that_changed_after_the_start_prove_nothing(right, manifest, runs):
    """Even where the copy keeps the times of what it was copied from."""
    pid = runs(right.parent)
    before = (right / "compile.py").stat()
    text = (right / "compile.py").read_bytes()
    (right / "compile.py").unlink()
    (right / "compile.py").write_bytes(text)
    os.utime(right / "compile.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    told = verdict("process", manifest, pid, "--package", "trainer")
    assert (told["code"], told["exit"]) == ("changed-since-start", 3)
    said = told["evidence"]["changed later"]
    assert said.startswith("1 file(s), after the process started: compile.py 20")


def test_a_link_that_changed_after_the_start_proves_nothing(linked, tmp_path, runs):
    """What it leads to now is the same, and older."""
    path = tmp_path / "linked.json"
    check("write", linked, path)
    shutil.copytree(tmp_path / "elsewhere" / "core", tmp_path / "copy", symlinks=True)
    pid = runs(linked.parent)
    assert verdict("process", path, pid, "--package", "trainer")["code"] == "same-code"
    (linked / "core").unlink()
    (linked / "core").symlink_to(tmp_path / "copy")
    told = verdict("process", path, pid, "--package", "trainer")
    assert told["code"] == "changed-since-start"
    assert "core/compile.py" in told["evidence"]["changed later"]


def test_many_files_that_changed_are_counted_and_the_newest_named(right, manifest, runs):
    pid = runs(right.parent)
    for path in right.iterdir():
        path.touch()
    told = verdict("process", manifest, pid, "--package", "trainer")
    count = len(list(right.iterdir()))
    assert told["evidence"]["changed later"].startswith(f"{count} file(s)")


def test_a_manifest_is_never_overwritten_nor_guessed(right, manifest, tmp_path):
    assert "exists" in check("write", right, manifest).output
    other = tmp_path / "other.json"
    other.write_text("{}")
    answer = check("verify", other, right)
    assert answer.exit_code == 2
    assert "is no manifest" in answer.output


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"files": []}, "files is [], not an object"),
        ({"files": {"a.py": "x"}}, "a.py: 'x' is not an object"),
        ({"files": {"a.py": {"sha256": 1, "mtime": 0}}}, "a.py: sha256 is 1, not text"),
        ({"files": {"a.py": {"sha256": "x", "mtime": "x"}}}, "a.py: mtime is 'x', not a number"),
        ({"directory": 3}, "directory is 3, not text"),
        ({"host": None}, "host is None, not text"),
        ({"code": ["x"]}, "code is ['x'], not text"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "log"])
def test_a_manifest_with_a_wrong_field_is_refused_by_its_name(manifest, command, change, says):
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **change}))
    answer = check(command, manifest, manifest if command == "log" else manifest.parent)
    assert answer.exit_code == 2
    assert f"{manifest} is no manifest: {says}; write one with" in answer.output


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "{", "\0", "[" * 100_000])
def test_what_is_no_manifest_at_all_is_refused(right, manifest, text):
    manifest.write_text(text)
    answer = check("verify", manifest, right)
    assert answer.exit_code == 2
    assert f"{manifest} is no manifest: " in answer.output


def test_a_time_that_no_calendar_has_is_shown_as_it_is(right, manifest):
    read = json.loads(manifest.read_text())
    read["files"]["compile.py"].update(sha256="0", mtime=1e300)
    manifest.write_text(json.dumps(read))
    assert "second 1e+300" in verdict("verify", manifest, right)["evidence"]["compile.py"]


@pytest.mark.parametrize("command", ["verify", "log"])
def test_a_pipe_is_not_waited_for(right, manifest, tmp_path, command):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    answer = check(*((command, manifest, pipe) if command == "log" else (command, pipe, right)))
    assert answer.exit_code == 2
    assert f"{pipe}: must be a regular file; type: cat {pipe} > FILE" in answer.output


@pytest.mark.parametrize("what", ["nopkg", "nopkg.sub", "os.path", "__main__", "a..b", "x y", "."])
@pytest.mark.parametrize("way", [(), ("--exec-in", "env --")])
def test_a_package_that_is_not_there_is_unknown(manifest, tmp_path, monkeypatch, what, way):
    monkeypatch.chdir(tmp_path)
    told = verdict("verify", manifest, f"{what}/x" if what == "." else what, *way)
    assert (told["code"], told["exit"]) == ("unreachable", 3)
    assert what in told["summary"]
    assert "Error" not in told["summary"]


def test_a_package_in_a_package_is_found_and_nothing_of_it_is_run(manifest, tmp_path, monkeypatch):
    outer = tmp_path / "site" / "outer"
    package(outer / "trainer", patched=True)
    (outer / "__init__.py").write_text("raise SystemExit('was run')")
    monkeypatch.syspath_prepend(str(outer.parent))
    assert verdict("verify", manifest, "outer.trainer")["code"] == "same-code"


@pytest.mark.parametrize("words", [("--", "-5"), ("0",), ("99999999",), ("1", "--package", "/tmp")])
def test_a_process_and_its_package_are_named_properly(manifest, words):
    assert check("process", manifest, *words).exit_code == 2


def test_a_process_without_a_command_line_is_unknown(manifest, monkeypatch):
    monkeypatch.setattr(psutil.Process, "cmdline", lambda _: [])
    told = verdict("process", manifest, os.getpid())
    assert (told["code"], told["exit"]) == ("unreachable", 3)


def test_a_package_is_found_by_its_name(tmp_path):
    path = tmp_path / "manifest.json"
    assert check("write", "dflash", path).exit_code == 0
    assert verdict("verify", path, "dflash", "--expect", "dflash.compile:Seal")["exit"] == 0


@pytest.mark.parametrize("version", ["0.1.0", "not installed"])
def test_a_runs_first_log_line_is_held_against_a_manifest(tmp_path, version):
    run = replace(collect("0" * 64), version=version)
    path, log = tmp_path / "manifest.json", tmp_path / "train.log"
    check("write", "dflash", path)
    log.write_text("nothing yet\n")
    assert verdict("log", path, log)["exit"] == 3
    log.write_text(f"12:00:00 INFO MainThread {run.first_line()}\n")
    assert verdict("log", path, log)["code"] == "same-code"
    other = run.first_line().replace("| code ", "| code 000000000000 | was ")
    log.write_text(log.read_text() + other)
    assert verdict("log", path, log)["code"] == "other-code"
