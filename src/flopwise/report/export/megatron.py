"""A plan as the arguments of Megatron-LM's `pretrain_gpt.py`, one on each line, with comments between them.

`torchrun … pretrain_gpt.py $(grep -v '^#' plan.args)` takes them as they are.
"""

from __future__ import annotations

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
    leave_streaming,
    state_stays,
    whole_recompute,
)
from flopwise.setup.parallel import Parallel
from flopwise.work.attention_kinds import RotaryScaling
from flopwise.work.formats import NARROW_BYTES
from flopwise.work.model import Model
from flopwise.work.transformer import Dropout, Transformer

TARGET = "Megatron-LM"
VERSION = "Megatron-LM with Megatron Core 0.13 or later"

Arguments = dict[str, str | int | None]
"""Argument → its value; None: it is a switch."""

SHARDED = {2: "optim_grads", 3: "optim_grads_params"}


def to_megatron(plan: AnyPlan, model: Model) -> Export:
    """The plan for Megatron-LM; an error where it cannot train the same."""
    ledger = Ledger(plan, TARGET)
    batch = batch_of(plan, ledger)
    arguments: Arguments = dict(model_arguments(model, ledger))
    assert isinstance(model, Transformer)
    ledger.carry("the arguments of its sizes", MODEL)
    arguments |= {
        "--seq-length": plan.sequence_tokens,
        "--max-position-embeddings": _positions(model, plan.sequence_tokens),
        "--micro-batch-size": batch.micro,
        "--global-batch-size": batch.sequences,
    }
    ledger.carry("--seq-length", "sequence_tokens")
    arguments |= _optimizer(plan, ledger)
    arguments |= _precision(plan, ledger)
    if isinstance(plan, ClusterPlan):
        arguments |= _cluster(plan, model, ledger)
        arguments |= _parallel(plan.parallel, model, ledger, batch)
    else:
        arguments |= _one_device(plan, ledger)
    lines = [name if value is None else f"{name} {value}" for name, value in arguments.items()]
    text = comment(header(ledger, model, VERSION, batch)) + "\n".join(lines) + "\n"
    return ledger.export(text)


def _positions(model: Transformer, tokens: int) -> int:
    """Rows of a learned table, which are parameters; elsewhere the longest sequence."""
    return model.position_rows or tokens if model.positions == "learned" else max(tokens, model.context)


def _optimizer(plan: AnyPlan, ledger: Ledger) -> Arguments:
    if plan.optimizer == "lion":
        raise ledger.refused(
            "the optimizer is lion", why="Megatron-LM has Adam and SGD", hint="`flopwise plan … --optimizer adamw`"
        )
    if plan.optimizer == "sgd":
        ledger.carry("--optimizer", "optimizer")
        return {"--optimizer": "sgd", "--sgd-momentum": 0}
    ledger.carry("--optimizer: its Adam decouples weight decay", "optimizer")
    return {"--optimizer": "adam"}


def _precision(plan: AnyPlan, ledger: Ledger) -> Arguments:
    formats = formats_of(plan)
    if formats.compute not in ("bf16", "fp16", "fp32"):
        raise ledger.refused(
            f"its precision is {plan.precision}",
            why="Megatron-LM computes in bf16, fp16 or fp32",
            hint="`flopwise plan … --precision bf16-mixed`",
        )
    arguments: Arguments = {} if formats.compute == "fp32" else {f"--{formats.compute}": None}
    why = None
    if formats.matrix in NARROW_BYTES and formats.matrix != "fp8":
        raise ledger.refused(
            f"its precision is {plan.precision}",
            why="of recipes for narrow products, that for fp8 alone is written",
            hint="`flopwise plan … --precision fp8`",
        )
    if formats.matrix == "fp8":
        arguments["--fp8-format"] = "hybrid"
        why = "Megatron-LM's own fp8 recipe decides which products are in fp8, and its state is fp32"
        if formats.scaling in ("tensorwise", "delayed"):
            arguments["--fp8-recipe"] = formats.scaling
        elif formats.scaling:
            why += ", with a scale for each tensor"
        if formats.gathered:
            arguments["--fp8-param-gather"] = None
    elif formats.matrix == "tf32":
        why = "whether fp32 products are rounded to tf32 is a setting of torch"
    elif formats.compute != "fp32" and (formats.master, formats.moments, formats.gradients) != ("fp32",) * 3:
        why = "Megatron-LM keeps fp32 weights and moments, and sums gradients in fp32: up to 18 bytes a parameter"
    ledger.rule("precision", " ".join(arguments) or "the default: fp32", why)
    return arguments


