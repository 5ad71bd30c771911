"""The formulas of docs/scale.md: they agree with what real objects hold, and the guard's part stays small at scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import scale
from benchmarks._rank_memory import (
    Engine,
    Shape,
    capture_peak,
    engine_peak,
    log_traffic,
    queue_bytes,
    sidecar_bytes,
    start_bytes,
    start_traffic,
    state_bytes,
    stretches,
)
from benchmarks._scale_models import MODELS, ScaleModel, build_meta, describe, shapes_of
from routeguard import find_routes, freeze
from routeguard.drift.meter import DriftMeter
from routeguard.protect.held import Held, held_parameters
from routeguard.protect.rows import take_rows
from routeguard.restoration.reference import capture_reference
from routeguard.sharding.shard import make_shard
from routeguard.sharding.split import shards_of
from tests.loops import tiny

CASES = ["lfm2", "qwen3_5_text", "phi3", "falcon"]  # whole tensors, rows beside gates, fused, fused by groups
large = cache(describe)


def meter_of(case: str, total: Callable[[Tensor], Tensor] | None = None) -> DriftMeter:
    model = tiny(case)
    routes = find_routes(model)
    held = held_parameters(model, routes)
    starts = {h.name: take_rows(h.parameter.detach(), h.rows, h.dim).clone() for h in held}
    return DriftMeter(model, routes, held, starts, total=total)


@pytest.mark.filterwarnings("ignore:all .* layers")
@pytest.mark.parametrize("case", CASES)
def test_the_objects_hold_what_the_formulas_say(case: str) -> None:
    model = tiny(case)
    routes = find_routes(model)
    shapes = shapes_of(model, routes)
    assert sum(shape.held_numel for shape in shapes) == routes.num_parameters > 0
    assert meter_of(case).start_bytes == start_bytes(shapes, "track", "FSDP2", 1)[0] == 4 * routes.num_parameters
    reference = capture_reference(model, held_parameters(model, routes))
    assert reference.num_bytes == sidecar_bytes(shapes, "FSDP2") == 2 * sidecar_bytes(shapes, "ZeRO-3")
    frozen = freeze(model, routes)
    copies = sum(start.nbytes for start in frozen.start.values())
    assert copies == start_bytes(shapes, "freeze", "FSDP2", 1)[0]
    assert (copies == 0) is (case == "lfm2")


@pytest.mark.filterwarnings("ignore:all .* layers")
def test_a_meter_keeps_at_most_twice_the_start_where_queries_and_keys_alternate() -> None:
    kept = meter_of("gpt_neox").start_bytes
    model = tiny("gpt_neox")
    expected = start_bytes(shapes_of(model, find_routes(model)), "track", "FSDP2", 1)[0]
    assert expected < kept <= 2 * expected


def test_drift_waits_on_the_device_and_is_summed_once_a_log_line() -> None:
    sums: list[int] = []

    def total(tensor: Tensor) -> Tensor:
        sums.append(tensor.nbytes)
        return tensor

    meter = meter_of("lfm2", total)
    cells = len(meter.cells)
    for step in range(5):
        meter.measure(step)
    assert sum(pending.nbytes for pending in meter._pending) == queue_bytes(cells, 5, block=1) == 20 * cells
    meter.read()
    assert sums == [4 * cells, 4 * cells * 5]  # the starts' norms once, then one sum for the five steps
    assert log_traffic(cells, 5, 2) == sums[1]
    assert meter.num_pending == 0


@pytest.mark.parametrize("devices", [2, 3, 8, 100])
@pytest.mark.parametrize("engine", ["FSDP2", "ZeRO-3", "ZeRO-2"])
@pytest.mark.parametrize("case", ["qwen3_5_text", "lfm2"])
def test_every_process_holds_the_part_that_its_shards_hold(case: str, engine: Engine, devices: int) -> None:
    model = tiny(case)
    routes = find_routes(model)
    held = held_parameters(model, routes)
    shapes = [shape for shape in shapes_of(model, routes) if len(shape.shape) > 1]  # one optimizer group
    computed = start_bytes(shapes, "track", engine, devices)
    places = dict(zip((shape.name for shape in shapes), stretches(shapes, engine, devices), strict=True))
    for rank in range(devices):
        parts = [_local(h, engine, devices, rank, *(int(at[rank]) for at in places[h.name])) for h in held]
        assert sum(part.num_elements for part in parts) * 4 == computed[rank]
    assert computed.sum() == 4 * routes.num_parameters


def _local(held: Held, engine: Engine, devices: int, rank: int, begin: int, stop: int) -> Held:
    def rows(tensor: Tensor) -> Tensor:  # what `Shard(0)` does
        pieces = tensor.chunk(devices)
        return pieces[rank] if rank < len(pieces) else tensor[:0]

    cut = rows if engine == "FSDP2" else lambda tensor: tensor.flatten()[begin:stop]
    local = cut(held.parameter.detach())
    return make_shard(
        held, local, shape=held.parameter.shape, dim=0, copies=1, cut=cut, whole_gradient=engine != "FSDP2"
    )


@pytest.fixture
def pretend() -> Iterator[Callable[[int, int], object]]:
    """Be one rank of many: collectives of the "fake" backend do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def begin(rank: int, size: int) -> object:
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        return torch.distributed.init_device_mesh("cpu", (size,))

    yield begin
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize(("rank", "size"), [(0, 8), (33, 64), (40, 65)])
def test_a_rank_of_the_80b_model_under_fully_shard(rank: int, size: int, pretend: Callable[[int, int], object]) -> None:
    """torch's own FSDP2 splits the meta model, and routeguard's own shards are counted."""
    from torch.distributed.fsdp import fully_shard

    mesh = pretend(rank, size)
    model = build_meta("80B-A3B")
    shapes = shapes_of(model, find_routes(model))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    states = sum(parameter.to_local().numel() for parameter in model.parameters()) * 16  # type: ignore[attr-defined]
    assert states == state_bytes(shapes, "track", "FSDP2", size)[rank]
    shards = shards_of(held_parameters(model, find_routes(model)))
    assert shards is not None and len(shards) == 24
    assert sum(shard.num_elements for shard in shards) * 4 == start_bytes(shapes, "track", "FSDP2", size)[rank]


