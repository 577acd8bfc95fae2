// Attention of a few query rows to one page of keys and values as they lie: no packing, which would cost more than the
// products do. For bf16 dot products in 512-bit registers.
#pragma once

#include "attention_call.h"
#include "transpose.h"

#if defined(__AVX512BF16__)

namespace hpcgen {

constexpr int kDecodeRows = 4;  // rows that share a pass over the page

inline void prefetch_row(const bf16* row, int64_t width) {
  const auto* bytes = reinterpret_cast<const char*>(row);
  for (int64_t b = 0; b < width * 2; b += 64) asm volatile("prefetcht0 %0" : : "m"(bytes[b]));
}

// Lanes of four vectors added up crosswise: in each 128 bits, a partial sum of t[0], t[1], t[2] and t[3].
inline __m512 add_lanes(const __m512 t[4]) {
  const __m512 x = _mm512_add_ps(_mm512_unpacklo_ps(t[0], t[1]), _mm512_unpackhi_ps(t[0], t[1]));
  const __m512 y = _mm512_add_ps(_mm512_unpacklo_ps(t[2], t[3]), _mm512_unpackhi_ps(t[2], t[3]));
  const __m512d a = _mm512_castps_pd(x), b = _mm512_castps_pd(y);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
}

// The four 128-bit parts of each of s[0] .. s[3] added up: part i of the result is the sum of s[i]'s.
inline __m512 add_parts(const __m512 s[4]) {
  const auto half = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return half(half(s[0], s[1]), half(s[2], s[3]));
}

// scores[r * 64 + token] = query[r] . keys[token]; width a multiple of 32. `later`: keys to prefetch meanwhile.
template <int Rows>
void score_page(const bf16* const* query, const bf16* keys, const bf16* later, int64_t stride, int64_t width,
                int64_t tokens, float* scores) {
  for (int64_t token = 0; token < tokens; token += kLanes) {
    __m512 sums[Rows][4];
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      __m512 products[Rows][4];
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) {
        const bf16* key = keys + (token + 4 * part + t) * stride;
        prefetch_row(later + (token + 4 * part + t) * stride, width);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) products[r][t] = _mm512_setzero_ps();
        for (int64_t c = 0; c < width; c += 32) {
          const auto k = reinterpret_cast<__m512bh>(_mm512_loadu_si512(key + c));
#pragma GCC unroll 4
          for (int r = 0; r < Rows; ++r)
            products[r][t] = _mm512_dpbf16_ps(
                products[r][t], reinterpret_cast<__m512bh>(_mm512_loadu_si512(query[r] + c)), k);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) sums[r][part] = add_lanes(products[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) _mm512_storeu_ps(scores + r * kPageTokens + token, add_parts(sums[r]));
  }
}

// sums[r * columns + c] += weights[r] . values[:, c] over the first `tokens` tokens, in pairs of them: weights [r * 32 +
// pair] are two bf16. 32 * Vectors columns from `values` on. What lies past `tokens` is not read.
template <int Rows, int Vectors>
void add_values(const uint32_t* weights, const bf16* values, const bf16* later, int64_t stride, int64_t tokens,
                float* sums, int64_t columns) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                       36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  __m512 total[Rows][2 * Vectors];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < 2 * Vectors; ++v) total[r][v] = _mm512_loadu_ps(sums + r * columns + v * kLanes);
  for (int64_t token = 0; token < tokens; token += 2) {
    const bf16* even = values + token * stride;
    prefetch_row(later + token * stride, 32 * Vectors);
    prefetch_row(later + (token + 1) * stride, 32 * Vectors);
    __m512bh units[2 * Vectors];
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) {
      const __m512i a = _mm512_loadu_si512(even + 32 * v);
      const __m512i b = token + 1 < tokens ? _mm512_loadu_si512(even + stride + 32 * v) : _mm512_setzero_si512();
      units[2 * v] = reinterpret_cast<__m512bh>(_mm512_permutex2var_epi16(a, low, b));
      units[2 * v + 1] = reinterpret_cast<__m512bh>(_mm512_permutex2var_epi16(a, high, b));
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const auto weight =
          reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(weights[r * (kPageTokens / 2) + token / 2])));
#pragma GCC unroll 4
      for (int v = 0; v < 2 * Vectors; ++v) total[r][v] = _mm512_dpbf16_ps(total[r][v], units[v], weight);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < 2 * Vectors; ++v) _mm512_storeu_ps(sums + r * columns + v * kLanes, total[r][v]);
}

// The keys and values of one page in one group; their rows are `stride` elements apart.
struct PageRows {
  const bf16 *keys, *values;
  const bf16 *later_keys, *later_values;  // of the next step, to prefetch
  int64_t key_stride, value_stride, key_width, value_width;  // widths: multiples of 32
};

template <int Rows>
void score_rows(const PageRows& page, const bf16* const* query, int64_t tokens, float* scores) {
  score_page<Rows>(query, page.keys, page.later_keys, page.key_stride, page.key_width, tokens, scores);
}

template <int Rows>
void add_rows(const PageRows& page, const uint32_t* weights, int64_t tokens, float* sums, int64_t columns) {
  int64_t c = 0;
  for (; c + 64 <= page.value_width; c += 64)
    add_values<Rows, 2>(weights, page.values + c, page.later_values + c, page.value_stride, tokens, sums + c, columns);
  if (c < page.value_width)
    add_values<Rows, 1>(weights, page.values + c, page.later_values + c, page.value_stride, tokens, sums + c, columns);
}

}  // namespace hpcgen

#endif
