"""What kernels and operators are for, by names as they stand in traces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flopwise
from flopwise.profile.explain.kernel_classes import class_of
from flopwise.records.profile import KernelClass

DEVICE_NAMES: dict[KernelClass, tuple[str, ...]] = {
    "gemm": (
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(T1::Params)",
        "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
        "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw",
        "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV",
        "triton_tem_fused_mm_5",
        "triton_tem_fused_addmm_7",
    ),
    "attention": (
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 32, 4>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 64>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
        "triton_tem_fused_flex_attention_0",
    ),
    "norm": (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>",
        "void cudnn::bn_fw_tr_1C11_kernel_NHWC<float>",
        "triton_red_fused_native_layer_norm_2",
        "_rms_norm_fwd_kernel",
    ),
    "optimizer": (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
        "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpListAlphaFunctor>",
    ),
    "communication": (
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclDevComm*)",
        "rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>",
    ),
    "copy": ("Memcpy HtoD (Pinned -> Device)", "Memset (Device)"),
    "pointwise": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
        "triton_poi_fused_add_mul_3",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, true, false>",
        "hip_elementwise_kernel",
    ),
    "other": ("spin_kernel", "hipSomethingElse", ""),
}
OPERATORS: dict[KernelClass, tuple[str, ...]] = {
    "gemm": (
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::linear",
        "aten::conv2d",
        "aten::convolution",
        "aten::mkldnn_convolution",
        "aten::convolution_backward",
    ),
    "attention": (
        "aten::scaled_dot_product_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_flash_attention_forward",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "norm": ("aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::rms_norm", "aten::batch_norm"),
    "pointwise": (
        "aten::copy_",
        "aten::_to_copy",
        "aten::add_",
        "aten::gelu",
        "aten::gelu_backward",
        "aten::_softmax",
        "aten::embedding",
        "aten::sum",
        "aten::nll_loss_forward",
    ),
    "optimizer": ("aten::_foreach_add_", "aten::_fused_adamw_"),
    "communication": ("c10d::allreduce_", "gloo:all_reduce", "_c10d_functional::all_gather_into_tensor"),
    "other": (
        "aten::t",
        "aten::view",
        "aten::empty",
        "AddmmBackward0",
        "autograd::engine::evaluate_function: MmBackward0",
        "aten::convert_weights",
    ),
}
OUR_KERNELS: dict[str, KernelClass] = {
    "norm_forward_kernel": "norm",
    "norm_backward_kernel": "norm",
    "whole_norm_forward_kernel": "norm",
    "whole_norm_backward_kernel": "norm",
    "narrow_norm_forward_kernel": "norm",
    "narrow_norm_backward_kernel": "norm",
    "add_rows_kernel": "norm",
    "_column_sums_kernel": "pointwise",
    "_quantise_rows_kernel": "pointwise",
    "_quantise_columns_kernel": "pointwise",
    "_quantise_columns_amax_kernel": "pointwise",
    "_dequantise_nf4_kernel": "pointwise",
    "_dequantise_lines_kernel": "pointwise",
    "_dequantise_rows_kernel": "pointwise",
    "_dropout_kernel": "pointwise",
    "_add_thin_product_kernel": "gemm",
    "_sums_activation_forward_kernel": "pointwise",
    "_sums_activation_backward_kernel": "pointwise",
    "_attention_forward_kernel": "attention",
    "_attention_query_gradients_kernel": "attention",
    "_attention_key_gradients_kernel": "attention",
    "_rotate_kernel": "pointwise",
    "_activation_forward_kernel": "pointwise",
    "_activation_backward_kernel": "pointwise",
    "_cross_entropy_kernel": "pointwise",
    "_copy_rows_kernel": "pointwise",
    "_copy_heads_kernel": "pointwise",
    "_merge_attention_kernel": "attention",
    "_embedding_kernel": "pointwise",
    "_embedding_backward_kernel": "pointwise",
    "adamw_kernel": "optimizer",
    "adamw_8bit_kernel": "optimizer",
    "lion_kernel": "optimizer",
    "sgd_kernel": "optimizer",
    "squares_kernel": "optimizer",
    "_heads_forward_kernel": "norm",
    "_heads_backward_kernel": "norm",
    "_product_kernel": "gemm",
    "_gated_kernel": "gemm",
    "_flat_product_kernel": "gemm",
    "_flat_gated_kernel": "gemm",
    "_wgrad_kernel": "gemm",
    "_gathered_wgrad_kernel": "gemm",
    "_sum_rows_kernel": "pointwise",
    "_lay_out_kernel": "pointwise",
    "_add_sinks_kernel": "attention",
    "_sinks_backward_kernel": "attention",
    "_weigh_backward_kernel": "pointwise",
    "_bias_gradient_kernel": "pointwise",
    "_route_forward_kernel": "pointwise",
    "_route_backward_kernel": "pointwise",
    "_sort_counts_kernel": "pointwise",
    "_sort_offsets_kernel": "pointwise",
    "_sort_places_kernel": "pointwise",
    "_cut_tiles_kernel": "pointwise",
    "_gather_sums_kernel": "pointwise",
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in DEVICE_NAMES.items() for name in names])
def test_kernels(kind: KernelClass, name: str) -> None:
    assert class_of(name, category="kernel") == kind


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in OPERATORS.items() for name in names])
def test_operators(kind: KernelClass, name: str) -> None:
    assert class_of(name, category="cpu_op") == kind


def test_the_trace_says_what_a_copy_is() -> None:
    assert class_of("anything gemm", category="gpu_memcpy") == "copy"
    assert class_of("Memcpy HtoD (Pinned -> Device)", category="gpu_memcpy") == "copy"
    assert class_of("Memcpy DtoD (Device -> Device)", category="gpu_memcpy") == "pointwise"
    assert class_of("Memset (Device)", category="gpu_memset") == "pointwise"


def test_every_kernel_of_the_engine_has_its_class() -> None:
    """The engine's sources are read for the names, so that a new kernel cannot be forgotten here."""
    sources = Path(flopwise.__file__).parent / "engine" / "kernels"
    found = {
        name
        for path in sources.glob("fused*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert found == set(OUR_KERNELS)
    assert {name: class_of(name) for name in found} == OUR_KERNELS


def test_a_name_of_any_length_is_looked_at_quickly() -> None:
    assert class_of("gemm" + "x" * 10**7) == "gemm"
    assert class_of("x_" * 10**6) == "other"
