"""Attention's kernels against torch's own attention in float64 with explicit masks, and its gradients by autograd."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flopwise.engine.kernels import flash_4, plain_attention
from flopwise.engine.kernels.attention import (
    LEAST_QUERIES,
    AttentionMask,
    Kernel,
    attention_backward,
    attention_forward,
    choose_kernel,
)
from tests.support.engine_memory import peak_bytes

CPU = torch.device("cpu")


@dataclass
class Case:
    """Inputs of one call, the gradient that comes back, and what may be seen."""

    mask: AttentionMask
    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor
    lengths: Tensor | None = None

    def seen(self) -> Tensor:
        """(sequences, 1, queries, keys): which query sees which key."""
        (sequences, queries), keys = self.query.shape[:2], self.key.shape[1]
        key, place = torch.arange(keys), torch.arange(keys - queries, keys)[:, None]
        seen = torch.ones(sequences, 1, queries, keys, dtype=torch.bool)
        if self.mask.causal:
            seen &= key <= place
        if self.mask.window is not None:
            seen &= key > place - self.mask.window
            if not self.mask.causal:
                seen &= key < place + self.mask.window
        if self.lengths is not None:
            seen &= key < self.lengths[:, None, None, None]
        return seen

    def expected(self) -> dict[str, Tensor]:
        """Output, logsumexp and gradients in float64."""
        leaves = [each.double().clone().requires_grad_() for each in (self.query, self.key, self.value)]
        query, key, value = (each.transpose(1, 2) for each in leaves)
        key, value = (each.repeat_interleave(self.mask.group, dim=1) for each in (key, value))
        seen = self.seen()
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        # torch leaves open what a query gets that sees nothing.
        out = torch.where(seen.any(-1, keepdim=True), out, 0.0).transpose(1, 2)
        gradients = torch.autograd.grad(out, leaves, self.gradient.double())
        scores = (query @ key.transpose(2, 3)) * self.mask.head_dim**-0.5
        sums = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
        names = ("query", "key", "value")
        return {"out": out.detach(), "sums": sums.detach(), **dict(zip(names, gradients, strict=True))}

    def found(self, kernel: Kernel, *, accumulate: bool = False) -> dict[str, Tensor]:
        """The same from a kernel. With `accumulate`, gradients of keys and values start at one and lie in a longer
        tensor of a wide type, whose rest must stay.
        """
        out = torch.full_like(self.query, 7.0)
        wide = torch.float64 if self.query.dtype == torch.float64 else torch.float32
        sequences, queries, heads, _ = self.query.shape
        # A part of a longer one, as a chunk's is.
        device = self.query.device
        sums = torch.full((sequences, heads, queries + 5), 7.0, dtype=wide, device=device)[:, :, 2 : queries + 2]
        attention_forward(
            *(self.query, self.key, self.value, self.mask), out=out, logsumexp=sums, lengths=self.lengths, kernel=kernel
        )
        of_query = torch.full_like(self.query, 7.0)
        if accumulate:
            shape = (sequences, self.key.shape[1] + 3, self.mask.kv_heads, self.mask.head_dim)
            of_key, of_value = (torch.ones(shape, dtype=wide, device=device) for _ in range(2))
        else:
            of_key, of_value = torch.full_like(self.key, 7.0), torch.full_like(self.value, 7.0)
        attention_backward(
            *(self.gradient, self.query, self.key, self.value, out, sums, self.mask),
            query_gradient=of_query,
            key_gradient=of_key,
            value_gradient=of_value,
            accumulate=accumulate,
            lengths=self.lengths,
            kernel=kernel,
        )
        if accumulate:
            keys = self.key.shape[1]
            assert (of_key[:, keys:] == 1).all() and (of_value[:, keys:] == 1).all()
            of_key, of_value = of_key[:, :keys] - 1, of_value[:, :keys] - 1
        found = {"out": out, "sums": sums, "query": of_query, "key": of_key, "value": of_value}
        return {name: each.cpu() for name, each in found.items()}

    def on(self, device: torch.device) -> Case:
        """The same elsewhere."""
        query, key, value, gradient = (each.to(device) for each in (self.query, self.key, self.value, self.gradient))
        return Case(self.mask, query, key, value, gradient, None if self.lengths is None else self.lengths.to(device))

    def check(self, kernel: Kernel, tolerance: float, *, accumulate: bool = False) -> None:
        expected, found = self.on(CPU).expected(), self.found(kernel, accumulate=accumulate)
        for name, values in expected.items():
            result = found[name].double()
            hidden = values == -torch.inf
            assert torch.equal(result == -torch.inf, hidden), name
            difference = (result - values)[~hidden].abs()
            largest = max(1.0, float(values[~hidden].abs().amax())) if difference.numel() else 1.0
            assert difference.numel() == 0 or float(difference.amax()) <= tolerance * largest, name


def make(
    mask: AttentionMask,
    *,
    sequences: int = 1,
    queries: int,
    keys: int,
    dtype: torch.dtype = torch.float64,
    lengths: list[int] | None = None,
) -> Case:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)

    def normal(rows: int, heads: int) -> Tensor:
        shape = (sequences, rows, heads, mask.head_dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return Case(
        mask,
        normal(queries, mask.heads),
        normal(keys, mask.kv_heads),
        normal(keys, mask.kv_heads),
        normal(queries, mask.heads),
        None if lengths is None else torch.tensor(lengths, dtype=torch.int32),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(1, 9))
    keys, sequences = draw(st.integers(1, 23)), draw(st.integers(1, 3))
    queries = draw(st.integers(1, keys) if causal else st.integers(1, 23))
    lengths = draw(st.none() | st.lists(st.integers(0, keys), min_size=sequences, max_size=sequences))
    mask = AttentionMask(kv_heads * group, kv_heads, draw(st.integers(1, 9)), causal, window)
    return make(mask, sequences=sequences, queries=queries, keys=keys, lengths=lengths)


@given(cases(), st.booleans())
def test_the_plain_kernel_agrees_with_masks(case: Case, accumulate: bool) -> None:
    case.check("plain", 1e-12, accumulate=accumulate)


@given(cases(), st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=60)
def test_small_tiles_change_nothing(case: Case, keys_step: int, queries_step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_attention, "_MOST_KEYS", keys_step)
        patch.setattr(plain_attention, "TILE_BYTES", queries_step * 1024)
        case.check("plain", 1e-12, accumulate=True)


@given(st.integers(1, 12), st.integers(0, 22), st.integers(1, 9))
def test_a_window_that_looks_ahead_knows_where_its_queries_stand(window: int, first: int, count: int) -> None:
    case = make(AttentionMask(2, 1, 4, False, window), queries=23, keys=23)
    whole, last = case.found("plain"), min(first + count, 23)
    query = case.query[:, first:last]
    out, sums = torch.empty_like(query), torch.empty(1, 2, last - first, dtype=torch.float64)
    attention_forward(
        *(query, case.key, case.value, case.mask), out=out, logsumexp=sums, kernel="plain", ahead=23 - last
    )
    torch.testing.assert_close(out, whole["out"][:, first:last], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 300])
def test_narrow_types_are_rounded_once(dtype: torch.dtype, window: int | None) -> None:
    # More keys than a tile holds: sums over tiles are kept wide.
    case = make(AttentionMask(4, 2, 16, True, window), queries=517, keys=1091, dtype=dtype)
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    # The backward starts from the rounded output, which its gradients see once more.
    case.check("plain", 2 * rounding, accumulate=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [True, False])
def test_the_kernel_of_the_processor_agrees(dtype: torch.dtype, causal: bool, kv_heads: int, accumulate: bool) -> None:
    case = make(AttentionMask(4, kv_heads, 20, causal, None), sequences=2, queries=67, keys=67, dtype=dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    case.check("cpu-flash", tolerance, accumulate=accumulate)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("queries", "keys"), [(1, 2), (31, 67), (40, 50), (66, 67)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("accumulate", [True, False])
def test_a_cut_sequence_is_taken_in_two_parts(
    *, dtype: torch.dtype, queries: int, keys: int, causal: bool, accumulate: bool
) -> None:
    """Through the processor's kernel, which as cuDNN has no mask for it."""
    case = make(AttentionMask(4, 2, 20, causal, None), sequences=2, queries=queries, keys=keys, dtype=dtype)
    case.check("cpu-flash", 1e-12 if dtype == torch.float64 else 1e-5, accumulate=accumulate)


