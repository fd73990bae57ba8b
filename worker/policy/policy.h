// What each eviction policy asks for. A policy is parameters only (where scores
// come from, what is protected, how many tokens stay); ONE selection function
// chooses (selection.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace heavywater {

enum class Policy {
  kFull,          // keep all
  kStreaming,     // sinks and recent (StreamingLLM, arXiv:2309.17453)
  kH2o,           // heavy hitters and recent (H2O, arXiv:2306.14048)
  kSnapKv,        // the prompt's last queries vote, decode keeps all (SnapKV, arXiv:2404.14469)
  kSnapKvH2o,     // SnapKV at the end of the prompt, H2O from then on
  kScissorhands,  // the most often pivotal (Scissorhands, arXiv:2305.17118)
  kPyramidKv,     // SnapKV, budgets that fall over the layers (PyramidKV, arXiv:2406.02069)
  kOracle,        // for evaluation: keeps all, each query attends to its own true top
};

// What a query gives to the positions that it attends to.
enum class GainKind {
  kProbability,  // its attention probability
  kPivotal,      // 1 where that is above kPivotalMargin / (its position + 1), else 0
};
// The paper's threshold is 1/t, the mean attention. Where all probabilities are equal
// none is pivotal, however they are rounded: hence a little more than 1.
inline constexpr double kPivotalMargin = 1.0 + 1.0 / (1 << 14);

// Which heads share one resident set.
enum class Scope {
  kLayer,   // all heads of all ranks in a layer; scores are all-reduced
  kKvHead,  // each KV head its own
};

// How a layer's slots are divided among its KV heads, in scope kv_head.
enum class HeadBudgets {
  kEven,      // each KV head has as many
  kAdaptive,  // where the layer's highest scores lie (head_budgets.h)
};

// Where attention sees a token.
enum class Positions {
  kAbsolute,       // at its place in the text: K is stored rotated
  kCacheRelative,  // at its place within the cache, by order (StreamingLLM): K is stored
                   // unrotated; generation may go on past the model's trained length
};

enum class Pooling { kNone, kAverage, kMax };

// Whether, and how, queries attend to demoted positions too.
struct RecallOptions {
  bool enabled = false;
  bool all = false;             // every demoted position: equals the full cache
  int recall_tokens = 64;       // picks of a query, per layer and KV head
  double min_share = 1e-4;      // of attention, by estimate, below which nothing is picked
  int sketch_channels = 0;      // a multiple of 8; 0 = by head size and budget
  int promote_candidates = 32;  // proposals of a plan, per layer and KV head; 0 = no promotion
  bool wait = false;            // for picks on pages that rest, which are missed otherwise

  bool operator==(const RecallOptions&) const = default;
};

// As given by the caller of OpenSequence; a plain struct, converted from proto
// in the servers. Either tokens or ratios: tokens win where they are set.
struct PolicyOptions {
  Policy policy = Policy::kSnapKvH2o;
  Scope scope = Scope::kLayer;
  int64_t heavy_tokens = 0;   // per layer; sinks count inside; 0 = by ratio
  int64_t recent_tokens = 0;  // per layer; 0 = by ratio
  double heavy_ratio = 0.1;   // of the prompt, frozen when it ends
  double recent_ratio = 0.1;
  int sink_tokens = 0;          // first positions, never candidates
  int min_budget_tokens = 256;  // floor of heavy + recent when given by ratio
  int window = 32;              // SnapKV: the queries that vote
  Pooling pooling = Pooling::kAverage;
  int pool_kernel = 5;          // odd
  int plan_interval_steps = 1;  // 1 = H2O as published
  double decay = 1.0;           // per token seen; 1.0 = H2O
  double exposure = 0;          // gamma: positions compete by score / queries seen ^ gamma; 0 = H2O
  int history_window = 400;     // scissorhands: queries whose pivotal positions count
  double pyramid_beta = 20;     // pyramidkv: the mean budget over the last layer's, beyond windows
  bool pooled_seeds = false;    // snapkv_h2o: decode's scores start from the pooled votes
  HeadBudgets head_budgets = HeadBudgets::kEven;
  double head_budget_floor = 0.2;  // adaptive: of an even share, what every KV head gets
  Positions positions = Positions::kAbsolute;
  // Above 0: heavy_tokens is solved when the sequence opens, so that all KV bytes
  // on the device (slots, scores, tables, sketches) are this share of the full
  // cache's after the prompt; min_budget_tokens stays a floor. Needs recent_tokens
  // above 0 and heavy_tokens 0. (worker/rank/device_budget.h)
  double device_ratio = 0;
  RecallOptions recall;
};

