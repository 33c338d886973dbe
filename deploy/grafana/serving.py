"""The dashboard *Serving*: what clients see, and who waits.

Knows the decoder's metrics (docs/metrics.md).
"""

from __future__ import annotations

from deploy.grafana.board import (
    DECODER_INSTANCE,
    EACH,
    ENGINE,
    ENGINES,
    INSTANCE,
    Board,
    Panel,
    Query,
    Section,
    quantiles,
    rate,
    ratio,
)

_ERRORS = f'{INSTANCE}, status=~"[45].."'
_IDLE = rate("hotset_device_idle_seconds_total", ENGINE)
_BUSY = rate("hotset_device_busy_seconds_total", ENGINE)

LATENCY = Section(
    "Latency",
    (
        Panel(
            "Time per output token",
            "TPOT: the mean time between a choice's tokens after its first, told when the choice ends. "
            "Lower is better; it grows with the rows that run and with what is missed in the hot buffer.",
            "s",
            quantiles("hotset_time_per_output_token_seconds", ENGINE),
        ),
        Panel(
            "Time to first token",
            "TTFT: from a request's arrival to a choice's first token: the wait for a row, then prefill.",
            "s",
            quantiles("hotset_time_to_first_token_seconds", ENGINE),
        ),
        Panel(
            "Gaps between tokens",
            "Every gap by itself, as it happens. A high 99th percentile beside a low median: prefill of "
            "others, or a row that was parked.",
            "s",
            quantiles("hotset_inter_token_seconds", ENGINE),
        ),
    ),
)

THROUGHPUT = Section(
    "Throughput",
    (
        Panel(
            "Tokens a second",
            "Sampled tokens, prompt tokens that were computed, and prompt tokens that the prefix cache "
            "spared.",
            "short",
            (
                Query(f"sum({rate('hotset_generation_tokens_total', ENGINE)})", "generated"),
                Query(f"sum({rate('hotset_prompt_tokens_total', ENGINE)})", "prompt, computed"),
                Query(f"sum({rate('hotset_cached_prompt_tokens_total', ENGINE)})", "prompt, from the cache"),
            ),
        ),
        Panel(
            "Running and waiting",
            "Choices that have a row, that wait for one, and of these, those that had one before.",
            "short",
            tuple(
                Query(
                    f"sum by ({EACH}) (hotset_requests_{what}{{{ENGINE}}})",
                    f"{what}, {{{{instance}}}} / {{{{engine}}}}",
                )
                for what in ("running", "waiting", "parked")
            ),
        ),
        Panel(
            "Time a step",
            "The mean forward pass of each engine, prefill included; on a GPU also the device's own time "
            "of steps that only decode.",
            "s",
            (
                Query(
                    ratio("hotset_step_seconds_total", "hotset_steps_total", ENGINE, EACH),
                    "step, {{instance}} / {{engine}}",
                ),
                Query(
                    ratio("hotset_decode_seconds_total", "hotset_decode_steps_total", ENGINE, EACH),
                    "decode on the GPU, {{instance}} / {{engine}}",
                ),
            ),
        ),
    ),
)

ENDINGS = Section(
    "Endings and errors",
    (
        Panel(
            "Choices ended",
            "By how: stop and length are good ends; abort is a client that left; refused is an answer of "
            "4xx.",
            "ops",
            (Query(f"sum by (outcome) ({rate('hotset_requests_total', INSTANCE)})", "{{outcome}}"),),
            stacked=True,
        ),
        Panel(
            "HTTP errors",
            "Answers of 4xx (the request was wrong, or the server is full: 429) and 5xx (the server was).",
            "ops",
            (
                Query(
                    f"sum by (status, path) ({rate('hotset_http_requests_total', _ERRORS)})",
                    "{{status}} {{path}}",
                ),
            ),
        ),
        Panel(
            "Interruptions",
            "Rows that were taken from a choice, choices that had to start over, and choices that an "
            "engine's next life took over. All are pauses for clients, never errors.",
            "ops",
            (
                Query(f"sum({rate('hotset_rows_parked_total', ENGINE)})", "parked"),
                Query(f"sum({rate('hotset_requests_rewound_total', ENGINE)})", "rewound"),
                Query(f"sum({rate('hotset_requests_resubmitted_total', ENGINE)})", "resubmitted"),
            ),
        ),
        Panel(
            "Whole request",
            "From a request's arrival to a choice's end, of choices that end by themselves.",
            "s",
            quantiles("hotset_request_seconds", ENGINE),
        ),
        Panel(
            "Engines that serve",
            "1 while an engine serves, 0 while it starts or is down.",
            "short",
            (Query(f"hotset_engine_ready{{{ENGINE}}}", "{{instance}} / {{engine}}"),),
        ),
        Panel(
            "Restarts and violations",
            "Within the last hour. Restarts are survived, and should not happen; a violation is a defect "
            "of hotset.",
            "short",
            (
                Query(
                    f"sum by ({EACH}) (increase(hotset_engine_restarts_total{{{ENGINE}}}[1h]))",
                    "restarts, {{instance}} / {{engine}}",
                ),
                Query(
                    f"sum by ({EACH}) (increase(hotset_integrity_violations_total{{{ENGINE}}}[1h]))",
                    "violations, {{instance}} / {{engine}}",
                ),
            ),
        ),
    ),
)

DEVICE = Section(
    "Device",
    (
        Panel(
            "Share of time that a GPU waits between steps",
            "Between a step and the next that continues its rows: time that the host took too long. "
            "Empty on a CPU.",
            "percentunit",
            (
                Query(
                    f"sum by ({EACH}) ({_IDLE}) / (sum by ({EACH}) ({_IDLE} + {_BUSY}) > 0)",
                    "{{instance}} / {{engine}}",
                ),
            ),
            width=12,
            top=1.0,
        ),
        Panel(
            "Device pages",
            "Pages of the selector's index on the device, and of KV in full mode.",
            "short",
            (
                Query(
                    f"sum by ({EACH}, state) (hotset_device_pages{{{ENGINE}}})",
                    "{{state}}, {{instance}} / {{engine}}",
                ),
            ),
            width=12,
            stacked=True,
        ),
    ),
)

SERVING = Board(
    "hotset-serving",
    "hotset: Serving",
    "What clients see - time per output token, time to first token, tokens a second, errors - and who waits.",
    (DECODER_INSTANCE, ENGINES),
    (LATENCY, THROUGHPUT, ENDINGS, DEVICE),
)
