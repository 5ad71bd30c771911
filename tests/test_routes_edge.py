"""Routes of wrapped, quantised, tied, remote-code and unsuitable models, and the table's extension by users."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from routeguard.routes.architecture import Architecture
from routeguard.routes.block import Block, Found, Piece
from routeguard.routes.collection import Routes
from routeguard.routes.find import find_routes
from routeguard.routes.in_memory import is_quantised
from routeguard.routes.names import canonical_name
from routeguard.routes.table import register_architecture, unregister_architecture
from routeguard.routes.verify import verify
from tests.standins import SoftmaxAttention, StandInConfig, StandInForCausalLM, hypenet, jet_nemotron
from tests.zoo.build import build
from tests.zoo.case import Case

peft = pytest.importorskip("peft")


def quiet(model: Any, **options: Any) -> Routes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return find_routes(model, **options)


def rows_by_name(routes: Routes) -> dict[str, Any]:
    return {
        canonical_name(route.parameter): (route.layer, route.role, route.kind, route.rows, route.shape)
        for route in routes
    }


# --- wrappers ---------------------------------------------------------------------------------------------------------

WRAPPED = ["qwen3_next", "gpt2", "deepseek_v3", "qwen3_5"]


class DataParallelLike(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("name", WRAPPED)
def test_compiled_and_data_parallel_models_read_the_same(name: str) -> None:
    expected = rows_by_name(quiet(build(name)))
    for wrapped in (
        torch.compile(build(name)),
        DataParallelLike(build(name)),
        DataParallelLike(torch.compile(build(name))),
    ):
        routes = quiet(wrapped)
        assert rows_by_name(routes) == expected
        names = dict(wrapped.named_parameters())
        assert all(route.parameter in names for route in routes)


def test_fsdp_renames_the_class_not_the_answer() -> None:
    model = build("qwen3_next")
    expected = quiet(model)
    for module in list(model.modules()):
        if type(module).__name__.endswith(("Attention", "DecoderLayer", "ForCausalLM")):
            module.__class__ = type(f"FSDP{type(module).__name__}", (type(module),), {})
    assert type(model).__name__.startswith("FSDP")
    assert quiet(model) == expected


def test_fsdp2_shards_keep_their_logical_shapes(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = build("qwen3_next")
    expected = quiet(model)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert type(model).__name__.startswith("FSDP")
        assert quiet(model) == expected
    finally:
        dist.destroy_process_group()


LORA: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["q_proj"], "target_modules": ["v_proj"]},
}


@pytest.mark.parametrize("kind", LORA)
def test_adapters_leave_the_routes_on_the_base_parameters(kind: str) -> None:
    expected = quiet(build("qwen3_next"), norms=True)
    config = peft.LoraConfig(r=2, **{"target_modules": ["q_proj", "k_proj"], **LORA[kind]})
    wrapped = peft.get_peft_model(build("qwen3_next"), config)
    routes = quiet(wrapped, norms=True)
    assert rows_by_name(routes) == rows_by_name(expected)
    names = dict(wrapped.named_parameters())
    assert all(names[route.parameter].shape == route.shape for route in routes)
    assert not any("lora_" in route.parameter for route in routes)
    if kind == "modules_to_save":  # the trained copy is the live one
        queries = [route.parameter for route in routes if route.role == "query" and route.kind == "weight"]
        assert all("modules_to_save" in name for name in queries)
        assert all(names[name].requires_grad for name in queries)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_layers_report_their_logical_shapes(bits: int) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = build("qwen3_next")
    expected = quiet(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name in ("q_proj", "k_proj"):
                kind = bnb.nn.Linear4bit if bits == 4 else bnb.nn.Linear8bitLt
                options = {} if bits == 4 else {"has_fp16_weights": False}
                quantised = kind(child.in_features, child.out_features, bias=False, **options)
                quantised.load_state_dict(child.state_dict())
                setattr(parent, name, quantised.to("cpu"))
    parameters = dict(model.named_parameters())
    routes = quiet(model)
    assert rows_by_name(routes) == rows_by_name(expected)
    assert routes.num_model_parameters == expected.num_model_parameters
    assert all(is_quantised(parameters[route.parameter]) for route in routes)
    if bits == 4:
        assert any(tuple(parameters[route.parameter].shape) != route.shape for route in routes)


# --- ties -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "blocks"), [("zamba", 1), ("zamba2/no_adapter", 2)])
def test_tied_blocks_are_listed_once_with_all_their_layers(name: str, blocks: int) -> None:
    routes = quiet(build(name))
    weights = [route for route in routes if route.role == "query" and route.kind == "weight"]
    assert len(weights) == blocks
    assert routes.layers == (1, 3, 5)
    assert sorted(layer for route in weights for layer in (route.layer, *route.tied_layers)) == [1, 3, 5]
    assert routes.num_parameters == sum(route.num_parameters for route in routes)


def test_adapters_of_a_shared_block_belong_to_one_use_each() -> None:
    routes = quiet(build("zamba2"))
    uses = {r.parameter: r.layer for r in routes if "adapter_list" in r.parameter}
    assert {layer for name, layer in uses.items() if "_list.0." in name} == {1}
    assert {layer for name, layer in uses.items() if "_list.1." in name} == {3}
    assert {layer for name, layer in uses.items() if "_list.2." in name} == {5}


def test_keys_of_sharing_layers_come_from_the_owner() -> None:
    model = build("gemma3n_text")
    if hasattr(model.model.layers[-1].self_attn, "k_proj"):
        pytest.skip("without a cache, sharing layers of this transformers use keys of their own")
    routes = quiet(model)
    queries = {route.layer for route in routes if route.role == "query"}
    keys = {route.layer for route in routes if route.role == "key"}
    assert keys < queries == set(routes.layers)


# --- what is refused, and what is warned about ------------------------------------------------------------------------

REFUSED = [
    ("bert", {}, "bidirectional encoder"),
    ("t5", {}, "encoder-decoder"),
    ("mamba", {}, r"no full-attention layer: its 4 layers are 4 other"),
    ("rwkv", {"attention_hidden_size": 64}, "no full-attention layer"),
    ("recurrent_gemma", {}, r"no full-attention layer: its 4 layers are 3 other, 1 sliding"),
    ("mistral", {"sliding_window": 8}, r"no full-attention layer: its 4 layers are 4 sliding"),
]


@pytest.mark.parametrize(("model_type", "overrides", "message"), REFUSED)
def test_models_without_routes_are_refused_with_what_was_found(model_type: str, overrides: Any, message: str) -> None:
    auto = "AutoModel" if model_type in ("bert", "t5") else "AutoModelForCausalLM"
    model = build(Case(model_type, model_type, overrides, auto), device="meta")
    with pytest.raises(ValueError, match=message):
        find_routes(model)


def test_layers_out_of_range_name_the_choice() -> None:
    model = build("qwen3_next", device="meta")
    for layers, message in (
        ([99], r"layers \[99\].*the full-attention layers are \[3\]"),
        ([0], r"\[0\]"),
        ([], "empty"),
    ):
        with pytest.raises(ValueError, match=message):
            find_routes(model, layers=layers)


@pytest.mark.parametrize("roles", [("querry",), (), ("query", "keys")])
def test_misspelt_roles_name_the_choices(roles: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="choose from query, key, value, output"):
        find_routes(build("qwen3_next", device="meta"), roles=roles)


@pytest.mark.parametrize("options", [{"layers": 1}, {"layers": "1"}, {"layers": [1.0]}, {"roles": None}, {"roles": 3}])
def test_what_is_no_list_is_said_to_be_none(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    for model in (build("lfm2"), "nowhere"):
        with pytest.raises(ValueError, match=rf"{name}={re.escape(repr(value))} is no list of"):
            find_routes(model, **options)


def test_pure_softmax_models_warn_and_hybrids_do_not() -> None:
    with pytest.warns(UserWarning, match="all 4 layers of 'llama' are full attention"):
        find_routes(build("llama", device="meta"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_routes(build("qwen3_next", device="meta"))
        parallel = find_routes(build("falcon_h1", device="meta"))  # Mamba-2 beside attention in each layer
        find_routes(build("llama", device="meta"), layers=[1])  # the user has chosen
    assert parallel.all_layers_full
    assert "every layer has Mamba-2 beside its attention" in str(parallel)
    assert "is weak in such models" not in str(parallel)


def test_a_module_without_config_is_refused_or_probed() -> None:
    with pytest.raises(ValueError, match="has no Hugging Face config"):
        find_routes(nn.Linear(2, 2))


# --- remote code ------------------------------------------------------------------------------------------------------


def test_hypenet_stand_in() -> None:
    model = hypenet()
    routes = verify(model, find_routes(model, norms=True))
    assert routes.layers == (1, 4)
    assert {route.parameter.split(".")[-2] for route in routes} == {"q_proj", "k_proj", "q_norm", "k_norm"}
    assert {attention.rotary_dim for attention in routes.attention} == {0}
    assert {attention.product_obstacle for attention in routes.attention} == {"queries and keys are normalised"}
    assert verify(model).layers == (1, 4)


def test_jet_nemotron_stand_in() -> None:
    model = jet_nemotron()
    routes = verify(model)
    assert routes.layers == (2,)
    assert {(route.role, route.kind) for route in routes} == {
        ("query", "weight"), ("query", "bias"), ("key", "weight"), ("key", "bias"),
    }  # fmt: skip
    assert routes.geometry(2).rotary_dim == 16
    assert routes.layer_kinds == ("other", "other", "full", "sliding", "other")


def test_names_alone_would_have_been_wrong() -> None:
    """The control: as full attention throughout, the stand-ins' linear layers look just like it."""
    model = hypenet()
    model.config.mixer_types = ["attn"] * 5
    wrong = quiet(model)
    assert wrong.layers == (0, 1, 2, 3, 4)
    with pytest.raises(ValueError, match="no global attention block depends on it"):
        verify(model, wrong)


