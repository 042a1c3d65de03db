"""What comes close to a finding and is none, beside its neighbour that is one."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from diagnostics.launch.check import Finding, check
from diagnostics.launch.shell import Source

LOG = ">> /workspace/train.log 2>&1"
KEEP = "\\; set-option remain-on-exit on"

EXPORTED = "export PYTHONUNBUFFERED=1"
RUN = "run() { python a.py; }"

# (code, a launch that has it, one that comes close)
PAIRS = [
    ("DL001", f"python -u train.py {LOG.replace('space', 'shop')}", f"python -u train.py {LOG}"),
    (
        "DL001",
        "mkdir -p other; python -u train.py >> logs/a.log 2>&1",
        "mkdir -p logs/deeper; python -u train.py >> logs/a.log 2>&1",
    ),
    (
        "DL001",
        "D=logs; python -u train.py >> $D/a.log 2>&1",
        'D=logs; mkdir -p "$D"; python -u train.py >> ${D}/a.log 2>&1',
    ),
    (
        "DL001",
        "(cd /workspace); python -u train.py >> home/none/a.log 2>&1",
        "cd home/miniconda3; python -u ../../train.py >> etc/a.log 2>&1",
    ),
    ("DL001", "cd none; python train.py >> a", "cd ~; python train.py >> a"),
    ("DL001", "cd; python train.py >> none/a", "cd -; python train.py >> none/a"),
    ("DL001", "pushd none; python train.py >> a", "pushd none; popd; python train.py >> a"),
    ("DL001", "cd -- none; python train.py >> a", "cd -P -- bin; python train.py >> a"),
    ("DL001", "cd none; python train.py >> a", "cd none; python train.py >> /tmp/a"),
    ("DL001", "cd none; cd bin; python a.py >> a", "cd none; cd /tmp; python a.py >> a"),
    ("DL001", "cd none; python train.py >> a", "git clone none; cd none; python train.py >> a"),
    ("DL001", "mkdir b; cd none; python a.py >> a", "mkdir none; cd none; python a.py >> a"),
    ("DL001", "mkdir a; cd bin; python a.py >> a/a", "mkdir bin/a; cd bin; python a.py >> a/a"),
    ("DL001", "cd bin; python a.py >> $HOME/a/a", "cd $X; mkdir a; python a.py >> a/a"),
    (
        "DL001",
        "flock -n /tmp/l -c 'python train.py > none/a'",
        "flock -n /tmp/l -c 'python train.py > bin/a'",
    ),
    ("DL001", "sg docker -c 'python a.py > none/a'", "sg docker -c 'python a.py > bin/a'"),
    (
        "DL001",
        'L=d/a; mkdir -p "$(dirname "$M")"; python a.py > "$L"',
        'L=d/a; mkdir -p "$(dirname "$L")"; python a.py > "$L"',
    ),
    (
        "DL001",
        'L=d/e/a; mkdir -p "${L%/*/*}"; python a.py > "$L"',
        'L=d/e/a; mkdir -p "${L%/*}"; python a.py > "$L"',
    ),
    (
        "DL002",
        'L=workspace; mkdir -p "${L%/*}"; python a.py > "$L"',
        'L=a; mkdir -p "$(dirname "$L")"; python a.py > "$L"',
    ),
    ("DL001", "install -m 755 a d; python a.py > d/a", "install -m 755 -d d; python a.py > d/a"),
    ("DL001", "mkdir -p d/{a,b}; python a.py > d/c/a", "mkdir -p d/{a,b}/e; python a.py > d/b/a"),
    ("DL001", "mkdir -p d/${a,b}; python a.py > d/b/a", "mkdir {c,d/{a,b}}; python a.py > d/b/a"),
    ("DL001", f"{RUN}; run > none/a", f"{RUN}; run > bin/a"),
    ("DL001", "run() { python a.py; } > none/a; run", "run() { python a.py; } > bin/a; run"),
    ("DL001", f"{RUN}; time run > none/a", f"{RUN}; time run > bin/a"),
    (
        "DL001",
        "old() { python a.py > none/a; }; old",
        "old() { python a.py > none/a; }; python a.py > bin/a",
    ),
    (
        "DL001",
        'run() { python a.py > "$1"; }; run none/a',
        'run() { python a.py > "$1"; }; run bin/a',
    ),
    (
        "DL001",
        'run() { python a.py > "$1"; }; run bin/a; run none/a',
        'run() { python a.py > "$1"; }; run bin/a; run a',
    ),
    ("DL001", 'log() { "$@" > none/a; }; log python a.py', 'log() { "$@" > a; }; log python a.py'),
    (
        "DL001",
        f"make() {{ mkdir d; }}; {RUN}; run > d/a",
        f"make() {{ mkdir d; }}; {RUN}; make; run > d/a",
    ),
    ("DL001", f"{RUN}; cd none; run > a", f"{RUN}; cd bin; run > a"),
    ("DL001", "go() { exec > none/a; }; go; python a.py", "go() { exec > none/a; }; python a.py"),
    ("DL001", "D=none/a; python a.py >> $D", "D=home/a; python a.py >> $D"),
    ("DL001", "cd none; python a.py >> a-$X", "cd none; python a.py >> $X"),
    (
        "DL001",
        "tmux new -d -c none 'python train.py >> a'",
        "mkdir none; tmux new -d -c none 'python train.py >> a'",
    ),
    (
        "DL001",
        "nohup tmux new -d -c none 'python train.py >> a'",
        "nohup tmux new -d -c bin 'python train.py >> a'",
    ),
    (
        "DL001",
        "chroot other-root sh -c 'python a.py >> /none/a'",
        "chroot other-root sh -c 'mkdir /none; python a.py >> /none/a'",
    ),
    (
        "DL001",
        "mkdir /none; chroot other-root sh -c 'python a.py >> /none/a'",
        "chroot other-root sh -c 'python a.py >> /a'",
    ),
    ("DL004", "python -u train.py > a.log 2>&1", "python -u train.py > a-$$.log 2>&1"),
    ("DL004", "A=a; python -u train.py > $A.log 2>&1", "python -u train.py > $RUN.log 2>&1"),
    ("DL001", "sbatch -o none/%j.out --wrap='python a.py'", "sbatch -o bin/%j --wrap='python a'"),
    (
        "DL001",
        "sbatch --output=none/%j.out --wrap='mkdir -p none; python a.py'",
        "mkdir -p none; sbatch --output=none/%j.out --wrap='python a.py'",
    ),
    ("DL004", "sbatch -o a.out --wrap='python a.py'", "sbatch -o a-%j.out --wrap='python a.py'"),
    (
        "DL004",
        "sbatch -o a.out --open-mode=truncate --wrap='python a.py'",
        "sbatch -o a.out --open-mode=append --wrap='python a.py'",
    ),
    ("DL011", "sbatch -o a-%j --wrap='python a.py'", "sbatch -o a-%j --wrap='python -u a.py'"),
    ("DL030", "sbatch -o /dev/null --wrap='python a.py'", "sbatch --wrap='python a.py'"),
    ("DL004", "python train.py | tee a", "set -C; python train.py > a"),
    ("DL004", "script -f -c 'python train.py' a", "script -f -a -c 'python train.py' a"),
    (
        "DL005",
        "ssh h 'python -u train.py >> a.log 2>&1'",
        "ssh h 'cd /srv && python -u train.py >> a.log 2>&1'",
    ),
    ("DL005", "bash -c 'python train.py >> a'", "python train.py >> a"),
    ("DL005", "bash -c 'cd bin; python a.py >> a'", "bash -c 'cd /usr; python a.py >> a'"),
    ("DL007", "python train.py | tee -a a", "set -euo pipefail; python train.py | tee -a a"),
    (
        "DL007",
        "bash -c 'python train.py | tee -a a'",
        "bash -o pipefail -c 'python train.py | tee -a a'",
    ),
    (
        "DL007",
        "(set -o pipefail); python a.py | tee -a a",
        "(set -o pipefail; python a.py | tee -a a)",
    ),
    (
        "DL007",
        "set -o pipefail; set +o pipefail; python a.py | tee -a a",
        "set +o pipefail; set -o pipefail; python a.py | tee -a a",
    ),
    (
        "DL007",
        "go() { set -o pipefail; }; python a.py | tee -a a",
        "go() { set -o pipefail; }; go; python a.py | tee -a a",
    ),
    ("DL007", "python a.py | tee a  # PIPESTATUS", "python a.py | tee a; echo $PIPESTATUS  # it"),
    (
        "DL007",
        "go() { echo $PIPESTATUS; }; python a.py | tee a",
        "go() { python a.py | tee a; echo $PIPESTATUS; }; go",
    ),
    ("DL007", "set -o errexit; python a.py | tee a", "set -o pipefail -e; python a.py | tee a"),
    ("DL007", "echo -o pipefail; python a.py | tee a", "set -e -o pipefail; python a.py | tee a"),
    ("DL007", "shopt -uo pipefail; python a.py | tee a", "shopt -so pipefail; python a.py | tee a"),
    (
        "DL007",
        "shopt -s pipefail; python a.py | tee a",
        "shopt -o -s pipefail; python a.py | tee a",
    ),
    (
        "DL007",
        "set -o pipefail; bash -c 'python a.py | tee a'",
        "if true; then set -o pipefail; fi; python a.py | tee a",
    ),
    ("DL007", f'{RUN}; run "$@" 2>&1 | tee -a a', f'set -o pipefail; {RUN}; run "$@" | tee -a a'),
    (
        "DL007",
        "run() { python a.py | tee -a a; }; run",
        f"go() {{ python a.py | tee a; }}; {RUN}; run",
    ),
    ("DL007", "python train.py | cat", "python train.py | cat; exit ${PIPESTATUS[0]}"),
    ("DL008", "python train.py > >(tee a)", "python train.py > >(tee a); wait"),
    ("DL009", "python train.py 2>&1 > a", "python train.py > a 2>&1"),
    ("DL010", "python train.py > a", "python train.py > a 2> b"),
    ("DL010", "python train.py | tee a", "python train.py |& tee a"),
    ("DL010", "python train.py > a 2> /dev/null", "python train.py &> a"),
    ("DL011", "python train.py > a", "PYTHONUNBUFFERED=x python train.py > a"),
    ("DL011", "PYTHONUNBUFFERED=1; python train.py > a", "python -Xdev -u train.py > a"),
    ("DL011", "python train.py | cat", "python train.py"),
    (
        "DL011",
        f"{EXPORTED}; ssh h 'python train.py > a'",
        f"ssh h '{EXPORTED}; python train.py > a'",
    ),
    (
        "DL011",
        f"{EXPORTED}; docker exec c sh -c 'python train.py > a'",
        f"{EXPORTED}; docker exec -e PYTHONUNBUFFERED c sh -c 'python train.py > a'",
    ),
    (
        "DL011",
        f"{EXPORTED}; docker exec c sh -c 'python train.py > a'",
        "docker exec -e PYTHONUNBUFFERED=1 c sh -c 'python train.py > a'",
    ),
    (
        "DL011",
        f"{EXPORTED}; pct exec 7 -- sh -c 'python train.py > a'",
        f"{EXPORTED}; chroot other-root sh -c 'python train.py > a'",
    ),
    (
        "DL011",
        f"{EXPORTED}; apptainer exec -e i python train.py > a",
        f"{EXPORTED}; apptainer exec i python train.py > a",
    ),
    (
        "DL011",
        f"{EXPORTED}; srun --export=NONE python train.py > a",
        f"{EXPORTED}; srun --export=ALL,A=1 python train.py > a",
    ),
    (
        "DL011",
        f"{EXPORTED}; lxc-attach --clear-env -n c -- python train.py > a",
        f"{EXPORTED}; lxc-attach -n c -- python train.py > a",
    ),
    (
        "DL011",
        f"go() {{ {EXPORTED}; }}; python a.py > a",
        f"go() {{ {EXPORTED}; }}; go; python a.py > a",
    ),
    ("DL011", f"{EXPORTED}; env -i python a.py > a", f"{EXPORTED}; env A=1 python a.py > a"),
    (
        "DL011",
        f"{EXPORTED}; env -u PYTHONUNBUFFERED python a.py > a",
        f"{EXPORTED}; env -u PYTHONHASHSEED python a.py > a",
    ),
    (
        "DL011",
        f"{EXPORTED}; env --unset=PYTHONUNBUFFERED python a.py > a",
        f"{EXPORTED}; env -i PYTHONUNBUFFERED=1 python a.py > a",
    ),
    ("DL011", f"{EXPORTED}; sudo python a.py > a", f"{EXPORTED}; sudo -E python a.py > a"),
    (
        "DL011",
        f"{EXPORTED}; sudo --preserve-env=PATH python a.py > a",
        f"{EXPORTED}; sudo --preserve-env=PYTHONUNBUFFERED python a.py > a",
    ),
    ("DL011", f"{EXPORTED}; sudo python a.py > a", "sudo PYTHONUNBUFFERED=1 python a.py > a"),
    (
        "DL011",
        f"{EXPORTED}; su - me -c 'python a.py > a'",
        f"{EXPORTED}; su me -c 'python a.py > a'",
    ),
    (
        "DL011",
        f"{EXPORTED}; unset PYTHONUNBUFFERED; python a.py > a",
        f"unset PYTHONUNBUFFERED; {EXPORTED}; python a.py > a",
    ),
    ("DL011", "python -m train > a", "python -m torch.distributed.run train.py > a"),
    ("DL011", "ssh h python train.py", "ssh -t h python train.py"),
    (
        "DL012",
        "export PYTHONUNBUFFERED=; python train.py > a",
        "export PYTHONUNBUFFERED=no; python train.py > a",
    ),
    (
        "DL012",
        "PYTHONUNBUFFERED=1; python train.py > a",
        "PYTHONUNBUFFERED=1; export PYTHONUNBUFFERED; python train.py > a",
    ),
    (
        "DL012",
        "env PYTHONUNBUFERED=1 python train.py > a",
        "env PYTHONFAULTHANDLER=0 PYTHONHASHSEED=0 python train.py > a",
    ),
    ("DL013", "stdbuf -oL python train.py", "stdbuf -oL ./trainer"),
    (
        "DL015",
        'ssh h "python train.py & echo $!"',
        'python train.py & ssh h "echo $! is mine"',
    ),
    ("DL015", 'bash -c "python train.py; echo $?"', "bash -c 'python train.py; echo $?'"),
    (
        "DL015",
        "ssh h <<EOF\npython train.py & echo $!\nEOF",
        "ssh h <<'EOF'\npython train.py & echo $!\nEOF",
    ),
    ("DL016", "bash keeps-signals.sh & echo $!", "bash passes-signals.sh & echo $!"),
    ("DL016", "python train.py | tee a & P=$!", "python train.py | tee a & wait $!"),
    ("DL016", "timeout 9 python train.py & echo $!", "nice python train.py & echo $!"),
    ("DL016", f"{RUN}; run & echo $!", "run() { python a.py & echo $!; }; run"),
    ("DL016", "flock l python train.py & echo $!", "exec 9> l; python train.py & echo $!"),
    ("DL016", "ssh h python train.py & echo $!", "bash -c 'python train.py' & echo $!"),
    (
        "DL017",
        "ssh -t h 'nohup python train.py > a &'",
        "ssh h 'nohup python train.py > a &'",
    ),
    (
        "DL017",
        "tmux new -d 'nohup python train.py & echo $!'",
        "tmux new -d 'nohup python train.py & wait'",
    ),
    ("DL018", "python train.py > a &", "nohup python train.py > a &"),
    ("DL018", "ssh -t h 'python a.py > a & disown'", "python a.py > a & echo $!; disown"),
    ("DL018", "python a.py > a & sleep 9 & disown", "python a.py > a & sleep 9 & disown %1"),
    ("DL018", "disown; python a.py > a &", "python a.py > a & disown -h"),
    ("DL018", f"{RUN}; run > a &", f"{RUN}; run > a & wait"),
    ("DL018", "run() { python a.py > a & }; run", "run() { python a.py > a & }; run; wait"),
    ("DL018", "nohup python train.py | tee a &", "nohup python train.py | nohup tee a &"),
    ("DL018", "setsid python train.py |& tee a &", "setsid bash -c 'python train.py |& tee a' &"),
    ("DL018", "bash -c 'nohup python a.py | tee a' &", "echo y | nohup python a.py > a &"),
    ("DL018", "ssh -t h 'nohup python a.py | tee a &'", "ssh h 'nohup python a.py | tee a &'"),
    (
        "DL018",
        "tmux new -d 'nohup python a.py | tee a &'",
        "tmux new -d 'trap \"\" HUP; nohup python a.py | tee a &'",
    ),
    ("DL018", "tmux new -d 'python train.py > a &'", "tmux new -d 'setsid python train.py > a &'"),
    ("DL019", "nohup torchrun train.py &", "nohup setsid torchrun train.py &"),
    ("DL019", "nohup torchrun train.py &", "ssh h 'nohup torchrun train.py &'"),
    ("DL021", "tmux new -d 'python train.py'", "tmux new -d 'python train.py; exec bash'"),
    ("DL021", "tmux new -d 'python train.py'", f"tmux new -d 'python train.py' {KEEP}"),
    (
        "DL021",
        "tmux new -d 'python train.py'",
        "tmux new -ds x; tmux send -t x 'python train.py' C-m",
    ),
    ("DL021", "tmux new -d 'python train.py'", "tmux new -d 'python train.py; echo $? > end'"),
    ("DL024", "ssh h tmux new 'python train.py'", "ssh -t h tmux new 'python train.py'"),
    ("DL025", "exec python train.py; echo no", "if x; then exec python train.py; fi; echo yes"),
    ("DL025", "exec python train.py\ncp a b", "exec > a 2>&1; python train.py"),
    ("DL026", "bash keeps-signals.sh", "bash passes-signals.sh"),
    ("DL027", "docker exec c python train.py > a", "docker exec c bash -c 'python train.py > a'"),
    ("DL027", "tmux new -d 'python train.py' > a", "tmux new -d 'python train.py > a' > /dev/null"),
    ("DL027", "ssh h python train.py | tee a", "srun python train.py > a"),
    (
        "DL028",
        "ssh h bash -lc 'nohup python train.py'",
        "ssh h \"bash -lc 'nohup python train.py'\"",
    ),
    (
        "DL028",
        "docker exec c cd /app && python train.py",
        "docker exec c python prepare.py && python train.py",
    ),
    (
        "DL028",
        "lxc exec c -- 'python train.py > /tmp/a'",
        "lxc exec c -- sh -c 'python train.py > /tmp/a'",
    ),
    ("DL028", "nohup 'python train.py' &", "nohup '/opt/my tools/python' train.py &"),
    ("DL035", "tmux new -d 'source a'", "tmux new -d 'source a; exec bash'"),
    ("DL030", f"{RUN}; run &", f"{RUN}; run >> /tmp/a 2>&1 &"),
    ("DL030", f"{RUN}; run > /dev/null", "go() { python a.py > /dev/null; }; python a.py"),
    ("DL030", "nohup python train.py > /dev/null &", "nohup python train.py &"),
    (
        "DL030",
        "tmux new -d 'python train.py'",
        "tmux new -d 'python train.py' \\; pipe-pane 'cat > a'",
    ),
    ("DL031", "python absent.py", "git clone u; python absent.py"),
    ("DL031", "source v/bin/activate; python train.py", "python -m venv v; source v/bin/activate"),
    ("DL031", "./train.py > a", "bash start.sh"),
    ("DL031", "./workspace > a", "./bin/python -u train.py > a"),
    ("DL031", "bash workspace", "bash start.sh"),
    ("DL031", "cd d && python ../train.py", "mkdir -p d && cd d && python ../train.py"),
    (
        "DL031",
        "mkdir d && cd d && python train.py",
        "mkdir d; cd d; cp ../train.py .; python train.py",
    ),
    ("DL031", "python -u absent.py", "python -u - < train.py"),
    (
        "DL031",
        "bash go.sh; cat > go.sh <<E\npython a.py\nE",
        "cat > go.sh <<E\ntrue\nE\nbash ./go.sh",
    ),
    ("DL031", "echo true > go; bash ./gone", "echo true > go; bash ./go"),
    (
        "DL031",
        "cat > go.sh <<E\npython absent.py\nE\ntmux new -d 'bash go.sh'",
        "cat > go.sh <<E\npython train.py\nE\ntmux new -d 'bash go.sh'",
    ),
    (
        "DL031",
        "run() { python train.py; }; bash -c run",
        "run() { python train.py; }; export -f run; bash -c run",
    ),
    (
        "DL001",
        "setup() { mkdir -p other; }; setup; python train.py > none/a",
        'setup() { local d=none; mkdir -p "$d"; }; setup; python train.py > none/a',
    ),
    (
        "DL001",
        'make() { mkdir -p "$1"; }; make other; python train.py > none/a',
        'make() { mkdir -p "$1"; }; make none; python train.py > none/a',
    ),
    (
        "DL010",
        "main() {\npython train.py\n} > a\nmain &",
        "main() {\npython train.py\n} > a 2>&1\nmain &",
    ),
    (
        "DL011",
        "export PYTHONUNBUFFERED=1; unset PYTHONUNBUFFERED; python train.py > a",
        "export PYTHONUNBUFFERED=1; (unset PYTHONUNBUFFERED; true); python train.py > a",
    ),
    ("DL031", "python -u workspace", "python -u package"),
    ("DL031", "source ./activate; python train.py", "source activate; python train.py"),
    ("DL006", "cd none; python train.py | tee -a a", "cd bin; python train.py | tee -a a"),
    ("DL006", "python train.py | tee -a none/a", "python train.py | tee >(gzip > none.gz) -a a"),
    ("DL031", "no-such-trainer.py", "source bin/python; no-such-trainer.py"),
    (
        "DL032",
        "ssh h 'conda activate x; python train.py'",
        "ssh h 'eval \"$(conda shell.bash hook)\"; conda activate x; python train.py'",
    ),
    (
        "DL032",
        "bash -c 'go() { conda activate x; }; go; python a'",
        "go() { conda activate x; }; go; python a",
    ),
    ("DL032", "bash -c 'conda activate x; python a'", "bash -ic 'conda activate x; python a'"),
    ("DL033", "sh -c 'python train.py &> a'", "bash -c 'python train.py &> a'"),
    ("DL033", "dash -c 'python train.py &> a'", "sh -c 'python train.py > a 2>&1'"),
    ("DL034", "script -c 'python train.py' a", "script -qefc 'python train.py' a"),
]


@pytest.fixture(autouse=True)
def plain(world: Path) -> None:
    """train.py is not executable here."""
    (world / "train.py").chmod(0o644)


def codes(text: str, world: Path) -> set[str]:
    text = text.replace("/workspace", str(world / "workspace"))
    return {f.rule.code for f in check(Source("command line", text)).findings}


@pytest.mark.parametrize(("code", "found", "near"), PAIRS, ids=[f"{c} {t}" for c, t, _ in PAIRS])
def test_it_is_found_and_its_neighbour_is_not(
    code: str, found: str, near: str, world: Path
) -> None:
    assert code in codes(found, world)
    assert code not in codes(near, world)


SETTINGS = [
    ("DL022", "set -g destroy-unattached on", "set -g destroy-unattached off"),
    ("DL022", "set-option -s exit-unattached on", "# set -s exit-unattached on"),
    ("DL022", "set -g destroy-unattached on", "set -g destroy-unattached keep-last"),
    ("DL023", 'set -g default-shell "/bin/false"', "set -g default-shell /bin/bash"),
    ("DL023", "set -g default-shell /usr/bin/tcsh", "set -g default-shell /usr/bin/zsh"),
    ("DL021", "set -g mouse on", "set -g remain-on-exit on"),
]


@pytest.mark.parametrize(("code", "found", "near"), SETTINGS)
def test_tmux_settings_of_the_user_count(code: str, found: str, near: str, world: Path) -> None:
    settings = world / "home" / ".tmux.conf"
    launch = f"tmux new-session -d -s x 'exec python -u train.py {LOG}'"
    for text, expected in ((found, True), (near, False)):
        settings.write_text(f"{text}\n")
        assert (code in codes(launch, world)) == expected
    # Another machine has settings of its own.
    settings.write_text(f"{found}\n")
    assert code == "DL021" or code not in codes(f'ssh h "{launch}"', world)


@pytest.fixture
def running(world: Path) -> Iterator[None]:
    """A session `job` on what is this test's default server."""
    subprocess.run(["tmux", "new-session", "-d", "-s", "job", "cat"], check=True, timeout=30)
    yield
    subprocess.run(["tmux", "kill-server"], check=False, timeout=30)


