"""The dashboard *Hot buffer*: hits, what misses cost, what more room would bring.

Knows the engine's metrics (docs/metrics.md).
"""

from __future__ import annotations

from deploy.grafana.board import (
    DECODER_INSTANCE,
    EACH,
    ENGINE,
    ENGINES,
    Board,
    Panel,
    Query,
    Section,
    Variable,
    rate,
    ratio,
)

_HITS, _CHOSEN = "hotset_hot_buffer_hits_total", "hotset_hot_buffer_chosen_total"
_MISSES, _BYTES = "hotset_hot_buffer_misses_total", "hotset_hot_buffer_fetched_bytes_total"
_RESOLVE, _STEP = "hotset_resolve_seconds_total", "hotset_step_seconds_total"
_TOKENS = "hotset_generation_tokens_total"

LINK_ROOF = Variable(
    "link_roof",
    "Link roof, bytes/s",
    "What a plain gather of the same records reaches on this machine; docs/speed.md says how it is measured.",
    text="48000000000",
)


def _by_layer(expr: str) -> str:
    """Layers as three digits, so that rows of a heat map stand in their order."""
    padded = f'label_replace({expr}, "layer", "0$1", "layer", "(.)")'
    return f'label_replace({padded}, "layer", "0$1", "layer", "(..)")'


HIT_RATE = Section(
    "Hit rate",
    (
        Panel(
            "Hit rate",
            "Of the blocks that attention chose, those that were in a hot slot. hits + misses = chosen.",
            "percentunit",
            (
                Query(ratio(_HITS, _CHOSEN, ENGINE), "all"),
                Query(ratio(_HITS, _CHOSEN, ENGINE, EACH), "{{instance}} / {{engine}}"),
            ),
            top=1.0,
        ),
        Panel(
            "Hit rate by layer",
            "One row a layer. Layers whose choice drifts faster miss more; a stripe over all layers is a "
            "row that was just seated, or one that shrank.",
            "percentunit",
            (Query(_by_layer(ratio(_HITS, _CHOSEN, ENGINE, "layer")), "{{layer}}"),),
            heat=True,
            width=16,
        ),
    ),
)

COST = Section(
    "What misses cost",
    (
        Panel(
            "Misses per token",
            "Blocks fetched from the arena for each sampled token, over all layers and groups.",
            "short",
            (Query(ratio(_MISSES, _TOKENS, ENGINE, EACH), "{{instance}} / {{engine}}"),),
        ),
        Panel(
            "Bytes per token",
            "Bytes fetched from the arena for each sampled token: misses times the bytes of a block.",
            "decbytes",
            (Query(ratio(_BYTES, _TOKENS, ENGINE, EACH), "{{instance}} / {{engine}}"),),
        ),
        Panel(
            "Exposed fetch share of TPOT",
            "Of the time of steps, what resolve itself counted: on a GPU from its lookup to the last "
            "byte of its fetches, by the device's clock, in launches that fetch; on a CPU all of its "
            "time.",
            "percentunit",
            (Query(ratio(_RESOLVE, _STEP, ENGINE, EACH), "{{instance}} / {{engine}}"),),
            top=1.0,
        ),
        Panel(
            "Link",
            "Bytes a second from the arena: over all time, and over the time inside resolve, which is "
            "how fast the link is when it is used. The roof is typed in above; compare the second line "
            "with it.",
            "Bps",
            (
                Query(
                    f"sum by ({EACH}) ({rate(_BYTES, ENGINE)})", "{{instance}} / {{engine}}, over all time"
                ),
                Query(ratio(_BYTES, _RESOLVE, ENGINE, EACH), "{{instance}} / {{engine}}, inside resolve"),
                Query("vector($link_roof)", "roof"),
            ),
            log=True,
        ),
        Panel(
            "Time in resolve by layer, a step",
            "Where a step waits: seconds inside resolve for each step, one row a layer.",
            "s",
            (
                Query(
                    _by_layer(
                        f"sum by (layer) ({rate(_RESOLVE, ENGINE)}) "
                        f"/ on () group_left () (sum({rate('hotset_steps_total', ENGINE)}) > 0)"
                    ),
                    "{{layer}}",
                ),
            ),
            heat=True,
            width=16,
        ),
    ),
)

ROOM = Section(
    "Room",
    (
        Panel(
            "What if the buffer were of another size",
            "Miss rate that hot buffers half, twice and four times as large would have, from the choices "
            "of a few sampled layers (1x is the size that it has). Flat lines: more memory brings "
            "nothing. Where choices are not sampled - on a GPU, in full mode - this is empty.",
            "percentunit",
            (
                Query(
                    f"sum by (size) ({rate('hotset_hot_buffer_sampled_misses_total', ENGINE)}) / on () "
                    f"group_left () (sum({rate('hotset_hot_buffer_sampled_blocks_total', ENGINE)}) > 0)",
                    "{{size}}",
                ),
            ),
            width=12,
        ),
        Panel(
            "Capacity per row",
            "Tokens that a row has hot slots for: of the row with fewest, and of the one with most. 0 "
            "while nobody runs. Capacities follow how many rows run and how long they are.",
            "short",
            (Query(f"hotset_hot_row_tokens{{{ENGINE}}}", "{{row}}, {{instance}} / {{engine}}"),),
            width=12,
        ),
        Panel(
            "Hot slots",
            "Slots that rows own and that are free, over all layers.",
            "short",
            (
                Query(
                    f"sum by ({EACH}, state) (hotset_hot_slots{{{ENGINE}}})",
                    "{{state}}, {{instance}} / {{engine}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Rows with everything resident",
            "Rows that own a slot for every block of theirs, beside all that run: the former miss a "
            "block once at most.",
            "short",
            (
                Query(f"sum(hotset_hot_rows_whole{{{ENGINE}}})", "whole"),
                Query(f"sum(hotset_requests_running{{{ENGINE}}})", "running"),
            ),
        ),
        Panel(
            "Evictions and resizes",
            "Blocks that lost their slot to another, and rows that got more or fewer slots.",
            "ops",
            (
                Query(f"sum({rate('hotset_hot_buffer_evictions_total', ENGINE)})", "evictions"),
                Query(f"sum({rate('hotset_hot_resizes_total', ENGINE)})", "resizes"),
            ),
        ),
    ),
)

HOT_BUFFER = Board(
    "hotset-hot-buffer",
    "hotset: Hot buffer",
    "How much of what attention chooses is in the hot buffer, what the rest costs, and what more room "
    "would bring.",
    (DECODER_INSTANCE, ENGINES, LINK_ROOF),
    (HIT_RATE, COST, ROOM),
)
