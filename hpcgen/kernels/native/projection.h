// Packed rows times packed weights, to plain rows in bf16.
#pragma once

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

// y [rows, columns] = rows x weight (+ bias).
template <class Kernel>
void project(const PackedRows<Kernel>& packed, const Weights& weights, const bf16* bias, int64_t columns, bf16* y,
             int64_t stride, int threads) {
  const int64_t panels = columns / kPanelColumns;
  const int64_t blocks = row_blocks<Kernel>(packed.tiles(), packed.units, panels, threads);
  parallel_for(threads, blocks * panels, [&](int64_t item) {
    static thread_local Scratch scratch, panel_scratch;
    const int64_t block = item / panels, panel = item % panels;
    const int64_t first = packed.tiles() * block / blocks, last = packed.tiles() * (block + 1) / blocks;
    const int64_t rows = packed.start(last) - packed.start(first);
    float* product = scratch.get<float>(Kernel::padded_rows(rows) * kPanelColumns);
    F32x16 bias_low = zero(), bias_high = zero();
    if (bias != nullptr) {
      bias_low = load(bias + panel * kPanelColumns);
      bias_high = load(bias + panel * kPanelColumns + kLanes);
    }
    Kernel::begin();
    multiply_panel<Kernel>(packed, first, last, weights.panel(panel, panel_scratch), product,
                           [&](int64_t t, const float* c) {
                             bf16* out = y + packed.start(t) * stride + panel * kPanelColumns;
                             for (int r = 0; r < packed.tile_rows(t); ++r, out += stride, c += kPanelColumns) {
                               store(out, load(c) + bias_low);
                               store(out + kLanes, load(c + kLanes) + bias_high);
                             }
                           });
    Kernel::end();
  });
}

}  // namespace hpcgen
