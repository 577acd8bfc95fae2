// Paged attention: what is asked for, and how it is cut into items that threads take one by one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

// The fields of attention/native.py, in its order. Pages hold 64 tokens; strides count elements.
struct AttentionCall {
  const void* query;       // [T, heads, width]
  const void* query_rope;  // [T, heads, rope_width] for MLA, else null
  void* out;               // [T, heads, value_width]
  const void* first;       // K [P, 64, groups, width], or the latent [P, 64, 1, width]
  const void* second;      // V [P, 64, groups, value_width], or the rotary key [P, 64, 1, rope_width]
  int64_t first_page_stride, second_page_stride;
  const int32_t* page_table;  // [B, table_stride]
  int64_t table_stride;
  const int32_t* query_offsets;    // [B + 1]
  const int32_t* context_lengths;  // [B]
  int64_t sequences, heads, groups, width, rope_width, value_width;
  int64_t window;      // 0: none
  const float* sinks;  // [heads] or null
  float scale;
  int32_t threads;
};

namespace hpcgen {

constexpr int64_t kPageTokens = 64;

// Queries [first_row, first_row + tokens) of T of one sequence, in some KV groups, over some pages of its context.
struct AttentionItem {
  int64_t sequence, first_row, tokens, position;  // position: of the first query
  int64_t first_group, last_group;
  int64_t first_page, last_page;
  int64_t partial;  // where its unnormalised result goes, or -1: it covers all pages and writes `out`
};

// Items whose partial results make up one result.
struct AttentionMerge {
  int64_t item, count;  // consecutive items
};

struct AttentionSchedule {
  std::vector<AttentionItem> items;
  std::vector<AttentionMerge> merges;
  int64_t partials = 0;        // rows of partial results
};

inline int64_t rows_of(const AttentionCall& call, const AttentionItem& item) {
  return item.tokens * (call.heads / call.groups);
}

// `target_rows`: query heads times tokens that share the work of packing a page of keys and values.
inline AttentionSchedule schedule_attention(const AttentionCall& call, int64_t target_rows) {
  // One new token: an item takes all groups, so that a page is read from front to back.
  constexpr int64_t few_rows = 16;
  // Packing a page costs about as much as the products of so many rows.
  constexpr int64_t packing_rows = 12;
  constexpr int64_t items_per_thread = 4, least_pages = 2;
  const int64_t heads_per_group = call.heads / call.groups;
  // A power of two, so that blocks begin where pages or halves of them do and few products are masked.
  int64_t block = 1;
  while (2 * block * heads_per_group <= target_rows) block *= 2;

  std::vector<AttentionItem> whole;
  int64_t total = 0;
  const auto cost = [&](const AttentionItem& item) {
    return (item.last_page - item.first_page) * (item.last_group - item.first_group) *
           (rows_of(call, item) + packing_rows);
  };
  for (int64_t b = 0; b < call.sequences; ++b) {
    const int64_t first = call.query_offsets[b], tokens = call.query_offsets[b + 1] - first;
    for (int64_t start = 0; start < tokens; start += block) {
      AttentionItem item{b, first + start, std::min(block, tokens - start), 0, 0, call.groups, 0, 0, -1};
      item.position = call.context_lengths[b] - tokens + start;
      if (call.window > 0) item.first_page = std::max<int64_t>(0, item.position - call.window + 1) / kPageTokens;
      item.last_page = (item.position + item.tokens + kPageTokens - 1) / kPageTokens;
      const int64_t groups_at_once = rows_of(call, item) <= few_rows ? call.groups : 1;
      for (int64_t g = 0; g < call.groups; g += groups_at_once) {
        item.first_group = g;
        item.last_group = g + groups_at_once;
        whole.push_back(item);
        total += cost(item);
      }
    }
  }
  // The longest first: what is handed out last is short, and threads end together.
  std::stable_sort(whole.begin(), whole.end(), [&](const auto& a, const auto& b) { return cost(a) > cost(b); });

  AttentionSchedule schedule;
  const int64_t limit = std::max<int64_t>(1, total / (items_per_thread * call.threads));
  for (AttentionItem item : whole) {
    const int64_t first = item.first_page, pages = item.last_page - first;
    const int64_t parts = call.threads == 1 ? 1 : std::min((cost(item) + limit - 1) / limit, pages / least_pages);
    if (parts <= 1) {
      schedule.items.push_back(item);
      continue;
    }
    schedule.merges.push_back({static_cast<int64_t>(schedule.items.size()), parts});
    for (int64_t p = 0; p < parts; ++p) {
      item.first_page = first + pages * p / parts;
      item.last_page = first + pages * (p + 1) / parts;
      item.partial = schedule.partials;
      schedule.partials += rows_of(call, item) * (item.last_group - item.first_group);
      schedule.items.push_back(item);
    }
  }
  return schedule;
}

}  // namespace hpcgen
