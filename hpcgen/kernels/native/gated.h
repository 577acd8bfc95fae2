// The first half of a gated MLP or of experts: act(x Wg^T + bg) * (x Wu^T + bu), packed for the second product.
#pragma once

#include <vector>

#include "gemm.h"

namespace hpcgen {

// The numbers of experts/native.py.
enum class Activation : int32_t { silu = 0, gelu_tanh = 1, gelu = 2, swiglu_oai = 3 };

struct Gating {
  Activation activation;
  float alpha, limit;  // of swiglu_oai
  bool interleaved;    // gate and up alternate in the columns of the weight
};

inline F32x16 sigmoid(F32x16 x) { return broadcast(1.0f) / (broadcast(1.0f) + exp(zero() - x)); }

// Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7.
inline F32x16 erf(F32x16 x) {
  const F32x16 z = absolute(x);
  const F32x16 t = broadcast(1.0f) / fma(broadcast(0.3275911f), z, broadcast(1.0f));
  F32x16 p = broadcast(1.061405429f);
  p = fma(p, t, broadcast(-1.453152027f));
  p = fma(p, t, broadcast(1.421413741f));
  p = fma(p, t, broadcast(-0.284496736f));
  p = fma(p, t, broadcast(0.254829592f));
  return copy_sign(broadcast(1.0f) - p * t * exp(zero() - z * z), x);
}

inline F32x16 gate(const Gating& gating, F32x16 g, F32x16 u) {
  switch (gating.activation) {
    case Activation::silu:
      return g * sigmoid(g) * u;
    case Activation::gelu_tanh: {
      // tanh(y) = 2 sigmoid(2 y) - 1
      const F32x16 y = broadcast(0.7978845608f) * fma(broadcast(0.044715f) * g * g, g, g);
      return g * sigmoid(y + y) * u;
    }
    case Activation::gelu:
      return broadcast(0.5f) * g * (broadcast(1.0f) + erf(g * broadcast(0.7071067812f))) * u;
    case Activation::swiglu_oai: {
      const F32x16 limit = broadcast(gating.limit);
      g = min(g, limit);
      u = max(min(u, limit), zero() - limit);
      return (u + broadcast(1.0f)) * g * sigmoid(broadcast(gating.alpha) * g);
    }
  }
  return zero();
}

// Rows that share one pair of weights: those of one expert, or all of a dense MLP.
template <class Kernel>
struct Group {
  PackedRows<Kernel> input;
  PackedRows<Kernel> gated;
  Weights gate, up;
  int64_t first_up_panel;  // where both are rows of one weight, gate before up
  const bf16* gate_bias;  // or null
  const bf16* up_bias;
};

// Turns two products of 32 columns of one row into 32 gated columns (16 units) of the next product's rows.
template <class Kernel>
void gate_row(const Gating& gating, const float* first, const float* second, const bf16* first_bias,
              const bf16* second_bias, uint32_t* units) {
  F32x16 a0 = load(first), a1 = load(first + kLanes), b0 = load(second), b1 = load(second + kLanes);
  if (first_bias != nullptr) {
    a0 = a0 + load(first_bias);
    a1 = a1 + load(first_bias + kLanes);
    b0 = b0 + load(second_bias);
    b1 = b1 + load(second_bias + kLanes);
  }
  F32x16 g0 = a0, g1 = a1, u0 = b0, u1 = b1;
  if (gating.interleaved) {
    split_pairs(a0, a1, g0, u0);
    split_pairs(b0, b1, g1, u1);
  }
  auto* out = reinterpret_cast<bf16*>(units);
  store(out, gate(gating, g0, u0));
  store(out + kLanes, gate(gating, g1, u1));
}

template <class Kernel>
void gate_up(const std::vector<Group<Kernel>>& groups, const Gating& gating, int64_t intermediate, int threads) {
  struct Item {
    const Group<Kernel>* group;
    int64_t first_tile, last_tile, column;  // column: which 32 of the intermediate
  };
  const int64_t panels = intermediate / kPanelColumns;
  std::vector<Item> items;
  for (const Group<Kernel>& group : groups) {
    const int64_t tiles = group.input.tiles();
    const int64_t blocks = row_blocks<Kernel>(tiles, group.input.units, panels * static_cast<int64_t>(groups.size()), threads);
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t p = 0; p < panels; ++p) items.push_back({&group, tiles * b / blocks, tiles * (b + 1) / blocks, p});
  }
  parallel_for(threads, static_cast<int64_t>(items.size()), [&](int64_t i) {
    static thread_local Scratch scratch, first_scratch, second_scratch;
    const Item& item = items[i];
    const Group<Kernel>& group = *item.group;
    const PackedRows<Kernel>& rows = group.input;
    const int64_t first_panel = gating.interleaved ? 2 * item.column : item.column;
    const int64_t second_panel = gating.interleaved ? first_panel + 1 : group.first_up_panel + item.column;
    const uint32_t* first = group.gate.panel(first_panel, first_scratch);
    const uint32_t* second = group.up.panel(second_panel, second_scratch);
    const bf16 *first_bias = nullptr, *second_bias = nullptr;
    if (group.gate_bias != nullptr) {
      first_bias = group.gate_bias + first_panel * kPanelColumns;
      second_bias = gating.interleaved ? first_bias + kPanelColumns : group.up_bias + item.column * kPanelColumns;
    }
    const int64_t row0 = rows.start(item.first_tile);
    const int64_t size = Kernel::padded_rows(rows.start(item.last_tile) - row0) * kPanelColumns;
    float* first_product = scratch.get<float>(2 * size);
    float* second_product = first_product + size;
    Kernel::begin();
    multiply_panel<Kernel>(rows, item.first_tile, item.last_tile, first, first_product, [](int64_t, const float*) {});
    multiply_panel<Kernel>(rows, item.first_tile, item.last_tile, second, second_product, [&](int64_t t, const float* b) {
      const float* a = first_product + (b - second_product);
      alignas(64) uint32_t units[kPanelColumns / 2];
      for (int r = 0; r < rows.tile_rows(t); ++r, a += kPanelColumns, b += kPanelColumns) {
        gate_row<Kernel>(gating, a, b, first_bias, second_bias, units);
        Kernel::put(group.gated.tile(t), rows.tile_rows(t), r, item.column * 16, units, 16);
      }
    });
    Kernel::end();
  });
}

}  // namespace hpcgen
