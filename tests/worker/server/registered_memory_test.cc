#include "worker/server/registered_memory.h"

#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cache_service/tier/slab.h"
#include "gtest/gtest.h"
#include "tests/worker/server/registering_backend.h"
#include "worker/server/remote_sequence.h"

namespace heavywater {
namespace {

TEST(RegisteredMemoryTest, BlocksAreZeroedAndNeverShareAPage) {
  RegisteringBackend backend;
  std::vector<std::unique_ptr<RegisteredMemory>> blocks;
  for (const int64_t bytes : {1, 100, 4096, 10'000}) {
    auto block = RegisteredMemory::Create(bytes, &backend);
    ASSERT_TRUE(block.ok()) << block.status();
    EXPECT_EQ(std::count((*block)->data(), (*block)->data() + bytes, std::byte{0}), bytes);
    EXPECT_TRUE(backend.IsRegistered((*block)->data() + bytes - 1));
    blocks.push_back(*std::move(block));
  }
  EXPECT_EQ(backend.num_registered(), 4);
  blocks.pop_back();
  EXPECT_EQ(backend.num_registered(), 3);
  blocks.clear();
  EXPECT_EQ(backend.num_registered(), 0);
}

TEST(RegisteredMemoryTest, NeedsNoBackend) {
  auto block = RegisteredMemory::Create(100, nullptr);
  ASSERT_TRUE(block.ok()) << block.status();
  (*block)->data()[99] = std::byte{1};
}

TEST(RegisteredMemoryTest, TellsWhyTheBackendRefuses) {
  RegisteringBackend backend;
  backend.Refuse();
  EXPECT_TRUE(absl::IsResourceExhausted(RegisteredMemory::Create(100, &backend).status()));
}

TEST(RegisterSlabTest, IsRegisteredUntilItsLastOwnerLetsGo) {
  RegisteringBackend backend;
  const auto slab = Slab::Create("heavywater-test-registered-" + std::to_string(getpid()), 1 << 20);
  ASSERT_TRUE(slab.ok()) << slab.status();
  auto view =
      SlabView::Map((*slab)->name(), (*slab)->object_bytes(), (*slab)->nonce(), kSlabFormatVersion);
  ASSERT_TRUE(view.ok()) << view.status();
  auto registered = RegisterSlab(*std::move(view), &backend);
  ASSERT_TRUE(registered.ok()) << registered.status();
  std::shared_ptr<SlabView> other = *registered;
  registered->reset();
  const std::span<std::byte> memory = other->memory();
  EXPECT_TRUE(backend.IsRegistered(memory.data()));
  EXPECT_TRUE(backend.IsRegistered(&memory.back()));
  other.reset();
  EXPECT_EQ(backend.num_registered(), 0);
}

TEST(RemoteSequenceMemoryTest, PagesOfThisProcessAreRegisteredWhileTheyAreThere) {
  RegisteringBackend backend;
  constexpr PageGeometry kGeometry{
      .num_layers = 2, .num_kv_heads = 2, .page_tokens = 4, .row_bytes = 16};
  {
    RemoteSequence sequence(1, kGeometry, {.first = 0, .count = 2}, nullptr, &backend);
    ASSERT_TRUE(sequence.AddLocalPages(3).ok());
    EXPECT_EQ(backend.num_registered(), 3);
    EXPECT_TRUE(backend.IsRegistered(sequence.Page(1, 1, 2) + kGeometry.page_bytes() - 1));
    sequence.SkipPages(2, 3);
    EXPECT_EQ(backend.num_registered(), 2);
    backend.Refuse();
    EXPECT_TRUE(absl::IsResourceExhausted(sequence.AddLocalPages(4)));
    EXPECT_EQ(sequence.num_pages(), 3);
  }
  EXPECT_EQ(backend.num_registered(), 0);
}

}  // namespace
}  // namespace heavywater
