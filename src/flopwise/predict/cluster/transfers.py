"""What the collectives of a strategy take, for each part of the model: tensor, context, expert, data, stages, host.

tensor    a reduction of the residual stream behind each product that splits its depth, forward and backward; with
          sequence parallelism a reduce-scatter and an all-gather in its place, and in backward one more gather of
          each product's input (Korthikanti et al., arXiv 2205.05198)
context   keys and values in a ring, each message behind a step of attention; gradients go along in backward
expert    tokens out and back, forward and backward
data      by ZeRO stage: gradients reduced or reduce-scattered, weights gathered. Hybrid sharding gathers and
          scatters inside a shard group and reduces the shards across groups
stages    the residual stream from stage to stage, a part for each tensor rank where they hold different tokens
host      kept activations over the link while a layer runs, gradients and weights around an update there
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flopwise.predict.cluster.collectives import Collective, collective_seconds, crossed, islands
from flopwise.predict.cluster.pieces import ATTENTION, BLOCK, EMBEDDING, HEAD, PRODUCTS, Pieces
from flopwise.predict.cluster.stages import reduced_always, trained_twice
from flopwise.predict.cluster.strategies import Booleans, Strategies
from flopwise.predict.kernels.calls import Floats, Phase
from flopwise.setup.hardware import Hardware
from flopwise.setup.stack import Stack

BRIDGED = 2
"""Cards that one NVLink bridge joins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfers:
    """Seconds, as arrays of part × strategy unless said otherwise."""

    tensor: tuple[Floats, Floats]
    """Exposed, forward and backward; the same for the next two."""
    context: tuple[Floats, Floats]
    expert: tuple[Floats, Floats]
    gather: Floats
    gather_again: Floats
    """Before a layer's backward."""
    reduce_each: Floats
    """After each micro-batch's backward."""
    reduce_last: Floats
    """After that of the last one, in addition."""
    offload: Floats
    """Kept activations over the link, one way."""
    hop: Floats
    """From stage to stage, all chunks of a device together; one element a strategy, as in the next two."""
    gather_after_update: Floats
    spread: Floats
    """1 where the devices span several islands of the nearest network, else 0."""
    update_s_per_parameter: Floats
    """Of an optimizer on the host: gradients out, weights back, state read and written there."""
    calls: Floats
    """Collectives that a micro-batch starts; part × strategy, like the next."""
    calls_last: Floats
    """Those that the last one starts in addition, and the update."""
    hop_calls: Floats
    """Messages from stage to stage of a micro-batch; one element a strategy."""

    @property
    def beside_backward(self) -> Floats:
        """Collectives that run beside every micro-batch's backward."""
        return self.gather_again + self.reduce_each


def transfers(strategies: Strategies, table: Pieces, hardware: Hardware, stack: Stack) -> Transfers:
    """Time every exchange of the strategies; `table` has their rows."""
    network = _Network(hardware, stack.value("network"), stack.bucket_mib * 2.0**20)
    each, last, after = _gradients(strategies, table, network, stack)
    ends = strategies.gathered_bytes
    each_part = np.stack([ends, strategies.gathered_block_bytes, ends])
    gathered = _over_shards(strategies, table, network, "all-gather", each_part, trained=False)
    gather = np.where(strategies.zero == 3, gathered, 0.0)
    link, host = _host_rates(hardware)
    layer = np.where(strategies.offload_activations, table.saved_bytes[:, BLOCK] / link, 0.0)
    apart = strategies.tensor * strategies.context * strategies.data
    # Ranks that hold different tokens send them; others may share what they all have.
    shared = stack.parted_hops & ~strategies.sequence
    parted = np.where(strategies.sequence | shared, strategies.tensor, 1.0)
    joined = network.seconds("all-gather", table.stream_bytes, strategies.tensor, 1.0) * shared
    # Both directions share the link's two ways; the state itself stays in host memory.
    over_link = np.maximum(strategies.gradient_bytes, strategies.weight_bytes) / link
    return Transfers(
        tensor=_tensor(strategies, table, network, stack),
        context=_context(strategies, table, network, stack),
        expert=_expert(strategies, table, network, stack),
        gather=gather,
        gather_again=np.where(strategies.reshard, gather, 0.0),
        reduce_each=each,
        reduce_last=last,
        offload=_in_blocks(layer),
        hop=strategies.chunks
        * (network.seconds("point-to-point", table.stream_bytes / parted, strategies.pipeline, apart) + joined)
        * (strategies.pipeline > 1),
        gather_after_update=after,
        spread=(crossed(hardware.networks, apart * strategies.pipeline, 1.0) > 0) * np.ones(len(strategies)),
        update_s_per_parameter=np.maximum(over_link, strategies.update_bytes / host),
        calls=_calls(strategies, table, stack),
        calls_last=_calls_last(strategies, stack),
        hop_calls=np.where(strategies.pipeline > 1, 2.0 * strategies.chunks, 0.0),
    )