@pytest.mark.parametrize("name", list(MODELS))
def test_the_guard_takes_less_than_a_hundredth_of_the_states(name: str) -> None:
    """For every mode, engine and number of devices: the start and the drift that waits, where a process keeps most."""
    model = large(name)
    shares = [scale.share_of_states(model, *case) for case in _runs(model)]
    assert all(share >= 0 for share in shares) and 0 < max(shares) < 0.01
    if "dense" in name:  # the bound is no formality: a log line every 1000 steps goes over it on 1024 devices
        unread = scale.share_of_states(model, "track", "FSDP2", 1024, steps=1000)
        assert 0.01 < unread < 0.0135


@pytest.mark.parametrize("name", list(MODELS))
def test_even_the_emptiest_process_has_little_beside_its_states(name: str) -> None:
    """FSDP2 cuts experts by number: with more devices than experts some processes have none, and little of anything."""
    model = large(name)
    for mode, engine, devices in _runs(model):
        kept = start_bytes(model.tensors, mode, engine, devices)
        states = state_bytes(model.tensors, mode, engine, devices)
        assert float(np.max(kept / states)) < (0.033 if engine == "FSDP2" else 0.01)
        assert kept.max() < 0.01 * states.max()


@pytest.mark.parametrize("name", list(MODELS))
def test_capturing_the_start_takes_less_than_the_engine_gathers_anyway(name: str) -> None:
    model = large(name)
    peaks = [capture_peak(model.tensors, engine) for engine in scale.engines_for(model)]
    assert 0 < max(peaks) < engine_peak(model.tensors) / 3
    assert max(peaks) < 0.01 * scale.DEVICE_MEMORY


