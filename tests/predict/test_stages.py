"""Memory of pipeline stages and sharded state, against published figures and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware, load_model
from flopwise.predict.cluster.pieces import BLOCK, EMBEDDING, HEAD, taken
from flopwise.predict.cluster.stages import FIRST, LAST, SECOND, StageBytes, StageShape, stage_bytes, stage_shapes
from flopwise.predict.cluster.strategies import listed, state_bytes
from flopwise.predict.cluster.transfers import transfers
from flopwise.predict.kernels.memory import LIBRARY_WORKSPACE_BYTES, device_bytes
from flopwise.setup.parallel import Parallel
from flopwise.setup.setup import SettledSetup, Setup
from flopwise.setup.stack import Stack
from flopwise.setup.trained import TrainedWords
from flopwise.work.describe import describe
from flopwise.work.exchange import parameters_by_part
from flopwise.work.formats import POLICIES, parse_formats
from flopwise.work.held import logits_bytes
from flopwise.work.model import Model
from flopwise.work.traffic import block_saved_bytes
from flopwise.work.work import RECOMPUTE_POLICIES, Recompute
from tests.support.clusters import MIXTURE, NEUTRAL, SMALL, placed, stack, workload
from tests.support.strategies import recurrent, transformers

H200 = load_hardware("h200")


def shapes_of(model: Model, parallel: Parallel, work: SettledSetup) -> tuple[StageShape, ...]:
    laid_out = listed([placed(work, model, parallel, H200)])
    return stage_shapes(laid_out.strategies, taken(laid_out.table, laid_out.strategies.row))


def stage(
    model: Model, parallel: Parallel, work: SettledSetup, which: int = FIRST, framework: Stack = NEUTRAL
) -> StageBytes:
    """Bytes of one of the three stages."""
    laid_out = listed([placed(work, model, parallel, H200)])
    table = taken(laid_out.table, laid_out.strategies.row)
    return stage_bytes(laid_out.strategies, table, stage_shapes(laid_out.strategies, table)[which], framework)


def state(found: StageBytes) -> float:
    return float(found.weights[0] + found.gradients[0] + found.optimizer[0])


# -- sharded state -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp16-mixed", "bf16-mixed"])
def test_state_of_a_parameter_is_rajbhandari_s(policy: str) -> None:
    """arXiv 1910.02054, section 3.1: 2 + 2 bytes and K = 12 of the optimizer, master weights included."""
    each = state_bytes(describe(load_model("gpt2"), 8), POLICIES[policy], "adamw")
    assert (each.weights, each.gradients, each.optimizer) == (2, 2, 12)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_is_rajbhandari_s(zero: int, gigabytes: float) -> None:
    """Their figure 1: 7.5 billion parameters over 64 ranks. In 7500 layers, so that what is gathered does not show."""
    parallel = Parallel(data=64, zero=zero)
    laid_out = listed([placed(workload(64, formats=POLICIES["fp16-mixed"]), SMALL, parallel, H200)])
    table = replace(
        taken(laid_out.table, laid_out.strategies.row),
        parameters=np.array([[0.0, 1e6, 0.0]]),
        trained=np.array([[0.0, 1e6, 0.0]]),
        layers=np.array([7500.0]),
    )
    found = stage_bytes(laid_out.strategies, table, stage_shapes(laid_out.strategies, table)[FIRST], NEUTRAL)
    assert round(state(found) / 1e9, 1) == gigabytes
    # Exactly: shards, and of one layer the gradients, of two the weights.
    shards = {0: 16.0, 1: 4 + 12 / 64, 2: 2 + 14 / 64, 3: 16 / 64}[zero]
    assert state(found) == shards * 7.5e9 + {0: 0, 1: 0, 2: 2e6, 3: 2e6 + 2 * 2e6}[zero]


LLAMA = load_model("llama-3-8b")
PARAMETERS = 8_030_261_248
LAYER = 218_112_000
"""Of Llama-3-8B: 2·4096² + 2·4096·1024 + 3·4096·14336 and two norms."""
TABLE = 128_256 * 4096
"""Its embedding; the head is as large, beside a last norm."""


def test_gathered_weights_and_whole_gradients() -> None:
    """ZeRO 3 over eight: shards, two layers and both ends gathered, the gradients of the head, the largest unit."""
    work = workload(8, tokens=1024)
    found = stage(LLAMA, Parallel(data=8, zero=3), work)
    ends = 2 * TABLE + 4096
    assert found.weights[0] == 2 * PARAMETERS / 8 + 2 * (2 * LAYER + ends)
    assert found.gradients[0] == 2 * PARAMETERS / 8 + 2 * (TABLE + 4096)
    assert found.optimizer[0] == 12 * PARAMETERS / 8
    farther = stage(LLAMA, Parallel(data=8, zero=3, prefetch=3), work)
    assert farther.weights[0] - found.weights[0] == 2 * 2 * LAYER
    everything = stage(LLAMA, Parallel(data=8, zero=3, reshard=False), work)
    assert everything.weights[0] == 2 * PARAMETERS / 8 + 2 * PARAMETERS


ADAPTERS = 41_943_040
"""Of rank 16 beside every matrix, as PEFT prints it."""


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_what_is_not_trained_has_no_gradients_and_no_state(zero: int) -> None:
    """Adapters in fp32 beside a model in bf16: shards of both, one layer's adapters whole in backward."""
    model = TrainedWords(lora=16).of(LLAMA)
    setup = placed(workload(8, tokens=1024), model, Parallel(data=8, zero=zero), H200)
    laid_out = listed([replace(setup, formats=parse_formats("bf16-amp,base=bf16"))])
    table = taken(laid_out.table, laid_out.strategies.row)
    found = stage_bytes(laid_out.strategies, table, stage_shapes(laid_out.strategies, table)[FIRST], NEUTRAL)
    shard, each = (8 if zero else 1), ADAPTERS / 32
    assert found.optimizer[0] == 8 * ADAPTERS / shard
    assert found.gradients[0] == pytest.approx(4 * ADAPTERS / shard + (4 * each if zero else 0))
    whole = 2 * PARAMETERS + 4 * ADAPTERS
    # Gathered in bf16: two layers and both ends.
    gathered = 2 * (2 * (LAYER + each) + 2 * TABLE + 4096)
    expected = whole / 8 + gathered if zero == 3 else whole
    assert found.weights[0] == pytest.approx(expected, rel=1e-9)


