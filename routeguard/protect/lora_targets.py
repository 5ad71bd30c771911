"""LoRA on all linear layers but the full-attention queries and keys, as a PEFT config that says exactly that."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from routeguard.protect.adapter_inits import ZERO_B_INITS
from routeguard.protect.lora_coverage import FUSED, Fused, LoraCoverage, check_lora_coverage
from routeguard.protect.lora_modules import KINDS, LinearModule, is_adapter, linear_modules
from routeguard.protect.lora_report import coverage_lines, left_out_lines, quiet_routes, summarise, target_notes
from routeguard.routes.collection import Routes
from routeguard.routes.find import find_routes
from routeguard.routes.names import canonical_name
from routeguard.routes.wording import as_printed

if TYPE_CHECKING:
    from peft import LoraConfig

__all__ = ["ALL_BUT_ROUTING", "LoraCoverage", "LoraTargets", "check_lora_coverage", "lora_config", "lora_targets"]

ALL_BUT_ROUTING = "all-linear but routing"

_DECIDED_HERE = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "layer_replication")


@dataclass(frozen=True)
class LoraTargets:
    """Which modules get an adapter, in the two spellings that PEFT understands.

    Attributes:
        target_modules: one regular expression that fully matches the adapted modules' names and no other module's.
        exclude_modules: likewise for the linear modules left out. Give PEFT both: for some mixture-of-experts model
            types it reduces `target_modules` to last names ("q_proj"), and then only this keeps queries and keys out.
            With `target_modules="all-linear"` it gives the same set, except for those model types (PEFT adds experts).
        modules: the adapted modules.
        left_out: the linear modules that get none, each with its reason.
        notes: what the adapters can still move, and what they do not reach.
    """

    target_modules: str
    exclude_modules: str | None
    modules: tuple[LinearModule, ...]
    left_out: tuple[LinearModule, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        total = len(self.modules) + len(self.left_out)
        lines = [
            f"LoRA targets: {len(self.modules)} of {total} linear modules",
            *coverage_lines(self.modules, self.left_out),
        ]
        lines += [f"  left out: {line}" for line in left_out_lines(self.left_out)]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    _repr_pretty_ = as_printed


def lora_targets(
    model: nn.Module,
    *,
    layers: Iterable[int] | None = None,
    targets: str | Iterable[str] = ALL_BUT_ROUTING,
    fused: Fused = "exclude",
    shared: bool = False,
) -> LoraTargets:
    """Choose the linear modules that LoRA may adapt without moving the queries and keys of full attention.

    Args:
        model: the base model, before PEFT wraps it; any device (meta as well), quantised by bitsandbytes or not.
        layers: hold queries and keys of these full-attention layers only. Default: of all.
        targets: "all-linear but routing" (default), or one or more of the kinds "full", "linear", "ssm", "conv",
            "sliding", "mlp", "experts", "other" to adapt only those; queries and keys stay out in any case.
        fused: a tensor that holds query or key rows beside others (gated q_proj, phi3's qkv_proj, gpt2's c_attn, MLA):
            "exclude" (default) leaves it without adapter; "include" adapts it whole, for use with
            `RouteGuard(protect=Freeze())`, which masks the held rows of lora_B.
        shared: also leave out rows that feed keys and values alike (MLA latents, tied keys and values). Default: no.

    Returns:
        `LoraTargets`, printable; the output head, embeddings, and towers beside the text decoder are never targets.

    Raises:
        ValueError: no full attention, a layer out of range, an unknown kind, nothing left to adapt, or a model that
            already carries adapters.
    """
    if fused not in FUSED:
        raise ValueError(f"fused={fused!r} not understood; choose 'exclude' or 'include'{_nearest(str(fused), FUSED)}")
    kinds = _check_kinds(targets)
    _refuse_adapters(model)
    held_layers = None if layers is None else list(layers)
    held = find_routes(model, layers=held_layers, shared=shared)
    routes = quiet_routes(model, shared=shared)
    modules = linear_modules(model, routes, layers=None if held_layers is None else held.layers)
    renamed = _renamed_by_peft(model)
    modules = tuple(_decide(m, kinds, fused, renamed) for m in modules)
    chosen = tuple(m for m in modules if m.left_out is None)
    left_out = tuple(m for m in modules if m.left_out is not None)
    _refuse_missing_kinds(kinds, modules)
    if not chosen:
        raise ValueError(
            f"nothing to adapt for targets={targets!r}: all {len(modules)} linear modules are left out: "
            + "; ".join(left_out_lines(left_out))
        )
    names = {m.name for m in chosen}
    leaves = {name.rpartition(".")[2] for name in names}
    alike = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in leaves}
    others = alike | {m.name for m in left_out}
    return LoraTargets(
        target_modules=names_to_regex(names),
        exclude_modules=names_to_regex(others - names) or None,
        modules=chosen,
        left_out=left_out,
        notes=target_notes(model, routes, chosen, shared=shared),
    )


def lora_config(
    model: nn.Module,
    *,
    r: int = 16,
    lora_alpha: int | None = None,
    layers: Iterable[int] | None = None,
    targets: str | Iterable[str] = ALL_BUT_ROUTING,
    fused: Fused = "exclude",
    shared: bool = False,
    **lora_kwargs: Any,
) -> LoraConfig:
    """A `peft.LoraConfig` for all linear layers but the queries and keys of full attention.

    Args:
        model: the base model, before PEFT wraps it.
        r: rank, at least 1. Default 16.
        lora_alpha: scale numerator. Default 2 r.
        layers, targets, fused, shared: as for `lora_targets`.
        lora_kwargs: any other `LoraConfig` field (`use_dora`, `use_rslora`, `init_lora_weights="pissa"`, ...).

    Raises:
        ValueError: as for `lora_targets`; an unknown `LoraConfig` field; a field that would move the held queries and
            keys (`bias="all"`, `modules_to_save`, `target_parameters`), or a non-zero initialisation of a fused tensor.
    """
    import peft

    layers = None if layers is None else list(layers)
    _check_options(r, lora_kwargs, [f.name for f in dataclasses.fields(peft.LoraConfig) if f.init])
    chosen = lora_targets(model, layers=layers, targets=targets, fused=fused, shared=shared)
    held = quiet_routes(model, layers=layers, shared=shared)
    _refuse_moving_routes(held, lora_kwargs)
    init = lora_kwargs.get("init_lora_weights", True)
    halves = [m for m in chosen.modules if m.num_routing_rows]
    if halves and init not in ZERO_B_INITS:
        raise ValueError(
            f"init_lora_weights={init!r} starts with a non-zero adapter, which moves the query or key rows of "
            f"{summarise((m.inner, m.layer) for m in halves)} from the first step; use the default "
            "initialisation, or fused='exclude'"
        )
    if hasattr(model, "prepare_inputs_for_generation"):
        lora_kwargs.setdefault("task_type", "CAUSAL_LM")
    linears = dict(model.named_modules())
    if not any(isinstance(linears[m.name], nn.Linear) for m in chosen.modules):
        lora_kwargs.setdefault("fan_in_fan_out", True)  # Conv1D stores its weight transposed
    return peft.LoraConfig(
        r=r,
        lora_alpha=2 * r if lora_alpha is None else lora_alpha,
        target_modules=chosen.target_modules,
        exclude_modules=chosen.exclude_modules,
        **lora_kwargs,
    )


def names_to_regex(names: Iterable[str]) -> str:
    """The shortest-looking expression that fully matches these dotted names and nothing else; "" for no name."""
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for segment in name.split("."):
            node = node.setdefault(segment, {})
        node[""] = {}
    return _tree_to_regex(tree)


def _tree_to_regex(tree: dict[str, Any]) -> str:
    """Segments with the same expression below them share one alternation, so the language is exactly the names."""
    by_rest: dict[str, list[str]] = {}
    for segment, below in sorted(tree.items()):
        if segment:
            by_rest.setdefault(_tree_to_regex(below), []).append(re.escape(segment))
    ways = []
    for rest, segments in by_rest.items():
        head = segments[0] if len(segments) == 1 else f"(?:{'|'.join(segments)})"
        ways.append(head + rest if not rest or rest.startswith(r"(?:\.") else rf"{head}\.{rest}")
    joined = ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})" if ways else ""
    return rf"(?:\.{joined})?" if "" in tree and ways else joined


def _decide(module: LinearModule, kinds: frozenset[str], fused: Fused, renamed: frozenset[str]) -> LinearModule:
    reason = module.left_out
    if reason == "fused" and fused == "include":
        reason = None
    if reason is None and module.name.rpartition(".")[2] in renamed:
        reason = "renamed"
    if reason is None and module.kind not in kinds:
        reason = "kinds"
    return replace(module, left_out=reason)


def _renamed_by_peft(model: nn.Module) -> frozenset[str]:
    """Last names that PEFT moves onto the experts' stacked tensors for this model type, asked of PEFT itself."""
    try:
        from peft import LoraConfig
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:
        return frozenset()
    asked = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
    config = LoraConfig(target_modules=sorted(asked))
    convert_peft_config_for_transformers(config, model=model, conversions=None)
    return frozenset(asked - set(config.target_modules or ()))


