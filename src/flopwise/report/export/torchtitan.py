"""A plan as torchtitan's TOML: the job configuration of its release 0.2.2, the last one that reads TOML.

Later versions are configured by Python functions; the sections and fields have the same names there, but for
`selective_ac_option` and `expert_tensor_parallel_degree`, which are gone.
"""

from __future__ import annotations

from typing import Any

from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.plan import Plan
from flopwise.report.export.ledger import (
    MODEL,
    AnyPlan,
    Export,
    ExportedBatch,
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
from flopwise.work.transformer import Transformer

TARGET = "torchtitan"
VERSION = "torchtitan 0.2.2 (February 2026), the last release that reads TOML; later ones take Python functions"

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}

FLAVORS: dict[tuple[int, ...], tuple[str, str]] = {
    (32, 4096, 32, 8, 128, 14336, 128256): ("llama3", "8B"),
    (80, 8192, 64, 8, 128, 28672, 128256): ("llama3", "70B"),
    (126, 16384, 128, 8, 128, 53248, 128256): ("llama3", "405B"),
    (28, 1024, 16, 8, 128, 3072, 151936): ("qwen3", "0.6B"),
    (28, 2048, 16, 8, 128, 6144, 151936): ("qwen3", "1.7B"),
    (36, 2560, 32, 8, 128, 9728, 151936): ("qwen3", "4B"),
    (36, 4096, 32, 8, 128, 12288, 151936): ("qwen3", "8B"),
    (40, 5120, 40, 8, 128, 17408, 151936): ("qwen3", "14B"),
    (64, 5120, 64, 8, 128, 25600, 151936): ("qwen3", "32B"),
}
"""Layers, width, heads, key-value heads, channels of a head, inner width and vocabulary → torchtitan's name for it."""

Tables = dict[str, dict[str, Any]]


def to_torchtitan(plan: AnyPlan, model: Model) -> Export:
    """The plan for torchtitan; an error where it cannot train the same."""
    import tomli_w

    ledger = Ledger(plan, TARGET)
    if not isinstance(model, Transformer) or model.head != "language":
        raise ledger.refused(
            f"{model.name} is no language model of transformer blocks",
            why="torchtitan's models are decoders with a loss on every token",
            hint="--to accelerate or --to deepspeed, which take any model",
        )
    batch = batch_of(plan, ledger)
    tables: Tables = {
        "model": _model(model, ledger),
        "optimizer": _optimizer(plan, ledger),
        "training": {},
        "parallelism": {},
        "activation_checkpoint": {},
        "compile": {},
    }
    _precision(plan, ledger, tables)
    if isinstance(plan, ClusterPlan):
        _cluster(plan, ledger, tables, batch)
        tables["parallelism"] |= _parallelism(plan.parallel, model, ledger, batch)
    else:
        _one_device(plan, ledger, tables, batch)
    tables["training"]["seq_len"] = plan.sequence_tokens
    ledger.carry("training.seq_len", "sequence_tokens")
    text = comment(header(ledger, model, VERSION, batch)) + "\n" + tomli_w.dumps(tables)
    return ledger.export(text)


def _model(model: Transformer, ledger: Ledger) -> dict[str, Any]:
    shape = (model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim, model.ffn, model.vocab)
    if shape in FLAVORS and not model.experts and not model.unusual:
        name, flavor = FLAVORS[shape]
        ledger.carry("model.name and model.flavor", MODEL)
        return {"name": name, "flavor": flavor}
    ledger.leave(
        MODEL,
        f"no flavor is known to have this shape: register one called {model.name!r}, or torchtitan stops with an error",
    )
    return {"name": "llama3", "flavor": model.name}


def _optimizer(plan: AnyPlan, ledger: Ledger) -> dict[str, Any]:
    if plan.optimizer != "adamw":
        raise ledger.refused(
            f"the optimizer is {plan.optimizer}",
            why="torchtitan has Adam and AdamW",
            hint="`flopwise plan … --optimizer adamw`",
        )
    ledger.carry("optimizer.name", "optimizer")
    return {"name": "AdamW"}