@pytest.mark.parametrize(
    ("launch", "taken"),
    [
        ("tmux new-session -d -s job 'python train.py'", True),
        ("tmux new -ds job 'python train.py'", True),
        ("tmux new-session -d -s jo 'python train.py'", False),
        ("tmux new-session -A -d -s job 'python train.py'", False),
        ("tmux -L mine new-session -d -s job 'python train.py'", False),
        ("tmux kill-session -t job; tmux new-session -d -s job 'python train.py'", False),
        ("ssh h \"tmux new-session -d -s job 'python train.py'\"", False),
    ],
)
def test_whose_session_is_taken(launch: str, taken: bool, running: None, world: Path) -> None:
    assert ("DL020" in codes(launch, world)) == taken


def test_asking_for_a_session_starts_no_server(world: Path) -> None:
    codes("tmux new-session -d -s job 'python train.py'", world)
    assert not list(world.glob("tmux-*/*"))


def test_the_other_copy_is_compared_byte_by_byte(world: Path) -> None:
    launch = "chroot other-root bash -c 'exec python -u /workspace/train.py >> /tmp/a 2>&1'"
    assert "DL029" in codes(launch, world)
    mine = world / "workspace" / "train.py"
    (world / "other-root" / str(mine).lstrip("/")).write_bytes(mine.read_bytes())
    assert "DL029" not in codes(launch, world)


