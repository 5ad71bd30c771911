"""Replace a method on one object, a Trainer, and put back what was there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Wrapped:
    """Calls of `owner.name(...)` become `around(original, ...)`, on this object alone, until `remove()`."""

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._earlier = vars(owner).get(name)  # somebody else's wrapper
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapper)

    def remove(self) -> None:
        """Put back what was there before; what others have wrapped around it since goes too."""
        if self._earlier is None:
            vars(self._owner).pop(self._name, None)
        else:
            setattr(self._owner, self._name, self._earlier)
