"""Models whose code lies beside their weights, written as it was in the days of transformers 4.57."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, dynamic_module_utils

from routeguard import RouteGuard, find_routes, restore_checkpoint, verify_checkpoint
from tests.standins import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCABULARY, hypenet
from tests.trainers import run

CODE = """
import copy

from torch.nn import functional
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.standins import hypenet


class HypeNetConfig(PretrainedConfig):
    model_type = "hypenet"

    def __init__(self, mixer_types=None, num_hidden_layers=5, hidden_size=48, num_attention_heads=4, **kwargs):
        self.mixer_types = mixer_types
        self.num_hidden_layers = num_hidden_layers
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        super().__init__(**kwargs)


class HypeNetForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = HypeNetConfig
    _no_split_modules = ["Layer"]

    def __init__(self, config):
        super().__init__(config)
        network = hypenet()
        self.model, self.lm_head = network.model, network.lm_head
        for layer in self.model.layers:
            layer.self_attn = copy.deepcopy(layer.self_attn)  # the stand-in's layers share modules
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids))
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with its code; what transformers copies of the code stays below `tmp_path`."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    network = hypenet()
    path = tmp_path / "hypenet"
    path.mkdir()
    code = "modeling_hypenet"
    config = {
        "architectures": ["HypeNetForCausalLM"],
        "auto_map": {"AutoConfig": f"{code}.HypeNetConfig", "AutoModelForCausalLM": f"{code}.HypeNetForCausalLM"},
        "model_type": "hypenet",
        "mixer_types": network.config.mixer_types,
        "num_hidden_layers": 5,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    (path / f"{code}.py").write_text(CODE)
    (path / "config.json").write_text(json.dumps(config))
    state = {name: tensor + 0.01 for name, tensor in network.state_dict().items()}
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return path


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)


def routing(model: Any) -> dict[str, torch.Tensor]:
    routes = find_routes(model)
    assert routes.layers == (1, 4)
    return {route.parameter: model.get_parameter(route.parameter).detach().clone() for route in routes}


def test_it_is_loaded_guarded_and_saved(folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    start = routing(model)
    others = model.model.layers[0].self_attn.q_proj.weight.detach().clone()
    run(model, tmp_path / "run", RouteGuard()).save_model(str(tmp_path / "tuned"))
    held = routing(model)
    assert all(torch.equal(held[name], start[name]) for name in start)
    assert not torch.equal(model.model.layers[0].self_attn.q_proj.weight, others)
    assert verify_checkpoint(tmp_path / "tuned", folder).ok


def test_it_is_repaired_on_disk(folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    start = routing(model)
    run(model, tmp_path / "run").save_model(str(tmp_path / "tuned"))
    assert not verify_checkpoint(tmp_path / "tuned", folder).ok
    restore_checkpoint(folder, tmp_path / "tuned", out=tmp_path / "fixed")
    assert verify_checkpoint(tmp_path / "fixed", folder).ok
    repaired = routing(load(tmp_path / "fixed"))
    assert all(torch.equal(repaired[name], start[name]) for name in start)
