"""Names without what wrappers add to them."""

from __future__ import annotations

import pytest

from routeguard.routes.names import canonical_name

EXPERTS = "layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("base_model.model.model.layers.3.q_proj.base_layer.weight", "model.layers.3.q_proj.weight"),
        ("module._orig_mod.layers.3.q_proj.weight", "layers.3.q_proj.weight"),
        ("layers.3._fsdp_wrapped_module.k_proj.modules_to_save.default.weight", "layers.3.k_proj.weight"),
        ("layers.3.q_proj.base_layer.weight.absmax", "layers.3.q_proj.weight.absmax"),
        # PEFT's wrappers of two tensors of one module, one inside the other
        (f"{EXPERTS}.base_layer.base_layer.down_proj", f"{EXPERTS}.down_proj"),
        (f"{EXPERTS}.base_layer.lora_A.default.weight", f"{EXPERTS}.base_layer.lora_A.default.weight"),
        (f"{EXPERTS}.base_layer.base_layer.lora_B.weight", f"{EXPERTS}.base_layer.base_layer.lora_B.weight"),
        (f"{EXPERTS}.lora_A.weight", f"{EXPERTS}.lora_A.weight"),
        ("layers.3.my_base_layer.weight", "layers.3.my_base_layer.weight"),
    ],
)
def test_wrappers_leave_no_trace_and_adapters_keep_their_place(name: str, plain: str) -> None:
    assert canonical_name(name) == plain
