"""GPU kernels without a GPU: right in Triton's interpreter, and compiled for the cards that we support.

`make check-kernels` puts Triton and NVRTC beside the CPU build of torch for this, and nothing may be skipped there.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if os.environ.get("GEARSHIFT_CHECK_KERNELS") != "1":
    pytest.importorskip("triton", reason="Triton comes with the CUDA build of torch; `make check-kernels` runs these")

CARDS = (75, 80, 86, 89, 90, 120)


def most_shared_bytes(card: int) -> int:
    """What a block may have on a consumer card of this capability, times ten."""
    return (64 if card < 80 else 99) << 10


COMPILE = """
import re
import sys
card = int(sys.argv[1])
half = "*fp16" if card < 80 else "*bf16"  # what it computes in
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from gearshift.worker.kernels import attention_triton, draw_triton, exchange_triton, grouped_triton, parcel_triton
from gearshift.worker.kernels import quant_triton, step_triton
from gearshift.worker.kernels.batch_source import type_facts
from gearshift.worker.kernels.cards import split_tile
from gearshift.worker.kernels.quant_planes import FORMATS

def source(kernel, types, constants):
    signature = {name: types.get(name, "constexpr" if name in constants else "*fp32") for name in kernel.arg_names}
    return ASTSource(fn=kernel, signature=signature, constexprs=constants)

