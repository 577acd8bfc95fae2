// Blocks of rows times panels of weights: packing, and the loop over K that keeps a panel in the L1 cache.
#pragma once

#include <algorithm>

#include "amx_kernel.h"
#include "dot_kernel.h"
#include "parallel.h"
#include "weights.h"

namespace hpcgen {

// Rows packed as the tiles of `Kernel`; tile t begins at row tile_start(rows, t).
template <class Kernel>
struct PackedRows {
  typename Kernel::RowUnit* data;
  int64_t rows;
  int64_t units;

  static int64_t size(int64_t rows, int64_t units) { return Kernel::padded_rows(rows) * units; }

  int64_t tiles() const { return Kernel::tiles(rows); }
  int64_t start(int64_t tile) const { return Kernel::tile_start(rows, tile); }
  int tile_rows(int64_t tile) const { return static_cast<int>(start(tile + 1) - start(tile)); }
  typename Kernel::RowUnit* tile(int64_t tile) const { return data + start(tile) * units; }
  // Where `tile` holds unit `first` of its rows.
  const typename Kernel::RowUnit* tile(int64_t tile, int64_t first) const {
    return data + start(tile) * units + first * Kernel::padded_rows(tile_rows(tile));
  }
};

// c [rows, 32] = rows of tiles [first, last) x panel. Then done(tile, c of the tile) for each tile.
// `c` has room for 32 columns of as many rows, padded to the kernel's tiles.
template <class Kernel, class Done>
void multiply_panel(const PackedRows<Kernel>& rows, int64_t first, int64_t last, const uint32_t* panel, float* c,
                    const Done& done) {
  const int64_t row0 = rows.start(first);
  for (int64_t u = 0; u < rows.units; u += Kernel::units_in_cache) {
    const int64_t units = std::min(Kernel::units_in_cache, rows.units - u);
    for (int64_t t = first; t < last; ++t) {
      float* out = c + (rows.start(t) - row0) * kPanelColumns;
      Kernel::multiply(rows.tile(t, u), rows.tile_rows(t), panel + u * kPanelColumns, units, out, kPanelColumns,
                       u != 0);
      if (u + units == rows.units) done(t, out);
    }
  }
}

// How many row blocks to cut `tiles` tiles into, so that `threads` threads stay busy over `panels` panels, and no block
// of packed rows is much larger than the L2 cache.
template <class Kernel>
int64_t row_blocks(int64_t tiles, int64_t units, int64_t panels, int threads) {
  constexpr int64_t block_bytes = int64_t{512} << 10;
  const int64_t tile_bytes = Kernel::max_rows * units * static_cast<int64_t>(sizeof(typename Kernel::RowUnit));
  int64_t blocks = (tiles * tile_bytes + block_bytes - 1) / block_bytes;
  if (threads > 1) blocks = std::max(blocks, (3 * threads + panels - 1) / panels);
  return std::clamp<int64_t>(blocks, 1, std::max<int64_t>(tiles, 1));
}

}  // namespace hpcgen