def test_of_frozen_blocks_nothing_is_reduced() -> None:
    """Half of the blocks and both ends: gradients, state and what goes over the network are halved."""
    half, formats = TrainedWords(freeze="embedding,head,blocks.0-15").of(LLAMA), POLICIES["bf16"]
    work = workload(8, tokens=1024, formats=formats)
    found = stage(half, Parallel(data=8, zero=2), work)
    trained = 16 * LAYER
    assert found.optimizer[0] == pytest.approx(4 * trained / 8)
    # Of the layers' mean: half of one.
    assert found.gradients[0] == pytest.approx(2 * trained / 8 + 2 * LAYER / 2)
    assert found.weights[0] == 2 * PARAMETERS
    moved = [
        transfers(laid_out.strategies, taken(laid_out.table, laid_out.strategies.row), H200, NEUTRAL)
        for laid_out in (listed([placed(work, model, Parallel(data=8), H200)]) for model in (half, LLAMA))
    ]
    assert not moved[0].reduce_last[[EMBEDDING, HEAD]].any()
    assert moved[1].reduce_last[[EMBEDDING, HEAD]].all()
    assert 0.45 < float(moved[0].reduce_last[BLOCK, 0] / moved[1].reduce_last[BLOCK, 0]) < 0.75


@pytest.mark.parametrize(
    ("parallel", "words", "formats", "told"),
    [
        (Parallel(tensor=2, data=4), TrainedWords(lora=16), "bf16", "sequences of their own"),
        (Parallel(pipeline=2, data=4), TrainedWords(freeze="blocks.0-3"), "bf16", "sequences of their own"),
    ],
)
def test_how_parts_are_not_trained_on_several_devices_is_told(
    parallel: Parallel, words: TrainedWords, formats: str, told: str
) -> None:
    with pytest.raises(FlopwiseError, match=told) as error:
        Setup(model=words.of(LLAMA), hardware=H200, parallel=parallel, formats=parse_formats(formats))
    assert error.value.hint


