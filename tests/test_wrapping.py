"""Methods wrapped on one object: what others had put there stays, and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from routeguard import RouteGuard
from routeguard.training.wrapping import Wrapped
from tests.loops import tiny
from tests.trainers import make

pytestmark = pytest.mark.filterwarnings("ignore")


class Speaker:
    def say(self, word: str) -> str:
        return word


def loudly(original: Any, word: str) -> str:
    return original(word).upper()


def test_a_method_is_wrapped_on_one_object_until_it_is_removed() -> None:
    speaker, other = Speaker(), Speaker()
    wrapped = Wrapped(speaker, "say", loudly)
    assert speaker.say("a") == "A" and other.say("a") == "a"
    wrapped.remove()
    assert speaker.say("a") == "a" and not vars(speaker)


def test_detaching_a_guard_leaves_the_wrappers_that_were_there_before(tmp_path: Path) -> None:
    trainer = make(tiny(), tmp_path)
    called: list[str] = []
    for name in ("create_optimizer", "save_model", "log"):

        def around(original: Any, *args: Any, name: str = name, **kwargs: Any) -> Any:
            called.append(name)
            return original(*args, **kwargs)

        Wrapped(trainer, name, around)
    theirs = {name: vars(trainer)[name] for name in ("create_optimizer", "save_model", "log")}
    guard = RouteGuard().attach(trainer)
    assert vars(trainer)["create_optimizer"] is not theirs["create_optimizer"]
    trainer.train()
    trainer.save_model()
    assert set(called) == set(theirs)
    guard.detach()
    assert {name: vars(trainer)[name] for name in theirs} == theirs
    assert "on_train_end" not in vars(trainer.callback_handler)
