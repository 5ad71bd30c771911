"""Every linear module of a model: in which kind of layer it sits, and what speaks against an adapter on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from routeguard.routes.collection import Routes, count_rows
from routeguard.routes.names import canonical_name

KIND_NAMES = {
    "full": "full attention",
    "linear": "linear attention",
    "ssm": "state space",
    "conv": "convolution",
    "sliding": "sliding or chunked attention",
    "mlp": "MLP",
    "experts": "experts",
    "other": "other",
}
KINDS = tuple(KIND_NAMES)

REASONS = {
    "routing": "full-attention queries and keys",
    "fused": "one tensor holds query or key rows and other rows (half of a tensor cannot be excluded; fused='include' "
    "adapts it whole, to be combined with RouteGuard(protect=Freeze()))",
    "bypassed": "the layer's code reads the weight itself, so an adapter has no effect or fails",
    "indexer": "the top-k indexer gets no gradient from the language-model loss",
    "unsupported": "the module's own forward cannot be wrapped by an adapter",
    "renamed": "for this model type PEFT redirects these names to the experts' 3-D tensors, which target_parameters "
    "reaches",
    "head": "output head",
    "outside": "outside the text decoder (vision, audio, projectors)",
    "kinds": "not among the kinds asked for",
}

_TOWER = re.compile(
    r"vision|visual|image|img|audio|speech|acoustic|semantic_tok|encoder|projector|aligner|connector|resampler|perceiver"
    r"|merger|qformer|abstractor|cross_?attn_layers|codec|vqmodel"
)
_ATTENTION = re.compile(r"(attn|attention)(\.|$)", re.IGNORECASE)
_FEED_FORWARD = re.compile(
    r"mlp|feed_?forward|ffn|moe|expert|^ff|^fc|dense_h_to|dense_4h|(up|down|gate|gate_up)_proj|router|^w[123]$"
    r"|^linear_?[12]$|^intermediate$|^output$"
)
_CONVOLUTION = ("conv", "short_conv")
# Mamba-2's fused kernel takes these weights as arguments; Mamba-1 multiplies by dt_proj's weight itself.
_BYPASSED_IN_MAMBA2 = ("out_proj", "conv1d")
_BYPASSED_IN_MAMBA1 = ("dt_proj",)
_BYPASSED = re.compile(r"\.router\.classifier$")  # longcat multiplies by `classifier.weight`
# Subclasses of nn.Linear that return tuples (routers) or regroup their input.
_UNSUPPORTED_CLASS = re.compile(r"Router|Grouped")


@dataclass(frozen=True)
class LinearModule:
    """One linear module (`nn.Linear`, quantised or not, or Conv1D).

    Attributes:
        name: its name in `model.named_modules()`.
        inner: its name inside the decoder layer, or inside the model if it is in no layer.
        kind: one of `KINDS`.
        layer: decoder layer index, None outside the layers.
        left_out: key of `REASONS`, None if it may get an adapter.
        num_rows, num_routing_rows: output features, and how many of them are query or key rows.
    """

    name: str
    inner: str
    kind: str
    layer: int | None
    left_out: str | None
    num_rows: int
    num_routing_rows: int


@dataclass(frozen=True)
class Decoder:
    """Where the text decoder sits: its stacks of layers (canonical name to the index of their first layer)."""

    stacks: Mapping[str, int]
    attention: frozenset[str]
    layer_kinds: tuple[str, ...]

    @property
    def root(self) -> str:
        parents = [stack.split(".")[:-1] for stack in self.stacks]
        shared = []
        for segments in zip(*parents, strict=False):
            if len(set(segments)) > 1:
                break
            shared.append(segments[0])
        return ".".join(shared)

    def locate(self, name: str) -> tuple[int | None, str]:
        """Layer index (None outside the layers) and name inside the layer of a canonical name."""
        for stack, offset in self.stacks.items():
            match = re.match(rf"{re.escape(stack)}\.(\d+)\.(.+)$", name)
            if match is not None:
                return int(match[1]) + offset, match[2]
        return None, name

    def contains(self, name: str) -> bool:
        """Whether a canonical name belongs to the text decoder rather than to a tower beside it."""
        layer, _ = self.locate(name)
        if layer is not None:
            return True
        prefix = f"{self.root}." if self.root else ""
        return name.startswith(prefix) and not _TOWER.search(name.removeprefix(prefix))


def locate_decoder(routes: Routes) -> Decoder:
    """Read off the stacks of decoder layers and the attention modules' place in them."""
    stacks: dict[str, int] = {}
    attention: set[str] = set()
    for geometry in routes.attention:
        segments = canonical_name(geometry.module).split(".")
        numbers = [at for at, segment in enumerate(segments) if segment.isdigit()]
        at = next((at for at in numbers if int(segments[at]) == geometry.layer), numbers[0])
        stacks.setdefault(".".join(segments[:at]), geometry.layer - int(segments[at]))
        attention.add(".".join(segments[at + 1 :]))
    return Decoder(stacks, frozenset(attention), routes.layer_kinds)


