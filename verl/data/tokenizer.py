"""Load the tokenizer of a model directory or hub id, with the errors a user can act on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.data.files import DataError, notice

if TYPE_CHECKING:
    from verl.config.schema.model import ModelConfig


def load_tokenizer(
    model_path: str | os.PathLike[str] | None,
    *,
    tokenizer_path: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
) -> Any:
    """A transformers tokenizer. `tokenizer_path` (data.tokenizer, model.tokenizer_path) wins over the model's.

    chat_template: Jinja text or the path of a file with it; replaces the tokenizer's own. A tokenizer
    without a padding token gets its end token for it. Raises DataError when nothing can be loaded.
    """
    from transformers import AutoTokenizer

    source = str(tokenizer_path or model_path)
    local = Path(os.path.expandvars(source)).expanduser()
    if local.exists() and not local.is_dir():
        raise DataError(f"{source}: a model is a directory or a hub id, this is a file")
    if not local.exists() and (source.startswith(("/", "~", "./", "../")) or source.count("/") > 1):
        raise DataError(f"{source}: no such model directory (actor_rollout_ref.model.path)")
    try:
        place = str(local) if local.exists() else source
        if _model_type(place) == "kimi_vl":
            from verl.data import kimi_images

            tokenizer = kimi_images.load_tokenizer(place)
        else:
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(_why(source, local, error)) from error
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
        # transformers makes an empty one where the files of a known architecture are missing
        raise DataError(_why(source, local, ValueError("its vocabulary is empty")))
    if chat_template is not None:
        text = tokenizer.chat_template = template_text(chat_template)
        if text != chat_template:
            notice(f"chat template from {chat_template} ({len(text)} characters)")
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise DataError(f"{source}: the tokenizer has neither an end token nor a padding token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _model_type(place: str) -> str:
    """Of the model whose tokenizer it is; "" where that is not known."""
    from transformers import PretrainedConfig

    try:
        return str(PretrainedConfig.get_config_dict(place)[0].get("model_type", ""))
    except (OSError, ValueError):
        return ""


def tokenizer_of(model: ModelConfig, named: str | None = None) -> Any:
    """`load_tokenizer` of a model's configuration group; `named`: data.tokenizer."""
    return load_tokenizer(
        model.path,
        tokenizer_path=named or model.tokenizer_path,
        trust_remote_code=model.trust_remote_code,
        chat_template=model.custom_chat_template,
    )


def save_tokenizer(tokenizer: Any, processor_of: str | None, directory: Path) -> None:
    """Write a model's tokenizer, and its processor's files where it has one, to a checkpoint."""
    from verl.data.media import save_processor

    tokenizer.save_pretrained(directory)
    if processor_of is not None:
        save_processor(processor_of, directory)


def _why(source: str, local: Path, error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        todo = "model.trust_remote_code=True runs it (code of the model's author)"
        return f"{source}: its tokenizer is code shipped with the model; {todo}"
    if local.exists():
        files = ", ".join(sorted(p.name for p in local.iterdir())[:12]) or "nothing"
        todo = f"set actor_rollout_ref.model.tokenizer_path. Cause: {text.splitlines()[0]}"
        return f"{source}: no tokenizer could be loaded (the directory holds {files}); {todo}"
    return f"{source}: neither a directory here nor a model the hub gives us: {text.splitlines()[0]}"


def template_text(template: str) -> str:
    """`template` itself, or the content of the file it names. DataError if it is neither."""
    if "{" in template or "\n" in template:
        return template
    path = Path(os.path.expandvars(template)).expanduser()
    if not path.is_file():
        problem = f"neither Jinja text nor an existing file (looked at {path})"
        raise DataError(f"custom_chat_template: {template!r} is {problem}")
    return path.read_text(encoding="utf-8")
