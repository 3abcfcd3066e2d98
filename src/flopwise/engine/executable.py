"""What is executed here and what is not: models, number formats, strategies. No torch, so that it is soon told."""

from __future__ import annotations

from flopwise.base.errors import FlopwiseError
from flopwise.records.cluster_plan import ClusterPlan
from flopwise.setup.parallel import Parallel
from flopwise.setup.setup import refuse_fp8
from flopwise.work.formats import WIDTH_BYTES, Formats, parse_formats
from flopwise.work.layer_names import LAYERS
from flopwise.work.optimizers import Optimizer
from flopwise.work.transformer import Transformer

TRAINED_IN = ("fp64", "fp32", "tf32", "bf16", "fp16")
"""Formats that torch's tensors have; products may be in fp8 too."""


def no_gpu() -> FlopwiseError:
    """What to say where --device cuda has none."""
    return FlopwiseError("there is no GPU that torch can use", hint="--device cpu, or a torch built for the GPU")


def check_trainable(model: Transformer) -> None:
    """Refuse a model that can be predicted but that nothing here can run."""
    hint = "`flopwise predict` tells how fast it would be; a model of the Llama, GPT-2 or BERT kind can be trained"
    if model.experts and (model.head == "classifier" or (model.dropout and model.dropout.hidden)):
        raise FlopwiseError(
            f"{model.name}: this mixture of experts cannot be trained yet",
            why="classifiers and dropout of branches are not there for mixtures",
            hint=hint,
        )
    if model.sinks and model.dropout is not None and model.dropout.attention:
        raise FlopwiseError(
            f"{model.name}: dropout of attention beside sinks cannot be trained yet", hint="attention_dropout = 0"
        )
    if model.attention_chunk is not None and model.dropout is not None and model.dropout.attention:
        raise FlopwiseError(
            f"{model.name}: dropout of attention in chunks cannot be trained yet", hint="attention_dropout = 0"
        )
    if model.positions == "alibi" and not model.causal:
        raise FlopwiseError(
            f"{model.name}: ALiBi positions that look ahead cannot be trained yet", hint='positions = "learned"'
        )
    if (
        model.dropout is not None
        and model.dropout.hidden
        and (model.norm_place in ("behind", "sandwich") or model.residual_scale != 1.0)
    ):
        raise FlopwiseError(
            f"{model.name}: dropout of branches whose results are normed or scaled cannot be trained yet",
            hint="dropout without `hidden`",
        )
    if model.has_kinds and (model.head != "language" or (model.dropout is not None and model.dropout.hidden)):
        raise FlopwiseError(
            f"{model.name}: blocks of these kinds cannot be trained so yet",
            why="with blocks that carry a state, or have one branch, there are language models alone, without dropout "
            "of branches",
            hint='head = "language", and dropout without `hidden`',
        )
    if model.tied and model.head == "classifier":
        raise FlopwiseError(
            f"{model.name}: a classifier has no matrix that could be the embedding's", hint="tied = false"
        )


def check_adapters(model: Transformer, formats: Formats | None) -> None:
    """Refuse adapters of a network that PEFT would have other ones for, and mixtures in formats without kernels."""
    if formats is not None:
        refuse_fp8(model, formats)
    if model.adapters is not None and model.family not in ("", *LAYERS):
        raise FlopwiseError(
            f"{model.name}: adapters of {model.family} cannot be trained yet",
            why="they are saved as PEFT has them, which is by the names of its layers, and those are not known here",
            hint="--freeze embedding,blocks.0-15, or a model of another family",
        )


def check_formats(formats: Formats) -> None:
    """Refuse formats that nothing here computes in."""
    if "fp16" in (formats.compute, formats.weights, formats.gradients):
        raise FlopwiseError(
            f"{formats.name} cannot be trained in",
            why="gradients in fp16 vanish unless the loss is scaled, which is not done here",
            hint="--precision bf16-mixed",
        )
    if formats.matrix == "fp8" and formats.compute != "bf16":
        raise FlopwiseError(
            f"{formats.name} cannot be trained in",
            why=f"products in fp8 read activations in bf16 and write them, and these are in {formats.compute}",
            hint="--precision fp8",
        )
    for role in ("matrix", "compute", "weights", "gradients", "moments", "master", "average"):
        name = getattr(formats, role)
        if name is not None and name not in TRAINED_IN and (role, name) != ("matrix", "fp8"):
            raise FlopwiseError(
                f"{formats.name} cannot be trained in yet",
                why=f"there are no kernels for {'matrix products' if role == 'matrix' else role} in {name}",
                hint="--precision bf16",
            )


def check_several(formats: Formats, hint: str = "--precision bf16, or --gpus 1") -> None:
    """Refuse number formats that only one device trains in."""
    if formats.matrix == "fp8":
        raise FlopwiseError(
            f"{formats.name} cannot be trained in on several devices yet",
            why="there are no kernels for matrix products in fp8 in the modules that are sharded",
            hint=hint,
        )


SHARDED: tuple[Optimizer, ...] = ("adamw", "lion", "sgd", "sgd-momentum")
"""Whose state each of several devices may have a part of, whatever the part."""


def check_optimizer(optimizer: Optimizer, *, ranks: int) -> None:
    """Refuse optimizers that do not update on so many devices."""
    if ranks > 1 and optimizer not in SHARDED:
        raise FlopwiseError(
            f"{optimizer} cannot be trained with on several devices yet",
            why="each device has some rows of a tensor, and the update needs more of it than those",
            hint=f"--optimizer {' or '.join(SHARDED)}, or --gpus 1",
        )


def check_executed(plan: ClusterPlan, model: Transformer, world: int) -> None:
    """Refuse plans that the distributed executor does not run, or not on so many ranks."""
    formats = parse_formats(plan.precision)
    check_formats(formats)
    check_several(formats)
    check_trainable(model)
    if WIDTH_BYTES[formats.gradients] > WIDTH_BYTES[formats.weights]:
        raise FlopwiseError(
            f"gradients in {formats.gradients} beside weights in {formats.weights} are not run on several devices yet",
            why="FSDP hands gradients over in the weights' format",
            hint="--precision bf16-amp, or bf16-mixed",
        )
    check_optimizer(plan.optimizer, ranks=plan.devices)
    _check_parallel(plan.parallel)
    if plan.devices != world:
        raise FlopwiseError(
            f"the plan is for {plan.devices:,} devices, and {world:,} ranks run it",
            hint=f"--gpus {plan.devices}, or plan again with --gpus {world}",
        )


def _check_parallel(parallel: Parallel) -> None:
    degrees = {
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
        "context": parallel.context,
        "expert": parallel.expert,
    }
    split = [name for name, degree in degrees.items() if degree > 1]
    if split:
        ranks = parallel.devices
        raise FlopwiseError(
            f"{parallel.label}: {' and '.join(split)} parallelism is not executed yet",
            why="ranks run different sequences through the whole model, with sharded state",
            hint=f"data = {ranks}, zero = 3 and nothing else in [parallel] of the plan; "
            f"`flopwise predict … --gpus {ranks} --parallel zero3` tells how fast that is",
        )
    if parallel.offload_optimizer or parallel.offload_activations:
        raise FlopwiseError(
            f"{parallel.label}: memory of the host is not used by several devices yet", hint="plan without --offload"
        )