def _calls(strategies: Strategies, table: Pieces, stack: Stack) -> Floats:
    """Collectives of a micro-batch, forward and backward, each a kernel that the host starts."""
    tensor, parted = strategies.tensor > 1, 1.0 + strategies.sequence
    layer = tensor * (2 * table.reductions + table.reductions_again) * parted
    layer += tensor * strategies.sequence * (not stack.gathered_kept) * table.reductions
    again = table.seconds[:, BLOCK, Phase.RECOMPUTE, ATTENTION] > 0
    layer += (strategies.context - 1.0) * (2.0 + again)
    sent = (strategies.expert > 1) * 1.0 + (table.shared_bytes > 0)
    layer += sent * (4.0 + table.dispatches_again)
    sharded = strategies.shard > 1
    gathers = (strategies.zero == 3) * (1.0 + strategies.reshard)
    units = sharded * (gathers + _reduces_each(strategies, stack))
    return np.stack([units + tensor * parted, units + layer, units + tensor * parted])


def _reduces_each(strategies: Strategies, stack: Stack) -> Booleans:
    """Whether every micro-batch's gradients are reduced, and not only the sum after the last."""
    always = (strategies.zero == 2) | ((strategies.zero == 3) & reduced_always(strategies, stack))
    return np.asarray(always, dtype=np.bool_)


def _calls_last(strategies: Strategies, stack: Stack) -> Floats:
    """A sum of each unit's gradients after the last micro-batch, and the gather of its weights after the update."""
    sums = (strategies.replicas > 1) * ~_reduces_each(strategies, stack)
    gathers = ((strategies.zero == 1) | (strategies.zero == 2)) * (strategies.shard > 1)
    each = sums * 1.0 + gathers
    return np.stack([each, each, each])


@dataclass(frozen=True, slots=True)
class _Network:
    hardware: Hardware
    factor: float
    bucket_bytes: float
    """Of messages that carry gradients; 0: a layer's at once."""

    def seconds(self, kind: Collective, payload: Floats, size: Floats | float, stride: Floats | float) -> Floats:
        found = collective_seconds(self.hardware.networks, kind, payload, size=size, stride=stride)
        # Nothing to send is not sent: not even its latency counts.
        return np.where(payload > 0, found * self.factor, 0.0)

    def in_buckets(self, kind: Collective, payload: Floats, size: Floats, stride: Floats) -> Floats:
        """The same of what is sent in buckets: as many, or as large a part of one, as the payload fills."""
        if not self.bucket_bytes:
            return self.seconds(kind, payload, size, stride)
        return payload / self.bucket_bytes * self.seconds(kind, np.full_like(payload, self.bucket_bytes), size, stride)


def _in_blocks(seconds: Floats) -> Floats:
    """The same in every block, nothing in embedding and head."""
    none = np.zeros_like(seconds)
    return np.stack([none, seconds, none])


def _host_rates(hardware: Hardware) -> tuple[float, float]:
    """Bytes per second of the link and of host memory; infinite where unknown, so that they never decide."""
    link = hardware.link.bandwidth_bytes_per_s.value if hardware.link else float("inf")
    bandwidth = hardware.host.memory_bandwidth_bytes_per_s if hardware.host else None
    return link, bandwidth.value if bandwidth else float("inf")


def _tensor(strategies: Strategies, table: Pieces, network: _Network, stack: Stack) -> tuple[Floats, Floats]:
    stream, ranks = table.stream_bytes, strategies.tensor
    scattered = network.seconds("reduce-scatter", stream, ranks, 1.0)
    whole = network.seconds("all-reduce", stream, ranks, 1.0)
    # At the ends nothing is narrower than the activations; before a layer's products tokens may be.
    ends = np.where(strategies.sequence, scattered + network.seconds("all-gather", stream, ranks, 1.0), whole)
    gathered = network.seconds("all-gather", table.gathered_stream_bytes, ranks, 1.0)
    # What is cast before it is gathered is cast by one scale, which all ranks agree on first.
    gathered = gathered + network.seconds("all-reduce", table.largest_bytes, ranks, 1.0)
    reduced = np.where(strategies.sequence, scattered + gathered, whole)
    again = table.reductions_again * reduced
    regathered = strategies.sequence & (not stack.gathered_kept)
    backward = table.reductions * (reduced + np.where(regathered, gathered, 0.0))
    forward = table.reductions * reduced
    products = table.seconds[:, BLOCK, :, PRODUCTS] * stack.value("products")
    if stack.tensor_overlap:
        # Half of a layer's backward products are weight gradients, which wait for nobody.
        backward = np.maximum(0.0, backward - 0.5 * products[:, Phase.BACKWARD])
    # In as many pieces as there are ranks: the first waits for nothing to hide behind.
    pieces = strategies.overlap_tensor | (("tensor" in stack.overlap) & _linked(strategies, network))
    lost = stack.value("interference")
    forward, backward, again = (
        np.where(pieces, _in_pieces(exchange, products[:, phase], ranks, lost), exchange)
        for exchange, phase in ((forward, Phase.FORWARD), (backward, Phase.BACKWARD), (again, Phase.RECOMPUTE))
    )
    none = np.zeros_like(forward)
    # The embedding's rows come from all ranks; the head's input gradient is a sum over them.
    return np.stack([ends, forward, none]), np.stack([none, backward + again, ends])


