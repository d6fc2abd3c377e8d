"""The base model, the adapters that are trained over it and the samplers that read them.

Every adapter sits in a tree of modules of its own, whose base tensors are those of the one model that was loaded. A
sampler is a tree too, one for each shape of adapters; the weights of a snapshot are written into it, and compared, when
a request needs others than it has.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.checkpoint import Checkpoint
from verl.checkpoint.read import newest_of
from verl.checkpoint.write import CheckpointWriter
from verl.config.model_facts import ADAPTER_FOLDER
from verl.data.tokenizer import load_tokenizer
from verl.engine.rollout.base import SamplingParams
from verl.engine.rollout.native.engine import NativeEngine
from verl.engine.training.base import MicroBatch
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.engine.training.lora import AdapterSource, LoraSettings, inject, read_tensors
from verl.engine.training.packing import CANDIDATES
from verl.errors import UserError
from verl.models.adapters import PlainView
from verl.models.pretrained import checkpoint_layers, end_token_ids, load_model
from verl.platform import detect
from verl.serving.losses import LOSSES
from verl.serving.wire import Datum, Sampled, TopK
from verl.trajectory import Segment
from verl.weight_sync.verify import FULL, checksums, compare

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALPHA = 32
"""lora_alpha of every adapter, as Tinker has it: the product B·A counts alpha / rank times."""
_CONTEXT = 8192  # tokens, where nobody says how many


@dataclass(frozen=True, slots=True)
class LoraShape:
    """What two adapters must share to fit into one tree of modules."""

    rank: int
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"an adapter has a rank of at least 1, not {self.rank}")


class Base:
    """The model that everything is added to.

    model: a directory or hub id. name: what clients call it. dtype: of the products, None for the device's default.
    max_length: most tokens of a sequence. max_samples: most responses that are sampled at a time.
    """

    def __init__(
        self,
        model: str,
        *,
        name: str = "",
        dtype: str | None = None,
        max_length: int | None = None,
        max_samples: int = 64,
    ):
        if dtype not in (None, "float32", "bfloat16"):
            raise UserError(f"--dtype {dtype}: adapters are trained in float32 or bfloat16")
        self.path = str(Path(model).expanduser().resolve()) if Path(model).expanduser().is_dir() else model
        self.name, self.dtype, self.max_samples = name or model, dtype, max_samples
        self.tokenizer = load_tokenizer(self.path)
        self.platform = detect("auto")
        self.platform.prepare()
        self.module = load_model(self.path).to(self.platform.device())  # type: ignore[arg-type]
        self.module.requires_grad_(False)
        text = self.module.config.get_text_config()
        self.vocabulary = int(text.vocab_size)
        positions = int(getattr(text, "max_position_embeddings", None) or _CONTEXT)
        self.max_length = min(positions, max_length or _CONTEXT)

    def twin(self) -> PreTrainedModel:
        """The modules anew, over the same tensors."""
        shared = itertools.chain(self.module.parameters(), self.module.buffers())
        return copy.deepcopy(self.module, {id(tensor): tensor for tensor in shared})

    def targets(self, shape: LoraShape) -> list[str]:
        """Names that adapted modules end with. UserError where there is none, or one that cannot have an adapter."""
        inside = [part for layer in checkpoint_layers(self.module) for part in layer.named_modules()]
        linear = {name for name, part in inside if isinstance(part, torch.nn.Linear) and not name.endswith("gate")}
        attention = {name.rpartition(".")[2] for name in linear if "attn" in name}
        names = attention if shape.train_attn else set()
        names = names | ({name.rpartition(".")[2] for name in linear} - attention if shape.train_mlp else set())
        if shape.train_unembed and not self.tied:
            names = names | {self._output_name()}
        if not names:
            raise UserError(f"{self.name}: {shape} leaves no layer to train (the output layer is the embedding)")
        return sorted(names)

    @property
    def tied(self) -> bool:
        """The output layer is the embedding, so it cannot have an adapter of its own."""
        return self.module.get_output_embeddings().weight is self.module.get_input_embeddings().weight

    def _output_name(self) -> str:
        layer = self.module.get_output_embeddings()
        return next(name.rpartition(".")[2] for name, part in self.module.named_modules() if part is layer)

    def _lora(self, shape: LoraShape) -> dict[str, Any]:
        return {"lora_rank": shape.rank, "lora_alpha": ALPHA, "target_modules": self.targets(shape)}

    def engine(self, module: PreTrainedModel, shape: LoraShape | None = None, seed: int = 0) -> FSDPEngine:
        """An engine on a twin: trainable where it is given the shape of an adapter to put in, else for log-probs."""
        role = {"fsdp_config": {"dtype": self.dtype}, "checkpoint": {"save_lora_only": True}}
        options: dict[str, Any] = {"model_cfg": self._lora(shape)} if shape else {"trainable": False}
        return FSDPEngine(
            self.path, module=module, role_cfg=role, device=self.platform, seed=seed, longest=self.max_length, **options
        )

    def sampler(self, shape: LoraShape | None) -> Sampler:
        """A sampler for adapters of this shape, None for the base itself."""
        module = self.twin()
        if shape is not None:
            settings = LoraSettings.of(self._lora(shape), self.path)
            assert settings is not None
            inject(module, settings).materialise(AdapterSource(module, settings, 0, None), self.platform.device())
            module.requires_grad_(False)
        return Sampler(self, module)

    def check_ids(self, ids: np.ndarray) -> None:
        """ValueError for tokens that the vocabulary lacks."""
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocabulary:
            raise ValueError(f"token {int(ids.max())} is outside of the vocabulary of {self.vocabulary}")


class Adapter:
    """One client's adapter: its weights, gradients, optimizer and number of optimizer steps."""

    def __init__(self, base: Base, shape: LoraShape, seed: int):
        self.base, self.shape, self.steps = base, shape, 0
        self._seed = seed
        self.engine = base.engine(base.twin(), shape, seed)

    def passes(
        self, data: Sequence[Datum], loss: str, config: dict[str, float | str], *, backward: bool
    ) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
        """Of each datum the log-probs of its targets (and the elements of cross_entropy), and the loss's sum.

        backward: its gradient is added to those since the last step. ValueError for data that cannot be computed,
        FloatingPointError where the result is not finite: the gradients since the last step are lost then.
        """
        if not data:
            raise ValueError("there is no data")
        rows, width = self._rows(data, loss, config)
        column = "candidate_log_probs" if width else "log_probs"
        results: dict[int, torch.Tensor] = {}

        def of(selected: Sequence[Segment], log_probs: torch.Tensor) -> torch.Tensor:
            inputs = {n: _joined(selected, tensors, n, log_probs) for n in LOSSES[loss][1]}
            results.update(zip(map(id, selected), log_probs.detach().split([r.length for r in selected]), strict=True))
            return LOSSES[loss][0](log_probs, inputs, config)

        tensors = {id(row): _padded(datum, width) for row, datum in zip(rows, data, strict=True)}
        if backward:

            def micro_loss(batch: MicroBatch) -> Any:
                value = of(batch.rows, getattr(batch, column)).sum()
                return value, {"loss": (float(value.detach()), 0.0)}

            step = self.engine.accumulate(rows, micro_loss, ("log_probs", column), temperature=1.0)
            if step.refused:
                raise FloatingPointError(f"{step.refused}; the gradients since the last optim_step are dropped")
            total = step.metrics["loss"]
        else:
            flat = torch.from_numpy(self.engine.forward(rows, (column,), temperature=1.0)[column])
            total = float(of(rows, flat).sum())
        outputs = [_output(datum, results[id(row)].float().cpu(), loss) for row, datum in zip(rows, data, strict=True)]
        return outputs, {"loss:sum": total}

    def _rows(self, data: Sequence[Datum], loss: str, config: dict[str, float | str]) -> tuple[list[Segment], int]:
        """A row for each datum, and how many targets a token has; 0 where the target is just the token that follows."""
        for number, datum in enumerate(data):
            _check(number, datum, loss, config)
            if len(datum.ids) > self.base.max_length:
                raise ValueError(f"datum {number} has {len(datum.ids)} tokens, more than {self.base.max_length}")
            self.base.check_ids(datum.ids)
            self.base.check_ids(datum.inputs["target_tokens"])
        targets = [datum.inputs["target_tokens"] for datum in data]
        follows = (t.ndim == 1 and np.array_equal(t[:-1], d.ids[1:]) for t, d in zip(targets, data, strict=True))
        width = 0 if all(follows) else max(t[0].size for t in targets)
        rows = []
        for number, (datum, target) in enumerate(zip(data, targets, strict=True)):
            last = target[-1:] if not width else np.zeros(1, np.int64)
            response = np.concatenate((datum.ids[1:], last))
            rows.append(Segment(datum.ids[:1], response, np.ones(len(response), bool), uid=str(number)))
            if width:
                rows[-1].put(CANDIDATES, _wide(target, width).astype(np.int32))
        return rows, width

    def step(self, clip: float, **settings: Any) -> float:
        """One step of AdamW with the gradients since the last one; returns their norm before clipping."""
        self.steps += 1
        return self.engine.update(clip, **settings)

    def save(self, place: Path, about: dict[str, Any], *, optimizer: bool) -> Path:
        """Seal a checkpoint in the folder `place`. OSError if it cannot be written."""
        parts: dict[str, Callable[[Path], Any]] = {"actor": self.engine.save_weights}
        if optimizer:
            parts["state/actor_optim"] = self.engine.save_optimizer
        writer = CheckpointWriter(place, self.steps, keep=1)
        writer.fill(parts, about | {"lora": asdict(self.shape), "seed": self._seed})
        path = writer.seal()
        if path is None:
            raise OSError(f"{place}: {writer.problem}")
        return path

    @classmethod
    def load(cls, base: Base, place: Path, *, optimizer: bool) -> Adapter:
        """What `save` wrote. UserError if it is not there, damaged, or of another model."""
        saved = newest_of(place, str(place))
        adapter = cls(base, shape_of(saved), int(saved.loop_state["seed"]))
        adapter.engine.load_weights(saved.part("actor"))
        if optimizer:
            adapter.engine.load_optimizer(saved.part("state/actor_optim"))
        adapter.steps = saved.step
        return adapter


