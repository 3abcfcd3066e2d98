"""The rule `dataflow`: how the reference offload trainer (als244/ml_dataflow) configures itself from two memory caps.

The facts are those of its documents, its recorded runs and its sources (none of its code is here); the aim is to be
compared with it and to repeat its runs. It takes chunks of fixed size, as many layers' weights, gradients and
activations on the device as fit, and for the activations that leave the richest save levels that the host holds. Each
pair of a layer and a chunk is one *activation*; they are numbered in forward order, layer by layer, and the last ones
never leave the device.

`variants` are its versions. With `RECORDED` the recorded runs of July 2025 come out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from flopwise.base.errors import DoesNotFit, FlopwiseError
from flopwise.base.units import show_bytes
from flopwise.plan.device.explain import notes
from flopwise.plan.device.forecast import forecast
from flopwise.records.plan import Plan, Planned, Residency
from flopwise.references.dataflow.sizes import (
    GIB,
    MOST,
    Chunks,
    LevelBytes,
    block_bytes,
    check_model,
    chunk_forward_flops,
    chunks_of,
    device_base,
    half_up,
    host_base,
    level_bytes,
    link_bytes_per_s,
    parameters,
    partition,
    peak_flops,
    refused,
    sequence_flops,
)
from flopwise.references.dataflow.variants import LONGER_STEP, Variant, variant_of
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import CappedSetup
from flopwise.work.checks import check_positive
from flopwise.work.op import Convention
from flopwise.work.parameters import ENDS
from flopwise.work.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Saves:
    """Activations that leave, by the level that they are meant to be saved at."""

    full: int
    attention: int
    context: int
    full_per_window: int = 0
    """Full ones of each `activation_slots` successive ones that leave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleChoice(Saves):
    """All that the rule decides."""

    variant: Variant
    layers: int
    sequence_tokens: int
    chunk_tokens: int
    chunks_per_sequence: int
    chunks_per_round: int
    head_chunk_tokens: int
    param_blocks: int
    """Layers whose weights the device has room for."""
    grad_blocks: int
    optimizer_blocks: int
    """Layers whose moments fit where activations were, when the step's rounds are over."""
    activation_slots: int
    """Activations that the device has room for, each at the full level."""
    home_activations: int
    """Those that leave for the host: the first ones."""
    placed_full: int
    """Full ones that its placement finds a place for; the others of `full` are saved at level attention."""
    rounds_per_step: int
    seqs_per_step: int
    used_host_bytes: int
    """By `placed_full`, as it records."""
    used_device_bytes: int
    """What is allocated, the pad not included; recorded figures are up to 80 kB above, for alignment."""
    base_bytes: dict[str, int] = field(repr=False)
    """Device memory set aside before blocks and activations, by name."""


def configure(
    model: Transformer,
    hardware: Hardware,
    *,
    sequence_tokens: int,
    device_bytes: int,
    host_bytes: int,
    variant: Variant,
) -> RuleChoice:
    """What the rule decides for a model and two caps; caps that it refuses are a `FlopwiseError` with exit code 1."""
    check_model(model)
    check_positive("a plan", sequence_tokens=sequence_tokens)
    chunks = chunks_of(model, hardware, sequence_tokens, variant)
    levels = level_bytes(model, chunks.tokens, variant.full_extra_bytes_per_token)
    base = device_base(model, hardware, chunks)
    device = partition(model, chunks, base, device_bytes, levels)
    home = model.layers * chunks.per_round - device.slots
    saves = _saves(model, hardware, variant, chunks, levels, host_bytes=host_bytes, slots=device.slots)
    rounds = _rounds(model, hardware, variant, chunks)
    placed = _leaving(saves, variant, chunks.per_sequence, chunks.per_round, device.slots).count("f")
    return RuleChoice(
        variant=variant,
        layers=model.layers,
        sequence_tokens=sequence_tokens,
        chunk_tokens=chunks.tokens,
        chunks_per_sequence=chunks.per_sequence,
        chunks_per_round=chunks.per_round,
        head_chunk_tokens=chunks.head_tokens,
        param_blocks=device.params,
        grad_blocks=device.grads,
        optimizer_blocks=device.optimizer,
        activation_slots=device.slots,
        home_activations=home,
        **asdict(saves),
        placed_full=placed,
        rounds_per_step=rounds,
        seqs_per_step=rounds * chunks.sequences_per_round,
        used_host_bytes=sum(host_base(model, tokens_per_round=chunks.tokens_per_round).values())
        + placed * levels.full
        + (home - placed - saves.context) * levels.attention
        + saves.context * levels.context,
        used_device_bytes=device.used_bytes,
        base_bytes=base,
    )


