"""A block where attention runs over a whole sequence at once, and what is before and after it chunk by chunk."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from flopwise.engine.streaming.block import Block, Chunk, Keys
from flopwise.engine.streaming.layout import SavedTensors, columns_of, fields_in_order
from flopwise.engine.streaming.trained import Trained, Weights
from flopwise.engine.streaming.values import Gradients, Values

GRADIENT = "gradient of "


class SequenceTensors:
    """Queries, attention's result and their gradients for all tokens of a sequence, in one buffer."""

    def __init__(
        self, buffer: Tensor, saved: SavedTensors, tokens: int, extras: Collection[str], *, packed: bool = False
    ) -> None:
        self.tokens = tokens
        names = ("query", "attended", "logsumexp", *extras)
        wanted = [(name, saved.each[name] * tokens, saved.types[name]) for name in names]
        wanted += [
            (f"{GRADIENT}{name}", saved.each[name] * tokens, saved.types[name])
            for name in ("attended", "query", "key", "value")
        ]
        fields = fields_in_order(wanted)
        self._whole = {name: field.of(buffer) for name, field in fields.items()}
        beside = [f"{GRADIENT}{name}" for name in ("query", "key", "value")]
        self._columns = columns_of(fields, beside, buffer, tokens) if packed else {}

    def whole(self, name: str) -> Tensor:
        """Of all tokens, a row for each; sums of the softmax by head."""
        if name in self._columns:
            return self._columns[name]
        return self._whole[name].view(-1 if name == "logsumexp" else self.tokens, *self._sides(name))

    def _sides(self, name: str) -> tuple[int, ...]:
        return (self.tokens,) if name == "logsumexp" else (-1,)

    def rows(self, name: str, chunk: Chunk) -> Tensor:
        """Of a chunk's tokens; of the softmax's sums the columns."""
        if name == "logsumexp":
            return self.whole(name)[:, chunk.first : chunk.last]
        return self.whole(name)[chunk.first : chunk.last]


