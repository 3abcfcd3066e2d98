"""Attention over given tensors: which kernel is for what, and the kernels of torch behind one pair of calls.

Query, output and their gradients are (sequences, queries, heads, channels), keys and values (sequences, keys, key and
value heads, channels), the last dimension contiguous. `logsumexp` is (sequences, heads, queries) in float32 (float64
for float64).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flopwise.engine.kernels import dispatch, flash_4
from flopwise.engine.kernels.blocks import has_triton
from flopwise.engine.kernels.dropout import DropMask
from flopwise.engine.kernels.plain_attention import AttentionMask, Saved, plain_backward, plain_forward

Kernel = Literal["plain", "cpu-flash", "cudnn", "flash", "flash-4", "triton"]

__all__ = ["AttentionMask", "Kernel", "attention_backward", "attention_forward", "choose_kernel"]

HALVES = (torch.bfloat16, torch.float16)
MOST_CHANNELS = 256
"""Of a head that our own kernels take."""
LEAST_QUERIES = 128
"""Of a cut sequence: for fewer, two calls of cuDNN and a merge take longer than one of torch's flash kernel."""


def choose_kernel(
    device: torch.device,
    dtype: torch.dtype,
    mask: AttentionMask,
    queries: int,
    keys: int,
    *,
    padded: bool,
    deterministic: bool,
    drops: bool = False,
) -> Kernel:
    """The fastest kernel that does what is asked.

    The choice holds for forward and backward. "flash" is repeatable where the caller asks torch for deterministic
    algorithms, "cudnn" and "flash-4" are not; the others always are. On Hopper cuDNN is 1.7 times as fast as torch's
    flash kernel; it has no mask for a cut sequence, whose two parts (`_spans`) it takes one after the other. `drops`:
    whether weights are dropped, of which no library's kernel can be told; ours are for that, and for scores that are
    capped or have ALiBi in them.
    """
    whole = queries == keys and mask.window is None
    if device.type == "cpu" and not (mask.changes_scores or drops):
        return "cpu-flash" if whole and not (padded and mask.causal) and dtype != torch.float16 else "plain"
    # The flash kernel has the last query at the last key, which tells a window that looks ahead.
    shifted = mask.looks_around and (padded or queries < keys)
    if shifted:
        return "plain"
    if not a_library_takes(device, dtype, mask) or drops:
        return "triton" if takes_ours(device, dtype, mask) else "plain"
    if padded or deterministic or mask.window is not None:
        return "flash"
    if _is_for_flash_4(device, mask):
        return "flash-4"
    takes_parts = whole or LEAST_QUERIES <= queries < keys
    takes_parts = takes_parts and mask.head_dim <= 128 and torch.cuda.get_device_capability(device)[0] >= 9
    return "cudnn" if takes_parts else "flash"


def a_library_takes(device: torch.device, dtype: torch.dtype, mask: AttentionMask) -> bool:
    """Whether torch's flash kernel takes such heads and scores."""
    takes = not mask.changes_scores and mask.head_dim % 8 == 0 and mask.head_dim <= 256
    return device.type == "cuda" and dtype in HALVES and takes


def takes_ours(device: torch.device, dtype: torch.dtype, mask: AttentionMask) -> bool:
    """Whether our own fast kernels do: for changed scores and for weights that are dropped they are the only ones."""
    takes = mask.head_dim <= MOST_CHANNELS and not mask.looks_around
    return device.type == "cuda" and dtype in HALVES and takes and has_triton()


