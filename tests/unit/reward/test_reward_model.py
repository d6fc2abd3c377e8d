"""Reward models: packed scores against transformers' own, ranks, refusals; several rewards in one score; a served
judge."""

from __future__ import annotations

import asyncio
import io
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import ranks
from tests.tiny import CHAT_TEMPLATE, tiny_config, tiny_model, tiny_tokenizer, tiny_vision_model
from tests.unit.data.test_media import picture
from tests.unit.reward.test_parts import settings
from tests.unit.reward.test_runner import trajectory_of
from verl.compat import spellings
from verl.data.media import ImageProcessor, decoded, load_processor, open_image
from verl.engine.training.packing import pack
from verl.errors import UserError
from verl.models import pretrained
from verl.platform import detect
from verl.reward.outcome import Outcome, failed
from verl.reward.reward_model import RewardModel
from verl.reward.runner import RewardRunner
from verl.reward.user_function import taken
from verl.tracking.step_metrics import reward_metrics
from verl.trajectory import Batch, Media, Prompt, Trajectory, fill_flat
from verl.versions import satisfies, version
from verl.workers import build

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "gemma2": {"sliding_window": 16},
    "qwen3_moe": {},
    "gpt2": {"n_positions": 512},
}


def classifier(path: Path, arch: str = "qwen3", labels: int = 1, template: str = CHAT_TEMPLATE, **more: Any) -> Path:
    """A random sequence classifier with a tokenizer of its own."""
    made = tiny_config(arch, num_labels=labels, **more)
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(made, dtype=torch.float32).save_pretrained(path)
    tiny_tokenizer(path, template=template)
    return path


def run_config(path: Path | str, *words: str) -> Any:
    own = ("reward_model.enable=True", f"reward_model.model.path={path}", "trainer.device=cpu")
    fixed = (
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.path=m",
        "reward_model.rollout.dtype=float32",
    )
    return spellings.load([*fixed, *own, *words])


def dialogues() -> list[Trajectory]:
    """Groups whose dialogues begin alike, a response that is empty, and one alone."""
    texts = [["forty-two", "forty-one", ""], ["a", "a much longer answer " * 4], ["x"]]
    found = []
    for number, group in enumerate(texts):
        messages = [{"role": "system", "content": "s" * number}, {"role": "user", "content": f"{number}?"}]
        prompt = Prompt(f"0:{number}@0", np.zeros(2, np.int64), messages)
        found += [Trajectory(prompt, i, np.zeros(1, np.int64), np.ones(1, bool), text=t) for i, t in enumerate(group)]
    return found


def plain_scores(path: Path, rows: list[Trajectory]) -> list[float]:
    """One by one as its card says, and all together with padding on the right, which must agree."""
    module = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    told = [t.fields.get("messages") or [*t.prompt.messages, {"role": "assistant", "content": t.text}] for t in rows]
    ids = [tokenizer.apply_chat_template(messages, return_dict=False) for messages in told]
    alone = torch.cat([module(torch.tensor([one])).logits[:, 0] for one in ids])
    padded = tokenizer.pad({"input_ids": ids}, return_tensors="pt", padding_side="right")
    torch.testing.assert_close(module(**padded).logits[:, 0], alone, rtol=1e-4, atol=1e-5)
    return alone.tolist()


def scorer(path: Path, *words: str) -> tuple[RewardModel, list[int]]:
    """The reward model on an engine of this process, and the tokens of its passes."""
    made = run_config(path, *words)
    model, engine, passes = RewardModel(made), build.reward_engine(made, detect("cpu")), []

    async def scores(batch: Batch) -> None:
        rows = batch.segments
        passes.append(pack(rows, engine.forward_batching).size)
        fill_flat(rows, "scores", engine.forward(rows, ("scores",), temperature=1.0)["scores"])

    model.scores = scores
    return model, passes


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_packed_scores_are_those_of_transformers(tmp_path: Path, arch: str) -> None:
    path = classifier(tmp_path / "rm", arch, **ARCHITECTURES[arch])
    rows, (model, passes) = dialogues(), scorer(path)
    found = asyncio.run(model.score(rows))
    np.testing.assert_allclose([o.score for o in found], plain_scores(path, rows), rtol=1e-5, atol=1e-5)
    lengths = [len(model._ids(t.prompt, t.text or "")) for t in rows]
    assert len(passes) == 1 and passes[0] < sum(lengths), "one pass, and what a group begins with once"


ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"max_position_embeddings": 160},
    "roberta": {"max_position_embeddings": 500},
    "modernbert": {"head_dim": 8},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
}


