"""The reference's print-out, line by line, from a `Result`: its labels with their slips are its format."""

from __future__ import annotations

import math

from flopwise.base.errors import FlopwiseError
from flopwise.references.deepflow.configuration import SPLIT_TYPES, DeepflowParallel
from flopwise.references.deepflow.events import (
    Event,
    Lookup,
    Place,
    Pointwise,
    Product,
    Reduction,
    Reloads,
    Roofline,
    Update,
)
from flopwise.references.deepflow.machine import USABLE
from flopwise.references.deepflow.memory import MemoryRequirement
from flopwise.references.deepflow.step import DeepflowResult

MEBI, GIBI, TEBI = 2**20, 2**30, 2**40

EPOCH_WORDS = 768_648_884
"""Words of the data set that the published searches scale."""
DAY_S = 86_400.0

_POINTWISE: dict[Place, tuple[str, str | None]] = {
    "hidden forward": ("Hidden", "\nHidden point_time: {seconds:,}"),
    "hidden backward": ("(gr) Hidden", "Hidden point_time: {seconds:,}"),
    "softmax forward": ("Softmax", "point_time: {seconds:,}"),
    "softmax backward": ("(gr) Softmax", "(gr) Softmax point_time: {seconds:,}"),
    "split hidden backward": ("(gr) Hidden", None),
    "split softmax forward": ("Softmax", "Softmax GEMM_time: {product_s:,}, point_time: {seconds:,}"),
    "split softmax backward": ("(gr) Softmax", None),
}


def printout(result: DeepflowResult) -> str:
    """The whole text, from the first kernel to `Time:`, as the reference prints it when asked for details."""
    return "".join(_event(event) for event in result.events) + _parts(result) + summary(result)


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


def step_budget_s(
    *,
    batch_sequences: int,
    sequence_tokens: int,
    data_scale: int = 100,
    epoch_words: int = EPOCH_WORDS,
    epoch_s: float = DAY_S,
) -> float:
    """The step time that would finish one epoch in a day. A goal of the published searches, not a prediction."""
    if min(batch_sequences, sequence_tokens) < 1 or epoch_s <= 0:
        raise FlopwiseError(
            "a step budget needs a batch, a sequence and a time of at least 1", hint="batch_sequences=32"
        )
    steps = math.floor(data_scale * epoch_words / (batch_sequences * sequence_tokens))
    if steps < 1:
        raise FlopwiseError(
            "the data set is smaller than one batch",
            why=f"{data_scale} × {epoch_words:,} words, batches of {batch_sequences} × {sequence_tokens}",
            hint="a smaller batch",
        )
    return epoch_s / steps


def step_budget_line(budget_s: float) -> str:
    """The line that the published searches append to a print-out."""
    return f"time_per_step: {budget_s:.8f}\n"


def _event(event: Event) -> str:
    match event:
        case Roofline():
            text = f"inflection_point: {event.inflection:.2f}\ncomp_int: {event.intensity:.2f}\n"
        case Reloads():
            level = "gmem" if event.level == "dram" else "l2mem"
            text = f"{level}: reload_AB: {{}}, reload_AC: {{}}, reload_BC: {{}}\n {event.left} 1 {event.right}\n"
        case Product():
            text = _product(event)
        case Pointwise():
            text = _pointwise(event)
        case Reduction():
            text = f"(gr) allReduce_flop: {int(event.flops):,}, allReduce_mem: {int(event.moved_bytes):,}\n"
        case Update():
            text = "".join(
                f"({event.name}) {name}_flop: {kernel.flops:,}, {name}_mem: {kernel.dram_bytes:,}\n"
                f"({event.name}) {name}_time: {kernel.seconds:,}\n\n"
                for name, kernel in (("gradclip", event.clip), ("applyGrad", event.apply))
            )
        case Lookup():
            text = f"{'(gr) ' if event.backward else ''}Embedding_mem: {int(event.moved_bytes):,}\n"
    return text


def _pointwise(event: Pointwise) -> str:
    label, second = _POINTWISE[event.place]
    first = f"{label} point_flop: {int(event.flops):,}, point_mem: {int(event.moved_bytes):,}\n"
    if second is None:
        return f"{first}\n"
    return f"{first}{second.format(seconds=event.seconds, product_s=event.product_s)}\n\n"


def _product(event: Product) -> str:
    flops, dram, l2 = (f"{int(number):,}" for number in (event.flops, event.dram_bytes, event.l2_bytes))
    if event.transposed:
        first = f"{event.name} GEMM_flop_t: {flops}, GEMM_gmem_t: {dram}\n{event.name} GEMM_time_t"
    else:
        first = f"{event.name} GEMM_flop: {flops}, GEMM_gmem: {dram}, GEMM_l2mem: {l2}\n{event.name} GEMM_time"
    return f"{first}: {event.straight_s:,}\n\n"


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
