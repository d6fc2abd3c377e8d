"""Metrics of an evaluation, by data source: pass@k, maj@k, accuracy with an interval. A response is right or it is not.

A response whose scoring failed is not right, as in validation; their number is given beside. The similarity of
responses to a reference text: BLEU by sacrebleu, ROUGE by rouge-score, neither of which comes with verl.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, pvariance
from typing import Any

import numpy as np

from verl.tracking.names import Number

SUBSETS = 1000
"""So many subsets of k responses are looked at for maj@k: all of them where there are no more."""
SEED = 42
ROUGE = ("rouge1", "rouge2", "rougeL")


def pass_at_k(n: int, right: int, k: int) -> float:
    """1 − C(n − right, k) / C(n, k): the chance that one of k responses drawn from n without replacement is right
    (arXiv 2107.03374, equation 1). ValueError unless 1 ≤ k ≤ n."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} responses: k must be between 1 and {n}")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority_at_k(right: Sequence[bool], answers: Sequence[str | None], k: int) -> float:
    """The chance that the most frequent answer of k responses drawn without replacement is right.

    A response without an answer (None) has no vote; without votes the result is wrong; equally frequent answers win
    with equal chance. Exact up to `SUBSETS` subsets, else the mean over as many draws, the same in every call.
    """
    n = len(answers)
    if math.comb(n, k) <= SUBSETS:
        drawn = np.array(list(itertools.combinations(range(n), k)))
    else:
        random = np.random.default_rng(SEED)
        drawn = random.permuted(np.tile(np.arange(n), (SUBSETS, 1)), axis=1)[:, :k]
    names = list(dict.fromkeys(answer for answer in answers if answer is not None))
    if not names:
        return 0.0
    ballots = (np.array(answers, object)[:, None] == np.array(names, object)).astype(float)
    votes = ballots[drawn].sum(axis=1)
    right_votes = (ballots * np.array(right, dtype=float)[:, None])[drawn].sum(axis=1)
    most = votes.max(axis=1, keepdims=True)
    wins = (votes == most) & (most > 0)
    chance = np.divide(right_votes, votes, out=np.zeros_like(votes), where=votes > 0)
    return float(((chance * wins).sum(axis=1) / np.maximum(wins.sum(axis=1), 1)).mean())


def accuracy_interval(per_prompt: Sequence[float], responses: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval for a mean of shares in [0, 1], one for each prompt, of so many responses in all.

    Responses to one prompt are not independent: the sample's size is p(1−p) over the variance of the mean over prompts,
    at least the number of prompts and at most that of responses. With one response to each prompt it is Wilson's own.
    """
    prompts, p = len(per_prompt), fmean(per_prompt)
    variance, spread = pvariance(per_prompt, p) / prompts, p * (1 - p)
    size = float(prompts)
    if spread > 0:
        size = min(max(size, spread / variance), responses) if variance > 0 else responses
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre, scale = p + z * z / (2 * size), 1 + z * z / size
    half = z * math.sqrt(spread / size + z * z / (4 * size * size))
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def sizes(n: int, wanted: Sequence[int] | None = None) -> list[int]:
    """The k of pass@k and maj@k for n responses: those wanted that are not above n, or 1, 2, 4, … and n."""
    if wanted is not None:
        return sorted({k for k in wanted if k <= n})
    return sorted({*(2**i for i in range(n.bit_length())), n})


def source_metrics(
    right: Sequence[Sequence[bool]],
    answers: Sequence[Sequence[str | None]] | None,
    ks: Sequence[int] | None,
    confidence: float,
) -> dict[str, Number]:
    """Metrics of the prompts of one source; `answers` (None: they cannot be told) are what maj@k counts.

    k goes up to the fewest responses that a prompt has, so that all prompts count in each number.
    """
    per_prompt, responses = [fmean(row) for row in right], sum(map(len, right))
    low, high = accuracy_interval(per_prompt, responses, confidence)
    out: dict[str, Number] = {"accuracy": fmean(per_prompt), "accuracy_low": low, "accuracy_high": high}
    of_k = sizes(min(map(len, right)), ks)
    out |= {f"pass@{k}": fmean(pass_at_k(len(r), sum(r), k) for r in right) for k in of_k}
    if answers is not None:
        pairs = list(zip(right, answers, strict=True))
        out |= {f"maj@{k}": fmean(majority_at_k(*pair, k) for pair in pairs) for k in of_k if k > 1}
    return out | {"prompts": len(right), "responses": responses}


# -- against a reference text


def text_metrics(
    names: Sequence[str], responses: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """bleu (corpus BLEU, 0 to 100) and rouge1, rouge2, rougeL (F measure, mean over responses, 0 to 1), as `names` say.

    references[i]: one or more texts that response i is compared with; of several ROUGE takes the closest.
    The packages are there: the check of the configuration asks for them.
    """
    out: dict[str, float] = {}
    if "bleu" in names:
        out["bleu"] = _bleu(responses, references)
    if "rouge" in names:
        out |= _rouge(responses, references)
    return out


def _bleu(responses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    import sacrebleu

    # sacrebleu wants the first reference of every response, then the second of every one, …; None where there is none.
    count = max(map(len, references))
    streams: Any = [[texts[i] if i < len(texts) else None for texts in references] for i in range(count)]
    return float(sacrebleu.corpus_bleu(list(responses), streams).score)


def _rouge(responses: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    pairs = [scorer.score_multi(list(texts), text) for text, texts in zip(responses, references, strict=True)]
    return {name: fmean(scores[name].fmeasure for scores in pairs) for name in ROUGE}