class SequenceBlock:
    """The three pieces of a block, forward and backward."""

    def __init__(self, block: Block, tensors: SequenceTensors) -> None:
        self.block, self.tensors = block, tensors
        self._keys_left: set[int] = set()
        """First tokens of chunks for which `make_keys` has left in the room what the norm of the keys reads."""

    # -- forward --------------------------------------------------------------------------------------------------

    def forward_before(self, residual: Tensor, weights: Weights, chunk: Chunk, keys: Keys) -> None:
        """Queries into the room, keys and values to where attention looks for them."""
        block, tensors = self.block, self.tensors
        places = {name: tensors.rows(name, chunk) for name in ("query", *block.extras)}
        places |= {"key": keys.key[chunk.first : chunk.last], "value": keys.value[chunk.first : chunk.last]}
        values = Values(block.arena, places)
        values["input"] = residual
        wanted = {name for op in block.before for name in op.outputs}
        block.run(block.before, values, weights, chunk, wanted, keep=places)
        values.close()

    def attention(self, chunks: Sequence[Chunk], keys: Keys) -> None:
        """Of all queries: at once, or chunk by chunk, as it will run when one chunk's is recomputed."""
        block, tensors = self.block, self.tensors
        query, out, sums = tensors.whole("query"), tensors.whole("attended"), tensors.whole("logsumexp")
        if block.attends_whole(query, chunks[0].drops):
            whole = self._whole(chunks, query)
            block.attend(query, keys, out, sums.view(1, *sums.shape), whole)
            return
        for chunk in chunks:
            shape = (1, sums.shape[0], chunk.tokens)
            part = block.arena.take(shape, sums.dtype)
            block.attend(
                tensors.rows("query", chunk),
                block.select_visible(keys, chunk),
                tensors.rows("attended", chunk),
                part,
                chunk,
            )
            tensors.rows("logsumexp", chunk).copy_(part[0])
            block.arena.give(part)

    def _whole(self, chunks: Sequence[Chunk], query: Tensor) -> Chunk:
        """All chunks of a sequence as one."""
        drops = chunks[0].drops
        if drops is not None:
            drops = drops.with_tokens(torch.cat([chunk.drops.tokens for chunk in chunks if chunk.drops is not None]))
        return Chunk(1, self.tensors.tokens, 0, query.new_empty(0), chunks[0].lengths, drops=drops)

    def forward_after(
        self,
        residual: Tensor,
        slot: dict[str, Tensor],
        weights: Weights,
        chunk: Chunk,
        keys: Keys,
        *,
        kept: Collection[str],
    ) -> None:
        """From attention's result to the output, over the residual stream. What is kept is brought into the slot."""
        block, tensors = self.block, self.tensors
        # Attention's own task has no weights at hand.
        block.add_sinks(weights, tensors.rows("attended", chunk), tensors.rows("logsumexp", chunk)[None])
        for name in kept:
            if name in ("query", "attended", *block.extras):
                slot[name].view(tensors.rows(name, chunk).shape).copy_(tensors.rows(name, chunk))
        if "key" in kept:
            slot["key"].copy_(keys.key[chunk.first : chunk.last])
            slot["value"].copy_(keys.value[chunk.first : chunk.last])
        if "logsumexp" in kept:
            sums = tensors.rows("logsumexp", chunk)
            slot["logsumexp"].view(sums.shape).copy_(sums)
        slot["input"].copy_(residual)
        places = {name: slot[name] for op in block.after for name in op.outputs if name in slot}
        values = Values(block.arena, {**places, "output": residual})
        values["input"] = slot["input"]
        values["attended"] = tensors.rows("attended", chunk)
        wanted = {name for op in block.after for name in op.outputs}
        block.run(block.after, values, weights, chunk, wanted, keep=values.places)
        values.close()

    # -- backward -------------------------------------------------------------------------------------------------

    def make_keys(self, source: Tensor, weights: Weights, chunk: Chunk, keys: Keys) -> None:
        """Keys and values recomputed from a chunk's input; with them what the norm of the keys will be asked for."""
        block, tensors = self.block, self.tensors
        places = {"key": keys.key[chunk.first : chunk.last], "value": keys.value[chunk.first : chunk.last]}
        places |= {name: tensors.rows(name, chunk) for name in block.key_extras}
        values = Values(block.arena, places)
        values["input"] = source
        block.make_keys(values, weights, chunk)
        self._keys_left.add(chunk.first)
        values.close()

    def backward_after(
        self, values: Values, trained: Trained, gradient: Tensor, chunk: Chunk, keys: Keys, *, level: str
    ) -> None:
        """Back to attention's result; what attention's own backward will read is brought into the room."""
        block, tensors = self.block, self.tensors
        brought = ("query", "attended", "logsumexp", *block.extras)
        kept = {*block.saved.names(level), "key", "value"}
        if level == "input" and chunk.first in self._keys_left:
            self._keys_left.discard(chunk.first)
            kept.update(block.key_extras)
        for name in brought:
            rows = tensors.rows(name, chunk)
            if name not in kept and name != "logsumexp":
                values.places[name] = rows
            elif name in values:
                rows.copy_(values[name].view(rows.shape))
                if name != "logsumexp":
                    # Read where forward read it: a product may depend on where its numbers begin.
                    values.drop((name,))
                    values[name] = rows
        needed = ({name for op in block.after for name in op.needs} - block.lazy) | {*brought}
        made = block.work.made_for(needed, kept)
        block.run(block.ops, values, trained.weights, chunk, made, keep=needed, keys=block.select_visible(keys, chunk))
        if "logsumexp" in made:
            rows = tensors.rows("logsumexp", chunk)
            rows.copy_(values["logsumexp"].view(rows.shape))
        gradients = Gradients(block.arena)
        gradients.put("output", gradient)
        block.back(block.after, values, gradients, trained, chunk)
        above = gradients["attended"]
        block.sinks_backward(above, trained, tensors.rows("attended", chunk), tensors.rows("logsumexp", chunk)[None])
        tensors.rows(f"{GRADIENT}attended", chunk).copy_(above)
        gradients.drop("attended")
        if gradients["input"] is not gradient:
            gradient.copy_(gradients["input"])
        gradients.drop("input")
        values.close()

    def attention_backward(self, chunks: Sequence[Chunk], keys: Keys) -> None:
        """Of all queries at once."""
        block, tensors = self.block, self.tensors
        values = Values(block.arena)
        for name in ("query", "attended", "logsumexp"):
            values[name] = tensors.whole(name)
        whole = self._whole(chunks, values["query"])
        found = Keys(tensors.whole(f"{GRADIENT}key"), tensors.whole(f"{GRADIENT}value"))
        gradient = tensors.whole(f"{GRADIENT}attended")
        target = tensors.whole(f"{GRADIENT}query")
        block.attention_back(gradient, values, keys, whole, query_gradient=target, found=found, accumulate=False)
        values.close()

    def backward_before(self, source: Tensor, trained: Trained, gradient: Tensor, chunk: Chunk) -> None:
        """From the gradients of queries, keys and values to that of the input, which is added to the stream's."""
        block, tensors = self.block, self.tensors
        values = Values(block.arena)
        values["input"] = source
        for name in block.extras:
            values[name] = tensors.rows(name, chunk)
        needed = {name for op in block.before for name in op.needs} - block.lazy
        made = block.work.made_for(needed, {"input", *block.extras})
        block.run(block.before, values, trained.weights, chunk, made, keep=needed)
        gradients = Gradients(block.arena)
        gradients.put("input", gradient)
        for name in ("query", "key", "value"):
            gradients.put(name, tensors.rows(f"{GRADIENT}{name}", chunk))
        block.back(block.before, values, gradients, trained, chunk)
        values.close()
