"""Writing a file so that a reader finds the old one or the new one, never a half."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from edgesdk.errors import UsageError


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Yields a UTF-8 text file that becomes `path` at the end; after an exception nothing changes.

    Its folder is made. Raises UsageError when the file cannot be written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            yield stream
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror or error}",
            hint="choose another file, or free some space",
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _umask() -> int:
    # Can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
