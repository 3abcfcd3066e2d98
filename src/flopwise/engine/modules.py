"""Plain PyTorch modules for every family that can be trained: autograd and nothing else.

They are what the engine's own kernels are compared with, and what PyTorch's own sharding wraps. Their parameters have
the names and shapes of `flopwise.work.parameters`, so that numbers go from one executor to another by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from flopwise.engine.adapted import Adapted, Matrix
from flopwise.engine.batch import NO_LABEL
from flopwise.engine.executable import check_trainable
from flopwise.engine.kernels.activations import LIMIT
from flopwise.engine.kernels.experts import choose, sum_terms
from flopwise.engine.kernels.plain_attention import alibi_biases, mask_for
from flopwise.engine.kernels.scan import PerHead, convolve, normalise_gated, scan
from flopwise.engine.streaming.rotary import rotation_of, temperatures_of
from flopwise.work.latent import LATENT_EPSILON, LatentAttention
from flopwise.work.recurrence import ATTENDING, FEEDING, RECURRENT, Recurrence
from flopwise.work.routing import CORRECTION_TERMS
from flopwise.work.transformer import Transformer


def _relu_squared(value: Tensor) -> Tensor:
    return functional.relu(value).square()


def _unchanged(value: Tensor) -> Tensor:
    return value


def _quick_gelu(value: Tensor) -> Tensor:
    return value * torch.sigmoid(1.702 * value)


ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": _relu_squared,
    "relu6": functional.relu6,
    "leaky_relu": functional.leaky_relu,
    "mish": functional.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "linear": _unchanged,
    "quick_gelu": _quick_gelu,
    "clamped_swiglu": _quick_gelu,
}
"""Every activation that a description may name; of a clamped one, what is done to the gate."""


@lru_cache(maxsize=4)
def rotary_tables(model: Transformer, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, scaled, (tokens, turned channels ÷ 2) each, in fp32: computed once on the CPU, equal on every
    device. `model` has blocks of one kind."""
    rotation = rotation_of(model, tokens, torch.device("cpu"))
    assert rotation is not None
    # What is kept for later calls may be asked for first by an evaluation, whose tensors no backward pass may use.
    with torch.inference_mode(False):
        angles = torch.arange(tokens, dtype=torch.float32)[:, None] * rotation.frequencies
        return (angles.cos() * rotation.scale).to(device), (angles.sin() * rotation.scale).to(device)


def rotate(value: Tensor, cosines: Tensor, sines: Tensor, *, neighbours: bool = False) -> Tensor:
    """Turn the first channels of (…, tokens, head_dim) by their positions, as many as there are angles for.

    Channel i is paired with that of the other half of those, or with its neighbour, as in `transformers`.
    """
    cosines, sines = cosines.to(value.dtype), sines.to(value.dtype)
    channels = 2 * cosines.shape[-1]
    turned, rest = value[..., :channels], value[..., channels:]
    if neighbours:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack((first * cosines - second * sines, second * cosines + first * sines), -1)
        return torch.cat((pairs.flatten(-2), rest), -1)
    first, second = turned.chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines, rest), -1)


def attention_mask(model: Transformer, tokens: int, lengths: Tensor | None, device: torch.device) -> Tensor | None:
    """True where a query may see a key, to be broadcast over (sequences, heads, queries, keys).

    None where no mask is needed beyond the causal one. Behind a causal model's sequence there is only padding, which
    none of its tokens sees, so that `lengths` are for bidirectional models.
    """
    places = torch.arange(tokens, device=device)
    within = None
    if model.window is not None and model.window < tokens:
        back = places[:, None] - places[None, :]
        within = (back if model.causal else back.abs()) < model.window
        if model.causal:
            return (back >= 0) & within
    if model.attention_chunk is not None and model.attention_chunk < tokens:
        chunks = places // model.attention_chunk
        return (places[:, None] >= places) & (chunks[:, None] == chunks)
    if model.causal or lengths is None:
        return within
    seen = places[None, None, None, :] < lengths.to(device)[:, None, None, None]
    return seen if within is None else seen & within


