// Attention over paged KV with an online softmax (Dao et al., FlashAttention), for packed ragged batches of prefill and
// decode alike: grouped-query attention with sliding windows and sinks, and MLA over its latent.
//
// For each page of 64 tokens the keys become panels of 32 tokens and the values panels of 32 columns; then each tile of
// query rows (tokens times the query heads of one KV group) makes its two products while they are in the cache. Where
// there are only a few rows, as in decode, keys and values are multiplied as they lie.
#include "attention_call.h"

#include "decode_kernel.h"
#include "gemm.h"
#include "online_softmax.h"

namespace hpcgen {
namespace {

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <class Kernel>
class Attention {
  using T = typename Kernel::Value;
  using RowUnit = typename Kernel::RowUnit;
  static constexpr int64_t per_unit = Element<T>::per_unit;
  static constexpr int64_t page_units = kPageTokens / per_unit;  // units along the tokens of a page
  static constexpr int64_t target_rows = 128;

 public:
  explicit Attention(const AttentionCall& call) : call_(call), schedule_(schedule_attention(call, target_rows)) {
    key_units_ = round_up((call.width + call.rope_width) / per_unit, Kernel::unit_multiple);
    value_columns_ = round_up(call.value_width, kPanelColumns);
    heads_per_group_ = call.heads / call.groups;
    latent_ = call.query_rope != nullptr;
    static thread_local Scratch partial_scratch;
    partials_ = partial_scratch.get<float>(schedule_.partials * partial_size());
  }

  void run() {
    parallel_for(call_.threads, static_cast<int64_t>(schedule_.items.size()),
                 [&](int64_t i) { attend(schedule_.items[i]); });
    parallel_for(call_.threads, static_cast<int64_t>(schedule_.merges.size()),
                 [&](int64_t i) { merge(schedule_.merges[i]); });
  }

 private:
  // One page of one KV group.
  struct Step {
    int64_t page, group;
  };

  // What an item works with; all of it stays in the L2 cache.
  struct Workspace {
    RowUnit *query, *weights;
    uint32_t *rows, *weight_rows, *keys, *values;
    float *scores, *sums, *highest, *total;
  };

  int64_t partial_size() const { return value_columns_ + 2; }

  Workspace workspace(int64_t rows, int64_t groups) const {
    static thread_local Scratch scratch;
    const int64_t padded = Kernel::padded_rows(rows);
    size_t offset = 0;
    const auto reserve = [&](size_t bytes) {
      const size_t start = offset;
      offset += (bytes + 63) / 64 * 64;
      return start;
    };
    const size_t query = reserve(groups * padded * key_units_ * sizeof(RowUnit));
    const size_t weights = reserve(Kernel::max_rows * page_units * sizeof(RowUnit));
    const size_t row_units = reserve(Kernel::max_rows * key_units_ * 4);
    const size_t weight_rows = reserve(Kernel::max_rows * page_units * 4);
    const size_t keys = reserve(2 * key_units_ * kPanelColumns * 4);
    const size_t values = reserve(page_units * value_columns_ * 4);
    const size_t scores = reserve(Kernel::max_rows * kPageTokens * 4);
    const size_t sums = reserve(groups * padded * value_columns_ * 4);
    const size_t highest = reserve(groups * rows * 4);
    const size_t total = reserve(groups * rows * 4);
    // Prefetches of the kernels look a little further.
    char* base = scratch.get<char>(offset + 8192);
    return {reinterpret_cast<RowUnit*>(base + query), reinterpret_cast<RowUnit*>(base + weights),
            reinterpret_cast<uint32_t*>(base + row_units), reinterpret_cast<uint32_t*>(base + weight_rows),
            reinterpret_cast<uint32_t*>(base + keys), reinterpret_cast<uint32_t*>(base + values),
            reinterpret_cast<float*>(base + scores), reinterpret_cast<float*>(base + sums),
            reinterpret_cast<float*>(base + highest), reinterpret_cast<float*>(base + total)};
  }