def test_unknown_type_with_stated_kinds_is_read_by_signature_and_says_so() -> None:
    model = hypenet("somebodys_net", layer_types=["lightning", "attn", "lightning", "lightning", "attn"])
    routes = quiet(model)
    assert routes.layers == (1, 4)
    assert any("not in the table" in note and "routeguard.verify(model)" in note for note in routes.notes)
    assert verify(model).layers == (1, 4)


def test_unknown_type_without_kinds_is_probed_and_says_so() -> None:
    model = hypenet("somebodys_net", tied=False)
    routes = quiet(model)
    assert routes.layers == (1, 4)
    assert any("found by the autograd probe" in note for note in routes.notes)
    assert any("they are not alike" in note for note in routes.notes)
    assert rows_by_name(routes) == rows_by_name(quiet(hypenet()))
    with pytest.raises(ValueError, match="they are not alike"):
        find_routes(model.to("meta"))


class OddlyNamed(SoftmaxAttention):
    """Projections that no table knows."""

    def __init__(self) -> None:
        super().__init__()
        for old, new in (("q_proj", "seek"), ("k_proj", "offer")):
            self.add_module(new, self._modules.pop(old))

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__({"q_proj": "seek", "k_proj": "offer"}.get(name, name))


def test_unknown_names_are_probed_and_zero_events_are_an_error() -> None:
    model = StandInForCausalLM(StandInConfig("somebodys_net", num_hidden_layers=2), [OddlyNamed(), OddlyNamed()])
    routes = quiet(model)
    assert {route.parameter.split(".")[-2] for route in routes} == {"seek", "offer"}
    assert routes.layers == (0, 1)
    silent = StandInForCausalLM(StandInConfig("somebodys_net", num_hidden_layers=1), [nn.GRU(48, 48, batch_first=True)])
    with pytest.raises(ValueError, match=r"no query and key projections.*(?s:.*)no attention call seen"):
        find_routes(silent)


