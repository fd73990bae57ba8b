// A sequence in the plain reference, fed with what a TestGroup is fed with, and
// the comparison of the two.
#pragma once

#include <string>
#include <vector>

#include "tests/worker/rank/plain_reference.h"
#include "tests/worker/rank/test_group.h"

namespace heavywater {

class PlainSequence {
 public:
  PlainSequence(const TestGroup& group, const PolicyOptions& policy);

  void Prompt(const std::vector<int32_t>& tokens);
  void Append(const std::vector<int32_t>& tokens);
  void Append(const std::vector<int32_t>& tokens, bool plan_due);
  void ForgetGains();
  void SetHostMemory(const PlainHostMemory& host);
  void SetHostMemory(int layer, const PlainHostMemory& host) { layers_[layer].SetHostMemory(host); }

  int64_t tokens_seen() const { return layers_[0].tokens_seen(); }
  const PlainLayer& layer(int layer) const { return layers_[layer]; }

  // "" when the group keeps the same positions, its scores are within
  // `tolerance` (units of 2^-32), and attention of the last call's tokens
  // returned the same; or what differs.
  std::string Compare(TestGroup& group, SequenceId sequence, int64_t tolerance) const;
  // Only the sets: positions that differ, of which none may have a ranking
  // farther than 1e-4 (relative) from the cut: then -1.
  int64_t CountDifferentNearTheCut(TestGroup& group, SequenceId sequence) const;
  // Only what attention returned for the last call's tokens.
  std::string CompareAttention(TestGroup& group, int layer) const;

 private:
  const TestGroup& group_;
  std::vector<PlainLayer> layers_;
  std::vector<int32_t> last_tokens_;
  Position last_first_ = 0;
  std::vector<std::vector<float>> last_out_;  // [layer]
};

}  // namespace heavywater
