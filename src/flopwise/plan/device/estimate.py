"""Seconds and bytes of very many plans at once, near enough to choose those that are worth a simulation.

A round is a forward, the head and a backward. In each the device computes, and the link moves what that phase needs;
the phase takes as long as the longer of the two. What the estimate leaves out (the order of copies within a phase, the
first and last of them) is the simulator's to tell.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flopwise.plan.device.levels import Curve, curve_of
from flopwise.plan.program.sizes import Sizes, State, largest_piece, sizes_of, slot_bytes, working_bytes
from flopwise.predict.simulate.tasks import TaskSeconds
from flopwise.records.plan import Plan, Residency
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import CappedSetup
from flopwise.setup.trained import trains_partly
from flopwise.work.model import Model
from flopwise.work.optimizers import Optimizer
from flopwise.work.parameters import ENDS, Place

Floats = NDArray[np.float64]

ENDS_STAY, STATE_PASSES, GRADIENTS_SHARE, WEIGHTS_SHARE = range(4)
"""What of embedding and head stays: everything; all but the optimizer state; weights alone, the gradients taking turns
in one slot; nothing, the weights taking turns too."""

LINK_WEIGHT = 0.005
"""What a second of copying counts even where it is hidden: of two plans equally fast, the one that moves less."""

SLOT_WEIGHT = 0.002
"""What a step counts more, by its slots for activations: of two plans equally fast, the one with room for surprises."""

LEAST_SLOTS = 2
"""One (layer, chunk) at work, one on its way."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Residencies to try: arrays of one length."""

    weights: Floats
    """Blocks that stay."""
    gradients: Floats
    optimizer: Floats
    ends: Floats
    passing: Floats
    """Slots through which weights and gradients pass."""
    updating: Floats
    """Slots through which optimizer state passes: with one, each block waits until the one before has left."""
    slots: Floats
    """Slots for activations at most. The last ones of a round stay in them; what they leave of the device is for those
    that stay at lower levels."""
    budget: Floats
    """Of what the save levels could take: from the fewest bytes (0) to all (1), or what there is room for."""

    def at(self, index: int) -> dict[str, float]:
        """One of them."""
        return {field.name: float(getattr(self, field.name)[index]) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of each choice."""

    token_s: Floats
    """Seconds a token; infinite where it does not fit."""
    slots: Floats
    level_bytes: Floats
    """Budget of all (layer, chunk) that are not in a slot."""
    room_bytes: Floats
    """That state and slots leave of the device."""


class _Activations(NamedTuple):
    """Of each choice what becomes of the activations."""

    slots: Floats
    leaving: Floats
    """Sequences in a layer that are in no slot."""
    levels: Floats
    """Bytes of those."""
    on_device: Floats
    """Of which on the device."""
    bytes: Floats
    """On the device, slots and all."""
    fits: NDArray[np.bool_]


class Shape:
    """One way to cut the batch, and where the update runs: all that the residencies do not change, costed once."""

    def __init__(self, plan: Plan, model: Model, hardware: Hardware, like: Shape | None = None) -> None:
        self.plan, self.hardware = plan, hardware
        self.costs: TaskSeconds = like.costs if like else TaskSeconds(plan, model, hardware)
        self.sizes: Sizes = sizes_of(model, plan.sequence_tokens, self.costs.formats, plan.optimizer)
        self.curve: Curve = like.curve if like else curve_of(plan, self.sizes, self.costs)
        self.block: State = self.sizes.mean_block
        self.reached = plan.layers - self.sizes.first_reached
        """Layers that backward comes to: the others keep nothing for it."""
        self.pairs = self.reached * plan.chunks_per_round
        self.sequences = self.pairs / plan.chunks_per_sequence
        """Sequences in a layer: what the curve is of."""
        self.slot = slot_bytes(self.sizes, plan.tokens_of(0))
        self.base = sum(working_bytes(self.sizes, plan).values())
        ends = (self.sizes.embedding, self.sizes.head)
        self.end_piece = max(largest_piece(state) for state in ends)
        self.place: Place = plan.update_place
        self.least_slots = LEAST_SLOTS
        self._seconds()
        link = hardware.link
        self.one_way = link.bandwidth_bytes_per_s.value if link else 0.0
        both = link.both_ways_bytes_per_s if link else None
        self.both_ways = both.value if both else self.one_way

    def variant(self, rounds: int, place: Place) -> Shape:
        """The same with another number of rounds, or another place for the update."""
        other = copy(self)
        other.plan, other.place = replace(self.plan, rounds_per_step=rounds, update_place=place), place
        other.update_s = self.costs.update_s(self.costs.work.trained_parameters, on_host=place == "host")
        return other

    def _seconds(self) -> None:
        plan, costs = self.plan, self.costs
        self.forward_s = self.backward_s = self.head_s = 0.0
        cut = plan.chunks_per_sequence > 1 and plan.attention == "sequence"
        reached = range(self.sizes.first_reached, plan.layers)
        # Beside adapters, blocks that have none are of a kind of their own, whose matrices have no gradients.
        frozen = frozenset[int]() if getattr(costs.model, "adapters", None) else self.sizes.frozen_layers
        frozen_share = sum(layer in frozen for layer in reached) / len(reached)
        for chunk in range(plan.chunks_per_round):
            group = costs.groups(plan.tokens_of(chunk))
            part = chunk % plan.chunks_per_sequence
            attention = [0.0, 0.0] if cut else [costs.attention_s(part, way) for way in ("forward", "backward")]
            again = group.recompute["full"]
            self.forward_s += group.forward["before"] + group.forward["after"] + attention[0]
            self.backward_s += group.backward["before"] + group.backward["after"] + attention[1]
            self.backward_s += again["before"] + again["after"]
            self.backward_s -= frozen_share * (group.wgrad["before"] + group.wgrad["after"])
            self.head_s += group.forward["embed"] + group.backward["embed"]
            pieces, rest = divmod(plan.tokens_of(chunk), plan.head_chunk_tokens)
            for tokens, count in ((plan.head_chunk_tokens, pieces), (rest, 1)):
                if tokens and count:
                    self.head_s += count * costs.head_s(tokens)
        if cut:
            copies = plan.chunks_per_round / plan.chunks_per_sequence
            self.forward_s += copies * costs.attention_s(None, "forward")
            self.backward_s += copies * costs.attention_s(None, "backward")
        self.forward_s *= plan.layers
        self.backward_s *= self.reached
        self.update_s = costs.update_s(costs.work.trained_parameters, on_host=plan.update_place == "host")

    # -- bytes ----------------------------------------------------------------------------------------------------

    def estimate(self, choice: Choice, device_cap: int, host_cap: int) -> Estimate:
        """Time and memory of every choice under two caps."""
        held = self.state_on_host(choice)
        fixed = self.state_on_device(choice, self.least_slots * self.slot)
        if self.plan.update_when == "end":
            # All activations lend their room to what passes then, where there is more of them than the fewest.
            lending = self._lay_out(choice, self.state_on_device(choice, np.inf), held, device_cap, host_cap).bytes
            fixed = np.minimum(fixed, self.state_on_device(choice, lending))
        laid = self._lay_out(choice, fixed, held, device_cap, host_cap)
        slots, leaving, levels, on_device, fits = laid.slots, laid.leaving, laid.levels, laid.on_device, laid.fits
        safe = np.maximum(leaving, 1e-9)
        again_s = leaving * self.curve.seconds_at(levels / safe)
        seconds = self._step_s(choice, again_s, levels - on_device)
        seconds += self.plan.rounds_per_step * self._unevenness_s(leaving, levels, on_device, slots)
        count = np.maximum(1.0, leaving * self.plan.chunks_per_sequence)
        share = np.minimum(1.0, count / self.pairs) * (levels - on_device) / np.maximum(levels, 1.0)
        seconds += share * self._behind_state_s(choice, again_s, levels / count, slots)
        seconds *= 1 + SLOT_WEIGHT / slots
        tokens = self.plan.tokens_per_step
        return Estimate(
            token_s=np.where(fits, seconds / tokens, np.inf),
            slots=slots,
            level_bytes=levels,
            room_bytes=np.maximum(0.0, device_cap - fixed - slots * self.slot),
        )

    def _lay_out(self, choice: Choice, fixed: Floats, held: Floats, device_cap: int, host_cap: int) -> _Activations:
        """Where activations go beside what is fixed on the device and held by the host."""
        slots = np.floor((device_cap - fixed) / self.slot)
        least_slots = min(self.least_slots, self.pairs)
        fits = slots >= least_slots
        slots = np.clip(np.minimum(slots, choice.slots), least_slots, self.pairs)
        leaving = (self.pairs - slots) / self.plan.chunks_per_sequence
        room = np.maximum(0.0, device_cap - fixed - slots * self.slot)
        least, most = leaving * self.curve.least_bytes, leaving * self.curve.most_bytes
        allowed = room + np.maximum(0.0, host_cap - held)
        fits &= (host_cap >= held) & (allowed >= least)
        levels = np.minimum(least + choice.budget * (most - least), np.maximum(allowed, least))
        on_device = np.minimum(room, levels)
        return _Activations(slots, leaving, levels, on_device, slots * self.slot + on_device, fits)

    def _unevenness_s(self, leaving: Floats, levels: Floats, on_device: Floats, slots: Floats) -> Floats:
        """Seconds a round that few slots cost: one full save takes longer over the link than a chunk computes.

        Slots smooth that over; with two of them nothing does.
        """
        if not self.one_way:
            return np.zeros_like(slots)
        chunk = self.plan.tokens_of(0)
        full, lower = (self.sizes.saved[name] * chunk for name in ("full", "attention"))
        count = np.maximum(0.0, levels - on_device - leaving * self.plan.chunks_per_sequence * lower) / (full - lower)
        over = sum(
            max(0.0, full / self.both_ways - seconds / self.pairs) for seconds in (self.forward_s, self.backward_s)
        )
        return np.asarray(count * over / np.maximum(1.0, slots - 1.0), dtype=np.float64)

    def _behind_state_s(self, choice: Choice, again_s: Floats, each: Floats, slots: Floats) -> Floats:
        """Seconds a step that backward waits for activations, of `each` bytes, while a block's state is on its way.

        A copy is not interrupted: what is in the slots by then is all that can be computed until the next have come.
        """
        if not self.one_way:
            return np.zeros_like(slots)
        buffered = (slots - 1.0) * (self.backward_s + again_s) / self.pairs
        layers, block, rounds = self.plan.layers, self.block, self.plan.rounds_per_step

        def behind(passing: Floats, size: float) -> Floats:
            waits = np.maximum(0.0, (size + each) / self.both_ways - buffered)
            return np.asarray(passing * waits, dtype=np.float64)

        found = rounds * behind(self._passes(choice.weights, choice.passing)[0], block.weights)
        found += (rounds - 1) * behind(self._passes(choice.gradients, choice.passing)[0], block.gradients)
        if self.place == "device" and self.plan.update_when == "backward":
            found += behind(layers - choice.optimizer, block.optimizer)
        return found

    def _passes(self, stays: Floats, slots: Floats) -> tuple[Floats, Floats]:
        """Blocks that pass, and the slots that they pass through."""
        passing = np.where(stays + slots >= self.plan.layers, 0.0, self.plan.layers - stays)
        return passing, np.minimum(slots, self.plan.layers - stays)

    def _gradient_slots(self, passing: Floats) -> Floats:
        """Slots of gradients: where each is used up before the next is made, one serves all."""
        plan = self.plan
        used_up = plan.rounds_per_step == 1 and plan.update_when == "backward" and self.place == "device"
        return np.ones_like(passing) if used_up else passing

    def state_on_device(self, choice: Choice, activations: Floats | float) -> Floats:
        """Bytes of everything but activations, of which there are so many to lend their room at the end of a step."""
        sizes, block, largest = self.sizes, self.block, self.sizes.largest_block
        embedding, head = sizes.embedding, sizes.head
        shared = max(embedding.weights, head.weights), max(embedding.gradients, head.gradients)
        found = float(self.base) + choice.weights * block.weights + choice.gradients * block.gradients
        found += self._passes(choice.weights, choice.passing)[1] * largest.weights
        found += self._passes(choice.gradients, self._gradient_slots(choice.passing))[1] * largest.gradients
        found += np.where(choice.ends >= WEIGHTS_SHARE, shared[0], embedding.weights + head.weights)
        found += np.where(choice.ends >= GRADIENTS_SHARE, shared[1], embedding.gradients + head.gradients)
        if self.place == "host":
            return np.asarray(found, dtype=np.float64)
        found += choice.optimizer * block.optimizer
        found += np.where(choice.ends >= STATE_PASSES, 0.0, embedding.optimizer + head.optimizer)
        passing = self.passing_piece(choice)
        # At the end of a step the state passes where activations were, as far as they are large enough.
        lent = activations if self.plan.update_when == "end" else 0.0
        found += np.maximum(0.0, choice.updating - np.floor(lent / np.maximum(1.0, passing))) * passing
        return np.asarray(found, dtype=np.float64)

    def passing_piece(self, choice: Choice) -> Floats:
        """Bytes of a slot for optimizer state; 0 where none passes."""
        of_ends = np.where(choice.ends >= STATE_PASSES, self.end_piece, 0.0)
        largest = max(self.sizes.largest_block.optimizer, self.end_piece)
        return np.where(choice.optimizer < self.plan.layers, largest, of_ends)

    def state_on_host(self, choice: Choice) -> Floats:
        sizes, block, layers = self.sizes, self.block, self.plan.layers
        embedding, head = sizes.embedding, sizes.head
        everything = layers * block.total + embedding.total + head.total
        if self.place == "host":
            return np.full_like(choice.weights, float(everything))
        found = self._passes(choice.weights, choice.passing)[0] * block.weights
        found += (layers - choice.optimizer) * block.optimizer
        found += np.where(choice.ends >= WEIGHTS_SHARE, embedding.weights + head.weights, 0.0)
        found += np.where(choice.ends >= STATE_PASSES, embedding.optimizer + head.optimizer, 0.0)
        if self.plan.rounds_per_step > 1 or self.plan.update_when == "end":
            found += self._passes(choice.gradients, choice.passing)[0] * block.gradients
            found += np.where(choice.ends >= GRADIENTS_SHARE, embedding.gradients + head.gradients, 0.0)
        return np.asarray(found, dtype=np.float64)

    # -- seconds --------------------------------------------------------------------------------------------------

    def _link_s(self, inward: Floats, outward: Floats) -> Floats:
        """Time of two flows over the link that begin together."""
        low, high = np.minimum(inward, outward), np.maximum(inward, outward)
        if not self.one_way:
            return np.where(high > 0, np.inf, 0.0)
        return np.asarray(low / self.both_ways + (high - low) / self.one_way, dtype=np.float64)

    def _longer(self, compute_s: Floats | float, link_s: Floats) -> Floats:
        """A phase's time, and of two that are equally long the one that moves less is preferred."""
        return np.asarray(np.maximum(compute_s, link_s) + LINK_WEIGHT * link_s, dtype=np.float64)

    def _step_s(self, choice: Choice, again_s: Floats, moved: Floats) -> Floats:
        """A step: its rounds, and in the last one the update."""
        sizes, block, rounds = self.sizes, self.block, self.plan.rounds_per_step
        embedding, head = sizes.embedding, sizes.head
        passing, through = self._passes(choice.weights, choice.passing)
        weights_in = np.maximum(0.0, passing - through) * block.weights
        ends_in = np.where(choice.ends >= WEIGHTS_SHARE, embedding.weights + head.weights, 0.0)
        forward = self._longer(self.forward_s, self._link_s(weights_in + ends_in, moved)) + self.head_s
        gradients = self._passes(choice.gradients, choice.passing)[0] * float(block.gradients)
        gradients += np.where(choice.ends >= GRADIENTS_SHARE, embedding.gradients + head.gradients, 0.0)
        inward, nothing = weights_in + moved, np.zeros_like(moved)

        def backward(*, first: bool, last: bool) -> Floats:
            more_in = nothing if first else gradients
            # Before an update at the end even the last round's gradients leave.
            kept = last and self.plan.update_when == "backward"
            return self._backward_s(choice, again_s, inward + more_in, nothing if kept else gradients, last=last)

        if rounds == 1:
            return np.asarray(forward + backward(first=True, last=True), dtype=np.float64)
        some = backward(first=True, last=False) + backward(first=False, last=True)
        between = (rounds - 2) * backward(first=False, last=False) if rounds > 2 else 0.0
        return np.asarray(rounds * forward + some + between, dtype=np.float64)

    def _backward_s(self, choice: Choice, again_s: Floats, inward: Floats, outward: Floats, *, last: bool) -> Floats:
        compute = self.backward_s + again_s
        if not last:
            return self._longer(compute, self._link_s(inward, outward))
        sizes, block, layers = self.sizes, self.block, self.plan.layers
        embedding, head = sizes.embedding, sizes.head
        # What is updated last has nothing left to hide behind: the embedding, or the matrix that it shares.
        last_end = embedding if embedding.parameters else head
        if self.place == "host":
            outward = outward + layers * block.gradients + embedding.gradients + head.gradients
            stay = choice.weights * block.weights + embedding.weights + head.weights
            behind = last_end.parameters / self.costs.work.parameters * self.update_s
            behind += (last_end.gradients + last_end.weights) / max(self.one_way, 1.0)
            return self._longer(np.maximum(compute, self.update_s), self._link_s(inward + stay, outward)) + behind
        ends = np.where(choice.ends >= STATE_PASSES, embedding.optimizer + head.optimizer, 0.0)
        state = (layers - choice.optimizer) * block.optimizer + ends
        new = self._passes(choice.weights, choice.passing)[0] * block.trained
        new = new + np.where(choice.ends >= WEIGHTS_SHARE, embedding.trained + head.trained, 0.0)
        if self.plan.update_when == "end":
            return self._longer(compute, self._link_s(inward, outward)) + self._longer(
                self.update_s, self._link_s(state + new + outward, state + new)
            )
        moved = self._link_s(inward + state, outward + state + new)
        # State is needed when a block's backward is over, its weights when it begins: they leave behind one block's
        # state and come behind the next one's.
        blocks, slots = self._passes(choice.weights, choice.passing)
        behind_state = 2.0 * block.optimizer * (1 - choice.optimizer / layers)
        waits = self._in_turn_s(layers - choice.optimizer, choice.updating, 2.0 * block.optimizer, compute)
        waits += self._in_turn_s(blocks, slots, block.weights + block.trained + behind_state, compute, sooner=1)
        compute = compute + waits
        late = 2.0 * last_end.optimizer / max(self.one_way, 1.0)
        last_block = np.where(choice.optimizer > 0, 0.0, block.optimizer) + np.where(new > 0, block.trained, 0.0)
        exposed = np.where(choice.ends >= STATE_PASSES, late, last_block / max(self.one_way, 1.0))
        return self._longer(compute + self.update_s, moved) + exposed

    def _in_turn_s(
        self, passing: Floats, slots: Floats, size: Floats | float, compute_s: Floats, *, sooner: int = 0
    ) -> Floats:
        """Seconds that backward waits for blocks which pass, as a slot is free when the last one has left it.

        `size`: bytes there and back; `sooner`: blocks that there is less time for.
        """
        layers, there_and_back = self.plan.layers, size / max(self.both_ways, 1.0)
        # Of evenly spread blocks some follow so many layers behind the one before, and the others a layer more.
        least: Floats = np.floor(layers / np.maximum(passing, 1.0))
        behind_more = layers - passing * least

        def wait(gap: Floats) -> Floats:
            return np.maximum(0.0, there_and_back - (slots * gap - sooner) * compute_s / layers)

        found = (passing - behind_more) * wait(least) + behind_more * wait(least + 1)
        return np.asarray(np.where(passing > 0, found, 0.0), dtype=np.float64)

    # -- a plan ---------------------------------------------------------------------------------------------------

    def residencies(self, chosen: dict[str, float]) -> dict[str, Residency]:
        """The kinds of state as a plan tells them."""
        layers, ends = self.plan.layers, int(chosen["ends"])
        passing = int(chosen["passing"])
        gradient_slots = int(self._gradient_slots(np.array([chosen["passing"]]))[0])

        def kind(name: str, slots: int, *, ends_stay: bool) -> Residency:
            blocks = int(chosen[name])
            if blocks + slots >= layers and name != "optimizer":
                # With a slot for each of them none has to pass.
                blocks = layers
            return Residency(blocks=blocks, passing=min(slots, layers - blocks), ends=ENDS if ends_stay else ())

        return {
            "weights": kind("weights", passing, ends_stay=ends < WEIGHTS_SHARE),
            "gradients": kind("gradients", gradient_slots, ends_stay=ends < GRADIENTS_SHARE),
            "optimizer_state": Residency(blocks=0)
            if self.place == "host"
            else kind("optimizer", int(chosen["updating"]), ends_stay=ends < STATE_PASSES),
        }


UPDATED_ON_HOST: tuple[Optimizer, ...] = ("adamw", "lion", "sgd", "sgd-momentum")
"""Whose updates take a host's cores as long as their bytes take its memory. Nobody has measured the others there."""


def can_update_on_host(setup: CappedSetup) -> bool:
    """Whether the description says how fast the host is, and no frozen weights would come back with the others."""
    host = setup.hardware.host
    known = host is not None and host.update_bytes_per_s is not None
    return known and not trains_partly(setup.model) and setup.optimizer in UPDATED_ON_HOST


def update_places(setup: CappedSetup) -> tuple[Place, ...]:
    """Where an update may run."""
    return ("device", "host") if can_update_on_host(setup) else ("device",)
