"""A few small steps of every kernel for compute-sanitizer, which is far too slow for the tests themselves.

compute-sanitizer --tool memcheck --report-api-errors no python -m tests.gpu.sanitize
compute-sanitizer --tool racecheck --report-api-errors no python -m tests.gpu.sanitize

With names of kernels behind it, those alone: `python -m tests.gpu.sanitize resolve select`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import pytest
import torch

from tests.gpu import (
    test_append_gpu,
    test_attend_gpu,
    test_attend_latent_gpu,
    test_attend_part_gpu,
    test_block_kernels_gpu,
    test_coded_records_gpu,
    test_latent_kernels_gpu,
    test_linear_gpu,
    test_load_pages_gpu,
    test_locate_gpu,
    test_norm_gpu,
    test_rope_gpu,
    test_sampler_gpu,
    test_select_gpu,
    test_swiglu_gpu,
    test_write_run_gpu,
)
from tests.gpu.test_replay_gpu import Follower
from tests.gpu.test_resolve_gpu import Case, Rig

CASES = (
    Case(16, 64, 1, 2, 40, 44, 90, 4, 6),
    Case(32, 4, 3, 2, 12, 13, 60, 2, 6),
    Case(1152, 64, 1, 1, 300, 400, 900, 8, 4),
    Case(1152, 64, 1, 1, 300, 400, 900, 1, 4, sweep=True),
    Case(8192, 4, 2, 2, 100, 120, 200, 4, 4, sweep=True),
)
BF16, FP32 = torch.bfloat16, torch.float32


def resolve_and_replay() -> None:
    for case in CASES:
        rig = Rig(case, disturbed=False)
        for step in range(case.steps):
            rig.step()
            if step == 2:
                rig.resize()
        rig.agree()
        rig.close()
        rig = Rig(case, disturbed=False)
        follower = Follower(rig)
        for _ in range(case.steps):
            follower.step()
        rig.agree()
        assert not bool(follower.wrong)
        follower.close()
        rig.close()


def append() -> None:
    for case in test_append_gpu.CASES[2:8]:
        test_append_gpu.test_kernel_equals_twin(case)


def attend() -> None:
    """In both forms, with and without parts that meet, and rings of every length that rows give."""
    for case in test_attend_gpu.CASES[:10]:
        test_attend_gpu.test_kernel_equals_twin(case)


def attend_latent() -> None:
    """Alone and in clusters; in decode and, with sums, in prefill, where there is a plain form too."""
    for case in (0, 4, 6, 7, 8):
        test_attend_latent_gpu.test_kernel_equals_twin(test_attend_latent_gpu.CASES[case])
    test_latent_kernels_gpu.test_sparse_prefill_over_parts(4, 32, 16, FP32)
    test_latent_kernels_gpu.test_sparse_prefill_over_parts(16, 128, 64, torch.float16)


def score_pick_and_append_entry() -> None:
    cases = test_latent_kernels_gpu.CASES
    for case in (cases[0], cases[1], cases[6], cases[7], cases[9]):
        test_latent_kernels_gpu.test_decode_chooses_what_the_twin_chooses(case, exact=True)
        test_latent_kernels_gpu.test_prefill_chooses_what_the_twin_chooses(case, exact=True)
    test_latent_kernels_gpu.test_new_keys_lie_on_both_sides(BF16)


def select() -> None:
    for case in (3, 4, 5, 6, 8, 11):
        test_select_gpu.test_exact_scores_choose_what_the_twin_chooses(test_select_gpu.CASES[case], 15)


def linear_and_swiglu() -> None:
    for case in (1, 2, 8, 13, 14):
        test_linear_gpu.test_every_division_gives_the_product_in_the_same_bits(
            test_linear_gpu.CASES[case], BF16
        )
    test_swiglu_gpu.test_kernel_equals_twin(3, 264, BF16)


def sample() -> None:
    """A row a cluster, of every width, and keys in global memory."""
    made = test_sampler_gpu.Case
    for case in (
        made("ties", 64, 5, 2, cluster=8),
        made("normal", 1500, 3, 2, cluster=4),
        made("wild", 1001, 3, 2, cluster=2),
        made("broken", 264, 5, 2, cluster=1),
        made("normal", 901, 3, 2, cluster=1, in_shared=False),
    ):
        with pytest.MonkeyPatch.context() as patch:
            test_sampler_gpu.test_tokens_are_those_of_the_definition(case, patch)


def norm_rope_and_locate() -> None:
    for rows, size in ((3, 264), (2, 8200)):
        test_norm_gpu.test_kernel_equals_twin(rows, size, BF16)
    for case in (2, 3, 4, 6):
        test_rope_gpu.test_kernel_equals_twin(test_rope_gpu.CASES[case], BF16)
    for place in (2, 4, 5):
        test_locate_gpu.test_kernel_equals_twin(test_locate_gpu.CASES[place])


def prefill() -> None:
    """write_run, fill_bounds, gather_pages, load_pages and merge_parts."""
    for case in test_write_run_gpu.CASES[1:]:
        test_write_run_gpu.test_records_are_the_twins(case, BF16)
        test_write_run_gpu.test_bounds_are_the_twins(case, 4, BF16)
    test_attend_part_gpu.test_gathered_pages_are_the_twins(BF16)
    for pages in test_load_pages_gpu.CASES[1:]:
        test_load_pages_gpu.test_pages_are_the_twins(pages)
    test_attend_part_gpu.test_merge_is_the_twins(BF16, (1, 4, 80))


def score_blocks_and_add_entry() -> None:
    for case in (0, 1, 5):
        test_block_kernels_gpu.test_choices_are_the_twins(test_block_kernels_gpu.CASES[case])
        test_block_kernels_gpu.test_what_decode_writes_lies_on_both_sides(test_block_kernels_gpu.CASES[case])


def code_records() -> None:
    """And what reads and writes such records."""
    test_coded_records_gpu.test_bytes_are_the_twins(128, 16, BF16)
    test_coded_records_gpu.test_bytes_are_appended_on_both_sides()
    for case in (0, 2, 4):
        test_coded_records_gpu.test_decode_attends_as_the_twin_does(test_coded_records_gpu.CASES[case])


KERNELS: Mapping[str, Callable[[], None]] = {
    work.__name__: work
    for work in (
        resolve_and_replay,
        append,
        attend,
        attend_latent,
        score_pick_and_append_entry,
        select,
        linear_and_swiglu,
        sample,
        norm_rope_and_locate,
        prefill,
        score_blocks_and_add_entry,
        code_records,
    )
}


def main() -> None:
    wanted = sys.argv[1:]
    for name, work in KERNELS.items():
        if not wanted or any(part in name for part in wanted):
            work()
            print("done:", name, flush=True)


if __name__ == "__main__":
    main()