def _precision(plan: AnyPlan, ledger: Ledger, tables: Tables) -> None:
    formats = formats_of(plan)
    if formats.compute not in DTYPES or formats.weights not in DTYPES:
        raise ledger.refused(
            f"its precision is {plan.precision}",
            why="torchtitan computes in bf16 or fp32",
            hint="`flopwise plan … --precision bf16` or bf16-amp",
        )
    is_mixed = formats.master is not None
    stored = "float32" if is_mixed else DTYPES[formats.weights]
    tables["training"] |= {"dtype": stored, "mixed_precision_param": DTYPES[formats.compute]}
    amp = formats.weights == formats.gradients == formats.moments == "fp32" and not is_mixed
    why = None
    if formats.matrix in NARROW_BYTES and formats.matrix != "fp8":
        raise ledger.refused(
            f"its precision is {plan.precision}",
            why="of recipes for narrow products, that for fp8 alone is written",
            hint="`flopwise plan … --precision fp8`",
        )
    if formats.matrix == "fp8":
        tables["model"]["converters"] = ["quantize.linear.float8"]
        recipe: dict[str, object] = {"recipe_name": "rowwise"} if formats.scaling == "rowwise" else {}
        if formats.gathered:
            recipe |= {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
        tables["quantize"] = {"linear": {"float8": {"filter_fqns": ["output"], **recipe}}}
        why = "torchtitan's own fp8 recipe decides which products are in fp8"
        if formats.scaling == "delayed":
            why += ", and scales are of the step itself"
    elif formats.matrix == "tf32":
        why = "whether fp32 products are rounded to tf32 is a setting of torch"
    elif not (is_pure(formats) or amp):
        why = f"state is kept in {stored}, gradients and moments with it, and gradients are summed in float32"
    ledger.rule("precision", "training.dtype and training.mixed_precision_param", why)


def _cluster(plan: ClusterPlan, ledger: Ledger, tables: Tables, batch: ExportedBatch) -> None:
    ledger.carry("the product of the degrees: NGPU", "devices")
    staged = plan.parallel.pipeline > 1
    tables["training"] |= {
        # A pipeline takes its micro-batches out of the local batch; without one they are accumulated.
        "local_batch_size": batch.micro * batch.accumulation if staged else batch.micro,
        "global_batch_size": batch.sequences,
    }
    ledger.carry("training.global_batch_size", "batch_sequences")
    where = "parallelism.pipeline_parallel_microbatch_size" if staged else "training.local_batch_size"
    ledger.carry(where, "micro_batch_sequences")
    tables["activation_checkpoint"] |= _recompute(plan, ledger)
    tables["compile"] |= {"enable": plan.fusion == "fused"}
    ledger.carry("compile.enable", "fusion")
    ledger.rule(
        "attention",
        "the default: scaled dot-product attention",
        None if plan.attention == "flash" else "torchtitan's attention keeps no scores, which takes less memory",
    )
    why = "torchtitan sends weights and gradients to the host too" if plan.parallel.offload_optimizer else None
    if plan.parallel.offload_optimizer:
        tables["training"]["enable_cpu_offload"] = True
    ledger.rule("parallel.offload_optimizer", "training.enable_cpu_offload, by default false", why)


def _recompute(plan: ClusterPlan, ledger: Ledger) -> dict[str, Any]:
    policy = "none" if plan.recompute == "selective" and plan.attention == "flash" else plan.recompute
    if policy == "none":
        ledger.carry("activation_checkpoint.mode", "recompute")
        return {"mode": "none"}
    if policy in ("input", "full"):
        ledger.carry("activation_checkpoint.mode and early_stop", "recompute")
        return {"mode": "full", "early_stop": policy == "input"}
    ledger.leave(
        "recompute", f"`{policy}` is nearest to selective checkpointing by operator, which saves other tensors"
    )
    return {"mode": "selective", "selective_ac_option": "op"}


def _parallelism(parallel: Parallel, model: Transformer, ledger: Ledger, batch: ExportedBatch) -> dict[str, Any]:
    copies, shards = _mesh(parallel, ledger)
    table: dict[str, Any] = {
        "data_parallel_replicate_degree": copies,
        "data_parallel_shard_degree": shards,
        "tensor_parallel_degree": parallel.tensor,
        "pipeline_parallel_degree": parallel.pipeline,
        "context_parallel_degree": parallel.context,
        "expert_parallel_degree": parallel.expert,
    }
    for name, key in (("tensor", "tensor"), ("context", "context"), ("pipeline", "pipeline"), ("expert", "expert")):
        ledger.carry(f"parallelism.{key}_parallel_degree", f"parallel.{name}")
    ledger.carry("parallelism.data_parallel_replicate_degree × data_parallel_shard_degree", "parallel.data")
    if parallel.context > 1:
        # Keys and values go around the ranks, as the plan has it, instead of being gathered on each.
        table["context_parallel_rotate_method"] = "alltoall"
    ledger.carry("parallelism.expert_tensor_parallel_degree", "parallel.expert_tensor")
    own = "torchtitan sends a copy to each of a token's experts" if parallel.once_a_node else None
    ledger.rule("parallel.once_a_node", "the default: a copy for each expert", own)
    if parallel.expert > 1 or parallel.sharing_experts != parallel.tensor:
        table["expert_tensor_parallel_degree"] = parallel.sharing_experts
    table |= _sharding(parallel, ledger)
    table |= _stages(parallel, model, ledger, batch)
    always = "torchtitan 0.2.2 shards norms and residual sums by token wherever it has tensor ranks"
    ledger.rule("parallel.sequence", "the default", always if parallel.tensor > 1 and not parallel.sequence else None)
    why = "torchtitan keeps activations on the device" if parallel.offload_activations else None
    ledger.rule("parallel.offload_activations", "the default: on the device", why)
    if "tensor" in parallel.overlap:
        table["enable_async_tensor_parallel"] = True
    others = [name for name in parallel.overlap if name != "tensor"]
    why = f"torchtitan does not run the exchange of {' and '.join(others)} beside kernels" if others else None
    ledger.rule("parallel.overlap", "parallelism.enable_async_tensor_parallel", why)
    return table


def _mesh(parallel: Parallel, ledger: Ledger) -> tuple[int, int]:
    copies, shards = mesh(parallel, ledger)
    if shards * parallel.context > 1:
        return copies, shards
    if parallel.offload_optimizer:
        if parallel.data == 1:
            raise ledger.refused(
                "optimizer state is on the host",
                why="torchtitan sends it there with FSDP, which needs 2 data ranks",
                hint="--to megatron or --to deepspeed",
            )
        ledger.leave("parallel.zero", "optimizer state on the host needs FSDP: the data ranks share the state")
        return 1, parallel.data
    if parallel.tensor * parallel.pipeline > 1 and not is_pure(formats_of(ledger.plan)):
        ledger.leave("precision", "mixed precision comes with FSDP, and these ranks share no state: fp32 throughout")
    return copies, shards


def _sharding(parallel: Parallel, ledger: Ledger) -> dict[str, Any]:
    ledger.rule(
        "parallel.prefetch",
        "the default: one layer ahead",
        None if parallel.prefetch == 1 or parallel.zero != 3 else "FSDP gathers one layer ahead by itself",
    )
    why = {
        0: "context ranks share the weights in any case" if parallel.context > 1 else None,
        1: "gradients are sharded too, and weights outside of forward and backward",
        2: "weights are sharded too outside of forward and backward",
        3: None,
    }[parallel.zero]
    ledger.rule("parallel.zero", "parallelism.data_parallel_shard_degree and fsdp_reshard_after_forward", why)
    ledger.carry("parallelism.fsdp_reshard_after_forward", "parallel.reshard")
    if not parallel.zero:
        return {}
    return {"fsdp_reshard_after_forward": "always" if parallel.zero == 3 and parallel.reshard else "never"}


def _stages(parallel: Parallel, model: Transformer, ledger: Ledger, batch: ExportedBatch) -> dict[str, Any]:
    if parallel.pipeline == 1:
        ledger.carry("no pipeline", "parallel.schedule", "parallel.chunks", "parallel.balance")
        return {}
    balanced = parallel.balance == "time"
    table: dict[str, Any] = {
        "pipeline_parallel_schedule": SCHEDULES[parallel.schedule],
        "pipeline_parallel_microbatch_size": batch.micro,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 1 if balanced else 0,
    }
    if parallel.chunks > 1:
        table["pipeline_parallel_layers_per_stage"] = model.layers // (parallel.pipeline * parallel.chunks)
    ledger.carry("parallelism.pipeline_parallel_schedule", "parallel.schedule")
    ledger.carry("parallelism.pipeline_parallel_layers_per_stage", "parallel.chunks")
    why = "torchtitan takes a number of layers: one fewer on the last stage is written" if balanced else None
    ledger.rule("parallel.balance", "parallelism.pipeline_parallel_last_stage_less_layers", why)
    return table


def _one_device(plan: Plan, ledger: Ledger, tables: Tables, batch: ExportedBatch) -> None:
    moving = [kind for kind in ("weights", "gradients", "optimizer_state") if not state_stays(plan, kind)]
    if moving:
        raise ledger.refused(
            f"{', '.join(moving).replace('_', ' ')} pass through the host",
            why="on one device torchtitan keeps all of its state there, and this plan has no room for it",
            hint="--to deepspeed or --to accelerate, or `flopwise plan … --gpus 8`",
        )
    ledger.carry("all state stays on the device", "weights", "gradients", "optimizer_state")
    ledger.rule(
        "update_place", "on the device", None if plan.update_place == "device" else "torchtitan updates on the device"
    )
    leave_streaming(plan, ledger)
    tables["training"] |= {"local_batch_size": batch.micro, "global_batch_size": batch.sequences}
    ledger.carry("training.global_batch_size", "chunks_per_round", "rounds_per_step")
    again = whole_recompute(plan)
    tables["activation_checkpoint"] |= {"mode": "full", "early_stop": True} if again else {"mode": "none"}
    why = "all layers are treated alike: full checkpointing is written, which takes the least memory" if again else None
    ledger.rule("saves", "activation_checkpoint.mode", why)
    tables["parallelism"] |= {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 1}
    tables["compile"] |= {"enable": True}
