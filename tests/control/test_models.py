"""GPU models exist while a node has them, and are limited in number."""

from __future__ import annotations

import msgspec
from tests.control.control_plane import A30, A100, ControlPlane

from slicewise.control.actors import internal
from slicewise.control.commands import AddNode, RemoveNode
from slicewise.control.handler import CommandHandler
from slicewise.control.snapshot import (
    decode_snapshot,
    encode_snapshot,
    restore_snapshot,
    snapshot_of,
)
from slicewise.control.state import State
from slicewise.journal.entries import ModelEntered, ModelForgotten
from slicewise.store.occupancy import Occupancy


def test_a_model_is_removed_with_its_last_node() -> None:
    control = ControlPlane()
    control.node("n0")
    control.node("n1")
    control.node("n2", geometry=A30)
    control.ask(RemoveNode("n0"))
    assert set(control.state.geometries) == {"A100-80GB", "A30-24GB"}
    control.ask(RemoveNode("n1"))
    assert set(control.state.geometries) == {"A30-24GB"}
    assert [g.model for g in control.state.cluster.models] == ["A30-24GB"]
    assert isinstance(control.rows[-1].entry, ModelForgotten)
    control.node("n3", gpus=2)
    kinds = [type(row.entry) for row in control.rows]
    assert kinds.count(ModelEntered) == 3
    assert control.create("7g.80gb", tenant="acme")[0] == 404
    control.tenant()
    assert control.create("7g.80gb")[0] == 201


def test_a_snapshot_without_models_keeps_the_free_gpu_ids() -> None:
    control = ControlPlane()
    control.node("n0", gpus=3)
    control.node("n1", gpus=2)
    control.ask(RemoveNode("n0"))
    control.ask(RemoveNode("n1"))
    snapshot = decode_snapshot(encode_snapshot(snapshot_of(control.state)))
    assert snapshot.geometries == ()
    again = restore_snapshot(snapshot, State())
    assert again.cluster.models == ()
    assert again.cluster.spare_gpus == control.state.cluster.spare_gpus
    assert snapshot_of(again) == snapshot
    assert ControlPlane(state=again).node("n2", gpus=2)["gpus"] == 2


def test_the_limits_on_models_and_states() -> None:
    def add(handler: CommandHandler, node: str, model: str) -> int:
        geometry = msgspec.structs.replace(A30, model=model)
        return handler.decide(AddNode(node, geometry, 1), internal("me"), 0).status

    handler = CommandHandler(State(), lambda letter: letter, max_models=2)
    assert [add(handler, f"n{n}", f"M{n}") for n in range(3)] == [201, 201, 409]
    assert add(handler, "n3", "M1") == 201
    states = len(handler.state.cluster.states) // 2
    handler = CommandHandler(State(), lambda letter: letter, max_states=2 * states)
    assert [add(handler, f"n{n}", f"M{n}") for n in range(3)] == [201, 201, 409]
    assert len(handler.state.nodes) == len(handler.state.geometries) == 2


def test_verify_finds_a_model_that_is_removed_too_early() -> None:
    control = ControlPlane()
    control.node("n0")
    twin = Occupancy()
    assert [problem for row in control.rows for problem in twin.take(row.entry)] == []
    assert twin.take(ModelForgotten(A100.model)) == [
        "the model 'A100-80GB' is forgotten, and node 'n0' has it"
    ]
    assert twin.take(ModelForgotten("T4")) == ["the model 'T4' is forgotten and was not known"]
