"""Puts a runner together from a plan: the one place where residence and selectors are chosen.

Knows every part by its constructor and none by its inside.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

import torch

from services.contract.errors import SetupError
from services.decoder.attention.block_heart import BlockHeart
from services.decoder.attention.everything import Everything
from services.decoder.attention.heart import Heart
from services.decoder.attention.latent_heart import LatentHeart
from services.decoder.attention.quest import Quest
from services.decoder.attention.recorder import Recorded
from services.decoder.attention.selection_file import FileHeader, SelectionWriter
from services.decoder.attention.selector import Selector
from services.decoder.engine.block_assembly import block_heart, block_kernels_of
from services.decoder.engine.capacity_book import CapacityBook
from services.decoder.engine.decode_graphs import DecodeGraphs
from services.decoder.engine.device_sampler import DeviceSampler
from services.decoder.engine.draw import DeviceDraw, HostDraw
from services.decoder.engine.latent_assembly import WrapTokens, latent_heart, latent_kernels_of
from services.decoder.engine.limits import Limits
from services.decoder.engine.loads_beside import LoadsBeside, load_kv_and_index, loads_beside
from services.decoder.engine.memory_plan import MemoryPlan
from services.decoder.engine.page_hash import PageHasher
from services.decoder.engine.prefill_warm_up import warm_up
from services.decoder.engine.prompt_tails import PromptTails
from services.decoder.engine.runner import Runner
from services.decoder.engine.step_clock import StepClock
from services.decoder.kernels.dense import DenseOps
from services.decoder.kernels.step_kernels import StepKernels
from services.decoder.kernels.twins import Twins
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.arena_path import ArenaPath, DirectPath
from services.decoder.kv.bounds_index import BoundsIndex
from services.decoder.kv.full import Full
from services.decoder.kv.history import Window
from services.decoder.kv.hot_buffer import HotBuffer
from services.decoder.kv.miss_curve import MissCurve
from services.decoder.kv.paged_index import PagedIndex
from services.decoder.kv.prefetch import AtOnce, Prefetch, SideStream
from services.decoder.kv.remote_arena import RemoteArena
from services.decoder.kv.remote_path import RemotePath
from services.decoder.kv.remote_tiered import RemoteTiered
from services.decoder.kv.residence import Residence
from services.decoder.kv.row_tables import RowTables
from services.decoder.kv.tiered import Tiered
from services.decoder.models.causal_lm import CausalLM
from services.decoder.settings import DecoderSettings

_LEAST_CAPABILITY = (8, 0)  # bfloat16 on tensor cores, copies into shared memory that nobody waits for

Wrap = Callable[[int, Selector], Selector]


def assemble(
    plan: MemoryPlan,
    model: CausalLM,
    arena: ArenaMap | RemoteArena,
    device: torch.device,
    wrap: Wrap = lambda layer, selector: selector,
    wrap_tokens: WrapTokens = lambda layer, selector: selector,
) -> Runner:
    """Allocate everything that the plan counts, and wire it.

    `wrap` may put another selector before a layer's own: a recorder of choices, or a benchmark's trace; in
    models that choose by an indexer of their own, `wrap_tokens` may.
    """
    shape, settings = plan.shape, plan.settings
    kernels = step_kernels(plan, device)
    writer = selection_writer(plan, device)
    tables = RowTables(settings.max_rows, plan.max_pages, device)
    residence: Residence
    if isinstance(arena, RemoteArena):
        hot = HotBuffer(shape, settings.max_rows, plan.max_blocks, plan.hot_classes, device)
        remote_path = RemotePath(kernels, arena, shape, settings.whole_window_tokens, device)
        residence = RemoteTiered(kernels, arena, hot, tables, remote_path)
    elif settings.kv_mode == "tiered":
        hot = HotBuffer(shape, settings.max_rows, plan.max_blocks, plan.hot_classes, device)
        path = arena_path(plan, kernels, arena, device, reads=True)
        curve, (prefetch, hits_first) = miss_curve(plan, device), fetches_beside(plan, device)
        residence = Tiered(kernels, arena, hot, tables, path, curve, prefetch, hits_first)
    else:
        window = Window(kernels, shape, settings.whole_window_tokens, device)
        path = arena_path(plan, kernels, arena, device, reads=False)
        residence = Full(kernels, arena, shape, plan.device_pages, tables, path, window)
    latent_kernels = latent_kernels_of(plan, model, device)
    block_kernels = block_kernels_of(plan, model.spec.blocks, device)
    index: PagedIndex | None
    heart: Heart | LatentHeart | BlockHeart
    if latent_kernels is not None:
        index, heart = latent_heart(
            plan, arena, device, kernels, latent_kernels, residence, writer, wrap_tokens
        )
    elif block_kernels is not None:
        assert model.spec.blocks is not None
        heart, index = block_heart(
            plan, model.spec.blocks, arena, kernels, block_kernels, residence, writer, device
        )
    else:
        index, heart = _quest_heart(plan, arena, device, kernels, residence, writer, wrap)
    beside = None
    if loads_beside(device):
        tails = None
        if type(heart) is Heart:  # a BlockHeart is one too, and steps compute its ends
            step_tokens = plan.step_tokens
            tails = PromptTails(model, shape, tables, residence, heart, step_tokens, device)
        beside = LoadsBeside(partial(load_kv_and_index, residence, index), tails, device)
    if device.type != "cuda":
        return Runner(model, shape, tables, residence, index, heart, HostDraw(), None, beside=beside)
    sampler = DeviceSampler(settings.max_rows, model.spec.vocab_size, device)
    graphs = DecodeGraphs(
        model, shape, tables, heart, sampler.tokens, plan.max_blocks, capture=settings.decode_graphs
    )
    for logits in graphs.warm_up():
        for greedy in (True, False):
            sampler.draw(logits, greedy=greedy)
    warm_up(plan, model.spec, kernels, latent_kernels, block_kernels, device)
    draw = DeviceDraw(sampler, settings.max_rows)
    return Runner(model, shape, tables, residence, index, heart, draw, graphs, StepClock(), beside)


def _quest_heart(
    plan: MemoryPlan,
    arena: ArenaMap | RemoteArena,
    device: torch.device,
    kernels: StepKernels,
    residence: Residence,
    writer: SelectionWriter | None,
    wrap: Wrap,
) -> tuple[PagedIndex | None, Heart]:
    """Of a model whose selector is ours to choose."""
    shape, bounds = plan.shape, None
    if plan.sparse_layers:
        bounds = BoundsIndex(kernels, arena, shape, plan.device_pages, plan.sparse_layers, device)
    dense = shape.layers - plan.sparse_layers
    selectors: list[Selector] = [
        Quest(kernels, shape, bounds.layer(layer), plan.top_k)
        if bounds is not None and layer >= dense
        else Everything()
        for layer in range(shape.layers)
    ]
    selectors = [wrap(layer, selector) for layer, selector in enumerate(selectors)]
    if writer is not None:
        selectors = [Recorded(own, layer, writer) for layer, own in enumerate(selectors)]
    return bounds, Heart(kernels, shape, residence, selectors)


def check_device(device: torch.device, asked: str = "") -> None:
    """See that the kernels can run there; `asked` is what it was called, if that was something else.

    Raises:
        SetupError: no such GPU, one that is too old, or the gpu extra is missing.
    """
    if device.type != "cuda":
        return
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise SetupError(
            f"there is no {asked or device}: torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} GPUs; check nvidia-smi and that torch is a CUDA build, or "
            "run with --device cpu"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise SetupError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; "
            "the kernels need 8.0 or newer; run with --device cpu"
        )
    for module in ("cuda.core", "cuda.bindings"):
        if importlib.util.find_spec(module) is None:
            raise SetupError(f"{device} needs {module}: pip install 'hotset[gpu]', or run with --device cpu")


def check_access(settings: DecoderSettings, device: torch.device) -> None:
    """See that the arena can be reached as the settings say.

    Raises:
        SetupError: a GPU's kernels fetch by themselves, which only a mapped arena allows.
    """
    if settings.store_access == "remote" and device.type != "cpu":
        raise SetupError(
            f"--store-access remote decodes on a CPU only so far, not on {device}; run with --device cpu, "
            "or beside a kvstore on this node with --store-access mapped"
        )


def step_kernels(plan: MemoryPlan, device: torch.device) -> StepKernels:
    """The GPU's kernels on a GPU, the twins elsewhere."""
    if device.type != "cuda":
        if plan.settings.probe_no_io:
            raise SetupError("--probe-no-io needs a GPU; drop it, or name one with --device cuda:0")
        return Twins()
    from services.decoder.kernels.gpu.step_kernels import GpuKernels  # needs the gpu extra

    rows, kv_heads = plan.settings.max_rows, plan.shape.kv_heads
    return GpuKernels(rows, kv_heads, device, skip_io=plan.settings.probe_no_io)


