"""Plans for other trainers: nothing is dropped in silence, the files parse, and their numbers agree."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_model
from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.plan import Plan, Residency
from flopwise.report.export.by_name import TARGETS, export_plan
from flopwise.report.export.ledger import UNEVEN, AnyPlan, Export
from flopwise.setup.parallel import Parallel
from flopwise.work.attention_kinds import RotaryScaling
from flopwise.work.transformer import Transformer
from tests.support.export_plans import EXPERTS, MODEL, cluster, cluster_plans, device_plans, one_device

BATCH = re.compile(r"# batch: (\d+) sequences = (\d+) at once × (\d+) times × (\d+) ranks\n")

TITAN_KEYS = {
    "model": {"name", "flavor", "converters"},
    "optimizer": {"name"},
    "training": {
        *("local_batch_size", "global_batch_size", "seq_len", "dtype", "mixed_precision_param", "enable_cpu_offload"),
    },
    "parallelism": {
        *("data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward"),
        *("tensor_parallel_degree", "pipeline_parallel_degree", "pipeline_parallel_first_stage_less_layers"),
        *("pipeline_parallel_last_stage_less_layers", "pipeline_parallel_layers_per_stage"),
        *("pipeline_parallel_schedule", "pipeline_parallel_microbatch_size", "context_parallel_degree"),
        *("context_parallel_rotate_method", "expert_parallel_degree", "expert_tensor_parallel_degree"),
    },
    "activation_checkpoint": {"mode", "selective_ac_option", "early_stop"},
    "compile": {"enable"},
    "quantize": {"linear"},
}
"""Those of the job configuration of torchtitan 0.2.2 that are written; it refuses others."""
ACCELERATE_KEYS = {
    *(
        "compute_environment",
        "distributed_type",
        "mixed_precision",
        "use_cpu",
        "debug",
        "num_processes",
        "machine_rank",
    ),
    *("num_machines", "main_training_function", "fsdp_config", "parallelism_config", "dynamo_config"),
}
"""Of accelerate's ClusterConfig."""
MEGATRON_SWITCHES = {
    *(
        "--group-query-attention",
        "--swiglu",
        "--untie-embeddings-and-output-weights",
        "--disable-bias-linear",
        "--bf16",
    ),
    *("--fp16", "--sequence-parallel", "--use-distributed-optimizer", "--overlap-grad-reduce", "--use-megatron-fsdp"),
    *("--overlap-param-gather", "--no-gradient-accumulation-fusion", "--optimizer-cpu-offload", "--qk-layernorm"),
    *("--use-precision-aware-optimizer", "--add-qkv-bias", "--no-bias-gelu-fusion", "--openai-gelu", "--squared-relu"),
    "--use-rope-scaling",
}


def arguments(export: Export) -> dict[str, str | None]:
    """Megatron's arguments; every line that is no comment is one."""
    found: dict[str, str | None] = {}
    for line in export.text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.partition(" ")
            assert re.fullmatch(r"--[a-z0-9]+(-[a-z0-9]+)*", name)
            assert name not in found
            assert (name in MEGATRON_SWITCHES) == (value == "")
            found[name] = value or None
    return found


def read_yaml(text: str) -> dict[str, Any]:
    """Only where PyYAML is installed, which nothing else needs."""
    return pytest.importorskip("yaml").safe_load(text)  # type: ignore[no-any-return]


def parsed(export: Export, target: str) -> dict[str, Any]:
    """The configuration as the target reads it."""
    if target == "torchtitan":
        return tomllib.loads(export.text)
    if target == "deepspeed":
        return json.loads(export.text)  # type: ignore[no-any-return]
    return read_yaml(export.text) if target == "accelerate" else arguments(export)


def names_of(plan: AnyPlan) -> set[str]:
    own = {field.name for field in fields(plan)} - {"parallel"}
    inner = {f"parallel.{field.name}" for field in fields(Parallel)} if isinstance(plan, ClusterPlan) else set()
    return own | inner | {"model"}


def check(plan: AnyPlan, model: Transformer, target: str) -> None:
    """All that is so of any export."""
    try:
        export = export_plan(plan, model, target)
    except FlopwiseError as error:
        assert "cannot take this plan" in error.what
        assert error.why
        assert error.hint
        return
    assert set(export.carried) | set(export.left) == names_of(plan)
    assert not set(export.carried) & set(export.left)
    assert all([*export.carried.values(), *export.left.values()])
    table = parsed(export, target)
    if target != "deepspeed":
        for name, why in export.left.items():
            assert f"#   {name}: {why}\n" in export.text
    check_batch(plan, export, table, target)
    check_devices(plan, table, target)


