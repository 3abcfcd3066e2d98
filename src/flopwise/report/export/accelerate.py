"""A plan as the YAML of `accelerate launch --config_file`, with FSDP2.

The file says how processes share the work. Batch, accumulation and sequence length belong to the training script: they
stand in the comments at its head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.plan import Plan
from flopwise.report.export.ledger import (
    MODEL,
    AnyPlan,
    Export,
    Ledger,
    batch_of,
    comment,
    formats_of,
    header,
    is_pure,
    leave_streaming,
    mesh,
    state_stays,
    whole_recompute,
)
from flopwise.setup.parallel import Parallel
from flopwise.work.formats import NARROW_BYTES
from flopwise.work.model import Model

TARGET = "accelerate"
VERSION = "accelerate 1.10 or later, FSDP2; unknown keys are an error there, so that the rest stands in comments"
SCRIPT = "an argument of the training script, named above"


def to_accelerate(plan: AnyPlan, model: Model) -> Export:
    """The plan for accelerate; an error where it cannot train the same."""
    ledger = Ledger(plan, TARGET)
    batch = batch_of(plan, ledger)
    ledger.leave(MODEL, "the training script brings the model")
    ledger.leave("optimizer", f"the training script brings the optimizer: {plan.optimizer}")
    ledger.carry(SCRIPT, "sequence_tokens")
    table: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": _precision(plan, ledger),
        "num_machines": 1,
        "num_processes": plan.devices,
        "use_cpu": False,
    }
    table |= _cluster(plan, ledger) if isinstance(plan, ClusterPlan) else _one_device(plan, ledger)
    script = (
        f"the training script: --per_device_train_batch_size {batch.micro}"
        f" --gradient_accumulation_steps {batch.accumulation} and sequences of {plan.sequence_tokens} tokens"
    )
    nodes = ["num_machines: as many as the processes are spread over"] if table["num_processes"] > 1 else []
    lines = [*header(ledger, model, VERSION, batch), "", script, *nodes]
    return ledger.export(comment(lines) + "\n" + _yaml(table))


def _yaml(table: Mapping[str, Any], indent: str = "") -> str:
    """Words, numbers and tables of them, sorted: all that such a file holds."""
    text = ""
    for key, value in sorted(table.items()):
        if isinstance(value, Mapping):
            text += f"{indent}{key}:\n{_yaml(value, indent + '  ')}"
        else:
            # Bare, `no` and `NO` would be read as false.
            word = str(value).lower() if isinstance(value, bool) else f"'{value}'" if value in ("no", "NO") else value
            text += f"{indent}{key}: {word}\n"
    return text


def _precision(plan: AnyPlan, ledger: Ledger) -> str:
    formats = formats_of(plan)
    if formats.matrix in NARROW_BYTES or formats.compute not in ("bf16", "fp16", "fp32"):
        raise ledger.refused(
            f"its precision is {plan.precision}",
            why="an accelerate file chooses among bf16, fp16 and no mixed precision",
            hint="`flopwise plan … --precision bf16-amp`",
        )
    amp = formats.master is None and formats.weights == formats.gradients == formats.moments == "fp32"
    if formats.compute == "fp32" or (is_pure(formats) and formats.compute == "bf16"):
        why = None
        if formats.compute == "bf16":
            why = "the training script loads the model in bfloat16; the file then says `no` mixed precision"
        elif formats.matrix == "tf32":
            why = "whether fp32 products are rounded to tf32 is a setting of torch"
        ledger.rule("precision", "mixed_precision", why)
        return "no"
    kept = "weights, gradients and moments are kept in fp32, which takes the place of a second copy of the weights"
    ledger.rule("precision", "mixed_precision", None if amp else kept)
    return formats.compute


def _cluster(plan: ClusterPlan, ledger: Ledger) -> dict[str, Any]:
    parallel = plan.parallel
    _refuse(parallel, ledger)
    ledger.carry("num_processes", "devices")
    ledger.carry(SCRIPT, "batch_sequences", "micro_batch_sequences")
    ledger.leave("attention", f"the training script loads the model with its attention: {plan.attention}")
    ledger.carry("no pipeline", "parallel.pipeline", "parallel.schedule", "parallel.chunks", "parallel.balance")
    ledger.carry("no expert parallelism", *(f"parallel.{name}" for name in ("expert", "expert_tensor", "once_a_node")))
    why = "which exchanges run beside kernels is the framework's own" if parallel.overlap else None
    ledger.rule("parallel.overlap", "the default", why)
    why = "accelerate keeps activations on the device" if parallel.offload_activations else None
    ledger.rule("parallel.offload_activations", "the default: on the device", why)
    why = "tensor ranks repeat what is not split, or not, by the model's own plan" if parallel.tensor > 1 else None
    ledger.rule("parallel.sequence", "no tensor ranks", why)
    table: dict[str, Any] = {}
    if plan.fusion == "fused":
        table["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    ledger.carry("dynamo_config.dynamo_backend", "fusion")
    again = _recompute(plan, ledger)
    _sharding(parallel, ledger)
    copies, shards = mesh(parallel, ledger)
    if copies > 1 and shards == 1 and parallel.tensor * parallel.context > 1:
        ledger.leave("parallel.zero", "accelerate has no plain copies beside tensor or context ranks: state is sharded")
        copies, shards = 1, parallel.data
    ledger.carry("parallelism_config_dp_replicate_size × dp_shard_size, or num_processes", "parallel.data")
    ledger.carry("parallelism_config_tp_size", "parallel.tensor")
    ledger.carry("parallelism_config_cp_size", "parallel.context")
    if not parallel.zero and parallel.devices == parallel.data and not parallel.offload_optimizer:
        if again:
            ledger.leave("recompute", "without FSDP the training script turns gradient checkpointing on")
        return {**table, "distributed_type": "MULTI_GPU" if plan.devices > 1 else "NO"}
    fsdp: dict[str, Any] = {
        "fsdp_activation_checkpointing": again,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": parallel.offload_optimizer,
        "fsdp_reshard_after_forward": parallel.zero == 3 and parallel.reshard,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_version": 2,
    }
    sizes = {"cp": parallel.context, "dp_replicate": copies, "dp_shard": shards, "tp": parallel.tensor}
    mesh_table: dict[str, Any] = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    if parallel.context > 1:
        mesh_table["parallelism_config_cp_comm_strategy"] = "alltoall"
    return {**table, "distributed_type": "FSDP", "fsdp_config": fsdp, "parallelism_config": mesh_table}


def _refuse(parallel: Parallel, ledger: Ledger) -> None:
    if parallel.pipeline > 1 or parallel.expert > 1 or parallel.sharing_experts != parallel.tensor:
        kind = "pipeline stages" if parallel.pipeline > 1 else "experts over several devices"
        raise ledger.refused(
            f"it has {kind}",
            why="an accelerate file has data, tensor and context ranks",
            hint="--to torchtitan or --to megatron, or other degrees in the plan's [parallel]",
        )


def _recompute(plan: ClusterPlan, ledger: Ledger) -> bool:
    policy = "none" if plan.recompute == "selective" and plan.attention == "flash" else plan.recompute
    whole = "accelerate checkpoints whole layers or none: whole layers are written, which takes the least memory"
    why = {"none": None, "input": None, "full": "torch stops once all is made again that backward reads"}
    ledger.rule("recompute", "fsdp_config.fsdp_activation_checkpointing", why.get(policy, whole))
    return policy != "none"


def _sharding(parallel: Parallel, ledger: Ledger) -> None:
    why = {
        0: "the host's optimizer needs FSDP, which shards over context ranks" if parallel.offload_optimizer else None,
        1: "gradients are sharded too, and weights outside of forward and backward",
        2: "weights are sharded too outside of forward and backward",
        3: None,
    }[parallel.zero]
    ledger.rule("parallel.zero", "distributed_type and fsdp_config.fsdp_reshard_after_forward", why)
    ledger.carry("fsdp_config.fsdp_reshard_after_forward", "parallel.reshard")
    ahead = None if parallel.prefetch == 1 or parallel.zero != 3 else "FSDP gathers one layer ahead by itself"
    ledger.rule("parallel.prefetch", "the default: one layer ahead", ahead)
    offload = "FSDP sends weights and gradients to the host too" if parallel.offload_optimizer else None
    ledger.rule("parallel.offload_optimizer", "fsdp_config.fsdp_offload_params", offload)


def _one_device(plan: Plan, ledger: Ledger) -> dict[str, Any]:
    leave_streaming(plan, ledger)
    ledger.carry(SCRIPT, "chunks_per_round", "rounds_per_step")
    again = whole_recompute(plan)
    why = "all layers are treated alike: whole layers are checkpointed, which takes the least memory" if again else None
    ledger.rule("saves", "no checkpointing", why)
    kinds = ("weights", "gradients", "optimizer_state")
    if all(state_stays(plan, kind) for kind in kinds) and plan.update_place == "device":
        ledger.carry("all state stays on the device", *kinds, "update_place")
        if again:
            ledger.leave("saves", "the training script turns gradient checkpointing on, for all layers alike")
        return {"distributed_type": "NO"}
    for kind in kinds:
        ledger.leave(kind, "FSDP keeps all of it on the host and brings one layer at a time")
    where = "FSDP updates on the host what it keeps there"
    ledger.rule("update_place", "on the host, by fsdp_offload_params", where if plan.update_place == "device" else None)
    fsdp = {
        "fsdp_activation_checkpointing": again,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": True,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_version": 2,
    }
    return {"distributed_type": "FSDP", "fsdp_config": fsdp}
