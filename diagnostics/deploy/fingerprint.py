"""Hashes of the files of a package, made where they lie: this file is sent there as it is.

It runs under any Python 3.6 or newer, alone, with nothing installed: `python3 - ARGUMENTS` reads it
from standard input. ARGUMENTS is one JSON object: `what`, a directory or the name of a package, and
`names`, a list of `module:name` to look for in the sources. It prints one JSON object, and exits 2
where there is no such directory or package.
"""

import ast
import hashlib
import importlib.util
import json
import os
import socket
import sys
from typing import Any, Sequence  # noqa: UP035

LEFT_OUT = ("__pycache__", ".git")
UNCHECKED = "bytecode that Python never compares with its source"
STALE = "bytecode of another version of its source, which Python makes anew"


def fingerprint(directory: str, names: "Sequence[str]" = ()) -> "dict[str, Any]":
    """Every file's hash, size and time; bytecode is left out, which Python makes itself."""
    files = {}
    for folder, folders, leaves in os.walk(directory):
        folders[:] = sorted(set(folders) - set(LEFT_OUT))
        for leaf in leaves:
            path = os.path.join(folder, leaf)
            if not leaf.endswith((".pyc", ".pyo")) and os.path.isfile(path):
                files[os.path.relpath(path, directory)] = _file(path)
    return {
        "directory": os.path.abspath(directory),
        "host": socket.gethostname(),
        "python": sys.version.split()[0],
        "files": files,
        "bytecode": _bytecode(directory),
        "defines": {name: _defines(directory, name) for name in names},
    }


def locate(what: str) -> "str | None":
    """The directory, given as such or as the name of a package; None where there is none."""
    if os.path.isdir(what):
        return what
    if os.sep in what:
        return None
    spec = importlib.util.find_spec(what)
    return next(iter(spec.submodule_search_locations or ()), None) if spec else None


def _file(path: str) -> "dict[str, Any]":
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    status = os.stat(path)
    return {"sha256": digest, "size": status.st_size, "mtime": status.st_mtime}


def _bytecode(directory: str) -> "dict[str, str]":
    """Cached bytecode that does not go with its source (PEP 552: flags, then time and size)."""
    told = {}
    for folder, _, leaves in os.walk(directory):
        for leaf in leaves:
            name = leaf.split(".")[0] + ".py"
            source = os.path.join(os.path.dirname(folder), name)
            if not leaf.endswith(".pyc") or not os.path.isfile(source):
                continue
            path = os.path.join(folder, leaf)
            with open(path, "rb") as file:
                header = file.read(16)
            flags, time, size = (int.from_bytes(header[i : i + 4], "little") for i in (4, 8, 12))
            status = os.stat(source)
            now = (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
            if flags == 1:
                told[os.path.relpath(path, directory)] = UNCHECKED
            elif flags == 0 and (time, size) != now:
                told[os.path.relpath(path, directory)] = STALE
    return told


def _defines(directory: str, name: str) -> bool:
    """Whether `package.module:function` or `package.module:Class.method` is in the sources."""
    module, _, wanted = name.partition(":")
    parts = module.split(".")
    # The package's own name comes first, whatever its directory is called there.
    for below in (parts, parts[1:]):
        base = os.path.join(directory, *below)
        for path in (base + ".py", os.path.join(base, "__init__.py")):
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    tree = ast.parse(file.read())
                return _has(tree, wanted.split("."))
    return False


def _has(tree: "Any", names: "Sequence[str]") -> bool:
    for node in tree.body:
        if names[0] in _bound(node):
            return len(names) == 1 or (hasattr(node, "body") and _has(node, names[1:]))
    return False


def _bound(node: ast.AST) -> "list[str]":
    """The names that a statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def main() -> None:
    """Print the fingerprint that standard input's sender asked for."""
    asked = json.loads(sys.argv[1])
    directory = locate(asked["what"])
    if directory is None:
        print(json.dumps({"missing": asked["what"], "host": socket.gethostname()}))
        sys.exit(2)
    print(json.dumps(fingerprint(directory, asked["names"])))


if __name__ == "__main__":
    main()
