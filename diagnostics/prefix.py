"""Commands that run another one elsewhere: `ssh host`, `pct exec 200 --`, `docker exec -i C`."""

import os
import shlex
from collections.abc import Sequence


def behind(prefix: Sequence[str], words: Sequence[str]) -> list[str]:
    """The words of a command, to be run behind the prefix.

    ssh joins its words with spaces, and a shell on the other side takes them apart again: what
    comes behind each ssh is quoted once more. No other prefix is known to.
    """
    for _ in (word for word in prefix if os.path.basename(word) == "ssh"):
        words = [shlex.quote(word) for word in words]
    return [*prefix, *words]
