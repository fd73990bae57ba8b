// The conformance suite's fixture: one suite, BackendTest, over every Backend;
// its tests lie in several files. Device memory is only touched through the
// interface, as callers do.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/worker/backend/layer_image.h"
#include "tests/worker/backend/recall_image.h"
#include "worker/backend/backend.h"

namespace heavywater {

// GetParam() names the backend (backend_factory.h); it is skipped where the machine
// lacks it.
class BackendTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override;
  void TearDown() override;

  Backend& backend() { return *backend_; }
  Backend& oracle() { return *oracle_; }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Backend> oracle_ = CreateReferenceBackend();
};

// Queries of a few sequences over one layer each.
struct AttendCase {
  struct Item {
    LayerImage layer;
    int64_t num_tokens = 1;
    Position first_position = 0;
    std::optional<RecallImage> recall = {};
  };
  KvShape shape;
  std::vector<Item> items;
  std::vector<float> queries;  // [sum of num_tokens][num_query_heads][head_dim]
  float scale = 0;
  GainKind gains = GainKind::kProbability;

  int64_t num_tokens() const;
  // The item's tokens as a case of their own.
  AttendCase Alone(size_t item) const;
};

struct AttendOutcome {
  std::vector<float> out;
  std::vector<std::vector<int64_t>> gains;  // [item][num_kv_heads * capacity]
  std::vector<RecallOutcome> recall = {};   // [item]
};
// Exactly what the backend asks for.
DeviceBuffer AttendScratch(Backend& backend, const KvShape& shape,
                           std::span<const AttendItem> items);
AttendOutcome RunAttend(Backend& backend, const AttendCase& attend);

// Sequences of random lengths with holes in their tables, queries at and before
// their last position.
AttendCase RandomAttendCase(std::mt19937& rng, const KvShape& shape, int num_items);

// A prompt in the chunks given (tokens each).
struct PromptCase {
  KvShape shape;
  LayerImage layer;
  std::vector<float> queries;  // [tokens][num_query_heads][head_dim]
  std::vector<int64_t> chunks;
  Position score_from = 0;
  float scale = 0;
  GainKind gains = GainKind::kProbability;
};
AttendOutcome RunPrompt(Backend& backend, const PromptCase& prompt);
PromptCase RandomPromptCase(std::mt19937& rng, const KvShape& shape, int64_t num_tokens);

// Results of float kernels against the oracle's: outputs relative to values of
// about 1, gains relative to themselves and to the rounding of `num_queries`
// probabilities.
void ExpectClose(const AttendOutcome& actual, const AttendOutcome& expected, int64_t num_queries);
void ExpectSameBits(const std::vector<float>& actual, const std::vector<float>& expected);

}  // namespace heavywater
