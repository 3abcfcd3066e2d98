"""`Layout`: what of a parallel set-up changes the operators of one device, and which layouts a model allows."""

from __future__ import annotations

from dataclasses import dataclass

from flopwise.work.lstm import Lstm
from flopwise.work.model import Model
from flopwise.work.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What of a parallel set-up changes the operators of one device."""

    tensor: int = 1
    sequence: bool = False
    """Norms and residual sums on 1/tensor of the tokens."""
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """Devices that share each expert's matrices; None: the tensor ranks, as everything else."""

    @property
    def sharing_experts(self) -> int:
        """Devices that share each expert's matrices."""
        return self.expert_tensor or self.tensor

    @property
    def folded(self) -> bool:
        """Whether tensor ranks hold different experts, or copies of the same, and each sends tokens of its own."""
        return self.sharing_experts != self.tensor


WHOLE = Layout()
"""One device does everything."""


def illegal_layout(model: Model, sequence_tokens: int, layout: Layout) -> tuple[str, str, str] | None:
    """The same for what one device computes."""
    if isinstance(model, Lstm):
        refusal = (
            "only its layers and sequences can be dealt out",
            "a cell's time steps follow each other",
            "dp and pp",
        )
        return None if layout == WHOLE else refusal
    uneven = _uneven(model, layout.tensor, layout.sharing_experts)
    if uneven:
        # A single rank always divides.
        tried = range(min(layout.tensor, model.heads), 0, -1)
        among = layout.expert_tensor if layout.folded else None
        fewer = next(ranks for ranks in tried if not _uneven(model, ranks, among or ranks))
        return f"{layout.tensor} tensor ranks", uneven, f"tp{fewer}"
    parts = layout.context * (layout.tensor if layout.sequence else 1)
    if sequence_tokens % parts:
        return (
            f"{sequence_tokens:,} tokens in {parts} parts",
            "context and sequence ranks take equal parts",
            f"a sequence that {parts} divides",
        )
    if layout.context > 1 and (
        model.head == "classifier"
        or model.window is not None
        or model.attention_chunk is not None
        or model.recurrence is not None
    ):
        carried = "a state is carried from its beginning to its end"
        why = carried if model.recurrence else "the ring is for full attention with a loss on every token"
        return "a sequence over several devices", why, "no cp"
    return _illegal_experts(model, layout)


def _illegal_experts(model: Transformer, layout: Layout) -> tuple[str, str, str] | None:
    if layout.folded and not model.experts:
        return f"experts over {layout.expert_tensor} of {layout.tensor} tensor ranks", "it has no experts", "no etp"
    if layout.expert > 1 and (not model.experts or model.experts % layout.expert):
        return (
            f"experts over {layout.expert} devices",
            f"it has {model.experts or 'no'} experts",
            f"ep{largest_divisor(max(1, model.experts), layout.expert)}",
        )
    return None


def _uneven(model: Transformer, ranks: int, sharing_experts: int) -> str | None:
    """What that many tensor ranks cannot share equally, or so many of them an expert; None when all can be."""
    if model.heads % ranks or (model.kv_heads % ranks and ranks % model.kv_heads):
        return f"it has {model.heads} heads and {model.kv_heads} key-value heads"
    states = model.recurrence
    if states is not None and (states.heads % ranks or states.key_heads % ranks):
        return f"its states have {states.heads} heads and {states.key_heads} of keys"
    own = sharing_experts if model.experts else ranks
    widths = ((model.ffn, own), (model.shared_ffn, ranks), (model.dense_ffn, ranks))
    width = next((width for width, among in widths if width % among), None)
    return None if width is None else f"its feed-forward width is {width}"


def largest_divisor(number: int, limit: int) -> int:
    return next(candidate for candidate in range(min(limit, number), 0, -1) if number % candidate == 0)