def sources():
    for form in FORMATS.values():
        facts = dict(K=4096, BITS=form.code_bits, HIGH=form.high_bits, KIND=int(form.scale_kind), ZERO=form.zero)
        words = dict.fromkeys(("codes", "high", "scales", "supers", "xq"), "*i32") | {"N": "i32"}
        words["supers"] = "*fp16" if form.name == "Q6_K" else "*i32"
        words |= {"inboxes": "*i64", "sequence": "*i32", "first": "i32"}
        sent = dict(WIDTH=5120, RANKS=4, RANK=1, ROWS=16)
        in_turns = facts | dict(K=5120, BN=4, G=16, EMULATED=False)
        yield source(quant_triton.multiply_rows, words, in_turns | sent)
        raw = dict(high="*u8", scales="*i8", supers="*fp16", ids="*i32", out=half)
        raw |= dict(out_stride="i32", N="i32", factor="fp32")
        raw["codes"] = "*i8" if form.code_bits == 8 else "*u8"
        yield source(quant_triton.expand_rows, raw, facts | dict(GATHER=False, BN=2, G=16))
        exact = dict(x_stride="i32", out="*fp32")
        yield source(quant_triton.multiply_floats, raw | exact, facts | dict(BN=4, G=16))
        yield source(quant_triton.multiply_floats, raw | exact | dict(x=half), facts | dict(BN=4, G=16))
    for together in (("Q6_K", "Q4_K"), ("Q8_0", "Q6_K", "Q5_K")):
        types, constants = {"xq": "*i32"}, dict(PIECES=len(together), K=4096, BN=2, G=64, EMULATED=False)
        for n, form in enumerate(map(FORMATS.get, (*together, together[0])[:3])):
            types |= dict.fromkeys((f"codes_{n}", f"high_{n}", f"scales_{n}", f"supers_{n}"), "*i32")
            types |= {f"first_{n}": "i32", f"N_{n}": "i32"}
            types |= {f"supers_{n}": "*fp16"} if form.name == "Q6_K" else {}
            constants |= {f"{fact}_{n}": value for fact, value in type_facts(form).items()}
        yield source(grouped_triton.multiply_pieces, types, constants)
    for ranks, parts, quantised in ((4, 1, True), (1, 2, True), (4, 1, False)):
        yield source(step_triton.finish_half_block, dict(partial_stride="i32", part_stride="i32",
            normed=half if quantised else "*fp32",
            xq="*i8", halves="*fp16", inboxes="*i64", sequence="*i32", failed="*i32", epsilon="fp32"),
            dict(D=5120, M=256, PARTS=parts, POST=True, QUANT=quantised, RANKS=ranks, RANK=0, ROWS=16, MANY=True,
                 SENT=False, COUNT=False))
    yield source(exchange_triton.sum_rows, dict(stride="i32", inboxes="*i64", sequence="*i32", failed="*i32"),
        dict(D=5120, M=16, SENT=True, RANKS=4, RANK=0, ROWS=16))
    cached = dict.fromkeys(("key_slot", "key_head", "value_slot", "value_head", "table_stride"), "i32")
    cached |= dict(query=half, table="*i64", positions="*i32")
    floats, q8_0 = (False, False), (True, True)
    for width in (64, 128, 256):
        for group, blocks in ((1, floats), (4, floats), (8, floats), (4, q8_0), (4, (False, True))):
            tile = split_tile(card < 80, group, width)
            rows = dict(keys="*i16" if blocks[0] else half, values="*i16" if blocks[1] else half)
            yield source(attention_triton.attend_split, cached | rows | dict(scale="fp32"), dict(Q=4 * group - 1, H=4,
                GROUP=group, SKIPPED=min(1, group - 1), PAD=tile.queries, W=width, SPLITS=32, WINDOW=0,
                STAGES=tile.stages, TOGETHER=tile.together, KEY_BLOCKS=blocks[0], VALUE_BLOCKS=blocks[1],
                EMULATED=False))
    for blocks in (floats, q8_0, (False, True)):
        rows = dict(keys="*i16" if blocks[0] else half, values="*i16" if blocks[1] else half)
        yield source(step_triton.rotate_and_store, cached | rows | dict(projected=half, projected_stride="i32",
            epsilon="fp32", query_stride="i32", T="i32"), dict(Q=16, H=4, W=128, PAIRS=64, INTERLEAVED=False,
            BIAS=True, NORM=True, R=16, KEY_BLOCKS=blocks[0], VALUE_BLOCKS=blocks[1]))
    yield source(attention_triton.gather_q8_0, dict(rows="*i16", slot_stride="i32", head_stride="i32", slots="*i64",
        out=half), dict(W=128))
    for quantised in (True, False):
        yield source(attention_triton.attend_merge, dict(positions="*i32", xq="*i8", halves="*fp16"),
            dict(Q=16, LEAD=1, HELD=18, W=128, SPLITS=64, WINDOW=0, HEADS=2, TOGETHER=32, MANY=True, QUANT=quantised))
    yield source(step_triton.rope_angles, dict(positions="*i32", magnitude="fp32", rows="i32"), dict(PAIRS=64, P=64))
    yield source(attention_triton.merge_two, dict(past=half, new=half, out=half, past_stride="i32",
        new_stride="i32", out_stride="i32", T="i32", head_stride="i32"), dict(W=128, R=16))
    yield source(step_triton.gate_rows, dict(both_stride="i32", out=half, out_stride="i32", xq="*i8",
        halves="*fp16"),
        dict(F=7168, M=8, GELU=True, QUANT=True, MANY=True, SHRINK=1.0))
    yield source(step_triton.gate_rows, dict(both=half, both_stride="i32", out=half, out_stride="i32", xq="*i8",
        halves="*fp16"),
        dict(F=7168, M=64, GELU=True, QUANT=False, MANY=True, SHRINK=32.0))
    yield source(step_triton.best_of_block, dict(stride="i32", first_id="i32", scale="fp32"),
        dict(V=64128, BLOCK=2048, BLOCKS=32))
    yield source(step_triton.choose_token, dict(tokens="*i32", positions="*i32", steps="*i32", ids_out="*i32",
        out_stride="i32", inboxes="*i64", data_at="i32", flags_at="i32", sequence="*i32", failed="*i32"),
        dict(BLOCKS=32, PADDED=32, RANKS=4, RANK=1, ROWS=16))
    part = dict(groups="*i64", candidates="*i64", greatest="*i64", stride="i32", first_id="i32", scale="fp32")
    part |= dict(keyed_stride="i32", keyed_scale="fp32")
    yield source(draw_triton.penalise, part | dict(counts_at="*i64", rows="i32"), dict(V=64128, BLOCK=2048))
    yield source(draw_triton.greatest_of_groups, part, dict(V=64128, BLOCK=2048, BLOCKS=32, GROUP=32))
    for vocab, groups, group in ((64128, 2048, 32), (262144, 4096, 64)):
        yield source(draw_triton.gather_greatest_groups, part,
            dict(V=vocab, COUNT=groups, GROUP=group, K=64, MINE=32, CHUNK=256))
        yield source(draw_triton.sort_greatest, part, dict(COUNT=64 * group, K=64, MINE=32, CHUNK=256))
    for ranks, rank, penalised in ((1, 0, True), (2, 0, False), (2, 0, True), (2, 1, False), (8, 7, True)):
        yield source(draw_triton.draw_token, dict(greatest="*i64", merged="*i64", table="*fp64", tokens="*i32",
            positions="*i32", steps="*i32", ids_out="*i32", out_stride="i32", inboxes="*i64", words_at="i32",
            sequence="*i32", failed="*i32", rows="i32", stride="i32", scale="fp32", first_id="i32", counts_at="*i64"),
            dict(V=64128, BLOCKS=32, PADDED=32, K=64, RANKS=ranks, KEYS=64 * ranks, RANK=rank, SAMPLER=ranks - 1,
                 ROWS=16, PENALISED=penalised))
    parcels = dict.fromkeys(("arena", "slots", "parcel", "weights", "verdicts"), "*i64") | {"salt": "i64"}
    parcels |= dict.fromkeys(("slot_words", "first_block", "first_word", "words", "number"), "i32")
    yield source(parcel_triton.pack_blocks, parcels, dict(WIDTH=1021, TILE=4096))
    yield source(parcel_triton.unpack_blocks, parcels, dict(WIDTH=1021, TILE=4096, PUT=True))
    yield source(parcel_triton.unpack_blocks, parcels, dict(WIDTH=1021, TILE=4096, PUT=False))
    for many in (False, True):
        yield source(quant_triton.quantize_rows, dict(stride="i32", xq="*i8", halves="*fp16"),
            dict(K=4096, M=16, MANY=many))
    yield source(quant_triton.gather_dense_rows, dict(table="*bf16", ids="*i32", factor="fp32"),
        dict(D=4096, BLOCK=1024))
    yield source(quant_triton.expand_rows, raw, facts | dict(GATHER=True, BN=2, G=16))

