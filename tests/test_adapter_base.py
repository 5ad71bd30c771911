"""An adapter is verified, restored and averaged only with a checkpoint that has the modules it acts on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from routeguard import average_checkpoint, restore_checkpoint, verify_checkpoint
from tests.tuned import tune
from tests.zoo.build import build, config_for

pytestmark = pytest.mark.filterwarnings("ignore")


def folders(root: Path, base: str, model: Any, targets: Sequence[str] | str, **options: Any) -> tuple[Path, Path]:
    """The folder of a base, and that of an adapter of another model (or the name of its case)."""
    build(base).save_pretrained(root / "base")
    adapted = get_peft_model(
        build(model) if isinstance(model, str) else model, LoraConfig(r=2, target_modules=targets, **options)
    )
    tune(adapted)
    adapted.save_pretrained(root / "adapter")
    return root / "base", root / "adapter"


FOREIGN = {
    "another family": ("llama", "gpt2", ["c_attn"], {"fan_in_fan_out": True}, "it has no such layer"),
    "its feed-forward": ("llama", "gpt2", ["c_fc"], {"fan_in_fan_out": True}, "it has no such layer"),
    "fused attention": ("llama", "phi3", ["qkv_proj"], {}, "it has no such module"),
    "split attention": ("phi3", "llama", ["q_proj", "up_proj"], {}, "it has no such module"),
    "nothing in common": ("llama", "gpt_neox", ["dense_h_to_4h"], {}, "it has none of the adapter's modules"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_an_adapter_of_another_model_is_refused(case: str, tmp_path: Path) -> None:
    base_case, model, targets, options, reason = FOREIGN[case]
    base, adapter = folders(tmp_path, base_case, model, targets, **options)
    match = rf"is not the base of this adapter: .*{reason}"
    with pytest.raises(ValueError, match=match):
        verify_checkpoint(adapter, base)
    with pytest.raises(ValueError, match=match):
        restore_checkpoint(base, adapter, out=tmp_path / "out")
    with pytest.raises(ValueError, match=match):
        average_checkpoint(base, adapter, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def changed_llama(**changes: int) -> Any:
    config = config_for("llama")
    for name, value in changes.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("target", ["q_proj", "up_proj"])
def test_a_deeper_or_wider_model_is_another_one(target: str, tmp_path: Path) -> None:
    deeper = changed_llama(num_hidden_layers=6)
    base, adapter = folders(tmp_path / "deeper", "llama", deeper, [target], layers_to_transform=[4, 5])
    with pytest.raises(ValueError, match=r"acts on model\.layers\.4\..*it has no such layer \(and 3 more\)"):
        verify_checkpoint(adapter, base)
    wider = changed_llama(hidden_size=96)
    base, adapter = folders(tmp_path / "wider", "llama", wider, [target])
    with pytest.raises(ValueError, match=r"there its shape is"):
        verify_checkpoint(adapter, base)


RENAMED = {  # modules that transformers stores under other names than it has them in memory
    "mixtral": ["mlp.gate", "v_proj"],
    "lfm3": ["g_proj", "v_proj"],
    "lara_mini": ["in_proj_qkv", "v_proj"],
    "zamba": ["q_proj", "v_proj"],
}


@pytest.mark.parametrize("case", RENAMED)
def test_modules_that_are_stored_under_other_names_are_no_sign_of_another_base(case: str, tmp_path: Path) -> None:
    base, adapter = folders(tmp_path, case, case, RENAMED[case])
    assert verify_checkpoint(adapter, base).ok == ("q_proj" not in RENAMED[case])


def test_experts_alone_are_no_sign_of_another_base(tmp_path: Path) -> None:
    experts = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    base, adapter = folders(tmp_path, "mixtral", "mixtral", [], **experts)
    assert verify_checkpoint(adapter, base).ok


@pytest.mark.parametrize("case", ["exaone", "sarvam_moe"])
def test_queries_that_are_stored_under_another_name_are_not_passed_over(case: str, tmp_path: Path) -> None:
    base, adapter = folders(tmp_path, case, case, ["q_proj", "k_proj", "v_proj"])
    with pytest.raises(ValueError, match=r"stores these modules under other names .* merge the adapter"):
        verify_checkpoint(adapter, base)
    average_checkpoint(base, adapter, out=tmp_path / "out", insist=True)