// Another budget than a preset's, as a caller gives it: 0 or absent is not given.
struct GivenBudget {
  int64_t heavy_tokens = 0;
  int64_t recent_tokens = 0;
  double heavy_ratio = 0;
  double recent_ratio = 0;
  std::optional<double> device_ratio = {};
};
// Takes the fields that are given, and from the preset only what does not
// contradict them: a heavy budget or a ratio ends its device_ratio, a recent_ratio
// its recent_tokens.
void ReplaceBudget(const GivenBudget& given, PolicyOptions& options);

// Where a prompt's scores come from.
enum class PromptScores { kNone, kWindow, kAllQueries };

// Of one layer's sets.
struct LayerBudget {
  int64_t budget_tokens = 0;         // slots a set may hold after a plan; 0 = unbounded in decode
  int64_t recent_tokens = 0;         // protected last positions, in decode
  int64_t prompt_budget_tokens = 0;  // kept at the end of the prompt; 0 = all

  bool operator==(const LayerBudget&) const = default;
};

// What a policy decides, resolved for one prompt length.
struct Budget {
  // Of every layer; where `layers` says otherwise, the mean over layers, rounded down.
  int64_t budget_tokens = 0;  // slots a set may hold after a plan; 0 = unbounded in decode
  int64_t sink_tokens = 0;
  int64_t recent_tokens = 0;         // protected last positions, in decode
  int64_t prompt_budget_tokens = 0;  // kept at the end of the prompt; 0 = all
  int64_t prompt_recent_tokens = 0;  // protected last positions at the end of the prompt
  std::vector<LayerBudget> layers;   // [num_layers]; empty: all layers alike
  PromptScores prompt_scores = PromptScores::kNone;
  bool window_votes = false;  // SnapKV: on the columns before the window, which is kept
  GainKind gains = GainKind::kProbability;
  int64_t window = 0;                // voting queries, at most the prompt's length
  Pooling pooling = Pooling::kNone;  // of the votes, for the choice only: seeds stay raw
  int pool_kernel = 1;
  // Oracle: residents that a query after the prompt attends to: sinks, recent and, by
  // its own attention to all of them, the top of the rest. 0 = all.
  int64_t attended_tokens = 0;
  bool bounded_decode = false;  // plans evict during decode
  bool uses_scores = false;     // decode accumulates attention scores

  LayerBudget OfLayer(int layer) const;
};

// The budget for a prompt of `prompt_tokens` (>= 1) and a model of `num_layers` (>= 1).
// INVALID_ARGUMENT naming the field when it cannot work (recent 0, budget below sinks +
// recent, a ratio outside (0, 1], an even pool_kernel, recall where nothing is demoted,
// ...). Never yields an empty set, and over all layers never more than the given budget.
absl::StatusOr<Budget> ResolveBudget(const PolicyOptions& options, int64_t prompt_tokens,
                                     int num_layers = 1);

// Names as in configuration, proto and tables: "full", "streaming", "h2o",
// "snapkv", "snapkv_h2o", "scissorhands", "pyramidkv", "oracle"; "layer", "kv_head";
// "even", "adaptive"; "absolute", "cache_relative". INVALID_ARGUMENT lists the names.
std::string_view PolicyName(Policy policy);
absl::StatusOr<Policy> ParsePolicy(std::string_view name);
std::string_view ScopeName(Scope scope);
absl::StatusOr<Scope> ParseScope(std::string_view name);
std::string_view HeadBudgetsName(HeadBudgets budgets);
absl::StatusOr<HeadBudgets> ParseHeadBudgets(std::string_view name);
std::string_view PositionsName(Positions positions);
absl::StatusOr<Positions> ParsePositions(std::string_view name);

// Options as published for a preset ("snapkv_h2o": the system as ordered;
// "h2o": likewise with sinks 0; every policy name is a preset; "recall": snapkv_h2o
// tuned, with recall, at 20 % of the full cache's bytes).
absl::StatusOr<PolicyOptions> Preset(std::string_view name);

}  // namespace heavywater