def fused_with_a_shuffle(ptx):
    # Threads of a pair would get different sums: fatal where one of them stores it and another one sends it.
    shuffled = set(re.findall(r"shfl\\.sync\\.bfly\\.b32\\s+(%r\\d+)", ptx))
    return [line for line in re.findall(r"\\bfma\\.rn\\S* .*", ptx) if shuffled & set(re.findall(r"%r\\d+", line))]

shared = 0
for each in sources():
    compiled = compile(each, target=GPUTarget("cuda", card, 32))
    shared = max(shared, compiled.metadata.shared)
    if each.fn in (step_triton.choose_token, draw_triton.draw_token):
        assert not fused_with_a_shuffle(compiled.asm["ptx"]), each.name
print(shared)
"""


COMPILE_CUDA = """
import itertools
import sys
from gearshift.worker.kernels import batch_source, block_source
from gearshift.worker.kernels.batch_kernels import TILES
from gearshift.worker.kernels.block_types import BLOCK_FORMATS
from gearshift.worker.kernels.cuda_source import Compiler
from gearshift.worker.kernels.grouped_source import grouped_source
from gearshift.worker.kernels.quant_planes import FORMATS

compiler, most = Compiler(f"sm_{sys.argv[1]}"), int(sys.argv[2])
for form in FORMATS.values():
    for tile, whole in itertools.product(TILES, (True, False)):
        if batch_source.shared_bytes([form], tile, 2) <= most:
            assert compiler.image(batch_source.source(form, tile, 2, whole)).startswith(bytes((127, *b"ELF")))
            print(batch_source.shared_bytes([form], tile, 2))
for names, whole in ((("Q6_K", "Q4_K"), True), (("Q6_K", "Q5_K", "Q8_0"), True), (("Q5_0", "Q4_1"), False)):
    image = compiler.image(grouped_source([FORMATS[name] for name in names], (4, 4), 2, whole))
    assert image.startswith(bytes((127, *b"ELF")))
expansions = [kernel for kernel in block_source.Kernel if kernel.function == "expand"]
for number, blocks in enumerate(BLOCK_FORMATS.values()):
    some = [block_source.Kernel.ROW, block_source.Kernel.BATCH_16, expansions[number % 3]]
    for kernel in some if number else block_source.Kernel:
        assert compiler.image(block_source.source(blocks, kernel)).startswith(bytes((127, *b"ELF")))
        print(block_source.shared_bytes(blocks, kernel))
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


