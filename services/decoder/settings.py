"""What an operator may say to the decoder, front and engine alike.

Sizes derived from it: engine/memory_plan.py. Knows no torch, and reads nothing but flags, environment and
the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from services.contract.base_settings import ServiceSettings
from services.contract.byte_size import ByteSize


class DecoderSettings(ServiceSettings):
    """hotset decoder: an OpenAI-compatible server whose KV lives in kvstore's arena."""

    table: ClassVar[str] = "decoder"

    model: Path = Field(
        description="directory of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json)"
    )
    served_model_name: str = Field("", description="name clients use; default: the directory's name")
    kvstore: str = Field("127.0.0.1:7700", description="kvstore's gRPC address, host:port or unix:/path")
    wire_dir: Path | None = Field(
        None, description="directory with the token and certificates of gRPC to kvstore (docs/transport.md)"
    )

    store_access: Literal["mapped", "remote"] = Field(
        "mapped",
        description="mapped: the engine maps kvstore's arena, on its node; remote: it asks for the bytes, "
        "slower, on a CPU only (docs/transport.md)",
    )
    store_seconds: float = Field(
        10.0,
        gt=0,
        le=600,
        description="seconds a remote kvstore may take for bytes, or be out of reach, before requests fail",
    )
    ucx_tls: str = Field(
        "tcp,sm,self", min_length=1, description="lanes to a remote kvstore that UCX may use, as UCX_TLS"
    )
    ucx_devices: str = Field(
        "lo", min_length=1, description="network devices that UCX listens on, as UCX_NET_DEVICES; or all"
    )
    ucx_lanes: Literal["any", "shm", "rdma", "tcp"] = Field(
        "any", description="lanes that UCX must use; a connection over others is refused"
    )

    prefill_only: bool = Field(
        False, description="read prompts for other servers: answers of one token only (docs/transport.md)"
    )
    decode_from: str = Field(
        "",
        pattern=r"^(https?://[^/\s]+(/\S*)?)?$",
        description="URL of a server that reads prompts first, whose kvstore is a peer of this one's",
    )
    prefill_seconds: float = Field(
        120.0, gt=0, description="seconds that the server of decode_from may take; then prompts are read here"
    )

    host: str = Field("127.0.0.1", description="address of the HTTP server")
    port: int = Field(8000, ge=0, le=65535, description="port of the HTTP server; 0 = any free one")
    api_keys: tuple[SecretStr, ...] = Field((), description="accepted bearer keys; none = open to all")
    urgent_keys: tuple[SecretStr, ...] = Field(
        (), description="bearer keys, accepted beside api_keys, whose requests may have any priority"
    )
    most_urgent: int = Field(
        0,
        ge=-(2**31),
        lt=2**31,
        description="lowest number that priority may be in requests without one of urgent_keys; lower runs "
        "earlier",
    )
    max_body_bytes: ByteSize = Field(8 * 2**20, ge=1024, description="longest HTTP request body, bytes")
    dashboards_url: str = Field(
        "", pattern="^(https?://.*)?$", description="address of Grafana, which the status page at / links to"
    )
    max_waiting: int = Field(256, ge=0, description="choices that may wait for a row before 429 is answered")
    queue_seconds: float = Field(
        600.0, ge=0, description="seconds that a choice waits for a row before it fails; 0 = for ever"
    )
    shutdown_seconds: float = Field(
        5.0, ge=0, le=60, description="seconds running requests get after SIGTERM"
    )
    restart_seconds: float = Field(
        300.0, ge=0, description="seconds requests of an engine that died wait to be taken by its next life"
    )

    device: str = Field(
        "auto",
        description="auto, cpu or cuda:N; several with commas between are an engine each behind one front",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="of weights and KV; auto: bfloat16 where the device computes it, else float32"
    )
    threads: int = Field(0, ge=0, description="CPU threads of the engine; 0 = all cores")

    kv_mode: Literal["tiered", "full"] = Field(
        "tiered", description="tiered: a hot buffer over the arena; full: all KV on the device"
    )
    selector: Literal["quest", "everything", "dsa", "nsa", "block_index"] = Field(
        "quest",
        description="what chooses blocks in decode; models that choose by themselves (dsa, nsa, block_index) "
        "do so",
    )
    quest_sharing: Literal["kv_head", "layer"] = Field(
        "kv_head", description="each KV head chooses for itself, or one choice for the whole layer"
    )
    budget_tokens: int = Field(
        2048, ge=16, description="tokens a step attends to, a multiple of block_tokens"
    )
    block_tokens: int = Field(16, ge=1, description="tokens a block, what the selector picks")
    dense_layers: int = Field(0, ge=0, description="first layers that attend to everything and stay resident")
    page_tokens: int = Field(64, ge=64, description="tokens a page, a multiple of block_tokens")
    hot_tokens: int = Field(
        0,
        ge=0,
        description="tokens that a row's lanes hold in the hot buffer at least; 0 = the budget and a block",
    )
    hot_bytes: ByteSize = Field(
        0,
        ge=0,
        description="device memory of the hot buffer, which the rows share; 0 = on a GPU what is free there, "
        "elsewhere max_rows x hot_tokens (twice the budget where hot_tokens is 0)",
    )
    device_memory_share: float = Field(
        0.9, gt=0, lt=1, description="share of a GPU's memory that the engine may plan with"
    )

    prefix_cache: bool = Field(
        True, description="prompts that begin alike share what was computed; off: each is computed"
    )
    decode_graphs: bool = Field(
        True, description="on a GPU, replay decode steps as captured CUDA graphs; off: launch by launch"
    )
    index_dtype: Literal["auto", "float8"] = Field(
        "auto",
        description="of the index keys of models with an indexer of their own; auto: as the weights, float8: "
        "turned and in eight bits with a scale, about half the memory and a choice that differs a little",
    )
    record_dtype: Literal["auto", "float8"] = Field(
        "auto",
        description="of the latent records of models that keep such; auto: as the weights, float8: in eight "
        "bits with a scale for 128 numbers, 656 bytes for 1,152, and NOT EXACT: answers differ a little",
    )
    prefetch: bool = Field(
        True,
        description="layers that reuse another one's choice fetch their misses ahead of their turn; off: in "
        "their turn",
    )
    hits_first: bool = Field(
        False,
        description="an experiment: attention over what is resident runs while what misses comes, then over "
        "that; so the last bits of an answer, and now and then a token, depend on what is resident",
    )
    share_device_pages: bool = Field(
        True,
        description="rows that begin alike have one set of device pages for what they share; off, each has "
        "its own, as rows of different prompts have",
    )
    probe_no_io: bool = Field(
        False,
        description="benchmark probe on a GPU: resolve moves no bytes, so every answer is WRONG",
    )
    record_selections: Path | None = Field(
        None,
        description="file, begun anew, that notes which blocks each decode step chose (docs/selections.md); "
        "on a GPU it needs decode_graphs off and costs speed: every layer waits until its ids are read back",
    )

    sampled_layers: int = Field(
        2,
        ge=0,
        description="layers whose choices tell what hot buffers of other sizes would miss; 0 = none; "
        "on a GPU none are sampled",
    )

    max_rows: int = Field(8, ge=1, le=1024, description="choices that run at once")
    max_model_len: int = Field(
        0, ge=0, description="longest prompt + answer, tokens; 0 = the model's own limit"
    )
    max_step_tokens: int = Field(
        0, ge=0, description="tokens a step computes at most, prefill included; 0 = 4096 on a GPU, else 512"
    )
    window_tokens: int = Field(
        16384, ge=64, description="history that prefill attends to at once, tokens, in whole pages"
    )
    device_cache_tokens: int = Field(
        0,
        ge=0,
        description="tokens whose index (and KV in full mode) fit the device; 0 = max_rows x max_model_len",
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe log lines kept"
    )

    @field_validator("device")
    @classmethod
    def _are_devices(cls, value: str) -> str:
        devices = [device.strip() for device in value.split(",")]
        if len(devices) > 1:
            kinds = {device.split(":")[0] for device in devices}
            if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
                raise ValueError(f"{value!r} is not a list of one kind: cuda:0,cuda:1 or cpu,cpu")
            if kinds == {"cuda"} and len(set(devices)) < len(devices):
                raise ValueError(f"{value!r} names a GPU twice; an engine takes a GPU of its own")
        return ",".join(devices)

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.page_tokens % self.block_tokens or self.budget_tokens % self.block_tokens:
            raise ValueError("page_tokens and budget_tokens must be multiples of block_tokens")
        if self.probe_no_io and self.kv_mode != "tiered":
            raise ValueError("probe_no_io leaves out the fetches of kv_mode tiered; full has none")
        if self.hits_first and self.kv_mode != "tiered":
            raise ValueError("hits_first is about what kv_mode tiered misses; full misses nothing")
        if self.hits_first and self.store_access == "remote":
            raise ValueError(
                "hits_first needs the arena mapped; what store_access remote misses is waited for"
            )
        if self.store_access == "remote" and self.kv_mode != "tiered":
            raise ValueError(
                "store_access remote fetches what kv_mode tiered misses; full needs the arena mapped"
            )
        if self.prefill_only and (self.decode_from or not self.prefix_cache):
            raise ValueError("prefill_only leaves pages behind: it needs prefix_cache, and no decode_from")
        least = self.budget_tokens + self.block_tokens
        if self.hot_tokens and (self.hot_tokens < least or self.hot_tokens % self.block_tokens):
            raise ValueError(
                "hot_tokens must be 0 or a multiple of block_tokens of at least "
                f"budget_tokens + block_tokens = {least}"
            )
        if self.max_step_tokens and self.max_step_tokens < self.max_rows + self.block_tokens:
            raise ValueError(
                "max_step_tokens must be at least max_rows + block_tokens = "
                f"{self.max_rows + self.block_tokens}, or prefill would never run beside decode"
            )
        return self

    @property
    def devices(self) -> tuple[str, ...]:
        """One an engine."""
        return tuple(self.device.split(","))

    @property
    def floor_tokens(self) -> int:
        """What a lane holds at least, tokens."""
        return self.hot_tokens or self.budget_tokens + self.block_tokens

    @property
    def selections_file(self) -> Path | None:
        """Where this process notes what is chosen."""
        return self.record_selections

    @property
    def usual_tokens(self) -> int:
        """What a lane holds when all rows are in use, tokens, where nothing says how much memory there is."""
        return self.hot_tokens or 2 * self.budget_tokens

    @property
    def whole_window_tokens(self) -> int:
        """Tokens of a window, a multiple of page_tokens."""
        return max(1, self.window_tokens // self.page_tokens) * self.page_tokens

    def step_tokens(self, device_type: str) -> int:
        """Tokens a step computes at most, on a device of this type; enough for all rows and a block."""
        default = max(4096 if device_type == "cuda" else 512, self.max_rows + self.block_tokens)
        return self.max_step_tokens or default
