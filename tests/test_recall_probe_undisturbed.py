"""RecallProbe leaves the run the same bit for bit: random states, dropout, buffers, averages, rotary tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from routeguard import RouteGuard
from routeguard.recall.quiet import undisturbed
from tests.loops import assert_same, tiny
from tests.test_recall_probe import losses, probe
from tests.trainers import parameters, run
from tests.zoo.build import build
from tests.zoo.case import text

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("case", ["gpt2", "lfm2", "granitemoehybrid"])
def test_a_probed_run_is_the_same_bit_for_bit(case: str, tmp_path: Path) -> None:
    plain = run(tiny(case), tmp_path / "a")
    probed = run(tiny(case), tmp_path / "b", probe())
    assert_same(parameters(plain), parameters(probed))
    assert losses(plain) == losses(probed) and len(losses(plain)) == 2  # no log line is lost either


def test_dropout_would_be_disturbed_without_care(tmp_path: Path) -> None:
    """The control: a callback that merely runs the model in training mode changes the run."""

    class Careless(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                model(input_ids=torch.randint(10, 80, (2, 40)))

    plain, careless = run(tiny("gpt2"), tmp_path / "a"), run(tiny("gpt2"), tmp_path / "b", Careless())
    assert losses(plain) != losses(careless)


@pytest.mark.parametrize("options", [{"bf16": True}, {"gradient_checkpointing": True}])
def test_under_mixed_precision_checkpointing_and_adapters(options: dict, tmp_path: Path) -> None:
    def adapted():
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.3, task_type="CAUSAL_LM")
        model = get_peft_model(tiny("llama"), config)
        model.enable_input_require_grads()
        return model

    plain = run(adapted(), tmp_path / "a", sft=True, **options)
    watched = probe()
    probed = run(adapted(), tmp_path / "b", watched, sft=True, **options)
    assert_same(parameters(plain), parameters(probed))
    assert losses(plain) == losses(probed)
    accuracies = ([line for line in t.state.log_history if "mean_token_accuracy" in line] for t in (plain, probed))
    first, second = ([line["mean_token_accuracy"] for line in lines] for lines in accuracies)
    assert first == second  # TRL's running averages are not emptied by the probe
    assert sorted(watched.results) == [0, 1, 2, 3, 4]


def test_a_rotary_embedding_that_adapts_to_length_is_put_back() -> None:
    case = text("llama/dynamic", max_position_embeddings=16,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0})  # fmt: skip
    model = build(case)
    rotary = model.model.rotary_emb
    before = rotary.inv_freq.clone(), {k: v for k, v in vars(rotary).items() if isinstance(v, (int, float))}
    ids = torch.randint(10, 80, (1, 56))
    with undisturbed(model):
        model(input_ids=ids)
        assert not torch.equal(rotary.inv_freq, before[0])  # the control: it did adapt
    assert torch.equal(rotary.inv_freq, before[0])
    assert before[1] == {k: v for k, v in vars(rotary).items() if isinstance(v, (int, float))}


def test_dynamic_rotary_scaling_with_rows_of_different_lengths(tmp_path: Path) -> None:
    """From its first growth on, the longest length seen is a plain tensor on the rotary module."""

    def model():
        return build(
            text(
                "llama/dynamic",
                max_position_embeddings=16,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
            )
        ).train()

    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(10, 80, (n,), generator=generator).tolist() for n in [18, 20, 22, 24, 26, 28, 30, 32] * 2]
    rows = {"train_dataset": Dataset.from_dict({"input_ids": ids, "labels": ids})}
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 8, "seed": 4}
    plain = run(model(), tmp_path / "a", trainer_options=rows, **options)
    probed = run(model(), tmp_path / "b", probe(insist=True), trainer_options=rows, **options)
    assert isinstance(plain.model.model.rotary_emb.max_seq_len_cached, torch.Tensor)  # it did grow
    assert int(probed.model.model.rotary_emb.max_seq_len_cached) <= 32  # not the probe's 56
    assert losses(plain) == losses(probed)
    assert_same(parameters(plain), parameters(probed))


def test_what_a_forward_pass_leaves_on_a_module_is_taken_away() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.tensor(3)
            self.register_buffer("table", torch.ones(2))

        def forward(self) -> None:
            self.seen += 1  # in place
            self.cache, self.count = torch.ones(4), 1
            self.table = torch.zeros(5)
            self.register_buffer("more", torch.ones(1))

    module = Module()
    with undisturbed(module):
        module()
    assert int(module.seen) == 3 and torch.equal(module.table, torch.ones(2))
    assert not {"cache", "count", "more"} & {*vars(module), *module._buffers}


def test_a_guarded_probed_run_is_the_guarded_run(tmp_path: Path) -> None:
    guarded = run(tiny("lfm2"), tmp_path / "a", RouteGuard("track"))
    probed = run(tiny("lfm2"), tmp_path / "b", RouteGuard("track", probe=probe()))
    assert_same(parameters(guarded), parameters(probed))
    drift = ([line for line in t.state.log_history if "routeguard/drift_max" in line] for t in (guarded, probed))
    first, second = ([line["routeguard/drift_max"] for line in lines] for lines in drift)
    assert first == second and len(first) == 2


@pytest.mark.parametrize("careful", [True, False])
def test_four_bit_weights_are_not_packed_for_inference(careful: bool) -> None:
    """On CPUs with bf16 instructions bitsandbytes packs them at an evaluation; training would get no gradient after."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(256, 256, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu")
    layer(torch.ones(1, 256, dtype=torch.bfloat16))  # quantised at the first use
    if not getattr(layer, "support_avx512bf16_for_cpu", False):
        pytest.skip("this CPU has no bf16 instructions, or this version packs nothing")
    layer.train()
    inputs = torch.ones(1, 256, dtype=torch.bfloat16)
    if careful:
        with undisturbed(layer):
            layer(inputs)
    else:  # the control
        layer.eval()
        with torch.no_grad():
            layer(inputs)
        layer.train()
    assert layer.support_avx512bf16_for_cpu
    assert bool(getattr(layer.weight.quant_state, "packing_format_for_cpu", False)) is not careful