@pytest.mark.parametrize("arch", ENCODERS)
def test_encoders_score_in_padded_batches(tmp_path: Path, arch: str) -> None:
    path = classifier(tmp_path / "rm", arch, **ENCODERS[arch])
    rows, made = dialogues(), run_config(path, "reward_model.rollout.max_num_batched_tokens=300")
    model, engine, sizes = RewardModel(made), build.reward_engine(made, detect("cpu")), []
    engine._module.register_forward_hook(lambda *called: sizes.append(called[2].logits.numel()))

    async def scores(batch: Batch) -> None:
        found = engine.forward(batch.segments, ("scores",), temperature=1.0)["scores"]
        fill_flat(batch.segments, "scores", found)

    model.scores = scores
    found = [outcome.score for outcome in asyncio.run(model.score(rows))]
    np.testing.assert_allclose(found, plain_scores(path, rows), rtol=1e-4, atol=1e-5)
    assert len(found) > len(sizes) > 1 and sum(sizes) == len(found), "several batches of several"
    if arch == "bert":
        (long,) = asyncio.run(model.score([trajectory_of("long" * 40)]))
        assert "the limit is 160" in str(long.error)


def test_a_dialogue_is_scored_with_its_roles(tmp_path: Path) -> None:
    model = RewardModel(run_config(classifier(tmp_path / "m")))
    said = [("user", "3*4?"), ("assistant", "call"), ("tool", "12"), ("assistant", "It is 12.")]
    messages = [{"role": role, "content": content} for role, content in said]
    ids = model._ids(Prompt("0:0@0", np.zeros(2, np.int64), messages[:1]), "call12It is 12.", messages)
    text = tiny_tokenizer().decode(ids)
    assert [text.index(f"<|im_start|>{role}\n{content}<|im_end|>") >= 0 for role, content in said] == [True] * 4


def test_a_last_token_that_is_the_padding_token_does_not_count(tmp_path: Path) -> None:
    path = classifier(tmp_path / "rm", template=CHAT_TEMPLATE + "{{ '<|endoftext|>' }}")
    rows, (model, _) = dialogues(), scorer(path)
    found = [outcome.score for outcome in asyncio.run(model.score(rows))]
    np.testing.assert_allclose(found, plain_scores(path, rows), rtol=1e-5, atol=1e-5)


def test_many_rows_take_few_passes(tmp_path: Path) -> None:
    path = classifier(tmp_path / "rm")
    made = run_config(path)
    engine, model, rows = build.reward_engine(made, detect("cpu")), RewardModel(made), dialogues() * 8
    forwards = []
    engine.module.base_model.register_forward_hook(lambda *_: forwards.append(1))

    async def scores(batch: Batch) -> None:
        fill_flat(batch.segments, "scores", engine.forward(batch.segments, ("scores",), temperature=1.0)["scores"])

    model.scores = scores
    assert len(asyncio.run(model.score(rows))) == 48 and len(forwards) <= 2


def ranked(path: str) -> list[float]:
    model, _ = scorer(Path(path))
    rows = dialogues()
    inner = model.scores

    async def mine(batch: Batch) -> None:
        import torch.distributed as dist

        rank = dist.get_rank()
        await inner(Batch(list(batch)[rank::2]))  # type: ignore[misc]
        for t in list(batch)[1 - rank :: 2]:
            t.scores = np.full(t.length, np.nan, np.float32)

    model.scores = mine
    return [o.score if o.error is None else np.nan for o in asyncio.run(model.score(rows))]


