"""Device memory by owner, for one device that holds everything.

What is counted is what the description says is alive at the worst moment: the start of the last block's backward,
with every kept tensor of the micro-batch, plus the temporaries of one block's backward.
Left out by owner, and kept free as a reserve instead: the driver's context, the allocator's fragmentation.
"""

from __future__ import annotations

from flopwise.core.formats import WIDTH_BYTES, Formats
from flopwise.core.hardware import Hardware
from flopwise.core.op import Attention, Gemm
from flopwise.core.prediction import DeviceBytes
from flopwise.core.traffic import saved_bytes, tensor_bytes
from flopwise.core.work import Recompute, Work
from flopwise.core.workload import MOMENTS, Fusion, Workload

LIBRARY_WORKSPACE_BYTES = 32 * 2**20
"""What PyTorch gives cuBLAS on Hopper; other devices take 8 MiB or less."""

RESERVED_BYTES = 2**30
"""Of a device's memory: the driver's context takes about half a GiB, an allocator loses as much to fragments."""


def usable_bytes(hardware: Hardware) -> int:
    """What a program can plan with of the device's memory."""
    return max(0, int(hardware.device.dram.size_bytes.value) - RESERVED_BYTES)


def device_bytes(work: Work, workload: Workload) -> DeviceBytes:
    """Peak bytes by owner while a step of `workload` runs."""
    formats, sequences = workload.formats, workload.micro_batch_sequences
    master = WIDTH_BYTES[formats.master] if formats.master else 0
    moments = MOMENTS[workload.optimizer] * WIDTH_BYTES[formats.moments]
    owners = {
        "weights": work.parameters * WIDTH_BYTES[formats.weights],
        "gradients": work.parameters * WIDTH_BYTES[formats.gradients],
        "optimizer": work.parameters * (moments + master),
        "activations": sequences * saved_bytes(work, workload.recompute, formats),
        "logits": sequences * logits_bytes(work, formats, workload.fusion),
        "workspace": workspace_bytes(work, workload.recompute, formats, sequences),
    }
    return DeviceBytes(**owners, total=sum(owners.values()))


def logits_bytes(work: Work, formats: Formats, fusion: Fusion) -> int:
    """Bytes of one sequence's logits.

    A fused loss writes the gradient over the logits, so there is one buffer. Plain code holds the logits, their
    fp32 copy and the log-softmax that backward reads.
    """
    logits = work.tensors["logits"]
    extra = 8 if fusion == "eager" else 0
    return tensor_bytes(logits, formats) + logits.elements * extra


def workspace_bytes(work: Work, policy: Recompute, formats: Formats, sequences: int) -> int:
    """Bytes of what lives only inside one block's backward.

    The tensors that are made again, the gradients of one operator's inputs and outputs beside the residual
    stream's, flash attention's fp32 query gradient, and the libraries' scratch. Weights kept in a wider format
    than the products' are cast once for the step, as torch.autocast caches them.
    """
    kept = {tensor.name for tensor in work.saved(policy)}
    again = {name for op in work.ops if op.in_block for name in op.needs} - kept
    made = sum(tensor_bytes(work.tensors[name], formats) for name in again)
    gradients = max(
        sum(tensor_bytes(work.tensors[name], formats) for name in (*op.inputs, *op.outputs) if name != "logits")
        for op in work.ops
    )
    stream = max(tensor_bytes(work.tensors[name], formats) for name in ("input", "last") if name in work.tensors)
    query = max((4 * work.tensors["query"].elements for op in work.ops if isinstance(op, Attention)), default=0)
    cast = 0
    if WIDTH_BYTES[formats.weights] > formats.compute_bytes:
        elements = sum(op.layers * weight.elements for op in work.ops if isinstance(op, Gemm) for weight in op.weights)
        cast = elements * formats.compute_bytes
    per_sequence = made + gradients + stream + (query if work.kernel == "flash" else 0)
    return sequences * per_sequence + cast + LIBRARY_WORKSPACE_BYTES
