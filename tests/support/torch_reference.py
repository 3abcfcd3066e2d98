"""Plain torch modules for every family, written from the papers and not from our operators.

They are what counted FLOPs and parameters are compared with. Nothing here imports the code under test but the
descriptions themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from flopwise.work.lstm import Lstm
from flopwise.work.transformer import Transformer

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def eager_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Scores, softmax, weighted sum; the mask does not change what is computed."""
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if causal:
        tokens = query.shape[-2]
        scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1), -1e9)
    result: Tensor = scores.softmax(-1) @ value
    return result


def flash_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """The operator that torch dispatches to on a CPU, called by name so that the meta device has it too."""
    result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)[0]
    return result


class Norm(nn.Module):
    """RMSNorm or LayerNorm, with or without a bias."""

    def __init__(self, model: Transformer, width: int) -> None:
        super().__init__()
        self.rms = model.norm == "rms"
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if model.norm_bias else None

    def forward(self, value: Tensor) -> Tensor:
        width = self.weight.shape
        if self.rms:
            return functional.rms_norm(value, width, self.weight)
        return functional.layer_norm(value, width, self.weight, self.bias)


class SelfAttention(nn.Module):
    def __init__(self, model: Transformer, attend: Attend) -> None:
        super().__init__()
        self.model, self.attend = model, attend
        wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.query = nn.Linear(model.hidden, wide, bias=model.qkv_bias)
        self.key = nn.Linear(model.hidden, narrow, bias=model.qkv_bias)
        self.value = nn.Linear(model.hidden, narrow, bias=model.qkv_bias)
        self.output = nn.Linear(wide, model.hidden, bias=model.output_bias)
        whole = model.qk_norm_over == "all"
        self.query_norm = Norm(model, wide if whole else model.head_dim) if model.qk_norm else nn.Identity()
        self.key_norm = Norm(model, narrow if whole else model.head_dim) if model.qk_norm else nn.Identity()

    def forward(self, value: Tensor) -> Tensor:
        model = self.model
        batch, tokens, _ = value.shape
        by_head = (batch, tokens, -1, model.head_dim)
        if model.qk_norm_over == "all":
            query, key = self.query_norm(self.query(value)).view(by_head), self.key_norm(self.key(value)).view(by_head)
        else:
            query, key = self.query_norm(self.query(value).view(by_head)), self.key_norm(self.key(value).view(by_head))
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        values = self.value(value).view(batch, tokens, model.kv_heads, model.head_dim).transpose(1, 2)
        if model.positions == "rotary":
            query, key = rotate(query), rotate(key)
        repeat = model.heads // model.kv_heads
        key, values = key.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
        attended = self.attend(query, key, values, model.causal)
        result: Tensor = self.output(attended.transpose(1, 2).reshape(batch, tokens, -1))
        return result


