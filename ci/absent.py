"""Stands in for packages that a peer imports and that a training step of it never calls."""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Absent(MetaPathFinder, Loader):
    """Empty packages in place of missing ones: any name in them is an empty class.

    `used` are those that were imported.
    """

    PACKAGES = ("datasets", "hs_connectors", "openai", "sglang", "yunchang")

    def __init__(self) -> None:
        self.used: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        known = name.partition(".")[0] in self.PACKAGES
        return ModuleSpec(name, self, is_package=True) if known else None

    def exec_module(self, module: ModuleType) -> None:
        self.used.add(module.__name__.partition(".")[0])

        def empty_class(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = empty_class  # type: ignore[method-assign]


def stand_in() -> Absent:
    """From now on, what is missing of `Absent.PACKAGES` can be imported all the same."""
    absent = Absent()
    sys.meta_path.append(absent)
    return absent
