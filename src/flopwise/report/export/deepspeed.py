"""A plan as DeepSpeed's JSON configuration.

JSON has no comments, and DeepSpeed refuses unknown keys within its sections, so that what is left stands beside the
file and not in it.
"""

from __future__ import annotations

from typing import Any

from flopwise.base.files import to_json
from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.plan import Plan
from flopwise.report.export.ledger import (
    MODEL,
    AnyPlan,
    Export,
    Ledger,
    batch_of,
    formats_of,
    is_pure,
    leave_streaming,
    state_stays,
    whole_recompute,
)
from flopwise.setup.parallel import Parallel
from flopwise.work.formats import NARROW_BYTES, Formats
from flopwise.work.model import Model

TARGET = "DeepSpeed"
VERSION = "DeepSpeed 0.18 or later: earlier ones have no bf16 state without fp32 copies, and no torch_autocast"

HOST = {"device": "cpu", "pin_memory": True}


def to_deepspeed(plan: AnyPlan, model: Model) -> Export:
    """The plan for DeepSpeed; an error where it cannot train the same."""
    ledger = Ledger(plan, TARGET)
    batch = batch_of(plan, ledger)
    table: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
    }
    ledger.leave(MODEL, f"the training script brings the model: {model.name}")
    ledger.leave("optimizer", f"the training script brings the optimizer and its learning rate: {plan.optimizer}")
    ledger.leave("sequence_tokens", f"the training script makes sequences of {plan.sequence_tokens} tokens")
    if isinstance(plan, ClusterPlan):
        table |= _cluster(plan, ledger)
    else:
        table |= _one_device(plan, ledger)
    if "batch_sequences" not in ledger.left:
        table = {"train_batch_size": batch.sequences, **table}
    table |= _precision(plan, ledger, table["zero_optimization"])
    return ledger.export(to_json(table) + "\n")


