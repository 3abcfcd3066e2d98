"""The reference's print-out, line by line, from a `Result`: its labels with their slips are its format."""

from __future__ import annotations

from flopwise.references.deepflow.configuration import SPLIT_TYPES, DeepflowParallel
from flopwise.references.deepflow.machine import USABLE
from flopwise.references.deepflow.memory import MemoryRequirement
from flopwise.references.deepflow.step import DeepflowResult

MEBI, GIBI, TEBI = 2**20, 2**30, 2**40


def printout(result: DeepflowResult) -> str:
    """The whole text, from the first kernel to `Time:`, as the reference prints it when asked for details."""
    return "".join(line.template.format(*line.values) for line in result.lines) + _parts(result) + summary(result)


def summary(result: DeepflowResult) -> str:
    """The text from `#Parameters:` to `Time:`, which is all that the reference prints when not asked for details."""
    blocks = (
        f"#Parameters: {result.parameters / 1e9:.2f} Billion\n\n",
        _hardware(result),
        _memory(result),
        _strategy(result.configuration.parallel),
        f"Time: {result.time_s:.8f}\n",
    )
    return "".join(blocks)


def _parts(result: DeepflowResult) -> str:
    times, parallel = result.times, result.configuration.parallel
    named = {"hidden": parallel.hidden, "softmax": parallel.softmax, "embedding": parallel.embedding}
    dimensions = ", ".join(
        f"kp_{name}_dim1: {split.first}, kp_{name}_dim2: {split.second}" for name, split in named.items()
    )
    types = ", ".join(f"kp_{name}_type: {SPLIT_TYPES[split.kind]}" for name, split in named.items())
    return (
        f"dp: {parallel.data}, lp: {parallel.layer}, hlp: {parallel.hidden_layer}, {dimensions},  {types}\n\n"
        f"Cf: {times.cell_forward_s}, Cb:; {times.cell_backward_s}, R: {times.hidden_update_s}, "
        f"softmax_f: {times.softmax_forward_s}, softmax_b:{times.softmax_backward_s}, "
        f"embedding_f: {times.embedding_forward_s}, embedding_b: {times.embedding_backward_s}, "
        f"projection_f: {times.projection_forward_s}, projection_b: {times.projection_backward_s}\n\n"
    )


def _hardware(result: DeepflowResult) -> str:
    machine = result.machine
    return (
        f"{'=' * 22}\nHardware Configuration\n{'=' * 22}\n"
        f"Throughput: {machine.flops_per_s / 1e12 / USABLE:.1f} Tflops\n"
        f"Memory Bandwidth: {machine.dram_bytes_per_s / GIBI / USABLE:.1f} GB/s\n"
        f"Memory Size: {machine.dram_bytes / GIBI:.1f} GB\n"
        f"L2 Bandwidth: {machine.l2_bytes_per_s / TEBI:.1f} TB/s\n"
        f"L2 Size: {machine.l2_bytes / MEBI:.1f} MB\n"
        f"Shared Memory Size: {machine.shared_bytes / MEBI:.1f} MB\n"
        f"Interconnection Bandwidth: {machine.network_bytes_per_s / GIBI:.1f} GB/s\n\n\n"
    )


def _memory(result: DeepflowResult) -> str:
    shard, device = result.data_shard, result.device
    rate = "Memory Overflow Rate (Total Memory Required per Data Shard / Memory capacity per node)"
    # The kinds of one device are printed as those of the whole shard, under the device's total.
    return (
        f"{'=' * 43}\nMemory Requirement Breakdown per Data Shard\n{'=' * 43}\n"
        f"{_by_part(shard)}\n{_by_kind(shard, shard.total)}\n\n"
        f"{rate}: {result.data_shard_overflow:.1f}\n\n\n\n"
        f"{'=' * 57}\nMemory Requirement Breakdown per Data Shard Per Model Shard\n{'=' * 59}\n"
        f"{_by_part(device)}\n{rate}: {result.device_overflow:.1f}\n\n\n"
        f"{_by_kind(shard, device.total)}\n\n\n"
    )


def _by_part(memory: MemoryRequirement) -> str:
    return (
        f"Total Memory: {memory.total / GIBI:.1f} GB\n"
        f"Embedding Memory: {memory.embedding.total / GIBI:.1f} GB\n"
        f"Hidden Memory: {memory.hidden.total / GIBI:.1f} GB\n"
        f"Softmax Memory: {memory.softmax.total / GIBI:.1f} GB\n"
        f"Projection Memory: {memory.projection.total / GIBI:.1f} GB\n"
    )


def _by_kind(memory: MemoryRequirement, total_bytes: float) -> str:
    return (
        f"Total Memory: {total_bytes / GIBI:.1f} GB\n"
        f"Weight Memory: {memory.weight / GIBI:.1f} GB\n"
        f"Activation Memory: {memory.activation / GIBI:.1f} GB\n"
        f"Pointwise Memory: {memory.pointwise / GIBI:.1f} GB\n"
    )


def _strategy(parallel: DeepflowParallel) -> str:
    hidden, softmax, projection = parallel.hidden, parallel.softmax, parallel.projection
    return (
        f"{'=' * 20}\nParallelism Strategy\n{'=' * 20}\n"
        f"dp: {parallel.data}, lp: {parallel.layer}, hlp: {parallel.hidden_layer}, "
        f"kp_hidden_dim1: {hidden.first}, kp_hidden_dim2: {hidden.second},"
        f"kp_softmax_dim1: {softmax.first}, kp_softmax_dim2: {softmax.second}, "
        f"kp_embedding: {parallel.embedding.first},"
        f"kp_projection_dim1: {projection.first}, kp_proejction_dim2: {projection.second}\n\n"
    )