  void attend(const AttentionItem& item) const {
    const int64_t rows = rows_of(call_, item), groups = item.last_group - item.first_group;
    const int64_t padded = Kernel::padded_rows(rows);
    const Workspace space = workspace(rows, groups);
    const bool unpacked = takes_unpacked(rows);
    if (!unpacked) {
      // Columns and units that only pad are zero, and stay so.
      std::fill(space.keys, space.keys + 2 * key_units_ * kPanelColumns, 0u);
      std::fill(space.values, space.values + page_units * value_columns_, 0u);
    }
    std::fill(space.sums, space.sums + groups * padded * value_columns_, 0.0f);
    std::fill(space.highest, space.highest + groups * rows, kLowest);
    std::fill(space.total, space.total + groups * rows, 0.0f);
    Kernel::begin();
    for (int64_t g = 0; g < groups && !unpacked; ++g)
      pack_query(item, item.first_group + g, space, space.query + g * padded * key_units_);
    for (int64_t page = item.first_page; page < item.last_page; ++page) {
      for (int64_t g = 0; g < groups; ++g) {
        const Step step{page, item.first_group + g};
        const Step next = g + 1 < groups ? Step{page, step.group + 1}
                                         : Step{std::min(page + 1, item.last_page - 1), item.first_group};
        if (unpacked) {
          attend_unpacked(item, step, next, rows, space, g);
          continue;
        }
        pack_keys(item, step, next, space);
        pack_values(item, step, next, space);
        const PackedRows<Kernel> query{space.query + g * padded * key_units_, rows, key_units_};
        // Whole panels of tokens that any of the queries sees.
        const int64_t seen = item.position + item.tokens - page * kPageTokens;
        const int64_t tokens = std::min(kPageTokens, round_up(seen, kPanelColumns));
        for (int64_t t = 0; t < query.tiles(); ++t)
          attend_tile(item, page, tokens, query, t, space, space.sums + (g * padded + query.start(t)) * value_columns_,
                      space.highest + g * rows + query.start(t), space.total + g * rows + query.start(t));
      }
    }
    Kernel::end();
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t r = 0; r < rows; ++r) {
        float* sums = space.sums + (g * padded + r) * value_columns_;
        const float highest = space.highest[g * rows + r], total = space.total[g * rows + r];
        if (item.partial < 0) {
          finish(item, item.first_group + g, r, sums, highest, total);
          continue;
        }
        float* partial = partials_ + (item.partial + g * rows + r) * partial_size();
        std::copy(sums, sums + value_columns_, partial);
        partial[value_columns_] = highest;
        partial[value_columns_ + 1] = total;
      }
  }

  // Row r is query token r / heads_per_group of the item, head r % heads_per_group of the group.
  int64_t head_row(const AttentionItem& item, int64_t group, int64_t r) const {
    return (item.first_row + r / heads_per_group_) * call_.heads + group * heads_per_group_ + r % heads_per_group_;
  }

  void pack_query(const AttentionItem& item, int64_t group, const Workspace& space, RowUnit* packed) const {
    const PackedRows<Kernel> tiles{packed, rows_of(call_, item), key_units_};
    const auto* query = static_cast<const T*>(call_.query);
    const auto* rope = static_cast<const T*>(call_.query_rope);
    for (int64_t t = 0; t < tiles.tiles(); ++t) {
      const int64_t start = tiles.start(t), units = call_.width / per_unit;
      const int rows = tiles.tile_rows(t);
      if (!latent_) {
        const auto row = [&](int r) {
          return reinterpret_cast<const uint32_t*>(query + head_row(item, group, start + r) * call_.width);
        };
        Kernel::pack(row, rows, units, tiles.tile(t));
        continue;
      }
      // The keys are the latent and then the rotary part; the queries come in the two apart.
      const int64_t joined = units + call_.rope_width / per_unit;
      for (int r = 0; r < rows; ++r) {
        const int64_t source = head_row(item, group, start + r);
        uint32_t* row = space.rows + r * joined;
        std::memcpy(row, query + source * call_.width, call_.width * sizeof(T));
        std::memcpy(row + units, rope + source * call_.rope_width, call_.rope_width * sizeof(T));
      }
      Kernel::pack([&](int r) { return space.rows + r * joined; }, rows, joined, tiles.tile(t));
    }
  }

