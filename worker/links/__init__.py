"""All of torch.distributed, and shared memory between the ranks of one host."""

from .errors import CollectiveTimeoutError, LinkFailedError
from .kv_moves import KvMoves, MoveHandle
from .open import Links, open_links
from .pipeline import PipelineEdges
from .tensor_group import TensorGroup

__all__ = [
    "CollectiveTimeoutError",
    "KvMoves",
    "LinkFailedError",
    "Links",
    "MoveHandle",
    "PipelineEdges",
    "TensorGroup",
    "open_links",
]
