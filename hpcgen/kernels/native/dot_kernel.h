// Products of a few packed rows with a packed panel of 32 columns, in vector registers.
//
// A *unit* is 32 bits along K: a pair of bf16, or one float. A panel of weights (or keys, or values) is
// [units of K][32 columns]; a tile of rows is [units of K][rows], so that both are read from front to back.
#pragma once

#include <algorithm>
#include <utility>

#include "transpose.h"

namespace hpcgen {

constexpr int kPanelColumns = 32;

// How an element type is held in a tile of rows, and multiplied.
template <class T>
struct Element;

template <>
struct Element<float> {
  static constexpr int per_unit = 1;
  static constexpr bool plain_units = true;  // a row's unit is its 32 bits in memory
  using RowUnit = float;
  static constexpr int max_rows =
#if defined(__AVX512F__)
      14;
#else
      6;
#endif
  static RowUnit row_unit(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
  }
  static F32x16 dot(F32x16 sum, Units16 panel, RowUnit row) { return fma(as_floats(panel), broadcast(row), sum); }
};

template <>
struct Element<bf16> {
  static constexpr int per_unit = 2;
#if defined(__AVX512BF16__)
  static constexpr bool plain_units = true;
  using RowUnit = uint32_t;
  static constexpr int max_rows = 14;
  static RowUnit row_unit(uint32_t bits) { return bits; }
  static F32x16 dot(F32x16 sum, Units16 panel, RowUnit row) {
    return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(panel.v),
                             reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(row))))};
  }
#else
  static constexpr bool plain_units = false;
  struct RowUnit {
    float even, odd;
  };
  static constexpr int max_rows =
#if defined(__AVX512F__)
      12;
#else
      5;
#endif
  static RowUnit row_unit(uint32_t bits) {
    return {to_float(static_cast<bf16>(bits & 0xffff)), to_float(static_cast<bf16>(bits >> 16))};
  }
  static F32x16 dot(F32x16 sum, Units16 panel, RowUnit row) {
    return fma(odd_of_pairs(panel), broadcast(row.odd), fma(even_of_pairs(panel), broadcast(row.even), sum));
  }
#endif
};

template <class T>
struct DotKernel {
  using Value = T;
  using RowUnit = typename Element<T>::RowUnit;
  static constexpr int max_rows = Element<T>::max_rows;
  static constexpr int unit_multiple = 1;
  // 32 columns of a panel for this much of K stay in the L1 cache.
  static constexpr int64_t units_in_cache = 256;

  static int64_t padded_rows(int64_t rows) { return rows; }
  static int64_t tiles(int64_t rows) { return (rows + max_rows - 1) / max_rows; }
  // Rows are spread evenly: the last tile is not a small one.
  static int64_t tile_start(int64_t rows, int64_t tile) { return rows * tile / tiles(rows); }
  static void begin() {}
  static void end() {}

  // Packs row(0) .. row(rows - 1), each of `units` units of 32 bits.
  template <class Row>
  static void pack(const Row& row, int rows, int64_t units, RowUnit* tile) {
    if constexpr (Element<T>::plain_units) {
      transpose_rows(row, rows, units, reinterpret_cast<uint32_t*>(tile), rows);
    } else {
      for (int r = 0; r < rows; ++r) {
        const uint32_t* source = row(r);
        for (int64_t u = 0; u < units; ++u) tile[u * rows + r] = Element<T>::row_unit(source[u]);
      }
    }
  }

  // Writes `count` units of row r from unit `first` on.
  static void put(RowUnit* tile, int rows, int r, int64_t first, const uint32_t* source, int count) {
    for (int u = 0; u < count; ++u) tile[(first + u) * rows + r] = Element<T>::row_unit(source[u]);
  }

  // c [rows, 32] (row stride ldc) = or += rows x panel. `tile` and `panel` point at the first of `units` units.
  static void multiply(const RowUnit* tile, int rows, const uint32_t* panel, int64_t units, float* c, int64_t ldc,
                       bool accumulate) {
    multiply_with(std::make_integer_sequence<int, max_rows>{}, tile, rows, panel, units, c, ldc, accumulate);
  }

 private:
#if defined(__AVX512F__)
  static constexpr int vectors = 2;
#else
  static constexpr int vectors = 1;
#endif

  template <int... R>
  static void multiply_with(std::integer_sequence<int, R...>, const RowUnit* tile, int rows, const uint32_t* panel,
                            int64_t units, float* c, int64_t ldc, bool accumulate) {
    using Function = void (*)(const RowUnit*, const uint32_t*, int64_t, float*, int64_t, bool);
    static constexpr Function by_rows[] = {&multiply_rows<R + 1>...};
    for (int column = 0; column < kPanelColumns; column += vectors * kLanes)
      by_rows[rows - 1](tile, panel + column, units, c + column, ldc, accumulate);
  }

  template <int Rows>
  static void multiply_rows(const RowUnit* tile, const uint32_t* panel, int64_t units, float* c, int64_t ldc,
                            bool accumulate) {
    F32x16 sums[Rows][vectors];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) sums[r][v] = accumulate ? load(c + r * ldc + v * kLanes) : zero();
    for (int64_t u = 0; u < units; ++u) {
      const uint32_t* line = panel + u * kPanelColumns;
      // Few rows: memory is what is waited for, and the hardware's prefetcher stops at every 4 KiB.
      if constexpr (Rows <= 8) {
        _mm_prefetch(reinterpret_cast<const char*>(line + 24 * kPanelColumns), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(line + 24 * kPanelColumns + 16), _MM_HINT_T0);
      }
      Units16 columns[vectors];
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) columns[v] = load_units(line + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) sums[r][v] = Element<T>::dot(sums[r][v], columns[v], tile[u * Rows + r]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) store(c + r * ldc + v * kLanes, sums[r][v]);
  }
};

}  // namespace hpcgen
