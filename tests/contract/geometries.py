"""Planes for tests: hypothesis strategies of every legal shape, small enough to lay out."""

from __future__ import annotations

from hypothesis import strategies as st

from services.contract.planes import Plane, PlaneLayer

LAYERS = st.builds(
    PlaneLayer,
    groups=st.integers(0, 4),
    entries=st.integers(0, 6),
    entry_bytes=st.integers(0, 80).map(lambda count: count * 16),
)


@st.composite
def planes(draw: st.DrawFn) -> tuple[Plane, ...]:
    """kv, and perhaps index and aux, in any order, over 1 to 8 layers; kv keeps something."""
    count = draw(st.integers(1, 8))
    names = draw(st.permutations(["kv", *draw(st.sets(st.sampled_from(["index", "aux"])))]))
    made = {name: draw(st.lists(LAYERS, min_size=count, max_size=count)) for name in names}
    made["kv"][draw(st.integers(0, count - 1))] = PlaneLayer(
        draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 80)) * 16
    )
    return tuple(Plane(name, tuple(layers)) for name, layers in made.items())