def _is_for_flash_4(device: torch.device, mask: AttentionMask) -> bool:
    return mask.head_dim in flash_4.HEAD_DIMENSIONS and flash_4.fits_device(device)


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    *,
    out: Tensor,
    logsumexp: Tensor,
    lengths: Tensor | None = None,
    kernel: Kernel,
    drop: DropMask | None = None,
    ahead: int = 0,
) -> None:
    """Each query's mean of the values it sees, weighted by the softmax of its scores; zeros where it sees none.

    Queries are the last of their sequence: the last one stands at the last key, or so many keys `ahead` of it, which
    matters to a window that looks ahead. Keys at or beyond a sequence's length
    are not seen. `drop`, with a token for each sequence's queries, says what of the softmax's weights is dropped.
    """
    assert drop is None or kernel in ("plain", "triton")
    if kernel != "plain" and out.shape[-1] < query.shape[-1]:
        wide = out.new_empty(query.shape)
        attention_forward(
            *(query, key, widened(value, key), mask),
            out=wide,
            logsumexp=logsumexp,
            lengths=lengths,
            kernel=kernel,
            drop=drop,
            ahead=ahead,
        )
        out.copy_(wide[..., : out.shape[-1]])
    elif kernel == "plain":
        plain_forward(query, key, value, mask, out=out, logsumexp=logsumexp, lengths=lengths, drop=drop, ahead=ahead)
    elif kernel == "triton":
        from flopwise.engine.kernels import fused_attention

        fused_attention.forward(query, key, value, mask, drop, lengths=lengths, out=out, logsumexp=logsumexp)
    elif kernel == "flash-4":
        flash_4.forward(query, key, value, causal=mask.causal, scale=mask.scaled_by, out=out, logsumexp=logsumexp)
    elif kernel == "flash":
        for part, count in _parts(key, lengths):
            _flash_forward(
                query[part], key[part, :count], value[part, :count], mask, out=out[part], logsumexp=logsumexp[part]
            )
    else:
        spans = _spans(query, key, mask)
        taken = len(spans) if kernel == "cudnn" else 3
        for piece in _pieces(query, mask, taken * query.nbytes):
            found = [_span_forward(piece, (query, key, value), span, kernel, lengths) for span in spans]
            sums = logsumexp[piece.sequences, piece.heads]
            parts = [(values.transpose(1, 2), of_part.reshape(sums.shape)) for values, of_part in found]
            if len(parts) == 1:
                dispatch.copy_heads(parts[0][0], out=piece.of(out), add=False)
                sums.copy_(parts[0][1])
            else:
                dispatch.merge_attention(*parts, out=piece.of(out), logsumexp=sums)


def attention_backward(  # noqa: PLR0917
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: AttentionMask,
    *,
    query_gradient: Tensor,
    key_gradient: Tensor,
    value_gradient: Tensor,
    accumulate: bool,
    lengths: Tensor | None = None,
    kernel: Kernel,
    drop: DropMask | None = None,
    spare_bytes: int = 0,
) -> None:
    """The gradients of query, key and value from what the forward wrote.

    The first rows of `key_gradient` and `value_gradient`, as many as there are keys, are added to with `accumulate`,
    else overwritten; they may be of a wider type. `query_gradient` is overwritten. With `spare_bytes` beside what is
    planned a kernel takes more heads at once: four calls of a quarter of them took 9 to 15 % longer than one.
    """
    keys = key.shape[1]
    if kernel != "plain" and value.shape[-1] < key.shape[-1]:
        of_values = value_gradient[:, :keys]
        wide = widened(of_values, key)
        attention_backward(
            *(widened(gradient, query), query, key, widened(value, key), widened(out, query), logsumexp, mask),
            query_gradient=query_gradient,
            key_gradient=key_gradient,
            value_gradient=wide,
            accumulate=accumulate,
            lengths=lengths,
            kernel=kernel,
            drop=drop,
            spare_bytes=spare_bytes,
        )
        of_values.copy_(wide[..., : value.shape[-1]])
        return
    of_keys, of_values = key_gradient[:, :keys], value_gradient[:, :keys]
    saved = Saved(gradient, query, key, value, out, logsumexp)
    if kernel == "plain":
        plain_backward(
            saved,
            mask,
            query_gradient=query_gradient,
            key_gradient=of_keys,
            value_gradient=of_values,
            accumulate=accumulate,
            lengths=lengths,
            drop=drop,
        )
        return
    if kernel == "triton":
        from flopwise.engine.kernels import fused_attention

        gradients = (query_gradient, of_keys, of_values)
        fused_attention.backward(saved, mask, drop, gradients, lengths=lengths, accumulate=accumulate)
        return
    # These kernels read it as it lies in memory, whatever its strides.
    saved = saved._replace(logsumexp=logsumexp.contiguous())
    if kernel == "flash-4":
        gradients = _Gradients(query_gradient, of_keys, of_values)
        _flash_4_pieces(saved, mask, gradients, accumulate=accumulate, spare_bytes=spare_bytes)
    elif kernel == "flash":
        for part, count in _parts(key, lengths):
            of_part = Saved(*(each[part] for each in saved))
            of_part = of_part._replace(key=of_part.key[:, :count], value=of_part.value[:, :count])
            gradients = _Gradients(query_gradient[part], of_keys[part], of_values[part])
            _flash_pieces(of_part, mask, gradients, accumulate=accumulate, spare_bytes=spare_bytes)
    else:
        spans = _spans(query, key, mask)
        longest = max(span.length for span in spans)
        # Gradients of the queries, also in fp32, and those of keys and values for every query head.
        expanded = 2 * query.nbytes // max(1, query.shape[1]) * longest
        taken = query.nbytes + expanded + (4 * query.numel() if kernel == "cudnn" else 3 * query.nbytes)
        for piece in _pieces(query, mask, taken - spare_bytes, within_groups=accumulate):
            for number, span in enumerate(spans):
                found = _span_backward(piece, saved, span, kernel, lengths)
                dispatch.copy_heads(found[0].transpose(1, 2), out=piece.of(query_gradient), add=number > 0)
                dispatch.copy_heads(found[1], out=piece.of(of_keys)[:, span.keys], add=accumulate)
                dispatch.copy_heads(found[2], out=piece.of(of_values)[:, span.keys], add=accumulate)