def selection_writer(plan: MemoryPlan, device: torch.device) -> SelectionWriter | None:
    """The file of what is chosen, begun; None where the settings want none.

    Raises:
        SetupError: it cannot be made, or decode steps run as graphs, in which nothing can be noted.
    """
    path = plan.settings.selections_file
    if path is None:
        return None
    if device.type == "cuda" and plan.settings.decode_graphs:
        raise SetupError("--record-selections on a GPU needs --no-decode-graphs: a graph has nobody to note")
    try:
        return SelectionWriter(
            path, FileHeader(plan.shape.layers, plan.shape.groups, plan.shape.block_tokens)
        )
    except OSError as error:
        raise SetupError(f"--record-selections {path}: {error.strerror}") from error


def fetches_beside(plan: MemoryPlan, device: torch.device) -> tuple[Prefetch | None, Prefetch | None]:
    """What fetches beside the computation: for layers that follow a choice, and for hits first."""
    ahead = plan.settings.prefetch and bool(plan.shape.anchors)
    first = plan.settings.hits_first
    if not ahead and not first:
        return None, None
    beside = SideStream(device) if device.type == "cuda" else AtOnce()
    return beside if ahead else None, beside if first else None


def arena_path(
    plan: MemoryPlan, kernels: StepKernels, arena: ArenaMap, device: torch.device, *, reads: bool
) -> ArenaPath:
    """Prefill's way to the arena; with `reads`, its history comes back by it."""
    window_tokens = plan.settings.whole_window_tokens
    if device.type != "cuda":
        return DirectPath(kernels, arena, plan.shape, window_tokens, device)
    from services.decoder.kv.streamed_path import StreamedPath  # needs the gpu extra

    return StreamedPath(kernels, arena, plan.shape, window_tokens, device, reads=reads)


