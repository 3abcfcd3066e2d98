"""What a kernel or an operator is for, told by its name."""

from __future__ import annotations

import re
from functools import lru_cache

from flopwise.records.profile import KernelClass

_RULES: tuple[tuple[KernelClass, str], ...] = (
    # What passes data between devices. `^hip` alone is no sign of it: every kernel of AMD's runtime may begin so.
    ("communication", r"nccl|rccl|^gloo:|^c10d::|c10d_functional|\bmscclpp|nvshmem|symm_mem|(two|one)_shot_all_reduce"),
    (
        "communication",
        r"^(void )?(\w+::)*(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce)\w*",
    ),
    # The engine's wrappers spend time of their own, not that of the operator in their name.
    (
        "other",
        r"^autograd::engine|(?-i:Backward\d*$)|^torch::autograd::|^Torch-Compiled|^## Call CompiledFx|^Optimizer\.",
    ),
    ("copy", r"^(memcpy|memset)|^\[?CUDA mem(cpy|set)|^(void )?__amd_rocclr_(copy|fill)"),
    (
        "optimizer",
        r"adam|multi_tensor_apply|multi_tensor|_foreach_|^aten::_fused_(adam|sgd|adagrad)|lamb(Stage|_|Kernel)|"
        r"distributed_fused|squares_kernel|fused_sgd|\bsgd_|adagrad|\bmuon|newton_?schulz",
    ),
    (
        "attention",
        r"flash|fmha|scaled_dot_product|(?<![a-z])sdpa|attention|attn|_attn_(fwd|bwd)|mha_(fwd|bwd|varlen)|softmax_lse|"
        r"compute_dq_dk_dv|dot_do_o|convert_dq",
    ),
    (
        "norm",
        r"layer_?norm|rms_?norm|batch_?norm|group_?norm|bn_(fw|bw|forward|backward)|norm_(forward|backward)_kernel|add_rows_kernel|"
        r"native_norm|GammaBeta|RowwiseMoments|instance_?norm|(?<![a-z])ln_(fwd|bwd|parallel)|fused_add_norm",
    ),
    (
        "gemm",
        r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|hgemm|sgemm|splitkreduce|\bCijk_|\bck::|hipblas|rocblas|tensorop|"
        r"_s?16816|s1688|s884|conv(olution)?(?!ert)(\dd|_|$|ol)|dgrad|wgrad|fprop|implicit_con|winograd|grouped_mm|"
        r"tem_fused_(\w*_)?(b|add)?mm|triton_\w*tem_\w*mm|_scaled_mm|matmul|mkldnn_linear|onednn_linear|_dot_kernel|"
        r"^aten::(_?addmm\w*|mm|mm_|bmm|baddbmm_?|addbmm|linear|addmv_?|mv|dot|vdot|addr|einsum|_int_mm|lstm|gru|"
        r"_?thnn_fused_lstm\w*|mkldnn_rnn_layer\w*|_cudnn_rnn\w*|_trilinear|bilinear|tensordot|inner|ger|outer)$",
    ),
    (
        "pointwise",
        r"elementwise|^triton_(poi|red|per|for|mix)|pointwise|_rotate_kernel|rotary|rope|swiglu|silu|gelu|relu|sigmoid|"
        r"tanh|softmax|cross_entropy|nll_loss|activation_(forward|backward)_kernel|dropout|reduce_kernel|"
        r"embedding|index|gather|scatter|CatArray|(^|_|::)cat(_|$)|copy_kernel|direct_copy|FillFunctor|transpose|permute|"
        r"cub::|DeviceScan|DeviceReduce|DeviceRadix|RadixSort|distribution_|nonzero|masked|where|unrolled|vectorized|"
        r"batched_transpose|topk|sort|cumsum|scan|compare|cast|quanti[sz]e|copy_rows",
    ),
    # On a CPU a copy is memory work like any other; so is whatever else the library does to every element.
    (
        "pointwise",
        r"^aten::(_to_copy|to|copy_|clone|contiguous|fill_|zero_|zeros|zeros_like|ones|ones_like|full|full_like|"
        r"_?(add|sub|mul|div|neg|pow|sqrt|rsqrt|exp|log|abs|square|mean|sum|max|min|amax|amin|lerp|addcmul|addcdiv|"
        r"clamp|clamp_min|clamp_max|sin|cos|erf|reciprocal|sign|norm|linalg_vector_norm|var|std|argmax|eq|ne|lt|le|gt|"
        r"ge|bitwise_and|logical_and|isnan|isfinite|normal|uniform|random|bernoulli|randint|randn|rand|repeat|roll|"
        r"stack|tril|triu|arange|threshold_backward|native_dropout|mse_loss|log_softmax|_log_softmax|logsumexp|maximum|"
        r"minimum|rsub|fmod|remainder|floor|ceil|round|hardtanh|leaky_relu|prelu|elu|mish|glu)"
        r"(_|_backward\w*|_out|_data)?)$",
    ),
)
_COMPILED = tuple((kind, re.compile(rule, re.IGNORECASE)) for kind, rule in _RULES)
_LONGEST_NAME = 2000
"""Characters that are looked at: templates of C++ can be far longer, and say what they are at their beginning."""


@lru_cache(maxsize=65536)
def class_of(name: str, *, category: str = "") -> KernelClass:
    """The class of a kernel or an operator; `category` is the trace's own, which settles what a copy is."""
    if category in ("gpu_memcpy", "gpu_memset"):
        # What stays within device memory is work on it like a kernel's; copy engines go over a link.
        return "pointwise" if category == "gpu_memset" or "DtoD" in name else "copy"
    looked_at = name[:_LONGEST_NAME]
    return next((kind for kind, rule in _COMPILED if rule.search(looked_at)), "other")