def widened(value: Tensor, like: Tensor) -> Tensor:
    """Values, or what became of them, with as many channels as keys have: the kernels of libraries know one width."""
    return torch.nn.functional.pad(value, (0, like.shape[-1] - value.shape[-1]))


LEAST_PIECE_BYTES = 8 << 20
"""Kernels that allocate less than this for themselves are called for all heads at once."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Heads and sequences that one call of a kernel takes."""

    mask: AttentionMask
    sequences: slice
    heads: slice
    kv_heads: slice
    all_heads: int
    """Query heads that there are."""

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of queries, or of keys and values."""
        queries = tensor.shape[2] == self.all_heads
        return tensor[self.sequences, :, self.heads if queries else self.kv_heads]


def _pieces(
    query: Tensor, mask: AttentionMask, whole_bytes: int, *, within_groups: bool = False, planned: int | None = None
) -> list[_Piece]:
    """As many pieces as keep what a kernel allocates within what is planned, the fp32 sum of the queries' gradients.

    `whole_bytes`: what it would allocate for all of them, less what it may take beside. Query heads that share keys are
    parted only `within_groups`.
    """
    sequences = query.shape[0]
    wanted = -(-max(1, whole_bytes) // max(LEAST_PIECE_BYTES, 4 * query.numel() if planned is None else planned))
    groups = next(
        (count for count in range(1, mask.kv_heads + 1) if mask.kv_heads % count == 0 and count >= wanted),
        mask.kv_heads,
    )
    at_once = max(1, sequences // max(1, -(-wanted // groups)))
    each, shares = mask.kv_heads // groups, 1
    if within_groups and wanted > groups == mask.kv_heads:
        least = -(-wanted // groups)
        shares = next(
            count for count in range(1, mask.group + 1) if mask.group % count == 0 and count >= min(least, mask.group)
        )
    heads = each * mask.group // shares
    part = replace(mask, heads=heads, kv_heads=each)
    return [
        _Piece(
            part,
            slice(first, min(first + at_once, sequences)),
            slice((group * shares + share) * heads, (group * shares + share + 1) * heads),
            slice(group * each, (group + 1) * each),
            mask.heads,
        )
        for first in range(0, sequences, at_once)
        for group in range(groups)
        for share in range(shares)
    ]


class _KeySpan(NamedTuple):
    """Keys that one call of a kernel takes, which has a causal mask for as many keys as queries alone."""

    keys: slice
    causal: bool

    @property
    def length(self) -> int:
        return int(self.keys.stop - self.keys.start)


def _spans(query: Tensor, key: Tensor, mask: AttentionMask) -> list[_KeySpan]:
    """The keys that all queries see, then those at which they stand themselves.

    Backward takes them apart too: with output and logsumexp of both, what a kernel finds for either is its part of the
    sum.
    """
    assert mask.window is None
    queries, keys = query.shape[1], key.shape[1]
    if not mask.causal or queries == keys:
        return [_KeySpan(slice(0, keys), mask.causal)]
    return [_KeySpan(slice(0, keys - queries), False), _KeySpan(slice(keys - queries, keys), True)]


def _span_forward(
    piece: _Piece, given: tuple[Tensor, Tensor, Tensor], span: _KeySpan, kernel: Kernel, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Results with heads before tokens, from the kernels that have no mask for a cut sequence."""
    mask = piece.mask
    query, key, value = (piece.of(tensor) for tensor in given)
    key, value = key[:, span.keys], value[:, span.keys]
    if kernel == "cudnn":
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(each.transpose(1, 2) for each in (query, key, value)), None, True, 0.0, span.causal, False, **_scale(mask)
        )
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query.transpose(1, 2),
            _repeat_heads(key, mask),
            _repeat_heads(value, mask),
            0.0,
            span.causal,
            attn_mask=_padding(query, None if lengths is None else lengths[piece.sequences]),
            **_scale(mask),
        )
    return found[0], found[1]


