#include "worker/model/packed_matmul.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/model/packed_matmul.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After foreach_target.h.
#include "hwy/cache_control.h"
#include "worker/model/row_codecs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heavywater {
namespace HWY_NAMESPACE {

// What only rows of floats have: columns beyond the last whole vector.
template <class Codec>
HWY_INLINE float DotRest(const std::byte* row, const float* x, int64_t begin, int64_t end) {
  float sum = 0;
  if constexpr (Codec::kElements == kLanes && Codec::kBytes == 4 * kLanes) {
    const auto* weights = reinterpret_cast<const float*>(row);
    for (int64_t i = begin; i < end; ++i) sum += weights[i] * x[i];
  }
  return sum;
}

// kRows x kTokens dot products side by side. Each has one accumulator of its
// own whatever the block's shape, hence the same rounding in every shape; eight
// or more of them hide the latency of FMA.
//
// kPrefetch fetches the next kRows rows: the hardware's prefetchers start anew
// at each row, and rows are short. A prefetch beyond the matrix has no effect.
template <class Codec, int kRows, int kTokens, bool kPrefetch>
HWY_INLINE void DotBlock(const MatmulArgs& args, int64_t row_bytes, int64_t row, int64_t token) {
  constexpr int kParts = Codec::kElements / kLanes;
  const RowD d;
  const std::byte* HWY_RESTRICT weights = args.weights + row * row_bytes;
  const float* HWY_RESTRICT x = args.x + token * args.cols;
  RowV sums[kRows][kTokens];
  for (auto& of_row : sums) {
    for (RowV& sum : of_row) sum = hn::Zero(d);
  }
  int64_t c = 0;
  for (int64_t at = 0; c + Codec::kElements <= args.cols; c += Codec::kElements) {
    for (int r = 0; r < kRows; ++r) {
      RowV values[kParts];
      Codec::Decode(weights + r * row_bytes + at, values);
      if constexpr (kPrefetch) hwy::Prefetch(weights + (r + kRows) * row_bytes + at);
      for (int t = 0; t < kTokens; ++t) {
        for (int p = 0; p < kParts; ++p) {
          const RowV input = hn::LoadU(d, x + t * args.cols + c + p * kLanes);
          sums[r][t] = hn::MulAdd(values[p], input, sums[r][t]);
        }
      }
    }
    at += Codec::kBytes;
  }
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTokens; ++t) {
      args.out[(token + t) * args.out_stride + row + r] =
          hn::GetLane(hn::SumOfLanes(d, sums[r][t])) +
          DotRest<Codec>(weights + r * row_bytes, x + t * args.cols, c, args.cols);
    }
  }
}

// All tokens for kRows rows, which stay in the first-level cache meanwhile.
template <class Codec, int kRows, int kTokens>
HWY_INLINE void Rows(const MatmulArgs& args, int64_t row_bytes, int64_t row) {
  int64_t token = 0;
  if (args.tokens >= kTokens) {
    DotBlock<Codec, kRows, kTokens, true>(args, row_bytes, row, 0);
    token = kTokens;
  }
  for (; token + kTokens <= args.tokens; token += kTokens) {
    DotBlock<Codec, kRows, kTokens, false>(args, row_bytes, row, token);
  }
  for (; token < args.tokens; ++token) {
    DotBlock<Codec, kRows, 1, false>(args, row_bytes, row, token);
  }
}

template <class Codec, int kRows, int kTokens>
HWY_INLINE void AllRows(const MatmulArgs& args) {
  const int64_t row_bytes = PackedRowBytes(args.codec, args.cols);
  int64_t row = 0;
  for (; row + kRows <= args.rows; row += kRows) {
    Rows<Codec, kRows, kTokens>(args, row_bytes, row);
  }
  for (; row < args.rows; ++row) Rows<Codec, 1, kTokens>(args, row_bytes, row);
}

template <class Codec>
void MatmulOf(const MatmulArgs& args) {
  if (args.tokens == 1) return AllRows<Codec, 8, 1>(args);
  if (args.tokens < 4) return AllRows<Codec, 4, 2>(args);
  // 4 x 4 accumulators need AVX-512's 32 registers; 16 hold 2 x 4.
  if constexpr (kLanes >= 16) return AllRows<Codec, 4, 4>(args);
  AllRows<Codec, 2, 4>(args);
}

template <class Codec>
void UnpackOf(const std::byte* from, int64_t cols, float* out) {
  RowV values[Codec::kElements / kLanes];
  int64_t c = 0;
  for (; c + Codec::kElements <= cols; c += Codec::kElements, from += Codec::kBytes) {
    Codec::Decode(from, values);
    for (int p = 0; p < Codec::kElements / kLanes; ++p) {
      hn::StoreU(values[p], RowD(), out + c + p * kLanes);
    }
  }
  std::memcpy(out + c, from, static_cast<size_t>(cols - c) * sizeof(float));  // of kFloat32
}

// Calls body(a value of the codec's type).
template <class Body>
HWY_INLINE void WithCodec(RowCodec codec, const Body& body) {
  switch (codec) {
    case RowCodec::kFloat32:
      return body(Float32Codec());
    case RowCodec::kFloat16:
      return body(Float16Codec());
    case RowCodec::kBFloat16:
      return body(BFloat16Codec());
    case RowCodec::kAffine4:
      return body(Affine4Codec());
    case RowCodec::kScaled8:
      return body(Scaled8Codec<32>());
    case RowCodec::kScaled8x16:
      return body(Scaled8Codec<16>());
    case RowCodec::kAffine8:
      return body(Affine8Codec());
  }
}

void MatmulKernel(const MatmulArgs& args) {
  WithCodec(args.codec, [&](auto codec) HWY_ATTR { MatmulOf<decltype(codec)>(args); });
}

void UnpackRowsKernel(const std::byte* weights, RowCodec codec, int64_t rows, int64_t cols,
                      float* out) {
  const int64_t row_bytes = PackedRowBytes(codec, cols);
  WithCodec(codec, [&](auto kind) HWY_ATTR {
    for (int64_t r = 0; r < rows; ++r) {
      UnpackOf<decltype(kind)>(weights + r * row_bytes, cols, out + r * cols);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace heavywater
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heavywater {

HWY_EXPORT(MatmulKernel);
HWY_EXPORT(UnpackRowsKernel);

void PackedMatmul(const MatmulArgs& args) { HWY_DYNAMIC_DISPATCH(MatmulKernel)(args); }

void UnpackRows(const std::byte* weights, RowCodec codec, int64_t rows, int64_t cols, float* out) {
  HWY_DYNAMIC_DISPATCH(UnpackRowsKernel)(weights, codec, rows, cols, out);
}

}  // namespace heavywater
#endif  // HWY_ONCE
