"""A profile's verdicts in words: titles, clauses, and the paragraph that `why` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite

from flopwise.profile.explain.verdicts import CLAUSES, LIMITS
from flopwise.records.profile import METRIC, Clue, Profile, SourcedValue, Unit, Verdict
from flopwise.report.words import about, list_words, plain, safe, scale_figure, seconds

SLOWED = 0.1
"""Traced steps that take so much longer are told apart from others."""
FEWEST_WORDS, MOST_WORDS = 60, 140
"""Of the paragraph."""

MOST_WARNINGS, LONGEST_WARNING = 3, 200
"""That a sentence repeats, and signs of each."""

# -- figures and names -----------------------------------------------------------------------------------------------


def value_words(name: str, value: SourcedValue) -> str:
    """One of a profile's values, by its name."""
    return scale_figure(value.value, METRIC[name].unit)


def name_words(profile: Profile) -> str:
    """A profile's name on one line; there is always something."""
    return safe(profile.name).strip() or "(no name)"


def warning_words(warnings: Sequence[str]) -> str:
    """What is damaged or missing, on a line: figures of a part stand nowhere without it."""
    told = "; ".join(safe(warning, LONGEST_WARNING) for warning in warnings[:MOST_WARNINGS])
    more = f"; and {len(warnings) - MOST_WARNINGS:,} more" if len(warnings) > MOST_WARNINGS else ""
    return f"{told}{more}"


# -- verdicts --------------------------------------------------------------------------------------------------------


RELATIONS = {"<": "under", "<=": "no more than", ">": "over", ">=": "no less than"}


def title(verdict: Verdict) -> str:
    """Its name; of an invalid figure also the rule that is broken."""
    found = LIMITS[verdict.kind].title
    return f"{found}: {safe(verdict.detail)}" if verdict.kind == "invalid" and verdict.detail else found


def clause(evidence: Clue, *, bounded: bool = True) -> str:
    """`the device is busy 43 % of the step's wall time, under 70 %`, or without the bound."""
    figure = _figure(evidence.value, evidence.unit)
    template = CLAUSES.get(evidence.what)
    told = template.format(figure) if template else f"{safe(evidence.what)}: {figure}"
    if evidence.bound is None or not evidence.relation or not bounded:
        return told
    return f"{told}, {RELATIONS[evidence.relation]} {_figure(evidence.bound, evidence.unit)}"


def _figure(value: float, unit: Unit) -> str:
    return about(value) if unit == "share" and isfinite(value) else scale_figure(value, unit)


def evidence_words(verdict: Verdict) -> str:
    """All that a verdict rests on."""
    if verdict.kind == "invalid":
        return "; ".join(_evidence_words(each) for each in verdict.evidence)
    return "; ".join(clause(each) for each in verdict.evidence)


def _evidence_words(evidence: Clue) -> str:
    # Enough digits to tell apart what differs by a per cent.
    beside = "" if evidence.bound is None else f" beside {evidence.bound:.5g}"
    return f"found {evidence.value:.5g}{beside}"


def stake_words(verdict: Verdict) -> str:
    """What is at stake at most."""
    return about(verdict.share)


# -- why -------------------------------------------------------------------------------------------------------------


def why_paragraph(profile: Profile, verdicts: Sequence[Verdict]) -> str:
    """What the run is, what limits it, what does not although it looks so, and what to do first: one paragraph."""
    limits = [verdict for verdict in verdicts if verdict.kind != "invalid"]
    invalid = [verdict for verdict in verdicts if verdict.kind == "invalid"]
    sentences = [
        _what_it_is(profile),
        f"Warning: {warning_words(profile.warnings)}." if profile.warnings else "",
        _how_it_went(profile),
        _first_limit(profile, limits),
        _other_limits(limits),
        _idle_bandwidth(profile, limits),
        _cheap_throttling(profile, limits),
        _invalid(invalid),
        _first_advice(limits),
    ]
    # Where there is no room, what says the least goes first.
    for number in (6, 2, 5, 4):
        if _words(sentences) > MOST_WORDS:
            sentences[number] = ""
    for more in _more(profile):
        if _words(sentences) < FEWEST_WORDS and _words([*sentences, more]) <= MOST_WORDS:
            sentences.insert(len(sentences) - 1, more)
    return " ".join(sentence for sentence in sentences if sentence)


def _words(sentences: Sequence[str]) -> int:
    return sum(len(sentence.split()) for sentence in sentences)


def _what_it_is(profile: Profile) -> str:
    if not (profile.device or profile.batch_sequences or profile.sequence_tokens or profile.precision):
        return f"This is {name_words(profile)}."
    told = f"{name_words(profile)} ran"
    if profile.device:
        told += f" on {safe(profile.device, 40)}"
    if profile.world is not None and profile.world > 1:
        told += f", one of {profile.world:,} devices,"
    if profile.batch_sequences is not None:
        of = f" of {profile.sequence_tokens:,} tokens" if profile.sequence_tokens is not None else ""
        told += f" with {profile.batch_sequences:,} sequences{of} a step"
    elif profile.sequence_tokens is not None:
        told += f" with sequences of {profile.sequence_tokens:,} tokens"
    if profile.precision:
        told += f" in {safe(profile.precision, 20)}"
    return f"{told.removesuffix(',')}."


