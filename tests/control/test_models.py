"""GPU models are known while a node has them, and there are only so many."""

from __future__ import annotations

import msgspec
from tests.control.office import A30, A100, Office

from slicewise.control.actors import internal
from slicewise.control.commands import AddNode, RemoveNode
from slicewise.control.desk import Desk
from slicewise.control.entries import ModelEntered, ModelForgotten
from slicewise.control.image import decode, encode, image_of, restore
from slicewise.control.state import State
from slicewise.store.occupancy import Occupancy


def test_a_model_is_forgotten_with_its_last_node() -> None:
    office = Office()
    office.node("n0")
    office.node("n1")
    office.node("n2", geometry=A30)
    office.ask(RemoveNode("n0"))
    assert set(office.state.geometries) == {"A100-80GB", "A30-24GB"}
    office.ask(RemoveNode("n1"))
    assert set(office.state.geometries) == {"A30-24GB"}
    assert [g.model for g in office.state.cluster.models] == ["A30-24GB"]
    assert isinstance(office.rows[-1].entry, ModelForgotten)
    office.node("n3", gpus=2)
    kinds = [type(row.entry) for row in office.rows]
    assert kinds.count(ModelEntered) == 3
    assert office.create("7g.80gb", tenant="acme")[0] == 404
    office.tenant()
    assert office.create("7g.80gb")[0] == 201


def test_an_image_without_models_still_knows_which_gpu_ids_are_spare() -> None:
    office = Office()
    office.node("n0", gpus=3)
    office.node("n1", gpus=2)
    office.ask(RemoveNode("n0"))
    office.ask(RemoveNode("n1"))
    image = decode(encode(image_of(office.state)))
    assert image.geometries == ()
    again = restore(image, State())
    assert again.cluster.models == ()
    assert again.cluster.spare_gpus == office.state.cluster.spare_gpus
    assert image_of(again) == image
    assert Office(state=again).node("n2", gpus=2)["gpus"] == 2


def test_there_are_only_so_many_models_and_states() -> None:
    def add(desk: Desk, node: str, model: str) -> int:
        geometry = msgspec.structs.replace(A30, model=model)
        return desk.decide(AddNode(node, geometry, 1), internal("me"), 0).status

    desk = Desk(State(), lambda letter: letter, most_models=2)
    assert [add(desk, f"n{n}", f"M{n}") for n in range(3)] == [201, 201, 409]
    assert add(desk, "n3", "M1") == 201
    states = len(desk.state.cluster.states) // 2
    desk = Desk(State(), lambda letter: letter, most_states=2 * states)
    assert [add(desk, f"n{n}", f"M{n}") for n in range(3)] == [201, 201, 409]
    assert len(desk.state.nodes) == len(desk.state.geometries) == 2


def test_verify_sees_a_model_that_is_forgotten_too_early() -> None:
    office = Office()
    office.node("n0")
    twin = Occupancy()
    assert [problem for row in office.rows for problem in twin.take(row.entry)] == []
    assert twin.take(ModelForgotten(A100.model)) == [
        "the model 'A100-80GB' is forgotten, and node 'n0' has it"
    ]
    assert twin.take(ModelForgotten("T4")) == ["the model 'T4' is forgotten and was not known"]
