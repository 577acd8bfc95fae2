// Products of packed rows with a packed panel of 32 columns, in AMX tiles. The panel is the one of dot_kernel.h.
//
// Rows lie as tiles of 16 rows x 16 units (1 KiB), [units / 16][1 or 2 tiles][16 rows][16 units].
#pragma once

#include "dot_kernel.h"

#if defined(__AMX_BF16__) || defined(HPCGEN_AMX_EMULATION)
#define HPCGEN_AMX 1

#if defined(HPCGEN_AMX_EMULATION)
#include HPCGEN_AMX_EMULATION
#endif

namespace hpcgen {

struct AmxKernel {
  using Value = bf16;
  using RowUnit = uint32_t;
  static constexpr int max_rows = 32;
  static constexpr int unit_multiple = 16;
  // A panel of 32 KiB stays in the L1 cache of 48 KiB, while rows stream from L2: with the whole of K at once, every
  // step would load four tiles from L2 for four products, more than L2 delivers.
  static constexpr int64_t units_in_cache = 256;

  static int64_t padded_rows(int64_t rows) { return (rows + 15) / 16 * 16; }
  static int64_t tiles(int64_t rows) { return (rows + max_rows - 1) / max_rows; }
  static int64_t tile_start(int64_t rows, int64_t tile) { return std::min(rows, tile * max_rows); }

  // Every thread configures its tiles before, and releases them after: dirty tiles slow context switches down.
  static void begin() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
  }
  static void end() { _tile_release(); }

  template <class Row>
  static void pack(const Row& row, int rows, int64_t units, RowUnit* tile) {
    const int64_t stride = padded_rows(rows) * 16;  // units between one block of K and the next
    for (int r = 0; r < rows; ++r) {
      const uint32_t* source = row(r);
      uint32_t* out = tile + r * 16;  // tile r / 16 lies 256 units on: (r / 16) * 256 + (r % 16) * 16
      int64_t u = 0;
      for (; u + 16 <= units; u += 16) std::memcpy(out + u / 16 * stride, source + u, 64);
      if (u < units) {
        std::memset(out + u / 16 * stride, 0, 64);
        std::memcpy(out + u / 16 * stride, source + u, static_cast<size_t>(units - u) * 4);
      }
    }
  }

  static void put(RowUnit* tile, int rows, int r, int64_t first, const uint32_t* source, int count) {
    std::memcpy(tile + first / 16 * padded_rows(rows) * 16 + r * 16 + first % 16, source,
                static_cast<size_t>(count) * 4);
  }

  // As in DotKernel; c has padded_rows(rows) rows.
  static void multiply(const RowUnit* tile, int rows, const uint32_t* panel, int64_t units, float* c, int64_t ldc,
                       bool accumulate) {
    if (rows <= 16)
      multiply_16(tile, panel, units, c, ldc, accumulate);
    else
      multiply_32(tile, panel, units, c, ldc, accumulate);
  }

 private:
  static constexpr int panel_stride = kPanelColumns * 4;

  static void multiply_16(const RowUnit* tile, const uint32_t* panel, int64_t units, float* c, int64_t ldc,
                          bool accumulate) {
    const size_t stride = static_cast<size_t>(ldc) * 4;
    if (accumulate) {
      _tile_loadd(0, c, stride);
      _tile_loadd(1, c + 16, stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
    }
    for (int64_t u = 0; u < units; u += 16, tile += 256, panel += 16 * kPanelColumns) {
      // Few rows: memory is what is waited for.
      for (int line = 0; line < 32; ++line)
        _mm_prefetch(reinterpret_cast<const char*>(panel + 32 * kPanelColumns + line * 16), _MM_HINT_T0);
      _tile_loadd(4, tile, 64);
      _tile_loadd(6, panel, panel_stride);
      _tile_loadd(7, panel + 16, panel_stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, c, stride);
    _tile_stored(1, c + 16, stride);
  }

  static void multiply_32(const RowUnit* tile, const uint32_t* panel, int64_t units, float* c, int64_t ldc,
                          bool accumulate) {
    const size_t stride = static_cast<size_t>(ldc) * 4;
    float* lower = c + 16 * ldc;
    if (accumulate) {
      _tile_loadd(0, c, stride);
      _tile_loadd(1, c + 16, stride);
      _tile_loadd(2, lower, stride);
      _tile_loadd(3, lower + 16, stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t u = 0; u < units; u += 16, tile += 512, panel += 16 * kPanelColumns) {
      _tile_loadd(4, tile, 64);
      _tile_loadd(6, panel, panel_stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, panel + 16, panel_stride);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, tile + 256, 64);
      // The next rows, two steps ahead, from L2.
      for (int line = 0; line < 32; ++line)
        _mm_prefetch(reinterpret_cast<const char*>(tile + 1024 + line * 16), _MM_HINT_T0);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, stride);
    _tile_stored(1, c + 16, stride);
    _tile_stored(2, lower, stride);
    _tile_stored(3, lower + 16, stride);
  }
};

}  // namespace hpcgen

#endif