def miss_curve(plan: MemoryPlan, device: torch.device) -> MissCurve | None:
    """Over some of the layers that choose, evenly spread; None where no choices are sampled.

    Raises:
        SetupError: asked for on a GPU, where choices stay on the device, inside captured graphs.
    """
    settings = plan.settings
    if device.type != "cpu":
        if settings.sampled_layers and "sampled_layers" in settings.model_fields_set:
            raise SetupError("--sampled-layers: choices are sampled on a CPU only; leave it out")
        return None
    choosing = plan.index_layers
    count = min(settings.sampled_layers, len(choosing))
    if not count:
        return None
    return MissCurve([choosing[(2 * place + 1) * len(choosing) // (2 * count)] for place in range(count)])


def page_hasher(plan: MemoryPlan, fingerprint: bytes) -> PageHasher | None:
    """What names this engine's pages; None where the settings want no prefix cache."""
    settings = plan.settings
    if not settings.prefix_cache:
        return None
    decoding = (settings.selector, settings.quest_sharing, settings.budget_tokens, settings.dense_layers)
    how = repr(decoding) + (" hits first" if settings.hits_first else "")
    return PageHasher(fingerprint, how.encode(), plan.shape.page_tokens)


def capacity_book(plan: MemoryPlan) -> CapacityBook:
    """Who owns what of the hot buffer; nobody anything in full mode."""
    return CapacityBook(plan.hot_classes, plan.shape.block_tokens)


def limits_of(plan: MemoryPlan) -> Limits:
    """The scheduler's limits in a plan."""
    return Limits(
        max_rows=plan.settings.max_rows,
        max_model_len=plan.max_model_len,
        max_step_tokens=plan.step_tokens,
        max_waiting=plan.settings.max_waiting,
        block_tokens=plan.shape.block_tokens,
        page_tokens=plan.shape.page_tokens,
    )


def dense_ops(device: torch.device) -> DenseOps | None:
    """What decode's layers are computed with: fused kernels on a GPU; elsewhere transformers' layers do."""
    if device.type != "cuda":
        return None
    from services.decoder.kernels.gpu.dense import GpuDense  # needs the gpu extra

    return GpuDense()