def test_views_into_a_fused_projection_are_taken() -> None:
    mask = AttentionMask(4, 2, 8, True, None)
    together = torch.randn(2, 13, (4 + 2 + 2) * 8, dtype=torch.float64)
    query, key, value = (each.view(2, 13, -1, 8) for each in torch.split(together, [4 * 8, 2 * 8, 2 * 8], dim=2))
    case = Case(mask, query, key, value, torch.randn(2, 13, 4, 8, dtype=torch.float64))
    for kernel in ("plain", "cpu-flash"):
        case.check(kernel, 1e-12)


def test_equal_calls_give_equal_bits() -> None:
    case = make(AttentionMask(6, 2, 24, True, 100), sequences=2, queries=130, keys=1290, dtype=torch.float32)
    one, two = case.found("plain"), case.found("plain")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temporaries_are_bounded(dtype: torch.dtype) -> None:
    case = make(AttentionMask(8, 2, 64, True, None), queries=512, keys=6000, dtype=dtype)
    out, sums = torch.empty_like(case.query), torch.empty(1, 8, 512)
    inputs = (case.query, case.key, case.value, case.mask)

    def forward() -> None:
        attention_forward(*inputs, out=out, logsumexp=sums, kernel="plain")

    of_query, of_key, of_value = (torch.empty_like(each) for each in inputs[:3])

    def backward() -> None:
        attention_backward(
            *(case.gradient, *inputs[:3], out, sums, case.mask),
            query_gradient=of_query,
            key_gradient=of_key,
            value_gradient=of_value,
            accumulate=False,
            kernel="plain",
        )

    for call in (forward, backward):
        assert 1 << 20 < peak_bytes(call) <= 1.25 * plain_attention.TILE_BYTES


