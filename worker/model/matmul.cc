#include "worker/model/matmul.h"

#include <omp.h>

#include <algorithm>
#include <dnnl.hpp>
#include <tuple>

#include "absl/container/flat_hash_map.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/model/message.h"

namespace heavywater {
namespace {

// Up to here our kernel is faster than oneDNN on plain weights.
constexpr int64_t kMaxSmallTokens = 16;
constexpr int64_t kTokenStep = 32;
// A model has some six shapes of matrix and 16 padded sizes up to 512 tokens.
constexpr size_t kMaxPrimitives = 256;

// A panel takes half of a second-level cache of 2 MiB (more above 4096 columns, for oneDNN
// wants rows in blocks).
constexpr int64_t kPanelFloats = int64_t{1} << 18;
constexpr int64_t kPanelRowStep = 64;

// Rows that are unpacked at once.
int64_t PanelRows(const MatmulArgs& args) {
  if (args.codec == RowCodec::kFloat32) return args.rows;  // used where they are
  const int64_t rows = kPanelFloats / args.cols / kPanelRowStep * kPanelRowStep;
  return std::min(args.rows, std::max(rows, kPanelRowStep));
}

using Key = std::tuple<int64_t, int64_t, int64_t, int64_t>;  // tokens, rows, cols, out_stride

dnnl::matmul::primitive_desc Describe(const Key& key, const dnnl::engine& engine) {
  using dnnl::memory;
  const auto& [tokens, rows, cols, out_stride] = key;
  const auto type = memory::data_type::f32;
  const memory::desc x({tokens, cols}, type, memory::format_tag::ab);
  const memory::desc weights({cols, rows}, type, memory::format_tag::ba);  // [rows][cols]
  const memory::desc out({tokens, rows}, type, memory::dims{out_stride, 1});
  dnnl::primitive_attr attributes;
  // One scratchpad for all primitives, of memory that is accounted for.
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return {dnnl::matmul::desc(x, weights, out), attributes, engine};
}

}  // namespace

class Matmul::Primitives {
 public:
  explicit Primitives(Backend& backend) : backend_(backend) {}

  int64_t scratchpad_bytes() const { return scratchpad_.bytes(); }

  absl::Status Reserve(const Key& key) {
    return Guarded(key, [&] { return ReserveScratchpad(Find(key)); });
  }
  // weights: [rows][cols] of the key.
  absl::Status Run(const Key& key, const float* x, const float* weights, float* out) {
    return Guarded(key, [&] { return RunOrThrow(Find(key), x, weights, out); });
  }

 private:
  struct Entry {
    dnnl::matmul::primitive_desc description;
    dnnl::matmul primitive;
  };

  const Entry& Find(const Key& key) {
    if (const auto found = entries_.find(key); found != entries_.end()) return *found->second;
    if (entries_.size() >= kMaxPrimitives) entries_.clear();
    auto entry = std::make_unique<Entry>();
    entry->description = Describe(key, engine_);
    entry->primitive = dnnl::matmul(entry->description);
    return *entries_.emplace(key, std::move(entry)).first->second;
  }

  // oneDNN reports by exceptions: they end here.
  template <class Body>
  absl::Status Guarded(const Key& key, const Body& body) {
    try {
      return body();
    } catch (const dnnl::error& error) {
      const auto& [tokens, rows, cols, out_stride] = key;
      return absl::InternalError(Message("oneDNN, matrix of ", rows, " x ", cols, " and ", tokens,
                                         " tokens: ", error.what()));
    }
  }

  absl::Status ReserveScratchpad(const Entry& entry) {
    const auto bytes = static_cast<int64_t>(entry.description.scratchpad_desc().get_size());
    if (bytes <= scratchpad_.bytes()) return absl::OkStatus();
    HW_ASSIGN_OR_RETURN(scratchpad_, backend_.Allocate(bytes));
    return absl::OkStatus();
  }

  absl::Status RunOrThrow(const Entry& entry, const float* x, const float* weights, float* out) {
    const dnnl::matmul::primitive_desc& description = entry.description;
    HW_RETURN_IF_ERROR(ReserveScratchpad(entry));
    const auto memory = [this](const dnnl::memory::desc& shape, const void* address) {
      return dnnl::memory(shape, engine_, const_cast<void*>(address));
    };
    entry.primitive.execute(
        stream_, {{DNNL_ARG_SRC, memory(description.src_desc(), x)},
                  {DNNL_ARG_WEIGHTS, memory(description.weights_desc(), weights)},
                  {DNNL_ARG_DST, memory(description.dst_desc(), out)},
                  {DNNL_ARG_SCRATCHPAD, memory(description.scratchpad_desc(),
                                               scratchpad_.As<std::byte>().device_address())}});
    stream_.wait();
    return absl::OkStatus();
  }

