"""A verdict for people: the finding first, then what to type, then the evidence."""

from diagnostics.verdict import Verdict


def render(verdict: Verdict, *, evidence: bool = True) -> str:
    """Lines without colour, fit for a log; without the evidence where it was shown already."""
    lines = [f"{verdict.status}: {verdict.summary}"]
    if verdict.remedy:
        lines.append(f"  {verdict.remedy}")
    if not evidence:
        return "\n".join(lines)
    width = max(map(len, verdict.evidence), default=0)
    lines += [f"  {name:<{width}}  {value}" for name, value in verdict.evidence.items()]
    return "\n".join(lines)