def _check_kinds(targets: str | Iterable[str]) -> frozenset[str]:
    if targets == ALL_BUT_ROUTING:
        return frozenset(KINDS)
    asked = [targets] if isinstance(targets, str) else list(targets)
    for kind in asked:
        if kind not in KINDS:
            known = (ALL_BUT_ROUTING, *KINDS)
            raise ValueError(
                f"targets: {kind!r} is not a kind of layer{_nearest(kind, known)}; choose from {', '.join(known)}"
            )
    if not asked:
        raise ValueError(f"targets is empty; choose {ALL_BUT_ROUTING!r} or some of {', '.join(KINDS)}")
    return frozenset(asked)


def _refuse_missing_kinds(kinds: frozenset[str], modules: Iterable[LinearModule]) -> None:
    there = {m.kind for m in modules if m.layer is not None or m.left_out not in ("head", "outside")}
    missing = [kind for kind in KINDS if kind in kinds - there]
    if missing and kinds != frozenset(KINDS):
        raise ValueError(
            f"targets {missing}: the model has no linear module of that kind; it has {[k for k in KINDS if k in there]}"
        )


def _refuse_adapters(model: nn.Module) -> None:
    wrapped = next((name for name, module in model.named_modules() if is_adapter(module)), None)
    if wrapped is not None or hasattr(model, "peft_config"):
        raise ValueError(
            f"the model already carries adapters ({wrapped or type(model).__name__}); choose targets on the base model "
            "before get_peft_model, take the adapters off with model.unload(), or check what is there with "
            "check_lora_coverage(model)"
        )