  Backend& backend_;
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  absl::flat_hash_map<Key, std::unique_ptr<Entry>> entries_;
  DeviceBuffer scratchpad_;
};

absl::StatusOr<std::unique_ptr<Matmul>> Matmul::Create(Backend& backend, int num_threads) {
  if (num_threads < 1) {
    return absl::InvalidArgumentError(Message("num_threads is ", num_threads, ", want 1 or more"));
  }
  try {
    return std::unique_ptr<Matmul>(
        new Matmul(backend, std::make_unique<Primitives>(backend), num_threads));
  } catch (const dnnl::error& error) {
    return absl::InternalError(Message("oneDNN: ", error.what()));
  }
}

Matmul::Matmul(Backend& backend, std::unique_ptr<Primitives> primitives, int num_threads)
    : backend_(backend), primitives_(std::move(primitives)), num_threads_(num_threads) {}
Matmul::~Matmul() = default;

int64_t Matmul::device_bytes() const { return primitives_->scratchpad_bytes() + panel_.bytes(); }

int64_t Matmul::PaddedTokens(int64_t tokens) {
  if (tokens <= kMaxSmallTokens) return tokens;
  return (tokens + kTokenStep - 1) / kTokenStep * kTokenStep;
}

absl::Status Matmul::Run(const MatmulArgs& args) {
  HW_CHECK(args.out_stride >= args.rows);
  if (args.tokens == 0 || args.rows == 0) return absl::OkStatus();
  if (args.cols == 0) {  // empty sums
    for (int64_t t = 0; t < args.tokens; ++t) {
      std::fill_n(args.out + t * args.out_stride, args.rows, 0.0f);
    }
    return absl::OkStatus();
  }
  if (args.tokens <= kMaxSmallTokens) {
    RunSmall(args);
    return absl::OkStatus();
  }
  omp_set_num_threads(num_threads_);  // the setting is the calling thread's
  const int64_t step = PanelRows(args);
  for (int64_t first = 0; first < args.rows; first += step) {
    HW_RETURN_IF_ERROR(RunPanel(args, first, std::min(step, args.rows - first)));
  }
  return absl::OkStatus();
}

absl::Status Matmul::RunPanel(const MatmulArgs& args, int64_t first, int64_t rows) {
  MatmulArgs part = args;
  part.weights += first * PackedRowBytes(args.codec, args.cols);
  part.rows = rows;
  part.out += first;
  const auto* weights = reinterpret_cast<const float*>(part.weights);
  if (args.codec != RowCodec::kFloat32) {
    HW_RETURN_IF_ERROR(ReservePanel(rows * args.cols));
    Unpack(part);
    weights = panel_.As<float>().device_address();
  }
  return primitives_->Run({PaddedTokens(args.tokens), rows, args.cols, args.out_stride}, args.x,
                          weights, part.out);
}

// To the panel, which has room.
void Matmul::Unpack(const MatmulArgs& args) const {
  float* const to = panel_.As<float>().device_address();
  const int64_t row_bytes = PackedRowBytes(args.codec, args.cols);
  const int64_t share = (args.rows + num_threads_ - 1) / num_threads_;
#pragma omp parallel for num_threads(num_threads_) schedule(static, 1) if (num_threads_ > 1)
  for (int thread = 0; thread < num_threads_; ++thread) {
    const int64_t first = std::min(thread * share, args.rows);
    UnpackRows(args.weights + first * row_bytes, args.codec, std::min(share, args.rows - first),
               args.cols, to + first * args.cols);
  }
}

absl::Status Matmul::ReservePanel(int64_t floats) {
  const int64_t bytes = floats * static_cast<int64_t>(sizeof(float));
  if (bytes <= panel_.bytes()) return absl::OkStatus();
  HW_ASSIGN_OR_RETURN(panel_, backend_.Allocate(bytes));
  return absl::OkStatus();
}

absl::Status Matmul::Reserve(const MatmulArgs& args) {
  const bool empty = args.rows == 0 || args.cols == 0;
  if (args.tokens <= kMaxSmallTokens || empty) return absl::OkStatus();
  omp_set_num_threads(num_threads_);  // the scratchpad may depend on it
  const int64_t step = PanelRows(args);
  if (args.codec != RowCodec::kFloat32) HW_RETURN_IF_ERROR(ReservePanel(step * args.cols));
  for (const int64_t rows : {step, args.rows % step}) {
    if (rows == 0) continue;
    HW_RETURN_IF_ERROR(
        primitives_->Reserve({PaddedTokens(args.tokens), rows, args.cols, args.out_stride}));
  }
  return absl::OkStatus();
}

void Matmul::RunSmall(const MatmulArgs& args) const {
  if (num_threads_ == 1) return PackedMatmul(args);
  // Shares of whole blocks of rows, so that rows are summed as on one thread.
  const int64_t share = (args.rows / num_threads_ + 8) / 8 * 8;
#pragma omp parallel for num_threads(num_threads_) schedule(static, 1)
  for (int thread = 0; thread < num_threads_; ++thread) {
    const int64_t first = std::min(thread * share, args.rows);
    MatmulArgs part = args;
    part.weights += first * PackedRowBytes(args.codec, args.cols);
    part.rows = std::min(share, args.rows - first);
    part.out += first;
    PackedMatmul(part);
  }
}

}  // namespace heavywater
