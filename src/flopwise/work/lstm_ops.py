"""A recurrent language model's operators for one sequence."""

from __future__ import annotations

from flopwise.work.lstm import Lstm
from flopwise.work.op import Gemm, Op, SaveLevel, Streaming, Tensor, Weight
from flopwise.work.work import Work


def lstm_work(model: Lstm, sequence_tokens: int) -> Work:
    """Describe one forward pass: each cell is a product of [input, state] with the four gates, time step by time step.

    The time steps of a layer are calls of one operator, since each waits for the one before it.
    """
    model.check_sequence(sequence_tokens)
    hidden, tokens = model.hidden, sequence_tokens
    tensors = _tensors(model, tokens)
    cells = model.layers * tokens
    inside = {"below", "state", "memory", "gates_raw", "gates"}
    return Work(
        name=model.name,
        sequence_tokens=tokens,
        ops=(
            Streaming(
                name="embedding",
                inputs=("ids",),
                outputs=("embedded",),
                needs=("ids",),
                weights=(Weight(module="embedding", shape=(model.vocab, hidden)),),
                in_block=False,
                kind="embedding",
            ),
            Gemm(
                name="cell",
                inputs=("below", "state"),
                outputs=("gates_raw",),
                needs=("below", "state"),
                weights=(
                    Weight(module="cell", shape=(4 * hidden, 2 * hidden)),
                    Weight(module="cell", kind="bias", shape=(4 * hidden,)),
                ),
                layers=model.layers,
                calls=tokens,
                rows=1,
                depth=2 * hidden,
                columns=4 * hidden,
            ),
            Streaming(
                name="cell_update",
                inputs=("gates_raw", "memory"),
                outputs=("gates", "memory", "state"),
                needs=("gates", "memory"),
                layers=model.layers,
                calls=tokens,
                eager_kernels=9,
            ),
            *_head(model, tokens),
        ),
        tensors=tensors,
        copies=dict.fromkeys(inside, cells),
    )


def _tensors(model: Lstm, tokens: int) -> dict[str, Tensor]:
    hidden = model.hidden
    all_of_them = [
        Tensor(name="ids", elements=tokens, format="index"),
        Tensor(name="embedded", elements=tokens * hidden),
        Tensor(name="below", elements=hidden, level=SaveLevel.INPUT),
        Tensor(name="state", elements=hidden, level=SaveLevel.EVERYTHING),
        Tensor(name="memory", elements=hidden, level=SaveLevel.EVERYTHING),
        Tensor(name="gates_raw", elements=4 * hidden),
        Tensor(name="gates", elements=4 * hidden, level=SaveLevel.EVERYTHING),
        Tensor(name="last", elements=tokens * hidden),
        Tensor(name="logits", elements=tokens * model.vocab),
        Tensor(name="loss", elements=tokens, format="fp32"),
    ]
    if model.projection:
        all_of_them.append(Tensor(name="projected", elements=tokens * model.projection))
    return {tensor.name: tensor for tensor in all_of_them}


def _head(model: Lstm, tokens: int) -> list[Op]:
    hidden = model.hidden
    ops: list[Op] = []
    if model.projection:
        ops.append(
            Gemm(
                name="projection",
                inputs=("last",),
                outputs=("projected",),
                needs=("last",),
                weights=(Weight(module="projection", shape=(model.projection, hidden)),),
                in_block=False,
                rows=tokens,
                depth=hidden,
                columns=model.projection,
            )
        )
    source = "projected" if model.head_input == "projection" else "last"
    depth = model.projection if model.head_input == "projection" else hidden
    ops.append(
        Gemm(
            name="head",
            inputs=(source,),
            outputs=("logits",),
            needs=(source,),
            weights=(
                Weight(module="head", shape=(model.vocab, depth)),
                Weight(module="head", kind="bias", shape=(model.vocab,)),
            ),
            in_block=False,
            rows=tokens,
            depth=depth,
            columns=model.vocab,
        )
    )
    ops.append(
        Streaming(
            name="loss",
            inputs=("logits",),
            outputs=("loss",),
            needs=("logits",),
            in_block=False,
            kind="cross_entropy",
            eager_kernels=2,
        )
    )
    return ops
