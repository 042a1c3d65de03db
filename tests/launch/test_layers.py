"""A launch is followed through every wrapper to the program, with the place where that runs."""

from pathlib import Path

import pytest

from diagnostics.launch.layers import Chain, Launch, read
from diagnostics.launch.shell import Source
from diagnostics.launch.streams import logs, streams
from diagnostics.launch.whereabouts import path_in


def launch(text: str) -> Launch:
    return read(Source("command line", text))


def trainer(text: str) -> Chain:
    found = launch(text).trainer
    assert found is not None
    return found


WRAPPED = [
    ("python train.py", ["python"]),
    ("nohup nice -n 5 stdbuf -oL python train.py &", ["nohup", "nice", "stdbuf", "python"]),
    ("setsid timeout -k 5 10h python train.py", ["setsid", "timeout", "python"]),
    ("sudo -E -u me env A=1 B='c d' python train.py", ["sudo", "env", "python"]),
    ("bash -lc 'cd /x && python train.py'", ["bash", "python"]),
    ("bash -eo pipefail -c 'exec python train.py'", ["bash", "exec", "python"]),
    ("tmux new -ds x 'python train.py'", ["tmux new", "python"]),
    ("tmux -L s new-session -d -s x python train.py", ["tmux new-session", "python"]),
    ("tmux send-keys -t x 'python train.py' Enter", ["tmux send-keys", "python"]),
    (
        "tmux start-server \\; set -g remain-on-exit on \\; new-session -d 'python train.py'",
        ["tmux start-server", "python"],
    ),
    ("screen -dmS x bash -c 'python train.py'", ["screen", "bash", "python"]),
    ("ssh -p 22 -t me@host 'python train.py'", ["ssh", "python"]),
    ("ssh host cd /x '&&' python train.py", ["ssh", "python"]),
    ("ssh host bash -s <<'EOF'\npython train.py\nEOF", ["ssh", "python"]),
    ("docker exec -i box bash <<'EOF'\npython train.py\nEOF", ["docker exec", "bash", "python"]),
    ("ssh host <<'EOF'\npython train.py\nEOF", ["ssh", "python"]),
    ("pct exec 200 -- bash -c 'python train.py'", ["pct exec", "bash", "python"]),
    ("lxc exec box -- python train.py", ["lxc exec", "python"]),
    ("docker exec -it -e A=1 -w /x box python train.py", ["docker exec", "python"]),
    (
        "docker run --rm --gpus all -v a:b --name n image:1 python train.py",
        ["docker run", "python"],
    ),
    ("podman run -it image bash -c 'python train.py'", ["podman run", "bash", "python"]),
    ("kubectl exec -n ns pod -- python train.py", ["kubectl exec", "python"]),
    ("srun -n 1 --gres gpu:8 python train.py", ["srun", "python"]),
    ("sbatch -N 2 --wrap='srun python train.py'", ["sbatch", "srun", "python"]),
    ("script -qefc 'python train.py' log", ["script", "python"]),
    ("su - me -c 'python train.py'", ["su", "python"]),
    ("sg docker -c 'python train.py'", ["sg", "python"]),
    ("sg docker 'python train.py'", ["sg", "python"]),
    ("flock -n -w 5 /tmp/l python train.py", ["flock", "python"]),
    ("flock -n /tmp/l -c 'python train.py'", ["flock", "python"]),
    ("conda run -n x --no-capture-output python train.py", ["conda run", "python"]),
    ("eval 'python train.py'", ["eval", "python"]),
    ("C='python train.py --x'; eval $C", ["eval", "python"]),
    ("run() { python train.py; }; run", ["run", "python"]),
    ("function run { nohup python train.py & }; run", ["run", "nohup", "python"]),
    ("inner() { python train.py; }; run() { inner; }; run", ["run", "inner", "python"]),
    ('run() { exec "$@"; }; run python train.py', ["run", "exec", "$@", "python"]),
    ("run() { python train.py; run; }; run", ["run", "python"]),
    ("run() { python train.py; }; export -f run; bash -c run", ["bash", "run", "python"]),
    ("P=${P:-python3}; nohup $P train.py &", ["nohup", "$P", "python3"]),
    ("accelerate launch train.py", ["accelerate"]),
    ("torchrun --nproc-per-node 8 train.py", ["torchrun"]),
    ("python -m torch.distributed.run train.py", ["python"]),
]