def test_hidden_tiles_are_not_computed() -> None:
    # The last 64 of 8,192 tokens in a window of 100 need one tile of keys at most two times over.
    case = make(AttentionMask(1, 1, 8, True, 100), queries=64, keys=8192, dtype=torch.float32)
    out, sums = torch.empty_like(case.query), torch.empty(1, 1, 64)

    def forward() -> None:
        attention_forward(case.query, case.key, case.value, case.mask, out=out, logsumexp=sums, kernel="plain")

    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        forward()
    assert counter.get_total_flops() <= 2 * 2 * 64 * (64 + 100) * 8


def test_a_kernel_is_chosen_by_what_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability[0])
    monkeypatch.setattr(flash_4, "fits_device", lambda _device: False)

    def chosen(device: torch.device, dtype: torch.dtype, mask: AttentionMask, **changed: bool) -> Kernel:
        options = {"padded": False, "deterministic": False, **changed}
        return choose_kernel(device, dtype, mask, 64, 64, **options)

    mask, windowed, odd = (
        AttentionMask(4, 4, 64, True, None),
        AttentionMask(4, 4, 64, True, 9),
        AttentionMask(4, 4, 63, True, None),
    )
    half, single = torch.bfloat16, torch.float32
    assert chosen(CPU, half, mask) == chosen(CPU, torch.float64, mask) == "cpu-flash"
    both = AttentionMask(4, 4, 64, False, None)
    assert chosen(CPU, single, mask, padded=True) == "plain"
    assert chosen(CPU, single, both, padded=True) == "cpu-flash"
    assert chosen(CPU, single, windowed) == chosen(CPU, torch.float16, mask) == "plain"
    assert choose_kernel(CPU, single, mask, 3, 64, padded=False, deterministic=False) == "plain"
    assert chosen(cuda, half, mask) == "cudnn"
    assert chosen(cuda, half, mask, deterministic=True) == "flash"
    assert choose_kernel(cuda, half, mask, 3, 640, padded=False, deterministic=False) == "flash"
    assert choose_kernel(cuda, half, mask, 128, 640, padded=False, deterministic=False) == "cudnn"
    assert choose_kernel(cuda, half, windowed, 128, 640, padded=False, deterministic=False) == "flash"
    around = AttentionMask(4, 4, 64, False, 9)
    assert chosen(cuda, half, around) == "flash"
    assert choose_kernel(cuda, half, around, 128, 640, padded=False, deterministic=False) == "plain"
    assert chosen(cuda, half, windowed) == chosen(cuda, half, mask, padded=True) == "flash"
    assert chosen(cuda, half, odd) == chosen(cuda, single, mask) == chosen(cuda, torch.float64, mask) == "plain"
    capability[0] = (8, 0)
    assert chosen(cuda, half, mask) == "flash"
    monkeypatch.setattr(flash_4, "fits_device", lambda device: device.type == "cuda")
    assert chosen(cuda, half, mask) == chosen(cuda, half, both) == "flash-4"
    assert choose_kernel(cuda, half, mask, 3, 64, padded=False, deterministic=False) == "flash-4"
    assert chosen(cuda, half, windowed) == chosen(cuda, half, mask, padded=True) == "flash"
    assert (
        chosen(cuda, half, mask, deterministic=True)
        == chosen(cuda, half, AttentionMask(4, 4, 80, True, None))
        == "flash"
    )
    assert chosen(cuda, single, mask) == "plain" and chosen(CPU, half, mask) == "cpu-flash"


