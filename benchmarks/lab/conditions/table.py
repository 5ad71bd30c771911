"""Every condition of the lab by name. Conditions with the same training share one run."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.lab.conditions.repair import NO_REPAIR, QK_RESTORE, Repair
from benchmarks.lab.language.needles import TESTED
from benchmarks.lab.training.plan import Lora, Training
from routeguard.protect.modes import L2SP, Anchor, Freeze, Interpolate, LowLR, QKPro, QKRestore

NONE, QK = "none", "qk_restore"
BEFORE = "before"  # the pretrained model, scored once a seed


@dataclass(frozen=True)
class Condition:
    """One line of a table.

    Attributes:
        name: unique; `A+restore` is condition A with queries and keys restored at the end.
        training: the run.
        repair: what is done after it.
    """

    name: str
    training: Training
    repair: Repair = NO_REPAIR

    def settings(self) -> dict[str, Any]:
        """Training and repair as JSON."""
        return {"training": self.training.settings(), "repair": self.repair.settings()}


def _afterwards() -> Iterator[Condition]:
    """Repairs of the plain run."""
    plain = Training()
    yield Condition(NONE, plain)
    yield Condition(QK, plain, QK_RESTORE)
    yield Condition("q_restore", plain, Repair(QKRestore(), ("query",)))
    yield Condition("k_restore", plain, Repair(QKRestore(), ("key",)))
    yield Condition("v_restore", plain, Repair(QKRestore(), ("value",)))
    yield Condition("qkvo_restore", plain, Repair(QKRestore(), ("query", "key", "value", "output")))
    for ridge in (0.01, 0.1, 1.0, 10.0):
        yield Condition(f"qk_pro_{ridge:g}", plain, Repair(QKPro(ridge)))
    for alpha in (0.25, 0.5, 0.75):
        yield Condition(f"interpolate_{alpha:g}", plain, Repair(Interpolate(alpha)))
    for share in (0.1, 0.25, 0.5):
        yield Condition(f"wise_ft_{share:g}", plain, Repair(average=share))
        yield Condition(f"wise_ft_{share:g}+restore", plain, Repair(QKRestore(), average=share))
    for heads in (1, 2, 4):
        yield Condition(f"heads_{heads}_restore", plain, Repair(QKRestore(), heads=heads))


def _runs() -> Iterator[tuple[str, Training, bool]]:
    """(name, training, whether it is also restored at the end)."""
    yield "freeze", Training(protect=Freeze()), False
    for scale in (0.03, 0.1, 0.3):
        yield f"low_lr_{scale:g}", Training(protect=LowLR(scale)), True
    for strength in (10.0, 30.0, 100.0, 300.0):
        yield f"anchor_{strength:g}", Training(protect=Anchor(strength)), True
    for share in (0.5, 0.8, 0.9):
        yield f"settle_{share:g}", Training(settle_at=share), False
    for radius in (0.02, 0.05, 0.1, 0.2):
        yield f"trust_{radius:g}", Training(trust_radius=radius), True
    for scale in (3.0, 6.0):
        yield f"sacrifice_{scale:g}", Training(routing_rate=scale), True
    for total in (0.3, 0.9, 3.0):
        yield f"l2_sp_{total:g}", Training(protect=L2SP(total)), True
        yield f"l2_sp_{total:g}+replay_5", Training(protect=L2SP(total), replay=0.05), True
    for percent in (0.5, 1.0, 2.0, 5.0, 10.0):
        share = percent / 100
        yield f"replay_{percent:g}", Training(replay=share), True
        yield f"freeze+replay_{percent:g}", Training(protect=Freeze(), replay=share), False
    for percent in (2.0, 5.0, 10.0):
        share = percent / 100
        yield f"anchor_100+replay_{percent:g}", Training(protect=Anchor(100.0), replay=share), True
        yield f"settle_0.8+replay_{percent:g}", Training(settle_at=0.8, replay=share), False
        yield f"trust_0.1+replay_{percent:g}", Training(trust_radius=0.1, replay=share), True
        yield f"sacrifice_3+replay_{percent:g}", Training(routing_rate=3.0, replay=share), True
        yield f"half_rate+replay_{percent:g}", Training(rate=0.5, replay=share), True
    yield "replay_2_tested_kind", Training(replay=0.02, replayed=(TESTED.name,)), True
    for name, scale in (("half_rate", 0.5), ("quarter_rate", 0.25)):
        yield name, Training(rate=scale), True
    for name, share in (("half_steps", 0.5), ("quarter_steps", 0.25)):
        yield name, Training(steps=share), True
    yield "long_texts", Training(words=190), True
    for rate in (1.0, 4.0):
        yield f"lora_x{rate:g}", Training(lora="all", rate=rate), True
        yield f"lora_without_qk_x{rate:g}", Training(lora="without_qk", rate=rate), False
    adapters: dict[str, Lora] = {"lora_x4": "all", "lora_without_qk_x4": "without_qk"}
    for name, lora in adapters.items():
        plain = Training(lora=lora, rate=4.0)
        for total in (0.9, 3.0):
            yield f"{name}+l2_sp_{total:g}", replace(plain, protect=L2SP(total)), False
        yield f"{name}+replay_5", replace(plain, replay=0.05), False
        yield f"{name}+l2_sp_0.9+replay_5", replace(plain, protect=L2SP(0.9), replay=0.05), False


def _all() -> Iterator[Condition]:
    yield from _afterwards()
    for name, training, restorable in _runs():
        yield Condition(name, training)
        if restorable:
            yield Condition(f"{name}+restore", training, QK_RESTORE)
        if training.replay or training.lora or isinstance(training.protect, L2SP):
            for share in (0.1, 0.25):
                yield Condition(f"{name}+wise_ft_{share:g}", training, Repair(average=share))
        if training.replay and restorable:
            yield Condition(f"{name}+interpolate_0.5", training, Repair(Interpolate(0.5)))
            yield Condition(f"{name}+wise_ft_0.1+restore", training, replace(QK_RESTORE, average=0.1))


CONDITIONS = {condition.name: condition for condition in _all()}


def find_conditions(names: Iterable[str]) -> tuple[Condition, ...]:
    """Conditions by name; a name that ends in `*` stands for all that begin so.

    Raises ValueError for a name that matches nothing, with the nearest.
    """
    found: dict[str, Condition] = {}
    for name in names:
        matching = [n for n in CONDITIONS if n == name or (name.endswith("*") and n.startswith(name[:-1]))]
        if not matching:
            close = difflib.get_close_matches(name, CONDITIONS, n=1)
            raise ValueError(f"no condition {name!r}; closest {close[0] if close else 'none'}")
        found |= {n: CONDITIONS[n] for n in matching}
    return tuple(found.values())


def by_run(conditions: Sequence[Condition]) -> dict[Training, list[Condition]]:
    """Conditions grouped by the run they need, in order."""
    groups: dict[Training, list[Condition]] = {}
    for condition in conditions:
        groups.setdefault(condition.training, []).append(condition)
    return groups