def _linked(strategies: Strategies, network: _Network) -> Booleans:
    """Whether tensor ranks read each other's memory over links of their own: what a framework's overlap is made for
    (Transformer Engine's userbuffers, torch's symmetric memory). PCIe switches, bridges of two cards and other nodes
    are not; of bridges nobody says, and four rows on A100 with them are nearer so."""
    networks = network.hardware.networks
    nearest = networks[0] if networks else None
    linked = nearest is None or (nearest.topology != "tree" and nearest.devices != BRIDGED)
    return linked & np.asarray(crossed(networks, strategies.tensor, 1.0) <= 0)


def _in_pieces(exchange: Floats, products: Floats, ranks: Floats, lost: float) -> Floats:
    """What a layer loses to an exchange that runs in pieces beside the products that it feeds or that feed it.

    `lost`: of what is hidden, the share by which the products take longer all the same.
    """
    exposed = np.maximum(exchange / ranks, exchange - products)
    return np.asarray(exposed + lost * (exchange - exposed), dtype=np.float64)


def _context(strategies: Strategies, table: Pieces, network: _Network, stack: Stack) -> tuple[Floats, Floats]:
    parts = strategies.context
    # All pass on at once, so the slowest link of the ring sets the pace.
    message = network.seconds("point-to-point", table.ring_bytes, parts, strategies.tensor)
    step = table.seconds[:, BLOCK, :, ATTENTION] * stack.value("attention") / parts[:, None]
    forward = (parts - 1) * np.maximum(0.0, message - step[:, Phase.FORWARD])
    # Keys and values go round, and their gradients behind them.
    backward = (parts - 1) * np.maximum(0.0, 2 * message - step[:, Phase.BACKWARD])
    again = np.where(step[:, Phase.RECOMPUTE] > 0, forward, 0.0)
    return _in_blocks(forward), _in_blocks(backward + again)


def _expert(strategies: Strategies, table: Pieces, network: _Network, stack: Stack) -> tuple[Floats, Floats]:
    one = _dispatch(strategies, table, network)
    # Those who share an expert gather what each of them was sent, and what they make of it is summed and parted again.
    shared = network.seconds("all-gather", table.shared_bytes, strategies.sharing_experts, 1.0)
    one = one + (shared + network.seconds("reduce-scatter", table.shared_bytes, strategies.sharing_experts, 1.0)) / 2
    forward, backward = 2 * one, (2 + table.dispatches_again) * one
    # The other micro-batch's kernels of a layer are there to hide behind.
    kernels = table.seconds[:, BLOCK].sum(axis=2)
    hidden = (strategies.overlap_experts | ("experts" in stack.overlap)) * (1.0 - stack.value("interference"))
    forward -= hidden * np.minimum(forward, kernels[:, Phase.FORWARD])
    backward -= hidden * np.minimum(backward, kernels[:, Phase.BACKWARD] + kernels[:, Phase.RECOMPUTE])
    return _in_blocks(forward), _in_blocks(backward)


def _dispatch(strategies: Strategies, table: Pieces, network: _Network) -> Floats:
    """Tokens to their experts, or back: a copy for each expert, or one for each node, sent on to its experts there.

    Both ways of a token through the network at once, a node's own links and those between nodes: the slower counts.
    """
    size, stride = strategies.expert, strategies.sharing_experts
    whole = network.seconds("all-to-all", table.dispatch_bytes, size, stride)
    if not strategies.once_a_node.any():
        return whole
    nodes = islands(network.hardware.networks, size, stride)
    between = network.seconds("all-to-all", table.dispatch_bytes * _nodes_a_token(table, nodes), size, stride)
    inside = network.seconds("all-to-all", table.dispatch_bytes, np.maximum(1.0, size / nodes), stride)
    once = np.where(nodes > 1, np.maximum(between, inside), whole)
    return np.where(strategies.once_a_node, np.minimum(whole, once), whole)


