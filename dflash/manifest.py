"""What code, versions and configuration a process really runs: the first line of every log.

Standard library only and without an import from `dflash`: `dflash-diag` loads this file by its
path, because another package under the name `dflash` is one of the things it looks for.
"""

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

DISTRIBUTION = "dflash-diag"
IMPORT_NAMES = ("dflash", "diagnostics", "repro")  # the names that this project's code uses
PACKAGE_DIR = Path(__file__).resolve().parent
NOT_INSTALLED = "not installed"
_GIT_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What runs. Hashes are SHA-256 in hex; `first_line` shortens them."""

    version: str
    git: str
    code_hash: str
    import_path: str
    config_hash: str
    python: str
    torch: str
    transformers: str

    def first_line(self) -> str:
        """Everything in one log line."""
        return (
            f"dflash {self.version} | git {self.git} | code {self.code_hash[:12]}"
            f" | {self.import_path} | config {self.config_hash[:12]} | python {self.python}"
            f" | torch {self.torch} | transformers {self.transformers}"
        )

    def to_json(self) -> str:
        """Everything, as one JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2)


def collect(config_hash: str) -> Manifest:
    """The manifest of this process; imports nothing and never fails for want of git."""
    return Manifest(
        version=installed_version(DISTRIBUTION),
        git=git_state(PACKAGE_DIR),
        code_hash=package_hash(PACKAGE_DIR),
        import_path=str(PACKAGE_DIR),
        config_hash=config_hash,
        python=platform.python_version(),
        torch=installed_version("torch"),
        transformers=installed_version("transformers"),
    )


def package_hash(package_dir: Path) -> str:
    """SHA-256 over the sorted relative paths and the contents of all `*.py` files below."""
    digest = hashlib.sha256()
    for path in sorted(package_dir.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package_dir).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def git_state(package_dir: Path) -> str:
    """`1a2b3c4`, `1a2b3c4-dirty`, or why there is no commit to name.

    A package that merely lies below some checkout, as in a virtual environment, is not part of it:
    only one whose `__init__.py` is tracked is.
    """
    try:
        if _git(package_dir, "ls-files", "--error-unmatch", "__init__.py") is None:
            return "not a git checkout"
        commit = _git(package_dir, "rev-parse", "--short", "HEAD")
        changes = _git(package_dir, "status", "--porcelain", "--", ".")
    except FileNotFoundError:
        return "unknown (no git command)"
    except subprocess.TimeoutExpired:
        return f"unknown (git took more than {_GIT_TIMEOUT_S:g} s)"
    return (commit or "no commit yet") + ("-dirty" if changes else "")


def _git(directory: Path, *arguments: str) -> str | None:
    """What git prints, or None where it fails."""
    done = subprocess.run(
        ["git", "-C", str(directory), *arguments],
        capture_output=True,
        text=True,
        timeout=_GIT_TIMEOUT_S,
    )
    return done.stdout.strip() if done.returncode == 0 else None


def installed_version(distribution: str) -> str:
    """The version in the installed metadata, without importing anything."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def import_path(name: str) -> str | None:
    """The file or directory that `import name` would take, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)


@dataclasses.dataclass(frozen=True)
class DoubleOwner:
    """An import name of ours that another distribution claims too."""

    name: str
    others: tuple[str, ...]  # "distribution version"
    imported_from: str

    def __str__(self) -> str:
        return (
            f"the import name {self.name!r} belongs to {DISTRIBUTION}"
            f" {installed_version(DISTRIBUTION)} and to {', '.join(self.others)};"
            f" `import {self.name}` takes {self.imported_from}"
        )

    @property
    def remedy(self) -> str:
        """What to type. Removing the other one may take files of ours along: put them back."""
        names = " ".join(other.split()[0] for other in self.others)
        return (
            f"Type: pip uninstall {names}; "
            f"pip install --force-reinstall --no-deps {DISTRIBUTION} (or -e . in a checkout)"
        )


def double_owners(names: Iterable[str] = IMPORT_NAMES) -> list[DoubleOwner]:
    """The import names among `names` that a distribution other than ours claims as well.

    Ours counts as an owner however it is installed, because an editable install records no
    package files and a checkout on the path no distribution at all.
    """
    return [
        DoubleOwner(name, others, import_path(name) or "nothing")
        for name in names
        if (others := tuple(owner for owner in import_owners(name) if not _is_ours(owner)))
    ]


def import_owners(name: str) -> list[str]:
    """`distribution version` of all whose installed files claim the import name, sorted."""
    return sorted(
        {
            f"{distribution.name} {distribution.version}"
            for distribution in importlib.metadata.distributions()
            if _claims(distribution, name)
        }
    )


def _claims(distribution: importlib.metadata.Distribution, name: str) -> bool:
    # Searched as text: parsing the record of every installed distribution takes seconds.
    record = "\n" + (distribution.read_text("RECORD") or "")
    return f"\n{name}/" in record or f"\n{name}.py," in record


def _is_ours(owner: str) -> bool:
    return owner.split()[0].replace("_", "-").lower() == DISTRIBUTION
