"""The dialects that a session speaks over HTTP: a module each, which translates a request into a dialogue of the
session, and a turn into the dialect's reply or the events of its stream.

The run decides how tokens are sampled: of a request only the most tokens, stop strings and tools count.
"""

from __future__ import annotations

from verl.rollout.dialects import anthropic, chat, completions, responses, tokens
from verl.rollout.http_sessions import ROUTES

ROUTES |= {
    "v1/chat/completions": ("POST", chat.create),
    "v1/completions": ("POST", completions.create),
    "v1/responses": ("POST", responses.create),
    "v1/responses/ID": ("GET", responses.retrieve),
    "v1/messages": ("POST", anthropic.create),
    "v1/messages/count_tokens": ("POST", anthropic.count_tokens),
    "v1/models": ("GET", tokens.models),
    "v1/models/ID": ("GET", tokens.model),
    "inference/v1/generate": ("POST", tokens.generate),
    "v1/inference/v1/generate": ("POST", tokens.generate),
    "tokenize": ("POST", tokens.tokenize),
    "detokenize": ("POST", tokens.detokenize),
}
