"""Which code would run here: interpreter, import paths, versions, and who owns the import names."""

import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType

from diagnostics.verdict import Status, Verdict

_PACKAGES = (
    *("torch", "triton", "transformers", "safetensors", "pyarrow", "numpy"),
    *("click", "psutil", "py-spy", "rich"),
)
_DIAGNOSTICS_DIR = Path(__file__).resolve().parents[1]
_DFLASH_DIR = _DIAGNOSTICS_DIR.with_name("dflash")


def probe() -> Verdict:
    """Show which code would run: interpreter, import paths, versions, code hash, git state.

    Finds import names that two distributions claim, and a `dflash` that is not the one this
    command belongs to. Imports neither torch nor dflash.
    """
    manifest = _load_manifest()
    evidence = _evidence(manifest)
    if doubles := manifest.double_owners():
        return Verdict(
            Status.PROBLEM,
            "import-name-owned-twice",
            "; ".join(map(str, doubles)),
            evidence,
            doubles[0].remedy,
        )
    if not _is_beside_us(evidence["dflash"]):
        return Verdict(
            Status.PROBLEM,
            "dflash-from-elsewhere",
            f"`import dflash` takes {evidence['dflash']}, and this command lies with {_DFLASH_DIR}",
            evidence,
            "Check PYTHONPATH and the working directory, or use the other copy's dflash-diag.",
        )
    summary = f"`import dflash` takes {evidence['dflash']}, which no other distribution claims"
    return Verdict(Status.OK, "environment-consistent", summary, evidence)


def _evidence(manifest: ModuleType) -> dict[str, str]:
    return {
        "python": f"{sys.executable} ({platform.python_version()})",
        "dflash": manifest.import_path("dflash") or "cannot be imported",
        "diagnostics": manifest.import_path("diagnostics") or "cannot be imported",
        "dflash-diag": manifest.installed_version(manifest.DISTRIBUTION),
        "git": manifest.git_state(_DFLASH_DIR),
        "dflash code": manifest.package_hash(_DFLASH_DIR),
        "diagnostics code": manifest.package_hash(_DIAGNOSTICS_DIR),
        **{name: manifest.installed_version(name) for name in _PACKAGES},
    }


def _is_beside_us(path: str) -> bool:
    return Path(path).resolve().is_relative_to(_DFLASH_DIR)


def _load_manifest() -> ModuleType:
    """dflash/manifest.py by its path: whose files `import dflash` finds is what we look into."""
    spec = importlib.util.spec_from_file_location("_own_manifest", _DFLASH_DIR / "manifest.py")
    assert spec and spec.loader  # a file path always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
