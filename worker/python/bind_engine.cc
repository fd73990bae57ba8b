// LocalDevice and LocalEngine for Python. Calls let other threads run meanwhile; arrays
// are read and written where they lie.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "worker/python/local_engine.h"
#include "worker/python/module.h"
#include "worker/python/status_to_python.h"

namespace heavywater {

namespace nb = nanobind;

namespace {

// Of any device: CheckRows() wants the engine's.
using InRows = nb::ndarray<const float, nb::ndim<3>, nb::c_contig>;
using OutRows = nb::ndarray<float, nb::ndim<3>, nb::c_contig>;
// sequence, phase, first position, tokens
using Item = std::tuple<SequenceId, EnginePhase, int64_t, int64_t>;

template <typename Function>
auto WithoutLock(Function function) {
  nb::gil_scoped_release released;
  return function();
}

std::string DeviceName(int type, int id) {
  if (type == nb::device::cpu::value) return "cpu";
  if (type == nb::device::cuda::value) return absl::StrCat("cuda:", id);
  return absl::StrCat("a device of DLPack's type ", type);
}

template <typename Rows>
void CheckRows(const char* field, const Rows& rows, LocalEngine& engine, int64_t want_rows,
               int heads) {
  const std::string got = DeviceName(rows.device_type(), rows.device_id());
  if (got != engine.device().name()) {
    RaiseIfError(absl::InvalidArgumentError(absl::StrCat(
        field, " is on ", got, ", want ", engine.device().name(), ", the engine's device")));
  }
  const int head_dim = engine.shape().head_dim;
  const bool fits = static_cast<int64_t>(rows.shape(0)) == want_rows &&
                    static_cast<int>(rows.shape(1)) == heads &&
                    static_cast<int>(rows.shape(2)) == head_dim;
  if (fits) return;
  RaiseIfError(absl::InvalidArgumentError(
      absl::StrCat(field, " is [", rows.shape(0), "][", rows.shape(1), "][", rows.shape(2),
                   "], want [", want_rows, "][", heads, "][", head_dim, "]")));
}

std::shared_ptr<LocalDevice> CreateDevice(const std::string& device, int num_threads,
                                          const std::string& target, int64_t host_memory_bytes) {
  return ValueOrRaise(LocalDevice::Create({.device = device,
                                           .num_threads = num_threads,
                                           .target = target,
                                           .host_memory_bytes = host_memory_bytes}));
}

std::unique_ptr<LocalEngine> CreateEngine(std::shared_ptr<LocalDevice> device, int num_layers,
                                          int num_query_heads, int num_kv_heads, int head_dim,
                                          const std::string& dtype, int page_tokens,
                                          float attention_scale, int max_step_tokens,
                                          int64_t device_memory_bytes,
                                          std::shared_ptr<EngineGroup> group) {
  const int rank = group == nullptr ? 0 : group->rank();
  const int ranks = group == nullptr ? 1 : group->size();
  const KvShape shape{.num_layers = num_layers,
                      .num_query_heads = num_query_heads,
                      .num_kv_heads = num_kv_heads,
                      .first_kv_head = rank * num_kv_heads,
                      .total_kv_heads = ranks * num_kv_heads,
                      .total_query_heads = ranks * num_query_heads,
                      .head_dim = head_dim,
                      .dtype = ValueOrRaise(ParseKvDtype(dtype)),
                      .page_tokens = page_tokens};
  const RankCacheOptions options{.shape = shape,
                                 .rank = rank,
                                 .world_size = ranks,
                                 .brings_rows = true,
                                 .device_memory_bytes = device_memory_bytes,
                                 .max_step_tokens = max_step_tokens,
                                 .reserve_ahead_tokens = 0,  // nothing to wait for
                                 .attention_scale = attention_scale};
  return ValueOrRaise(LocalEngine::Create(std::move(device), options, std::move(group)));
}

void Open(LocalEngine& engine, SequenceId sequence, const PolicyOptions& policy,
          int64_t prompt_tokens, int64_t max_tokens, bool prompt_in_steps,
          bool drop_when_host_full) {
  const SequenceOptions options{
      .policy = policy,
      .prompt_tokens = prompt_tokens,
      .max_tokens = max_tokens,
      .on_host_full = drop_when_host_full ? OnHostFull::kDrop : OnHostFull::kStop,
      .prompt_in_steps = prompt_in_steps};
  RaiseIfError(WithoutLock([&] { return engine.Open(sequence, options); }));
}

void Begin(LocalEngine& engine, const std::vector<Item>& items) {
  std::vector<EngineItem> begun;
  for (const auto& [sequence, phase, first_position, num_tokens] : items) {
    begun.push_back({.sequence = sequence,
                     .phase = phase,
                     .first_position = static_cast<Position>(first_position),
                     .num_tokens = num_tokens});
  }
  RaiseIfError(WithoutLock([&] { return engine.Begin(begun); }));
}

void Attend(LocalEngine& engine, int layer, const InRows& queries, const InRows& keys,
            const InRows& values, const OutRows& out) {
  const KvShape& shape = engine.shape();
  const int64_t rows = static_cast<int64_t>(queries.shape(0));
  CheckRows("queries", queries, engine, rows, shape.num_query_heads);
  CheckRows("keys", keys, engine, rows, shape.num_kv_heads);
  CheckRows("values", values, engine, rows, shape.num_kv_heads);
  CheckRows("out", out, engine, rows, shape.num_query_heads);
  const CallerRows all{.rows = rows,
                       .queries = queries.data(),
                       .keys = keys.data(),
                       .values = values.data(),
                       .out = out.data()};
  RaiseIfError(WithoutLock([&] { return engine.Attend(layer, all); }));
}

// [layer and set]: layer, KV head (-1: shared by all), positions, scores (2^-32).
nb::list KeptSets(LocalEngine& engine, SequenceId sequence) {
  const KeptSequence kept = ValueOrRaise(WithoutLock([&] { return engine.Kept(sequence); }));
  nb::list sets;
  for (const ResidentSet& set : kept.report.sets) {
    sets.append(
        nb::make_tuple(set.layer, set.kv_head, nb::cast(set.positions), nb::cast(set.scores)));
  }
  return sets;
}

nb::bytes AsBytes(const std::vector<std::byte>& bytes) {
  return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

nb::bytes SaveState(LocalEngine& engine, SequenceId sequence) {
  return AsBytes(ValueOrRaise(WithoutLock([&] { return engine.SaveState(sequence); })));
}

nb::bytes ReadPage(LocalEngine& engine, SequenceId sequence, int64_t page) {
  return AsBytes(ValueOrRaise(WithoutLock([&] { return engine.ReadPage(sequence, page); })));
}

void LoadState(LocalEngine& engine, SequenceId sequence, const PolicyOptions& policy,
               int64_t prompt_tokens, int64_t max_tokens, const nb::bytes& state,
               const std::vector<nb::bytes>& pages, int64_t tokens_seen) {
  const auto span_of = [](const nb::bytes& bytes) {
    return std::span(reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size());
  };
  std::vector<std::span<const std::byte>> spans;
  for (const nb::bytes& page : pages) spans.push_back(span_of(page));
  const std::span<const std::byte> whole = span_of(state);
  const SequenceOptions options{
      .policy = policy, .prompt_tokens = prompt_tokens, .max_tokens = max_tokens};
  RaiseIfError(
      WithoutLock([&] { return engine.LoadState(sequence, options, whole, spans, tokens_seen); }));
}

nb::bytes ReadKv(LocalEngine& engine, SequenceId sequence, int layer, int kv_head,
                 int64_t position) {
  const std::vector<std::byte> kv = ValueOrRaise(WithoutLock(
      [&] { return engine.ReadKv(sequence, layer, kv_head, static_cast<Position>(position)); }));
  return nb::bytes(reinterpret_cast<const char*>(kv.data()), kv.size());
}

MemoryGauge Gauge(LocalEngine& engine) {
  return WithoutLock([&] { return engine.kv_bytes(); });
}

void BindStats(nb::module_& module) {
  nb::class_<SequenceStats>(module, "SequenceStats")
      .def_prop_ro("budget_tokens", [](const SequenceStats& s) { return s.budget.budget_tokens; })
      .def_ro("prompt_tokens", &SequenceStats::prompt_tokens)
      .def_ro("tokens_seen", &SequenceStats::tokens_seen)
      .def_ro("tokens_resident", &SequenceStats::tokens_resident)
      .def_ro("tokens_demoted", &SequenceStats::tokens_demoted)
      .def_ro("tokens_dropped", &SequenceStats::tokens_dropped)
      .def_ro("plans", &SequenceStats::plans)
      .def_ro("device_bytes", &SequenceStats::device_bytes)
      .def_ro("peak_device_bytes", &SequenceStats::peak_device_bytes)
      .def_ro("host_bytes", &SequenceStats::host_bytes)
      .def_ro("recall_queries", &SequenceStats::recall_queries)
      .def_ro("recall_reads", &SequenceStats::recall_reads)
      .def_ro("recall_reads_max", &SequenceStats::recall_reads_max)
      .def_ro("promoted", &SequenceStats::promoted)
      .def_ro("mass_missing", &SequenceStats::mass_missing);
}

}  // namespace

void BindEngine(nb::module_& module) {
  BindStats(module);
  nb::enum_<EnginePhase>(module, "Phase")
      .value("PROMPT", EnginePhase::kPrompt)
      .value("PROMPT_LAST", EnginePhase::kPromptLast)
      .value("DECODE", EnginePhase::kDecode);
  nb::class_<LocalDevice>(module, "LocalDevice")
      .def(nb::new_(&CreateDevice), nb::arg("device"), nb::arg("num_threads"), nb::arg("target"),
           nb::arg("host_memory_bytes"))
      .def_prop_ro("host_bytes",
                   [](LocalDevice& d) { return WithoutLock([&d] { return d.host_bytes(); }); });
  nb::class_<LocalEngine>(module, "LocalEngine")
      .def(nb::new_(&CreateEngine), nb::arg("device"), nb::arg("num_layers"),
           nb::arg("num_query_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
           nb::arg("dtype"), nb::arg("page_tokens"), nb::arg("attention_scale"),
           nb::arg("max_step_tokens"), nb::arg("device_memory_bytes"), nb::arg("group").none())
      .def("open", &Open, nb::arg("sequence"), nb::arg("policy"), nb::arg("prompt_tokens"),
           nb::arg("max_tokens"), nb::arg("prompt_in_steps"), nb::arg("drop_when_host_full"))
      .def(
          "fork",
          [](LocalEngine& e, SequenceId id, LocalEngine& from, SequenceId source) {
            RaiseIfError(WithoutLock([&] { return e.Fork(id, from, source); }));
          },
          nb::arg("sequence"), nb::arg("source_engine"), nb::arg("source"))
      .def("save_state", &SaveState, nb::arg("sequence"))
      .def("read_page", &ReadPage, nb::arg("sequence"), nb::arg("page"))
      .def("load_state", &LoadState, nb::arg("sequence"), nb::arg("policy"),
           nb::arg("prompt_tokens"), nb::arg("max_tokens"), nb::arg("state"), nb::arg("pages"),
           nb::arg("tokens_seen"))
      .def(
          "truncate",
          [](LocalEngine& e, SequenceId id, int64_t tokens) {
            RaiseIfError(WithoutLock([&] { return e.Truncate(id, tokens); }));
          },
          nb::arg("sequence"), nb::arg("tokens"))
      .def("close", [](LocalEngine& e,
                       SequenceId id) { RaiseIfError(WithoutLock([&] { return e.Close(id); })); })
      .def("begin", &Begin, nb::arg("items"))
      // noconvert: an array that would have to be copied is refused, not copied in silence.
      .def("attend", &Attend, nb::arg("layer"), nb::arg("queries").noconvert(),
           nb::arg("keys").noconvert(), nb::arg("values").noconvert(), nb::arg("out").noconvert())
      .def("end", [](LocalEngine& e) { RaiseIfError(WithoutLock([&e] { return e.End(); })); })
      .def("abandon", [](LocalEngine& e) { WithoutLock([&e] { e.Abandon(); }); })
      .def("stats",
           [](LocalEngine& e, SequenceId id) {
             return ValueOrRaise(WithoutLock([&] { return e.Stats(id); }));
           })
      .def("kept", &KeptSets, nb::arg("sequence"))
      .def("read_kv", &ReadKv, nb::arg("sequence"), nb::arg("layer"), nb::arg("kv_head"),
           nb::arg("position"))
      .def_prop_ro("kv_bytes", [](LocalEngine& e) { return Gauge(e).current_bytes; })
      .def_prop_ro("peak_kv_bytes", [](LocalEngine& e) { return Gauge(e).peak_bytes; });
}

}  // namespace heavywater