def test_frozen_weights_in_few_bits_are_sharded_and_gathered_so() -> None:
    work = describe(TrainedWords(lora=16).of(LLAMA), 1024)
    found = state_bytes(work, parse_formats("bf16-amp,base=nf4"), "adamw")
    # Of the blocks' matrices 4.5 bits with their scales, of what is around them two bytes a number, of adapters four.
    norms, beside = (2 * LLAMA.layers + 1) * LLAMA.hidden, work.trained_parameters
    matrices = work.parameters - beside - 2 * TABLE - norms
    total = matrices * 4.5 / 8 + 2 * (2 * TABLE + norms) + 4 * beside
    assert found.weights * work.parameters == pytest.approx(total, rel=1e-9)
    assert found.gathered * work.parameters == pytest.approx(total - 2 * beside, rel=1e-9)


def test_gathered_weights_are_cast_first() -> None:
    """fp32 state, bf16 products: shards of 4 bytes, gathered copies of 2 and no others."""
    work = workload(8, tokens=1024, formats=POLICIES["bf16-amp"])
    found = stage(LLAMA, Parallel(data=8, zero=3), work)
    assert found.weights[0] == 4 * PARAMETERS / 8 + 2 * (2 * LAYER + 2 * TABLE + 4096)
    temporaries = stage(LLAMA, Parallel(data=8, zero=3), replace(work, formats=POLICIES["bf16"])).workspace[0]
    assert found.workspace[0] == temporaries
    # Unsharded weights have a copy of 2 bytes of all that products read: not of the embedding, not of 65 norms.
    whole = stage(LLAMA, Parallel(data=8), work)
    assert whole.workspace[0] - temporaries == 2 * (PARAMETERS - TABLE - 65 * 4096)


def test_a_tied_matrix_is_gathered_once_and_held_on_both_ends() -> None:
    """GPT-2: 50257 × 768 for embedding and head; 1024 positions, a last norm of two vectors."""
    model = load_model("gpt2")
    matrix, layer = 50_257 * 768, 7_087_872
    total = matrix + 1024 * 768 + 12 * layer + 2 * 768
    assert total == 124_439_808
    found = stage(model, Parallel(data=4, zero=3), workload(4, tokens=512))
    assert found.weights[0] == 2 * total / 4 + 2 * (2 * layer + matrix + 1024 * 768 + 2 * 768)
    first, last = (stage(model, Parallel(pipeline=2), workload(4, tokens=512), which) for which in (FIRST, LAST))
    assert first.weights[0] == 2 * (matrix + 1024 * 768 + 6 * layer)
    assert last.weights[0] == 2 * (matrix + 2 * 768 + 6 * layer)


def test_a_group_of_one_shards_nothing() -> None:
    work = workload(4, 1)
    for formats in (POLICIES["bf16-mixed"], POLICIES["bf16-amp"]):
        whole = stage(SMALL, Parallel(), replace(work, formats=formats))
        for zero in (1, 2, 3):
            found = stage(SMALL, Parallel(zero=zero), replace(work, formats=formats), framework=ALWAYS)
            assert found == whole
            hybrid = stage(SMALL, Parallel(data=4, zero=zero, shard=1), replace(work, formats=formats))
            assert hybrid.weights[0] == whole.weights[0]


ALWAYS = replace(NEUTRAL, reduce_always=True)


def test_gradients_are_whole_until_they_are_reduced() -> None:
    """ZeRO 3 that only reduces after the last micro-batch sums whole gradients; stage 2 and `reduce_always` do not."""
    parallel, several, single = Parallel(data=8, zero=3), workload(16, tokens=1024), workload(8, tokens=1024)
    sharded = 2 * PARAMETERS / 8 + 2 * (TABLE + 4096)
    assert stage(LLAMA, parallel, several).gradients[0] == 2 * PARAMETERS
    assert stage(LLAMA, parallel, several, framework=ALWAYS).gradients[0] == sharded
    assert stage(LLAMA, parallel, single).gradients[0] == sharded
    assert stage(LLAMA, replace(parallel, zero=2), several).gradients[0] == sharded


