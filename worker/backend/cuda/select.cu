// SelectKept() on the device, bit for bit: protected positions stay by exclusion; of the
// rest the highest scores, ties to the lower position.
//
// Radix selection: the rank of a candidate is its key, the score and below it the
// position counted downwards, 96 bits. Eight bits at a time, from the first bit in which
// keys differ, a histogram of the keys that begin as those at the cut do tells the cut's
// next bits; it ends when the cut falls between two keys.
#include "worker/backend/cuda/block_sum.h"
#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/select_kernels.h"

namespace heavywater::cuda {
namespace {

constexpr int kMostThreads = 1024;
constexpr int kDigits = 256;
constexpr int kPositionBits = 32;

struct Key {
  uint64_t score;     // order of the signed score
  uint32_t position;  // the lower position is the larger
};

// What the block shares.
struct Shared {
  uint64_t partial[kWarp];
  uint32_t histogram[kDigits];
  int32_t digit;
  int32_t above;  // keys of the histogram with a larger digit
  int32_t equal;
};

// Free slots have no key; protected positions no need of one.
enum class Kind { kFree, kProtected, kCandidate };
__device__ __forceinline__ Kind KindOf(const SelectKernelParams& params, int32_t position) {
  if (position < 0) return Kind::kFree;
  const bool is_protected = position < params.sink_end || position >= params.recent_begin;
  return is_protected ? Kind::kProtected : Kind::kCandidate;
}
__device__ __forceinline__ Key KeyOf(int32_t position, int64_t score) {
  return {static_cast<uint64_t>(score) ^ uint64_t{1} << 63, ~static_cast<uint32_t>(position)};
}

// The key without its lowest `bits` bits.
__device__ __forceinline__ Key Prefix(const Key& key, int bits) {
  if (bits >= kPositionBits) {
    const int of_score = bits - kPositionBits;
    return {of_score >= 64 ? 0 : key.score >> of_score, 0};
  }
  return {key.score, key.position >> bits};
}
__device__ __forceinline__ bool IsEqual(const Key& a, const Key& b) {
  return a.score == b.score && a.position == b.position;
}
__device__ __forceinline__ bool IsLess(const Key& a, const Key& b) {
  return a.score != b.score ? a.score < b.score : a.position < b.position;
}
// Eight bits of the key, from `bits` up; digits do not straddle score and position.
__device__ __forceinline__ unsigned DigitOf(const Key& key, int bits) {
  return bits >= kPositionBits
             ? static_cast<unsigned>(key.score >> (bits - kPositionBits)) & (kDigits - 1)
             : key.position >> bits & (kDigits - 1);
}
__device__ __forceinline__ void SetDigit(Key& key, int bits, unsigned digit) {
  if (bits >= kPositionBits) {
    key.score |= uint64_t{digit} << (bits - kPositionBits);
  } else {
    key.position |= digit << bits;
  }
}

// Counts: protected and candidates, and the bits in which candidates' keys differ.
struct Survey {
  int32_t num_protected = 0;
  int32_t num_candidates = 0;
  Key all = {~uint64_t{0}, ~uint32_t{0}};  // and of the keys
  Key any = {0, 0};                        // or of the keys
};

class Selection {
 public:
  __device__ Selection(const SelectKernelParams& params, Shared* shared)
      : params_(params),
        shared_(shared),
        positions_(params.positions + blockIdx.x * params.stride),
        scores_(params.scores + blockIdx.x * params.stride),
        kept_(params.kept + int64_t{blockIdx.x} * params.count) {}

  __device__ void Run() {
    const Survey survey = TakeSurvey();
    const int64_t room = params_.budget_tokens - survey.num_protected;
    if (room >= survey.num_candidates) return Mark({0, 0}, 0);     // all
    if (room <= 0) return Mark({~uint64_t{0}, ~uint32_t{0}}, -1);  // none
    Key cut = {0, 0};
    const int bits = FindCut(survey, static_cast<int32_t>(room), cut);
    Mark(Prefix(cut, bits), bits);
  }

 private:
  __device__ Survey TakeSurvey() {
    Survey survey;
    for (int i = static_cast<int>(threadIdx.x); i < params_.count; i += blockDim.x) {
      const int32_t position = Load(positions_ + i);
      const Kind kind = KindOf(params_, position);
      if (kind == Kind::kProtected) ++survey.num_protected;
      if (kind != Kind::kCandidate) continue;
      const Key key = KeyOf(position, Load(scores_ + i));
      ++survey.num_candidates;
      survey.all = {survey.all.score & key.score, survey.all.position & key.position};
      survey.any = {survey.any.score | key.score, survey.any.position | key.position};
    }
    const auto both = [](uint64_t a, uint64_t b) { return a & b; };
    const auto either = [](uint64_t a, uint64_t b) { return a | b; };
    const uint64_t counts =
        ReduceBlock(uint64_t{static_cast<uint32_t>(survey.num_protected)} << 32 |
                        static_cast<uint32_t>(survey.num_candidates),
                    shared_->partial, Plus());
    survey.num_protected = static_cast<int32_t>(counts >> 32);
    survey.num_candidates = static_cast<int32_t>(counts & 0xffffffffu);
    survey.all.score = ReduceBlock(survey.all.score, shared_->partial, both);
    survey.any.score = ReduceBlock(survey.any.score, shared_->partial, either);
    survey.all.position =
        static_cast<uint32_t>(ReduceBlock(uint64_t{survey.all.position}, shared_->partial, both));
    survey.any.position =
        static_cast<uint32_t>(ReduceBlock(uint64_t{survey.any.position}, shared_->partial, either));
    return survey;
  }