def _check_options(r: int, options: dict[str, Any], known: list[str]) -> None:
    if r < 1:
        raise ValueError(f"r={r}: the rank must be at least 1")
    for name in options:
        if name in _DECIDED_HERE:
            raise ValueError(
                f"{name} is decided here (layers=, targets=); to set it by hand, build peft.LoraConfig from "
                "lora_targets(model) and verify with check_lora_coverage"
            )
        if name not in known:
            raise ValueError(f"{name!r} is not a LoraConfig field{_nearest(name, known)}")


def _refuse_moving_routes(held: Routes, options: dict[str, Any]) -> None:
    if options.get("bias") == "all" and any(route.kind == "bias" for route in held):
        raise ValueError("bias='all' trains the query and key biases of full attention; use bias='none' or 'lora_only'")
    names = [canonical_name(name) for name in held.parameters]
    for option in ("modules_to_save", "target_parameters"):
        for entry in options.get(option) or ():
            hit = next((name for name in names if _hits(option, entry, name)), None)
            if hit is not None:
                raise ValueError(f"{option} entry {entry!r} would train {hit}, a query or key tensor of full attention")


def _hits(option: str, entry: str, parameter: str) -> bool:
    if option == "target_parameters":
        return f".{parameter}".endswith(f".{entry}")
    return re.match(rf"(^|.*\.){entry}($|\..*)", parameter.rpartition(".")[0]) is not None


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f"; nearest: {close[0]!r}" if close else ""
