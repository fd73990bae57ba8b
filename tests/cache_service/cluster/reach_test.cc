#include "cache_service/cluster/reach.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace heavywater {
namespace {

TEST(ListensTest, WhoListensIsFoundAndWhoHasStoppedIsNot) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(address);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), bytes), 0);
  ASSERT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &bytes), 0);
  ASSERT_EQ(listen(fd, 1), 0);
  const int port = ntohs(address.sin_port);
  EXPECT_TRUE(Listens(absl::StrCat("127.0.0.1:", port), absl::Seconds(1)));
  EXPECT_TRUE(Listens(absl::StrCat("localhost:", port), absl::Seconds(1)));
  close(fd);
  EXPECT_FALSE(Listens(absl::StrCat("127.0.0.1:", port), absl::Seconds(1)));
  EXPECT_FALSE(Listens("127.0.0.1", absl::Seconds(1)));
  EXPECT_FALSE(Listens("no.such.host.invalid:1", absl::Seconds(1)));
}

}  // namespace
}  // namespace heavywater
