"""What our worker looks after in vLLM's layer-wise reload: small modules, no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm_cases import require_vllm
from verl.engine.rollout.vllm import worker

require_vllm()


class Decoder(torch.nn.Module):
    """One weight is loaded as vLLM's reload expects, one is copied by the model itself, one is made of the first."""

    def __init__(self, *, head: bool = False) -> None:
        super().__init__()
        self.seen, self.own = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
        self.config = SimpleNamespace(tie_word_embeddings=True)
        if head:
            self.lm_head = torch.nn.Linear(3, 3, bias=False)

    def load_weights(self, weights: Any) -> set[str]:
        loaded = set()
        for name, value in weights:
            parameter = dict(self.named_parameters())[name]
            if name.startswith("own"):
                parameter.data.copy_(value)
            else:
                parameter.weight_loader(parameter, value)
            loaded.add(name)
        return loaded


def reloaded(model: Any, names: tuple[str, ...]) -> None:
    vllm_worker = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        device=torch.device("cpu"),
        vllm_config=None,
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    worker._reload(vllm_worker, ((name, torch.ones(3, 3)) for name in names))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    import contextlib

    import vllm.config
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    monkeypatch.setattr(vllm.config, "set_current_vllm_config", lambda config: contextlib.nullcontext())
    out = Decoder()
    record_metadata_for_reloading(out)
    return out


def test_weights_that_a_model_copies_past_the_reload_are_an_error(model: Decoder) -> None:
    old = model.own.weight.detach().clone()
    with pytest.raises(ValueError, match=r"Decoder copies 1 weights by itself.*'own\.weight'.*rollout\.name=native"):
        reloaded(model, ("seen.weight", "own.weight"))
    assert torch.equal(model.own.weight, old), "it was not loaded, although the model says so"


def test_what_is_made_of_weights_need_not_come(model: Decoder) -> None:
    del model.own
    model.attention = torch.nn.Module()
    model.attention.made = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    reloaded(model, ("seen.weight",))
    assert torch.equal(model.seen.weight, torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"no value came for 1 .*'seen\.weight'"):
        reloaded(model, ())


def test_a_weight_without_a_place_is_named(model: Decoder) -> None:
    with pytest.raises(ValueError, match=r"Decoder has no place for the weight 'gate\.bias'.*config\.json"):
        reloaded(model, ("gate.bias",))


def test_a_tied_output_matrix_goes_only_where_there_is_one() -> None:
    def names(model: Any) -> list[str]:
        weights = [("embed_tokens.weight", torch.ones(2)), ("lm_head.weight", torch.ones(2))]
        return [name for name, _ in worker._without_tied_head(model, weights)]

    assert names(Decoder(head=True)) == ["embed_tokens.weight", "lm_head.weight"]
    plain = Decoder()
    assert names(plain) == ["embed_tokens.weight"]
    plain.config.tie_word_embeddings = False
    with pytest.raises(ValueError, match="an output matrix of its own"):
        names(plain)