def _cluster(plan: ClusterPlan, model: Transformer, ledger: Ledger) -> Arguments:
    ledger.carry("the launcher's number of processes", "devices")
    ledger.carry("--global-batch-size", "batch_sequences")
    ledger.carry("--micro-batch-size", "micro_batch_sequences")
    ledger.carry("--attention-backend", "attention")
    eager = "Megatron-LM's kernels are fused by default" if plan.fusion == "eager" else None
    ledger.rule("fusion", "the default: fused kernels", eager)
    arguments: Arguments = {"--attention-backend": "flash" if plan.attention == "flash" else "unfused"}
    return arguments | _recompute(plan, model, ledger)


def _recompute(plan: ClusterPlan, model: Transformer, ledger: Ledger) -> Arguments:
    policy = plan.recompute
    if policy == "none" or (policy == "selective" and plan.attention == "flash"):
        ledger.carry("nothing is made again", "recompute")
        return {}
    if policy == "selective":
        ledger.carry("--recompute-granularity selective, of the core of attention", "recompute")
        return {"--recompute-granularity": "selective", "--recompute-modules": "core_attn"}
    if policy == "pointwise":
        ledger.leave("recompute", "`pointwise` is nearest to making norms and the feed-forward part again")
        modules = "layernorm moe_act" if model.experts else "layernorm mlp"
        return {"--recompute-granularity": "selective", "--recompute-modules": modules}
    whole = None if policy == "full" else f"`{policy}` keeps more: whole layers are made again, which takes the least"
    ledger.rule("recompute", "--recompute-granularity full", whole)
    return _whole_layers()


def _whole_layers() -> Arguments:
    return {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1}


def _parallel(parallel: Parallel, model: Transformer, ledger: Ledger, batch: ExportedBatch) -> Arguments:
    arguments: Arguments = {
        "--tensor-model-parallel-size": parallel.tensor,
        "--pipeline-model-parallel-size": parallel.pipeline,
        "--context-parallel-size": parallel.context,
        "--expert-model-parallel-size": parallel.expert,
    }
    for name in ("tensor", "pipeline", "expert"):
        ledger.carry(f"--{name}-model-parallel-size", f"parallel.{name}")
    ledger.carry("--context-parallel-size", "parallel.context")
    ledger.carry("what the other ranks leave of the processes", "parallel.data")
    if parallel.expert > 1 or parallel.sharing_experts != parallel.tensor:
        arguments["--expert-tensor-parallel-size"] = parallel.sharing_experts
    ledger.carry("--expert-tensor-parallel-size", "parallel.expert_tensor")
    if parallel.once_a_node:
        arguments |= {"--moe-token-dispatcher-type": "flex", "--moe-enable-deepep": None}
    ledger.carry("--moe-token-dispatcher-type flex --moe-enable-deepep", "parallel.once_a_node")
    if parallel.sequence:
        arguments["--sequence-parallel"] = None
    if parallel.expert > 1 and parallel.tensor > 1 and not parallel.sequence:
        arguments["--sequence-parallel"] = None
        ledger.leave("parallel.sequence", "experts beside tensor ranks need --sequence-parallel, which is written")
    ledger.carry("--sequence-parallel", "parallel.sequence")
    if "tensor" in parallel.overlap:
        arguments["--tp-comm-overlap"] = None
    if "experts" in parallel.overlap:
        arguments["--overlap-moe-expert-parallel-comm"] = None
    # Hops between interleaved stages, and the distributed optimizer's gather, run beside kernels by themselves.
    stages = "hops run beside kernels between interleaved stages alone"
    plain = "stages" in parallel.overlap and parallel.chunks == 1
    ledger.rule("parallel.overlap", "--tp-comm-overlap, --overlap-param-gather", stages if plain else None)
    return arguments | _stages(parallel, model, ledger, batch) | _sharding(parallel, ledger)


