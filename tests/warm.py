"""What each process of a run, or of a rank, would compute once for itself; a process that imports this before it forks
them saves each of them up to half a second of a core. Starts no thread."""

from contextlib import suppress
from importlib import import_module

from transformers import conversion_mapping

from verl.config import load

for name in (
    "fsspec.core",
    "numpy.ma",
    "peft",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "pytest",
    "safetensors.numpy",
    "safetensors.torch",
    "torch.distributed.checkpoint._fsspec_filesystem",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen2", "qwen3", "qwen3_moe", "llama")),
):
    with suppress(ImportError):
        import_module(name)
# The grammar's tables and the expressions are made, and the names that weights have had are mapped.
load(
    ["actor_rollout_ref.model.path=none", "actor_rollout_ref.actor.optim.lr=1e-2", "reward_model.weights={function: 1}"]
)
conversion_mapping.get_checkpoint_conversion_mapping("qwen3")