def test_a_package_that_cannot_be_loaded_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [
        OSError("libcuda.so"),
        RuntimeError("no device"),
        ModuleNotFoundError("no cutlass", name="cutlass.cute"),
    ]
    for failure in (ModuleNotFoundError("no flash_attn", name="flash_attn"), *failures):

        def fails(_name: str, failure: Exception = failure) -> None:
            raise failure

        flash_4._calls.cache_clear()
        monkeypatch.setattr(flash_4, "import_module", fails)
        with pytest.warns(RuntimeWarning, match="cannot be loaded") if failure in failures else nullcontext():
            assert not flash_4.is_installed()
    flash_4._calls.cache_clear()


def skip_unless_chosen(kernel: Kernel) -> None:
    device = torch.device("cuda")
    if kernel == "cudnn" and torch.cuda.get_device_capability(device)[0] < 9:
        pytest.skip("the kernel is not chosen on this device")
    if kernel == "flash-4" and not flash_4.fits_device(device):
        pytest.skip("FlashAttention-4 is not installed, or not for this device")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning")
@pytest.mark.parametrize("kernel", ["plain", "flash", "cudnn", "flash-4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [True, False])
def test_the_kernels_of_the_gpu_agree(
    *, kernel: Kernel, dtype: torch.dtype, causal: bool, kv_heads: int, accumulate: bool
) -> None:
    device = torch.device("cuda")
    skip_unless_chosen(kernel)
    case = make(AttentionMask(4, kv_heads, 64, causal, None), sequences=2, queries=131, keys=131, dtype=dtype)
    case.on(device).check(kernel, 3e-2, accumulate=accumulate)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning")
@pytest.mark.parametrize("kernel", ["plain", "flash", "cudnn", "flash-4"])
@pytest.mark.parametrize(
    "case",
    [
        make(AttentionMask(4, 2, 128, True, None), queries=1, keys=333, dtype=torch.bfloat16),
        make(AttentionMask(4, 2, 128, True, None), sequences=2, queries=65, keys=333, dtype=torch.bfloat16),
        make(AttentionMask(4, 2, 128, True, None), sequences=2, queries=131, keys=333, dtype=torch.bfloat16),
        make(AttentionMask(6, 2, 64, False, None), sequences=2, queries=131, keys=333, dtype=torch.float16),
        make(AttentionMask(4, 2, 64, True, 70), sequences=2, queries=65, keys=333, dtype=torch.bfloat16),
        make(
            AttentionMask(4, 4, 64, False, None),
            sequences=3,
            queries=77,
            keys=77,
            dtype=torch.float16,
            lengths=[0, 5, 77],
        ),
    ],
    ids=["one query", "a small chunk", "a chunk", "a chunk that sees all", "a window", "padded"],
)
@pytest.mark.parametrize("accumulate", [True, False])
def test_chunks_windows_and_padding_on_the_gpu(kernel: Kernel, case: Case, accumulate: bool) -> None:
    skip_unless_chosen(kernel)
    if kernel in ("cudnn", "flash-4") and (case.mask.window is not None or case.lengths is not None):
        pytest.skip("not what it is chosen for")
    if kernel == "cudnn" and case.query.shape[1] < LEAST_QUERIES:
        pytest.skip("not what it is chosen for")
    case.on(torch.device("cuda")).check(kernel, 3e-2, accumulate=accumulate)
