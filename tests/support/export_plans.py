"""Plans for the tests of exports: some to look at, and random ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from hypothesis import strategies as st

from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.outcome import Outcome
from flopwise.records.plan import Plan, Residency
from flopwise.setup.parallel import BALANCES, SCHEDULES, Parallel, why_illegal
from flopwise.setup.words import Fusion
from flopwise.work.formats import POLICIES
from flopwise.work.op import AttentionKernel
from flopwise.work.optimizers import OPTIMIZERS
from flopwise.work.parameters import ENDS
from flopwise.work.transformer import Transformer
from flopwise.work.work import RECOMPUTE_POLICIES
from tests.support.clusters import MIXTURE, SMALL

MODEL = replace(SMALL, layers=8)
"""Eight layers, which pipelines of 2 and 4 divide and those of 3 do not."""
EXPERTS = replace(MIXTURE, layers=8)
STAYS = Residency(blocks=MODEL.layers, ends=ENDS)


def cluster(parallel: Parallel | None = None, **changes: Any) -> ClusterPlan:
    """A plan for several devices; 8 data ranks that share everything unless told otherwise."""
    parallel = parallel or Parallel(data=8, zero=3)
    settled: dict[str, Any] = {
        "hardware": "h100-sxm",
        "devices": parallel.devices,
        "sequence_tokens": 512,
        "batch_sequences": 8 * parallel.data,
        "micro_batch_sequences": 2,
        "precision": "bf16",
        "recompute": "none",
        "attention": "flash",
        "fusion": "fused",
        "optimizer": "adamw",
        "stack": "kernels",
        "parallel": parallel,
        "expected": Outcome(step_s=1.0, tokens_per_s=1e5, mfu=0.5, device_bytes=2**34),
    }
    return ClusterPlan(**settled | changes)


def one_device(**changes: Any) -> Plan:
    """A plan for one device with all of the state and the activations on it: 4 rounds of 2 sequences."""
    settled: dict[str, Any] = {
        "hardware": "h100-sxm",
        "device_memory_bytes": 2**36,
        "host_memory_bytes": 2**36,
        "sequence_tokens": 512,
        "chunk_tokens": 1024,
        "chunks_per_round": 1,
        "rounds_per_step": 4,
        "head_chunk_tokens": 256,
        "attention": "sequence",
        "weights": STAYS,
        "gradients": STAYS,
        "optimizer_state": STAYS,
        "activation_slots": MODEL.layers + 1,
        "saves": ("F",) * MODEL.layers,
        "precision": "bf16",
    }
    return Plan(**settled | changes)


@st.composite
def parallels(draw: st.DrawFn) -> Parallel:
    """Any set-up that can be."""
    # Mostly 1: many at once are refused by all but one of the targets.
    degree = st.sampled_from([1, 1, 1, 1, 2, 4])
    data, context, tensor = draw(st.sampled_from([1, 2, 3, 8])), draw(degree), draw(degree)
    pipeline = draw(st.sampled_from([1, 1, 1, 1, 2, 3, 4]))
    replicas = data * context
    divisors = [size for size in range(1, replicas + 1) if replicas % size == 0]
    schedule = draw(st.sampled_from(SCHEDULES if pipeline > 1 else SCHEDULES[:2]))
    return Parallel(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=draw(st.sampled_from([1, 1, 1, *(size for size in divisors if size <= 4)])),
        sequence=tensor > 1 and draw(st.booleans()),
        zero=draw(st.integers(0, 3)),
        shard=draw(st.sampled_from([None, *divisors])),
        reshard=draw(st.booleans()),
        prefetch=draw(st.integers(0, 3)),
        schedule=schedule,
        chunks=2 if schedule == "interleaved" else 1,
        balance=draw(st.sampled_from(BALANCES)),
        offload_optimizer=draw(st.booleans()),
        offload_activations=draw(st.booleans()),
    )


@st.composite
def cluster_plans(draw: st.DrawFn) -> tuple[ClusterPlan, Transformer]:
    """A legal plan with its model."""
    model = draw(st.sampled_from([MODEL, EXPERTS]))
    parallel = draw(parallels().filter(lambda found: why_illegal(model, 512, found) is None))
    batch = draw(st.integers(1, 12))
    plan = cluster(
        parallel,
        batch_sequences=draw(st.sampled_from([batch, *[batch * parallel.data] * 4])),
        micro_batch_sequences=draw(st.integers(1, 5)),
        precision=draw(st.sampled_from([*POLICIES, "bf16,gradients=fp32", "bf16,moments=fp32"])),
        recompute=draw(st.sampled_from(RECOMPUTE_POLICIES)),
        attention=draw(st.sampled_from(get_args(AttentionKernel))),
        fusion=draw(st.sampled_from(get_args(Fusion))),
        optimizer=draw(st.sampled_from(["adamw", "adamw", "adamw", *OPTIMIZERS])),
        device_memory_bytes=draw(st.sampled_from([None, 2**35])),
        lengths=draw(st.sampled_from([None, "packed:5x2,17,512", "padded:100,300"])),
    )
    return plan, model


@st.composite
def residencies(draw: st.DrawFn) -> Residency:
    blocks = draw(st.sampled_from([0, 3, MODEL.layers]))
    return Residency(blocks=blocks, passing=draw(st.integers(0, 2)), ends=draw(st.sampled_from([(), ("head",), ENDS])))


@st.composite
def device_plans(draw: st.DrawFn) -> tuple[Plan, Transformer]:
    """A plan for one device, with chunks of several sequences, of one, or of a part of one."""
    chunk, chunks = draw(st.sampled_from([(512, 1), (1024, 1), (1536, 2), (128, 4), (200, 6)]))
    letters = draw(st.sampled_from(["F", "f", "FaCi", "I"]))
    saves = tuple("".join(letters[(layer + place) % len(letters)] for place in range(chunks)) for layer in range(8))
    stays = draw(st.booleans())
    state = {kind: STAYS if stays else draw(residencies()) for kind in ("weights", "gradients", "optimizer_state")}
    plan = one_device(
        chunk_tokens=chunk,
        chunks_per_round=chunks,
        rounds_per_step=draw(st.integers(1, 9)),
        saves=saves,
        activation_slots=8,
        precision=draw(st.sampled_from(sorted(POLICIES))),
        optimizer=draw(st.sampled_from(["adamw", "adamw", "adamw", *OPTIMIZERS])),
        attention=draw(st.sampled_from(["sequence", "chunk"])),
        update_place=draw(st.sampled_from(["device", "host"])),
        update_when=draw(st.sampled_from(["backward", "end"])),
        host_copies=draw(st.booleans()),
        lengths=draw(st.sampled_from([None, "packed:5x2,17,512"])),
        **state,
    )
    return plan, MODEL