def square_attention(
    model: Transformer, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """Attention with capped or biased scores or sinks, over the whole square: torch has no kernel for it."""
    cap = model.attention_cap
    scores = query @ key.transpose(-1, -2) * model.score_scale
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    if model.positions == "alibi":
        places = torch.arange(key.shape[2], device=key.device)
        scores = scores + alibi_biases(mask_for(model), places, 0, scores.dtype)[:, None]
    if mask is None and model.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        # Padding beyond a window sees nothing: whatever it gets, but no NaN, which gradients would take along.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1, dtype=at_least_fp32(scores.dtype)).to(query.dtype)
    result: Tensor = weights[..., : key.shape[2]] @ value
    return result


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last `width` channels; narrow types are normalised in fp32."""

    def __init__(self, model: Transformer, width: int, *, epsilon: float | None = None, scales: bool = True) -> None:
        super().__init__()
        self.width = width
        self.rms, self.adds_one = model.norm == "rms", model.norm_adds_one
        self.epsilon = model.norm_epsilon if epsilon is None else epsilon
        self.weight = nn.Parameter(torch.ones(width)) if scales else None
        self.bias = nn.Parameter(torch.zeros(width)) if model.norm_bias and scales else None

    def forward(self, value: Tensor) -> Tensor:
        if self.weight is None:
            return self.normed(value)
        weight = self.weight + 1.0 if self.adds_one else self.weight
        if not self.rms:
            return functional.layer_norm(value, weight.shape, weight, self.bias, self.epsilon)
        scaled = weight * self.normed(value)
        return scaled if self.bias is None else scaled + self.bias

    def normed(self, value: Tensor) -> Tensor:
        """With nothing scaled."""
        if not self.rms:
            return functional.layer_norm(value, (self.width,), None, None, self.epsilon)
        wide = value.to(at_least_fp32(value.dtype))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)).to(value.dtype)


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over channels and losses are computed in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class Dropper(Protocol):
    """What training drops of one batch."""

    def rows(self, values: Tensor, layer: int, name: str) -> Tensor:
        """What is kept of (sequences, tokens, channels), of which the description speaks as `name`."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, layer: int) -> Tensor | None:
        """Attention over (sequences, heads, tokens, channels) without what is dropped of its weights; None: all."""


class PlainBlock(nn.Module):
    """Attention, or what carries a state, and a feed-forward part with their norms, around the residual stream."""

    def __init__(self, model: Transformer, layer: int) -> None:
        super().__init__()
        assert model.other_attention is None, "a block is of one kind"
        self.model, self.layer = model, layer
        self.routed: tuple[Tensor, Tensor] | None = None
        """Scores and experts of the last pass, where a loss asks for them."""
        self.activation = ACTIVATION_FUNCTIONS[model.activation]
        self.kind = model.block_kind(0) if model.has_kinds else ATTENDING
        self.norm1 = nn.Identity() if model.unnormed_attention == "all" else Norm(model, model.hidden)
        self.norm2 = None if model.shared_norm or model.one_branch else Norm(model, model.hidden)
        sandwich = model.norm_place == "sandwich"
        self.attention_norm = Norm(model, model.hidden) if sandwich else None
        self.feed_norm = Norm(model, model.hidden) if sandwich else None
        if self.kind == ATTENDING:
            self.make_attention(model)
        elif self.kind == RECURRENT:
            assert model.recurrence is not None
            self.make_states(model, model.recurrence)
        if self.kind == FEEDING or not model.one_branch:
            self.make_feed(model)
        self.adapted = None if model.adapters is None else Adapted(model)
        for name, shape in self.adapted.shapes.items() if self.adapted else ():
            self.add_module(name, Matrix(shape))

    def make_attention(self, model: Transformer) -> None:
        """Products, norms and sinks."""
        if model.latent is None:
            gate = model.query_width if model.attention_gate else 0
            self.qkv = nn.Linear(model.hidden, model.query_width + 2 * model.kv_width + gate, bias=model.qkv_bias)
        else:
            self.make_latents(model, model.latent)
        whole = model.qk_norm_over == "all"
        scales = model.qk_norm_weights
        widths = (model.query_width, model.kv_width) if whole else (model.head_dim, model.head_dim)
        self.query_norm = Norm(model, widths[0], scales=scales) if model.qk_norm else None
        self.key_norm = Norm(model, widths[1], scales=scales) if model.qk_norm else None
        self.sinks = Sinks(model.heads) if model.sinks else None
        self.output = nn.Linear(model.attended_width, model.hidden, bias=model.output_bias)

    def make_states(self, model: Transformer, recurrence: Recurrence) -> None:
        """Products around a state, its convolution and what is one number for each head."""
        wide = recurrence.width + recurrence.channels + recurrence.steps
        self.mix_in = nn.Linear(model.hidden, wide, bias=recurrence.bias)
        filters = (recurrence.channels, recurrence.conv)
        self.convolution = Numbers(filters, (recurrence.channels,) if recurrence.conv_bias else None)
        self.steps = Numbers(None, (recurrence.heads,))
        self.decay = Numbers((recurrence.heads,))
        self.skip = Numbers((recurrence.heads,)) if recurrence.rule == "mamba2" else None
        self.mix_norm = Numbers((recurrence.norm_weights,))
        self.mix_out = nn.Linear(recurrence.width, model.hidden, bias=recurrence.bias)

    def make_feed(self, model: Transformer) -> None:
        """The feed-forward part."""
        if model.experts:
            self.router = nn.Linear(model.hidden, model.experts, bias=model.routing.bias)
        linear = partial(ExpertMatrices, model.experts) if model.experts else partial(nn.Linear)
        if model.gated:
            self.gate_up = linear(model.hidden, 2 * model.ffn, bias=model.ffn_bias)
        else:
            self.up = linear(model.hidden, model.ffn, bias=model.ffn_bias)
        self.down = linear(model.ffn, model.hidden, bias=model.ffn_bias)
        if model.routing.correction:
            self.routing = Correction(model.experts)
        if model.shared_ffn:
            if model.gated:
                self.shared_gate_up = nn.Linear(model.hidden, 2 * model.shared_ffn, bias=model.ffn_bias)
            else:
                self.shared_up = nn.Linear(model.hidden, model.shared_ffn, bias=model.ffn_bias)
            self.shared_down = nn.Linear(model.shared_ffn, model.hidden, bias=model.ffn_bias)
        self.shared_router = nn.Linear(model.hidden, 1, bias=False) if model.shared_gate else None

    def made(self, product: str, value: Tensor, expert: int | None = None) -> Tensor:
        """What a product makes, of an expert where there are some, with what adapters add to it."""
        module = getattr(self, product)
        result: Tensor = module(value) if expert is None else module(value, expert)
        return result if self.adapted is None else self.adapted.add(self, product, value, result, expert)

    def inner(self, prefix: str, value: Tensor, expert: int | None = None) -> Tensor:
        """What the feed-forward part's last product reads; `prefix`: of shared experts."""
        if self.model.gated:
            return self.gated(*self.made(f"{prefix}gate_up", value, expert).chunk(2, -1))
        return self.activation(self.made(f"{prefix}up", value, expert))

    def take_routed(self) -> tuple[Tensor, Tensor]:
        """What was routed last, (tokens, experts) and (tokens, choices): it is asked once."""
        routed, self.routed = self.routed, None
        assert routed is not None, "the routing has losses, and gradients are asked for"
        return routed

    def forward(self, stream: Tensor, lengths: Tensor | None = None, drops: Dropper | None = None) -> Tensor:
        """The next block's input from this one's, (sequences, tokens, hidden)."""
        if self.model.one_branch:
            return stream + self.scaled(self.mixed(self.norm1(stream), lengths, drops))
        second = self.norm1 if self.norm2 is None else self.norm2
        if self.model.norm_place == "post":
            stream = self.norm1(stream + self.scaled(self.attention(stream, lengths, drops)))
            result: Tensor = second(stream + self.scaled(self.feed_forward(stream, drops)))
            return result
        if self.model.norm_place == "behind":
            stream = stream + self.scaled(self.norm1(self.attention(stream, lengths, drops)))
            return stream + self.scaled(second(self.feed_forward(stream, drops)))
        if self.attention_norm is not None and self.feed_norm is not None:
            stream = stream + self.scaled(self.attention_norm(self.attention(self.norm1(stream), lengths, drops)))
            return stream + self.scaled(self.feed_norm(self.feed_forward(second(stream), drops)))
        attended = stream + self.scaled(self.mixed(self.norm1(stream), lengths, drops))
        source = stream if self.model.parallel_residual else attended
        return attended + self.scaled(self.feed_forward(second(source), drops))

    def scaled(self, branch: Tensor) -> Tensor:
        """A branch's result as it is added to the residual stream."""
        return branch if self.model.residual_scale == 1.0 else branch * self.model.residual_scale

    def mixed(self, value: Tensor, lengths: Tensor | None, drops: Dropper | None = None) -> Tensor:
        """The first branch, or the only one."""
        if self.kind == ATTENDING:
            return self.attention(value, lengths, drops)
        return self.carried(value) if self.kind == RECURRENT else self.feed_forward(value, drops)

    def carried(self, value: Tensor) -> Tensor:
        """A state along the sequence."""
        recurrence = self.model.recurrence
        assert recurrence is not None
        wide = at_least_fp32(value.dtype)
        parts = torch.split(self.mix_in(value), [recurrence.width, recurrence.channels, recurrence.steps], -1)
        gate, raw, steps = (part.to(wide) for part in parts)
        filters, shift = self.convolution.weight, self.convolution.bias
        assert filters is not None and self.decay.weight is not None and self.steps.bias is not None
        assert self.mix_norm.weight is not None
        mixed = convolve(raw, filters.to(wide), None if shift is None else shift.to(wide)).to(value.dtype).to(wide)
        skip = None if self.skip is None or self.skip.weight is None else self.skip.weight.to(wide)
        heads = PerHead(self.steps.bias.to(wide), self.decay.weight.to(wide), skip)
        read = scan(recurrence, mixed, steps, heads)
        weight = self.mix_norm.weight.to(wide)
        normed = normalise_gated(recurrence, read.to(value.dtype).to(wide), gate, weight, self.model.norm_epsilon)
        result: Tensor = self.mix_out(normed.to(value.dtype))
        return result

    def attention(self, value: Tensor, lengths: Tensor | None, drops: Dropper | None = None) -> Tensor:
        model = self.model
        gate = None
        if model.latent is not None:
            query, key, values = self.latent_heads(value, model.latent)
        else:
            query, key, values, gate = self.plain_heads(value)
        attended = None if drops is None else drops.attend(query, key, values, lengths, self.layer)
        if attended is None:
            attended = self.attend(query, key, values, lengths)
        attended = attended.transpose(1, 2).flatten(2)
        result: Tensor = self.made("output", attended if gate is None else attended * gate.sigmoid())
        return result if drops is None else drops.rows(result, self.layer, "projected")

    def plain_heads(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values, (sequences, heads, tokens, channels), and what gates attention's result."""
        model = self.model
        sequences, tokens, _ = value.shape
        widths = [model.query_width, model.kv_width, model.kv_width]
        widths += [model.query_width] if model.attention_gate else []
        parts = list(torch.split(self.made("qkv", value), widths, -1))
        gate = parts.pop() if model.attention_gate else None
        by_head = model.qk_norm_over == "head"
        if self.query_norm is not None and self.key_norm is not None and not by_head:
            parts[:2] = self.query_norm(parts[0]), self.key_norm(parts[1])
        query, key, values = (part.view(sequences, tokens, -1, model.head_dim).transpose(1, 2) for part in parts)
        if self.query_norm is not None and self.key_norm is not None and by_head:
            query, key = self.query_norm(query), self.key_norm(key)
        if model.positions == "rotary":
            tables, neighbours = rotary_tables(model, tokens, value.device), model.rotary_pairs == "neighbours"
            query, key = (rotate(each, *tables, neighbours=neighbours) for each in (query, key))
        if model.temperature is not None:
            places = torch.arange(tokens, device=value.device)
            query = query * temperatures_of(model, places, at_least_fp32(query.dtype))[:, None]
            query = query.to(value.dtype)
        return query, key, values, gate

    def make_latents(self, model: Transformer, latent: LatentAttention) -> None:
        """The products and norms of latent attention."""
        turned, plain = model.turned_channels, model.head_dim - model.turned_channels
        first = latent.query_rank or model.query_width
        self.latents = nn.Linear(model.hidden, first + latent.rank + turned, bias=False)
        if latent.query_rank:
            self.query_latent_norm = Norm(model, latent.query_rank, epsilon=LATENT_EPSILON)
            self.query_up = nn.Linear(latent.query_rank, model.query_width, bias=False)
        self.latent_norm = Norm(model, latent.rank, epsilon=LATENT_EPSILON)
        self.latent_up = nn.Linear(latent.rank, model.heads * plain + model.value_width, bias=False)

    def latent_heads(self, value: Tensor, latent: LatentAttention) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (sequences, heads, tokens, channels); the channels that turn are a head's first."""
        model, turned = self.model, self.model.turned_channels
        first = latent.query_rank or model.query_width
        query, narrow, common = torch.split(self.made("latents", value), [first, latent.rank, turned], -1)
        if latent.query_rank:
            query = self.made("query_up", self.query_latent_norm(query))
        widths = [model.heads * (model.head_dim - turned), model.value_width]
        own, values = torch.split(self.made("latent_up", self.latent_norm(narrow)), widths, -1)
        query, own, values = (
            torch.unflatten(each, -1, (model.heads, -1)).transpose(1, 2) for each in (query, own, values)
        )
        tables, neighbours = rotary_tables(model, value.shape[1], value.device), model.rotary_pairs == "neighbours"
        common = rotate(common[:, None], *tables, neighbours=neighbours).expand(-1, model.heads, -1, -1)
        return rotate(query, *tables, neighbours=neighbours), torch.cat((common, own), -1), values

    def attend(self, query: Tensor, key: Tensor, values: Tensor, lengths: Tensor | None) -> Tensor:
        """Attention over (sequences, heads, tokens, channels)."""
        model = self.model
        # Each key and value head serves a run of neighbouring query heads.
        shared = model.heads // model.kv_heads
        key, values = key.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
        mask = attention_mask(model, query.shape[2], lengths, query.device)
        if model.attention_cap is not None or model.positions == "alibi" or self.sinks is not None:
            sinks = None if self.sinks is None else self.sinks.bias
            return square_attention(model, query, key, values, mask=mask, sinks=sinks)
        return functional.scaled_dot_product_attention(
            query, key, values, attn_mask=mask, is_causal=model.causal and mask is None, scale=model.attention_scale
        )

    def feed_forward(self, value: Tensor, drops: Dropper | None = None) -> Tensor:
        if self.model.experts:
            return self.mixture(value.flatten(0, 1)).view(value.shape)
        inner = self.inner("", value)
        result = self.made("down", inner)
        return result if drops is None else drops.rows(result, self.layer, "fed")

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """What the activation makes of both."""
        if self.model.activation == "clamped_swiglu":
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
            return (up + 1) * _quick_gelu(gate)
        return self.activation(gate) * up

    def mixture(self, value: Tensor) -> Tensor:
        """What each token's experts make of it, weighted, expert by expert."""
        weights, chosen = self.route(value)
        result = torch.zeros_like(value)
        for expert in range(self.model.experts):
            tokens, slots = torch.where(chosen == expert)
            weight, read = weights[tokens, slots, None].to(value.dtype), value[tokens]
            if self.model.routing.on_inputs:
                read, weight = read * weight, torch.ones_like(weight)
            made = self.made("down", self.inner("", read, expert), expert) * weight
            result = result.index_add(0, tokens, made)
        return result if not self.model.shared_ffn else result + self.shared(value)

    def shared(self, value: Tensor) -> Tensor:
        """What every token goes through."""
        inner = self.inner("shared_", value)
        made = self.made("shared_down", inner)
        return made if self.shared_router is None else made * self.shared_router(value).sigmoid()

    def route(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of each token's experts."""
        routing, scores = self.model.routing, self.router(value)
        if routing.scores == "sigmoid":
            shares = scores.to(at_least_fp32(value.dtype)).sigmoid()
        else:
            shares = scores.softmax(-1, dtype=at_least_fp32(value.dtype))
        correction = sum_terms(self.routing.bias, shares.dtype) if routing.correction else None
        decides = scores if routing.on_inputs else shares
        chosen = choose(decides.detach(), routing, correction, self.model.experts_per_token)
        if routing.has_losses and torch.is_grad_enabled():
            self.routed = scores, chosen
        weights = shares.gather(-1, chosen)
        if routing.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * routing.scale, chosen


class Numbers(nn.Module):
    """A weight, a bias, or both, that others multiply with."""

    def __init__(self, weight: tuple[int, ...] | None, bias: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(torch.empty(weight))
        self.bias = None if bias is None else nn.Parameter(torch.empty(bias))


class Sinks(nn.Module):
    """A score for each head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads))


class Correction(nn.Module):
    """What is added to each expert's share for the choice alone, as the sum of its terms."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(CORRECTION_TERMS, experts), requires_grad=False)


class ExpertMatrices(nn.Module):
    """A matrix for each expert, and perhaps a bias."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        lead = (experts,) if experts > 1 else ()
        self.weight = nn.Parameter(torch.empty(*lead, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(*lead, outputs)) if bias else None

    def forward(self, value: Tensor, expert: int) -> Tensor:
        if self.weight.ndim == 2:
            return functional.linear(value, self.weight, self.bias)
        return functional.linear(value, self.weight[expert], None if self.bias is None else self.bias[expert])


def _table(rows: int, width: int) -> nn.Embedding:
    """Without first values: to draw them on the device `meta`, torch would import its compiler, for two seconds."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class ReferenceModel(nn.Module):
    """The whole network; `sequence_tokens` sizes a learned position table whose rows the description leaves open."""

    def __init__(self, model: Transformer, sequence_tokens: int) -> None:
        super().__init__()
        check_trainable(model)
        model.check_sequence(sequence_tokens)
        self.model = model
        hidden = model.hidden
        self.embedding = None if model.tied else _table(model.vocab, hidden)
        learned = model.positions == "learned"
        self.positions = _table(model.position_rows or sequence_tokens, hidden) if learned else None
        self.token_types = _table(model.token_types, hidden) if model.token_types else None
        self.embedding_norm = Norm(model, hidden) if model.embedding_norm else None
        self.layers = nn.ModuleList(PlainBlock(model.kind_of(layer), layer) for layer in range(model.layers))
        self.final_norm = Norm(model, hidden) if model.final_norm else None
        if model.head == "classifier":
            assert model.labels is not None
            self.pooler = nn.Linear(hidden, hidden, bias=model.transform_bias)
            self.pooler_norm = Norm(model, hidden) if model.pooler_norm else None
            self.classifier = nn.Linear(hidden, model.labels)
            return
        if model.head == "masked":
            self.transform = nn.Linear(hidden, hidden, bias=model.transform_bias)
            self.transform_norm = Norm(model, hidden)
        self.head = nn.Linear(hidden, model.vocab, bias=model.head_bias)

    def forward(
        self,
        ids: Tensor,
        lengths: Tensor | None = None,
        drops: Dropper | None = None,
        types: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Logits: (sequences, tokens, vocab), (sequences, labels) of a classifier, or (rows, vocab) of what is chosen.

        `chosen`: numbers of the tokens that the head is computed for, counted through all sequences; None: all.
        A bidirectional model does not look at the tokens of a sequence from its entry of `lengths` on.
        """
        stream = self.embedded(ids, types)
        stream = stream if drops is None else drops.rows(stream, 0, "embedding")
        for block in self.layers:
            stream = block(stream, lengths, drops)
        stream = stream if chosen is None else stream.reshape(-1, stream.shape[-1]).index_select(0, chosen)
        return self.logits(stream, drops, lengths)

    def embedded(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """The first block's input; without `types` every token is of the first."""
        # A tied model has one matrix, the head's, and looks its tokens up there.
        table = self.head.weight if self.embedding is None else self.embedding.weight
        stream = functional.embedding(ids, table)
        if self.model.embedding_scale != 1.0:
            # Rounded to the type of the numbers, as `transformers` does for Gemma.
            stream = stream * torch.tensor(self.model.embedding_scale, dtype=stream.dtype, device=stream.device)
        if self.positions is not None:
            stream = stream + self.positions(torch.arange(ids.shape[1], device=ids.device) + self.model.position_offset)
        if self.token_types is not None:
            stream = stream + self.token_types(torch.zeros_like(ids) if types is None else types)
        return stream if self.embedding_norm is None else self.embedding_norm(stream)

    def pooled(self, stream: Tensor, lengths: Tensor | None) -> Tensor:
        """What a classifier reads of each sequence."""
        if self.model.pooling == "first":
            return stream[:, 0]
        if lengths is None:
            return stream.mean(1)
        seen = torch.arange(stream.shape[1], device=stream.device) < lengths.to(stream.device)[:, None]
        return (stream * seen[..., None]).sum(1) / lengths.to(stream)[:, None]

    def logits(self, stream: Tensor, drops: Dropper | None = None, lengths: Tensor | None = None) -> Tensor:
        """The head's result for the last block's."""
        result: Tensor
        if self.model.head == "classifier":
            first = self.pooled(stream if self.final_norm is None else self.final_norm(stream), lengths)
            first = first if drops is None else drops.rows(first[:, None], 0, "first")[:, 0]
            pooled = ACTIVATION_FUNCTIONS[self.model.pooler_activation](self.pooler(first))
            pooled = pooled if self.pooler_norm is None else self.pooler_norm(pooled)
            pooled = pooled if drops is None else drops.rows(pooled[:, None], 0, "pooled")[:, 0]
            result = self.classifier(pooled)
            return result
        if self.final_norm is not None:
            stream = self.final_norm(stream)
        if self.model.head == "masked":
            activation = self.model.transform_activation or self.model.activation
            stream = self.transform_norm(ACTIVATION_FUNCTIONS[activation](self.transform(stream)))
        result = self.head(stream)
        if self.model.logit_scale != 1.0:
            result = result * self.model.logit_scale
        cap = self.model.logit_cap
        return result if cap is None else (result / cap).tanh() * cap

    def loss(
        self,
        ids: Tensor,
        labels: Tensor,
        lengths: Tensor | None = None,
        drops: Dropper | None = None,
        types: Tensor | None = None,
    ) -> Tensor:
        """The sum of the cross-entropies of all labels but NO_LABEL, in fp32 at least.

        Labels are what is to be foretold at their place: nothing is shifted here. A classifier has one a sequence.
        """
        logits = self(ids, lengths, drops, types)
        wide = logits.to(at_least_fp32(logits.dtype)).reshape(-1, logits.shape[-1])
        return functional.cross_entropy(wide, labels.reshape(-1).long(), ignore_index=NO_LABEL, reduction="sum")


def build(
    model: Transformer, sequence_tokens: int, *, dtype: torch.dtype, device: torch.device | str
) -> ReferenceModel:
    """The network on a device (`meta` too), with numbers that are still to be set: see `engine.initial`."""
    with torch.device("meta"):
        module = ReferenceModel(model, sequence_tokens)
    return module.to(dtype).to_empty(device=device)
