"""What the package may import, and how large it may grow."""

import ast
import io
import sys
import tokenize
from pathlib import Path

import dflash.concurrency

FILES = sorted(Path(dflash.concurrency.__file__).parent.glob("*.py"))
MAX_CODE_LINES = 400
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield node.module


def code_lines(text):
    """Count lines that hold code: no blank line, comment or docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        line
        for token in tokens
        if token.type not in LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def test_standard_library_only():
    assert FILES
    for file in FILES:
        for module in imported_modules(ast.parse(file.read_text())):
            known = module.split(".")[0] in sys.stdlib_module_names
            assert known or module.startswith("dflash.concurrency"), f"{file.name}: {module}"


def test_stays_small():
    count = {file.name: code_lines(file.read_text()) for file in FILES}
    assert sum(count.values()) < MAX_CODE_LINES, count
