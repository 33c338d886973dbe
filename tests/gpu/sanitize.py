"""A few small steps of every kernel for compute-sanitizer, which is far too slow for the tests themselves.

compute-sanitizer --tool memcheck --report-api-errors no python -m tests.gpu.sanitize
compute-sanitizer --tool racecheck --report-api-errors no python -m tests.gpu.sanitize
"""

from __future__ import annotations

from tests.gpu.test_replay_gpu import Follower
from tests.gpu.test_resolve_gpu import Case, Rig

CASES = (
    Case(16, 64, 1, 2, 40, 44, 90, 4, 6),
    Case(32, 4, 3, 2, 12, 13, 60, 2, 6),
    Case(1152, 64, 1, 1, 300, 400, 900, 8, 4),
    Case(1152, 64, 1, 1, 300, 400, 900, 1, 4, sweep=True),
    Case(8192, 4, 2, 2, 100, 120, 200, 4, 4, sweep=True),
)


def main() -> None:
    for case in CASES:
        rig = Rig(case, disturbed=False)
        follower = Follower(rig)
        for step in range(case.steps):
            follower.step()
            if step == 2:
                rig.resize()
        rig.agree()
        assert not bool(follower.wrong)
        follower.close()
        rig.close()
        print("done:", case)


if __name__ == "__main__":
    main()