def _nodes_a_token(table: Pieces, nodes: Floats) -> Floats:
    """Nodes that a token goes to, in the mean, for each of its experts.

    The chance that none of k experts is on a node is that of k draws without putting back. Groups of experts that are
    chosen first are whole nodes at best.
    """
    experts, chosen = table.experts, np.maximum(1.0, table.experts_per_token)
    here = experts / nodes
    missed = np.ones_like(nodes)
    for draw in range(int(np.max(chosen, initial=0.0))):
        left = np.maximum(0.0, experts - here - draw) / np.maximum(1.0, experts - draw)
        missed = missed * np.where(draw < chosen, left, 1.0)
    return np.minimum(nodes * (1.0 - missed), np.minimum(table.groups_kept, chosen)) / chosen


def _gradients(strategies: Strategies, table: Pieces, network: _Network, stack: Stack) -> tuple[Floats, Floats, Floats]:
    """Reductions after each micro-batch and after the last, and the gather of weights after the update."""
    zero, none = strategies.zero, np.zeros((3, len(strategies)))
    summed = _over_replicas(strategies, table, network)
    scattered = _scattered(strategies, table, network) + _across_shards(strategies, table, network)
    reduction = np.where(zero == 0, summed, scattered)
    always = _reduces_each(strategies, stack)
    each = np.where(always, reduction, none)
    # Whole weights are on every device up to stage 2; each has updated its shard of them.
    sent = _over_shards(strategies, table, network, "all-gather", strategies.weight_bytes, trained=True)
    ends = np.where(strategies.pipeline > 1, np.maximum(sent[EMBEDDING], sent[HEAD]), sent[EMBEDDING] + sent[HEAD])
    layers = np.ceil(table.layers / strategies.pipeline)
    after = np.where((zero == 1) | (zero == 2), layers * sent[BLOCK] + ends, 0.0)
    return each, np.where(always, none, reduction), after


def _payloads(strategies: Strategies, table: Pieces, each: Floats, *, trained: bool = True) -> tuple[Floats, Floats]:
    """Bytes of the dense parameters by part, and of a layer's experts: of what is trained, or of all.

    `each`: of a parameter, for all parts or by part.
    """
    dense = (table.trained if trained else table.parameters).T.copy()
    twice, experts = (
        (trained_twice(table), table.trained_experts) if trained else (table.tied_parameters, table.expert_parameters)
    )
    # One stage that has both uses of a tied matrix sends it once, with the embedding: its gradient is complete there.
    dense[HEAD] -= np.where(strategies.pipeline > 1, 0.0, twice)
    return dense * each, experts * (each[BLOCK] if each.ndim > 1 else each)


def _over_shards(
    strategies: Strategies, table: Pieces, network: _Network, kind: Collective, each: Floats, *, trained: bool
) -> Floats:
    dense, experts = _payloads(strategies, table, each, trained=trained)
    found = network.seconds(kind, dense, strategies.shard, strategies.tensor)
    ranks = np.maximum(1.0, strategies.shard / strategies.dealt)
    return found + _in_blocks(network.seconds(kind, experts, ranks, strategies.tensor * strategies.dealt))


def _scattered(strategies: Strategies, table: Pieces, network: _Network) -> Floats:
    """Gradients to the ranks that hold their shard: unit by unit where weights are sharded too, else in buckets."""
    whole = _over_shards(strategies, table, network, "reduce-scatter", strategies.gradient_bytes, trained=True)
    if not network.bucket_bytes:
        return whole
    dense, experts = _payloads(strategies, table, strategies.gradient_bytes)
    found = network.in_buckets("reduce-scatter", dense, strategies.shard, strategies.tensor)
    ranks, apart = np.maximum(1.0, strategies.shard / strategies.dealt), strategies.tensor * strategies.dealt
    found = found + _in_blocks(network.in_buckets("reduce-scatter", experts, ranks, apart))
    return np.where(strategies.zero == 3, whole, found)


def _over_replicas(strategies: Strategies, table: Pieces, network: _Network) -> Floats:
    dense, experts = _payloads(strategies, table, strategies.gradient_bytes)
    found = network.in_buckets("all-reduce", dense, strategies.replicas, strategies.tensor)
    ranks = strategies.replicas / strategies.dealt
    return found + _in_blocks(network.in_buckets("all-reduce", experts, ranks, strategies.tensor * strategies.dealt))


def _across_shards(strategies: Strategies, table: Pieces, network: _Network) -> Floats:
    """Hybrid sharding: each shard is summed over the groups that hold it."""
    dense, experts = _payloads(strategies, table, strategies.gradient_bytes)
    replicas, shard, tensor = strategies.replicas, strategies.shard, strategies.tensor
    found = network.seconds("all-reduce", dense / shard, replicas / shard, tensor * shard)
    # Expert ranks that reach beyond a shard group hold different experts: fewer groups have the same.
    reach = np.maximum(shard, strategies.dealt)
    shards = reach / strategies.dealt
    return found + _in_blocks(network.seconds("all-reduce", experts / shards, replicas / reach, tensor * reach))