  const T* first(const AttentionItem& item, int64_t page) const {
    return static_cast<const T*>(call_.first) + page_of(item, page) * call_.first_page_stride;
  }
  const T* second(const AttentionItem& item, int64_t page) const {
    return static_cast<const T*>(call_.second) + page_of(item, page) * call_.second_page_stride;
  }
  int64_t page_of(const AttentionItem& item, int64_t page) const {
    return call_.page_table[item.sequence * call_.table_stride + page];
  }

  // Brings data into the cache. Assembly, because GCC drops calls to functions that only prefetch.
  static void prefetch(const T* data, int64_t count) {
    const auto* bytes = reinterpret_cast<const char*>(data);
    for (int64_t b = 0; b < count * static_cast<int64_t>(sizeof(T)); b += 64)
      asm volatile("prefetcht0 %0" : : "m"(bytes[b]));
  }

  // Tokens past the context are packed too; their scores are never looked at.
  // The rows of the next step are prefetched a few at a time: all at once, they would hold up the ones in hand.
  void pack_keys(const AttentionItem& item, Step step, Step next, const Workspace& space) const {
    const auto pack = [&](const T* keys, const T* later, int64_t width, int64_t stride, int64_t first_unit) {
      for (int64_t token = 0; token < kPageTokens; token += kLanes) {
        for (int64_t t = token; t < token + kLanes; ++t) prefetch(later + t * stride, width);
        const auto row = [&](int r) { return reinterpret_cast<const uint32_t*>(keys + (token + r) * stride); };
        uint32_t* panel = space.keys + (token / kPanelColumns * key_units_ + first_unit) * kPanelColumns;
        transpose_rows(row, kLanes, width / per_unit, panel + token % kPanelColumns, kPanelColumns);
      }
    };
    const int64_t width = call_.width, rope = call_.rope_width;
    pack(first(item, step.page) + step.group * width, first(item, next.page) + next.group * width, width,
         call_.groups * width, 0);
    if (latent_) pack(second(item, step.page), second(item, next.page), rope, rope, width / per_unit);
  }

  // Tokens past the context are zero: what lies in their place may be NaN, which a weight of 0 does not hide.
  void pack_values(const AttentionItem& item, Step step, Step next, const Workspace& space) const {
    const int64_t width = call_.value_width, stride = call_.groups * width;
    const T* values = latent_ ? first(item, step.page) : second(item, step.page) + step.group * width;
    const T* later = second(item, next.page) + next.group * width;
    const int64_t present = std::min(kPageTokens, item.position + item.tokens - step.page * kPageTokens);
    for (int64_t column = 0; column < width; column += kPanelColumns) {
      const int64_t columns = std::min<int64_t>(kPanelColumns, width - column);
      uint32_t* panel = space.values + column * page_units;
      for (int64_t token = 0; token < kPageTokens; token += per_unit, panel += kPanelColumns) {
        if (!latent_)
          for (int64_t t = token; t < token + per_unit; ++t) prefetch(later + t * stride + column, columns);
        const T* here = values + token * stride + column;
        if (token >= present)
          std::fill(panel, panel + kPanelColumns, 0u);
        else
          fill_value_units(here, token + 1 < present ? here + stride : nullptr, columns, panel);
      }
    }
  }

  static void fill_value_units(const float* token, const float*, int64_t columns, uint32_t* units) {
    std::memcpy(units, token, columns * sizeof(float));
  }

  static void fill_value_units(const bf16* even, const bf16* odd, int64_t columns, uint32_t* units) {
    if (odd == nullptr) {
      for (int64_t c = 0; c < columns; ++c) units[c] = even[c];
    } else if (columns == kPanelColumns) {
      interleave(even, odd, units);
    } else {
      for (int64_t c = 0; c < columns; ++c) units[c] = even[c] | static_cast<uint32_t>(odd[c]) << 16;
    }
  }

