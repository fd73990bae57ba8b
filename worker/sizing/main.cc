// heavywater-plan-memory: a question in JSON on standard input (plan_request.h), the
// answer in JSON on standard output.
#include <cstdio>
#include <iostream>
#include <iterator>
#include <string>

#include "worker/sizing/cuda_scratch.h"
#include "worker/sizing/plan_json.h"

namespace heavywater {
namespace {

int Run() {
  const std::string text{std::istreambuf_iterator<char>(std::cin), {}};
  const absl::StatusOr<PlanRequest> request = ParsePlanRequest(text);
  const auto answer = request.ok() ? AnswerPlanRequest(*request, CudaScratch()) : request.status();
  if (!answer.ok()) {
    std::fprintf(stderr, "%s\n", std::string(answer.status().message()).c_str());
    return 1;
  }
  std::printf("%s\n", answer->dump().c_str());
  return 0;
}

}  // namespace
}  // namespace heavywater

int main() { return heavywater::Run(); }
