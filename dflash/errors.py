"""What can go wrong, one exception class per culprit, and the exit codes of `dflash`.

A message says what, where, the value seen and the rule; `remedy` says what to type next.
Callers catch by class and never by message text.
"""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `dflash`; a code below 64 is final, one from 64 on invites a resume."""

    OK = 0
    FAILED = 1
    USAGE = 2
    STUCK = 70  # a thread would not stop and the process ended itself
    STOPPED = 75  # asked to stop; the state is saved and the run can be resumed
    INTERRUPTED = 130  # second Ctrl-C; nothing was saved


class DflashError(Exception):
    """An error whose cause is known well enough to say what to do about it."""

    remedy: str = "Run the command again with --help, or report the message above."
    exit_code: Exit = Exit.FAILED

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        if remedy is not None:
            self.remedy = remedy


class ConfigError(DflashError):
    """An option has a value that its rule forbids: `--block-size must be at least 2, got 1`.

    `value` is None where nothing was given.
    """

    remedy = "Run `dflash train --help` for every option, its unit and its default."
    exit_code = Exit.USAGE

    def __init__(
        self, option: str, rule: str, value: object = None, *, remedy: str | None = None
    ) -> None:
        got = "" if value is None else f", got {value}"
        super().__init__(f"{option} {rule}{got}", remedy=remedy)
        self.option = option
        self.rule = rule
        self.value = value


class DataError(DflashError):
    """The tokenized completions cannot be read or hold something that cannot be trained on."""

    remedy = "Check --data-dir: every row needs `input_ids` and a `loss_mask` of the same length."


class ModelError(DflashError):
    """The target model cannot be loaded or is not one that a drafter can be trained for."""

    remedy = "Check --target-model: it must be the directory of a Hugging Face causal LM."


class CheckpointError(DflashError):
    """A checkpoint is missing, incomplete, or belongs to a different run."""

    remedy = "Give --resume auto, --resume PATH of a complete checkpoint, or another --output-dir."


class MissingExtraError(DflashError):
    """A command needs packages that the base installation leaves out."""

    def __init__(self, extra: str, package: str) -> None:
        super().__init__(
            f"this command needs the package {package!r}, which is not installed",
            remedy=f"Type: pip install 'dflash-diag[{extra}]'",
        )
        self.extra = extra
        self.package = package
