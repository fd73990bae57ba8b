#include "cache_service/security/address.h"

#include <gtest/gtest.h>

namespace heavywater {
namespace {

TEST(AddressTest, LoopbackIsWhatOnlyThisMachineCanReach) {
  for (const char* address :
       {"127.0.0.1:7700", "127.8.9.1:0", "[::1]:7700", "localhost:1", "::1"}) {
    EXPECT_TRUE(IsLoopback(address)) << address;
  }
  for (const char* address :
       {"0.0.0.0:7700", "[::]:7700", "10.0.0.1:7700", "128.0.0.1:1", "cache:7700", "", ":7700",
        "localhost.example.com:1", "127.0.0.1.example.com:1", "[::2]:1", "*:7700"}) {
    EXPECT_FALSE(IsLoopback(address)) << address;
  }
}

TEST(AddressTest, TheHostIsWhatStandsBeforeThePort) {
  EXPECT_EQ(HostOf("cache.svc:7700"), "cache.svc");
  EXPECT_EQ(HostOf("[fe80::1]:7700"), "fe80::1");
  EXPECT_EQ(HostOf("cache"), "cache");
}

}  // namespace
}  // namespace heavywater
