"""Saved paths: written, loaded, tried out, and copies of a converted model."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from routeguard.cli.main import app
from routeguard.state_transition.convert import StateTransition
from routeguard.state_transition.describe import saved_transition
from tests.state_transition_texts import (
    TWO_TEXTS,
    converted,
    text,
    whole,
)
from tests.zoo.build import build

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("gate", ["head", "channel", "none"])
def test_saved_and_loaded(gate: str, tmp_path: Path) -> None:
    transition = converted("qwen3_next", gate=gate, features="identity")
    expected = whole(transition.model, TWO_TEXTS)
    transition.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state_transition.json", "state_transition.safetensors"]
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)]).output
    assert "linear paths in layers [3], 2 start tokens and an end; " in shown and f"gate {gate!r}" in shown
    as_json = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path), "--json"]).output)
    assert as_json["num_parameters"] == sum(p.numel() for _, p in transition.named_parameters())
    refused = CliRunner().invoke(app, ["inspect", str(tmp_path), "--norms"])
    assert refused.exit_code == 2 and "holds a state transition, no checkpoint" in refused.output + refused.stderr
    again = StateTransition.from_pretrained(build("qwen3_next"), tmp_path)
    assert torch.equal(whole(again.model, TWO_TEXTS), expected) and again.config == transition.config
    assert set(transition.openness) == (set() if gate == "none" else {3})
    model = build("llama")
    with pytest.raises(ValueError, match=r"belongs to another model: .* weights do not fit, the first is layers"):
        StateTransition.from_pretrained(model, tmp_path)
    assert getattr(model, "state_transition", None) is None
    with pytest.raises(ValueError, match="holds no state transition"):
        StateTransition.from_pretrained(model, tmp_path / "nothing")
    (tmp_path / "state_transition.json").write_text("{'rank'")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        StateTransition.from_pretrained(model, tmp_path)


def test_a_folder_names_its_base_model(tmp_path: Path) -> None:
    transition = converted("llama")
    transition.model.config._name_or_path = "us/small"
    transition.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "state_transition.json").read_text())["base_model_name_or_path"] == "us/small"
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)]).output
    assert "base model: us/small; its queries and keys are frozen" in shown
    assert saved_transition(tmp_path)["base_model_name_or_path"] == "us/small"
    with pytest.raises(ValueError, match=r"belongs to another model \(us/small\): .* weights do not fit"):
        StateTransition.from_pretrained(build("qwen2"), tmp_path)
    for name, number in (("us/small", 0), ("", 0), ("them/small", 1)):
        model = build("llama")
        model.config._name_or_path = name
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            StateTransition.from_pretrained(model, tmp_path)
        told = [str(w.message) for w in caught if "was trained beside 'us/small' and is put on" in str(w.message)]
        assert len(told) == number


def test_a_saved_path_is_tried_out_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted("llama").save_pretrained(tmp_path)
    model = build("llama")
    names = set(model.state_dict())
    (tmp_path / "state_transition.safetensors").write_bytes(b"broken")
    with pytest.raises(Exception, match=r"(?i)header|safetensor"):
        StateTransition.from_pretrained(model, tmp_path)
    assert set(model.state_dict()) == names and not model.lm_head._forward_hooks
    monkeypatch.setattr(type(model.model), "forward", lambda self, *args, **kwargs: 1 / 0)
    with pytest.raises(
        ValueError, match="could not read a text with steps after the conversion, which was undone: div"
    ):
        StateTransition.from_pretrained(model, tmp_path)
    assert set(model.state_dict()) == names


def test_a_copy_is_its_own() -> None:
    transition = converted("llama")
    copied = copy.deepcopy(transition.model)
    torch.nn.init.zeros_(copied.state_transition.paths[0].multiplier)
    assert torch.equal(whole(transition.model, TWO_TEXTS), whole(copy.deepcopy(transition.model), TWO_TEXTS))
    assert not torch.equal(whole(copied, TWO_TEXTS), whole(transition.model, TWO_TEXTS))
    plain, ours = text(20)[None], whole(transition.model, TWO_TEXTS)
    copied.state_transition.remove()
    assert torch.equal(whole(copied, plain), whole(build("llama"), plain))
    assert torch.equal(whole(transition.model, TWO_TEXTS), ours)
