#include "worker/model/packed_matmul.h"

#include <algorithm>
#include <type_traits>
#include <vector>

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

// As many tokens as a block has.
template <class Codec, int kRows, int kTokens>
HWY_INLINE void OneBlockOfTokens(const MatmulArgs& args) {
  const int64_t row_bytes = PackedRowBytes(args.codec, args.cols);
  int64_t row = 0;
  for (; row + kRows <= args.rows; row += kRows) {
    DotBlock<Codec, kRows, kTokens, true>(args, row_bytes, row, 0);
  }
  for (; row < args.rows; ++row) DotBlock<Codec, 1, kTokens, true>(args, row_bytes, row, 0);
}

// 4 x 4 accumulators need AVX-512's 32 registers; 16 hold 2 x 4.
constexpr int kBlockRows = kLanes >= 16 ? 4 : 2;
constexpr int kBlockTokens = 4;

// All tokens for kRows rows of floats, which stay in the first-level cache meanwhile.
template <int kRows>
HWY_INLINE void FloatRows(const MatmulArgs& args, int64_t row_bytes, int64_t row) {
  int64_t token = 0;
  for (; token + kBlockTokens <= args.tokens; token += kBlockTokens) {
    DotBlock<Float32Codec, kRows, kBlockTokens, false>(args, row_bytes, row, token);
  }
  switch (args.tokens - token) {
    case 1:
      return DotBlock<Float32Codec, kRows, 1, false>(args, row_bytes, row, token);
    case 2:
      return DotBlock<Float32Codec, kRows, 2, false>(args, row_bytes, row, token);
    case 3:
      return DotBlock<Float32Codec, kRows, 3, false>(args, row_bytes, row, token);
  }
}

// Not inlined: one for all codecs.
HWY_NOINLINE void MultiplyFloats(const MatmulArgs& args) {
  const int64_t row_bytes = PackedRowBytes(RowCodec::kFloat32, args.cols);
  int64_t row = 0;
  for (; row + kBlockRows <= args.rows; row += kBlockRows) {
    FloatRows<kBlockRows>(args, row_bytes, row);
  }
  for (; row < args.rows; ++row) FloatRows<1>(args, row_bytes, row);
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

// For more tokens than a block has: rows are unpacked once, to where the first-level
// cache holds them, and not for each block. Floats are multiplied in the order of columns
// that packed rows have, hence the same bits.
template <class Codec>
void UnpackAndMultiply(const MatmulArgs& args) {
  const int64_t row_bytes = PackedRowBytes(args.codec, args.cols);
  std::vector<float> floats(static_cast<size_t>(kBlockRows * args.cols));
  MatmulArgs block = args;
  block.weights = reinterpret_cast<const std::byte*>(floats.data());
  block.codec = RowCodec::kFloat32;
  for (int64_t row = 0; row < args.rows; row += kBlockRows) {
    block.rows = std::min<int64_t>(kBlockRows, args.rows - row);
    block.out = args.out + row;
    for (int64_t r = 0; r < block.rows; ++r) {
      UnpackOf<Codec>(args.weights + (row + r) * row_bytes, args.cols,
                      floats.data() + r * args.cols);
    }
    MultiplyFloats(block);
  }
}

template <class Codec>
void MatmulOf(const MatmulArgs& args) {
  switch (args.tokens) {
    case 1:
      return OneBlockOfTokens<Codec, 8, 1>(args);
    case 2:
      return OneBlockOfTokens<Codec, 4, 2>(args);
    case 3:
      return OneBlockOfTokens<Codec, kBlockRows, 3>(args);
    case 4:
      return OneBlockOfTokens<Codec, kBlockRows, 4>(args);
  }
  if constexpr (std::is_same_v<Codec, Float32Codec>) {
    MultiplyFloats(args);
  } else {
    UnpackAndMultiply<Codec>(args);
  }
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
