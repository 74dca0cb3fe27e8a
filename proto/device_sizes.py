"""Sizes of what a GPU worker sets aside: workers allocate by them, and plans of memory count with them. Pure."""

STEP_BATCHES = (1, 2, 4, 8, 16)  # of captured decode steps: a batch is rounded up to the next
MOST_ROWS = STEP_BATCHES[-1]  # of a step; passes of so few rows multiply quantised matrices as they are
MOST_STEPS = 64  # between two looks at the results
SPLITS = 32  # of a request's cache among programs
DEEP_CONTEXT = 8192  # tokens, beyond which there are twice as many splits
SPAN = 256  # columns with one scale of activations, in a batch
BEST_BLOCK = 2048  # logits that a program of a choice looks at
DRAW_KEYS = 64  # greatest logits of a rank and row, among which a sampled choice is made
WIDE_VOCAB = 1 << 17  # ids of a rank beyond which groups are larger, so that there are about as many as their members
FLAG_WORDS = 32  # of an inbox: a flag has 128 bytes of its own
MOST_SCORES = 1 << 24  # of attention at a time, one KV head's group: 64 MiB in f32
KEPT_MASKS = 4  # of attention, for the layers to come
EXPANDED_BYTES = 128 << 20  # most of the workspace that matrices are expanded into
SHORT_CHUNK_ROWS = 512  # so few are multiplied as fast by twice as many pieces of half the size
SMALL_CHUNK_BUCKETS = (64, 128)
CHUNK_BUCKET_ROWS = 256
EXACT_BYTES = 16 << 20  # of blocks that are multiplied by exact activations, expanded at once to f32


def chunk_bucket(rows: int) -> int:
    """Rows that a chunk of a prompt is filled up to on a GPU, so that few sizes are captured (model/chunk_pass.py)."""
    small = next((size for size in SMALL_CHUNK_BUCKETS if rows <= size), None)
    return small or -(-rows // CHUNK_BUCKET_ROWS) * CHUNK_BUCKET_ROWS


def bucket_sizes(rows: int) -> list[int]:
    """These sizes, for chunks of up to so many rows."""
    large = range(CHUNK_BUCKET_ROWS, chunk_bucket(rows) + 1, CHUNK_BUCKET_ROWS)
    return [*(size for size in SMALL_CHUNK_BUCKETS if size < rows or size == chunk_bucket(rows)), *large]


def expanded_bytes(chunk_rows: int) -> int:
    """Most of the workspace that matrices are expanded into, for chunks of up to so many rows."""
    return EXPANDED_BYTES // 2 if chunk_rows <= SHORT_CHUNK_ROWS else EXPANDED_BYTES


def splits_for(context_tokens: int) -> int:
    """Fixed, so that results do not depend on how full a cache is."""
    return SPLITS if context_tokens <= DEEP_CONTEXT else 2 * SPLITS


def draw_group(vocab: int) -> int:
    """Logits whose greatest stands for all while the greatest of a rank's are looked for."""
    return 32 if vocab <= WIDE_VOCAB else 64
