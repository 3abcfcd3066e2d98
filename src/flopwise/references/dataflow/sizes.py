"""Bytes and FLOPs as the reference offload trainer (als244/ml_dataflow) counts them when it configures itself.

They are its own arithmetic, with its own estimates and omissions, and not what `core` counts: they are here so that its
decisions can be repeated exactly. D is the hidden width, A that of all query heads, K that of all key heads, F that of
the feed-forward part, V the vocabulary, L the layers, S tokens of a sequence, c of a chunk, n chunks of a round. All
numbers are bf16; each tensor begins at a multiple of 256 bytes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from flopwise.base.errors import DoesNotFit, FlopwiseError
from flopwise.base.units import show_bytes
from flopwise.references.dataflow.variants import Variant
from flopwise.setup.hardware import Hardware
from flopwise.work.transformer import Transformer

MIB, GIB = 2**20, 2**30
ALIGNMENT_BYTES = 256
KERNEL_WORKSPACE_BYTES = 200 * MIB
PAD_BYTES = 200 * MIB
"""Left free by the rule for what it does not count; no allocation."""
HOST_TOKEN_BYTES = 12
"""Ids, labels and positions of a token on the host."""
DEVICE_TOKEN_BYTES = 28
"""The same and what attention needs to know, on the device: found from the recorded bytes, not from its documents. The
rule does not count it; its pad takes it."""
MOST = 1024
"""Most sequence groups of a round, and most rounds of a step."""
MOST_SMALL_UNITS = 84
"""SMs of the largest Ampere chip that is not an A100."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelBytes:
    """What a (layer, chunk) takes at each save level; each level's buffer begins with that of the one below."""

    context: int
    attention: int
    full: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """How the tokens of a round are cut."""

    tokens: int
    per_sequence: int
    """1 where a chunk holds whole sequences."""
    per_round: int
    head_tokens: int
    """Tokens whose logits exist at once."""
    sequence_tokens: int

    @property
    def sequences(self) -> int:
        """Whole sequences of a chunk; 1 where a sequence is several chunks."""
        return max(1, self.tokens // self.sequence_tokens)

    @property
    def sequences_per_round(self) -> int:
        return self.per_round // self.per_sequence * self.sequences

    @property
    def tokens_per_round(self) -> int:
        return self.per_round * self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """What the device has room for."""

    params: int
    """Blocks of weights."""
    grads: int
    slots: int
    """Activations at the full level."""
    optimizer: int
    """Blocks of both moments, in place of the activations."""
    used_bytes: int
    """Allocated: up to 80 kB less than recorded, which is alignment."""


def check_model(model: Transformer) -> None:
    """Refuse what the trainer has no kernels for: it knows dense, gated, causal decoders of Llama's kind."""
    wrong = {
        "a mixture of experts": model.experts > 0,
        "a feed-forward part that is not gated": not model.gated,
        f"{model.positions} positions": model.positions != "rotary",
        f"{model.norm} norm": model.norm != "rms",
        "attention that is not causal": not model.causal,
        "a sliding window": model.window is not None,
        f"a {model.head} head": model.head != "language",
        "a head that shares the embedding's matrix": model.tied,
        "biases": model.qkv_bias or model.output_bias or model.ffn_bias or model.norm_bias or model.head_bias,
        "norms of queries and keys": model.qk_norm,
        "parallel residuals": model.parallel_residual,
        "norms elsewhere than before each part and the head": (
            model.norm_place != "pre" or model.embedding_norm or not model.final_norm
        ),
    }
    wrong |= dict.fromkeys(model.unusual, True)
    for what, holds in wrong.items():
        if holds:
            raise FlopwiseError(
                f"the rule `dataflow` cannot configure {model.name}: it has {what}",
                why="it is for dense decoders with rotary positions, RMS norms, gated feed-forward parts, no biases and"
                " a head of their own",
                hint="dataflow-1b, llama-3-8b, dataflow-15b or dataflow-32b; or flopwise's own rule",
            )


def align(size_bytes: int) -> int:
    """Up to the next multiple of 256."""
    return round_up(size_bytes, ALIGNMENT_BYTES)


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def half_up(number: float) -> int:
    """C's `round` of a number that is not negative: halves go up."""
    return math.floor(number + 0.5)


def least_divisor(number: int, least: int) -> int:
    """The smallest divisor of `number` that is at least `least`; `number` itself where there is no other."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    divisors = [*small, *(number // candidate for candidate in small)]
    return min((divisor for divisor in divisors if divisor >= least), default=number)


def block_bytes(model: Transformer) -> int:
    """One layer's weights; its gradients and each of its two moments are as large."""
    hidden, query, kv, ffn = model.hidden, model.query_width, model.kv_width, model.ffn
    matrices = (hidden * query, hidden * kv, hidden * kv, query * hidden, *([hidden * ffn] * 3))
    return sum(align(2 * elements) for elements in (hidden, hidden, *matrices))


def parameters(model: Transformer) -> int:
    """Weights without padding, embedding and head included."""
    hidden, ends = model.hidden, 2 * model.vocab * model.hidden + model.hidden
    return ends + model.layers * (hidden * (2 * model.query_width + 2 * model.kv_width + 3 * model.ffn) + 2 * hidden)


def estimate_bytes(model: Transformer, chunk_tokens: int) -> int:
    """What the rule reckons for a saved (layer, chunk): 2c(2D + 2A + 2K + 2F), 136 bytes a token short for Llama's."""
    return 4 * chunk_tokens * (model.hidden + model.query_width + model.kv_width + model.ffn)


def level_bytes(model: Transformer, chunk_tokens: int, full_extra_bytes_per_token: int = 0) -> LevelBytes:
    """What a saved (layer, chunk) really takes.

    Context: input, two norms' statistics, keys, values. Attention: softmax statistics and output besides. Full:
    queries, the residual sum after attention and both feed-forward products besides.
    """
    hidden, query, kv = 2 * model.hidden, 2 * model.query_width, 2 * model.kv_width
    context = sum(align(chunk_tokens * width) for width in (hidden, 4, 4, kv, kv))
    attention = context + sum(align(chunk_tokens * width) for width in (4 * model.heads, query))
    rest = (query, hidden, 2 * model.ffn, 2 * model.ffn, full_extra_bytes_per_token)
    return LevelBytes(
        context=context,
        attention=attention,
        full=attention + sum(align(chunk_tokens * width) for width in rest),
    )


def is_large(hardware: Hardware) -> bool:
    """Whether the rule treats it as an H100 or A100."""
    architecture, units = hardware.device.architecture, hardware.device.units.value
    return architecture == "Hopper" or (architecture == "Ampere" and units > MOST_SMALL_UNITS)


def attention_workspace_bytes(
    model: Transformer, hardware: Hardware, *, chunk_tokens: int, sequence_tokens: int
) -> int:
    """What attention's backward needs: flash attention 3 on Hopper and Ampere, 2 on Blackwell.

    The tokens of one sequence stand for all keys, also where a chunk holds several sequences.
    """
    architecture = hardware.device.architecture
    if architecture not in ("Hopper", "Ampere", "Blackwell", "Blackwell RTX"):
        raise FlopwiseError(
            f"the rule `dataflow` is not known for {hardware.name}",
            why=f"its architecture is {architecture}; the trainer ran on Hopper, Ampere and Blackwell",
            hint="h100-sxm, h200, a100-80gb, rtx-5090 or rtx-3090",
        )
    sequences = max(1, chunk_tokens // sequence_tokens)
    heads, kv_heads, channels = model.heads, model.kv_heads, model.head_dim
    grouped = heads != kv_heads
    if architecture.startswith("Blackwell"):
        padded = chunk_tokens + 128 * sequences
        copies = math.ceil(hardware.device.units.value / (sequences * heads))
        keys = 2 * sequence_tokens * heads * channels * 2 if grouped else 0
        return heads * padded * 4 + keys + copies * padded * heads * channels * 2 * 4
    rows = 128 if channels <= 64 else 64
    columns = 96 if not is_large(hardware) and channels == 128 else 128
    query_tokens = round_up(chunk_tokens + sequences * rows, rows)
    key_tokens = round_up(sequence_tokens + sequences * columns, columns)
    keys = 2 * kv_heads * key_tokens * channels * 4 if grouped else 0
    order = -(-chunk_tokens // rows) * sequences * heads * 4
    return 2 * heads * query_tokens * 4 + heads * query_tokens * channels * 4 + keys + order


def device_base(model: Transformer, hardware: Hardware, chunks: Chunks) -> dict[str, int]:
    """Device memory that the rule sets aside before blocks and saved activations, by name.

    Embedding and head stay with gradients and both moments: four times V·D and (V+1)·D.
    """
    hidden, vocab, tokens, head_tokens = model.hidden, model.vocab, chunks.tokens, chunks.head_tokens
    attention = attention_workspace_bytes(model, hardware, chunk_tokens=tokens, sequence_tokens=chunks.sequence_tokens)
    return {
        "kernel workspace": KERNEL_WORKSPACE_BYTES,
        "attention workspace": attention,
        "contexts": 2 * 2 * max(tokens, chunks.sequence_tokens) * model.kv_width * 2,
        "embedding and head": 4 * (vocab * hidden * 2) + 4 * ((vocab + 1) * hidden * 2),
        "transitions": 2 * chunks.tokens_per_round * hidden * 2,
        "logits": head_tokens * vocab * 2,
        "head activations": head_tokens * ((hidden + vocab) * 2 + 4),
        "recomputed norms": 2 * tokens * hidden * 2,
        "gradients of activations": estimate_bytes(model, tokens),
        "activation workspace": tokens * (hidden + model.ffn) * 2,
        "pad": PAD_BYTES,
    }


def host_base(model: Transformer, *, tokens_per_round: int) -> dict[str, int]:
    """Host memory before saved activations, by name: the host keeps every block, those that stay on the device too."""
    hidden, vocab = model.hidden, model.vocab
    return {
        "embedding and head": vocab * hidden * 2 + (vocab + 1) * hidden * 2,
        "blocks": 4 * model.layers * block_bytes(model),
        "tokens": HOST_TOKEN_BYTES * tokens_per_round,
        "transitions": 2 * tokens_per_round * hidden * 2,
    }


def peak_flops(hardware: Hardware) -> float:
    """bf16 FLOP/s that the rule divides by. It has 989e12 for an H100; with 989.5e12 every recorded row is the same."""
    fact = hardware.device.peak_flops.get("bf16")
    if fact is None:
        raise FlopwiseError(
            f"the rule `dataflow` needs the bf16 peak of {hardware.name}", hint="`bf16` in [device.peak_flops]"
        )
    return fact.value


def link_bytes_per_s(hardware: Hardware) -> float:
    """The link's rate as the rule reckons it: ¼ GiB/s · 2^(generation - 1) a lane, 64 GiB/s for PCIe 5.0 x16."""
    name = hardware.link.name if hardware.link else ""
    found = re.fullmatch(r"PCIe ([1-9])(?:\.0)? x(\d+)", name)
    if not found:
        raise FlopwiseError(
            f"the rule `dataflow` does not know the link of {hardware.name}",
            why=f"it is called {name!r}; the rule goes by the generation of PCIe and its lanes" if name else None,
            hint='a [link] with name = "PCIe 5.0 x16"',
        )
    return GIB / 4 * (1 << int(found[1]) - 1) * int(found[2])


def sequence_flops(model: Transformer, tokens: int) -> int:
    """Forward and backward of a sequence: L(6SD(2A + 2K + 3F) + 2S²A + 4S²D) + 6SDV, causal attention halved."""
    hidden, query = model.hidden, model.query_width
    products = 6 * tokens * hidden * (2 * query + 2 * model.kv_width + 3 * model.ffn)
    attention = 2 * tokens**2 * query + 4 * tokens**2 * hidden
    return model.layers * (products + attention) + 6 * tokens * hidden * model.vocab


def chunk_forward_flops(model: Transformer, *, sequences: int, tokens: int) -> int:
    """Forward of a layer over a chunk of whole sequences, as the link rule counts: without the output projection."""
    hidden = model.hidden
    products = 2 * tokens * hidden * (model.query_width + 2 * model.kv_width + 3 * model.ffn)
    return sequences * (products + 2 * tokens**2 * model.query_width)


def refused(
    kind: Literal["device", "host"], cap_bytes: int, needed_bytes: int, what: str, hint: str | None = None
) -> DoesNotFit:
    """An error about a cap that the rule refuses."""
    return DoesNotFit(
        f"the rule `dataflow` refuses {show_bytes(cap_bytes)} of {kind} memory",
        why=f"it wants {show_bytes(needed_bytes)}, for {what}",
        hint=hint or f"--{kind}-mem {-(-needed_bytes // GIB)}GiB",
        # With a hint of its own, more memory is no way out.
        needed_bytes=None if hint else needed_bytes,
        place=kind,
    )


def head_chunk_tokens(chunk_tokens: int, variant: Variant) -> int:
    """Tokens whose logits exist at once."""
    least = variant.least_head_chunk_tokens
    return chunk_tokens if least is None else least_divisor(chunk_tokens, least)


def chunks_of(model: Transformer, hardware: Hardware, sequence_tokens: int, variant: Variant) -> Chunks:
    """Chunks of the smallest size allowed; so many groups of sequences that a layer saves about what it weighs."""
    least = variant.least_chunk_tokens if is_large(hardware) else variant.least_chunk_tokens_elsewhere
    divided = sequence_tokens > least
    tokens = least_divisor(sequence_tokens, least) if divided else round_up(least, sequence_tokens)
    per_sequence = -(-sequence_tokens // tokens)
    groups = half_up(block_bytes(model) / estimate_bytes(model, tokens) / per_sequence)
    return Chunks(
        tokens=tokens,
        per_sequence=per_sequence,
        per_round=per_sequence * min(max(groups, 1), MOST),
        head_tokens=head_chunk_tokens(tokens, variant),
        sequence_tokens=sequence_tokens,
    )


def partition(
    model: Transformer, chunks: Chunks, base: dict[str, int], device_bytes: int, levels: LevelBytes
) -> Partition:
    """Whole layers (weights, gradients, activations of all chunks) while they fit, then weights, then activations."""
    block, estimate, count = block_bytes(model), estimate_bytes(model, chunks.tokens), chunks.per_round
    set_aside = sum(base.values())
    remaining = device_bytes - set_aside
    least = 2 * block + 2 * estimate
    if remaining < least:
        raise refused("device", device_bytes, set_aside + least, "buffers, two blocks and two activations")
    layer = 2 * block + count * estimate
    whole = min(remaining // layer, model.layers)
    params = grads = max(whole, 1)
    if whole == 0:
        slots = (remaining - 2 * block) // estimate
    else:
        slots, left = whole * count, remaining - whole * layer
        if whole < model.layers:
            if left > block:
                params, left = params + 1, left - block
            slots += min(model.layers * count - slots, left // estimate)
    # What is allocated in the end: the gradients of activations at their true size, token data, and no pad.
    fixed = set_aside - PAD_BYTES - estimate + levels.full + (params + grads) * block
    fixed += DEVICE_TOKEN_BYTES * chunks.tokens_per_round
    used = fixed + slots * levels.full
    if used > device_bytes:
        # More memory would only mean more of them.
        what, hint = (
            f"{slots} activations, which it reckons smaller than they are",
            "another cap, or flopwise's own rule",
        )
        raise refused("device", device_bytes, used, what, hint)
    optimizer = min((device_bytes - fixed) // (2 * block), model.layers)
    if optimizer < 1:
        raise refused("device", device_bytes, fixed + 2 * block, "a layer's moments in place of the activations")
    return Partition(params=params, grads=grads, slots=slots, optimizer=optimizer, used_bytes=used)
