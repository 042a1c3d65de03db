"""A verdict for scripts: one JSON object with the fields of `Verdict` as keys."""

import dataclasses
import json

from diagnostics.verdict import Verdict


def render(verdict: Verdict) -> str:
    """Indented JSON; the order of the keys is that of the fields."""
    return json.dumps(dataclasses.asdict(verdict), indent=2)