def test_probe_on_request_agrees_with_the_table() -> None:
    for name in ("qwen3_next", "lfm2", "deepseek_v3"):
        table, probed = quiet(build(name), norms=True), quiet(build(name), norms=True, probe=True)
        assert {(r.parameter, r.role, r.rows) for r in probed} == {(r.parameter, r.role, r.rows) for r in table}
        assert probed.layer_kinds == table.layer_kinds or name == "deepseek_v3"
    with pytest.raises(ValueError, match="output"):
        find_routes(build("lfm2"), probe=True, roles=("output",))


# --- verification -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": ((0, 128),)}, r"q_proj.weight query rows 16-31, 48-63.* are not such by the probe"),
        ({"rows": ((0, 16), (32, 48), (64, 80))}, r"q_proj.weight query rows 96-111 are missing"),
        ({"role": "key"}, r"q_proj.weight key rows .* are not such"),
    ],
)
def test_verify_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    model = build("qwen3_next")
    data = quiet(model).to_dict()
    [query] = [route for route in data["routes"] if route["role"] == "query"]
    query.update(change)
    with pytest.raises(ValueError, match=message):
        verify(model, Routes.from_dict(data))


def test_verify_notices_a_layer_that_was_left_out() -> None:
    model = build("lfm2")
    model.config.layer_types[5] = "conv"  # what a wrong table would say
    with pytest.raises(ValueError, match=r"layers\.5\.self_attn.*missing from the routes"):
        verify(model)


