#include "tests/worker/backend/recall_image.h"

#include <algorithm>
#include <limits>

#include "cache_service/base/check.h"

namespace heavywater {

RecallImage RecallOf(const KvShape& shape, const LayerImage& full, int sketch_channels) {
  RecallImage image;
  image.sketch = {
      .head_dim = shape.head_dim, .channels = sketch_channels, .page_tokens = shape.page_tokens};
  image.num_positions = full.capacity;
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    for (int64_t page = 0; page < image.num_pages(); ++page) {
      // Rows that nobody wrote hold anything.
      std::vector<std::byte>& bytes =
          image.host.emplace_back(int64_t{shape.page_tokens} * shape.row_bytes(), std::byte{0xff});
      const int64_t first = page * shape.page_tokens;
      for (int64_t row = 0; row < shape.page_tokens && first + row < full.capacity; ++row) {
        auto to = bytes.begin() + row * shape.row_bytes();
        for (const auto* rows : {&full.keys, &full.values}) {
          const auto from = StoredRow(*rows, shape, full.capacity, kv_head, first + row);
          to = std::copy(from.begin(), from.end(), to);
        }
      }
    }
  }
  image.demoted.resize(full.num_sets * image.num_pages() * shape.page_tokens / kSketchBlock);
  image.squares.assign(shape.num_kv_heads * kSketchQueries * shape.head_dim, 1.0f);
  return image;
}

namespace {

uint16_t* WordOf(const RecallImage& image, int set, Position position) {
  const int64_t words = image.num_pages() * image.sketch.page_tokens / kSketchBlock;
  return const_cast<uint16_t*>(image.demoted.data()) + set * words + position / kSketchBlock;
}

}  // namespace

bool IsDemoted(const RecallImage& image, int set, Position position) {
  return (*WordOf(image, set, position) >> (position % kSketchBlock) & 1) != 0;
}

void SetDemoted(RecallImage& image, int set, Position position, bool demoted) {
  const auto bit = static_cast<uint16_t>(1u << position % kSketchBlock);
  uint16_t& word = *WordOf(image, set, position);
  word = static_cast<uint16_t>(demoted ? word | bit : word & ~bit);
}

std::vector<float> StructuredKeys(std::mt19937& rng, int64_t count, int head_dim) {
  std::vector<float> deviation(head_dim);
  std::vector<float> offset(head_dim);
  for (int i = 0; i < head_dim; ++i) {
    const unsigned kind = rng() % 10;
    deviation[i] = kind == 0 ? 0.0f : kind <= 2 ? 3.0f : 0.3f;
    offset[i] = kind == 3 ? 20.0f : static_cast<float>(kind) * 0.1f;
  }
  std::vector<float> keys = RandomFloats(rng, count * head_dim);
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = keys[i] * deviation[i % head_dim] + offset[i % head_dim];
  }
  return keys;
}

