// AllReduceSum over a mesh: why it is not one of Gloo's own is measured in
// docs/decisions/2026-11-29-gloo-allreduce.md.
#include <algorithm>
#include <cstring>

#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "worker/comm/gloo/gloo_collectives.h"
#include "worker/comm/sum.h"

namespace heavywater {
namespace {

// Up to here everyone sends everything to everyone, one exchange; above, two
// exchanges that send each element twice rather than size() - 1 times.
constexpr int64_t kDirectBytes = int64_t{16} << 10;

// What one rank reduces per exchange: fills a message beside its header.
constexpr int64_t kPartBytes = int64_t{60} << 10;
static_assert(kPartBytes + static_cast<int64_t>(sizeof(CallHeader)) <= GlooMesh::kMaxMessageBytes);

template <typename T>
std::span<const T> As(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
}

// The part of `block` that rank `index` of `count` reduces; may be empty.
template <typename T>
std::span<T> Part(std::span<T> block, int index, int count) {
  const size_t length = (block.size() + count - 1) / count;
  const size_t begin = std::min(index * length, block.size());
  return block.subspan(begin, std::min(length, block.size() - begin));
}

}  // namespace

template <typename T>
absl::Status GlooCollectives::AllReduceSum(const CallHeader& call, std::span<T> data) {
  const absl::Time deadline = absl::Now() + timeout_;
  const int64_t bytes = data.size_bytes();
  return bytes <= kDirectBytes ? ReduceDirectly(call, data, deadline)
                               : ReduceInParts(call, data, deadline);
}

template absl::Status GlooCollectives::AllReduceSum(const CallHeader&, std::span<float>);
template absl::Status GlooCollectives::AllReduceSum(const CallHeader&, std::span<int64_t>);

template <typename T>
absl::Status GlooCollectives::ReduceDirectly(const CallHeader& call, std::span<T> data,
                                             absl::Time deadline) {
  HW_RETURN_IF_ERROR(MeetWith(
      call, [&](int) { return std::as_bytes(data); }, deadline));
  const std::span<std::byte> staging = Staging(data.size_bytes());
  const std::span<T> total(reinterpret_cast<T*>(staging.data()), data.size());
  SumInRankOrder<T>(data, total);
  std::copy_n(total.data(), total.size(), data.data());
  return absl::OkStatus();
}

// Block by block: part r of every rank goes to rank r, which sums them and
// sends the sum to all. The first parts travel with the opening exchange.
template <typename T>
absl::Status GlooCollectives::ReduceInParts(const CallHeader& call, std::span<T> data,
                                            absl::Time deadline) {
  const int rank = mesh_->rank();
  const int size = mesh_->size();
  const std::span<std::byte> staging = Staging(data.size_bytes());
  const std::span<T> result(reinterpret_cast<T*>(staging.data()), data.size());
  const size_t block_length = size * kPartBytes / sizeof(T);
  for (size_t begin = 0; begin < data.size(); begin += block_length) {
    const size_t length = std::min(block_length, data.size() - begin);
    const std::span<const T> block = std::span<const T>(data).subspan(begin, length);
    const std::span<T> sum = result.subspan(begin, length);
    const auto terms = [&](int peer) { return std::as_bytes(Part(block, peer, size)); };
    if (begin == 0) {
      HW_RETURN_IF_ERROR(MeetWith(call, terms, deadline));
    } else {
      HW_RETURN_IF_ERROR(SendToAll(terms));
      HW_RETURN_IF_ERROR(ReceiveFromAll(deadline));
    }
    const std::span<T> my_sum = Part(sum, rank, size);
    SumInRankOrder<T>(Part(block, rank, size), my_sum);
    HW_RETURN_IF_ERROR(SendToAll([&](int) { return std::as_bytes(my_sum); }));
    HW_RETURN_IF_ERROR(ReceiveFromAll(deadline));
    for (int peer = 0; peer < size; ++peer) {
      const std::span<T> part = Part(sum, peer, size);
      if (peer != rank)
        std::copy_n(As<T>(Payload(peer, part.size_bytes())).data(), part.size(), part.data());
    }
  }
  std::copy_n(result.data(), result.size(), data.data());
  return absl::OkStatus();
}

template <typename T>
void GlooCollectives::SumInRankOrder(std::span<const T> mine, std::span<T> total) const {
  const auto term = [&](int rank) {
    return rank == mesh_->rank() ? mine : As<T>(Payload(rank, mine.size_bytes()));
  };
  if (mesh_->size() == 1) {
    std::copy_n(mine.data(), mine.size(), total.data());
    return;
  }
  Add(term(0), term(1), total);
  for (int rank = 2; rank < mesh_->size(); ++rank) Add(total, term(rank), total);
}

}  // namespace heavywater
