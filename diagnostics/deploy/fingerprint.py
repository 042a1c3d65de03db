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
from typing import Any, Iterator, Sequence  # noqa: UP035

SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)  # inside a line
MOST_LINKS = 40  # on the way to one file, as in the kernel
UNCHECKED = "bytecode that Python never compares with its source"
STALE = "bytecode of another version of its source, which Python makes anew"


def fingerprint(directory: str, names: "Sequence[str]" = (), root: str = "") -> "dict[str, Any]":
    """Every file's hash, size and time; bytecode is left out, which Python makes itself.

    Args:
        root: the root of the file system that `directory` is in, where that is not this one's.
    """
    files, bytecode = {}, {}
    for path in _walk(directory, root):
        relative = os.path.relpath(path, directory)
        if path.endswith(".pyc"):
            bytecode[relative] = _bytecode(path, root)
        elif not _is_left_out(relative):
            files[relative] = _file(real_path(path, root))
    return {
        "directory": os.path.abspath(root + directory),
        "host": socket.gethostname(),
        "python": sys.version.split()[0],
        "files": files,
        "bytecode": {path: said for path, said in bytecode.items() if said},
        "defines": {name: _defines(directory, root, name) for name in names},
    }


def locate(what: str, root: str = "") -> "str | None":
    """The directory, given as such or as the name of a package; None where there is none."""
    if os.path.isdir(real_path(what, root)):
        return what
    top, *below = what.split(".")
    if root or not all(part.isidentifier() for part in (top, *below)):
        return None
    try:
        spec = importlib.util.find_spec(top)  # of `a.b` it would import `a`
    except ValueError:  # __main__ has none
        return None
    found = (spec.submodule_search_locations if spec else None) or ()
    directories = (os.path.join(directory, *below) for directory in found)
    return next(filter(os.path.isdir, directories), None)


def real_path(path: str, root: str) -> str:
    """Where links lead those whose root this is; empty if they lead round in a circle."""
    if not root:
        return path
    done: list[str] = []
    todo, links = path.split("/")[::-1], 0
    while todo:
        part = todo.pop()
        here = "/".join([root, *done, part])
        if part == "..":
            done[-1:] = []
        elif os.path.islink(here):
            links += 1
            if links > MOST_LINKS:
                return ""
            target = os.readlink(here)
            done = [] if target.startswith("/") else done
            todo += target.split("/")[::-1]
        elif part not in ("", "."):
            done.append(part)
    return "/".join([root, *done])


def _walk(folder: str, root: str, above: "Sequence[tuple[int, int]]" = ()) -> "Iterator[str]":
    """All files, those behind links to code too, such as are no data sets.

    No link is followed to a directory that it lies in.
    """
    real = real_path(folder, root)
    status = os.stat(real)
    place = (status.st_dev, status.st_ino)
    if place in above:
        return
    for name in sorted(os.listdir(real)):
        path = os.path.join(folder, name)
        leads_to = real_path(path, root)
        if os.path.isfile(leads_to):
            yield path
        elif os.path.isdir(leads_to) and name != ".git" and _is_code(real, name, leads_to):
            yield from _walk(path, root, (*above, place))


def _is_code(folder: str, name: str, leads_to: str) -> bool:
    """Of a link: whether Python sources are in the directory that it leads to, or right below."""
    if not os.path.islink(os.path.join(folder, name)):
        return True
    for below, folders, files in os.walk(leads_to):
        if any(file.endswith(".py") for file in files):
            return True
        if below != leads_to:
            folders.clear()
    return False


def _is_left_out(relative: str) -> bool:
    return relative.endswith(".pyo") or "__pycache__" in relative.split(os.sep)


def _file(path: str) -> "dict[str, Any]":
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    status = os.stat(path)
    return {"sha256": digest, "size": status.st_size, "mtime": status.st_mtime}


def _bytecode(path: str, root: str) -> str:
    """How cached bytecode does not go with its source (PEP 552: flags, then time and size)."""
    folder, leaf = os.path.split(path)
    name = leaf.split(".")[0] + ".py"
    source = real_path(os.path.join(os.path.dirname(folder), name), root)
    if not os.path.isfile(source):
        return ""
    with open(real_path(path, root), "rb") as file:
        header = file.read(16)
    flags, time, size = (int.from_bytes(header[i : i + 4], "little") for i in (4, 8, 12))
    status = os.stat(source)
    now = (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    if flags == 1:
        return UNCHECKED
    return STALE if flags == 0 and (time, size) != now else ""


def _defines(directory: str, root: str, name: str) -> "bool | str":
    """Whether `package.module:function` or `package.module:Class.method` is in the sources.

    Where that cannot be told: why not.
    """
    module, _, wanted = name.partition(":")
    for path in _sources(directory, module.split(".")):
        source = real_path(path, root)
        if os.path.isfile(source):
            with open(source, "rb") as file:
                return _binds(file.read(), os.path.relpath(path, directory), wanted.split("."))
    return f"there is no module {module}"


def _sources(directory: str, module: "Sequence[str]") -> "Iterator[str]":
    """Where a module may lie, in the order in which Python looks."""
    # The package's own name comes first, whatever its directory is called there.
    for below in (module, module[1:]):
        base = os.path.join(directory, *below)
        yield os.path.join(base, "__init__.py")
        if below:
            yield base + ".py"


def _binds(source: bytes, path: str, names: "Sequence[str]") -> "bool | str":
    try:
        tree = ast.parse(source, path)
    except (SyntaxError, ValueError) as error:
        return f"{path}: Python {sys.version.split()[0]} cannot parse it: {error}"
    if _has(tree, names):
        return True
    takes_all = any(name == "*" for name, _ in _bindings(tree))
    return f"{path} takes names by `import *`" if takes_all else False


def _has(scope: ast.AST, names: "Sequence[str]") -> bool:
    return any(
        name == names[0] and (len(names) == 1 or _has(node, names[1:]))
        for name, node in _bindings(scope)
    )


def _bindings(scope: ast.AST) -> "Iterator[tuple[str, ast.AST]]":
    """Each name that is bound in a scope, in whatever block, with what binds it."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.split(".")[0], node
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node
        elif not isinstance(node, SCOPES):
            yield from _bindings(node)


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
