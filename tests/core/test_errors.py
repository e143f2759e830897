"""Errors survive pickling between processes."""

from __future__ import annotations

import pickle

from slicewise import GeometryError, SlicewiseError, UnknownNameError


def test_errors_survive_pickling() -> None:
    unknown = pickle.loads(pickle.dumps(UnknownNameError("node", "blu", ["blue"])))
    assert isinstance(unknown, UnknownNameError)
    assert str(unknown) == "unknown node 'blu'; did you mean blue?"
    assert (unknown.kind, unknown.name) == ("node", "blu")
    wrong = pickle.loads(pickle.dumps(GeometryError("size", "is negative")))
    assert isinstance(wrong, GeometryError)
    assert (str(wrong), wrong.field) == ("size: is negative", "size")
    assert pickle.loads(pickle.dumps(SlicewiseError("no", 1))).args == ("no", 1)