def _stages(parallel: Parallel, model: Transformer, ledger: Ledger, batch: ExportedBatch) -> Arguments:
    if parallel.pipeline == 1:
        ledger.carry("no pipeline", "parallel.schedule", "parallel.chunks", "parallel.balance")
        return {}
    first = "Megatron-LM runs a backward as soon as there is one, which keeps fewer activations"
    ledger.rule("parallel.schedule", "the default: 1f1b", first if parallel.schedule == "gpipe" else None)
    arguments: Arguments = {}
    whole = None
    ends_count = parallel.chunks > 1 and model.layers % (parallel.pipeline * parallel.chunks) != 0
    if ends_count:
        arguments |= dict.fromkeys(
            ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
        )
    if parallel.chunks > 1:
        layers = model.layers + 2 * ends_count
        arguments["--num-layers-per-virtual-pipeline-stage"] = layers // (parallel.pipeline * parallel.chunks)
        if batch.accumulation % parallel.pipeline:
            whole = (
                f"{batch.accumulation} micro-batches are no multiple of {parallel.pipeline} stages, as it wants them"
            )
    ledger.rule("parallel.chunks", "--num-layers-per-virtual-pipeline-stage", whole)
    even = ends_count or model.layers % parallel.pipeline == 0
    if parallel.balance == "layers" and even:
        ledger.carry("the default: equal stages", "parallel.balance")
        return arguments
    last = _last_stage(model.layers, parallel.pipeline, fewer=parallel.balance == "time")
    if last is None:
        raise ledger.refused(
            f"{model.layers} layers on {parallel.pipeline} stages",
            why="all stages but the last must have equally many layers",
            hint="a number of stages that divides the layers",
        )
    arguments["--decoder-last-pipeline-num-layers"] = last
    ledger.leave("parallel.balance", f"equal stages but for the last: {last} layers there are written")
    return arguments


def _last_stage(layers: int, stages: int, *, fewer: bool) -> int | None:
    """Layers of the last stage, as many as can be, that leave equally many for each of the others."""
    most = (layers - 1) // stages if fewer else -(-layers // stages)
    fitting = (last for last in range(most, 0, -1) if (layers - last) % (stages - 1) == 0)
    return next(fitting, None)


def _sharding(parallel: Parallel, ledger: Ledger) -> Arguments:
    arguments: Arguments = {}
    if parallel.zero or parallel.offload_optimizer:
        arguments |= dict.fromkeys(("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"))
    if parallel.zero in SHARDED:
        arguments |= {
            "--use-megatron-fsdp": None,
            "--data-parallel-sharding-strategy": SHARDED[parallel.zero],
            "--no-gradient-accumulation-fusion": None,
            "--ckpt-format": "fsdp_dtensor",
        }
    host = parallel.offload_optimizer
    needs = "optimizer state on the host needs --use-distributed-optimizer, which is written"
    ledger.rule(
        "parallel.zero",
        "--use-distributed-optimizer and --data-parallel-sharding-strategy",
        needs if host and not parallel.zero else None,
    )
    if host:
        arguments |= dict.fromkeys(("--optimizer-cpu-offload", "--use-precision-aware-optimizer"))
    ledger.carry("--optimizer-cpu-offload", "parallel.offload_optimizer")
    if parallel.zero and parallel.shard is not None and parallel.shard != parallel.replicas:
        arguments["--num-distributed-optimizer-instances"] = parallel.replicas // parallel.shard
    ledger.carry("--num-distributed-optimizer-instances", "parallel.shard")
    gathered = parallel.zero == 3
    kept = "Megatron-FSDP drops a layer's weights after forward" if gathered and not parallel.reshard else None
    ledger.rule("parallel.reshard", "the default", kept)
    ahead = "Megatron-FSDP gathers ahead by a number of elements" if gathered and parallel.prefetch != 1 else None
    ledger.rule("parallel.prefetch", "--overlap-param-gather", ahead)
    away = "activations stay on the device" if parallel.offload_activations else None
    ledger.rule("parallel.offload_activations", "the default: on the device", away)
    return arguments


def _one_device(plan: Plan, ledger: Ledger) -> Arguments:
    if not (state_stays(plan, "weights") and state_stays(plan, "gradients")):
        raise ledger.refused(
            "weights or gradients pass through the host",
            why="on one device Megatron-LM keeps them there, and this plan has no room for them",
            hint="--to deepspeed or --to accelerate, or `flopwise plan … --gpus 8`",
        )
    leave_streaming(plan, ledger)
    ledger.carry("on the device", "weights", "gradients")
    ledger.carry("--global-batch-size", "chunks_per_round", "rounds_per_step")
    arguments: Arguments = {"--attention-backend": "flash"}
    host = plan.update_place == "host" or not state_stays(plan, "optimizer_state")
    if host:
        switches = ("--use-distributed-optimizer", "--optimizer-cpu-offload", "--use-precision-aware-optimizer")
        arguments |= dict.fromkeys(switches)
    ledger.rule("optimizer_state", "on the device", "Megatron-LM keeps all of it on the host" if host else None)
    moved = "Megatron-LM updates on the host what it keeps there" if host and plan.update_place == "device" else None
    ledger.rule("update_place", "--optimizer-cpu-offload", moved)
    again = whole_recompute(plan)
    alike = "all layers are treated alike: whole layers are made again, which takes the least memory" if again else None
    ledger.rule("saves", "nothing is made again", alike)
    return arguments | (_whole_layers() if again else {})


# -- the model -------------------------------------------------------------------------------------------------------

