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
    "L2SP": "routeguard.protect.modes",
    "Track": "routeguard.protect.modes",
    "QKRestore": "routeguard.protect.modes",
    "QKPro": "routeguard.protect.modes",
    "Interpolate": "routeguard.protect.modes",
    "Average": "routeguard.protect.modes",
    "freeze": "routeguard.protect.freeze",
    "low_lr": "routeguard.protect.groups",
    "anchor": "routeguard.protect.anchor",
    "l2_sp": "routeguard.protect.l2_sp",
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
_NEEDS_NO_LIBRARY = "routeguard.checkpoint."  # folders are read and written without torch and transformers

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:  # `as` the same name: strict type checkers take only such names for exported
    from routeguard.checkpoint.average import average_checkpoint as average_checkpoint
    from routeguard.checkpoint.drift import checkpoint_drift as checkpoint_drift
    from routeguard.checkpoint.in_place import undo_restore as undo_restore
    from routeguard.checkpoint.restore import restore_checkpoint as restore_checkpoint
    from routeguard.checkpoint.verify import verify_checkpoint as verify_checkpoint
    from routeguard.diagnostics.autocorrelation import token_autocorrelation as token_autocorrelation
    from routeguard.diagnostics.distance import attention_distance as attention_distance
    from routeguard.diagnostics.distance_change import distance_change as distance_change
    from routeguard.diagnostics.drift_report import drift_report as drift_report
    from routeguard.diagnostics.gradient import gradient_locality as gradient_locality
    from routeguard.diagnostics.importance import head_importance as head_importance
    from routeguard.diagnostics.importance import layer_importance as layer_importance
    from routeguard.diagnostics.locality import locality as locality
    from routeguard.diagnostics.needle_prompt import needle_prompt as needle_prompt
    from routeguard.diagnostics.routing_picture import attention_map as attention_map
    from routeguard.diagnostics.routing_picture import routing_picture as routing_picture
    from routeguard.drift.meter import DriftMeter as DriftMeter
    from routeguard.drift.meter import track as track
    from routeguard.drift.record import read_drift as read_drift
    from routeguard.protect.anchor import anchor as anchor
    from routeguard.protect.freeze import freeze as freeze
    from routeguard.protect.groups import low_lr as low_lr
    from routeguard.protect.groups import param_groups as param_groups
    from routeguard.protect.l2_sp import l2_sp as l2_sp
    from routeguard.protect.lora_targets import check_lora_coverage as check_lora_coverage
    from routeguard.protect.lora_targets import lora_config as lora_config
    from routeguard.protect.lora_targets import lora_targets as lora_targets
    from routeguard.protect.modes import L2SP as L2SP
    from routeguard.protect.modes import Anchor as Anchor
    from routeguard.protect.modes import Average as Average
    from routeguard.protect.modes import Freeze as Freeze
    from routeguard.protect.modes import Interpolate as Interpolate
    from routeguard.protect.modes import LowLR as LowLR
    from routeguard.protect.modes import QKPro as QKPro
    from routeguard.protect.modes import QKRestore as QKRestore
    from routeguard.protect.modes import Track as Track
    from routeguard.recall.gate import gate as gate
    from routeguard.recall.measure import measure_recall as measure_recall
    from routeguard.recall.probe import RecallProbe as RecallProbe
    from routeguard.recall.probe_record import read_recall as read_recall
    from routeguard.recall.replay import replay as replay
    from routeguard.recall.result import RecallResult as RecallResult
    from routeguard.restoration.averaging import average as average
    from routeguard.restoration.averaging import averaged as averaged
    from routeguard.restoration.in_memory import restore as restore
    from routeguard.restoration.in_memory import restored as restored
    from routeguard.routes.architecture import Architecture as Architecture
    from routeguard.routes.collection import AttentionLayer as AttentionLayer
    from routeguard.routes.collection import Route as Route
    from routeguard.routes.collection import Routes as Routes
    from routeguard.routes.find import find_routes as find_routes
    from routeguard.routes.table import register_architecture as register_architecture
    from routeguard.routes.verify import verify as verify
    from routeguard.state_transition.cache import StateTransitionCache as StateTransitionCache
    from routeguard.state_transition.config import StateTransitionConfig as StateTransitionConfig
    from routeguard.state_transition.convert import StateTransition as StateTransition
    from routeguard.state_transition.convert import add_state_transition as add_state_transition
    from routeguard.state_transition.data import mark_steps as mark_steps
    from routeguard.state_transition.entropy import transition_words as transition_words
    from routeguard.state_transition.patterns import cluster_patterns as cluster_patterns
    from routeguard.state_transition.segment import segment_steps as segment_steps
    from routeguard.state_transition.step_limit import StepLimit as StepLimit
    from routeguard.state_transition.step_marks import add_step_tokens as add_step_tokens
    from routeguard.state_transition.trainer import StateTransitionTrainer as StateTransitionTrainer
    from routeguard.training.guard import RouteGuard as RouteGuard


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'routeguard' has no attribute {name!r}; it has {', '.join(_EXPORTS)}")
    if not _EXPORTS[name].startswith(_NEEDS_NO_LIBRARY):
        import_module("routeguard.versions").check_versions()
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
