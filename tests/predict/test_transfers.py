"""Communication of parallel set-ups by hand: what is sent, how long it takes and how much of it kernels hide.

One network on which all ranks reach all others at once, without latency unless a test is about it: a gather or a
scatter of B bytes over n ranks takes (n − 1)/n · B/w, a sum twice that.
"""

from __future__ import annotations

from dataclasses import replace
from math import comb

import pytest

from flopwise.catalog.load import load_model
from flopwise.predict.cluster.pieces import ATTENTION, BLOCK, EMBEDDING, HEAD, PRODUCTS
from flopwise.predict.kernels.calls import Phase
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import Parallel
from flopwise.work.describe import describe
from flopwise.work.formats import POLICIES, parse_formats
from flopwise.work.work import Recompute
from tests.support.clusters import MIXTURE, NEUTRAL, SMALL, Kernels, evaluated, machine, network, one, stack, workload

RATE = 50e9
FLAT = machine(network(RATE))
STREAM = 2 * 512 * 256 * 2
"""Bytes of the residual stream of SMALL: micro-batches of 2 sequences, 512 tokens, 256 channels, 2 bytes."""
WORK = workload(6, 2)
"""Three micro-batches of 2."""
EMBEDDING_PARAMETERS, HEAD_PARAMETERS = 1000 * 256, 1000 * 256 + 256
LAYER_PARAMETERS = 256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 768 + 2 * 256
EXPERT_PARAMETERS = 3 * 256 * 768
"""One expert of MIXTURE, in one layer; each of them is as large as SMALL's feed-forward part."""


def passed(size: float, ranks: int, rate: float = RATE) -> float:
    """Seconds of a gather or scatter."""
    return (ranks - 1) / ranks * size / rate


# -- tensor ------------------------------------------------------------------------------------------------------------


def test_tensor_ranks_sum_four_times_a_layer() -> None:
    """Two sums forward and two backward in each of 6 layers, one behind the embedding, one for the head."""
    parallel, total = Parallel(tensor=4), 2 * passed(STREAM, 4)
    found = evaluated(SMALL, parallel, WORK, FLAT)
    assert one(found.parts["tensor"]) == pytest.approx(3 * (6 * 4 + 2) * total)
    kernels = 3 * Kernels(SMALL, parallel, WORK, FLAT).total()
    assert one(found.step_s) == pytest.approx(kernels + one(found.parts["tensor"]) + one(found.parts["update"]))
    again = evaluated(SMALL, parallel, replace(WORK, recompute="full"), FLAT)
    assert one(again.parts["tensor"]) == pytest.approx(3 * (6 * 6 + 2) * total)
    branches = evaluated(replace(SMALL, parallel_residual=True), parallel, WORK, FLAT)
    assert one(branches.parts["tensor"]) == pytest.approx(3 * (6 * 2 + 2) * total)


def test_tensor_sums_with_latency_and_a_stack_s_factor() -> None:
    """Two exchanges of 20 µs each; the stack's network takes half as long again."""
    slow = machine(network(RATE, 20e-6))
    found = evaluated(SMALL, Parallel(tensor=8), WORK, slow, stack(network=1.5))
    assert one(found.parts["tensor"]) == pytest.approx(3 * 26 * 1.5 * 2 * (passed(STREAM, 8) + 20e-6))


def test_sequence_parallelism_gathers_once_more() -> None:
    """Scatter and gather in place of each sum; backward gathers the two products' inputs again unless they are kept."""
    parallel, half = Parallel(tensor=4, sequence=True), passed(STREAM, 4)
    found = evaluated(SMALL, parallel, WORK, FLAT)
    assert one(found.parts["tensor"]) == pytest.approx(3 * (6 * (4 * 2 + 2) + 2 * 2) * half)
    kept = evaluated(SMALL, parallel, WORK, FLAT, replace(NEUTRAL, gathered_kept=True))
    assert one(kept.parts["tensor"]) == pytest.approx(3 * (6 * 4 * 2 + 2 * 2) * half)


@pytest.mark.parametrize(("scaling", "width"), [("rowwise", 2), ("tensorwise", 1), ("delayed", 1)])
def test_one_scale_for_a_tensor_lets_its_tokens_be_gathered_in_fp8(scaling: str, width: int) -> None:
    """Of a layer's ten passes the four sums scatter in bf16; their gathers and the two of inputs are narrow."""
    parallel, half = Parallel(tensor=4, sequence=True), passed(STREAM, 4)
    work = replace(WORK, formats=parse_formats(f"bf16-mixed,matrix=fp8,scaling={scaling}"))
    found = evaluated(SMALL, parallel, work, FLAT)
    assert one(found.parts["tensor"]) == pytest.approx(3 * (6 * (4 + 6 * width / 2) + 2 * 2) * half, rel=1e-4)