  void attend_tile(const AttentionItem& item, int64_t page, int64_t tokens, const PackedRows<Kernel>& query, int64_t t,
                   const Workspace& space, float* sums, float* highest, float* total) const {
    const int rows = query.tile_rows(t);
    for (int64_t token = 0; token < tokens; token += kPanelColumns)
      Kernel::multiply(query.tile(t), rows, space.keys + token * key_units_, key_units_, space.scores + token,
                       kPageTokens, false);
    for (int r = 0; r < rows; ++r) {
      weigh_row(item, page, (query.start(t) + r) / heads_per_group_, space.scores + r * kPageTokens,
                sums + r * value_columns_, highest[r], total[r]);
      round_weights(space.scores + r * kPageTokens, space.weight_rows + r * page_units);
    }
    const int64_t units = tokens / per_unit;
    Kernel::pack([&](int r) { return space.weight_rows + r * page_units; }, rows, units, space.weights);
    for (int64_t column = 0; column < value_columns_; column += kPanelColumns)
      Kernel::multiply(space.weights, rows, space.values + column * page_units, units, sums + column,
                       value_columns_, true);
  }

  // Few rows of bf16 whose widths fill vectors.
  bool takes_unpacked(int64_t rows) const {
#if defined(__AVX512BF16__)
    return per_unit == 2 && !latent_ && rows <= 2 * kDecodeRows && call_.width % 32 == 0 && call_.value_width % 32 == 0;
#else
    return false;
#endif
  }

  void attend_unpacked(const AttentionItem& item, Step step, Step next, int64_t rows, const Workspace& space,
                       int64_t g) const {
#if defined(__AVX512BF16__)
    if constexpr (per_unit == 2) {
      const int64_t width = call_.width, value_width = call_.value_width;
      const PageRows page{first(item, step.page) + step.group * width,
                          second(item, step.page) + step.group * value_width,
                          first(item, next.page) + next.group * width,
                          second(item, next.page) + next.group * value_width,
                          call_.groups * width,
                          call_.groups * value_width,
                          width,
                          value_width};
      for (int64_t r = 0; r < rows; r += kDecodeRows) {
        switch (std::min<int64_t>(kDecodeRows, rows - r)) {
          case 1: attend_rows<1>(item, page, step, r, space, g * rows + r); break;
          case 2: attend_rows<2>(item, page, step, r, space, g * rows + r); break;
          case 3: attend_rows<3>(item, page, step, r, space, g * rows + r); break;
          default: attend_rows<4>(item, page, step, r, space, g * rows + r);
        }
      }
    }
#endif
  }

#if defined(__AVX512BF16__)
  // Query rows [r, r + Rows) of the group; `state`: where their sums, highest scores and totals are.
  template <int Rows>
  void attend_rows(const AttentionItem& item, const PageRows& page, Step step, int64_t r, const Workspace& space,
                   int64_t state) const {
    const bf16* query[Rows];
    for (int i = 0; i < Rows; ++i)
      query[i] = static_cast<const bf16*>(call_.query) + head_row(item, step.group, r + i) * call_.width;
    const int64_t present = std::min(kPageTokens, item.position + item.tokens - step.page * kPageTokens);
    score_rows<Rows>(page, query, round_up(present, kLanes), space.scores);
    float* sums = space.sums + state * value_columns_;
    for (int i = 0; i < Rows; ++i) {
      weigh_row(item, step.page, (r + i) / heads_per_group_, space.scores + i * kPageTokens,
                sums + i * value_columns_, space.highest[state + i], space.total[state + i]);
      round_weights(space.scores + i * kPageTokens, space.weight_rows + i * page_units);
    }
    add_rows<Rows>(page, space.weight_rows, present, sums, value_columns_);
  }
#endif

  // Turns the scores of one page into weights, for query token `token` of the item.
  void weigh_row(const AttentionItem& item, int64_t page, int64_t token, float* scores, float* sums, float& highest,
                 float& total) const {
    // Of the query, counted from the page's first token.
    const int64_t position = item.position + token - page * kPageTokens;
    const int64_t first_seen = call_.window > 0 ? std::max<int64_t>(0, position + 1 - call_.window) : 0;
    weigh(static_cast<int>(first_seen), static_cast<int>(std::min(kPageTokens, position + 1)), call_.scale, scores, sums,
          value_columns_, highest, total);
  }