@pytest.mark.parametrize(("text", "names"), WRAPPED, ids=[text for text, _ in WRAPPED])
def test_it_is_followed_through(text: str, names: list[str]) -> None:
    assert trainer(text).names() == names


@pytest.mark.parametrize(
    ("text", "place", "remote", "tty"),
    [
        ("python train.py", "this machine", False, True),
        ("ssh host python train.py", "ssh host", True, False),
        ("ssh -t host python train.py", "ssh host", True, True),
        ("ssh host 'pct exec 7 -- python train.py'", "ssh host > pct exec 7", True, False),
        ("docker exec box python train.py", "docker exec box", False, False),
        ("docker exec -it box python train.py", "docker exec box", False, True),
        ("chroot /srv/root python train.py", "chroot /srv/root", False, True),
    ],
)
def test_where_it_runs(text: str, place: str, remote: bool, tty: bool) -> None:
    program = trainer(text).program
    assert (str(program.place), program.place.remote, program.tty) == (place, remote, tty)


def test_the_script_is_read_and_points_into_itself(world: Path) -> None:
    (world / "start.sh").write_text("cd /srv\nexec python -u train.py --lr 1\n")
    chain = trainer('tmux new-session -d -s train "bash start.sh > train.log 2>&1"')
    assert chain.names() == ["tmux new-session", "bash", "exec", "python"]
    span = chain.program.command.span
    assert (span.source.name, span.line, span.text) == (
        "start.sh",
        2,
        "python -u train.py --lr 1",
    )


@pytest.mark.parametrize("wrapper", ["ssh host bash -s", "ssh host", "bash", "docker exec -i c sh"])
def test_a_script_is_read_from_standard_input(wrapper: str, world: Path) -> None:
    """It is this machine's file, wherever it runs."""
    (world / "go").write_text("exec python inside.py\n")
    program = trainer(f"{wrapper} < go").program
    assert program.command.argv == ["python", "inside.py"]
    assert program.place.here == (wrapper == "bash")


def test_a_sourced_script_and_its_variables_count(world: Path) -> None:
    (world / "env.sh").write_text("export RUN=/srv/run\n")
    found = launch("source env.sh; python train.py")
    assert [shell.kind for shell in found.shells] == ["command line", "source"]


def test_a_script_that_the_launch_writes_is_read(world: Path) -> None:
    """And not what is on the disk."""
    text = "cat <<'E' > run.sh\nexec python inside.py\nE\n{}bash ./run.sh > log"
    chain = trainer(text.format(""))
    assert chain.names() == ["bash", "exec", "python"]
    assert chain.program.command.span.text == "python inside.py"
    assert trainer(text.format("cp x run.sh; ")).names() == ["bash", "exec", "python"]
    assert trainer(text.format("echo > run.sh; ")).program.command.argv[-1] == "train.py"
    itself = "cat > go.sh <<E\nbash go.sh; bash go.sh\nE\nbash go.sh"
    assert trainer(itself).unread is not None


def test_a_script_that_starts_itself_ends(world: Path) -> None:
    (world / "run.sh").write_text("bash run.sh\npython train.py\n")
    assert trainer("bash run.sh").names() == ["bash", "python"]


def test_a_batch_script_is_read_where_it_is_submitted(world: Path) -> None:
    (world / "job.sh").write_text("srun python inside.py\n")
    chain = trainer("sbatch --gpus 1 job.sh")
    assert (chain.names(), str(chain.program.place)) == (
        ["sbatch", "srun", "python"],
        "sbatch > srun",
    )
    assert trainer(f"ssh login sbatch {world / 'job.sh'}").unread is not None


def test_a_script_elsewhere_is_not_read(world: Path) -> None:
    """A file of the same name on this machine is not what runs."""
    chain = trainer(f"ssh host bash {world / 'run.sh'}")
    assert chain.names() == ["ssh", "bash"]
    assert chain.unread is not None and chain.unread.value == str(world / "run.sh")


def test_a_script_in_a_readable_root_is_read(world: Path) -> None:
    inside = world / "other-root" / "opt"
    inside.mkdir()
    (inside / "go.sh").write_text("exec python inside.py\n")
    chain = trainer("chroot other-root bash /opt/go.sh")
    assert chain.program.command.argv == ["python", "inside.py"]