def _runs(model: ScaleModel) -> list[tuple[scale.Mode, Engine, int]]:
    engines = scale.engines_for(model)
    return [(mode, engine, devices) for mode in scale.MODES for engine in engines for devices in scale.DEVICES]


def test_a_model_that_is_mostly_routing_goes_over_the_bound() -> None:
    """The control."""
    tensors = (Shape("q", (1024, 64), None), Shape("mlp", (1024, 64)), Shape("norm", (64,)))
    model = replace(large("80B-A3B"), tensors=tensors)
    assert scale.share_of_states(model, "track", "FSDP2", 8) > 0.1


def test_sizes_are_those_of_their_names() -> None:
    billions = {name: large(name).routes.num_model_parameters / 1e9 for name in MODELS}
    active = {name: large(name).num_active / 1e9 for name in MODELS}
    assert list(billions.values()) == pytest.approx([7.4, 9.0, 79.7, 1026], rel=0.01)
    assert active["80B-A3B"] == pytest.approx(3.9, abs=0.1) and active["1T-A32B"] == pytest.approx(32, abs=0.5)
    assert [large(name).splits_rows for name in MODELS] == [False, True, True, True]


def test_states_by_hand() -> None:
    tensors = [Shape("q", (8, 4), None), Shape("mixed", (8, 4), ((0, 2),)), Shape("rest", (16, 4))]
    assert state_bytes(tensors, "track", "FSDP2", 4).tolist() == [16 * 32] * 4
    assert state_bytes(tensors, "freeze", "FSDP2", 4).tolist() == [16 * 24 + 4 * 8] * 4
    assert state_bytes(tensors, "freeze", "ZeRO-3", 4).tolist() == [16 * 24 + 2 * 8] * 4
    assert state_bytes(tensors, "track", "ZeRO-2", 4).tolist() == [2 * 128 + 14 * 32] * 4
    assert state_bytes(tensors, "track", "ZeRO-1", 4).tolist() == [4 * 128 + 12 * 32] * 4
    assert start_bytes(tensors, "freeze", "FSDP2", 4).tolist() == [4 * 8, 0, 0, 0]
    assert start_bytes(tensors, "track", "ZeRO-1", 4).tolist() == [4 * 32, 4 * 8, 0, 0]
    assert start_bytes(tensors, "anchor", "ZeRO-1", 4).tolist() == [4 * 16, 4 * 16, 4 * 8, 0]  # a group of its own


def test_start_by_hand() -> None:
    tensors = [Shape("q", (8, 4), None), Shape("mixed", (16, 4), ((0, 2),)), Shape("rest", (1000, 4))]
    assert capture_peak(tensors, "FSDP2") == 4 * 64 + 4 * 8
    assert capture_peak(tensors, "ZeRO-3") == 4 * 64 + 2 * 8
    assert capture_peak(tensors, "ZeRO-2") == 2 * 8
    assert start_traffic(tensors, "FSDP2", 4) == 4 * 96 * 3 / 4
    assert start_traffic(tensors, "ZeRO-1", 4) == 0
    assert queue_bytes(16, 10) == 5120 and queue_bytes(200, 1) == 1024


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "MODELS", {"80B-A3B": MODELS["80B-A3B"]})
    scale.main([])
    printed = capsys.readouterr().out
    assert "79.67B parameters, 3.9B met by a token; held 113M (0.14%) in 12 layers" in printed
    assert len([line for line in printed.splitlines() if "FSDP2  " in line]) == 4 and "148.41*" in printed


def test_the_page_shows_what_is_computed(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main(["--markdown"])
    computed = capsys.readouterr().out.splitlines()
    page = (Path(__file__).resolve().parent.parent / "docs" / "scale.md").read_text()
    shown = [line for line in page.splitlines() if line.startswith(tuple(f"| {name} |" for name in MODELS))]
    assert computed[0] in page and len(shown) >= 16
    assert not set(shown) - set(computed)
    assert {line.split(" | ")[0][2:] for line in shown} == set(MODELS)
