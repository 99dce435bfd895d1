"""Train a model whose records take 28 times the memory that experts get, stop, and resume with another budget.

Run it with a directory that does not exist yet:  python examples/train_larger_than_memory.py /tmp/larger

Then train it again with memory for everything: it ends in the same bits.
"""

import sys
from pathlib import Path

from tierstore.cache import CacheConfig
from tierstore.train import DataConfig, ModelConfig, Opening, TrainConfig, open_session
from tierstore.units import format_bytes, parse_size

STEPS = 4
MODEL = ModelConfig(d_model=96, n_heads=4, n_layers=4, seq_len=64, d_ff=192, experts=32, top_k=2)
DATA = DataConfig(max_bytes=1 << 20, batch_size=4)  # no paths: the source text of Python's own library


def train(store: Path, host_budget: str, steps: int, opening: Opening) -> int:
    """Trains up to step ``steps``, commits, and returns a checksum over all records."""
    config = TrainConfig(
        store=store,
        host_budget=parse_size(host_budget),  # bytes: the host cache, gradients and slots of the device
        model=MODEL,
        data=DATA,
        cache=CacheConfig(policy="next-use"),
    )
    with open_session(config, opening) as trainer:
        while trainer.state.position < steps:
            result = trainer.step()
            print(f"step {result.step}: loss {result.loss:.4f}, {result.active_experts} experts")
        trainer.commit()  # durable; a kill before this line loses these steps and nothing else
        records = sum(
            trainer.store.records.info(key).schema.record_bytes for key in trainer.store.records.keys
        )
        cache, stalled_s = trainer.store.cache.residency.stats(), trainer.ledger.total_s
        print(
            f"{format_bytes(records)} of records in {host_budget}: {cache.hits} hits, {cache.misses} misses, "
            f"{format_bytes(cache.read_bytes)} read, {stalled_s:.2f} s stalled"
        )
        return trainer.store.records_crc32c()


def main(directory: Path) -> None:
    train(directory / "tight", "3MiB", STEPS // 2, Opening.CREATE)
    resumed = train(directory / "tight", "6MiB", STEPS, Opening.RESUME)
    roomy = train(directory / "roomy", "256MiB", STEPS, Opening.CREATE)
    print("the same bits" if resumed == roomy else "different bits")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