def test_what_a_card_takes_is_imported_without_torchs_compiler() -> None:
    """It would take seconds, beside a load that Python's lock lets wait for it."""
    asked = "import sys, gearshift.worker.device_model; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", asked], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "False", done.stdout + done.stderr


def test_products_over_planes_are_right_in_the_interpreter() -> None:
    run(["-m", "gearshift.tests.worker.quant_kernel_checks"], TRITON_INTERPRET="1")


def test_kernels_between_products_are_right_in_the_interpreter() -> None:
    run(["-m", "gearshift.tests.worker.step_kernel_checks"], TRITON_INTERPRET="1")


def test_attention_over_the_cache_is_right_in_the_interpreter() -> None:
    run(["-m", "gearshift.tests.worker.attention_kernel_checks"], TRITON_INTERPRET="1")


def test_sums_over_ranks_are_right_in_the_interpreter() -> None:
    run(["-m", "gearshift.tests.worker.exchange_kernel_checks"], TRITON_INTERPRET="1")


def test_sampled_choices_are_the_samplers_in_the_interpreter() -> None:
    run(["-m", "gearshift.tests.worker.draw_kernel_checks"], TRITON_INTERPRET="1")


def test_steps_of_the_layer_layout_are_what_its_passes_are_in_the_interpreter() -> None:
    run(["-m", "gearshift.tests.worker.layer_step_checks"], TRITON_INTERPRET="1")


def test_steps_of_the_tensor_layout_are_those_of_the_layer_layout_in_the_interpreter() -> None:
    run(["-m", "gearshift.tests.worker.tensor_step_checks"], TRITON_INTERPRET="1")


def test_chunks_in_pieces_and_what_is_prepared_for_them_are_right_in_the_interpreter() -> None:
    run(["-m", "gearshift.tests.worker.chunk_checks"], TRITON_INTERPRET="1")


def test_products_of_many_rows_are_right_when_a_compiler_for_the_host_runs_their_source() -> None:
    if os.environ.get("GEARSHIFT_CHECK_KERNELS") != "1" and shutil.which("g++") is None:
        pytest.skip("needs g++")
    run(["-m", "gearshift.tests.worker.batch_kernel_on_host"], TRITON_INTERPRET="1")


def test_products_and_expansions_of_blocks_are_right_when_a_compiler_for_the_host_runs_their_source() -> None:
    if os.environ.get("GEARSHIFT_CHECK_KERNELS") != "1" and shutil.which("g++") is None:
        pytest.skip("needs g++")
    run(["-m", "gearshift.tests.worker.block_kernel_on_host"], TRITON_INTERPRET="1")


def test_passes_in_f16_are_near_those_in_f32_in_the_interpreter() -> None:
    run(["-m", "gearshift.tests.worker.f16_checks"], TRITON_INTERPRET="1")


def test_parcels_by_kernels_are_those_of_plain_torch_in_the_interpreter() -> None:
    run(["-m", "gearshift.tests.worker.parcel_kernel_checks"], TRITON_INTERPRET="1")


@pytest.mark.parametrize("card", CARDS)
def test_kernels_compile_for_a_card_within_its_shared_memory(card: int, tmp_path: Path) -> None:
    script = tmp_path / "compile_kernels.py"  # Triton reads sources: none from -c
    script.write_text(COMPILE)
    assert int(run([str(script), str(card)])) <= most_shared_bytes(card)


@pytest.mark.parametrize("card", CARDS)
def test_cuda_kernels_compile_for_a_card_within_its_shared_memory(card: int, tmp_path: Path) -> None:
    if os.environ.get("GEARSHIFT_CHECK_KERNELS") != "1" and importlib.util.find_spec("nvidia") is None:
        pytest.skip("NVRTC comes with the CUDA build of torch; `make check-kernels` runs this")
    script = tmp_path / "compile_cuda.py"
    script.write_text(COMPILE_CUDA)
    most = most_shared_bytes(card)
    assert max(map(int, run([str(script), str(card), str(most)]).split())) <= most
