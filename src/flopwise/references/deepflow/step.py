"""One training step by the reference's formulas: the parts, their total, parameters, memory.

With Cf and Cb a cell forward and backward, R the hidden weights' reduction and update, W a message between groups of
layers and g the number of these groups (hlp), the recurrent part takes

    forward     (L + L/g·(S−1))·Cf + W·(g−1), or L·Cf + (S+g−2)·W where a message outlasts a group's Cf
    backward    the same with Cb, + R. Where R > Cb it comes L/g times and all but one of as many Cb fall away, and so
                do the messages that would have been hidden
"""

from __future__ import annotations

from dataclasses import dataclass

from flopwise.references.deepflow.configuration import Configuration
from flopwise.references.deepflow.kernels import Kernels, PrintedLine, lines_of
from flopwise.references.deepflow.layers import (
    cell_backward,
    cell_forward,
    projection_backward,
    projection_forward,
    softmax_backward,
    softmax_forward,
)
from flopwise.references.deepflow.machine import Machine
from flopwise.references.deepflow.memory import MemoryRequirement, data_shard_bytes, device_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepflowTimes:
    """Seconds of the parts."""

    cell_forward_s: float
    """Cf: one layer, one time step."""
    cell_backward_s: float
    """Cb"""
    hidden_update_s: float
    """R: the data-parallel sum of one hidden layer's gradients, and its update."""
    softmax_forward_s: float
    softmax_backward_s: float
    softmax_update_s: float
    embedding_forward_s: float
    embedding_backward_s: float
    projection_forward_s: float
    """In no total, as the other one."""
    projection_backward_s: float
    message_s: float
    """W: between groups of layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepflowResult:
    """What the reference model says about one step."""

    configuration: Configuration
    machine: Machine
    times: DeepflowTimes
    time_s: float
    parameters: int
    data_shard: MemoryRequirement
    device: MemoryRequirement
    lines: tuple[PrintedLine, ...]
    """Every kernel, in the order of the print-out."""

    @property
    def data_shard_overflow(self) -> float:
        """Memory that a copy of the model needs, over what one device has."""
        return self.data_shard.total / self.machine.dram_bytes

    @property
    def device_overflow(self) -> float:
        """Memory that one device needs, over what it has."""
        return self.device.total / self.machine.dram_bytes


def run(configuration: Configuration) -> DeepflowResult:
    """Predict one training step as the reference model of 2019 does."""
    kernels, model, parallel = Kernels(configuration), configuration.model, configuration.parallel
    machine = kernels.machine
    reduction = kernels.reduction(2 * model.hidden, model.gates * model.hidden, parallel.data, sums=True)
    hidden = kernels.update("Hidden", 2 * model.hidden, model.gates * model.hidden)
    projection = kernels.update("Projection", model.hidden, model.projection)
    softmax = kernels.update("Softmax", model.hidden, model.vocab)
    parts = [
        part(kernels)
        for part in (
            cell_forward,
            cell_backward,
            softmax_forward,
            softmax_backward,
            projection_forward,
            projection_backward,
        )
    ]
    lookups = [kernels.embedding(backward=backward) for backward in (False, True)]
    shard_bytes = model.element_bytes * configuration.shard_sequences * model.hidden
    times = DeepflowTimes(
        cell_forward_s=parts[0].seconds,
        cell_backward_s=parts[1].seconds,
        hidden_update_s=reduction.seconds + hidden.seconds,
        softmax_forward_s=parts[2].seconds,
        softmax_backward_s=parts[3].seconds,
        softmax_update_s=softmax.seconds,
        embedding_forward_s=lookups[0].seconds,
        embedding_backward_s=lookups[1].seconds,
        projection_forward_s=parts[4].seconds,
        projection_backward_s=parts[5].seconds,
        message_s=shard_bytes / machine.network_bytes_per_s if parallel.layer > 1 else 0.0,
    )
    return DeepflowResult(
        configuration=configuration,
        machine=machine,
        times=times,
        time_s=_total_s(configuration, times),
        parameters=parameter_count(configuration),
        data_shard=data_shard_bytes(configuration),
        device=device_bytes(configuration),
        lines=lines_of((reduction, hidden, projection, softmax, *parts, *lookups)),
    )


def step_s(configuration: Configuration) -> float:
    """Seconds of one training step."""
    return run(configuration).time_s


def parameter_count(configuration: Configuration) -> int:
    """Embedding, recurrent layers with biases, projection without, softmax over the hidden width with biases."""
    model = configuration.model
    hidden = (2 * model.hidden + 1) * model.gates * model.hidden * model.layers
    return model.vocab * model.hidden + hidden + model.hidden * model.projection + (model.hidden + 1) * model.vocab


def _total_s(configuration: Configuration, times: DeepflowTimes) -> float:
    """Softmax, embedding, the softmax's update, and the recurrent layers as a wavefront over layers and time steps."""
    model, groups = configuration.model, configuration.parallel.hidden_layer
    layers, steps = model.layers, model.sequence_tokens
    forward, backward, update = times.cell_forward_s, times.cell_backward_s, times.hidden_update_s
    message, depth = times.message_s, layers / groups
    around = times.softmax_forward_s + times.softmax_backward_s + times.embedding_forward_s
    around += times.embedding_backward_s + times.softmax_update_s
    hidden_messages, exposed_messages = message * (groups - 1), (steps + groups - 2) * message

    if message <= forward * depth:
        forward_s = (layers + depth * (steps - 1)) * forward + hidden_messages
    else:
        forward_s = layers * forward + exposed_messages
    if forward * depth < message and message >= backward * depth:
        if backward >= update:
            return around + (forward_s + layers * backward + exposed_messages + update)
        return around + (forward_s + (layers - depth + 1) * backward + exposed_messages + depth * update)
    if backward >= update:
        return around + (forward_s + (layers + depth * (steps - 1)) * backward + hidden_messages + update)
    return around + (forward_s + (layers + depth * (steps - 2) + 1) * backward + update * depth)