class _Gradients(NamedTuple):
    """Where the gradients of a call go."""

    query: Tensor
    key: Tensor
    value: Tensor


def _flash_pieces(
    saved: Saved, mask: AttentionMask, gradients: _Gradients, *, accumulate: bool, spare_bytes: int
) -> None:
    """Flash attention's backward, some heads at a time; keys beyond those that are seen get nothing."""
    count = saved.key.shape[1]
    query = saved.query
    # Queries' gradients, also in fp32, and those of keys and values for every query head.
    expanded = 2 * query.nbytes // max(1, query.shape[1]) * count
    taken = query.nbytes + 4 * query.numel() + expanded
    for piece in _pieces(query, mask, taken - spare_bytes, within_groups=accumulate):
        gradient, query, key, value, out = (piece.of(each) for each in saved[:5])
        sums = saved.logsumexp[piece.sequences, piece.heads].contiguous()
        of_piece = Saved(gradient, query, key, value, out, sums)
        found = _flash_backward(of_piece, piece.mask)
        dispatch.copy_heads(found[0], out=piece.of(gradients.query), add=False)
        for given, result in ((gradients.key, found[1]), (gradients.value, found[2])):
            dispatch.copy_heads(result, out=piece.of(given)[:, :count], add=accumulate)
    if not accumulate:
        gradients.key[:, count:] = 0
        gradients.value[:, count:] = 0


def _flash_4_pieces(
    saved: Saved, mask: AttentionMask, gradients: _Gradients, *, accumulate: bool, spare_bytes: int
) -> None:
    """FlashAttention-4's backward, some heads at a time where all of them would take more memory than is planned."""
    direct = not accumulate and gradients.key.dtype == saved.key.dtype
    taken = flash_4.backward_bytes(saved.query, saved.key) + (0 if direct else 2 * saved.key.nbytes)
    # As planned: the keys' part for as many keys as there are queries.
    planned = flash_4.backward_bytes(saved.query, saved.key[:, : saved.query.shape[1]])
    for piece in _pieces(saved.query, mask, taken - spare_bytes, planned=planned):
        gradient, query, key, value, out = (piece.of(each) for each in saved[:5])
        given = tuple(piece.of(each) for each in (gradients.key, gradients.value))
        found = given if direct else tuple(torch.empty_like(each) for each in (key, value))
        flash_4.backward(
            gradient,
            query,
            key,
            value,
            out,
            logsumexp=saved.logsumexp[piece.sequences, piece.heads].contiguous(),
            causal=mask.causal,
            scale=mask.scaled_by,
            query_gradient=piece.of(gradients.query),
            key_gradient=found[0],
            value_gradient=found[1],
        )
        if not direct:
            for target, result in zip(given, found, strict=True):
                dispatch.copy_heads(result, out=target, add=accumulate)


