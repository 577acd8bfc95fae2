// Packed rows times packed weights, to plain rows in bf16.
#pragma once

#include <vector>

#include "gemm.h"

namespace hpcgen {

// Packs rows x [rows, 2 * units] of bf16 into `packed`.
template <class Kernel>
void pack_rows(const bf16* x, int64_t stride, const PackedRows<Kernel>& packed, int threads) {
  constexpr int64_t worthwhile = 64;  // rows; below, waking threads costs more
  parallel_for(packed.rows < worthwhile ? 1 : threads, packed.tiles(), [&](int64_t t) {
    const bf16* source = x + packed.start(t) * stride;
    const auto row = [&](int r) { return reinterpret_cast<const uint32_t*>(source + r * stride); };
    Kernel::pack(row, packed.tile_rows(t), packed.units, packed.tile(t));
  });
}

// One of the weights that the same rows are multiplied with.
struct Projection {
  Weights weights;
  int64_t columns;
  const bf16* bias;  // or null
  bf16* y;           // [rows, columns]
  int64_t stride;    // of y
};

// y = rows x weight (+ bias), of each projection.
template <class Kernel>
void project(const PackedRows<Kernel>& packed, const std::vector<Projection>& projections, int threads) {
  struct Panel {
    const Projection* projection;
    int64_t panel;
  };
  std::vector<Panel> panels;
  for (const Projection& projection : projections)
    for (int64_t p = 0; p < projection.columns / kPanelColumns; ++p) panels.push_back({&projection, p});
  const auto count = static_cast<int64_t>(panels.size());
  const int64_t blocks = row_blocks<Kernel>(packed.tiles(), packed.units, count, threads);
  parallel_for(threads, blocks * count, [&](int64_t item) {
    static thread_local Scratch scratch, panel_scratch;
    const int64_t block = item / count;
    const auto [projection, panel] = panels[item % count];
    const int64_t first = packed.tiles() * block / blocks, last = packed.tiles() * (block + 1) / blocks;
    const int64_t rows = packed.start(last) - packed.start(first), stride = projection->stride;
    float* product = scratch.get<float>(Kernel::padded_rows(rows) * kPanelColumns);
    F32x16 bias_low = zero(), bias_high = zero();
    if (projection->bias != nullptr) {
      bias_low = load(projection->bias + panel * kPanelColumns);
      bias_high = load(projection->bias + panel * kPanelColumns + kLanes);
    }
    bf16* y = projection->y + panel * kPanelColumns;
    Kernel::begin();
    multiply_panel<Kernel>(packed, first, last, projection->weights.panel(panel, panel_scratch), product,
                           [&](int64_t t, const float* c) {
                             bf16* out = y + packed.start(t) * stride;
                             for (int r = 0; r < packed.tile_rows(t); ++r, out += stride, c += kPanelColumns) {
                               store(out, load(c) + bias_low);
                               store(out + kLanes, load(c + kLanes) + bias_high);
                             }
                           });
    Kernel::end();
  });
}

}  // namespace hpcgen