def _how_it_went(profile: Profile) -> str:
    wall, span, mfu = (profile.get(name) for name in ("step_wall_s", "device_span_s", "mfu"))
    a_step = "A step" if profile.steps is not None or wall is not None else "What was profiled"
    told = []
    if wall is not None:
        # On a CPU the two are one.
        apart = span is not None and abs(span - wall) > 1e-3 * wall
        steady = _untraced_s(profile)
        if steady is not None and abs(wall - steady) > SLOWED * steady:
            told.append(f"{a_step} takes {seconds(steady)} ({seconds(wall)} while it is traced)")
        else:
            told.append(
                f"{a_step} takes {seconds(wall)}" + (f", the device {seconds(span)} of it" if span and apart else "")
            )
    elif span is not None:
        told.append(f"{a_step} takes the device {seconds(span)}")
    if mfu is not None:
        told.append(f"{'at ' if told else 'It reaches '}{about(mfu)} MFU")
    return f"{', '.join(told)}." if told else ""


def _untraced_s(profile: Profile) -> float | None:
    """A step of our own run as its rates have it: they leave traced steps out."""
    rate, batch = profile.get("samples_per_s"), profile.batch_sequences
    if profile.format != "flopwise" or not rate or not batch:
        return None
    return batch * (profile.world or 1) / rate


def _whole(profile: Profile) -> str:
    return "the step" if profile.get("step_wall_s") is not None else "the device's time"


def _first_limit(profile: Profile, limits: Sequence[Verdict]) -> str:
    if not limits:
        return "No rule finds a limit in the figures that are there."
    first = limits[0]
    at_stake = f" Up to {about(first.share)} of {_whole(profile)} is at stake." if first.share is not None else ""
    return f"Most of all it {LIMITS[first.kind].predicate}: {clause(first.evidence[0])}.{at_stake}"


def _other_limits(limits: Sequence[Verdict]) -> str:
    """The second with its evidence, the third."""
    told = []
    for number, verdict in enumerate(limits[1:3]):
        at_stake = f"up to {about(verdict.share)}" if verdict.share is not None else ""
        reasons = [at_stake, "" if number else clause(verdict.evidence[0], bounded=False)]
        beside = "; ".join(reason for reason in reasons if reason)
        told.append(f"it {LIMITS[verdict.kind].predicate}" + (f" ({beside})" if beside else ""))
    return f"Next, {', then '.join(told)}." if told else ""


def _idle_bandwidth(profile: Profile, limits: Sequence[Verdict]) -> str:
    """Below the ridge, and still not bound by memory."""
    intensity, ridge, use = (profile.get(name) for name in ("intensity", "ridge", "mbu"))
    if intensity is None or ridge is None or use is None or intensity >= ridge:
        return ""
    if any(verdict.kind == "memory_bound" for verdict in limits):
        return ""
    return (
        f"Its {scale_figure(intensity, 'FLOP/B')} lie below the ridge of {plain(ridge, 2)}, but only {about(use)} of "
        "the memory bandwidth is used: this is not the limit."
    )


def _cheap_throttling(profile: Profile, limits: Sequence[Verdict]) -> str:
    limited, loss = profile.get("throttle_share"), profile.get("throttle_loss")
    if limited is None or loss is None or limited < 0.05 or any(verdict.kind == "throttled" for verdict in limits):
        return ""
    return f"Throttling for {about(limited)} of the time costs only {about(loss)}."


def _invalid(invalid: Sequence[Verdict]) -> str:
    if not invalid:
        return ""
    rules = ", ".join(safe(verdict.detail, 40) for verdict in invalid[:2])
    more = f" and {len(invalid) - 2} more" if len(invalid) > 2 else ""
    return f"Figures that break {rules}{more} cannot be right: conclude nothing from them."


def _first_advice(limits: Sequence[Verdict]) -> str:
    if not limits:
        return "A profile with more figures would tell more."
    return f"Try first: {limits[0].advice}."


def _more(profile: Profile) -> Iterator[str]:
    """For a paragraph that is short since little is known."""
    wanted = {
        "step_wall_s": "a step's wall time",
        "device_span_s": "the device's time",
        "model_flops": "the model's FLOPs",
        "hbm_read_bytes": "device-memory traffic",
        "copy_active_s": "the copy engines' activity",
        "comm_active_s": "the time of collectives",
    }
    unknown = [words for name, words in wanted.items() if profile.get(name) is None]
    if profile.peaks is None:
        unknown.append("the device's peaks")
    if unknown:
        yield f"Not known: {list_words(unknown)}; limits that show in them cannot be told from this profile."
    if profile.kernels:
        longest = profile.kernels[0]
        yield f"The longest kernel is {safe(longest.name, 40)} with {seconds(longest.seconds)}."
    yield (
        "The verdicts rest on fixed rules: each holds one figure of the profile against a bound, says how much time is "
        "at stake at most, and leaves out whatever the profile does not know; --threshold moves the bounds."
    )
