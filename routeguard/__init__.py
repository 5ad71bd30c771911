"""Keep the long-range recall of hybrid LLMs while you fine-tune them.

Importing this package imports nothing heavy and patches nothing: every name below is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name: module that defines it
_EXPORTS = {
    "AttentionLayer": "routeguard.routes.collection",
    "Route": "routeguard.routes.collection",
    "Routes": "routeguard.routes.collection",
    "find_routes": "routeguard.routes.find",
    "verify": "routeguard.routes.verify",
    "Architecture": "routeguard.routes.architecture",
    "register_architecture": "routeguard.routes.table",
    "RouteGuard": "routeguard.training.guard",
    "Freeze": "routeguard.protect.modes",
    "LowLR": "routeguard.protect.modes",
    "Anchor": "routeguard.protect.modes",
    "Track": "routeguard.protect.modes",
    "QKRestore": "routeguard.protect.modes",
    "QKPro": "routeguard.protect.modes",
    "Interpolate": "routeguard.protect.modes",
    "Average": "routeguard.protect.modes",
    "freeze": "routeguard.protect.freeze",
    "low_lr": "routeguard.protect.groups",
    "anchor": "routeguard.protect.anchor",
    "param_groups": "routeguard.protect.groups",
    "track": "routeguard.drift.meter",
    "DriftMeter": "routeguard.drift.meter",
    "lora_config": "routeguard.protect.lora_targets",
    "lora_targets": "routeguard.protect.lora_targets",
    "check_lora_coverage": "routeguard.protect.lora_targets",
    "restore": "routeguard.restoration.in_memory",
    "restored": "routeguard.restoration.in_memory",
    "average": "routeguard.restoration.averaging",
    "averaged": "routeguard.restoration.averaging",
    "read_drift": "routeguard.drift.record",
    "verify_checkpoint": "routeguard.checkpoint.verify",
    "measure_recall": "routeguard.recall.measure",
    "RecallResult": "routeguard.recall.result",
    "gate": "routeguard.recall.gate",
    "RecallProbe": "routeguard.recall.probe",
    "read_recall": "routeguard.recall.probe_record",
    "replay": "routeguard.recall.replay",
    "restore_checkpoint": "routeguard.checkpoint.restore",
    "undo_restore": "routeguard.checkpoint.in_place",
    "average_checkpoint": "routeguard.checkpoint.average",
    "checkpoint_drift": "routeguard.checkpoint.drift",
    "attention_distance": "routeguard.diagnostics.distance",
    "distance_change": "routeguard.diagnostics.distance_change",
    "token_autocorrelation": "routeguard.diagnostics.autocorrelation",
    "gradient_locality": "routeguard.diagnostics.gradient",
    "locality": "routeguard.diagnostics.locality",
    "attention_map": "routeguard.diagnostics.routing_picture",
    "routing_picture": "routeguard.diagnostics.routing_picture",
    "needle_prompt": "routeguard.diagnostics.needle_prompt",
    "layer_importance": "routeguard.diagnostics.importance",
    "head_importance": "routeguard.diagnostics.importance",
    "drift_report": "routeguard.diagnostics.drift_report",
    "StateTransition": "routeguard.state_transition.convert",
    "StateTransitionCache": "routeguard.state_transition.cache",
    "StateTransitionConfig": "routeguard.state_transition.config",
    "StateTransitionTrainer": "routeguard.state_transition.trainer",
    "StepLimit": "routeguard.state_transition.step_limit",
    "add_state_transition": "routeguard.state_transition.convert",
    "add_step_tokens": "routeguard.state_transition.step_marks",
    "cluster_patterns": "routeguard.state_transition.patterns",
    "mark_steps": "routeguard.state_transition.data",
    "segment_steps": "routeguard.state_transition.segment",
    "transition_words": "routeguard.state_transition.entropy",
}
_RENAMED = {"read_recall": "read_probe_record", "verify": "verify_routes", "read_drift": "read_record"}
_NEEDS_NO_LIBRARY = "routeguard.checkpoint."  # folders are read and written without torch and transformers

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from routeguard.checkpoint.average import average_checkpoint
    from routeguard.checkpoint.drift import checkpoint_drift
    from routeguard.checkpoint.in_place import undo_restore
    from routeguard.checkpoint.restore import restore_checkpoint
    from routeguard.checkpoint.verify import verify_checkpoint
    from routeguard.diagnostics.autocorrelation import token_autocorrelation
    from routeguard.diagnostics.distance import attention_distance
    from routeguard.diagnostics.distance_change import distance_change
    from routeguard.diagnostics.drift_report import drift_report
    from routeguard.diagnostics.gradient import gradient_locality
    from routeguard.diagnostics.importance import head_importance, layer_importance
    from routeguard.diagnostics.locality import locality
    from routeguard.diagnostics.needle_prompt import needle_prompt
    from routeguard.diagnostics.routing_picture import attention_map, routing_picture
    from routeguard.drift.meter import DriftMeter, track
    from routeguard.drift.record import read_record as read_drift
    from routeguard.protect.anchor import anchor
    from routeguard.protect.freeze import freeze
    from routeguard.protect.groups import low_lr, param_groups
    from routeguard.protect.lora_targets import check_lora_coverage, lora_config, lora_targets
    from routeguard.protect.modes import Anchor, Average, Freeze, Interpolate, LowLR, QKPro, QKRestore, Track
    from routeguard.recall.gate import gate
    from routeguard.recall.measure import measure_recall
    from routeguard.recall.probe import RecallProbe
    from routeguard.recall.probe_record import read_probe_record as read_recall
    from routeguard.recall.replay import replay
    from routeguard.recall.result import RecallResult
    from routeguard.restoration.averaging import average, averaged
    from routeguard.restoration.in_memory import restore, restored
    from routeguard.routes.architecture import Architecture
    from routeguard.routes.collection import AttentionLayer, Route, Routes
    from routeguard.routes.find import find_routes
    from routeguard.routes.table import register_architecture
    from routeguard.routes.verify import verify_routes as verify
    from routeguard.state_transition.cache import StateTransitionCache
    from routeguard.state_transition.config import StateTransitionConfig
    from routeguard.state_transition.convert import StateTransition, add_state_transition
    from routeguard.state_transition.data import mark_steps
    from routeguard.state_transition.entropy import transition_words
    from routeguard.state_transition.patterns import cluster_patterns
    from routeguard.state_transition.segment import segment_steps
    from routeguard.state_transition.step_limit import StepLimit
    from routeguard.state_transition.step_marks import add_step_tokens
    from routeguard.state_transition.trainer import StateTransitionTrainer
    from routeguard.training.guard import RouteGuard


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'routeguard' has no attribute {name!r}; it has {', '.join(_EXPORTS)}")
    if not _EXPORTS[name].startswith(_NEEDS_NO_LIBRARY):
        import_module("routeguard.versions").check_versions()
    value = getattr(import_module(_EXPORTS[name]), _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
