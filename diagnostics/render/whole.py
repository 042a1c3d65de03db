"""Files that are there as a whole or not at all."""

import os
import tempfile
from pathlib import Path


def write(path: Path, content: str, mode: int) -> None:
    """Put the file there, with these permissions. Raises OSError, with the path in it."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            file.write(content)
            file.flush()
            os.chmod(file.name, mode)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
