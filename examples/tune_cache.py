"""From a trace to a configuration: generate a training trace, see what policies miss, tune, and paste.

python examples/tune_cache.py
"""

from tierstore.lab import Machine, RoutingWorkload, curves, in_memory, trace_requests, tune


def main() -> None:
    # Eight layers of 32 experts, 8 tokens a step that each choose 2: forward, then backward.
    workload = RoutingWorkload(
        layers=8,
        experts=32,
        k=2,
        tokens_per_step=8,
        steps=400,
        skew=1.0,
        persistence=0.5,
        weight_bytes=8 << 20,
    )
    requests = trace_requests(in_memory(workload), name="generated")
    print(f"{requests.info.requests} requests for {requests.table.total_bytes >> 20} MiB of experts")

    for curve in curves(requests, ["lru", "lfu-decay", "next-use", "belady"], [0.2, 0.4, 0.6]):
        print(f"{curve.label:10}", *(f"{point.miss_ratio:.3f}" for point in curve.points))

    machine = Machine(read_bytes_per_s=3e9, write_bytes_per_s=2e9, compute_s_per_step=0.1)
    found = tune(requests, 0.4, machine=machine)
    print(found.regime.advice)
    print(
        f"{found.result.verdict.value}: misses {found.result.gain:.1%} of the requests fewer than the default"
    )
    print(found.result.configuration)


if __name__ == "__main__":
    main()