def test_hybrid_sharding_divides_by_its_group() -> None:
    found = stage(LLAMA, Parallel(data=8, context=2, zero=1, shard=4), workload(8, tokens=1024))
    assert found.optimizer[0] == 12 * PARAMETERS / 4
    everyone = stage(LLAMA, Parallel(data=8, context=2, zero=1), workload(8, tokens=1024))
    assert everyone.optimizer[0] == 12 * PARAMETERS / 16


MIXTRAL = load_model("mixtral-8x7b")
EXPERTS = 32 * 8 * 3 * 4096 * 14336
"""Of Mixtral 8x7B."""
DENSE = describe(MIXTRAL, 1024).parameters - EXPERTS


def test_experts_are_sharded_as_far_as_they_are_not_dealt_out() -> None:
    work = workload(16, tokens=1024)
    found = stage(MIXTRAL, Parallel(data=16, expert=8, zero=1), work)
    assert found.weights[0] == 2 * (DENSE + EXPERTS / 8)
    assert found.optimizer[0] == 12 * (DENSE / 16 + EXPERTS / 8 / 2)
    # A shard group of four is smaller than the eight that hold different experts.
    hybrid = stage(MIXTRAL, Parallel(data=16, expert=8, zero=1, shard=4), work)
    assert hybrid.optimizer[0] == 12 * (DENSE / 4 + EXPERTS / 8)


def test_experts_of_tensor_ranks_are_sharded_by_their_copies() -> None:
    """Eight tensor ranks with an expert of each layer: two data ranks have two copies, sixteen of them sixteen."""
    for data in (2, 16):
        parallel = Parallel(data=data, tensor=8, sequence=True, expert=8, expert_tensor=1, zero=1)
        found = stage(MIXTRAL, parallel, workload(16, tokens=1024))
        dense = describe(MIXTRAL, 1024, layout=parallel.layout).parameters - EXPERTS / 8
        assert found.weights[0] == 2 * (dense + EXPERTS / 8)
        assert found.optimizer[0] == 12 * (dense / data + EXPERTS / 8 / data)
    # All experts on every tensor rank: eight times as many copies as data ranks.
    whole = Parallel(data=2, tensor=8, sequence=True, expert_tensor=1, zero=1)
    dense = describe(MIXTRAL, 1024, layout=whole.layout).parameters - EXPERTS
    assert stage(MIXTRAL, whole, workload(16, tokens=1024)).optimizer[0] == 12 * (dense / 2 + EXPERTS / 16)


def test_dealt_out_experts_are_not_gathered() -> None:
    """Eight ranks with an expert each: of two layers only the dense part is gathered, and of the ends all."""
    found = stage(MIXTRAL, Parallel(data=8, expert=8, zero=3), workload(8, tokens=1024))
    ends = 2 * 32_000 * 4096 + 4096
    assert found.weights[0] == 2 * (DENSE / 8 + EXPERTS / 8) + 2 * (2 * (DENSE - ends) / 32 + ends)
    shared = stage(MIXTRAL, Parallel(data=8, expert=4, zero=3), workload(8, tokens=1024))
    assert shared.weights[0] == 2 * (DENSE / 8 + EXPERTS / 8) + 2 * (2 * (DENSE - ends + EXPERTS / 4) / 32 + ends)


def test_dealt_out_experts_are_cast_like_all_that_is_not_gathered() -> None:
    """fp32 state, bf16 products, one expert of each layer on each of four ranks: two bytes more of those alone."""
    work = workload(4, formats=POLICIES["bf16-amp"])
    cast, plain = (
        stage(MIXTURE, Parallel(data=4, expert=4, zero=3), replace(work, formats=formats)).workspace[0]
        for formats in (POLICIES["bf16-amp"], POLICIES["bf16"])
    )
    assert cast - plain == 2 * 6 * 3 * 256 * 768
    whole, narrow = (
        stage(MIXTURE, Parallel(), replace(work, formats=formats)).workspace[0]
        for formats in (POLICIES["bf16-amp"], POLICIES["bf16"])
    )
    # All but the look-up's table and 13 norms.
    assert whole - narrow == 2 * (describe(MIXTURE, 512).parameters - 1000 * 256 - 13 * 256)


