"""The rows of a batch, and the step that a forward pass of the model is for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from heavywater.engine import AttentionEngine, AttentionShape, EngineGroup, LocalDevice
from heavywater.hf.sequence import RowOptions, RowSequence

_KV_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class RowsOptions:
    """What all rows of a cache have in common."""

    row: RowOptions
    num_layers: int
    num_kv_heads: int  # of the model
    max_step_tokens: int
    page_tokens: int
    device_memory_bytes: int  # of each row; 0: no limit
    kv_dtype: str | None  # None: as K comes
    group: EngineGroup | None = None  # of a model that is split over processes


class BatchRows:
    """Sequences of a batch, made when the first K, V and Q tell their shapes."""

    def __init__(self, device: LocalDevice, options: RowsOptions) -> None:
        self.device = device
        self.options = options
        self.rows: list[RowSequence] = []
        self.columns = 0  # of the batch in steps that have ended, padding included
        self.prompt_columns: int | None = None  # announced; None: the first step has them all
        self._next_layer = 0
        self._ids = itertools.count(1)
        self.shape: AttentionShape | None = None  # once K and Q have come
        self.scale = 0.0
        self._idle: list[AttentionEngine] = []  # of rows that have gone
        self._records_past = False

    def attend(self, layer: int, queries: Any, keys: Any, values: Any, padding: Any, scale: float) -> Any:
        """One layer of a step.

        `queries` [B][heads][T][head_dim], `keys` and `values` likewise of the KV heads; `padding` [B][columns with
        these]: false is padding, None: no padding. Returns [B][T][heads][head_dim] as `queries` are; zeros for padding.
        """
        if layer != self._next_layer:
            raise RuntimeError(f"attention of layer {layer} came, want layer {self._next_layer} of this step")
        if layer == 0:
            self._begin(queries, keys, padding, scale)
        # Float32 that lies by token, as projections leave it, is used where it lies.
        q, k, v = (states.detach().transpose(1, 2).to(torch.float32) for states in (queries, keys, values))
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        if q.device.type == "cuda":  # the engine has a stream of its own
            torch.cuda.current_stream(q.device).synchronize()
        for row, sequence in enumerate(self.rows):
            sequence.attend(layer, q[row], k[row], v[row], out[row])
        self._next_layer += 1
        if self._next_layer == self.options.num_layers:
            self._end(q.shape[1])
        return out.to(queries.dtype)

    def close(self) -> None:
        """Frees all rows; the next step begins anew."""
        rows, self.rows = self.rows, []
        self.columns = self._next_layer = 0
        self.prompt_columns = None
        self._idle = []
        for sequence in rows:
            sequence.close()

    def select(self, indices: Sequence[int]) -> None:
        """Row i becomes what row `indices`[i] is; a row that is there several times goes on from there in each. Between
        steps. IndexError, NotImplementedError (before anything changes)."""
        self._check_between_steps("rows are selected")
        if not self.rows:
            return
        bad = [index for index in indices if not 0 <= index < len(self.rows)]
        if bad:
            raise IndexError(f"row {bad[0]} is selected, want 0 to {len(self.rows) - 1}")
        if any(row.taken > 0 and not row.prompt_done for row in self.rows):
            raise NotImplementedError("rows of a HeavywaterCache cannot be selected before all of a prompt has come")
        for index, row in enumerate(self.rows):
            if index not in indices:
                row.close()
                self._idle.append(row.engine)
        moved: set[int] = set()
        selected = []
        for index in indices:
            row = self.rows[index]
            selected.append(row.copy(self._engine()) if index in moved else row)
            moved.add(index)
        self.rows = selected

    def restore(self, shape: AttentionShape, scale: float, columns: int, saved: list[dict[str, Any]]) -> None:
        """Empty rows become those that were saved (RowSequence.load)."""
        self.shape, self.scale, self.columns = shape, scale, columns
        for one in saved:
            self.rows.append(RowSequence(self._ids, self._engine(), self.options.row))
            self.rows[-1].load(one)

    def crop(self, columns: int) -> None:
        """As if the last `columns` had never come; fewer than there are. Between steps. NotImplementedError, before
        anything changes."""
        self._check_between_steps("columns are taken back")
        for row in self.rows:
            row.check_crop(columns)
        for row in self.rows:
            row.crop(columns)
        self.columns -= columns

    def record_past(self) -> None:
        """From now on the last step can be taken back."""
        self._records_past = True
        for row in self.rows:
            row.record_past()

    @property
    def croppable(self) -> bool:
        """Whether the last step can be taken back."""
        options = self.options.row
        return options.policy.policy == "full" or options.crop_tokens is not None or self._records_past

    @property
    def in_step(self) -> bool:
        """Whether some layers of a step have been attended and some not."""
        return self._next_layer > 0

    def _check_between_steps(self, what: str) -> None:
        if self.in_step:
            raise RuntimeError(f"{what} in the middle of a forward pass, want it to end first")

    def _begin(self, queries: Any, keys: Any, padding: Any, scale: float) -> None:
        batch, _, tokens, _ = queries.shape
        if not self.rows:
            self._create(queries, keys, scale)
        if len(self.rows) != batch:
            raise ValueError(
                f"the batch has {batch} rows, but this cache holds {len(self.rows)}; call cache.reset() first"
            )
        real = self._real(padding, batch, tokens)
        left = 0
        if self.prompt_columns is not None:
            left = max(self.prompt_columns - self.columns - tokens, 0)
        for row, sequence in enumerate(self.rows):
            sequence.begin(real[row], left)

    def _real(self, padding: Any, batch: int, tokens: int) -> Any:
        """[B][T]: which of the step's columns are tokens."""
        if padding is None:
            return torch.ones(batch, tokens, dtype=torch.bool)
        columns = self.columns + tokens
        if tuple(padding.shape) != (batch, columns):
            raise ValueError(
                f"attention_mask is {list(padding.shape)}, want [{batch}, {columns}] (tokens seen and new)"
            )
        earlier = padding[:, : self.columns].sum(dim=1).tolist()
        for row, sequence in enumerate(self.rows):
            if earlier[row] != sequence.taken:
                raise ValueError(
                    f"attention_mask of row {row} has {earlier[row]} of the {self.columns} earlier columns, want the "
                    f"{sequence.taken} that it had: what was taken in cannot be masked later"
                )
        return padding[:, self.columns :]

    def _end(self, tokens: int) -> None:
        for sequence in self.rows:
            sequence.end()
        self.columns += tokens
        self._next_layer = 0

    def _create(self, queries: Any, keys: Any, scale: float) -> None:
        if keys.dtype not in _KV_DTYPES:
            raise TypeError(f"K is {keys.dtype}, want one of: {', '.join(map(str, _KV_DTYPES))}")
        ranks = self.options.group.size if self.options.group is not None else 1
        if keys.shape[1] * ranks != self.options.num_kv_heads:
            raise ValueError(
                f"K has {keys.shape[1]} heads on each of {ranks} ranks, want {self.options.num_kv_heads} together: the "
                "model's tp_plan must split its attention by heads"
            )
        self.shape = AttentionShape(
            num_layers=self.options.num_layers,
            num_query_heads=queries.shape[1],
            num_kv_heads=keys.shape[1],
            head_dim=queries.shape[3],
            dtype=self.options.kv_dtype or _KV_DTYPES[keys.dtype],
        )
        self.scale = scale
        for _ in range(queries.shape[0]):
            row = RowSequence(self._ids, self._engine(), self.options.row)
            if self._records_past:
                row.record_past()
            self.rows.append(row)

    def _engine(self) -> AttentionEngine:
        if self._idle:
            return self._idle.pop()
        assert self.shape is not None
        return AttentionEngine(
            self.device,
            self.shape,
            attention_scale=self.scale,
            page_tokens=self.options.page_tokens,
            max_step_tokens=self.options.max_step_tokens,
            device_memory_bytes=self.options.device_memory_bytes,
            group=self.options.group,
        )
