"""Keep other libraries' hints out of what a command prints."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """No hints of transformers, and none about CUDA or CPU kernels that bitsandbytes misses; nothing here uses them."""
    bitsandbytes = logging.getLogger("bitsandbytes")
    before = bitsandbytes.level
    bitsandbytes.setLevel(logging.ERROR)
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        bitsandbytes.setLevel(before)