@pytest.mark.parametrize(
    ("directives", "submit", "expected"),
    [
        ("#SBATCH --gpus 1", "sbatch job.sh", set()),
        ("#SBATCH -o workspace/%x-%j.out", "sbatch job.sh", set()),
        ("#SBATCH -o none/%x-%j.out", "sbatch job.sh", {"DL001"}),
        ('#SBATCH --output="none/%j.out"  # here', "sbatch job.sh", {"DL001"}),
        ("#SBATCH -e none/%j.err", "sbatch job.sh", {"DL001"}),
        ("#SBATCH -o none/%j.out", "sbatch -o workspace/%j.out job.sh", set()),
        ("#SBATCH -o none/%j.out", "mkdir -p none; sbatch job.sh --lr 1", set()),
        ("#SBATCH -o none/%j.out", "sbatch -D workspace job.sh", set()),
        ("#SBATCH -o %x.out", "sbatch job.sh", {"DL004"}),
        ("#SBATCH -o none/%j.out", "bash job.sh", {"DL026"}),
        ("true\n#SBATCH -o none/%j.out", "sbatch job.sh", set()),
    ],
)
def test_a_batch_job_says_where_its_output_goes(
    directives: str, submit: str, expected: set[str], world: Path
) -> None:
    text = f"#!/bin/bash\n{directives}\nsrun python -u train.py\n"
    (world / "job.sh").write_text(text)
    assert codes(submit, world) == expected