@pytest.mark.parametrize(
    ("text", "out", "err"),
    [
        ("python x", "terminal", "terminal"),
        ("python x > log", "file", "terminal"),
        ("python x > log 2>&1", "file", "file"),
        ("python x 2>&1 > log", "file", "terminal"),
        ("python x &> log", "file", "file"),
        ("python x | tee log", "pipe", "terminal"),
        ("python x |& tee log", "pipe", "pipe"),
        ("python x 2>&1 | tee log", "pipe", "pipe"),
        ("python x > >(tee log) 2>&1", "pipe", "pipe"),
        ("exec > log 2>&1; python x", "file", "file"),
        ("run() { python x 2>&1; }; run > log", "file", "file"),
        ("run() { python x; } 2>&1; run > log", "file", "file"),
        ("log() { exec > log 2>&1; }; log; python x", "file", "file"),
        ("nohup python x &", "file", "file"),
        ("tmux new -d 'python x' > log", "terminal", "terminal"),
        ("script -c 'python x' log", "terminal", "terminal"),
        ("ssh host python x", "pipe", "pipe"),
        ("python x > /dev/null 2> err", "discarded", "file"),
    ],
)
def test_where_its_output_goes(text: str, out: str, err: str) -> None:
    level = streams(trainer(text))[-1]
    assert (level.out.kind, level.err.kind) == (out, err)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "sbatch -o a -e b-%j --wrap='python x'",
            [("a", "sbatch", False), ("b-%j", "sbatch", True)],
        ),
        ("python x > a 2> b", [("a", "redirect", False), ("b", "redirect", False)]),
        ("python x 2>&1 | tee -a a b", [("a", "tee", True), ("b", "tee", True)]),
        ("ssh -t h 'python x >> a' | tee b", [("b", "tee", False), ("a", "redirect", True)]),
        ("script -a -c 'python x' a", [("a", "script", True)]),
        ("tmux new -d 'python x > a' > b", [("a", "redirect", False)]),
    ],
)
def test_its_logs(text: str, expected: list[tuple[str, str, bool]]) -> None:
    found = logs(trainer(text))
    assert [(g.word.value if g.word else "", g.writer, g.appends) for g in found] == expected


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("mkdir -p x; python prepare.py; python train.py; echo done", "python train.py"),
        ("./setup; ./my-trainer --fast", "./my-trainer --fast"),
        ("pip install x; python -c 'print(1)'; torchrun train.py", "torchrun train.py"),
        ("echo hello; cd /x", None),
        ("train() { python train.py; }; echo hello", None),
        ("train() { python train.py; }; nohup train", "train"),
        ("old() { python old.py; }; new() { python new.py; }; new", "python new.py"),
    ],
)
def test_which_program_trains(text: str, program: str | None) -> None:
    found = launch(text).trainer
    assert (found.program.command.span.text if found else None) == program


@pytest.mark.parametrize(
    "own",
    [
        '$(dirname "$0")',
        "${0%/*}",
        '$(dirname "${BASH_SOURCE[0]}")',
        '$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
        "$(dirname -- $0)",
    ],
)
def test_a_script_knows_the_directory_that_it_lies_in(own: str, world: Path) -> None:
    (world / "workspace" / "go.sh").write_text(f'cd "{own}"\nexec python train.py\n')
    program = trainer("bash workspace/go.sh").program
    assert path_in(program.command.words[1], program) == world / "workspace" / "train.py"


def test_a_function_knows_what_it_is_called_with(world: Path) -> None:
    """And `$0` is still the script's."""
    (world / "go.sh").write_text('run() { python "$(dirname "$0")/$1" "$0"; }\nrun train.py\n')
    program = trainer("bash go.sh").program
    assert path_in(program.command.words[1], program) == world / "train.py"
    assert path_in(program.command.words[2], program) is None


def test_and_in_another_root_it_is_that_root_s(world: Path) -> None:
    inside = world / "other-root" / "opt"
    inside.mkdir()
    (inside / "go.sh").write_text('cd "$(dirname "$0")"\nexec python inside.py\n')
    program = trainer("chroot other-root bash /opt/go.sh").program
    found = path_in(program.command.words[1], program)
    assert found is not None and found.resolve() == inside / "inside.py"
