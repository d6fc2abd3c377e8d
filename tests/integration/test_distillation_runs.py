"""Distillation from the command line: several teachers by row, exact resume, teachers that do not fit."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.test_vision_runs import VisionRun
from tests.runs import TinyRun, from_step, records, weights
from tests.tiny import SPECIAL, VISION, VISION_TEMPLATE, VOCAB_SIZE, tiny_model, tiny_tokenizer
from tests.unit.data.test_text_spans import pairs_tokenizer
from verl.trainer.main_ppo import main
from verl.workers.roles import Policy

TEACHERS = "distillation.teacher_models"
ON = ("distillation.enabled=True", "distillation.distillation_loss.loss_mode=k2")


def of_two_subjects(path: Path) -> None:
    """Add a column that names a subject to each row."""
    table = pq.read_table(path)
    subjects = [("letters", "digits")[i % 2] for i in range(len(table))]
    pq.write_table(table.append_column("subject", pa.array(subjects)), path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = TinyRun(tmp_path_factory.mktemp("distill"))
    of_two_subjects(run.train)
    of_two_subjects(run.val)
    for number in (1, 2, 3):
        tiny_model(run.root / f"teacher_{number}", seed=number, scale=4.0, hidden_size=16 * number)
    return run


def two_teachers(tiny: TinyRun, second: int = 2) -> list[str]:
    return [
        *ON,
        "distillation.teacher_key=subject",
        f"+{TEACHERS}.letters.model_path={tiny.root / 'teacher_1'}",
        f"+{TEACHERS}.counting={{key:digits,model_path:{tiny.root / f'teacher_{second}'}}}",
        "trainer.test_freq=-1",
    ]


def trained(tiny: TinyRun, out: Path, *words: str) -> dict[int, dict]:
    assert main(tiny.overrides(out, *words)) == 0
    return records(out)


def test_teachers_by_row_go_on_exactly_and_are_seen(tiny: TinyRun, tmp_path: Path) -> None:
    words = two_teachers(tiny)
    whole = trained(tiny, tmp_path / "whole", *words, "trainer.total_training_steps=3")
    parts = from_step(tmp_path / "whole", 1, tmp_path / "parts")
    later = trained(tiny, parts, *words, "trainer.total_training_steps=3")
    assert later == {step: whole[step] for step in (1, 2, 3)}
    assert weights(tmp_path / "parts", 3) == weights(tmp_path / "whole", 3)
    other = trained(tiny, tmp_path / "other", *two_teachers(tiny, 3), "trainer.total_training_steps=1")
    for name in ("actor/grad_norm", "distillation/loss"):
        assert other[1][name] != pytest.approx(whole[1][name], rel=1e-3), name
    assert other[1]["actor/entropy"] == whole[1]["actor/entropy"]


@pytest.mark.long
def test_the_mix_of_two_teachers_is_that_of_each_on_its_rows(tiny: TinyRun, tmp_path: Path) -> None:
    """With one teacher under both keys the run is that of one teacher."""
    one = f"{TEACHERS}.teacher_model.model_path={tiny.root / 'teacher_1'}"
    same = [word.replace("teacher_2", "teacher_1") for word in two_teachers(tiny)]
    short = ("trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.test_freq=-1")
    alone = trained(tiny, tmp_path / "alone", *ON, one, *short)
    both = trained(tiny, tmp_path / "both", *same, *short)
    for step, record in alone.items():
        assert both[step] == pytest.approx(record, rel=1e-4, abs=1e-6, nan_ok=True)


def test_a_row_without_a_teacher_is_named(tiny: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [word for word in two_teachers(tiny) if "counting" not in word]
    words.append(f"+{TEACHERS}.others.model_path={tiny.root / 'teacher_2'}")
    assert main(tiny.overrides(tmp_path / "out", *words)) == 2
    said = capfd.readouterr().err
    assert "train.parquet row 1: subject='digits' has no teacher" in said and "letters, others" in said


def test_a_teacher_of_another_vocabulary_is_refused(
    tiny: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = tiny_model(tmp_path / "small", vocab_size=262)
    renamed = tiny_model(tmp_path / "renamed")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|extra|>"])
    policys = tiny.root / "with_extra"
    tiny_model(policys)
    tokenizer.save_pretrained(str(policys))
    for policy, teacher, part in (
        (tiny.model, small, "its vocabulary has 262 tokens, the policy's 264"),
        (policys, renamed, "token '<|extra|>' is 261 for the policy and absent there"),
    ):
        words = (f"actor_rollout_ref.model.path={policy}", f"{TEACHERS}.teacher_model.model_path={teacher}")
        assert main(tiny.overrides(tmp_path / "out", *ON, *words)) == 2
        said = capfd.readouterr().err
        assert part in said and "distillation.teacher_models" in said


def test_the_reverse_kl_of_a_teacher_that_is_the_policy_is_zero(tiny: TinyRun, tmp_path: Path) -> None:
    loss = "distillation.distillation_loss"
    words = [ON[0], f"{loss}.loss_mode=reverse_kl_topk", f"{loss}.topk=4", f"{loss}.use_task_rewards=False"]
    short = ("trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.test_freq=-1")
    for number, teacher in enumerate((tiny.model, tiny.root / "teacher_1")):
        model = f"{TEACHERS}.teacher_model.model_path={teacher}"
        one_update = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
        found = trained(tiny, tmp_path / str(number), *words, model, one_update, *short)[1]
        same = found["distillation/teacher_mass"] == pytest.approx(found["distillation/student_mass"], rel=1e-5)
        assert same == (number == 0) and (found["distillation/loss"] < 1e-6) == (number == 0)


PROMPT = "{prompt} The answer is {ground_truth}, row {index}, {length} characters."
"""A teacher's prompt: of the message, the row and what the reward function returned."""


