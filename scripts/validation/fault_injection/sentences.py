"""Checks the sentences of a verdict against raw losses and against what is true of the run.

Nothing here reads the package's analysis, so that an error there cannot hide itself. `CLAIMS` has a regular expression and a
check for each kind of claim.

Tolerances: a sample shows what began since the sample before, so a step may lie one sampling interval off. A verdict smooths
losses over a sixth of the run, so the step of a loss may lie half of that off, too. A percentage may lie three standard
errors off. So a correct sentence is called false about once in 370.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from fault_injection.known import Fault, Known
from fault_injection.raw_losses import ENDS, Apart, Losses, measure_rise

#: percent from which a gap is harm
_HARM = 2.0
#: part of a departure that may have been there a window before the step at which the loss is said to depart
_EARLIER = 0.75
#: steps that the truth averages over to find where a loss leaves
_BACK = 20
# The text ---------------------------------------------------------------------------------------------------------------
#: a number as verdicts write it: 2,896, −0.183, 4e−5 or 2^−30
N = r"[-+−]?(?:2\^[-−]?[\d,.]*\d|(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+−]?\d+)?)"
T = (
    r"(?<![\w.])(?:master W|step of W|the reduced dW|logits|input|output|[XWYQKVSOmv]|d[XWYOPQKV]) of "
    r"(?!all |some |most )[\w.*\-/\[\]]*\w[\w*\]]*"
)
_SPLIT = re.compile(r"(?<=\.)\s+(?=[A-Z0-9]|d[A-Z] )")
_ADVICE = re.compile(
    r"Next:|Look|Check|Sample|Use|Find|Restore|Let|Compare|Give|Before you trust|If one rank|`|Set|No recipe|Then we can|"
    r"Resume"
)
_CLAIMS = re.compile(
    r"\d|\b(?:above|below|follows?|first|transient|since|gone|start|harms?|harmed|rises?|rose|jump\w*|departed|diverged|stays|"
    r"before|after|then|same)\b"
)
#: beginnings of sentences about what is unusual, likely, or so in the baseline too: they do not say what is wrong
_NOT_WRONG = ("Unusual:", "Likeliest:", "The baseline has the same trouble:")


def read_number(text: str) -> float:
    """Return the value of a number as `N` matches it."""
    plain = text.replace(",", "").replace("−", "-")
    base, power, exponent = plain.partition("^")
    return math.copysign(abs(float(base)) ** float(exponent), float(base)) if power else float(plain)


@dataclass
class Checked:
    """What came of checking a verdict."""

    #: what is false, and the sentence
    false: list[str] = field(default_factory=list)
    #: by kind of claim, how often it was checked
    checked: Counter[str] = field(default_factory=Counter)
    #: sentences with a number or a claim that was not checked, with N for numbers and T for tensors
    unchecked: list[str] = field(default_factory=list)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Checked:
        """Read what `to_json` returns."""
        return cls(told["false"], Counter(told["checked"]), told["unchecked"])

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"false": self.false, "checked": dict(self.checked), "unchecked": self.unchecked}


@dataclass(frozen=True)
class Claim:
    """A claim of a sentence, the text before it, and the whole text."""

    match: re.Match[str]
    sentence: str
    before: str
    text: str
    known: Known

    def get(self, name: str) -> str:
        """Return the text of a group; empty if there is none."""
        return self.match.groupdict().get(name) or ""

    def __getitem__(self, name: str) -> float:
        """Return the number of a group; one that fails all comparisons if there is none."""
        text = self.get(name)
        return read_number(text) if text else math.nan

    def has(self, *names: str) -> bool:
        """Return True if one of some groups matched."""
        return any(self.match.groupdict().get(name) is not None for name in names)

    @property
    def times(self) -> float:
        """Return what *N times* and *1/N of* multiply by."""
        return self["times"] if self.has("times") else 1 / self["part"]

    @property
    def tensor(self) -> str | None:
        """Return the tensor that it is about: the last one before it, apart from those after *Also wrong*."""
        named = re.findall(T, re.sub(rf"Also wrong by then: {T}(?:, {T})?", "", self.before))
        return named[-1] if named else None

    @property
    def culprit(self) -> Fault | None:
        """Return the fault if it sits in the tensor that the claim is about."""
        fault, tensor = self.known.fault, self.tensor
        return fault if fault and tensor and fault.sits_in(tensor) else None


def list_texts(told: Mapping[str, Any]) -> list[str]:
    """Return the texts of `diagnose --json`: verdict, headline, and the report on the loss and on each tensor."""
    head, tensors = told["story"]["headline"], told["story"]["tensors"]
    whys = [f"{each['tensor']} of {each['layer']}: {each['why']}" for each in tensors]
    return [told["verdict"], told["headline"], *filter(None, [head["gap_told"], head["cause_told"]]), *whys]


def check_texts(texts: Iterable[str], known: Known) -> Checked:
    """Check texts of one verdict. What several of them say counts once."""
    all_of, seen = Checked(), set[str]()
    for text in texts:
        before, is_advice = "", False
        for sentence in _SPLIT.split(text):
            is_advice = bool(_ADVICE.match(sentence)) and (is_advice or not sentence.startswith("Other"))
            if sentence not in seen:
                _check_sentence(sentence, before, text, known, all_of, is_advice)
            seen.add(sentence)
            before += f"{sentence} "
    return all_of


def _check_sentence(sentence: str, before: str, text: str, known: Known, checked: Checked, is_advice: bool) -> None:
    covered = set[int]()
    for kind, pattern, check in CLAIMS:
        for match in pattern.finditer(sentence):
            claim = Claim(match, sentence, before + sentence[: match.start()], text, known)
            checked.checked[kind] += 1
            wrong = [*_check_groups(claim), *(check(claim) if check else ())]
            checked.false += [f"{kind}: {why} | {sentence}" for why in wrong]
            covered |= set(range(*match.span()))
    rest = "".join(" " if place in covered else letter for place, letter in enumerate(sentence))
    if not is_advice and _CLAIMS.search(rest.replace("FP8", "").replace("BF16", "")):
        checked.unchecked.append(re.sub(N, "N", re.sub(T, "T", sentence)))


def _if(is_false: object, why: str) -> list[str]:
    return [why] if is_false else []


# Steps ------------------------------------------------------------------------------------------------------------------


def _check_groups(claim: Claim) -> Iterator[str]:
    """Yield what is wrong with named groups, whatever the claim.

    Steps lie in the run, `layer` and `tensor` are recorded, `some` is at most `all_of`, `more` is more than `less`, and
    `low` to `high` holds `size`. The fault is there `by` a step, and from `start`, `earlier` or `onset` on; `late` may lie
    two more intervals off.
    """
    known, fault, names = claim.known, claim.known.fault, claim.match.groupdict()
    first, last = known.losses.steps[0], known.losses.steps[-1]
    for name in ("step", "end", "by", "loss_at", "onset", "late", "earlier"):
        yield from _if(claim[name] < first or claim[name] > last, f"the run's steps are {first} to {last}")
    layer = names.get("layer") or (names.get("tensor") or "").split(" of ")[-1]
    is_recorded = not layer or not known.layers or any(_is_same(layer, each) for each in known.layers)
    yield from _if(not is_recorded, f"no such layer: {layer}")
    yield from _if(claim["some"] > claim["all_of"], "that many there are not")
    yield from _if(claim["more"] <= claim["less"], "that is no more")
    slack = 0.01 + 0.01 * abs(claim["size"])  # three digits are printed
    is_out = claim["size"] < claim["low"] - slack or claim["size"] > claim["high"] + slack
    if claim.has("under"):
        is_out = claim["size"] > claim["under" if claim.get("side") == "below" else "over"] + slack
    yield from _if(is_out, "the gap is not in its interval")
    if claim.sentence.startswith(_NOT_WRONG) or not claim.has("onset", "late", "start", "earlier", "by"):
        return
    yield from _if(fault and claim["by"] < fault.begins - known.interval, "nothing was wrong by then")
    for name in ("onset", "late"):
        yield from _check_onset(claim, claim[name], names.get("tensor"), 2 * known.interval * (name == "late"))
    since = known.sampled[0] if claim.has("start") else claim["earlier"] + known.interval
    yield from _if(fault is None, "nothing went wrong in this run")
    yield from _if(fault and fault.begins > since, f"the fault begins at step {fault and fault.begins}")


def _is_same(named: str, recorded: str) -> bool:
    """Return True if a name is that of a recorded layer, of a kind of several, or of a module around it."""
    return any(fnmatchcase(recorded, name) for name in (named, f"{named}.*")) or fnmatchcase(named, recorded)


def _check_onset(claim: Claim, step: float, tensor: str | None = None, slack: float = 0) -> Iterator[str]:
    """Yield that nothing began at a step, give or take a sampling interval and `slack`.

    A tensor that the fault does not sit in may follow it at any later step. Without one, the run as a whole is meant.
    """
    fault, slack = claim.known.fault, slack + claim.known.interval
    if fault is not None and not claim.sentence.startswith(_NOT_WRONG):
        yield from _if(step < fault.begins - slack, f"the fault begins at step {fault.begins}")
        # A scale that is stale must wait for values to move.
        is_about = (tensor is None or fault.sits_in(tensor)) and fault.kind != "stale"
        yield from _if(is_about and step > fault.grown + slack, f"the fault has grown at step {fault.grown}")


def _check_nan_order(claim: Claim) -> Iterator[str]:
    """Yield that the loss is not lost where it is said to be, or that the steps are not in order."""
    first, begin = claim.known.losses.first_lost, claim.before.rfind("irst NaN or infinity is in ")
    told = claim.before[begin + 24 if begin >= 0 else len(claim.before) :] + claim.match[0]
    found = re.findall(r"in ([^;,]+?) at (?:step |sample )?(\d+)", told)
    steps = [int(step) for _, step in found]
    yield from _if(steps != sorted(steps), f"steps {steps} are not in order")
    for what, step in found:
        is_other = what == "the loss" and first != int(step)
        yield from _if(is_other, f"the first loss that is not finite is that of step {first}")
    is_late = first is not None and steps and steps[0] > first + claim.known.interval
    yield from _if(is_late, f"a loss is not finite at step {first} already")


def _check_transient(claim: Claim) -> Iterator[str]:
    known, fault, count = claim.known, claim.culprit, claim["count"]
    since = re.findall(r"(?:went wrong (?:at|by)|since)(?: step| sample)? (\d+)", claim.before)
    yield from _if(since and sum(step >= int(since[-1]) for step in known.sampled) <= count, "no sample is left after it")
    yield from _if(fault and fault.stays, "the fault stays to the end")
    if fault and fault.until is not None:
        acts = sum(fault.begins <= step < fault.until for step in known.sampled)
        yield from _if(abs(acts - count) > 1, f"the fault acts from {fault.begins} to {fault.until}")


def _check_moved(claim: Claim) -> Iterator[str]:
    """Yield that a scale is said to be too large and to have moved down, or the other way round."""
    side = re.findall(r"scale is \S+ bits too (large|small)", claim.before)
    yield from _if(side and (side[-1] == "large") != (claim["moved"] > 0), f"the scale is too {side and side[-1]}")
    yield from _check_onset(claim, claim["around"], claim.tensor)
    is_both = "its values hardly did" in claim.before and abs(claim["values"]) > abs(claim["moved"]) / 2
    yield from _if(is_both, "the values moved too")


def _check_scale_side(claim: Claim) -> list[str]:
    bits = claim.culprit and claim.culprit.bits
    return _if(bits and (claim.get("side") == "large") != (bits > 0), f"the fault moves it by {bits} bits")


def _check_factor(claim: Claim, kind: str, within: float) -> list[str]:
    factor = claim.known.fault.factor if claim.known.fault and claim.known.fault.kind == kind else None
    return _if(factor and abs(math.log(claim.times / factor)) > within, f"it is multiplied by {factor}")


def _check_rate(claim: Claim) -> Iterator[str]:
    start = claim["after"] + 1 if claim.has("after") else claim.known.sampled[0]
    yield from _check_onset(claim, start)
    yield from _if(claim["step"] < start, "it is farthest before it leaves")
    yield from _if(abs(math.log(claim["mine"] / claim["theirs"] / claim.times)) > 0.02, "the factor is another")
    yield from _check_factor(claim, "learning_rate", 0.05)


def _check_not_stale(claim: Claim) -> list[str]:
    return _if(claim.culprit and claim.culprit.kind == "stale", "it stands still")


def _check_sample(claim: Claim) -> list[str]:
    # NaN shows in the loss between two samples, too.
    is_sample = not claim.has("onset") or "NaN" in claim.sentence or claim["onset"] in claim.known.sampled
    return _if(not is_sample, "that is no sample")


def _check_where_multiplied(claim: Claim) -> list[str]:
    at_the_loss = claim.known.fault.at_the_loss if claim.known.fault else None
    return _if(at_the_loss is claim.has("after"), f"the loss is multiplied: {at_the_loss}")


# The loss ---------------------------------------------------------------------------------------------------------------


def _check_gap(claim: Claim) -> Iterator[str]:
    known, batches, pair = claim.known, claim.get("batches"), claim.known.pair
    is_one = claim.get("whose") == "the baseline's"
    yield from _if(is_one and batches == "same batches" and not known.same_batches, "these are other batches")
    if pair is None or claim.get("whose") == "the reference run's":
        return
    signed = claim["size"] if claim.get("side") == "above" else -claim["size"]
    long, short = (pair.measure_end(part) for part in ENDS)
    yield from _if(bool(pair.whole) != claim.has("range"), "percents are of the range if losses have both signs")
    is_off = long and abs(signed - long.percent) > max(long.reach, 0.02 * abs(long.percent), 0.01)
    yield from _if(is_off, f"the last fifth of the losses lies {long} apart")
    is_other = short and abs(signed) > 0.1 and (short.is_below if signed > 0 else short.is_above)
    yield from _if(is_other, f"the last tenth of the losses lies {short} apart")


def _check_loss_step(claim: Claim) -> list[str]:
    """Return that the loss is said to leave before the fault acts. It may leave at any later step."""
    fault, slack = claim.known.fault, claim.known.losses.window + claim.known.interval
    return _if(fault and claim["loss_at"] < fault.begins - slack, f"the fault begins at step {fault and fault.begins}")


def _check_departure(claim: Claim) -> Iterator[str]:
    known, step, window = claim.known, claim["loss_at"], claim.known.losses.window
    yield from _check_loss_step(claim)
    if claim.get("verb") == "diverged":
        yield from _check_rises(known.losses, step)
    if known.pair is not None and not claim.get("verb").startswith("jumped"):
        first, end = step + window + known.interval, int(known.pair.steps[-1]) + 1
        width = max((end - first) / 4, window, 10)
        while first < end:
            apart = known.pair.measure_between(first, first + width)
            yield from _if(apart and apart.is_below, f"around step {first + width / 2:.0f} it lies {apart} apart")
            first += width
        before = known.pair.measure_between(step - 3 * window, step - window)
        after = known.pair.measure_between(step, step + window)
        as_far = before and after and before.is_above and before.percent > _EARLIER * after.percent
        yield from _if(as_far, f"it lies {before} above before that step, and {after} after it")
    # Another seed hides the beginning of a departure, so that only its own losses tell.
    if known.leaves is not None and (known.baseline is None or known.same_batches):
        is_late = step > known.leaves + window + _BACK + known.interval
        yield from _if(is_late, f"the loss has left that of the same run without the fault at step {known.leaves}")


def _measure_end_above_lowest(losses: Losses) -> Apart | None:
    lowest, _ = losses.lowest
    return measure_rise(losses.between(lowest, lowest + losses.window), losses.last(0.1))


def _check_rises(losses: Losses | None, step: float) -> Iterator[str]:
    """Yield that the last losses are no higher than the lowest level up to the step, or that this comes after it."""
    if losses is not None and losses.lost_from is None and len(losses.last(0.1)):
        rise = _measure_end_above_lowest(losses)
        yield from _if(rise and rise.percent <= rise.reach, f"the last tenth of the losses lies {rise} above the lowest")
        yield from _if(losses.lowest[0] > step + 2 * losses.window, f"the loss is lowest at step {losses.lowest[0]}")


def _check_jump(claim: Claim) -> Iterator[str]:
    """Yield that the loss does not rise at a step as far as is said, or comes back."""
    known, step, percent = claim.known, claim["loss_at"], claim["size"]
    losses, pair, window = known.losses, known.pair, known.losses.window
    yield from _check_loss_step(claim)
    yield from _check_onset(claim, step if "goes up" in claim.match[0] else math.nan, None, window)
    rises: list[Apart | None] = []
    for place in {step, step - known.interval + 1}:
        for width in {max(window, 8), 2 * max(window, 8)}:
            sides = ((place - width, place), (place, place + width))
            rises.append(measure_rise(*(losses.between(*side) for side in sides)))
            before, after = (pair and pair.measure_between(*side) for side in sides)
            if before and after:  # the baseline's own moves may be left out
                rises.append(Apart(after.percent - before.percent, math.hypot(after.error, before.error)))
    found = [] if claim.has("range") or losses.lost_from is not None else [rise for rise in rises if rise]
    # The place of its window matters, so half of a rise may be missing.
    near = any(rise.percent > 0 and abs(percent - rise.percent) <= max(rise.reach, 0.5 * percent) for rise in found)
    yield from _if(found and not near and claim.has("size"), f"it rises by {', '.join(map(str, found))} there")
    later = measure_rise(losses.between(step - 2 * window, step), losses.between(step + window, step + 4 * window))
    yield from _if(claim.has("stays") and later and later.is_below, f"afterwards it lies {later} from what it was")


def _check_no_rise(claim: Claim) -> list[str]:
    rise = _measure_end_above_lowest(claim.known.losses)
    visible = re.search(rf"does not rise \(a rise below ({N})%( of the loss's range)?", claim.text)
    limit = read_number(visible[1]) if visible else _HARM
    # The lowest of many windows lies below their mean by chance: two more standard errors.
    is_high = rise and not (visible and visible[2]) and rise.percent > limit + rise.reach + 2 * rise.error
    return _if(is_high, f"the last tenth of the losses lies {rise} above the lowest")


def _check_follows(claim: Claim) -> list[str]:
    apart, is_follows = claim.known.apart, claim.get("verb").startswith("follows")
    is_above = apart.percent - apart.reach > _HARM or (not is_follows and apart.is_above)
    is_lost = is_follows and claim.known.losses.lost_from is not None
    return _if(is_above, f"it lies {apart} above") + _if(is_lost, "it ends without a number")


def _check_less(claim: Claim) -> list[str]:
    limit = next((claim[name] for name in ("size", "limit") if claim.has(name)), _HARM)
    return _if(claim.known.apart.percent - claim.known.apart.reach > limit, f"it lies {claim.known.apart} above")


def _check_lost(claim: Claim) -> list[str]:
    lost_from = claim.known.losses.lost_from
    return _if(lost_from != claim["step"], f"no loss is finite from step {lost_from} on")


def _check_both_rise(claim: Claim) -> Iterator[str]:
    yield from _check_rises(claim.known.losses, claim["loss_at"])
    yield from _check_rises(claim.known.baseline, claim["theirs"])


def _check_cannot_tell(claim: Claim) -> list[str]:
    return _if(claim.known.same_batches and claim.known.apart.is_below, f"it lies {claim.known.apart} apart")


def _check_is_negative_from_zero(claim: Claim) -> list[str]:
    finite = claim.known.losses.last(1.0)
    is_other = sorted(finite)[len(finite) // 2] >= 0 or abs(finite[:8].mean()) > 0.2 * (finite.max() - finite.min())
    return _if(is_other, f"it begins at {finite[:8].mean():.3g}")


def _check_agree(claim: Claim) -> list[str]:
    mine, theirs = (each and each.at(int(claim["step"])) for each in (claim.known.losses, claim.known.baseline))
    return _if(mine and theirs and abs(mine - theirs) > 0.025 * abs(theirs), f"they are {mine} and {theirs}")


def _check_missed(claim: Claim) -> list[str]:
    end = claim.known.sampled[-1] if "the last sample" in claim.match[0] else claim.known.baseline_end
    return _if(end is not None and claim["step"] != end, f"that is step {end}")


def _check_nothing_found(claim: Claim) -> list[str]:
    hedges = "We could have missed" in claim.text or "We cannot tell" in claim.text
    return _if(claim.known.harmed and not hedges, "the run is harmed")


def _check_first_tensor(claim: Claim) -> Iterator[str]:
    if claim.known.fault and claim.known.fault.culprits:
        yield from _check_onset(claim, claim["step"])


def _expand(pattern: str) -> re.Pattern[str]:
    """Return a pattern in which `@name` is a step, `#name` a number, and `<tensor>` a tensor."""
    pattern = re.sub(r"@(\w+)", r"(?:step|sample) (?P<\1>\\d+)", pattern)
    pattern = re.sub(r"#(\w+)", lambda found: rf"(?P<{found[1]}>{N})", pattern)
    return re.compile(pattern.replace("<tensor>", f"(?P<tensor>{T})"))


_WHEN = (
    "(?:(?:at|at or before|around) @onset|(?P<start>from the first sample on)|since @earlier or earlier|"
    "at an unknown (?:step|sample))"
)
_SURE = r"(?= \(\w+ confidence\)|\.$)"
_LATE = r"(?:In \S+, )?(?:[Ww]eights|Something)\b"
_PERCENT = "#size%(?P<range> of the loss's range)?"
_WHOSE = "(?P<whose>the baseline's|the baselines' mean|the reference run's)"
_INTERVAL = r"\(95% interval (?:#low to #high%|#under% below to #over% above)"
_BATCHES = r"(?P<batches>same batches|batches not matched|mean of \d+ runs of other batches)"
_TIMES = "(?:#times times|1/#part of)"
Check = Callable[[Claim], Iterable[str]]
#: kind of claim, its wording (see `_expand`), and what is checked of it beyond named groups (see `_check_groups`)
_TABLE: list[tuple[str, str, Check | None]] = [
    ("tensor", "<tensor>", None),
    ("layer", r"^In (?:layer )?(?P<layer>\S+), ", None),
    ("unfinished", "[{}]", lambda c: ["a name is missing"]),
    ("tensor since", f"<tensor> went wrong {_WHEN}", _check_sample),
    ("blamed since", "^<tensor>: (?:Also wrong by then|Blamed): .*?, since @onset", None),
    (
        "recipe or scale since",
        rf"(?:recipe|scale) of <tensor>(?: and (?:\d+ other operands|{T}))? (?:changed )?{_WHEN}",
        None,
    ),
    ("recipe from", r"the recipe changed from \S+(?: \S+)? to \S+(?: \S+)?", None),
    ("recipe differs", r"the recipe is \S+(?: \S+)?, and \S+(?: \S+)? in the baseline", None),
    ("cause since", rf"^(?!The (?:loss|first NaN|optimizer|re\w+)\b|{_LATE}|.* went wrong)[^;:]*?{_WHEN}{_SURE}", None),
    # What is found in weights or in the loss is measured over several samples.
    ("cause since", f"^{_LATE}.*? {_WHEN.replace('onset', 'late')}{_SURE}", None),
    ("weights shrink from", "shrink from @late on", None),
    ("also wrong", "Also wrong by then: ", lambda c: _if(c.known.fault is None, "nothing went wrong in this run")),
    ("first NaN", "first NaN or infinity is in .+? at @onset", _check_nan_order),
    ("then NaN", r"[Tt]hen in .+? at \d+(?:,? in .+? at \d+)*", _check_nan_order),
    ("no step is taken", "optimizer takes no step from @by on", None),
    (
        "multiplied or zero from",
        "(?:a factor of #times on top of the loss scale|is zero|gets no token) from @onset on",
        None,
    ),
    (
        "norm moves",
        f"rom @onset on, the gradient norm is {_TIMES} its earlier value",
        lambda c: _check_factor(c, "gradient_sum", 0.5),
    ),
    ("multiplied where", "(?P<after>no dY moves with it)|dY of all layers moves with it", _check_where_multiplied),
    ("zero", r"[Ff](?:rom|irst at) @by(?: to the end)?, \w+ is zero in (?:all )?#some(?: of #all_of)?", None),
    ("stand still", r"#some of #all_of W(?: of \S+)? (?:are the same in all samples|stand still since @earlier)", None),
    ("resumed", "the run was resumed at @onset, and scales are wrong from then on", None),
    (
        "learning rate leaves",
        rf"the baseline's (?:after @after|from the start) and was {_TIMES} it at (?P<step>\d+): #mine instead of #theirs",
        _check_rate,
    ),
    (
        "learning rate rises",
        "rose from #less at @after to #more after its warm-up",
        lambda c: _check_onset(c, c["after"] + 1),
    ),
    ("norm next to baseline", f"norm is {_TIMES} the baseline's from (?:@step|(?P<start>the first step on))", None),
    ("norm is zero", r"exactly 0 at #some of #all_of \w+, (?:and at each one from|first at) @step", None),
    (
        "other step",
        r"(?:(?:usual|tokens|channel|is #value|so) at|no token from) @step|"
        r"(?:since|from)(?: step| sample)? (?P<end>\d+) (?:on|\()",
        None,
    ),
    ("scale side", r"scale is #value bits too (?P<side>large|small)", _check_scale_side),
    ("scale moved", "its scale moved, its values hardly did", _check_not_stale),
    ("scale moved", "around @around, the scale moved by #moved bits and the values by #values bits", _check_moved),
    ("values moved", "the scale stands still while the values moved by #moved bits", _check_moved),
    (
        "scale is 1",
        "exactly 1 in all #some samples",
        lambda c: _if(c["some"] > len(c.known.sampled), "there are not as many"),
    ),
    ("scale is right", "its scale is right", lambda c: _if("its scale is too" in c.before, "it is said to be too large")),
    ("outlier", "stands #more bits above the median instead of #less", None),
    ("share", "(?:underflow|overflow) #share%", lambda c: _if(not 0 <= c["share"] <= 100, "that is no share")),
    ("count", "[Uu]p to #count values are NaN or infinite", lambda c: _if(c["count"] < 1, "none is")),
    ("transient", "it lasted for #count samples?, a transient", _check_transient),
    ("first tensor", "out of band from @step on.*: the first tensor", _check_first_tensor),
    ("consequence", "out of band since @by, .*: a consequence", None),
    ("loss is lost", "loss is NaN or infinite from @step on", _check_lost),
    ("gap at the end", rf"ended {_PERCENT} (?P<side>above|below) {_WHOSE} {_INTERVAL}; {_BATCHES}\)", _check_gap),
    ("gap at the end", f"loss ends {_PERCENT} (?P<side>below) {_WHOSE}", _check_gap),
    (
        "departure",
        f"[Tt]he loss (?P<verb>diverged|departed from {_WHOSE}|jumped to another level) (?:at|around) @loss_at",
        _check_departure,
    ),
    ("jump", f"[Tt]he loss (?:jumped|goes up|rose) by {_PERCENT} at @loss_at(?P<stays> and stays there)?", _check_jump),
    (
        "too few",
        "#count loss(?:es)? (?:is|are) too few",
        lambda c: _if(c["count"] != len(c.known.losses.values), "other count"),
    ),
    ("no rise", r"[Tt]he loss does not rise(?:\.| \(a rise below \S+%)", _check_no_rise),
    ("follows", f"[Tt]he loss (?P<verb>follows|is not above) {_WHOSE}", _check_follows),
    ("little harm", f"less than the {_PERCENT} that|by less than counts as harm|slightly above the baseline's", _check_less),
    (
        "cannot tell",
        rf"[Ww]e cannot tell whether the loss is harmed \(#limit%(?: of the loss's range)? or more above {_WHOSE}\)",
        _check_cannot_tell,
    ),
    (
        "other seeds",
        f"Another seed can explain up to {_PERCENT}|another seed ends #limit% or more above this mean",
        _check_less,
    ),
    ("begins at zero", "The loss begins at zero and is negative|negative loss from zero", _check_is_negative_from_zero),
    ("too low", "loss is too low to trust", lambda c: _if(c.known.apart.percent > -c.known.apart.reach, "it is not")),
    ("losses agree", "in @step, in which the losses agree", _check_agree),
    ("harm is likely", "harm is likely|probably harms", lambda c: _if(c.known.harmed is False, "the run is not harmed")),
    ("nothing found", r"We found nothing (?:wrong|certain|that harms the loss)\.", _check_nothing_found),
    ("same trouble", "The baseline has the same trouble: (?!both losses rise)", lambda c: ["the baseline is clean"]),
    ("both losses rise", r"the run's from @loss_at on, the baseline's from (?P<theirs>\d+) on", _check_both_rise),
    ("missed", "what happened after @step, (?:where the baseline ends|the last sample)", _check_missed),
    ("no baseline", "Without a baseline, we cannot see a gap", lambda c: _if(c.known.baseline, "there is a baseline")),
    ("gap to reference", rf"gap to the reference run is {_PERCENT} {_INTERVAL}\)", None),
]
CLAIMS = [(kind, _expand(pattern), check) for kind, pattern, check in _TABLE]


# Many verdicts ----------------------------------------------------------------------------------------------------------


def describe_checks(checks: Mapping[str, Checked]) -> str:
    """Return the share of verdicts with a false sentence, each of those, and what was checked how often and what was not.

    Args:
        checks: by the name of each verdict.
    """
    false = [f"  {name}: {why}" for name, each in checks.items() for why in each.false]
    wrong = sum(bool(each.false) for each in checks.values())
    counts = sum((each.checked for each in checks.values()), Counter[str]())
    missed = Counter(template for each in checks.values() for template in each.unchecked)
    lines = [f"verdicts with a false sentence: {wrong} of {len(checks)} ({100 * wrong / max(len(checks), 1):.1f}%)"]
    lines += [*false, f"claims checked: {counts.total()} of {len(counts)} kinds"]
    lines += [f"  {count:6d} {kind}" for kind, count in counts.most_common()]
    lines += [f"sentences with a claim that is not checked: {missed.total()}, of {len(missed)} templates"]
    return "\n".join(lines + [f"  {count:6d} {template}" for template, count in missed.most_common()])
