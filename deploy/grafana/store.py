"""The dashboard *Store*: host pages, prefixes, sessions, and bytes between stores.

Knows kvstore's metrics (docs/metrics.md).
"""

from __future__ import annotations

from deploy.grafana.board import INSTANCE, WINDOW, Board, Panel, Query, Section, Variable, rate, ratio

PAGES = Section(
    "Pages",
    (
        Panel(
            "Pages by state",
            "Free; open: being written; sealed: full and held by somebody; cached: full, held by nobody, "
            "kept for prompts that begin alike until the room is needed.",
            "short",
            (Query(f"sum by (state) (hotset_store_pages{{{INSTANCE}}})", "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "Prefix hit rate",
            "Of the pages that prompts asked for, those that were there.",
            "percentunit",
            (
                Query(
                    ratio("hotset_store_pages_matched_total", "hotset_store_pages_looked_up_total", INSTANCE),
                    "found",
                ),
            ),
            top=1.0,
        ),
        Panel(
            "Pages that change hands",
            "Evicted: cached pages that made room. Refused: wanted, and nothing could make room; rows "
            "then wait or are parked.",
            "ops",
            tuple(
                Query(f"sum({rate(f'hotset_store_pages_{what}_total', INSTANCE)})", what)
                for what in ("allocated", "sealed", "released", "evicted", "refused")
            ),
        ),
        Panel(
            "Arena",
            "Length of the arena's file, and what of it lies in memory.",
            "decbytes",
            (
                Query(f"sum(hotset_store_arena_bytes{{{INSTANCE}}})", "length"),
                Query(f"sum(hotset_store_arena_resident_bytes{{{INSTANCE}}})", "in memory"),
            ),
        ),
        Panel(
            "Pages held",
            "Open and sealed pages, of all: near 1 requests wait. Cached pages do not count, they make room.",
            "percentunit",
            (
                Query(
                    f'sum(hotset_store_pages{{{INSTANCE}, state=~"open|sealed"}}) / '
                    f"(sum(hotset_store_pages{{{INSTANCE}}}) > 0)",
                    "held",
                ),
            ),
            top=1.0,
        ),
        Panel(
            "Health",
            "1 while pages of before a restart wait for their clients, 1 while it drains, and books "
            "found wrong.",
            "short",
            (
                Query(f"sum(hotset_store_recovering{{{INSTANCE}}})", "recovering"),
                Query(f"sum(hotset_store_draining{{{INSTANCE}}})", "draining"),
                Query(f"sum(hotset_store_integrity_violations_total{{{INSTANCE}}})", "violations"),
            ),
        ),
    ),
)

CLIENTS = Section(
    "Clients",
    (
        Panel(
            "Sessions",
            "Attached clients by kind; mapped ones past their lease that live; mapped ones of before a "
            "restart that have not come back.",
            "short",
            (
                Query(f"sum by (kind) (hotset_store_sessions{{{INSTANCE}}})", "{{kind}}"),
                Query(f"sum(hotset_store_sessions_expired{{{INSTANCE}}})", "past their lease"),
                Query(f"sum(hotset_store_sessions_unclaimed{{{INSTANCE}}})", "unclaimed"),
            ),
        ),
        Panel(
            "Leases and attaches",
            "Leases that ended unrenewed, by kind of client; sessions opened or taken up again; sessions "
            "ended.",
            "ops",
            (
                Query(
                    f"sum by (kind) ({rate('hotset_store_lease_expirations_total', INSTANCE)})",
                    "expired, {{kind}}",
                ),
                Query(f"sum({rate('hotset_store_attaches_total', INSTANCE)})", "attached"),
                Query(
                    f"sum by (reason) ({rate('hotset_store_sessions_ended_total', INSTANCE)})",
                    "ended, {{reason}}",
                ),
            ),
        ),
        Panel(
            "Calls, 95th percentile",
            "Time that a call spends in the store's process. Engines make one Update a step.",
            "s",
            (
                Query(
                    f"histogram_quantile(0.95, sum by (le, method) "
                    f"(rate(hotset_store_rpc_seconds_bucket{{{INSTANCE}}}[{WINDOW}])))",
                    "{{method}}",
                ),
            ),
        ),
        Panel(
            "Calls that failed",
            "By method and gRPC status. NOT_FOUND after a restart of the store is an engine that "
            "attaches again.",
            "ops",
            (
                Query(
                    f"sum by (method, status) ({rate('hotset_store_rpc_errors_total', INSTANCE)})",
                    "{{method}} {{status}}",
                ),
            ),
            width=24,
        ),
    ),
)

TRANSPORT = Section(
    "Between stores",
    (
        Panel(
            "Bytes",
            "Bytes between stores, frames included. Served: others read here; asked: this store reads "
            "elsewhere.",
            "Bps",
            (
                Query(
                    f"sum by (role, direction) ({rate('hotset_store_data_bytes_total', INSTANCE)})",
                    "{{role}}, {{direction}}",
                ),
            ),
        ),
        Panel(
            "Errors",
            "Requests between stores that failed, by what was wrong. Each is tried elsewhere or "
            "computed: no answer is wrong for it.",
            "ops",
            (
                Query(
                    f"sum by (role, kind) ({rate('hotset_store_data_errors_total', INSTANCE)})",
                    "{{role}}, {{kind}}",
                ),
            ),
        ),
        Panel(
            "Pages",
            "Pages that others read here, pages that arrived from others, and pulls that failed or found "
            "nothing.",
            "ops",
            (
                Query(f"sum({rate('hotset_store_pages_served_total', INSTANCE)})", "served"),
                Query(f"sum({rate('hotset_store_pages_pulled_total', INSTANCE)})", "pulled"),
                Query(f"sum({rate('hotset_store_pulls_failed_total', INSTANCE)})", "failed pulls"),
                Query(f"sum({rate('hotset_store_pulls_empty_total', INSTANCE)})", "empty pulls"),
            ),
        ),
        Panel(
            "Requests",
            "Requests for bytes between stores.",
            "ops",
            (Query(f"sum by (role) ({rate('hotset_store_data_requests_total', INSTANCE)})", "{{role}}"),),
            width=12,
        ),
        Panel(
            "Memory of answers under way",
            "Bytes that wait to be sent to other stores.",
            "decbytes",
            (Query(f"sum(hotset_store_data_held_bytes{{{INSTANCE}}})", "held"),),
            width=12,
        ),
    ),
)

STORE = Board(
    "hotset-store",
    "hotset: Store",
    "Host pages, prefixes that were found, sessions and leases, and bytes between stores.",
    (
        Variable(
            "instance", "Store", "Which stores, by address.", "label_values(hotset_store_info, instance)"
        ),
    ),
    (PAGES, CLIENTS, TRANSPORT),
)
