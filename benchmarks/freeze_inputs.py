"""What the frozen runs read: random models, a tokenizer of one token per character, arithmetic rows, a reward, a
plug-in.

Made once, when a record begins, and kept beside it; nothing here is imported from the product.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_tied": {"tie_word_embeddings": True},
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    # vLLM's kernels for processors have no attention heads of fewer than 32 elements.
    "qwen3_vllm": {"hidden_size": 64, "head_dim": 32},
}
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """A score that differs between responses of a random model: digits help, the right digit helps more."""
    digits = [c for c in solution_str if c.isdigit()]
    right = ground_truth in solution_str
    return {"score": len(digits) / (1 + len(solution_str)) + right, "acc": right, "pred": "".join(digits[:1])}
'''
PLUGIN = """
import torch
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss


@register_adv_est("frozen_median")
def frozen_median(token_level_rewards, response_mask, index, config=None):
    scores = token_level_rewards.sum(-1)
    advantage = torch.empty_like(scores)
    for group in sorted(set(index)):
        members = torch.tensor([key == group for key in index])
        advantage[members] = scores[members] - scores[members].quantile(0.5)
    advantages = advantage.unsqueeze(-1) * response_mask
    return advantages, advantages


@register_policy_loss("frozen_soft_clip")
def frozen_soft_clip(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
):
    difference = log_prob - old_log_prob
    terms = -advantages * torch.tanh(difference / config.clip_ratio) * config.clip_ratio
    loss = agg_loss(terms, response_mask, loss_agg_mode, **config.global_batch_info)
    return loss, {"actor/frozen_size": ((difference.abs() * response_mask).sum() / response_mask.sum()).detach()}
"""
YAML = "defaults:\n  - ppo_trainer\n  - _self_\ndata:\n  train_batch_size: 32\ntrainer:\n  total_epochs: 7\n"


def make(folder: Path) -> None:
    """Write everything below `folder`: models/NAME, train.parquet, val.parquet, sft.jsonl, reward.py, plugins/,
    small.yaml."""
    for name, changes in MODELS.items():
        make_model(folder / "models" / name, name.split("_")[0] if name != "qwen3_moe" else name, changes)
    write_parquet(folder / "train.parquet", 24)
    write_parquet(folder / "val.parquet", 5)
    sums = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(9) for b in range(3)]
    (folder / "sft.jsonl").write_text("\n".join(map(json.dumps, sums)))
    (folder / "reward.py").write_text(REWARD)
    (folder / "plugins").mkdir()
    (folder / "plugins/frozen_plugin.py").write_text(PLUGIN)
    (folder / "small.yaml").write_text(YAML)


def make_model(path: Path, kind: str, changes: dict[str, Any]) -> None:
    """Save a random model of two layers with its tokenizer. Weights are four times the usual ones, so that the
    distribution over tokens is far from flat."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": 104,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": len(CHARACTERS) + SPECIAL.index("<|im_end|>"),
        "pad_token_id": len(CHARACTERS),
    }
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **(shape | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)


def make_tokenizer() -> Any:
    """One token per printable character, so that a response's text tells its ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = [level.pre_tokenize_str(character)[0][0] for character in CHARACTERS]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = level
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=512
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_parquet(path: Path, count: int) -> None:
    """Additions of one-digit numbers from two data sources, as chats of one message."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for i in range(count):
        first, second = i % 5, (i * 3) % 5
        rows.append(
            {
                "data_source": ("sums/small", "sums/large")[i % 2],
                "prompt": [{"role": "user", "content": f"{first} + {second} =" + " ?" * (i % 4)}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(first + second)},
                "extra_info": {"split": path.stem, "index": i},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path)
