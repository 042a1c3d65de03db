"""Two environments side by side, what matters for compiling and numerics first."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diagnostics.verdict import Status, Verdict

# In the order of `collect`: a difference in one of these can change what is computed or compiled.
THAT_MATTER = (
    "torch",
    "driver",
    "packages for compiling and numerics",
    "variables",
    "python",
)
ABSENT = "-"
WIDEST = 60


@dataclass(frozen=True)
class Difference:
    """One value that differs; ABSENT where a side has none."""

    section: str
    name: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{_cut(self.first)}  ->  {_cut(self.second)}"


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Difference]:
    """In the order of the sections; a package is told once, where it matters most."""
    told = set()
    for section in dict.fromkeys((*first, *second)):
        mine, theirs = first.get(section, {}), second.get(section, {})
        for name in dict.fromkeys((*mine, *theirs)):
            a, b = str(mine.get(name, ABSENT)), str(theirs.get(name, ABSENT))
            if a != b and ("packages" not in section or name not in told):
                told.add(name)
                yield Difference(section, name, a, b)


def judge(first: Mapping[str, Any], second: Mapping[str, Any], names: tuple[str, str]) -> Verdict:
    """Whether two environments are the same. `names` say which they are."""
    found = list(differences(first, second))
    unknown = [
        n for n, side in zip(names, (first, second), strict=True) if "unknown" in side["torch"]
    ]
    evidence = {f"{d.section}: {d.name}": str(d) for d in found}
    if found:
        serious = sum(d.section in THAT_MATTER for d in found)
        return Verdict(
            Status.PROBLEM,
            "environments-differ",
            f"{names[0]} and {names[1]} differ in {len(found)} things, of which {serious} can "
            "change what is computed or compiled",
            evidence,
        )
    if unknown:
        return Verdict(
            Status.UNKNOWN,
            "torch-unknown",
            f"torch could not be asked in {', '.join(unknown)}: {first['torch']}",
            evidence,
        )
    return Verdict(Status.OK, "environments-same", f"{names[0]} and {names[1]} are the same")


def _cut(value: str) -> str:
    return value if len(value) <= WIDEST else f"{value[: WIDEST - 3]}..."
