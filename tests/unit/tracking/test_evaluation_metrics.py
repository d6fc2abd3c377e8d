"""pass@k, maj@k and the accuracy's interval against slow references from their definitions; BLEU and ROUGE of known
texts."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.tracking import evaluation_metrics
from verl.tracking.evaluation_metrics import (
    accuracy_interval,
    majority_at_k,
    pass_at_k,
    sizes,
    source_metrics,
    text_metrics,
)

GROUPS = st.lists(st.tuples(st.booleans(), st.sampled_from(["a", "b", "c", None])), min_size=1, max_size=7)


def slow_pass(right: list[bool], k: int) -> float:
    return fmean(any(subset) for subset in itertools.combinations(right, k))


def slow_majority(right: list[bool], answers: list[str | None], k: int) -> float:
    """Of every subset, a vote; of equally frequent answers each with the same chance, right as often as its voters
    are."""
    results = []
    for subset in itertools.combinations(range(len(right)), k):
        votes = Counter(answers[i] for i in subset if answers[i] is not None)
        winners = [a for a, count in votes.items() if count == max(votes.values())]
        shares = [fmean(right[i] for i in subset if answers[i] == winner) for winner in winners]
        results.append(fmean(shares) if shares else 0.0)
    return fmean(results)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(right, data) -> None:
    k = data.draw(st.integers(1, len(right)))
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(slow_pass(right, k), abs=1e-12)


def test_pass_at_k_at_its_ends() -> None:
    assert [pass_at_k(10, c, 1) for c in (0, 3, 10)] == pytest.approx([0.0, 0.3, 1.0])
    assert pass_at_k(10, 8, 3) == 1.0 and pass_at_k(10, 0, 10) == 0.0 and pass_at_k(10, 1, 10) == 1.0
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)  # no overflow
    for k in (0, 4):
        with pytest.raises(ValueError, match="between 1 and 3"):
            pass_at_k(3, 1, k)


@given(GROUPS, st.data())
def test_majority_is_the_mean_over_all_subsets(group, data) -> None:
    right, answers = [r for r, _ in group], [a for _, a in group]
    k = data.draw(st.integers(1, len(group)))
    assert majority_at_k(right, answers, k) == pytest.approx(slow_majority(right, answers, k), abs=1e-12)


def test_majority_of_many_is_drawn_and_close(monkeypatch) -> None:
    answers = [random.Random(1).choice("aab") for _ in range(12)]
    right = [a == "a" for a in answers]
    exact = slow_majority(right, list(answers), 5)
    monkeypatch.setattr(evaluation_metrics, "SUBSETS", 700)  # of 792
    drawn = majority_at_k(right, answers, 5)
    assert drawn == majority_at_k(right, answers, 5) and drawn == pytest.approx(exact, abs=0.06)


def test_one_response_to_each_prompt_gives_wilsons_interval() -> None:
    low, high = accuracy_interval([1.0] * 8 + [0.0] * 2, 10)
    assert (low, high) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)  # a published example
    none = (0.0, 1.959964**2 / (10 + 1.959964**2))
    assert accuracy_interval([0.0] * 10, 10) == pytest.approx(none, abs=1e-6)


def test_more_responses_narrow_the_interval_only_as_far_as_they_differ() -> None:
    def width(per_prompt: list[float], responses: int) -> float:
        low, high = accuracy_interval(per_prompt, responses)
        return high - low

    same = width([1.0] * 50 + [0.0] * 50, 400)  # four responses to a prompt that always agree
    assert same == pytest.approx(width([1.0] * 50 + [0.0] * 50, 100))
    free = width([0.5] * 100, 400)  # prompts that do not differ: all responses count
    assert free == pytest.approx(width([1.0] * 200 + [0.0] * 200, 400))
    assert free < width([0.0, 0.5, 0.5, 1.0] * 25, 400) < same
    assert accuracy_interval([0.5] * 100, 400, 0.99)[1] > accuracy_interval([0.5] * 100, 400)[1]


def test_sizes() -> None:
    assert sizes(1) == [1] and sizes(8) == [1, 2, 4, 8] and sizes(5) == [1, 2, 4, 5]
    assert sizes(5, [3, 10, 1]) == [1, 3]


def test_uneven_prompts_count_up_to_the_fewest_responses() -> None:
    found = source_metrics([[True, False, True], [False, False]], [["1", "2", "1"], ["3", None]], None, 0.95)
    assert {name for name in found if "@" in name} == {"pass@1", "pass@2", "maj@2"}
    assert [found["accuracy"], found["pass@1"]] == pytest.approx([1 / 3, 1 / 3])
    assert found["prompts"] == 2 and found["responses"] == 5
    assert not [name for name in source_metrics([[True]], None, None, 0.95) if name.startswith("maj")]


# ------------------------------------------------------------------------------------------------------- texts


def test_texts_get_the_published_values() -> None:
    """BLEU of sacrebleu's own documentation; of ROUGE by hand: 5 of 6 words and 3 of 5 pairs are the same."""
    reason = "sacrebleu and rouge-score come with the extras `evaluation` and `test`"
    pytest.importorskip("sacrebleu", reason=reason)
    pytest.importorskip("rouge_score", reason=reason)
    responses = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
    references = [
        ["The dog bit the man.", "The dog had bit the man."],
        ["It was not unexpected.", "No one was surprised."],
        ["The man bit him first.", "The man had bitten the dog."],
    ]
    assert text_metrics(["bleu"], responses, references) == {"bleu": pytest.approx(48.530827)}
    uneven = [["The dog bit the man."], *references[1:]]  # not every response has a second reference
    assert 0 < text_metrics(["bleu"], responses, uneven)["bleu"] <= 48.530828
    said, texts = ["the cat sat on the mat"], [["no", "the cat is on the mat"]]  # the closest counts
    found = {name: pytest.approx(value) for name, value in {"rouge1": 5 / 6, "rouge2": 3 / 5, "rougeL": 5 / 6}.items()}
    assert text_metrics(["rouge"], said, texts) == found
