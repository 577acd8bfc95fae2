// Experts of a sparse MoE layer: tokens sorted by expert, gate and up and activation in one pass, down, weighted sum.
#include "gated.h"

// The fields of experts/native.py, in its order.
struct ExpertsCall {
  const uint16_t* hidden;  // [tokens, inner]
  int64_t hidden_stride;
  const int64_t* top_index;  // [tokens, top_k], global numbers
  const float* top_weight;   // [tokens, top_k]
  uint16_t* out;             // [tokens, inner], contiguous
  int64_t tokens, top_k, inner, intermediate;
  const StoredWeights* gate_up;  // [count, 2 * intermediate, inner]
  const StoredWeights* down;     // [count, inner, intermediate]
  const uint16_t* gate_up_bias;  // [count, 2 * intermediate] or null
  const uint16_t* down_bias;     // [count, inner] or null
  int64_t first, count;
  int32_t activation, interleaved;
  float alpha, limit;
  int32_t threads;
};

namespace hpcgen {
namespace {

// A row of an expert's input: whose it is and what it weighs in that token's sum.
struct Row {
  int64_t token;
  float weight;
};

// Rows of local experts, by expert and then by token; starts[e] is where those of expert e begin.
void sort_by_expert(const ExpertsCall& call, std::vector<Row>& rows, std::vector<int64_t>& starts) {
  starts.assign(call.count + 1, 0);
  const int64_t slots = call.tokens * call.top_k;
  const auto local = [&](int64_t slot) {
    const int64_t expert = call.top_index[slot] - call.first;
    return expert >= 0 && expert < call.count ? expert : -1;
  };
  for (int64_t s = 0; s < slots; ++s)
    if (local(s) >= 0) ++starts[local(s) + 1];
  for (int64_t e = 0; e < call.count; ++e) starts[e + 1] += starts[e];
  rows.resize(starts[call.count]);
  std::vector<int64_t> next(starts.begin(), starts.end() - 1);
  for (int64_t s = 0; s < slots; ++s)
    if (local(s) >= 0) rows[next[local(s)]++] = {s / call.top_k, call.top_weight[s]};
}

template <class Kernel>
class Experts {
 public:
  explicit Experts(const ExpertsCall& call) : call_(call) {
    sort_by_expert(call, rows_, starts_);
    static thread_local Scratch input_scratch, gated_scratch;
    // Tiles begin at a padded row, so an expert takes up to a tile more than its rows.
    int64_t padded = 0;
    for (int64_t e = 0; e < call.count; ++e) padded += Kernel::padded_rows(starts_[e + 1] - starts_[e]);
    auto* input = input_scratch.get<typename Kernel::RowUnit>(padded * call.inner / 2);
    auto* gated = gated_scratch.get<typename Kernel::RowUnit>(padded * call.intermediate / 2);
    for (int64_t e = 0; e < call.count; ++e) {
      const int64_t rows = starts_[e + 1] - starts_[e];
      if (rows == 0) continue;
      const Weights weights(*call.gate_up, e);
      const bf16* bias = call.gate_up_bias ? call.gate_up_bias + e * 2 * call.intermediate : nullptr;
      groups_.push_back({{input, rows, call.inner / 2},
                         {gated, rows, call.intermediate / 2},
                         weights,
                         weights,
                         call.intermediate / kPanelColumns,
                         bias,
                         bias ? bias + call.intermediate : nullptr});
      experts_.push_back(e);
      input += PackedRows<Kernel>::size(rows, call.inner / 2);
      gated += PackedRows<Kernel>::size(rows, call.intermediate / 2);
    }
  }

  void run() {
    gather();
    const Gating gating{static_cast<Activation>(call_.activation), call_.alpha, call_.limit, call_.interleaved != 0};
    gate_up<Kernel>(groups_, gating, call_.intermediate, call_.threads);
    down();
  }

 private:
  void gather() {
    std::vector<std::pair<int64_t, int64_t>> tiles;  // group, tile
    for (size_t g = 0; g < groups_.size(); ++g)
      for (int64_t t = 0; t < groups_[g].input.tiles(); ++t) tiles.emplace_back(g, t);
    parallel_for(call_.threads, static_cast<int64_t>(tiles.size()), [&](int64_t i) {
      const auto [g, t] = tiles[i];
      const PackedRows<Kernel>& input = groups_[g].input;
      const Row* rows = &rows_[starts_[experts_[g]] + input.start(t)];
      const auto row = [&](int r) {
        return reinterpret_cast<const uint32_t*>(call_.hidden + rows[r].token * call_.hidden_stride);
      };
      Kernel::pack(row, input.tile_rows(t), input.units, input.tile(t));
    });
  }