POSITIONS = {"rotary": "rope", "learned": "learned_absolute", "none": "none"}
NORMS = {"rms": "RMSNorm", "layer": "LayerNorm"}


def model_arguments(model: Model, ledger: Ledger) -> Arguments:
    """Sizes and kinds of the parts; dropout is told even where there is none, for Megatron-LM's default is 0.1."""
    if not isinstance(model, Transformer):
        raise _unknown(ledger, model.name, "a recurrent network")
    _refuse(model, ledger)
    dropout = model.dropout or Dropout()
    arguments: Arguments = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn,
        "--num-attention-heads": model.heads,
        "--kv-channels": model.head_dim,
        "--vocab-size": model.vocab,
        # The vocabulary is padded for the tensor ranks alone; by default it is padded to multiples of 128 of them.
        "--make-vocab-size-divisible-by": 1,
        "--position-embedding-type": POSITIONS[model.positions],
        "--normalization": NORMS[model.norm],
        "--norm-epsilon": repr(model.norm_epsilon),
        "--attention-dropout": f"{dropout.attention:g}",
        "--hidden-dropout": f"{dropout.hidden:g}",
    }
    if model.kv_heads != model.heads:
        arguments |= {"--group-query-attention": None, "--num-query-groups": model.kv_heads}
    if model.positions == "rotary":
        arguments |= {"--rotary-base": f"{model.rotary_base:.0f}", **_scaling(model.rotary_scaling)}
    if model.gated:
        arguments["--swiglu"] = None
    else:
        # Its fused kernel is for gelu_tanh alone.
        arguments["--no-bias-gelu-fusion"] = None
        switch = {"relu2": "--squared-relu", "gelu_tanh": "--openai-gelu"}.get(model.activation)
        arguments |= {switch: None} if switch else {}
    if not model.tied:
        arguments["--untie-embeddings-and-output-weights"] = None
    if not (model.output_bias or model.ffn_bias):
        arguments["--disable-bias-linear"] = None
        if model.qkv_bias:
            arguments["--add-qkv-bias"] = None
    if model.qk_norm:
        arguments["--qk-layernorm"] = None
    if model.window is not None:
        # It counts the tokens before the one that looks.
        arguments["--window-size"] = f"{model.window - 1},0"
    if model.experts:
        arguments |= {"--num-experts": model.experts, "--moe-router-topk": model.experts_per_token}
    return arguments


def _scaling(scaling: RotaryScaling | None) -> Arguments:
    if scaling is None:
        return {}
    if scaling.original_context is None:
        return {"--rotary-seq-len-interpolation-factor": f"{scaling.factor:.0f}"}
    return {"--use-rope-scaling": None, "--rope-scaling-factor": repr(scaling.factor)}


def _refuse(model: Transformer, ledger: Ledger) -> None:
    all_biased = model.qkv_bias and model.output_bias and model.ffn_bias
    unbiased = not (model.output_bias or model.ffn_bias)
    scaling = model.rotary_scaling
    refused = {
        f"a {model.head} head": model.head != "language",
        "attention to both sides": not model.causal,
        "alibi positions": model.positions == "alibi",
        "attention and feed-forward side by side": model.parallel_residual,
        "norms behind the blocks": model.norm_place == "post",
        "a norm of the embedding": model.embedding_norm,
        "no norm before the head": not model.final_norm,
        "a bias of the head": model.head_bias,
        "token types": bool(model.token_types),
        "norms with other biases than a LayerNorm's": model.norm_bias != (model.norm == "layer"),
        "a rotary base that is no whole number": model.positions == "rotary" and model.rotary_base % 1 != 0,
        "biases on some products only": not (all_biased or unbiased),
        f"the activation {model.activation}": not _activation_known(model),
        "linear scaling by no whole number": scaling is not None
        and scaling.original_context is None
        and scaling.factor % 1 != 0,
        "another low-frequency scaling than Llama 3.1's": scaling is not None
        and scaling.original_context is not None
        and (scaling.original_context, scaling.low_frequency_factor, scaling.high_frequency_factor) != (8192, 1.0, 4.0),
    }
    refused |= dict.fromkeys(model.unusual, True)
    for what, there in refused.items():
        if there:
            raise _unknown(ledger, model.name, what)


def _activation_known(model: Transformer) -> bool:
    return model.activation == "silu" if model.gated else model.activation in ("gelu", "gelu_tanh", "relu2")


def _unknown(ledger: Ledger, name: str, what: str) -> Exception:
    return ledger.refused(
        f"{name} has {what}" if what != "a recurrent network" else f"{name} is {what}",
        why="its GPT has no argument for that, and would train another model",
        hint="--to accelerate or --to deepspeed, which take any model",
    )
