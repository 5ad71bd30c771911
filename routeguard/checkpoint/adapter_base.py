"""Whether a checkpoint has the modules that a PEFT adapter acts on. No torch.

Checkpoints may store a module under another name than the model has in memory, by which adapters call it. That is
passed over for experts, feed-forward, linear attention, gates and indexers, and refused for queries and keys: an
adapter on them would be taken for one that leaves them alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from routeguard.checkpoint.start import Start
from routeguard.routes.collection import Route
from routeguard.routes.wording import first_of
from routeguard.storage.header import StoredTensor

PART = re.compile(
    r"\.(?P<part>lora_A|lora_B|lora_magnitude_vector)"
    r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?(?P<tail>\.weight|\.bias)?$"
)
IN_LAYER = re.compile(
    r"^(?P<prefix>(?:.*?\.)?)"
    r"(?P<tail>(?:layers|h|blocks|block|layer|decoder_layers)\.(?P<index>\d+)\.(?P<inner>.+))$"
)
_ATTENTION = re.compile(r"(attn|attention)\.", re.IGNORECASE)
_QUERY_OR_KEY = re.compile(r"(^|_)w?(q|k|qk|kv|qkv|query|key)(_|$)|c_attn", re.IGNORECASE)
_BESIDE = re.compile(r"(^|\.)(indexer|compressor)\.|gate_proj")  # in attention, and neither queries nor keys


def refuse_other_base(stored: Mapping[str, StoredTensor], start: Start, routes: Sequence[Route]) -> None:
    """Raise ValueError unless the base has the modules that an adapter acts on in the decoder, in their shapes.

    Args:
        stored: the adapter's tensors under the prefix of the base.
        start: a checkpoint.
        routes: those of the base that matter.
    """
    base = _Base(start, routes)
    matches = {name: match for name in stored if (match := IN_LAYER.match(name)) and match["prefix"] in base.prefixes}
    reasons = {name: base.reason(name, stored[name], match) for name, match in matches.items()}
    wrong = {name: reason for name, reason in reasons.items() if reason}
    free = [name for name in matches if not base.is_expert(name)]
    if not wrong and not any(base.has(name) for name in free):
        wrong = dict.fromkeys(free, "it has none of the adapter's modules")
    if wrong:
        shown = [f"{stored[n].name} {list(stored[n].shape)} acts on {_module(n)}, and {r}" for n, r in wrong.items()]
        raise ValueError(
            f"{start.origin} is not the base of this adapter: {first_of(shown)}. Give the checkpoint that the adapter "
            "was trained on; if it is that one, and stores these modules under other names than the model has in "
            "memory, merge the adapter (merge_and_unload) and use the merged model"
        )


class _Base:
    """The modules of a checkpoint, and where its queries and keys lie."""

    def __init__(self, start: Start, routes: Sequence[Route]) -> None:
        self.tensors = start.tensors
        weights = [route.parameter.split(".") for route in routes if route.kind == "weight"]
        self.routed = {last for segments in weights for last in segments[-2:-1]}
        self.attention = {parent for segments in weights for parent in segments[-3:-2]}
        found = [match for route in routes if (match := IN_LAYER.match(route.parameter))]
        self.prefixes = {match["prefix"] for match in found}
        self.routed_layers = {_layer(match) for match in found}
        self.tied_layers = {str(layer) for route in routes for layer in route.tied_layers}
        self.modules: set[str] = set()
        self.segments: dict[str, set[str]] = {}  # by layer
        for name in self.tensors:
            segments = name.split(".")
            self.modules.update(".".join(segments[:depth]) for depth in range(1, len(segments)))
            match = IN_LAYER.match(name)
            if match is not None:
                self.segments.setdefault(_layer(match), set()).update(segments)

    def has(self, name: str) -> bool:
        """Whether the module that an adapter's tensor acts on is there under this name."""
        return _module(name) in self.modules

    def is_expert(self, name: str) -> bool:
        return "experts" in name.split(".")

    def reason(self, name: str, tensor: StoredTensor, match: re.Match[str]) -> str:
        """Why an adapter's tensor cannot be one for this base, or ""."""
        module, layer = _module(name), _layer(match)
        part, weight = PART.search(name), self.tensors.get(f"{module}.weight")
        if part is not None and weight is not None:
            size = tensor.shape[-1 if part["part"] == "lora_A" else 0]
            return "" if size in weight.shape else f"there its shape is {list(weight.shape)}"
        if layer not in self.segments:
            return "it has no such layer"
        elsewhere = self.is_expert(name) or match["index"] in self.tied_layers or _BESIDE.search(match["inner"])
        if elsewhere or module in self.modules:
            return ""
        parent, _, last = module.rpartition(".")
        if last in self.routed:
            return "it has no such weight"
        if layer not in self.routed_layers or last in self.segments[layer]:
            return ""
        in_attention = _ATTENTION.search(match["inner"]) or parent.rpartition(".")[2] in self.attention
        if in_attention and (parent not in self.modules or _QUERY_OR_KEY.search(last)):
            return "it has no such module"
        return ""


def _layer(match: re.Match[str]) -> str:
    return match[0].removesuffix(match["inner"])


def _module(name: str) -> str:
    """The module that a tensor of an adapter acts on, or is a whole copy of."""
    part = PART.search(name)
    return name[: part.start()] if part else name.rpartition(".")[0]
