// The real model, for tests that need one.
#pragma once

#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "worker/model/gguf_file.h"

namespace heavywater {

// From the environment's HEAVYWATER_MODEL, else as configured; empty = none.
std::string RealModelPath();

// Skips visibly where there is no model file.
class RealModelTest : public testing::Test {
 protected:
  void SetUp() override;
  std::unique_ptr<GgufFile> file_;
};

}  // namespace heavywater