DeviceRecall::DeviceRecall(Backend& backend, const KvShape& shape, const RecallImage& image,
                           int64_t num_tokens)
    : backend_(&backend), num_kv_heads_(shape.num_kv_heads) {
  size_t host_bytes = 0;
  for (const std::vector<std::byte>& page : image.host) host_bytes += page.size();
  host_ = std::make_unique<TestMemory>(backend, host_bytes);
  size_t offset = 0;
  for (const std::vector<std::byte>& page : image.host) {
    host_pages_.push_back(host_->span().subspan(offset, page.size()));
    std::copy(page.begin(), page.end(), host_pages_.back().begin());
    table_.push_back(page.empty() ? nullptr : host_pages_.back().data());
    offset += page.size();
  }
  for (int64_t page = 0; page < image.num_pages(); ++page) {
    pages_.push_back(backend.Allocate(shape.num_kv_heads * image.sketch.page_bytes()).value());
    page_spans_.push_back(pages_.back().As<std::byte>());
  }
  channels_ = backend.Allocate(shape.num_kv_heads * image.sketch.channels).value();
  demoted_ = Upload(backend, image.demoted);
  const int64_t stride = image.num_pages() * shape.page_tokens;
  gains_.resize(shape.num_kv_heads * stride);
  num_picks_.assign(num_tokens * shape.num_kv_heads, -1);
  picks_.assign(num_tokens * shape.num_kv_heads * image.max_picks, kNoPosition);
  missing_.assign(num_tokens * shape.num_kv_heads, -1);
  view_ = {.sketch = image.sketch,
           .host = {.pages = table_, .num_pages = image.num_pages()},
           .pages = page_spans_,
           .channels = channels_.As<uint8_t>(),
           .demoted = demoted_.As<uint16_t>(),
           .num_pages = image.num_pages(),
           .max_picks = image.max_picks,
           .all = image.all,
           .min_share = image.min_share,
           .gains = gains_,
           .gains_stride = stride,
           .num_picks = num_picks_,
           .picks = picks_,
           .missing = missing_};
  Stream stream;
  const DeviceBuffer squares = Upload(backend, image.squares);
  HW_CHECK(backend
               .ChooseChannels(shape,
                               {.sketch = image.sketch,
                                .host = view_.host,
                                .num_positions = image.num_positions,
                                .squares = squares.As<float>(),
                                .num_queries = kSketchQueries,
                                .channels = channels_.As<uint8_t>()},
                               stream)
               .ok());
  HW_CHECK(backend
               .EncodePages(shape,
                            {.sketch = image.sketch,
                             .host = view_.host,
                             .channels = channels_.As<uint8_t>(),
                             .pages = page_spans_,
                             .first_page = 0,
                             .end_page = image.num_pages(),
                             .num_positions = image.num_positions},
                            stream)
               .ok());
  LetRest(image.resting, num_tokens);
}

// Only now: their rows have made the sketches.
void DeviceRecall::LetRest(const std::vector<uint8_t>& resting, int64_t num_tokens) {
  if (resting.empty()) return;
  resting_ = resting;
  missed_.assign(resting.size(), 0);
  num_missed_.assign(num_tokens * num_kv_heads_, -1);
  for (size_t i = 0; i < resting.size(); ++i) {
    if (resting[i] != 0) table_[i] = nullptr;
  }
  view_.resting = resting_;
  view_.missed = missed_;
  view_.num_missed = num_missed_;
}

std::vector<uint8_t> DeviceRecall::Channels() const {
  return Download<uint8_t>(*backend_, channels_);
}

std::vector<std::byte> DeviceRecall::Page(int64_t page) const {
  return Download<std::byte>(*backend_, pages_[page]);
}

RecallOutcome DeviceRecall::Read() const {
  Stream stream;
  HW_CHECK(backend_->Synchronize(stream).ok());
  RecallOutcome outcome{.gains = gains_, .picks = {}, .missing = missing_};
  outcome.missed = missed_;
  outcome.num_missed = num_missed_;
  for (size_t i = 0; i < num_picks_.size(); ++i) {
    const auto first = picks_.begin() + static_cast<int64_t>(i) * view_.max_picks;
    const int64_t count = std::min<int64_t>(num_picks_[i], view_.max_picks);
    HW_CHECK(count >= 0);
    outcome.picks.emplace_back(first, first + count);
  }
  return outcome;
}

void DeviceRecall::PoisonResidents(const KvShape& shape, int num_sets) {
  const int64_t words = view_.num_pages * shape.page_tokens / kSketchBlock;
  const std::vector<uint16_t> demoted = Download<uint16_t>(*backend_, demoted_);
  for (int kv_head = 0; kv_head < num_kv_heads_; ++kv_head) {
    const uint16_t* set = demoted.data() + (num_sets == 1 ? 0 : kv_head) * words;
    for (int64_t position = 0; position < words * kSketchBlock; ++position) {
      const std::span<std::byte> page =
          host_pages_[kv_head * view_.num_pages + position / shape.page_tokens];
      if (page.empty() || (set[position / kSketchBlock] >> position % kSketchBlock & 1) != 0) {
        continue;
      }
      // All bits set: NaN in either dtype.
      std::fill_n(page.begin() + position % shape.page_tokens * shape.row_bytes(),
                  shape.row_bytes(), std::byte{0xff});
    }
  }
}

}  // namespace heavywater