  static void round_weights(const float* weights, uint32_t* units) {
    if constexpr (per_unit == 1) {
      std::memcpy(units, weights, page_units * sizeof(float));
    } else {
      for (int64_t c = 0; c < kPageTokens; c += kLanes) store(reinterpret_cast<bf16*>(units) + c, load(weights + c));
    }
  }

  // Divides by the sum of the weights, the sink's among them.
  void finish(const AttentionItem& item, int64_t group, int64_t r, const float* sums, float highest,
              float total) const {
    const int64_t row = head_row(item, group, r);
    float factor = 1.0f;
    if (call_.sinks != nullptr) {
      const float sink = call_.sinks[row % call_.heads], peak = std::max(highest, sink);
      factor = exp(highest - peak);
      total = total * factor + exp(sink - peak);
    }
    const F32x16 share = broadcast(factor / total);
    T* out = static_cast<T*>(call_.out) + row * call_.value_width;
    int64_t c = 0;
    for (; c + kLanes <= call_.value_width; c += kLanes) store(out + c, load(sums + c) * share);
    if (c < call_.value_width) {
      alignas(64) T rest[kLanes];
      store(rest, load(sums + c) * share);
      std::copy(rest, rest + call_.value_width - c, out + c);
    }
  }

  void merge(const AttentionMerge& merge) const {
    static thread_local Scratch scratch;
    const AttentionItem& item = schedule_.items[merge.item];
    const int64_t rows = rows_of(call_, item);
    float* sums = scratch.get<float>(value_columns_);
    for (int64_t i = 0; i < rows * (item.last_group - item.first_group); ++i) {
      const auto part = [&](int64_t p) {
        return partials_ + (schedule_.items[merge.item + p].partial + i) * partial_size();
      };
      float highest = kLowest, total = 0;
      for (int64_t p = 0; p < merge.count; ++p) highest = std::max(highest, part(p)[value_columns_]);
      std::fill(sums, sums + value_columns_, 0.0f);
      for (int64_t p = 0; p < merge.count; ++p) {
        const float factor = exp(part(p)[value_columns_] - highest);
        total += part(p)[value_columns_ + 1] * factor;
        const F32x16 factors = broadcast(factor);
        for (int64_t c = 0; c < value_columns_; c += kLanes)
          store(sums + c, fma(load(part(p) + c), factors, load(sums + c)));
      }
      finish(item, item.first_group + i / rows, i % rows, sums, highest, total);
    }
  }

  const AttentionCall& call_;
  AttentionSchedule schedule_;
  int64_t key_units_, value_columns_, heads_per_group_;
  bool latent_;
  float* partials_;
};

}  // namespace
}  // namespace hpcgen

// bf16: width, rope_width and value_width are even.
extern "C" void hpcgen_attention_bf16(const AttentionCall* call) {
  using namespace hpcgen;
#if defined(HPCGEN_AMX)
  // Decode with few heads in a group would leave tiles mostly empty.
  const int64_t tokens = call->query_offsets[call->sequences];
  if (tokens * (call->heads / call->groups) >= 16 * call->sequences) return Attention<AmxKernel>(*call).run();
#endif
  Attention<DotKernel<bf16>>(*call).run();
}

extern "C" void hpcgen_attention_f32(const AttentionCall* call) {
  using namespace hpcgen;
  Attention<DotKernel<float>>(*call).run();
}

// pages[slot / 64][slot % 64] = rows[t] for each new token t; `bytes`: of one token; the page stride in bytes.
extern "C" void hpcgen_write_pages(char* pages, int64_t page_stride, const char* rows, int64_t row_stride,
                                   const int64_t* slots, int64_t tokens, int64_t bytes) {
  for (int64_t t = 0; t < tokens; ++t)
    std::memcpy(pages + slots[t] / hpcgen::kPageTokens * page_stride + slots[t] % hpcgen::kPageTokens * bytes,
                rows + t * row_stride, static_cast<size_t>(bytes));
}