@pytest.mark.parametrize(("scaling", "agreed"), [("rowwise", 0), ("tensorwise", 6), ("delayed", 0)])
def test_ranks_agree_on_a_tensor_s_scale_before_they_gather_it(scaling: str, agreed: int) -> None:
    """Over a network of latency alone: six gathers and four scatters a layer, and a sum in one shot before each gather
    of what was cast by the largest of its numbers."""
    slow = machine(network(1e18, 20e-6))
    work = replace(WORK, formats=parse_formats(f"bf16-mixed,matrix=fp8,scaling={scaling}"))
    found = evaluated(SMALL, Parallel(tensor=4, sequence=True), work, slow)
    assert one(found.parts["tensor"]) == pytest.approx(3 * (6 * (10 + agreed) + 2 * 2) * 20e-6)


@pytest.mark.parametrize(("rate", "hidden"), [(1e9, False), (1000e9, True)])
def test_weight_gradients_hide_backward_sums(rate: float, hidden: bool) -> None:
    hardware, parallel = machine(network(rate)), Parallel(tensor=4)
    total = 2 * passed(STREAM, 4, rate)
    products = Kernels(SMALL, parallel, WORK, hardware).by_class[BLOCK, Phase.BACKWARD, PRODUCTS]
    exposed = max(0.0, 2 * total - products / 2)
    assert (exposed == 0) == hidden
    found = evaluated(SMALL, parallel, WORK, hardware, replace(NEUTRAL, tensor_overlap=True))
    assert one(found.parts["tensor"]) == pytest.approx(3 * (6 * (2 * total + exposed) + 2 * total))


# -- context -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "exposed"), [(1e9, True), (100e12, False)])
def test_the_ring_hides_behind_attention(rate: float, exposed: bool) -> None:
    """Three messages of keys and values (128 tokens, 4 heads of 32, 2 sequences) in four steps of attention."""
    hardware, parallel = machine(network(rate)), Parallel(context=4)
    message = 2 * 2 * 128 * 4 * 32 * 2 / rate
    attention = Kernels(SMALL, parallel, WORK, hardware).by_class[BLOCK, :, ATTENTION] / 4
    forward = max(0.0, message - attention[Phase.FORWARD])
    backward = max(0.0, 2 * message - attention[Phase.BACKWARD])
    assert (forward > 0, backward > 0) == (exposed, exposed)
    found = evaluated(SMALL, parallel, WORK, hardware)
    assert one(found.parts["context"]) == pytest.approx(3 * 6 * 3 * (forward + backward))
    again = evaluated(SMALL, parallel, replace(WORK, recompute="full"), hardware)
    assert one(again.parts["context"]) == pytest.approx(3 * 6 * 3 * (2 * forward + backward))


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    """Eight ranks in nodes of four: six messages stay inside, but all wait for the two that do not."""
    near, far = network(1e12, devices=4), network(1e8)
    message = 2 * 2 * 64 * 4 * 32 * 2
    parallel = Parallel(context=8)
    hardware = machine(near, far)
    attention = Kernels(SMALL, parallel, WORK, hardware).by_class[BLOCK, :, ATTENTION] / 8
    exposed = 3 * message / 1e8 - attention[Phase.FORWARD] - attention[Phase.BACKWARD]
    found = evaluated(SMALL, parallel, WORK, hardware)
    assert one(found.parts["context"]) == pytest.approx(3 * 6 * 7 * exposed)


# -- experts -----------------------------------------------------------------------------------------------------------


def test_tokens_travel_to_their_experts_and_back() -> None:
    """Two copies of 1024 tokens of 256 channels, of which 3 of 4 go elsewhere: out and back, forward and backward."""
    parallel, work = Parallel(data=4, expert=4), workload(24, 2)
    one_way = passed(2 * STREAM, 4)
    found = evaluated(MIXTURE, parallel, work, FLAT)
    assert one(found.parts["expert"]) == pytest.approx(3 * 6 * 4 * one_way)
    again = evaluated(MIXTURE, parallel, replace(work, recompute="full"), FLAT)
    assert one(again.parts["expert"]) == pytest.approx(3 * 6 * 6 * one_way)
    alone = evaluated(MIXTURE, Parallel(data=4), work, FLAT)
    assert one(alone.parts["expert"]) == 0


