# The compiled module (worker/python); heavywater.engine documents it.
from collections.abc import Callable
from enum import Enum
from typing import Any

class RecallOptions:
    enabled: bool
    all: bool
    recall_tokens: int
    min_share: float
    sketch_channels: int
    promote_candidates: int

class PolicyOptions:
    policy: str
    scope: str
    head_budgets: str
    head_budget_floor: float
    heavy_tokens: int
    recent_tokens: int
    heavy_ratio: float
    recent_ratio: float
    sink_tokens: int
    min_budget_tokens: int
    window: int
    pool_kernel: int
    plan_interval_steps: int
    decay: float
    exposure: float
    history_window: int
    pyramid_beta: float
    pooled_seeds: bool
    device_ratio: float
    @property
    def recall(self) -> RecallOptions: ...

def preset(name: str) -> PolicyOptions: ...

class Phase(Enum):
    PROMPT = ...
    PROMPT_LAST = ...
    DECODE = ...

class SequenceStats:
    @property
    def budget_tokens(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def tokens_seen(self) -> int: ...
    @property
    def tokens_resident(self) -> int: ...
    @property
    def tokens_demoted(self) -> int: ...
    @property
    def tokens_dropped(self) -> int: ...
    @property
    def plans(self) -> int: ...
    @property
    def device_bytes(self) -> int: ...
    @property
    def peak_device_bytes(self) -> int: ...
    @property
    def host_bytes(self) -> int: ...
    @property
    def recall_queries(self) -> int: ...
    @property
    def recall_reads(self) -> int: ...
    @property
    def recall_reads_max(self) -> int: ...
    @property
    def promoted(self) -> int: ...
    @property
    def mass_missing(self) -> float: ...

class LocalDevice:
    def __init__(self, device: str, num_threads: int, target: str, host_memory_bytes: int) -> None: ...
    @property
    def host_bytes(self) -> int: ...

class EngineGroup:
    def __init__(
        self,
        rank: int,
        size: int,
        put: Callable[[str, bytes], None],
        wait: Callable[[str, float], bytes],
        listen_address: str,
        timeout_s: float,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

class LocalEngine:
    def __init__(
        self,
        device: LocalDevice,
        num_layers: int,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        page_tokens: int,
        attention_scale: float,
        max_step_tokens: int,
        device_memory_bytes: int,
        group: EngineGroup | None,
    ) -> None: ...
    def open(
        self,
        sequence: int,
        policy: PolicyOptions,
        prompt_tokens: int,
        max_tokens: int,
        prompt_in_steps: bool,
        drop_when_host_full: bool,
    ) -> None: ...
    def fork(self, sequence: int, source_engine: LocalEngine, source: int) -> None: ...
    def save_state(self, sequence: int) -> bytes: ...
    def read_page(self, sequence: int, page: int) -> bytes: ...
    def load_state(
        self,
        sequence: int,
        policy: PolicyOptions,
        prompt_tokens: int,
        max_tokens: int,
        state: bytes,
        pages: list[bytes],
        tokens_seen: int,
    ) -> None: ...
    def truncate(self, sequence: int, tokens: int) -> None: ...
    def close(self, sequence: int, /) -> None: ...
    def begin(self, items: list[tuple[int, Phase, int, int]]) -> None: ...
    def attend(self, layer: int, queries: Any, keys: Any, values: Any, out: Any) -> None: ...
    def end(self) -> None: ...
    def abandon(self) -> None: ...
    def stats(self, sequence: int, /) -> SequenceStats: ...
    def kept(self, sequence: int) -> list[tuple[int, int, list[int], list[int]]]: ...
    def read_kv(self, sequence: int, layer: int, kv_head: int, position: int) -> bytes: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def peak_kv_bytes(self) -> int: ...
