"""CUDA source of one launch for pieces of different types below one another, with 2 to 16 rows of activations.

Each piece has blocks of its own, which do what those of `batch_source` do: the same text, once for each type. What a
block needs of registers is bounded by the tile, so none is worse off beside others. Nothing is sent to other ranks:
only matrices of one tensor are, and these have one type.
"""

from collections.abc import Sequence

from .batch_source import SOURCE, tile_facts, type_facts
from .cuda_text import COPIES, DELIVER, INSTRUCTIONS, defines
from .quant_planes import PlaneFormat

HEAD = """
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) multiply_batch(
    const signed char* x, const float* x_scales, const unsigned short* x_sums, float* out, int out_stride, int batch,
    int groups{arguments}) {{
  int block = blockIdx.x;
"""
ARGUMENTS = """,
    const unsigned char* codes_{n}, const unsigned* high_{n}, const unsigned* scales_{n}, const unsigned* supers_{n},
    int first_{n}, int rows_{n}, int blocks_{n}"""
BRANCH = """
  if (block < blocks_{n}) {{  // all threads of a block
    piece_{n}::multiply_tiles(block, blocks_{n}, codes_{n}, high_{n}, scales_{n}, supers_{n}, x, x_scales, x_sums,
                            out + first_{n}, out_stride, rows_{n}, batch, groups, nullptr, nullptr, 0, 0, 1, 0);
    return;
  }}
  block -= blocks_{n};
"""


def grouped_source(forms: Sequence[PlaneFormat], tile: tuple[int, int], rows_of_eight: int, whole: bool) -> str:
    """A kernel as `batch_source.source`, of pieces of these types. Blocks are the first piece's, then the second's."""
    parts = [defines(tile_facts(tile, rows_of_eight, whole)), INSTRUCTIONS, COPIES, DELIVER]
    for number, form in enumerate(forms):
        facts = type_facts(form)
        undone = "".join(f"#undef {name}\n" for name in facts)
        parts.append(f"{defines(facts)}namespace piece_{number} {{{SOURCE}}}\n{undone}")
    arguments = "".join(ARGUMENTS.format(n=number) for number in range(len(forms)))
    branches = "".join(BRANCH.format(n=number) for number in range(len(forms)))
    return "".join(parts) + HEAD.format(arguments=arguments) + branches + "}\n"
