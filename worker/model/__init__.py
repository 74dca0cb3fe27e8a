"""The model's mathematics. Shape letters: T rows (tokens of a chunk or requests of a batch), D hidden width,
Q query heads, H KV heads, K key width, V value width, F feed-forward width of the parts at hand, L cached tokens."""
