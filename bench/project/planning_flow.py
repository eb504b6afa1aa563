"""How often a plan with a budget and a host budget orders and lays out, checks, and builds a rewritten graph.

    python bench/project/planning_flow.py graphs/gpt2_b32.json.gz

Per target (the budget, then lower ones until the arena fits it too) at most two graphs are laid out: that of the best
plan without swaps, and that of the best one with them. The answer is checked once, no graph is built twice.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any
from unittest import mock

import olla
from olla import pipeline, planner
from olla.plan import Plan, Recomputed
from olla.recompute import starts
from olla.recompute.rewrite import recomputed_graph
from olla.recompute.search import RecomputeSearch


def count(graph: olla.Graph, share: float = 0.7, time_limit: float = 60.0) -> tuple[Plan, Counter[str]]:
    """Plan towards a share of what the best order has above resident memory.

    Returns:
        The plan, and the number of: "pipeline" runs, "check"s, "targets", rewritten graphs "built", "distinct" ones.
    """
    counts: Counter[str] = Counter()
    digests: set[str] = set()
    targets: set[int] = set()

    def rewrite(*given: Any) -> Recomputed:
        built = recomputed_graph(*given)
        counts["built"] += 1
        digests.add(built.graph.digest)
        return built

    def lowered(self: RecomputeSearch, target: int) -> tuple[Recomputed] | None:
        targets.add(target)
        return within(self, target)

    best = olla.plan(graph, layout=False, time_limit=time_limit).peak_bytes
    budget = int(graph.resident_bytes + share * (best - graph.resident_bytes))
    within = RecomputeSearch.within
    with (
        mock.patch.object(pipeline, "run", side_effect=pipeline.run) as run,
        mock.patch.object(planner, "check", side_effect=planner.check) as check,
        mock.patch.object(starts, "recomputed_graph", rewrite),
        mock.patch.object(RecomputeSearch, "within", lowered),
    ):
        plan = olla.plan(graph, budget=budget, host_budget="64GB", time_limit=time_limit)
    counts |= Counter(
        {"pipeline": run.call_count, "check": check.call_count, "targets": len(targets), "distinct": len(digests)}
    )
    return plan, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="+", metavar="GRAPH")
    wrong = 0
    for path in parser.parse_args().graphs:
        plan, counts = count(olla.Graph.load(path))
        print(f"{plan.graph_name}: {dict(counts)}")
        wrong += counts["pipeline"] > 2 * counts["targets"] or counts["check"] != 1
        wrong += counts["built"] > counts["distinct"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
