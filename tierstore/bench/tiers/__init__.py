"""A store under load: throughput, latencies, write and space amplification."""