def placement(configuration: RuleChoice, layers: int, *, as_run: bool = False) -> tuple[str, ...]:
    """The save level of every activation, for each layer a letter a chunk as `Plan.saves` has them.

    The last `activation_slots` stay (`F`). Of those that leave, `c` are the earliest chunks of sequences in all
    layers, whose attention is the cheapest to redo. Without any, each window of `activation_slots` has as many full
    ones, at its end and its beginning by turns, and what follows the last window has the rest; before the link
    rule, full and attention alternate. Numbers at each level are checked by recorded bytes; which layers the odd `c`
    fall to is our reading.

    The trainer loses full saves: with w windows it gives each ⌊full ÷ w⌋ and what is left over to what follows them,
    which may be fewer places. With `as_run` they are saved at level attention, as in its recorded runs; otherwise
    the last ones that leave become full until the numbers are those of the configuration.
    """
    total = layers * configuration.chunks_per_round
    told = configuration.full + configuration.attention + configuration.context
    if configuration.activation_slots + told != total:
        raise FlopwiseError(
            f"{configuration.activation_slots} activations that stay and {told} that leave are not {total}",
            why=f"there are {layers} layers of {configuration.chunks_per_round} chunks",
            hint="their numbers are full + attention + context + slots",
        )
    leaving = _leaving(
        configuration,
        configuration.variant,
        configuration.chunks_per_sequence,
        configuration.chunks_per_round,
        configuration.activation_slots,
    )
    if not as_run:
        lost = configuration.full - leaving.count("f")
        leaving = leaving[::-1].replace("a", "f", lost)[::-1]
    letters = leaving + "F" * configuration.activation_slots
    chunks = configuration.chunks_per_round
    return tuple(letters[start : start + chunks] for start in range(0, total, chunks))


def to_plan(
    configuration: RuleChoice,
    model: Transformer,
    hardware_name: str,
    device_bytes: int,
    host_bytes: int,
    *,
    as_run: bool = False,
) -> Plan:
    """The configuration as a plan: everything passes from the host and has a copy there, embedding and head stay.

    `as_run` leaves out the full saves that the trainer loses: see `placement`.
    """
    return Plan(
        model=model.name,
        hardware=hardware_name,
        device_memory_bytes=device_bytes,
        host_memory_bytes=host_bytes,
        sequence_tokens=configuration.sequence_tokens,
        chunk_tokens=configuration.chunk_tokens,
        chunks_per_round=configuration.chunks_per_round,
        rounds_per_step=configuration.rounds_per_step,
        head_chunk_tokens=configuration.head_chunk_tokens,
        attention="chunk",
        weights=_residency(configuration.param_blocks, model.layers),
        gradients=_residency(configuration.grad_blocks, model.layers),
        optimizer_state=Residency(blocks=0, passing=configuration.optimizer_blocks, ends=ENDS),
        activation_slots=configuration.activation_slots,
        saves=placement(configuration, model.layers, as_run=as_run),
        precision="bf16",
        update_place="device",
        update_when="end",
        fetch="at once",
        host_copies=True,
        rule=f"dataflow {configuration.variant.name}",
    )


def _residency(blocks: int, layers: int) -> Residency:
    if blocks == layers:
        return Residency(blocks=layers, passing=0, ends=ENDS)
    return Residency(blocks=0, passing=blocks, ends=ENDS)