def shape_of(saved: Checkpoint) -> LoraShape:
    """The shape of a checkpoint's adapter."""
    return LoraShape(**saved.loop_state["lora"])


class Sampler:
    """Draws responses and gives log-probs, with the weights of one snapshot at a time."""

    def __init__(self, base: Base, module: PreTrainedModel):
        self._base, self._module = base, module
        self._engine = base.engine(module)
        self._native = NativeEngine(
            module,
            eos_token_ids=end_token_ids(module.config, module.generation_config, base.tokenizer),
            max_model_len=base.max_length,
            max_num_seqs=base.max_samples,
            dtype=str(self._engine.compute_dtype),
            tokenizer=base.tokenizer,
        )
        self._numbers = itertools.count(1)
        self._holds: tuple[Path, int | None] | None = None

    def use(self, place: Path | None, stamp: int | None) -> None:
        """From now on the adapter of the checkpoint in `place`, None for the base, whose sampler has no other; stamp:
        which of those that were saved there. WeightSyncError if the sampler then has another."""
        self._native.wake()
        if place is None or self._holds == (place, stamp):
            return
        folder = newest_of(place, str(place)).part("actor") / ADAPTER_FOLDER
        tensors = read_tensors(folder, PlainView(self._module).adapter_state())
        self._holds = None  # what it has is unknown until the load has succeeded
        received = self._native.load_weights(tensors.items(), next(self._numbers), verify=FULL)
        compare(checksums(tensors.items()), received)
        self._holds = place, stamp

    def rest(self) -> None:
        """Give the memory of keys, values and packed weights back."""
        self._native.sleep()

    async def sample(self, prompt: np.ndarray, sampling: SamplingParams, count: int, likely: int = 0) -> list[Sampled]:
        """`count` responses to a prompt, each with draws of its own. likely: of how many most likely tokens to give the
        log-probs beside those of the tokens drawn."""
        self._base.check_ids(prompt)
        name = f"request {next(self._numbers)}"
        drawn = [
            self._native.generate(prompt, replace(sampling, call=number), request_id=f"{name}.{number}", group=name)
            for number in range(count)
        ]
        out = []
        for completion in await asyncio.gather(*drawn):
            ids, top = completion.token_ids, None
            if likely and len(ids):
                _, top = self.log_probs(np.concatenate((prompt, ids)), len(ids), likely)
            out.append(Sampled(ids, completion.log_probs, completion.finish_reason == "stop", top))
        return out

    def log_probs(self, ids: np.ndarray, last: int, likely: int = 0) -> tuple[np.ndarray, TopK | None]:
        """float32 [last] log-probs of the last tokens of a sequence, and ids and log-probs [last, likely] of the most
        likely ones in their places."""
        self._base.check_ids(ids)
        context, response = np.split(ids, [len(ids) - last])
        row = Segment(context, response, np.ones(last, bool))
        self._engine.set_topk(likely)
        names = ("log_probs", "topk_log_probs", "topk_ids")[: 3 if likely else 1]
        columns = self._engine.forward([row], names, temperature=1.0)
        top = (columns["topk_ids"].astype(np.int64), columns["topk_log_probs"]) if likely else None
        return columns["log_probs"], top


