"""Bad input to RouteGuard: each a clear ValueError, before a step is made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, Trainer

import routeguard
from routeguard import L2SP, Anchor, Freeze, Interpolate, LowLR, QKPro, QKRestore, RouteGuard, Track
from tests.loops import tiny
from tests.trainers import arguments, dataset, make, run
from tests.tuned import values

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protect": "freze"}, "closest 'freeze'"),
        ({"protect": "low-lr"}, "closest 'low_lr'"),
        ({"protect": 3}, "choose from 'freeze'"),
        ({"protect": "track", "restore": "qk_por"}, "closest 'qk_pro'"),
        ({"restore": "qk"}, r"Freeze\(\) with restore= is meaningless"),
        ({"protect": Freeze(), "restore": QKRestore()}, "meaningless"),
        ({"layers": 1}, r"layers=1 is no list.*layers=\[3\]"),
        ({"layers": "1"}, "layers='1' is no list"),
        ({"layers": ["1"]}, r"layers=\['1'\] is no list"),
        ({"roles": None}, r"roles=None is no list.*\['query', 'key'\]"),
    ],
)
def test_settings(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouteGuard(**options)


@pytest.mark.parametrize(
    ("make_mode", "message"),
    [
        (lambda: LowLR(0.0), "use Freeze"),
        (lambda: LowLR(1.0), "Track"),
        (lambda: LowLR("0.1"), "scale='0.1'.* not a number between 0 and 1"),
        (lambda: Anchor("100"), "strength='100'.* not a positive number"),
        (lambda: Anchor(True), "strength=True"),
        (lambda: L2SP(None), "total=None.* not a positive number"),
        (lambda: L2SP().strength("0.1"), "add up to '0.1'"),
        (lambda: QKPro("0.1"), "ridge='0.1'.* not a number"),
        (lambda: Interpolate("0.5"), "alpha='0.5'.* not a number between 0 and 1"),
        (lambda: Anchor(-1.0), "positive"),
        (lambda: QKPro(-0.1), "negative"),
        (lambda: QKPro(float("nan")), "not a number"),
        (lambda: Interpolate(1.5), "between 0 and 1"),
    ],
)
def test_mode_values(make_mode, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_mode()


def test_names_stand_for_the_objects() -> None:
    assert RouteGuard("low_lr").protect == LowLR() and RouteGuard(LowLR).protect == LowLR()
    assert RouteGuard(Track(), "qk_pro").restore == QKPro()
    assert RouteGuard().protect == Freeze() and RouteGuard().restore is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [3]}, r"layers \[3\] have no full attention.*\[2, 5\]"),
        ({"layers": [99]}, r"0 to 5"),
        ({"layers": []}, "empty"),
        ({"roles": ["querry"]}, "querry"),
    ],
)
def test_choices_that_match_nothing(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make(tiny(), tmp_path, RouteGuard(**options))


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(ValueError, match="bidirectional encoder"):
        make(BertLMHeadModel(config), tmp_path, RouteGuard())


@pytest.mark.parametrize("case", ["mamba", "recurrent_gemma"])
def test_a_model_without_full_attention_is_refused(case: str, tmp_path: Path) -> None:
    from tests.zoo import build
    from tests.zoo.configs import CASES

    model = build.build(case) if case in CASES else _mamba()
    with pytest.raises(ValueError, match="no full-attention layer"):
        make(model, tmp_path, RouteGuard())


def _mamba():
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4))


def test_a_pure_softmax_model_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="all .* layers of 'llama' are full attention"):
        make(tiny("llama"), tmp_path, RouteGuard())


def test_nan_weights(tmp_path: Path) -> None:
    model = tiny()
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.2\.self_attn\.q_proj\.weight has NaN"):
        run(model, tmp_path, RouteGuard())


def test_a_reference_from_another_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="q_proj"):
        run(tiny(), tmp_path, RouteGuard("track", reference={"some.other.weight": torch.zeros(2)}))
    with pytest.raises(ValueError, match="is not from this model"):
        run(tiny(), tmp_path, RouteGuard("track", reference=tiny("granitemoehybrid")))
    with pytest.raises(ValueError, match="does not exist"):
        run(tiny(), tmp_path, RouteGuard("track", reference=str(tmp_path / "nowhere")))


@pytest.mark.parametrize("mode", ["anchor", "l2_sp", "freeze"])
def test_a_reference_whose_weights_mean_something_else(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turned = tiny()
    settings = getattr(turned.config, "rope_parameters", None)
    if settings is None:  # transformers 4
        turned.config.rope_theta = 77.0
    else:
        turned.config.rope_parameters = {**settings, "rope_theta": 77.0}
    with pytest.raises(ValueError, match=r"rope: .* in the model, .*77\.0.* in the reference"):
        run(tiny(), tmp_path, RouteGuard(mode, reference=turned))
    run(tiny(), tmp_path, RouteGuard(mode, reference=turned, insist=True))
    assert "note: insisted on although they differ: rope" in capsys.readouterr().out
    run(tiny(), tmp_path / "bare", RouteGuard(mode, reference=values(tiny())))
    assert "note: the reference carries no config: rotary settings" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mode", "name", "message"),
    [
        ("anchor", "self_attn.q_proj", "q_proj.weight.* there is no sound start"),
        ("l2_sp", "feed_forward.w1", "L2SP would pull towards them"),
    ],
)
def test_a_reference_with_nan(mode: str, name: str, message: str, tmp_path: Path) -> None:
    start = values(tiny())
    next(value for key, value in start.items() if name in key).view(-1)[0] = float("nan")
    with pytest.raises(ValueError, match=message):
        run(tiny(), tmp_path, RouteGuard(mode, reference=start))


@pytest.mark.parametrize("mode", ["freeze", "track", "anchor"])
def test_late_add_callback_is_told_to_attach(mode: str, tmp_path: Path) -> None:
    trainer = make(tiny(), tmp_path)
    trainer.add_callback(RouteGuard(mode))
    with pytest.raises(ValueError, match=r"guard\.attach\(trainer\)"):
        trainer.train()


@pytest.mark.parametrize("mode", ["freeze", "low_lr", "anchor", "track"])
def test_attach_equals_passing_the_callback(mode: str, tmp_path: Path) -> None:
    passed = run(tiny(), tmp_path / "a", RouteGuard(mode))
    trainer = make(tiny(), tmp_path / "b")
    guard = RouteGuard(mode)
    assert guard.attach(trainer) is guard and guard.attach(trainer) is guard
    trainer.train()
    for (name, a), (_, b) in zip(passed.model.named_parameters(), trainer.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert trainer.state.log_history[0].keys() == passed.state.log_history[0].keys()


def test_two_guards_on_one_trainer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="already has a RouteGuard"):
        make(tiny(), tmp_path, RouteGuard(), RouteGuard("track"))


def test_an_optimizer_with_its_scheduler_is_refused_for_groups(tmp_path: Path) -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ValueError, match=r"routeguard\.param_groups"):
        Trainer(
            model,
            arguments(tmp_path),
            train_dataset=dataset(),
            callbacks=[RouteGuard("low_lr")],
            optimizers=(optimizer, scheduler),
        )


def test_an_optimizer_of_ones_own_is_split(tmp_path: Path) -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = make(model, tmp_path, RouteGuard("low_lr"), trainer_options={"optimizers": (optimizer, None)})
    trainer.train()
    assert [g["lr"] for g in optimizer.param_groups if g.get("routeguard")] == [
        pytest.approx(0.1 * optimizer.param_groups[0]["lr"])
    ]


def test_adafactor_for_rows_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Adafactor is not known to treat rows"):
        run(tiny("qwen3_5_text"), tmp_path, RouteGuard(), optim="adafactor")


def test_importing_loads_and_patches_nothing() -> None:
    heavy = {"torch", "transformers", "trl", "peft"}
    code = f"import routeguard, sys; bad = {heavy} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_exported_name_resolves() -> None:
    for name in routeguard.__all__:
        assert getattr(routeguard, name) is not None and not isinstance(getattr(routeguard, name), type(sys))
    with pytest.raises(AttributeError, match="has no attribute 'routegard'"):
        routeguard.routegard  # noqa: B018
