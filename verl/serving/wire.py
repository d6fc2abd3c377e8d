"""The bodies of the Tinker API that are protobuf: what `forward_backward` gets, and its results and those of sampling.

Names and numbers of fields are those of the public SDK (tinker 0.38).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}
_MESSAGE = 11
_MESSAGES = {
    # Fields: number, name, kind; *kind is repeated, {kind} maps strings to it. Enumerations travel as int32.
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape *int64",
    "EncodedText": "1 tokens bytes",
    "Other": "1 data bytes",
    "Chunk": "1 encoded_text EncodedText, 2 image Other, 3 dmel Other",
    "Datum": "1 model_input *Chunk, 2 loss_fn_inputs {Tensor}",
    "LossConfigValue": "1 number double, 2 text string",
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data *Datum, 4 loss_fn string, "
    "5 loss_fn_config {double}, 6 forward_only bool, 7 loss_fn_config_v2 {LossConfigValue}",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape *int64",
    "ArrayRecord": "1 type_tag string, 2 fields {BatchedTensor}, 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs *ArrayRecord, 3 metrics {double}",
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes, 4 topk_sampled_logprobs TopkLogprobs",
    "SampleResponse": "1 sequences *SampledSequence, 2 prompt_logprobs bytes, 3 topk_prompt_logprobs TopkLogprobs",
}
_FLOAT32 = 1
_DTYPES: dict[int, Any] = {1: np.dtype(np.float32), 2: np.dtype(np.int64), 3: np.dtype(np.int32)}


def _classes() -> dict[str, Any]:
    """The message classes, in a pool of their own: a process may hold the SDK's too."""
    file = descriptor_pb2.FileDescriptorProto(name="verl_serving.proto", package="verl_serving", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field, kind in (text.split() for text in fields.split(",")):
            repeated = kind[0] in "*{"
            if kind[0] == "{":
                entry = message.nested_type.add(name=f"{field.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                _add(entry, 1, "key", "string")
                _add(entry, 2, "value", kind[1:-1])
                kind = f"{name}.{entry.name}"
            _add(message, int(number), field, kind.lstrip("*"), repeated=repeated)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    types = {name: pool.FindMessageTypeByName(f"verl_serving.{name}") for name in _MESSAGES}
    return {name: message_factory.GetMessageClass(kind) for name, kind in types.items()}


def _add(message: Any, number: int, name: str, kind: str, *, repeated: bool = False) -> None:
    field = message.field.add(name=name, number=number, label=3 if repeated else 1, type=_SCALARS.get(kind, _MESSAGE))
    if kind not in _SCALARS:
        field.type_name = f".verl_serving.{kind}"


CLASSES = _classes()
"""Name of a message → its class."""


@dataclass(frozen=True, slots=True)
class Datum:
    """ids int64 [N] and what the loss takes beside them, by name: arrays whose first dimension is N."""

    ids: np.ndarray
    inputs: dict[str, np.ndarray]


class LossRequest:
    """A body of `forward_backward`. ValueError for bytes that are none, and from `data` for what cannot be read."""

    def __init__(self, body: bytes):
        try:
            self._message = CLASSES["ForwardBackwardRequest"].FromString(body)
        except Exception as error:  # protobuf's own class of error differs among its implementations
            raise ValueError(f"the body is no ForwardBackwardRequest: {error}") from error
        self.model_id: str = self._message.model_id
        self.seq_id: int = self._message.seq_id
        self.loss: str = self._message.loss_fn
        self.forward_only: bool = self._message.forward_only
        self.config: dict[str, float | str] = dict(self._message.loss_fn_config)
        self.config |= {name: value.text or value.number for name, value in self._message.loss_fn_config_v2.items()}

    def data(self) -> list[Datum]:
        """The sequences."""
        return [
            Datum(_ids(datum.model_input), {name: _array(name, value) for name, value in datum.loss_fn_inputs.items()})
            for datum in self._message.data
        ]


def _ids(chunks: Sequence[Any]) -> np.ndarray:
    if any(chunk.HasField("image") or chunk.HasField("dmel") for chunk in chunks):
        raise ValueError("model_input has images or audio; this server takes text alone")
    parts = [np.frombuffer(chunk.encoded_text.tokens, np.int32) for chunk in chunks]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def _array(name: str, tensor: Any) -> np.ndarray:
    """The whole array; entries that a sparse one leaves out are 0."""
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{name} has the data type {tensor.dtype}; float32 and int64 can be read")
    dtype, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    if not tensor.HasField("sparse_csr"):
        values = np.frombuffer(tensor.dense, dtype)
        return values.reshape(shape) if shape else values
    sparse = tensor.sparse_csr
    starts, columns = (np.frombuffer(part, np.int64) for part in (sparse.crow_indices, sparse.col_indices))
    values, dense = np.frombuffer(sparse.values, dtype), np.zeros(shape, dtype)
    dense[np.repeat(np.arange(len(starts) - 1), np.diff(starts)), columns] = values
    return dense


def loss_response(outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]) -> bytes:
    """outputs: of each datum its float32 arrays by name; one record where only first dimensions differ."""
    message = CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    alike = len({tuple((name, a.shape[1:]) for name, a in output.items()) for output in outputs}) == 1
    for group in [outputs] if alike else [[output] for output in outputs]:
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(group))
        for name in group[0]:
            arrays = [np.ascontiguousarray(output[name], np.float32) for output in group]
            field = record.fields[name]
            field.dtype, field.data = _FLOAT32, b"".join(array.tobytes() for array in arrays)
            field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64).tobytes()
            field.trailing_shape.extend(arrays[0].shape[1:])
    return message.SerializeToString()


TopK = tuple[np.ndarray, np.ndarray]
"""Ids and log-probs [length, k] of the most likely tokens."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One response: ids int [L], float32 log-probs [L], whether it ended by itself."""

    ids: np.ndarray
    log_probs: np.ndarray
    stopped: bool
    likely: TopK | None = None


def sample_response(
    sequences: Sequence[Sampled], prompt_log_probs: np.ndarray | None = None, prompt_likely: TopK | None = None
) -> bytes:
    """prompt_log_probs: float32 [prompt tokens], NaN where there is none."""
    message = CLASSES["SampleResponse"]()
    for sequence in sequences:
        entry = message.sequences.add(stop_reason=0 if sequence.stopped else 1)
        entry.tokens = sequence.ids.astype(np.int32).tobytes()
        entry.logprobs = sequence.log_probs.astype(np.float32).tobytes()
        if sequence.likely is not None:
            entry.topk_sampled_logprobs.CopyFrom(_likely(sequence.likely))
    if prompt_log_probs is not None:
        message.prompt_logprobs = prompt_log_probs.astype(np.float32).tobytes()
    if prompt_likely is not None:
        message.topk_prompt_logprobs.CopyFrom(_likely(prompt_likely))
    return message.SerializeToString()


def _likely(pair: TopK) -> Any:
    ids, log_probs = pair
    fields = {"token_ids": ids.astype(np.int32).tobytes(), "logprobs": log_probs.astype(np.float32).tobytes()}
    return CLASSES["TopkLogprobs"](k=ids.shape[1], length=len(ids), **fields)