def check_batch(plan: AnyPlan, export: Export, table: dict[str, Any], target: str) -> None:
    data = plan.parallel.data if isinstance(plan, ClusterPlan) else 1
    wanted = plan.batch_sequences if isinstance(plan, ClusterPlan) else plan.tokens_per_step // plan.sequence_tokens
    if target == "deepspeed":
        micro, times = table["train_micro_batch_size_per_gpu"], table["gradient_accumulation_steps"]
        assert micro * times * data == table.get("train_batch_size", wanted) == wanted
        return
    match = BATCH.search(export.text)
    assert match is not None
    total, micro, times, ranks = map(int, match.groups())
    assert total == micro * times * ranks == wanted
    assert ranks == data
    if target == "torchtitan":
        training, parallelism = table["training"], table["parallelism"]
        assert training["global_batch_size"] == wanted
        assert training["seq_len"] == plan.sequence_tokens
        local, staged = training["local_batch_size"], parallelism.get("pipeline_parallel_microbatch_size")
        assert wanted % (local * data) == 0
        assert (local, staged) == ((micro, None) if staged is None else (micro * times, micro))
    elif target == "megatron":
        assert int(table["--global-batch-size"]) == wanted
        assert int(table["--micro-batch-size"]) == micro
        assert int(table["--seq-length"]) == plan.sequence_tokens
    else:
        script = f"--per_device_train_batch_size {micro} --gradient_accumulation_steps {times} "
        assert script in export.text


def check_devices(plan: AnyPlan, table: dict[str, Any], target: str) -> None:
    """The degrees multiply to the devices, and the keys are those that the target knows."""
    devices = plan.devices if isinstance(plan, ClusterPlan) else 1
    if target == "torchtitan":
        assert all(set(section) <= TITAN_KEYS[name] for name, section in table.items())
        mesh = table["parallelism"]
        names = (
            "data_parallel_replicate",
            "data_parallel_shard",
            "tensor_parallel",
            "pipeline_parallel",
            "context_parallel",
        )
        product = 1
        for name in names:
            product *= mesh.get(f"{name}_degree", 1)
        assert product == devices
    elif target == "accelerate":
        assert set(table) <= ACCELERATE_KEYS
        assert table["num_processes"] == devices
        sizes = table.get("parallelism_config")
        if sizes:
            product = 1
            for name in ("dp_replicate", "dp_shard", "tp", "cp"):
                product *= sizes[f"parallelism_config_{name}_size"]
            assert product == devices
    elif target == "megatron" and isinstance(plan, ClusterPlan):
        kinds = ("tensor-model", "pipeline-model", "context")
        product = plan.parallel.data
        for kind in kinds:
            product *= int(table[f"--{kind}-parallel-size"])
        assert product == devices


@pytest.mark.parametrize("target", TARGETS)
@given(case=cluster_plans())
@settings(max_examples=100)
def test_nothing_of_a_plan_for_several_devices_is_dropped(target: str, case: tuple[ClusterPlan, Transformer]) -> None:
    check(*case, target)


@pytest.mark.parametrize("target", TARGETS)
@given(case=device_plans())
@settings(max_examples=60)
def test_nothing_of_a_plan_for_one_device_is_dropped(target: str, case: tuple[Plan, Transformer]) -> None:
    check(*case, target)


@pytest.mark.parametrize("target", TARGETS)
def test_plain_plans_can_be_exported(target: str) -> None:
    """So that the properties above are not about refusals alone."""
    assert export_plan(cluster(), MODEL, target).carried
    assert export_plan(one_device(), MODEL, target).carried


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("make", [cluster, one_device])
def test_lengths_are_lost_where_a_plan_has_them(make: Callable[..., AnyPlan], target: str) -> None:
    even, uneven = (export_plan(make(lengths=words), MODEL, target) for words in (None, "packed:5x2,17,512"))
    assert "lengths" in even.carried
    assert uneven.left.items() - even.left.items() == {("lengths", UNEVEN)}


def table_of(target: str, plan: AnyPlan, model: Transformer = MODEL) -> dict[str, Any]:
    return parsed(export_plan(plan, model, target), target)