def test_two_ranks_score_as_one(tmp_path: Path) -> None:
    path = classifier(tmp_path / "rm")
    found = np.nanmax(np.array(ranks.run(ranked, 2, str(path)), float), axis=0)
    np.testing.assert_allclose(found, plain_scores(path, dialogues()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("lm", "this is Qwen3ForCausalLM, not a sequence classifier"),
        ("labels", "it has 3 labels; a reward model has one"),
        ("template", "no chat template"),
        ("tokenizer", "its tokenizer has 261 tokens, its vocabulary 250"),
    ],
)
def test_models_that_cannot_score(tmp_path: Path, kind: str, message: str) -> None:
    path = tmp_path / "rm"
    if kind == "lm":
        tiny_model(path)
    else:
        template = None if kind == "template" else CHAT_TEMPLATE
        vocabulary = {"vocab_size": 250, "eos_token_id": 1, "pad_token_id": 0} if kind == "tokenizer" else {}
        classifier(path, labels=3 if kind == "labels" else 1, template=template, **vocabulary)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message) as raised:
        scorer(path)
    assert "reward_model.model" in str(raised.value)


def test_what_cannot_be_scored_is_a_failure(tmp_path: Path) -> None:
    refuses = (
        "{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('no system') }}{%- endif -%}" + CHAT_TEMPLATE
    )
    model, _ = scorer(classifier(tmp_path / "rm", template=refuses), "reward_model.rollout.max_model_len=40")
    rows = [trajectory_of("short"), trajectory_of("long" * 20), *dialogues()[:1]]
    found = asyncio.run(model.score(rows))
    assert found[0].error is None
    assert "103 tokens; the limit is 40 (reward_model.rollout.max_model_len" in str(found[1].error)
    assert "no system" in str(found[2].error)
    with pytest.raises(UserError, match="cannot score row"):
        model.check(rows[2].prompt)


# ------------------------------------------------------------------------------------------ several rewards


class Says:
    """Stands for a reward model: a score of the response's length, a failure for one that says so."""

    label = "the reward model (m)"

    async def score(self, rows: list[Trajectory]) -> list[Outcome]:
        return [failed("value", "nonsense") if t.text == "bad" else Outcome(float(len(t.text or ""))) for t in rows]


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise": raise ValueError("no")
    return {"score": 2.0, "format": 0.5} if solution_str != "bare" else 2.0