  // Each item sums 32 columns of all tokens over a share of the experts, in fp32: no product is written to memory, and
  // the order of the sum does not depend on the threads.
  void down() {
    const int64_t panels = call_.inner / kPanelColumns;
    const int64_t groups = static_cast<int64_t>(groups_.size());
    const int64_t shares = std::clamp<int64_t>(groups / 2, 1, (2 * call_.threads + panels - 1) / panels);
    static thread_local Scratch sum_scratch;
    float* sums = shares > 1 ? sum_scratch.get<float>(panels * shares * call_.tokens * kPanelColumns) : nullptr;
    const int64_t size = call_.tokens * kPanelColumns;
    parallel_for(call_.threads, panels * shares, [&](int64_t item) {
      static thread_local Scratch own_scratch;
      const int64_t panel = item / shares, share = item % shares;
      float* sum = shares > 1 ? sums + item * size : own_scratch.get<float>(size);
      std::fill(sum, sum + size, 0.0f);
      for (int64_t g = groups * share / shares; g < groups * (share + 1) / shares; ++g) add_group(g, panel, sum);
      if (shares == 1) write(panel, sum, 1);
    });
    if (shares > 1)
      parallel_for(call_.threads, panels, [&](int64_t panel) { write(panel, sums + panel * shares * size, shares); });
  }

  void add_group(int64_t g, int64_t panel, float* sum) const {
    static thread_local Scratch scratch, panel_scratch;
    const PackedRows<Kernel>& gated = groups_[g].gated;
    const int64_t expert = experts_[g];
    const Row* rows = &rows_[starts_[expert]];
    const uint32_t* weight = Weights(*call_.down, expert).panel(panel, panel_scratch);
    F32x16 bias_low = zero(), bias_high = zero();
    if (call_.down_bias != nullptr) {
      const bf16* bias = call_.down_bias + expert * call_.inner + panel * kPanelColumns;
      bias_low = load(bias);
      bias_high = load(bias + kLanes);
    }
    float* product = scratch.get<float>(Kernel::padded_rows(gated.rows) * kPanelColumns);
    Kernel::begin();
    multiply_panel<Kernel>(gated, 0, gated.tiles(), weight, product, [&](int64_t t, const float* c) {
      const Row* row = rows + gated.start(t);
      for (int r = 0; r < gated.tile_rows(t); ++r, ++row, c += kPanelColumns) {
        float* out = sum + row->token * kPanelColumns;
        const F32x16 share = broadcast(row->weight);
        store(out, fma(share, load(c) + bias_low, load(out)));
        store(out + kLanes, fma(share, load(c + kLanes) + bias_high, load(out + kLanes)));
      }
    });
    Kernel::end();
  }

  void write(int64_t panel, const float* sums, int64_t shares) const {
    const int64_t size = call_.tokens * kPanelColumns;
    for (int64_t t = 0; t < call_.tokens; ++t) {
      const float* sum = sums + t * kPanelColumns;
      F32x16 low = load(sum), high = load(sum + kLanes);
      for (int64_t s = 1; s < shares; ++s) {
        low = low + load(sum + s * size);
        high = high + load(sum + s * size + kLanes);
      }
      bf16* out = call_.out + t * call_.inner + panel * kPanelColumns;
      store(out, low);
      store(out + kLanes, high);
    }
  }

  const ExpertsCall& call_;
  std::vector<Row> rows_;
  std::vector<int64_t> starts_;
  std::vector<Group<Kernel>> groups_;  // of the experts that have rows
  std::vector<int64_t> experts_;       // their numbers
};

}  // namespace
}  // namespace hpcgen

// inner and intermediate are multiples of 32. Slots whose expert is not local add nothing.
extern "C" void hpcgen_experts(const ExpertsCall* call) {
  using namespace hpcgen;
  if (call->tokens == 0) return;
#if defined(HPCGEN_AMX)
  // Few rows an expert: memory is what is waited for, and small tiles would be mostly padding.
  if (call->tokens * call->top_k > 4 * call->count) return Experts<AmxKernel>(*call).run();
#endif
  Experts<DotKernel<bf16>>(*call).run();
}