# -- torchtitan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "mesh"),
    [
        (Parallel(data=8, zero=3), (1, 8, "always")),
        (Parallel(data=8, zero=3, reshard=False), (1, 8, "never")),
        (Parallel(data=8, zero=2), (1, 8, "never")),
        (Parallel(data=8, zero=3, shard=2), (4, 2, "always")),
        (Parallel(data=4, context=2, zero=3), (1, 4, "always")),
        (Parallel(data=4, context=2, zero=3, shard=4), (2, 2, "always")),
        (Parallel(data=8), (8, 1, None)),
    ],
    ids=["zero3", "kept", "zero2", "hybrid", "context", "hybrid-context", "copies"],
)
def test_torchtitan_meshes(parallel: Parallel, mesh: tuple[int, int, str | None]) -> None:
    table = table_of("torchtitan", cluster(parallel))["parallelism"]
    found = (
        table["data_parallel_replicate_degree"],
        table["data_parallel_shard_degree"],
        table.get("fsdp_reshard_after_forward"),
    )
    assert found == mesh


def test_torchtitan_pipelines() -> None:
    parallel = Parallel(data=2, pipeline=2, chunks=2, schedule="interleaved", zero=1)
    table = table_of("torchtitan", cluster(parallel, batch_sequences=32, micro_batch_sequences=2))
    assert table["parallelism"]["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert table["parallelism"]["pipeline_parallel_layers_per_stage"] == 2
    assert table["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    # All 16 sequences of a rank go through the stages, two at a time.
    assert (table["training"]["local_batch_size"], table["training"]["global_batch_size"]) == (16, 32)


@pytest.mark.parametrize(
    ("precision", "dtype", "param", "is_whole"),
    [
        ("bf16", "bfloat16", "bfloat16", True),
        ("bf16-amp", "float32", "bfloat16", True),
        ("bf16-mixed", "float32", "bfloat16", False),
        ("fp32", "float32", "float32", True),
        ("tf32", "float32", "float32", False),
        ("fp8", "bfloat16", "bfloat16", False),
    ],
)
def test_torchtitan_precisions(precision: str, dtype: str, param: str, is_whole: bool) -> None:
    export = export_plan(cluster(precision=precision), MODEL, "torchtitan")
    training = tomllib.loads(export.text)["training"]
    assert (training["dtype"], training["mixed_precision_param"]) == (dtype, param)
    assert ("precision" in export.carried) == is_whole


@pytest.mark.parametrize(
    ("recompute", "settings_wanted"),
    [
        ("none", {"mode": "none"}),
        ("selective", {"mode": "none"}),
        ("pointwise", {"mode": "selective", "selective_ac_option": "op"}),
        ("input", {"mode": "full", "early_stop": True}),
        ("full", {"mode": "full", "early_stop": False}),
    ],
)
def test_torchtitan_recompute(recompute: str, settings_wanted: dict[str, Any]) -> None:
    assert table_of("torchtitan", cluster(recompute=recompute))["activation_checkpoint"] == settings_wanted


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("llama-3-8b", ("llama3", "8B")), ("llama-3-70b", ("llama3", "70B")), ("qwen3-8b", ("qwen3", "8B"))],
)
def test_torchtitan_names_the_models_that_it_has(name: str, wanted: tuple[str, str]) -> None:
    model = load_model(name)
    assert isinstance(model, Transformer)
    export = export_plan(cluster(), model, "torchtitan")
    table = tomllib.loads(export.text)["model"]
    assert (table["name"], table["flavor"]) == wanted
    assert "model" in export.carried
    other = export_plan(cluster(), replace(model, layers=model.layers // 2), "torchtitan")
    assert "register" in other.left["model"]


# -- accelerate ------------------------------------------------------------------------------------------------------


def test_accelerate_with_fsdp() -> None:
    table = table_of("accelerate", cluster(Parallel(data=8, zero=3), precision="bf16-amp", recompute="input"))
    assert (table["distributed_type"], table["mixed_precision"]) == ("FSDP", "bf16")
    config = table["fsdp_config"]
    assert config["fsdp_version"] == 2
    assert config["fsdp_reshard_after_forward"] is True
    assert config["fsdp_activation_checkpointing"] is True
    assert config["fsdp_offload_params"] is False


def test_accelerate_with_copies_and_with_tensor_ranks() -> None:
    assert table_of("accelerate", cluster(Parallel(data=8)))["distributed_type"] == "MULTI_GPU"
    assert table_of("accelerate", cluster(Parallel(data=1)))["distributed_type"] == "NO"
    export = export_plan(cluster(Parallel(data=4, tensor=2)), MODEL, "accelerate")
    sizes = read_yaml(export.text)["parallelism_config"]
    # It refuses plain copies beside tensor ranks.
    assert sizes["parallelism_config_dp_replicate_size"] == 1
    assert sizes["parallelism_config_dp_shard_size"] == 4
    assert "parallel.zero" in export.left


def test_no_mixed_precision_is_a_word_in_yaml() -> None:
    assert table_of("accelerate", cluster(precision="fp32"))["mixed_precision"] == "no"


# -- DeepSpeed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "wanted"),
    [
        ("bf16", {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}),
        ("bf16-mixed", {"bf16": {"enabled": True}}),
        ("fp16-mixed", {"fp16": {"enabled": True}}),
        ("bf16-amp", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
        ("fp32", {}),
    ],
)
def test_deepspeed_precisions(precision: str, wanted: dict[str, Any]) -> None:
    table = table_of("deepspeed", cluster(precision=precision))
    assert {name: table[name] for name in ("bf16", "fp16", "torch_autocast") if name in table} == wanted


@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_stages(stage: int) -> None:
    table = table_of("deepspeed", cluster(Parallel(data=8, zero=stage), precision="bf16-mixed"))
    assert table["zero_optimization"]["stage"] == stage
    host = Parallel(data=8, zero=stage, offload_optimizer=True)
    table = table_of("deepspeed", cluster(host, precision="bf16-mixed"))
    assert table["zero_optimization"]["stage"] == max(1, stage)
    assert table["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def test_deepspeed_keeps_on_the_host_what_passes_through_it() -> None:
    passing = Residency(blocks=2, passing=2)
    assert table_of("deepspeed", one_device(precision="fp32"))["zero_optimization"] == {"stage": 0}
    zero = table_of("deepspeed", one_device(optimizer_state=passing))["zero_optimization"]
    assert (zero["stage"], "offload_param" in zero, "offload_optimizer" in zero) == (2, False, True)
    zero = table_of("deepspeed", one_device(weights=passing))["zero_optimization"]
    assert (zero["stage"], "offload_param" in zero, "offload_optimizer" in zero) == (3, True, True)


# -- Megatron-LM -----------------------------------------------------------------------------------------------------


def test_megatron_sizes_of_llama() -> None:
    model = load_model("llama-3-8b")
    assert isinstance(model, Transformer)
    table = table_of("megatron", cluster(Parallel(data=2, tensor=2, pipeline=2, sequence=True, zero=1)), model)
    # As the model's card has them.
    sizes = {"--num-layers": 32, "--hidden-size": 4096, "--ffn-hidden-size": 14336, "--num-attention-heads": 32}
    sizes |= {"--num-query-groups": 8, "--vocab-size": 128256, "--rotary-base": 500000}
    assert {name: int(table[name]) for name in sizes} == sizes
    switches = ("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--sequence-parallel")
    assert all(table[name] is None for name in (*switches, "--use-distributed-optimizer"))
    assert (table["--normalization"], table["--position-embedding-type"]) == ("RMSNorm", "rope")
    assert (table["--attention-dropout"], table["--hidden-dropout"]) == ("0", "0")


def test_megatron_sizes_of_gpt2_and_of_experts() -> None:
    gpt2 = load_model("gpt2")
    assert isinstance(gpt2, Transformer)
    table = table_of("megatron", cluster(), gpt2)
    assert (table["--position-embedding-type"], table["--normalization"]) == ("learned_absolute", "LayerNorm")
    assert table["--max-position-embeddings"] == "1024"
    assert (table["--attention-dropout"], table["--hidden-dropout"]) == ("0.1", "0.1")
    assert "--swiglu" not in table
    assert "--disable-bias-linear" not in table
    assert "--untie-embeddings-and-output-weights" not in table
    table = table_of("megatron", cluster(Parallel(data=4, expert=4)), EXPERTS)
    assert (table["--num-experts"], table["--moe-router-topk"], table["--expert-model-parallel-size"]) == (
        "4",
        "2",
        "4",
    )


def test_megatron_positions_that_are_scaled() -> None:
    model = load_model("llama-3-1b")
    assert isinstance(model, Transformer)
    table = table_of("megatron", cluster(), model)
    # As the configuration of the released weights has it.
    assert float(table["--rope-scaling-factor"]) == 32
    assert table["--use-rope-scaling"] is None
    linear = replace(MODEL, rotary_scaling=RotaryScaling(factor=4.0))
    assert table_of("megatron", cluster(), linear)["--rotary-seq-len-interpolation-factor"] == "4"
    with pytest.raises(FlopwiseError, match="no whole number"):
        export_plan(cluster(), replace(MODEL, rotary_scaling=RotaryScaling(factor=2.5)), "megatron")
    window = replace(MODEL, window=128)
    assert table_of("megatron", cluster(), window)["--window-size"] == "127,0"


@pytest.mark.parametrize(
    ("parallel", "wanted"),
    [
        (Parallel(data=2, zero=1), {"--use-distributed-optimizer": None}),
        (Parallel(data=2, zero=2), {"--data-parallel-sharding-strategy": "optim_grads"}),
        (Parallel(data=2, zero=3), {"--data-parallel-sharding-strategy": "optim_grads_params"}),
        (Parallel(data=8, zero=1, shard=2), {"--num-distributed-optimizer-instances": "4"}),
        (Parallel(pipeline=2, chunks=2, schedule="interleaved"), {"--num-layers-per-virtual-pipeline-stage": "2"}),
        (Parallel(pipeline=3), {"--decoder-last-pipeline-num-layers": "2"}),
        (Parallel(pipeline=2, balance="time"), {"--decoder-last-pipeline-num-layers": "3"}),
        (Parallel(data=2, offload_optimizer=True), {"--optimizer-cpu-offload": None}),
        (Parallel(context=4), {"--context-parallel-size": "4"}),
    ],
    ids=["zero1", "zero2", "zero3", "hybrid", "chunks", "uneven", "balanced", "host", "context"],
)
def test_megatron_set_ups(parallel: Parallel, wanted: dict[str, str | None]) -> None:
    assert wanted.items() <= table_of("megatron", cluster(parallel)).items()


# -- what is refused -------------------------------------------------------------------------------------------------

PASSING = Residency(blocks=0, passing=1)
STATE = dict.fromkeys(("weights", "gradients", "optimizer_state"), PASSING)
THREE_LAYERS = one_device(saves=("F",) * 3, activation_slots=3, **STATE)


@pytest.mark.parametrize(
    ("target", "plan", "word"),
    [
        ("deepspeed", cluster(Parallel(context=2)), "context"),
        ("deepspeed", cluster(Parallel(pipeline=2)), "pipeline"),
        ("accelerate", cluster(Parallel(pipeline=2)), "pipeline"),
        ("torchtitan", cluster(optimizer="lion"), "lion"),
        ("megatron", cluster(optimizer="lion"), "lion"),
        ("torchtitan", cluster(precision="fp16-mixed"), "fp16"),
        ("deepspeed", cluster(precision="fp8"), "fp8"),
        ("torchtitan", one_device(weights=PASSING), "host"),
        ("megatron", one_device(gradients=PASSING), "host"),
        ("torchtitan", cluster(batch_sequences=9), "9 sequences over 8"),
        ("megatron", cluster(Parallel(tensor=3)), "tensor ranks"),
        ("megatron", THREE_LAYERS, "layers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_be_another_training_is_refused(target: str, plan: AnyPlan, word: str) -> None:
    with pytest.raises(FlopwiseError) as caught:
        export_plan(plan, MODEL, target)
    assert word in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["bert-base", "pythia-1b", "lstm-lm"])
def test_megatron_refuses_models_that_it_does_not_have(name: str) -> None:
    model = load_model(name)
    plan = cluster(Parallel(data=2))
    with pytest.raises(FlopwiseError, match="cannot take this plan"):
        export_plan(plan, model, "megatron")
    # Those that leave the model to the script take any.
    assert export_plan(plan, model, "accelerate").left["model"]
    assert export_plan(plan, model, "deepspeed").left["model"]


def test_a_micro_batch_that_does_not_divide_is_made_smaller_and_that_is_said() -> None:
    plan = cluster(Parallel(data=2), batch_sequences=24, micro_batch_sequences=5)
    for target in TARGETS:
        export = export_plan(plan, MODEL, target)
        assert "4 are written" in export.left["micro_batch_sequences"]


@given(st.text(max_size=12))
def test_unknown_trainers_are_told(name: str) -> None:
    if name not in TARGETS:
        with pytest.raises(FlopwiseError) as caught:
            export_plan(cluster(), MODEL, name)
        assert caught.value.hint
