"""Device memory by owner, for one device that holds everything.

What is counted is what the description says is alive at the worst moment of backward: the state, every kept tensor of
the micro-batch, and either the logits or the temporaries of one block, whichever is more, since the logits are gone
when the blocks' backward begins. State and gradients are all there from the start, as a trainer that preallocates them
has it. Left out by owner, and kept free as a reserve: the driver's context, the allocator's fragmentation.
"""

from __future__ import annotations

from dataclasses import replace

from flopwise.records.prediction import DeviceBytes
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import SettledSetup
from flopwise.setup.words import MOMENTS, Fusion
from flopwise.work.describe import describe
from flopwise.work.formats import WIDTH_BYTES, Formats
from flopwise.work.op import Attention, Gemm
from flopwise.work.traffic import saved_bytes, tensor_bytes
from flopwise.work.transformer import Transformer
from flopwise.work.work import SCORES, Recompute, Work

LIBRARY_WORKSPACE_BYTES = 32 * 2**20
"""What PyTorch gives cuBLAS on Hopper; other devices take 8 MiB or less."""

RESERVED_BYTES = 2**30
"""Of a device's memory: the driver's context takes about half a GiB, an allocator loses as much to fragments."""


def usable_bytes(hardware: Hardware) -> int:
    """What a program can plan with of the device's memory."""
    return max(0, int(hardware.device.dram.size_bytes.value) - RESERVED_BYTES)


def device_bytes(setup: SettledSetup) -> DeviceBytes:
    """Peak bytes by owner while a step runs."""
    formats, sequences = setup.formats, setup.micro_batch_sequences
    work = describe(setup.model, setup.sequence_tokens, setup.attention)
    master = WIDTH_BYTES[formats.master] if formats.master else 0
    moments = MOMENTS[setup.optimizer] * WIDTH_BYTES[formats.moments]
    logits = sequences * logits_bytes(work, formats, setup.fusion)
    # The blocks' temporaries take the logits' place; only what goes beyond it is memory of its own.
    beyond = max(0, sequences * temporary_bytes(work, setup.recompute, formats) - logits)
    owners = {
        "weights": work.parameters * WIDTH_BYTES[formats.weights],
        "gradients": work.parameters * WIDTH_BYTES[formats.gradients],
        "optimizer": work.parameters * (moments + master),
        "activations": sequences * saved_bytes(work, setup.recompute, formats),
        "logits": logits,
        "workspace": beyond + cast_copy_bytes(work, formats) + LIBRARY_WORKSPACE_BYTES,
    }
    return DeviceBytes(**owners, total=sum(owners.values()))


def memory_line(setup: SettledSetup) -> tuple[int, int]:
    """Total bytes with one sequence at once, and what each further one adds: memory is linear in the micro-batch."""
    one, two = (
        device_bytes(replace(setup, batch_sequences=count, micro_batch_sequences=count)).total for count in (1, 2)
    )
    return one, two - one


def logits_bytes(work: Work, formats: Formats, fusion: Fusion) -> int:
    """Bytes of one sequence's logits.

    A fused loss writes the gradient over the logits, so there is one buffer. Plain code holds the logits, their
    fp32 copy and the log-softmax that backward reads.
    """
    logits = work.tensors["logits"]
    extra = 8 if fusion == "eager" else 0
    return tensor_bytes(logits, formats) + logits.elements * extra


def dropout_bytes(work: Work, policy: Recompute, formats: Formats) -> int:
    """Bytes of one sequence that dropout keeps more in one layer of a transformer.

    A mask of one byte for each number behind attention's and the feed-forward part's last product; where the scores are
    kept, a mask for them and the scores after it. By Korthikanti et al. (arXiv 2205.05198, section 4.1) 2·sbh and
    3·as²b. A block that is run again keeps none of it.
    """
    if policy not in ("none", "selective", "everything") or "fed" not in work.tensors:
        return 0
    masks = work.tensors["projected"].elements + work.tensors["fed"].elements
    kept = {tensor.name for tensor in work.saved(policy)}
    scores = work.tensors[SCORES].elements if SCORES in kept else 0
    return masks + scores * (1 + formats.compute_bytes)


def temporary_bytes(work: Work, policy: Recompute, formats: Formats) -> int:
    """Bytes of one sequence that live only inside one block's backward.

    The tensors that are made again (those of every time step, for a recurrent layer), the gradients of one operator's
    inputs and outputs beside the residual stream's, and flash attention's fp32 gradient of the queries.
    """
    kept = {tensor.name for tensor in work.saved(policy)}
    again = {name: op.calls for op in work.ops if op.in_block for name in op.needs if name not in kept}
    made = sum(calls * tensor_bytes(work.tensors[name], formats) for name, calls in again.items())
    gradients = max(
        sum(tensor_bytes(work.tensors[name], formats) for name in (*op.inputs, *op.outputs))
        for op in work.ops
        if op.in_block
    )
    stream = next(tensor_bytes(work.tensors[name], formats) for name in ("input", "below") if name in work.tensors)
    flash = work.kernel == "flash" and any(isinstance(op, Attention) for op in work.ops)
    return made + gradients + stream + (formats.statistics_bytes * work.tensors["query"].elements if flash else 0)


def attention_sums_bytes(model: Transformer, formats: Formats) -> int:
    """Bytes a token that the fastest attention's backward takes for itself.

    Sums in fp32 of the queries' gradients, of the keys' and values' where several heads share them, and two numbers for
    each query and head.
    """
    shared = 2 * model.kv_width if model.kv_heads != model.heads else 0
    return formats.statistics_bytes * (model.query_width + shared + 2 * model.heads)


def cast_copy_bytes(work: Work, formats: Formats) -> int:
    """Bytes of the weights' copy in the products' format, kept for the step as torch.autocast caches it."""
    if WIDTH_BYTES[formats.weights] <= formats.compute_bytes:
        return 0
    elements = sum(op.layers * weight.elements for op in work.ops if isinstance(op, Gemm) for weight in op.weights)
    return elements * formats.compute_bytes
