"""Spans of text that two tokenizations share, and what a teacher with another tokenizer says of the policy's tokens."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_tokenizer
from verl.data.rows import ChatRenderer
from verl.data.text_spans import TextTeacher, common_spans, token_bytes
from verl.errors import UserError
from verl.trajectory import Prompt, Segment, Trajectory


def pairs_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with merges: other ids, fewer tokens, another end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("Ã", "¶"), ("c", "d")]
    words = ["<end>", *alphabet, *("".join(merge) for merge in merges)]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}>{{ m['content'] }}{% endfor %}!"
    return tokenizer


@pytest.mark.parametrize("text", ["abcd", "xabcöö", "", "öab cd"])
def test_spans_are_the_finest_that_both_cut_the_text_into(text: str) -> None:
    mine, theirs = tiny_tokenizer(), pairs_tokenizer()
    ids = [t.encode(text, add_special_tokens=False) for t in (mine, theirs)]
    pieces = [token_bytes(t, own) for t, own in zip((mine, theirs), ids, strict=True)]
    assert b"".join(pieces[0]) == b"".join(pieces[1]) == text.encode()
    spans = common_spans(*pieces)
    for a, b in spans:
        assert b"".join(pieces[0][a]) == b"".join(pieces[1][b]) != b""
    # The policy writes bytes, so every token of the teacher is a span.
    assert [b.stop - b.start for _, b in spans] == [1] * len(ids[1])
    assert sum(a.stop - a.start for a, _ in spans) == len(ids[0])
    assert not text or common_spans([*pieces[0], b"y"], [*pieces[1], b"x"]) == spans
    with pytest.raises(ValueError, match="the same text"):
        common_spans([b"a"], [b"b"])


def test_the_teacher_reads_the_text_and_its_log_ratio_is_shared_by_a_spans_tokens() -> None:
    mine, theirs = tiny_tokenizer(), pairs_tokenizer()
    teacher = TextTeacher("{prompt}?", "key", ChatRenderer(theirs), 1.0, mine)
    ids = np.array([*mine.encode("xabcö", add_special_tokens=False), mine.eos_token_id])
    prompt = Prompt(uid="a", ids=np.arange(3), messages=[{"role": "user", "content": "Hi"}])
    old = -np.arange(1.0, len(ids) + 1)
    row = Trajectory(prompt, 0, ids, np.ones(len(ids), bool), old_log_probs=old.astype(np.float32))
    told = teacher(row, [row])
    assert theirs.decode(told.context_ids) == "user>Hi?!"
    assert theirs.convert_ids_to_tokens(told.response_ids) == ["x", "abc", "Ã¶", "<end>"]
    told.put("teacher_log_probs", np.array([-0.5, -4.0, -1.0, -0.25], np.float32))
    found = teacher.column(row, told, "teacher_log_probs")
    # x | a b c | ö, two bytes | end: the sum over a span is the teacher's, the difference is the same for its tokens.
    wanted = [-0.5, *(old[1:4] + (-4.0 + 9.0) / 3), *(old[4:6] + (-1.0 + 11.0) / 2), -0.25]
    assert found.tolist() == pytest.approx(wanted)
    # From bytes that are no text on nothing is compared, the end neither.
    broken = np.insert(ids, 4, ids[4])
    row = Trajectory(
        prompt, 0, broken, np.ones(len(broken), bool), old_log_probs=np.append(old, -9.0).astype(np.float32)
    )
    told = teacher(row, [row])
    assert theirs.convert_ids_to_tokens(told.response_ids) == ["x", "abc"]
    told.put("teacher_log_probs", np.array([-0.5, -4.0], np.float32))
    found = teacher.column(row, told, "teacher_log_probs")
    assert found.tolist() == pytest.approx([*wanted[:4], *row.column("old_log_probs")[4:]])
    row.segments.append(Segment(np.arange(2), ids, np.ones(len(ids), bool)))
    with pytest.raises(UserError, match="responses of one turn"):
        teacher(row, [row])