def rotate(value: Tensor) -> Tensor:
    tokens, channels = value.shape[-2:]
    angles = torch.ones(tokens, channels // 2, device=value.device, dtype=value.dtype)
    first, second = value.chunk(2, -1)
    return torch.cat((first * angles - second * angles, second * angles + first * angles), -1)


class FeedForward(nn.Module):
    def __init__(self, model: Transformer, width: int = 0) -> None:
        super().__init__()
        width = width or model.ffn
        self.gate = nn.Linear(model.hidden, width, bias=model.ffn_bias) if model.gated else None
        self.up = nn.Linear(model.hidden, width, bias=model.ffn_bias)
        self.down = nn.Linear(width, model.hidden, bias=model.ffn_bias)

    def forward(self, value: Tensor) -> Tensor:
        inner = self.up(value)
        inner = functional.silu(self.gate(value)) * inner if self.gate is not None else functional.gelu(inner)
        result: Tensor = self.down(inner)
        return result


class Experts(nn.Module):
    """Tokens go round the experts in turn: as many to each as a balanced router sends."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.chosen = model.experts_per_token
        self.router = nn.Linear(model.hidden, model.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(model) for _ in range(model.experts))
        self.shared = FeedForward(model, model.shared_ffn) if model.shared_ffn else None
        self.shared_gate = nn.Linear(model.hidden, 1, bias=False) if model.shared_gate else None

    def forward(self, value: Tensor) -> Tensor:
        batch, tokens, hidden = value.shape
        flat = value.reshape(-1, hidden)
        weights = self.router(flat).softmax(-1)[:, : self.chosen]
        copies = flat.repeat(self.chosen, 1)
        parts = copies.chunk(len(self.experts))
        results = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        mixed = (results.view(self.chosen, -1, hidden) * weights.t().unsqueeze(-1)).sum(0)
        if self.shared is not None:
            shared = self.shared(flat)
            mixed = mixed + (shared if self.shared_gate is None else self.shared_gate(flat).sigmoid() * shared)
        result: Tensor = mixed.view(batch, tokens, hidden)
        return result


class Block(nn.Module):
    def __init__(self, model: Transformer, attend: Attend, layer: int = 0) -> None:
        super().__init__()
        self.model = model
        self.attention = SelfAttention(model, attend)
        dense = layer in model.dense_blocks
        self.feed = Experts(model) if model.experts and not dense else FeedForward(model, model.dense_ffn)
        self.norm1, self.norm2 = Norm(model, model.hidden), Norm(model, model.hidden)
        sandwich = model.norm_place == "sandwich"
        self.norm3, self.norm4 = (Norm(model, model.hidden) if sandwich else nn.Identity() for _ in range(2))
        if model.shared_norm:
            self.norm2.weight, self.norm2.bias = self.norm1.weight, self.norm1.bias

    def scaled(self, value: Tensor) -> Tensor:
        return value if self.model.residual_scale == 1.0 else value * self.model.residual_scale

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor
        if self.model.norm_place == "behind":
            value = value + self.scaled(self.norm1(self.attention(value)))
            result = value + self.scaled(self.norm2(self.feed(value)))
            return result
        if self.model.norm_place == "post":
            value = self.norm1(value + self.scaled(self.attention(value)))
            result = self.norm2(value + self.scaled(self.feed(value)))
        elif self.model.parallel_residual:
            attended, fed = self.attention(self.norm1(value)), self.feed(self.norm2(value))
            result = value + self.scaled(attended) + self.scaled(fed)
        else:
            value = value + self.scaled(self.norm3(self.attention(self.norm1(value))))
            result = value + self.scaled(self.norm4(self.feed(self.norm2(value))))
        return result


class Reference(nn.Module):
    """The whole network, from token ids to the sum of its logits (any loss has the same matrix products)."""

    def __init__(self, model: Transformer, tokens: int, attend: Attend) -> None:
        super().__init__()
        self.model = model
        hidden = model.hidden
        self.embedding = nn.Embedding(model.vocab, hidden)
        learned = model.positions == "learned"
        self.positions = nn.Embedding(model.position_rows or tokens, hidden) if learned else None
        self.types = nn.Embedding(model.token_types, hidden) if model.token_types else None
        self.embedding_norm = Norm(model, hidden) if model.embedding_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(model, attend, layer) for layer in range(model.layers))
        self.final_norm = Norm(model, hidden) if model.final_norm and model.head != "classifier" else nn.Identity()
        if model.head == "classifier":
            self.pooler = nn.Linear(hidden, hidden)
            self.head = nn.Linear(hidden, model.labels or 1)
        else:
            if model.head == "masked":
                self.transform = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), Norm(model, hidden))
            self.head = nn.Linear(hidden, model.vocab, bias=model.head_bias)
            if model.tied:
                self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.hidden(ids)).sum()

    def hidden(self, ids: Tensor) -> Tensor:
        """Everything but the head, whose input this is."""
        value: Tensor = self.embedding(ids)
        if self.positions is not None:
            value = value + self.positions(torch.zeros_like(ids))
        if self.types is not None:
            value = value + self.types(torch.zeros_like(ids))
        value = self.embedding_norm(value)
        for block in self.blocks:
            value = block(value)
        result: Tensor = self.final_norm(value)
        return result

    def logits(self, value: Tensor) -> Tensor:
        """The head's result for the last hidden state."""
        if self.model.head == "classifier":
            value = self.pooler(value[:, 0]).tanh()
        elif self.model.head == "masked":
            value = self.transform(value)
        result: Tensor = self.head(value)
        return result


class RecurrentReference(nn.Module):
    """An LSTM language model with one product per cell, over [input, state]."""

    def __init__(self, model: Lstm) -> None:
        super().__init__()
        self.model = model
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.cells = nn.ModuleList(nn.Linear(2 * model.hidden, 4 * model.hidden) for _ in range(model.layers))
        self.projection = nn.Linear(model.hidden, model.projection, bias=False) if model.projection else None
        width = model.projection if model.head_input == "projection" else model.hidden
        self.head = nn.Linear(width, model.vocab)

    def forward(self, ids: Tensor) -> Tensor:
        value = self.embedding(ids)
        for cell in self.cells:
            # The first state is a parameter's stand-in: its gradient is computed like every other step's.
            state = memory = torch.zeros_like(value[:, 0]).requires_grad_()
            outputs = []
            for step in range(value.shape[1]):
                gates = cell(torch.cat((value[:, step], state), -1))
                take, forget, give, candidate = gates.chunk(4, -1)
                memory = forget.sigmoid() * memory + take.sigmoid() * candidate.tanh()
                state = give.sigmoid() * memory.tanh()
                outputs.append(state)
            value = torch.stack(outputs, 1)
        extra = value.new_zeros(())
        if self.projection is not None:
            projected = self.projection(value)
            if self.model.head_input == "projection":
                value = projected
            else:
                extra = projected.sum()
        result: Tensor = self.head(value).sum() + extra
        return result