def test_tensor_ranks_send_tokens_of_their_own_where_they_share_no_expert() -> None:
    """Four experts over two data and two tensor ranks: half the tokens of each, and neither experts' sum nor gather."""
    folded, work = Parallel(data=2, tensor=2, sequence=True, expert=4, expert_tensor=1), workload(12, 2)
    found = evaluated(MIXTURE, folded, work, FLAT)
    assert one(found.parts["expert"]) == pytest.approx(3 * 6 * 4 * passed(2 * STREAM / 2, 4))
    # Of attention's output one scatter and one gather each way, and its input gathered again; the ends as before.
    assert one(found.parts["tensor"]) == pytest.approx(3 * (6 * 5 + 2 * 2) * passed(STREAM, 2))
    # Two that share an expert gather what both were sent, twice each way, and scatter what they make of it.
    pairs = Parallel(data=2, tensor=4, sequence=True, expert=4, expert_tensor=2)
    found = evaluated(MIXTURE, pairs, work, FLAT)
    one_way = passed(2 * STREAM / 4, 4) + passed(2 * STREAM / 2, 2)
    assert one(found.parts["expert"]) == pytest.approx(3 * 6 * 4 * one_way)


def test_nodes_that_a_token_goes_to() -> None:
    """The chance that none of a token's experts is on a node, by counting the choices."""
    for experts, chosen, nodes, groups, kept in ((4, 2, 2, 1, 1), (4, 2, 4, 1, 1), (4, 1, 2, 1, 1), (4, 2, 4, 4, 1)):
        routing = replace(MIXTURE.routing, groups=groups, groups_kept=kept)
        model = replace(MIXTURE, experts=4 * experts, experts_per_token=chosen, routing=routing)
        away = comb(4 * experts * (nodes - 1) // nodes, chosen) / comb(4 * experts, chosen)
        reached = min(nodes * (1 - away), kept if groups > 1 else chosen)
        slow = machine(network(1e15, devices=2), network(1e8))
        parallel = Parallel(data=2 * nodes, expert=2 * nodes)
        copies, once = (
            one(evaluated(model, replace(parallel, once_a_node=each), workload(6 * 2 * nodes, 2), slow).parts["expert"])
            for each in (False, True)
        )
        assert once / copies == pytest.approx(reached / chosen, rel=1e-6)


def test_a_token_that_stays_in_its_node_is_sent_as_it_was() -> None:
    inside = Parallel(data=4, expert=4)
    plain, once = (evaluated(MIXTURE, each, WORK, NODES) for each in (inside, replace(inside, once_a_node=True)))
    assert one(once.parts["expert"]) == one(plain.parts["expert"]) > 0


# -- who sits beside whom ----------------------------------------------------------------------------------------------

NODES = machine(network(1e15, devices=4), network(1e8))
"""Nodes of four devices: what stays inside takes no time worth counting."""


def test_tensor_ranks_fill_a_node_and_others_lie_beyond_it() -> None:
    late, work = replace(NEUTRAL, gradient_overlap=False), workload(12, 2)
    ring = evaluated(SMALL, Parallel(tensor=4, context=2), WORK, NODES)
    attention = Kernels(SMALL, Parallel(tensor=4, context=2), WORK, NODES).by_class[BLOCK, :, ATTENTION] / 2
    message = 2 * 2 * 256 * 1 * 32 * 2 / 1e8
    exposed = 3 * message - attention[Phase.FORWARD] - attention[Phase.BACKWARD]
    assert one(ring.parts["context"]) == pytest.approx(3 * 6 * exposed)
    experts = evaluated(MIXTURE, Parallel(tensor=4, data=2, expert=2), work, NODES)
    assert one(experts.parts["expert"]) == pytest.approx(3 * 6 * 4 * passed(2 * STREAM, 2, 1e8))
    replicas = evaluated(SMALL, Parallel(tensor=4, data=2), work, NODES, late)
    part = describe(SMALL, 512, layout=Parallel(tensor=4).layout).parameters
    assert one(replicas.parts["sharding"]) == pytest.approx(2 * passed(2 * part, 2, 1e8))
    assert one(replicas.parts["tensor"]) < 1e-3 * one(replicas.step_s)
    # Shard groups of a node each: scattered inside, a quarter summed beyond.
    hybrid = evaluated(SMALL, Parallel(data=8, zero=1, shard=4), workload(48, 2), NODES, late)
    shard = 2 * describe(SMALL, 512).parameters / 4
    assert one(hybrid.parts["sharding"]) == pytest.approx(2 * passed(shard, 2, 1e8), rel=1e-4)


@pytest.mark.parametrize("zero", [0, 1])
def test_copies_of_folded_experts_lie_beyond_the_node(zero: int) -> None:
    """Two nodes of four tensor ranks, four experts over each node's: dense gradients of a quarter, experts' whole."""
    late = replace(NEUTRAL, gradient_overlap=False)
    parallel = Parallel(data=2, tensor=4, sequence=True, expert=4, expert_tensor=1, zero=zero)
    found = evaluated(MIXTURE, parallel, workload(12, 2), NODES, late)
    part = describe(MIXTURE, 512, layout=parallel.layout).parameters
    one_way = passed(2 * part, 2, 1e8)
    assert part == describe(MIXTURE, 512, layout=Parallel(tensor=4).layout).parameters
    assert one(found.parts["sharding"]) == pytest.approx((1 if zero else 2) * one_way, rel=1e-4)


@pytest.mark.parametrize("zero", [0, 1])
def test_copies_of_an_expert_lie_an_expert_group_apart(zero: int) -> None:
    """Two groups of four in a node each: dense gradients are summed inside and across, experts' across alone."""
    late, parallel = replace(NEUTRAL, gradient_overlap=False), Parallel(data=8, expert=4, zero=zero)
    found = evaluated(MIXTURE, parallel, workload(48, 2), NODES, late)
    experts = 2 * 6 * EXPERT_PARAMETERS
    dense = 2 * describe(MIXTURE, 512).parameters - 4 * experts
    # Inside out: of the dense part a quarter leaves the node on each of its devices, half of it to the other.
    one_way = passed(dense / 4, 2, 1e8) + passed(experts, 2, 1e8)
    assert one(found.parts["sharding"]) == pytest.approx((1 if zero else 2) * one_way, rel=1e-4)


# -- stages ------------------------------------------------------------------------------------------------------------


def test_a_hop_is_the_residual_stream() -> None:
    """Forward and backward for each of three micro-batches; a tensor rank sends its tokens where they are split."""
    for parallel, part in (
        (Parallel(pipeline=3), 1),
        (Parallel(pipeline=3, tensor=2), 1),
        (Parallel(pipeline=3, tensor=2, sequence=True), 2),
        (Parallel(pipeline=3, context=4), 4),
    ):
        found = evaluated(SMALL, parallel, WORK, machine(network(RATE, 5e-6)))
        assert one(found.parts["stages"]) == pytest.approx(3 * 2 * (STREAM / part / RATE + 5e-6))
    assert one(evaluated(SMALL, Parallel(data=3), WORK, FLAT).parts["stages"]) == 0


def test_every_chunk_hops() -> None:
    """Narayanan et al., arXiv 2104.04473, section 2.2.2: as many chunks, as many times the communication."""
    parallel = Parallel(pipeline=3, schedule="interleaved", chunks=2)
    assert one(evaluated(SMALL, parallel, WORK, FLAT).parts["stages"]) == pytest.approx(3 * 2 * 2 * STREAM / RATE)


def test_a_pipeline_is_as_fast_as_its_slowest_hop() -> None:
    """Stages of one device in nodes of two: every other hop leaves the node. With two stages none does."""
    hardware = machine(network(RATE, devices=2), network(1e9))
    assert one(evaluated(SMALL, Parallel(pipeline=3), WORK, hardware).parts["stages"]) == pytest.approx(
        3 * 2 * STREAM / 1e9
    )
    assert one(evaluated(SMALL, Parallel(pipeline=2), WORK, hardware).parts["stages"]) == pytest.approx(
        3 * 2 * STREAM / RATE
    )


# -- data --------------------------------------------------------------------------------------------------------------


def sums(rate: float, ranks: int) -> dict[int, float]:
    """Seconds of summing each part's gradients of 2 bytes."""
    parameters = {EMBEDDING: EMBEDDING_PARAMETERS, BLOCK: LAYER_PARAMETERS, HEAD: HEAD_PARAMETERS}
    return {part: 2 * passed(2 * count, ranks, rate) for part, count in parameters.items()}


def test_fast_sums_leave_a_tail() -> None:
    """Each is done before the next layer's is due, but for the first layer's and the embedding's."""
    hardware, parallel, work = machine(network(RATE)), Parallel(data=4), workload(24, 2)
    backward, each = Kernels(SMALL, parallel, work, hardware).backward, sums(RATE, 4)
    assert each[BLOCK] + each[HEAD] < backward[BLOCK]
    # The first layer's sum runs beside the embedding's backward, the embedding's behind both.
    tail = max(each[BLOCK], backward[EMBEDDING]) + each[EMBEDDING] - backward[EMBEDDING]
    found = evaluated(SMALL, parallel, work, hardware)
    assert one(found.parts["sharding"]) == pytest.approx(tail)
    late = evaluated(SMALL, parallel, work, hardware, replace(NEUTRAL, gradient_overlap=False))
    assert one(late.parts["sharding"]) == pytest.approx(each[EMBEDDING] + 6 * each[BLOCK] + each[HEAD])


def test_slow_sums_run_one_after_the_other() -> None:
    """They start when the head's backward is done; the rest of backward hides a part of them."""
    hardware, parallel, work = machine(network(1e9)), Parallel(data=4), workload(24, 2)
    backward, each = Kernels(SMALL, parallel, work, hardware).backward, sums(1e9, 4)
    total = each[EMBEDDING] + 6 * each[BLOCK] + each[HEAD]
    found = evaluated(SMALL, parallel, work, hardware)
    assert one(found.parts["sharding"]) == pytest.approx(total - 6 * backward[BLOCK] - backward[EMBEDDING])


def test_sharded_gradients_are_scattered_after_every_micro_batch() -> None:
    """ZeRO 2, and 3 in a stack that always does: three times what the last of ZeRO 1 takes; nothing is left."""
    hardware, work = machine(network(1e9)), workload(24, 2)
    backward = Kernels(SMALL, Parallel(data=4), work, hardware).backward
    scattered = sum(sums(1e9, 4)[part] for part in (EMBEDDING, *[BLOCK] * 6, HEAD)) / 2
    exposed = scattered - 6 * backward[BLOCK] - backward[EMBEDDING]
    for zero, times in ((1, 1), (2, 3)):
        found = evaluated(SMALL, Parallel(data=4, zero=zero), work, hardware)
        assert one(found.parts["sharding"]) == pytest.approx(times * exposed)
    always = replace(NEUTRAL, reduce_always=True, gradient_overlap=False)
    last, each = (
        one(evaluated(SMALL, Parallel(data=4, zero=3, prefetch=0), work, hardware, framework).parts["sharding"])
        for framework in (replace(NEUTRAL, gradient_overlap=False), always)
    )
    assert each > last + scattered


def test_context_ranks_sum_gradients_too() -> None:
    hardware, late = machine(network(1e9)), replace(NEUTRAL, gradient_overlap=False)
    found = evaluated(SMALL, Parallel(data=2, context=2), workload(12, 2), hardware, late)
    assert one(found.parts["sharding"]) == pytest.approx(2 * passed(2 * describe(SMALL, 512).parameters, 4, 1e9))


def test_a_smaller_last_micro_batch_hides_less() -> None:
    """Gradients are summed behind the last one, of one sequence: 2 + 2 + 1."""
    hardware, parallel = machine(network(1e9)), Parallel(data=4)
    single = Kernels(SMALL, parallel, workload(8, 1), hardware).backward
    total = sum(sums(1e9, 4)[part] for part in (EMBEDDING, *[BLOCK] * 6, HEAD))
    found = evaluated(SMALL, parallel, workload(20, 2), hardware)
    assert one(found.parts["sharding"]) == pytest.approx(total - 6 * single[BLOCK] - single[EMBEDDING])


def test_a_tied_matrix_is_summed_once() -> None:
    """With the embedding's gradient; on two stages each end sums its own, the first one after everybody's backward."""
    hardware, model = machine(network(1e9)), replace(SMALL, tied=True)
    late = replace(NEUTRAL, gradient_overlap=False)
    found = evaluated(model, Parallel(data=4), workload(24, 2), hardware, late)
    assert one(found.parts["sharding"]) == pytest.approx(2 * passed(2 * describe(model, 512).parameters, 4, 1e9))
    halves = evaluated(model, Parallel(data=4, pipeline=2), workload(24, 2), hardware, late)
    # The last stage has a norm more to sum, and the time of the first one's backward more to do it in.
    assert one(halves.parts["sharding"]) == pytest.approx(
        2 * passed(2 * (EMBEDDING_PARAMETERS + 3 * LAYER_PARAMETERS), 4, 1e9)
    )


def test_a_fast_network_hides_all_gathers_but_the_first() -> None:
    """ZeRO 3, three micro-batches: each starts with the embedding's gather and the first layer's beside its look-up."""
    rate = 200e9
    hardware, parallel, work = machine(network(rate)), Parallel(data=4, zero=3), workload(24, 2)
    kernels = Kernels(SMALL, parallel, work, hardware)
    gather = {part: seconds / 2 for part, seconds in sums(rate, 4).items()}
    assert gather[BLOCK] + gather[HEAD] < min(kernels.forward[BLOCK], kernels.backward[BLOCK])
    first = gather[EMBEDDING] + max(0.0, gather[BLOCK] - kernels.forward[EMBEDDING])
    # The last micro-batch scatters gradients of as many bytes; the embedding's weights are gathered before that.
    tail = max(gather[BLOCK], kernels.backward[EMBEDDING]) + gather[EMBEDDING] - kernels.backward[EMBEDDING]
    found = evaluated(SMALL, parallel, work, hardware)
    assert one(found.parts["sharding"]) == pytest.approx(3 * first + tail)
    assert one(found.step_s) == pytest.approx(3 * (kernels.total() + first) + tail + one(found.parts["update"]))


def test_slow_gathers_are_the_step() -> None:
    """ZeRO 3 over a network so slow that the kernels hide in it: all weights twice, and once if they are kept."""
    rate = 1e7
    hardware, work = machine(network(rate)), workload(8, 2)
    gathered = passed(2 * describe(SMALL, 512).parameters, 4, rate)
    late = replace(NEUTRAL, gradient_overlap=False)
    kernels = Kernels(SMALL, Parallel(data=4, zero=3), work, hardware)
    for reshard, times in ((True, 2), (False, 1)):
        found = evaluated(SMALL, Parallel(data=4, zero=3, reshard=reshard), work, hardware, late)
        exposed = one(found.parts["sharding"]) - gathered
        assert times * gathered - kernels.total() < exposed < times * gathered


def streamed(parameters: float, hardware: Hardware) -> float:
    """Seconds of an update in mixed precision: 28 bytes a parameter of gradient, weight, master and moments."""
    memory, dram = hardware.efficiency.memory, hardware.device.dram.bandwidth_bytes_per_s
    assert dram is not None
    return hardware.efficiency.launch_s + (28 * parameters + memory.half_bytes) / (dram.value * memory.dram)


def test_weights_cast_before_they_are_gathered_are_half_as_long_on_the_way() -> None:
    """Of a network so slow that gathers are the step: the blocks' weights in fp8, embedding and head in bf16."""
    parallel, work = Parallel(data=4, zero=3), replace(workload(24, 2), formats=parse_formats("bf16,matrix=fp8"))
    slow, late = machine(network(1e6)), replace(NEUTRAL, gradient_overlap=False)

    def sharding(precision: str) -> float:
        formats = parse_formats(f"bf16,matrix=fp8,scaling=tensorwise{precision}")
        return one(evaluated(SMALL, parallel, replace(work, formats=formats), slow, late).parts["sharding"])

    # Forward and backward gather every layer in each of three micro-batches.
    saved = 3 * 2 * SMALL.layers * passed(LAYER_PARAMETERS, 4, 1e6)
    assert sharding("") - sharding(",gathered=fp8") == pytest.approx(saved, rel=1e-3)


def test_an_optimizer_s_shards_are_gathered_after_the_update() -> None:
    """ZeRO 1: gradients are scattered behind backward, all weights gathered as they are stored behind the update."""
    hardware, work = machine(network(1e9)), workload(24, 2)
    parameters = describe(SMALL, 512).parameters
    late = replace(NEUTRAL, gradient_overlap=False)
    for formats, weight, gradient in (("bf16-mixed", 2, 2), ("bf16-amp", 4, 4)):
        found = evaluated(SMALL, Parallel(data=4, zero=1), replace(work, formats=POLICIES[formats]), hardware, late)
        assert one(found.parts["sharding"]) == pytest.approx(passed(gradient * parameters, 4, 1e9))
        gathered = passed(weight * parameters, 4, 1e9)
        assert one(found.parts["update"]) == pytest.approx(gathered + streamed(parameters / 4, hardware))


def test_every_stage_updates_its_own() -> None:
    """The last of two has a norm more than the first; unsharded, nothing is gathered."""
    hardware, work, mine = machine(network(1e9)), workload(24, 2), HEAD_PARAMETERS + 3 * LAYER_PARAMETERS
    whole = evaluated(SMALL, Parallel(data=4, pipeline=2), work, hardware)
    assert one(whole.parts["update"]) == pytest.approx(streamed(mine, hardware))
    shards = evaluated(SMALL, Parallel(data=4, pipeline=2, zero=1), work, hardware)
    assert one(shards.parts["update"]) == pytest.approx(passed(2 * mine, 4, 1e9) + streamed(mine / 4, hardware))


def test_hybrid_sharding_sums_shards_across_groups() -> None:
    """Twelve ranks in groups of four: a scatter inside, then a quarter summed over three groups."""
    hardware, work = machine(network(1e9)), workload(72, 2)
    late = replace(NEUTRAL, gradient_overlap=False)
    gradients = 2 * describe(SMALL, 512).parameters
    found = evaluated(SMALL, Parallel(data=12, zero=1, shard=4), work, hardware, late)
    expected = passed(gradients, 4, 1e9) + 2 * passed(gradients / 4, 3, 1e9)
    assert one(found.parts["sharding"]) == pytest.approx(expected)


@pytest.mark.parametrize(("shard", "scattered", "copies"), [(2, 1, 2), (4, 1, 2), (8, 2, 1)])
def test_expert_gradients_are_summed_over_their_copies(shard: int, scattered: int, copies: int) -> None:
    """Eight ranks, four experts on as many: each expert is there twice, in one shard group or in two."""
    hardware, work = machine(network(1e9)), workload(48, 2)
    late = replace(NEUTRAL, gradient_overlap=False)
    found = evaluated(MIXTURE, Parallel(data=8, expert=4, zero=1, shard=shard), work, hardware, late)
    experts = 2 * 6 * EXPERT_PARAMETERS
    dense = 2 * describe(MIXTURE, 512).parameters - 4 * experts
    across = 2 * passed(dense / shard, 8 // shard, 1e9) + 2 * passed(experts / scattered, copies, 1e9)
    expected = passed(dense, shard, 1e9) + passed(experts, scattered, 1e9) + across
    assert one(found.parts["sharding"]) == pytest.approx(expected)


# -- the host ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("link", "host", "each"), [(10e9, 1e12, 2 / 10e9), (1e12, 40e9, 28 / 40e9)])
def test_an_optimizer_on_the_host(link: float, host: float, each: float) -> None:
    """2 bytes of gradient out while 2 of weight come back, or 28 bytes of state moved in host memory."""
    hardware = machine(link_bytes_per_s=link, host_bytes_per_s=host)
    found = evaluated(SMALL, Parallel(offload_optimizer=True), WORK, hardware)
    assert one(found.parts["offload"]) == pytest.approx(describe(SMALL, 512).parameters * each)
    assert one(found.parts["update"]) == 0


@pytest.mark.parametrize(("link", "exposed"), [(1e9, True), (1e15, False)])
def test_offloaded_activations_put_a_floor_under_a_layer(link: float, exposed: bool) -> None:
    hardware, parallel = machine(link_bytes_per_s=link), Parallel(offload_activations=True)
    kernels = Kernels(SMALL, parallel, WORK, hardware)
    # Two bytes of 4 widths of the stream, queries, keys, values and result, three of 768; two norms' and 8 heads' fp32.
    layer = 2 * 512 * (2 * (4 * 256 + 2 * 256 + 2 * 128 + 3 * 768) + 4 * (2 + 8))
    copied = layer / link
    forward, backward = max(0.0, copied - kernels.forward[BLOCK]), max(0.0, copied - kernels.backward[BLOCK])
    assert (forward + backward > 0) == exposed
    found = evaluated(SMALL, parallel, WORK, hardware)
    assert one(found.parts["offload"]) == pytest.approx(3 * 6 * (forward + backward))


def test_a_slow_host_is_the_step() -> None:
    """10 ms for each of 8 parts, forward and backward; the layers' once more when they are made again."""
    policies: tuple[tuple[Recompute, int], ...] = (("none", 16), ("full", 22))
    for policy, starts in policies:
        work = replace(WORK, recompute=policy)
        found = evaluated(SMALL, Parallel(), work, machine(), stack(host_layer_s=0.01))
        assert one(found.step_s) == pytest.approx(3 * starts * 0.01 + one(found.parts["update"]))
        kernels = 3 * Kernels(SMALL, Parallel(), work, machine()).total()
        assert one(found.parts["host"]) == pytest.approx(3 * starts * 0.01 - kernels)


def test_collectives_of_tensor_ranks_take_the_host_too() -> None:
    """Four calls a layer of 1 ms, ten with sequence parallelism; 0.1 ms more a rank when the job leaves a node."""
    hardware = machine(network(1e13, devices=4), network(1e13))
    framework = stack(tensor_call_s=1e-3, tensor_rank_s=1e-4, host_layer_s=1e-2)
    for parallel, calls, spread in (
        (Parallel(tensor=4), 4, 0),
        (Parallel(tensor=4, sequence=True), 10, 0),
        (Parallel(tensor=4, data=2), 4, 4),
    ):
        found = evaluated(SMALL, parallel, workload(6 * parallel.data, 2), hardware, framework)
        again = evaluated(SMALL, parallel, workload(6 * parallel.data, 2, recompute="full"), hardware, framework)
        remade = 6 * (1e-2 + 2 * (2 if parallel.sequence else 1) * (1e-3 + spread * 1e-4))
        assert one(again.step_s) - one(found.step_s) == pytest.approx(3 * remade)
        floor = 16 * 1e-2 + 6 * calls * (1e-3 + spread * 1e-4)
        once = one(found.parts["update"]) + one(found.parts["sharding"])
        assert one(found.step_s) == pytest.approx(3 * floor + once)


def test_a_pipeline_over_nodes_leaves_a_node_too() -> None:
    """Two stages of four tensor ranks: an end and three layers each, with the ranks' part of four calls a layer."""
    hardware = machine(network(1e13, devices=4), network(1e13))
    framework = stack(tensor_rank_s=1e-4, host_layer_s=1e-2)
    found = evaluated(SMALL, Parallel(tensor=4, pipeline=2), WORK, hardware, framework)
    waiting = sum(one(found.parts[name]) for name in ("bubble", "stages", "update"))
    assert one(found.step_s) - waiting == pytest.approx(3 * (8 * 1e-2 + 3 * 4 * 4 * 1e-4))


def test_what_a_framework_does_once_a_step() -> None:
    plain, found = (
        evaluated(SMALL, Parallel(), WORK, machine(), framework) for framework in (NEUTRAL, stack(step_s=2))
    )
    assert one(found.step_s) - one(plain.step_s) == pytest.approx(2)
    assert one(found.parts["step"]) == 2


@pytest.mark.parametrize("rate", [200e9, 2e9])
def test_hidden_gathers_cost_what_they_interfere(rate: float) -> None:
    """A third of the time of every collective beside kernels, as far as they overlap: embedding, 6 layers, head."""
    hardware, parallel, work = machine(network(rate)), Parallel(data=4, zero=3), workload(24, 2)
    kernels = Kernels(SMALL, parallel, work, hardware)
    gather = {part: seconds / 2 for part, seconds in sums(rate, 4).items()}

    def hidden(backward: int) -> float:
        return float(
            sum(
                min(gather[part], kernels.forward[part]) + min(backward * gather[part], kernels.backward[part])
                for part in (EMBEDDING, *[BLOCK] * 6, HEAD)
            )
        )

    found = evaluated(SMALL, parallel, work, hardware, stack(interference=1 / 3))
    assert one(found.parts["interference"]) == pytest.approx(3 * hidden(1) / 3)
    always = evaluated(SMALL, parallel, work, hardware, replace(stack(interference=1 / 3), reduce_always=True))
    assert one(always.parts["interference"]) == pytest.approx(3 * hidden(2) / 3)


def test_a_recurrent_model_over_stages_and_replicas() -> None:
    """Two stages of a layer each, two replicas: the stream of 20 tokens of 19,968 channels hops; 2.4e9 sums."""
    model, hardware = load_model("lstm-lm"), machine(network(RATE))
    parallel, work = Parallel(data=2, pipeline=2), workload(8, 2, tokens=20)
    late = replace(NEUTRAL, gradient_overlap=False)
    found = evaluated(model, parallel, work, hardware, late)
    assert one(found.parts["stages"]) == pytest.approx(2 * 2 * 2 * 20 * 19_968 * 2 / RATE)
    # The first stage holds a layer and 800,000 words, and is the last to be done with its backward. The last stage
    # has a projection and a bias more, and starts earlier by more than they take.
    first = 8 * 19_968**2 + 4 * 19_968 + 800_000 * 19_968
    assert one(found.parts["sharding"]) == pytest.approx(2 * passed(2 * first, 2))
    assert [float(shape.layers[0]) for shape in found.shapes] == [1, 0, 1]