  // The `room` largest keys are those that begin as `cut` does, or with more, in all but
  // the lowest bits, whose number is returned. 0 < room < candidates.
  __device__ int FindCut(const Survey& survey, int32_t room, Key& cut) {
    const uint64_t scores_differ = survey.all.score ^ survey.any.score;
    int bits = 0;
    if (scores_differ != 0) {
      bits = kPositionBits + (63 - __clzll(static_cast<long long>(scores_differ))) / 8 * 8;
      cut.score = Above(survey.all.score, bits + 8 - kPositionBits);
    } else {
      // Positions do differ: they are distinct.
      const uint32_t positions_differ = survey.all.position ^ survey.any.position;
      bits = (31 - __clz(static_cast<int>(positions_differ))) / 8 * 8;
      cut.score = survey.all.score;
      cut.position = static_cast<uint32_t>(Above(survey.all.position, bits + 8));
    }
    for (;; bits -= 8) {
      CountDigits(cut, bits);
      FindDigit(room);
      room -= shared_->above;
      SetDigit(cut, bits, static_cast<unsigned>(shared_->digit));
      const bool falls_between = shared_->equal == room;
      __syncthreads();
      if (falls_between || bits == 0) return bits;
    }
  }

  // Without the lowest `bits` bits.
  static __device__ uint64_t Above(uint64_t value, int bits) {
    return bits >= 64 ? 0 : value >> bits << bits;
  }

  // Of keys that begin as `cut` does above bits + 8.
  __device__ void CountDigits(const Key& cut, int bits) {
    for (unsigned i = threadIdx.x; i < kDigits; i += blockDim.x) shared_->histogram[i] = 0;
    __syncthreads();
    const Key prefix = Prefix(cut, bits + 8);
    // The warp stays together, for the shuffles.
    for (int first = 0; first < params_.count; first += static_cast<int>(blockDim.x)) {
      const int i = first + static_cast<int>(threadIdx.x);
      unsigned digit = kDigits;
      if (i < params_.count) {
        const int32_t position = Load(positions_ + i);
        if (KindOf(params_, position) == Kind::kCandidate) {
          const Key key = KeyOf(position, Load(scores_ + i));
          if (IsEqual(Prefix(key, bits + 8), prefix)) digit = DigitOf(key, bits);
        }
      }
      CountDigit(digit);
    }
    __syncthreads();
  }

  // Where a warp has one digit only, as in the upper bits of scores, it counts once.
  __device__ void CountDigit(unsigned digit) {
    const unsigned of_first = __shfl_sync(kAllLanes, digit, 0);
    if (__all_sync(kAllLanes, digit == of_first ? 1 : 0) != 0) {
      if (digit < kDigits && threadIdx.x % kWarp == 0) {
        atomicAdd(&shared_->histogram[digit], static_cast<uint32_t>(kWarp));
      }
    } else if (digit < kDigits) {
      atomicAdd(&shared_->histogram[digit], 1u);
    }
  }

  // The digit of the room-th largest key of the histogram. By the first warp, from the
  // top: a lane sums eight digits.
  __device__ void FindDigit(int32_t room) {
    if (threadIdx.x < kWarp) {
      constexpr int kPerLane = kDigits / kWarp;
      const int lane = static_cast<int>(threadIdx.x);
      const int top = kDigits - 1 - lane * kPerLane;
      int32_t sum = 0;
      for (int i = 0; i < kPerLane; ++i) sum += static_cast<int32_t>(shared_->histogram[top - i]);
      int32_t through = sum;  // of this lane and those above
      for (int step = 1; step < kWarp; step *= 2) {
        const int32_t other = __shfl_up_sync(kAllLanes, through, step);
        if (lane >= step) through += other;
      }
      int32_t above = through - sum;
      if (above < room && room <= through) {
        int digit = top;
        while (above + static_cast<int32_t>(shared_->histogram[digit]) < room) {
          above += static_cast<int32_t>(shared_->histogram[digit--]);
        }
        shared_->digit = digit;
        shared_->above = above;
        shared_->equal = static_cast<int32_t>(shared_->histogram[digit]);
      }
    }
    __syncthreads();
  }

  // Keeps protected positions and the candidates whose keys are at least `cut` in all
  // but the lowest bits; bits < 0: no candidate.
  __device__ void Mark(const Key& cut, int bits) {
    for (int i = static_cast<int>(threadIdx.x); i < params_.count; i += blockDim.x) {
      const int32_t position = Load(positions_ + i);
      const Kind kind = KindOf(params_, position);
      bool stays = kind == Kind::kProtected;
      if (kind == Kind::kCandidate && bits >= 0) {
        stays = !IsLess(Prefix(KeyOf(position, Load(scores_ + i)), bits), cut);
      }
      Store(kept_ + i, static_cast<uint8_t>(stays ? 1 : 0));
    }
  }

  const SelectKernelParams& params_;
  Shared* shared_;
  const int32_t* positions_;
  const int64_t* scores_;
  uint8_t* kept_;
};

__global__ void __launch_bounds__(kMostThreads) select_kept(SelectKernelParams params) {
  Selection(params, reinterpret_cast<Shared*>(SharedMemory())).Run();
}

}  // namespace

cudaError_t LaunchSelect(const SelectKernelParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  const int threads = params.count <= 2048 ? 256 : kMostThreads;
  return Launch(select_kept, dim3(static_cast<unsigned>(params.num_sets)),
                dim3(static_cast<unsigned>(threads)), sizeof(Shared), stream, params);
}

}  // namespace heavywater::cuda
