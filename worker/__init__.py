"""One process per device: weights, KV, kernels and collectives. A worker decides nothing about requests."""
