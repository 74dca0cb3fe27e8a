"""GPU kernels without a GPU: right in Triton's interpreter, and compiled for the cards that we support."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes with the CUDA build of torch; `pip install triton` runs this test")

CARDS = (80, 86, 89, 90, 120)
MOST_SHARED_BYTES = 99 << 10  # what a block may have on consumer cards

COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from gearshift.worker.kernels import quant_triton, step_triton
from gearshift.worker.kernels.quant_planes import FORMATS

def source(kernel, types, constants):
    signature = {name: types.get(name, "constexpr" if name in constants else "*fp32") for name in kernel.arg_names}
    return ASTSource(fn=kernel, signature=signature, constexprs=constants)

def sources():
    for form in FORMATS.values():
        facts = dict(K=4096, BITS=form.code_bits, HIGH=form.high_bits, KIND=int(form.scale_kind), ZERO=form.zero)
        words = dict.fromkeys(("codes", "high", "scales", "supers", "xq"), "*i32") | {"out_stride": "i32", "N": "i32"}
        words["supers"] = "*fp16" if form.name == "Q6_K" else "*i32"
        yield source(quant_triton.multiply_rows, words, facts | dict(B=4, BN=2, G=64, EMULATED=False))
        raw = dict(high="*u8", scales="*i8", supers="*fp16", ids="*i32", out="*bf16")
        raw |= dict(out_stride="i32", N="i32", factor="fp32")
        raw["codes"] = "*i8" if form.code_bits == 8 else "*u8"
        yield source(quant_triton.expand_rows, raw, facts | dict(GATHER=False, BN=2, G=16))
    yield source(step_triton.finish_half_block, dict(partial_stride="i32", normed="*bf16", xq="*i8", inboxes="*i64",
        flags_at="i32", sequence="*i32", failed="*i32", epsilon="fp32"),
        dict(D=5120, M=256, HAS_PARTIAL=True, POST=True, QUANT=True, RANKS=2, RANK=0, ROWS=16))
    yield source(step_triton.attend_split, dict(query="*bf16", keys="*bf16", values="*bf16", table="*i64",
        table_stride="i32", positions="*i32", scale="fp32", slot_stride="i32", head_stride="i32"),
        dict(H=4, GROUP=4, PAD=16, W=256, SPLITS=32, WINDOW=0))

card = int(sys.argv[1])
print(max(compile(each, target=GPUTarget("cuda", card, 32)).metadata.shared for each in sources()))
"""


def run(arguments: list[str], **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_products_over_planes_are_right_in_the_interpreter() -> None:
    run(["-m", "gearshift.tests.worker.quant_kernel_checks"], TRITON_INTERPRET="1")


@pytest.mark.parametrize("card", CARDS)
def test_kernels_compile_for_a_card_within_its_shared_memory(card: int, tmp_path: Path) -> None:
    script = tmp_path / "compile_kernels.py"  # Triton reads sources: none from -c
    script.write_text(COMPILE)
    assert int(run([str(script), str(card)])) <= MOST_SHARED_BYTES
