"""Where the time went: small traces whose table is known, and pieces against a plain loop."""

import gzip
import itertools
import json

import pytest

from lomdm_dist.cli import main
from lomdm_dist.errors import UserError
from lomdm_dist.study.trace import Piece, as_text, innermost, kind_of, overlay, read_trace, where_time_went

MAIN, BACKWARD, GLOO = 1, 2, 3


def span(name, start, end, cat="cpu_op", thread=MAIN, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": thread, "args": args}


def mark(name, at, thread=MAIN):
    return span(f"phase:{name}", at, at + 0.5, "user_annotation", thread)


def allocated(total, at, device=0):
    args = {"Device Type": device, "Total Allocated": total, "Bytes": total}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": at, "tid": MAIN, "args": args}


ON_HOST = [
    {"ph": "M", "name": "process_name", "ts": 0, "pid": 1, "args": {"name": "python"}},
    span("aten::mm", -50, -1),  # before the step
    span("step 7", 0, 100, "user_annotation"),
    mark("data", 5),
    span("aten::copy_", 6, 10),
    mark("z1", 20),
    span("aten::linear", 21, 31),  # 1 + 1 of its own: no work
    span("aten::t", 22, 23),
    span("aten::addmm", 23, 30),
    span("aten::_scaled_dot_product_flash_attention_for_cpu", 31, 35),
    span("autograd::engine::evaluate_function: MulBackward0", 35, 41),
    span("aten::mul", 36, 40),
    span("aten::mul", 36, 90, thread=BACKWARD),  # of another thread: not the one that trains
    mark("reduction", 50, BACKWARD),
    span("c10d::allreduce_", 51, 52),
    span("gloo:all_reduce", 51, 70, "user_annotation", GLOO),
    span("aten::add_", 55, 60),  # under it
    mark("None", 80),
    span("aten::sum", 90, 95),
    allocated(100, 21),
    allocated(300, 22),
    allocated(50, 60),
    allocated(900, 200),  # after the step
]


def test_a_step_on_a_host_is_cut_into_what_its_thread_does():
    found = where_time_went({"traceEvents": ON_HOST})
    micro = {
        phase: {k: round(1e6 * s, 6) for k, s in kinds.items()} for phase, kinds in found["seconds"].items()
    }
    assert micro == {
        "other": {"idle": 5 + 10 + 5, "pointwise": 5},
        "data": {"idle": 11, "copies": 4},
        "z1": {"idle": 1 + 1 + 1 + 1 + 1 + 1 + 9, "matrix products": 7, "attention": 4, "pointwise": 4},
        "reduction": {"idle": 1 + 10, "communication": 4 + 10, "pointwise": 5},
    }
    assert found["step_seconds"] == pytest.approx(100e-6, rel=1e-12)
    assert found["communication"] == pytest.approx({"in_flight": 19e-6, "under_computation": 5e-6})
    assert found["peak_bytes"] == {"z1": 300, "reduction": 50}
    assert (found["steps"], found["device"], found["rank"]) == ([7], "cpu", 0)
    first = found["operations"][0]
    assert (first["name"], first["kind"]) == ("gloo:all_reduce", "communication")
    assert first["seconds"] == pytest.approx(13e-6)


def test_a_step_on_a_gpu_is_cut_into_its_kernels_over_two_streams():
    gemm, nccl = "nvjet_tst_128x256_NNT", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"
    found = where_time_went(
        {
            "distributedInfo": {"rank": 3},
            "traceEvents": [
                span("step 1", 0, 50, "user_annotation"),
                span("step 2", 100, 200, "user_annotation"),
                mark("z1", 100),
                span("cudaLaunchKernel", 101, 102, "cuda_runtime", correlation=1),
                span("aten::mm", 100, 103),  # of the host: it counts kernels only
                mark("z2", 110, BACKWARD),
                span("cuLaunchKernelEx", 111, 112, "cuda_driver", BACKWARD, correlation=2),
                span("cudaLaunchKernel", 112, 113, "cuda_runtime", BACKWARD, correlation=3),
                span("cudaMemcpyAsync", 114, 115, "cuda_runtime", BACKWARD, correlation=4),
                span(gemm, 105, 130, "kernel", 7, correlation=1, stream=7),  # launched in z1
                span(nccl, 120, 160, "kernel", 20, correlation=2, stream=20),
                span("fmha_cutlassF_bf16_aligned_64x64", 130, 150, "kernel", 7, correlation=3, stream=7),
                span("Memcpy HtoD (Pageable -> Device)", 145, 155, "gpu_memcpy", 9, correlation=4),
                allocated(2**20, 120, device=1),
                allocated(2**30, 120, device=0),
            ],
        }
    )
    micro = {
        phase: {k: round(2e6 * s, 6) for k, s in kinds.items()} for phase, kinds in found["seconds"].items()
    }
    assert micro == {
        "other": {"idle": 50},
        "z1": {"idle": 5, "matrix products": 25},
        "z2": {"attention": 15, "copies": 10, "communication": 5, "idle": 40},
    }
    assert found["step_seconds"] == pytest.approx(75e-6, rel=1e-12)
    assert found["communication"] == pytest.approx({"in_flight": 20e-6, "under_computation": 17.5e-6})
    assert found["peak_bytes"] == {"z2": 2**20}
    text = as_text(found)
    assert "the mean of steps 1 to 2, rank 3, cuda" in text
    assert "communication in flight 0.02 ms: 0.02 ms under computation" in text


def test_pieces_against_a_plain_loop():
    times = [(k * 37 % 61, k * 37 % 61 + 1 + k * k % 17) for k in range(40)]  # they overlap in every way
    pieces = [Piece(start, end, (start, -end)) for start, end in times]
    window, cut = Piece(5.5, 50.5, None), []
    for half in (innermost(pieces[:20]), innermost(pieces)):
        assert all(a.end <= b.start for a, b in itertools.pairwise(half))
        cut.append(half)
    seen = list(overlay(window, *cut))
    assert (seen[0].start, seen[-1].end) == (5.5, 50.5)
    assert all(a.end == b.start for a, b in itertools.pairwise(seen))
    for tick in range(6, 50):
        now = tick + 0.25
        (here,) = [piece.what for piece in seen if piece.start <= now < piece.end]
        for what, among in zip(here, (pieces[:20], pieces), strict=True):
            assert what == max((p.what for p in among if p.start <= now < p.end), default=None)


KINDS = {
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL": "communication",
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": "attention",
    "sm90_xmma_gemm_bf16bf16_bf16f32": "matrix products",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop>": "matrix products",
    "aten::baddbmm": "matrix products",
    "aten::_scaled_mm": "matrix products",
    "triton_tem_fused_mm_3": "matrix products",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<...>": "copies",
    "Memset (Device)": "copies",
    "triton_poi_fused_add_mul_0": "pointwise",
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<...>>": "pointwise",
    "aten::native_layer_norm": "pointwise",
    "aten::sum": "pointwise",
}


def test_kinds_of_operations_and_kernels():
    assert {name: kind_of(name) for name in KINDS} == KINDS


def test_the_command_reads_a_run_or_a_trace(tmp_path, capsys):
    folder = tmp_path / "profile"
    folder.mkdir()
    trace, result = folder / "trace-steps-7-7-rank-0.json.gz", tmp_path / "result.json"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": ON_HOST}).encode()))
    for path in (tmp_path, trace):
        main(["bench", "profile", str(path), "--json", str(result)])
        (found,) = json.loads(result.read_text())["traces"].values()
        assert sum(sum(kinds.values()) for kinds in found["seconds"].values()) == pytest.approx(
            100e-6, rel=1e-9
        )
        assert "where the time went: step 7, rank 0, cpu" in capsys.readouterr().out


def test_what_is_no_trace_is_said(tmp_path):
    path = tmp_path / "a.json.gz"
    with pytest.raises(UserError, match=r"cannot read .*No such file"):
        read_trace(path)
    packed = bytearray(gzip.compress(json.dumps({"traceEvents": ON_HOST}).encode()))
    packed[12:40] = bytes(28)  # in the compressed stream
    odd = gzip.compress(b'{"traceEvents": [1]}'), bytes(packed)
    for content in (b"", b"text", gzip.compress(b'{"traceEvents": [')[:-9], gzip.compress(b"[]"), *odd):
        path.write_bytes(content)
        with pytest.raises(UserError, match="is no trace"):
            read_trace(path)
    with pytest.raises(UserError, match="the trace has no steps"):
        where_time_went({"traceEvents": [span("aten::mm", 0, 1)]})
    with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        main(["bench", "profile", "."])