@pytest.mark.parametrize(
    ("mode", "template"),
    [
        ("k1", PROMPT),
        pytest.param("jsd_topk", PROMPT, marks=pytest.mark.long),
        ("k3", "{prompt} Somebody said {solution}."),
    ],
)
def test_a_teacher_that_is_the_policy_and_reads_more(
    mode: str, template: str, tiny: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says of each response is what transformers says of it after the longer prompt; two steps are trained."""
    seen: list = []
    update = Policy.update
    monkeypatch.setattr(
        Policy, "update", lambda role, batch, **more: (seen.append(list(batch)), update(role, batch, **more))[1]
    )
    loss = "distillation.distillation_loss"
    own = [f"{TEACHERS}.teacher_model.prompt='{template}'", f"{loss}.loss_mode={mode}", f"{loss}.topk=4"]
    own.append(f"{TEACHERS}.teacher_model.solution_score=0.1")
    more = [f"{loss}.use_task_rewards=False", f"{loss}.use_policy_gradient={mode == 'k1'}", ON[0]]
    found = trained(tiny, tmp_path / "out", *own, *more, "trainer.total_training_steps=2", "trainer.test_freq=-1")
    assert found[2]["actor/grad_norm"] > 0 and found[2]["distillation/abs_loss"] > 0
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    network = AutoModelForCausalLM.from_pretrained(tiny.model).eval()
    shown = 0
    for row in seen[0]:
        text = row.prompt.messages[0]["content"]
        others = [other for other in seen[0] if other.uid == row.uid and other is not row and other.score >= 0.1]
        solution = max(others, key=lambda other: other.score).text if others else None
        shown += solution is not None
        filled = {"prompt": text, "ground_truth": row.prompt.ground_truth, **row.prompt.extra_info, **row.score_parts}
        told = template.format(**filled, solution=solution) if solution or template == PROMPT else text
        content = [{"role": "user", "content": told}]
        context = tokenizer(tokenizer.apply_chat_template(content, tokenize=False, add_generation_prompt=True))
        ids = torch.tensor([[*context["input_ids"], *row.response_ids]])
        with torch.no_grad():
            log_probs = network(ids).logits[0, -len(row.response_ids) - 1 : -1].log_softmax(-1)
        if mode != "jsd_topk":
            expected = log_probs.gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]
            assert row.teacher_log_probs == pytest.approx(expected.numpy(), abs=1e-4)
        else:
            expected = log_probs.gather(1, torch.tensor(row.teacher_topk_ids).long())
            assert row.teacher_topk_log_probs == pytest.approx(expected.numpy(), abs=1e-4)
    assert 0 < shown < len(seen[0])


def test_a_text_model_teaches_a_policy_that_sees_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what transformers says of the response after the prompt less its images, over tokens that can be
    sampled."""
    seen: list = []
    update = Policy.update
    monkeypatch.setattr(
        Policy, "update", lambda role, batch, **more: (seen.extend(batch), update(role, batch, **more))[1]
    )
    run = VisionRun(tmp_path)
    teacher = tiny_model(tmp_path / "teacher", seed=5, scale=4.0, vocab_size=272)
    tiny_tokenizer(teacher, template=VISION_TEMPLATE, special=SPECIAL + VISION)
    words = ["distillation.enabled=True", "distillation.distillation_loss.loss_mode=jsd_topk"]
    words += [f"{TEACHERS}.teacher_model.model_path={teacher}", "distillation.distillation_loss.topk=8"]
    found = trained(run, tmp_path / "out", *words, "trainer.total_training_steps=1", "trainer.test_freq=-1")
    assert found[1]["actor/grad_norm"] > 0
    network, marks = AutoModelForCausalLM.from_pretrained(teacher).eval(), list(range(VOCAB_SIZE, VOCAB_SIZE + 4))
    assert any(row.prompt.media for row in seen) and any(not row.prompt.media for row in seen)
    for row in seen:
        ids = torch.tensor([[*(i for i in row.prompt.ids if i not in marks), *row.response_ids]])
        with torch.no_grad():
            logits = network(ids).logits[0, -len(row.response_ids) - 1 : -1]
        logits[:, marks] = -torch.inf
        best = logits.log_softmax(-1).topk(8)
        assert row.teacher_topk_log_probs == pytest.approx(best.values.numpy(), abs=1e-4)
        assert (row.teacher_topk_ids == best.indices.numpy()).all()


def test_a_name_that_a_row_has_not_ends_the_run(
    tiny: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = (ON[0], f"{TEACHERS}.teacher_model.prompt='{{prompt}} {{solutions}}'", "trainer.test_freq=-1")
    assert main(tiny.overrides(tmp_path / "out", *words)) == 2
    assert "has no 'solutions' (there are: length, " in capfd.readouterr().err


def test_a_teacher_that_follows_the_policy_is_in_the_checkpoints(tiny: TinyRun, tmp_path: Path) -> None:
    """After k steps it is the moving average of the policy at the start of each; a resumed run goes on exactly."""
    teacher = f"{TEACHERS}.teacher_model"
    words = [*ON, f"{teacher}.update_rate=0.25", f"{teacher}.prompt='{PROMPT}'", "trainer.test_freq=-1"]
    words += ["trainer.total_training_steps=3"]
    whole = trained(tiny, tmp_path / "whole", *words)
    later = trained(tiny, from_step(tmp_path / "whole", 1, tmp_path / "parts"), *words)
    assert later == {step: whole[step] for step in (1, 2, 3)}
    average = {
        name: value.clone() for name, value in AutoModelForCausalLM.from_pretrained(tiny.model).named_parameters()
    }
    for step in range(1, 4):  # before step n + 1 the average takes in the policy of step n; that of step 0 is itself
        held = AutoModelForCausalLM.from_pretrained(tmp_path / f"whole/global_step_{step}/teacher_teacher_model")
        for name, value in held.named_parameters():
            torch.testing.assert_close(value, average[name], rtol=1e-5, atol=1e-6)
        policy = dict(
            AutoModelForCausalLM.from_pretrained(tmp_path / f"whole/global_step_{step}/actor").named_parameters()
        )
        average = {name: value + 0.25 * (policy[name] - value) for name, value in average.items()}


def test_a_teacher_reads_right_and_wrong_responses(
    tiny: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rlcsd compares is what transformers says of a response after each; without both it learns nothing."""
    seen: list = []
    update = Policy.update
    monkeypatch.setattr(
        Policy, "update", lambda role, batch, **more: (seen.append(list(batch)), update(role, batch, **more))[1]
    )
    teacher, loss = f"{TEACHERS}.teacher_model", "distillation.distillation_loss"
    words = [ON[0], f"{teacher}.prompt='{{prompt}} Somebody said {{solution}}.'", f"{teacher}.contrast=2"]
    words += [f"{teacher}.solution_score=0.15", f"{loss}.distillation_loss_coef=0", "algorithm.adv_estimator=rlcsd"]
    short = ("trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.test_freq=-1")
    trained(tiny, tmp_path / "out", *words, *short, "actor_rollout_ref.rollout.n=5")
    tokenizer, network = (
        AutoTokenizer.from_pretrained(tiny.model),
        AutoModelForCausalLM.from_pretrained(tiny.model).eval(),
    )

    def after(row, solution: str) -> torch.Tensor:
        content = [{"role": "user", "content": f"{row.prompt.messages[0]['content']} Somebody said {solution}."}]
        context = tokenizer(tokenizer.apply_chat_template(content, tokenize=False, add_generation_prompt=True))
        ids = torch.tensor([[*context["input_ids"], *row.response_ids]])
        with torch.no_grad():
            log_probs = network(ids).logits[0, -len(row.response_ids) - 1 : -1].log_softmax(-1)
        return log_probs.gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]

    compared = 0
    for row in seen[0]:
        others = [other for other in seen[0] if other.uid == row.uid and other is not row]
        right = [other for other in others if other.score >= 0.15]
        wrong = [other for other in others if other.score < 0.15]
        assert bool(row.extra.get("without_contrast")) == (not right or not wrong)
        if not right or not wrong:
            assert not row.advantages.any()
            continue
        compared += 1
        best = max(right, key=lambda other: other.score).text
        assert row.teacher_log_probs == pytest.approx(after(row, best).numpy(), abs=1e-4)
        order = sorted(wrong, key=lambda other: (other.index < row.index, other.index))[:2]
        mean = torch.stack([after(row, other.text) for other in order]).logsumexp(0) - math.log(len(order))
        assert row.teacher_contrast_log_probs == pytest.approx(mean.numpy(), abs=1e-4)
    assert compared


def test_a_teacher_with_another_tokenizer_trains(tiny: TinyRun, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny_model(other, seed=5, vocab_size=300)
    pairs_tokenizer().save_pretrained(other)
    loss, teacher = "distillation.distillation_loss", f"{TEACHERS}.teacher_model"
    words = [ON[0], f"{loss}.loss_mode=k1", f"{loss}.use_policy_gradient=True", f"{loss}.use_task_rewards=False"]
    words += [f"{teacher}.model_path={other}", f"{teacher}.own_tokenizer=True"]
    short = ("trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.test_freq=-1")
    found = trained(tiny, tmp_path / "out", *words, *short)
    assert found[2]["actor/grad_norm"] > 0 and found[1]["distillation/abs_loss"] > 0


def test_sources_and_demonstrations_in_one_run(tiny: TinyRun, tmp_path: Path) -> None:
    """Two environments with an estimator and a loss each, and the rows' demonstrations in every update."""
    rows = pq.read_table(tiny.train).to_pylist()
    for i, row in enumerate(rows):
        row["data_source"], row["solution"] = ("test/letters", "test/digits")[i % 2], "abc"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    own = "{loss_mode:gspo,clip_ratio_low:3e-4,clip_ratio_high:4e-4}"
    sources = f"{{test/digits:{{adv_estimator:rloo,weight:0.5,policy_loss:{own}}}}}"
    words = [f"data.train_files={tmp_path / 'train.parquet'}", f"algorithm.by_source={sources}"]
    words += ["actor_rollout_ref.actor.demonstrations.column=solution", "actor_rollout_ref.actor.demonstrations.mu=0.5"]
    short = ("trainer.total_training_steps=3", "trainer.save_freq=-1", "trainer.test_freq=-1")
    found = trained(tiny, tmp_path / "out", *words, *short)
    losses = [found[step]["actor/demonstration_loss"] for step in (1, 2, 3)]
    assert losses == sorted(losses, reverse=True) and found[1]["actor/demonstration_weight"] == 0.5
    assert found[1]["actor/pg_loss"] != 0
