"""The lab's commands: what is run by default, and mistakes on the command line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.lab import __main__ as command_line
from benchmarks.lab import commands
from benchmarks.lab.conditions import sets
from benchmarks.lab.experiment import seeds
from benchmarks.lab.experiment.plan import Experiment, Run

Work = list[tuple[Experiment, Run]]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Work:
    """What would be run, instead of running it."""
    work: Work = []

    def plan(found: Sequence[tuple[Experiment, Run]], *, workers: int, say: Callable[[str], None]) -> None:
        work.extend(found)

    monkeypatch.setattr(commands, "do_all", plan)
    return work


def conditions_of(work: Work, architecture: str) -> set[str]:
    return {c.name for e, run in work if e.subject.architecture.name == architecture for c in run.conditions}


def test_everything_is_developed_on_the_main_architecture_and_less_elsewhere(planned: Work, tmp_path: Path) -> None:
    commands.run(results=tmp_path)
    assert conditions_of(planned, "lfm2") == set(sets.MAIN)
    assert conditions_of(planned, "qwen3") == set(sets.ELSEWHERE)
    assert {run.seed for _, run in planned} == set(seeds.DEVELOPMENT_SEEDS)
    assert {e.data.name for e, _ in planned} == {"rules"}


def test_the_confirmation_has_its_own_seeds_and_conditions(planned: Work, tmp_path: Path) -> None:
    commands.run(confirm=True, results=tmp_path)
    assert conditions_of(planned, "lfm2") == set(sets.CONFIRMED)
    assert conditions_of(planned, "bamba") == set(sets.CONFIRMED_ELSEWHERE)
    by_architecture = {
        name: {run.seed for e, run in planned if e.subject.architecture.name == name} for name in ("lfm2", "bamba")
    }
    assert by_architecture == {"lfm2": set(seeds.CONFIRMATION_SEEDS), "bamba": set(seeds.CONFIRMATION_SEEDS_ELSEWHERE)}


def test_names_narrow_the_work(planned: Work, tmp_path: Path) -> None:
    commands.run(["bamba"], data=["cups"], conditions=["none", "qk_restore"], seeds=[0], results=tmp_path)
    assert [str(run) for _, run in planned] == ["seed 0, before", "seed 0, none and 1 more"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "--architecture", "lfm3"], "'lfm3' is not one of lfm2, .*; closest lfm2"),
        (["run", "--data", "cup"], "'cup' is not one of rules, .*; closest cups"),
        (["run", "--conditions", "qk_restor"], "no condition 'qk_restor'; closest qk_restore"),
        (["report", "--results", "nowhere"], "no results in nowhere"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lab", *arguments])
    with pytest.raises(SystemExit) as stopped:
        command_line.main()
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_conditions_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lab", "conditions"])
    command_line.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(sets.MAIN) and any(
        line.startswith("freeze ") and "'mode': 'freeze'" in line for line in lines
    )