def test_verify_accepts_a_narrowed_choice_and_leaves_the_model_alone() -> None:
    model = build("lfm2")
    before = copy.deepcopy(model.state_dict())
    routes = verify(model, quiet(model, layers=[5], roles=("key",)))
    assert routes.layers == (5,)
    assert any("confirmed by the autograd probe" in note for note in routes.notes)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# --- a row of one's own -----------------------------------------------------------------------------------------------


def test_register_architecture_in_one_call() -> None:
    model = StandInForCausalLM(StandInConfig("somebodys_net", num_hidden_layers=2), [OddlyNamed(), OddlyNamed()])
    register_architecture(
        Architecture(
            ("somebodys_net",), kinds=lambda config: ("full", "other"), aliases={"seek": "q_proj", "offer": "k_proj"}
        )
    )
    try:
        routes = find_routes(model)
        assert routes.layers == (0,)
        assert [route.parameter.split(".")[-2] for route in routes] == ["seek", "offer"]
        assert not any("probe" in note or "unverified" in note for note in routes.notes)
    finally:
        unregister_architecture("somebodys_net")
    assert quiet(model).layers == (0, 1)


def test_register_architecture_with_a_layout_function() -> None:
    def queries_only(block: Block) -> Found | None:
        return Found((Piece("q_proj.weight", "query", rows=((0, 8),)),), 4, 2, 16)

    register_architecture(Architecture(("lfm2",), layout=queries_only))
    try:
        routes = find_routes(build("lfm2", device="meta"))
        assert {(route.role, route.rows) for route in routes} == {("query", ((0, 8),))}
    finally:
        unregister_architecture("lfm2")


def test_register_architecture_refuses_what_cannot_work() -> None:
    with pytest.raises(ValueError, match=r"'seperate' does not exist; closest 'separate'"):
        register_architecture(Architecture(("mine",), layout="seperate"))
    with pytest.raises(ValueError, match="at least one model type"):
        register_architecture(Architecture(()))


def test_a_registered_row_replaces_a_built_in_one_and_gives_it_back() -> None:
    before = quiet(build("lfm2", device="meta"))
    register_architecture(Architecture(("lfm2",), kinds=lambda config: ("other",) * 5 + ("full",)))
    try:
        assert quiet(build("lfm2", device="meta")).layers == (5,)
    finally:
        unregister_architecture("lfm2")
    assert quiet(build("lfm2", device="meta")) == before