def test_a_batch_script_is_what_the_submitting_side_has(world: Path) -> None:
    (world / "job.sh").write_text("#!/bin/bash\n#SBATCH -o none/%j.out\npython -u train.py\n")
    (finding,) = check(Source("command line", "sbatch job.sh")).findings
    assert (finding.hit.span.line, finding.hit.span.text) == (2, "none/%j.out")
    assert (finding.mended, finding.hit.instead) == ("", "put in front: mkdir -p none")
    assert codes("sbatch absent.sh", world) == {"DL031"}


def test_a_function_of_a_script_runs_in_the_script(world: Path) -> None:
    (world / "lib.sh").write_text("train() { python -u train.py; }\n")
    script = world / "go.sh"
    for text, expected in (
        ("main() { python -u train.py; }\nmain >> /tmp/t.log 2>&1\n", {"DL026"}),
        ("main() { exec python -u train.py; }\nmain >> /tmp/t.log 2>&1\n", set()),
        ("main() { python -u train.py; }\nmain >> t.log 2>&1\n", {"DL005", "DL026"}),
        ("source lib.sh\ntrain >> /none/t.log 2>&1\n", {"DL001", "DL026"}),
        ("source lib.sh\ntrap 'kill $!' TERM\ntrain >> /tmp/t.log 2>&1\n", set()),
    ):
        script.write_text(text)
        assert codes("bash go.sh", world) == expected, text
    script.write_text("main() { python -u train.py; }\nmain\n")
    (finding,) = check(Source("command line", "bash go.sh >> /tmp/t.log 2>&1")).findings
    assert finding.mended == "main() { exec python -u train.py; }"


