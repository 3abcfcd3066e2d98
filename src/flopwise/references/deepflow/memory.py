"""The reference's memory requirement, by part of the model and by kind, for a data shard and for one device.

Elements of activations, weights and pointwise results, each times the width of a number:

    embedding     BSD           VD             0
    hidden        2BDSL         (2D+1)·GD·L    9·BD·L·S
    softmax       BSV           (P+1)·V        2BSV + BS
    projection    BSP           (D+1)·P        BSP

Neither gradients nor optimizer state are counted, and the softmax has the projection's depth here although its time
is that of the hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass

from flopwise.references.deepflow.configuration import Configuration, Split


@dataclass(frozen=True, kw_only=True, slots=True)
class PartBytes:
    """One part of the model."""

    activation: float
    weight: float
    pointwise: float

    @property
    def total(self) -> float:
        return self.activation + self.weight + self.pointwise


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRequirement:
    """Bytes by part; by kind they are summed over the parts."""

    embedding: PartBytes
    hidden: PartBytes
    softmax: PartBytes
    projection: PartBytes

    @property
    def parts(self) -> tuple[PartBytes, ...]:
        return (self.embedding, self.hidden, self.softmax, self.projection)

    @property
    def total(self) -> float:
        return sum(part.total for part in self.parts)

    @property
    def weight(self) -> float:
        return sum(part.weight for part in self.parts)

    @property
    def activation(self) -> float:
        return sum(part.activation for part in self.parts)

    @property
    def pointwise(self) -> float:
        return sum(part.pointwise for part in self.parts)


def data_shard_bytes(configuration: Configuration) -> MemoryRequirement:
    """What one copy of the model needs for its part of the batch, on however many devices."""
    model, rows = configuration.model, configuration.shard_sequences
    return MemoryRequirement(
        embedding=_embedding(configuration, rows),
        hidden=_hidden(configuration, model.layers, rows, 2 * model.hidden, model.gates * model.hidden),
        softmax=_softmax(configuration, rows, model.projection, model.vocab),
        projection=_projection(configuration, rows, model.hidden, model.projection),
    )


def device_bytes(configuration: Configuration) -> MemoryRequirement:
    """What one device needs of it. An embedding shares out its sequences, never its table."""
    model, parallel, rows = configuration.model, configuration.parallel, configuration.shard_sequences

    def sides(split: Split, depth: float, columns: float) -> tuple[float, float, float]:
        if split.kind == "row-column":
            return rows / split.first, depth, columns / split.second
        return rows, depth / split.first, columns

    return MemoryRequirement(
        embedding=_embedding(configuration, rows / parallel.embedding.devices),
        hidden=_hidden(
            configuration,
            model.layers / parallel.layer,
            *sides(parallel.hidden, 2 * model.hidden, model.gates * model.hidden),
        ),
        softmax=_softmax(configuration, *sides(parallel.softmax, model.projection, model.vocab)),
        projection=_projection(configuration, *sides(parallel.projection, model.hidden, model.projection)),
    )


def _embedding(configuration: Configuration, rows: float) -> PartBytes:
    model = configuration.model
    return _part(configuration, rows * model.sequence_tokens * model.hidden, model.vocab * model.hidden, 0)


def _hidden(configuration: Configuration, layers: float, rows: float, depth: float, columns: float) -> PartBytes:
    activations = rows * depth * configuration.model.sequence_tokens * layers
    # Three sigmoids, two tanh, three multiplications and an addition, each as wide as half the depth.
    return _part(configuration, activations, (depth + 1) * columns * layers, 9 * activations / 2)


def _softmax(configuration: Configuration, rows: float, depth: float, columns: float) -> PartBytes:
    tokens = rows * configuration.model.sequence_tokens
    return _part(configuration, tokens * columns, (depth + 1) * columns, 2 * tokens * columns + tokens)


def _projection(configuration: Configuration, rows: float, depth: float, columns: float) -> PartBytes:
    results = rows * configuration.model.sequence_tokens * columns
    return _part(configuration, results, (depth + 1) * columns, results)


def _part(configuration: Configuration, activations: float, weights: float, pointwise: float) -> PartBytes:
    width = configuration.model.element_bytes
    return PartBytes(activation=activations * width, weight=weights * width, pointwise=pointwise * width)