def test_an_optimizer_on_the_host_takes_no_memory() -> None:
    found = stage(LLAMA, Parallel(offload_optimizer=True), workload(8, tokens=1024))
    assert found.optimizer[0] == 0
    assert found.weights[0] == found.gradients[0] == 2 * PARAMETERS


# -- stages ------------------------------------------------------------------------------------------------------------


def test_state_of_pipeline_stages() -> None:
    """Four stages of eight layers: the embedding on the first, the head and its norm on the last."""
    work = workload(8, tokens=1024)
    each = [stage(LLAMA, Parallel(pipeline=4), work, which).weights[0] for which in (FIRST, SECOND, LAST)]
    assert each == [2 * (TABLE + 8 * LAYER), 2 * 8 * LAYER, 2 * (TABLE + 4096 + 8 * LAYER)]


@pytest.mark.parametrize(
    ("parallel", "held"),
    [
        (Parallel(pipeline=4), (4, 3, 1)),
        (Parallel(pipeline=4, schedule="gpipe"), (6, 6, 6)),
        # 2·3 + 4 + 1 and 2·2 + 4 + 1 and 4 + 1 halves of a device's layers
        (Parallel(pipeline=4, schedule="interleaved", chunks=2), (5.5, 4.5, 2.5)),
    ],
)
def test_activations_of_the_micro_batches_in_flight(parallel: Parallel, held: tuple[float, ...]) -> None:
    """Six micro-batches of two sequences, eight layers a stage; ids of 4 bytes on the first, the head on the last."""
    work = workload(12, 2, tokens=1024)
    description = describe(LLAMA, 1024)
    layer = block_saved_bytes(description, "none", work.formats)
    # The head keeps its norm's input, statistics and output.
    head = 1024 * (2 * 4096 * 2 + 4)
    at_head = 6 if parallel.schedule == "gpipe" else 1
    expected = [
        2 * (8 * layer + 1024 * 4) * held[0],
        2 * 8 * layer * held[1],
        2 * 8 * layer * held[2] + 2 * head * at_head,
    ]
    stages = [stage(LLAMA, parallel, work, which) for which in (FIRST, SECOND, LAST)]
    assert [found.activations[0] for found in stages] == pytest.approx(expected, rel=1e-12)
    # All forwards first: every micro-batch's logits wait for their backward.
    logits = 2 * logits_bytes(description, work.formats, fused=True)
    assert [found.logits[0] for found in stages] == [0, 0, logits * at_head]


def test_a_stack_s_factor_is_for_activations_alone() -> None:
    work = workload(8, tokens=1024)
    plain, more = (stage(LLAMA, Parallel(), work, framework=framework) for framework in (NEUTRAL, stack(activations=2)))
    assert more.activations[0] == 2 * plain.activations[0]
    assert more.total[0] - plain.total[0] == plain.activations[0]


def test_offloaded_activations_leave_two_layers() -> None:
    work = workload(8, tokens=1024)
    layer = block_saved_bytes(describe(LLAMA, 1024), "none", work.formats)
    ends = 1024 * 4 + 1024 * (2 * 4096 * 2 + 4)
    assert stage(LLAMA, Parallel(offload_activations=True), work).activations[0] == 2 * layer + ends


def test_gathered_inputs_that_are_kept() -> None:
    """Sequence parallelism with `gathered_kept`: two inputs a layer of 1024 tokens of 4096 channels."""
    parallel, work = Parallel(tensor=4, sequence=True), workload(8, tokens=1024)
    plain, kept = (
        stage(LLAMA, parallel, work, framework=framework).activations[0]
        for framework in (NEUTRAL, replace(NEUTRAL, gathered_kept=True))
    )
    assert kept - plain == 32 * 2 * 1024 * 4096 * 2


