from __future__ import annotations

import pytest
from hotset.v1 import kvstore_pb2 as pb
from hypothesis import given

from services.contract.errors import InvalidRequest
from services.contract.planes import Plane, PlaneLayer, check_planes, planes_from_wire, planes_to_wire
from tests.contract.geometries import planes

KV = Plane("kv", (PlaneLayer(1, 4, 16),))


@given(planes())
def test_the_wire_changes_nothing(shape: tuple[Plane, ...]) -> None:
    sent = pb.AttachRequest(planes=planes_to_wire(shape)).SerializeToString()
    assert planes_from_wire(pb.AttachRequest.FromString(sent).planes) == shape


REFUSED = {
    "none": ((), "planes must be kv"),
    "no kv": ((Plane("index", KV.layers),), "planes must be kv"),
    "kv twice": ((KV, KV), "planes must be kv"),
    "unknown name": ((KV, Plane("weights", KV.layers)), "planes must be kv"),
    "layer counts differ": ((KV, Plane("index", KV.layers * 2)), "same number of layers"),
    "no layers": ((Plane("kv", ()),), "keeps no bytes"),
    "all empty": ((Plane("kv", (PlaneLayer(0, 0, 0),)),), "keeps no bytes"),
    "17 bytes": ((Plane("kv", (PlaneLayer(1, 1, 17),)),), "multiple of 16"),
    "negative": ((Plane("kv", (PlaneLayer(-1, 1, 16),)),), "must not be negative"),
}


@pytest.mark.parametrize(("shape", "message"), REFUSED.values(), ids=REFUSED)
def test_impossible_planes(shape: tuple[Plane, ...], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_planes(shape)