def _check(number: int, datum: Datum, loss: str, config: dict[str, float | str]) -> None:
    """ValueError for a datum that lacks what the loss needs, or has it in another shape."""
    if loss not in LOSSES:
        raise ValueError(f"loss_fn {loss!r} is not here; there are {', '.join(LOSSES)}")
    _, needed, settings = LOSSES[loss]
    if odd := config.keys() - {*settings}:
        raise ValueError(f"loss_fn_config {sorted(odd)}: {loss} reads {list(settings) or 'nothing'}")
    if loss == "dro" and "beta" not in config:
        raise ValueError("loss_fn dro needs loss_fn_config beta")
    missing = {"target_tokens", *needed} - datum.inputs.keys()
    if missing:
        raise ValueError(f"datum {number} lacks {', '.join(sorted(missing))}, which {loss} needs")
    shape = datum.inputs["target_tokens"].shape
    if not len(datum.ids) or shape[:1] != (len(datum.ids),) or len(shape) > (2 if loss == "cross_entropy" else 1):
        raise ValueError(f"datum {number} has {len(datum.ids)} tokens and target_tokens of shape {list(shape)}")
    for name in needed:
        if datum.inputs[name].shape != shape:
            raise ValueError(f"datum {number}: {name} has shape {list(datum.inputs[name].shape)}, not {list(shape)}")