@given(layers=st.integers(1, 40), pipeline=st.integers(1, 12), by_time=st.booleans(), vocab=st.integers(2, 300_000))
def test_every_layer_is_dealt_out(layers: int, pipeline: int, by_time: bool, vocab: int) -> None:
    """The second stage stands for all between the ends, of which some may have a layer less."""
    pipeline = min(pipeline, layers)
    model = replace(SMALL, layers=layers, vocab=vocab)
    parallel = Parallel(pipeline=pipeline, balance="time" if by_time else "layers")
    first, second, last = (int(shape.layers[0]) for shape in shapes_of(model, parallel, workload()))
    between = max(0, pipeline - 2)
    assert first >= 1
    assert 0 <= last <= layers // pipeline or pipeline == 1
    assert second - 1 <= first <= second or pipeline <= 2
    assert 0 <= first + between * second + last - layers < max(1, between)
    if not by_time:
        assert max(first, second, last) == -(-layers // pipeline)


def test_as_many_stages_as_layers() -> None:
    shapes = shapes_of(SMALL, Parallel(pipeline=6), workload())
    assert [shape.layers[0] for shape in shapes] == [1, 1, 1]
    assert [shape.place[0] for shape in shapes] == [0, 1, 5]
    assert [shape.embedding[0] for shape in shapes] == [1, 0, 0]
    assert [shape.head[0] for shape in shapes] == [0, 0, 1]


def test_dealt_out_by_time_the_head_stands_for_layers() -> None:
    """A head of as much time as two and a half layers of 12: over 4 stages 14.5/4 − 2.5, so one layer, rounded."""
    model = replace(SMALL, layers=12)
    laid_out = listed([placed(workload(), model, Parallel(pipeline=4, balance="time"), H200)])
    table = taken(laid_out.table, laid_out.strategies.row)
    seconds = np.zeros_like(table.seconds)
    seconds[:, BLOCK, :, 0], seconds[:, HEAD, :, 0] = 2.0, 5.0
    found = [int(shape.layers[0]) for shape in stage_shapes(laid_out.strategies, replace(table, seconds=seconds))]
    assert found == [3, 4, 1]
    # One of 20 layers' time takes a stage of its own.
    seconds[:, HEAD, :, 0] = 40.0
    found = [int(shape.layers[0]) for shape in stage_shapes(laid_out.strategies, replace(table, seconds=seconds))]
    assert found == [4, 4, 0]


# -- one device --------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    model=transformers() | recurrent(),
    micro=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    policy=st.sampled_from(RECOMPUTE_POLICIES),
    formats=st.sampled_from([name for name in sorted(POLICIES) if POLICIES[name].matrix not in ("mxfp8", "nvfp4")]),
    attention=st.sampled_from(["flash", "eager"]),
    fusion=st.sampled_from(["fused", "eager"]),
    optimizer=st.sampled_from(["adamw", "lion", "sgd"]),
)
def test_one_device_has_the_memory_of_one_device(
    model: Model, micro: int, accumulation: int, policy: Recompute, formats: str, **choices: Any
) -> None:
    work = workload(micro * accumulation, micro, tokens=8, formats=POLICIES[formats], recompute=policy, **choices)
    found = stage(model, Parallel(), work)
    expected = device_bytes(placed(work, model, Parallel(), H200))
    for owner in ("weights", "gradients", "optimizer", "activations", "logits", "workspace"):
        assert getattr(found, owner)[0] == pytest.approx(getattr(expected, owner), rel=1e-12), owner
    assert found.total[0] == pytest.approx(expected.total, rel=1e-12)


def test_empty_stages_take_what_the_library_takes() -> None:
    found = stage(SMALL, Parallel(), workload(), SECOND)
    assert state(found) == found.activations[0] == found.logits[0] == 0
    assert found.workspace[0] >= LIBRARY_WORKSPACE_BYTES


# -- what always holds -------------------------------------------------------------------------------------------------

set_ups = st.fixed_dictionaries(
    {
        "tensor": st.sampled_from([1, 2, 4]),
        "pipeline": st.integers(1, 6),
        "prefetch": st.integers(0, 3),
        "reshard": st.booleans(),
    }
)
shards = st.sampled_from([(1, 2), (2, 4), (3, 12), (4, 12), (1, 12)])