def linear_modules(
    model: nn.Module, routes: Routes, *, layers: Iterable[int] | None = None
) -> tuple[LinearModule, ...]:
    """All linear modules of a model (PEFT-wrapped as well) in `named_modules()` order, tied modules at every use.

    Args:
        model: the model, on any device (meta as well).
        routes: `find_routes(model)`, all full-attention layers.
        layers: full-attention layers whose queries and keys are routing. Default: all of them.
    """
    decoder = locate_decoder(routes)
    held = routes if layers is None else routes.select(layers=layers)
    parameters = dict(model.named_parameters())
    routing = {id(parameters[name]): held.rows_of(name) for name in held.parameters if name in parameters}
    heads = {id(base_layer(head)) for head in _output_heads(model)}
    modules = dict(model.named_modules())
    found = []
    for name, module in top_level_modules(modules):
        base = base_layer(module)
        if not is_linear(base):
            continue
        canonical = canonical_name(name)
        layer, inner = decoder.locate(canonical)
        recurrent, bypassed = _recurrent_block(name, modules)
        kind = _kind(inner, layer, decoder, recurrent)
        weight: Any = base.weight
        rows = routing.get(id(weight), ())
        num_rows = int(getattr(base, "out_features", 0) or base.nf)
        num_routing_rows = num_rows if rows is None else count_rows(rows)
        reason = (
            _routing_reason(num_routing_rows, num_rows)
            or ("head" if id(base) in heads else None)
            or (None if decoder.contains(canonical) else "outside")
            or _unreachable(inner, bypassed, base)
        )
        found.append(LinearModule(name, inner, kind, layer, reason, num_rows, num_routing_rows))
    return tuple(found)


def base_layer(module: Any) -> Any:
    """The module under an adapter, or the module itself."""
    return module.get_base_layer() if is_adapter(module) else module


def is_adapter(module: nn.Module) -> bool:
    """Whether a PEFT tuner has wrapped this module."""
    return "base_layer" in module._modules and callable(getattr(module, "get_base_layer", None))


def has_adapters(model: nn.Module) -> bool:
    """Whether an adapter is there, not only its config: PEFT 0.18 leaves that behind when it unloads."""
    return any(is_adapter(module) or hasattr(module, "prompt_encoder") for module in model.modules())


def active_adapters(model: nn.Module) -> set[str]:
    """The names of the adapters that the model's layers apply."""
    layers: list[Any] = [module for module in model.modules() if is_adapter(module)]
    return {name for layer in layers for name in layer.active_adapters}


def is_linear(module: nn.Module) -> bool:
    """`nn.Linear` (bitsandbytes' 4-bit and 8-bit ones are subclasses) or transformers' Conv1D."""
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def top_level_modules(modules: Mapping[str, nn.Module]) -> Iterable[tuple[str, nn.Module]]:
    """Named modules without what lies inside an adapter (its base layer, its A and B)."""
    inside: str | None = None
    for name, module in modules.items():
        if inside is not None and name.startswith(inside):
            continue
        inside = f"{name}." if is_adapter(module) else None
        yield name, module