def _parts(key: Tensor, lengths: Tensor | None) -> list[tuple[slice, int]]:
    """Sequences that one call of a kernel without lengths can take together, and the keys they see."""
    if lengths is None:
        return [(slice(None), key.shape[1])]
    return [(slice(first, first + 1), min(count, key.shape[1])) for first, count in enumerate(lengths.tolist())]


def _repeat_heads(heads: Tensor, mask: AttentionMask) -> Tensor:
    """(sequences, heads, keys, channels), each head of a key or value once for every query head that reads it."""
    moved = heads.transpose(1, 2)
    return moved if mask.group == 1 else moved.repeat_interleave(mask.group, dim=1)


def _padding(query: Tensor, lengths: Tensor | None) -> Tensor | None:
    """What to add to the scores of keys: nothing, or minus infinity beyond a sequence's length, which is at least 1."""
    if lengths is None:
        return None
    beyond = torch.arange(query.shape[1]) >= lengths[:, None, None, None]
    return torch.zeros(beyond.shape, dtype=query.dtype).masked_fill_(beyond, -torch.inf)


def _span_backward(
    piece: _Piece, saved: Saved, span: _KeySpan, kernel: Kernel, lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what `_span_forward` takes: the query's with its heads before its tokens."""
    mask = piece.mask
    gradient, query, key, value, out = (piece.of(tensor) for tensor in saved[:5])
    key, value = key[:, span.keys], value[:, span.keys]
    logsumexp = saved.logsumexp[piece.sequences, piece.heads].contiguous()
    above, queries, results = (each.transpose(1, 2) for each in (gradient, query, out))
    if kernel == "cudnn":
        # Without dropout the random state is not read, but a tensor is asked for.
        unused = torch.zeros((), dtype=torch.int64, device=query.device)
        found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            above,
            queries,
            key.transpose(1, 2),
            value.transpose(1, 2),
            results,
            logsumexp[..., None],
            unused,
            unused,
            None,
            None,
            None,
            query.shape[1],
            key.shape[1],
            0.0,
            span.causal,
            **_scale(mask),
        )
        return found[0], found[1].transpose(1, 2), found[2].transpose(1, 2)
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        above,
        queries,
        _repeat_heads(key, mask),
        _repeat_heads(value, mask),
        results,
        logsumexp,
        0.0,
        span.causal,
        attn_mask=_padding(query, None if lengths is None else lengths[piece.sequences]),
        **_scale(mask),
    )
    of_keys, of_values = (
        torch.unflatten(each, 1, (mask.kv_heads, mask.group)).sum(2, dtype=logsumexp.dtype).transpose(1, 2)
        for each in found[1:]
    )
    return found[0], of_keys, of_values


def _scale(mask: AttentionMask) -> dict[str, float]:
    """What torch's kernels are told of another scale than their own."""
    return {} if mask.scaled_by is None else {"scale": mask.scaled_by}


def flash_options(mask: AttentionMask) -> dict[str, float]:
    """What torch's flash kernels are told of a window and a scale."""
    window = {}
    if mask.window is not None:
        window = {
            "window_size_left": mask.window - 1,
            "window_size_right": mask.window - 1 if mask.looks_around else 0,
        }
    return {**window, **_scale(mask)}


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, *, out: Tensor, logsumexp: Tensor
) -> None:
    if not key.shape[1]:
        out.zero_()
        logsumexp.fill_(-torch.inf)
        return
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, None, None, query.shape[1], key.shape[1], 0.0, mask.causal, False, **flash_options(mask)
    )
    out.copy_(found[0])
    logsumexp.copy_(found[1])


def _flash_backward(saved: Saved, mask: AttentionMask) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = saved.query, saved.key, saved.value
    if not key.shape[1]:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    unused = torch.zeros(2, dtype=torch.int64, device=query.device)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *saved, None, None, query.shape[1], key.shape[1], 0.0, mask.causal, unused, unused, **flash_options(mask)
    )
    return found