def _wide(array: np.ndarray, width: int) -> np.ndarray:
    """[N] or [N, K] → [N, width], zeros on the right."""
    columns = array.reshape(len(array), -1)
    return np.pad(columns, ((0, 0), (0, width - columns.shape[1])))


def _padded(datum: Datum, width: int) -> dict[str, np.ndarray]:
    """A datum's tensors, in the shape of the log-probs that go with them."""
    return {name: _wide(array, width) if width else array for name, array in datum.inputs.items()}


def _joined(
    rows: Sequence[Segment], tensors: dict[int, dict[str, np.ndarray]], name: str, like: torch.Tensor
) -> torch.Tensor:
    """A tensor of all rows, in the place of `like`."""
    return torch.from_numpy(np.concatenate([tensors[id(row)][name] for row in rows])).float().to(like.device)


def _output(datum: Datum, log_probs: torch.Tensor, loss: str) -> dict[str, np.ndarray]:
    """What the client gets of a datum, in the shape of its targets."""
    shape = datum.inputs["target_tokens"].shape
    if log_probs.ndim > 1:
        log_probs = log_probs[:, : math.prod(shape[1:])].reshape(shape)
    output = {"logprobs": log_probs.numpy()}
    if loss == "cross_entropy":
        output["elementwise_loss"] = -datum.inputs["weights"] * output["logprobs"]
    return output
