// Where recall's part of a plan lies in the buffer that ranks reduce: what the
// picks received, so that the attention of all queries still adds up, and the
// positions that each KV head proposes to promote.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "worker/rank/demoted_ledger.h"

namespace heavywater {

// [num_layers] of: mass [rows], then proposals [num_heads][num_candidates] of
// (position + 1, gain), both 0 where there is none. Each KV head has a segment
// of its own, so that the sum over ranks changes none. Where pages may rest, then
// absent [num_pages]: on how many ranks positions of the page cannot be copied up now.
struct RecallRegion {
  int64_t begin = 0;
  int num_layers = 0;
  int rows = 0;        // as in the region of gains
  int num_heads = 0;   // that propose: of the model where ranks reduce, else of this rank
  int first_head = 0;  // of this rank's among them
  int64_t num_candidates = 0;
  int64_t num_pages = 0;  // 0: none may rest

  int64_t layer_size() const { return rows + 2 * num_heads * num_candidates + num_pages; }
  int64_t size() const { return num_layers * layer_size(); }
  int64_t end() const { return begin + size(); }

  // Offsets into the buffer.
  int64_t Mass(int layer, int row) const { return begin + layer * layer_size() + row; }
  int64_t Proposals(int layer, int head) const {
    return begin + layer * layer_size() + rows + 2 * head * num_candidates;
  }

  int64_t Absent(int layer, int64_t page) const { return Proposals(layer, num_heads) + page; }

  void Write(int layer, int head, std::span<const PositionGain> gains,
             std::span<int64_t> buffer) const;
  std::vector<PositionGain> Read(int layer, int head, std::span<const int64_t> buffer) const;
};

}  // namespace heavywater
