"""How close responses are to a reference text: BLEU by sacrebleu, ROUGE by rouge-score. Neither comes with verl."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from statistics import fmean
from types import ModuleType
from typing import Any

from verl.errors import UserError

ROUGE = ("rouge1", "rouge2", "rougeL")


def text_metrics(
    names: Sequence[str], responses: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """bleu (corpus BLEU, 0 to 100) and rouge1, rouge2, rougeL (F measure, mean over responses, 0 to 1), as `names` say.

    references[i]: one or more texts that response i is compared with; of several ROUGE takes the closest.
    UserError where a package is missing.
    """
    out: dict[str, float] = {}
    if "bleu" in names:
        out["bleu"] = _bleu(_package("bleu", "sacrebleu", "sacrebleu"), responses, references)
    if "rouge" in names:
        out |= _rouge(_package("rouge", "rouge_score.rouge_scorer", "rouge-score"), responses, references)
    return out


def _bleu(sacrebleu: Any, responses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    # sacrebleu wants the first reference of every response, then the second of every one, …; None where there is none.
    count = max(map(len, references))
    streams = [[texts[i] if i < len(texts) else None for texts in references] for i in range(count)]
    return float(sacrebleu.corpus_bleu(list(responses), streams).score)


def _rouge(package: Any, responses: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    scorer = package.RougeScorer(list(ROUGE), use_stemmer=True)
    found = [scorer.score_multi(list(texts), text) for text, texts in zip(responses, references, strict=True)]
    return {name: fmean(scores[name].fmeasure for scores in found) for name in ROUGE}


def _package(name: str, module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"metrics.text={name} needs {package} ({error}): pip install {package} (or 'verl[evaluation]')"
        ) from error
