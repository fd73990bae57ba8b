#include "worker/rank/exposure.h"

#include <cmath>
#include <initializer_list>

#include "gtest/gtest.h"

namespace heavywater {
namespace {

TEST(ExposureTest, ThePowerIsThatOfTheLibraryWithoutItsLastBit) {
  for (const int64_t n : {1, 2, 3, 10, 1000, 123456}) {
    for (const double gamma : {0.25, 0.5, 0.75, 1.0, 1.5, 4.0}) {
      const double want = std::pow(static_cast<double>(n), gamma);
      EXPECT_NEAR(ExposurePower(n, gamma), want, want * 1e-13) << n << "^" << gamma;
    }
  }
  EXPECT_EQ(ExposurePower(12345, 1.0), 12345);
  EXPECT_EQ(ExposurePower(16, 0.25), 2);
}

TEST(ExposureTest, AtZeroAScoreIsItsOwnValueAndAtOneTheMeanOfItsQueries) {
  EXPECT_EQ(ExposedValue(1001, 7, 0), 1001);
  EXPECT_EQ(ExposedValue(1001, 7, 1), 143);
  // An old position with the larger sum loses to a newer one that each query pays more.
  EXPECT_LT(ExposedValue(1000, 100, 0.5), ExposedValue(500, 10, 0.5));
}

}  // namespace
}  // namespace heavywater