def expert_tensors(model: nn.Module, routes: Routes) -> tuple[tuple[str, str], ...]:
    """(name, name inside the layer) of the decoder's 3-D parameters outside convolutions: stacked experts."""
    decoder = locate_decoder(routes)
    modules = dict(model.named_modules())
    found = []
    for name, parameter in model.named_parameters():
        owner = modules[name.rpartition(".")[0]]
        layer, inner = decoder.locate(canonical_name(name))
        is_convolution = isinstance(owner, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) or "conv" in inner
        if layer is not None and parameter.ndim == 3 and not is_convolution and ".lora_" not in name:
            found.append((name, inner))
    return tuple(found)


def _routing_reason(num_routing_rows: int, num_rows: int) -> str | None:
    if num_routing_rows == 0:
        return None
    return "routing" if num_routing_rows == num_rows else "fused"


def _unreachable(inner: str, bypassed: Sequence[str], base: nn.Module) -> str | None:
    segments = inner.split(".")
    if "indexer" in segments:
        return "indexer"
    if segments[-1] in bypassed or _BYPASSED.search(f".{inner}"):
        return "bypassed"
    return "unsupported" if _UNSUPPORTED_CLASS.search(type(base).__name__) else None


def _recurrent_block(name: str, modules: Mapping[str, nn.Module]) -> tuple[str | None, tuple[str, ...]]:
    """Kind of the recurrent block around a module, and the names in it that an adapter cannot serve.

    Mamba owns `A_log` and the skip weights `D` (`A_log` has one number a head in Mamba-2, a matrix in Mamba-1); gated
    linear attention owns `A_log` alone.
    """
    while name:
        name = name.rpartition(".")[0]
        owned = modules[name]._parameters
        decay = owned.get("A_log")
        if decay is not None and "D" in owned:
            num_dims = len(getattr(decay, "ds_shape", decay.shape))
            return "ssm", _BYPASSED_IN_MAMBA2 if num_dims == 1 else _BYPASSED_IN_MAMBA1
        if decay is not None:
            return "linear", ()
    return None, ()


def _kind(inner: str, layer: int | None, decoder: Decoder, recurrent: str | None) -> str:
    if layer is None:
        return "other"
    layer_kind = decoder.layer_kinds[layer] if layer < len(decoder.layer_kinds) else "other"
    long_range = layer_kind in ("full", "sparse")
    if long_range and any(place and inner.startswith(f"{place}.") for place in decoder.attention):
        return "full"
    if recurrent is not None:
        return recurrent
    segments = inner.split(".")
    rules: Sequence[tuple[str, Callable[[], bool]]] = (
        ("conv", lambda: any(segment in _CONVOLUTION for segment in segments)),
        ("other", lambda: "cross" in inner),
        ("sliding", lambda: layer_kind in ("sliding", "chunked") and bool(_ATTENTION.search(inner))),
        ("linear", lambda: layer_kind == "other" and bool(_ATTENTION.search(inner))),
        ("full", lambda: long_range and bool(_ATTENTION.search(inner))),
        ("experts", lambda: "experts" in segments),
        ("mlp", lambda: any(_FEED_FORWARD.search(segment) for segment in segments)),
        ("linear", lambda: "mixer" in segments),
        ("full", lambda: long_range and "" in decoder.attention),
    )
    return next((kind for kind, holds in rules if holds()), "other")


def _output_heads(model: nn.Module) -> list[nn.Module]:
    heads = []
    for module in model.modules():
        find = getattr(module, "get_output_embeddings", None)
        if callable(find):
            try:
                head = find()
            except (AttributeError, NotImplementedError):
                continue
            if isinstance(head, nn.Module):
                heads.append(head)
    return heads