def _saves(
    model: Transformer,
    hardware: Hardware,
    variant: Variant,
    chunks: Chunks,
    levels: LevelBytes,
    *,
    host_bytes: int,
    slots: int,
) -> Saves:
    """Levels by what the host holds, then by what the link carries; numbers of those that leave."""
    total = model.layers * chunks.per_round
    home = total - slots
    used = sum(host_base(model, tokens_per_round=chunks.tokens_per_round).values())
    counted = total if variant.count_all_activations else home
    spare = host_bytes - used - levels.context * counted
    if spare < 0:
        raise refused("host", host_bytes, host_bytes - spare, f"all blocks and {counted} activations at level context")
    attention = min(spare // (levels.attention - levels.context), counted)
    spare -= attention * (levels.attention - levels.context)
    full = min(spare // (levels.full - levels.attention), attention, home)
    attention = min(attention, home - full)
    windows = home // slots
    saves = Saves(
        full=full,
        attention=attention,
        context=home - full - attention,
        full_per_window=full // windows if windows else 0,
    )
    if variant.link_rule and windows and saves.context == 0 and chunks.per_sequence == 1:
        return _unclog(model, hardware, variant, chunks=chunks, levels=levels, saves=saves, slots=slots)
    return saves


def _unclog(
    model: Transformer,
    hardware: Hardware,
    variant: Variant,
    *,
    chunks: Chunks,
    levels: LevelBytes,
    saves: Saves,
    slots: int,
) -> Saves:
    """No more full saves than the link carries while the device computes a window of `slots` activations."""
    home = saves.full + saves.attention
    windows, rest = divmod(home, slots)
    flops = slots * chunk_forward_flops(model, sequences=chunks.sequences, tokens=chunks.sequence_tokens)
    window_s = flops / (variant.compute_efficiency * peak_flops(hardware))
    most_bytes = window_s * variant.link_efficiency * link_bytes_per_s(hardware)
    spare = most_bytes - slots * levels.attention
    room = int(spare // (levels.full - levels.attention))
    if spare < 0:
        full, per_window = 0, 0
    elif room == 0:
        full, per_window = min(saves.full, rest), 0
    elif home - (slots - room) * windows < saves.full:
        full, per_window = home - (slots - room) * windows, room
    else:
        full, per_window = saves.full, saves.full_per_window
    return Saves(full=full, attention=home - full, context=0, full_per_window=per_window)


def _leaving(saves: Saves, variant: Variant, per_sequence: int, per_round: int, slots: int) -> str:
    """Letters of the activations that leave, in forward order, as the trainer places them."""
    home = saves.full + saves.attention + saves.context
    if saves.context:
        # The sort keeps forward order among chunks of the same place in their sequence.
        earliest = sorted(range(home), key=lambda index: index % per_round % per_sequence)
        chosen = set(earliest[: saves.context])
        return "".join("c" if index in chosen else "a" for index in range(home))
    if not variant.link_rule:
        both = min(saves.full, saves.attention)
        return "fa" * both + "f" * (saves.full - both) + "a" * (saves.attention - both)
    windows = home // slots
    letters, left = "", saves.full
    for window in range(windows):
        full = min(saves.full_per_window, slots)
        # Where sequences are several chunks, the attention share is a quotient of its own and may crowd out full ones.
        share = slots - full if per_sequence == 1 else min(saves.attention // windows, slots)
        if window % 2:
            letters += "f" * full + "a" * (slots - full)
        else:
            full = min(full, slots - share)
            letters += "a" * share + "f" * full + "a" * (slots - share - full)
        left -= full
    rest = home - len(letters)
    return letters + "f" * min(left, rest) + "a" * (rest - min(left, rest))


def _rounds(model: Transformer, hardware: Hardware, variant: Variant, chunks: Chunks) -> int:
    """Rounds of a step: for a time, or so many that moving the weights once is a small share."""
    flops = chunks.sequences_per_round * sequence_flops(model, chunks.sequence_tokens)
    round_s = flops / (variant.compute_efficiency * peak_flops(hardware))
    if variant.overhead is not None:
        moved_s = 2 * model.layers * block_bytes(model) / (variant.link_efficiency * link_bytes_per_s(hardware))
        target_s = moved_s / variant.overhead
    else:
        assert variant.target_s is not None
        # It goes by the name of a size, of which it knows 1, 8, 15 and 32 (10⁹ parameters).
        named_8b = half_up(parameters(model) / 1e9) == 8
        target_s = variant.target_s * (LONGER_STEP if named_8b else 1)
    return min(max(half_up(target_s / round_s), 1), MOST)


def apply_rule(setup: CappedSetup, variant: str, *, convention: Convention = "causal") -> Planned:
    """What the reference's rule chooses for the same caps, simulated as it runs."""
    model = setup.model
    if not isinstance(model, Transformer):
        raise FlopwiseError(f"the rule dataflow is for transformers, not {model.name}", hint="--rule flopwise")
    if setup.batch_sequences is not None or setup.clip:
        given, options = ("clipping", "--clip") if setup.clip else ("a batch", "--batch and --batch-tokens")
        raise FlopwiseError(
            f"{given} beside --rule dataflow", why="the rule decides it itself", hint=f"without {options}"
        )
    if (setup.formats.name, setup.optimizer) != ("bf16", "adamw"):
        raise FlopwiseError(
            "the rule dataflow plans AdamW with everything in bf16",
            why="it knows no other formats",
            hint="--precision bf16 --optimizer adamw",
        )
    configuration = _configure(setup, model, variant)
    name = setup.hardware_name or setup.hardware.name
    plan = to_plan(configuration, model, name, setup.device_cap_bytes, setup.host_cap_bytes)
    device, host = show_bytes(configuration.used_device_bytes), show_bytes(configuration.used_host_bytes)
    return Planned(
        model=model.name,
        plan=plan,
        forecast=forecast(plan, model, setup.hardware, convention=convention),
        reasons={"rule": f"dataflow as of {variant_of(variant).date}; nothing was searched"},
        notes=(
            *notes(model, setup.hardware, setup.sequence_tokens),
            f"the rule itself counts {device} of device and {host} of host memory",
        ),
    )


def _configure(setup: CappedSetup, model: Transformer, variant: str) -> RuleChoice:
    try:
        return configure(
            model,
            setup.hardware,
            sequence_tokens=setup.sequence_tokens,
            device_bytes=setup.device_cap_bytes,
            host_bytes=setup.host_cap_bytes,
            variant=variant_of(variant),
        )
    except DoesNotFit as error:
        hinted = -(-(error.needed_bytes or 0) // GIB) * GIB
        if error.place == "device" and hinted > setup.hardware.device.dram.size_bytes.value:
            # More than the device has is no hint.
            error.hint = "a shorter --seq, or --rule flopwise"
        raise
