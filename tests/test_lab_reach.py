"""How far back look-ups and gradient reach, against a chain read by hand."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lab import commands
from benchmarks.lab.language.chains import RULES
from benchmarks.lab.language.words import build_tokenizer
from benchmarks.lab.measuring.reach import REACH_FILE, Span, look_up_distances, reach_of, span
from benchmarks.lab.models.architectures import ARCHITECTURES
from benchmarks.lab.models.weights import make
from benchmarks.lab.report.tables import reach_table
from benchmarks.lab.training.data import DATA_KINDS
from routeguard.demo.tasks import Sample


def test_look_ups_go_back_to_the_latest_place_where_a_name_was_told() -> None:
    text = "let k07 4 river ask k07 + 3 = 7 ; let k12 7 cloud cloud ask k12 + 1 = 8 ; let k20 8 ask k07"
    words = tuple(text.split(" "))
    assert look_up_distances(RULES, Sample(words, (False,) * len(words))) == [4, 5, 26]


def test_quantiles_of_distances() -> None:
    assert span(np.array([0, 5, 0, 4, 1])) == Span(half=1, most=3)
    assert span(np.ones(100)) == Span(half=49, most=89)


def test_references_at_any_distance_reach_further_than_those_to_the_step_before() -> None:
    tokenizer = build_tokenizer()
    model = ARCHITECTURES["lfm2"].untrained(0)
    near, far = (reach_of(model, tokenizer, DATA_KINDS[name], num_samples=8) for name in ("rules", "instruction"))
    assert near.look_ups.most <= 14 < far.look_ups.most
    assert near.gradient.half > 0


def test_the_command_measures_what_is_missing_and_the_page_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(ARCHITECTURES["lfm2"], build=tmp_path, steps=1)
    monkeypatch.setattr("benchmarks.lab.experiment.subject.Subject.folder", tmp_path / "models/lfm2-seed0")
    monkeypatch.setattr(commands, "DATA_KINDS", {name: DATA_KINDS[name] for name in ("rules", "instruction")})
    monkeypatch.setattr(commands, "reach_of", partial(reach_of, num_samples=8))
    commands.reach(["lfm2"], results=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / REACH_FILE).read_text().splitlines()]
    assert [line["data"] for line in lines] == ["rules", "instruction"]
    table = reach_table(lines)
    assert f"| {lines[0]['look_ups']['half']} | {lines[0]['gradient']['half']} |" in table
    commands.reach(["lfm2"], results=tmp_path)
    assert len((tmp_path / REACH_FILE).read_text().splitlines()) == 2
    assert "Not measured yet" in reach_table([])
