"""Who may import whom: the floors of the house, and what each room may take from outside.

Knows the rooms by their dotted names. Dependencies point down only:

    decoder.__main__ > front | engine > models > attention > kv > kernels | contract | settings | metrics
    kvstore > contract
    command.plan > engine, and all below it; the other commands > contract | decoder.settings
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tests.house.source_tree import Module, packages_of, reachable

_DECODER = "services.decoder"

MAY_IMPORT: Mapping[str, tuple[str, ...]] = {
    "services": (),
    "services.contract": (),
    "services.kvstore": ("services.contract",),
    _DECODER: (),
    f"{_DECODER}.settings": ("services.contract",),
    f"{_DECODER}.metrics": ("services.contract",),
    f"{_DECODER}.kernels": ("services.contract",),
}
"""Room -> rooms it may import beside itself. The decoder's upper floors are stacked on this below."""


def _stack() -> dict[str, tuple[str, ...]]:
    rooms = dict(MAY_IMPORT)
    below = ("services.contract", *(f"{_DECODER}.{room}" for room in ("settings", "metrics", "kernels")))
    for floor in (("kv",), ("attention",), ("models",), ("front", "engine"), ("__main__",)):
        names = tuple(f"{_DECODER}.{room}" for room in floor)
        rooms |= dict.fromkeys(names, below)
        below += names
    # What a plan counts is what the engine counts. The other commands meet services on the wire.
    engine = f"{_DECODER}.engine"
    rooms["services.command.plan"] = (*rooms[engine], engine)
    rooms["services.command"] = ("services.contract", f"{_DECODER}.settings", "services.command.plan")
    return rooms


ROOMS: Mapping[str, tuple[str, ...]] = _stack()

WITHOUT_TORCH = (
    "services.contract",
    "services.kvstore",
    f"{_DECODER}.front",
    f"{_DECODER}.settings",
    f"{_DECODER}.metrics",
    f"{_DECODER}.engine.scheduler",
    *(f"services.command.{name}" for name in ("serve", "store", "chat", "bench", "doctor", "server")),
)
"""Rooms and files that never reach torch or transformers: not through others, not lazily."""

HEAVY = ("torch", "transformers")

OUTSIDE_KERNELS = ("grpc", "hotset", "transformers", "pydantic", "fastapi")
"""Kernels see tensors and ints: no wire, no settings, no model code."""


ONLY_IN: Mapping[str, str] = {
    "ucxx": "services.contract.transport.ucx_library",
    "nixl_cu13": "services.contract.transport.nixl_library",
    "xxhash": "services.contract.transport.checksum",
    "zmq": "services.kvstore.event_publisher",
    "msgspec": "services.kvstore.event_publisher",
}
"""Optional packages -> the one file that imports them, and only when it is asked to."""


def floor_violations(tree: Mapping[str, Module]) -> list[str]:
    """Every breach of the floors, as a line for people; empty when the house stands."""
    checks = (_unknown_rooms, _upward, _surprises, _heavy, _kernels, _optional, _circles)
    return [line for check in checks for line in check(tree)]


def room_of(name: str) -> str | None:
    """The room a module lies in: the longest room name that begins its own."""
    fitting = [room for room in ROOMS if name == room or name.startswith(room + ".")]
    room = max(fitting, key=len, default=None)
    # A file directly in `services` or `services.decoder` belongs to no floor unless it is named above.
    return None if room in ("services", _DECODER) and name != room else room


def _within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


def _unknown_rooms(tree: Mapping[str, Module]) -> Iterator[str]:
    for module in tree.values():
        if room_of(module.name) is None:
            yield f"{module.path}: lies in no room; give it one in tests/house/floors.py"


def _upward(tree: Mapping[str, Module]) -> Iterator[str]:
    for module in tree.values():
        room = room_of(module.name)
        if room is None:
            continue
        for part in module.imports:
            target = room_of(part.name) if part.name.split(".")[0] == "services" else room
            if target not in (room, *ROOMS[room]):
                below = ", ".join(ROOMS[room]) or "nothing of services"
                yield f"{module.path}:{part.line}: imports {part.name}; {room} may import {below}"


def _surprises(tree: Mapping[str, Module]) -> Iterator[str]:
    for module in tree.values():
        for part in module.imports:
            top = part.name.split(".")[0]
            if part.name.startswith("."):
                yield f"{module.path}:{part.line}: relative import; write the full name"
            elif top == "services" and part.name not in tree:
                yield f"{module.path}:{part.line}: imports {part.name}, which the tree does not have"
            elif top in ("tests", "benchmarks", "deploy"):
                yield f"{module.path}:{part.line}: imports {part.name}; services stand without it"


def _heavy(tree: Mapping[str, Module]) -> Iterator[str]:
    for name, module in tree.items():
        if not any(_within(name, room) for room in WITHOUT_TORCH):
            continue
        for target, way in reachable(tree, name).items():
            if target.split(".")[0] in HEAVY:
                yield f"{module.path}: reaches {target.split('.')[0]} through {' > '.join(way)}"


def _kernels(tree: Mapping[str, Module]) -> Iterator[str]:
    for module in tree.values():
        if room_of(module.name) == f"{_DECODER}.kernels":
            for part in module.imports:
                if part.name.split(".")[0] in OUTSIDE_KERNELS:
                    yield f"{module.path}:{part.line}: imports {part.name}; kernels see tensors and ints"


def _optional(tree: Mapping[str, Module]) -> Iterator[str]:
    for module in tree.values():
        for part in module.imports:
            top = part.name.split(".")[0]
            if top in ONLY_IN and (part.at_start or module.name != ONLY_IN[top]):
                only = f"only {ONLY_IN[top]} may, inside a function"
                yield f"{module.path}:{part.line}: imports {part.name}; {only}"


def _circles(tree: Mapping[str, Module]) -> Iterator[str]:
    """Modules that need each other at import time; which of them is imported first then matters."""
    state: dict[str, bool] = {}  # False while on the present way, True when done

    def visit(name: str, way: tuple[str, ...]) -> Iterator[str]:
        state[name] = False
        for part in tree[name].imports:
            if not part.at_start or part.name not in tree or part.name in packages_of(name):
                continue
            if part.name not in state:
                yield from visit(part.name, (*way, part.name))
            elif not state[part.name]:
                yield f"circle: {' > '.join((*way[way.index(part.name) :], part.name))}"
        state[name] = True

    for name in tree:
        if name not in state:
            yield from visit(name, (name,))