@given(set_up=set_ups, zero=st.integers(0, 3), shard=shards, mixture=st.booleans(), always=st.booleans())
def test_more_shards_never_take_more_state(
    set_up: dict[str, Any], zero: int, shard: tuple[int, int], mixture: bool, always: bool
) -> None:
    """Two shards or more; from one to two, what must be gathered may be more than what is saved."""
    model, expert = (MIXTURE, 2) if mixture else (SMALL, 1)
    framework = replace(NEUTRAL, reduce_always=always)

    def found(shard: int | None, zero: int) -> float:
        parallel = Parallel(data=12, expert=expert, zero=zero, shard=shard, **set_up)
        return state(stage(model, parallel, workload(24), framework=framework))

    fewer, more = (found(max(2, count), zero) for count in shard)
    assert more <= fewer
    # Up to stage 1 nothing has to be gathered, so every shard saves.
    assert zero > 1 or fewer <= found(None, 0)


@given(set_up=set_ups, shard=st.sampled_from([2, 4, 12]), micro_batches=st.integers(1, 2))
def test_a_higher_stage_takes_no_more_but_for_its_buffers(
    set_up: dict[str, Any], shard: int, micro_batches: int
) -> None:
    """Stage 2 adds a layer's gradients, stage 3 one copy of the weights at the most."""
    work = workload(12 * micro_batches)
    none, optimizer, gradients, weights = (
        stage(SMALL, Parallel(data=12, zero=zero, shard=shard, **set_up), work, framework=ALWAYS) for zero in range(4)
    )
    layer = 2 * parameters_by_part(describe(SMALL, 512, layout=Parallel(**set_up).layout))[0][BLOCK]
    assert optimizer.optimizer[0] == gradients.optimizer[0] == weights.optimizer[0] == none.optimizer[0] / shard
    assert optimizer.gradients[0] == none.gradients[0]
    assert gradients.gradients[0] == weights.gradients[0] == pytest.approx(none.gradients[0] / shard + layer)
    assert none.weights[0] == optimizer.weights[0] == gradients.weights[0]
    assert none.weights[0] / shard < weights.weights[0] <= none.weights[0] * (1 + 1 / shard) * (1 + 1e-12)


@given(set_up=set_ups, micro=st.integers(1, 4), schedule=st.sampled_from(["gpipe", "1f1b"]))
def test_less_is_kept_the_more_is_recomputed(set_up: dict[str, Any], micro: int, schedule: Any) -> None:
    parallel = Parallel(schedule=schedule, **set_up)
    kept = [
        float(stage(SMALL, parallel, workload(8, micro, recompute=policy)).activations[0])
        for policy in RECOMPUTE_POLICIES
    ]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] < kept[0]


@pytest.mark.parametrize(
    ("tensor", "sequence", "policy", "linear", "squares"),
    [
        # Their equations 1, 2 and 4, and section 5: without and with the scores.
        (1, False, "none", 34, 5),
        (8, False, "none", 10 + 24 / 8, 5 / 8),
        (8, True, "none", 34 / 8, 5 / 8),
        (8, True, "selective", 34 / 8, 0),
        (1, False, "full", 2, 0),
    ],
)
def test_activations_are_korthikanti_s(
    tensor: int, sequence: bool, policy: Recompute, linear: float, squares: float
) -> None:
    """Bytes of a layer of GPT-3 175B for a sequence: s·b·h·(linear + squares·a·s/h), statistics of norms aside."""
    work = workload(1, tokens=2048, recompute=policy, attention="eager", formats=POLICIES["fp16-mixed"])
    parallel = Parallel(tensor=tensor, sequence=sequence)
    laid_out = listed([placed(work, load_model("gpt-3-175b"), parallel, H200)])
    kept = float(laid_out.table.saved_bytes[0, BLOCK] + laid_out.table.dropout_bytes[0])
    expected = 2048 * 12288 * (linear + squares * 96 * 2048 / 12288)
    assert kept == pytest.approx(expected, rel=2e-3)


def test_dropout_is_kept_where_a_stack_has_it() -> None:
    work = workload(2, 2, attention="eager")
    plain = stage(SMALL, Parallel(), work)
    dropped = stage(SMALL, Parallel(), work, framework=replace(NEUTRAL, dropout=True))
    # Two sequences of 512 tokens in 6 layers: masks of 2 × 256 bytes a token, 3 bytes for each pair of 8 heads.
    assert dropped.activations[0] - plain.activations[0] == 2 * 6 * 512 * (2 * 256 + 3 * 8 * 512)
