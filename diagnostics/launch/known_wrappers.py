"""Programs that take options and then a command: adding one is an entry of `WRAPPERS`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wrapper:
    """Options, `operands` words of its own, then the command.

    `valued` are the options that take a value; with `flags`, all but those do.
    """

    valued: frozenset[str] = frozenset()
    flags: frozenset[str] | None = None
    operands: int = 0
    hop: bool = False
    remote: bool = False
    detaches: frozenset[str] = frozenset()
    ttys: frozenset[str] = frozenset()

    def takes_value(self, option: str) -> bool:
        """Whether the next word belongs to this option."""
        return option in self.valued if self.flags is None else option not in self.flags


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


_DOCKER_RUN = Wrapper(
    flags=names("-d -i -t -P -q --detach --interactive --tty --rm --init --privileged --read-only"),
    operands=1,
    hop=True,
    detaches=names("-d --detach"),
    ttys=names("-t --tty"),
)
_DOCKER_EXEC = Wrapper(
    valued=names("-e -u -w --env --env-file --user --workdir --detach-keys"),
    operands=1,
    hop=True,
    detaches=names("-d --detach"),
    ttys=names("-t --tty"),
)
_KUBECTL_EXEC = Wrapper(
    valued=names("-c -n -f --container --namespace --context"),
    operands=1,
    hop=True,
    remote=True,
    ttys=names("-t --tty"),
)
_APPTAINER = Wrapper(valued=names("-B --bind -H --home --env --pwd -W"), operands=1, hop=True)
SLURM_FLAGS = names(
    "-E -H -K -O -Q -W -X -l -q -s -u -v --exclusive --hold --label --no-kill --overlap --parsable"
    " --pty --quiet --requeue --test-only --unbuffered --verbose --wait"
)

WRAPPERS = {
    "nohup": Wrapper(),
    "setsid": Wrapper(),
    "stdbuf": Wrapper(valued=names("-i -o -e")),
    "timeout": Wrapper(valued=names("-k -s --kill-after --signal"), operands=1),
    "nice": Wrapper(valued=names("-n --adjustment")),
    "ionice": Wrapper(valued=names("-c -n -p --class --classdata")),
    "chrt": Wrapper(operands=1),
    "taskset": Wrapper(operands=1),
    "numactl": Wrapper(valued=names("-C -N -m -p -i")),
    "env": Wrapper(valued=names("-u -C --unset --chdir")),
    "exec": Wrapper(valued=names("-a")),
    "command": Wrapper(),
    "time": Wrapper(valued=names("-f -o")),
    "strace": Wrapper(valued=names("-e -o -p -s -u")),
    "sudo": Wrapper(valued=names("-u -g -h -p -C -D -R -T --user --group")),
    "doas": Wrapper(valued=names("-u -C")),
    "ray job submit": Wrapper(flags=names("--no-wait"), hop=True, remote=True),
    "srun": Wrapper(flags=SLURM_FLAGS, hop=True, remote=True),
    "chroot": Wrapper(operands=1, hop=True),
    "unshare": Wrapper(),
    "uv run": Wrapper(valued=names("--with --python -p --project --extra --env-file")),
    "poetry run": Wrapper(),
    "pipenv run": Wrapper(),
    "conda run": Wrapper(valued=names("-n -p --name --prefix --cwd")),
    "mamba run": Wrapper(valued=names("-n -p --name --prefix --cwd")),
    "pct exec": Wrapper(operands=1, hop=True),
    "lxc exec": Wrapper(valued=names("--env --cwd --user --group --mode"), operands=1, hop=True),
    "incus exec": Wrapper(valued=names("--env --cwd --user --group --mode"), operands=1, hop=True),
    "lxc-attach": Wrapper(valued=names("-n -P -u -g --name --lxcpath"), hop=True),
    "docker exec": _DOCKER_EXEC,
    "podman exec": _DOCKER_EXEC,
    "docker compose exec": _DOCKER_EXEC,
    "docker run": _DOCKER_RUN,
    "podman run": _DOCKER_RUN,
    "docker compose run": _DOCKER_RUN,
    "kubectl exec": _KUBECTL_EXEC,
    "singularity exec": _APPTAINER,
    "apptainer exec": _APPTAINER,
}