def test_a_script_that_asks_for_sh_does_not_know_and_greater(world: Path) -> None:
    for interpreter, expected in (("/bin/sh", True), ("/bin/bash", False)):
        (world / "go.sh").write_text(f"#!{interpreter}\nexec python -u train.py &>> a.log\n")
        (world / "go.sh").chmod(0o755)
        assert ("DL033" in codes("./go.sh", world)) == expected
    assert "DL033" in codes("sh go.sh", world)


def test_what_a_sourced_script_sets_counts(world: Path) -> None:
    (world / "env.sh").write_text("export PYTHONUNBUFFERED=1 LOGS=/workspace\n")
    launch = "source env.sh; python train.py > $LOGS/a.log 2>&1"
    assert codes(launch, world) == {"DL001", "DL004"}
    assert "DL011" in codes(launch.replace("source", "cat"), world)


@pytest.mark.parametrize(
    ("front", "buffered"),
    [("", False), ("unset PYTHONUNBUFFERED; ", True), ("env -i ", True), ("sudo ", True)],
)
def test_the_users_own_setting_goes_the_same_way(
    front: str, buffered: bool, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    assert ("DL011" in codes(f"{front}python train.py > a", world)) == buffered


def test_a_variable_in_front_of_a_command_is_not_known_to_its_redirects(world: Path) -> None:
    assert "DL004" in codes("L=a; python -u train.py > $L 2>&1", world)
    assert "DL004" not in codes("L=a python -u train.py > $L 2>&1", world)
    assert "DL004" in codes("L=a bash -c 'python -u train.py > $L 2>&1'", world)


def test_the_login_shell_counts_where_tmux_is_told_nothing(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = f"tmux new-session -d -s x 'exec python -u train.py {LOG}' {KEEP}"
    assert codes(launch, world) == set()
    monkeypatch.setenv("SHELL", "/usr/sbin/nologin")
    assert codes(launch, world) == {"DL023"}


def test_a_directory_that_is_made_by_an_unknown_name_is_made(world: Path) -> None:
    line = 'L=d/$(date +%F).log; mkdir -p "$(dirname "$L")"; python -u train.py >> "$L" 2>&1'
    assert dl001(line) == []
    (finding,) = dl001(line.replace("mkdir", "rmdir"))
    assert finding.hit.unknown


def dl001(text: str) -> list[Finding]:
    report = check(Source("command line", text))
    return [f for f in (*report.findings, *report.unknown) if f.rule.code == "DL001"]


@pytest.mark.parametrize(
    "launch",
    [
        "cd none; python -u train.py > a.log 2>&1",
        "cd none && python -u train.py > logs/a.log 2>&1",
        "tmux new -d 'cd none && python -u train.py > a.log 2>&1'",
        "cd none && tmux new -d 'python -u train.py > a.log 2>&1'",
        "tmux new -d -c none 'python -u train.py > a.log 2>&1'",
    ],
)
def test_a_cd_that_leads_nowhere_is_what_is_named(launch: str, world: Path) -> None:
    """No `mkdir` of the log's own directory helps there."""
    (finding,) = dl001(launch)
    assert finding.hit.span.text == "none"
    assert finding.hit.what == f"there is no directory {world / 'none'}"
    assert (finding.mended, finding.hit.edits) == ("", ())
    assert finding.hit.instead.endswith("in front: mkdir -p none")
    (world / "none").mkdir()
    assert all(near.hit.span.text == "logs" for near in dl001(launch))


@pytest.mark.parametrize(("then", "log"), [(";", True), ("&&", False)])
def test_what_a_cd_that_leads_nowhere_does(then: str, log: bool, world: Path) -> None:
    """What the finding says of it, by bash itself."""
    line = f"cd none {then} echo step > a.log"
    subprocess.run(["bash", "-c", line], check=False, timeout=30, stderr=subprocess.DEVNULL)
    assert (world / "a.log").exists() == log


@pytest.mark.parametrize(
    ("launch", "what", "instead"),
    [
        ("ssh h 'cd /srv && python a.py > out/a'", "/srv/out on ssh h", "test -w /srv/out && "),
        ("ssh h 'cd && python a.py > a'", "~ on ssh h", "test -w ~ && "),
        ("cd $X; python a.py > a", "the value of $X", "test -w $X && "),
        ("cd $X; python a.py > out/a", "the value of $X/out", "put in front: mkdir -p out"),
        ("python a.py > $LOG", "the value of $LOG", "check it again with its value"),
    ],
)
def test_what_cannot_be_looked_at_is_asked_for_where_it_is(
    launch: str, what: str, instead: str, world: Path
) -> None:
    (finding,) = dl001(launch)
    assert finding.hit.unknown
    assert finding.hit.what.startswith(what)
    assert instead in finding.hit.instead