def _precision(plan: AnyPlan, ledger: Ledger, zero: dict[str, Any]) -> dict[str, Any]:
    formats = formats_of(plan)
    if formats.matrix in NARROW_BYTES or formats.compute not in ("bf16", "fp16", "fp32"):
        raise ledger.refused(
            f"its precision is {plan.precision}",
            why="a DeepSpeed file chooses among bf16, fp16 and fp32",
            hint="`flopwise plan … --precision bf16-mixed`",
        )
    where = "bf16, fp16 or torch_autocast"
    if formats.compute == "fp32":
        rounded = "whether fp32 products are rounded to tf32 is a setting of torch"
        ledger.rule("precision", where, rounded if formats.matrix == "tf32" else None)
        return {}
    if formats.master is None and formats.weights == formats.gradients == formats.moments == "fp32":
        ledger.carry("torch_autocast", "precision")
        return {"torch_autocast": {"enabled": True, "dtype": {"bf16": "bfloat16", "fp16": "float16"}[formats.compute]}}
    if is_pure(formats) and formats.compute == "bf16":
        if not zero["stage"]:
            zero["stage"] = 1
            if isinstance(plan, ClusterPlan):
                ledger.leave("parallel.zero", "bf16 state without fp32 copies needs stage 1, which is written")
        ledger.carry("bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states", "precision")
        return {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    ledger.rule("precision", where, None if _is_mixed(formats) else "DeepSpeed keeps fp32 weights and moments beside")
    return {formats.compute: {"enabled": True}}


def _is_mixed(formats: Formats) -> bool:
    low = formats.weights == formats.gradients == formats.compute
    return low and formats.master == formats.moments == "fp32"


def _cluster(plan: ClusterPlan, ledger: Ledger) -> dict[str, Any]:
    parallel = plan.parallel
    _refuse(parallel, ledger)
    ledger.carry("the launcher's number of processes", "devices")
    ledger.carry("train_batch_size", "batch_sequences")
    ledger.carry("train_micro_batch_size_per_gpu", "micro_batch_sequences")
    ledger.leave("attention", f"the training script loads the model with its attention: {plan.attention}")
    ledger.leave("fusion", f"the training script compiles the model, or not: {plan.fusion}")
    no_stages = ("pipeline", "schedule", "chunks", "balance", "context", "expert", "expert_tensor", "once_a_node")
    ledger.carry("one stage, whole sequences", *(f"parallel.{name}" for name in no_stages))
    table: dict[str, Any] = {"zero_optimization": _zero(parallel, ledger)}
    if parallel.tensor > 1:
        # Versions differ in whether they count tensor ranks as data ranks when they check the product.
        ledger.leave("batch_sequences", "follows from the micro-batch, the accumulation and the data ranks")
    ledger.carry("what the tensor ranks leave of the processes", "parallel.data")
    ledger.carry("tensor_parallel.autotp_size", "parallel.tensor")
    if parallel.tensor > 1:
        table["tensor_parallel"] = {"autotp_size": parallel.tensor}
    repeated = "DeepSpeed's tensor ranks repeat norms and residual sums" if parallel.sequence else None
    ledger.rule("parallel.sequence", "the default: norms are repeated", repeated)
    policy = "none" if plan.recompute == "selective" and plan.attention == "flash" else plan.recompute
    if policy != "none" or parallel.offload_activations:
        table["activation_checkpointing"] = _checkpointing(on_host=parallel.offload_activations)
    asked = f"the model's code decides which layers are made again (`{policy}`); the file only says where they are kept"
    ledger.rule("recompute", "nothing is made again", None if policy == "none" else asked)
    away = "only what checkpointed layers keep goes to the host" if parallel.offload_activations else None
    ledger.rule("parallel.offload_activations", "activation_checkpointing.cpu_checkpointing", away)
    beside = "which exchanges run beside kernels is DeepSpeed's own" if parallel.overlap else None
    ledger.rule("parallel.overlap", "the default", beside)
    return table


def _checkpointing(*, on_host: bool) -> dict[str, bool]:
    # Only partitioned activations can go to the host.
    return {"partition_activations": on_host, "cpu_checkpointing": on_host}


def _refuse(parallel: Parallel, ledger: Ledger) -> None:
    unknown = {
        "pipeline stages": parallel.pipeline,
        "context ranks": parallel.context,
        "experts over several devices": max(parallel.expert, parallel.tensor // parallel.sharing_experts),
    }
    for kind, degree in unknown.items():
        if degree > 1:
            raise ledger.refused(
                f"it has {kind}",
                why="in DeepSpeed they are a matter of the model's code, not of the file",
                hint="--to torchtitan or --to megatron, or other degrees in the plan's [parallel]",
            )


def _zero(parallel: Parallel, ledger: Ledger) -> dict[str, Any]:
    stage = parallel.zero
    moved = parallel.offload_optimizer and not stage
    table: dict[str, Any] = {"stage": max(1, stage) if moved else stage}
    if table["stage"]:
        table |= {"overlap_comm": True, "contiguous_gradients": True}
    if parallel.offload_optimizer:
        table["offload_optimizer"] = dict(HOST)
    ledger.rule(
        "parallel.zero",
        "zero_optimization.stage",
        "optimizer state on the host needs stage 1, which is written" if moved else None,
    )
    ledger.carry("zero_optimization.offload_optimizer", "parallel.offload_optimizer")
    hybrid = parallel.zero and parallel.shard is not None and parallel.shard != parallel.replicas
    ledger.rule(
        "parallel.shard",
        "the default: all data ranks share",
        "DeepSpeed shards over all data ranks, which takes less memory and more of the network" if hybrid else None,
    )
    kept = "stage 3 drops weights by its own limits (stage3_max_live_parameters)"
    ledger.rule("parallel.reshard", "zero_optimization.stage", kept if stage == 3 and not parallel.reshard else None)
    ahead = "stage 3 gathers ahead by a number of elements (stage3_prefetch_bucket_size), not of layers"
    ledger.rule("parallel.prefetch", "nothing is gathered", ahead if stage == 3 else None)
    return table


def _one_device(plan: Plan, ledger: Ledger) -> dict[str, Any]:
    leave_streaming(plan, ledger)
    ledger.carry("train_batch_size", "chunks_per_round", "rounds_per_step")
    zero: dict[str, Any] = {"stage": 0}
    here = "on the device"
    weights, state = state_stays(plan, "weights"), state_stays(plan, "optimizer_state")
    if not weights or not state_stays(plan, "gradients"):
        zero = {"stage": 3, "offload_param": dict(HOST), "offload_optimizer": dict(HOST)}
    elif not state or plan.update_place == "host":
        zero = {"stage": 2, "offload_optimizer": dict(HOST)}
    offloaded = "DeepSpeed keeps all of it on the host"
    in_step = "weights are on the host, and gradients and optimizer state with them"
    streamed = "offload_param" in zero
    ledger.rule("weights", here, None if not streamed else offloaded if not weights else in_step)
    ledger.rule("gradients", here, None if not streamed else offloaded)
    updated = "offload_optimizer" in zero
    ledger.rule("optimizer_state", here, offloaded if updated else None)
    moved = "DeepSpeed updates on the host what it keeps there"
    ledger.rule("update_place", "zero_optimization", moved if updated and plan.update_place == "device" else None)
    table: dict[str, Any] = {"zero_optimization": zero}
    again = whole_recompute(plan)
    if again:
        table["activation_checkpointing"] = _checkpointing(on_host=False)
    asked = "the model's code decides which layers are made again; all of them take the least memory"
    ledger.rule("saves", "nothing is made again", asked if again else None)
    return table