"""


def scored(tmp_path: Path, texts: list[str], weights: str, *words: str) -> list[Trajectory]:
    (tmp_path / "r.py").write_text(REWARD)
    own = (f"custom_reward_function.path={tmp_path / 'r.py'}", f"reward_model.weights={weights}", *words)
    chosen = settings("reward_model.enable=True", "reward_model.model.path=m", *own)
    runner = RewardRunner(None, settings=chosen, model=Says() if "model" in weights else None)  # type: ignore[arg-type]
    rows = [trajectory_of(text, i, data_source="openai/gsm8k") for i, text in enumerate(texts)]

    async def work() -> None:
        await asyncio.gather(*(runner.score(t) for t in rows))
        await runner.score_batch(rows)

    try:
        asyncio.run(work())
    finally:
        runner.close()
    return rows


def test_rewards_add_up_by_weight(tmp_path: Path) -> None:
    rows = scored(tmp_path, ["#### 72", "bad", "raise", "bare"], "{function: 1, model: 0.5, format: 2}")
    assert rows[0].score == 2.0 + 0.5 * 7 + 2 * 0.5
    assert rows[0].score_parts == {"function": 2.0, "format": 0.5, "model": 7.0}
    assert rows[3].score_parts == {"function": 2.0, "acc": 2.0}
    errors = ["nonsense", "ValueError: no", "its result lacks format (reward_model.weights)"]
    assert [t.score for t in rows[1:]] == [None, None, None], "a part that failed is no 0"
    assert all(text in str(t.score_error) for t, text in zip(rows[1:], errors, strict=True))
    assert str(rows[1].score_error).startswith("the reward model (m): ")
    metrics = reward_metrics(Batch(rows))
    assert (
        metrics["reward/errors"] == 3 and metrics["reward/model/mean"] == 7.0 and metrics["reward/format/mean"] == 0.5
    )


def test_the_penalty_on_length_comes_after_the_sum(tmp_path: Path) -> None:
    key = "reward_model.reward_kwargs"
    words = (
        f"{key}.overlong_buffer_cfg.enable=True",
        f"{key}.overlong_buffer_cfg.len=4",
        f"{key}.max_resp_len=6",
    )
    (row,) = scored(tmp_path, ["abc"], "{function: 1, model: 1}", *words)
    assert row.score == 2.0 + 3.0 - 3 / 4 and row.score_parts["function"] == 2.0


def test_a_model_alone_scores_without_a_function() -> None:
    chosen = settings("reward_model.enable=True", "reward_model.model.path=m")
    runner, row = RewardRunner(None, settings=chosen, model=Says()), trajectory_of("four")  # type: ignore[arg-type]
    asyncio.run(runner.score(row))
    assert row.score is None and not row.score_parts
    asyncio.run(runner.score_batch([row]))
    assert row.score == 4.0 and row.score_parts == {"model": 4.0}


# -------------------------------------------------------------------------------------------- a judge


def ask(address: str, body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(f"{address}/chat/completions", data=json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as answered:
            return answered.status, json.load(answered)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_judge_is_served(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "judge")
    judge = build.judge(run_config(path, "reward_model.rollout.max_num_seqs=4"))
    address = judge.offered["reward_router_address"]
    message = {"role": "user", "content": "Is it right?"}

    def asks(solution_str: str, *, reward_router_address: str, reward_model_tokenizer: Any) -> None: ...

    given = taken(asks, judge.offered)
    assert given["reward_router_address"] == address and given.keys() == set(list(judge.offered)[:2])
    assert given["reward_model_tokenizer"].decode([72 - 33]) == "H"
    try:
        status, one = ask(address, {"messages": [message], "max_tokens": 5, "temperature": 0})
        assert status == 200 and one["choices"][0]["finish_reason"] in ("length", "stop")
        judge.sleep()
        judge.wake()
        assert ask(address, {"messages": [message], "max_tokens": 5, "temperature": 0}) == (200, one)
        for wrong in ({}, {"messages": "x"}, {"messages": [message | {"content": "x" * 5000}]}, []):
            status, told = ask(address, wrong)
            assert status == 400 and told["error"]
    finally:
        judge.close()


# ------------------------------------------------------------------------------------------- models that see


def seen_prompts(processor: Any) -> list[Prompt]:
    """Two prompts with an image each, one without; what scores gets the images."""
    made, found = ImageProcessor(processor, scored=True), []
    for number, colour in enumerate(("red", "blue", None)):
        messages: Any = [{"role": "user", "content": "Which?"}]
        media = None
        if colour:
            messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}]
            text = made.processor.tokenizer.apply_chat_template(messages, tokenize=False)
            media = made(text, [Image.new("RGB", (24 + 16 * number, 32), colour)], Path())[1]
        found.append(Prompt(f"0:{number}@0", np.zeros(2, np.int64), messages, media=media))
    return found


def test_a_reward_model_sees_the_images(tmp_path: Path) -> None:
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.modeling_layers import GenericForSequenceClassification

    path = tiny_vision_model(tmp_path / "rm")
    kind = pretrained._headed(Qwen2_5_VLForConditionalGeneration, GenericForSequenceClassification)
    settings = AutoConfig.from_pretrained(path)
    settings.num_labels = 1
    module = kind(settings).eval()
    module.save_pretrained(path)
    with pytest.raises(UserError, match="set reward_model"):
        scorer(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    processor = load_processor(str(path), tokenizer, {})
    rows = [
        Trajectory(prompt, i, np.zeros(1, np.int64), np.ones(1, bool), text=text)
        for prompt in seen_prompts(processor)
        for i, text in enumerate(("red", "it is blue", ""))
    ]
    model, passes = scorer(path, "reward_model.images=True")
    found = [outcome.score for outcome in asyncio.run(model.score(rows))]
    expected = []
    for row in rows:
        dialogue = [*row.prompt.messages, {"role": "assistant", "content": row.text}]
        text = tokenizer.apply_chat_template(dialogue, tokenize=False)
        files = row.prompt.media.files if row.prompt.media else ()
        images = [decoded(open_image(file, Path())) for file in files]
        inputs = processor(text=[text], images=images or None, return_tensors="pt")
        with torch.no_grad():
            expected.append(float(module(**inputs).logits[0, 0]))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert len(passes) == 1 and len({round(score, 4) for score in expected}) == 9
    stray = Trajectory(rows[0].prompt, 0, np.zeros(1, np.int64), np.ones(1, bool), text="<|image_pad|>")
    assert "image tokens" in str(asyncio.run(model.score([stray]))[0].error)


@pytest.mark.skipif(satisfies(str(version("transformers")), "<5.18"), reason="images need transformers >=5.18")
def test_a_served_judge_sees_images(tmp_path: Path) -> None:
    parts = [{"type": "image_url", "image_url": {"url": Media({}, files=(picture(),)).uris()[0]}}]
    body = {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "Right?"}]}],
        "max_tokens": 3,
    }
    for path, expected in ((tiny_vision_model(tmp_path / "vl"), 200), (tiny_model(tmp_path / "blind"), 400)):
        judge = build.judge(run_config(path, "reward_model.rollout.max_num_seqs=4"))
        try:
            status, told = ask(judge.offered["reward_router_address"], body)
            assert status == expected, told
        finally:
            judge.close()
    assert "sees no images" in told["error"]


def test_clip_compares_the_response_with_the_image(tmp_path: Path) -> None:
    from transformers import CLIPConfig, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    from verl.reward.clip import compute_score

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = shape | {"vocab_size": 264, "eos_token_id": 258, "max_position_embeddings": 8}
    sight = shape | {"image_size": 16, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=sight, projection_dim=8)).save_pretrained(tmp_path)
    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    tiny_tokenizer(tmp_path)
    uris = Media({}, files=(picture(),)).uris()
    found = [
        compute_score("x", said, None, {"images": uris * n}, model=str(tmp_path))
        for said, n in (("a", 1), ("a", 2), ("much too long a text", 1), ("", 1))
    ]
    assert found[0] == pytest.approx(found[1]) and len({one["clip_similarity"] for one in found}) >= 3
    for one in found:
        assert -1 <= one["clip_similarity"] <= 1
        assert one["score"] == pytest.approx(2.5 * max(0, one["clip_similarity"]))
    with pytest.raises(ValueError, match="is not set"):
        compute_score("x", "a", None, {}, model=str(tmp_path))


def test_siglip_reads_texts_as_it_was_trained_on_them(tmp_path: Path) -> None:
    from transformers import SiglipConfig, SiglipModel
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    from verl.reward.clip import compute_score

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = shape | {"vocab_size": 264, "max_position_embeddings": 8, "projection_size": 16}
    sight = shape | {"image_size": 16, "patch_size": 8}
    model = SiglipModel(SiglipConfig(text_config=text, vision_config=sight)).eval()
    model.save_pretrained(tmp_path)
    images = SiglipImageProcessorPil(size={"height": 16, "width": 16})
    images.save_pretrained(tmp_path)
    tokenizer, picture_ = tiny_tokenizer(tmp_path), Media({}, files=(picture(),))
    found = compute_score("x", "ab", None, {"images": picture_.uris()}, model=str(tmp_path))
    ids = tokenizer("ab", padding="max_length", max_length=8, return_tensors="pt")["input_ids"]
    pixels = images(Image.open(io.BytesIO(picture_.files[0])), return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        said = model(input_ids=ids, pixel_values=pixels)
    assert ids.shape == (1, 8)
    assert found["clip_similarity"] == pytest.approx(float((said.text_embeds @ said.image_embeds.T)[0, 0]))
