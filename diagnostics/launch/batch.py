"""Where a batch system puts a job's output: what sbatch is told, and the job's `#SBATCH` lines."""

import re

from diagnostics.launch.known_wrappers import SLURM_FLAGS
from diagnostics.launch.parse import parse
from diagnostics.launch.shell import Script, Word
from diagnostics.launch.whereabouts import is_relative
from diagnostics.launch.wrappers import split_options

Options = dict[str, Word | None]
UNIQUE = re.compile(r"%\d*[jJA]")


def job_options(given: Options, script: Script | None) -> Options:
    """All of a job's options, by their long names where both are used here."""
    return {**_long(_directives(script) if script else {}), **_long(given)}


def _directives(script: Script) -> Options:
    """Those of the script; behind its first command they are comments."""
    found: Options = {}
    first = min((p.span.start for p in script.pipelines), default=0)
    for comment in script.comments:
        if comment.value.startswith("#SBATCH") and comment.span().start < first:
            words = parse(comment.cut(1, len(comment.value))).pipelines[0].commands[0].words
            found |= split_options(words[1:], lambda name: name not in SLURM_FLAGS)[0]
    return found


def _long(options: Options) -> Options:
    known = {"-o": "--output", "-e": "--error", "-D": "--chdir"}
    return {known.get(name, name): word for name, word in options.items()}


def output(options: Options, name: str) -> Word | None:
    """The file that `--output` or `--error` names, if its directory is said there in full."""
    word = options.get(name)
    if word is None or "%" in word.value.rpartition("/")[0]:
        return None
    return None if "--chdir" in options and is_relative(word.value) else word


def keeps_earlier(options: Options, word: Word) -> bool:
    """Whether the output of an earlier job stays: the file is another, or is added to."""
    mode = options.get("--open-mode")
    return UNIQUE.search(word.value) is not None or (mode is not None and mode.value[:1] == "a")
