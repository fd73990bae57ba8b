"""heavywater.engine: the worker library in this process, against the plain reference."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest
from heavywater.errors import HeavywaterError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "reference"))
from policies import LayerCache, Policy, summarize_prompt

engine_module = pytest.importorskip(
    "heavywater.engine", reason="heavywater._engine is not built: run deploy/local/setup", exc_type=ImportError
)
from heavywater.engine import AttentionEngine, AttentionShape, EngineItem, LocalDevice, Phase, preset  # noqa: E402

LAYERS, QUERY_HEADS, KV_HEADS, SIZE, PROMPT, TOKENS = 2, 6, 2, 16, 90, 130
SHAPE = AttentionShape(LAYERS, QUERY_HEADS, KV_HEADS, SIZE, dtype="fp32")


@pytest.fixture(scope="module")
def qkv():
    """[layers, tokens, heads, size] each, with long keys, so that attention differs between positions."""
    rng = np.random.default_rng(5)
    shapes = [(LAYERS, TOKENS, heads, SIZE) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    return 2 * q, k, v


def run(engine, qkv, item, layers=LAYERS):
    """One step of one sequence: what attention returns, [layers, tokens, heads, size]."""
    q, k, v = (array[:, item.first_position : item.first_position + item.num_tokens] for array in qkv)
    out = np.full_like(q, np.nan)
    engine.begin([item])
    for layer in range(layers):
        engine.attend(layer, q[layer], k[layer], v[layer], out[layer])
    engine.end()
    return out


def generate(engine, qkv, policy, sequence=1):
    engine.open(sequence, policy, prompt_tokens=PROMPT, max_tokens=TOKENS)
    outs = [run(engine, qkv, EngineItem(sequence, Phase.PROMPT_LAST, 0, PROMPT))]
    outs += [run(engine, qkv, EngineItem(sequence, Phase.DECODE, t)) for t in range(PROMPT, TOKENS)]
    return np.concatenate(outs, axis=1)


def options(name, **fields):
    chosen = preset(name)
    for field, value in fields.items():
        setattr(chosen, field, value)
    return chosen


@pytest.mark.parametrize("name", ["full", "h2o", "snapkv_h2o"])
def test_outputs_and_kept_sets_are_the_references(qkv, name):
    policy = options(name, heavy_tokens=20, recent_tokens=10, window=8)
    engine = AttentionEngine(LocalDevice(), SHAPE)
    out = generate(engine, qkv, policy)
    q, k, v = qkv
    for layer in range(LAYERS):
        prompt = summarize_prompt(q[layer, :PROMPT], k[layer, :PROMPT], v[layer, :PROMPT], window=8)
        cache = LayerCache(Policy(name, budget_tokens=30, recent_tokens=10, window=8), prompt)
        for t in range(PROMPT, TOKENS):
            want = cache.append(q[layer, t], k[layer, t], v[layer, t])
            np.testing.assert_allclose(out[layer, t], want, atol=2e-5)
        kept = engine.kept(1)[layer]
        assert (kept.layer, kept.kv_head) == (layer, -1)
        assert kept.positions.tolist() == cache.kept()[0].tolist()
        if name != "full":
            np.testing.assert_allclose(kept.scores / 2**32, cache.scores()[0], rtol=1e-4)


def test_recall_of_everything_returns_what_the_full_cache_returns(qkv):
    policy = options("h2o", heavy_tokens=8, recent_tokens=8)
    policy.recall.enabled = policy.recall.all = True
    engine = AttentionEngine(LocalDevice(), SHAPE, page_tokens=32)
    recalled = generate(engine, qkv, policy)
    full = generate(AttentionEngine(LocalDevice(), SHAPE), qkv, preset("full"))
    np.testing.assert_allclose(recalled, full, atol=1e-4)
    stats = engine.stats(1)
    assert (stats.tokens_seen, stats.tokens_resident, stats.tokens_demoted) == (TOKENS, 16, TOKENS - 16)


def test_what_leaves_the_device_is_dropped_without_host_memory(qkv):
    engine = AttentionEngine(LocalDevice(host_memory_bytes=0), SHAPE)
    generate(engine, qkv, options("h2o", heavy_tokens=8, recent_tokens=8))
    assert engine.stats(1).tokens_dropped == TOKENS - 16


def test_bytes_rise_for_the_prompt_and_fall_to_the_budget(qkv):
    engine = AttentionEngine(LocalDevice(), SHAPE)
    engine.open(1, options("h2o", heavy_tokens=8, recent_tokens=8), prompt_tokens=PROMPT, max_tokens=TOKENS)
    run(engine, qkv, EngineItem(1, Phase.PROMPT_LAST, 0, PROMPT))
    row = 2 * KV_HEADS * SIZE * 4
    assert engine.peak_kv_bytes >= PROMPT * row  # one layer whole
    assert LAYERS * 17 * row <= engine.kv_bytes < LAYERS * 40 * row


def test_a_prompt_in_parts_keeps_the_same_sets(qkv):
    policy = options("snapkv_h2o", heavy_tokens=20, recent_tokens=10)
    whole = AttentionEngine(LocalDevice(), SHAPE)
    generate(whole, qkv, policy)
    parts = AttentionEngine(LocalDevice(), SHAPE)
    parts.open(1, policy, prompt_tokens=PROMPT, max_tokens=TOKENS, prompt_in_steps=True)
    run(parts, qkv, EngineItem(1, Phase.PROMPT, 0, 37))
    run(parts, qkv, EngineItem(1, Phase.PROMPT_LAST, 37, PROMPT - 37))
    for t in range(PROMPT, TOKENS):
        run(parts, qkv, EngineItem(1, Phase.DECODE, t))
    for one, other in zip(whole.kept(1), parts.kept(1), strict=True):
        assert one.positions.tolist() == other.positions.tolist()


def test_stored_kv_reads_back_bit_for_bit(qkv):
    engine = AttentionEngine(LocalDevice(), SHAPE)
    generate(engine, qkv, options("h2o", heavy_tokens=8, recent_tokens=8))
    demoted = next(p for p in range(PROMPT) if p not in engine.kept(1)[1].positions)
    stored = np.frombuffer(engine.read_kv(1, layer=1, kv_head=1, position=demoted), np.float32)
    assert np.array_equal(stored, np.concatenate([qkv[1][1, demoted, 1], qkv[2][1, demoted, 1]]))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda q: q.astype(np.float64), TypeError, "incompatible"),
        (lambda q: np.asfortranarray(q), TypeError, "incompatible"),
        (lambda q: q[:-1].copy(), HeavywaterError, r"keys is \[90\]\[2\]\[16\], want \[89\]"),
        (
            lambda q: np.where(np.arange(q.size).reshape(q.shape) == 7, np.inf, q).astype(np.float32),
            HeavywaterError,
            r"queries\[7\]",
        ),
    ],
)
def test_arrays_that_cannot_be_used_in_place_are_refused_and_the_step_goes_on(qkv, change, error, words):
    engine = AttentionEngine(LocalDevice(), SHAPE)
    engine.open(1, preset("full"), prompt_tokens=PROMPT, max_tokens=TOKENS)
    engine.begin([EngineItem(1, Phase.PROMPT_LAST, 0, PROMPT)])
    q, k, v = (array[:, :PROMPT] for array in qkv)
    out = np.empty_like(q)
    with pytest.raises(error, match=words):
        engine.attend(0, change(q[0]), k[0], v[0], out[0])
    for layer in range(LAYERS):
        engine.attend(layer, q[layer], k[layer], v[layer], out[layer])
    engine.end()
    assert engine.stats(1).tokens_seen == PROMPT


def test_errors_carry_code_and_field():
    engine = AttentionEngine(LocalDevice(), SHAPE)
    with pytest.raises(HeavywaterError, match="sequence 9") as unknown:
        engine.stats(9)
    assert unknown.value.code == "NOT_FOUND"
    with pytest.raises(HeavywaterError, match="prompt_tokens") as refused:
        engine.open(1, preset("h2o"), prompt_tokens=0, max_tokens=10)
    assert refused.value.code == "INVALID_ARGUMENT"
    with pytest.raises(HeavywaterError, match="want one of: full"):
        preset("nonesuch")
    with pytest.raises(HeavywaterError, match="num_threads is 0"):
        LocalDevice(num_threads=0)
    with pytest.raises(HeavywaterError, match="dtype"):
        AttentionEngine(LocalDevice(), AttentionShape(1, 1, 1, 8, dtype="int3"))


def test_an_abandoned_step_leaves_the_sequence_as_it_was(qkv):
    engine = AttentionEngine(LocalDevice(), SHAPE)
    generate(engine, [array[:, :TOKENS] for array in qkv], options("full"))
    before = engine.stats(1).tokens_seen
    engine.close(1)
    engine.open(2, preset("full"), prompt_tokens=PROMPT, max_tokens=TOKENS)
    run(engine, qkv, EngineItem(2, Phase.PROMPT_LAST, 0, PROMPT))
    engine.begin([EngineItem(2, Phase.DECODE, PROMPT)])
    engine.abandon()
    engine.abandon()
    assert (before, engine.stats(2).tokens_seen) == (TOKENS, PROMPT)


def test_engines_of_one_device_share_its_host_memory(qkv):
    device = LocalDevice(num_threads=2)
    one, two = AttentionEngine(device, SHAPE), AttentionEngine(device, SHAPE)
    generate(one, qkv, options("h2o", heavy_tokens=8, recent_tokens=8), sequence=1)
    held = device.host_bytes
    generate(two, qkv, options("h2o", heavy_tokens=8, recent_tokens=8), sequence=2)
    assert device.host_bytes == 2 * held > 0
    one.close(1)
    assert device.host_bytes == held


class _DlTensor(ctypes.Structure):
    """DLManagedTensor, as DLPack lays it out."""

    _fields_ = (
        *(("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)),
        *(("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64)),
        *(("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)),
    )


class Dlpack:
    """An array that says it is where DLPack counts `device_type` (1: CPU, 2: CUDA)."""

    def __init__(self, array, device_type, device_id=0):
        self._shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self._tensor = _DlTensor(array.ctypes.data, device_type, device_id, array.ndim, 2, 32, 1)
        self._tensor.shape = ctypes.addressof(self._shape)
        self._array = array

    def __dlpack_device__(self):
        return self._tensor.device_type, self._tensor.device_id

    def __dlpack__(self, **_):
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return capsule(ctypes.addressof(self._tensor), b"dltensor", None)


def test_dlpack_tensors_of_the_device_are_used_where_they_lie(qkv):
    engine, other = AttentionEngine(LocalDevice(), SHAPE), AttentionEngine(LocalDevice(), SHAPE)
    for one in (engine, other):
        one.open(1, preset("full"), prompt_tokens=PROMPT, max_tokens=TOKENS)
    item = EngineItem(1, Phase.PROMPT_LAST, 0, PROMPT)
    want = run(other, qkv, item)
    q, k, v = (array[:, :PROMPT].copy() for array in qkv)
    out = np.full_like(q, np.nan)
    engine.begin([item])
    for layer in range(LAYERS):
        engine.attend(layer, *(Dlpack(array[layer], 1) for array in (q, k, v, out)))
    engine.end()
    assert np.array_equal(out, want)  # written through the tensor: no copy of it


def test_tensors_of_another_device_are_refused_by_name_and_the_step_goes_on(qkv):
    engine = AttentionEngine(LocalDevice(), SHAPE)
    engine.open(1, preset("full"), prompt_tokens=PROMPT, max_tokens=TOKENS)
    engine.begin([EngineItem(1, Phase.PROMPT_LAST, 0, PROMPT)])
    q, k, v = (array[0, :PROMPT].copy() for array in qkv)
    out = np.empty_like(q)
    for index, field in enumerate(("queries", "keys", "values", "out")):
        arrays = [q, k, v, out]
        arrays[index] = Dlpack(arrays[index], 2, 3)
        with pytest.raises(HeavywaterError, match=f"{field} is on cuda:3, want cpu, the engine's device"):
            engine.attend(0, *arrays)
    with pytest.raises(HeavywaterError, match="queries is on a device of DLPack's type 8"):
        engine.attend(0, Dlpack(q, 8), k, v, out)
    engine.attend(0, q, k, v, out)


@pytest.mark.parametrize("name", ["gpu", "cuda", "cuda:", "cuda:-1", "cuda:256", "CPU", ""])
def test_devices_that_there_are_not_are_refused_by_name(name):
    with pytest.raises(HeavywaterError, match=f'INVALID_ARGUMENT: device is "{name}", want "cpu" or "cuda:0"'):
        LocalDevice(device=name)


def test_a_gpu_that_is_not_there_is_refused_by_name():
    with pytest.raises(HeavywaterError, match="FAILED_PRECONDITION"):
        LocalDevice(device="cuda:255")
