"""A transformer's operators for one sequence, in the order of its forward pass."""

from __future__ import annotations

from flopwise.work.attention_ops import AttentionOps
from flopwise.work.end_ops import EndOps
from flopwise.work.feed_ops import FeedOps
from flopwise.work.layout import WHOLE, Layout
from flopwise.work.lengths import Lengths
from flopwise.work.op import AttentionKernel, SaveLevel
from flopwise.work.recurrence import ATTENDING, FEEDING, RECURRENT
from flopwise.work.state_ops import StateOps
from flopwise.work.transformer import Transformer
from flopwise.work.work import Work


def transformer_work(
    model: Transformer,
    sequence_tokens: int,
    kernel: AttentionKernel = "flash",
    layout: Layout = WHOLE,
    lengths: Lengths | None = None,
) -> Work:
    """Describe one forward pass over one sequence, or over those of `lengths`; backward and recompute follow from it.

    With a `layout` it is what one device of it does: its heads, its columns of the feed-forward part and of the
    vocabulary (padded to equal parts), its tokens and its experts, each of which gets an equal part of the tokens.
    """
    model.check_sequence(sequence_tokens)
    builder = _Builder(model, sequence_tokens, kernel, layout, lengths)
    builder.embedding()
    builder.block()
    builder.head()
    return Work(
        name=model.name,
        sequence_tokens=sequence_tokens if lengths is None else lengths.tokens,
        ops=tuple(builder.ops),
        tensors=builder.tensors,
        copies=builder.copies,
        kernel=kernel,
        sequences=builder.sequences,
        forward_twice=builder.forward_twice(),
    )


class _Builder(AttentionOps, StateOps, FeedOps, EndOps):
    """Puts the parts of a block together: branches, norms and sums with the residual stream."""

    def block(self) -> None:
        model = self.model
        self.layers, self.in_block = model.layers, True
        self.frozen = model.layers if model.adapters is not None else len(model.frozen_layers)
        self.unreached = model.first_reached
        self.adapted_layers = model.layers - len(model.frozen_layers)
        width = self.stream_tokens * model.hidden
        if model.one_branch:
            self.one_branch(width)
        elif model.norm_place == "post":
            attended = self.attention_branch("input")
            self.tensor("middle_sum", width, SaveLevel.EVERYTHING)
            self.streaming("residual1", ("input", attended), ("middle_sum",), kind="residual")
            self.tensor("middle", width)
            self.norm("norm1", "middle_sum", "middle")
            fed = self.feed_branch("middle")
            self.tensor("output_sum", width, SaveLevel.EVERYTHING)
            self.streaming("residual2", ("middle", fed), ("output_sum",), kind="residual")
            self.tensor("output", width)
            self.norm("norm2", "output_sum", "output")
        elif model.parallel_residual:
            self.tensor("normed1", width)
            self.norm("norm1", "input", "normed1")
            attended = self.attention_branch("normed1")
            self.tensor("normed2", width)
            # A norm that both read is made for each of them, so that what is before attention and what is after it
            # hand on nothing but the block's input.
            self.norm("norm2", "input", "normed2", weights_of="norm1" if model.shared_norm else "")
            branches = ("input", attended, self.feed_branch("normed2"))
            self.tensor("output", width)
            self.streaming("residual", branches, ("output",), kind="residual", eager_kernels=2)
        else:
            before, bare = model.norm_place != "behind", model.normed_from
            if before and bare < model.layers:
                self.begin_at(bare)
                self.tensor("normed1", width)
                self.norm("norm1", "input", "normed1")
                self.begin_at(0)
            attended = self.attention_branch("normed1" if before and bare < model.layers else "input")
            if before:
                self.tensor("normed2", width)
            self.tensor("middle", width, SaveLevel.EVERYTHING)
            self.streaming("residual1", ("input", attended), ("middle",), kind="residual")
            if before:
                self.norm("norm2", "middle", "normed2")
            fed = self.feed_branch("normed2" if before else "middle")
            self.tensor("output", width)
            self.streaming("residual2", ("middle", fed), ("output",), kind="residual")
        self.layers, self.in_block = 1, False
        self.frozen = self.unreached = 0

    def one_branch(self, width: int) -> None:
        """A block that is attention, carries a state, or feeds forward."""
        self.tensor("normed1", width)
        self.norm("norm1", "input", "normed1")
        self.tensor("projected", width)
        branch = self.mixing_branch("normed1", feeds=True)
        self.tensor("output", width)
        self.streaming("residual1", ("input", branch), ("output",), kind="residual")

    def mixing_branch(self, source: str, *, feeds: bool = False) -> str:
        """The first branch of blocks that come in kinds: the name of its result."""
        model = self.model
        with self.only_in(model.blocks_of(RECURRENT), RECURRENT) as some:
            if some and model.recurrence is not None:
                self.carry(source, model.recurrence)
        with self.only_in(model.blocks_of(ATTENDING), ATTENDING) as some:
            if some:
                self.attention(source)
        with self.only_in(model.blocks_of(FEEDING), FEEDING) as some:
            if some and feeds:
                self.fed_by(source, "projected")
        return self.to_residual("projected", None)

    def attention_branch(self, source: str) -> str:
        """Attention and what follows it up to the sum with the residual stream: the name of its result."""
        if self.model.has_kinds:
            self.tensor("projected", self.stream_tokens * self.model.hidden)
            return self.mixing_branch(source)
        self.attention(source)
        names = {"behind": "norm1", "sandwich": "attention_norm"}
        return self.to_residual("projected", names.get(self.model.norm_place))

    def feed_branch(self, source: str) -> str:
        """The same of the feed-forward part."""
        self.feed_forward(source)
        names = {"behind": "norm2", "sandwich": "feed_norm"}
        return self.to_residual("fed", names.get(self.model.norm_place))

    def to_residual(self, name: str, norm: str | None) -> str:
        """A branch's result, normed and scaled where a model does so."""
        width = self.stream_tokens * self.model.hidden
        if norm is not None:
            # The norm's backward reads what the product wrote.
            self.tensor(name, width, SaveLevel.EVERYTHING)
            self.norm(norm, name, self.tensor(f"{name}_normed", width))
            name = f"{name}_normed"
        if self.model.residual_scale != 1.0:
            scaled = self.tensor(f"{name}_scaled", width)
            self.streaming(f"{name}_scale", (name,), (scaled,))
            name = scaled
        return name
